"""Measured times of matrix products, as a few coefficients of a device and a type of numbers (docs/machines.md).

A kernel takes the time of its launch, then fills its pipeline along the axis that it sums over, then computes while it
reads and writes:

    seconds = launch + ramp * depth / (depth + ramp_length) + (computing ** s + moving ** s) ** (1 / s)

`computing` and `moving` are the times of its operations and bytes at the shares of the peak rates that products reach.
The larger one counts, and near their balance both do: the smaller `s`, the less they overlap. The time grows with each
size, and is never below what the peak rates allow.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from onnxplace.target.limits import MAX_SECONDS, require_number

# The least and the largest number of each field, in their order.
_RANGES = ((0.0, MAX_SECONDS), (0.0, MAX_SECONDS), (1.0, 1e9), (1e-6, 1.0), (1e-6, 1.0), (1.0, 20.0))


@dataclass(frozen=True)
class ProductTimes:
    """The coefficients of products of one type on a device."""

    launch_seconds: float
    """The least that a product takes."""
    ramp_seconds: float
    """What a long sum adds to the launch, until the device is busy."""
    ramp_length: float
    """Summed elements after which half of `ramp_seconds` has passed."""
    compute_share: float
    """Share of the peak rate of operations that large products reach."""
    memory_share: float
    """Share of the peak rate of memory that they reach."""
    sharpness: float
    """How well computing and moving overlap: 1 for not at all; from 3 on, the larger one counts."""

    def __post_init__(self) -> None:
        for item, (least, most) in zip(fields(self), _RANGES):
            require_number(self, item.name, "products", least, most)

    def seconds(self, computing: float, moving: float, depth: int, launch_seconds: float = 0.0) -> float:
        """Return the seconds of a product.

        >>> round(ProductTimes(2e-6, 4e-6, 1000, 0.8, 0.9, 2).seconds(2.4e-6, 3.6e-6, 3000), 9)
        1e-05

        Args:
            computing: Seconds of its operations at the peak rate.
            moving: Seconds of its bytes at the peak rate.
            depth: Length of the axis that it sums over.
            launch_seconds: The least that any kernel takes there, where that is longer than in the measurements.
        """
        low, high = sorted((computing / self.compute_share, moving / self.memory_share))
        overlapped: float = high * (1 + (low / high) ** self.sharpness) ** (1 / self.sharpness) if high else 0.0
        ramp = self.ramp_seconds * depth / (depth + self.ramp_length)
        return max(self.launch_seconds, launch_seconds) + ramp + overlapped
