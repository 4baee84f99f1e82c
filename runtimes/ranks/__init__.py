"""Run a bundle on ranks of MPI: a process per device, on one host or several."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
