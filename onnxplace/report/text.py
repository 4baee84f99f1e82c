"""Show people what was decided and what happened: the summary of a bundle, and timelines."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from onnxplace.errors import counted
from onnxplace.utils import field_docs

if TYPE_CHECKING:
    from onnxplace.bundle import Bundle, Manifest, Predicted, RepeatRecord
    from onnxplace.cost_graph import CostGraph
    from onnxplace.driver import Placed
    from onnxplace.runtime import Event
    from onnxplace.target import Target

_LIMITS = {"Ge": "at least", "Gt": "more than", "Le": "at most", "Lt": "less than"}
_COLORS = {"run": "thread_state_running", "copy": "rail_animation", "wait": "thread_state_sleeping"}


def chrome_trace(events: Iterable[Event], bundle: Bundle) -> dict[str, Any]:
    """Return events in Chrome's trace format: a row per device, microseconds."""
    rows = {device.id: index for index, device in enumerate(bundle.target.devices)}
    entries: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": device}}
        for device, row in rows.items()
    ]
    entries += [
        {
            "ph": "X",
            "pid": 0,
            "tid": rows[event.device],
            "cat": event.kind,
            "name": event.name,
            "cname": _COLORS[event.kind],
            "ts": event.start_seconds * 1e6,
            "dur": (event.finish_seconds - event.start_seconds) * 1e6,
            "args": {"request": event.request},
        }
        for event in events
    ]
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": {"model": bundle.manifest.model}}


def milliseconds(seconds: float) -> str:
    """Return a time as people read it: three digits, in ms."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def mebibytes(size: int) -> str:
    """Return an amount of memory as people read it."""
    if size < 2**10:
        return f"{size} B"
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Lay out rows in columns; the first `left` columns are aligned left, the others right."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def compile_summary(bundle: Bundle) -> str:
    """Return what was decided, on one screen."""
    manifest = bundle.manifest
    rows = [
        (
            device.id,
            str(device.nodes),
            milliseconds(device.compute_seconds),
            mebibytes(device.weights_bytes),
            mebibytes(device.peak_bytes),
            mebibytes(device.limit_bytes),
        )
        for device in manifest.devices
    ]
    predicted, sent = manifest.predicted, mebibytes(manifest.transfer_bytes)
    nodes = counted(sum(device.nodes for device in manifest.devices), "node")
    return "\n".join(
        [
            f"{manifest.model}: {nodes}, placer {manifest.placer}",
            *_repeats_line(manifest.repeats),
            table(("device", "nodes", "compute", "weights", "peak", "limit"), rows),
            f"segments: {len(manifest.segments)}, transfers: {manifest.transfers} ({sent})",
            *_step_lines(manifest),
            *_process_line(predicted),
            f"bundle: {bundle.path}",
        ]
    )


def _step_lines(manifest: Manifest) -> list[str]:
    """Return what a step is expected to take, and what it took in a trial, if there was one."""
    from onnxplace.pipeline import OBJECTIVES  # with all that placing needs, which other texts do without

    predicted, trial = manifest.predicted, manifest.trial
    step, best = milliseconds(predicted.step_seconds), milliseconds(predicted.single_device_seconds)
    bound = milliseconds(predicted.lower_bound_seconds)
    room = "" if predicted.single_device_fits else ", where it does not fit"
    lines = [f"predicted step {step}; best single device {best}{room}; nothing beats {bound}"]
    if manifest.placer == OBJECTIVES["throughput"]:
        lines.append(f"with requests in flight, a result every {milliseconds(predicted.interval_seconds)}")
    if trial is not None:
        took, planned = milliseconds(trial.step_seconds), milliseconds(trial.planned_seconds)
        lines.append(f"predicted from a trial, whose steps took {took}; planned by the costs of nodes: {planned}")
    return lines


def _process_line(predicted: Predicted) -> list[str]:
    """Return a line about the memory of the process, if that was predicted."""
    if not predicted.running_bytes:
        return []
    running, opening = mebibytes(predicted.running_bytes), mebibytes(predicted.opening_bytes)
    return [f"a process that runs it takes {running}, and at most {opening} while it opens sessions"]


def _repeats_line(repeats: Sequence[RepeatRecord]) -> list[str]:
    """Return a line about equal layers, the largest stretches first, if there are any."""
    largest = sorted(repeats, key=lambda found: -found.count * found.nodes)
    shown = [f"{found.count} x layer of {found.nodes} nodes (from {found.first!r})" for found in largest[:3]]
    more = [f"{len(largest) - 3} more"] if len(largest) > 3 else []
    return [f"repeats: {', '.join(shown + more)}"] if shown else []


def pass_help(kind: type) -> tuple[str, dict[str, Any]]:
    """Return what a pass or runtime does and its options, as text and as data."""
    options = []
    if is_dataclass(kind):
        about_fields = field_docs(kind)
        options = [
            {
                "name": item.name,
                "type": _type_text(item.type),
                "default": None if item.default is MISSING else item.default,
                "about": about_fields.get(item.name, ""),
            }
            for item in fields(kind)
        ]
    about = inspect.cleandoc(kind.__doc__ or "")
    lines = [
        f"  {option['name']}={option['default']!r}  ({option['type']})\n      {option['about']}" for option in options
    ]
    return about + "\n\n" + ("\n".join(["options:", *lines]) if lines else "no options"), {
        "about": about,
        "options": options,
    }


def _type_text(annotation: object) -> str:
    """Return the type of an option as people read it: `float, at least 0` for `Annotated[float, Ge(0)]`."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    found = re.fullmatch(r"(?:typing\.)?Annotated\[([^\[\],]+), (.*)\]", text)
    if not found:
        return text
    limits = re.findall(r"\b(Ge|Gt|Le|Lt)\((?:\w+=)?([^()]*)\)", found[2])
    return ", ".join([found[1], *(f"{_LIMITS[name]} {value}" for name, value in limits)])


