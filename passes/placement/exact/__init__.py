"""Placements with a proof: branch and bound, and a MILP."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.placement.exact.solver import solve_exactly as solve_exactly

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "solver": "solve_exactly",
    },
)
