"""Wakeup flags: threads that watch for a value instead of sleeping, and sessions with them."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import parser

import onnxplace
from onnxplace.runtimes.execution import wakeups as wakeups_module
from onnxplace.runtimes.execution.wakeups import CALLERS, WakeupFlag, choose_wakeups, install_wakeups

COUNT = 12


def device(cores: tuple[int, ...], is_host: bool = True) -> SimpleNamespace:
    return SimpleNamespace(cores=cores, kind=SimpleNamespace(is_host=is_host))


@pytest.fixture
def flags() -> dict[str, WakeupFlag]:
    return install_wakeups(["a", "b"])


def test_who_watches_returns_when_its_flag_is_notified(
    flags: dict[str, WakeupFlag], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = flags["a"], flags["b"]
    mine._pauses = sys.maxsize  # for ever, unless it is notified
    values: list[int] = []

    def deliver() -> None:
        time.sleep(0.05)
        values.append(1)
        other.plan_notification(mine)
        other.notify()

    thread = threading.Thread(target=deliver)
    thread.start()
    mine.watch(lambda: bool(values))
    assert values
    thread.join()


def test_who_watches_notifies_as_planned_and_waits_for_an_answer(flags: dict[str, WakeupFlag]) -> None:
    mine, other = flags["a"], flags["b"]
    mine._pauses = other._pauses = sys.maxsize
    log: list[str] = []

    def answer() -> None:
        other.watch(lambda: "question" in log)
        log.append("answer")
        other.plan_notification(flags[CALLERS])
        other.notify()

    thread = threading.Thread(target=answer)
    thread.start()
    time.sleep(0.02)
    log.append("question")
    mine.plan_notification(other)
    mine.watch(lambda: "answer" in log, flags[CALLERS])
    thread.join()
    assert log == ["question", "answer"]


def test_without_a_notification_watching_ends_and_is_left_out_more_and_more_often(flags: dict[str, WakeupFlag]) -> None:
    mine, other = flags["a"], flags["b"]
    kernel, calls = mine._kernel, []

    def counted(*arguments: int) -> bool:
        calls.append(arguments)
        return kernel(*arguments)

    mine._kernel = counted
    for _ in range(100):
        mine.watch(lambda: False)
    assert 4 <= len(calls) <= 8  # 1 + 1 + 3 + 7 + ... of them are left out
    mine.plan_notification(other)
    before = sum(mine._counters)
    mine.watch(lambda: False)  # left out or not, it notifies
    assert sum(mine._counters) == before + 1


@pytest.mark.parametrize(
    ("cores", "is_host", "transfers", "seconds", "expected"),
    [
        (((0,), (1,)), True, 6, 1e-3, True),
        (((0, 1), (1, 2)), True, 6, 1e-3, False),  # who watches would keep the other from its core
        (((0,), ()), True, 6, 1e-3, False),
        (((0,), (1,)), False, 6, 1e-3, False),
        (((0,), (1,)), True, 1, 1e-5, False),
        (((0,), (1,)), True, 6, 1.0, False),  # waits are long
        (tuple((core,) for core in range(62)), True, 6, 1e-3, True),
        (tuple((core,) for core in range(63)), True, 6, 1e-3, False),
    ],
)
def test_flags_are_for_devices_with_cores_of_their_own_and_frequent_transfers(
    cores: tuple[tuple[int, ...], ...], is_host: bool, transfers: int, seconds: float, expected: bool
) -> None:
    devices = {f"cpu:{i}": device(item, is_host) for i, item in enumerate(cores)}
    manifest = SimpleNamespace(
        programs={"cpu:0": [SimpleNamespace(op="run")] + [SimpleNamespace(op="send")] * transfers, "cpu:1": []},
        predicted=SimpleNamespace(step_seconds=seconds),
    )
    assert set(choose_wakeups(devices, manifest)) == ({*devices, CALLERS} if expected else set())  # type: ignore[arg-type]


def compile_alternating(tmp_path: Path) -> onnxplace.Bundle:
    """Compile a chain whose nodes alternate between two devices."""
    nodes = " ".join(f"[n{i}] v{i + 1} = Add(v{i}, one)" for i in range(COUNT))
    text = f"g (float[N] v0) => (float[N] v{COUNT}) <float[1] one = {{1}}> {{ {nodes} }}"
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    (tmp_path / "map.json").write_text(json.dumps({f"n{i}": f"cpu:{i % 2}" for i in range(COUNT)}))
    pipeline = f'profile{{estimate=true}},coplace{{join=never,device_map="{tmp_path / "map.json"}"}},m-topo,split,emit'
    return onnxplace.compile(model, tmp_path / "bundle", devices="cpu:0,cpu:1", shape={"N": 4}, pipeline=pipeline)


def test_the_last_of_the_most_flags_is_notified() -> None:
    flags = install_wakeups([str(number) for number in range(wakeups_module.MAX_FLAGS - 1)])
    first, callers = flags["0"], flags[CALLERS]
    before = first._counters[callers.index * first._stride]
    first.plan_notification(callers)
    first.watch(lambda: False)
    assert first._counters[callers.index * first._stride] == before + 1


class _LyingFlag(WakeupFlag):
    """A flag that loses each notification, or has some without reason."""

    def notify(self) -> None:
        self._planned = 0
        for index in range(0, len(self._counters), self._stride):
            self._counters[index] += 1


@pytest.mark.parametrize("flag", [WakeupFlag, _LyingFlag])
def test_requests_in_flight_are_right_with_flags_whatever_they_notify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: type[WakeupFlag]
) -> None:
    bundle = compile_alternating(tmp_path)
    made: list[dict[str, WakeupFlag]] = []

    def always(devices: dict[str, object], manifest: object) -> dict[str, WakeupFlag]:
        made.append(install_wakeups(devices))
        return made[-1]

    monkeypatch.setattr(wakeups_module, "WakeupFlag", flag)
    monkeypatch.setattr("onnxplace.runtimes.execution.workers.choose_wakeups", always)
    with onnxplace.InferenceSession(bundle) as session:
        assert made
        for round_ in range(30):
            feeds = [np.full(4, 100.0 * round_ + i, np.float32) for i in range(4)]
            futures = [session.submit({"v0": item}) for item in feeds]
            alone = session.run(None, {"v0": feeds[0]})
            np.testing.assert_array_equal(alone[0], feeds[0] + COUNT)
            for item, future in zip(feeds, futures):
                np.testing.assert_array_equal(future.result(20).outputs[f"v{COUNT}"], item + COUNT)
        with pytest.raises(onnxplace.OnnxplaceError):
            session.run(None, {"v0": np.zeros((2, 2), np.float32)})
        np.testing.assert_array_equal(session.run(None, {"v0": feeds[0]})[0], feeds[0] + COUNT)
