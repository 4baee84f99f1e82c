"""Contract tests for plugins, and random states to try them on."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
