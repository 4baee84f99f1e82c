"""The ONNX models of a bundle, in an order in which they can run, and the types of its inputs and outputs."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto

from onnxplace.bundle import (
    SEGMENTS_FOLDER,
    WHOLE_MODEL_FILE,
    Bundle,
    InputRecord,
    Manifest,
    OutputRecord,
    SegmentRecord,
    StateRecord,
)
from onnxplace.errors import BundleError
from onnxplace.model import WeightFile, parse_type, read_tensor_bytes, tensor_size
from onnxplace.utils import report_progress


@dataclass(frozen=True)
class SegmentModel:
    """A segment and its ONNX model."""

    record: SegmentRecord
    proto: ModelProto

    @property
    def default_inputs(self) -> frozenset[str]:
        """Return the inputs of the file that the runtime never feeds: they protect the scales of quantised values."""
        return frozenset(value.name for value in self.proto.graph.input) - frozenset(self.record.inputs)


@dataclass(frozen=True)
class BundleModels:
    """The ONNX models of a bundle; weights stay in their files."""

    bundle: Bundle

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @property
    def weights_folder(self) -> Path:
        """Return the folder to which the locations of external weights are relative."""
        root = self.bundle.path.resolve()
        return root.parent if self.manifest.linked else root / SEGMENTS_FOLDER

    @cached_property
    def segments(self) -> tuple[SegmentModel, ...]:
        """Return the segments, each after those whose values it reads."""
        records = order_segments(self.manifest)
        files = [self.bundle.file(record.file) for record in records]
        return tuple(
            SegmentModel(record, ModelProto.FromString(file.read_bytes())) for record, file in zip(records, files)
        )

    @cached_property
    def header(self) -> ModelProto:
        """Return a model that has the IR version and the opsets of all; the whole one if no segment computes."""
        return self.segments[0].proto if self.segments else self.whole

    @cached_property
    def whole(self) -> ModelProto:
        """Return the uncut model, with whole operators."""
        return ModelProto.FromString(self.bundle.file(WHOLE_MODEL_FILE).read_bytes())

    def list_initial_states(self) -> list[TensorProto]:
        """Return the initial values of carried states, which no segment holds, as references to their files."""
        return [self._refer_to_initial(state) for state in self.manifest.states if state.initial is not None]

    def _refer_to_initial(self, state: StateRecord) -> TensorProto:
        record = state.initial
        assert record is not None
        dtype = next(item.dtype for item in self.manifest.inputs if item.name == state.input)
        number = make_type(dtype, record.shape).tensor_type.elem_type
        tensor = TensorProto(name=state.input, data_type=number, dims=record.shape)
        if not record.bytes:
            tensor.raw_data = b""
            return tensor
        file = (self.bundle.linked_file if record.linked else self.bundle.file)(record.file).resolve()
        location = file.relative_to(self.weights_folder.resolve()).as_posix()
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", record.offset), ("length", record.bytes)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor

    def place(self, tensors: Iterable[TensorProto], weights: WeightFile | None) -> list[TensorProto]:
        """Return tensors with their bytes in a file of weights, or in themselves without one; report progress."""
        sources = list(tensors)
        placed, done, total = list[TensorProto](), 0, sum(map(tensor_size, sources))
        for tensor in sources:
            if weights is not None:
                placed.append(weights.place(tensor, self.weights_folder))
            else:
                placed.append(embed_tensor(tensor, self.weights_folder))
            done += tensor_size(tensor)
            report_progress(done, total)
        return placed


def order_segments(manifest: Manifest) -> list[SegmentRecord]:
    """Return the segments, each after those whose values it reads; near-linear.

    Among those that are ready, the first of the manifest comes first.
    """
    position = {segment.id: index for index, segment in enumerate(manifest.segments)}
    waiting_for = [len(list_producers(manifest, segment)) for segment in manifest.segments]
    readers: dict[str, list[int]] = {segment.id: [] for segment in manifest.segments}
    for index, segment in enumerate(manifest.segments):
        for producer in list_producers(manifest, segment):
            readers[producer].append(index)
    ready = [index for index, count in enumerate(waiting_for) if count == 0]
    ordered = []
    while ready:
        segment = manifest.segments[heapq.heappop(ready)]
        ordered.append(segment)
        for reader in readers[segment.id]:
            waiting_for[reader] -= 1
            if waiting_for[reader] == 0:
                heapq.heappush(ready, reader)
    assert len(ordered) == len(position), "checked when the bundle was opened: its programs cannot deadlock"
    return ordered


def list_producers(manifest: Manifest, segment: SegmentRecord) -> tuple[str, ...]:
    """Return the segments whose values a segment reads, each once."""
    producers = (manifest.values[name].producer for name in segment.inputs)
    return tuple(dict.fromkeys(producer for producer in producers if producer is not None))


def describe_values(records: Iterable[InputRecord | OutputRecord]) -> Iterator[ValueInfoProto]:
    """Yield inputs or outputs of the manifest as ONNX declares them."""
    for record in records:
        if record.dtype == "unknown":
            yield ValueInfoProto(name=record.name)
        else:
            yield ValueInfoProto(name=record.name, type=make_type(record.dtype, record.shape))


def make_type(dtype: str, shape: tuple[int | str | None, ...] | None) -> TypeProto:
    """Return a type from the manifest's spelling; a shape of None leaves the rank open.

    Raises BundleError for a text that is not a type.

    >>> make_type("tensor(float)", ("batch", 4)).tensor_type.shape.dim[0].dim_param
    'batch'
    """
    kind = parse_type(dtype, shape)
    if kind is None:
        hint = "the manifest is damaged; compile again"
        raise BundleError("N002", f"expected a type such as 'tensor(float)', got {dtype!r}", where="export", hint=hint)
    if shape is not None and kind.HasField("tensor_type"):
        kind.tensor_type.shape.SetInParent()  # a scalar has a shape without dimensions
    return kind


def embed_tensor(tensor: TensorProto, folder: Path) -> TensorProto:
    """Return a tensor that holds its own bytes."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return tensor
    raw = b"".join(read_tensor_bytes(tensor, folder))
    return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=raw)
