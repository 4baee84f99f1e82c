"""Format bundles, times and sizes as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from onnxplace.errors import format_count, format_name, format_names
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.quantities import format_bytes, format_milliseconds, list_first

if TYPE_CHECKING:
    from onnxplace.bundle.bundle import Bundle
    from onnxplace.bundle.manifest import Manifest, RepeatRecord, ShardingRecord, TrainingRecord
    from onnxplace.target.target import Pool


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Lay out rows in columns: the first `left` left-aligned, others right-aligned.

    >>> print(format_table(("device", "nodes"), [("cpu:0", "12")]))
    device  nodes
    cpu:0      12
    """
    lines = [[format_name(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def compile_summary(bundle: Bundle) -> str:
    """Return the summary of a bundle, on one screen."""
    manifest, precisions = bundle.manifest, {device.id: device.precision for device in bundle.target.devices}
    header = ("device", "nodes", "compute", "weights", "peak", "limit", "precision")
    columns = len(header) - (set(precisions.values()) == {"float32"})
    rows = [
        (
            device.id,
            str(device.nodes),
            format_milliseconds(device.compute_seconds),
            *map(format_bytes, (device.weights_bytes, device.peak_bytes, device.limit_bytes)),
            precisions[device.id],
        )
        for device in manifest.devices
    ]
    held = [(name, *map(format_bytes, item.model_dump().values())) for name, item in manifest.held.items()]
    transfer_size = format_bytes(manifest.transfer_bytes)
    nodes = format_count(sum(segment.nodes for segment in manifest.segments), "node")
    return "\n".join(
        [
            f"{format_name(manifest.model)}: {nodes}, placer {manifest.placer}",
            *_format_repeats(manifest.repeats),
            *_format_training(manifest.training),
            *_format_sharding(manifest.sharding),
            format_table(header[:columns], (row[:columns] for row in rows)),
            *([format_table(("all plans", "weights", "shared", "peak"), held)] if held else []),
            *(f"{pool.describe()}, and hold at most {format_bytes(size)}" for pool, size in list_pools(manifest)),
            f"segments: {len(manifest.segments)}, transfers: {manifest.transfers} ({transfer_size})",
            *_format_streams(manifest),
            *_format_routes(manifest),
            *_format_steps(manifest),
            *_format_openings(manifest),
            *_format_sizes(manifest),
            f"bundle: {bundle.path}",
        ]
    )


def list_pools(manifest: Manifest) -> list[tuple[Pool, int]]:
    """Return the pools of devices, each with a bound on the bytes that they hold at one time in a request."""
    peaks = {device.id: device.peak_bytes for device in manifest.devices}
    return [(pool, min(sum(map(peaks.__getitem__, pool.devices)), pool.memory_bytes)) for pool in manifest.target.pools]


def _format_steps(manifest: Manifest) -> list[str]:
    """Return a line about the step, and what is known with requests in flight."""
    from onnxplace.bundle.bundle import describe_step
    from onnxplace.pipeline.select_placer import OBJECTIVES  # imports what placing needs, and other texts do not

    predicted, trial = manifest.predicted, manifest.trial
    lines = [describe_step(manifest)]
    notes = {(note.code, note.where): note.message for note in manifest.diagnostics}
    if manifest.placer == OBJECTIVES["throughput"] or manifest.routes or ("P043", "throughput") in notes:
        rate = f" ({1 / predicted.interval_seconds:.4g} requests/s)" if predicted.interval_seconds > 0 else ""
        interval = format_milliseconds(predicted.interval_seconds)
        kind = "a disturbed trial" if ("C004", "throughput") in notes else "a trial"
        source = f"measured in {kind} with {trial.in_flight} in flight" if trial and trial.in_flight else "predicted"
        lines.append(f"with requests in flight, a result every {interval}{rate}, {source}")
        lines += [message for (code, _), message in notes.items() if code == "P048"]
    return lines


def count_streamed_bytes(manifest: Manifest) -> dict[str, int]:
    """Return the bytes of weights that stream, by their homes."""
    sizes = group_pairs((weight.home, weight.bytes) for weight in manifest.streamed.values())
    return {home: sum(own) for home, own in sizes.items()}


def _format_streams(manifest: Manifest) -> list[str]:
    """Return a line with the weights that stream, if some do."""
    if not manifest.streams:
        return []
    stay = sum(device.weights_bytes for device in manifest.devices) - sum(item.pool_bytes for item in manifest.streams)
    sources = [f"{format_bytes(size)} from {home}" for home, size in count_streamed_bytes(manifest).items()]
    ways = [
        f"{stream.device} through a pool of {format_bytes(stream.pool_bytes)} at "
        + " and ".join(f"{format_bytes(int(rate))}/s" for rate in stream.bytes_per_second.values())
        for stream in manifest.streams
    ]
    return [f"weights: {format_bytes(stay)} stay; {' and '.join(sources)} stream in each step, to {', '.join(ways)}"]


def _format_sizes(manifest: Manifest) -> list[str]:
    """Return a table of the sizes that the bundle was compiled for, if there were several."""
    count = format_count(1 + len(manifest.plans), "plan")
    own = [item.text for item in manifest.sizes if item.dimensions == manifest.dimensions]
    others = f"; the figures above are those of plan 0 at {own[0]}" if own else ""
    return [f"step of {count} at each size{others}", format_table(*tabulate_sizes(manifest))] if manifest.sizes else []


def tabulate_sizes(manifest: Manifest) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the header and the rows of a table: the step of each plan at each size that was compiled for."""
    plans = [f"plan {index}" for index in range(1 + len(manifest.plans))]
    sizes = [item for item in manifest.sizes if item.weight]
    steps = [["-" if step is None else format_milliseconds(step) for step in item.seconds] for item in sizes]
    rows = ((item.text, f"{item.weight:g}", *own, plans[item.fastest]) for item, own in zip(sizes, steps))
    return ("size", "weight", *plans, "fastest"), tuple(rows)


# Routes of the summary; the manifest has all of them.
MAX_LISTED_ROUTES = 8


def _format_openings(manifest: Manifest) -> list[str]:
    """Return a line with the times to open compiled models, if there are some."""
    times = [
        f"{segment.id} {format_milliseconds(item.open_seconds)} ({format_milliseconds(item.compile_seconds)})"
        for segment in manifest.segments
        for item in segment.compiled
    ]
    return [f"opening compiled segments (compiling anew): {format_names(times, quoted=False)}"] if times else []


def _format_routes(manifest: Manifest) -> list[str]:
    """Return a line that says which copies requests may take; none if there is one route."""
    from onnxplace.bundle.bundle_routes import list_routes

    routes = list_routes(manifest)
    if len(routes) == 1:
        return []
    ways = [f"{route.share:.0%} on {' and '.join(route.devices.values())}" for route in routes]
    shown = ", ".join(list_first(ways, MAX_LISTED_ROUTES, "more routes"))
    return [f"{describe_copies(manifest)}; of the requests {shown}"]


def describe_copies(manifest: Manifest) -> str:
    """Return what is there several times, as in `2 copies of the model`."""
    from onnxplace.bundle.bundle_routes import list_routes

    routes = list_routes(manifest)
    devices = {home: {route.devices[home] for route in routes} for home in routes[0].devices}
    total = {device for stand_ins in devices.values() for device in stand_ins}
    if len(total) == len(routes) * len(devices):
        what = "the model" if len(devices) == 1 else f"a pipeline of {len(devices)} devices"
        return f"{len(routes)} copies of {what}"
    return "copies of stages: " + " + ".join(str(len(stand_ins)) for stand_ins in devices.values())


def _format_training(training: TrainingRecord | None) -> list[str]:
    """Return lines that say what a training step consists of, if the model is one."""
    if training is None:
        return []
    moments = sum(len(parameter.moments) for parameter in training.parameters)
    gradients = sum(bool(parameter.gradient) for parameter in training.parameters)
    counts = [
        format_count(len(training.parameters), "parameter"),
        format_count(moments, "moment"),
        format_count(len(training.buffers), "buffer"),
        format_count(gradients, "gradient"),
    ]
    lines = [f"training step with the loss {training.loss!r}: {', '.join(counts)}"]
    if (nodes := training.nodes) is not None:
        backward = f"{nodes.backward} backward ({nodes.owned_backward} with their forward node)"
        one = f"{nodes.of_one_parameter} of them for one parameter only"
        lines.append(f"  nodes: {nodes.forward} forward, {backward}, {nodes.update} update; {one}")
    return lines


# Lines of operators in the summary; the manifest has all of them.
MAX_SHARDED_LINES = 4


def _format_sharding(sharding: ShardingRecord | None) -> list[str]:
    """Return lines that say how operators are split, the most expensive first."""
    if sharding is None:
        return []
    exchanges = ", ".join(f"{count} {kind}" for kind, count in sharding.exchanges.items()) or "no exchanges"
    by_op = group_pairs((kind.op, kind) for kind in sharding.kinds)
    total = sum(kind.seconds for kind in sharding.kinds)
    stages = f" in each of {sharding.stages} stages" if sharding.stages > 1 else ""
    lines = [f"operators split over {sharding.ways} devices{stages}: {exchanges}"]
    ranked = sorted(by_op.items(), key=lambda item: -sum(kind.seconds for kind in item[1]))
    for op, kinds in ranked[:MAX_SHARDED_LINES]:
        share = sum(kind.seconds for kind in kinds) / total if total else 0.0
        ways = ((kind, "on every device" if kind.layout == "whole" else f"by {kind.layout}") for kind in kinds[:4])
        layouts = ", ".join(f"{kind.count} {way}" for kind, way in ways)
        lines.append(f"  {op} ({share:.0%} of the time): {layouts}")
    return lines


def _format_repeats(repeats: Sequence[RepeatRecord]) -> list[str]:
    """Return a line with the three largest repeats, if any."""
    largest = sorted(repeats, key=lambda repeat: -repeat.count * repeat.nodes)
    texts = [f"{repeat.count} x layer of {repeat.nodes} nodes (from {repeat.first!r})" for repeat in largest]
    return [f"repeats: {', '.join(list_first(texts, 3))}"] if texts else []
