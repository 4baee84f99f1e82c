"""Why segments, nodes and layouts are where they are: what the alternatives would cost, as tables of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from onnxplace.bundle import LayoutAlternativeRecord, ShardedKindRecord, ShardingRecord
from onnxplace.errors import format_count
from onnxplace.reports.page_records import Table
from onnxplace.reports.step_analysis import MAX_SIMULATED_NODES, PlacedStep
from onnxplace.utils import format_time

# Rows of a table: the most expensive nodes or segments.
MAX_MOVED = 20
# Other devices in a row, the nearest ones by the step.
MAX_LISTED_DEVICES = 4
# Neighbours whose layouts change that a row names.
MAX_LISTED_NEIGHBOURS = 3


def tabulate_alternatives(
    step: PlacedStep, names: Sequence[str], sharding: ShardingRecord | None = None
) -> tuple[Table, ...]:
    """Return the layouts that nodes could have where operators are split, else other devices, if there are several.

    Args:
        step: The simulated step, whose nodes may be segments.
        names: Its nodes as readers know them.
        sharding: How operators are split; their parts have their devices.
    """
    return tuple(_tabulate_moves(step, names) if sharding is None else _tabulate_layouts(sharding))


def _tabulate_moves(step: PlacedStep, names: Sequence[str]) -> Iterator[Table]:
    devices, count = len(step.device_names), len(step.graph)
    rows = min(MAX_MOVED, MAX_SIMULATED_NODES // max(devices * count, 1))
    own = step.simulation.finish_seconds - step.simulation.start_seconds
    ranked = np.argsort(-own, kind="stable")[:rows].tolist()
    if devices > 1 and ranked:
        yield Table(
            caption="The step with one of them on another device, and all others where they are",
            header=("what", "takes", "is on", "elsewhere, the step would be"),
            rows=tuple(
                (names[node], format_time(own[node]), step.device_names[step.device[node]], _list_moves(step, node))
                for node in ranked
            ),
        )


def _list_moves(step: PlacedStep, node: int) -> str:
    """Return how the step changes with a node on other devices; a dash where its times there are unknown."""
    before, moves = step.simulation.makespan_seconds, []
    for device, name in enumerate(step.device_names):
        if device != step.device[node] and (after := step.simulate_moved(np.array([node]), device)) is not None:
            moves.append((after - before, name))
    texts = [f"{describe_difference(seconds)} on {name}" for seconds, name in sorted(moves)[:MAX_LISTED_DEVICES]]
    return ", ".join(texts) or "–"


def describe_difference(seconds: float) -> str:
    """Return how much longer or shorter a step is, in words.

    >>> describe_difference(0.0012), describe_difference(-0.0012), describe_difference(0.0)
    ('1.2 ms longer', '1.2 ms shorter', 'as long')
    """
    if abs(seconds) < 1e-9:
        return "as long"
    return f"{format_time(abs(seconds))} {'longer' if seconds > 0 else 'shorter'}"


def _tabulate_layouts(sharding: ShardingRecord) -> Iterator[Table]:
    compared = [kind for kind in sharding.kinds if kind.alternatives]
    if compared:
        yield Table(
            caption="The step with another layout of a node, and all others chosen again, as the choice counts it",
            header=("node", "operator", "layout", "the step would be", "exchanges", "it forces"),
            rows=tuple(_describe_layout(kind, item) for kind in compared for item in kind.alternatives),
        )


def _describe_layout(kind: ShardedKindRecord, item: LayoutAlternativeRecord) -> tuple[str, ...]:
    """Return a row of the table of layouts."""
    kept = kind.alternatives[0].seconds or 0.0
    step = "impossible" if item.seconds is None else describe_difference(item.seconds - kept)
    exchanges = ", ".join(f"{count:+d} {name}" for name, count in item.exchanges.items())
    forced = [f"{change.node}: {change.before} → {change.after}" for change in item.neighbours[:MAX_LISTED_NEIGHBOURS]]
    if more := len(item.neighbours) - len(forced) + item.others:
        forced.append(format_count(more, "more node" if forced else "node"))
    what = f"{format_time(kept)}, kept" if item.is_kept else step
    return kind.node, kind.op, item.layout, what, exchanges, "; ".join(forced)
