from onnxplace.passes.sharding.apply.apply_microbatches import microbatch_state as microbatch_state
from onnxplace.passes.sharding.apply.apply_sharding import (
    ShardingOptions as ShardingOptions,
    shard_state as shard_state,
)
from onnxplace.passes.sharding.rules.axis_rules import AxisRule as AxisRule
from onnxplace.passes.sharding.rules.layouts import Division as Division, Layout as Layout
from onnxplace.passes.sharding.rules.node_views import NodeView as NodeView, Shape as Shape, split_words as split_words
from onnxplace.passes.sharding.rules.reshape_rules import (
    RESHAPES as RESHAPES,
    equal_parts as equal_parts,
    reshape_layout as reshape_layout,
)
from onnxplace.passes.sharding.rules.rule_table import list_axis_rules as list_axis_rules
from onnxplace.passes.sharding.space.known_shapes import (
    infer_shapes_and_values as infer_shapes_and_values,
    infer_with_runtime as infer_with_runtime,
    require_constant_states as require_constant_states,
)
from onnxplace.passes.sharding.space.strategy_space import is_unrepeatable as is_unrepeatable
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts as TensorFacts, read_constants as read_constants
