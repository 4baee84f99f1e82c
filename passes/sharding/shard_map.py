"""The user's own choice of how nodes are split: a map of patterns to kinds of split."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxplace.errors import UsageError, format_value, suggest_nearest
from onnxplace.passes.sharding.layouts import PARTIAL
from onnxplace.passes.sharding.space import StrategySpace
from onnxplace.passes.sharding.strategies import Strategy
from onnxplace.utils import match_names, parse_json, read_json

_WHERE = "--shard-map"
_EXAMPLE = '{"layers.*.mlp.*": "columns", "lm_head": "whole"}'
KINDS = ("whole", "split", "batch", "rows", "columns", "sum")
"""`whole`: not split. `split`: in any way. `batch`: the first axis of the result. `rows`: an axis between the first and
the last one. `columns`: the last axis, or the channels of a convolution. `sum`: the summed axis. Also `axis N`."""
_AXIS = re.compile(r"axis [0-9]{1,9}")


def restrict_space(space: StrategySpace, shard_map: str) -> StrategySpace:
    """Return the space with only those strategies that the user's map allows.

    Raises UsageError for a map that matches no node, or asks for a split that a node does not have. Raises InputError
    for a file that cannot be read.
    """
    rules = _read_map(shard_map)
    names = [node.name for node in space.facts.model.nodes]
    strategies = list(space.strategies)
    unmatched = []
    decided: set[int] = set()
    for (pattern, kind), positions in zip(rules.items(), match_names(list(rules), names, _WHERE)):
        free = [index for index in positions if index not in decided]
        decided.update(free)
        if not positions:
            unmatched.append(pattern)
            continue
        matching = {index: _filter(space, index, kind) for index in free}
        if free and not any(matching.values()):
            _raise_impossible(space, free, pattern, kind)
        for index, options in matching.items():
            if options:
                strategies[index] = options
    if unmatched:
        listed = ", ".join(repr(pattern) for pattern in unmatched[:3])
        hint = f"names look like {', '.join(repr(name) for name in names[:3])}"
        raise UsageError("U070", f"no node's name matches {listed}", where=_WHERE, hint=hint)
    return replace(space, strategies=tuple(strategies))


def _filter(space: StrategySpace, index: int, kind: str) -> Sequence[Strategy]:
    """Return the strategies of a node that are of a kind."""
    return tuple(strategy for strategy in space.strategies[index] if _is_kind(space, index, strategy, kind))


def _is_kind(space: StrategySpace, index: int, strategy: Strategy, kind: str) -> bool:
    layout = next((layout for layout in strategy.outputs if layout is not None), None)
    if kind == "whole":
        return not strategy.is_split and layout != PARTIAL
    if not strategy.is_split or layout is None:
        return False
    if kind == "split":
        return True
    if kind == "sum":
        return layout == PARTIAL
    if not layout.is_split:
        return False
    if kind.startswith("axis "):
        return layout.axis == int(kind.removeprefix("axis "))
    view = space.views[index]
    rank = len(view.result()) if view is not None else 0
    channels = 1 if view is not None and "Conv" in view.op else rank - 1
    if kind == "batch":
        return layout.axis == 0
    if kind == "columns":
        return layout.axis == channels
    return layout.axis not in (0, channels) or (rank == 2 and layout.axis == 0)


def _raise_impossible(space: StrategySpace, positions: Sequence[int], pattern: str, kind: str) -> None:
    index = positions[0]
    name = space.facts.model.nodes[index].name
    possible = [item for item in KINDS if _filter(space, index, item)]
    ways = space.division.count
    message = f"node {name!r} ({space.facts.model.nodes[index].op_type}) cannot be split by {kind!r} in {ways} ways"
    hint = f"it can be: {', '.join(possible)}"
    view = space.views[index]
    if view is not None and kind != "whole":
        hint += f"; its result has the shape {list(view.result())}, and each device needs a part of its own"
    raise UsageError("U071", message, where=f"{_WHERE} {pattern!r}", hint=hint)


def _read_map(text: str) -> Mapping[str, str]:
    """Read a shard map: from a file, or from the JSON text itself."""
    is_text = text.lstrip().startswith("{")
    data = parse_json(text, "U072", "a shard map", _WHERE) if is_text else read_json(text, "U072", "a shard map")
    where = _WHERE if is_text else text
    if not isinstance(data, dict) or not data or not all(isinstance(kind, str) for kind in data.values()):
        raise UsageError("U072", "expected a map of patterns to kinds of split", where=where, hint=f"write {_EXAMPLE}")
    for kind in data.values():
        if kind not in KINDS and not _AXIS.fullmatch(kind):
            hint = f"{suggest_nearest(kind, KINDS)}; or an axis of the result, such as 'axis 1'"
            raise UsageError("U072", f"unknown kind of split {format_value(kind)}", where=where, hint=hint)
    return data
