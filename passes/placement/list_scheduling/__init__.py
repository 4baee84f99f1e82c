"""List schedulers: m-TOPO, m-ETF and m-SCT."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
