"""What the outputs of a model come from: the types that values pass through on the way, and nodes that draw numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxplace.model.nested_graphs import is_constant, names_read, subgraphs, with_inner

_RANDOM = {
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"),
    *("Sampling", "BitmaskDropout", "BitmaskBiasDropout", "BiasDropout"),
}
# Their results depend on the shape of what they read, not on its elements.
_SHAPE_ONLY = {"Shape", "Size", "EyeLike", "RandomNormalLike", "RandomUniformLike"}
# The shapes of their results depend on elements of what they read: of anything, or of other inputs than the first.
_SHAPED_BY_ANY = {"NonZero", "Unique", "Compress", "NonMaxSuppression", "Range", "ConstantOfShape", "Loop", "If"}
_SHAPED_BY_OTHERS = {"Reshape", "Expand", "Tile", "Slice", "Pad", "Resize", "TopK", "Split", "OneHot", "Squeeze"}
_QUANTISING = re.compile(r"(?i:quantize)|Integer|NBits|Bnb4|FpQ4|^Q[A-Z]")
# A larger initializer holds no shape or axes that type inference has to see.
MAX_SHAPE_BYTES = 1024


@dataclass(frozen=True)
class Lineage:
    """What one value comes from."""

    types: frozenset[str] = frozenset()
    """Types of the values computed on the way, itself included, as numpy or ml_dtypes call them.

    Not those of constants and of inputs, which are the same however the model is run.
    """
    random_nodes: frozenset[str] = frozenset()
    """Names of the nodes on the way that draw random numbers."""
    shape_is_drawn: bool = False
    """Whether its shape may depend on random numbers."""

    def __or__(self, other: Lineage) -> Lineage:
        return Lineage(
            self.types | other.types,
            self.random_nodes | other.random_nodes,
            self.shape_is_drawn or other.shape_is_drawn,
        )


def output_lineages(model: ModelProto, states: Mapping[str, str]) -> dict[str, Lineage]:
    """Return the lineage of each output of a model with its nodes in topological order.

    `states` says for an input which output of the step before becomes it. Weights need not be loaded.
    """
    tracer = _Tracer(model)
    origins = tracer.trace({})
    while True:  # until another step adds nothing
        carried = {name: origins[output] for name, output in states.items() if output in origins}
        of_next_step = tracer.trace(carried)
        if of_next_step == origins:
            return origins
        origins = of_next_step


def is_quantising(model: ModelProto) -> bool:
    """Return whether a node rounds to few values, so that the last bit of a float can become a whole step."""
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    return any(_QUANTISING.search(node.op_type) or _is_cast_to_few_bits(node) for node in with_inner(nodes))


def _is_cast_to_few_bits(node: NodeProto) -> bool:
    """Return whether a node casts to a type of at most eight bits other than bool."""
    kind = _cast_type(node)
    return kind not in (0, TensorProto.BOOL, TensorProto.STRING) and helper.tensor_dtype_to_np_dtype(kind).itemsize == 1


def _cast_type(node: NodeProto) -> int:
    """Return the type that a Cast makes, 0 for other nodes."""
    return next((a.i for a in node.attribute if node.op_type == "Cast" and a.name == "to"), 0)


class _Tracer:
    """Follows the values of a model from its inputs to its outputs."""

    def __init__(self, model: ModelProto) -> None:
        graph = _with_types(model).graph
        self._nodes = graph.node
        self._types = _value_types(graph)
        self._constants = dict(_constants(model.graph))
        self._inputs = [value.name for value in model.graph.input]
        self._outputs = [value.name for value in model.graph.output]

    def trace(self, carried: Mapping[str, Lineage]) -> dict[str, Lineage]:
        """Return the lineage of each output, with these lineages of inputs that are states."""
        known = {name: carried.get(name, Lineage()) for name in self._inputs}
        for node in self._nodes:
            origin = self._made_by(node, known)
            if origin is not None:
                known.update({name: origin | self._own(name) for name in node.output if name})
        return {name: known.get(name, Lineage()) for name in self._outputs}

    def _own(self, name: str) -> Lineage:
        return Lineage(self._types.get(name, frozenset()))

    def _made_by(self, node: NodeProto, known: Mapping[str, Lineage]) -> Lineage | None:
        """Return what the outputs of a node come from, None if they are constant."""
        given = {name: known[name] for name in names_read(node) if name in known}
        drawing = frozenset(self._drawing(node))
        if not given and not drawing:
            return None
        sources = Lineage()
        for item in given.values():
            sources |= item
        shaped = sources.shape_is_drawn or _is_shaped_by_drawn(node, given, bool(drawing))
        if node.op_type in _SHAPE_ONLY:
            return Lineage(
                random_nodes=drawing | (sources.random_nodes if shaped else frozenset()), shape_is_drawn=shaped
            )
        cast = _names([kind]) if (kind := _cast_type(node)) else frozenset()
        types = _union([sources.types, cast, *(_inner_types(graph) for graph in subgraphs(node))])
        return Lineage(types, sources.random_nodes | drawing, shaped)

    def _drawing(self, node: NodeProto) -> list[str]:
        """Return the names of random nodes: this one, or those in its subgraphs."""
        return [inner.name or inner.op_type for inner in with_inner([node]) if self._draws(inner)]

    def _draws(self, node: NodeProto) -> bool:
        if node.op_type != "Dropout":
            return node.op_type in _RANDOM
        mode = node.input[2] if len(node.input) > 2 else ""
        if not mode:
            return False
        tensor = self._constants.get(mode)
        return tensor is None or mode in self._inputs or bool(numpy_helper.to_array(tensor).any())


def _is_shaped_by_drawn(node: NodeProto, given: Mapping[str, Lineage], draws: bool) -> bool:
    """Return whether random numbers, read or drawn by a node, decide about the shapes of its results."""
    drawn = {name for name, item in given.items() if item.random_nodes}
    if node.op_type in _SHAPED_BY_ANY:
        return bool(drawn) or draws
    return node.op_type in _SHAPED_BY_OTHERS and not drawn.isdisjoint(node.input[1:])


def _constants(graph: GraphProto) -> Iterator[tuple[str, TensorProto]]:
    """Yield the constants of a graph and its subgraphs, by name."""
    yield from ((tensor.name, tensor) for tensor in graph.initializer)
    for node in graph.node:
        if is_constant(node):
            yield node.output[0], node.attribute[0].t
        for body in subgraphs(node):
            yield from _constants(body)


def _with_types(model: ModelProto) -> ModelProto:
    """Return a copy of a model with the types of its values, as far as they can be inferred, and without weights."""
    graph = model.graph
    small = [t for t in graph.initializer if t.ByteSize() <= MAX_SHAPE_BYTES and not t.external_data]
    kept = {tensor.name for tensor in small} | {value.name for value in graph.input}
    weights = [
        helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in graph.initializer if t.name not in kept
    ]
    copy = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    copy.graph.name = graph.name
    copy.graph.node.extend(graph.node)
    copy.graph.initializer.extend(small)
    copy.graph.input.extend([*graph.input, *weights])
    copy.graph.output.extend(graph.output)
    copy.graph.value_info.extend(graph.value_info)
    try:
        return onnx.shape_inference.infer_shapes(copy)
    except Exception:  # noqa: BLE001 - inference is a service here: without it, the declared types count
        return copy


def _value_types(graph: GraphProto) -> dict[str, frozenset[str]]:
    """Return the types of values that are tensors, by name."""
    values = (*graph.value_info, *graph.input, *graph.output)
    tensors = [value for value in values if value.type.HasField("tensor_type")]
    return {value.name: _names([value.type.tensor_type.elem_type]) for value in tensors}


def _inner_types(graph: GraphProto) -> frozenset[str]:
    """Return the types of the values in a subgraph and those within it, as far as they are known."""
    casts = _names(kind for node in graph.node if (kind := _cast_type(node)))
    inner = (_inner_types(body) for node in graph.node for body in subgraphs(node))
    return _union([casts, *_value_types(graph).values(), *inner])


def _names(types: Iterable[int]) -> frozenset[str]:
    """Return numpy's names of element types that hold numbers."""
    known = {kind for kind in types if kind not in (TensorProto.UNDEFINED, TensorProto.STRING)}
    return frozenset(helper.tensor_dtype_to_np_dtype(kind).name for kind in known)


def _union(sets: Iterable[Collection[str]]) -> frozenset[str]:
    return frozenset().union(*sets)
