"""The built-in runtimes: one file, one runtime. Import them as `onnxplace.runtimes`."""

if not __name__.startswith("onnxplace."):
    raise ImportError("import onnxplace.runtimes, not this folder by its own name")
