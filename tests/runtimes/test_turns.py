"""Devices that share processors: turns in the order of their requests, in the runtime too, whatever fails."""

from __future__ import annotations

import json
import random
import threading
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import parser, save

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import ExecutionError, FallbackWarning, TargetError
from onnxplace.machine import hardware
from onnxplace.pipeline.registry import create_runtime
from onnxplace.runtimes.execution.segments import OpenSegment
from onnxplace.runtimes.execution.turns import Turn, TurnQueue
from onnxplace.runtimes.execution.wakeups import choose_wakeups
from tests.support.fault_checks import HUNG_SECONDS
from tests.support.fault_injection import KINDS, inject, inject_at_each_place, list_faults
from tests.support.isolated import list_children
from tests.support.random_placements import assert_same
from tests.support.small_programs import make_ping_pong, make_random_model

# An exception set in a thread from outside may come while Python frees an object, and is printed then.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

NAMES = ("cpu:0", "cpu:1", "cpu:0-1")
PROCESSORS = (("cpu:0",), ("cpu:1",), ("cpu:0", "cpu:1"))
# A model whose nodes are on all three devices.
TEXT = """<ir_version: 8, opset_import: ["": 17]> m (float[n] x) => (float[n] y) {
    [a] a = Neg(x) [b] b = Relu(x) [c] c = Add(a, b) [d] d = Neg(c) [e] y = Add(d, a) }"""
PLACES = {"a": "cpu:0", "b": "cpu:1", "c": "cpu:0-1", "d": "cpu:0", "e": "cpu:1"}
FEEDS = {"x": np.arange(-2, 2, dtype=np.float32)}
EXPECTED = -(np.maximum(FEEDS["x"], 0) - FEEDS["x"]) - FEEDS["x"]
A, B, BOTH = frozenset("a"), frozenset("b"), frozenset("ab")


def join(queue: TurnQueue, key: str, processors: frozenset[str], woken: list[str] | None = None) -> Turn:
    return queue.join(key, processors, lambda: (woken if woken is not None else []).append(key))


# ---------------------------------------------------------------------------------------------------------- the queue


def test_a_processor_has_one_turn_at_a_time_in_the_order_of_requests() -> None:
    queue, woken = TurnQueue(), list[str]()
    first, second, third = (join(queue, key, A, woken) for key in "123")
    assert [turn.has_begun for turn in (first, second, third)] == [True, False, False]
    queue.leave("1")
    assert (second.has_begun, third.has_begun) == (True, False)
    assert woken[-1] == "2"
    queue.leave("2")
    assert third.has_begun


def test_turns_on_different_processors_go_on_at_once() -> None:
    queue = TurnQueue()
    assert join(queue, "1", A).has_begun
    assert join(queue, "2", B).has_begun


def test_a_device_with_several_processors_has_its_place_in_all_queues() -> None:
    queue = TurnQueue()
    one = join(queue, "one", A)
    span, other = join(queue, "span", BOTH), join(queue, "other", B)
    assert one.has_begun
    assert not span.has_begun
    assert not other.has_begun  # its processor is idle, but the span came first: else it might wait for ever
    queue.leave("one")
    assert span.has_begun
    assert not other.has_begun
    queue.leave("span")
    assert other.has_begun


def test_who_gives_up_waiting_lets_others_go_on() -> None:
    queue = TurnQueue()
    join(queue, "one", A)
    join(queue, "span", BOTH)
    other = join(queue, "other", B)
    queue.leave("span")
    assert other.has_begun
    queue.leave("unknown")


@pytest.mark.parametrize("fails", [1, 2])
def test_an_interrupted_end_may_be_repeated(fails: int) -> None:
    queue, calls = TurnQueue(), list[int]()

    def wake() -> None:
        calls.append(0)
        if len(calls) <= fails:
            raise KeyboardInterrupt

    queue.join("1", A, lambda: None)
    second = queue.join("2", A, wake)
    for _ in range(fails):
        with pytest.raises(KeyboardInterrupt):
            queue.leave("1")
    queue.leave("1")
    assert second.has_begun
    assert len(calls) == fails + 1


