"""List schedulers: m-TOPO, m-ETF and m-SCT."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.placement.list_scheduling.favourites import (
        favourite_children as favourite_children,
        transfer_edges as transfer_edges,
    )
    from onnxplace.passes.placement.list_scheduling.filling import fill as fill
    from onnxplace.passes.placement.list_scheduling.planner import (
        best_plan as best_plan,
        place as place,
        plans as plans,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "favourites": "favourite_children transfer_edges",
        "filling": "fill",
        "planner": "best_plan place plans",
    },
)
