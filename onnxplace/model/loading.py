"""Read models from files and objects, and check their weight files."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from copy import deepcopy
from pathlib import Path, PurePath
from types import MappingProxyType

from google.protobuf.message import DecodeError
from onnx import ModelProto, StringStringEntryProto, TensorProto

from onnxplace.errors import Diagnostic, InputError, ModelError
from onnxplace.model.canonicalize import canonicalize
from onnxplace.model.model import Model
from onnxplace.model.nested_graphs import walk_nodes
from onnxplace.model.node_metadata import name_with_module
from onnxplace.model.operator_checks import note_known_functions
from onnxplace.model.tensors import find_external_range, find_repository, relocate_external_data, take_fingerprint
from onnxplace.model.weights import build_link_error, has_external_file
from onnxplace.model_metadata import ModelMetadata, read_training_step
from onnxplace.utils.files import open_input


def load(source: str | Path | ModelProto, *, may_lack_weights: bool = False) -> Model:
    """Read an ONNX model from a file or an object.

    The result is in canonical form.

    External data is checked (present, inside the model's folder, long enough), but not read. With `may_lack_weights`,
    files may be absent until `require_weights`.

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
    parts, notes = canonicalize(proto, where, folder), note_known_functions(proto.functions, where)
    if proto.configuration:  # of devices: it is not kept, so what nodes say of it would refer to nothing
        parts.nodes = deepcopy(parts.nodes)
        for node in walk_nodes(parts.nodes):
            del node.device_configurations[:]
        message = "what its nodes say of devices counts if it is the --device-map, or the --shard-map"
        notes = (*notes, Diagnostic("U025", message, where=where))
    external = [t for t in parts.initializers.values() if t.data_location == TensorProto.EXTERNAL]
    if may_lack_weights:
        external = [tensor for tensor in external if has_external_file(tensor, folder)]
    if folder and (repository := find_repository(folder)):  # ONNX Runtime takes the blobs, but not links to them
        for tensor in external:
            relocate_external_data(tensor, folder, repository)
        folder = repository
    files = dict.fromkeys(find_external_range(tensor, folder)[0] for tensor in external)
    metadata = read_metadata(proto, where if folder else "")
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
        value_info=tuple(proto.graph.value_info),
        folder=folder,
        digest=hashlib.sha256(data).hexdigest(),
        weights_files=MappingProxyType({file: take_fingerprint(file) for file in files}),
        training=training,
        # Optimisations gain nothing in training steps: their patterns are rare where gradients read all values. In its
        # own order a step needs less memory, and it computes the same however it is cut.
        keeps_order=training is not None,
        metadata=metadata,
        removed=tuple(name for node in proto.graph.node if node.name and (name := name_with_module(node)) not in names),
        notes=notes,
    )


