"""Measure the parameters of predictions: links, calls of segments, and contention between devices.

The runtime itself runs probe bundles for each of them; docs/target.md says what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path

from onnxplace.errors import UsageError
from onnxplace.machine.hardware import available_memory_bytes, find_link_technology, require_device
from onnxplace.target.target import SEGMENT_OVERHEAD_SECONDS, Device, Link, LinkModel, Shared, Target
from onnxplace.utils.file_locks import temporary_folder
from onnxplace_doctor.link_fit import LinkFit, fit_link
from onnxplace_doctor.microbenchmarks import (
    CallCosts,
    Contention,
    HopSamples,
    prepare_calls,
    prepare_contention,
    prepare_hops,
)
from onnxplace_doctor.probe_runs import LOWER_QUARTILE, MIN_UNDISTURBED_SAMPLES, Samples, take_turns

TRANSFER_SIZES_BYTES = tuple(4**power for power in range(15))
"""Bytes of the values that cross, 1 B to 256 MiB, evenly spaced so that the fit weighs all magnitudes equally."""
DEFAULT_SECONDS = 30.0
Observer = Callable[[str, int, int], None]
"""Called with the name of the next measurement, its index, and the number of all."""

# Samples of each kind, even if the time is over.
MIN_SAMPLES = 3
# At most this many copies of a value are in memory while it crosses.
COPIES_PER_VALUE = 8
# Directions whose latency and bandwidth differ by at most these shares are fitted as one link.
MAX_LATENCY_DIFFERENCE, MAX_BANDWIDTH_DIFFERENCE = 0.3, 0.3
# Simultaneous copies that share one channel evenly take twice as long. On a CPU, where they share the bandwidth of
# memory, they take 1.2 to 1.7 times as long, which changes no step: they hardly ever coincide (docs/target.md).
MIN_SHARED_CHANNEL_SLOWDOWN = 1.85
# Measurements cannot distinguish a slowdown up to this factor from noise.
MAX_NOISE_SLOWDOWN = 1.05


@dataclass(frozen=True)
class LinkMeasurement:
    """Measurements and fit of one direction between two devices."""

    link: Link
    fit: LinkFit
    undisturbed_samples: Mapping[int, int]
    """By size, the number of samples that did not wait for a core."""
    symmetric: bool
    """Whether both directions are alike, and were fitted as one."""
    waking_seconds: float
    """Part of the latency: the slowdown of a segment whose device slept until a value arrived."""


@dataclass(frozen=True)
class Calibration:
    """Measurements, and the target with their results."""

    target: Target
    links: tuple[LinkMeasurement, ...]
    call_costs: Mapping[str, CallCosts]
    """Costs of calls, by device."""
    cpu_devices: tuple[str, ...]
    contention: Contention | None
    """Contention between CPU devices; None for fewer than two."""
    notes: tuple[str, ...]
    """Limitations of these figures."""
    seconds: float
    """Duration of the calibration."""


def calibrate(
    target: Target,
    *,
    sizes: Sequence[int] = TRANSFER_SIZES_BYTES,
    seconds: float = DEFAULT_SECONDS,
    observer: Observer | None = None,
) -> Calibration:
    """Measure the devices of a target, all of which must be on this machine.

    Args:
        target: the devices; its links and costs of calls are replaced by measured ones.
        sizes: bytes of the values that cross, in whole floats; sizes that do not fit into memory are left out.
        seconds: about how long to measure.
        observer: called before each pair of devices.

    Raises:
        UsageError: for sizes or seconds that are not positive.
        TargetError: for a device that this machine does not have.

    >>> calibrate(local_target("cpu:0,cpu:1"), seconds=1.0).target.links  # doctest: +SKIP
    """
    sizes = _choose_sizes(sizes)
    if not seconds > 0:
        message = f"expected a positive number of seconds, got {seconds:g}"
        raise UsageError("U005", message, where="--seconds", hint="30 seconds suffice for most machines")
    for device in target.devices:
        require_device(device)
    began = time.perf_counter()
    with temporary_folder() as folder:
        hops, calls, contention = _measure(target, sizes, seconds, folder, observer or (lambda *_: None))
    devices = {device.id: device for device in target.devices}
    links = [link for (a, b), pair in hops.items() for link in _fit_links(pair, (devices[a], devices[b]), calls)]
    return Calibration(
        target=_build_target(target, links, calls, contention),
        links=tuple(links),
        call_costs=calls,
        cpu_devices=_list_cpus(target),
        contention=contention,
        notes=_list_notes(links, contention),
        seconds=time.perf_counter() - began,
    )


def _list_cpus(target: Target) -> tuple[str, ...]:
    """Return devices that compute on cores at once: of those that share a processor, ONNX Runtime's own comes first."""
    devices = sorted(target.devices, key=lambda item: not item.is_host)
    chosen = {devices[index].id for index in replace(target, devices=tuple(devices)).independent_devices}
    return tuple(device.id for device in target.devices if device.has_cores and device.id in chosen)


