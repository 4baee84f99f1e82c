"""A model over two cards of which one stays empty: the limits of memory decide, and hold.

    python examples/cases/two_cards.py [--quick] [--json]

Two cores stand for two cards here: the same decoder is compiled with memory for all of it on one card, and with less,
as whole layers and with shared operators. The memory of each card is measured in a process of its own. Then a decoder
with as many bytes as the one of the thread is planned for two cards of 32 GB, by name: its weights are holes of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _case import (
    MEMORY_REQUESTS,
    BoundSession,
    Case,
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
from _streaming_models import Decoder, write_model

import models
import onnxplace
from decoder import decoder
from onnxplace.bundle.bundle import Bundle
from onnxplace.driver.plan import plan_model
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.measure.device_usage import measure_usage
from onnxplace.target.machines import parse_machine

CASE = Case(
    "A model over two cards",
    {
        "openvino #38250": "https://github.com/openvinotoolkit/openvino/issues/38250",
        "openvino #38253": "https://github.com/openvinotoolkit/openvino/issues/38253",
        "onnxruntime #23874": "https://github.com/microsoft/onnxruntime/issues/23874",
    },
    "Two cards of 32 GB and a model of 27 billion int8 weights: with HETERO and PIPELINE_PARALLEL, the first card held"
    " 28.6 GB and the second one nothing; with a prompt of 29,000 tokens the first one reached 31.5 GB.",
)

CARDS = "cpu:0,cpu:1"
BASELINE, ONE_CORE = "ONNX Runtime, both cores, I/O binding", "ONNX Runtime, one core, I/O binding"
SIZES = {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 8000, "positions": 1024}
QUICK_SIZES = {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1000, "positions": 1024}
REQUEST = {"batch": 1, "seq": 1, "past": 256}
ENOUGH, LAYERS_APART = "enough memory", "layers, 70 %"
WAYS: Mapping[str, tuple[float, str]] = {
    ENOUGH: (1.2, "off"),
    LAYERS_APART: (0.7, "off"),
    "shared operators, 70 %": (0.7, "auto"),
}
"""Memory of a card, as a share of what the model takes, and whether cards may share operators."""

MACHINE = "2xRTX-5090"
# As many bytes as the thread's model, in float16; 80 kB of cache for each token.
LARGE = Decoder(layers=39, width=5120, inner=17408, heads=40, kv_heads=4, vocab=152_064)
SMALL = Decoder(layers=4, width=5120, inner=17408, heads=40, kv_heads=4, vocab=152_064)
PASTS = (0, 29_000, 64_000, 128_000)
QUICK_PASTS = (0,)
COMPARISON = (
    "The thread's cards, of another model with as much memory, held 28.6 GB without a prompt and 31.5 GB with 29,000"
    " tokens. Its author then rebuilt the plugins so that they split: 15.58 and 14.12 GB, and a crash at the first"
    " request (openvino #38253). The weights here have as many bytes by choice; the bytes of values, and parts, follow."
)


def measure(settings: Settings) -> list[Table]:
    """Return the memory of each card, the steps, and what is predicted for two cards of 32 GB."""
    return [*measure_here(settings), predict_elsewhere(settings)]


def measure_here(settings: Settings) -> list[Table]:
    """Return memory by card and steps of a decoder on two cores."""
    path = settings.folder / "decoder.onnx"
    models.save(decoder(**(QUICK_SIZES if settings.quick else SIZES)), path, external=True)
    bundles = compile_ways(path, settings)
    feeds = dict(random_feeds(bundles[ENOUGH].inputs, REQUEST, 0))
    memory = [row for what, bundle in bundles.items() for row in list_memory(what, bundle, feeds)]
    with ExitStack() as stack:
        calls: dict[str, Any] = {}
        for what, bundle in bundles.items():
            session = stack.enter_context(onnxplace.InferenceSession(bundle))
            calls[what] = partial(session.run, None, feeds)
        whole = {BASELINE: BoundSession(path, feeds), ONE_CORE: BoundSession(path, feeds, threads=1)}
        calls = {**{what: session.run for what, session in whole.items()}, **calls}
        report_progress("measuring steps")
        timings = time_calls(calls, settings)
        expected = whole[BASELINE].fetch()
        for what in bundles:
            check_outputs(what, dict(zip(expected, calls[what]())), expected)
    steps = [
        timed_row(what, timing, bundles[what].manifest.predicted.step_seconds if what in bundles else None)
        for what, timing in timings.items()
    ]
    split, alone = (timings[what].seconds for what in (LAYERS_APART, ONE_CORE))
    price = (
        f"Whole layers on two cards, a core each, took {split / alone:.1f} times as long as one session on one core."
    )
    return [
        Table(
            "Memory of each card: weights, caches and values",
            memory,
            how=f"the most of a process with {MEMORY_REQUESTS} requests",
            remarks=[describe_limits(bundles)],
        ),
        Table("A token after 256", steps, BASELINE, settings.how, [price]),
    ]


def compile_ways(path: Path, settings: Settings) -> dict[str, Bundle]:
    """Compile the model with memory for all of it on one card, and with less."""
    common: dict[str, Any] = {"devices": CARDS, "shape": REQUEST, "stream": "off", "recompute": "off"}
    alone = compile_case(path, "its memory", settings, placer="single", **{**common, "effort": "low"})
    needed = max(device.peak_bytes for device in alone.manifest.devices)
    return {
        what: compile_case(path, what, settings, max_memory=int(share * needed), shard=shard, **common)
        for what, (share, shard) in WAYS.items()
    }


def list_memory(what: str, bundle: Bundle, feeds: Mapping[str, Any]) -> list[Row]:
    """Return a row for each card: the predicted peak, and that of a process that runs its part alone."""
    report_progress(f"memory: {what}")
    limits = {device.id: device.limit_bytes for device in bundle.manifest.devices}
    used = {device.id: device.peak_bytes for device in bundle.manifest.devices}
    rows = []
    for index, use in enumerate(measure_usage(bundle, feeds, MEMORY_REQUESTS, True).devices):
        measured = use.peak_bytes if used[use.id] else 0  # a card without work has no process to measure
        note = describe_limit(limits[use.id], measured)
        card = f"card {index}" if len(limits) > 1 else "both cores"
        rows.append(Row(f"{what}: {card}", used[use.id], measured, unit="bytes", note=note))
    return rows


def describe_limits(bundles: Mapping[str, Bundle]) -> str:
    """Say on how many cards each bundle is, and that predictions keep the limits; raises SystemExit if they do not."""
    texts = []
    for what, bundle in bundles.items():
        devices = bundle.manifest.devices
        if any(device.peak_bytes > device.limit_bytes for device in devices):
            raise SystemExit(f"{what}: a card needs more than its limit")
        used = f"{sum(device.peak_bytes > 0 for device in devices)} of {len(devices)} cards"
        texts.append(f"{what}: {used if len(devices) > 1 else 'one session on both cores'}")
    return f"Cards with work: {'; '.join(texts)}. Limits bound weights and values, not the code of ONNX Runtime."


def predict_elsewhere(settings: Settings) -> Table:
    """Return what is predicted for two cards of 32 GB, for several lengths of the cache."""
    report_progress(f"planning for {MACHINE}")
    path = settings.folder / "large" / "model.onnx"
    path.parent.mkdir()
    write_model(SMALL if settings.quick else LARGE, path, np.float16, holes=True)
    target, rows, chosen = parse_machine(MACHINE).to_target(), [], []
    for past in QUICK_PASTS if settings.quick else PASTS:
        shape = {"batch": 1, "sequence": 1, "past": past}
        plan = plan_model(path, target=target, shape=shape, estimate=True, llm=True)
        for item in plan.strategies:
            if item.name not in ("one device", "stages", "sharded 2 ways"):
                continue
            name = {"one device": "one card", "stages": "layers on two cards"}.get(item.name, "shared operators")
            what = f"{past:,} tokens in the cache, {name}"
            rows.append(Row(what, item.step_seconds, note=describe_memory(item.peak_bytes, item.weight_bytes)))
        if fastest := plan.find_best()[0]:
            chosen.append(f"{past:,}: {fastest.name}")
    remarks = [f"Fastest at each length: {'; '.join(chosen)}. Nothing ran on these cards."]
    return Table(
        f"Estimated for {MACHINE}, one token", rows, remarks=remarks if settings.quick else [*remarks, COMPARISON]
    )


def describe_memory(peak_bytes: int | None, weight_bytes: int | None) -> str:
    """Return the memory of the card that needs more, and its share of weights, in words."""
    if peak_bytes is None or weight_bytes is None:
        return "does not fit"
    return f"{peak_bytes / 1e9:.1f} GB on the fuller card, weights {weight_bytes / 1e9:.1f} GB"


if __name__ == "__main__":
    run_case(CASE, measure)
