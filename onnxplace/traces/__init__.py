"""Timelines of requests: recorded, predicted, compared, and written for Perfetto."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
