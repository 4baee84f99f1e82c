"""Placements with a proof: branch and bound, and a MILP."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
