"""Read models from files and objects, and check their weight files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import MappingProxyType

from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto

from onnxplace.errors import InputError, ModelError
from onnxplace.model.canonicalize import take_apart
from onnxplace.model.formats import suggest_conversion
from onnxplace.model.model import Model
from onnxplace.model.tensors import (
    find_external_range,
    find_repository,
    relocate_external_data,
    take_fingerprint,
)
from onnxplace.model.weights import build_link_error
from onnxplace.model_metadata import ModelMetadata
from onnxplace.training_step import read_training_step
from onnxplace.utils import open_input


def load(source: str | Path | ModelProto) -> Model:
    """Read an ONNX model from a file or an object.

    The result is in canonical form.

    External data is checked (present, inside the model's folder, long enough), but not read.

    Raises:
        ModelError: It names the file, node or tensor that is wrong.

    >>> from onnx import parser
    >>> text = '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
    >>> [node.op_type for node in load(parser.parse_model(text)).nodes]
    ['Relu']
    """
    folder: Path | None = None
    if isinstance(source, ModelProto):
        proto, where = source, source.graph.name or "model"
        data = b"".join(node.SerializeToString(deterministic=True) for node in source.graph.node)
    else:
        path = Path(source)
        data = read_model_file(path)
        proto, folder, where = parse_model(data, path), path.parent, path.name
    parts = take_apart(proto, where, folder)
    external = [t for t in parts.initializers.values() if t.data_location == TensorProto.EXTERNAL]
    if folder and (repository := find_repository(folder)):  # ONNX Runtime takes the blobs, but not links to them
        for tensor in external:
            relocate_external_data(tensor, folder, repository)
        folder = repository
    files = dict.fromkeys(find_external_range(tensor, folder)[0] for tensor in external)
    metadata = read_metadata(proto)
    training = read_training_step(metadata.custom_metadata_map, where)
    names = {"", *(node.name for node in parts.nodes)}
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
        digest=hashlib.sha256(data).hexdigest(),
        weights_files=MappingProxyType({file: take_fingerprint(file) for file in files}),
        training=training,
        # Optimisations gain nothing in training steps: their patterns are rare where gradients read all values. In its
        # own order a step needs less memory, and it computes the same however it is cut.
        keeps_order=training is not None,
        metadata=metadata,
        removed=tuple(node.name for node in proto.graph.node if node.name not in names),
    )


def read_metadata(proto: ModelProto) -> ModelMetadata:
    """Return what a file says of its model."""
    return ModelMetadata(
        producer_name=_to_text(proto.producer_name),
        graph_name=proto.graph.name,
        domain=_to_text(proto.domain),
        description=_to_text(proto.doc_string),
        graph_description=_to_text(proto.graph.doc_string),
        version=proto.model_version,
        custom_metadata_map={_to_text(entry.key): _to_text(entry.value) for entry in proto.metadata_props},
    )


def _to_text(text: str | bytes) -> str:
    """Return a text of a model; protobuf returns those that are not UTF-8 as bytes."""
    return text if isinstance(text, str) else text.decode(errors="replace")


def read_model_file(path: Path) -> bytes:
    """Return the bytes of a file.

    Raises ModelError if it cannot be read.
    """
    try:
        with open_input(path, "M001") as stream:
            return bytes(stream.read() or b"")
    except InputError as problem:
        raise ModelError(problem.code, problem.message, where=problem.where, hint=problem.hint) from None
    except OSError as problem:
        raise ModelError("M001", f"it cannot be read: {problem.strerror}", where=str(path)) from None


def parse_model(data: bytes, path: Path) -> ModelProto:
    """Return the model in the bytes of a file.

    Raises ModelError, with a hint for other formats.
    """
    proto, hint = ModelProto(), suggest_conversion(data, str(path))
    try:
        proto.ParseFromString(data)
    except DecodeError:
        if data[:1] == b"\x08" and not hint:  # field 1, ir_version, which every writer of ONNX puts first
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
    """Raise ModelError if a weights file changed since it was read."""
    for file, fingerprint in model.weights_files.items():
        try:
            changed = take_fingerprint(file) != fingerprint
        except OSError:
            changed = True
        if changed:
            hint = "compile again while no other program writes to it"
            raise ModelError("M025", "this weights file changed while it was compiled", where=str(file), hint=hint)


def require_linkable(model: Model, bundle: Path) -> None:
    """Raise UsageError if a bundle could not link to the weights files.

    `bundle` is its path, which need not exist.
    """
    folder = bundle.absolute().parent.resolve()
    for tensor in model.initializers.values():
        if tensor.data_location == TensorProto.EXTERNAL:
            file = find_external_range(tensor, model.folder)[0].resolve()
            if not file.is_relative_to(folder):
                raise build_link_error(file, folder)
