from onnxplace.model.carried_state import StateRequest as StateRequest, bind_states as bind_states
from onnxplace.model.device_metadata import (
    DEVICE_KEY as DEVICE_KEY,
    SPLITS_KEY as SPLITS_KEY,
    DeviceMetadata as DeviceMetadata,
    read_device_metadata as read_device_metadata,
)
from onnxplace.model.external_ranges import list_external_ranges as list_external_ranges
from onnxplace.model.host_values import (
    DEQUANTIZE as DEQUANTIZE,
    HostValue as HostValue,
    find_host_values as find_host_values,
    is_quantization_node as is_quantization_node,
    join_quantised_units as join_quantised_units,
)
from onnxplace.model.lineage import (
    RANDOM_OPERATORS as RANDOM_OPERATORS,
    Lineage as Lineage,
    is_quantising as is_quantising,
    output_lineages as output_lineages,
)
from onnxplace.model.loading import (
    load as load,
    require_linkable as require_linkable,
    require_unchanged as require_unchanged,
)
from onnxplace.model.lowering import build_op_graph as build_op_graph
from onnxplace.model.misjudged_shapes import find_misjudged_values as find_misjudged_values
from onnxplace.model.model import (
    MAX_INLINE_BYTES as MAX_INLINE_BYTES,
    Model as Model,
    declaration_of as declaration_of,
)
from onnxplace.model.module_paths import (
    list_enclosing_modules as list_enclosing_modules,
    list_module_paths as list_module_paths,
    normalize_module as normalize_module,
)
from onnxplace.model.nested_graphs import (
    captured_names as captured_names,
    iterate_reads as iterate_reads,
    iterate_subgraphs as iterate_subgraphs,
    rename_reads as rename_reads,
)
from onnxplace.model.precision import find_scales_to_protect as find_scales_to_protect
from onnxplace.model.session_model import store_for_session as store_for_session
from onnxplace.model.shapes import (
    bind as bind,
    infer_static_shapes as infer_static_shapes,
    value_bytes as value_bytes,
)
from onnxplace.model.supported_operators import (
    list_custom_operators as list_custom_operators,
    require_operators as require_operators,
)
from onnxplace.model.tensor_parts import make_tensor_part as make_tensor_part
from onnxplace.model.tensors import (
    embed_tensor as embed_tensor,
    find_external_range as find_external_range,
    packed_size as packed_size,
    read_tensor_bytes as read_tensor_bytes,
    tensor_size as tensor_size,
)
from onnxplace.model.training_states import FLOAT_TYPES as FLOAT_TYPES, is_scalar as is_scalar
from onnxplace.model.value_types import (
    format_type as format_type,
    parse_type as parse_type,
    read_shape_entries as read_shape_entries,
)
from onnxplace.model.weights import WeightFile as WeightFile
