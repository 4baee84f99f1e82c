from onnxplace.passes.sharding.apply_sharding import ShardingOptions as ShardingOptions, shard_state as shard_state
from onnxplace.passes.sharding.batch_axis import BatchAxes as BatchAxes, find_batch_axes as find_batch_axes
from onnxplace.passes.sharding.microbatches.apply_microbatches import microbatch_state as microbatch_state
