"""Failures while a bundle runs: timeouts, interrupts, failing callbacks, dead workers, forks, the interpreter's end."""

import copy
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from onnx import parser

import onnxplace
from onnxplace.bundle import WHOLE_MODEL_FILE
from onnxplace.machine import make_session_options, open_session
from onnxplace.runtimes.execution import engine as engine_module, workers as workers_module
from onnxplace.runtimes.onnxruntime import OnnxRuntime
from tests.support.endless import endless_bundle, expected, feeds

ROOT = Path(__file__).parents[2]
# Far more than any test takes: whatever is still running then hangs.
HUNG_SECONDS = 20


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return endless_bundle(tmp_path_factory.mktemp("endless"))


@pytest.fixture
def session(bundle):
    with onnxplace.InferenceSession(bundle) as session:
        yield session
        session.close(timeout=0)


@pytest.fixture
def hook_errors(monkeypatch):
    """Errors passed to `threading.excepthook`, which prints them for users."""
    errors = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: errors.append(arguments.exc_value))
    return errors


def assert_expected(outputs, rounds):
    for output, reference in zip(outputs, expected(rounds), strict=True):
        np.testing.assert_array_equal(output, reference)


def wait_until(condition):
    deadline = time.monotonic() + HUNG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.005)


def list_worker_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("onnxplace c")]


# ------------------------------------------------------------------------------------------------------- timeouts


def test_a_timeout_ends_a_run_and_reports_its_progress(session):
    with pytest.raises(onnxplace.RunTimeoutError) as raised:
        session.run(None, feeds(None), timeout=0.2)
    problem = raised.value
    assert (problem.code, problem.exit_code) == ("X007", 4)
    assert "cpu:1 runs segment cpu1-000" in problem.message
    assert "cpu:0 waits for value 'spun' of cpu:1" in problem.message
    assert isinstance(problem, TimeoutError), "as Python's own"
    assert_expected(session.run(None, feeds(3), timeout=HUNG_SECONDS), 3)
    assert_expected(session.run(None, feeds(4)), 4)


def test_the_timeout_includes_the_wait_for_a_slot(session):
    for _ in range(engine_module.MAX_IN_FLIGHT):
        session.submit(feeds(None))
    with pytest.raises(onnxplace.RunTimeoutError, match="8 requests before it are in flight"):
        session.run(None, feeds(1), timeout=0.1)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "1", True])
def test_invalid_timeouts_are_refused(session, timeout):
    with pytest.raises(onnxplace.UsageError, match=r"U056.*expected a timeout in seconds"):
        session.run(None, feeds(1), timeout=timeout)


def test_a_close_with_timeout_ends_runs_in_flight(bundle):
    session = onnxplace.InferenceSession(bundle)
    futures = [session.submit(feeds(None)) for _ in range(3)]
    session.close(timeout=0.1)
    for future in futures:
        with pytest.raises(onnxplace.ExecutionError, match="the session was closed"):
            future.result(HUNG_SECONDS)
    assert not list_worker_threads()
    with pytest.raises(onnxplace.ExecutionError, match="X002"):
        session.run(None, feeds(1))


def leave_block(bundle, kind, inputs):
    """Return the future of a run in flight when an exception left the block of its session."""
    try:
        with onnxplace.InferenceSession(bundle) as session:
            future = session.submit(inputs)
            raise kind
    except kind:
        return future


def test_leaving_a_block_by_an_interrupt_does_not_wait_for_runs_in_flight(bundle):
    future = leave_block(bundle, KeyboardInterrupt, feeds(None))
    assert isinstance(future.exception(HUNG_SECONDS), onnxplace.ExecutionError)
    assert not list_worker_threads()


def test_leaving_a_block_by_an_error_waits_for_runs_in_flight(bundle):
    assert_expected([leave_block(bundle, ZeroDivisionError, feeds(3)).result(0).outputs[name] for name in "yz"], 3)


