"""Measure what predictions are made from: links, calls of segments, and devices that slow each other down.

All of it goes through the runtime itself, with bundles made for the purpose; docs/target.md says what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from onnxplace.calibration.link_fit import LinkFit, fit_link
from onnxplace.calibration.microbenchmarks import (
    CallCosts,
    Contention,
    HopSamples,
    estimate_undisturbed,
    prepare_calls,
    prepare_contention,
    prepare_hops,
)
from onnxplace.calibration.samples import MIN_UNDISTURBED_SAMPLES, Samples, take_turns
from onnxplace.errors import UsageError
from onnxplace.machine import available_memory_bytes, link_technology, require_cuda
from onnxplace.target import SEGMENT_OVERHEAD_SECONDS, Device, Link, LinkModel, Shared, Target
from onnxplace.utils import temporary_folder

TRANSFER_SIZES_BYTES = tuple(4**power for power in range(15))
"""Bytes of the values that cross, 1 B to 256 MiB: were some closer than others, the fit would be of those."""
DEFAULT_SECONDS = 30.0
Observer = Callable[[str, int, int], None]
"""Is told what is measured next, its number, and of how many."""

# Samples of each kind, however little time there is.
MIN_SAMPLES = 3
# A value is there several times while it crosses.
COPIES_PER_VALUE = 8
# Directions whose latency and bandwidth differ by no more are taken for one link.
MAX_LATENCY_DIFFERENCE, MAX_BANDWIDTH_DIFFERENCE = 0.3, 0.3
# Copies at once that share one channel evenly take twice as long. On a CPU, where they share the bandwidth of memory,
# 1.2 to 1.7 times, which changes no step: they hardly ever meet (docs/target.md).
MIN_SHARED_CHANNEL_SLOWDOWN = 1.85
# A slowdown up to this is none that a measurement could tell from noise.
MAX_NOISE_SLOWDOWN = 1.05


@dataclass(frozen=True)
class LinkMeasurement:
    """One direction between two devices."""

    link: Link
    fit: LinkFit
    calm_samples: Mapping[int, int]
    """By size, how many samples did not wait for a core."""
    symmetric: bool
    """Whether the other direction is like it, so that both were fitted as one."""
    waking_seconds: float
    """Part of the latency: by how much a segment is slower after its device slept until a value came."""


@dataclass(frozen=True)
class Calibration:
    """What was measured, and the target that says so."""

    target: Target
    links: tuple[LinkMeasurement, ...]
    calls: Mapping[str, CallCosts]
    """By device."""
    together: tuple[str, ...]
    """The CPU devices."""
    at_once: Contention | None
    """What they do to each other; None unless there are two or more."""
    notes: tuple[str, ...]
    """What to know about these figures."""
    seconds: float
    """How long all of it took."""


def calibrate(
    target: Target,
    *,
    sizes: Sequence[int] = TRANSFER_SIZES_BYTES,
    seconds: float = DEFAULT_SECONDS,
    observer: Observer | None = None,
) -> Calibration:
    """Measure the devices of a target, all of which must be here, in about so many seconds.

    `sizes` are the bytes of values that cross; those for which memory lacks are left out. Raises UsageError for sizes
    or a time that cannot be, TargetError for a GPU that is not here.
    """
    sizes = _choose_sizes(sizes)
    if not seconds > 0:
        raise UsageError("U015", f"cannot measure for {seconds:g} seconds", where="--seconds", hint="give more than 0")
    for device in target.devices:
        if device.kind == "cuda":
            require_cuda(device.id)
    began = time.perf_counter()
    with temporary_folder() as folder:
        found, called, slower = _measure(target, sizes, seconds, folder, observer or (lambda *_: None))
    at = {device.id: device for device in target.devices}
    links = [link for (a, b), both in found.items() for link in _fit_links(both, (at[a], at[b]), called)]
    measured, notes = _build_target(target, links, called, slower), _list_notes(links, slower)
    return Calibration(measured, tuple(links), called, _list_cpus(target), slower, notes, time.perf_counter() - began)


def _list_cpus(target: Target) -> tuple[str, ...]:
    return tuple(device.id for device in target.devices if device.kind == "cpu")


def _measure(
    target: Target, sizes: Sequence[int], seconds: float, folder: Path, observer: Observer
) -> tuple[dict[tuple[str, str], Mapping[tuple[str, str], HopSamples]], dict[str, CallCosts], Contention | None]:
    """Return hops by pair of devices, calls by device, and what CPU devices do to each other, if there are several.

    Pairs come one after another, since each holds large values. All else goes on beside them: a machine is quicker and
    slower for seconds at a time, and so each figure comes from as much of the time as there is.
    """
    pairs = [(a.id, b.id) for i, a in enumerate(target.devices) for b in target.devices[i + 1 :]]
    found: dict[tuple[str, str], Mapping[tuple[str, str], HopSamples]] = {}
    with ExitStack() as stack:
        called = {
            device.id: prepare_calls(stack, target, device.id, folder / f"calls-{number}")
            for number, device in enumerate(target.devices)
        }
        cpus = _list_cpus(target)
        slower = prepare_contention(stack, target, cpus, folder / "at-once") if len(cpus) > 1 else None
        beside = [task for timed in called.values() for task in timed.tasks]
        beside += slower.tasks if slower else []
        for number, pair in enumerate(pairs):
            observer(" <-> ".join(pair), number, len(pairs))
            with ExitStack() as own:
                crossing = prepare_hops(own, target, pair, sizes, folder / f"hops-{number}")
                take_turns([*crossing.tasks, *beside], seconds / len(pairs), MIN_SAMPLES)
            found[pair] = crossing.result()
        if not pairs:
            observer(target.devices[0].id, 0, 1)
            take_turns(beside, seconds, MIN_SAMPLES)
        by_device = {device: timed.result() for device, timed in called.items()}
        return found, by_device, slower.result() if slower else None


def _choose_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes that fit into memory, sorted; raises UsageError for what is no list of sizes."""
    found = tuple(sorted(set(sizes)))
    if not found or found[0] < 1:
        message = "there are no sizes to measure" if not found else f"a value of {found[0]} bytes cannot cross"
        raise UsageError("U015", message, where="--sizes", hint="write them as 1,4KiB,1MiB,64MiB")
    room = available_memory_bytes() // COPIES_PER_VALUE
    return tuple(size for size in found if size <= room) or found[:1]


