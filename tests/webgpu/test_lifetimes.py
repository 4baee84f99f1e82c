"""Whoever drops sessions and values of a GPU, and whenever: they are freed while the lock of the provider is held."""

import gc
import threading
import weakref
from collections import Counter

import onnxruntime
import pytest

import onnxplace
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.kind_table import find_kind
from tests.support.fault_checks import HUNG_SECONDS
from tests.support.ping_pong import compile_ping_pong, make_feeds, make_start


class Witness:
    """Counts the ends of ONNX Runtime's objects on the GPU: with the lock, or without it."""

    def __init__(self):
        self.lock = find_kind(DeviceAddress.of("webgpu:0").kind).lock.hold()
        self.alive = {}
        self.freed = Counter()

    def watch(self, kind, item):
        def note(reference):
            self.freed[kind, "with the lock" if self.lock._is_owned() else "without the lock"] += 1
            del self.alive[id(reference)]

        reference = weakref.ref(item, note)
        self.alive[id(reference)] = reference


@pytest.fixture
def witness(monkeypatch):
    """Watch sessions, bindings and values on the GPU that are made from now on."""
    witness = Witness()
    create, bind = onnxruntime.InferenceSession.__init__, onnxruntime.InferenceSession.io_binding
    wrap = onnxruntime.OrtValue.__init__

    def create_session(self, *arguments, **options):
        create(self, *arguments, **options)
        if self.get_providers()[0] == "WebGpuExecutionProvider":
            witness.watch("session", self)

    def bind_session(self):
        binding = bind(self)
        if self.get_providers()[0] == "WebGpuExecutionProvider":
            witness.watch("binding", binding)
        return binding

    def wrap_value(self, value, *arguments):
        wrap(self, value, *arguments)
        if value.is_tensor() and value.device_name().lower() != "cpu":
            witness.watch("value", value)

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", create_session)
    monkeypatch.setattr(onnxruntime.InferenceSession, "io_binding", bind_session)
    monkeypatch.setattr(onnxruntime.OrtValue, "__init__", wrap_value)
    return witness


@pytest.fixture(params=[("webgpu:0", "cpu:0"), ("webgpu:0", "webgpu:0")], ids=",".join)
def bundle(request, tmp_path):
    return compile_ping_pong(tmp_path, names=request.param)


def talk(session):
    """Run with states, in the session and in a conversation, and fail; return what a caller might keep."""
    conversation = session.conversation()
    for user in (session, conversation):
        user.run(None, make_feeds(0, **make_start()))
        user.submit(make_feeds(1)).result(HUNG_SECONDS)
    failing = [session.submit(make_feeds(number, fails=True)) for number in range(3)]
    kept = [future.exception(HUNG_SECONDS) for future in failing]
    kept.append(kept)  # only garbage collection frees it
    assert isinstance(kept[0], onnxplace.ExecutionError)
    return conversation, failing, kept


def await_workers():
    for thread in threading.enumerate():
        if thread.name.startswith(("onnxplace w", "onnxplace c")):
            thread.join(HUNG_SECONDS)


def assert_all_freed(witness):
    gc.collect()
    assert not witness.alive
    assert {kind for kind, _ in witness.freed} == {"session", "binding", "value"}
    assert {where for _, where in witness.freed} == {"with the lock"}, witness.freed


def test_exceptions_and_conversations_that_outlive_a_closed_session(witness, bundle):
    session = onnxplace.InferenceSession(bundle)
    kept = talk(session)
    session.close()
    del session
    gc.collect()
    del kept
    assert_all_freed(witness)


def test_a_session_that_is_dropped_with_its_conversations_and_errors(witness, bundle):
    session = onnxplace.InferenceSession(bundle)
    kept = talk(session)
    del session, kept
    gc.collect()
    await_workers()
    assert_all_freed(witness)


def test_errors_are_dropped_by_other_threads_while_the_gpu_runs(witness, bundle):
    """Garbage collection of one thread used to free sessions while another one ran."""
    ended, problems = threading.Event(), []

    def run_until_the_end(session):
        try:
            while not ended.is_set():
                session.run(None, make_feeds(0, **make_start()))
        except Exception as problem:  # noqa: BLE001 - raised below
            problems.append(problem)

    with onnxplace.InferenceSession(bundle) as busy:
        thread = threading.Thread(target=run_until_the_end, args=(busy,))
        thread.start()
        for _ in range(5):
            with onnxplace.InferenceSession(bundle) as session:
                kept = talk(session)
            del session, kept
            gc.collect()
        ended.set()
        thread.join(HUNG_SECONDS)
    assert not problems
    del busy, thread
    assert_all_freed(witness)


def test_a_bundle_that_cannot_be_opened(witness, bundle):
    """By then, each device has a session that waits for its work."""
    record = bundle.manifest.segments[0]
    bundle.file(record.file).write_bytes(b"no model")
    with pytest.raises(onnxplace.OnnxplaceError):
        onnxplace.InferenceSession(bundle)
    gc.collect()
    assert not witness.alive
    assert not {where for _, where in witness.freed} - {"with the lock"}, witness.freed
