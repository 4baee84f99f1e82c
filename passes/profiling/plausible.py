"""Upper limits of plausible costs; larger ones mean a damaged file."""

from __future__ import annotations

# Of one value or weight, and of all together: sums of such amounts are still 64-bit integers.
MAX_BYTES = 1 << 50
MAX_ALL_BYTES = 1 << 60
# Of one run of a whole model.
MAX_WHOLE_SECONDS = 1e9
# Figures of the quality of a measurement: runs, kernels, spread.
MAX_FIGURE = 1e15
