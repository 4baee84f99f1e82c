"""Layouts: where the parts of a value are on a group of devices.

The notation follows OneFlow's SBP and GSPMD: a value is replicated, partial, or split along one axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

Rows = tuple[int, int]
"""The range [low, high) of an axis, in the numbering of the whole value."""

_REPLICATED_AXIS, _PARTIAL_AXIS = -1, -2


class Layout(NamedTuple):
    """How a value lies on the devices of a group.

    A split axis of size n is seen as [outer, n / outer]. Each of the `outer` rows is cut at multiples of
    n / outer / blocks. `outer` above 1 serves axes that hold several tensors one after the other, such as q, k and v.
    `blocks` keeps units together, such as the heads of an attention. With fewer blocks than devices, each block is on
    several devices, next to each other in the group.

    An axis whose size is not fixed is cut in runs: seen as [n / -outer, -outer], it may have any number of rows. So it
    is where a symbolic batch and heads are merged into one axis.

    Parts may overlap: a device then has halo rows, those of its neighbours, too, computed twice. Convolutions consume
    the overlap: a run of them needs one exchange. Some of the rows may be invalid, those computed without rows that
    they need. They are kept where it costs more to cut them off, but no valid row is ever computed of them.

    >>> REPLICATED.is_split, Layout(1, 1, 2).is_split
    (False, True)
    """

    axis: int
    """The split axis; negative for replicated and partial values."""
    outer: int = 1
    blocks: int = 0
    rows: tuple[Rows, ...] = ()
    """Per device, the range [low, high) of a split axis that it has where parts overlap; otherwise empty."""
    valid: tuple[Rows, ...] = ()
    """Per device, those of its rows that are valid; empty where all are."""

    @property
    def is_split(self) -> bool:
        return self.axis >= 0

    @property
    def is_in_runs(self) -> bool:
        """Return whether the axis may have any number of rows. Values of such layouts change to no other layout."""
        return self.outer < 0

    def contains(self, finer: Layout) -> bool:
        """Return whether a device of a layout with copies has its part of another one within its own.

        >>> Layout(0, 1, 2).contains(Layout(0, 1, 4)), Layout(0, 1, 2).contains(Layout(0, rows=((0, 3), (1, 4))))
        (True, False)
        """
        has_blocks = min(self.blocks, finer.blocks) > 0  # rows that overlap are in none
        return finer[:2] == self[:2] and has_blocks and finer.blocks % self.blocks == 0

    def in_runs(self, size: int) -> Layout:
        """Return the layout with rows of this length, for an axis of this size at the sizes of the compilation."""
        return self._replace(outer=-size // self.outer)

    def __str__(self) -> str:
        if self.axis == _REPLICATED_AXIS:
            return "replicated"
        if self.axis == _PARTIAL_AXIS:
            return "partial"
        if self.is_in_runs:
            return f"axis {self.axis} in runs of {-self.outer}"
        if self.rows:
            return f"axis {self.axis}, overlapping"
        return f"axis {self.axis}" + (f" in {self.outer} parts" if self.outer > 1 else "")


REPLICATED = Layout(_REPLICATED_AXIS)
"""Each device has the whole value."""
PARTIAL = Layout(_PARTIAL_AXIS)
"""Each device has a summand of the value."""


@dataclass(frozen=True)
class Division:
    """How axes are divided among the devices of a group.

    >>> Division((1.0, 1.0)).cuts(5)
    (0, 3, 5)
    >>> Division((3.0, 1.0)).cuts(8)
    (0, 6, 8)
    """

    shares: tuple[float, ...]
    """Share of the work of each device, in any unit."""

    @property
    def count(self) -> int:
        """Return the number of devices."""
        return len(self.shares)

    @cached_property
    def _bounds(self) -> tuple[float, ...]:
        total = sum(self.shares)
        return (0.0, *(sum(self.shares[: index + 1]) / total for index in range(self.count)))

    @cached_property
    def _cuts(self) -> dict[int, tuple[int, ...]]:
        return {}

    @property
    def is_even(self) -> bool:
        return len(set(self.shares)) == 1

    def cuts(self, blocks: int) -> tuple[int, ...]:
        """Return where a number of blocks is cut: device d has blocks cuts[d] to cuts[d + 1]."""
        if blocks not in self._cuts:
            # A small tolerance, so that halves round up in spite of rounding errors of the bounds.
            self._cuts[blocks] = tuple(math.floor(bound * blocks + 0.5 + 1e-9) for bound in self._bounds)
        return self._cuts[blocks]

    def split(self, axis: int, size: int, outer: int = 1, blocks: int = 0) -> Layout | None:
        """Return the layout of a split axis in its simplest form; None if some device would get nothing.

        Without `blocks`, the axis is cut as evenly as the shares ask for. Fewer blocks than devices are shared out if
        each is on the same number of like devices.
        """
        if size < 1 or not outer or size % outer:
            return None
        inner = size // outer if outer > 0 else -outer
        if 1 < blocks < self.count:
            can_share = self.is_even and self.count % blocks == 0 and inner % blocks == 0
            return Layout(axis, outer, blocks) if can_share else None
        blocks = blocks or inner
        if blocks < self.count or inner % blocks:
            return None
        cuts = self.cuts(blocks)
        if any(low >= high for low, high in pairwise(cuts)):
            return None
        # Blocks that all cuts keep together are one block: layouts with the same cuts are then equal.
        return Layout(axis, outer, blocks // math.gcd(blocks, *cuts))

    def copies(self, layout: Layout) -> int:
        """Return how many devices have each part of a split value.

        >>> Division((1.0,) * 4).copies(Layout(0, 1, 2))
        2
        """
        return max(self.count // layout.blocks, 1) if layout.blocks else 1

    def holders(self, layout: Layout, device: int) -> range:
        """Return devices that together have each part once, in order; readers spread over the copies."""
        copies = self.copies(layout)
        return range(device % copies, self.count, copies)

    def blocks_of(self, layout: Layout, device: int) -> tuple[int, int]:
        """Return the blocks [first, end) of a split axis that a device has."""
        copies = self.copies(layout)
        if copies > 1:
            return device // copies, device // copies + 1
        cuts = self.cuts(layout.blocks)
        return cuts[device], cuts[device + 1]

    def hold(self, axis: int, size: int, rows: Sequence[Rows]) -> Layout:
        """Return the layout in which each device has these rows, [low, high) of an axis, in its simplest form.

        Lower and upper ends must rise from device to device, and together the rows must be all of them.

        >>> Division((1.0, 1.0)).hold(2, 8, [(0, 5), (3, 8)])
        Layout(axis=2, outer=1, blocks=0, rows=((0, 5), (3, 8)), valid=())
        >>> Division((1.0, 1.0)).hold(2, 8, [(0, 4), (4, 8)])
        Layout(axis=2, outer=1, blocks=2, rows=(), valid=())
        """
        if all(own == (0, size) for own in rows):
            return REPLICATED
        cut = self.split(axis, size, 1, size // math.gcd(size, *chain(*rows)))
        if cut is not None and self.held(cut, size) == list(rows):
            return cut
        return Layout(axis, rows=tuple(rows))

    def holds(self, source: Layout, result: Layout) -> bool:
        """Return whether each device can make its part in one layout of its part in another one."""
        if source == REPLICATED or (self.copies(source) > 1 and source.contains(result)):
            return True
        if not self.shares_rows(source, result):
            return False
        size = (source.rows or result.rows)[-1][1]
        return all(
            have[0] <= want[0] and want[1] <= have[1]
            for rows in (self.held, self.valid)
            for have, want in zip(rows(source, size), rows(result, size))
        )

    @staticmethod
    def shares_rows(source: Layout, result: Layout) -> bool:
        """Return whether parts along one axis overlap in one of two layouts, so that rows go from part to part."""
        is_same = source.is_split and source.axis == result.axis and source.outer == result.outer == 1
        return is_same and bool(source.rows or result.rows)

    def held(self, layout: Layout, size: int) -> Sequence[Rows]:
        """Return the rows [low, high) of a split axis that each device has, of a layout that has one range on each."""
        return layout.rows or [self.ranges(layout, size, device)[0] for device in range(self.count)]

    def valid(self, layout: Layout, size: int) -> Sequence[Rows]:
        """Return the valid rows among those that each device has."""
        return layout.valid or self.held(layout, size)

    def owned(self, layout: Layout, size: int, device: int) -> Rows:
        """Return the rows that a device passes on to others; no two devices have the same ones.

        >>> division, layout = Division((1.0, 1.0)), Layout(2, rows=((0, 6), (3, 8)))
        >>> [division.owned(layout, 8, device) for device in (0, 1)]
        [(0, 4), (4, 8)]
        """
        middles = [(have[1] + more[0]) // 2 for have, more in pairwise(self.valid(layout, size))]
        ends = [0, *middles, size]
        return ends[device], ends[device + 1]

    def ranges(self, layout: Layout, size: int, device: int) -> list[tuple[int, int]]:
        """Return the ranges [low, high) of a split axis of this size that a device has: `outer` of them."""
        if layout.rows:
            return [layout.rows[device]]
        inner = size // layout.outer
        block, (first, end) = inner // layout.blocks, self.blocks_of(layout, device)
        low, high = first * block, end * block
        return [(row * inner + low, row * inner + high) for row in range(layout.outer)]

    def local_size(self, layout: Layout, size: int, device: int) -> int:
        """Return the size of a split axis on a device."""
        if layout.rows:
            return layout.rows[device][1] - layout.rows[device][0]
        first, end = self.blocks_of(layout, device)
        return size // layout.blocks * (end - first)

    def local_shape(self, layout: Layout, shape: Sequence[int], device: int) -> tuple[int, ...]:
        """Return the shape of a device's part of a value."""
        if not layout.is_split:
            return tuple(shape)
        sizes = list(shape)
        sizes[layout.axis] = self.local_size(layout, sizes[layout.axis], device)
        return tuple(sizes)

    def fraction(self, layout: Layout, device: int) -> float:
        """Return which fraction of a value a device has."""
        if not layout.is_split:
            return 1.0
        size = layout.rows[-1][1] if layout.rows else layout.blocks
        return self.local_size(layout, size, device) / size

    def largest_fraction(self, layout: Layout | None) -> float:
        """Return the largest fraction of a value that a device has; 1 for an omitted one."""
        if layout is None:
            return 1.0
        return max(self.fraction(layout, device) for device in range(self.count))
