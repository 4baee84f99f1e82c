"""Unequal devices: parts in proportion to memory, and stages in proportion to speed.

    python examples/cases/unequal_devices.py [--quick]

Two processor devices of this machine get unequal memory limits, in the proportion of the thread's machines: equal
halves do not fit the smaller one. Unequal speeds are simulated, since the cores of a machine are equal: an L4 and a T4.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx
from _case import (
    MEMORY_REQUESTS,
    BoundSession,
    Case,
    Feeds,
    Row,
    Settings,
    Table,
    check_outputs,
    compile_case,
    describe_limit,
    report_progress,
    run_case,
    time_calls,
    timed_row,
)
from machines import declared_weights, place_weights

import models
import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.driver.plan import PlannedStrategy
from onnxplace.driver.settings import Effort
from onnxplace.facts import Prediction
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.measure.device_usage import measure_usage
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target import Target
from onnxplace.target.machines import parse_machine
from transformer import transformer

CASE = Case(
    "Unequal devices",
    {
        "exo #953": "https://github.com/exo-explore/exo/issues/953",
        "exo #1821": "https://github.com/exo-explore/exo/pull/1821",
        "mlx-lm #1137": "https://github.com/ml-explore/mlx-lm/pull/1137",
    },
    "A model of 130 GB on machines of 128 and 48 GB: equal halves of 65 GB do not fit the second one, and in a "
    "pipeline one of the two is always idle.",
)

LAYERS = 12
MEMORY = {"cpu:0": 128 / 130, "cpu:1": 48 / 130}
"""Limits of devices, as shares of the weights."""
DEVICES = ("cuda:0", "cuda:1")
CARDS = ("L4", "T4")
BASELINE = "one session, all cores, I/O binding, no limit"


def halve_layers(devices: tuple[str, str], folder: Path) -> Path:
    """Write a device map with half of the layers on each device; return its path."""
    late = "|".join(map(str, range(LAYERS // 2, LAYERS)))
    path = folder / f"halves-{devices[0].partition(':')[0]}.json"
    path.write_text(
        json.dumps({f"(encoder/block_({late})/|encoder/final|pooler|pooled|last).*": devices[1], ".*": devices[0]})
    )
    return path


def measure_memory(settings: Settings) -> Table:
    """Return times and memory of a model on two devices of this machine, of which neither can hold it twice."""
    path = settings.folder / "limits.onnx"
    model = transformer(layers=LAYERS, hidden=64 if settings.quick else 256, vocab=100)
    models.save(model, path)
    weights = models.weight_bytes(model)
    limits = {device: int(share * weights) for device, share in MEMORY.items()}
    options = {
        "devices": list(MEMORY),
        "shape": {"batch": 1, "seq": 32},
        "stream": "off",
        "recompute": "off",
        "max_memory": ",".join(f"{device}={limit}" for device, limit in limits.items()),
    }
    try:
        compile_case(path, "halves", settings, **options, device_map=halve_layers(("cpu:0", "cpu:1"), settings.folder))
        refusal = "fits"
    except onnxplace.InfeasibleError as error:
        refusal = f"refused: {error.code}"
    bundle = compile_case(path, "limits", settings, **options)
    feeds = random_feeds(bundle.inputs, bundle.manifest.dimensions, 0)
    whole = BoundSession(path, feeds)
    with onnxplace.InferenceSession(bundle) as session:
        timings = time_calls({"whole": whole.run, "bundle": lambda: session.run(None, feeds)}, settings)
        names = [item.name for item in session.get_outputs()]
        check_outputs("limits", dict(zip(names, session.run(None, feeds))), whole.fetch())
    rows = [
        timed_row(BASELINE, timings["whole"]),
        Row("equal halves of the layers", note=refusal),
        timed_row("onnxplace, within the limits", timings["bundle"], bundle.manifest.predicted.step_seconds),
        *list_memory(bundle, feeds),
    ]
    how = f"times: {settings.how}; memory: the most of a process with {MEMORY_REQUESTS} requests"
    return Table("Unequal memory, processor devices of this machine", rows, BASELINE, how)


def list_memory(bundle: Bundle, feeds: Feeds) -> Iterator[Row]:
    """Yield the memory of each device: the predicted peak, and that of a process that runs its part alone."""
    report_progress("measuring memory")
    records = {device.id: device for device in bundle.manifest.devices}
    for usage in measure_usage(bundle, feeds, MEMORY_REQUESTS, True).devices:
        record = records[usage.id]
        note = f"{describe_limit(record.limit_bytes, usage.peak_bytes)}, {record.nodes} nodes"
        yield Row(f"memory of {usage.id}", record.peak_bytes, usage.peak_bytes, unit="bytes", note=note)


def simulate_speed(settings: Settings) -> list[Table]:
    """Return the latency and the rate of a text encoder on two unlike GPUs, by strategy."""
    with declared_weights():
        model = transformer(layers=LAYERS, hidden=768, heads=12)
    place_weights(model, settings.folder)
    path = settings.folder / "speed.onnx"
    onnx.save(model, path)
    cards = [parse_machine(name).to_target().devices[0] for name in CARDS]
    target = Target(tuple(replace(card, id=name) for name, card in zip(DEVICES, cards)))
    shape = {"batch": 8, "seq": 128}
    report_progress("simulating two GPUs")
    alone = {
        name: onnxplace.plan(path, target=Target((device,)), shape=shape, estimate=True, effort="low").strategies[0]
        for name, device in zip(CARDS, target.devices)
    }
    effort: Effort = "low" if settings.quick else "default"
    strategies = onnxplace.plan(path, target=target, shape=shape, estimate=True, effort=effort).strategies
    state = State(target).with_facts(bind(load(path, may_lack_weights=True), shape, {}))
    pins = halve_layers(DEVICES, settings.folder)
    pipeline = f"optimize,profile{{estimate=true}},coplace{{device_map={pins},join=never}},m-etf,split,predict"
    halves = Pipeline.parse(pipeline).run(state)[0][Prediction].request
    planned = [item for item in strategies if item.step_seconds and item.interval_seconds]
    fastest = min(planned, key=lambda item: (item.step_seconds, item.devices))
    densest = min(planned, key=lambda item: (item.interval_seconds, item.devices))
    equal = "equal halves of the layers"
    latencies = [
        *(Row(f"{name} alone", item.step_seconds) for name, item in alone.items()),
        Row(equal, halves.step_seconds),
        *(Row("onnxplace, uneven parts of operators", item.step_seconds) for item in planned if "shard" in item.name),
        Row(f"onnxplace, least latency: {fastest.name}", fastest.step_seconds),
    ]
    rates = [
        *(Row(f"{name} alone", _rate(item), unit="requests/s") for name, item in alone.items()),
        Row(f"{equal}, in flight", 1 / halves.interval_seconds, unit="requests/s"),
        *(Row(f"onnxplace, {item.name}", _rate(item), unit="requests/s") for item in planned if item.name == "stages"),
        Row(f"onnxplace, most requests: {densest.name}", _rate(densest), unit="requests/s"),
    ]
    baseline = f"{CARDS[0]} alone"
    return [
        Table(f"Unequal speed, {' and '.join(CARDS)}, simulated: one request", latencies, baseline),
        Table(f"Unequal speed, {' and '.join(CARDS)}, simulated: requests in flight", rates, baseline),
    ]


def _rate(strategy: PlannedStrategy) -> float:
    return 1 / strategy.interval_seconds if strategy.interval_seconds else 0.0


def measure(settings: Settings) -> list[Table]:
    """Return the tables of unequal memory, measured, and of unequal speed, simulated."""
    return [measure_memory(settings), *simulate_speed(settings)]


if __name__ == "__main__":
    run_case(CASE, measure)
