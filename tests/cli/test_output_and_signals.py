"""Output that cannot be printed, interruptions, names of outputs, and sizes in bundles."""

from __future__ import annotations

import json
import os
import re
import signal

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from onnx import TensorProto, helper, parser

import onnxplace
from onnxplace.cli import app, terminal
from onnxplace.errors import ExecutionError, FeedError
from onnxplace.feeds.feeds import Declared
from onnxplace.feeds.npz import require_storable, write_npz
from tests.conftest import FAST_PIPELINE, Ran, branches
from tests.support.random_placements import RandomPlacement, compiled_with

PYTHON = (sys.executable, "-c", "from onnxplace.cli.app import entry; entry()")
FULL = Path("/dev/full")
TIMEOUT_SECONDS = 300
Cli = Callable[..., Ran]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("answers") / "bundle"
    onnxplace.compile(branches(), out, devices="cpu:0,cpu:1", shape={"batch": 4}, pipeline=FAST_PIPELINE, trial=False)
    return out


@pytest.fixture(scope="module")
def other(bundle: Path) -> Path:
    """Return a model with other weights."""
    path = bundle.with_name("other.onnx")
    path.write_bytes(branches(seed=1).SerializeToString())
    return path


# ----------------------------------------------------------------------------------- output that cannot be written


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    "arguments",
    [("verify", "BUNDLE", "--json"), ("verify", "BUNDLE"), ("passes", "--json"), ("verify", "none", "--json")],
    ids=" ".join,
)
@pytest.mark.sampled(4)
def test_output_that_cannot_be_written_is_a_failure(bundle: Path, arguments: tuple[str, ...], unbuffered: str):
    command = [*PYTHON, *(str(bundle) if part == "BUNDLE" else part for part in arguments)]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with FULL.open("w") as full:
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=TIMEOUT_SECONDS
        )
    assert result.returncode == 4
    assert result.stderr.count("error[E001] standard output: no space left") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_an_error_that_cannot_be_written_keeps_its_exit_code(unbuffered: str):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with FULL.open("w") as full:
        result = subprocess.run(
            [*PYTHON, "verify", "none"], stdout=subprocess.PIPE, stderr=full, env=environment, timeout=TIMEOUT_SECONDS
        )
    assert result.returncode == 2


