"""Device maps: patterns of names, modules of other programs, and models whose nodes name their devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import NodeProto

from onnxplace.errors import Diagnostic, InputError, TargetError, UsageError, format_value
from onnxplace.graph import Ints, OpGraph
from onnxplace.model import SPLITS_KEY
from onnxplace.passes.placement.grouping.module_maps import (
    are_module_names,
    has_module_devices,
    pin_modules,
)
from onnxplace.passes.placement.grouping.node_names import format_list, match_removed, note_removed, suggest_names
from onnxplace.passes.placement.grouping.node_pins import pin_named_nodes
from onnxplace.target import Target
from onnxplace.utils import match_names, parse_json, read_json

MODEL_SUFFIX = ".onnx"


def read_pins(
    source: str, graph: OpGraph, target: Target, removed: Sequence[str], nodes: Sequence[NodeProto]
) -> tuple[Ints, list[Diagnostic]]:
    """Return the device that a device map pins each node to, -1 for none, and notes about the map.

    `source` is the path of a JSON file or of a model, or JSON text; an empty one pins nothing. `removed` has the names
    of the nodes that optimisation removed, `nodes` the nodes of the model, if the graph is that of a model.

    Raises:
        InputError: The source is not a device map.
        TargetError: It names a device that the target does not have.
        UsageError: It names nodes or modules that the graph does not have.
    """
    if not source:
        return np.full(len(graph), -1, dtype=np.int32), []
    if source.lower().endswith(MODEL_SUFFIX) and not source.startswith("{"):
        return pin_named_nodes(Path(source), graph, target, removed, nodes)
    where = "device map" if source.startswith("{") else source
    rules = _read_map(source, where)
    if SPLITS_KEY in rules and isinstance(rules[SPLITS_KEY], dict):
        splits = _require_devices(rules[SPLITS_KEY], where)
        return pin_modules(splits, graph, target, removed, nodes, where, by_position=True)
    devices = _require_devices(rules, where)
    if has_module_devices(devices):
        return pin_modules(devices, graph, target, removed, nodes, where)
    patterns = {pattern: str(device) for pattern, device in devices.items()}
    matches = match_names(list(patterns), graph.names, where)
    has_nodes = any(matches) or bool(match_removed(list(patterns), removed, where))
    if patterns and not has_nodes and are_module_names(patterns):
        return pin_modules(patterns, graph, target, removed, nodes, where)
    return _pin_patterns(patterns, matches, graph, target, removed, where)


def _pin_patterns(
    patterns: Mapping[str, str],
    matches: Sequence[Sequence[int]],
    graph: OpGraph,
    target: Target,
    removed: Sequence[str],
    where: str,
) -> tuple[Ints, list[Diagnostic]]:
    """Pin the nodes that each pattern matches; the first pattern that matches a node decides."""
    pinned = np.full(len(graph), -1, dtype=np.int32)
    devices = [_find_device(device, target, where) for device in patterns.values()]
    unused, unmatched = [], []
    for pattern, device, positions in zip(patterns, devices, matches):
        free = [node for node in positions if pinned[node] < 0]
        pinned[free] = device
        if not free:
            unused.append(pattern)
        if not positions:
            unmatched.append(pattern)
    removed_matches = match_removed(unmatched, removed, where)
    if without_node := [pattern for pattern in unused if pattern not in removed_matches]:
        hint = f"{suggest_names(graph)}; the first match wins"
        raise UsageError("U020", f"no node is left for {format_list(map(repr, without_node))}", where=where, hint=hint)
    return pinned, [note_removed(removed_matches, where)] if removed_matches else []


def _find_device(name: str, target: Target, where: str) -> int:
    try:
        return target.position(name)
    except TargetError as error:
        raise TargetError(error.code, error.message, where=where, hint=error.hint) from None


def _read_map(source: str, where: str) -> dict[str, Any]:
    """Read a device map: from a file, or from the JSON text itself."""
    if source.startswith("{"):
        data = parse_json(source, "U023", "a device map", where)
    else:
        data = read_json(source, "U023", "a device map")
    if not isinstance(data, dict):
        raise _not_a_map_error(f"expected an object, got {format_value(data)}", where)
    return data


def _require_devices(rules: Mapping[str, Any], where: str) -> dict[str, str | int]:
    """Return the rules of a map; raises InputError unless each value is the id or the number of a device."""
    for key, device in rules.items():
        if isinstance(device, bool) or not isinstance(device, str | int):
            reason = f"expected the id or the number of a device for {key!r}, got {format_value(device)}"
            raise _not_a_map_error(reason, where)
    if has_module_devices(rules) and (patterns := [key for key in rules if not are_module_names([key])]):
        reason = f"where devices have numbers or kinds, it names modules, but {patterns[0]!r} is a pattern"
        raise _not_a_map_error(reason, where)
    return dict(rules)


def _not_a_map_error(reason: str, where: str) -> InputError:
    hint = 'write it like {"encoder.*": "cuda:0"}, or with modules and numbers, {"model.layers.0": 0}'
    return InputError("U023", f"not a device map: {reason}", where=where, hint=hint)
