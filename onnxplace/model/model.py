"""The one door to ONNX: read a model, put it into one shape, ask it questions, write parts of it.

A `Model` is an ONNX model taken apart: nodes in topological order with unique names, weights as tensors that may
stay in their file, inputs and outputs. Reading maps nothing and copies nothing of external data.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, TypeGuard

import onnx
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TypeProto, ValueInfoProto

from onnxplace.errors import InputError, ModelError, nearest
from onnxplace.feeds import (
    MAX_DIMENSION,
    Array,
    Declared,
    check_feeds,
    complete_dimensions,
    dimension_keys,
    dimensions_of_feeds,
    random_feeds,
    resolve_shapes,
    symbols_of_dimension,
)
from onnxplace.model.canonicalize import take_apart, without_data
from onnxplace.model.formats import format_hint
from onnxplace.model.nested_graphs import names_read
from onnxplace.model.tensors import Fingerprint, external_range, fingerprint, packed_size, tensor_size, unknown_element
from onnxplace.model.weights import WeightFile, not_beside
from onnxplace.utils import open_input

if TYPE_CHECKING:
    from onnxplace.state import State

# ONNX Runtime 1.30 and 1.31 take IR versions up to 13; 8 is the first that carries everything we write.
LOWEST_IR, HIGHEST_IR = 8, 13
INLINE_LIMIT_BYTES = 1 << 30
# Beyond what any machine holds; sums of such sizes still fit into 64 bits.
MAX_VALUE_BYTES = 1 << 50

# onnx takes every vector for a shape and follows each of its elements: memory runs out at some million of them.
LONG_VECTOR = 1 << 18


def _has_long_vectors(graph: GraphProto) -> bool:
    """Whether some value is a vector of more elements than any shape has, and than vocabularies."""
    shapes = (value.type.tensor_type.shape.dim for value in (*graph.value_info, *graph.input, *graph.output))
    return any(len(shape) == 1 and shape[0].dim_value > LONG_VECTOR for shape in shapes)


@dataclass(frozen=True)
class Model:
    """An ONNX model taken apart. Frozen: transformations return a new one; protos in it are never altered."""

    derived_from: ClassVar[tuple[type, ...]] = ()

    name: str
    ir_version: int
    opsets: tuple[OperatorSetIdProto, ...]
    nodes: tuple[NodeProto, ...]
    """In topological order, each with a unique name."""
    initializers: Mapping[str, TensorProto]
    inputs: tuple[ValueInfoProto, ...]
    """What the caller feeds, including initializers that the caller may override."""
    outputs: tuple[ValueInfoProto, ...]
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Output name -> name of the value it returns, where that is another one (an initializer given back)."""
    folder: Path | None = None
    """Where external weights are found."""
    digest: str = ""
    """SHA-256 of the model file, or of the serialised graph."""
    dimensions: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Values bound to symbolic dimensions for profiling; the model itself keeps them symbolic."""
    samples: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))
    """Inputs the user gave to profile with."""
    states: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Input name -> name of the output whose value it takes in the next call."""
    removed: tuple[str, ...] = ()
    """Names of the nodes that optimisation removed, in their order."""
    weights_files: Mapping[Path, Fingerprint] = field(default_factory=lambda: MappingProxyType({}))
    """Files of external data, as they were when the model was read."""

    def check(self, state: State) -> None:
        """Raise ValueError if a node reads something that nobody makes before it."""
        known = {value.name for value in self.inputs} | set(self.initializers)
        for node in self.nodes:
            for name in names_read(node):
                if name not in known:
                    raise ValueError(f"node {node.name!r} reads {name!r} before anybody makes it")
            known.update(node.output)

    @cached_property
    def input_names(self) -> frozenset[str]:
        return frozenset(value.name for value in self.inputs)

    @cached_property
    def reads(self) -> tuple[tuple[str, ...], ...]:
        """Return, for each node, the names it reads, those captured by its subgraphs included, each once."""
        return tuple(tuple(dict.fromkeys(names_read(node))) for node in self.nodes)

    @cached_property
    def types(self) -> dict[str, TypeProto]:
        """Return the type of each value as far as shape inference finds it; symbolic dimensions stay symbolic."""
        skeleton = self._skeleton()
        try:
            inferred = onnx.shape_inference.infer_shapes(skeleton)
            if not _has_long_vectors(inferred.graph):
                inferred = onnx.shape_inference.infer_shapes(inferred, data_prop=True)
            graph = inferred.graph
        except Exception:  # noqa: BLE001 - inference is a service here; missing types are asked of ONNX Runtime
            graph = skeleton.graph
        found = {v.name: v.type for v in (*graph.value_info, *graph.output, *graph.input)}
        return {name: kind for name, kind in found.items() if kind.WhichOneof("value")}

    def _skeleton(self) -> ModelProto:
        """Return the model without the bytes of large weights: small enough to hand to shape inference."""
        weights = [
            without_data(t) if tensor_size(t) > 1024 else t
            for t in self.initializers.values()
            if t.name not in self.input_names
        ]
        return self.proto(self.nodes, weights, self.inputs, [self._produced(out) for out in self.outputs])

    def _produced(self, output: ValueInfoProto) -> ValueInfoProto:
        renamed = ValueInfoProto()
        renamed.CopyFrom(output)
        renamed.name = self.sources.get(output.name, output.name)
        if renamed.type.HasField("tensor_type"):
            renamed.type.tensor_type.ClearField("shape")  # what is declared there may be wrong
        return renamed

    def proto(
        self,
        nodes: Sequence[NodeProto],
        weights: Sequence[TensorProto],
        inputs: Sequence[ValueInfoProto],
        outputs: Sequence[ValueInfoProto],
        name: str = "",
    ) -> ModelProto:
        """Return an ONNX model of some of our nodes, in an IR version that ONNX Runtime takes."""
        graph = GraphProto(
            name=name or self.name or "graph", node=nodes, initializer=weights, input=inputs, output=outputs
        )
        return ModelProto(
            ir_version=min(max(self.ir_version, LOWEST_IR), HIGHEST_IR),
            producer_name="onnxplace",
            graph=graph,
            opset_import=self.opsets,
        )

    def whole_proto(self, weights: WeightFile | None = None, more: Sequence[ValueInfoProto] = ()) -> ModelProto:
        """Return the whole model under its original input and output names, and `more` values as outputs.

        Weights go to `weights` if given.
        """
        nodes = [node for node in self.nodes if not (node.output and node.output[0] in self._returned_initializers)]
        tensors = [weights.place(t, self.folder) if weights else t for t in self.initializers.values()]
        return self.proto(nodes, tensors, self.inputs, [*self.outputs, *more])

    @property
    def session_entries(self) -> dict[str, str]:
        """Return the options with which a session opened from bytes finds our external weights."""
        return {"session.model_external_initializers_file_folder_path": str(self.folder)} if self.folder else {}

    @cached_property
    def _returned_initializers(self) -> frozenset[str]:
        return frozenset(self.sources.values())

    @cached_property
    def inline_bytes(self) -> int:
        """Return the bytes of weights held in memory rather than in files."""
        return sum(tensor_size(t) for t in self.initializers.values() if t.data_location != TensorProto.EXTERNAL)

    def overridable(self, name: str) -> bool:
        """Return whether `name` is an input with a default value."""
        return name in self.initializers and name in self.input_names

    def replacing(self, nodes: Sequence[NodeProto], initializers: Mapping[str, TensorProto]) -> Model:
        """Return this model with other nodes and weights (same inputs and outputs)."""
        return replace(self, nodes=tuple(nodes), initializers=MappingProxyType(dict(initializers)))

    def feeds(self, seed: int = 0) -> dict[str, Array]:
        """Return inputs to profile or try the model with: the user's, else random ones of the bound shapes.

        Raises FeedError listing the symbolic dimensions that have no value, and for inputs that cannot be invented.
        """
        drawn = [declaration_of(value, self) for value in self.inputs if value.name not in self.samples]
        return {**random_feeds(drawn, self.dimensions, seed), **self.samples}

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each input that is a tensor; raises FeedError listing dimensions that have no value."""
        tensors = [declaration_of(value, self) for value in self.inputs if value.name not in self.samples]
        sizes = resolve_shapes([item for item in tensors if item.dtype.startswith("tensor(")], self.dimensions)
        return {**sizes, **{name: array.shape for name, array in self.samples.items() if not isinstance(array, list)}}


def load(source: str | Path | ModelProto) -> Model:
    """Read an ONNX model from a file or an object and put it into our one shape.

    External data is checked (present, inside the model's folder, long enough) but not read. Raises ModelError
    naming the file, node or tensor.
    """
    if isinstance(source, ModelProto):
        proto, folder, where = source, None, source.graph.name or "model"
        digest = hashlib.sha256(
            b"".join(n.SerializeToString(deterministic=True) for n in source.graph.node)
        ).hexdigest()
    else:
        path = Path(source)
        data = _read(path)
        proto, folder, where, digest = _parse(data, path), path.parent, path.name, hashlib.sha256(data).hexdigest()
    parts = take_apart(proto, where, folder)
    external = [t for t in parts.initializers.values() if t.data_location == TensorProto.EXTERNAL]
    files = dict.fromkeys(external_range(tensor, folder)[0] for tensor in external)
    return Model(
        name=proto.graph.name or where,
        ir_version=proto.ir_version,
        opsets=tuple(parts.opsets),
        nodes=tuple(parts.nodes),
        initializers=MappingProxyType(parts.initializers),
        inputs=tuple(parts.inputs),
        outputs=tuple(parts.outputs),
        sources=MappingProxyType(parts.sources),
        folder=folder,
        digest=digest,
        weights_files=MappingProxyType({file: fingerprint(file) for file in files}),
    )


def _read(path: Path) -> bytes:
    try:
        with open_input(path, "M001") as stream:
            return bytes(stream.read() or b"")
    except InputError as problem:
        raise ModelError(problem.code, problem.message, where=problem.where, hint=problem.hint) from None
    except OSError as problem:
        raise ModelError("M001", f"it cannot be read: {problem.strerror}", where=str(path)) from None


def _parse(data: bytes, path: Path) -> ModelProto:
    proto, hint = ModelProto(), format_hint(data, str(path))
    try:
        proto.ParseFromString(data)
    except DecodeError:
        if data[:1] == b"\x08" and not hint:  # field 1, ir_version, which every ONNX writer puts first
            raise ModelError(
                "M003",
                f"the ONNX file is truncated or damaged ({len(data)} bytes)",
                where=str(path),
                hint="copy or export it again",
            ) from None
        raise ModelError("M002", "not an ONNX file", where=str(path), hint=hint) from None
    if not proto.ir_version or not proto.HasField("graph"):
        raise ModelError("M002", "not an ONNX file: it holds no graph", where=str(path), hint=hint)
    return proto


def require_unchanged(model: Model) -> None:
    """Raise ModelError if a weights file was written or replaced since the model was read."""
    for file, before in model.weights_files.items():
        try:
            changed = fingerprint(file) != before
        except OSError:
            changed = True
        if changed:
            hint = "compile again when nothing writes to it"
            raise ModelError("M025", "this weights file changed while it was compiled", where=str(file), hint=hint)


def require_beside(model: Model, bundle: Path) -> None:
    """Raise UsageError if a bundle at `bundle` could not refer to the model's weights files."""
    below = bundle.absolute().parent.resolve()
    for tensor in model.initializers.values():
        if tensor.data_location == TensorProto.EXTERNAL:
            file = external_range(tensor, model.folder)[0].resolve()
            if not file.is_relative_to(below):
                raise not_beside(file, below)


def bind(model: Model, dimensions: Mapping[str, int], samples: Mapping[str, Array]) -> Model:
    """Return `model` with values for symbolic dimensions and sample inputs.

    Sizes that follow from others, or from the samples, join the dimensions. Raises ModelError for a dimension or
    input the model does not have, and FeedError for samples that do not fit, or sizes that contradict each other.
    """
    inputs = [declaration_of(value, model) for value in model.inputs]
    keys = dict.fromkeys(key for item in inputs for key, size in dimension_keys(item) if size is None)
    _require_dimensions(keys, dimensions)
    if samples:
        samples = check_feeds(samples, inputs)
        sampled = dimensions_of_feeds(samples, inputs)
        for key, size in dimensions.items():
            if sampled.get(key, size) != size:
                message = f"dimension {key!r} is {size} here and {sampled[key]} in the inputs"
                raise ModelError("M022", message, where="--shape", hint="leave it out: the inputs say it")
        dimensions = {**dimensions, **sampled}
    sizes = {key: int(size) for key, size in complete_dimensions(keys, dimensions).items()}
    return replace(model, dimensions=MappingProxyType(sizes), samples=MappingProxyType(dict(samples)))


def _require_dimensions(keys: Iterable[str], dimensions: Mapping[str, int]) -> None:
    """Raise ModelError for a dimension that is not there, or whose size cannot be."""
    known = {name for key in keys for name in (key, *symbols_of_dimension(key))}
    for key, size in dimensions.items():
        if key not in known:
            raise ModelError(
                "M022",
                f"the model has no symbolic dimension {key!r}",
                where="--shape",
                hint=nearest(key, sorted(known)) if known else "all its dimensions are fixed",
            )
        if not isinstance(size, Integral) or not 0 <= size <= MAX_DIMENSION:
            hint = f"give a whole number from 0 to {MAX_DIMENSION}"
            raise ModelError("M022", f"dimension {key!r} cannot be {size!r}", where="--shape", hint=hint)


def declaration_of(value: ValueInfoProto, model: Model) -> Declared:
    """Describe an input or output of `model`."""
    return Declared(value.name, type_name(value.type), shape_entries(value.type), model.overridable(value.name))


def type_name(kind: TypeProto) -> str:
    """Return ONNX Runtime's spelling of a type: `tensor(float)`, `seq(tensor(int64))`."""
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        element = TensorProto.DataType.Name(getattr(kind, which).elem_type).lower()
        return f"{'sparse_' if which.startswith('sparse') else ''}tensor({element})"
    if which == "sequence_type":
        return f"seq({type_name(kind.sequence_type.elem_type)})"
    if which == "optional_type":
        return f"optional({type_name(kind.optional_type.elem_type)})"
    if which == "map_type":
        return f"map({TensorProto.DataType.Name(kind.map_type.key_type).lower()},{type_name(kind.map_type.value_type)})"
    return "unknown"


def shape_entries(kind: TypeProto) -> tuple[int | str | None, ...] | None:
    """Return the dimensions of a tensor type: sizes, symbols, or None; None for no shape at all.

    A size that cannot be, as shape inference makes of nodes that cannot run, says nothing.
    """
    if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    sizes = kind.tensor_type.shape.dim
    return tuple(
        (size.dim_value if 0 <= size.dim_value <= MAX_DIMENSION else None)
        if size.HasField("dim_value")
        else (size.dim_param or None)
        for size in sizes
    )


def static_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shape of each value that shape inference knows once the dimensions are bound."""
    sizes = model.input_shapes()
    inputs = []
    for value in model.inputs:
        bound = ValueInfoProto()
        bound.CopyFrom(value)
        if value.name in sizes and value.type.HasField("tensor_type"):
            bound.type.tensor_type.ClearField("shape")
            bound.type.tensor_type.shape.SetInParent()
            for size in sizes[value.name]:
                bound.type.tensor_type.shape.dim.add(dim_value=size)
        inputs.append(bound)
    outputs = tuple(_unshaped(output) for output in model.outputs)
    entries = {
        name: shape_entries(kind) for name, kind in replace(model, inputs=tuple(inputs), outputs=outputs).types.items()
    }
    return {name: shape for name, shape in entries.items() if shape is not None and _is_known(shape)}


def _is_known(shape: tuple[int | str | None, ...]) -> TypeGuard[tuple[int, ...]]:
    """Return whether all sizes are known; inference computes sizes below zero where a model cannot run."""
    return all(isinstance(size, int) and size >= 0 for size in shape)


def _unshaped(output: ValueInfoProto) -> ValueInfoProto:
    """Return an output without its declared shape, which may be wrong or symbolic."""
    return ValueInfoProto(name=output.name)


def value_bytes(model: Model, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the bytes of each value whose shape and type are known."""
    sizes = {}
    for name, shape in shapes.items():
        kind = model.types.get(name)
        if kind is None or not kind.HasField("tensor_type"):
            continue
        if (number := unknown_element(kind)) is not None:
            message = f"its element type would be {number}, which ONNX does not have"
            raise ModelError("M024", message, where=f"value {name!r}", hint="the model is damaged; export it again")
        strings = kind.tensor_type.elem_type in (TensorProto.STRING, TensorProto.UNDEFINED)
        size = math.prod(shape) if strings else packed_size(kind.tensor_type.elem_type, shape)
        if size > MAX_VALUE_BYTES:
            message = f"of shape {list(shape)} it would take {size} bytes or more"
            raise ModelError("M024", message, where=f"value {name!r}", hint="give smaller sizes with --shape")
        if not strings:
            sizes[name] = size
    return sizes
