"""Engines whose work a `Worker` does: here, a session of ONNX Runtime with the whole model."""

import queue
import threading
import time
from contextlib import suppress

import pytest

from onnxplace.bundle.bundle import WHOLE_MODEL_FILE
from onnxplace.errors import ExecutionError, OnnxplaceError
from onnxplace.runtime.interface import Event, Runtime
from onnxplace.runtimes.execution import engine
from onnxplace.runtimes.execution.engine import Engine
from onnxplace.runtimes.execution.segments import OpenRoute, PlacedDevice
from onnxplace.runtimes.execution.sessions import EngineSession
from onnxplace.runtimes.execution.workers import Worker
from onnxplace.target.target import Device
from onnxplace.testing.runtime_contract import check_runtime
from onnxplace.utils.ort import import_onnxruntime
from tests.support.endless import endless_bundle, feeds
from tests.support.fault_checks import HUNG_SECONDS

HOME = "cpu:0"


class WholeModel(Worker):
    """Runs the whole model of a bundle, one request after the other."""

    def __init__(self, bundle, callers_seconds=float("inf")):
        self.callers_seconds = callers_seconds
        self._bundle, self._begun, self._over = bundle, set(), set()
        self._session = import_onnxruntime().InferenceSession(bundle.file(WHOLE_MODEL_FILE))
        self._tokens, self._running = queue.SimpleQueue(), threading.Lock()
        self.threads = []

    def work(self, device):
        while not self.engine.is_finished(device.id):
            with suppress(queue.Empty):
                self._tokens.get(timeout=0.1)
            if self.engine.owner is not None and self.engine.owner() is None:
                self.engine.abandon()
            while (request := self.engine.next_request(lambda item: item.number not in self._begun)) is not None:
                if request.callers_device:
                    break
                self.run_part(request)

    def offer(self, request):
        self.wake()

    def wake(self):
        self._tokens.put(None)

    def run_part(self, request):
        self.threads.append(threading.current_thread().name)
        with self._running:
            self._begun.add(request.number)
            try:
                self._compute(request)
            except OnnxplaceError as failure:
                self.engine.fail(request, failure)
            except Exception as problem:  # noqa: BLE001
                self.engine.fail(request, ExecutionError("X001", str(problem), where=HOME))
            self._over.add(request.number)
        self.engine.finish_part(request, HOME)

    def _compute(self, request):
        started = time.perf_counter() - request.start_time
        states = self.engine.take_states(request)
        manifest = self._bundle.manifest
        values = self._session.run(
            [item.name for item in manifest.outputs], {**request.feeds, **states}, request.options
        )
        by_name = {item.name: value for item, value in zip(manifest.outputs, values)}
        request.outputs = {item.value: by_name[item.name] for item in manifest.outputs}
        request.next_states = {item.input: by_name[item.output] for item in manifest.states}
        finished = time.perf_counter() - request.start_time
        request.events = [Event(item.id, "run", "whole", started, finished) for item in self._bundle.target.devices]

    def finished(self, request):
        return request.number in self._over

    def give_up(self):
        for request in self.engine.list_in_flight():
            self._over.add(request.number)
            self.engine.fail(request, ExecutionError("X002", "the session was closed"))
            self.engine.finish_part(request, HOME)


def open_whole(bundle, worker, trace=False, max_in_flight=8):
    device = PlacedDevice(Device(HOME, 1 << 30), ())
    routes = [OpenRoute(0, {HOME: HOME}, {HOME: HOME}, {}, 1.0)]
    return EngineSession(Engine(bundle, {HOME: device}, routes, trace, max_in_flight, worker=worker))


class Whole(Runtime):
    name, keeps_state = "whole", True

    def open(self, bundle, *, trace=False):
        return open_whole(bundle, WholeModel(bundle), trace)


def test_a_runtime_of_a_worker_keeps_the_contract():
    check_runtime(Whole)


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    return endless_bundle(tmp_path_factory.mktemp("endless"))


def test_a_caller_runs_its_request_if_its_time_is_longer_than_its_part_takes(endless):
    worker = WholeModel(endless, callers_seconds=1.0)
    with open_whole(endless, worker) as session:
        for timeout, is_callers in ((None, True), (0.9, False), (HUNG_SECONDS, True)):
            result = session.run(feeds(1), timeout=timeout)
            assert result.outputs
            assert (worker.threads[-1] == threading.current_thread().name) == is_callers


def test_closing_ends_requests(endless):
    with open_whole(endless, WholeModel(endless)) as session:
        future = session.submit(feeds(None))
        session.close(0.0)
        assert isinstance(future.exception(HUNG_SECONDS), ExecutionError)
        with pytest.raises(ExecutionError, match="X002"):
            session.run(feeds(1))


def test_a_worker_gives_up_requests_that_do_not_end_in_time(endless, monkeypatch):
    class Stuck(WholeModel):
        gave_up = threading.Event()

        def _compute(self, request):
            self.gave_up.wait()

        def give_up(self):
            self.gave_up.set()
            super().give_up()

    monkeypatch.setattr(engine, "END_GRACE_SECONDS", 0.1)
    with open_whole(endless, Stuck(endless)) as session:
        future = session.submit(feeds(1))
        session.close(0.0)
        assert Stuck.gave_up.is_set()
        assert isinstance(future.exception(HUNG_SECONDS), ExecutionError)


def test_a_worker_that_refuses_ends_new_requests_with_its_reason(endless):
    with open_whole(endless, worker := WholeModel(endless)) as session:
        worker.engine.refuse(ExecutionError("X005", "its power failed", where=HOME))
        worker.engine.refuse(ExecutionError("X005", "something else", where=HOME))
        for _ in range(2):
            with pytest.raises(ExecutionError, match="its power failed"):
                session.run(feeds(1))
        assert "its power failed" in str(session.failure)
