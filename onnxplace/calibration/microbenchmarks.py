"""What calibration times, each through the runtime: hops between two devices, calls of segments, devices at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Generic, TypeVar, cast

import numpy as np

from onnxplace.calibration.probe_bundles import Probe, write_probe_bundle
from onnxplace.calibration.samples import MAX_WAITING_SHARE, MIN_UNDISTURBED_SAMPLES, RequestTimes, Samples, run_once
from onnxplace.feeds import Array
from onnxplace.pipeline import find_plugin
from onnxplace.runtime import Event, EventKind, Runtime, RuntimeSession
from onnxplace.target import Target

# Values up to SMALL_BYTES make many hops in one request; those up to TINY_BYTES take no time to compute with.
TINY_BYTES, SMALL_BYTES = 1 << 12, 1 << 16
SMALL_HOPS, LARGE_HOPS = 16, 4
# The first hop each way finds a device that has slept for long, and memory that the system has yet to give.
SETTLING_HOPS = 2
SEGMENTS_PER_REQUEST, EXTRA_VALUES = 8, 16
# Devices slow each other down from one moment to the next, in a virtual machine most of all: fewer calm samples than
# this tell nothing.
MIN_CONTENTION_SAMPLES = 10
# More than any cache keeps for one core; and matrices that stay in it.
STREAMED_SIZE, COMPUTED_SIZE = 4096, 256
EXCHANGED_BYTES = 1 << 24
# What ran beside something else for less of its time tells nothing of both at once.
MIN_OVERLAP_SHARE = 0.9

T = TypeVar("T")


@dataclass(frozen=True)
class Benchmark(Generic[T]):
    """Tasks that take samples, a request each, and what follows from them."""

    tasks: Sequence[Callable[[], object]]
    """For `take_turns`, while the time lasts: machines drift over seconds, so samples count that are far apart."""
    result: Callable[[], T]
    """To be called when each task was done."""


def _open_probes(stack: ExitStack, folder: Path, target: Target, probes: Sequence[Probe]) -> RuntimeSession:
    """Open probes with the runtime that runs bundles by default, traced, until the stack is left."""
    runtime = cast("type[Runtime]", find_plugin("runtimes", "onnxruntime"))()
    folder.mkdir(parents=True)
    return stack.enter_context(runtime.open(write_probe_bundle(folder, target, probes), trace=True))


def estimate_undisturbed(samples: Samples) -> float:
    """Return the lower quartile of what did not wait for a core, or the shortest if nearly everything did.

    Others use the caches and the memory of a machine, or of the one that a virtual machine is on, for seconds at a
    time: the median moves with how much of the time that was.
    """
    calm = [taken for taken, share in zip(samples.seconds, samples.waited) if share <= MAX_WAITING_SHARE]
    return float(np.quantile(calm, 0.25)) if len(calm) >= MIN_UNDISTURBED_SAMPLES else min(samples.seconds)


def _run_warm(session: RuntimeSession, feeds: Mapping[str, Array]) -> RequestTimes:
    """Run a request twice and return the second: the first finds the caches full of what ran before it.

    That would be most of the time of a tiny segment. What larger ones lose is in their costs (`APART_SECONDS`).
    """
    run_once(session, feeds)
    return run_once(session, feeds)


def _add_median(samples: Samples, taken: Sequence[float], waited: float) -> None:
    """Add the median of what a request repeated as one sample."""
    samples.add([float(np.median(taken))], waited)


# ---------------------------------------------------------------------------------------------- hops


@dataclass
class HopSamples:
    """Times of values that crossed from one device to another."""

    by_size: dict[int, Samples] = field(default_factory=dict)
    """From the end of the segment that made a value to the begin of the one that reads it."""
    woken: Samples = field(default_factory=Samples)
    """Runs of a tiny segment right after a hop."""


def prepare_hops(
    stack: ExitStack, target: Target, pair: tuple[str, str], sizes: Sequence[int], folder: Path
) -> Benchmark[dict[tuple[str, str], HopSamples]]:
    """Prepare to send values to and fro between two devices; what is measured in each direction."""
    found = {pair: HopSamples(), pair[::-1]: HopSamples()}
    tasks: list[Callable[[], object]] = []
    for name, count, some in (
        ("small", SMALL_HOPS, [size for size in sizes if size <= SMALL_BYTES]),
        ("large", LARGE_HOPS, [size for size in sizes if size > SMALL_BYTES]),
    ):
        if some:
            session = _open_probes(stack, folder / name, target, _build_chain(pair, count))
            tasks += [_make_hop_task(session, size, count, found) for size in some]
    return Benchmark(tasks, lambda: found)


def _build_chain(pair: tuple[str, str], count: int) -> list[Probe]:
    return [Probe(pair[i % 2], f"v{i + 1} = Identity(v{i})", (f"v{i}",), (f"v{i + 1}",)) for i in range(count + 1)]


def _make_hop_task(
    session: RuntimeSession, size: int, count: int, found: Mapping[tuple[str, str], HopSamples]
) -> Callable[[], object]:
    """Return a task that sends a value of `size` bytes along the chain and adds its hops to what was found."""
    for way in found:
        found[way].by_size[size] = Samples()

    def once() -> None:
        feeds = {"v0": np.ones(size, np.uint8)}
        ran = _run_warm(session, feeds) if size <= SMALL_BYTES else run_once(session, feeds)
        runs = ran.runs()
        steps = list(pairwise(runs[str(index)] for index in range(SETTLING_HOPS, count + 1)))
        for way, there in found.items():
            mine = [(before, after) for before, after in steps if (before.device, after.device) == way]
            crossed = [after.start_seconds - before.finish_seconds for before, after in mine]
            _add_median(there.by_size[size], crossed, ran.waited)
            if size <= TINY_BYTES:
                read = [after.finish_seconds - after.start_seconds for _, after in mine]
                _add_median(there.woken, read, ran.waited)

    return once


# ---------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True)
class CallCosts:
    """What calling segments costs on a device, one right after the other."""

    segment_seconds: float
    """Of the call."""
    input_seconds: float
    """Of each value taken."""
    output_seconds: float
    """Of each value given."""
    copied_seconds: float
    """Of a whole call that copies one tiny value: what `prepare_hops` runs."""


def prepare_calls(stack: ExitStack, target: Target, device: str, folder: Path) -> Benchmark[CallCosts]:
    """Prepare to run tiny segments in a row: with one node, with more nodes, with more inputs, with more outputs.

    What a node costs is taken off: it is in the costs of nodes.
    """
    taken: dict[str, Samples] = {}
    tasks = []
    for name, make in _PROBE_MAKERS.items():
        probes = [make(device, index) for index in range(SEGMENTS_PER_REQUEST)]
        session = _open_probes(stack, folder / name, target, probes)
        taken[name] = Samples()
        tasks.append(_make_call_task(session, _make_tiny_feeds(probes), taken[name]))
    return Benchmark(tasks, lambda: _compute_call_costs(taken))


def _make_call_task(session: RuntimeSession, feeds: Mapping[str, Array], samples: Samples) -> Callable[[], object]:
    def once() -> None:
        ran = _run_warm(session, feeds)
        _add_median(
            samples, ran.taken("run")[SEGMENTS_PER_REQUEST // 4 :], ran.waited
        )  # the first ones come after a sleep

    return once


def _compute_call_costs(taken: Mapping[str, Samples]) -> CallCosts:
    plain = estimate_undisturbed(taken["plain"])
    node = max(estimate_undisturbed(taken["nodes"]) - plain, 0.0) / EXTRA_VALUES
    each_input = max(estimate_undisturbed(taken["inputs"]) - plain, 0.0) / EXTRA_VALUES
    each_output = max((estimate_undisturbed(taken["outputs"]) - plain) / EXTRA_VALUES - node, 0.0)
    call = max(plain - node - each_input - each_output, 0.0)
    return CallCosts(call, each_input, each_output, estimate_undisturbed(taken["copied"]))


def _make_tiny_feeds(probes: Sequence[Probe]) -> dict[str, Array]:
    made = {name for probe in probes for name in probe.outputs}
    return {
        name: np.ones(1, np.uint8 if probe.kind.startswith("uint8") else np.float32)
        for probe in probes
        for name in probe.inputs
        if name not in made
    }


def _make_plain_probe(device: str, index: int) -> Probe:
    return Probe(device, f"v{index + 1} = Neg(v{index})", (f"v{index}",), (f"v{index + 1}",), "float[?]")


def _make_copying_probe(device: str, index: int) -> Probe:
    return Probe(device, f"v{index + 1} = Identity(v{index})", (f"v{index}",), (f"v{index + 1}",))


def _make_probe_with_nodes(device: str, index: int) -> Probe:
    steps = [f"v{index}", *[f"t{node}" for node in range(EXTRA_VALUES)], f"v{index + 1}"]
    nodes = " ".join(f"{after} = Neg({before})" for before, after in pairwise(steps))
    return Probe(device, nodes, (f"v{index}",), (f"v{index + 1}",), "float[?]")


def _make_probe_with_inputs(device: str, index: int) -> Probe:
    inputs = (f"v{index}", *[f"x{number}" for number in range(EXTRA_VALUES)])
    return Probe(device, f"v{index + 1} = Max({', '.join(inputs)})", inputs, (f"v{index + 1}",), "float[?]")


def _make_probe_with_outputs(device: str, index: int) -> Probe:
    outputs = (f"v{index + 1}", *[f"y{index}_{number}" for number in range(EXTRA_VALUES)])
    return Probe(device, " ".join(f"{name} = Neg(v{index})" for name in outputs), (f"v{index}",), outputs, "float[?]")


_PROBE_MAKERS: Mapping[str, Callable[[str, int], Probe]] = {
    "plain": _make_plain_probe,
    "copied": _make_copying_probe,
    "nodes": _make_probe_with_nodes,
    "inputs": _make_probe_with_inputs,
    "outputs": _make_probe_with_outputs,
}


# ---------------------------------------------------------------------------------------------- at once


@dataclass(frozen=True)
class Slowdown:
    """By how much work takes longer while other devices are busy."""

    factor: float
    """For each other device that is busy all the time; 1 where nothing shows."""
    calm_samples: int
    """The fewest samples in which nothing waited for a core, over devices, alone or together."""
    alone_seconds: float
    """What the work takes on a device alone."""

    @property
    def seen(self) -> bool:
        """Return whether there were enough calm samples to tell."""
        return self.calm_samples >= MIN_CONTENTION_SAMPLES


@dataclass(frozen=True)
class Contention:
    """What the same work on several devices at once costs more than on each alone."""

    memory: Slowdown
    compute: Slowdown
    copy: Slowdown

    @property
    def memory_bytes_per_second(self) -> float:
        """Return what a device alone reads from memory."""
        return 4 * STREAMED_SIZE**2 / self.memory.alone_seconds


def prepare_contention(stack: ExitStack, target: Target, devices: Sequence[str], folder: Path) -> Benchmark[Contention]:
    """Prepare the same work on each device alone and on all of them: streaming weights, computing, receiving."""
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
    """Prepare to compare the time together with the time alone."""
    alone, together = ({device: Samples() for device in devices} for _ in range(2))
    parts = {device: work(device, mark, devices[(mark + 1) % len(devices)]) for mark, device in enumerate(devices)}
    tasks: list[Callable[[], object]] = []
    for busy, into in [*[((device,), alone) for device in devices], (tuple(devices), together)]:
        # Makers of values come before what reads them, on all devices.
        probes = sorted((probe for device in busy for probe in parts[device][0]), key=lambda probe: probe.stage)
        feeds = {name: array for device in busy for name, array in parts[device][1].items()}
        session = _open_probes(stack, folder / str(len(tasks)), target, probes)
        tasks.append(_make_work_task(session, feeds, busy, kind, into))
    return Benchmark(tasks, lambda: _compute_slowdown(alone, together))


def _compute_slowdown(alone: Mapping[str, Samples], together: Mapping[str, Samples]) -> Slowdown:
    """Return the median over devices of the time together over the time alone, at least 1, for each other device.

    Only samples in which no thread waited for a core count: while one waits, the others are alone. Of those the median:
    the quickest together are those that met least.
    """
    fewest = min(samples.calm for found in (alone, together) for samples in found.values())
    base = float(np.median([samples.typical() for samples in alone.values()]))
    if fewest < MIN_CONTENTION_SAMPLES:
        return Slowdown(1.0, fewest, base)
    ratio = float(np.median([together[device].typical() / alone[device].typical() for device in alone]))
    return Slowdown(1 + max(ratio - 1, 0.0) / (len(alone) - 1), fewest, base)


def _make_work_task(
    session: RuntimeSession,
    feeds: Mapping[str, Array],
    busy: Sequence[str],
    kind: EventKind,
    into: Mapping[str, Samples],
) -> Callable[[], object]:
    def once() -> None:
        ran = run_once(session, feeds)
        for device in busy:
            into[device].add(_select_overlapped(ran, device, busy, kind), ran.waited)

    return once


def _select_overlapped(ran: RequestTimes, device: str, busy: Sequence[str], kind: EventKind) -> list[float]:
    """Return what each event of a device took, of those during which all other busy devices were at work."""
    spans = {name: [e for e in ran.events if e.kind == kind and e.device == name] for name in busy}
    return [
        event.finish_seconds - event.start_seconds
        for event in spans[device]
        if all(_overlap_share(event, spans[other]) >= MIN_OVERLAP_SHARE for other in busy if other != device)
    ]


def _overlap_share(event: Event, others: Sequence[Event]) -> float:
    shared = sum(
        max(min(event.finish_seconds, other.finish_seconds) - max(event.start_seconds, other.start_seconds), 0.0)
        for other in others
    )
    return shared / max(event.finish_seconds - event.start_seconds, 1e-9)


def _make_streaming_work(device: str, mark: int, _: str) -> tuple[list[Probe], dict[str, Array]]:
    """Multiply a vector with a matrix that no cache holds."""
    matrix = np.full((STREAMED_SIZE, STREAMED_SIZE), 1e-3, np.float32)
    return [_make_products_probe(device, mark, 1)], {
        f"x{mark}": np.ones((1, STREAMED_SIZE), np.float32),
        f"w{mark}": matrix,
    }


def _make_computing_work(device: str, mark: int, _: str) -> tuple[list[Probe], dict[str, Array]]:
    """Multiply matrices that stay in the cache."""
    one = np.eye(COMPUTED_SIZE, dtype=np.float32)
    return [_make_products_probe(device, mark, 8)], {f"x{mark}": one, f"w{mark}": one}


def _make_products_probe(device: str, mark: int, count: int) -> Probe:
    steps = [f"x{mark}", *[f"t{node}" for node in range(1, count)], f"y{mark}"]
    text = " ".join(f"{after} = MatMul({before}, w{mark})" for before, after in pairwise(steps))
    return Probe(device, text, (f"x{mark}", f"w{mark}"), (f"y{mark}",), "float[?, ?]")


def _make_exchanging_work(device: str, mark: int, source: str) -> tuple[list[Probe], dict[str, Array]]:
    """Receive a large value from the next device."""
    made = Probe(source, f"m{mark} = Identity(x{mark})", (f"x{mark}",), (f"m{mark}",))
    read = Probe(device, f"y{mark} = Identity(m{mark})", (f"m{mark}",), (f"y{mark}",), stage=1)
    return [made, read], {f"x{mark}": np.ones(EXCHANGED_BYTES, np.uint8)}
