"""Why segments, nodes and layouts are where they are: what the alternatives would cost, as tables of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from onnxplace.bundle import LayoutAlternativeRecord, ShardingRecord
from onnxplace.errors import format_count
from onnxplace.reports.page_records import Table
from onnxplace.reports.step_analysis import MAX_SIMULATED_NODES, PlacedStep
from onnxplace.utils import format_time

# Rows of a table: the most expensive nodes or segments.
MAX_MOVED = 20
# Other devices in a row, the nearest ones by the step.
MAX_LISTED_DEVICES = 4
# Smaller differences are none.
MIN_SECONDS = 1e-9
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
    kept, moves = step.simulation.makespan_seconds, []
    for device, name in enumerate(step.device_names):
        if device != step.device[node] and (after := step.simulate_moved(np.array([node]), device)) is not None:
            moves.append((after, f"{describe_difference(after, kept)} on {name}"))
    texts = [text for _, text in sorted(moves)[:MAX_LISTED_DEVICES]]
    return ", ".join(texts) or "–"


def describe_difference(seconds: float | None, kept: float | None, *, is_kept: bool = False) -> str:
    """Return how a step compares with the one that was kept, in words.

    >>> describe_difference(0.0032, 0.002), describe_difference(0.002, 0.002, is_kept=True)
    ('1.2 ms longer', '2 ms, kept')
    """
    if seconds is None or kept is None:
        return "impossible"
    if is_kept or abs(seconds - kept) < MIN_SECONDS:
        return f"{format_time(kept)}, kept" if is_kept else "as long"
    return f"{format_time(abs(seconds - kept))} {'longer' if seconds > kept else 'shorter'}"


def _tabulate_layouts(sharding: ShardingRecord) -> Iterator[Table]:
    if compared := [kind for kind in sharding.kinds if kind.alternatives]:
        yield Table(
            caption="The step with another layout of a node, and all others chosen again, as the choice counts it",
            header=("node", *LAYOUT_COLUMNS),
            rows=tuple(
                (f"{kind.op} {kind.node}", *row) for kind in compared for row in describe_layouts(kind.alternatives)
            ),
        )


LAYOUT_COLUMNS = ("layout", "the step would be", "exchanges", "it forces")


def describe_layouts(layouts: Sequence[LayoutAlternativeRecord]) -> Iterator[tuple[str, ...]]:
    """Yield a row of `LAYOUT_COLUMNS` per layout of a node; the first one is the kept one."""
    for item in layouts:
        kept, exchanges = layouts[0].seconds, ", ".join(f"{count:+d} {name}" for name, count in item.exchanges.items())
        forced = [f"{node}: {change}" for node, change in item.neighbours.items()][:MAX_LISTED_NEIGHBOURS]
        if more := len(item.neighbours) - len(forced) + item.others:
            forced.append(format_count(more, "more node" if forced else "node"))
        yield item.layout, describe_difference(item.seconds, kept, is_kept=item.is_kept), exchanges, "; ".join(forced)
