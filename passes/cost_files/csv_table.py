"""Cost files as CSV: a row per node.

Comments above hold figures of the whole model.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onnxplace.errors import InputError, format_value
from onnxplace.facts import Profile, Source
from onnxplace.model import Model
from onnxplace.utils import read_text

FORMAT = "onnxplace-costs"
VERSION = 1
_COLUMNS = ("node", "op", "fingerprint", "unit", "output_bytes", "workspace_bytes")
_MEASURED_PREFIX = "measured."


def node_entries(profile: Profile) -> Iterator[dict[str, Any]]:
    """Yield the entry of each node in a cost file."""
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
        raise InputError("C012", message, where=str(path))


def read_lines(path: str | Path) -> list[str]:
    """Return the lines of a text file; raises InputError if unreadable."""
    return read_text(path, "C011", "a cost file", "utf-8-sig").splitlines()


def read_table(path: str | Path, model: Model) -> dict[str, Any]:
    """Read CSV into the form of JSON; raises InputError at others."""
    lines = read_lines(path)
    comments = [line[1:].split() for line in lines if line.startswith("#")]
    if not comments or comments[0][:1] != [FORMAT]:
        hint = f"start it with the line '# {FORMAT} {VERSION}'"
        raise InputError("C011", "not a cost file", where=str(path), hint=hint)
    version = comments[0][1].rstrip(",") if len(comments[0]) > 1 else ""
    require_version(_parse_number(version) if version else None, path)
    whole_seconds: dict[str, Any] = {}
    measured: dict[str, dict[str, Any]] = {}
    for first, *words in filter(None, comments[1:]):
        kind, _, figure = " ".join(words).rstrip(",").rpartition("=")
        if first == "whole_seconds":
            whole_seconds[kind] = _parse_number(figure)
        elif first.startswith(_MEASURED_PREFIX):
            measured.setdefault(kind, {})[first.removeprefix(_MEASURED_PREFIX)] = _parse_number(figure)
    rows = _read_rows([line for line in lines if not line.startswith("#")], path)
    outputs = {node.name: node.output for node in model.nodes}
    nodes: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    for row in rows:
        if not any(isinstance(cell, str) and cell.strip() for cell in row.values()):
            continue  # spreadsheets write empty rows below the last one
        name = row["node"]
        if name in nodes:
            raise InputError("C014", f"node {name!r} has two rows", where=str(path), hint="keep one row per node")
        nodes[name] = _parse_row(row)
        output_bytes = (row.get("output_bytes") or "").split()
        sizes.update(
            (v, _parse_number(size)) for v, size in zip(outputs.get(name, ()), output_bytes) if v and size != "-"
        )
    return {"nodes": nodes, "whole_seconds": whole_seconds, "measured": measured, "value_bytes": sizes}


def _read_rows(lines: list[str], path: str | Path) -> list[dict[str, Any]]:
    """Return rows by column name; raises InputError without 'node'."""
    table = csv.DictReader(lines)
    try:
        rows = list(table) if "node" in (table.fieldnames or ()) else None
    except csv.Error as error:
        raise InputError("C011", f"not a cost file: {error}", where=str(path)) from None
    if rows is None:
        raise InputError("C011", "not a cost file: it has no column 'node'", where=str(path), hint="see docs/costs.md")
    return rows


def _parse_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in the form of JSON, without empty cells."""
    cells = {name: cell for name, cell in row.items() if name and isinstance(cell, str) and cell.strip()}
    entry: dict[str, Any] = {"seconds": {}, "source": {}, "spread": {}}
    for name, cell in cells.items():
        field, _, kind = name.partition(" ")
        if kind and field in entry:
            entry[field][kind] = cell.strip() if field == "source" else _parse_number(cell)
    entry |= {name: _parse_number(cells[name]) for name in ("unit", "workspace_bytes") if name in cells}
    if "fingerprint" in cells:
        entry["fingerprint"] = cells["fingerprint"]
    return entry


def _parse_number(text: str) -> Any:
    """Return the number in a text, or the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
