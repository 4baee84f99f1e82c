from onnxplace.model.cut_constraints import (
    DEQUANTIZE as DEQUANTIZE,
    HostValue as HostValue,
    find_host_values as find_host_values,
    find_scales_to_protect as find_scales_to_protect,
    is_quantization_node as is_quantization_node,
    join_quantised_units as join_quantised_units,
    list_quantised_kernels as list_quantised_kernels,
)
from onnxplace.model.decoders import (
    Decoder as Decoder,
    recognise_decoder as recognise_decoder,
    try_states as try_states,
)
from onnxplace.model.device_metadata import (
    DEVICE_KEY as DEVICE_KEY,
    SPLITS_KEY as SPLITS_KEY,
    DeviceMetadata as DeviceMetadata,
    read_device_metadata as read_device_metadata,
)
from onnxplace.model.empty_axes import ENDS_PROCESS as ENDS_PROCESS, list_own_nodes as list_own_nodes
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
    require_weights as require_weights,
)
from onnxplace.model.lowering import (
    bind as bind,
    build_op_graph as build_op_graph,
    infer_static_shapes as infer_static_shapes,
    value_bytes as value_bytes,
    with_shape as with_shape,
)
from onnxplace.model.model import (
    MAX_INLINE_BYTES as MAX_INLINE_BYTES,
    Model as Model,
    declaration_of as declaration_of,
    find_misjudged_values as find_misjudged_values,
    store_for_session as store_for_session,
)
from onnxplace.model.nested_graphs import (
    captured_names as captured_names,
    has_subgraphs as has_subgraphs,
    is_tensor_constant as is_tensor_constant,
    iterate_reads as iterate_reads,
    iterate_subgraphs as iterate_subgraphs,
    iterate_tensors as iterate_tensors,
    rename_reads as rename_reads,
    walk_nodes as walk_nodes,
)
from onnxplace.model.node_metadata import (
    find_module_path as find_module_path,
    list_aliases as list_aliases,
    match_nodes as match_nodes,
    normalize_module as normalize_module,
    suggest_nodes as suggest_nodes,
)
from onnxplace.model.operator_checks import (
    list_custom_operators as list_custom_operators,
    require_operators as require_operators,
)
from onnxplace.model.shape_inference import FRAGILE_INPUTS as FRAGILE_INPUTS, infer_shapes as infer_shapes
from onnxplace.model.state_binding import (
    FLOAT_TYPES as FLOAT_TYPES,
    StateRequest as StateRequest,
    bind_states as bind_states,
    is_scalar as is_scalar,
)
from onnxplace.model.tensors import (
    embed_tensor as embed_tensor,
    find_external_range as find_external_range,
    format_type as format_type,
    make_reference as make_reference,
    make_tensor_part as make_tensor_part,
    packed_size as packed_size,
    parse_type as parse_type,
    read_external_range as read_external_range,
    read_shape_entries as read_shape_entries,
    read_tensor_bytes as read_tensor_bytes,
    says_unknown as says_unknown,
    tensor_size as tensor_size,
)
from onnxplace.model.weights import WeightFile as WeightFile
