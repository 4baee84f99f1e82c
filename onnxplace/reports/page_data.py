"""The data of a report about a bundle, or about a placed cost graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from onnxplace.bundle.bundle import Bundle, describe_step
from onnxplace.bundle.bundle_routes import list_routes, list_working_devices
from onnxplace.bundle.bundle_simulation import build_weight_stream
from onnxplace.bundle.manifest import Manifest
from onnxplace.cost_graph.data import CostGraph
from onnxplace.errors import Diagnostic, UsageError
from onnxplace.facts import Schedule, is_refused
from onnxplace.graph.op_graph import Ints, OpGraph
from onnxplace.pipeline.text_form import parse_pipeline
from onnxplace.reports.bundle_nodes import read_nodes
from onnxplace.reports.charts import draw_memory, draw_step, read_trace
from onnxplace.reports.layer_tree import LayerNode, build_layer_tree, name_layer
from onnxplace.reports.page_records import (
    Attempt,
    AttemptGroup,
    Crossing,
    DeviceSummary,
    Entry,
    NodeEdges,
    Note,
    PageData,
    Quantity,
    Table,
    Timeline,
)
from onnxplace.reports.step_analysis import PlacedStep, count_bytes, explain_step, list_crossings, simulate_segments
from onnxplace.reports.text import count_streamed_bytes, list_pools, tabulate_sizes
from onnxplace.reports.verdict import RATE_LABEL, ReportContext, judge_step
from onnxplace.simulation.weight_streams import WeightStream
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.quantities import format_bytes, format_time

# What times follow from.
FROM_TRIAL, FROM_COSTS = "from trial", "from node costs"

# --------------------------------------------------------------------------------------------------- attempts and notes


_TITLES = {
    "P040": "Placers: time of a step, from node costs",
    "P042": "Several devices or one: time of a step, from trial",
    "P043": "Strategies: time between two results, from node costs",
    "P046": "Groups of a training step: time of a step, from node costs",
    "P068": "Weights that stream, or all weights held: time of a step, from node costs",
    "P062": "Whole or split operators: time of a step, from node costs",
}


def list_attempts(notes: Iterable[Diagnostic]) -> tuple[AttemptGroup, ...]:
    """Return what was compared, the shortest first in each comparison."""
    return tuple(
        AttemptGroup(
            title=_TITLES.get(note.code, "Compared"),
            code=note.code,
            attempts=tuple(
                Attempt(figure.name, figure.seconds, index == 0)
                for index, figure in sorted(enumerate(note.figures), key=lambda item: (item[1].seconds, item[0]))
            ),
        )
        for note in notes
        if note.figures
    )


def list_notes(notes: Iterable[Diagnostic]) -> tuple[Note, ...]:
    """Return the diagnostics as the page shows them."""
    return tuple(Note(note.code, note.message, note.where, note.hint) for note in notes)


# -------------------------------------------------------------------------------------------------------------- bundles


def describe_bundle(bundle: Bundle, trace: Path | None = None) -> PageData:
    """Return what a report says about a bundle.

    Args:
        bundle: The open bundle.
        trace: A file that `onnxplace run --trace` wrote, whose timelines are shown instead.

    Raises:
        InputError: `trace` is not a trace of this bundle.
    """
    manifest = bundle.manifest
    step, nodes = simulate_segments(manifest), read_nodes(bundle)
    predicted, attempts = manifest.predicted, list_attempts(manifest.diagnostics)
    planned = manifest.trial.planned_seconds if manifest.trial else None
    limits = predicted.lower_bound_seconds, predicted.single_device_seconds
    bound = explain_step(step, predicted.step_seconds, *limits, predicted.request_seconds, planned)
    known = ReportContext(
        basis=FROM_COSTS if manifest.trial is None else FROM_TRIAL,
        step_seconds=manifest.trial.step_seconds if manifest.trial else None,
        times_as_fast=manifest.speedup,
        single_device_fits=predicted.single_device_fits,
        interval_seconds=predicted.interval_seconds,
        sizes=", ".join(f"{name} = {size}" for name, size in manifest.dimensions.items()),
        attempts=attempts,
        streams=tuple(_list_stream_changes(manifest)),
    )
    return PageData(
        title=manifest.metadata.file_name or manifest.model or bundle.path.name,
        source=bundle.path.absolute().name,
        kind="bundle",
        verdict=judge_step(step, bound, known),
        summary=tuple(_summarise(manifest)),
        devices=_list_devices(manifest, step),
        timelines=_draw_timelines(bundle, step, trace),
        memory=draw_memory(step, [item.weights_bytes for item in manifest.devices]),
        crossings=tuple(replace(item, layer=nodes.layers.get(item.value, "")) for item in list_crossings(step)),
        bound=bound,
        attempts=attempts,
        layers=build_layer_tree(nodes.nodes, {*zip(nodes.edges.source, nodes.edges.reader)}),
        edges=nodes.edges,
        segments=nodes.segments,
        division=tuple(_iterate_tables(manifest)),
        notes=list_notes(manifest.diagnostics),
        passes=list_passes(manifest.pipeline),
        origin=tuple(_list_origin(manifest)),
        files={name: (record.bytes, record.sha256) for name, record in {**manifest.files, **manifest.linked}.items()},
        summary_line=describe_step(manifest),
        is_unsure=manifest.is_unsure,
    )


def _draw_timelines(bundle: Bundle, step: PlacedStep, trace: Path | None) -> tuple[Timeline, ...]:
    """Return the timelines of a trace if there is one; else the predicted step, with the planned one after a trial."""
    manifest = bundle.manifest
    if trace is not None:
        plan = bundle.path.absolute().name if bundle.is_plan else ""
        return read_trace(trace, step.device_names, [segment.id for segment in manifest.segments], plan)
    if manifest.trial is None:
        return (draw_step(step, FROM_COSTS, "one request, by the costs of nodes"),)
    count = f"the median of {manifest.trial.requests} steps"
    measured = draw_step(step, FROM_TRIAL, f"one request; each segment takes {count}")
    if not any(segment.planned_seconds is not None for segment in manifest.segments):
        return (measured,)
    planned = simulate_segments(manifest, planned=True)
    return (measured, draw_step(planned, FROM_COSTS, "one request, by the costs of nodes"))


def _list_stream_changes(manifest: Manifest) -> Iterator[tuple[str, WeightStream]]:
    """Yield changes of how weights stream, in words, with what a step would wait for then."""
    if not manifest.streams:
        return

    def change(pools: int, rates: int) -> WeightStream:
        streams = [
            stream.model_copy(
                update={
                    "pool_bytes": pools * stream.pool_bytes,
                    "bytes_per_second": {home: rates * rate for home, rate in stream.bytes_per_second.items()},
                }
            )
            for stream in manifest.streams
        ]
        return build_weight_stream(manifest.model_copy(update={"streams": tuple(streams)}))

    pool_bytes, homes = sum(item.pool_bytes for item in manifest.streams), count_streamed_bytes(manifest)
    yield f"Weights that come twice as fast from {' and '.join(homes)}", change(1, 2)
    yield f"Pools twice as large, {format_bytes(pool_bytes)} more memory", change(2, 1)
    more = sum(homes.values()) - pool_bytes
    yield f"Memory for all weights, {format_bytes(max(more, 0))} more", WeightStream.none()


def _list_streams(manifest: Manifest) -> Iterator[tuple[str, ...]]:
    """Yield the row of each device to which weights stream."""
    held = {device.id: device.weights_bytes for device in manifest.devices}
    for stream in manifest.streams:
        own = {name for item in manifest.segments if item.device == stream.device for name in item.streamed}
        for home, rate in stream.bytes_per_second.items():
            size = sum(manifest.streamed[name].bytes for name in own if manifest.streamed[name].home == home)
            sizes = (held[stream.device] - stream.pool_bytes, stream.pool_bytes, size)
            yield stream.device, home, *map(format_bytes, sizes), f"{format_bytes(int(rate))}/s"


def _summarise(manifest: Manifest) -> Iterator[Quantity]:
    """Yield the figures on top of the page."""
    predicted, trial = manifest.predicted, manifest.trial
    if trial is None:
        yield _quantify_time("Step, from node costs", predicted.step_seconds)
    else:
        yield _quantify_time("Step, from trial", trial.step_seconds)
        yield _quantify_time("Step, from node costs", trial.planned_seconds)
    if manifest.streams:
        yield _quantify_time("Waits for weights in a step", predicted.weight_wait_seconds)
        yield _quantify_bytes("Weights that stream", sum(count_streamed_bytes(manifest).values()))
    fits = "" if predicted.single_device_fits else " (does not fit)"
    is_refused_everywhere = not predicted.single_device_fits and predicted.single_device_seconds == 0
    single = "refused" if is_refused_everywhere else format_time(predicted.single_device_seconds) + fits
    yield Quantity("Best single device", single, predicted.single_device_seconds)
    yield Quantity("Lower bound", format_time(predicted.lower_bound_seconds), predicted.lower_bound_seconds)
    if predicted.interval_seconds > 0:
        yield _quantify_time(RATE_LABEL, predicted.interval_seconds)
    used, available = len(list_working_devices(manifest)), len(manifest.target.devices)
    yield Quantity("Devices at work", f"{used} of {available}", used)
    yield _quantify_count("Segments", len(manifest.segments))
    yield _quantify_count("Nodes", sum(segment.nodes for segment in manifest.segments))
    yield _quantify_count("Transfers in a step", manifest.transfers)
    yield _quantify_bytes("Sent in a step", manifest.transfer_bytes)
    yield _quantify_bytes("Memory, all devices at their peaks", sum(item.peak_bytes for item in manifest.devices))
    for pool, size in list_pools(manifest):
        yield _quantify_bytes(f"Memory: {pool.describe()}, and hold at most", size)


def _quantify_time(label: str, seconds: float) -> Quantity:
    return Quantity(label, format_time(seconds), seconds, lower_is_better=True)


def _quantify_bytes(label: str, size: int) -> Quantity:
    return Quantity(label, format_bytes(size), size, lower_is_better=True)


def _quantify_count(label: str, count: int) -> Quantity:
    return Quantity(label, str(count), count)


def _list_devices(manifest: Manifest, step: PlacedStep) -> tuple[DeviceSummary, ...]:
    kinds = {
        item.id: (item.model or item.kind) + f", computes in {item.precision}" * (item.precision != "float32")
        for item in step.target.devices
    }
    return tuple(
        DeviceSummary(
            **item.model_dump(),
            kind=kinds[item.id],
            idle_seconds=max(step.simulation.makespan_seconds - item.compute_seconds, 0.0),
        )
        for item in manifest.devices
    )


def list_passes(pipeline: str) -> tuple[Entry, ...]:
    """Return each pass of a pipeline with its options; the text as it is where it cannot be read."""
    try:
        specs = parse_pipeline(pipeline)
    except UsageError:
        return (Entry("pipeline", pipeline),)
    texts = (", ".join(f"{key} = {value}" for key, value in spec.options.items()) for spec in specs)
    return tuple(Entry(spec.name, text or "default options") for spec, text in zip(specs, texts))


def _list_origin(manifest: Manifest) -> Iterator[Entry]:
    """Yield versions, digests, sizes, devices and links."""
    yield Entry("model", manifest.model)
    yield Entry("digest of the model", manifest.model_digest)
    yield Entry("placer", manifest.placer)
    yield Entry("pipeline", manifest.pipeline)
    yield Entry("format of the bundle", manifest.schema_version)
    for name, version in manifest.versions.items():
        yield Entry(name, version)
    if manifest.dimensions:
        yield Entry("sizes", ", ".join(f"{name} = {size}" for name, size in manifest.dimensions.items()))
    yield Entry("link model", manifest.target.link_model)
    yield from _list_links(manifest)
    for title, names in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        yield Entry(title, ", ".join(f"{item.name} {item.dtype}{_format_shape(item.shape)}" for item in names))
    if manifest.states:
        yield Entry("carried states", f"{len(manifest.states)}")
    if manifest.custom_operators:
        yield Entry("custom operators", ", ".join(manifest.custom_operators))
    if len(list_routes(manifest)) > 1:
        yield Entry("timelines", "of the first route")


# Links that the page lists one by one; a cluster of 64 devices has 4032.
MAX_LISTED_LINKS = 64


def _list_links(manifest: Manifest) -> Iterator[Entry]:
    links = manifest.target.links
    for link in links[:MAX_LISTED_LINKS]:
        rate, latency = format_bytes(int(link.bytes_per_second)), format_time(link.latency_seconds)
        yield Entry(f"link {link.source} → {link.destination}", f"{rate}/s, latency {latency}")
    if len(links) > MAX_LISTED_LINKS:
        yield Entry("further links", f"{len(links) - MAX_LISTED_LINKS}")


def _format_shape(shape: Sequence[int | str | None] | None) -> str:
    return "" if shape is None else f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


# ----------------------------------------------------------------------------------------------------- division of work


# Placers that give each device a stage of a pipeline.
STAGE_PLACERS = ("stages", "pipelined")


def _list_stages(manifest: Manifest) -> Iterator[tuple[str, ...]]:
    """Yield the row of each device with a program, in the order of its first segment."""
    segments = group_pairs((item.device, item) for item in manifest.segments)
    for stage, (device, own) in enumerate(segments.items(), 1):
        seconds = format_time(sum(item.seconds for item in own))
        yield str(stage), device, str(len(own)), str(sum(item.nodes for item in own)), seconds


def _iterate_tables(manifest: Manifest) -> Iterator[Table]:
    if manifest.sizes:
        hint = "; all else is about plan 0, `onnxplace report BUNDLE/plan1` shows plan 1" if manifest.plans else ""
        yield Table(f"Step of each plan at each size{hint}", *tabulate_sizes(manifest))
    if (sharding := manifest.sharding) is not None:
        stages = f", in each of {sharding.stages} stages" if sharding.stages > 1 else ""
        yield Table(
            caption=f"Operators split over {sharding.ways} devices{stages}",
            header=("operator", "split by", "nodes", "time on one device"),
            rows=tuple((kind.op, kind.layout, str(kind.count), format_time(kind.seconds)) for kind in sharding.kinds),
        )
        yield Table(
            caption="Exchanges between the parts",
            header=("exchange", "number"),
            rows=tuple((kind, str(count)) for kind, count in sharding.exchanges.items()),
        )
    if manifest.placer in STAGE_PLACERS:
        yield Table(
            caption="Pipeline stages, in the order in which a request reaches them",
            header=("stage", "device", "segments", "nodes", "compute"),
            rows=tuple(_list_stages(manifest)),
        )
    routes = list_routes(manifest)
    if len(routes) > 1:
        yield Table(
            caption="Routes of requests: copies of the model or of its stages",
            header=("route", "devices", "share of requests"),
            rows=tuple(
                (str(index), ", ".join(route.devices.values()), f"{route.share:.0%}")
                for index, route in enumerate(routes)
            ),
        )
    if manifest.streams:
        yield Table(
            caption="Weights that stream",
            header=("device", "from", "weights that stay", "pool", "weights that stream", "rate"),
            rows=tuple(_list_streams(manifest)),
        )
    if manifest.repeats:
        yield Table(
            caption="Repeated layers, of which one was measured",
            header=("layers", "nodes of one", "first node"),
            rows=tuple((str(item.count), str(item.nodes), item.first) for item in manifest.repeats),
        )
    if (training := manifest.training) is not None and (nodes := training.nodes) is not None:
        yield Table(
            caption=f"Training step with {len(training.parameters)} parameters",
            header=("phase", "nodes"),
            rows=tuple((phase, str(getattr(nodes, phase))) for phase in ("forward", "backward", "update")),
        )


# --------------------------------------------------------------------------------------------------- placed cost graphs


@dataclass(frozen=True)
class PlacedGraph:
    """A cost graph with its placement."""

    graph: CostGraph
    placer: str
    device: Ints
    """Per node, the index of its device."""
    schedule: Schedule
    is_feasible: bool
    seconds: float
    """Time to place."""
    diagnostics: tuple[Diagnostic, ...] = ()
    passes: tuple[str, ...] = ()
    """Names of the passes that ran."""
    options: Mapping[str, str] = field(default_factory=dict)
    """As the user gave them."""


def describe_placement(placed: PlacedGraph) -> PageData:
    """Return what a report says about a placed cost graph."""
    graph, schedule = placed.graph.profile.graph, placed.schedule
    target, profile = placed.graph.target, placed.graph.profile
    seconds = np.stack([profile.seconds[device.cost_class] for device in target.devices])
    seconds = np.where(is_refused(seconds), np.nan, seconds)
    own = seconds[placed.device, np.arange(len(graph))].tolist()
    step = PlacedStep(
        graph=graph,
        seconds=seconds,
        target=target,
        # A bare number would read as an amount.
        device_names=tuple(f"device {i}" if i.isdecimal() else i for i in map(str, placed.graph.device_ids)),
        device=placed.device,
        order=schedule.order,
        simulation=schedule.simulation,
        details=graph.ops,
    )
    simulation = schedule.simulation
    alone = float(np.nan_to_num(np.fmin.reduce(seconds.sum(axis=1))))  # 0 where each device refuses some node
    nodes = [
        LayerNode(*item, index, index)
        for index, item in enumerate(zip(graph.names, graph.ops, placed.device.tolist(), own))
    ]
    attempts, edges = list_attempts(placed.diagnostics), _list_edges(graph)
    layers = {
        name: name_layer(graph.names[node])
        for name, node in zip(graph.value_names, graph.producer.tolist())
        if node >= 0
    }
    crossings = tuple(replace(item, layer=layers[item.value]) for item in list_crossings(step))
    bound = explain_step(step, simulation.makespan_seconds, schedule.lower_bound_seconds, alone)
    return PageData(
        title=placed.graph.name,
        source=placed.graph.name,
        kind="placement",
        verdict=judge_step(step, bound, ReportContext(FROM_COSTS, attempts=attempts)),
        summary=tuple(_summarise_placement(placed, alone, crossings)),
        devices=_list_placement_devices(step),
        timelines=(draw_step(step, FROM_COSTS, "one step, node by node"),),
        memory=draw_memory(step, simulation.weights_bytes.tolist()),
        crossings=crossings,
        bound=bound,
        attempts=attempts,
        layers=build_layer_tree(nodes, {*zip(edges.source, edges.reader)}),
        edges=edges,
        segments=(),
        division=(),
        notes=list_notes(placed.diagnostics),
        passes=tuple(Entry(name, "") for name in placed.passes),
        origin=(
            Entry("cost graph", placed.graph.name),
            Entry("placer", placed.placer),
            Entry("link model", target.link_model),
            *(Entry(name, text) for name, text in placed.options.items()),
        ),
        files={},
    )


def _list_edges(graph: OpGraph) -> NodeEdges:
    value, reader = graph.readers.rows, graph.readers.items
    made = graph.producer[value] >= 0
    columns = graph.producer[value], reader, graph.value_bytes[value]
    return NodeEdges(*(tuple(column[made].tolist()) for column in columns))


def _summarise_placement(placed: PlacedGraph, alone: float, crossings: tuple[Crossing, ...]) -> Iterator[Quantity]:
    simulation = placed.schedule.simulation
    yield _quantify_time("Step, from node costs", simulation.makespan_seconds)
    yield Quantity("Work of a single device", format_time(alone), alone)
    lowest = placed.schedule.lower_bound_seconds
    yield Quantity("Lower bound", format_time(lowest), lowest)
    used = len(set(placed.device.tolist()))
    yield Quantity("Devices at work", f"{used} of {len(placed.graph.device_ids)}", used)
    yield _quantify_count("Nodes", len(placed.graph.ids))
    yield _quantify_count("Transfers in a step", len(simulation.transfers))
    yield _quantify_bytes("Sent in a step", count_bytes(crossings))
    yield _quantify_bytes("Memory, all devices at their peaks", int(simulation.peak_bytes.sum()))
    yield _quantify_time("Time to place", placed.seconds)
    if not placed.is_feasible:
        yield Quantity("Memory", "it does not fit")


def _list_placement_devices(step: PlacedStep) -> tuple[DeviceSummary, ...]:
    simulation, counts = step.simulation, np.bincount(step.device, minlength=len(step.device_names))
    return tuple(
        DeviceSummary(
            id=name,
            kind=device.kind,
            nodes=int(counts[index]),
            compute_seconds=float(simulation.compute_seconds[index]),
            idle_seconds=float(simulation.makespan_seconds - simulation.compute_seconds[index]),
            weights_bytes=int(simulation.weights_bytes[index]),
            peak_bytes=int(simulation.peak_bytes[index]),
            limit_bytes=device.memory_bytes,
        )
        for index, (name, device) in enumerate(zip(step.device_names, step.target.devices))
    )
