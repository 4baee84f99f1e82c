"""Bells: threads that watch for a value instead of sleeping, and sessions with them."""

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
from onnxplace.runtimes.execution import bells as bells_module
from onnxplace.runtimes.execution.bells import CALLERS, Bell, hang_bells, make_bells

COUNT = 12


def device(cores: tuple[int, ...], is_host: bool = True) -> SimpleNamespace:
    return SimpleNamespace(cores=cores, kind=SimpleNamespace(is_host=is_host))


@pytest.fixture
def bells() -> dict[str, Bell]:
    return hang_bells(["a", "b"])


def test_who_watches_returns_when_its_bell_rings(bells: dict[str, Bell], monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = bells["a"], bells["b"]
    mine._pauses = sys.maxsize  # for ever, unless it rings
    values: list[int] = []

    def deliver() -> None:
        time.sleep(0.05)
        values.append(1)
        other.plan_ring(mine)
        other.ring()

    thread = threading.Thread(target=deliver)
    thread.start()
    mine.watch(lambda: bool(values))
    assert values
    thread.join()


def test_who_watches_rings_what_it_has_planned_and_waits_for_an_answer(bells: dict[str, Bell]) -> None:
    mine, other = bells["a"], bells["b"]
    mine._pauses = other._pauses = sys.maxsize
    log: list[str] = []

    def answer() -> None:
        other.watch(lambda: "question" in log)
        log.append("answer")
        other.plan_ring(bells[CALLERS])
        other.ring()

    thread = threading.Thread(target=answer)
    thread.start()
    time.sleep(0.02)
    log.append("question")
    mine.plan_ring(other)
    mine.watch(lambda: "answer" in log, bells[CALLERS])
    thread.join()
    assert log == ["question", "answer"]


def test_without_a_ring_watching_ends_and_is_left_out_more_and_more_often(bells: dict[str, Bell]) -> None:
    mine, other = bells["a"], bells["b"]
    kernel, calls = mine._kernel, []

    def counted(*arguments: int) -> bool:
        calls.append(arguments)
        return kernel(*arguments)

    mine._kernel = counted
    for _ in range(100):
        mine.watch(lambda: False)
    assert 4 <= len(calls) <= 8  # 1 + 1 + 3 + 7 + ... of them are left out
    mine.plan_ring(other)
    before = sum(mine._counters)
    mine.watch(lambda: False)  # left out or not, it rings
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
def test_bells_are_for_devices_with_cores_of_their_own_and_frequent_transfers(
    cores: tuple[tuple[int, ...], ...], is_host: bool, transfers: int, seconds: float, expected: bool
) -> None:
    devices = {f"cpu:{i}": device(item, is_host) for i, item in enumerate(cores)}
    manifest = SimpleNamespace(
        programs={"cpu:0": [SimpleNamespace(op="run")] + [SimpleNamespace(op="send")] * transfers, "cpu:1": []},
        predicted=SimpleNamespace(step_seconds=seconds),
    )
    assert set(make_bells(devices, manifest)) == ({*devices, CALLERS} if expected else set())  # type: ignore[arg-type]


def compile_alternating(tmp_path: Path) -> onnxplace.Bundle:
    """Compile a chain whose nodes alternate between two devices."""
    nodes = " ".join(f"[n{i}] v{i + 1} = Add(v{i}, one)" for i in range(COUNT))
    text = f"g (float[N] v0) => (float[N] v{COUNT}) <float[1] one = {{1}}> {{ {nodes} }}"
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    (tmp_path / "map.json").write_text(json.dumps({f"n{i}": f"cpu:{i % 2}" for i in range(COUNT)}))
    pipeline = f'profile{{estimate=true}},coplace{{join=never,device_map="{tmp_path / "map.json"}"}},m-topo,split,emit'
    return onnxplace.compile(model, tmp_path / "bundle", devices="cpu:0,cpu:1", shape={"N": 4}, pipeline=pipeline)


def test_the_last_of_the_most_bells_rings() -> None:
    bells = hang_bells([str(number) for number in range(bells_module.MAX_BELLS - 1)])
    first, callers = bells["0"], bells[CALLERS]
    before = first._counters[callers.index * first._stride]
    first.plan_ring(callers)
    first.watch(lambda: False)
    assert first._counters[callers.index * first._stride] == before + 1


class _LyingBell(Bell):
    """A bell that loses each ring, or rings without reason."""

    def ring(self) -> None:
        self._unrung = 0
        for index in range(0, len(self._counters), self._stride):
            self._counters[index] += 1


@pytest.mark.parametrize("bell", [Bell, _LyingBell])
def test_requests_in_flight_are_right_with_bells_whatever_they_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bell: type[Bell]
) -> None:
    bundle = compile_alternating(tmp_path)
    made: list[dict[str, Bell]] = []

    def always(devices: dict[str, object], manifest: object) -> dict[str, Bell]:
        made.append(hang_bells(devices))
        return made[-1]

    monkeypatch.setattr(bells_module, "Bell", bell)
    monkeypatch.setattr("onnxplace.runtimes.execution.workers.make_bells", always)
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
