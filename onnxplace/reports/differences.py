"""What two reports about one model decide differently: devices of nodes, the division of work, and passes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from onnxplace.reports.layer_tree import name_layer
from onnxplace.reports.page_records import PageData, Table

# Layers that a row names.
MAX_LISTED_LAYERS = 3
# Rows of nodes between the same devices; with many devices there may be thousands.
MAX_MOVES = 20
_PART = re.compile(r"/shard\d+$")
# Columns of tables that differ between any two measurements.
_TIMES = frozenset(("time on one device", "compute"))


def list_differences(first: PageData, second: PageData) -> tuple[Table, ...]:
    """Return the tables of what differs, none for equal decisions."""
    return (*_list_moves(first, second), *_list_divisions(first, second), *_list_options(first, second))


def _list_moves(first: PageData, second: PageData) -> Iterator[Table]:
    """Yield the nodes that are on other devices, grouped by the devices in both."""
    before, after = _find_devices(first), _find_devices(second)
    moves: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in dict.fromkeys((*before, *after)):
        devices = before.get(name, "-"), after.get(name, "-")
        if devices[0] != devices[1]:
            moves[devices].append(name)
    rows = [(*devices, str(len(names)), _name_layers(names)) for devices, names in moves.items()]
    if rows:
        yield Table(
            caption="Nodes on other devices; a dash where a report does not have them",
            header=("in A on", "in B on", "nodes", "in"),
            rows=tuple(sorted(rows, key=lambda row: -int(row[2]))[:MAX_MOVES]),
        )


def _name_layers(names: Iterable[str]) -> str:
    layers = [*dict.fromkeys(name_layer(name, "/") or name for name in names)]
    more = [f"{len(layers) - MAX_LISTED_LAYERS} more"] if len(layers) > MAX_LISTED_LAYERS else []
    return ", ".join((*layers[:MAX_LISTED_LAYERS], *more))


def _find_devices(page: PageData) -> Mapping[str, str]:
    """Return the devices of each node, by its path; the parts of a node are one."""
    tree, paths = page.layers, list[str]()
    devices: dict[str, set[str]] = defaultdict(set)
    for label, parent, node, device in zip(tree.label, tree.parent, tree.node, tree.device):
        above = paths[parent] if parent >= 0 else ""
        # Groups of equal layers are not in the names of nodes.
        paths.append(above if " … " in label else f"{above}/{label}" if above else label)
        if node >= 0:
            # Parts are separated by `/`, also where layers are separated by `.`.
            devices[_PART.sub("", paths[-1]).replace(".", "/")].add(page.devices[device].id)
    return {name: "+".join(sorted(own)) for name, own in devices.items()}


def _list_divisions(first: PageData, second: PageData) -> Iterator[Table]:
    """Yield the rows about split operators, exchanges, stages, routes and so on that only one of the reports has."""
    tables = [{part.header: part for part in page.division} for page in (first, second)]
    for header in dict.fromkeys((*tables[0], *tables[1])):
        kept = [index for index, name in enumerate(header) if name not in _TIMES]
        rows = [
            [tuple(row[index] for index in kept) for row in own[header].rows] if header in own else [] for own in tables
        ]
        differing = [("AB"[side], *row) for side in (0, 1) for row in rows[side] if row not in rows[1 - side]]
        if differing:
            caption = next(own[header].caption for own in tables if header in own)
            columns = ("only in", *(header[index] for index in kept))
            yield Table(f"{caption}; what only one of both has", columns, tuple(differing))


def _list_options(first: PageData, second: PageData) -> Iterator[Table]:
    """Yield the passes whose options differ."""
    passes = [{entry.label: entry.text for entry in page.passes} for page in (first, second)]
    rows = [
        (name, *texts)
        for name in dict.fromkeys((*passes[0], *passes[1]))
        if len(set(texts := tuple(own.get(name, "-") for own in passes))) > 1
    ]
    if rows:
        yield Table("Passes with other options; a dash where it did not run", ("pass", "A", "B"), tuple(rows))
