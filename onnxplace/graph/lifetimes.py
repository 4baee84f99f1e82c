"""What is alive over a sequence of positions: intervals, and the sizes that add up in them.

Accounts of memory (segments, layouts, contention) and cuts of pipelines ask this: of items that live from one position
to another, how much is there at each position? With four nodes in a sequence,

    value   size   alive at       positions   0  1  2  3
    a       5      0, 1, 2        a           5  5  5
    b       2         1, 2        b              2  2
    c       3            2, 3     c                 3  3
                                  together    5  7 10  3
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph.op_graph import Floats


def sum_alive(begin: NDArray[Any], end: NDArray[Any], size: NDArray[Any], count: int) -> Floats:
    """Return, for each position below `count`, the sum of the sizes of items with `begin <= position < end`.

    All three are per item. An item may end at `count`; one that ends where it begins is never alive. Sums of whole
    numbers below 2^53 are exact.

    >>> sum_alive(np.array([0, 1, 2]), np.array([3, 3, 4]), np.array([5, 2, 3]), 4).astype(int).tolist()
    [5, 7, 10, 3]
    """
    change = np.bincount(begin, size, count + 1) - np.bincount(end, size, count + 1)
    return np.cumsum(change, dtype=np.float64)[:count]
