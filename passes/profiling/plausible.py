"""What measured or given costs can be at most: more is a damaged file, or a mistake in it."""

from __future__ import annotations

# Sums of such amounts are still 64-bit integers.
MAX_BYTES = 1 << 50
MAX_ALL_BYTES = 1 << 60
MAX_WHOLE_SECONDS = 1e9
# Figures of how sure a measurement is: iterations, runs, spread.
MAX_FIGURE = 1e15