def test_a_worker_that_does_not_return_is_left_behind_with_a_warning(bundle, monkeypatch):
    monkeypatch.setattr(engine_module, "END_GRACE_SECONDS", 0.1)
    released, started = threading.Event(), []
    session = onnxplace.InferenceSession(bundle)
    engine = session._session.engine
    monkeypatch.setattr(
        engine, "run_segment", lambda *arguments: (started.append(arguments), released.wait(HUNG_SECONDS))
    )
    session.submit(feeds(1))
    wait_until(lambda: len(started) == 2)
    with pytest.warns(RuntimeWarning, match=r"cpu:0, cpu:1 did not return .*its thread is left behind"):
        session.close(timeout=0)
    released.set()
    wait_until(lambda: not list_worker_threads())


# ------------------------------------------------------------------------------------------------------ callbacks


@pytest.mark.parametrize("failure", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_callback_that_raises_an_exit_does_not_end_the_worker(session, hook_errors, failure):
    def fail(future):
        raise failure

    future, results = session.submit(feeds(20_000)), []
    future.add_done_callback(fail)
    future.add_done_callback(lambda future: results.append(future.result()))
    assert_expected([future.result(HUNG_SECONDS).outputs[name] for name in "yz"], 20_000)
    for rounds in range(1, 9):
        assert_expected(session.run(None, feeds(rounds), timeout=HUNG_SECONDS), rounds)
    assert hook_errors == [failure]
    assert len(results) == 1, "the other callback is called nevertheless"


def test_an_error_in_a_callback_of_run_async_is_reported_and_the_next_one_is_called(session, hook_errors):
    finished, failure = threading.Event(), ValueError("mine")

    def fail(outputs, error):
        raise failure

    session.run_async(None, feeds(1), fail)
    session.run_async(None, feeds(1), lambda outputs, error: finished.set())
    assert finished.wait(HUNG_SECONDS)
    assert hook_errors == [failure]


def test_a_refused_run_async_leaves_no_thread_behind(bundle):
    with onnxplace.InferenceSession(bundle) as session, pytest.raises(onnxplace.FeedError):
        session.run_async(None, {}, lambda outputs, error: None)
    wait_until(lambda: not list_worker_threads())


def test_a_callback_on_a_worker_may_submit_and_close_but_not_run(bundle):
    session, raised, futures, finished = onnxplace.InferenceSession(bundle), [], [], threading.Event()

    def call(future):
        try:
            session.run(None, feeds(1))
        except onnxplace.ExecutionError as problem:
            raised.append(problem)
        futures.append(session.submit(feeds(2)))
        session.close()
        finished.set()

    session.submit(feeds(20_000)).add_done_callback(call)
    assert finished.wait(HUNG_SECONDS)
    assert raised[0].code == "X009"
    assert_expected([futures[0].result(HUNG_SECONDS).outputs[name] for name in "yz"], 2)
    session.close()
    assert not list_worker_threads()


def test_a_callback_on_a_worker_may_submit_without_a_free_slot(session):
    callback_futures, finished = [], threading.Event()

    def call(future):
        callback_futures.append(session.submit(feeds(1)))
        finished.set()

    futures = [session.submit(feeds(20_000)) for _ in range(engine_module.MAX_IN_FLIGHT)]
    futures[0].add_done_callback(call)
    later_futures = [session.submit(feeds(10)) for _ in range(20)]
    assert finished.wait(HUNG_SECONDS)
    for future in [*futures, *later_futures, *callback_futures]:
        assert future.result(HUNG_SECONDS).outputs


# -------------------------------------------------------------------------------------------------- dead workers


def raise_in(thread, kind):
    """Make a thread raise at its next instruction of Python."""
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind)) == 1


def test_a_dead_worker_is_reported_and_fails_all_requests(session):
    worker = next(thread for thread in threading.enumerate() if thread.name == "onnxplace cpu:1")
    raise_in(worker, SystemExit)
    first = session.submit(feeds(1))  # wakes it
    with pytest.raises(onnxplace.ExecutionError, match=r"X005.*cpu:1: its worker died: SystemExit"):
        first.result(HUNG_SECONDS)
    with pytest.raises(onnxplace.ExecutionError, match="open a new session"):
        session.run(None, feeds(1))
    session.close()
    assert not list_worker_threads()


