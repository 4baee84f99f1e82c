"""Bad input gets one clear line, the right exit code, and leaves nothing behind."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

import onnxplace
from onnxplace.bundle import staging
from onnxplace.cli import main
from onnxplace.machine import cuda_problem

pytestmark = pytest.mark.usefixtures("no_gpus")

SHAPE = ("--shape", "batch=4")
SCRIPT = """
import os, resource, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us in the background ignores it
if "LIMIT" in os.environ:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["LIMIT"]),) * 2)
from onnxplace.cli import main
sys.exit(main(sys.argv[1:]))
"""


def contents(folder: Path) -> dict[str, object]:
    """Return everything below a folder: links with their targets, files with their bytes, folders."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, which must be empty again at the end."""
    folder = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def refused(run_cli, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command that must be refused: exit code, one line and perhaps one hint, no trace of it on disk."""
    monkeypatch.chdir(tmp_path)

    def check(code: int, said: tuple[str, ...], *arguments: object) -> str:
        before = contents(tmp_path)
        ran = run_cli(*arguments)
        assert ran.code == code, ran
        assert ran.out == ""
        message, *rest = ran.err.splitlines()
        assert re.match(r"error\[[A-Z]\d{3}\] \S", message)
        assert [line[:8] for line in rest] in ([], ["  hint: "])
        for words in said:
            assert words in ran.err
        assert contents(tmp_path) == before
        assert not any(scratch.iterdir())
        return ran.err

    return check


@pytest.fixture
def unusable_gpu() -> None:
    if cuda_problem(0) is None:
        pytest.skip("ONNX Runtime can use a GPU here")


def parsed(text: str, opset: int = 17) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {text}')


def store(model: onnx.ModelProto, path: Path) -> Path:
    """Write a model as it is; `onnx.save` would look into it."""
    path.write_bytes(model.SerializeToString())
    return path


# ---------------------------------------------------------------------------------------------- the file


def test_a_missing_model_is_named(refused):
    refused(2, ("nowhere.onnx", "no such file"), "compile", "nowhere.onnx")


def test_a_folder_is_not_a_model(refused, tmp_path):
    (tmp_path / "folder").mkdir()
    refused(2, ("folder", "cannot be read", "directory"), "compile", "folder")


def test_the_working_folder_is_not_a_model(refused):
    refused(2, ("cannot be read",), "compile", ".")


def test_a_folder_with_a_model_in_it_gets_that_model(refused, model_file):
    refused(2, ("folder", "model.onnx"), "compile", model_file.parent)


def test_each_kind_of_path_is_sent_to_the_command_that_takes_it(refused, model_file, bundle_copy, tmp_path):
    (tmp_path / "graph.json").write_text("{}")
    np.save(tmp_path / "x.npy", np.zeros(3))
    refused(2, ("is a folder", "it is a bundle", f"onnxplace run {bundle_copy}"), "compile", bundle_copy)
    refused(2, ("folder", "it is a bundle"), "place", bundle_copy)
    refused(2, ("not a cost graph", f"onnxplace compile {model_file}"), "place", model_file)
    refused(2, ("cost graph", "onnxplace place graph.json"), "compile", "graph.json")
    (tmp_path / "empty.onnx").touch()
    assert "onnxplace place" not in refused(2, ("not a cost graph",), "place", "graph.json")
    assert "onnxplace compile" not in refused(2, ("not an ONNX file",), "compile", "empty.onnx")
    (tmp_path / "empty.onnx").unlink()
    refused(2, ("not an ONNX file", "--inputs"), "compile", "x.npy")
    for command in ("run", "verify", "bench"):
        refused(2, ("not a bundle", f"onnxplace compile {model_file}"), command, model_file)
        refused(2, ("not a bundle", f"name the folder it is in: {bundle_copy}"), command, bundle_copy / "manifest.json")
        refused(2, ("not a bundle", f"name what is in it: {model_file} or {bundle_copy}"), command, tmp_path)


def test_a_single_array_is_not_a_file_of_inputs(refused, bundle_copy, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((4, 64), "f4"))
    said = refused(2, ("x.npy", "without a name", "numpy.savez"), "run", bundle_copy, "--inputs", "x.npy")
    assert "ndarray" not in said


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is empty"),
        (b"\x08\xf0\xff", "binary"),
        (b'{"left": ', "no JSON at line 1, column 10"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"left": "cpu:0", "left": "cpu:1"}', "'left' is given twice"),
        (None, "folder"),
    ],
    ids=["empty", "binary", "cut", "deep", "twice", "folder"],
)
def test_json_that_is_none_is_refused_without_words_of_python(refused, model_file, tmp_path, data, said):
    path = tmp_path / "map.json"
    path.mkdir() if data is None else path.write_bytes(data)
    text = refused(2, ("map.json", said), "compile", model_file, *SHAPE, "--device-map", path)
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
def test_what_is_not_onnx_is_called_so(refused, tmp_path, data):
    (tmp_path / "thing.onnx").write_bytes(data)
    refused(2, ("thing.onnx", "not an ONNX file"), "compile", "thing.onnx")


@pytest.mark.parametrize("kept", [5, 100, 0.5, -1])
def test_a_truncated_file_is_called_so_with_its_size(refused, model_file, kept, fast_pipeline):
    data = model_file.read_bytes()
    data = data[: kept if isinstance(kept, int) else int(len(data) * kept)]
    model_file.write_bytes(data)
    said = ("model.onnx", "truncated", f"{len(data)} bytes", "again")
    refused(2, said, "compile", model_file, *SHAPE, "--pipeline", fast_pipeline)


# ---------------------------------------------------------------------------------------------- external data


@pytest.fixture
def external_model(tmp_path: Path, branches_bytes: bytes) -> Path:
    """The model with its weights in weights.data, 16 KiB each."""
    model = onnx.ModelProto.FromString(branches_bytes)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights.data", size_threshold=0)
    return tmp_path / "model.onnx"


def refer(path: Path, **entries: str) -> None:
    """Alter where the first weight says its bytes are."""
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        entry.value = entries.get(entry.key, entry.value)
    store(model, path)


def test_external_data_that_is_missing_is_named_with_its_weight(refused, external_model):
    (external_model.parent / "weights.data").unlink()
    refused(2, ("w_left", "weights.data", "missing", "beside the model"), "compile", external_model, *SHAPE)


def test_external_data_that_is_too_short_says_what_it_needs_and_has(refused, external_model):
    file = external_model.parent / "weights.data"
    file.write_bytes(file.read_bytes()[:20000])
    refused(2, ("w_right", "too short", "16384", "20000", "copy it again"), "compile", external_model, *SHAPE)


@pytest.mark.parametrize("location", ["../secret.data", "/etc/passwd"])
def test_external_data_outside_the_folder_is_refused(refused, external_model, location):
    refer(external_model, location=location)
    refused(2, ("w_left", "outside the model's folder", location), "compile", external_model, *SHAPE)


def test_external_data_behind_a_link_that_leads_outside_is_refused(refused, external_model, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "weights.data"
    inside = external_model.parent / "weights.data"
    shutil.move(inside, outside)
    inside.symlink_to(outside)
    refused(2, ("w_left", "outside the model's folder"), "compile", external_model, *SHAPE)


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
    refer(external_model, **entries)
    refused(2, ("w_left", "weights.data"), "compile", external_model, *SHAPE, "--pipeline", fast_pipeline)


# ---------------------------------------------------------------------------------------------- the graph

# Estimating must refuse what measuring refuses: the bundle would not run.
BOTH_PIPELINES = pytest.mark.parametrize(
    "pipeline", ["optimize,profile,m-etf,split,emit", "optimize,profile{estimate=true},m-etf,split,emit"]
)


@BOTH_PIPELINES
def test_an_operator_that_onnx_runtime_does_not_know_is_named_with_its_node(refused, tmp_path, pipeline):
    model = parsed("(float[4] x) => (float[4] y) { [fine] z = Relu(x) [odd_one] y = Frobnicate(z) }")
    store(model, tmp_path / "m.onnx")
    refused(2, ("odd_one", "Frobnicate"), "compile", "m.onnx", "--pipeline", pipeline)


def test_an_operator_of_an_unknown_domain_is_named_with_its_domain(refused, tmp_path, fast_pipeline):
    store(parsed("(float[4] x) => (float[4] y) { [odd_one] y = acme.Bar(x) }"), tmp_path / "m.onnx")
    refused(2, ("odd_one", "acme.Bar"), "compile", "m.onnx", "--pipeline", fast_pipeline)


def test_a_misspelt_operator_gets_the_nearest_one(refused, tmp_path):
    store(parsed("(float[4] x) => (float[4] y) { [odd_one] y = Sigmoidd(x) }"), tmp_path / "m.onnx")
    refused(2, ("Sigmoidd", "did you mean 'Sigmoid'?"), "compile", "m.onnx")


def test_an_operator_that_is_like_no_other_does_not_list_them_all(refused, tmp_path):
    store(parsed("(float[4] x) => (float[4] y) { [odd_one] y = Qqqqqqqq(x) }"), tmp_path / "m.onnx")
    assert len(refused(2, ("Qqqqqqqq",), "compile", "m.onnx")) < 500


@BOTH_PIPELINES
def test_an_opset_that_onnx_runtime_does_not_know_is_named(refused, tmp_path, pipeline):
    store(parsed("(float[4] x) => (float[4] y) { y = Relu(x) }", opset=99), tmp_path / "m.onnx")
    refused(2, ("opset 99", "older opset"), "compile", "m.onnx", "--pipeline", pipeline)


def test_a_cycle_is_shown_node_by_node(refused, tmp_path):
    nodes = "[first] a = Add(x, c) [second] b = Relu(a) [third] c = Tanh(b) [last] y = Relu(c)"
    store(parsed(f"(float[4] x) => (float[4] y) {{ {nodes} }}"), tmp_path / "m.onnx")
    said = refused(2, ("m.onnx", "cycle", "first", "second", "third"), "compile", "m.onnx")
    assert "last" not in said


def test_a_value_that_nobody_makes_is_named_with_its_reader(refused, tmp_path):
    store(parsed("(float[4] x) => (float[4] y) { [sum] y = Add(x, ghost) }"), tmp_path / "m.onnx")
    refused(2, ("sum", "ghost"), "compile", "m.onnx")


def test_an_output_that_nobody_makes_is_named(refused, tmp_path):
    store(parsed("(float[4] x) => (float[4] ghost) { y = Relu(x) }"), tmp_path / "m.onnx")
    refused(2, ("output", "ghost"), "compile", "m.onnx")


def test_a_value_that_is_made_twice_is_named_with_its_second_maker(refused, tmp_path):
    nodes = "[one] y = Relu(x) [two] y = Tanh(x)"
    store(parsed(f"(float[4] x) => (float[4] y) {{ {nodes} }}"), tmp_path / "m.onnx")
    refused(2, ("two", "'y'", "twice"), "compile", "m.onnx")


@pytest.mark.parametrize(("index", "size", "words"), [(4, 4, ("sparse", "no sense")), (0, 1 << 30, ("dense", "bytes"))])
def test_sparse_weights_that_cannot_be_made_dense_are_refused_by_name(refused, tmp_path, index, size, words):
    model = parsed(f"(float[{size}] x) => (float[{size}] y) {{ y = Add(x, thin) }}")
    values = helper.make_tensor("thin", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("thin_indices", TensorProto.INT64, [1], [index])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [size]))
    store(model, tmp_path / "m.onnx")
    refused(2, ("thin", *words), "compile", "m.onnx")


def test_a_model_without_outputs_is_refused(refused, tmp_path, fast_pipeline):
    model = parsed("(float[4] x) => (float[4] y) { y = Relu(x) }")
    del model.graph.output[:]
    store(model, tmp_path / "m.onnx")
    refused(2, ("m.onnx", "output"), "compile", "m.onnx", "--pipeline", fast_pipeline)


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(
            TensorProto(data_type=99, dims=[4], raw_data=bytes(16)),
            id="unknown-type",
        ),
        pytest.param(
            TensorProto(data_type=0, dims=[4], raw_data=bytes(16)),
            id="no-type",
        ),
        pytest.param(
            TensorProto(data_type=1, dims=[-4]),
            id="negative",
        ),
        pytest.param(
            TensorProto(data_type=1, dims=[4], raw_data=b"1"),
            id="short",
        ),
    ],
)
def test_a_weight_that_contradicts_itself_is_named(refused, tmp_path, fast_pipeline, weight):
    model = parsed("(float[4] x) => (float[4] y) { y = Add(x, odd_weight) }")
    model.graph.initializer.append(weight)
    model.graph.initializer[0].name = "odd_weight"
    store(model, tmp_path / "m.onnx")
    refused(2, ("odd_weight",), "compile", "m.onnx", "--pipeline", fast_pipeline)


# ---------------------------------------------------------------------------------------------- dimensions


def test_unbound_dimensions_are_listed_with_an_example_that_works(refused, run_cli, tmp_path, fast_pipeline):
    store(
        parsed("(float[batch, seq, 4] x, float[seq] z) => (float[batch, seq, 4] y) { y = Relu(x) }"),
        tmp_path / "m.onnx",
    )
    said = refused(2, ("batch, seq", "--inputs"), "compile", "m.onnx", "--pipeline", fast_pipeline)
    example = re.search(r"--shape (\S+?),? ", said)[1]
    assert run_cli("compile", "m.onnx", "--shape", example, "--pipeline", fast_pipeline).code == 0


def test_an_unnamed_dimension_can_be_bound_by_the_name_the_message_gives(refused, run_cli, tmp_path, fast_pipeline):
    store(parsed("(float[?, 4] x) => (float[?, 4] y) { y = Relu(x) }"), tmp_path / "m.onnx")
    refused(2, ("x.0", "--shape x.0=1"), "compile", "m.onnx", "--pipeline", fast_pipeline)
    assert run_cli("compile", "m.onnx", "--shape", "x.0=1", "--pipeline", fast_pipeline).code == 0


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("batsh=4", ("batsh", "did you mean 'batch'?")),
        ("batch", ("'batch'", "batch=8")),
        ("batch=many", ("batch=many", "batch=8")),
        ("batch=-1", ("batch=-1", "batch=8")),
        ("=4", ("=4", "batch=8")),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(refused, model_file, shape, said):
    refused(2, ("--shape", *said), "compile", model_file, "--shape", shape)


def test_a_shape_for_a_model_without_symbols_is_refused(refused, tmp_path):
    store(parsed("(float[4] x) => (float[4] y) { y = Relu(x) }"), tmp_path / "m.onnx")
    refused(2, ("batch", "fixed"), "compile", "m.onnx", "--shape", "batch=4")


@pytest.mark.parametrize("command", ["run", "verify", "bench"])
def test_a_shape_with_an_unknown_symbol_is_refused_by_a_bundle_too(refused, bundle_copy, command):
    refused(2, ("batsh", "did you mean 'batch'?"), command, bundle_copy, "--shape", "batsh=4")


# ---------------------------------------------------------------------------------------------- feeds

FEEDS = pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"xx": np.zeros((4, 64), "f4")}, ("'xx'", "did you mean 'x'?")),
        ({"x": np.zeros((4, 65), "f4")}, ("'x'", "[4, 65]", "[batch, 64]", "64")),
        ({"x": np.zeros(64, "f4")}, ("'x'", "[64]", "[batch, 64]")),
        ({"x": np.zeros((4, 64), "f8")}, ("'x'", "float64", "float32", "astype")),
    ],
    ids=["name", "shape", "rank", "dtype"],
)


@FEEDS
@pytest.mark.parametrize("command", ["compile", "run", "verify", "bench"])
def test_feeds_that_do_not_fit_are_refused(refused, model_file, bundle_copy, command, arrays, said):
    np.savez(model_file.parent / "feeds.npz", **arrays)
    refused(2, said, command, model_file if command == "compile" else bundle_copy, "--inputs", "feeds.npz")


def test_a_feed_that_is_missing_is_named_with_its_type_and_shape(refused, bundle_copy, tmp_path):
    np.savez(tmp_path / "feeds.npz")
    refused(2, ("'x'", "tensor(float)", "[batch, 64]"), "run", bundle_copy, "--inputs", "feeds.npz")


def test_compiling_with_some_inputs_names_those_that_are_missing(refused, tmp_path):
    store(parsed("(float[4] x, float[4] z) => (float[4] y) { y = Add(x, z) }"), tmp_path / "m.onnx")
    np.savez(tmp_path / "feeds.npz", x=np.zeros(4, "f4"))
    refused(2, ("'z'", "tensor(float)", "[4]"), "compile", "m.onnx", "--inputs", "feeds.npz")


def test_inputs_that_disagree_about_a_dimension_are_refused(refused, tmp_path):
    store(parsed("(float[n] x, float[n] z) => (float[n] y) { y = Add(x, z) }"), tmp_path / "m.onnx")
    np.savez(tmp_path / "feeds.npz", x=np.zeros(4, "f4"), z=np.zeros(5, "f4"))
    refused(2, ("'n'", "'z'", "x[0]", "5", "4"), "compile", "m.onnx", "--inputs", "feeds.npz")


def not_an_npz(kind: str, path: Path) -> None:
    if kind == "array":
        np.save(path.with_suffix(".npy"), np.zeros(3))
        path.with_suffix(".npy").rename(path)
    elif kind == "objects":
        np.savez(path, x=np.array([{}], dtype=object))
    elif kind == "folder":
        path.mkdir()
    elif kind in ("truncated", "altered"):
        np.savez(path, x=np.zeros((4, 64), "f4"))
        data = bytearray(path.read_bytes())
        data[300] ^= 255
        path.write_bytes(bytes(data) if kind == "altered" else bytes(data[:-40]))
    else:
        path.write_bytes(b"x" if kind == "text" else b"")


@pytest.mark.parametrize(
    "kind",
    [
        "text",
        "array",
        "objects",
        "folder",
        pytest.param(
            "truncated",
        ),
        "altered",
        pytest.param(
            "empty",
        ),
    ],
)
def test_inputs_that_are_not_an_npz_file_are_refused(refused, bundle_copy, tmp_path, kind):
    not_an_npz(kind, tmp_path / "feeds.npz")
    refused(2, ("feeds.npz", ".npz", "numpy.savez"), "run", bundle_copy, "--inputs", "feeds.npz")


def test_inputs_that_are_missing_are_named(refused, model_file, bundle_copy):
    refused(2, ("nowhere.npz", "no such file"), "run", bundle_copy, "--inputs", "nowhere.npz")
    refused(2, ("nowhere.npz", "no such file"), "compile", model_file, "--inputs", "nowhere.npz")


def test_inputs_that_a_kernel_refuses_are_the_users_fault(refused, tmp_path):
    store(
        parsed("(int64[2] rows, float[2, 2] x) => (float[2, 2] y) { [pick] y = Gather(x, rows) }"), tmp_path / "m.onnx"
    )
    np.savez(tmp_path / "feeds.npz", rows=np.array([0, 5]), x=np.zeros((2, 2), "f4"))
    said = refused(2, ("pick", "out of data bounds"), "compile", "m.onnx", "--inputs", "feeds.npz")
    assert "defect of the pass" not in said


def test_a_kernel_that_fails_is_reported_in_one_line_and_a_hint(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    store(parsed("(int64[2] rows, float[2, 2] x) => (float[2, 2] y) { y = Gather(x, rows) }"), tmp_path / "m.onnx")
    np.savez(tmp_path / "feeds.npz", rows=np.array([0, 5]), x=np.zeros((2, 2), "f4"))
    assert main(["compile", "m.onnx", "--inputs", "feeds.npz"]) == 2
    message, hint = capfd.readouterr().err.splitlines()
    assert message.startswith("error[")
    assert hint.startswith("  hint: ")


# ---------------------------------------------------------------------------------------------- names and text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--devices", "cpus:0"), ("--devices", "'cpus:0'", "did you mean 'cpu:0'?")),
        (("--devices", "cpu"), ("'cpu'", "index", "cpu:0")),
        (("--devices", "cpu:zero"), ("'cpu:zero'", "cpu:0")),
        (("--devices", ","), ("empty", "cpu:0")),
        (("--devices", "cpu:0,cpu:1,cpu:0"), ("twice", "cpu:0")),
        (("--placer", "m-eft"), ("'m-eft'", "did you mean 'm-etf'?", "onnxplace passes")),
        (("--placer", "M_ETF"), ("unknown placer", "did you mean 'm-etf'?")),
        (("--placer", "optimise"), ("unknown placer", "known: single, m-topo")),
        (("--placer", "fuse"), ("'fuse'", "not a placer", "m-etf")),
        (("--placer", "refine"), ("not a placer", "starts from a placement", "m-etf,refine", "--placer auto")),
        (("--placer", "m-etf,refine"), ("not a placer but a pipeline", "--pipeline")),
        (("--devices", "gpu:1"), ("'gpu:1'", "did you mean 'cuda:1'?")),
        (("--max-memory", "cpu:0=1GiB,cpu:0=2GiB"), ("--max-memory", "cpu:0", "twice")),
        (("--max-memory", "gpu:0=1GiB"), ("'gpu:0'", "known: cpu:0, cpu:1")),
        (("--shape", "batch=1,batch=2"), ("--shape", "'batch'", "twice")),
        (("--pipeline", "optimise,profile"), ("'optimise'", "did you mean 'optimize'?", "onnxplace passes")),
        (("--pipeline", "profile{repeats=3}"), ("'profile'", "'repeats'", "did you mean 'repeat'?")),
        (("--pipeline", "fuse{repeat=3}"), ("'fuse'", "'repeat'")),
        (("--pipeline", "profile{repeat=three}"), ("'profile'", "'repeat'", "'three'", "integer")),
        (("--pipeline", "coplace{join=often}"), ("'join'", "'often'", "'always'")),
        (("--pipeline", "profile{repeat=3"), ("character 17", "the end")),
        (("--pipeline", "profile,,emit"), ("character 9", "','")),
        (("--pipeline", ""), ("character 1", "the end")),
        (("--pipeline", "optimize,split,emit"), ("'split'", "Profile", "put profile before it")),
        (("--pipeline", "profile{estimate=true}"), ("writes no bundle", "split,emit")),
        (("--pipeline", "profile", "--placer", "single"), ("--placer", "--pipeline")),
        (("--pipeline", "profile", "--colocate", "x"), ("--pipeline", "--colocate")),
        (("--target", "t.toml", "--devices", "cpu:0"), ("--devices", "--target")),
        (("--max-memory", "lots"), ("'lots'", "16GiB")),
        (("--max-memory", "cpu:7=1GiB"), ("'cpu:7'", "--max-memory", "did you mean 'cpu:1'?")),
        (("--colocate", "nothing.*"), ("--colocate", "nothing.*", "'left'")),
        (("--colocate", "("), ("--colocate", "regular expression")),
    ],
    ids=" ".join,
)
def test_an_option_that_names_nothing_is_refused_with_what_is_near(refused, model_file, options, said):
    (model_file.parent / "t.toml").write_text('[[devices]]\nid = "cpu:0"\nmemory_bytes = 1000000\n')
    refused(2, said, "compile", model_file, *SHAPE, *options)


def test_a_bad_escape_in_a_pipeline_is_pointed_at(refused, model_file):
    refused(2, ("character",), "compile", model_file, *SHAPE, "--pipeline", r'profile{costs="\x"}')


def test_an_option_given_twice_is_refused(refused, model_file):
    pipeline = "profile{repeat=3,repeat=4},m-etf,split,emit"
    refused(2, ("'repeat'", "twice"), "compile", model_file, *SHAPE, "--pipeline", pipeline)


def test_measuring_no_run_is_refused(refused, model_file):
    pipeline = "optimize,profile{repeat=0},m-etf,split,emit"
    refused(2, ("'repeat'", "'0'"), "compile", model_file, *SHAPE, "--pipeline", pipeline)


def test_one_device_under_two_spellings_is_a_duplicate(refused, model_file):
    refused(2, ("twice",), "compile", model_file, *SHAPE, "--devices", "cpu:0,cpu:00")


@pytest.mark.parametrize("command", ["compile", "run"])
def test_a_negative_seed_is_refused(refused, model_file, bundle_copy, command):
    refused(
        2, ("seed", "-1"), command, *((model_file, *SHAPE) if command == "compile" else (bundle_copy,)), "--seed", "-1"
    )


def test_an_unknown_runtime_gets_the_nearest_one(refused, bundle_copy):
    said = ("'onnxrutime'", "did you mean 'onnxruntime'?", "onnxplace runtimes")
    refused(2, said, "run", bundle_copy, "--runtime", "onnxrutime")


@pytest.mark.parametrize(
    ("command", "name", "near"), [("passes", "m-eft", "m-etf"), ("runtimes", "simulate", "simulated")]
)
def test_asking_about_an_unknown_name_gets_the_nearest_one(refused, command, name, near):
    refused(2, (f"'{name}'", f"did you mean '{near}'?"), command, name)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compil",), "compile"),
        (("compile", "m.onnx", "--devces", "cpu:0"), "--devices"),
        (("run", "bundle", "--repeat", "0"), "--repeat"),
        (("run", "bundle", "--seed", "x"), "--seed"),
        (("compile",), "MODEL"),
    ],
)
def test_bad_usage_exits_with_two_and_names_the_option(run_cli, arguments, said):
    ran = run_cli(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


@pytest.mark.usefixtures("unusable_gpu")
def test_a_gpu_that_is_not_here_is_refused_with_how_to_get_it(refused, model_file):
    refused(2, ("cuda:0", "pip install 'onnxplace[gpu]'"), "compile", model_file, *SHAPE, "--devices", "cuda:0")


@pytest.mark.usefixtures("unusable_gpu")
@pytest.mark.parametrize("command", ["run", "verify", "bench"])
def test_a_bundle_for_a_gpu_that_is_not_here_is_refused_with_how_to_get_it(refused, bundle_copy, command):
    manifest = bundle_copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace("cpu:1", "cuda:0"))
    refused(2, ("cuda:0", "pip install 'onnxplace[gpu]'"), command, bundle_copy)


# ---------------------------------------------------------------------------------------------- files of options


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"none_such.*": "cpu:0"}', ("map.json", "none_such.*", "'left'")),
        ('{"left": "cpu:7"}', ("'cpu:7'", "did you mean 'cpu:1'?")),
        ('{"left": "tpu:0"}', ("'tpu:0'", "cpu:0")),
        ('{"(": "cpu:0"}', ("map.json", "regular expression")),
        ('{"left": 3}', ("map.json", "not a device map", "cuda:0")),
        ('["left"]', ("map.json", "not a device map", "cuda:0")),
        ('{"left":', ("map.json", "not a device map")),
    ],
)
def test_a_device_map_that_makes_no_sense_is_refused(refused, model_file, text, said):
    (model_file.parent / "map.json").write_text(text)
    refused(2, said, "compile", model_file, *SHAPE, "--device-map", "map.json")


def test_a_device_map_that_is_missing_is_named(refused, model_file):
    refused(2, ("nowhere.json", "no such file"), "compile", model_file, *SHAPE, "--device-map", "nowhere.json")


def test_colocating_what_the_device_map_separates_is_refused(refused, model_file):
    (model_file.parent / "map.json").write_text('{"left": "cpu:0", "right": "cpu:1"}')
    options = ("--device-map", "map.json", "--colocate", "left|right")
    refused(2, ("left|right", "device map", "'right'"), "compile", model_file, *SHAPE, *options)


def test_a_pattern_with_a_semicolon_stays_one_pattern(refused, model_file):
    refused(2, ("'left;right'",), "compile", model_file, *SHAPE, "--colocate", "left;right")


def test_one_device_cannot_hold_what_the_map_puts_on_two(refused, model_file):
    (model_file.parent / "map.json").write_text('{"left": "cpu:0", "right": "cpu:1"}')
    options = ("--device-map", "map.json", "--placer", "single")
    refused(3, ("cpu:0 and cpu:1", "--placer"), "compile", model_file, *SHAPE, *options)


def damaged_costs(compiled: Path, path: tuple[str, ...], value: object) -> str:
    costs = json.loads((compiled / "costs.json").read_text())
    part = costs
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return json.dumps(costs)


def cost_class(compiled: Path) -> str:
    return next(iter(json.loads((compiled / "costs.json").read_text())["nodes"]["left"]["seconds"]))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("format",), "other", ("not a cost file", "costs.json")),
        (("version",), 99, ("version", "99")),
        (("nodes",), {}, ("5 of 5 nodes", "left")),
        (("nodes", "left", "seconds"), {}, ("no seconds", "'left'")),
        (("nodes", "left", "seconds", "CLASS"), -1.0, ("'left'", "-1.0")),
        pytest.param(
            ("nodes", "left"),
            5,
            ("'left'",),
        ),
        pytest.param(
            ("nodes", "left", "unit"),
            "x",
            ("'left'",),
        ),
        pytest.param(
            ("nodes", "left", "seconds"),
            [],
            ("'left'",),
        ),
        pytest.param(
            ("value_bytes",),
            [],
            ("value_bytes",),
        ),
        pytest.param(
            ("value_bytes", "a"),
            "x",
            ("value_bytes",),
        ),
        pytest.param(
            ("value_bytes", "a"),
            -5,
            ("value_bytes",),
        ),
        pytest.param(
            ("whole_seconds",),
            3,
            ("whole_seconds",),
        ),
    ],
    ids=str,
)
def test_a_cost_file_that_makes_no_sense_is_refused(refused, model_file, compiled, path, value, said):
    path = tuple(cost_class(compiled) if key == "CLASS" else key for key in path)
    (model_file.parent / "mine.json").write_text(damaged_costs(compiled, path, value))
    refused(2, ("mine.json", *said), "compile", model_file, *SHAPE, "--costs", "mine.json")


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_what_is_no_cost_file_at_all_is_refused(refused, model_file, text):
    (model_file.parent / "mine.json").write_text(text)
    refused(2, ("mine.json", "not a cost file"), "compile", model_file, *SHAPE, "--costs", "mine.json")


DEVICE = '[[devices]]\nid = "{}"\nmemory_bytes = {}\n'
LINK = '[[links]]\nsource = "{}"\ndestination = "{}"\nlatency_seconds = {}\nbytes_per_second = {}\n'
TWO = DEVICE.format("cpu:0", 10**9) + DEVICE.format("cpu:1", 10**9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = ", ("not TOML",)),
        (DEVICE.format("tpu:0", 1), ("tpu:0", "did you mean 'cpu:0'?")),
        (TWO + DEVICE.format("cpu:0", 1), ("twice", "cpu:0")),
        (TWO + LINK.format("cpu:0", "cpu:2", 1.0, 1.0), ("'cpu:2'", "cpu:")),
        ("", ("empty", "cpu:0")),
        pytest.param(
            '[[devices]]\nid = "cpu:0"\n',
            ("memory_bytes",),
        ),
        pytest.param(
            'link_model = "odd"\n' + TWO,
            ("link_model", "'duplex'"),
        ),
        pytest.param(
            "devices = 3",
            ("devices",),
        ),
        pytest.param(
            TWO + "speed = 3\n",
            ("speed",),
        ),
        pytest.param(
            "[[device]]\n",
            ("'device'",),
        ),
        pytest.param(
            DEVICE.format("cpu:0", -1),
            ("memory_bytes", "-1"),
        ),
        pytest.param(
            TWO + "cores = 0\n",
            ("cores",),
        ),
        pytest.param(
            TWO + "segment_seconds = -1.0\n",
            ("segment_seconds",),
        ),
        pytest.param(
            TWO + LINK.format("cpu:0", "cpu:1", 1.0, 0.0),
            ("bytes_per_second",),
        ),
    ],
)
def test_a_target_file_that_makes_no_sense_is_refused(refused, model_file, fast_pipeline, text, said):
    (model_file.parent / "t.toml").write_text(text)
    refused(2, said, "compile", model_file, *SHAPE, "--target", "t.toml", "--pipeline", fast_pipeline)


def test_a_target_file_that_is_missing_is_named(refused, model_file):
    refused(2, ("nowhere.toml", "no such file"), "compile", model_file, *SHAPE, "--target", "nowhere.toml")


def test_a_bad_device_in_a_target_file_is_reported_with_the_file(refused, model_file):
    (model_file.parent / "t.toml").write_text(DEVICE.format("tpu:0", 1))
    assert "--devices" not in refused(2, ("t.toml",), "compile", model_file, *SHAPE, "--target", "t.toml")


# ---------------------------------------------------------------------------------------------- where it is written


def test_an_output_folder_that_exists_is_refused_before_any_work(refused, model_file, bundle_copy):
    said = refused(2, ("bundle", "exists", "--force"), "compile", model_file, "-o", bundle_copy)
    assert "batch" not in said  # the unbound dimension would be the next complaint


def test_force_replaces_a_bundle_and_leaves_nothing_of_the_old_one(run_cli, model_file, bundle_copy, fast_pipeline):
    (bundle_copy / "segments" / "old-000.onnx").write_bytes(b"old")
    edit(bundle_copy, lambda m: m["files"].update({"segments/old-000.onnx": {"sha256": "", "bytes": 3}}))
    pipeline = fast_pipeline.replace("m-etf", "single")
    before = set(model_file.parent.iterdir())
    ran = run_cli("compile", model_file, *SHAPE, "-o", bundle_copy, "--pipeline", pipeline, "--force")
    assert ran.code == 0
    assert set(model_file.parent.iterdir()) == before
    assert not (bundle_copy / "segments" / "old-000.onnx").exists()
    assert onnxplace.load(bundle_copy, "all").manifest.placer == "single"


def test_force_replaces_an_empty_folder(run_cli, model_file, fast_pipeline):
    empty = model_file.parent / "empty"
    empty.mkdir()
    assert run_cli("compile", model_file, *SHAPE, "-o", empty, "--pipeline", fast_pipeline, "--force").code == 0
    assert onnxplace.load(empty).manifest.placer == "m-etf"


@pytest.mark.parametrize("kind", ["folder", "file", "model", "link", "here"])
def test_force_never_replaces_what_is_not_a_bundle(refused, model_file, fast_pipeline, kind):
    folder = model_file.parent
    (folder / "precious").mkdir()
    (folder / "precious" / "thesis.tex").write_text("years of work")
    (folder / "letter").write_text("dear")
    (folder / "link").symlink_to("precious")
    output = {"folder": "precious", "file": "letter", "model": "model.onnx", "link": "link", "here": "."}[kind]
    options = ("-o", output, "--pipeline", fast_pipeline, "--force")
    refused(2, (output, "not a bundle", "--force"), "compile", model_file, *SHAPE, *options)


def test_a_folder_that_cannot_be_made_is_named(refused, model_file, fast_pipeline):
    options = ("-o", "model.onnx/bundle", "--pipeline", fast_pipeline)
    refused(2, ("model.onnx", "cannot write there"), "compile", model_file, *SHAPE, *options)


def test_a_link_to_a_bundle_is_refused_or_followed_before_any_work(refused, model_file, bundle_copy, fast_pipeline):
    (model_file.parent / "link").symlink_to("bundle")
    options = ("-o", "link", "--pipeline", fast_pipeline, "--force")
    refused(2, ("link",), "compile", model_file, *SHAPE, *options)


def test_a_link_that_leads_nowhere_is_refused_as_output(refused, model_file, fast_pipeline):
    (model_file.parent / "link").symlink_to("nowhere")
    refused(2, ("link",), "compile", model_file, *SHAPE, "-o", "link", "--pipeline", fast_pipeline)


def test_an_output_name_that_is_too_long_is_refused(refused, model_file, fast_pipeline):
    refused(2, ("too long",), "compile", model_file, *SHAPE, "-o", "x" * 300, "--pipeline", fast_pipeline)


def test_what_force_does_not_replace_is_refused_before_any_work(refused, model_file):
    (model_file.parent / "precious").mkdir()
    (model_file.parent / "precious" / "thesis.tex").write_text("years of work")
    said = refused(2, ("not a bundle",), "compile", model_file, "-o", "precious", "--force")
    assert "batch" not in said


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(
            "FAST,emit",
        ),
        pytest.param(
            "FAST,profile{estimate=true}",
        ),
    ],
)
def test_a_pipeline_that_does_not_end_with_its_only_emit_leaves_nothing(refused, model_file, fast_pipeline, pipeline):
    refused(2, ("emit",), "compile", model_file, *SHAPE, "--pipeline", pipeline.replace("FAST", fast_pipeline))


@pytest.mark.parametrize("option", ["--outputs", "--trace"])
@pytest.mark.parametrize("where", ["nowhere/file", "bundle"])
def test_results_that_cannot_be_written_are_refused(refused, bundle_copy, option, where):
    refused(2, (where, "cannot write there"), "run", bundle_copy, option, where)


def test_a_target_file_that_cannot_be_written_is_refused(refused):
    refused(2, ("nowhere/t.toml", "cannot write there"), "devices", "-o", "nowhere/t.toml")


def test_results_cannot_be_written_over_the_working_folder(refused, bundle_copy):
    refused(2, ("cannot write there",), "run", bundle_copy, "--outputs", ".")


# ---------------------------------------------------------------------------------------------- no space left


def run_script(folder: Path, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start the command line in a process of its own, with its temporary files in `folder`/tmp."""
    (folder / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder / "tmp"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.usefixtures("compiled")  # so that numba has its kernels on disk and need not write them
@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits there")
def test_a_file_that_outgrows_its_limit_ends_the_compilation_without_a_trace(model_file, fast_pipeline):
    folder = model_file.parent
    process = run_script(folder, "compile", model_file, *SHAPE, "--pipeline", fast_pipeline, LIMIT="20000")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (4, "")
    assert "no space left" in err
    assert "model.bundle" in err
    assert "another -o" in err
    assert "Traceback" not in err
    assert set(contents(folder)) == {"model.onnx", "tmp"}


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("method", ["mkdir", "write_bytes", "write_text", "rename_new"])
def test_a_full_disk_is_said_and_leaves_nothing_whichever_file_meets_it(
    refused, model_file, fast_pipeline, monkeypatch, method
):
    mkdir = Path.mkdir
    monkeypatch.setattr(staging if method == "rename_new" else Path, method, full_disk)
    if method == "mkdir":  # the folder of the segments, not the one the bundle goes to
        monkeypatch.setattr(Path, "mkdir", lambda path, *a, **k: (mkdir if k else full_disk)(path, *a, **k))
    options = ("--pipeline", fast_pipeline)
    refused(4, ("model.bundle", "no space left", "another -o"), "compile", model_file, *SHAPE, *options)


@pytest.mark.parametrize("method", ["write_text", "exchange"])
def test_a_full_disk_leaves_the_bundle_that_force_would_have_replaced(
    refused, model_file, bundle_copy, fast_pipeline, monkeypatch, method
):
    monkeypatch.setattr(staging if method == "exchange" else Path, method, full_disk)
    options = ("-o", bundle_copy, "--pipeline", fast_pipeline, "--force")
    refused(4, ("no space left",), "compile", model_file, *SHAPE, *options)


def test_a_full_disk_leaves_no_parents_behind(refused, model_file, fast_pipeline, monkeypatch):
    monkeypatch.setattr(Path, "write_text", full_disk)
    options = ("-o", "new/folder/bundle", "--pipeline", fast_pipeline)
    refused(4, ("no space left",), "compile", model_file, *SHAPE, *options)


def test_a_full_disk_for_temporary_files_is_said_by_the_profiler(refused, model_file, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryDirectory", full_disk)
    refused(4, ("no space left",), "compile", model_file, *SHAPE)


# ---------------------------------------------------------------------------------------------- bundles


def edit(bundle: Path, change: Callable[[dict], object]) -> None:
    """Alter the manifest of a bundle."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("command", ["run", "verify", "bench"])
def test_what_is_no_bundle_is_called_so(refused, tmp_path, model_file, command):
    (tmp_path / "folder").mkdir()
    for path in ("nowhere", "folder", "model.onnx"):
        refused(2, (path, "not a bundle", "onnxplace compile"), command, path)


@pytest.mark.parametrize("data", [b"{nope", b"\xff\xfe\x00", b"[]", b"{}", b"", b'{"schema_version": 1}'])
def test_a_manifest_that_is_malformed_is_named(refused, bundle_copy, data):
    (bundle_copy / "manifest.json").write_bytes(data)
    refused(2, ("manifest.json", "manifest"), "run", bundle_copy)


def test_a_manifest_that_is_nested_without_end_is_refused(refused, bundle_copy):
    (bundle_copy / "manifest.json").write_text("[" * 100000)
    refused(2, ("manifest.json",), "run", bundle_copy)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.pop("programs"), ("'programs'", "required")),
        (lambda m: m.update(transfers="many"), ("'transfers'", "integer")),
        (lambda m: m["predicted"].update(step_seconds=-1), ("'predicted.step_seconds'", "greater")),
        (lambda m: m["segments"][1].update(nodes="x"), ("'segments.1.nodes'", "integer")),
        (lambda m: m["programs"]["cpu:0"][0].update(op="explode"), ("'programs.cpu:0.0.op'", "'run'")),
        (lambda m: m["programs"]["cpu:0"][0].update(segment="cpu9-000"), ("cpu:0", "cpu9-000")),
        (lambda m: m["programs"].update({"cpu:7": m["programs"].pop("cpu:1")}), ("cpu:7",)),
    ],
    ids=["missing", "type", "negative", "nested", "step", "segment", "device"],
)
def test_a_manifest_with_a_wrong_field_says_which(refused, bundle_copy, change, said):
    edit(bundle_copy, change)
    refused(2, ("manifest.json", *said), "run", bundle_copy)


def test_a_bundle_of_a_newer_major_version_is_refused_with_what_to_do(refused, bundle_copy):
    edit(bundle_copy, lambda m: m.update(schema_version="2.0", programs="something new"))
    refused(2, ("manifest.json", "2.0", "update onnxplace"), "run", bundle_copy)


def test_a_bundle_of_a_newer_minor_version_is_read(run_cli, bundle_copy):
    edit(bundle_copy, lambda m: m.update(schema_version="1.99"))
    assert run_cli("run", bundle_copy).code == 0


@pytest.mark.parametrize(
    "name", ["segments/cpu1-000.onnx", "segments/weights.bin", "segments/whole.onnx", "costs.json"]
)
def test_a_file_that_is_missing_is_named(refused, bundle_copy, name):
    (bundle_copy / name).unlink()
    refused(2, (name, "missing"), "run", bundle_copy)


@pytest.mark.parametrize(
    "name", ["segments/cpu1-000.onnx", "segments/weights.bin", "segments/whole.onnx", "costs.json"]
)
@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_file_with_one_flipped_byte_is_named(refused, bundle_copy, name, command):
    data = bytearray((bundle_copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (bundle_copy / name).write_bytes(data)
    refused(2, (name, "SHA-256", "compile the model again"), command, bundle_copy)


def test_truncated_weights_are_named_with_both_sizes(refused, bundle_copy):
    file = bundle_copy / "segments" / "weights.bin"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-100])
    said = ("weights.bin", str(size), str(size - 100), "compile the model again")
    refused(2, said, "run", bundle_copy)


def test_large_files_are_hashed_by_verify_though_not_by_run(refused, run_cli, bundle_copy, monkeypatch):
    monkeypatch.setattr("onnxplace.bundle.bundle.MAX_SMALL_FILE_BYTES", 1000)
    file = bundle_copy / "segments" / "weights.bin"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    assert run_cli("run", bundle_copy).code == 0
    refused(2, ("weights.bin", "SHA-256"), "verify", bundle_copy)


def rename_in_manifest(bundle: Path, old: str, new: str) -> None:
    manifest = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(manifest.replace(json.dumps(old), json.dumps(new)))


@pytest.mark.parametrize("kind", ["parent", "absolute", "hidden parent"])
def test_a_file_named_outside_the_bundle_is_refused(refused, bundle_copy, tmp_path, kind):
    shutil.copy(bundle_copy / "segments" / "cpu1-000.onnx", tmp_path / "evil.onnx")
    name = {
        "parent": "../evil.onnx",
        "absolute": str(tmp_path / "evil.onnx"),
        "hidden parent": "segments/../../evil.onnx",
    }[kind]
    rename_in_manifest(bundle_copy, "segments/cpu1-000.onnx", name)
    refused(2, ("manifest.json", "outside the bundle", name, "do not trust"), "run", bundle_copy)


@pytest.mark.parametrize("name", ["segments/cpu1-000.onnx", "segments/weights.bin"])
def test_a_link_that_leads_out_of_the_bundle_is_refused(refused, bundle_copy, tmp_path, name):
    shutil.move(bundle_copy / name, tmp_path / "evil")
    (bundle_copy / name).symlink_to(tmp_path / "evil")
    refused(2, (name, "outside the bundle", "do not trust"), "run", bundle_copy)


def test_a_file_name_with_a_null_byte_is_refused(refused, bundle_copy):
    rename_in_manifest(bundle_copy, "segments/cpu1-000.onnx", "segments/\0")
    refused(2, ("manifest.json",), "run", bundle_copy)


def test_weights_that_the_manifest_does_not_list_are_refused(refused, bundle_copy):
    edit(bundle_copy, lambda m: m["files"].pop("segments/weights.bin"))
    refused(2, ("weights.bin",), "run", bundle_copy)


def step(op: str, **fields: str) -> dict[str, str]:
    return {"op": op, "segment": "", "value": "", "peer": "", **fields}


# In the compiled bundle cpu:1 makes `d` and sends it to cpu:0, which then adds it to its own `c`.
IMPOSSIBLE = {
    "waits for itself": lambda m: m["programs"]["cpu:1"].insert(0, step("receive", value="c", peer="cpu:0")),
    "nobody sends": lambda m: m["programs"]["cpu:1"].pop(1),
    "sends what is not made yet": lambda m: m["programs"]["cpu:1"].insert(0, step("send", value="d", peer="cpu:0")),
    "program is empty": lambda m: m["programs"]["cpu:1"].clear(),
    "program is missing": lambda m: m["programs"].pop("cpu:1"),
    "segment never runs": lambda m: m["programs"]["cpu:0"].pop(0),
    "segment of another device": lambda m: m["programs"]["cpu:1"][0].update(segment="cpu0-001"),
    "segment on no device": lambda m: m["segments"][0].update(device="cpu:9"),
    "value freed before it is read": lambda m: m["programs"]["cpu:1"].insert(0, step("free", value="x")),
    "segment reads what is not there": lambda m: m["segments"][0].update(inputs=["ghost"]),
    "output that nobody makes": lambda m: m["outputs"][0].update(value="ghost"),
    "output that is freed": lambda m: m["outputs"][0].update(value="c"),
    "producer that is not there": lambda m: m["values"]["d"].update(producer="ghost"),
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_a_manifest_whose_programs_cannot_run_is_refused_when_it_is_opened(bundle_copy, kind):
    edit(bundle_copy, IMPOSSIBLE[kind])
    with pytest.raises(onnxplace.BundleError, match=r"manifest\.json"):
        onnxplace.load(bundle_copy)


@pytest.mark.parametrize("device", ["tpu:0", "cpu:x", "cpu"])
def test_a_bundle_for_a_kind_of_device_that_does_not_exist_is_refused(bundle_copy, device):
    rename_in_manifest(bundle_copy, "cpu:0", device)
    with pytest.raises(onnxplace.BundleError, match=device):
        onnxplace.load(bundle_copy)


def test_a_bundle_whose_devices_contradict_each_other_is_refused_by_name(refused, bundle_copy):
    edit(bundle_copy, lambda m: m["target"]["devices"].append(m["target"]["devices"][0]))
    refused(2, ("manifest.json", "twice"), "run", bundle_copy)


# ---------------------------------------------------------------------------------------------- verify and bench


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_model_to_compare_with_must_be_one(refused, bundle_copy, tmp_path, command):
    (tmp_path / "junk.onnx").write_text("junk")
    refused(2, ("nowhere.onnx", "no such file"), command, bundle_copy, "--against", "nowhere.onnx")
    refused(2, ("junk.onnx",), command, bundle_copy, "--against", "junk.onnx")


@pytest.mark.parametrize("command", ["verify", "bench"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(float[batch, 64] x) => (float[batch, 64] z) { z = Relu(x) }", ("no output y", "another model")),
        pytest.param(
            "(float[batch, 64] q) => (float[batch, 64] y) { y = Relu(q) }",
            ("q", "another model"),
        ),
        pytest.param(
            "(float[batch] x) => (float[batch] y) { y = Relu(x) }",
            ("x", "another model"),
        ),
    ],
    ids=["output", "input", "shape"],
)
def test_another_model_to_compare_with_is_refused(refused, bundle_copy, tmp_path, command, text, said):
    store(parsed(text), tmp_path / "other.onnx")
    refused(2, ("other.onnx", *said), command, bundle_copy, "--against", "other.onnx")


def test_verifying_what_computes_nothing_is_refused(refused, bundle_copy):
    refused(2, ("simulated",), "verify", bundle_copy, "--runtime", "simulated")


# ---------------------------------------------------------------------------------------------- memory


def test_limits_that_cannot_hold_the_weights_are_refused_before_anything_is_measured(refused, model_file, monkeypatch):
    monkeypatch.setattr(
        "onnxplace.passes.profiling.timer.MeasurementOptions.measure", lambda *_: pytest.fail("no need to measure")
    )
    said = refused(3, ("--max-memory",), "compile", model_file, *SHAPE, "--max-memory", "cpu:0=1000,cpu:1=2000")
    assert "cpu:0 (1000 bytes), cpu:1 (2000 bytes); all together lack 29768 bytes for the weights alone" in said
    assert "a number without GiB or MiB is in bytes" in said


@pytest.mark.parametrize("placer", ["single", "m-topo", "m-etf"])
@pytest.mark.parametrize("limit", [18000])
def test_limits_that_cannot_hold_the_model_say_which_device_lacks_how_many_bytes(
    refused, model_file, fast_pipeline, placer, limit
):
    # 18000 bytes hold each weight (16384), but not the values beside it.
    options = ("--max-memory", limit, "--pipeline", fast_pipeline.replace("m-etf", placer))
    said = refused(3, (placer, "--max-memory"), "compile", model_file, *SHAPE, *options)
    assert re.search(rf"cpu:[01] lacks \d+ bytes \(needs \d+, may use {limit}\)", said)


@pytest.mark.parametrize("placer", ["single", "m-topo", "m-etf"])
def test_limits_that_cannot_hold_the_model_exit_with_three_and_name_devices_and_bytes(
    refused, model_file, fast_pipeline, placer
):
    options = ("--max-memory", "cpu:0=17000,cpu:1=18000", "--pipeline", fast_pipeline.replace("m-etf", placer))
    said = refused(
        3, (placer, "cpu:0", "cpu:1", "may use 17000", "may use 18000"), "compile", model_file, *SHAPE, *options
    )
    assert re.search(r"lacks? \d+ bytes", said)


# ---------------------------------------------------------------------------------------------- unused devices


def test_a_device_without_work_fails_a_strict_compilation(refused, model_file, fast_pipeline):
    options = ("--pipeline", fast_pipeline.replace("m-etf", "single"), "--strict")
    refused(3, ("cpu:1", "no work", "'single'", "--strict"), "compile", model_file, *SHAPE, *options)


def test_a_device_without_work_is_noted_otherwise(run_cli, model_file, fast_pipeline):
    options = ("--pipeline", fast_pipeline.replace("m-etf", "single"), "--json")
    ran = run_cli("compile", model_file, *SHAPE, *options)
    assert ran.code == 0
    assert re.search(r"^note\[P010\] cpu:1: .*no work", ran.err, re.MULTILINE)
    notes = [note for note in json.loads(ran.out)["diagnostics"] if note["code"] == "P010"]
    assert [note["where"] for note in notes] == ["cpu:1"]
    assert "no work" in notes[0]["message"]
    assert notes[0]["hint"]


def test_a_device_without_work_is_in_the_summary(run_cli, model_file, fast_pipeline):
    ran = run_cli("compile", model_file, *SHAPE, "--pipeline", fast_pipeline.replace("m-etf", "single"))
    assert re.search(r"^cpu:1 +0 ", ran.out, re.MULTILINE)


# ---------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to a single process there")
def test_ctrl_c_while_profiling_leaves_nothing(model_file):
    folder = model_file.parent
    pipeline = "optimize,profile{repeat=1000000000,seconds=60},m-etf,split,emit"
    process = run_script(folder, "compile", model_file, *SHAPE, "--pipeline", pipeline)
    patience = time.monotonic() + 30
    while not any((folder / "tmp").iterdir()) and process.poll() is None and time.monotonic() < patience:
        time.sleep(0.01)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err.strip() == "interrupted; nothing half-written was left"
    assert set(contents(folder)) == {"model.onnx", "tmp"}


def test_ctrl_c_while_writing_leaves_nothing(run_cli, model_file, scratch, fast_pipeline, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupt)
    ran = run_cli("compile", model_file, *SHAPE, "--pipeline", fast_pipeline)
    assert (ran.code, ran.out) == (130, "")
    assert set(contents(model_file.parent)) == {"model.onnx"}


# ---------------------------------------------------------------------------------------------- from Python


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "nope"}, ("U048", "nope")),
        ({"shape": {"batch": "8"}}, ("M022", "'batch'", "'8'")),
        ({"shape": {"batch": 8.5}}, ("M022", "8.5")),
        ({"shape": {"batch": 10**20}}, ("M022", "2147483647")),
        ({"device_map": {"nobody.*": "cpu:0"}}, ("U020", "nobody")),
        ({"device_map": {".*": 3}}, ("U023", "device map")),
        ({"max_memory": 10}, ("lack", "cpu:0")),
        ({"devices": 5}, ("U054", "5", "cuda:0,cuda:1")),
        ({"shape": "batch=8"}, ("U054", "'batch=8'", '{"batch": 8}')),
        ({"inputs": "f.npz"}, ("U054", "'f.npz'", "read_npz")),
    ],
    ids=str,
)
def test_what_python_cannot_ask_for_is_refused_by_name(model_file, tmp_path, options, words):
    given = {"shape": {"batch": 4}, "devices": "cpu:0,cpu:1", **options}
    with pytest.raises(onnxplace.OnnxplaceError) as refused:
        onnxplace.compile(model_file, tmp_path / "refused.bundle", **given)
    assert [word for word in words if word not in str(refused.value)] == []
    assert not (tmp_path / "refused.bundle").exists()


def test_what_is_no_model_no_check_no_feed_and_no_list_of_outputs_is_refused(model_file, tmp_path):
    with pytest.raises(onnxplace.OnnxplaceError, match="U049"):
        onnxplace.compile(None, tmp_path / "none.bundle")
    device_map = {".*": "cpu:1"}
    bundle = onnxplace.compile(
        model_file, tmp_path / "b", devices="cpu:0,cpu:1", shape={"batch": 4}, device_map=device_map
    )
    assert {device.id: device.nodes > 0 for device in bundle.manifest.devices} == {"cpu:0": False, "cpu:1": True}
    with pytest.raises(onnxplace.OnnxplaceError, match="U051"):
        onnxplace.load(bundle.path, check="bogus")
    with onnxplace.InferenceSession(bundle) as session:
        assert session.get_inputs()[0].type == session.get_inputs()[0].dtype
        with pytest.raises(onnxplace.OnnxplaceError, match="F007"):
            session.run(None, None)
        with pytest.raises(onnxplace.OnnxplaceError, match="are a list"):
            session.run(session.get_outputs()[0].name, {})
