"""Trace the types and random numbers that outputs depend on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxplace.model.nested_graphs import is_tensor_constant, iterate_reads, walk_graphs, walk_nodes
from onnxplace.model.shape_inference import infer_shapes
from onnxplace.model.tensors import strip_data

# Operators that draw random numbers; Dropout, which is not among them, does so in training mode only.
RANDOM_OPERATORS = {
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"),
    *("Sampling", "BitmaskDropout", "BitmaskBiasDropout", "BiasDropout"),
}
# Results of these operators depend on the shapes of their inputs, not on the elements.
_SHAPE_READERS = {"Shape", "Size", "EyeLike", "RandomNormalLike", "RandomUniformLike"}
# Shapes of their results depend on elements of their inputs: of any input, or of inputs after the first.
_SHAPED_BY_ANY = {"NonZero", "Unique", "Compress", "NonMaxSuppression", "Range", "ConstantOfShape", "Loop", "If"}
_SHAPED_BY_OTHERS = {"Reshape", "Expand", "Tile", "Slice", "Pad", "Resize", "TopK", "Split", "OneHot", "Squeeze"}
# Names of operators that round to few values, such as QLinearConv, MatMulInteger, MatMulNBits.
_QUANTISING_OPERATOR = re.compile(r"(?i:quantize)|Integer|NBits|Bnb4|FpQ4|^Q[A-Z]")


@dataclass(frozen=True)
class Lineage:
    """The types and random numbers that one value depends on."""

    types: frozenset[str] = frozenset()
    """Types of the values computed on the way, itself included, as numpy or ml_dtypes call them.

    Types of constants and inputs are left out: those are the same however the model is cut.
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
    """Return the lineage of each output.

    Args:
        model: A model with its nodes in topological order; its weights need not be loaded.
        states: Input -> the output whose value it takes from the previous step.
    """
    tracer = _Tracer(model)
    origins = tracer.trace({})
    while True:  # lineages only grow, and end once another step adds nothing
        carried = {name: origins[output] for name, output in states.items() if output in origins}
        of_next_step = tracer.trace(carried)
        if of_next_step == origins:
            return origins
        origins = of_next_step


def is_quantising(model: ModelProto) -> bool:
    """Return whether some node rounds to few values.

    The last bit of a float may then become a whole step.
    """
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    return any(_QUANTISING_OPERATOR.search(node.op_type) or _is_cast_to_few_bits(node) for node in walk_nodes(nodes))


def _is_cast_to_few_bits(node: NodeProto) -> bool:
    """Return whether a node casts to at most eight bits.

    Casts to bool do not count.
    """
    kind = _read_cast_type(node)
    return kind not in (0, TensorProto.BOOL, TensorProto.STRING) and helper.tensor_dtype_to_np_dtype(kind).itemsize == 1


def _read_cast_type(node: NodeProto) -> int:
    """Return the type that a Cast returns; 0 for other nodes."""
    return next((a.i for a in node.attribute if node.op_type == "Cast" and a.name == "to"), 0)


