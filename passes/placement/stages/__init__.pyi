from onnxplace.passes.placement.stages.contiguous_split import (
    MAX_MOVES as MAX_MOVES,
    build_group_search as build_group_search,
    generate_splits as generate_splits,
)
from onnxplace.passes.placement.stages.stage_dp import least_held_bytes as least_held_bytes
from onnxplace.passes.placement.stages.stage_kernels import (
    DUPLEX as DUPLEX,
    PARALLEL as PARALLEL,
    SEQUENTIAL as SEQUENTIAL,
    SUM as SUM,
    TRAFFIC as TRAFFIC,
)
