"""What a server counts, in the text form of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import psutil

from onnxplace.serving.served_models import LATENCY_BOUNDS, ServedModel

_Sample = tuple[dict[str, str], float]


def format_metrics(models: Sequence[ServedModel]) -> str:
    """Return all metrics of a server."""
    return "".join(f"{line}\n" for line in _list_lines([({"model": model.name}, model) for model in models]))


def _list_lines(models: Sequence[tuple[dict[str, str], ServedModel]]) -> Iterator[str]:
    counts = [(label, model.statistics) for label, model in models]
    yield from _format("requests_total", "counter", "Requests answered with a result.", (
        (label, item.success.count) for label, item in counts
    ))  # fmt: skip
    yield from _format("failures_total", "counter", "Requests refused or failed, by reason.", (
        (label | {"reason": reason}, count) for label, item in counts for reason, count in item.failures.items()
    ))  # fmt: skip
    yield from _format("executions_total", "counter", "Runs of the model; joined requests are one.", (
        (label, item.executions) for label, item in counts
    ))  # fmt: skip
    yield from _format("open_requests", "gauge", "Requests that wait or run.", (
        (label, model.open_requests) for label, model in models
    ))  # fmt: skip
    yield from _format("waiting_requests", "gauge", "Requests that wait for a place to run.", (
        (label, model.waiting_requests) for label, model in models
    ))  # fmt: skip
    yield from _format("queue_seconds_total", "counter", "Time that requests waited for a place.", (
        (label, item.queue.seconds) for label, item in counts
    ))  # fmt: skip
    yield from _format("request_seconds", "histogram", "From the arrival of a request to its answer.", ())
    for label, item in counts:
        bounds = [*(f"{bound:g}" for bound in LATENCY_BOUNDS), "+Inf"]
        samples = zip(({**label, "le": bound} for bound in bounds), accumulate(item.latencies))
        yield from (_format_sample("request_seconds_bucket", *sample) for sample in samples)
        yield _format_sample("request_seconds_sum", label, item.success.seconds)
        yield _format_sample("request_seconds_count", label, item.success.count)
    yield from _format("device_busy_seconds_total", "counter", "Time that segments of the model ran, by device.", (
        (label | {"device": device}, seconds) for label, item in counts for device, seconds in item.busy_seconds.items()
    ))  # fmt: skip
    yield from _format("device_planned_bytes", "gauge", "Memory that the compiler planned for the model, by device.", (
        (label | {"device": device.id}, device.peak_bytes)
        for label, model in models
        for device in model.bundle.manifest.devices
    ))  # fmt: skip
    memory = psutil.Process().memory_info().rss
    yield from _format("process_resident_bytes", "gauge", "Memory of the process.", [({}, memory)])


def _format(name: str, kind: str, text: str, samples: Iterable[_Sample]) -> Iterator[str]:
    yield f"# HELP onnxplace_{name} {text}"
    yield f"# TYPE onnxplace_{name} {kind}"
    yield from (_format_sample(name, *sample) for sample in samples)


def _format_sample(name: str, labels: dict[str, str], value: float) -> str:
    """Return a line; names of models have no characters that would have to be escaped, nor have those of devices."""
    pairs = ",".join(f'{key}="{label}"' for key, label in labels.items())
    return f"onnxplace_{name}{{{pairs}}} {value:.17g}" if pairs else f"onnxplace_{name} {value:.17g}"
