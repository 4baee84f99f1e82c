"""Files that are not models, and damaged ones, are refused."""

import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.conftest import FAST_PIPELINE
from tests.support.bad_input import SHAPE, store
from tests.support.snapshots import make_snapshot

pytestmark = pytest.mark.usefixtures("no_gpus")


def test_a_missing_model_is_named(refused):
    refused(2, ("nowhere.onnx", "no such file"), "compile", "nowhere.onnx")


@pytest.mark.parametrize("name", ["nowhere.pt", "model.pt"])
def test_what_is_no_model_is_reported_before_an_output_that_exists(refused, tmp_path, name):
    """Next to model.onnx with its bundle, model.pt has a bundle of the same name."""
    (tmp_path / "model.pt").write_text("no model")
    (tmp_path / "model.bundle").mkdir()
    (tmp_path / "model.bundle" / "file.txt").touch()
    words = {"nowhere.pt": "no such file", "model.pt": "torch.onnx.export"}[name]
    assert "U030" not in refused(2, (name, words), "compile", name, "-o", "model.bundle")


def test_wrong_sizes_are_reported_before_an_output_that_exists(refused, model_file, compiled):
    shutil.copytree(compiled, model_file.with_suffix(".bundle"))
    refused(2, ("M022", "'bach'", "did you mean 'batch'?"), "compile", model_file, "--shape", "bach=4")


def test_a_folder_is_not_a_model(refused, tmp_path):
    (tmp_path / "folder").mkdir()
    refused(2, ("folder", "cannot be read", "directory"), "compile", "folder")


def test_the_working_folder_is_not_a_model(refused):
    refused(2, ("cannot be read",), "compile", ".")


def test_a_folder_with_weights_but_no_model_is_refused_with_the_command_that_exports_them(refused, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "model-00001-of-00002.safetensors").touch()
    expected = "optimum-cli export onnx --model tiny tiny-onnx"
    for command in ("compile", "plan"):
        refused(2, ("error[M003] tiny: it is a folder of weights, without an ONNX model", expected), command, "tiny")


@pytest.mark.parametrize(
    "names",
    [
        ("encoder_model.onnx", "decoder_model.onnx", "decoder_model_merged.onnx"),
        ("model_quantized.onnx", "model_q4.onnx"),
        ("model.onnx", "encoder_model.onnx"),
        ("onnx/text_model.onnx", "onnx/vision_model.onnx"),
    ],
)
def test_a_folder_with_several_models_is_refused_with_all_of_them(refused, tmp_path, names):
    for name in names:
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / name).touch()
    expected = ("error[M003] hub: it is a folder with several models: ", *map(repr, names), "onnxplace compile hub/")
    refused(2, expected, "compile", "hub")


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (("model.onnx",), "model.onnx"),
        (("encoder.onnx",), "encoder.onnx"),
        (("onnx/model.onnx",), "onnx/model.onnx"),
        (("onnx/model.onnx", "onnx/model_fp16.onnx", "onnx/model_quantized.onnx"), "onnx/model.onnx"),
        (("model.onnx", "onnx/model.onnx"), "model.onnx"),
    ],
)
def test_the_model_of_a_folder_is_taken_and_named(run_cli, tmp_path, model_file, names, chosen):
    for name in names:
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / name).write_bytes(model_file.read_bytes())
    options = ("--shape", "batch=1", "--pipeline", FAST_PIPELINE, "--no-trial", "--devices", "cpu:0")
    result = run_cli("compile", tmp_path / "hub", *options, "-v")
    assert result.code == 0, result.err
    assert f"note[M003] {tmp_path / 'hub'}: its model {chosen!r} is taken" in result.err
    assert all(name in result.err for name in names)
    assert (tmp_path / "hub" / chosen).with_suffix(".bundle").is_dir()


def test_hints_name_the_command_that_takes_a_path(refused, model_file, bundle_copy, tmp_path):
    (tmp_path / "graph.json").write_text("{}")
    np.save(tmp_path / "x.npy", np.zeros(3))
    refused(2, ("is a folder", "it is a bundle", f"onnxplace run {bundle_copy}"), "compile", bundle_copy)
    refused(2, ("folder", "it is a bundle"), "place", bundle_copy)
    refused(2, ("not a cost graph", f"onnxplace compile {model_file}"), "place", model_file)
    refused(2, ("cost graph", "onnxplace place graph.json"), "compile", "graph.json")
    (tmp_path / "graph.graphml").write_text("<graphml/>")
    refused(2, ("cost graph", "onnxplace place graph.graphml"), "compile", "graph.graphml")
    (tmp_path / "empty.onnx").touch()
    assert "onnxplace place" not in refused(2, ("not a cost graph",), "place", "graph.json")
    assert "onnxplace compile" not in refused(2, ("not an ONNX file",), "compile", "empty.onnx")
    (tmp_path / "empty.onnx").unlink()
    refused(2, ("not an ONNX file", "--inputs"), "compile", "x.npy")
    for command in ("run", "verify", "bench"):
        refused(2, ("not a bundle", f"onnxplace compile {model_file}"), command, model_file)
        refused(2, ("not a bundle", f"name its folder: {bundle_copy}"), command, bundle_copy / "manifest.json")
        refused(2, ("not a bundle", f"name a path in it: {model_file} or {bundle_copy}"), command, tmp_path)


