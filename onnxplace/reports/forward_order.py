"""Orders of nodes and of their groups in which no edge runs backwards."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence
from heapq import heappop, heappush

Edges = Collection[tuple[int, int]]
"""Each from an item to one that reads it; none twice."""


def sort_forward(count: int, edges: Edges) -> list[int]:
    """Return items 0 to `count` - 1, each after all that it reads.

    >>> sort_forward(4, [(3, 1), (1, 2)])
    [0, 3, 1, 2]
    """
    return [run[0] for run in divide_forward(range(count), range(count), edges)]


def divide_forward(items: Sequence[int], keys: Sequence[Hashable], edges: Edges) -> list[list[int]]:
    """Return runs of items with one key, in an order in which no edge runs backwards, neither between runs nor in one.

    A key has one run, or several where values leave it and come back.

    Args:
        items: Nodes or groups.
        keys: Of each item.
        edges: Between these items. Those of a circle of items are not all followed.

    >>> divide_forward([0, 1, 2, 3], "abab", [(0, 2)]), divide_forward([0, 1, 2, 3], "abab", [(0, 1), (1, 2)])
    ([[0, 2], [1, 3]], [[0], [1, 3], [2]])
    """
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    home = {item: number[key] for item, key in zip(items, keys)}
    # Inputs that are in no run yet: those of items, and those of keys from other keys.
    missing, outside, readers = Counter[int](), Counter[int](), defaultdict[int, list[int]](list)
    for source, reader in edges:
        readers[source].append(reader)
        missing[reader] += 1
        outside[home[reader]] += home[source] != home[reader]
    free = sorted(item for item in items if not missing[item])
    free_of: list[list[int]] = [[] for _ in number]
    for item in free:
        free_of[home[item]].append(item)
    ready = [key for key in range(len(number)) if not outside[key]]
    runs, done, rest = list[list[int]](), set[int](), iter(items)
    while len(done) < len(items):
        if not ready and not free:  # items read each other, which no computed step has
            free = [next(item for item in rest if item not in done)]
            free_of[home[free[0]]].append(free[0])
        # Where keys read each other, one of them begins with what needs no other.
        key, run = heappop(ready) if ready else home[heappop(free)], list[int]()
        while free_of[key]:
            item = heappop(free_of[key])
            run.append(item)
            done.add(item)
            for reader in readers[item]:
                missing[reader] -= 1
                outside[home[reader]] -= home[reader] != key
                if not missing[reader] and reader not in done:
                    heappush(free_of[home[reader]], reader)
                    heappush(free, reader)
                if home[reader] != key and not outside[home[reader]]:
                    heappush(ready, home[reader])
        runs += [run] if run else []
    return runs
