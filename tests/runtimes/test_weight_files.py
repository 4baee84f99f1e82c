"""A weights file that is cut or overwritten while its bundle is open: an error, no wrong result and no signal."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxplace
from onnxplace.runtimes.execution.weight_files import WeightFiles

ROWS, COLUMNS = 1 << 14, 64  # 4 MiB, which ONNX Runtime keeps mapped: only a Gather reads it
STEPS = "optimize,profile{estimate=true},coplace{join=never},m-etf,split,emit"

WAS_CUT = f"was cut or overwritten while it was in use: 5000 bytes, expected {4 << 20}"

# Runs requests until one fails, after the file was cut before a run or by another thread; then those after it.
CHILD = """
import os, sys, threading
from pathlib import Path
import numpy as np
import onnxplace

path, when = sys.argv[1:]
file = f"{path}/segments/weights.bin"
data, status = Path(file).read_bytes(), os.stat(file)
ids = {"ids": np.tile(np.arange(1 << 14)[::-1], 8)}
with onnxplace.InferenceSession(path) as session:
    expected = session.run(None, ids)[0]
    cut = threading.Timer(0.03 if when == "during" else 0, os.truncate, (file, 5000))
    cut.start()
    if when != "during":
        cut.join()
    codes = []
    while len(codes) < 3:
        try:
            assert np.array_equal(session.run(None, ids)[0], expected) and not codes, "a wrong result"
        except onnxplace.OnnxplaceError as problem:
            codes.append(problem.code)
    print(codes)
    if when == "restored":  # what was mapped remains lost, as after an error of the disk
        Path(file).write_bytes(data)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    session.run(None, ids)
