"""Search over placements: coarsening, annealing, a portfolio of placers."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
