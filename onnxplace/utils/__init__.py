"""Helpers for all other wings: files, file locks, compiled loops, processes, progress, names, linear programs."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
