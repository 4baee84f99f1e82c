"""A machine with a virtual clock, on which runs take as long as its noise says: measurements without wall time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from onnxplace.machine import repeated_runs
from onnxplace.measure import trial
from onnxplace.runtime.interface import Event, Result

REFERENCE_SECONDS = 60e-6


@dataclass(frozen=True)
class Noise:
    """How times of equal runs differ."""

    jitter: float = 0.01
    """Standard deviation of a run, as a share of it."""
    spikes: float = 0.0
    """Share of runs that take half as long again."""
    slow: float = 1.0
    """Factor of times in slow periods of the machine."""
    period_seconds: float = 1.0
    """Mean length of slow periods, and of those between them."""
    seen: float = 1.0
    """Share of a slow period's slowdown that the reference loop shows, too."""
    settling: float = 0.0
    """By which share the first run is slower; it fades within 0.1 s."""
    waiting: float = 0.0
    """Mean share of the time in which another program has the core."""


NOISES = {
    "calm": Noise(),
    "jittery": Noise(jitter=0.05, spikes=0.1),
    "settling": Noise(settling=0.5),
    "slow cores": Noise(jitter=0.02, slow=1.25, period_seconds=0.5),
    "neighbours": Noise(jitter=0.03, spikes=0.05, slow=1.15, period_seconds=0.3, seen=0.0),
    "long drift": Noise(jitter=0.02, slow=1.2, period_seconds=3.0, seen=0.0),
    "busy": Noise(jitter=0.03, waiting=0.4),
}


@dataclass
class SimulatedMachine:
    """A virtual clock, which the runs of models advance."""

    noise: Noise
    seed: int
    now: float = 0.0
    waited: float = 0.0
    runs: int = 0
    _random: np.random.Generator = field(init=False)
    _changes: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._changes = [0.0, float(self._random.exponential(self.noise.period_seconds))]

    def is_slow(self) -> bool:
        """Return whether this is a slow period."""
        while self._changes[-1] <= self.now:
            self._changes.append(self._changes[-1] + float(self._random.exponential(self.noise.period_seconds)))
        position = int(np.searchsorted(self._changes, self.now, "right"))
        return (position + self.seed) % 2 == 0

    def run(self, seconds: float) -> float:
        """Compute for so long, with noise; return how long that took."""
        noise, random = self.noise, self._random
        factor = 1 + abs(random.normal(0, noise.jitter)) + 0.5 * (random.random() < noise.spikes)
        factor *= noise.slow if self.is_slow() else 1.0
        factor *= 1 + noise.settling * float(np.exp(-self.now / 0.03))
        computing = seconds * factor
        waiting = 0.0
        if noise.waiting:
            waiting = computing * noise.waiting / (1 - noise.waiting) * float(random.exponential())
        self.now += computing + waiting
        self.waited += waiting
        self.runs += 1
        return computing + waiting

    def time_reference(self) -> float:
        """Run the reference loop."""
        slowdown = 1 + (self.noise.slow - 1) * self.noise.seen if self.is_slow() else 1.0
        seconds = REFERENCE_SECONDS * slowdown * (1 + abs(self._random.normal(0, 0.01)))
        self.now += seconds
        return seconds

    def read_delays(self, pool: bool) -> dict[str, int]:
        """Return how long threads waited for a core, in nanoseconds."""
        return {"": int(self.waited * 1e9)}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let measurements see this machine instead of the real one."""

        def read_clock() -> float:
            self.now += 1e-7  # so that loops which wait for a time end
            return self.now

        def spin() -> None:
            self.now += 0.06

        replaced = {
            "time": SimpleNamespace(perf_counter=read_clock, process_time=lambda: 0.0),
            "read_run_delays": self.read_delays,
        }
        fast = {"time_reference": self.time_reference, "find_least_reference_seconds": lambda: REFERENCE_SECONDS}
        with (
            patch.multiple(repeated_runs, **replaced, **fast),
            patch.multiple(
                trial,
                **replaced,
                settle=spin,
                find_least_reference_seconds=lambda: REFERENCE_SECONDS,
            ),
        ):
            yield


class SimulatedSession:
    """A session of a bundle, or of a whole model, whose steps take so many seconds on the machine."""

    def __init__(self, machine: SimulatedMachine, seconds: float) -> None:
        self._machine, self._seconds = machine, seconds
        self.states = SimpleNamespace(reset=lambda: None)

    def __enter__(self) -> SimulatedSession:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, *_: object) -> Future[Result]:
        """Run a step."""
        future: Future[Result] = Future()
        future.set_result(self.run())
        return future

    def run(self, *_: object) -> Result:
        """Run a step."""
        seconds = self._machine.run(self._seconds)
        event = Event("cpu:0", "run", "cpu0_0", 0.0, seconds, 0)
        return Result({}, (event,), seconds)

    def read_remote_delays(self) -> dict[str, int]:
        """Return nothing: there are no other processes."""
        return {}


def run_simulated_trials(
    machine: SimulatedMachine, steps: list[float], *, one_device: float = 0.0, all_cores: float = 0.0
) -> tuple[trial.Trial, ...]:
    """Run trials of bundles whose steps take so long; with plain sessions if their steps are given."""
    bundles: Any = [SimpleNamespace(path=Path(str(index)), manifest=None) for index in range(len(steps))]
    plain = {(0,): one_device, (0, 1): all_cores}
    runtime = SimpleNamespace(open=lambda bundle, trace: SimulatedSession(machine, steps[int(str(bundle.path))]))
    repeated = SimpleNamespace(prepare=lambda session: {})
    replaced = {
        "create_runtime": lambda _: runtime,
        "_list_reference_cores": lambda *_: tuple(plain),
        "_PlainSession": lambda _, cores: SimulatedSession(machine, plain[cores]),
        "RepeatedStep": lambda *_, **__: repeated,
        "SplitStates": lambda _: SimpleNamespace(align_copies=lambda feeds: feeds),
        "measure_once": lambda *arguments: arguments[-1](),
        "compare_at_another_size": lambda *_: (),
    }
    with machine.installed(), patch.multiple(trial, **replaced):
        return trial.run_trials(bundles, {}, plain=bool(one_device))