def _measure(
    target: Target, sizes: Sequence[int], seconds: float, folder: Path, observer: Observer
) -> tuple[dict[tuple[str, str], Mapping[tuple[str, str], HopSamples]], dict[str, CallCosts], Contention | None]:
    """Return hops by pair of devices, calls by device, and contention if there are several CPU devices.

    Pairs are measured one after another, since each holds large values. All else is measured alongside each pair: a
    machine is faster and slower for seconds at a time, so each figure uses as much of the time as possible.
    """
    pairs = [(a.id, b.id) for i, a in enumerate(target.devices) for b in target.devices[i + 1 :]]
    hops: dict[tuple[str, str], Mapping[tuple[str, str], HopSamples]] = {}
    with ExitStack() as stack:
        calls = {
            device.id: prepare_calls(stack, target, device.id, folder / f"calls-{number}")
            for number, device in enumerate(target.devices)
        }
        cpus = _list_cpus(target)
        contention = prepare_contention(stack, target, cpus, folder / "at-once") if len(cpus) > 1 else None
        common_tasks = [task for benchmark in calls.values() for task in benchmark.tasks]
        common_tasks += contention.tasks if contention else []
        for number, pair in enumerate(pairs):
            observer(" <-> ".join(pair), number, len(pairs))
            with ExitStack() as pair_stack:
                benchmark = prepare_hops(pair_stack, target, pair, sizes, folder / f"hops-{number}")
                take_turns([*benchmark.tasks, *common_tasks], seconds / len(pairs), MIN_SAMPLES)
            hops[pair] = benchmark.result()
        if not pairs:
            observer(target.devices[0].id, 0, 1)
            take_turns(common_tasks, seconds, MIN_SAMPLES)
        call_costs = {device: benchmark.result() for device, benchmark in calls.items()}
        return hops, call_costs, contention.result() if contention else None


