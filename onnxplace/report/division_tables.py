"""Tables of how a bundle divides its work: shards, stages, replicas, repeats, the training step."""

from __future__ import annotations

from collections.abc import Iterator

from onnxplace.bundle import Manifest, list_routes
from onnxplace.report.page_records import Table
from onnxplace.report.text import format_milliseconds

# Placers that give each device a stage of a pipeline.
STAGE_PLACERS = ("stages", "pipelined")


def list_division(manifest: Manifest) -> tuple[Table, ...]:
    """Return the tables that apply to a bundle, none for whole operators on one route."""
    return tuple(_iterate_tables(manifest))


def _list_stages(manifest: Manifest) -> Iterator[tuple[str, ...]]:
    """Yield the row of each device with a program, in the order of its first segment."""
    segments = {device: [item for item in manifest.segments if item.device == device] for device in manifest.programs}
    first = {item.device: index for index, item in reversed(list(enumerate(manifest.segments)))}
    for stage, device in enumerate(sorted(first, key=lambda name: first[name]), 1):
        own = segments[device]
        seconds = format_milliseconds(sum(item.seconds for item in own))
        yield str(stage), device, str(len(own)), str(sum(item.nodes for item in own)), seconds


def _iterate_tables(manifest: Manifest) -> Iterator[Table]:
    if (sharding := manifest.sharding) is not None:
        stages = f", in each of {sharding.stages} stages" if sharding.stages > 1 else ""
        yield Table(
            caption=f"Operators split over {sharding.ways} devices{stages}",
            header=("operator", "split by", "nodes", "time on one device"),
            rows=tuple(
                (kind.op, kind.layout, str(kind.count), format_milliseconds(kind.seconds)) for kind in sharding.kinds
            ),
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
            rows=(
                ("forward", str(nodes.forward)),
                ("backward", str(nodes.backward)),
                ("update", str(nodes.update)),
            ),
        )
