"""Run a bundle's segments on threads of this process, and follow the programs of devices."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
