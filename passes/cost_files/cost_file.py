"""Cost files: what `profile` found out, as JSON or CSV that people can read, edit and carry to another machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplace.errors import Diagnostic, InputError, ModelError, shown
from onnxplace.facts import Profile, Quality, Source
from onnxplace.graph import Floats
from onnxplace.model import Model, op_graph, static_shapes, value_bytes
from onnxplace.passes.cost_files.csv_table import FORMAT, VERSION, entries, read_table, require_version
from onnxplace.passes.profiling import MAX_ALL_BYTES, MAX_BYTES, MAX_FIGURE, MAX_WHOLE_SECONDS, fingerprints
from onnxplace.target import MAX_SECONDS, Target
from onnxplace.utils import read_json

Entry = Mapping[str, Any]

_OF_BYTES = f"it must be a whole number of bytes, from 0 to {MAX_BYTES}"
_OF_SECONDS = "it must be a number of seconds, not negative"
# What a file may say of where a time comes from. It was not measured by this process.
_SOURCES = {"measured": Source.GIVEN, "given": Source.GIVEN, "estimated": Source.ESTIMATED, "known": Source.KNOWN}
_FORM = 'it is written like {"unit": 0, "seconds": {"cpu/1": 1e-5}}'


def format_costs(profile: Profile) -> str:
    """Return a profile in the form of a cost file: JSON, one line per node."""
    graph = profile.graph
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in zip(graph.names, entries(profile))
    )
    head: dict[str, Any] = {"format": FORMAT, "version": VERSION, "whole_seconds": dict(profile.whole_seconds)}
    if profile.quality:
        head["measured"] = {kind: asdict(quality) for kind, quality in profile.quality.items()}
    sizes = json.dumps(dict(zip(graph.value_names, graph.value_bytes.tolist())))
    return f'{json.dumps(head)[:-1]},\n "nodes": {{\n{lines}\n }},\n "value_bytes": {sizes}}}\n'


def read_costs(path: str | Path, model: Model, target: Target) -> tuple[Profile, list[Diagnostic]]:
    """Read a cost file for this model and target; raises InputError naming the file and what is missing in it.

    Nodes are found by their names, else, in a file that holds fingerprints, as nodes that do the same. Times that
    were measured are `GIVEN` here; estimated and known ones stay what they are.
    """
    data = read_table(path, model) if str(path).endswith(".csv") else _read(path)
    shapes = static_shapes(model)
    prints = fingerprints(model, shapes)
    order, notes = _matched(data["nodes"], prints, path, model)
    names = [node.name for node in model.nodes]
    classes = list(dict.fromkeys(device.cost_class for device in target.devices))
    seconds = {
        kind: np.array([_seconds(entry, kind, path, name) for entry, name in zip(order, names)]) for kind in classes
    }
    sources = {
        kind: np.array([_source(entry, kind, path, name) for entry, name in zip(order, names)], dtype=np.uint8)
        for kind in classes
    }
    spread = {kind: _spread(order, kind, path, names) for kind in classes}
    unit = np.unique([_unit(entry, -1 - i, path, names[i]) for i, entry in enumerate(order)], return_inverse=True)[1]
    sizes = value_bytes(model, {**shapes, **model.input_shapes()})
    sizes |= _bytes(data, "value_bytes", path)
    profile = Profile(
        replace(op_graph(model, sizes), workspace_bytes=_workspace(order, path, names)),
        MappingProxyType(seconds),
        MappingProxyType(sources),
        unit.astype(np.int32),
        MappingProxyType(_amounts(data, "whole_seconds", path, MAX_WHOLE_SECONDS, f"{_OF_SECONDS}, up to 1e9")),
        spread=MappingProxyType({kind: around for kind, around in spread.items() if around is not None}),
        quality=MappingProxyType(_quality(data, path)),
        prints=prints,
    )
    return profile, notes


def _matched(
    nodes: Mapping[str, Any], prints: Sequence[str], path: str | Path, model: Model
) -> tuple[list[Entry], list[Diagnostic]]:
    """Return the entry of each node of the model; raises ModelError for those that have none."""
    printed = {e["fingerprint"]: e for e in nodes.values() if isinstance(e, dict) and _is_print(e.get("fingerprint"))}
    unknown = [node.name for node, own in zip(model.nodes, prints) if node.name not in nodes and own not in printed]
    if unknown:
        raise ModelError(
            "C010",
            f"no costs for {len(unknown)} of {len(model.nodes)} nodes, such as {', '.join(unknown[:3])}",
            where=str(path),
            hint="it was made for another model; profile this one",
        )
    order: list[Entry] = []
    other = []
    for node, own in zip(model.nodes, prints):
        if node.name in nodes:
            entry = _entry(nodes[node.name], path, node.name)
            if _is_print(entry.get("fingerprint")) and entry["fingerprint"] != own:
                other.append(node.name)
        else:  # its unit is one of another model, where it may have had other members
            known = _entry(printed[own], path, node.name)
            entry = {name: value for name, value in known.items() if name != "unit"}
        order.append(entry)
    if not other:
        return order, []
    message = (
        f"{len(other)} of {len(model.nodes)} nodes are not as they were measured (other shapes or attributes), "
        f"such as {', '.join(other[:3])}"
    )
    return order, [Diagnostic("C005", message, where=str(path), hint="profile again for these shapes")]


def _is_print(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_amount(value: Any, most: float) -> bool:
    """Return whether a value is a number from 0 to `most`."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most


