"""Split operators over devices: rules, choice and rewriting."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
