"""The widest example models with fewer channels: the same nodes, weights of a few megabytes."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

import light_models

DIVISOR = 8
"""Of channels. It divides those of each layer of these models."""
PIXEL_CHANNELS, CLASSES = 3, 1000
# Models of 32 MB and more. Where memory is slow, bundles of the largest take minutes to write.
WIDE = ("alexnet", "densenet121", "inception-v2", "resnet50", "vgg19", "zfnet512")


def narrow_model(name: str, seed: int = 0) -> onnx.ModelProto:
    """Return a model of `WIDE` with an eighth of its channels, and with its inputs and outputs."""
    model = light_models.load_light_file(name)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if tensor.data_type == TensorProto.INT64:  # the shape of a weight, or that of the flattened image
            narrow = np.array([_divide(size, axis) for axis, size in enumerate(values.tolist())])
        else:
            narrow = values[..., : max(values.shape[-1] // DIVISOR, 1)]
        tensor.CopyFrom(numpy_helper.from_array(narrow, tensor.name))
    return light_models.draw_weights(model, seed)


def _divide(size: int, axis: int) -> int:
    """Return a size with fewer channels: kernels have outputs and inputs first, then pixels."""
    if axis > 1 or size in (1, PIXEL_CHANNELS, CLASSES):
        return size
    assert size % DIVISOR == 0
    return size // DIVISOR
