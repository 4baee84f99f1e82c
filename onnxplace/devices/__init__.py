"""Kinds of devices: what each is called, how it is found and opened, and how values move in and out of it."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