class _Tracer:
    """Propagates lineages from the inputs of a model to its outputs."""

    def __init__(self, model: ModelProto) -> None:
        graph = _infer_types(model).graph
        self._nodes = graph.node
        self._types = _collect_value_types(graph)
        self._constants = dict(_iterate_constants(model.graph))
        self._inputs = [value.name for value in model.graph.input]
        self._outputs = [value.name for value in model.graph.output]

    def trace(self, carried: Mapping[str, Lineage]) -> dict[str, Lineage]:
        """Return the lineage of each output.

        `carried` has the lineages of inputs that are states.
        """
        known = {name: carried.get(name, Lineage()) for name in self._inputs}
        for node in self._nodes:
            origin = self._trace_node(node, known)
            if origin is not None:
                own = {name: Lineage(self._types.get(name, frozenset())) for name in node.output if name}
                known.update({name: origin | start for name, start in own.items()})
        return {name: known.get(name, Lineage()) for name in self._outputs}

    def _trace_node(self, node: NodeProto, known: Mapping[str, Lineage]) -> Lineage | None:
        """Return the lineage of a node's outputs; None if they are constant."""
        inputs = {name: known[name] for name in iterate_reads(node) if name in known}
        drawing = frozenset([inner.name or inner.op_type for inner in walk_nodes([node]) if self._is_random(inner)])
        if not inputs and not drawing:
            return None
        sources = Lineage()
        for lineage in inputs.values():
            sources |= lineage
        shape_is_drawn = sources.shape_is_drawn or _has_drawn_shape(node, inputs, bool(drawing))
        if node.op_type in _SHAPE_READERS:
            carried = sources.random_nodes if shape_is_drawn else frozenset()
            return Lineage(random_nodes=drawing | carried, shape_is_drawn=shape_is_drawn)
        cast = _to_numpy_names([kind]) if (kind := _read_cast_type(node)) else frozenset()
        types = sources.types.union(cast, *map(_collect_graph_types, walk_graphs([node])))
        return Lineage(types, sources.random_nodes | drawing, shape_is_drawn)

    def _is_random(self, node: NodeProto) -> bool:
        """Return whether a node draws random numbers, its subgraphs left out."""
        if node.op_type != "Dropout":
            return node.op_type in RANDOM_OPERATORS
        mode = node.input[2] if len(node.input) > 2 else ""
        if not mode:
            return False
        tensor = self._constants.get(mode)
        return tensor is None or mode in self._inputs or bool(numpy_helper.to_array(tensor).any())


def _has_drawn_shape(node: NodeProto, inputs: Mapping[str, Lineage], is_random: bool) -> bool:
    """Return whether random numbers determine the shapes of a node's outputs.

    The node may read the numbers or draw them.
    """
    drawn = {name for name, lineage in inputs.items() if lineage.random_nodes}
    if node.op_type in _SHAPED_BY_ANY:
        return bool(drawn) or is_random
    return node.op_type in _SHAPED_BY_OTHERS and not drawn.isdisjoint(node.input[1:])


def _iterate_constants(graph: GraphProto) -> Iterator[tuple[str, TensorProto]]:
    """Yield the constants of a graph and its subgraphs, by name."""
    for inner in (graph, *walk_graphs(graph.node)):
        yield from ((tensor.name, tensor) for tensor in inner.initializer)
        yield from ((node.output[0], node.attribute[0].t) for node in inner.node if is_tensor_constant(node))


def _infer_types(model: ModelProto) -> ModelProto:
    """Return a copy of a model with inferred types, without the bytes of large weights."""
    graph = model.graph
    weights = [strip_data(tensor) for tensor in graph.initializer]
    small = helper.make_graph(graph.node, graph.name, graph.input, graph.output, weights, value_info=graph.value_info)
    copy = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    copy.graph.CopyFrom(small)
    try:
        return infer_shapes(copy)
    except Exception:  # noqa: BLE001 - inference may fail here: the declared types count then
        return copy


def _collect_value_types(graph: GraphProto) -> dict[str, frozenset[str]]:
    """Return the types of values that are tensors, by name."""
    values = (*graph.value_info, *graph.input, *graph.output)
    tensors = [value for value in values if value.type.HasField("tensor_type")]
    return {value.name: _to_numpy_names([value.type.tensor_type.elem_type]) for value in tensors}


def _collect_graph_types(graph: GraphProto) -> frozenset[str]:
    """Return the known types of the values in a graph, those of its subgraphs left out."""
    casts = _to_numpy_names(kind for node in graph.node if (kind := _read_cast_type(node)))
    return casts.union(*_collect_value_types(graph).values())


def _to_numpy_names(types: Iterable[int]) -> frozenset[str]:
    """Return numpy's names of element types that hold numbers."""
    known = {kind for kind in types if kind not in (TensorProto.UNDEFINED, TensorProto.STRING)}
    return frozenset(helper.tensor_dtype_to_np_dtype(kind).name for kind in known)
