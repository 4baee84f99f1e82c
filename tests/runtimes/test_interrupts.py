"""Interrupts while a bundle opens or runs, and the end of the interpreter."""

import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from onnx import parser

from onnxplace.bundle.bundle import WHOLE_MODEL_FILE
from onnxplace.errors import ModelError
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import (
    make_session_options,
    open_in_threads,
    uses_optimisations,
    without_optimisations,
)
from onnxplace.runtimes.execution import engine as engine_module, workers as workers_module
from tests.support.endless import endless_bundle, feeds
from tests.support.fault_checks import HUNG_SECONDS, ROOT, assert_expected

# --------------------------------------------------------------------------------------- as processes: Ctrl-C and exits


PRELUDE = """
import os, signal, sys, threading, time
sys.path.insert(0, {root!r})
import onnxplace
from tests.support.endless import endless_bundle, feeds
session = onnxplace.InferenceSession(onnxplace.load({bundle!r}))
session.run(None, feeds(2))
def run_quietly():
    try:
        session.run(None, feeds(None))
    except onnxplace.ExecutionError:
        pass
"""


def start(bundle, text):
    prelude = PRELUDE.format(root=str(ROOT), bundle=str(bundle.path))
    code = prelude + textwrap.dedent(text)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=bundle.path.parent
    )


def wait_for_end(process):
    try:
        out, err = process.communicate(timeout=HUNG_SECONDS)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        ("futures = [session.submit(feeds(30_000)) for _ in range(3)]", 100.0),
        ("futures = [session.submit(feeds(None)) for _ in range(3)]", 0.3),
        ("session.run_async(None, feeds(30_000), lambda outputs, error: print(outputs is not None))", 100.0),
        ("threading.Thread(target=run_quietly, daemon=True).start(); time.sleep(0.2)", 0.3),
        ("bundle = session._bundle; del session; onnxplace.InferenceSession(bundle).submit(feeds(None))", 0.3),
    ],
)
@pytest.mark.sampled(4)
def test_the_interpreter_ends_with_runs_in_flight(bundle, work, seconds):
    patch = f"from onnxplace.runtimes.execution import engine; engine.EXIT_SECONDS = {seconds}"
    code, out, err = wait_for_end(start(bundle, f"{patch}\n{work}\nprint('end')"))
    assert (code, err) == (0, "")
    assert out in ("end\n", "end\nTrue\n", "True\nend\n")
    assert ("True" in out) == ("run_async" in work), "callbacks of completed runs are called"


def test_a_session_that_outlives_its_modules_touches_nothing(session, monkeypatch):
    """At the very end of the interpreter, the names in modules are None."""
    for module in (engine_module, workers_module):
        monkeypatch.setattr(module, "os", None)
    session.__del__(lambda: True)
    monkeypatch.undo()
    assert_expected(session.run(None, feeds(1)), 1)


def interrupt(process):
    """Send one interrupt, once the process is ready for it, and most probably computes."""
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)


def interrupt_until_end(process):
    """Interrupt again and again, as users do: of two that come too soon one after the other, one is ignored."""
    interrupt(process)
    deadline = time.monotonic() + HUNG_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
@pytest.mark.parametrize("callers", ["cpu:0", "cpu:1"])
def test_one_interrupt_ends_a_run_on_any_device(tmp_path, callers):
    bundle = endless_bundle(tmp_path, spin=callers, last="cpu:0" if callers == "cpu:1" else "cpu:1")
    text = """
        try:
            print("ready", flush=True)
            with session:
                session.run(None, feeds(None))
        except KeyboardInterrupt:
            print("interrupted")
    """
    process = start(bundle, text)
    interrupt(process)
    assert wait_for_end(process) == (0, "interrupted\n", "")


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_an_interrupted_session_goes_on(bundle):
    text = """
        try:
            print("ready", flush=True)
            session.run(None, feeds(None))
        except KeyboardInterrupt:
            print(session.run(None, feeds(2))[0].tolist())
    """
    process = start(bundle, text)
    interrupt(process)
    assert wait_for_end(process) == (0, "[-0.0, -1.0, -2.0, -3.0]\n", "")


# Simulates a node that never ends: a thread that waits for a lock it holds itself, without the GIL.
HANGING = """
    import ctypes
    from onnxplace.runtimes.execution import engine
    engine.END_GRACE_SECONDS = 0.3
    library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    def hang(*arguments):
        if threading.current_thread() is threading.main_thread():
            os.write(1, b"ready\\n")
        while True:
            library.pthread_mutex_lock(lock)
    for segment in session._session.engine._routes[0].segments.values():
        segment.run = hang
    with session:
        {work}
"""


SUBMIT = r"future = session.submit(feeds(2)); os.write(1, b'ready\n'); future.result()"


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
@pytest.mark.parametrize("work", ["session.run(None, feeds(2))", SUBMIT])
@pytest.mark.sampled(2)
def test_a_second_interrupt_ends_a_process_whose_node_hangs(bundle, work):
    process = start(bundle, HANGING.format(work=work))
    interrupt_until_end(process)
    code, _, err = wait_for_end(process)
    assert code in (130, -signal.SIGINT)
    assert "terminate called" not in err


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_after_one_interrupt_a_message_suggests_a_second_one(bundle):
    process = start(bundle, HANGING.format(work="session.run(None, feeds(2))"))
    interrupt(process)
    assert "Interrupt again to end the process" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert wait_for_end(process)[0] == 130


# --------------------------------------------------------------------------------- opening, and what users' code raises


