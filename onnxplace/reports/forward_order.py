"""Orders of nodes and of their groups in which no edge runs backwards."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence
from heapq import heappop, heappush

Edges = Collection[tuple[int, int]]
"""Each from an item to one that reads it; none twice."""


def sort_forward(count: int, edges: Edges) -> list[int]:
    """Return items 0 to `count` - 1, each after all that it reads; of a circle, the smallest comes first.

    >>> sort_forward(4, [(3, 1), (1, 2), (2, 1)])
    [0, 3, 1, 2]
    """
    readers, missing = defaultdict[int, list[int]](list), Counter[int]()
    for source, reader in edges:
        readers[source].append(reader)
        missing[reader] += 1
    ready = [item for item in range(count) if not missing[item]]
    smallest, order = iter(range(count)), dict[int, None]()
    while len(order) < count:
        item = heappop(ready) if ready else next(item for item in smallest if item not in order)
        order[item] = None
        for reader in readers[item]:
            missing[reader] -= 1
            if not missing[reader] and reader not in order:
                heappush(ready, reader)
    return [*order]


def divide_forward(items: Sequence[int], keys: Sequence[Hashable], edges: Edges) -> list[list[int]]:
    """Return runs of items with one key, in an order in which no edge runs from a run to an earlier one.

    A key has one run, or several where values leave it and come back.

    Args:
        items: Each after all that it reads.
        keys: Of each item.
        edges: Between these items.

    >>> divide_forward([0, 1, 2, 3], "abab", [(0, 2)]), divide_forward([0, 1, 2, 3], "abab", [(0, 1), (1, 2)])
    ([[0, 2], [1, 3]], [[0], [1, 3], [2]])
    """
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    place = {item: number[key] for item, key in zip(items, keys)}
    between = {(place[source], place[reader]) for source, reader in edges if place[source] != place[reader]}
    rank = {key: position for position, key in enumerate(sort_forward(len(number), between))}
    place = {item: rank[key] for item, key in place.items()}
    # Keys from one that is read by later ones, up to the last of these, take turns: together they are a knot.
    reach = dict[int, int]()
    for source, reader in between:
        reach[rank[reader]] = max(reach.get(rank[reader], 0), rank[source])
    knot, end = list[int](), -1
    for position in range(len(number)):
        knot.append(position if position > end else knot[-1])
        end = max(end, reach.get(position, 0))
    inputs = defaultdict[int, list[int]](list)
    for source, reader in edges:
        if knot[place[source]] == knot[place[reader]]:
            inputs[reader].append(source)
    turn, runs = dict[int, int](), defaultdict[tuple[int, int, int], list[int]](list)
    for item in items:  # a value for an earlier key of the knot begins another turn
        own = place[item]
        turn[item] = max((turn[source] + (place[source] > own) for source in inputs[item]), default=0)
        runs[knot[own], turn[item], own].append(item)
    return [runs[key] for key in sorted(runs)]
