"""Cost files: what `profile` found out, as JSON that people can read, edit and carry to another machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from onnxplace.errors import InputError, ModelError
from onnxplace.facts import Profile, Source
from onnxplace.files import read_json
from onnxplace.model import Model, op_graph
from onnxplace.target import Target

FORMAT = "onnxplace-costs"
VERSION = 1


def costs_text(profile: Profile) -> str:
    """Return a profile in the form of a cost file: JSON, one line per node."""
    graph = profile.graph
    kinds = list(profile.seconds)
    seconds = [profile.seconds[kind].tolist() for kind in kinds]
    sources = [[Source(index).name.lower() for index in profile.sources[kind].tolist()] for kind in kinds]
    nodes = (
        {"op": op, "unit": unit, "seconds": dict(zip(kinds, spent)), "source": dict(zip(kinds, known))}
        for op, unit, spent, known in zip(graph.ops, profile.unit.tolist(), zip(*seconds), zip(*sources))
    )
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in zip(graph.names, nodes))
    head = {"format": FORMAT, "version": VERSION, "whole_seconds": dict(profile.whole_seconds)}
    sizes = json.dumps(dict(zip(graph.value_names, graph.value_bytes.tolist())))
    return f'{json.dumps(head)[:-1]},\n "nodes": {{\n{lines}\n }},\n "value_bytes": {sizes}}}\n'


def read_costs(path: str | Path, model: Model, target: Target) -> Profile:
    """Read a cost file for this model and target; raises InputError naming the file and what is missing in it."""
    data = _read(path)
    nodes: Mapping[str, Any] = data["nodes"]
    missing = [node.name for node in model.nodes if node.name not in nodes]
    if missing:
        raise ModelError(
            "C010",
            f"no costs for {len(missing)} of {len(model.nodes)} nodes, such as {', '.join(missing[:3])}",
            where=str(path),
            hint="it was made for another model; profile this one",
        )
    order = [_entry(nodes[node.name], path, node.name) for node in model.nodes]
    classes = list(dict.fromkeys(device.cost_class for device in target.devices))
    seconds = {
        kind: np.array([_seconds(entry, kind, path, node.name) for entry, node in zip(order, model.nodes)])
        for kind in classes
    }
    sources = {kind: np.full(len(order), Source.GIVEN, dtype=np.uint8) for kind in classes}
    unit = np.unique([entry.get("unit", -1 - i) for i, entry in enumerate(order)], return_inverse=True)[1]
    sizes = _amounts(data, "value_bytes", path, whole=True)
    whole = _amounts(data, "whole_seconds", path, whole=False)
    return Profile(
        op_graph(model, sizes),
        MappingProxyType(seconds),
        MappingProxyType(sources),
        unit.astype(np.int32),
        MappingProxyType(whole),
    )


def _entry(entry: Any, path: str | Path, name: str) -> Mapping[str, Any]:
    """Return a node's entry; raises InputError unless it has the form of one."""
    good = isinstance(entry, dict) and isinstance(entry.get("seconds"), dict) and type(entry.get("unit", 0)) is int
    if not good:
        raise InputError(
            "C014",
            f"the entry of node {name!r} makes no sense: {entry!r}",
            where=str(path),
            hint='it is written like {"unit": 0, "seconds": {"cpu/1": 1e-5}}',
        )
    return entry  # type: ignore[no-any-return]


def _amounts(data: Mapping[str, Any], key: str, path: str | Path, *, whole: bool) -> dict[str, Any]:
    """Return a table of numbers by name; raises InputError naming the entry that is none."""
    amounts = data.get(key, {})
    if not isinstance(amounts, dict):
        raise InputError("C014", f"{key} is no table of numbers by name", where=str(path), hint="see docs/bundle.md")
    for name, amount in amounts.items():
        number = isinstance(amount, int if whole else (int, float)) and not isinstance(amount, bool)
        if not number or not np.isfinite(amount) or amount < 0:
            raise InputError(
                "C014", f"{key} of {name!r} is {amount!r}", where=str(path), hint="it must be a number, not negative"
            )
    return amounts


def _read(path: str | Path) -> dict[str, Any]:
    data = read_json(path, "C011", "a cost file")
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("nodes"), dict):
        raise InputError("C011", "not a cost file", where=str(path), hint="bundles hold one as costs.json")
    if data.get("version") != VERSION:
        raise InputError(
            "C012", f"its version is {data.get('version')}, this onnxplace reads {VERSION}", where=str(path)
        )
    return data


def _seconds(entry: Mapping[str, Any], kind: str, path: str | Path, name: str) -> float:
    value = entry.get("seconds", {}).get(kind)
    if value is None:
        raise InputError(
            "C013",
            f"no seconds on {kind!r} for node {name!r}",
            where=str(path),
            hint="it holds: " + ", ".join(entry.get("seconds", {})),
        )
    if not isinstance(value, (int, float)) or not np.isfinite(value) or value < 0:
        raise InputError(
            "C014",
            f"the cost of node {name!r} on {kind!r} is {value}, not a time",
            where=str(path),
            hint="it must be a number of seconds, not negative",
        )
    return float(value)