def _fit_links(
    found: Mapping[tuple[str, str], HopSamples], pair: tuple[Device, Device], called: Mapping[str, CallCosts]
) -> list[LinkMeasurement]:
    """Fit both directions, as one if they are alike."""
    (a, b), ways = pair, [(pair[0].id, pair[1].id), (pair[1].id, pair[0].id)]
    waking = [_compute_waking(found[way], called[way[1]]) for way in ways]
    fits = [_fit_direction(found[way].by_size, extra) for way, extra in zip(ways, waking)]
    samples = [found[way].by_size for way in ways]
    same = _is_symmetric(*fits)
    if same:
        together = {size: _join_samples(samples[0][size], samples[1][size]) for size in samples[0]}
        samples, fits = [together] * 2, [_fit_direction(together, sum(waking) / 2)] * 2
    via = link_technology(a.id, b.id)
    return [
        LinkMeasurement(
            Link(*way, fit.latency_seconds, fit.bytes_per_second, via),
            fit,
            {size: taken.calm for size, taken in by_size.items()},
            same,
            extra,
        )
        for way, fit, by_size, extra in zip(ways, fits, samples, waking)
    ]


def _compute_waking(found: HopSamples, called: CallCosts) -> float:
    """Return by how much a tiny segment is slower after a hop than right after another one."""
    return max(estimate_undisturbed(found.woken) - called.copied_seconds, 0.0) if found.woken.seconds else 0.0


def _fit_direction(by_size: Mapping[int, Samples], extra: float) -> LinkFit:
    return fit_link(list(by_size), [estimate_undisturbed(taken) + extra for taken in by_size.values()])


def _join_samples(one: Samples, other: Samples) -> Samples:
    return Samples([*one.seconds, *other.seconds], [*one.waited, *other.waited])


def _is_symmetric(one: LinkFit, other: LinkFit) -> bool:
    return abs(one.latency_seconds - other.latency_seconds) <= MAX_LATENCY_DIFFERENCE * max(
        one.latency_seconds, other.latency_seconds
    ) and abs(one.bytes_per_second - other.bytes_per_second) <= MAX_BANDWIDTH_DIFFERENCE * max(
        one.bytes_per_second, other.bytes_per_second
    )


def _describe_sharing(cpus: tuple[str, ...], slower: Contention | None) -> tuple[Shared, ...]:
    """Return that CPU devices slow each other down, if it shows."""
    if slower is None:
        return ()
    memory, compute = slower.memory.factor, slower.compute.factor
    entry = Shared(cpus, memory, compute, slower.memory_bytes_per_second)
    return (entry,) if max(memory, compute) > MAX_NOISE_SLOWDOWN else ()


def _build_target(
    target: Target, links: Sequence[LinkMeasurement], called: Mapping[str, CallCosts], slower: Contention | None
) -> Target:
    """Return the target with what was measured in the place of constants."""
    devices = tuple(
        replace(
            device,
            segment_seconds=called[device.id].segment_seconds + SEGMENT_OVERHEAD_SECONDS,
            input_seconds=called[device.id].input_seconds,
            output_seconds=called[device.id].output_seconds,
        )
        for device in target.devices
    )
    one_channel = slower is not None and slower.copy.factor >= MIN_SHARED_CHANNEL_SLOWDOWN
    model: LinkModel = "sequential" if one_channel else target.link_model
    return Target(
        devices, tuple(measured.link for measured in links), model, _describe_sharing(_list_cpus(target), slower)
    )


def _list_notes(links: Sequence[LinkMeasurement], slower: Contention | None) -> tuple[str, ...]:
    """Say where the machine was too busy to tell, and what the fit does not cover."""
    notes = []
    busy = [size for link in links for size, calm in link.calm_samples.items() if calm < MIN_UNDISTURBED_SAMPLES]
    points = sum(len(link.calm_samples) for link in links)
    if busy:
        notes.append(f"the machine was busy: {len(busy)} of {points} points are the quickest of samples that waited")
    unseen = [what for what, found in vars(slower).items() if not found.seen] if slower else []
    if unseen:
        notes.append(f"the machine was too busy to see devices slow each other down at: {', '.join(unseen)}")
    left_out = sorted({point.bytes for link in links for point in link.fit.points if point.outlier})
    if left_out:
        named = ", ".join(map(str, left_out))
        notes.append(f"left out of the fit, which they miss by a factor of five or more: {named} bytes")
    return tuple(notes)