def devices_summary(about: Mapping[str, Any], target: Target) -> str:
    """Return what `machine.describe` found, and the devices that are used by default."""
    host = about["host"]
    lines = [
        f"host: {len(host['cores'])} cores, {mebibytes(host['available_memory_bytes'])} available; "
        f"onnxruntime {about['onnxruntime']}"
    ]
    for gpu in about["gpus"]:
        problem = f"; NOT usable: {gpu['problem']}" if gpu["problem"] else ""
        lines.append(f"{gpu['id']}: {gpu['name']}, {mebibytes(gpu['free_bytes'])} free{problem}")
    if not about["gpus"]:
        lines.append("no NVIDIA GPU found")
    rows = [(d.id, str(d.cores), mebibytes(d.memory_bytes), d.cost_class) for d in target.devices]
    return "\n".join(
        [*lines, "", "used unless --devices says otherwise:", table(("device", "cores", "memory", "cost class"), rows)]
    )


def placed_summary(found: Placed, graph: CostGraph) -> str:
    """Return how a placement of a cost graph does, on one screen."""
    counts = Counter(found.placement.values())
    rows = [
        (str(name), str(counts[name]), mebibytes(int(peak)), mebibytes(device.memory_bytes))
        for name, peak, device in zip(graph.device_ids, found.peak_bytes, graph.target.devices)
    ]
    gap = found.makespan_seconds / found.lower_bound_seconds - 1 if found.lower_bound_seconds else 0.0
    return "\n".join(
        [
            f"{graph.name}: {counted(len(graph.ids), 'node')}, placer {found.placer}, "
            f"{milliseconds(found.seconds)} to place",
            table(("device", "nodes", "peak", "limit"), rows),
            f"step {milliseconds(found.makespan_seconds)}, {gap:.1%} above a bound of "
            f"{milliseconds(found.lower_bound_seconds)}" + ("" if found.feasible else "; DOES NOT FIT"),
        ]
    )
