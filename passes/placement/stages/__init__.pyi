from onnxplace.passes.placement.stages.contiguous_split import (
    MAX_MOVES as MAX_MOVES,
    RESIDENT_SHARES as RESIDENT_SHARES,
    split_into_stages as split_into_stages,
)
from onnxplace.passes.placement.stages.local_search_kernels import LocalSearch as LocalSearch
from onnxplace.passes.placement.stages.replicated_stages import (
    find_first_devices as find_first_devices,
    merge_devices as merge_devices,
)
from onnxplace.passes.placement.stages.stage_dp import (
    CROSSING_BYTES as CROSSING_BYTES,
    least_held_bytes as least_held_bytes,
    prepare_cuts as prepare_cuts,
    unit_seconds as unit_seconds,
)
from onnxplace.passes.placement.stages.stage_kernels import (
    DUPLEX as DUPLEX,
    PARALLEL as PARALLEL,
    SEQUENTIAL as SEQUENTIAL,
    SUM as SUM,
    TRAFFIC as TRAFFIC,
)