"""


def compile_embedding(folder: Path, devices: str = "cpu:0", rows: int = ROWS) -> onnxplace.Bundle:
    """Compile the sum of rows of a table, which stays in the weights file."""
    table = np.random.default_rng(0).standard_normal((rows, COLUMNS), dtype=np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], "gather"),
        helper.make_node("ReduceSum", ["rows", "axes"], ["total"], "sum", keepdims=0),
    ]
    weights = [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.array([0]), "axes")]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])
    total = helper.make_tensor_value_info("total", TensorProto.FLOAT, [COLUMNS])
    graph = helper.make_graph(nodes, "embedding", [ids], [total], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnxplace.compile(model, folder / "bundle", devices=devices, shape={"n": 8 * ROWS}, pipeline=STEPS)


def weights_file(bundle: onnxplace.Bundle) -> Path:
    return bundle.path / "segments" / "weights.bin"


@pytest.mark.skipif(sys.platform != "linux", reason="SIGBUS is handled on Linux")
@pytest.mark.parametrize(
    ("when", "devices", "happened"),
    [
        ("restored", "cpu:0,cpu:1", "could not be read while it was in use"),
        ("during", "cpu:0", WAS_CUT),
        ("between", "cpu:0{isolate=true}", WAS_CUT),
    ],
)
def test_a_file_that_is_cut_is_an_error_and_no_signal(tmp_path, when, devices, happened):
    bundle = compile_embedding(tmp_path, devices)
    command = [sys.executable, "-c", CHILD, str(bundle.path), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "['X017', 'X017', 'X017']\n"), done.stderr
    *_, message, hint = done.stderr.splitlines()
    assert message.endswith(f"error[X017] {weights_file(bundle)}: this file of weights {happened}")
    assert hint == "  hint: restore the file, or compile the model again; then open a new session"


def test_a_file_that_is_overwritten_is_an_error_until_a_new_session(tmp_path):
    bundle = compile_embedding(tmp_path)
    file, ids = weights_file(bundle), {"ids": np.arange(4)}
    data = file.read_bytes()
    with onnxplace.InferenceSession(bundle) as session:
        total = session.run(None, ids)[0]
        with file.open("r+b") as stream:
            stream.write(bytes(4))
        os.utime(file, ns=(0, 0))  # even within one tick of the file system's clock
        for _ in range(2):
            with pytest.raises(onnxplace.ExecutionError, match=r"X017.*was modified while it was in use") as raised:
                session.run(None, ids)
        assert raised.value.exit_code == 4
    file.write_bytes(data)
    with onnxplace.InferenceSession(bundle) as session:
        assert np.array_equal(session.run(None, ids)[0], total)
        file.rename(file.with_name("moved"))  # as `compile --force` does: what is open stays as it is
        file.write_bytes(b"other")
        assert np.array_equal(session.run(None, ids)[0], total)


def overwrite(file, offset=0):
    """Write other bytes of the same size, and put the time of the file back."""
    status = file.stat()
    with file.open("r+b") as stream:
        stream.seek(offset)
        data = stream.read(64)
        stream.seek(offset)
        stream.write(bytes(255 - byte for byte in data))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


ATTRIBUTE_CHANGES = {
    "permissions": lambda file: file.chmod(0o644 if file.stat().st_mode & 0o022 else 0o664),
    "link": lambda file: os.link(file, file.with_name("second")),
    "name": lambda file: file.rename(file.with_name("moved")),
    "removed": lambda file: file.unlink(),
    "replaced": lambda file: (file.with_name("new").write_bytes(bytes(4 << 20)), file.with_name("new").replace(file)),
}


def test_a_file_whose_time_was_put_back_is_an_error(tmp_path):
    bundle = compile_embedding(tmp_path)
    with onnxplace.InferenceSession(bundle) as session:
        session.run(None, {"ids": np.arange(4)})
        overwrite(weights_file(bundle))
        for _ in range(2):
            with pytest.raises(onnxplace.ExecutionError, match=r"X017.*was modified while it was in use"):
                session.run(None, {"ids": np.arange(4)})


@pytest.mark.parametrize("change", ATTRIBUTE_CHANGES)
def test_attributes_of_a_file_and_what_has_its_name_may_change(tmp_path, change):
    bundle = compile_embedding(tmp_path)
    file, ids = weights_file(bundle), {"ids": np.arange(4)}
    with onnxplace.InferenceSession(bundle) as session:
        total = session.run(None, ids)[0]
        ATTRIBUTE_CHANGES[change](file)
        with mock.patch("hashlib.file_digest", side_effect=hashlib.file_digest) as digest:
            assert all(np.array_equal(session.run(None, ids)[0], total) for _ in range(3))
        assert digest.call_count == 1, "it is read once"
        if change == "link":
            overwrite(file.with_name("second"))
            with pytest.raises(onnxplace.ExecutionError, match="X017"):
                session.run(None, ids)


def test_a_file_that_is_not_mapped_any_more_may_change(tmp_path):
    weight = np.random.default_rng(0).standard_normal((1024, 512), dtype=np.float32)
    node = helper.make_node("MatMul", ["x", "weight"], ["y"])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, n]) for name, n in (("x", 1024), ("y", 512)))
    graph = helper.make_graph([node], "product", [x], [y], [numpy_helper.from_array(weight, "weight")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    bundle = onnxplace.compile(model, tmp_path / "bundle", devices="cpu:0", pipeline=STEPS)
    feeds = {"x": np.ones((1, 1024), np.float32)}
    with onnxplace.InferenceSession(bundle) as session:
        before = session.run(None, feeds)[0]
        os.truncate(weights_file(bundle), 0)
        assert np.array_equal(session.run(None, feeds)[0], before), "ONNX Runtime has its own copy"


def compile_streaming_chain(folder):
    """Compile four products, whose weights stream."""
    shapes = [(512, 1024), (1024, 512)] * 2
    values = [np.full(shape, 0.001 * (i + 1), np.float32) for i, shape in enumerate(shapes)]  # equal ones are merged
    weights = [numpy_helper.from_array(value, f"w{i}") for i, value in enumerate(values)]
    nodes = [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"], f"product{i}") for i in range(len(shapes))]
    ends = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 512]) for name in ("x0", "x4"))
    graph = helper.make_graph(nodes, "chain", *([item] for item in ends), weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    steps, limit = STEPS.replace("coplace{join=never},m-etf", "stream{pool=4MiB}"), "cpu:0=6MiB"
    bundle = onnxplace.compile(model, folder / "bundle", devices="cpu:0", max_memory=limit, pipeline=steps)
    assert bundle.manifest.streams
    return bundle, {"x0": np.ones((1, 512), np.float32)}


def test_a_file_whose_weights_stream_must_not_change(tmp_path):
    bundle, feeds = compile_streaming_chain(tmp_path)
    with onnxplace.InferenceSession(bundle) as session:
        session.run(None, feeds)
        os.truncate(weights_file(bundle), 100)
        with pytest.raises(
            onnxplace.ExecutionError, match=r"X017.*weights\.bin: weight 'w\d', which streams, cannot be read"
        ):
            session.run(None, feeds)


def test_a_file_whose_weights_stream_is_an_error_after_its_time_was_put_back(tmp_path):
    bundle, feeds = compile_streaming_chain(tmp_path)
    with onnxplace.InferenceSession(bundle) as session:
        session.run(None, feeds)
        for record in bundle.manifest.streamed.values():
            overwrite(weights_file(bundle), record.offset)
        for _ in range(3):
            with pytest.raises(onnxplace.ExecutionError, match=r"X017.*was modified while it was in use"):
                session.run(None, feeds)


@pytest.mark.parametrize("change", ATTRIBUTE_CHANGES)
def test_weights_stream_on_where_only_attributes_or_names_change(tmp_path, change):
    bundle, feeds = compile_streaming_chain(tmp_path)
    with onnxplace.InferenceSession(bundle) as session:
        before = session.run(None, feeds)[0]
        ATTRIBUTE_CHANGES[change](weights_file(bundle))
        assert all(np.array_equal(session.run(None, feeds)[0], before) for _ in range(3))


def test_a_file_in_the_place_of_a_watched_one_is_not_read(tmp_path):
    bundle, _ = compile_streaming_chain(tmp_path)
    files, path = WeightFiles(bundle, []), weights_file(bundle)
    files.open_again(path).close()
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").replace(path)
    with pytest.raises(OSError, match="the file was replaced while it was in use"):
        files.open_again(path)
    files.check()
    files.close()


def test_files_are_closed_with_the_session(tmp_path):
    bundle = compile_embedding(tmp_path)
    file = str(weights_file(bundle).resolve())
    with onnxplace.InferenceSession(bundle):
        assert [item.path for item in psutil.Process().open_files()].count(file) == 1
    assert file not in [item.path for item in psutil.Process().open_files()]


def test_models_with_few_weights_are_not_watched(tmp_path):
    bundle = compile_embedding(tmp_path, rows=1024)
    with onnxplace.InferenceSession(bundle) as session:
        assert not session._session.engine._weight_files._files