# ONNX Runtime folds these products while it opens the model, for longer than any test waits.
FOLDING = """
<ir_version: 8, opset_import: ["" : 17]>
folding_model (float[1] x) => (float[1200, 1200] y) {{
    shape = Constant <value = int64[2] {{1200, 1200}}> ()
    v0 = ConstantOfShape (shape)
    {products}
    y = Add(v400, x)
}}
"""


@pytest.fixture(scope="module")
def folding_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("folding_model") / "folding_model.onnx"
    products = "\n".join(f"v{index + 1} = MatMul(v{index}, v0)" for index in range(400))
    path.write_bytes(parser.parse_model(FOLDING.format(products=products)).SerializeToString())
    return path


OPENING = """
    from onnxplace.machine.isolated_sessions import open_session
    from onnxplace.machine.ort_sessions import end_openings, make_session_options, open_in_threads
    end_openings.__defaults__ = (0.5,)
    try:
        print("ready", flush=True)
        open_in_threads([lambda: open_session({path!r}, make_session_options([0]))] * {threads})
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a further interrupt would end the process by its default effect
        print("interrupted")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_ends_the_opening_of_a_session(bundle, folding_model, threads):
    process = start(bundle, OPENING.format(path=str(folding_model), threads=threads))
    interrupt_until_end(process)
    code, out, _ = wait_for_end(process)
    # A second interrupt ends the process at once, or the wait for the threads: ONNX Runtime, which folds products in
    # one of them, then aborts a process whose interpreter has ended.
    assert (out, code) in [("interrupted\n", 0), ("", 130), ("interrupted\n", -signal.SIGABRT)][: threads + 1]


def test_threads_give_up_sessions_when_one_of_them_fails(folding_model):
    errors = []

    def fail():
        raise ValueError("refused")

    def open_later():
        time.sleep(0.2)
        try:
            open_session(folding_model, make_session_options([0]))
        except ModelError as error:
            errors.append(error.message)
            raise

    with pytest.raises(ValueError, match="refused"):
        open_in_threads([open_later, fail])
    assert "MODEL_LOAD_CANCELED" in errors[0]


def test_threads_open_sessions_as_their_caller_would():
    with without_optimisations():
        assert open_in_threads([uses_optimisations, uses_optimisations, lambda: 3]) == [False, False, 3]
    assert open_in_threads([uses_optimisations] * 2) == [True, True]


# Says when signals are handled.
COMMAND = """
from onnxplace.cli import app
main = app.main
def say_ready_and_run():
    print("ready", flush=True)
    return main()
app.main = say_ready_and_run
app.entry()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
@pytest.mark.parametrize("command", ["run", "verify", "bench"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.sampled(6)
def test_one_signal_ends_a_command_while_it_computes(tmp_path, command, number):
    bundle = endless_bundle(tmp_path, spin="cpu:0", last="cpu:0")
    np.savez(tmp_path / "in.npz", **feeds(None))
    arguments = [command, str(bundle.path), "--inputs", str(tmp_path / "in.npz")]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(2.5)  # by then it computes, unless the machine is very busy
    process.send_signal(number)
    code, _, err = wait_for_end(process)
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert "interrupted" in err


@pytest.mark.slow
def test_opening_and_running_a_bundle_imports_nothing_that_compiles(bundle):
    code = f"""if True:
        import sys
        import numpy as np
        import onnxplace
        session = onnxplace.InferenceSession({str(bundle.path)!r})
        session.run(None, {{"limit": np.array(2), "x": np.ones(4, np.float32)}})
        print([name for name in ("numba", "onnx", "onnxplace.driver") if name in sys.modules])
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr


def test_the_interpreter_ends_while_daemon_threads_open_sessions(bundle):
    text = """
        def work():
            while True:
                try:
                    with onnxplace.InferenceSession(session._bundle) as other:
                        other.run(None, feeds(2000))
                except onnxplace.ExecutionError as problem:
                    assert problem.code in ("X002", "X006"), problem
                    time.sleep(100)
        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.5)
    """
    assert wait_for_end(start(bundle, text)) == (0, "", "")


class AlarmError(Exception):
    """An error raised by a user's signal handler."""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_an_error_of_a_signal_handler_passes_through_the_opening_of_a_session(bundle):
    def ring(*_):
        raise AlarmError

    before = signal.signal(signal.SIGALRM, ring)
    rung = 0
    try:
        for _ in range(10):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.003)
                while True:
                    open_session(bundle.file(WHOLE_MODEL_FILE), make_session_options([0]))
            except AlarmError:
                rung += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rung == 10


def test_an_error_of_a_signal_handler_passes_through_a_run(session, bundle, monkeypatch):
    def ring(*_):
        raise AlarmError

    own = bundle.manifest.segments[0].id  # its device is the one whose part the caller's own thread does
    with monkeypatch.context() as patch:
        patch.setattr(session._session.engine._routes[0].segments[own], "run", ring)
        with pytest.raises(AlarmError):
            session.run(None, feeds(1))
    assert_expected(session.run(None, feeds(2), timeout=HUNG_SECONDS), 2)


def test_a_failing_excepthook_does_not_end_a_worker(session, monkeypatch, capsys):
    def fail(*_):
        raise ValueError("mine")

    monkeypatch.setattr(threading, "excepthook", fail)
    for _ in range(3):
        session.submit(feeds(20_000)).add_done_callback(fail)
    for rounds in range(5):
        assert_expected(session.run(None, feeds(rounds), timeout=HUNG_SECONDS), rounds)
    assert "mine" in capsys.readouterr().err


def test_a_timeout_may_be_a_numpy_number(session):
    assert_expected(session.run(None, feeds(1), timeout=np.float32(20)), 1)
