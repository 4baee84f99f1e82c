"""The interface of `onnxruntime.InferenceSession` for sessions of bundles: docs/drop-in.md."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
