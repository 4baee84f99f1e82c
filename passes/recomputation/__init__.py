"""Recomputation: the order of nodes, clones of nodes, and the model with them."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.recomputation.apply_recomputation import recompute_state as recompute_state

__getattr__, __dir__, __all__ = attach(__name__, {"apply_recomputation": "recompute_state"})