def test_a_single_array_is_not_a_file_of_inputs(refused, bundle_copy, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((4, 64), "f4"))
    expected_words = refused(2, ("x.npy", "without a name", "numpy.savez"), "run", bundle_copy, "--inputs", "x.npy")
    assert "ndarray" not in expected_words


@pytest.mark.parametrize(
    ("data", "expected_words"),
    [
        (b"", "it is empty"),
        (b"\x08\xf0\xff", "binary"),
        (b'{"left": ', "invalid JSON at line 1, column 10"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"left": "cpu:0", "left": "cpu:1"}', "'left' is given twice"),
        (None, "folder"),
    ],
    ids=["empty", "binary", "cut", "deep", "twice", "folder"],
)
def test_malformed_json_is_refused_without_exception_texts(refused, model_file, tmp_path, data, expected_words):
    path = tmp_path / "map.json"
    path.mkdir() if data is None else path.write_bytes(data)
    text = refused(2, ("map.json", expected_words), "compile", model_file, *SHAPE, "--device-map", path)
    assert not re.search(r"Errno|codec|Error:|Traceback", text)


@pytest.mark.parametrize(
    "data",
    [
        b"hello world, this is no model\n" * 5,
        b"\x89PNG\r\n\x1a\n" + bytes(50),
        bytes(100),
        b"PK\x03\x04" + bytes(50),
        b"",
    ],
    ids=["text", "image", "zeros", "zip", "empty"],
)
def test_a_file_that_is_not_onnx_is_refused(refused, tmp_path, data):
    (tmp_path / "thing.onnx").write_bytes(data)
    refused(2, ("thing.onnx", "not an ONNX file"), "compile", "thing.onnx")


@pytest.mark.parametrize("length", [5, 100, 0.5, -1])
def test_a_truncated_file_is_named_with_its_size(refused, model_file, length, fast_pipeline):
    data = model_file.read_bytes()
    data = data[: length if isinstance(length, int) else int(len(data) * length)]
    model_file.write_bytes(data)
    expected_words = ("model.onnx", "truncated", f"{len(data)} bytes", "again")
    refused(2, expected_words, "compile", model_file, *SHAPE, "--pipeline", fast_pipeline)


@pytest.fixture
def external_model(tmp_path: Path, branches_bytes: bytes) -> Path:
    """The model with its weights in weights.data, 16 KiB each."""
    model = onnx.ModelProto.FromString(branches_bytes)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights.data", size_threshold=0)
    return tmp_path / "model.onnx"


def edit_external_data(path: Path, **entries: str) -> None:
    """Change the location of the bytes of the first weight."""
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        entry.value = entries.get(entry.key, entry.value)
    store(model, path)


def test_external_data_that_is_missing_is_named_with_its_weight(refused, external_model):
    (external_model.parent / "weights.data").unlink()
    refused(2, ("w_left", "weights.data", "missing", "next to the model"), "compile", external_model, *SHAPE)


def test_external_data_that_is_too_short_is_named_with_both_sizes(refused, external_model):
    file = external_model.parent / "weights.data"
    file.write_bytes(file.read_bytes()[:20000])
    refused(2, ("w_right", "too short", "16384", "20000", "copy it again"), "compile", external_model, *SHAPE)


@pytest.mark.parametrize("location", ["../secret.data", "/etc/passwd"])
def test_external_data_outside_the_folder_is_refused(refused, external_model, location):
    edit_external_data(external_model, location=location)
    refused(2, ("w_left", "outside the model's folder", location), "compile", external_model, *SHAPE)


def test_external_data_behind_a_link_that_leads_outside_is_refused(refused, external_model, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "weights.data"
    inside = external_model.parent / "weights.data"
    shutil.move(inside, outside)
    inside.symlink_to(outside)
    refused(2, ("w_left", "a link that leads outside the model's folder", "cp -L"), "compile", external_model, *SHAPE)


@pytest.mark.parametrize("kind", ["blob", "blobs", "file"])
def test_links_that_leave_the_blobs_of_a_repository_are_refused(refused, external_model, tmp_path, kind):
    """Hugging Face's cache: a blob that is a link, a folder of blobs that is one, and a link to another file."""
    model, blob = make_snapshot(external_model, tmp_path / "hub")
    link = {"blob": blob, "blobs": blob.parent, "file": model.parent / "weights.data"}[kind]
    target = tmp_path / "elsewhere"
    shutil.copytree(link, target) if link.is_dir() else shutil.copy(link, target)
    shutil.rmtree(link) if link.is_dir() else link.unlink()
    link.symlink_to(target)
    refused(2, ("w_left", "is a link that leads outside", "cp -L"), "compile", model, *SHAPE)


@pytest.mark.parametrize(
    "entries",
    [
        {"offset": "99999999"},
        {"length": "5"},
        pytest.param(
            {"offset": "-5"},
        ),
        pytest.param(
            {"offset": "x"},
        ),
        pytest.param(
            {"length": "x"},
        ),
    ],
    ids=str,
)
def test_external_data_with_an_impossible_range_is_refused(refused, external_model, fast_pipeline, entries):
    edit_external_data(external_model, **entries)
    refused(2, ("w_left", "weights.data"), "compile", external_model, *SHAPE, "--pipeline", fast_pipeline)
