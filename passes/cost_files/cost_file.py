"""Cost files: the results of `profile` as JSON or CSV.

People read and edit them, and carry them to other machines. In CSV, a row is a node, and comments above hold figures
of the whole model.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplace.errors import Diagnostic, InputError, ModelError, format_value
from onnxplace.facts import REFUSED_SECONDS, Profile, Quality, Source
from onnxplace.model.lowering import build_op_graph, infer_static_shapes, value_bytes
from onnxplace.model.model import Model
from onnxplace.passes.profiling.profile_model import MAX_ALL_BYTES, MAX_BYTES, MAX_FIGURE, MAX_WHOLE_SECONDS
from onnxplace.passes.profiling.repeated_layers import fingerprints
from onnxplace.target.limits import MAX_SECONDS
from onnxplace.target.target import Target
from onnxplace.utils.files import read_json, read_text

CostEntry = Mapping[str, Any]

# The source of a time that a file holds. It was not measured by this process.
_SOURCES = {"measured": Source.GIVEN, "given": Source.GIVEN, "estimated": Source.ESTIMATED, "known": Source.KNOWN}
# In the place of a time: devices of the class do not take the node.
REFUSED = "refused"
_SECONDS_HINT = f"write a number of seconds, from 0 to {MAX_SECONDS:g}, or {REFUSED!r} if devices do not take the node"
_BYTES_HINT = f"write a whole number of bytes, from 0 to {MAX_BYTES}"
_ENTRY_HINT = 'write it like {"unit": 0, "seconds": {"cpu/1": 1e-5}}'


def format_costs(profile: Profile) -> str:
    """Return a profile as a JSON cost file, one line per node."""
    graph = profile.graph
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in zip(graph.names, node_entries(profile))
    )
    head: dict[str, Any] = {"format": FORMAT, "version": VERSION, "whole_seconds": dict(profile.whole_seconds)}
    if profile.quality:
        head["measured"] = {cost_class: asdict(quality) for cost_class, quality in profile.quality.items()}
    sizes = json.dumps(dict(zip(graph.value_names, graph.value_bytes.tolist())))
    return f'{json.dumps(head)[:-1]},\n "nodes": {{\n{lines}\n }},\n "value_bytes": {sizes}}}\n'


def read_costs(path: str | Path, model: Model, target: Target) -> tuple[Profile, list[Diagnostic]]:
    """Read a cost file for this model and target.

    Nodes are found by their names, else, in a file that holds fingerprints, as nodes that do the same. Times that
    were measured become `GIVEN`; estimated and known ones stay so.

    Raises:
        InputError: an entry of the file is missing or invalid.
        ModelError: the file is for another model.
    """
    data = read_table(path, model) if str(path).endswith(".csv") else _read_json_costs(path)
    shapes = infer_static_shapes(model)
    prints = fingerprints(model, shapes)
    entries, notes = _match_entries(data["nodes"], prints, path, model)
    nodes = [_NodeCosts(node.name, entry, path) for node, entry in zip(model.nodes, entries)]
    seconds, sources, spreads = {}, {}, {}
    for cost_class in dict.fromkeys(device.cost_class for device in target.devices):
        seconds[cost_class] = np.array([node.seconds(cost_class) for node in nodes])
        sources[cost_class] = np.array([node.source(cost_class) for node in nodes], dtype=np.uint8)
        if any(node.entry.get("spread", {}).get(cost_class) is not None for node in nodes):
            spreads[cost_class] = np.array([node.spread_seconds(cost_class) for node in nodes])
    # A node without a unit is its own unit; negative numbers keep it apart from those in the file.
    unit = np.unique([node.unit(-1 - index) for index, node in enumerate(nodes)], return_inverse=True)[1]
    sizes = value_bytes(model, {**shapes, **model.input_shapes()}) | _read_bytes(data, "value_bytes", path)
    whole_hint = f"write a number of seconds, from 0 to {MAX_WHOLE_SECONDS:g}"
    profile = Profile(
        graph=replace(build_op_graph(model, sizes), workspace_bytes=_read_workspace(nodes, path)),
        seconds=MappingProxyType(seconds),
        sources=MappingProxyType(sources),
        unit=unit.astype(np.int32),
        whole_seconds=MappingProxyType(_read_numbers(data, "whole_seconds", path, MAX_WHOLE_SECONDS, whole_hint)),
        spread=MappingProxyType(spreads),
        quality=MappingProxyType(_read_quality(data, path)),
        prints=prints,
    )
    return profile, notes


def _read_json_costs(path: str | Path) -> dict[str, Any]:
    data = read_json(path, "C011", "a cost file")
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("nodes"), dict):
        raise InputError("C011", "not a cost file", where=str(path), hint="bundles hold one as costs.json")
    require_version(data.get("version"), path)
    return data


def _match_entries(
    entries: Mapping[str, Any], prints: Sequence[str], path: str | Path, model: Model
) -> tuple[list[CostEntry], list[Diagnostic]]:
    """Return the entry of each node; raises ModelError without one."""
    by_fingerprint = {
        e["fingerprint"]: e for e in entries.values() if isinstance(e, dict) and _is_fingerprint(e.get("fingerprint"))
    }
    names = [node.name for node in model.nodes]
    unknown = [
        name for name, fingerprint in zip(names, prints) if name not in entries and fingerprint not in by_fingerprint
    ]
    if unknown:
        raise ModelError(
            "C010",
            f"no costs for {len(unknown)} of {len(names)} nodes, such as {', '.join(unknown[:3])}",
            where=str(path),
            hint="it was made for another model; profile this one",
        )
    matches, changed = list[CostEntry](), list[str]()
    for name, fingerprint in zip(names, prints):
        if name in entries:
            entry = _require_entry(entries[name], path, name)
            if _is_fingerprint(entry.get("fingerprint")) and entry["fingerprint"] != fingerprint:
                changed.append(name)
        else:  # its unit is one of another model, where it may have had other members
            known = _require_entry(by_fingerprint[fingerprint], path, name)
            entry = {key: value for key, value in known.items() if key != "unit"}
        matches.append(entry)
    if not changed:
        return matches, []
    message = (
        f"{len(changed)} of {len(names)} nodes were measured with other shapes or attributes, "
        f"such as {', '.join(changed[:3])}"
    )
    return matches, [Diagnostic("C005", message, where=str(path), hint="profile again for these shapes")]


def _is_fingerprint(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _require_entry(entry: Any, path: str | Path, name: str) -> CostEntry:
    """Return a node's entry; raises InputError if it is malformed."""
    is_valid = isinstance(entry, dict) and isinstance(entry.get("seconds"), dict)
    if not is_valid or not all(isinstance(entry.get(key, {}), dict) for key in ("source", "spread")):
        message = f"expected an object with 'seconds' for node {name!r}, got {format_value(entry)}"
        raise _entry_error(message, path, _ENTRY_HINT)
    return entry  # type: ignore[no-any-return]


