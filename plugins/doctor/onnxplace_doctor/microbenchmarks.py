"""Benchmarks of hops between two devices, of calls of segments, and of the same work on several devices at once.

The runtime runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from onnxplace.feeds.feeds import Array
from onnxplace.pipeline.registry import create_runtime
from onnxplace.runtime.interface import Event, EventKind, RuntimeSession
from onnxplace.target.kind_table import find_kind
from onnxplace.target.target import Target
from onnxplace_doctor.probe_runs import (
    ANY_SIZE,
    LOWER_QUARTILE,
    MEDIAN,
    Probe,
    RequestTimes,
    Samples,
    run_once,
    write_probe_bundle,
)

# Values up to SMALL_BYTES make many hops in one request; computing with values up to TINY_BYTES takes no time.
TINY_BYTES, SMALL_BYTES = 1 << 12, 1 << 16
SMALL_HOPS, LARGE_HOPS = 16, 4
# An NPU's compiler has to find room for a value: that of QNN's simulator refuses a vector of 16 MiB.
MAX_STATIC_BYTES = 1 << 22
# The first hops of a request wake devices that slept for long, and use memory that the system has yet to provide.
SETTLING_HOPS = 2
# Segments in a row in the benchmark of calls; nodes, inputs or outputs that its probes have in addition.
SEGMENTS_PER_REQUEST, EXTRA_VALUES = 8, 16

T = TypeVar("T")


@dataclass(frozen=True)
class Benchmark(Generic[T]):
    """Tasks that take samples, one request each, and a function that evaluates them."""

    tasks: Sequence[Callable[[], object]]
    """For `take_turns`: machines drift over seconds, so samples should be spread over time."""
    result: Callable[[], T]
    """To be called after the last task."""


def open_probes(stack: ExitStack, folder: Path, target: Target, probes: Sequence[Probe]) -> RuntimeSession:
    """Open probes with the default runtime, traced, until the stack is closed."""
    folder.mkdir(parents=True)
    bundle = write_probe_bundle(folder, target, probes)
    return stack.enter_context(create_runtime("onnxruntime").open(bundle, trace=True))


def _run_warm(session: RuntimeSession, feeds: Mapping[str, Array]) -> RequestTimes:
    """Run a request twice and return the second, which finds warm caches.

    Cold caches would be most of the time of a tiny segment. The costs of larger ones include them (`APART_SECONDS`).
    """
    run_once(session, feeds)
    return run_once(session, feeds)


def _add_median(samples: Samples, seconds: Sequence[float], waiting_share: float) -> None:
    """Add the median of repetitions in one request as one sample."""
    samples.add([float(np.median(seconds))], waiting_share)


# ---------------------------------------------------------------------------------------------- hops


@dataclass
class HopSamples:
    """Times of values that crossed from one device to another."""

    by_size: dict[int, Samples] = field(default_factory=dict)
    """From the end of the segment that computed a value to the start of the one that reads it."""
    woken_runs: Samples = field(default_factory=Samples)
    """Runs of a tiny segment right after a hop."""


def prepare_hops(
    stack: ExitStack, target: Target, pair: tuple[str, str], sizes: Sequence[int], folder: Path
) -> Benchmark[dict[tuple[str, str], HopSamples]]:
    """Prepare to send values back and forth between two devices; the result is by direction."""
    hops = {pair: HopSamples(), pair[::-1]: HopSamples()}
    tasks: list[Callable[[], object]] = []
    groups: list[tuple[str, int, list[int], str]] = [
        ("small", SMALL_HOPS, [size for size in sizes if size <= SMALL_BYTES], ANY_SIZE),
        ("large", LARGE_HOPS, [size for size in sizes if size > SMALL_BYTES], ANY_SIZE),
    ]
    if any(map(_needs_static_shapes, pair)):  # otherwise such a device would leave the segments to the CPU
        sizes = sorted({min(size, MAX_STATIC_BYTES) for size in sizes})
        groups = [(str(size), LARGE_HOPS, [size], f"float[{max(size // 4, 1)}]") for size in sizes]
    for name, count, group, kind in groups:
        if group:
            probes = [
                Probe(pair[i % 2], f"v{i + 1} = Identity(v{i})", (f"v{i}",), (f"v{i + 1}",), kind)
                for i in range(count + 1)
            ]
            session = open_probes(stack, folder / name, target, probes)
            tasks += [_make_hop_task(session, size, count, hops) for size in group]
    return Benchmark(tasks, lambda: hops)


def _needs_static_shapes(device: str) -> bool:
    return find_kind(device.partition(":")[0]).needs_static_shapes


def _make_hop_task(
    session: RuntimeSession, size: int, count: int, hops: Mapping[tuple[str, str], HopSamples]
) -> Callable[[], object]:
    """Return a task that sends a value of `size` bytes along a chain and adds its hops to `hops`."""
    for samples in hops.values():
        samples.by_size[size] = Samples()

    def sample_hops() -> None:
        feeds = {"v0": np.ones(max(size // 4, 1), np.float32)}
        times = _run_warm(session, feeds) if size <= SMALL_BYTES else run_once(session, feeds)
        runs = times.get_runs()
        pairs = list(pairwise(runs[str(index)] for index in range(SETTLING_HOPS, count + 1)))
        for direction, samples in hops.items():
            own_pairs = [(before, after) for before, after in pairs if (before.device, after.device) == direction]
            crossings = [after.start_seconds - before.finish_seconds for before, after in own_pairs]
            _add_median(samples.by_size[size], crossings, times.waiting_share)
            if size <= TINY_BYTES:
                readers = [after.finish_seconds - after.start_seconds for _, after in own_pairs]
                _add_median(samples.woken_runs, readers, times.waiting_share)

    return sample_hops


# ---------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True)
class CallCosts:
    """Costs of calling segments on a device, one right after the other."""

    segment_seconds: float
    """Per call."""
    input_seconds: float
    """Per input."""
    output_seconds: float
    """Per output."""
    copied_seconds: float
    """The time of a whole call that copies one tiny value, as `prepare_hops` runs it."""


def prepare_calls(stack: ExitStack, target: Target, device: str, folder: Path) -> Benchmark[CallCosts]:
    """Prepare to run tiny segments in a row: with one node, more nodes, more inputs, or more outputs.

    The time of a node is subtracted: it is part of the costs of nodes.
    """
    samples: dict[str, Samples] = {}
    tasks = []
    for name in ("plain", "copied", "nodes", "inputs", "outputs"):
        probes = [_make_call_probe(name, device, index) for index in range(SEGMENTS_PER_REQUEST)]
        session = open_probes(stack, folder / name, target, probes)
        samples[name] = Samples()
        tasks.append(partial(_sample_calls, session, _make_tiny_feeds(probes), samples[name]))
    return Benchmark(tasks, lambda: _compute_call_costs(samples))


def _sample_calls(session: RuntimeSession, feeds: Mapping[str, Array], samples: Samples) -> None:
    times = _run_warm(session, feeds)
    runs = times.list_run_seconds()[SEGMENTS_PER_REQUEST // 4 :]  # without those right after a sleep
    _add_median(samples, runs, times.waiting_share)


def _compute_call_costs(samples: Mapping[str, Samples]) -> CallCosts:
    seconds = {name: item.estimate(LOWER_QUARTILE) for name, item in samples.items()}
    plain_call = seconds["plain"]
    node = max(seconds["nodes"] - plain_call, 0.0) / EXTRA_VALUES
    input_seconds = max(seconds["inputs"] - plain_call, 0.0) / EXTRA_VALUES
    output_seconds = max((seconds["outputs"] - plain_call) / EXTRA_VALUES - node, 0.0)
    call = max(plain_call - node - input_seconds - output_seconds, 0.0)
    return CallCosts(call, input_seconds, output_seconds, seconds["copied"])


def _make_tiny_feeds(probes: Sequence[Probe]) -> dict[str, Array]:
    produced = {name for probe in probes for name in probe.outputs}
    return {name: np.ones(1, np.float32) for probe in probes for name in probe.inputs if name not in produced}


def _make_call_probe(kind: str, device: str, index: int) -> Probe:
    """Return a segment with one node, or with more nodes, inputs or outputs."""
    value, result = f"v{index}", f"v{index + 1}"
    size = "float[1]" if _needs_static_shapes(device) else ANY_SIZE
    if kind == "nodes":
        steps = [value, *[f"t{node}" for node in range(EXTRA_VALUES)], result]
        return Probe(device, " ".join(f"{b} = Neg({a})" for a, b in pairwise(steps)), (value,), (result,), size)
    if kind == "inputs":
        inputs = (value, *[f"x{number}" for number in range(EXTRA_VALUES)])
        return Probe(device, f"{result} = Max({', '.join(inputs)})", inputs, (result,), size)
    if kind == "outputs":
        outputs = (result, *[f"y{index}_{number}" for number in range(EXTRA_VALUES)])
        return Probe(device, " ".join(f"{name} = Neg({value})" for name in outputs), (value,), outputs, size)
    operator = "Identity" if kind == "copied" else "Neg"
    return Probe(device, f"{result} = {operator}({value})", (value,), (result,), size)


# ----------------------------------------------------------------------------------------------------------- contention


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
    tasks = [task for part in parts for task in part.tasks]
    return Benchmark(tasks, lambda: Contention(*(part.result() for part in parts)))


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
        tasks.append(partial(_sample_work, session, feeds, busy, kind, samples))
    return Benchmark(tasks, lambda: _compute_slowdown(alone, together))


def _compute_slowdown(alone: Mapping[str, Samples], together: Mapping[str, Samples]) -> Slowdown:
    """Return the slowdown per other device: the median over devices of the time together over the time alone.

    Only samples in which no thread waited for a core count: while one waits, the others are alone. Their median counts,
    not the shortest, as the shortest overlapped least.
    """
    fewest = min(samples.undisturbed_count for group in (alone, together) for samples in group.values())
    alone_seconds = float(np.median([samples.estimate(MEDIAN) for samples in alone.values()]))
    if fewest < MIN_CONTENTION_SAMPLES:
        return Slowdown(1.0, fewest, alone_seconds)
    ratios = [together[device].estimate(MEDIAN) / alone[device].estimate(MEDIAN) for device in alone]
    return Slowdown(1 + max(float(np.median(ratios)) - 1, 0.0) / (len(alone) - 1), fewest, alone_seconds)


def _sample_work(
    session: RuntimeSession,
    feeds: Mapping[str, Array],
    busy: Sequence[str],
    kind: EventKind,
    samples: Mapping[str, Samples],
) -> None:
    times = run_once(session, feeds)
    for device in busy:
        samples[device].add(_list_simultaneous_seconds(times, device, busy, kind), times.waiting_share)


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
