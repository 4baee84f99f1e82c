"""onnxplace: the placement compiler for ONNX.

>>> bundle = onnxplace.compile("model.onnx", devices="cpu:0,cpu:1")  # doctest: +SKIP
>>> with onnxplace.InferenceSession(bundle) as session:  # doctest: +SKIP
...     outputs = session.run(None, feeds)
"""

from onnxplace import _startup as _startup
from onnxplace._lazy import attach
from onnxplace._version import __version__ as __version__

__getattr__, __dir__, __all__ = attach(__name__, __file__)