SETS = st.frozensets(st.sampled_from("abc"), min_size=1)


@given(st.lists(st.one_of(SETS, st.integers(0, 30)), max_size=40))
def test_turns_are_those_of_one_queue_for_each_processor(steps: list[Any]) -> None:
    """A set of processors is a request, a number the end of one of those that are there, begun or not."""
    queue, queues, turns = TurnQueue(), {name: list[int]() for name in "abc"}, dict[int, Turn]()
    for number, step in enumerate(steps):
        if isinstance(step, frozenset):
            turns[number] = queue.join(number, step, lambda: None)
            for name in step:
                queues[name].append(number)
        elif turns:
            key = list(turns)[step % len(turns)]
            queue.leave(key)
            for name in turns.pop(key).processors:
                queues[name].remove(key)
        for key, turn in turns.items():
            assert turn.has_begun == all(queues[name][0] == key for name in turn.processors)


@settings(max_examples=20)
@given(st.lists(SETS, min_size=2, max_size=6), st.integers(0, 1 << 30))
def test_threads_take_turns(sets: list[frozenset[str]], seed: int) -> None:
    """No two turns at once on a processor, in the order of requests, though some give up."""
    queue, lock, problems = TurnQueue(), threading.Lock(), list[str]()
    busy, order, begun = set[str](), list[tuple[int, int]](), list[tuple[int, int]]()

    def work(index: int) -> None:
        draw = random.Random(seed + index)
        for number in range(15):
            woken, key, asked = threading.Semaphore(0), (index, number), sets[index]
            try:
                with lock:  # so that the order is known
                    turn = queue.join(key, asked, woken.release)
                    order.append(key)
                if draw.random() < 0.2:
                    continue
                while not turn.has_begun:
                    if not woken.acquire(timeout=HUNG_SECONDS):
                        problems.append(f"{key} waits for ever")
                        return
                with lock:
                    if busy & asked:
                        problems.append(f"{key} found {busy & asked} busy")
                    busy.update(asked)
                    begun.append(key)
                if draw.random() < 0.3:
                    time.sleep(1e-4)
                with lock:
                    busy.difference_update(asked)
            finally:
                queue.leave(key)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(sets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HUNG_SECONDS)
        assert not thread.is_alive()
    assert not problems
    place = {key: position for position, key in enumerate(order)}
    for name in "abc":
        mine = [place[key] for key in begun if name in sets[key[0]]]
        assert mine == sorted(mine)
    assert not queue._turns


# -------------------------------------------------------------------------------------------------------- the runtime


def processors_of(device: str) -> set[str]:
    return set(dict(zip(NAMES, PROCESSORS))[device])


def require_turns(events: list[Any]) -> None:
    """Raise AssertionError if two devices ran on a processor at once; times are of one clock."""
    runs = [event for event in events if event.kind == "run"]
    for one, other in combinations(runs, 2):
        if processors_of(one.device) & processors_of(other.device):
            starts = [event.submitted_seconds + event.start_seconds for event in (one, other)]
            ends = [event.submitted_seconds + event.finish_seconds for event in (one, other)]
            assert ends[0] <= starts[1] + 1e-6 or ends[1] <= starts[0] + 1e-6, (one, other)


@pytest.fixture(scope="module")
def ping_pong(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Any]:
    model = make_ping_pong(3)
    return model.compile(tmp_path_factory.mktemp("turns"), NAMES, PROCESSORS), model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(4)
def test_a_fault_at_any_instruction_gives_the_processors_back(ping_pong: tuple[Bundle, Any], kind: str) -> None:
    bundle, model = ping_pong
    assert inject_at_each_place(bundle, model, kind) >= (2 if kind == "kill_outside" else 5)


@settings(max_examples=10)
@given(st.integers(0, 1 << 30), st.permutations(range(3)))
def test_random_faults_in_random_programs_with_shared_processors(
    tmp_path_factory: pytest.TempPathFactory, seed: int, devices: list[int]
) -> None:
    draw, model = random.Random(seed), make_random_model(seed)
    names, processors = [NAMES[i] for i in devices], [PROCESSORS[i] for i in devices]
    bundle = model.compile(tmp_path_factory.mktemp("random"), names, processors)
    for fault in draw.sample(list_faults(bundle), 3):
        inject(bundle, model, fault)


