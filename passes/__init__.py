"""The built-in passes: one file, one pass, named alike.

Import them as `onnxplace.passes`.
"""

if not __name__.startswith("onnxplace."):
    raise ImportError("import onnxplace.passes, not this folder by its own name")
