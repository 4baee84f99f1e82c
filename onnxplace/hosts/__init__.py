"""Several hosts: what each has, and how long messages between them take."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