@settings(max_examples=8)
@given(st.integers(0, 1 << 30), st.permutations(range(3)))
def test_requests_of_four_threads_are_right_and_devices_take_turns(
    tmp_path_factory: pytest.TempPathFactory, seed: int, devices: list[int]
) -> None:
    draw = random.Random(seed)
    model = make_random_model(seed)
    names, processors = [NAMES[i] for i in devices], [PROCESSORS[i] for i in devices]
    bundle = model.compile(tmp_path_factory.mktemp("random"), names, processors)
    events, problems = list[Any](), list[BaseException]()
    with create_runtime("onnxruntime").open(bundle, trace=True) as session:
        fails_at = draw.sample(range(40), 3)
        count = iter(range(1 << 30))
        run = OpenSegment.run

        def run_or_fail(segment: OpenSegment, *arguments: Any) -> None:
            if next(count) in fails_at:
                raise RuntimeError("injected")
            run(segment, *arguments)

        def work(index: int) -> None:
            try:
                with session.open_conversation() as talk:
                    for number in range(6):
                        feeds = {**model.make_feeds(10 * index + number), **model.make_start(number)}
                        try:
                            result = (
                                talk.run(feeds, model.outputs)
                                if number % 2
                                else talk.submit(feeds, model.outputs).result(HUNG_SECONDS)
                            )
                        except ExecutionError as problem:
                            if "injected" not in str(problem):
                                raise
                            continue
                        for name, value in model.step(feeds).items():
                            assert_same(result.outputs[name], value)
                        events.extend(result.events)
            except BaseException as problem:  # noqa: BLE001 - raised below
                problems.append(problem)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OpenSegment, "run", run_or_fail)
            threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(HUNG_SECONDS)
                assert not thread.is_alive()
        engine = session.engine  # type: ignore[attr-defined]
        assert engine._turns is None or not engine._turns._turns
    if problems:
        raise problems[0]
    require_turns(events)


def test_devices_with_processors_of_their_own_have_no_queue(tmp_path: Path) -> None:
    bundle = make_ping_pong(2).compile(tmp_path)
    with onnxplace.InferenceSession(bundle) as session:
        assert session._session.engine._turns is None  # type: ignore[attr-defined]


def test_only_devices_in_use_share(tmp_path: Path) -> None:
    """The target has a span, but no segment is on it."""
    bundle = make_ping_pong(2).compile(tmp_path, NAMES[:2], PROCESSORS[:2])
    with onnxplace.InferenceSession(bundle) as session:
        assert session._session.engine._turns is None  # type: ignore[attr-defined]


def test_a_failure_elsewhere_ends_the_wait_for_a_processor(ping_pong: tuple[Bundle, Any]) -> None:
    bundle, model = ping_pong
    with onnxplace.InferenceSession(bundle) as session:
        engine = session._session.engine  # type: ignore[attr-defined]
        engine._turns.join("a run that hangs", frozenset(PROCESSORS[2]), lambda: None)
        feeds = {**model.make_feeds(1), **model.make_start(1)}
        with pytest.raises(ExecutionError, match="X007"):
            session.run(None, feeds, timeout=0.05)
        engine._turns.leave("a run that hangs")
        session.run(None, feeds, timeout=HUNG_SECONDS)


def test_close_does_not_wait_for_a_processor(ping_pong: tuple[Bundle, Any]) -> None:
    bundle, model = ping_pong
    session = onnxplace.InferenceSession(bundle)
    engine = session._session.engine  # type: ignore[attr-defined]
    engine._turns.join("a run that hangs", frozenset(PROCESSORS[2]), lambda: None)
    future = session.submit({**model.make_feeds(1), **model.make_start(1)})
    session.close(timeout=0)
    with pytest.raises(ExecutionError, match="X002"):
        future.result(HUNG_SECONDS)
    for worker in engine._workers:
        worker.join(HUNG_SECONDS)
        assert not worker.is_alive()


