"""Measure how much devices slow each other down: the same work on each device alone, and on all at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from onnxplace.calibration.microbenchmarks import Benchmark, open_probes
from onnxplace.calibration.probe_bundles import Probe
from onnxplace.calibration.samples import RequestTimes, Samples, run_once
from onnxplace.feeds import Array
from onnxplace.runtime import Event, EventKind, RuntimeSession
from onnxplace.target import Target

# Contention varies from one moment to the next, above all in a virtual machine: fewer undisturbed samples than this
# are not significant.
MIN_CONTENTION_SAMPLES = 10
# Rows of a square matrix larger than the cache of a core, and of one that stays in the cache.
STREAMED_SIZE, COMPUTED_SIZE = 4096, 256
EXCHANGED_BYTES = 1 << 24
# Events count as simultaneous if they overlap for at least this share of their time.
MIN_OVERLAP_SHARE = 0.9


@dataclass(frozen=True)
class Slowdown:
    """The slowdown of work while other devices are busy."""

    factor: float
    """For each other device that is busy all the time; 1 if no slowdown was measured."""
    undisturbed_samples: int
    """The fewest undisturbed samples over devices, alone or together."""
    alone_seconds: float
    """Time of the work on a device alone."""

    @property
    def seen(self) -> bool:
        """Return whether there were enough undisturbed samples."""
        return self.undisturbed_samples >= MIN_CONTENTION_SAMPLES


@dataclass(frozen=True)
class Contention:
    """The slowdown of the same work on several devices at once, by kind of work."""

    memory: Slowdown
    compute: Slowdown
    copy: Slowdown

    @property
    def memory_bytes_per_second(self) -> float:
        """Return the memory bandwidth of a device alone."""
        return 4 * STREAMED_SIZE**2 / self.memory.alone_seconds


def prepare_contention(stack: ExitStack, target: Target, devices: Sequence[str], folder: Path) -> Benchmark[Contention]:
    """Prepare to stream weights, compute and receive, on each device alone and on all at once."""
    works: tuple[tuple[Work, EventKind], ...] = (
        (_make_streaming_work, "run"),
        (_make_computing_work, "run"),
        (_make_exchanging_work, "copy"),
    )
    parts = [_prepare_slowdown(stack, target, devices, work, kind, folder / work.__name__) for work, kind in works]
    return Benchmark(
        [task for part in parts for task in part.tasks], lambda: Contention(*(part.result() for part in parts))
    )


Work = Callable[[str, int, str], tuple[list[Probe], dict[str, Array]]]


def _prepare_slowdown(
    stack: ExitStack, target: Target, devices: Sequence[str], work: Work, kind: EventKind, folder: Path
) -> Benchmark[Slowdown]:
    """Prepare to compare the time on all devices at once with the time alone."""
    alone, together = ({device: Samples() for device in devices} for _ in range(2))
    parts = {device: work(device, index, devices[(index + 1) % len(devices)]) for index, device in enumerate(devices)}
    tasks: list[Callable[[], object]] = []
    for busy, samples in [*[((device,), alone) for device in devices], (tuple(devices), together)]:
        # Producers come before consumers, on all devices.
        probes = sorted((probe for device in busy for probe in parts[device][0]), key=lambda probe: probe.stage)
        feeds = {name: array for device in busy for name, array in parts[device][1].items()}
        session = open_probes(stack, folder / str(len(tasks)), target, probes)
        tasks.append(_make_work_task(session, feeds, busy, kind, samples))
    return Benchmark(tasks, lambda: _compute_slowdown(alone, together))


def _compute_slowdown(alone: Mapping[str, Samples], together: Mapping[str, Samples]) -> Slowdown:
    """Return the slowdown per other device: the median over devices of the time together over the time alone.

    Only samples in which no thread waited for a core count: while one waits, the others are alone. Their median counts,
    not the shortest, as the shortest overlapped least.
    """
    fewest = min(samples.undisturbed_count for group in (alone, together) for samples in group.values())
    alone_seconds = float(np.median([samples.estimate_typical() for samples in alone.values()]))
    if fewest < MIN_CONTENTION_SAMPLES:
        return Slowdown(1.0, fewest, alone_seconds)
    ratios = [together[device].estimate_typical() / alone[device].estimate_typical() for device in alone]
    return Slowdown(1 + max(float(np.median(ratios)) - 1, 0.0) / (len(alone) - 1), fewest, alone_seconds)


def _make_work_task(
    session: RuntimeSession,
    feeds: Mapping[str, Array],
    busy: Sequence[str],
    kind: EventKind,
    samples: Mapping[str, Samples],
) -> Callable[[], object]:
    def sample_work() -> None:
        times = run_once(session, feeds)
        for device in busy:
            samples[device].add(_list_simultaneous_seconds(times, device, busy, kind), times.waiting_share)

    return sample_work


def _list_simultaneous_seconds(times: RequestTimes, device: str, busy: Sequence[str], kind: EventKind) -> list[float]:
    """Return the seconds of a device's events during which all other busy devices were working."""
    events = {name: [event for event in times.events if (event.kind, event.device) == (kind, name)] for name in busy}
    return [
        event.finish_seconds - event.start_seconds
        for event in events[device]
        if all(_compute_overlap(event, events[other]) >= MIN_OVERLAP_SHARE for other in busy if other != device)
    ]


def _compute_overlap(event: Event, others: Sequence[Event]) -> float:
    """Return the share of an event's time in which other events went on."""
    shared = sum(
        max(min(event.finish_seconds, other.finish_seconds) - max(event.start_seconds, other.start_seconds), 0.0)
        for other in others
    )
    return shared / max(event.finish_seconds - event.start_seconds, 1e-9)


def _make_streaming_work(device: str, index: int, _: str) -> tuple[list[Probe], dict[str, Array]]:
    """Multiply a vector with a matrix larger than any cache."""
    matrix = np.full((STREAMED_SIZE, STREAMED_SIZE), 1e-3, np.float32)
    return [_make_products_probe(device, index, 1)], {
        f"x{index}": np.ones((1, STREAMED_SIZE), np.float32),
        f"w{index}": matrix,
    }


def _make_computing_work(device: str, index: int, _: str) -> tuple[list[Probe], dict[str, Array]]:
    """Multiply matrices that stay in the cache."""
    matrix = np.eye(COMPUTED_SIZE, dtype=np.float32)
    return [_make_products_probe(device, index, 8)], {f"x{index}": matrix, f"w{index}": matrix}


def _make_products_probe(device: str, index: int, count: int) -> Probe:
    steps = [f"x{index}", *[f"t{node}" for node in range(1, count)], f"y{index}"]
    text = " ".join(f"{after} = MatMul({before}, w{index})" for before, after in pairwise(steps))
    return Probe(device, text, (f"x{index}", f"w{index}"), (f"y{index}",), "float[?, ?]")


def _make_exchanging_work(device: str, index: int, source: str) -> tuple[list[Probe], dict[str, Array]]:
    """Receive a large value from the next device."""
    producer = Probe(source, f"m{index} = Identity(x{index})", (f"x{index}",), (f"m{index}",))
    consumer = Probe(device, f"y{index} = Identity(m{index})", (f"m{index}",), (f"y{index}",), stage=1)
    return [producer, consumer], {f"x{index}": np.ones(EXCHANGED_BYTES // 4, np.float32)}
