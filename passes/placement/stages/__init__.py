"""Pipeline stages: ideals, dynamic programs, local search."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.placement.stages.contiguous_split import MOVES as MOVES, RESIDENT as RESIDENT, split as split
    from onnxplace.passes.placement.stages.ideal_kernels import (
        DUPLEX as DUPLEX,
        PARALLEL as PARALLEL,
        SEQUENTIAL as SEQUENTIAL,
        SUM as SUM,
        TRAFFIC as TRAFFIC,
    )
    from onnxplace.passes.placement.stages.local_search_kernels import Search as Search
    from onnxplace.passes.placement.stages.stage_dp import (
        CROSSING_BYTES as CROSSING_BYTES,
        cutting as cutting,
        needs as needs,
        unit_seconds as unit_seconds,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "contiguous_split": "MOVES RESIDENT split",
        "ideal_kernels": "DUPLEX PARALLEL SEQUENTIAL SUM TRAFFIC",
        "local_search_kernels": "Search",
        "stage_dp": "CROSSING_BYTES cutting needs unit_seconds",
    },
)
