"""Cost files of other programs: what they tell of a model. Neither holds times.

Recognised by the first line: the memory statistics of ONNX Runtime's nodes, and the cost model of Olive.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path

from onnxplace.errors import Diagnostic, InputError, ModelError, counted
from onnxplace.graph import Longs
from onnxplace.model import Model
from onnxplace.passes.cost_files.csv_table import read_lines
from onnxplace.passes.cost_files.olive import Figures, ModuleWork, module_work
from onnxplace.passes.cost_files.ort_node_memory import NodeBytes, matched_nodes, unknown_sizes, workspaces

NODE_HEADER = ("#name", "input_sizes", "initializers_sizes", "total_dynamic_sizes", "total_temp_allocations")
MODULE_HEADER = ("module", "num_params", "num_bytes")
FLOPS = "num_flops"
# No count of bytes or operations is larger; sums of them are integers still.
MOST = 1 << 50


@dataclass(frozen=True)
class ImportedCosts:
    """What a cost file of another program tells of a model."""

    workspace_bytes: Longs | None = None
    """Per node."""
    value_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of values whose size shape inference does not know."""
    work: ModuleWork | None = None
    """From which times are estimated."""
    instead: str = ""
    """Why nothing is measured, if that is so."""
    notes: tuple[Diagnostic, ...] = ()


def is_foreign_file(path: str | Path) -> bool:
    """Return whether a file begins as one of another program does; False if it cannot be read, or only once."""
    if not os.path.isfile(path):  # a pipe, say
        return False
    try:
        with Path(path).open(encoding="utf-8-sig", errors="replace") as stream:
            first = stream.readline(1000)
    except OSError:
        return False
    return _first_cell(first) in (NODE_HEADER[0], MODULE_HEADER[0])


def _first_cell(line: str) -> str:
    return line.partition(",")[0].strip().strip('"')


def read_foreign(
    path: str | Path, model: Model, shapes: Mapping[str, Sequence[int]], sizes: Mapping[str, int]
) -> ImportedCosts:
    """Read what a file of another program says of a model whose shapes and sizes of values are known so far.

    Raises InputError naming the line that is wrong, ModelError if nothing in it is in the model.
    """
    lines = read_lines(path)
    if _first_cell(lines[0]) == NODE_HEADER[0]:
        return _node_memory(_node_rows(lines, path), path, model, sizes)
    return _module_work(_module_rows(lines, path), path, model, shapes, sizes)


def _node_memory(
    rows: Mapping[str, NodeBytes], path: str | Path, model: Model, sizes: Mapping[str, int]
) -> ImportedCosts:
    nodes = matched_nodes(rows, model)
    _require_some(nodes, rows, "node", path)
    workspace, found = workspaces(rows, nodes, len(model.nodes)), unknown_sizes(rows, nodes, model, sizes)
    message = (
        f"the workspace of {len(set(nodes.values()))} of {len(model.nodes)} nodes is from the file, at most "
        f"{int(workspace.max(initial=0))} bytes, and the size of {counted(len(found), 'value')} that was unknown; "
        "it holds no times"
    )
    notes = [Diagnostic("C007", message, where=str(path))]
    if other := [name for name in rows if name not in nodes]:
        largest = max(rows[name].temporary for name in other)
        message = (
            f"{len(other)} of the {len(rows)} nodes in the file are none of the model's, as ONNX Runtime makes "
            f"them by fusing and inserting nodes, and are left out, such as {', '.join(other[:3])}; "
            f"their workspace is at most {largest} bytes"
        )
        notes.append(Diagnostic("C008", message, where=str(path)))
    return ImportedCosts(workspace, found, notes=tuple(notes))


def _module_work(
    rows: Mapping[str, Figures],
    path: str | Path,
    model: Model,
    shapes: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int],
) -> ImportedCosts:
    work = module_work(rows, model, shapes, sizes)
    _require_some(work.modules, rows, "module", path)
    message = (
        f"{len(work.nodes)} of {len(model.nodes)} nodes are in {len(work.modules)} of the {len(rows)} modules in the "
        "file: their times are estimated from its operations and bytes, those of the other nodes from the model's"
    )
    note = Diagnostic("C007", message, where=str(path))
    return ImportedCosts(work=work, instead="the cost file holds work, no times", notes=(note,))


def _require_some(found: Sized, rows: Mapping[str, object], what: str, path: str | Path) -> None:
    """Raise ModelError if nothing in the file is in the model."""
    if not found:
        such = f", such as {', '.join(list(rows)[:3])}" if rows else ""
        message = f"none of the {len(rows)} {what}s in it is in the model{such}"
        raise ModelError("C010", message, where=str(path), hint="it was made for another model")


def _node_rows(lines: Sequence[str], path: str | Path) -> dict[str, NodeBytes]:
    """Return the rows of ONNX Runtime's statistics by name; a name may hold commas, which are not quoted."""
    header = [cell.strip().strip('"') for cell in lines[0].split(",")]
    _require_columns(header, NODE_HEADER, path, "statistics of ONNX Runtime's nodes")
    rows = {}
    for number, line in enumerate(lines[1:], 2):
        if not line or line.startswith("#"):
            continue
        name, *cells = line.rsplit(",", len(header) - 1)
        figures = _figures(dict(zip(header[1:], cells)), NODE_HEADER[1:], f"line {number}", path)
        rows[name] = NodeBytes(int(figures["total_dynamic_sizes"]), int(figures["total_temp_allocations"]))
    return rows


def _module_rows(lines: Sequence[str], path: str | Path) -> dict[str, Figures]:
    """Return the rows of Olive's cost model by module."""
    try:
        header, *table = list(csv.reader(lines))
    except csv.Error as problem:
        raise InputError("C011", f"not a cost file: {problem}", where=str(path)) from None
    header = [cell.strip() for cell in header]
    _require_columns(header, MODULE_HEADER, path, "Olive's cost model")
    wanted = [name for name in (*MODULE_HEADER[1:], FLOPS) if name in header]
    rows: dict[str, Figures] = {}
    for cells in filter(None, table):
        row = dict(zip(header, cells))
        name = row["module"].strip()
        if name in rows:
            hint = "each module has one row"
            raise InputError("C015", f"module {name!r} is there twice", where=str(path), hint=hint)
        figures = _figures(row, wanted, f"module {name!r}", path)
        rows[name] = Figures(figures.get(FLOPS, 0.0), figures["num_bytes"])
    return rows


def _require_columns(found: Sequence[str], wanted: Sequence[str], path: str | Path, what: str) -> None:
    if missing := [name for name in wanted if name not in found]:
        hint = f"the columns are {','.join(wanted)}"
        raise InputError("C011", f"{what} without {', '.join(missing)}", where=str(path), hint=hint)


def _figures(cells: Mapping[str, str], names: Sequence[str], row: str, path: str | Path) -> dict[str, float]:
    """Return the numbers of a row by column; raises InputError naming the one that is none."""
    figures = {}
    for name in names:
        cell = cells.get(name)
        try:
            figures[name] = float(cell) if cell is not None else math.nan
        except ValueError:
            figures[name] = math.nan
        if not 0 <= figures[name] <= MOST:
            told = "is missing" if cell is None else f"is {cell.strip()!r}"
            hint = "it must be a number, not negative"
            raise InputError("C015", f"{row}: {name} {told}", where=str(path), hint=hint)
    return figures