def test_a_segment_out_of_memory_has_its_own_error(session, monkeypatch):
    def run_out(*arguments):
        raise MemoryError

    for segment in session._session.engine._segments.values():
        monkeypatch.setattr(segment, "run", run_out)
    with pytest.raises(onnxplace.ExecutionError) as raised:
        session.run(None, feeds(1))
    assert raised.value.code == "X010"
    assert "ran out of memory" in raised.value.message
    assert raised.value.hint
    assert isinstance(raised.value.__cause__, MemoryError)


def test_a_failure_without_message_is_reported_by_its_type(session, monkeypatch):
    def fail(*arguments):
        raise RuntimeError

    for segment in session._session.engine._segments.values():
        monkeypatch.setattr(segment, "run", fail)
    with pytest.raises(onnxplace.ExecutionError, match=r"segment cpu[01]-000 failed: RuntimeError"):
        session.run(None, feeds(1))


# ------------------------------------------------------------------------------------- copies, forks, forgotten


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_session_cannot_be_copied_and_the_error_names_an_alternative(session, duplicate):
    for original in (session, session._session):
        with pytest.raises(onnxplace.UsageError, match=r"U055.*cannot be copied or pickled(.|\n)*pickle the bundle"):
            duplicate(original)


def test_a_bundle_can_be_pickled(bundle):
    unpickled = pickle.loads(pickle.dumps(bundle))
    assert unpickled == bundle
    with onnxplace.InferenceSession(unpickled) as session:
        assert_expected(session.run(None, feeds(1)), 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_gets_an_error_and_ends(session):
    assert_expected(session.run(None, feeds(1)), 1)
    future = session.submit(feeds(None))

    def child():
        for call in (lambda: session.run(None, feeds(1)), lambda: session.submit(feeds(1))):
            with pytest.raises(onnxplace.ExecutionError, match="X006"):
                call()
        session.close()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(HUNG_SECONDS)
    code = process.exitcode
    process.kill()
    assert code == 0
    assert not future.done()
    session.close(timeout=0)


def test_names_of_outputs_may_come_from_a_generator(session):
    (output,) = session.run((name for name in ["z"]), feeds(1))
    np.testing.assert_array_equal(output, expected(1)[1])


def test_a_deleted_session_waits_for_nothing(bundle):
    session = onnxplace.InferenceSession(bundle)
    future = session.submit(feeds(None))
    engine = session._session.engine
    del session
    gc.collect()
    assert not future.done()
    engine.end_requests()
    assert isinstance(future.exception(HUNG_SECONDS), onnxplace.ExecutionError)
    wait_until(lambda: not list_worker_threads())


def test_a_session_whose_finalizer_was_interrupted_ends_its_threads_all_the_same(bundle, monkeypatch):
    monkeypatch.setattr(workers_module, "OWNER_CHECK_SECONDS", 0.05)
    session = OnnxRuntime().open(bundle)
    session.finalizer.detach()  # as after an interrupt at its first instruction, which Python swallows
    del session
    gc.collect()
    wait_until(lambda: not list_worker_threads())


def test_an_interrupted_opening_leaves_no_thread(bundle, monkeypatch):
    started, start = [], threading.Thread.start

    def interrupted(thread):
        if started and thread.name.startswith("onnxplace"):
            raise KeyboardInterrupt
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        onnxplace.InferenceSession(bundle)
    assert started
    wait_until(lambda: not list_worker_threads())


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
# An interrupt while Python frees an object is printed, not raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_of_a_run_leaves_a_session_that_works(bundle):
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupts = 0
    try:
        with onnxplace.InferenceSession(bundle) as session:
            for microseconds in range(1, 600):
                try:
                    signal.setitimer(signal.ITIMER_REAL, microseconds * 1e-6)
                    for _ in range(50):
                        session.run(None, feeds(3))
                except KeyboardInterrupt:
                    interrupts += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert_expected(session.run(None, feeds(2), timeout=HUNG_SECONDS), 2)
            with ThreadPoolExecutor(4) as pool:
                for outputs in pool.map(lambda rounds: session.run(None, feeds(rounds)), [5] * 20):
                    assert_expected(outputs, 5)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 300
    assert not list_worker_threads()


# ----------------------------------------------------------------------------------- as processes: Ctrl-C and exits

PRELUDE = """
import os, sys, threading, time
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
        ("futures = [session.submit(feeds(100_000)) for _ in range(3)]", 10.0),
        ("futures = [session.submit(feeds(None)) for _ in range(3)]", 0.3),
        ("session.run_async(None, feeds(100_000), lambda outputs, error: print(outputs is not None))", 10.0),
        ("threading.Thread(target=run_quietly, daemon=True).start(); time.sleep(0.2)", 0.3),
        ("bundle = session._bundle; del session; onnxplace.InferenceSession(bundle).submit(feeds(None))", 0.3),
    ],
)
def test_the_interpreter_ends_with_runs_in_flight(bundle, work, seconds):
    patch = f"from onnxplace.runtimes.execution import lifecycle; lifecycle.EXIT_SECONDS = {seconds}"
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


def interrupt(process, times=1, number=signal.SIGINT):
    assert process.stdout.readline() == "ready\n"
    for index in range(times):
        time.sleep(0.5 if index else 0.2)
        process.send_signal(number)


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
@pytest.mark.parametrize("callers", ["cpu:0", "cpu:1"])
def test_one_interrupt_ends_a_run_on_any_device(tmp_path, callers):
    bundle = endless_bundle(tmp_path, spin=callers, last="cpu:0" if callers == "cpu:1" else "cpu:1")
    text = """
        print("ready", flush=True)
        try:
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
        print("ready", flush=True)
        try:
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
        while True:
            library.pthread_mutex_lock(lock)
    for segment in session._session.engine._segments.values():
        segment.run = hang
    print("ready", flush=True)
    with session:
        {work}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
@pytest.mark.parametrize("work", ["session.run(None, feeds(2))", "session.submit(feeds(2)).result()"])
def test_a_second_interrupt_ends_a_process_whose_node_hangs(bundle, work):
    process = start(bundle, HANGING.format(work=work))
    interrupt(process, times=2)
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


# -------------------------------------------------------------------------------- opening, and what users' code raises

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
    from onnxplace.machine import open_session, session_options
    print("ready", flush=True)
    try:
        open_session({path!r}, session_options([0]))
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_an_interrupt_ends_the_opening_of_a_session(bundle, folding_model):
    process = start(bundle, OPENING.format(path=str(folding_model)))
    interrupt(process, times=2)
    code, out, _ = wait_for_end(process)
    assert (code, out) in ((0, "interrupted\n"), (130, ""))


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
@pytest.mark.parametrize("command", ["run", "verify", "bench"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_a_command_while_it_computes(tmp_path, command, number):
    bundle = endless_bundle(tmp_path, spin="cpu:0", last="cpu:0")
    np.savez(tmp_path / "in.npz", **feeds(None))
    arguments = [command, str(bundle.path), "--inputs", str(tmp_path / "in.npz")]
    code = "import sys; from onnxplace.cli import entry; print('ready', flush=True); "
    code += f"sys.argv[1:] = {arguments!r}; entry()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(2.5)
    process.send_signal(number)
    code, _, err = wait_for_end(process)
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert "interrupted" in err


def test_the_interpreter_ends_while_daemon_threads_open_sessions(bundle):
    text = """
        def work():
            while True:
                try:
                    with onnxplace.InferenceSession(session._bundle) as other:
                        other.run(None, feeds(2000))
                except onnxplace.ExecutionError as problem:
                    assert problem.code in ("X002", "X013"), problem
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


def test_an_error_of_a_signal_handler_passes_through_a_run(session, monkeypatch):
    def ring(*_):
        raise AlarmError

    engine = session._session.engine
    with monkeypatch.context() as patch:
        patch.setattr(engine._segments["cpu1-000"], "run", ring)  # which the caller's own thread runs
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