def read_metadata(proto: ModelProto, file_name: str = "") -> ModelMetadata:
    """Return what a file says of its model."""
    return ModelMetadata(
        file_name=file_name.encode(errors="replace").decode(),
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


# A model with external data is small; larger files are not searched for the names of their weights files.
_MAX_OWNER_BYTES = 64 << 20


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
    proto, message, is_cut = ModelProto(), "not an ONNX file", False
    try:
        proto.ParseFromString(data)
        if proto.ir_version and proto.HasField("graph"):
            return proto
        message += ": it holds no graph"
    except DecodeError:
        is_cut = data[:1] == b"\x08"  # field 1, ir_version, which every writer of ONNX puts first
    hint = _suggest_owner(path) or suggest_conversion(data, str(path))
    if is_cut and not hint:
        message, hint = f"the ONNX file is truncated or damaged ({len(data)} bytes)", "copy or export it again"
    raise ModelError("M002", message, where=str(path), hint=hint)


def _suggest_owner(path: Path) -> str:
    """Return a hint at the model in the same folder that refers to a file of weights; "" if there is none."""
    entry = StringStringEntryProto(key="location", value=path.name).SerializeToString()
    for model in sorted(path.parent.glob("*.onnx")):
        with suppress(OSError):
            if model.stat().st_size <= _MAX_OWNER_BYTES and entry in model.read_bytes():
                return f"it holds weights of {str(model)!r}: give that file, and keep this one next to it"
    return ""


def require_weights(model: Model) -> None:
    """Raise ModelError if a file of weights is absent, or does not hold them."""
    for tensor in model.initializers.values():
        if tensor.data_location == TensorProto.EXTERNAL:
            find_external_range(tensor, model.folder)


def require_unchanged(model: Model) -> None:
    """Raise ModelError if a weights file changed since it was read."""
    for file, fingerprint in model.weights_files.items():
        try:
            changed = take_fingerprint(file) != fingerprint
        except OSError:
            changed = True
        if changed:
            hint = "compile again while no other program writes to it"
            raise ModelError("M005", "this weights file changed while it was compiled", where=str(file), hint=hint)


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


# -------------------------------------------------------------------------------------------------------- other formats


_TORCH = 'it is a PyTorch model: torch.onnx.export(model, example_inputs, "model.onnx", dynamo=True)'
_ORT = "it is in the format of ONNX Runtime, which cannot be cut: give the .onnx file that it was made from"
_TFLITE = "it is a TensorFlow Lite model: python -m tf2onnx.convert --tflite {name} --output model.onnx"
_KERAS = 'it is a Keras model: model.export("model.onnx", format="onnx") in Keras 3, or tf2onnx.convert.from_keras'
_TENSORFLOW = (
    "if it is a TensorFlow graph: python -m tf2onnx.convert --graphdef {name} --inputs A:0 --outputs B:0 "
    "--output model.onnx (of a SavedModel: --saved-model FOLDER)"
)
_TEXT = 'it is ONNX as text: onnx.save(onnx.load("{name}", format="{format}"), "model.onnx")'
_WEIGHTS = "it holds weights and no graph: export the model that uses them (optimum-cli export onnx --model NAME)"
_EXTERNAL = "if it is the external data of an ONNX model: give the .onnx file of the same export, next to it"
_COREML = "it is a Core ML model, which cannot be converted back: export the original one to ONNX"
_SKLEARN = "if it is a pickled model: skl2onnx.to_onnx(model, inputs) of scikit-learn, torch.onnx.export of PyTorch"
_OPENVINO = "if it is an OpenVINO model, it cannot be converted back: export the original one to ONNX"
_ENGINE = "it is a TensorRT engine, which cannot be cut: give the .onnx file that it was built from"
_ZIP = "it is a zip archive: unpack it, and name the .onnx file that is in it"
_GZIP = "it is compressed: gunzip it first"
_ARRAYS = "arrays are for --inputs"
_POINTER = "it is a pointer of Git LFS, not the file itself: git lfs pull"
_PROGRAM = "it is a program: run it to write the model (torch.onnx.export, onnx.save), and give the .onnx file"
_JSON = "if it is a cost graph: `onnxplace place {name}`"
_PAGE = "it is a web page, not a model: download the file itself (on a model hub, the raw file)"

_BY_ENDING = {
    **dict.fromkeys((".pt", ".pth", ".pt2", ".ckpt", ".torchscript"), _TORCH),
    ".ort": _ORT,
    ".tflite": _TFLITE,
    **dict.fromkeys((".keras", ".h5", ".hdf5"), _KERAS),
    **dict.fromkeys((".pb", ".pbtxt", ".meta"), _TENSORFLOW),
    **dict.fromkeys((".onnxtxt", ".onnxtext"), _TEXT.replace("{format}", "onnxtxt")),
    **dict.fromkeys((".textproto", ".prototxt"), _TEXT.replace("{format}", "textproto")),
    ".onnxjson": _TEXT.replace("{format}", "onnxjson"),
    **dict.fromkeys((".data", ".onnx_data", ".weights"), _EXTERNAL),
    **dict.fromkeys((".safetensors", ".gguf", ".ggml", ".msgpack", ".bin"), _WEIGHTS),
    **dict.fromkeys((".mlmodel", ".mlpackage", ".mlmodelc"), _COREML),
    **dict.fromkeys((".pkl", ".pickle", ".joblib"), _SKLEARN),
    ".xml": _OPENVINO,
    **dict.fromkeys((".engine", ".plan", ".trt"), _ENGINE),
    **dict.fromkeys((".npz", ".npy"), _ARRAYS),
    **dict.fromkeys((".py", ".ipynb"), _PROGRAM),
    **dict.fromkeys((".json", ".graphml"), _JSON),
    ".zip": _ZIP,
    ".gz": _GZIP,
}
# (offset, bytes at this offset, hint), the first that fits.
_BY_CONTENT = (
    (4, b"ORTM", _ORT),
    (4, b"TFL3", _TFLITE),
    (0, b"\x89HDF\r\n", _KERAS),
    (0, b"GGUF", _WEIGHTS),
    (0, b"\x93NUMPY", _ARRAYS),
    (0, b"version https://git-lfs", _POINTER),
    (0, b"\x1f\x8b", _GZIP),
)
# (name of a file in a zip archive, hint), the first that fits.
_BY_ZIPPED_NAME = ((b"data.pkl", _TORCH), (b"model.weights.h5", _KERAS), (b".npy", _ARRAYS), (b".onnx", _ZIP))
# A zip archive lists the names of its files at its end.
_TAIL_BYTES = 1 << 20


def suggest_conversion(data: bytes, path: str) -> str:
    """Return how to convert a file to ONNX; "" for unknown formats.

    The content decides, or else the ending.

    >>> suggest_conversion(b"....TFL3", "face.onnx")
    'it is a TensorFlow Lite model: python -m tf2onnx.convert --tflite face.onnx --output model.onnx'
    """
    hint = _recognise_content(data) or _BY_ENDING.get(PurePath(path).suffix.lower(), "")
    return hint.replace("{name}", path)


def _recognise_content(data: bytes) -> str:
    """Return the hint for the content of a file.

    Returns "" for an unknown format.
    """
    if data.startswith(b"PK\x03\x04"):
        names = data[-_TAIL_BYTES:]
        return next((hint for name, hint in _BY_ZIPPED_NAME if name in names), "")
    if data[:512].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return _PAGE
    if data[8:10] == b'{"' and 0 < int.from_bytes(data[:8], "little") <= len(data):
        return _WEIGHTS  # the format of safetensors: the length of a header in JSON, and the header
    return next((hint for offset, mark, hint in _BY_CONTENT if data.startswith(mark, offset)), "")
