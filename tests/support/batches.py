"""Check that requests can be joined: the outputs of a joined run are those of single runs, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from onnxplace.bundle.manifest import BatchingRecord as BatchAxes
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.passes.batching.batch_flow import find_batch_axes
from tests.support.random_models import reference
from tests.support.random_placements import assert_same

Feeds = dict[str, Any]


def prove(proto: ModelProto, dimensions: Mapping[str, int]) -> BatchAxes:
    """Return what the compiler finds out about a model, bound to some sizes of its symbols."""
    return find_batch_axes(bind(load(proto), dimensions, {}))


def draw_requests(proto: ModelProto, axes: BatchAxes, feeds: Feeds, sizes: Sequence[int], seed: int) -> list[Feeds]:
    """Return requests of these batch sizes, whose rows are those of the feeds in another order or repeated."""
    random, requests = Random(seed), []
    for size in sizes:
        request = dict(feeds)
        for name, axis in axes.inputs.items():
            rows = [random.randrange(feeds[name].shape[axis]) for _ in range(size)]
            request[name] = np.take(feeds[name], rows, axis=axis)
        requests.append(request)
    return requests


def join_requests(axes: BatchAxes, requests: Sequence[Feeds]) -> Feeds:
    return {
        name: np.concatenate([item[name] for item in requests], axis=axes.inputs[name])
        if name in axes.inputs
        else value
        for name, value in requests[0].items()
    }


def check_joined_run(proto: ModelProto, axes: BatchAxes, requests: Sequence[Feeds], tolerance: float = 0.0) -> None:
    """Raise AssertionError unless a joined run has the outputs of single runs; ONNX Runtime must take all of them."""
    single = reference(proto, requests)
    (joined,) = reference(proto, [join_requests(axes, requests)])
    for index, output in enumerate(proto.graph.output):
        axis = axes.outputs.get(output.name)
        parts = [outputs[index] for outputs in single]
        if axis is None:
            for part in parts:
                assert_same([[joined[index]]], [[part]])
            continue
        expected = np.concatenate(parts, axis=axis)
        assert (joined[index].dtype, joined[index].shape) == (expected.dtype, expected.shape)
        if expected.dtype.kind == "f":
            finite = expected[np.isfinite(expected)]
            scale = max(1.0, float(np.abs(finite).max(initial=0)))
            np.testing.assert_allclose(joined[index], expected, rtol=0, atol=tolerance * scale)
        else:
            np.testing.assert_array_equal(joined[index], expected)


def make_symbolic(proto: ModelProto, axes: Mapping[str, int], symbol: str = "batch") -> ModelProto:
    """Return a model whose inputs have a symbolic size at these axes, without shapes of outputs."""
    copied = ModelProto()
    copied.CopyFrom(proto)
    for value in copied.graph.input:
        if value.name in axes:
            value.type.tensor_type.shape.dim[axes[value.name]].dim_param = symbol
    for value in copied.graph.output:
        value.type.CopyFrom(helper.make_tensor_type_proto(value.type.tensor_type.elem_type, None))
    return copied