def test_an_interrupt_while_a_caller_waits_gives_its_place_back(
    ping_pong: tuple[Bundle, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, model = ping_pong
    with onnxplace.InferenceSession(bundle) as session:
        engine = session._session.engine  # type: ignore[attr-defined]
        feeds = {**model.make_feeds(1), **model.make_start(1)}
        leave, interrupts = engine._turns.leave, [KeyboardInterrupt(), KeyboardInterrupt()]

        def leave_late(key: Any) -> None:
            if interrupts and threading.current_thread() is threading.main_thread():
                raise interrupts.pop()
            leave(key)

        monkeypatch.setattr(engine._turns, "leave", leave_late)
        with pytest.raises(KeyboardInterrupt):
            session.run(None, feeds)
        session.reset_state()
        session.run(None, feeds, timeout=HUNG_SECONDS)
        assert not engine._turns._turns


def test_threads_do_not_watch_cores_that_others_need(ping_pong: tuple[Bundle, Any]) -> None:
    bundle, _ = ping_pong
    with onnxplace.InferenceSession(bundle) as session:
        engine = session._session.engine  # type: ignore[attr-defined]
        assert choose_wakeups(engine._devices, bundle.manifest) == {}


def test_ranks_refuse_devices_that_share_processors(ping_pong: tuple[Bundle, Any]) -> None:
    with pytest.raises(TargetError, match=r"K001.*its devices share processors"):
        create_runtime("mpi").open(ping_pong[0])


def test_values_between_devices_on_the_same_cores_are_not_copied(
    ping_pong: tuple[Bundle, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "available_cores", lambda: (0, 1))
    with onnxplace.InferenceSession(ping_pong[0]) as session:
        devices = session._session.engine._devices  # type: ignore[attr-defined]
        memories = [devices[name].memory for name in NAMES]
        value = np.ones(4, np.float32)
        assert memories[2].receive(value, memories[0]) is value
        assert memories[1].receive(value, memories[2]) is value
        assert memories[1].receive(value, memories[0]) is not value
        assert memories[0].keep(value) is not value


def test_the_fallback_of_a_span_takes_turns_on_its_own_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = parser.parse_model(TEXT)
    monkeypatch.setattr(hardware, "available_cores", lambda: (0, 1))
    bundle = onnxplace.compile(
        model,
        tmp_path / "b",
        devices="cpu:0,cpu:1,cpu{isolate=true}",
        device_map=PLACES,
        shape={"n": 4},
        effort="low",
        trial=False,
    )
    with onnxplace.InferenceSession(bundle, fallback="cpu:1") as session:
        assert_same(session.run(["y"], FEEDS)[0], EXPECTED)
        (child,) = list_children()
        child.kill()
        child.wait()
        with pytest.warns(FallbackWarning, match="cpu:1 runs its segments"):
            session.run(["y"], FEEDS)
        device = session._session.engine._devices["cpu:0-1"]  # type: ignore[attr-defined]
        assert (device.processors, device.cores) == ({"cpu:1"}, (1,))
        for future in [session.submit(FEEDS, ["y"]) for _ in range(20)]:
            assert_same(future.result(HUNG_SECONDS).outputs["y"], EXPECTED)


# ----------------------------------------------------------------------------------------------------------- commands


def test_a_device_map_may_use_a_processor_and_a_span_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Any
) -> None:
    save(parser.parse_model(TEXT), tmp_path / "m.onnx")
    (tmp_path / "map.json").write_text(json.dumps(PLACES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "available_cores", lambda: (0, 1))
    options = ["--device-map", "map.json", "--shape", "n=4", "--effort", "low", "--no-trial"]
    compiled = run_cli("compile", "m.onnx", "-o", "b", "--devices", "cpu:0,cpu:1,cpu", *options)
    assert compiled.code == 0, compiled
    assert {segment.device for segment in Bundle.open(tmp_path / "b").manifest.segments} == set(NAMES)
    with onnxplace.InferenceSession("b") as session:
        assert_same(session.run(["y"], FEEDS)[0], EXPECTED)
    assert run_cli("run", "b").code == 0
    assert run_cli("verify", "b").code == 0
