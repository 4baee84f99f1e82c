"""Refusals of ONNX Runtime are explained: an operator and type without a kernel, a full disk."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

from onnxplace.errors import ExecutionError, ModelError
from onnxplace.machine import session_errors
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.machine.ort_values import make_runner
from onnxplace.machine.session_errors import explain_session_error, find_disk_full

ROOT = Path(__file__).parents[2]
HEADER = '<ir_version: 8, opset_import: ["": 17]>'
PLAIN = f"{HEADER} g (bfloat16[2,2] x) => (bfloat16[2,2] y) {{ [first] a = Add(x, x) [second] y = MatMul(a, a) }}"
NAMELESS = f"{HEADER} g (bfloat16[2] x) => (bfloat16[2] y) {{ y = Add(x, x) }}"
TWO_NAMELESS = f"{HEADER} g (bfloat16[2] x) => (bfloat16[2] y) {{ a = Add(x, x) y = Add(a, x) }}"
INSIDE = f"""{HEADER} g (bool[] c, bfloat16[2] x) => (bfloat16[2] y) {{
    [outer] y = If(c) <then_branch = a () => (bfloat16[2] z) {{ [inner] z = Add(x, x) }},
                       else_branch = b () => (bfloat16[2] w) {{ [other] w = Identity(x) }}> }}"""


@pytest.mark.parametrize(
    ("text", "where", "types"),
    [
        (PLAIN, "part, node 'first'", "bfloat16"),
        (NAMELESS, "part", "bfloat16"),
        (TWO_NAMELESS, "part", "its input types"),
        (INSIDE, "part, node 'inner'", "bfloat16"),
    ],
    ids=["plain", "nameless", "two nameless", "inside"],
)
def test_a_missing_kernel_is_reported_with_operator_and_type(text, where, types):
    with pytest.raises(ModelError) as caught:
        open_session(parser.parse_model(text).SerializeToString(), make_session_options([0]), where="part")
    problem = caught.value
    assert (problem.code, problem.where) == ("M012", where)
    assert problem.message == f"ONNX Runtime has no kernel of Add (opset 14) for {types} on a CPU"
    assert "float32" in problem.hint
    assert "opset" not in problem.hint


def test_a_missing_kernel_is_reported_for_models_in_files(tmp_path):
    onnx.save(parser.parse_model(PLAIN), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="no kernel of Add \\(opset 14\\) for bfloat16"):
        open_session(tmp_path / "m.onnx", make_session_options([0]))


@pytest.mark.parametrize("model", [b"junk", b"", Path("nowhere.onnx")], ids=["junk", "empty", "no file"])
def test_a_missing_kernel_is_reported_even_if_the_model_cannot_be_read(model):
    problem = RuntimeError("[ONNXRuntimeError] : 9 : Could not find an implementation for Add(14) node with name 'x'")
    error = explain_session_error(problem, model, "", "cuda:0", "here")
    assert error.message == "ONNX Runtime has no kernel of Add (opset 14) for its input types on a GPU"


def test_large_models_are_not_searched_for_types(monkeypatch):
    monkeypatch.setattr(session_errors, "MAX_SEARCHED_BYTES", 10)
    with pytest.raises(ModelError, match="its input types"):
        open_session(parser.parse_model(PLAIN).SerializeToString(), make_session_options([0]))


def test_the_command_reports_a_missing_kernel(run_cli, tmp_path):
    onnx.save(parser.parse_model(PLAIN), tmp_path / "m.onnx")
    result = run_cli("compile", tmp_path / "m.onnx", "--devices", "cpu:0,cpu:1")
    assert result.code == 2
    message = "error[M012] g, node 'first': ONNX Runtime has no kernel of Add (opset 14) for bfloat16 on a CPU"
    assert message in result.err
    assert "older opset" not in result.err


# ---------------------------------------------------------------------------------------------- no space


def build_chain(count: int, width: int) -> onnx.ModelProto:
    """Return a model of nodes in a row, the first of which adds a weight of `width` numbers."""
    nodes = [helper.make_node("Add", ["x", "w"], ["v0"], name="add")]
    nodes += [helper.make_node("Tanh", [f"v{n}"], [f"v{n + 1}"], name=f"n{n}") for n in range(count)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [width]) for name in ("x", f"v{count}")]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [width], [1.0] * width)
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


SMALL_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
from onnxplace.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")
@pytest.mark.parametrize(("count", "width"), [(2, 100_000), (60, 10)], ids=["weights", "profile"])
def test_lack_of_space_for_temporary_files_is_reported(tmp_path, count, width):
    """Slow: it needs another process, since the limit cannot be raised again."""
    onnx.save(build_chain(count, width), tmp_path / "m.onnx")
    command = [sys.executable, "-c", SMALL_FILES, "compile", "m.onnx", "--devices", "cpu:0", "--no-trial"]
    # The files of the cache would exceed the limit as well.
    result = subprocess.run(
        [*command, "--no-cache"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 4, result.stderr
    assert "error[E001]" in result.stderr
    assert "no space left" in result.stderr
    assert "TMPDIR" in result.stderr


def test_a_full_disk_is_recognised(tmp_path):
    assert find_disk_full(str(tmp_path)) is None
    missing = find_disk_full(str(tmp_path), 1 << 60)
    assert isinstance(missing, ExecutionError)
    assert (missing.code, missing.where) == ("E001", str(tmp_path))


def test_without_a_written_folder_a_refusal_is_not_for_lack_of_space(tmp_path):
    problem = RuntimeError("[ONNXRuntimeError] : 1 : FAIL : odd")
    assert explain_session_error(problem, b"", "", "cpu:0", "here").code == "M012"
    assert explain_session_error(problem, b"", str(tmp_path), "cpu:0", "here").code == "M012"
    assert explain_session_error(problem, b"", str(tmp_path / "nowhere"), "cpu:0", "here").code == "U032"


def test_inputs_that_a_model_cannot_take_are_named_also_next_to_sequences():
    text = "(seq(float[N]) s, int64 p) => (float[M] y) { y = SequenceAt(s, p) }"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    session = open_session(model.SerializeToString(), make_session_options([0]))
    ragged = [np.ones(1, np.float32), np.ones(2, np.float32)]
    with pytest.raises(ModelError, match=r"M017.*the model cannot be run with these inputs") as problem:
        make_runner(session, "m.onnx")({"s": ragged, "p": np.array(9)})
    assert problem.value.hint.startswith("random inputs, such as p=9, may not fit this model")
