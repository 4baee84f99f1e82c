"""Models for NPUs, which take inputs of fixed sizes only."""

from onnx import ModelProto

from tests.conftest import branches

NPU = "qnn/npu:0"


def fixed_branches(batch: int = 4) -> ModelProto:
    """Return the model of two branches for a batch of this size."""
    model = branches()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    return model
