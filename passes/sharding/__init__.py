"""Split operators over devices: rules, choice and rewriting."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.sharding.apply_sharding import ShardingOptions as ShardingOptions, shard_state as shard_state
    from onnxplace.passes.sharding.batch_axis import BatchAxes as BatchAxes, find_batch_axes as find_batch_axes
    from onnxplace.passes.sharding.microbatches.apply_microbatches import microbatch_state as microbatch_state

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "apply_sharding": "ShardingOptions shard_state",
        "batch_axis": "BatchAxes find_batch_axes",
        "microbatches.apply_microbatches": "microbatch_state",
    },
)
