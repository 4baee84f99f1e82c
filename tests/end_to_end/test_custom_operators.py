"""Operators that ONNX Runtime lacks: named if their library is missing, run if it is given."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, parser

import onnxplace
from onnxplace.bundle.bundle import MANIFEST_FILE
from onnxplace.errors import ModelError
from onnxplace.machine.ort_sessions import list_operator_libraries, make_session_options, use_custom_operators
from tests.conftest import Ran

X = np.array([[1, -2, 3], [-4, 5, -6]], dtype=np.float32)
TEXT = """<ir_version: 9, opset_import: ["": 18, "ai.onnx.contrib": 1]>
graph (float[2, 3] x, bool c) => (float[2, 3] y, float[2, 3] z) {
    [first] a = Neg(x)
    [special] n, p = ai.onnx.contrib.NegPos(a)
    [second] b = Abs(n)
    y = Add(b, p)
    [choice] z = If(c) <
        then_branch = t () => (float[2, 3] u) { [within] u, w = ai.onnx.contrib.NegPos(a) },
        else_branch = e () => (float[2, 3] v) { v = Neg(a) }
    >
}"""


def model() -> ModelProto:
    return parser.parse_model(TEXT)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "custom.onnx"
    path.write_bytes(model().SerializeToString())
    return path


@pytest.fixture(scope="module")
def library() -> str:
    """A real library: onnxruntime-extensions, if it is installed."""
    return pytest.importorskip("onnxruntime_extensions").get_library_path()


def test_the_error_of_a_missing_library_names_operator_domain_node_and_option(
    run_cli: Callable[..., Ran], model_file: Path
):
    result = run_cli("compile", model_file)
    assert result.code == 2
    for word in ("M010", "NegPos", "ai.onnx.contrib", "special", "--custom-op-library"):
        assert word in result.err


def test_a_missing_library_is_reported_for_operators_in_subgraphs(run_cli: Callable[..., Ran], tmp_path: Path):
    proto = model()
    del proto.graph.node[1:4]
    del proto.graph.output[0]
    (tmp_path / "inner.onnx").write_bytes(proto.SerializeToString())
    result = run_cli("compile", tmp_path / "inner.onnx")
    assert result.code == 2
    for word in ("M010", "NegPos", "within", "--custom-op-library"):
        assert word in result.err


def test_an_unknown_standard_operator_does_not_ask_for_a_library(run_cli: Callable[..., Ran], tmp_path: Path):
    proto = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[1] x) => (float[1] y) { y = Reelu(x) }'
    )
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    result = run_cli("compile", tmp_path / "m.onnx")
    assert result.code == 2
    assert "Relu" in result.err
    assert "--custom-op-library" not in result.err


@pytest.mark.parametrize("command", [("compile",), ("run",), ("verify",), ("bench",)])
def test_a_missing_library_file_is_named(
    run_cli: Callable[..., Ran], compiled: Path, model_file: Path, command: tuple[str, ...]
):
    path = model_file if command == ("compile",) else compiled
    result = run_cli(*command, path, "--custom-op-library", "nowhere.so")
    assert result.code == 2
    assert "M010" in result.err
    assert "nowhere.so" in result.err


def test_a_file_that_is_not_a_library_is_named(run_cli: Callable[..., Ran], model_file: Path, tmp_path: Path):
    (tmp_path / "text.so").write_text("not a library")
    result = run_cli("compile", model_file, "--custom-op-library", tmp_path / "text.so")
    assert result.code == 2
    assert "M010" in result.err
    assert "text.so" in result.err
    with pytest.raises(ModelError, match="M010"):
        onnxplace.compile(model_file, tmp_path / "out", custom_op_libraries=[tmp_path / "text.so"])
    assert list_operator_libraries() == ()


def test_a_path_in_place_of_a_list_of_libraries_is_named(compiled: Path):
    for library in ("ops.so", Path("ops.so")):
        with pytest.raises(ModelError, match=r"M010.*expected a list of paths of libraries, got 'ops\.so'"):
            onnxplace.InferenceSession(compiled, custom_op_libraries=library)


STEPS = "optimize,profile,coplace{join=never,device_map=MAP},m-etf,split,emit"


def placed(folder: Path, library: str) -> onnxplace.Bundle:
    """Compile the model with the custom operator on a device of its own."""
    (folder / "map.json").write_text(json.dumps({"special": "cpu:1", "first": "cpu:0", "second": "cpu:0"}))
    steps = STEPS.replace("MAP", str(folder / "map.json"))
    return onnxplace.compile(
        model(), folder / "bundle", devices="cpu:0,cpu:1", pipeline=steps, custom_op_libraries=[library]
    )


def test_a_library_works_for_compile_and_run(tmp_path: Path, library: str):
    bundle = placed(tmp_path, library)
    assert bundle.manifest.custom_operators == ("ai.onnx.contrib.NegPos",)
    with onnxplace.InferenceSession(bundle, custom_op_libraries=[library]) as session:
        for chosen in (True, False):
            y, z = session.run(None, {"x": X, "c": np.array(chosen)})
            np.testing.assert_array_equal(y, np.abs(X))
            np.testing.assert_array_equal(z, np.minimum(-X, 0) if chosen else X)


def test_a_library_works_for_all_commands(run_cli: Callable[..., Ran], tmp_path: Path, library: str):
    bundle = placed(tmp_path, library).path
    for command in (("run",), ("verify",), ("bench", "--repeat", "1")):
        result = run_cli(command[0], bundle, *command[1:], "--custom-op-library", library)
        assert result.code == 0, result.err
    assert run_cli("run", bundle, "--runtime", "simulated").code == 0
    assert list_operator_libraries() == ()


def test_running_a_bundle_without_its_library_is_refused(run_cli: Callable[..., Ran], tmp_path: Path, library: str):
    bundle = placed(tmp_path, library).path
    for command in ("run", "verify", "bench"):
        result = run_cli(command, bundle)
        assert result.code == 2
        for word in ("M010", "NegPos", "ai.onnx.contrib", "--custom-op-library"):
            assert word in result.err


def test_a_library_named_twice_is_loaded_once(library: str):
    with use_custom_operators([library, library]), use_custom_operators([library]):
        assert len(list_operator_libraries()) == 1
        make_session_options([0])
    assert list_operator_libraries() == ()


def test_a_bundle_of_standard_operators_needs_no_library(compiled: Path):
    assert json.loads((compiled / MANIFEST_FILE).read_text())["custom_operators"] == []
