"""Hints how to convert models in other formats to ONNX.

Formats are recognised by content, or else by ending.
"""

from __future__ import annotations

from pathlib import PurePath

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
    **dict.fromkeys((".safetensors", ".gguf", ".ggml", ".msgpack", ".bin"), _WEIGHTS),
    **dict.fromkeys((".mlmodel", ".mlpackage", ".mlmodelc"), _COREML),
    **dict.fromkeys((".pkl", ".pickle", ".joblib"), _SKLEARN),
    ".xml": _OPENVINO,
    **dict.fromkeys((".engine", ".plan", ".trt"), _ENGINE),
    **dict.fromkeys((".npz", ".npy"), _ARRAYS),
    **dict.fromkeys((".py", ".ipynb"), _PROGRAM),
    **dict.fromkeys((".json", ".graphml", ".gexf"), _JSON),
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