def _choose_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes that fit into memory, sorted; raises UsageError if there are none, or not positive ones."""
    distinct = tuple(sorted(set(sizes)))
    if not distinct or distinct[0] < 1:
        message = f"expected positive sizes in bytes, got {distinct[0] if distinct else 'none'}"
        raise UsageError("U005", message, where="--sizes", hint="write them as 1,4KiB,1MiB,64MiB")
    max_bytes = available_memory_bytes() // COPIES_PER_VALUE
    return tuple(size for size in distinct if size <= max_bytes) or distinct[:1]


def _fit_links(
    hops: Mapping[tuple[str, str], HopSamples], pair: tuple[Device, Device], calls: Mapping[str, CallCosts]
) -> list[LinkMeasurement]:
    """Fit both directions of a pair, as one if they are alike."""
    (a, b), directions = pair, [(pair[0].id, pair[1].id), (pair[1].id, pair[0].id)]
    waking = [_compute_waking(hops[direction], calls[direction[1]]) for direction in directions]
    samples = [hops[direction].by_size for direction in directions]
    fits = [_fit_direction(by_size, seconds) for by_size, seconds in zip(samples, waking)]
    symmetric = _is_symmetric(*fits)
    if symmetric:
        joined = {size: _join_samples(samples[0][size], samples[1][size]) for size in samples[0]}
        samples, fits = [joined] * 2, [_fit_direction(joined, sum(waking) / 2)] * 2
    via = find_link_technology(a.id, b.id)
    return [
        LinkMeasurement(
            link=Link(*direction, fit.latency_seconds, fit.bytes_per_second, via),
            fit=fit,
            undisturbed_samples={size: item.undisturbed_count for size, item in by_size.items()},
            symmetric=symmetric,
            waking_seconds=seconds,
        )
        for direction, fit, by_size, seconds in zip(directions, fits, samples, waking)
    ]


def _compute_waking(hops: HopSamples, calls: CallCosts) -> float:
    """Return how much slower a tiny segment is after a hop than right after another segment."""
    return max(hops.woken_runs.estimate(LOWER_QUARTILE) - calls.copied_seconds, 0.0) if hops.woken_runs.seconds else 0.0


def _fit_direction(by_size: Mapping[int, Samples], waking_seconds: float) -> LinkFit:
    """Fit the transfers of one direction, with the waking of the destination added to each."""
    return fit_link(list(by_size), [samples.estimate(LOWER_QUARTILE) + waking_seconds for samples in by_size.values()])


def _join_samples(a: Samples, b: Samples) -> Samples:
    return Samples([*a.seconds, *b.seconds], [*a.waiting_shares, *b.waiting_shares])


def _is_symmetric(forward: LinkFit, backward: LinkFit) -> bool:
    rates = forward.bytes_per_second, backward.bytes_per_second
    has_one_latency = isclose(forward.latency_seconds, backward.latency_seconds, rel_tol=MAX_LATENCY_DIFFERENCE)
    return has_one_latency and isclose(*rates, rel_tol=MAX_BANDWIDTH_DIFFERENCE)


def _describe_sharing(cpus: tuple[str, ...], contention: Contention | None) -> tuple[Shared, ...]:
    """Return the mutual slowdown of CPU devices; empty if it does not exceed noise."""
    if contention is None:
        return ()
    memory, compute = contention.memory.factor, contention.compute.factor
    entry = Shared(cpus, memory, compute, contention.memory_bytes_per_second)
    return (entry,) if max(memory, compute) > MAX_NOISE_SLOWDOWN else ()


def _build_target(
    target: Target, links: Sequence[LinkMeasurement], calls: Mapping[str, CallCosts], contention: Contention | None
) -> Target:
    """Return the target with measured values in place of constants."""
    devices = tuple(
        replace(
            device,
            segment_seconds=calls[device.id].segment_seconds + SEGMENT_OVERHEAD_SECONDS,
            input_seconds=calls[device.id].input_seconds,
            output_seconds=calls[device.id].output_seconds,
        )
        for device in target.devices
    )
    one_channel = contention is not None and contention.copy.factor >= MIN_SHARED_CHANNEL_SLOWDOWN
    model: LinkModel = "sequential" if one_channel else target.link_model
    # What slows cores down is their common memory, whoever computes on them.
    shared = _describe_sharing(tuple(device.id for device in target.devices if device.has_cores), contention)
    return replace(target, devices=devices, links=tuple(item.link for item in links), link_model=model, shared=shared)


def _list_notes(links: Sequence[LinkMeasurement], contention: Contention | None) -> tuple[str, ...]:
    """Return notes on measurements that a busy machine disturbed, and on outliers of the fits."""
    notes = []
    counts = [count for link in links for count in link.undisturbed_samples.values()]
    if disturbed := sum(count < MIN_UNDISTURBED_SAMPLES for count in counts):
        points = f"{disturbed} of {len(counts)} points"
        notes.append(f"the machine was busy: {points} are the shortest of samples that waited")
    unclear = [work for work, slowdown in vars(contention).items() if not slowdown.seen] if contention else []
    if unclear:
        notes.append(f"the machine was too busy to measure how devices slow each other down at: {', '.join(unclear)}")
    outliers = sorted({point.bytes for link in links for point in link.fit.points if point.outlier})
    if outliers:
        sizes = ", ".join(map(str, outliers))
        notes.append(f"outliers, which differ from the fit by a factor of five or more: {sizes} bytes")
    return tuple(notes)
