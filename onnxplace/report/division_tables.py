"""Tables of how a bundle divides its work: shards, stages, replicas, repeats, the training step."""

from __future__ import annotations

from collections.abc import Iterator

from onnxplace.bundle import Manifest, list_routes
from onnxplace.report.page_records import Table
from onnxplace.report.text import format_milliseconds


def list_division(manifest: Manifest) -> tuple[Table, ...]:
    """Return the tables that apply to a bundle, none for whole operators on one route."""
    return tuple(_iterate_tables(manifest))


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
