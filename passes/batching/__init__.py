"""Whether requests can be joined into one: a proof for each model, by the rules of sharding."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
