"""An ONNX model in canonical form.

Nodes are in topological order, with unique names. Weights may stay in their files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import onnx
from onnx import (
    DeviceConfigurationProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from onnxplace.errors import Diagnostic
from onnxplace.feeds.dimensions import resolve_shapes
from onnxplace.feeds.feeds import Array, Declared
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.model.empty_axes import FATAL_OPERATORS, MIN_GUARDED_OPSET, guard_empty_axes
from onnxplace.model.nested_graphs import captured_names, iterate_reads, iterate_subgraphs, walk_nodes
from onnxplace.model.shape_inference import has_open_sizes, infer_shapes
from onnxplace.model.tensors import Fingerprint, embed_part, format_type, read_shape_entries, strip_data, tensor_size
from onnxplace.model.weights import WeightFile
from onnxplace.model_metadata import ModelMetadata, TrainingStep
from onnxplace.utils.groups import group_pairs

if TYPE_CHECKING:
    from onnxplace.state import State

Derived = TypeVar("Derived")

# ONNX Runtime 1.30 and 1.31 take IR versions up to 13; 8 is the first that has everything we write.
MIN_IR_VERSION, MAX_IR_VERSION = 8, 13
# A larger model is opened from a file: protobuf ends at 2 GiB, and a copy in memory costs as much again.
MAX_INLINE_BYTES = 1 << 30

# Data propagation of onnx takes every vector for a shape and follows each of its elements. With some million elements,
# memory runs out. No shape, and no vocabulary, has as many as this.
MAX_FOLLOWED_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Model:
    """An ONNX model in canonical form.

    Transformations return a new one. The protos in it are never altered.
    """

    derived_from: ClassVar[tuple[type, ...]] = ()

    name: str
    ir_version: int
    opsets: tuple[OperatorSetIdProto, ...]
    nodes: tuple[NodeProto, ...]
    """In topological order, each with a unique name."""
    initializers: Mapping[str, TensorProto]
    inputs: tuple[ValueInfoProto, ...]
    """Values that the caller feeds, including initializers that the caller may override."""
    outputs: tuple[ValueInfoProto, ...]
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Output name -> name of the value that it returns, where the two differ (outputs that are initializers)."""
    folder: Path | None = None
    """The folder of external weights; None for a model without one."""
    digest: str = ""
    """SHA-256 of the model file, or of the serialised graph."""
    dimensions: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Sizes of symbolic dimensions for profiling; the model itself keeps them symbolic."""
    samples: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))
    """Inputs that the user gave to profile with."""
    states: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Carried state: input name -> name of the output whose value it takes in the next call."""
    value_info: tuple[ValueInfoProto, ...] = ()
    """What the file says of values in between; it may be wrong."""
    removed: tuple[str, ...] = ()
    """Names of the nodes that were left out, in their order: constants, calls of functions, and what is not needed."""
    device_configurations: tuple[DeviceConfigurationProto, ...] = ()
    """ONNX's own description of devices, which sharding specifications of nodes refer to."""
    weights_files: Mapping[Path, Fingerprint] = field(default_factory=lambda: MappingProxyType({}))
    """Files of external data, with their fingerprints when the model was read."""
    keeps_order: bool = False
    """Whether sessions compute the nodes one by one in this order, without fusing them."""
    training: TrainingStep | None = None
    """What inputs and outputs mean as a training step, by the model's metadata; None for a model without it."""
    metadata: ModelMetadata = field(default_factory=ModelMetadata)
    """What its file says of it."""
    notes: tuple[Diagnostic, ...] = ()
    """What a user should know of how it was read."""

    def check(self, state: State) -> None:
        """Raise ValueError if a node reads a value without an earlier producer."""
        known = {value.name for value in self.inputs} | set(self.initializers)
        for node in self.nodes:
            for name in iterate_reads(node):
                if name not in known:
                    raise ValueError(f"node {node.name!r} reads {name!r}, which has no producer before it")
            known.update(node.output)

    @cached_property
    def input_names(self) -> frozenset[str]:
        return frozenset(value.name for value in self.inputs)

    @cached_property
    def opset(self) -> int:
        """Return the version of the standard operators, 0 for a model without them."""
        return next((item.version for item in self.opsets if item.domain in ("", "ai.onnx")), 0)

    @cached_property
    def reads(self) -> tuple[tuple[str, ...], ...]:
        """Return the distinct names that each node reads.

        Names captured by its subgraphs are included.
        """
        return tuple(tuple(dict.fromkeys(iterate_reads(node))) for node in self.nodes)

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """Return the nodes that read each value, in order; values that no node reads are missing."""
        return group_pairs((name, index) for index, reads in enumerate(self.reads) for name in reads)

    @cached_property
    def operands(self) -> tuple[tuple[str, ...], ...]:
        """Return the inputs of each node by position, then the distinct names that its subgraphs capture."""
        return tuple(
            (*node.input, *dict.fromkeys(name for graph in iterate_subgraphs(node) for name in captured_names(graph)))
            for node in self.nodes
        )

    @cached_property
    def types(self) -> dict[str, TypeProto]:
        """Return the type of each value that shape inference finds.

        Symbolic dimensions stay symbolic. Types without a shape are those of values whose shape is doubtful.
        """
        # Without the bytes of large weights, it is small enough for shape inference.
        weights = [strip_data(item) for item in self.initializers.values() if item.name not in self.input_names]
        outputs = [self._describe_source(output) for output in self.outputs]
        skeleton = self.proto(self.nodes, weights, self.inputs, outputs)
        try:
            inferred = infer_shapes(skeleton)
            graph = inferred.graph
            dims = [item.type.tensor_type.shape.dim for item in (*graph.value_info, *graph.input, *graph.output)]
            longest = max((dim[0].dim_value for dim in dims if len(dim) == 1), default=0)
            if has_open_sizes(graph) and longest <= MAX_FOLLOWED_ELEMENTS:
                graph = infer_shapes(inferred, data_prop=True).graph
        except Exception:  # noqa: BLE001 - inference may fail here: ONNX Runtime knows the missing types
            graph = skeleton.graph
        types = {v.name: v.type for v in (*graph.value_info, *graph.output, *graph.input)}
        types = {name: kind for name, kind in types.items() if kind.WhichOneof("value")}
        shapes: dict[str, Entries] = {name: read_shape_entries(kind) for name, kind in types.items()}
        shapes |= {name: tuple(tensor.dims) for name, tensor in self.initializers.items()}
        for name in find_misjudged_values(self.nodes, self.reads, shapes) & types.keys():
            if types[name].HasField("tensor_type"):
                types[name].tensor_type.ClearField("shape")
        return types

    def _describe_source(self, output: ValueInfoProto) -> ValueInfoProto:
        """Return the value that an output returns, without a shape."""
        renamed = deepcopy(output)
        renamed.name = self.sources.get(output.name, output.name)
        if renamed.type.HasField("tensor_type"):
            renamed.type.tensor_type.ClearField("shape")  # the declared shape may be wrong
        return renamed

    def proto(
        self,
        nodes: Sequence[NodeProto],
        weights: Sequence[TensorProto],
        inputs: Sequence[ValueInfoProto],
        outputs: Sequence[ValueInfoProto],
        name: str = "",
    ) -> ModelProto:
        """Return an ONNX model of some of the nodes.

        Its IR version is one that ONNX Runtime supports.

        Args:
            nodes: Nodes of this model, in topological order.
            weights: Initializers of the new model.
            inputs: Inputs of the new model.
            outputs: Outputs of the new model.
            name: Name of its graph; by default that of this model.
        """
        proto = ModelProto(
            ir_version=min(max(self.ir_version, MIN_IR_VERSION), MAX_IR_VERSION),
            producer_name="onnxplace",
            opset_import=self.opsets,
        )
        graph = proto.graph  # filled in place: a graph that is handed over would be copied, weights included
        graph.name = name or self.name or "graph"
        graph.node.extend(nodes)
        graph.initializer.extend(weights)
        graph.input.extend(inputs)
        graph.output.extend(outputs)
        return proto

    def whole_proto(self, weights: WeightFile | None = None, more: Sequence[ValueInfoProto] = ()) -> ModelProto:
        """Return the whole model under its original input and output names.

        Args:
            weights: A file that takes the weights; by default they stay in the model.
            more: Values that become outputs too.
        """
        returned = frozenset(self.sources.values())
        nodes = [node for node in self.nodes if not (node.output and node.output[0] in returned)]
        tensors = list(self.initializers.values())
        if weights:
            tensors = [weights.place(tensor, self.folder) for tensor in tensors]
        else:
            tensors = [embed_part(tensor, self.folder) for tensor in tensors]
        proto = self.proto(nodes, tensors, self.inputs, [*self.outputs, *more])
        proto.configuration.extend(self.device_configurations)
        self.guard_empty_axes(proto)
        return proto

    def guard_empty_axes(self, proto: ModelProto) -> None:
        """Let a model of some of the nodes refuse what would end the process, if a CPU computes it."""
        operators = {node.op_type for node in walk_nodes(proto.graph.node)}
        if self.opset >= MIN_GUARDED_OPSET and not operators.isdisjoint(FATAL_OPERATORS):
            guard_empty_axes(proto.graph, self.types)

    @property
    def session_entries(self) -> dict[str, str]:
        """Return the configuration that lets sessions find the external weights.

        Sessions need it that are opened from bytes.
        """
        return {"session.model_external_initializers_file_folder_path": str(self.folder)} if self.folder else {}

    @cached_property
    def inline_bytes(self) -> int:
        """Return the bytes of weights in memory rather than in files."""
        tensors = self.initializers.values()
        return sum(tensor_size(tensor) for tensor in tensors if tensor.data_location != TensorProto.EXTERNAL)

    @cached_property
    def element_types(self) -> dict[str, int]:
        """Return the element types of tensors: weights, and values as far as they are known."""
        tensors = {name: kind.tensor_type for name, kind in self.types.items() if kind.HasField("tensor_type")}
        types = {name: tensor.elem_type for name, tensor in tensors.items()}
        return types | {name: tensor.data_type for name, tensor in self.initializers.items()}

    @cached_property
    def constants(self) -> dict[str, TensorProto]:
        """Return the initializers that no input overrides."""
        return {name: tensor for name, tensor in self.initializers.items() if name not in self.input_names}

    def derive(self, function: Callable[[Model], Derived]) -> Derived:
        """Return what a function makes of this model, made once, for all passes that ask."""
        results: dict[Callable[[Model], Derived], Derived] = vars(self).setdefault("_derived", {})
        if function not in results:
            results[function] = function(self)
        return results[function]

    def overridable(self, name: str) -> bool:
        """Return whether `name` is an input with a default value."""
        return name in self.initializers and name in self.input_names

    def replacing(self, nodes: Sequence[NodeProto], initializers: Mapping[str, TensorProto]) -> Model:
        """Return this model with other nodes and weights.

        Inputs and outputs are the same.
        """
        return replace(self, nodes=tuple(nodes), initializers=MappingProxyType(dict(initializers)))

    def feeds(self, seed: int = 0) -> dict[str, Array]:
        """Return inputs to profile the model with.

        Those of the user come first. Others are random, of the bound shapes, except that a training step begins with
        its initial states, its learning rate and step 1.

        Raises FeedError listing the symbolic dimensions without a size, and for inputs that cannot be drawn.
        """
        missing = [declaration_of(value, self) for value in self.inputs if value.name not in self.samples]
        first = list_training_feeds(self.training, self.initializers, self.folder)
        return {**random_feeds(missing, self.dimensions, seed), **first, **self.samples}

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each input that is a tensor.

        Raises FeedError listing dimensions without a size.
        """
        missing = [declaration_of(value, self) for value in self.inputs if value.name not in self.samples]
        shapes = resolve_shapes([item for item in missing if item.dtype.startswith("tensor(")], self.dimensions)
        return {**shapes, **{name: array.shape for name, array in self.samples.items() if hasattr(array, "shape")}}


def declaration_of(value: ValueInfoProto, model: Model) -> Declared:
    """Describe an input or output of `model`."""
    return Declared(value.name, format_type(value.type), read_shape_entries(value.type), model.overridable(value.name))


def list_training_feeds(
    step: TrainingStep | None, initializers: Mapping[str, TensorProto], folder: Path | None
) -> dict[str, Array]:
    """Return initial states and learning rate, as far as the model has them, and 1 for the number of the step.

    Random numbers would make moments that no optimiser has, such as negative squares, and diverge.
    """
    if step is None:
        return {}
    names = [*(state.input for state in step.list_states()), step.learning_rate]
    base = "" if folder is None else str(folder)
    feeds = {name: numpy_helper.to_array(initializers[name], base) for name in names if name in initializers}
    return {**feeds, step.step: np.array(1, dtype=np.int64)} if step.step else feeds


def store_for_session(
    model: Model, folder: Path, more: Sequence[onnx.ValueInfoProto] = ()
) -> tuple[bytes | Path, dict[str, str]]:
    """Return a model as ONNX Runtime opens it.

    Args:
        model: The model.
        folder: An empty folder, which takes the model and its weights if these exceed `MAX_INLINE_BYTES`.
        more: Values that are to be outputs too.

    Returns:
        Serialised model or path of a file, and entries for the session's configuration.
    """
    if model.inline_bytes <= MAX_INLINE_BYTES:
        return model.whole_proto(more=more).SerializeToString(), model.session_entries
    with WeightFile(folder / "weights.bin", "weights.bin") as weights:
        (folder / "whole.onnx").write_bytes(model.whole_proto(weights, more).SerializeToString())
    return folder / "whole.onnx", {}


# ----------------------------------------------------------------------------------------------------- misjudged shapes


Entries = Sequence[int | str | None] | None
"""Sizes and symbols per axis, None for unknown ones."""


def find_misjudged_values(
    nodes: Sequence[NodeProto], reads: Sequence[Sequence[str]], shapes: Mapping[str, Entries]
) -> set[str]:
    """Return the values whose inferred shapes may be wrong, with all that is computed from them.

    Args:
        nodes: In topological order.
        reads: What each node reads, captured values included.
        shapes: Inferred shape by value, as far as it is known.
    """
    misjudged = set[str]()
    for node, names in zip(nodes, reads):
        if not misjudged.isdisjoint(names) or (node.domain in ("", "ai.onnx") and _is_misjudged(node, shapes)):
            misjudged.update(filter(None, node.output))
    return misjudged


def _is_misjudged(node: NodeProto, shapes: Mapping[str, Entries]) -> bool:
    if node.op_type not in ("Concat", "PRelu", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"):
        return False
    inputs = [shapes.get(name) for name in node.input]
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    if node.op_type == "Concat":
        # ONNX Runtime ignores the other sizes of inputs that are empty.
        axis = attributes.get("axis", 1)
        others = {None if shape is None else (*shape[:axis], *shape[axis:][1:]) for shape in inputs}
        return len(others) > 1 and any(shape is not None and 0 in shape for shape in inputs)
    if node.op_type == "PRelu":
        return _is_broadcast_by_slope(inputs[0], inputs[1])
    is_padded = attributes.get("auto_pad", b"NOTSET").startswith(b"SAME")
    if node.op_type == "ConvTranspose":
        return is_padded and any(attributes.get("output_padding", ()))
    return _is_misjudged_pool(attributes, is_padded, inputs[0], shapes.get(node.output[0]))


def _is_broadcast_by_slope(source: Entries | None, slope: Entries | None) -> bool:
    """Return whether the result of a PRelu is larger than its input, whose shape ONNX infers for it."""
    if source is None or slope is None:
        return False
    pairs = zip_longest(reversed(source), reversed(slope), fillvalue=1)
    return len(slope) > len(source) or any(entry not in (1, size) for size, entry in pairs)


def _is_misjudged_pool(
    attributes: Mapping[str, Any], is_padded: bool, source: Entries | None, result: Entries | None
) -> bool:
    is_rounded_up = bool(attributes.get("ceil_mode", 0))
    if is_padded:
        return is_rounded_up or max(attributes.get("dilations", (1,))) > 1
    if not is_rounded_up or source is None or result is None:
        return False
    # ONNX Runtime has no last window that begins behind the input.
    return any(
        isinstance(count, int) and isinstance(size, int) and (count - 1) * stride >= size + before
        for size, count, stride, before in zip(
            source[2:], result[2:], _per_axis(attributes, "strides", 1), _per_axis(attributes, "pads", 0)
        )
    )


def _per_axis(attributes: Mapping[str, Sequence[int]], name: str, default: int) -> Sequence[int]:
    """Return an attribute of spatial axes; of paddings, those before each axis come first."""
    return attributes.get(name) or [default] * len(attributes["kernel_shape"])