def _entry_error(message: str, path: str | Path, hint: str) -> InputError:
    return InputError("C011", message, where=str(path), hint=hint)


@dataclass(frozen=True)
class _NodeCosts:
    """The entry of a node; methods raise InputError where invalid."""

    name: str
    entry: CostEntry
    path: str | Path

    def unit(self, default: int) -> int:
        """Return the unit of the node, `default` if the file has none."""
        unit = self.entry.get("unit", default)
        is_whole = unit.is_integer() if isinstance(unit, float) else type(unit) is int
        if not is_whole:
            message = f"the unit of node {self.name!r} is {format_value(unit)}, expected a whole number"
            raise _entry_error(message, self.path, "give nodes of one kernel the same whole number")
        return int(unit)

    def seconds(self, cost_class: str) -> float:
        """Return the time of the node on a class of device; `REFUSED_SECONDS` where it is refused."""
        times = self.entry["seconds"]
        value = times.get(cost_class)
        if value is None:
            if times:
                hint = f"it holds: {', '.join(times)}"
            elif str(self.path).endswith(".csv"):
                hint = f"its row is empty, or too short, in the column 'seconds {cost_class}'"
            else:
                hint = _ENTRY_HINT
            message = f"no seconds on {cost_class!r} for node {self.name!r}"
            raise InputError("C010", message, where=str(self.path), hint=hint)
        if value == REFUSED:
            return REFUSED_SECONDS
        return _require_seconds(value, f"the cost of node {self.name!r} on {cost_class!r}", self.path)

    def source(self, cost_class: str) -> Source:
        """Return the source of that time, `GIVEN` if the file has none."""
        word = self.entry.get("source", {}).get(cost_class, "given")
        if not isinstance(word, str) or word not in _SOURCES:
            message = f"the source of node {self.name!r} on {cost_class!r} is {word!r}"
            raise _entry_error(message, self.path, "write one of " + ", ".join(_SOURCES))
        return _SOURCES[word]

    def spread_seconds(self, cost_class: str) -> float:
        """Return the spread of that time, 0 if the file has none."""
        value = self.entry.get("spread", {}).get(cost_class) or 0.0
        return _require_seconds(value, f"the spread of node {self.name!r} on {cost_class!r}", self.path)


