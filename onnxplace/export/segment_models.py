"""The ONNX models of a bundle, in an order in which they can run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from onnx import ModelProto, TensorProto, ValueInfoProto

from onnxplace.bundle.bundle import SEGMENTS_FOLDER, WHOLE_MODEL_FILE, Bundle
from onnxplace.bundle.bundle_simulation import order_segments
from onnxplace.bundle.manifest import InitialRecord, InputRecord, Manifest, OutputRecord, SegmentRecord
from onnxplace.errors import BundleError
from onnxplace.model.nested_graphs import refill
from onnxplace.model.tensors import embed_tensor, make_reference, parse_type, tensor_size
from onnxplace.model.weights import WeightFile
from onnxplace.target.target import Device
from onnxplace.utils.progress import report_progress


@dataclass(frozen=True)
class SegmentModel:
    """A segment and its ONNX model."""

    record: SegmentRecord
    proto: ModelProto


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
        return self.bundle.link_root if self.manifest.linked else self.bundle.path.resolve() / SEGMENTS_FOLDER

    @cached_property
    def segments(self) -> tuple[SegmentModel, ...]:
        """Return the segments, each after those whose values it reads; weights that stream are initializers again."""
        return tuple(SegmentModel(record, self._read_model(record)) for record in order_segments(self.manifest))

    def _read_model(self, segment: SegmentRecord) -> ModelProto:
        proto, records = ModelProto.FromString(self.bundle.file(segment.file).read_bytes()), self.manifest.streamed
        refill(proto.graph.input, (item for item in proto.graph.input if item.name not in segment.streamed))
        weights = (self._refer_to_bytes(name, records[name].dtype, records[name]) for name in segment.streamed)
        proto.graph.initializer.extend(weights)
        return proto

    @cached_property
    def header(self) -> ModelProto:
        """Return a model that has the IR version and the opsets of all; the whole one if no segment computes."""
        return self.segments[0].proto if self.segments else self.whole

    @cached_property
    def whole(self) -> ModelProto:
        """Return the uncut model, with whole operators."""
        return ModelProto.FromString(self.bundle.file(WHOLE_MODEL_FILE).read_bytes())

    @cached_property
    def devices(self) -> dict[str, Device]:
        """Return the devices of the bundle by id."""
        return {device.id: device for device in self.bundle.target.devices}

    @cached_property
    def initial_states(self) -> dict[str, TensorProto]:
        """Return the initial values of carried states, which no segment holds, as references to their files."""
        dtypes = {item.name: item.dtype for item in self.manifest.inputs}
        return {
            state.input: self._refer_to_bytes(state.input, dtypes[state.input], state.initial)
            for state in self.manifest.states
            if state.initial is not None
        }

    def _refer_to_bytes(self, name: str, dtype: str, record: InitialRecord) -> TensorProto:
        kind = parse_type(dtype, record.shape)
        assert kind is not None, "checked when the bundle was opened"
        element_type = kind.tensor_type.elem_type
        if not record.bytes:
            return TensorProto(name=name, data_type=element_type, dims=record.shape, raw_data=b"")
        file = (self.bundle.linked_file if record.linked else self.bundle.file)(record.file).resolve()
        location = file.relative_to(self.weights_folder.resolve()).as_posix()
        return make_reference(name, element_type, record.shape, location, record.offset, record.bytes)

    def place(self, tensors: Iterable[TensorProto], weights: WeightFile | None) -> list[TensorProto]:
        """Return tensors with their bytes in a file of weights, or in themselves without one; report progress."""
        sources = list(tensors)
        placed, done, total = list[TensorProto](), 0, sum(map(tensor_size, sources))
        for tensor in sources:
            if weights is not None:
                placed.append(weights.place(tensor, self.weights_folder, str(self.bundle.path)))
            else:
                placed.append(embed_tensor(tensor, self.weights_folder))
            done += tensor_size(tensor)
            report_progress(done, total)
        return placed


def describe_values(records: Iterable[InputRecord | OutputRecord]) -> Iterator[ValueInfoProto]:
    """Yield inputs or outputs of the manifest as ONNX declares them; those of an unknown type without one.

    Raises BundleError for a text that is not a type.
    """
    for record in records:
        kind = parse_type(record.dtype, record.shape)
        if kind is None and record.dtype != "unknown":
            message = f"expected a type such as 'tensor(float)', got {record.dtype!r}"
            hint = "the manifest is damaged; compile again"
            raise BundleError("N002", message, where=f"input or output {record.name!r}", hint=hint)
        yield ValueInfoProto(name=record.name, type=kind)
