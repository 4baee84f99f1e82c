"""What a server counts, in the text form of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import psutil

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import HOST
from onnxplace_serving.served_models import LATENCY_BOUNDS, ServedModel

_Labels = tuple[tuple[str, str], ...]


def format_metrics(models: Sequence[ServedModel]) -> str:
    """Return all metrics of a server."""
    lines = []
    for name, kind, text, samples in _list_metrics([(("model", model.name), model) for model in models]):
        lines += [f"# HELP onnxplace_{name} {text}", f"# TYPE onnxplace_{name} {kind}"]
        for suffix, labels, value in samples:
            # Names of models and devices have no characters that would have to be escaped.
            pairs = ",".join(f'{key}="{label}"' for key, label in labels)
            lines.append(f"onnxplace_{name}{suffix}{{{pairs}}} {value:.17g}")
    return "\n".join(lines) + "\n"


def _list_metrics(
    models: Sequence[tuple[tuple[str, str], ServedModel]],
) -> Iterator[tuple[str, str, str, Iterable[tuple[str, _Labels, float]]]]:
    """Yield name, kind and text of each metric, with its samples: suffix of the name, labels, value."""
    counts = [(label, model.statistics) for label, model in models]
    answered = [("", (label,), item.counts["success"]) for label, item in counts]
    yield "requests_total", "counter", "Requests answered with a result.", answered
    failures = [("", (label, ("reason", why)), n) for label, item in counts for why, n in item.failures.items()]
    yield "failures_total", "counter", "Requests refused or failed, by reason.", failures
    runs = [
        ("", (label, *plan), number)
        for label, model in models
        for plan, number in _count_by_plan(model.statistics.executions, len(model.bundle.manifest.plans))
    ]
    yield "executions_total", "counter", "Runs of the model, by plan; joined requests are one.", runs
    for name, text in (("open_requests", "Requests that wait or run."), ("waiting_requests", "Requests that wait.")):
        yield name, "gauge", text, [("", (label,), getattr(model, name)) for label, model in models]
    deaths = [("", (label,), sum(copy.failures for copy in model.session.list_copies())) for label, model in models]
    yield "deaths_total", "counter", "Deaths of processes, and of copies of the model, that are opened again.", deaths
    waits = [("", (label,), item.seconds["queue"]) for label, item in counts]
    yield "queue_seconds_total", "counter", "Time that requests waited for a place.", waits
    bounds = [*(f"{bound:g}" for bound in LATENCY_BOUNDS), "+Inf"]
    latencies: list[tuple[str, _Labels, float]] = []
    for label, item in counts:
        latencies += [("_bucket", (label, ("le", le)), n) for le, n in zip(bounds, accumulate(item.latencies))]
        latencies += [("_sum", (label,), item.seconds["success"]), ("_count", (label,), item.counts["success"])]
    yield "request_seconds", "histogram", "From the arrival of a request to its answer.", latencies
    busy = [("", (label, ("device", name)), s) for label, item in counts for name, s in item.busy_seconds.items()]
    yield "device_busy_seconds_total", "counter", "Time that segments of the model ran, by device.", busy
    planned = [
        ("", (label, ("device", name)), size) for label, model in models for name, size in _list_peaks(model.bundle)
    ]
    yield "device_planned_bytes", "gauge", "Memory that the compiler planned, by device.", planned
    yield "process_resident_bytes", "gauge", "Memory of the process.", [("", (), psutil.Process().memory_info().rss)]


def _list_peaks(bundle: Bundle) -> list[tuple[str, int]]:
    """Return the devices of a bundle with the bytes that they hold for all of its plans."""
    held = {name: item.peak_bytes for name, item in bundle.manifest.held.items() if name != HOST}
    return list((held or {item.id: item.peak_bytes for item in bundle.manifest.devices}).items())


def _count_by_plan(executions: Mapping[int, int], further_plans: int) -> Iterator[tuple[_Labels, float]]:
    """Yield how often each plan of a bundle ran, with its label; a bundle of one plan needs none."""
    for plan in range(further_plans + 1):
        yield (("plan", str(plan)),) if further_plans else (), executions.get(plan, 0)
