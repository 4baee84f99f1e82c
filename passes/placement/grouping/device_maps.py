"""Device maps: patterns of names, modules of other programs, and models whose nodes name their devices.

Maps of other programs name modules: Hugging Face accelerate's, and Olive's split assignments. Models carry ONNX's
multi-device metadata, devices in the metadata of nodes, or Olive's pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.errors import (
    MAX_LISTED,
    Diagnostic,
    InputError,
    TargetError,
    UsageError,
    format_count,
    format_value,
    suggest_nearest,
)
from onnxplace.graph.op_graph import Ints, OpGraph
from onnxplace.model.device_metadata import SPLITS_KEY, DeviceMetadata, read_device_metadata
from onnxplace.model.node_metadata import list_aliases, match_nodes, normalize_module, suggest_nodes
from onnxplace.target.target import Target
from onnxplace.utils.files import format_path, parse_json, read_json
from onnxplace.utils.names import match_names

# What accelerate calls a device, apart from numbers and ids.
BARE_KINDS = ("cpu", "cuda", "disk")
# A module as PyTorch names it; "" is the whole model.
MODULE_NAME = re.compile(r"[\w./-]*")

MODEL_SUFFIX = ".onnx"

# Pattern or module -> the id, number or kind of a device.
Rules = Mapping[str, str | int]


def match_removed(patterns: Sequence[str], removed: Sequence[str], where: str) -> dict[str, str]:
    """Return the patterns that match nodes that were removed, each with the first such node."""
    if not patterns or not removed:
        return {}
    matches = match_nodes(patterns, removed, where)
    return {pattern: removed[positions[0]] for pattern, positions in zip(patterns, matches) if positions}


def note_removed(removed_matches: Mapping[str, str], where: str) -> Diagnostic:
    """Return the note that patterns have no effect; each comes with the first removed node that it matches."""
    listed = format_list(f"{pattern!r} ({name!r})" for pattern, name in removed_matches.items())
    message = f"only nodes that were removed (constants, calls of functions, unused ones) match {listed}: no effect"
    return Diagnostic("U025", message, where=where, hint="leave it out, or name nodes that remain")


def format_list(items: Iterable[str], separator: str = ", ") -> str:
    """Join the first of several items to one text, with the number of the others."""
    entries = list(items)
    more = len(entries) - MAX_LISTED
    return separator.join(entries[:MAX_LISTED]) + (f"{separator}and {more} more" if more > 0 else "")


def are_module_names(keys: Iterable[str]) -> bool:
    """Return whether all keys of a map can be names of modules.

    >>> are_module_names(["model.layers.0", "lm_head"]), are_module_names(["encoder.*"])
    (True, False)
    """
    return all(MODULE_NAME.fullmatch(key) for key in keys)


def has_module_devices(rules: Rules) -> bool:
    """Return whether a map names devices as accelerate does: by number, or by kind alone.

    >>> has_module_devices({"lm_head": "cpu"}), has_module_devices({"lm_head": "cpu:0"})
    (True, False)
    """
    return any(isinstance(device, int) or device in BARE_KINDS for device in rules.values())


def pin_modules(
    rules: Rules, graph: OpGraph, target: Target, removed: Sequence[str], where: str, by_position: bool = False
) -> tuple[Ints, list[Diagnostic]]:
    """Return the device of each node by its innermost module in the map, -1 for none, and notes.

    With `by_position`, number N is the device at position N of the target.

    Raises:
        TargetError: The target lacks a device.
        UsageError: The model does not have a module, nor the one around it.
    """
    devices = {
        normalize_module(key): _find_module_device(key, device, target, where, by_position)
        for key, device in rules.items()
    }
    pinned: Ints = np.full(len(graph), -1, dtype=np.int32)
    modules = dict.fromkeys(path for name in removed for path in list_aliases(name))
    used = set[str]()
    for index, name in enumerate(graph.names):
        # Innermost module first: the first one in the map decides.
        paths = list(list_aliases(name))
        modules.update(dict.fromkeys(paths))
        if (module := next((path for path in paths if path in devices), None)) is not None:
            pinned[index] = devices[module]
            used.add(module)
    idle = [key for key in rules if normalize_module(key) not in used]
    if unknown := [key for key in idle if not _may_be_empty(normalize_module(key), modules, devices)]:
        hint = suggest_nodes(unknown[0], graph.names)
        raise UsageError("U020", f"no module {format_list(map(repr, unknown))} in this model", where=where, hint=hint)
    pinned_count = int((pinned >= 0).sum())
    message = f"modules of this map pin {format_count(pinned_count, 'node')} of {len(graph)}; the others are free"
    if idle:
        message += f"; no node is in {format_list(map(repr, idle))}"
    return pinned, [Diagnostic("U025", message, where=where)]


def _may_be_empty(module: str, modules: Mapping[str, object], rules: Mapping[str, object]) -> bool:
    """Return whether a module without nodes may be one without operators, such as a dropout layer.

    The module around it is known then. It is neither one of a numbered list, nor almost a name that the map lacks.
    """
    outer, _, last = module.rpartition(".")
    if module in modules:
        return True
    others = [name for name in modules if name not in rules and name.rpartition(".")[0] == outer]
    is_misspelt = bool(others) and suggest_nearest(module, others).startswith("did you mean")
    return bool(outer) and outer in modules and not last.isdecimal() and not is_misspelt


def _find_module_device(module: str, device: str | int, target: Target, where: str, by_position: bool) -> int:
    """Return the position of a device that a map names by number, kind or id."""
    ids = [item.id for item in target.devices]
    if isinstance(device, int) and by_position:
        candidates = ids[device : device + 1] if device >= 0 else []
    elif isinstance(device, int):
        # A bare number means a GPU, as in PyTorch; without any GPU it counts CPU devices.
        has_accelerator = any(item.kind != "cpu" for item in target.devices)
        numbered = [item.id for item in target.devices if item.kind != "cpu" or not has_accelerator]
        candidates = [name for name in numbered if name.endswith(f":{device}")]
    elif device in BARE_KINDS:
        candidates = [item.id for item in target.devices if item.kind == device][:1]
    else:
        candidates = [name for name in ids if name == device]
    if len(candidates) == 1:
        return ids.index(candidates[0])
    description = "several devices" if candidates else "no device"
    hint = f"devices are {', '.join(ids)}; {_explain(device, by_position, ids)}"
    raise TargetError("T005", f"{description} {device!r} in this target, for {module!r}", where=where, hint=hint)


def _explain(device: str | int, by_position: bool, ids: Sequence[str]) -> str:
    """Return the end of a hint: what the name of a device means."""
    if by_position:
        return f"piece {device} goes to the device at position {device}, counted from 0"
    if isinstance(device, int):
        return f"number {device} is the GPU of that number, or the CPU device if there are only those"
    if device == "disk":
        return "weights cannot stay on disk: choose a device"
    return suggest_nearest(device, ids)


def pin_named_nodes(
    path: Path, graph: OpGraph, target: Target, removed: Sequence[str]
) -> tuple[Ints, list[Diagnostic]]:
    """Return the device that the nodes of a model file name for nodes of the same names, -1 for none, and notes.

    Raises:
        ModelError: The file is not a model.
        InputError: Its nodes name no devices.
        TargetError: The target lacks one of these devices.
        UsageError: No name of a node agrees.
    """
    where = format_path(path)
    metadata = read_device_metadata(path)
    if metadata.pieces:
        return pin_modules(metadata.pieces, graph, target, removed, where, by_position=True)
    devices = _find_devices(metadata, target, where)
    pinned: Ints = np.array([devices.get(name, -1) for name in graph.names], dtype=np.int32)
    pinned_count = int((pinned >= 0).sum())
    if not pinned_count:
        hint = (
            f"{suggest_nodes('', graph.names)}; in {where}: {format_list(map(repr, [*devices, *metadata.split][:3]))}"
        )
        raise UsageError("U020", "no node has a name of this model's nodes with one device", where=where, hint=hint)
    message = f"the model pins {format_count(pinned_count, 'node')} of {len(graph)}; the others are free"
    if metadata.split:
        message += f"; {format_count(len(metadata.split), 'node')} on several devices, such as {metadata.split[0]!r}"
    known = {*graph.names, *removed}
    if unknown := [name for name in devices if name not in known]:
        message += f"; this model lacks {format_list(map(repr, unknown))}"
    return pinned, [Diagnostic("U025", message, where=where)]


def _find_devices(metadata: DeviceMetadata, target: Target, where: str) -> dict[str, int]:
    """Return the position of each node's device in the target."""
    ids = [device.id for device in target.devices]
    names = dict(metadata.by_id)
    devices = dict(metadata.by_stage)
    for node, position in metadata.by_position.items():
        if 0 <= position < len(metadata.devices) and metadata.devices[position]:
            names[node] = metadata.devices[position]
        else:
            devices[node] = position
    hint = f"devices are {', '.join(ids)}; devices of nodes are in {where}"
    if unknown := [name for name in dict.fromkeys(names.values()) if name not in ids]:
        raise TargetError("T005", f"no device {format_list(map(repr, unknown))} in this target", where=where, hint=hint)
    if beyond := sorted({number for number in devices.values() if not 0 <= number < len(ids)}):
        listed = format_list(map(str, beyond))
        raise TargetError("T005", f"no device at position {listed} of this target", where=where, hint=hint)
    return devices | {node: ids.index(name) for node, name in names.items()}


