"""Cost files: what `profile` found out, as JSON or CSV that people can read, edit and carry to another machine."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from onnxplace.errors import InputError, ModelError
from onnxplace.facts import Profile, Source
from onnxplace.files import read_json
from onnxplace.graph import Floats
from onnxplace.model import Model, op_graph, static_shapes, value_bytes
from onnxplace.passes._measure import Quality
from onnxplace.passes._repeats import fingerprints
from onnxplace.state import Diagnostic
from onnxplace.target import Target

FORMAT = "onnxplace-costs"
VERSION = 1
_COLUMNS = ("node", "op", "fingerprint", "unit", "output_bytes")


@dataclass(frozen=True)
class Details:
    """What a cost file tells besides a profile."""

    prints: Sequence[str] = ()
    """Per node, by which it is known in other models too (`fingerprints`)."""
    spread: Mapping[str, Floats] = field(default_factory=dict)
    """Per class of device and node, in seconds."""
    quality: Mapping[str, Quality] = field(default_factory=dict)
    """Per class of device that was measured."""


def costs_text(profile: Profile, details: Details | None = None) -> str:
    """Return a profile in the form of a cost file: JSON, one line per node."""
    graph, more = profile.graph, details or Details()
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in zip(graph.names, _entries(profile, more))
    )
    head = {"format": FORMAT, "version": VERSION, "whole_seconds": dict(profile.whole_seconds)}
    if more.quality:
        head["measured"] = {kind: asdict(quality) for kind, quality in more.quality.items()}
    sizes = json.dumps(dict(zip(graph.value_names, graph.value_bytes.tolist())))
    return f'{json.dumps(head)[:-1]},\n "nodes": {{\n{lines}\n }},\n "value_bytes": {sizes}}}\n'


def _entries(profile: Profile, more: Details) -> Iterable[dict[str, Any]]:
    """Return what is said of each node."""
    seconds = {kind: array.tolist() for kind, array in profile.seconds.items()}
    sources = {kind: [Source(index).name.lower() for index in array] for kind, array in profile.sources.items()}
    spread = {kind: array.tolist() for kind, array in more.spread.items()}
    for node, (op, unit) in enumerate(zip(profile.graph.ops, profile.unit.tolist())):
        entry: dict[str, Any] = {"op": op, "unit": unit}
        if more.prints:
            entry["fingerprint"] = more.prints[node]
        entry["seconds"] = {kind: spent[node] for kind, spent in seconds.items()}
        entry["source"] = {kind: known[node] for kind, known in sources.items()}
        if spread:
            entry["spread"] = {kind: around[node] for kind, around in spread.items()}
        yield entry


def costs_table(profile: Profile, model: Model, details: Details | None = None) -> str:
    """Return a profile as CSV: a row per node; sizes are those of its outputs, in order, and empty if unknown."""
    more, kinds = details or Details(), list(profile.seconds)
    sizes = dict(zip(profile.graph.value_names, profile.graph.value_bytes.tolist()))
    stream = io.StringIO()
    stream.write(f"# {FORMAT} {VERSION}\n")
    stream.writelines(f"# whole_seconds {kind}={seconds!r}\n" for kind, seconds in profile.whole_seconds.items())
    table = csv.writer(stream, lineterminator="\n")
    table.writerow([*_COLUMNS, *(f"{what} {kind}" for kind in kinds for what in ("seconds", "source", "spread"))])
    for name, node, entry in zip(profile.graph.names, model.nodes, _entries(profile, more)):
        made = " ".join(str(sizes.get(value) or "-") for value in node.output)
        times = [entry[what].get(kind, "") for kind in kinds for what in ("seconds", "source")]
        around = [entry.get("spread", {}).get(kind, "") for kind in kinds]
        cells = [x for seconds, source, near in zip(times[::2], times[1::2], around) for x in (seconds, source, near)]
        table.writerow([name, entry["op"], entry.get("fingerprint", ""), entry["unit"], made, *cells])
    return stream.getvalue()


def read_costs(path: str | Path, model: Model, target: Target) -> tuple[Profile, list[Diagnostic]]:
    """Read a cost file for this model and target; raises InputError naming the file and what is missing in it.

    Nodes are found by their names, else, in a file that holds fingerprints, as nodes that do the same.
    """
    data = _read_table(path, model) if str(path).endswith(".csv") else _read(path)
    nodes: Mapping[str, Any] = data["nodes"]
    shapes = _Lazily(model)
    order, notes = _matched(nodes, path, model, shapes)
    classes = list(dict.fromkeys(device.cost_class for device in target.devices))
    seconds = {
        kind: np.array([_seconds(entry, kind, path, node.name) for entry, node in zip(order, model.nodes)])
        for kind in classes
    }
    sources = {kind: np.full(len(order), Source.GIVEN, dtype=np.uint8) for kind in classes}
    unit = np.unique([entry.get("unit", -1 - i) for i, entry in enumerate(order)], return_inverse=True)[1]
    sizes = _amounts(data, "value_bytes", path, whole=True)
    whole = _amounts(data, "whole_seconds", path, whole=False)
    made = (name for node in model.nodes for name in node.output if name)
    if any(name not in sizes for name in (*made, *(value.name for value in model.inputs))):
        found = shapes()
        sizes = {**value_bytes(model, {**found, **model.input_shapes()}), **sizes}
    profile = Profile(
        op_graph(model, sizes),
        MappingProxyType(seconds),
        MappingProxyType(sources),
        unit.astype(np.int32),
        MappingProxyType(whole),
    )
    return profile, notes


class _Lazily:
    """The static shapes of a model, found when first asked for."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._found: Mapping[str, tuple[int, ...]] | None = None

    def __call__(self) -> Mapping[str, tuple[int, ...]]:
        if self._found is None:
            self._found = static_shapes(self._model)
        return self._found


