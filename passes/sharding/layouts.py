"""Layouts: where the parts of a value are on a group of devices.

The notation follows OneFlow's SBP and GSPMD: a value is replicated, partial, or split along one axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

_REPLICATED_AXIS, _PARTIAL_AXIS = -1, -2


class Layout(NamedTuple):
    """How a value lies on the devices of a group.

    A split axis of size n is seen as [outer, n / outer]. Each of the `outer` rows is cut at multiples of
    n / outer / blocks. `outer` above 1 serves axes that hold several tensors one after the other, such as q, k and v.
    `blocks` keeps units together, such as the heads of an attention.

    >>> REPLICATED.is_split, Layout(1, 1, 2).is_split
    (False, True)
    """

    axis: int
    """The split axis; negative for replicated and partial values."""
    outer: int = 1
    blocks: int = 0

    @property
    def is_split(self) -> bool:
        return self.axis >= 0

    def __str__(self) -> str:
        if self.axis == _REPLICATED_AXIS:
            return "replicated"
        if self.axis == _PARTIAL_AXIS:
            return "partial"
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

        Without `blocks`, the axis is cut as evenly as the shares ask for.
        """
        if min(outer, size) < 1 or size % outer:
            return None
        inner = size // outer
        blocks = blocks or inner
        if blocks < self.count or inner % blocks:
            return None
        cuts = self.cuts(blocks)
        if any(low >= high for low, high in pairwise(cuts)):
            return None
        # Blocks that all cuts keep together are one block: layouts with the same cuts are then equal.
        return Layout(axis, outer, blocks // math.gcd(blocks, *cuts))

    def ranges(self, layout: Layout, size: int, device: int) -> list[tuple[int, int]]:
        """Return the ranges [low, high) of a split axis of this size that a device has: `outer` of them."""
        inner = size // layout.outer
        block, cuts = inner // layout.blocks, self.cuts(layout.blocks)
        low, high = cuts[device] * block, cuts[device + 1] * block
        return [(row * inner + low, row * inner + high) for row in range(layout.outer)]

    def local_size(self, layout: Layout, size: int, device: int) -> int:
        """Return the size of a split axis on a device."""
        cuts = self.cuts(layout.blocks)
        return size // layout.blocks * (cuts[device + 1] - cuts[device])

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
        cuts = self.cuts(layout.blocks)
        return (cuts[device + 1] - cuts[device]) / layout.blocks

    def largest_fraction(self, layout: Layout | None) -> float:
        """Return the largest fraction of a value that a device has; 1 for an omitted one."""
        if layout is None:
            return 1.0
        return max(self.fraction(layout, device) for device in range(self.count))