def read_pins(source: str, graph: OpGraph, target: Target, removed: Sequence[str]) -> tuple[Ints, list[Diagnostic]]:
    """Return the device that a device map pins each node to, -1 for none, and notes about the map.

    `source` is the path of a JSON file or of a model, or JSON text; an empty one pins nothing. `removed` has the names
    of the nodes that optimisation removed.

    Raises:
        InputError: The source is not a device map.
        TargetError: It names a device that the target does not have.
        UsageError: It names nodes or modules that the graph does not have.
    """
    if not source:
        return np.full(len(graph), -1, dtype=np.int32), []
    if source.lower().endswith(MODEL_SUFFIX) and not source.startswith("{"):
        return pin_named_nodes(Path(source), graph, target, removed)
    where = "device map" if source.startswith("{") else source
    rules = _read_map(source, where)
    if SPLITS_KEY in rules and isinstance(rules[SPLITS_KEY], dict):
        splits = _require_devices(rules[SPLITS_KEY], where)
        return pin_modules(splits, graph, target, removed, where, by_position=True)
    devices = _require_devices(rules, where)
    if has_module_devices(devices):
        return pin_modules(devices, graph, target, removed, where)
    patterns = {pattern: str(device) for pattern, device in devices.items()}
    # Keys that look like modules may be patterns too: they are modules only if none of them is the name of a node.
    has_nodes = any(match_names(list(patterns), [*graph.names, *removed], where))
    if patterns and not has_nodes and are_module_names(patterns):
        return pin_modules(patterns, graph, target, removed, where)
    return _pin_patterns(patterns, graph, target, removed, where)


def _pin_patterns(
    patterns: Mapping[str, str], graph: OpGraph, target: Target, removed: Sequence[str], where: str
) -> tuple[Ints, list[Diagnostic]]:
    """Pin the nodes that each pattern matches; the first pattern that matches a node decides."""
    matches, pinned = match_nodes(list(patterns), graph.names, where), np.full(len(graph), -1, dtype=np.int32)
    try:
        devices = [target.position(device) for device in patterns.values()]
    except TargetError as error:
        raise TargetError(error.code, error.message, where=where, hint=error.hint) from None
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
        hint = f"{suggest_nodes(without_node[0], graph.names)}; the first match wins"
        raise UsageError("U020", f"no node is left for {format_list(map(repr, without_node))}", where=where, hint=hint)
    return pinned, [note_removed(removed_matches, where)] if removed_matches else []


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
