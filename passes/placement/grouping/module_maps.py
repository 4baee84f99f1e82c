"""Device maps of other programs, which name modules: Hugging Face accelerate's, and Olive's split assignments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from onnx import NodeProto

from onnxplace.errors import Diagnostic, TargetError, UsageError, format_count, suggest_nearest
from onnxplace.graph import Ints, OpGraph
from onnxplace.model import list_enclosing_modules, list_module_paths, normalize_module
from onnxplace.passes.placement.grouping.node_names import format_list, suggest_names
from onnxplace.target import Target

# What accelerate calls a device, apart from numbers and ids.
BARE_KINDS = ("cpu", "cuda", "disk")
# A module as PyTorch names it; "" is the whole model.
MODULE_NAME = re.compile(r"[\w./-]*")


def are_module_names(keys: Iterable[str]) -> bool:
    """Return whether all keys of a map can be names of modules.

    >>> are_module_names(["model.layers.0", "lm_head"]), are_module_names(["encoder.*"])
    (True, False)
    """
    return all(MODULE_NAME.fullmatch(key) for key in keys)


def has_module_devices(rules: Mapping[str, str | int]) -> bool:
    """Return whether a map names devices as accelerate does: by number, or by kind alone.

    >>> has_module_devices({"lm_head": "cpu"}), has_module_devices({"lm_head": "cpu:0"})
    (True, False)
    """
    return any(isinstance(device, int) or device in BARE_KINDS for device in rules.values())


def pin_modules(
    rules: Mapping[str, str | int],
    graph: OpGraph,
    target: Target,
    removed: Sequence[str],
    nodes: Sequence[NodeProto],
    where: str,
    by_position: bool = False,
) -> tuple[Ints, list[Diagnostic]]:
    """Return the device of each node by its innermost module in the map, -1 for none, and notes.

    With `by_position`, number N is the device at position N of the target.

    Raises:
        TargetError: The target lacks a device.
        UsageError: The model does not have a module, nor the one around it.
    """
    devices = {
        normalize_module(key): _find_device(key, device, target, where, by_position) for key, device in rules.items()
    }
    protos = {node.name: node for node in nodes}
    pinned: Ints = np.full(len(graph), -1, dtype=np.int32)
    modules = dict.fromkeys(path for name in removed for path in list_enclosing_modules(name))
    used = set[str]()
    for index, name in enumerate(graph.names):
        paths = list(list_module_paths(protos.get(name, NodeProto(name=name))))
        modules.update(dict.fromkeys(paths))
        if (module := next((path for path in paths if path in devices), None)) is not None:
            pinned[index] = devices[module]
            used.add(module)
    idle = [key for key in rules if normalize_module(key) not in used]
    if unknown := [key for key in idle if not _may_be_empty(normalize_module(key), modules, devices)]:
        known = [module for module in modules.keys() - set(map(normalize_module, (*graph.names, *removed))) if module]
        nearest = f"{suggest_nearest(unknown[0], sorted(known))}; " if known else ""
        hint = f"{nearest}{suggest_names(graph)}"
        raise UsageError("U020", f"no module {format_list(map(repr, unknown))} in this model", where=where, hint=hint)
    pinned_count = int((pinned >= 0).sum())
    message = f"modules of this map pin {format_count(pinned_count, 'node')} of {len(graph)}; the others are free"
    if idle:
        message += f"; no node is in {format_list(map(repr, idle))}"
    return pinned, [Diagnostic("U026", message, where=where)]


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


def _find_device(module: str, device: str | int, target: Target, where: str, by_position: bool) -> int:
    """Return the position of a device that a map names by number, kind or id."""
    ids = [item.id for item in target.devices]
    if isinstance(device, int) and by_position:
        candidates = ids[device : device + 1] if device >= 0 else []
    elif isinstance(device, int):
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
    raise TargetError("T004", f"{description} {device!r} in this target, for {module!r}", where=where, hint=hint)


def _explain(device: str | int, by_position: bool, ids: Sequence[str]) -> str:
    """Return the end of a hint: what the name of a device means."""
    if by_position:
        return f"piece {device} goes to the device at position {device}, counted from 0"
    if isinstance(device, int):
        return f"number {device} is the GPU of that number, or the CPU device if there are only those"
    if device == "disk":
        return "weights cannot stay on disk: choose a device"
    return suggest_nearest(device, ids)