def _matched(
    nodes: Mapping[str, Any],
    path: str | Path,
    model: Model,
    shapes: Callable[[], Mapping[str, tuple[int, ...]]],
) -> tuple[list[Mapping[str, Any]], list[Diagnostic]]:
    """Return the entry of each node of the model; raises ModelError for those that have none."""
    printed = {e["fingerprint"]: e for e in nodes.values() if isinstance(e, dict) and _is_print(e.get("fingerprint"))}
    missing = [node.name for node in model.nodes if node.name not in nodes]
    prints = dict(zip((node.name for node in model.nodes), fingerprints(model, shapes()))) if printed else {}
    unknown = [name for name in missing if prints.get(name) not in printed]
    if unknown:
        raise ModelError(
            "C010",
            f"no costs for {len(unknown)} of {len(model.nodes)} nodes, such as {', '.join(unknown[:3])}",
            where=str(path),
            hint="it was made for another model; profile this one",
        )
    order, other = [], []
    for node in model.nodes:
        if node.name in nodes:
            entry = _entry(nodes[node.name], path, node.name)
            if _is_print(entry.get("fingerprint")) and entry["fingerprint"] != prints[node.name]:
                other.append(node.name)
        else:  # its unit is one of another model, where it may have had other members
            known = _entry(printed[prints[node.name]], path, node.name)
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
        raise InputError("C014", f"{key} is no table of numbers by name", where=str(path), hint="see docs/costs.md")
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
    _require_version(data.get("version"), path)
    return data


def _require_version(found: object, path: str | Path) -> None:
    if found != VERSION:
        raise InputError("C012", f"its version is {found}, this onnxplace reads {VERSION}", where=str(path))


def _read_table(path: str | Path, model: Model) -> dict[str, Any]:
    """Read CSV into what JSON holds."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise InputError("C011", "there is no such file", where=str(path)) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError("C011", f"not a cost file: {problem}", where=str(path)) from None
    told = [line[1:].split() for line in lines if line.startswith("#")]
    if not told or told[0][:1] != [FORMAT]:
        hint = f"its first line is '# {FORMAT} {VERSION}'"
        raise InputError("C011", "not a cost file", where=str(path), hint=hint)
    version = told[0][1].rstrip(",") if len(told[0]) > 1 else ""
    _require_version(int(version) if version.isdecimal() else version or None, path)
    whole: dict[str, Any] = {}
    for words in told[1:]:
        if words[:1] == ["whole_seconds"]:
            kind, _, seconds = " ".join(words[1:]).rpartition("=")
            whole[kind] = _number(seconds.rstrip(","))
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    if "node" not in (rows.fieldnames or ()):
        raise InputError("C011", "not a cost file: it has no column 'node'", where=str(path), hint="see docs/costs.md")
    outputs = {node.name: node.output for node in model.nodes}
    nodes: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    for row in rows:
        nodes[row["node"]] = _row_entry(row)
        made = (row.get("output_bytes") or "").split()
        sizes.update((v, _number(size)) for v, size in zip(outputs.get(row["node"], ()), made) if v and size != "-")
    return {"nodes": nodes, "whole_seconds": whole, "value_bytes": sizes}


def _row_entry(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of CSV as JSON has it; an empty cell is nothing."""
    cells = {name: cell for name, cell in row.items() if name and isinstance(cell, str) and cell.strip()}
    seconds = {name.partition(" ")[2]: _number(c) for name, c in cells.items() if name.startswith("seconds ")}
    entry: dict[str, Any] = {"seconds": seconds}
    if "unit" in cells:
        entry["unit"] = _number(cells["unit"])
    if "fingerprint" in cells:
        entry["fingerprint"] = cells["fingerprint"]
    return entry


def _number(text: str) -> Any:
    """Return the number that is written, or the text itself if it is none."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


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
