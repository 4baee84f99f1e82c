"""Cost files of other programs, which hold no times.

They are recognised by the first line: the memory statistics of ONNX Runtime's nodes, and the cost model of Olive.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path

from onnxplace.errors import Diagnostic, InputError, ModelError, format_count
from onnxplace.graph import Longs
from onnxplace.model import Model
from onnxplace.passes.cost_files.csv_table import read_lines
from onnxplace.passes.cost_files.olive import Figures, ModuleWork, module_work
from onnxplace.passes.cost_files.ort_node_memory import NodeBytes, find_unknown_sizes, match_nodes, node_workspaces

NODE_HEADER = ("#name", "input_sizes", "initializers_sizes", "total_dynamic_sizes", "total_temp_allocations")
MODULE_HEADER = ("module", "num_params", "num_bytes")
FLOPS_COLUMN = "num_flops"
# Limit of a count of bytes or operations, so that sums are still exact integers.
MAX_COUNT = 1 << 50


@dataclass(frozen=True)
class ImportedCosts:
    """Costs of a model from a file of another program."""

    workspace_bytes: Longs | None = None
    """Per node."""
    value_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of values whose size shape inference does not know."""
    work: ModuleWork | None = None
    """The work of nodes, from which times are estimated."""
    instead: str = ""
    """The reason why nothing is measured, empty if something is."""
    notes: tuple[Diagnostic, ...] = ()


def is_foreign_file(path: str | Path) -> bool:
    """Return whether a file begins like one of another program.

    False for files that cannot be read, or only once.
    """
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
    """Read a file of another program.

    Args:
        path: Of the file.
        model: The model that it is about.
        shapes: Known shapes of values, by name.
        sizes: Known sizes of values in bytes, by name.

    Raises:
        InputError: a line is wrong; the error names it.
        ModelError: nothing in the file is in the model.
    """
    lines = read_lines(path)
    if _first_cell(lines[0]) == NODE_HEADER[0]:
        return _import_node_memory(_read_node_rows(lines, path), path, model, sizes)
    return _import_module_work(_read_module_rows(lines, path), path, model, shapes, sizes)


def _import_node_memory(
    rows: Mapping[str, NodeBytes], path: str | Path, model: Model, sizes: Mapping[str, int]
) -> ImportedCosts:
    nodes = match_nodes(rows, model)
    _require_matches(nodes, rows, "node", path)
    workspace = node_workspaces(rows, nodes, len(model.nodes))
    new_sizes = find_unknown_sizes(rows, nodes, model, sizes)
    message = (
        f"the workspace of {len(set(nodes.values()))} of {len(model.nodes)} nodes is from the file, at most "
        f"{int(workspace.max(initial=0))} bytes, and the size of {format_count(len(new_sizes), 'value')} that was "
        "unknown; "
        "it holds no times"
    )
    notes = [Diagnostic("C007", message, where=str(path))]
    if unmatched := [name for name in rows if name not in nodes]:
        largest = max(rows[name].temporary_bytes for name in unmatched)
        message = (
            f"{len(unmatched)} of the {len(rows)} nodes in the file are not in the model and are left out, since ONNX "
            f"Runtime makes them by fusing and inserting nodes, such as {', '.join(unmatched[:3])}; "
            f"their workspace is at most {largest} bytes"
        )
        notes.append(Diagnostic("C008", message, where=str(path)))
    return ImportedCosts(workspace, new_sizes, notes=tuple(notes))


def _import_module_work(
    rows: Mapping[str, Figures],
    path: str | Path,
    model: Model,
    shapes: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int],
) -> ImportedCosts:
    work = module_work(rows, model, shapes, sizes)
    _require_matches(work.modules, rows, "module", path)
    message = (
        f"{len(work.nodes)} of {len(model.nodes)} nodes are in {len(work.modules)} of the {len(rows)} modules in the "
        "file: their times are estimated from its operations and bytes, those of the other nodes from the model's"
    )
    note = Diagnostic("C007", message, where=str(path))
    return ImportedCosts(work=work, instead="the cost file holds work, no times", notes=(note,))


def _require_matches(matches: Sized, rows: Mapping[str, object], kind: str, path: str | Path) -> None:
    """Raise ModelError if nothing in the file is in the model."""
    if not matches:
        examples = f", such as {', '.join(list(rows)[:3])}" if rows else ""
        message = f"none of the {len(rows)} {kind}s in it is in the model{examples}"
        raise ModelError("C010", message, where=str(path), hint="it was made for another model")


def _read_node_rows(lines: Sequence[str], path: str | Path) -> dict[str, NodeBytes]:
    """Return the rows of ONNX Runtime's statistics by name.

    A name may hold commas, which are not quoted.
    """
    header = [cell.strip().strip('"') for cell in lines[0].split(",")]
    _require_columns(header, NODE_HEADER, path, "statistics of ONNX Runtime's nodes")
    rows = {}
    for number, line in enumerate(lines[1:], 2):
        if not line or line.startswith("#"):
            continue
        name, *cells = line.rsplit(",", len(header) - 1)
        figures = _parse_figures(dict(zip(header[1:], cells)), NODE_HEADER[1:], f"line {number}", path)
        rows[name] = NodeBytes(int(figures["total_dynamic_sizes"]), int(figures["total_temp_allocations"]))
    return rows


def _read_module_rows(lines: Sequence[str], path: str | Path) -> dict[str, Figures]:
    """Return the rows of Olive's cost model by module."""
    try:
        header, *table = list(csv.reader(lines))
    except csv.Error as error:
        raise InputError("C011", f"not a cost file: {error}", where=str(path)) from None
    header = [cell.strip() for cell in header]
    _require_columns(header, MODULE_HEADER, path, "Olive's cost model")
    columns = [name for name in (*MODULE_HEADER[1:], FLOPS_COLUMN) if name in header]
    rows: dict[str, Figures] = {}
    for cells in filter(None, table):
        row = dict(zip(header, cells))
        name = row["module"].strip()
        if name in rows:
            hint = "keep one row per module"
            raise InputError("C015", f"module {name!r} has two rows", where=str(path), hint=hint)
        figures = _parse_figures(row, columns, f"module {name!r}", path)
        rows[name] = Figures(figures.get(FLOPS_COLUMN, 0.0), figures["num_bytes"])
    return rows


def _require_columns(header: Sequence[str], columns: Sequence[str], path: str | Path, description: str) -> None:
    if missing := [name for name in columns if name not in header]:
        hint = f"expected the columns {','.join(columns)}"
        raise InputError("C011", f"{description} without {', '.join(missing)}", where=str(path), hint=hint)


def _parse_figures(cells: Mapping[str, str], columns: Sequence[str], row: str, path: str | Path) -> dict[str, float]:
    """Return the numbers of a row; raises InputError at others."""
    figures = {}
    for name in columns:
        cell = cells.get(name)
        try:
            figures[name] = float(cell) if cell is not None else math.nan
        except ValueError:
            figures[name] = math.nan
        if not 0 <= figures[name] <= MAX_COUNT:
            cell_text = "is missing" if cell is None else f"is {cell.strip()!r}"
            hint = f"write a number from 0 to {MAX_COUNT}"
            raise InputError("C015", f"{row}: {name} {cell_text}", where=str(path), hint=hint)
    return figures
