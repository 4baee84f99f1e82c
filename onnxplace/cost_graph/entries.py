"""Read and check entries of a cost graph: lists, ids and costs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from onnxplace.errors import InputError, format_value
from onnxplace.graph import Floats

# Sums of larger numbers of bytes would not fit into 64 bits.
MAX_COST = 10**18


def require_ids(ids: Sequence[Any], kind: str, where: str) -> tuple[Hashable, ...]:
    """Return ids; raise InputError for one that is missing, a list or an object, or not unique."""
    seen: set[Hashable] = set()
    for node_id in ids:
        if node_id is None:
            raise InputError("D002", f"one of the {kind} has no id", where=where, hint='give each its own "id"')
        if not isinstance(node_id, Hashable):
            message = f"expected an id that is a number or a text, got {node_id!r}"
            raise InputError("D002", message, where=where, hint="change the id, and the edges that name it")
        if node_id in seen:
            raise InputError("D002", f"two {kind} have the id {node_id!r}", where=where)
        seen.add(node_id)
    return tuple(ids)


def require_list(data: Mapping[str, Any], key: str, where: str, optional: bool = False) -> list[Mapping[str, Any]]:
    """Return a list of entries; raise InputError unless all of them are objects."""
    items = data.get(key, [] if optional else None)
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise InputError("D001", f"not a cost graph: it has no list of {key}", where=where)
    return items


def read_costs(entries: Sequence[Mapping[str, Any]], key: str, where: str) -> Floats:
    """Return one cost of all entries, zero where it is missing; raise InputError if their sum is too large."""
    numbers = np.array([read_cost(entry, key, where) for entry in entries], dtype=np.float64)
    if float(numbers.sum()) > MAX_COST:
        message, hint = (
            f"{key} add up to {numbers.sum():.3g}, expected at most {MAX_COST:.0e}",
            "correct the unit of the numbers",
        )
        raise InputError("D002", message, where=where, hint=hint)
    return numbers


def read_cost(entry: Mapping[str, Any], key: str, where: str, missing: float = 0) -> float:
    """Return one cost of an entry; raise InputError unless it is a number from 0 to the limit."""
    value = entry.get(key, missing)
    if not _is_number(value) or not 0 <= value <= MAX_COST:
        name = entry.get("name", entry.get("id", "?"))
        hint = "correct the number, or leave it out for zero"
        message = f"{key} of {format_value(name)} is {format_value(value)}, expected a number from 0 to {MAX_COST:.0e}"
        raise InputError("D002", message, where=where, hint=hint)
    return value


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