def _require_seconds(value: Any, name: str, path: str | Path) -> float:
    if not _is_number(value, MAX_SECONDS):
        raise _entry_error(f"{name} is {format_value(value)}, expected a time", path, _SECONDS_HINT)
    return float(value)


def _is_number(value: Any, maximum: float) -> bool:
    """Return whether a value is a number from 0 to `maximum`."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= maximum


def _read_workspace(nodes: Sequence[_NodeCosts], path: str | Path) -> NDArray[np.int64]:
    """Return the workspace bytes of each node, 0 if not given."""
    given = {node.name: node.entry["workspace_bytes"] for node in nodes if "workspace_bytes" in node.entry}
    amounts = _read_bytes({"workspace_bytes": given}, "workspace_bytes", path)
    return np.array([amounts.get(node.name, 0) for node in nodes], dtype=np.int64)


def _read_quality(data: Mapping[str, Any], path: str | Path) -> dict[str, Quality]:
    """Return the quality of measurements by class, if given."""
    names, qualities = {field.name for field in fields(Quality)}, dict[str, Quality]()
    try:
        for cost_class, figures in data.get("measured", {}).items():
            if missing := sorted(names - set(figures)):
                raise TypeError(f"{', '.join(missing)} of {format_value(cost_class)} are missing")
            qualities[cost_class] = Quality(**figures)
            if not all(_is_number(figure, MAX_FIGURE) for figure in figures.values()):
                raise TypeError(f"expected numbers from 0 to {MAX_FIGURE:g}")
    except (AttributeError, TypeError) as error:
        raise _entry_error(
            f"'measured' is invalid: {error}", path, "leave out all figures of this class, or see docs/costs.md"
        ) from None
    return qualities


def _read_bytes(data: Mapping[str, Any], key: str, path: str | Path) -> dict[str, int]:
    """Return a table of bytes by name; raises InputError at others."""
    amounts = _read_numbers(data, key, path, MAX_BYTES, _BYTES_HINT)
    for name, amount in amounts.items():
        if amount != int(amount):
            raise _entry_error(f"{key} of {format_value(name)} is {format_value(amount)}", path, _BYTES_HINT)
    if (total := sum(amounts.values())) > MAX_ALL_BYTES:
        raise _entry_error(f"{key} add up to {total:.3g}", path, f"at most {MAX_ALL_BYTES} bytes are allowed in total")
    return {name: int(amount) for name, amount in amounts.items()}


def _read_numbers(data: Mapping[str, Any], key: str, path: str | Path, maximum: float, hint: str) -> dict[str, Any]:
    """Return a table of numbers by name.

    Raises InputError at an entry outside 0 to `maximum`.
    """
    amounts = data.get(key, {})
    if not isinstance(amounts, dict):
        message = f"expected an object of numbers by name under {key}, got {format_value(amounts)}"
        raise _entry_error(message, path, "see docs/costs.md")
    for name, amount in amounts.items():
        if not _is_number(amount, maximum):
            raise _entry_error(f"{key} of {format_value(name)} is {format_value(amount)}", path, hint)
    return amounts


# ------------------------------------------------------------------------------------------------------------------ CSV


FORMAT = "onnxplace-costs"
VERSION = 1
_COLUMNS = ("node", "op", "fingerprint", "unit", "output_bytes", "workspace_bytes")
_MEASURED_PREFIX = "measured."


def node_entries(profile: Profile) -> Iterator[dict[str, Any]]:
    """Yield the entry of each node in a cost file."""
    times = profile.seconds.items()
    seconds = {kind: [REFUSED if item >= REFUSED_SECONDS else item for item in array.tolist()] for kind, array in times}
    sources = {kind: [Source(index).name.lower() for index in array] for kind, array in profile.sources.items()}
    spread = {kind: array.tolist() for kind, array in profile.spread.items()}
    workspace = profile.graph.workspace_bytes.tolist()
    for node, (op, unit) in enumerate(zip(profile.graph.ops, profile.unit.tolist())):
        entry: dict[str, Any] = {"op": op, "unit": unit}
        if profile.prints:
            entry["fingerprint"] = profile.prints[node]
        if workspace[node]:
            entry["workspace_bytes"] = workspace[node]
        entry["seconds"] = {kind: times[node] for kind, times in seconds.items()}
        entry["source"] = {kind: words[node] for kind, words in sources.items()}
        if spread:
            entry["spread"] = {kind: spreads[node] for kind, spreads in spread.items()}
        yield entry


def format_costs_csv(profile: Profile, model: Model) -> str:
    """Return a profile as CSV: a row per node.

    `output_bytes` holds the sizes of the outputs in order, `-` for unknown ones.
    """
    kinds = list(profile.seconds)
    sizes = dict(zip(profile.graph.value_names, profile.graph.value_bytes.tolist()))
    stream = io.StringIO()
    stream.write(f"# {FORMAT} {VERSION}\n")
    stream.writelines(f"# whole_seconds {kind}={seconds!r}\n" for kind, seconds in profile.whole_seconds.items())
    for kind, quality in profile.quality.items():
        stream.writelines(f"# {_MEASURED_PREFIX}{name} {kind}={figure!r}\n" for name, figure in vars(quality).items())
    table = csv.writer(stream, lineterminator="\n")
    columns = [(field, kind) for kind in kinds for field in ("seconds", "source", "spread")]
    table.writerow([*_COLUMNS, *(f"{field} {kind}" for field, kind in columns)])
    for name, node, entry in zip(profile.graph.names, model.nodes, node_entries(profile)):
        output_bytes = " ".join(str(sizes.get(value) or "-") for value in node.output)
        row = {**entry, "node": name, "output_bytes": output_bytes}
        cells = [entry.get(field, {}).get(kind, "") for field, kind in columns]
        table.writerow([*(row.get(column, "") for column in _COLUMNS), *cells])
    return stream.getvalue()


def require_version(version: object, path: str | Path) -> None:
    """Raise InputError unless a cost file has the supported version."""
    if version != VERSION:
        message = f"its version is {format_value(version)}, this onnxplace reads {VERSION}"
        raise InputError("C010", message, where=str(path))


def read_table(path: str | Path, model: Model) -> dict[str, Any]:
    """Read CSV into the form of JSON; raises InputError at others."""
    lines = read_text(path, "C011", "a cost file", "utf-8-sig").splitlines()
    comments = [line[1:].split() for line in lines if line.startswith("#")]
    # The first comment names the format and its version.
    if not comments or comments[0][:1] != [FORMAT]:
        raise _entry_error("not a cost file", path, f"start it with the line '# {FORMAT} {VERSION}'")
    version = "".join(comments[0][1:2]).rstrip(",")
    require_version(_parse_number(version) if version else None, path)
    outputs = {node.name: node.output for node in model.nodes}
    nodes: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    table = csv.DictReader(line for line in lines if not line.startswith("#"))
    try:
        rows = list(table)
    except csv.Error as error:
        raise InputError("C011", f"not a cost file: {error}", where=str(path)) from None
    if "node" not in (table.fieldnames or ()):
        raise _entry_error("not a cost file: it has no column 'node'", path, "see docs/costs.md")
    for row in rows:
        # Spreadsheets write empty rows below the last one.
        if not any(isinstance(cell, str) and cell.strip() for cell in row.values()):
            continue
        name = row["node"]
        if name in nodes:
            raise _entry_error(f"node {name!r} has two rows", path, "keep one row per node")
        nodes[name] = _parse_row(row)
        # The bytes of its outputs, in order; '-' where they are not known.
        figures = zip(outputs.get(name, ()), (row.get("output_bytes") or "").split())
        sizes |= {value: _parse_number(figure) for value, figure in figures if value and figure != "-"}
    return {"nodes": nodes, **_read_figures(comments[1:]), "value_bytes": sizes}


def _read_figures(comments: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the times of the whole model and of measurements, which are comments of a table."""
    whole_seconds: dict[str, Any] = {}
    measured: dict[str, dict[str, Any]] = {}
    for first, *words in filter(None, comments):
        kind, _, figure = " ".join(words).rstrip(",").rpartition("=")
        if first == "whole_seconds":
            whole_seconds[kind] = _parse_number(figure)
        elif first.startswith(_MEASURED_PREFIX):
            measured.setdefault(kind, {})[first.removeprefix(_MEASURED_PREFIX)] = _parse_number(figure)
    return {"whole_seconds": whole_seconds, "measured": measured}


def _parse_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in the form of JSON, without empty cells."""
    cells = {name: cell for name, cell in row.items() if name and isinstance(cell, str) and cell.strip()}
    entry: dict[str, Any] = {"seconds": {}, "source": {}, "spread": {}}
    for name, cell in cells.items():
        field, _, kind = name.partition(" ")
        if kind and field in ("seconds", "source", "spread"):
            entry[field][kind] = cell.strip() if field == "source" else _parse_number(cell)
        elif name in ("unit", "workspace_bytes", "fingerprint"):
            entry[name] = cell if name == "fingerprint" else _parse_number(cell)
    return entry


def _parse_number(text: str) -> Any:
    """Return the number in a text, or the text itself."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
