"""Groups of nodes that share a device, and contracting them."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.placement.grouping.contraction_kernels import contract as contract, merge_runs as merge_runs
    from onnxplace.passes.placement.grouping.group_kernels import (
        choose_devices as choose_devices,
        join_light_groups as join_light_groups,
        number_sets as number_sets,
    )
    from onnxplace.passes.placement.grouping.groups import (
        Union as Union,
        first_equal as first_equal,
        group_nodes as group_nodes,
        only_readers as only_readers,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "contraction_kernels": "contract merge_runs",
        "group_kernels": "choose_devices join_light_groups number_sets",
        "groups": "Union first_equal group_nodes only_readers",
    },
)
