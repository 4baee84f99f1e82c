"""What the alternatives of a plan would cost, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxplace.errors import format_count
from onnxplace.facts import LayoutAlternative
from onnxplace.utils.quantities import format_time

# Smaller differences are none.
MIN_SECONDS = 1e-9
# Neighbours whose layouts change that a row names.
MAX_LISTED_NEIGHBOURS = 3
LAYOUT_COLUMNS = ("layout", "the step would be", "exchanges", "it forces")


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


def describe_layouts(layouts: Sequence[LayoutAlternative]) -> Iterator[tuple[str, ...]]:
    """Yield a row of `LAYOUT_COLUMNS` per layout of a node; the first one is the kept one."""
    for item in layouts:
        kept, exchanges = layouts[0].seconds, ", ".join(f"{count:+d} {name}" for name, count in item.exchanges.items())
        forced = [f"{node}: {change}" for node, change in item.neighbours.items()][:MAX_LISTED_NEIGHBOURS]
        if more := len(item.neighbours) - len(forced) + item.others:
            forced.append(format_count(more, "more node" if forced else "node"))
        yield item.layout, describe_difference(item.seconds, kept, is_kept=item.is_kept), exchanges, "; ".join(forced)
