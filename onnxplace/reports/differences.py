"""Which of two reports to take, and what they decide differently: devices of nodes, the division of work, passes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from onnxplace.reports.layer_tree import name_layer
from onnxplace.reports.page_records import ComparedQuantity, Comparison, PageData, Quantity, Table
from onnxplace.reports.verdict import MIN_SHARE, RATE_LABEL
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.quantities import format_bytes, format_time, list_first

# Layers that a row names.
MAX_LISTED_LAYERS = 3
# Rows of nodes between the same devices; with many devices there may be thousands.
MAX_MOVES = 20
_PART = re.compile(r"/shard\d+$| \(part \d+\)")
# Columns of tables that differ between any two measurements.
_TIMES = frozenset(("time on one device", "compute"))


def compare_pages(first: PageData, second: PageData) -> Comparison:
    """Return the figures of two reports next to each other, and which one to take."""
    rows = compare_figures(first.summary, second.summary)
    tables = list_differences(first, second) if first.title == second.title else ()
    return Comparison(_choose(first, second, rows), rows, tables)


def compare_figures(*reports: Sequence[Quantity]) -> tuple[ComparedQuantity, ...]:
    """Return the figures of two reports next to each other, by their labels."""
    figures, empty = [{entry.label: entry for entry in entries} for entries in reports], Quantity("", "–")
    labels = dict.fromkeys(label for own in figures for label in own)
    return tuple(_compare(label, *(own.get(label, empty) for own in figures)) for label in labels)


def _compare(label: str, first: Quantity, second: Quantity) -> ComparedQuantity:
    texts, before, after = (first.text, second.text), first.value, second.value
    if before is None or after is None:
        return ComparedQuantity(label, texts, "", "")
    if before == after:
        return ComparedQuantity(label, texts, "equal", "")
    is_count = isinstance(before, int) and not first.lower_is_better
    difference = f"{after - before:+.0f}" if is_count else f"{after / before - 1:+.0%}" if before else "from none"
    better: Literal["", "A", "B"] = "" if not first.lower_is_better else "B" if after < before else "A"
    return ComparedQuantity(label, texts, difference.replace("-", "−"), better)


def _choose(first: PageData, second: PageData, rows: Sequence[ComparedQuantity]) -> str:
    """Return in one sentence which report to take, and why."""
    if first.title != second.title:
        return f"They are of different models, {first.title} and {second.title}, so neither replaces the other."
    sizes = [next((entry.text for entry in page.origin if entry.label == "sizes"), "") for page in (first, second)]
    if sizes[0] != sizes[1]:
        return f"They are compiled for other sizes, A for {sizes[0]}, B for {sizes[1]}, so their times do not compare."
    pages = {"A": first, "B": second}
    steps = {name: page.verdict.step_seconds for name, page in pages.items()}
    peaks = {name: sum(device.peak_bytes for device in page.devices) for name, page in pages.items()}
    better, other = sorted(pages, key=lambda name: (steps[name], name))
    if steps[other] <= steps[better] * (1 + MIN_SHARE):
        smaller, larger = sorted(pages, key=lambda name: peaks[name])
        if peaks[smaller] == peaks[larger]:
            return f"Take either: their steps and their memory are equal within {MIN_SHARE:.0%}."
        held = f"{format_bytes(peaks[smaller])} instead of {format_bytes(peaks[larger])} at their peaks"
        return f"Take {smaller}: the steps are equal within {MIN_SHARE:.0%}, and its devices hold {held}."
    if first.is_unsure or second.is_unsure:
        texts = " and ".join(f"{name}'s {format_time(seconds)}" for name, seconds in steps.items())
        return f"There is no clear difference: a trial was disturbed ({texts}). Compile again when the machine is idle."
    times, ratio = {name: format_time(seconds) for name, seconds in steps.items()}, steps[other] / steps[better]
    text = f"Take {better}: its step takes {times[better]}, {ratio:.2f} times as fast as {other}'s {times[other]}"
    price = peaks[better] - peaks[other]
    against = [f"its devices hold {format_bytes(price)} more"] if price > 0 else []
    if any(row.better == other and row.label == RATE_LABEL for row in rows):
        against.append(f"with several requests in flight, {other} gives results more often")
    if first.verdict.basis != second.verdict.basis:
        against.append(f"A's time is {first.verdict.basis}, B's {second.verdict.basis}")
    return f"{text}; {'; '.join(against)}." if against else f"{text}."


# ----------------------------------------------------------------------------------------- what they decide differently


def list_differences(first: PageData, second: PageData) -> tuple[Table, ...]:
    """Return the tables of what differs, none for equal decisions."""
    return (*_list_moves(first, second), *_list_divisions(first, second), *_list_options(first, second))


def _list_moves(first: PageData, second: PageData) -> Iterator[Table]:
    """Yield the nodes that are on other devices, grouped by the devices in both."""
    before, after = _find_devices(first), _find_devices(second)
    names = dict.fromkeys((*before, *after))
    groups = group_pairs(((before.get(name, "-"), after.get(name, "-")), name) for name in names)
    moves = {devices: own for devices, own in groups.items() if devices[0] != devices[1]}
    rows = [(*devices, str(len(own)), _name_layers(own)) for devices, own in moves.items()]
    if rows:
        yield Table(
            caption="Nodes on other devices; a dash where a report does not have them",
            header=("in A on", "in B on", "nodes", "in"),
            rows=tuple(sorted(rows, key=lambda row: -int(row[2]))[:MAX_MOVES]),
        )


def _name_layers(names: Iterable[str]) -> str:
    layers = [*dict.fromkeys(name_layer(name) or name for name in names)]
    return ", ".join(list_first(layers, MAX_LISTED_LAYERS))


def _find_devices(page: PageData) -> Mapping[str, str]:
    """Return the devices of each node, by its path; the parts of a node are one."""
    tree, paths = page.layers, list[str]()
    devices = defaultdict[str, set[str]](set)
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
        kept = [index for index, name in enumerate(header) if name not in _TIMES and not name.startswith("plan ")]
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
