from onnxplace.passes.placement.stages.contiguous_split import (
    MAX_MOVES as MAX_MOVES,
    RESIDENT_SHARES as RESIDENT_SHARES,
    build_group_search as build_group_search,
    split_into_stages as split_into_stages,
    tighten_limits as tighten_limits,
)
from onnxplace.passes.placement.stages.stage_dp import (
    least_held_bytes as least_held_bytes,
    prepare_cuts as prepare_cuts,
)
from onnxplace.passes.placement.stages.stage_kernels import (
    DUPLEX as DUPLEX,
    PARALLEL as PARALLEL,
    SEQUENTIAL as SEQUENTIAL,
    SUM as SUM,
    TRAFFIC as TRAFFIC,
)
