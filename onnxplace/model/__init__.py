"""The one door to ONNX: models in one normal form, their weights, nested graphs and carried state."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.model.carried_state import Asked as Asked, bind_states as bind_states
    from onnxplace.model.host_values import (
        DEQUANTIZE as DEQUANTIZE,
        HostValue as HostValue,
        find_host_values as find_host_values,
        is_quantiser as is_quantiser,
        with_quantised_units as with_quantised_units,
    )
    from onnxplace.model.lineage import Lineage as Lineage, lineages as lineages, quantises as quantises
    from onnxplace.model.lowering import op_graph as op_graph
    from onnxplace.model.model import (
        Model as Model,
        bind as bind,
        declared as declared,
        load as load,
        require_beside as require_beside,
        require_unchanged as require_unchanged,
        shape_entries as shape_entries,
        static_shapes as static_shapes,
        type_name as type_name,
        value_bytes as value_bytes,
    )
    from onnxplace.model.nested_graphs import captured as captured, subgraphs as subgraphs
    from onnxplace.model.precision import scales_to_hold as scales_to_hold
    from onnxplace.model.session_model import stored as stored
    from onnxplace.model.supported_operators import (
        custom_operators_of as custom_operators_of,
        require_operators as require_operators,
    )
    from onnxplace.model.tensors import tensor_size as tensor_size
    from onnxplace.model.weights import WeightFile as WeightFile

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "carried_state": "Asked bind_states",
        "host_values": "DEQUANTIZE HostValue find_host_values is_quantiser with_quantised_units",
        "lineage": "Lineage lineages quantises",
        "lowering": "op_graph",
        "model": (
            "Model bind declared load require_beside require_unchanged shape_entries static_shapes type_name "
            "value_bytes"
        ),
        "nested_graphs": "captured subgraphs",
        "precision": "scales_to_hold",
        "session_model": "stored",
        "supported_operators": "custom_operators_of require_operators",
        "tensors": "tensor_size",
        "weights": "WeightFile",
    },
)
