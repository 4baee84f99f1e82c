"""Orders of nodes and of their groups in which no edge runs backwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from itertools import groupby

from onnxplace.graph import order_items

Edges = Collection[tuple[int, int]]
"""Each from an item to one that reads it; none twice."""


def sort_forward(count: int, edges: Edges) -> list[int]:
    """Return items 0 to `count` - 1, each after all that it reads, without those on a circle or after one.

    >>> sort_forward(4, [(3, 1), (1, 2)]), sort_forward(4, [(0, 1), (1, 2), (2, 1), (2, 3)])
    ([0, 3, 1, 2], [0])
    """
    readers: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for source, reader in edges:
        readers[source].append(reader)
        missing[reader] += 1
    return order_items(readers, missing)


def divide_forward(items: Sequence[int], keys: Sequence[Hashable], edges: Edges) -> list[list[int]]:
    """Return runs of items with one key, in an order in which no edge runs backwards.

    A key has one run, or several where values leave it and come back.

    Args:
        items: Each after all that it reads.
        keys: Of each item.
        edges: Between these items.

    >>> divide_forward([0, 1, 2, 3], "abab", [(0, 2)]), divide_forward([0, 1, 2, 3], "abab", [(0, 1), (1, 2)])
    ([[0, 2], [1, 3]], [[0], [1], [2], [3]])
    """
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    home = {item: number[key] for item, key in zip(items, keys)}
    between = {(home[source], home[reader]) for source, reader in edges if home[source] != home[reader]}
    # Before all circles of keys, and after all of them, each key is whole; in between, the order of the items stands.
    before = dict.fromkeys(sort_forward(len(number), between))
    back = sort_forward(len(number), {(reader, source) for source, reader in between})
    after = [key for key in reversed(back) if key not in before]
    members = defaultdict[int, list[int]](list)
    for item in items:
        members[home[item]].append(item)
    whole = {*before, *after}
    divided = groupby((item for item in items if home[item] not in whole), lambda item: home[item])
    return [*(members[key] for key in before), *([*run] for _, run in divided), *(members[key] for key in after)]
