"""Prove that requests can be joined along a dimension: the result of all is the results of each, one after the other.

The rules of sharding say which axes of inputs and results are cut together without communication. A model allows
batching if every input with the dimension is cut along it, each node passes the cut on by such a rule, and the results
end cut. Unlike a sharded model, this one cannot be edited: targets of Reshape, Expand and others have to follow the
size of the batch by themselves. So shapes are inferred at two sizes of the batch, and at two sizes of all other
symbolic dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from onnx import numpy_helper

from onnxplace.errors import OnnxplaceError
from onnxplace.feeds import complete_dimensions, dimension_keys, symbols_of_dimension
from onnxplace.model import Model, declaration_of
from onnxplace.passes.sharding.batch_flow import BatchFlow, Refusal, Sample
from onnxplace.passes.sharding.batch_rows import Cut
from onnxplace.passes.sharding.known_shapes import infer_shapes_and_values
from onnxplace.passes.sharding.tensor_facts import TensorFacts, read_constants

# Two sizes of the batch: a prime and an even number, both unlikely elsewhere.
_BATCH_SIZES = (13, 22)
# How sizes of the other dimensions are drawn: (a + b * i) * size + c + d * i for dimension i. The second ones keep
# divisors. The model is sure to run at its own sizes, but these may be 1, which is broadcast.
_OTHER_SIZES = ((3, 0, 2, 2), (2, 1, 0, 0), (1, 0, 0, 0))
# The proof has to succeed at so many of them.
_MIN_OTHER_SIZES = 2
# A model with many symbolic dimensions is not tried along all of them.
_MAX_CANDIDATES = 4


@dataclass(frozen=True)
class BatchAxes:
    """Whether requests can be joined, and along which axes."""

    dimension: str = ""
    """The symbolic dimension; empty if requests cannot be joined."""
    inputs: Mapping[str, int] = field(default_factory=dict)
    """Input -> axis with the dimension."""
    outputs: Mapping[str, int] = field(default_factory=dict)
    """Output -> axis with the dimension; other outputs do not depend on it."""
    reason: str = ""
    """Why requests cannot be joined."""
    node: str = ""
    """The node that prevents it."""


def find_batch_axes(model: Model) -> BatchAxes:
    """Return the first symbolic dimension of the inputs along which requests can be joined, or the reason against it.

    Takes time linear in the number of nodes, for up to 4 dimensions. Raises nothing.
    """
    if model.states:
        return BatchAxes(reason="the model carries states from call to call")
    declared = [declaration_of(value, model) for value in model.inputs]
    if unranked := [item.name for item in declared if item.shape is None and item.dtype.startswith("tensor(")]:
        return BatchAxes(reason=f"the model does not declare the shape of input {unranked[0]!r}")
    refusals = []
    for dimension in _list_candidates(model)[:_MAX_CANDIDATES]:
        try:
            return _prove(model, dimension)
        except Refusal as refusal:
            refusals.append(BatchAxes(reason=f"along dimension {dimension!r}, {refusal.reason}", node=refusal.node))
        except OnnxplaceError as problem:
            refusals.append(BatchAxes(reason=f"along dimension {dimension!r}, it has no shapes: {problem.message}"))
        except Exception as problem:  # noqa: BLE001 - a model that cannot be analysed is still compiled
            text = f"along dimension {dimension!r}, it cannot be analysed: {type(problem).__name__}: {problem}"
            refusals.append(BatchAxes(reason=text))
    if not refusals:
        return BatchAxes(reason="no input has a symbolic dimension")
    return next((refusal for refusal in refusals if refusal.node), refusals[0])


def _input_keys(model: Model) -> dict[str, list[str]]:
    """Return the symbolic dimension of each axis by input; an empty text for a known size."""
    declared = [declaration_of(value, model) for value in model.inputs]
    return {item.name: [key if size is None else "" for key, size in dimension_keys(item)] for item in declared}


def _list_candidates(model: Model) -> list[str]:
    """Return the symbolic dimensions: first those of first axes."""
    keys = _input_keys(model).values()
    ordered = [*(axes[0] for axes in keys if axes), *(key for axes in keys for key in axes)]
    return [key for key in dict.fromkeys(ordered) if key and symbols_of_dimension(key) == [key]]


def _prove(model: Model, dimension: str) -> BatchAxes:
    """Return the axes of a dimension; raises Refusal, or OnnxplaceError where there are no shapes."""
    axes = _find_input_axes(model, dimension)
    others = {
        key: size
        for key, size in sorted(model.dimensions.items())
        if key != dimension and symbols_of_dimension(key) == [key]
    }
    proven, unknown = [], None
    for sizes in _draw_other_sizes(others):
        samples = [_infer_sample(model, {**sizes, dimension: size}, size) for size in _BATCH_SIZES]
        try:
            proven.append(BatchFlow(model, samples[0], samples[1]).find_output_axes(axes))
        except Refusal as refusal:
            if not refusal.is_unknown:
                raise
            unknown = refusal  # these sizes may be impossible
        if len(proven) == _MIN_OTHER_SIZES:
            break
    if unknown is not None and len(proven) < min(_MIN_OTHER_SIZES, 1 + len(others)):
        raise unknown
    if any(outputs != proven[0] for outputs in proven):
        raise Refusal("the axes of the outputs depend on the sizes of other dimensions")
    inputs = {name: cut.axis for name, cut in axes.items()}
    return BatchAxes(dimension, inputs, proven[0])


def _find_input_axes(model: Model, dimension: str) -> dict[str, Cut]:
    axes = {}
    for name, keys in _input_keys(model).items():
        if any(key and key != dimension and dimension in symbols_of_dimension(key) for key in keys):
            raise Refusal(f"input {name!r} has an axis whose size is computed from it")
        if keys.count(dimension) > 1:
            raise Refusal(f"input {name!r} has several axes of this size")
        if dimension in keys:
            if model.overridable(name):
                raise Refusal(f"input {name!r} has a default value of a fixed size")
            axes[name] = Cut(keys.index(dimension))
    return axes


def _draw_other_sizes(bound: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield sizes of the other dimensions."""
    if not bound:
        yield {}
        return
    for factor, factor_step, offset, offset_step in _OTHER_SIZES:
        yield {
            name: (factor + factor_step * index) * size + offset + offset_step * index
            for index, (name, size) in enumerate(bound.items())
        }


def _infer_sample(model: Model, sizes: Mapping[str, int], batch: int) -> Sample:
    """Return the shapes, and the values that follow from them, at some sizes of the symbolic dimensions."""
    dimensions = complete_dimensions(model.dimensions, sizes)
    other = replace(model, dimensions=MappingProxyType(dict(dimensions)), samples=MappingProxyType({}))
    shapes, tensors = infer_shapes_and_values(other)
    for name, tensor in model.initializers.items():
        if not model.overridable(name):
            shapes[name] = tuple(tensor.dims)
    for node in model.nodes:
        # Inference leaves the mask out, which most models do not read.
        if node.op_type == "Dropout" and node.domain in ("", "ai.onnx") and node.input[0] in shapes:
            shapes.update((name, shapes[node.input[0]]) for name in node.output if name)
    values = {name: numpy_helper.to_array(tensor) for name, tensor in tensors.items()}
    return Sample(batch, TensorFacts(other, shapes, {}, {}, read_constants(other)), values)
