"""Placements with a proof: branch and bound, and a MILP."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.placement.exact.branch_and_bound import (
        MAX_DEVICES as MAX_DEVICES,
        MAX_NODES as MAX_NODES,
        SearchResult as SearchResult,
        branch_and_bound_search as branch_and_bound_search,
        build_tables as build_tables,
    )
    from onnxplace.passes.placement.exact.branch_kernels import ProblemTables as ProblemTables
    from onnxplace.passes.placement.exact.milp import solve_milp as solve_milp

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "branch_and_bound": "MAX_DEVICES MAX_NODES SearchResult branch_and_bound_search build_tables",
        "branch_kernels": "ProblemTables",
        "milp": "solve_milp",
    },
)
