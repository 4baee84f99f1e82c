"""Show people what was decided and what happened: the summary of a bundle, and timelines."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxplace.bundle import Bundle, Predicted, RepeatRecord, TrialRecord
    from onnxplace.cost_graph import CostGraph
    from onnxplace.placing import Placed
    from onnxplace.runtime import Event
    from onnxplace.target import Target

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
    best, bound = milliseconds(predicted.single_device_seconds), milliseconds(predicted.lower_bound_seconds)
    return "\n".join(
        [
            f"{manifest.model}: {sum(device.nodes for device in manifest.devices)} nodes, placer {manifest.placer}",
            *_repeats_line(manifest.repeats),
            table(("device", "nodes", "compute", "weights", "peak", "limit"), rows),
            f"segments: {len(manifest.segments)}, transfers: {manifest.transfers} ({sent})",
            f"predicted step {milliseconds(predicted.step_seconds)}; best single device {best}; nothing beats {bound}",
            *_trial_line(manifest.trial),
            *_process_line(predicted),
            f"bundle: {bundle.path}",
        ]
    )


def _trial_line(trial: TrialRecord | None) -> list[str]:
    """Return a line about how the bundle did when it was tried out, if it was."""
    if trial is None:
        return []
    planned, took = milliseconds(trial.planned_seconds), milliseconds(trial.step_seconds)
    return [f"trial: {took} (median of {trial.requests}); by the costs of its nodes, {planned}"]


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
        about_fields = _field_docs(kind)
        options = [
            {
                "name": item.name,
                "type": str(item.type),
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


def _field_docs(kind: type) -> dict[str, str]:
    """Return the string that follows each field of a class, which Python itself does not keep."""
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, SyntaxError, ValueError):
        return {}
    members = body.body if isinstance(body, ast.ClassDef) else []
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(members)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


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
            f"{graph.name}: {len(graph.ids)} nodes, placer {found.placer}, {milliseconds(found.seconds)} to place",
            table(("device", "nodes", "peak", "limit"), rows),
            f"step {milliseconds(found.makespan_seconds)}, {gap:.1%} above a bound of "
            f"{milliseconds(found.lower_bound_seconds)}" + ("" if found.feasible else "; DOES NOT FIT"),
        ]
    )
