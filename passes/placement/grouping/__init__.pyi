from onnxplace.passes.placement.grouping.contraction_kernels import contract as contract, merge_runs as merge_runs
from onnxplace.passes.placement.grouping.group_kernels import (
    choose_devices as choose_devices,
    join_light_groups as join_light_groups,
    number_sets as number_sets,
)
from onnxplace.passes.placement.grouping.node_groups import (
    Union as Union,
    first_equal as first_equal,
    group_nodes as group_nodes,
    list_parameter_members as list_parameter_members,
    only_readers as only_readers,
    spread_owners as spread_owners,
)
