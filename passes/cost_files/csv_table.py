"""Cost files as CSV: a row per node, and what is said of the whole in comments above."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onnxplace.errors import InputError, shown
from onnxplace.facts import Profile, Source
from onnxplace.model import Model
from onnxplace.utils import read_text

FORMAT = "onnxplace-costs"
VERSION = 1
_COLUMNS = ("node", "op", "fingerprint", "unit", "output_bytes", "workspace_bytes")
_MEASURED = "measured."


def entries(profile: Profile) -> Iterator[dict[str, Any]]:
    """Yield what a cost file says of each node."""
    seconds = {kind: array.tolist() for kind, array in profile.seconds.items()}
    sources = {kind: [Source(index).name.lower() for index in array] for kind, array in profile.sources.items()}
    spread = {kind: array.tolist() for kind, array in profile.spread.items()}
    workspace = profile.graph.workspace_bytes.tolist()
    for node, (op, unit) in enumerate(zip(profile.graph.ops, profile.unit.tolist())):
        entry: dict[str, Any] = {"op": op, "unit": unit}
        if profile.prints:
            entry["fingerprint"] = profile.prints[node]
        if workspace[node]:
            entry["workspace_bytes"] = workspace[node]
        entry["seconds"] = {kind: spent[node] for kind, spent in seconds.items()}
        entry["source"] = {kind: known[node] for kind, known in sources.items()}
        if spread:
            entry["spread"] = {kind: around[node] for kind, around in spread.items()}
        yield entry


def format_costs_csv(profile: Profile, model: Model) -> str:
    """Return a profile as CSV: a row per node; sizes are those of its outputs, in order, and `-` if unknown."""
    kinds = list(profile.seconds)
    sizes = dict(zip(profile.graph.value_names, profile.graph.value_bytes.tolist()))
    stream = io.StringIO()
    stream.write(f"# {FORMAT} {VERSION}\n")
    stream.writelines(f"# whole_seconds {kind}={seconds!r}\n" for kind, seconds in profile.whole_seconds.items())
    for kind, quality in profile.quality.items():
        stream.writelines(f"# {_MEASURED}{name} {kind}={figure!r}\n" for name, figure in vars(quality).items())
    table = csv.writer(stream, lineterminator="\n")
    told = [(what, kind) for kind in kinds for what in ("seconds", "source", "spread")]
    table.writerow([*_COLUMNS, *(f"{what} {kind}" for what, kind in told)])
    for name, node, entry in zip(profile.graph.names, model.nodes, entries(profile)):
        made = " ".join(str(sizes.get(value) or "-") for value in node.output)
        first = {**entry, "node": name, "output_bytes": made}
        cells = [entry.get(what, {}).get(kind, "") for what, kind in told]
        table.writerow([*(first.get(column, "") for column in _COLUMNS), *cells])
    return stream.getvalue()


def require_version(found: object, path: str | Path) -> None:
    """Raise InputError unless a cost file has the version that is read."""
    if found != VERSION:
        raise InputError("C012", f"its version is {shown(found)}, this onnxplace reads {VERSION}", where=str(path))


def read_lines(path: str | Path) -> list[str]:
    """Return the lines of a text; raises InputError if there is none."""
    return read_text(path, "C011", "a cost file", "utf-8-sig").splitlines()


def read_table(path: str | Path, model: Model) -> dict[str, Any]:
    """Read CSV into what JSON holds; raises InputError naming the file if it is no cost file."""
    lines = read_lines(path)
    told = [line[1:].split() for line in lines if line.startswith("#")]
    if not told or told[0][:1] != [FORMAT]:
        hint = f"its first line is '# {FORMAT} {VERSION}'; files of other programs that are read: docs/costs.md"
        raise InputError("C011", "not a cost file", where=str(path), hint=hint)
    version = told[0][1].rstrip(",") if len(told[0]) > 1 else ""
    require_version(_number(version) if version else None, path)
    whole: dict[str, Any] = {}
    measured: dict[str, dict[str, Any]] = {}
    for first, *words in filter(None, told[1:]):
        kind, _, figure = " ".join(words).rstrip(",").rpartition("=")
        if first == "whole_seconds":
            whole[kind] = _number(figure)
        elif first.startswith(_MEASURED):
            measured.setdefault(kind, {})[first.removeprefix(_MEASURED)] = _number(figure)
    rows = _rows([line for line in lines if not line.startswith("#")], path)
    outputs = {node.name: node.output for node in model.nodes}
    nodes: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    for row in rows:
        if not any(isinstance(cell, str) and cell.strip() for cell in row.values()):
            continue  # as spreadsheets write below the last one
        name = row["node"]
        if name in nodes:
            raise InputError("C014", f"node {name!r} is there twice", where=str(path), hint="each node has one row")
        nodes[name] = _row_entry(row)
        made = (row.get("output_bytes") or "").split()
        sizes.update((v, _number(size)) for v, size in zip(outputs.get(name, ()), made) if v and size != "-")
    return {"nodes": nodes, "whole_seconds": whole, "measured": measured, "value_bytes": sizes}


def _rows(lines: list[str], path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of CSV by the names of its columns; raises InputError if there is no column of nodes."""
    table = csv.DictReader(lines)
    try:
        rows = list(table) if "node" in (table.fieldnames or ()) else None
    except csv.Error as problem:
        raise InputError("C011", f"not a cost file: {problem}", where=str(path)) from None
    if rows is None:
        raise InputError("C011", "not a cost file: it has no column 'node'", where=str(path), hint="see docs/costs.md")
    return rows


def _row_entry(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of CSV as JSON has it; an empty cell is nothing."""
    cells = {name: cell for name, cell in row.items() if name and isinstance(cell, str) and cell.strip()}
    entry: dict[str, Any] = {"seconds": {}, "source": {}, "spread": {}}
    for name, cell in cells.items():
        what, _, kind = name.partition(" ")
        if kind and what in entry:
            entry[what][kind] = cell.strip() if what == "source" else _number(cell)
    entry |= {name: _number(cells[name]) for name in ("unit", "workspace_bytes") if name in cells}
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
