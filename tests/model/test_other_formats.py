"""Models in other formats are refused with a way to convert them to ONNX."""

import io
import zipfile

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxplace.model.loading import load

pytestmark = pytest.mark.usefixtures("no_gpus")


def zip_files(*names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, b"x" * 100)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "expected_words"),
    [
        # Recognised by content, whatever the ending.
        ("m.onnx", zip_files("archive/data.pkl", "archive/data/0"), "torch.onnx.export"),
        ("m.pt", zip_files("archive/data.pkl", "archive/code/x.py"), "torch.onnx.export"),
        ("m.onnx", zip_files("config.json", "model.weights.h5"), "Keras"),
        ("m.zip", zip_files("model.onnx"), "unpack it"),
        ("m.onnx", b"\x10\0\0\0ORTM" + bytes(40), "give the .onnx file that it was made from"),
        ("m.onnx", b"\x1c\0\0\0TFL3" + bytes(40), "tf2onnx.convert --tflite"),
        ("m.onnx", b"\x89HDF\r\n\x1a\n" + bytes(40), "Keras"),
        ("m.onnx", b"\x08\0\0\0\0\0\0\0" + b'{"a": 1}', "weights and no graph"),
        ("m.onnx", b"GGUF" + bytes(40), "weights and no graph"),
        ("m.onnx", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n", "git lfs pull"),
        ("m.onnx", b"\n<!DOCTYPE html><html></html>", "web page"),
        ("m.onnx", b"\x1f\x8b\x08" + bytes(40), "gunzip"),
        # Recognised by the ending.
        ("m.pth", b"\x80\x02}q\x00.", "torch.onnx.export"),
        ("m.PT", b"\x80\x02}q\x00.", "torch.onnx.export"),
        ("m.onnxtxt", b'<ir_version: 8, opset_import: ["": 17]> g () => () {}', 'format="onnxtxt"'),
        ("m.textproto", b"ir_version: 8", 'format="textproto"'),
        ("m.pb", b"\x0a\x05hello", "tf2onnx.convert --graphdef"),
        ("m.mlmodel", b"\x08\x01", "Core ML"),
        ("m.pkl", b"\x80\x04.", "skl2onnx"),
        ("m.xml", b"<?xml version='1.0'?><net/>", "OpenVINO"),
        ("m.engine", b"ftrt", "TensorRT"),
        ("m.py", b"import torch\n", "run it to write the model"),
        ("m.json", b'{"nodes": []}', "`onnxplace place"),
        ("m.safetensors", b"", "weights and no graph"),
        ("m.onnx.data", bytes(40), "the .onnx file of the same export"),
        ("m.onnx_data", b"\x08" + bytes(40), "the .onnx file of the same export"),
        ("m.ort", b"", "that it was made from"),
        ("m.tflite", b"", "tf2onnx"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_in_another_format_gets_a_hint_how_to_convert_it(require_refusal, tmp_path, name, data, expected_words):
    (tmp_path / name).write_bytes(data)
    require_refusal(tmp_path / name, "M002", "not an ONNX file", expected_words)


@pytest.mark.parametrize("name", ["my.onnx.data", "weights", "part.bin"])
def test_a_file_of_weights_gets_a_hint_at_the_model_that_refers_to_it(require_refusal, tmp_path, name):
    tensor = numpy_helper.from_array(np.ones(2, np.float32), "w")
    value = helper.make_tensor_value_info("w", TensorProto.FLOAT, [2])
    model = helper.make_model(helper.make_graph([], "g", [], [value], [tensor]))
    onnx.save(model, tmp_path / "my.onnx", save_as_external_data=True, location=name, size_threshold=0)
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "broken.onnx").symlink_to("nowhere")
    (tmp_path / "an_other.onnx").write_bytes(name.encode())
    require_refusal(tmp_path / name, "M002", "not an ONNX file", "it holds weights of", "my.onnx'", "give that file")


def test_the_folder_of_a_tensorflow_model_gets_a_hint_how_to_convert_it(require_refusal, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "saved_model.pb").write_bytes(b"x")
    require_refusal(tmp_path / "saved", "M001", "--saved-model")


@pytest.mark.parametrize("name", ["m.pb", "m.pt", "model", "m.bin"])
def test_an_onnx_model_is_read_whatever_its_ending(tmp_path, branches_bytes, name):
    (tmp_path / name).write_bytes(branches_bytes)
    assert len(load(tmp_path / name).nodes) == 5