@pytest.mark.parametrize(("differs", "code"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.sampled(4)
def test_the_exit_code_of_verify_does_not_depend_on_who_reads(
    bundle: Path, other: Path, differs: bool, code: int, options: tuple[str, ...]
):
    against = ("--against", str(other)) if differs else ()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed_pipe:
        result = subprocess.run(
            [*PYTHON, "verify", str(bundle), *against, *options], stdout=closed_pipe, stderr=subprocess.PIPE, text=True,
            timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
    assert (result.returncode, result.stderr) == (code, "")


@pytest.mark.parametrize("arguments", [("passes",), ("passes", "--json"), ("--help",), ("--version",)], ids=" ".join)
def test_a_closed_pipe_does_not_exit_with_1(arguments: tuple[str, ...]):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed_pipe:
        result = subprocess.run(
            [*PYTHON, *arguments], stdout=closed_pipe, stderr=subprocess.PIPE, timeout=TIMEOUT_SECONDS
        )
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_closed_stdout_is_not_a_defect(bundle: Path):
    result = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *PYTHON, "verify", str(bundle)],
        stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")


# ------------------------------------------------------------------------------------- what native libraries print


NATIVE_SCRIPT = """
import ctypes, os
from onnxplace.cli import app, print_json, print_text
def command(**_):
    os.write(1, b"written by a library\\n")
    ctypes.CDLL(None).puts(b"kept in a buffer of C")
    RESULT
    os.write(1, b"written later\\n")
app.cli.main = command
app.entry()
"""


@pytest.mark.skipif(os.name != "posix", reason="it calls C's puts")
@pytest.mark.parametrize(
    ("result", "expected"),
    [("print_json({'a': 1})", '{\n "a": 1\n}\n'), ("print_text('a table')", "a table\n")],
    ids=["json", "text"],
)
def test_what_native_libraries_print_does_not_reach_stdout(result: str, expected: str):
    command = [sys.executable, "-c", NATIVE_SCRIPT.replace("RESULT", result), "passes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert (done.returncode, done.stdout) == (0, expected)
    assert sorted(done.stderr.splitlines()) == ["kept in a buffer of C", "written by a library", "written later"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_left_as_they_are(closed: str):
    command = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *PYTHON, "passes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("m-etf" in done.stdout) == closed.startswith("2")


def test_a_file_that_is_called_stdout_is_that_of_the_user(bundle: Path, tmp_path: Path):
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        command = [*PYTHON, "run", str(bundle), "--outputs", "/dev/stdout", "--quiet"]
        assert subprocess.run(command, stdout=out, stderr=err, timeout=TIMEOUT_SECONDS).returncode == 0
    assert np.load(tmp_path / "out")["y"].shape == (4, 64)
    assert (tmp_path / "err").read_text() == ""


# ------------------------------------------------------------------------------------- signals while it is imported


# As sitecustomize.py, it sends the signal when the command line is about to be imported.
EARLY_SIGNAL = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "onnxplace.cli":
            os.kill(os.getpid(), signal.NAME)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("json_", [False, True], ids=["text", "json"])
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("is_module", [False, True], ids=["script", "module"])
def test_signals_during_imports_leave_no_traceback(tmp_path: Path, is_module: bool, name: str, code: int, json_: bool):
    (tmp_path / "sitecustomize.py").write_text(EARLY_SIGNAL.replace("NAME", name))
    (tmp_path / "onnxplace").write_text("from onnxplace.cli.app import entry\nentry()")
    command = [sys.executable, *(("-m", "onnxplace") if is_module else (str(tmp_path / "onnxplace"),)), "passes"]
    root = str(Path(onnxplace.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), root))}
    done = subprocess.run(
        [*command, *(["--json"] if json_ else [])], capture_output=True, text=True, env=environment, cwd=root,
        timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    message = "interrupted" if name == "SIGINT" else "interrupted (SIGTERM)"
    assert (done.returncode, done.stderr) == (code, f"{message}; nothing half-written was left\n")
    error = {"code": "X011", "message": message, "where": "", "hint": ""}
    assert done.stdout == (f"{json.dumps({'error': error}, indent=1)}\n" if json_ else "")


def test_a_program_that_imports_the_package_keeps_its_interrupts():
    script = "import signal, onnxplace; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.skipif(os.name != "posix", reason="there is no nohup")
def test_ignored_interrupts_stay_ignored(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(EARLY_SIGNAL.replace("NAME", "SIGINT"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "onnxplace", "passes"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------------------------------------------------- SIGTERM


TERMINATED_SCRIPT = """
import os, signal, time
from onnxplace.cli import app, terminal
def command(**_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
app.cli.main = command
app.entry()
"""


@pytest.mark.parametrize("json_", [False, True], ids=["text", "json"])
def test_sigterm_is_reported_as_an_interruption(json_: bool):
    command = [sys.executable, "-c", TERMINATED_SCRIPT, "passes", *(["--json"] if json_ else [])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert result.returncode == 143
    assert result.stderr == "interrupted (SIGTERM); nothing half-written was left\n"
    assert json.loads(result.stdout)["error"]["code"] == "X011" if json_ else result.stdout == ""


SWALLOWED_SIGNAL_SCRIPT = """
import os, signal
from onnxplace.cli import app, terminal
from onnxplace.errors import BrokenPassError
def command(**_):
    try:
        os.kill(os.getpid(), {number})
        for _ in range(1000): pass
    except BaseException:
        pass
    raise {failure}
app.cli.main = command
app.entry()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("failure", ['BrokenPassError("B001", "no compiled object yet")', "ValueError"])
def test_errors_after_a_signal_are_reported_as_an_interruption(number: signal.Signals, code: int, failure: str):
    """A callback of a C library may swallow the exception, and something else fails then."""
    text = SWALLOWED_SIGNAL_SCRIPT.format(number=int(number), failure=failure)
    result = subprocess.run([sys.executable, "-c", text, "x"], capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert result.returncode == code
    assert result.stderr.startswith("interrupted")
    assert "B001" not in result.stderr


def test_the_message_of_ctrl_c_is_stable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app.cli, "main", interrupted)
    assert app.main(["passes"]) == 130
    assert capsys.readouterr().err == "interrupted; nothing half-written was left\n"


# ------------------------------------------------------------------------------------------------------- outputs.npz


def tensors(*names: str, lists: tuple[str, ...] = ()) -> list[Declared]:
    return [Declared(n, "seq(tensor(float))" if n in lists else "tensor(float)", None) for n in names]


@pytest.mark.parametrize(
    ("outputs", "about"),
    [
        (tensors("a\0b"), "NUL"),
        (tensors("n" * 65536), "65536 bytes"),
        (tensors("é" * 40000), "80000 bytes"),
        (tensors("a", "a.npy"), "'a'"),
        (tensors("a/b", "a\\b"), "'a/b'"),
        (tensors("x", "x.0", lists=("x",)), "'x'"),
        (tensors("x.7", "x", lists=("x",)), "'x'"),
        (tensors("x.0.npy", "x", lists=("x",)), "'x'"),
    ],
    ids=["NUL", "long", "long in UTF-8", "suffix", "slashes", "element", "element first", "element with suffix"],
)
def test_names_that_a_file_of_outputs_cannot_hold_are_refused(outputs: list[Declared], about: str):
    with pytest.raises(FeedError, match="U032") as raised:
        require_storable(outputs)
    assert about in str(raised.value)
    assert len(str(raised.value)) < 500


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["a", "a.npy", "a.0", "a.0.npy", "../a", "/a", "a/", "a\\b", "a/b", ".", "..", "", "ä", "a\0", "a\n", "x" * 65531]
)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(NAMES, min_size=1, max_size=5, unique=True), st.data())
@example(["x", "x.0"], None)
def test_accepted_names_are_read_back(names: list[str], data: st.DataObject | None):
    lists = tuple(name for name in names if data is not None and data.draw(st.booleans()))
    try:
        require_storable(tensors(*names, lists=lists))
    except FeedError:
        return
    arrays = {name: np.full(2, number, np.float32) for number, name in enumerate(names)}
    outputs = {name: [array, array + 0.5] if name in lists else array for name, array in arrays.items()}
    with tempfile.TemporaryDirectory() as folder:
        write_npz(Path(folder) / "out.npz", outputs)
        with np.load(Path(folder) / "out.npz") as archive:
            for name, array in arrays.items():
                if name in lists:
                    np.testing.assert_array_equal(archive[f"{name}.0"], array)
                    np.testing.assert_array_equal(archive[f"{name}.1"], array + 0.5)
                else:
                    np.testing.assert_array_equal(archive[name], array)
            assert len(archive.files) == len(names) + len(lists)


def test_names_are_refused_before_anything_is_run(tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y", "y.npy")]
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Abs", ["y"], ["y.npy"])]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    bundle = compiled_with(proto, RandomPlacement((0, 1)), tmp_path)
    assert run_cli("run", bundle.path).code == 0
    monkeypatch.setattr("onnxplace.session.inference_session.InferenceSession", None)  # a session would fail
    result = run_cli("run", bundle.path, "--outputs", tmp_path / "out.npz")
    assert result.code == 2
    assert result.err.startswith("error[U032] output 'y.npy'")
    assert not (tmp_path / "out.npz").exists()


# -------------------------------------------------------------------------------------------------- remembered sizes

SIZED = """<ir_version: 10, opset_import: ["": 21]>
g (float[batch, width] x, float[n, width] w) => (float[batch, n] y) {
    t = Transpose(w)
    p = MatMul(x, t)
    y = Tanh(p)
}"""


@pytest.fixture
def sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Cli) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(parser.parse_model(SIZED), "m.onnx")
    np.savez("in.npz", x=np.ones((3, 5), np.float32), w=np.ones((7, 5), np.float32))
    out = tmp_path / "bundle"
    result = run_cli(
        "compile", "m.onnx", "-o", out, "--devices", "cpu:0,cpu:1", "--inputs", "in.npz", "--pipeline", FAST_PIPELINE
    )
    assert result.code == 0, result.err
    return out


@pytest.mark.parametrize("command", [("run",), ("verify",), ("bench", "--no-memory", "--repeat", "1")], ids=" ".join)
def test_a_bundle_compiled_with_inputs_remembers_their_sizes(sampled: Path, run_cli: Cli, command: tuple[str, ...]):
    assert onnxplace.load(sampled).manifest.dimensions == {"batch": 3, "width": 5, "n": 7}
    result = run_cli(command[0], sampled, *command[1:])
    assert result.code == 0, result.err
    assert run_cli(command[0], sampled, *command[1:], "--shape", "n=2").code == 0


def test_a_size_that_is_given_replaces_the_one_that_is_remembered(sampled: Path, run_cli: Cli):
    for options, shape in (((), [3, 7]), (("--shape", "n=2"), [3, 2])):
        found = json.loads(run_cli("run", sampled, "--json", *options).out)
        assert found["outputs"]["y"]["shape"] == shape


def test_the_sizes_with_which_costs_were_measured_are_remembered_of_several(tmp_path: Path):
    inputs = {"x": np.ones((1, 5), np.float32), "w": np.ones((7, 5), np.float32)}
    bundle = onnxplace.compile(
        parser.parse_model(SIZED), tmp_path / "b", devices="cpu:0", inputs=inputs, pipeline=FAST_PIPELINE
    )
    assert bundle.manifest.dimensions == {"batch": 1, "width": 5, "n": 7}
    with pytest.raises(onnxplace.ModelError, match=r"M022.*dimension 'n' is 4 here and 7 in the inputs"):
        onnxplace.compile(parser.parse_model(SIZED), tmp_path / "c", inputs=inputs, shape={"n": 4})


def test_the_rank_of_a_sample_is_remembered_where_the_model_leaves_it_open(tmp_path: Path, run_cli: Cli):
    text = '<ir_version: 10, opset_import: ["": 21]> g (float x) => (float y) { a = Neg(x) y = Tanh(a) }'
    proto = parser.parse_model(text)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    inputs = {"x": np.ones((2, 3), np.float32)}
    out = tmp_path / "b"
    bundle = onnxplace.compile(proto, out, devices="cpu:0,cpu:1", inputs=inputs, pipeline=FAST_PIPELINE)
    assert bundle.manifest.dimensions == {"x.0": 2, "x.1": 3}
    assert run_cli("verify", out).code == 0
    assert "[2, 9]" in run_cli("run", out, "--shape", "x.1=9").out
    np.savez(tmp_path / "in.npz", x=np.ones(4, np.float32))
    assert "[4]" in run_cli("run", out, "--inputs", tmp_path / "in.npz").out


# ------------------------------------------------------------------------------------------------------------ advice


def test_verify_does_not_advise_verify(bundle: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch):
    def fail(self: object, values: object, states: object) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr("onnxplace.runtimes.execution.segments.OpenSegment.run", fail)
    for command, about in (("verify", "the unsplit model runs with the same inputs"), ("run", "onnxplace verify")):
        result = run_cli(command, bundle)
        assert result.code == ExecutionError.exit_code
        assert "error[X001]" in result.err
        hint = result.err.partition("hint:")[2]
        assert about in hint
        assert ("onnxplace verify" in hint) == (command == "run")


def test_numbers_that_were_drawn_are_said_if_a_model_cannot_run_with_them(tmp_path: Path, run_cli: Cli):
    """As the sample rate of a voice detector, which sizes alone do not make right."""
    head = '<ir_version: 10, opset_import: ["": 21]> g (float[N] x, int64 rate, int64[1] d) => (float[M, K] y) '
    text = head + "<int64[1] h = {0}> { r = Unsqueeze(rate, h) s = Concat<axis=0>(r, d) y = Reshape(x, s) }"
    onnx.save(parser.parse_model(text), tmp_path / "rate.onnx")
    result = run_cli("compile", tmp_path / "rate.onnx", "--shape", "N=7", "--devices", "cpu:0")
    assert (result.code, result.err[:11]) == (2, "error[M017]")
    assert re.search("random inputs, such as rate=[01], d=[01], may not fit", result.err)


def test_verify_names_the_file_of_inputs_with_which_the_unsplit_model_fails(tmp_path: Path, run_cli: Cli):
    head = '<ir_version: 10, opset_import: ["": 21]> g (float[4] x, int64[2] i) => (float[2] y) '
    bundle = compiled_with(
        parser.parse_model(head + "{ a = Neg(x) y = Gather(a, i) }"), RandomPlacement((0, 1)), tmp_path
    )
    np.savez(tmp_path / "in.npz", x=np.ones(4, np.float32), i=np.array([0, 9]))
    result = run_cli("verify", bundle.path, "--inputs", tmp_path / "in.npz")
    assert result.code == 2
    assert result.err.startswith("error[M017]")
    assert f"check the inputs in {tmp_path / 'in.npz'}" in result.err


def test_doubts_are_grey_up_to_the_end_of_their_reason(monkeypatch):
    shown = []
    monkeypatch.setattr(terminal.click, "echo", lambda text, err: shown.append(text))
    terminal.print_text(
        "5 ms a step, unsure: busy\nverdict: unsure, as others ran: 1.2 times as fast; limited by cpu:0"
    )
    grey, end = "\x1b[90m", "\x1b[0m"
    assert shown == [
        f"5 ms a step, {grey}unsure: busy{end}\n"
        f"verdict: {grey}unsure, as others ran: 1.2 times as fast{end}; limited by cpu:0"
    ]
