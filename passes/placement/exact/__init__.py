"""Placements with a proof: branch and bound, and a MILP."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.placement.exact.branch_and_bound import (
        MOST_DEVICES as MOST_DEVICES,
        MOST_NODES as MOST_NODES,
        Found as Found,
        search as search,
        tables as tables,
    )
    from onnxplace.passes.placement.exact.branch_kernels import Tables as Tables
    from onnxplace.passes.placement.exact.milp import solve as solve

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "branch_and_bound": "Found MOST_DEVICES MOST_NODES search tables",
        "branch_kernels": "Tables",
        "milp": "solve",
    },
)