def _entry(entry: Any, path: str | Path, name: str) -> Entry:
    """Return a node's entry; raises InputError unless it has the form of one."""
    good = isinstance(entry, dict) and isinstance(entry.get("seconds"), dict)
    if not good or not all(isinstance(entry.get(key, {}), dict) for key in ("source", "spread")):
        message = f"the entry of node {name!r} makes no sense: {shown(entry)}"
        raise InputError("C014", message, where=str(path), hint=_FORM)
    return entry  # type: ignore[no-any-return]


def _unit(entry: Entry, alone: int, path: str | Path, name: str) -> int:
    """Return the unit of a node, `alone` if the file names none; raises InputError if it is no whole number."""
    unit = entry.get("unit", alone)
    whole = unit.is_integer() if isinstance(unit, float) else type(unit) is int
    if not whole:
        hint = "it is a whole number; nodes of one number are one kernel"
        raise InputError("C014", f"the unit of node {name!r} is {shown(unit)}", where=str(path), hint=hint)
    return int(unit)


def _seconds(entry: Entry, kind: str, path: str | Path, name: str) -> float:
    value = entry["seconds"].get(kind)
    if value is None:
        if entry["seconds"]:
            hint = f"it holds: {', '.join(entry['seconds'])}"
        elif str(path).endswith(".csv"):
            hint = f"its row is empty, or too short, in the column 'seconds {kind}'"
        else:
            hint = _FORM
        raise InputError("C013", f"no seconds on {kind!r} for node {name!r}", where=str(path), hint=hint)
    return _time(value, f"the cost of node {name!r} on {kind!r}", path)


def _time(value: Any, what: str, path: str | Path) -> float:
    if not _is_amount(value, MAX_SECONDS):
        hint = f"{_OF_SECONDS}, up to 1e6"
        raise InputError("C014", f"{what} is {shown(value)}, not a time", where=str(path), hint=hint)
    return float(value)


def _source(entry: Entry, kind: str, path: str | Path, name: str) -> Source:
    word = entry.get("source", {}).get(kind, "given")
    if not isinstance(word, str) or word not in _SOURCES:
        message, hint = f"the source of node {name!r} on {kind!r} is {word!r}", "it is one of " + ", ".join(_SOURCES)
        raise InputError("C014", message, where=str(path), hint=hint)
    return _SOURCES[word]


def _spread(order: Sequence[Entry], kind: str, path: str | Path, names: Sequence[str]) -> Floats | None:
    """Return the spread of each node on a class of device, zero where there is none; None if no node has one."""
    found = [entry.get("spread", {}).get(kind) for entry in order]
    if all(value is None for value in found):
        return None
    return np.array(
        [_time(value or 0.0, f"the spread of node {n!r} on {kind!r}", path) for value, n in zip(found, names)]
    )


def _workspace(order: Sequence[Entry], path: str | Path, names: Sequence[str]) -> NDArray[np.int64]:
    """Return the bytes that each node needs while it runs, as far as the file says."""
    found = {name: entry["workspace_bytes"] for entry, name in zip(order, names) if "workspace_bytes" in entry}
    amounts = _bytes({"workspace_bytes": found}, "workspace_bytes", path)
    return np.array([amounts.get(name, 0) for name in names], dtype=np.int64)


def _quality(data: Mapping[str, Any], path: str | Path) -> dict[str, Quality]:
    """Return how sure the measurement of each class of device is, as far as the file says."""
    try:
        found = {kind: Quality(**told) for kind, told in data.get("measured", {}).items()}
        figures = [figure for quality in found.values() for figure in vars(quality).values()]
        if not all(_is_amount(figure, MAX_FIGURE) for figure in figures):
            raise TypeError("a figure is no number, negative or too large")
    except (AttributeError, TypeError) as problem:
        message = f"what it says under 'measured' makes no sense: {problem}"
        raise InputError("C014", message, where=str(path), hint="leave it out, or see docs/costs.md") from None
    return found


def _bytes(data: Mapping[str, Any], key: str, path: str | Path) -> dict[str, int]:
    """Return a table of bytes by name; raises InputError naming the entry that is no whole number of them."""
    amounts = _amounts(data, key, path, MAX_BYTES, _OF_BYTES)
    for name, amount in amounts.items():
        if amount != int(amount):
            raise InputError("C014", f"{key} of {shown(name)} is {shown(amount)}", where=str(path), hint=_OF_BYTES)
    if (total := sum(amounts.values())) > MAX_ALL_BYTES:
        message, hint = f"{key} add up to {total:.3g}", f"at most {MAX_ALL_BYTES} bytes, all together"
        raise InputError("C014", message, where=str(path), hint=hint)
    return {name: int(amount) for name, amount in amounts.items()}


def _amounts(data: Mapping[str, Any], key: str, path: str | Path, most: float, hint: str) -> dict[str, Any]:
    """Return a table of numbers by name; raises InputError naming the entry that is none."""
    amounts = data.get(key, {})
    if not isinstance(amounts, dict):
        raise InputError("C014", f"{key} is no table of numbers by name", where=str(path), hint="see docs/costs.md")
    for name, amount in amounts.items():
        if not _is_amount(amount, most):
            raise InputError("C014", f"{key} of {shown(name)} is {shown(amount)}", where=str(path), hint=hint)
    return amounts


def _read(path: str | Path) -> dict[str, Any]:
    data = read_json(path, "C011", "a cost file")
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("nodes"), dict):
        raise InputError("C011", "not a cost file", where=str(path), hint="bundles hold one as costs.json")
    require_version(data.get("version"), path)
    return data
