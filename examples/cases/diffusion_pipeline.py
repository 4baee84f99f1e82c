"""A diffusion pipeline of three models on three devices, as one program that is placed by cost.

    python examples/cases/diffusion_pipeline.py [--quick] [--json]

Text encoder, denoiser and decoder of pictures become one ONNX program whose denoiser appears once for each step, with
one set of weights. Here it runs on two cores, as two devices: one picture alone, and several in flight. Then a pipeline
of the size of Stable Diffusion 1.5 is planned for a PC with processor, GPU and NPU, by name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
from _case import (
    BoundSession,
    Case,
    Feeds,
    Row,
    Settings,
    Table,
    check_outputs,
    compile_case,
    report_progress,
    run_case,
    time_calls,
    timed_row,
)
from _diffusion import PARTS, Diffusion, Pipeline, schedule, write_pipeline
from _streaming_models import UNet

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.driver.plan import plan_model
from onnxplace.reports.text import describe_copies
from onnxplace.target.machines import parse_machine

CASE = Case(
    "A diffusion pipeline on three devices",
    {
        "openvino #34077": "https://github.com/openvinotoolkit/openvino/pull/34077",
        "openvino.genai #2730": "https://github.com/openvinotoolkit/openvino.genai/pull/2730",
    },
    "A page for OpenVINO's documentation runs the text encoder on the CPU, the denoiser on the NPU and the decoder on"
    " the GPU. The user chooses the device of each model by hand, without a measurement.",
)

SIZES = Diffusion(
    UNet(latent=32, channels=(64, 128), depths=(0, 1), cross=128, head=32, added=128, groups=16),
    text_layers=4, channels=(64, 64, 32, 32), vocab=1000, steps=4,
)  # fmt: skip
QUICK_SIZES = Diffusion(
    UNet(latent=8, channels=(32, 64), depths=(0, 1), cross=64, head=32, added=32, groups=16),
    text_layers=1, channels=(32, 32, 32, 32), vocab=100, steps=2,
)  # fmt: skip
CORES = "cpu:0,cpu:1"
IN_FLIGHT = 4
RATES = {False: (16, 5), True: (6, 2)}
"""Pictures of a turn, and turns, without and with `--quick`."""

MACHINE = "AI-PC-NPU"
LARGE = Diffusion(
    UNet(latent=64, channels=(320, 640, 1280), depths=(1, 1, 1), cross=768, head=64, added=1280, groups=32),
    text_layers=12, channels=(512, 512, 256, 128), vocab=49_408, steps=4,
)  # fmt: skip
MANY_STEPS = 20
"""As in OpenVINO's example, for a denoiser that was not distilled. With guidance, each of them has two rows."""
BY_HAND = {"text/.*": "cpu:0", "denoise.*": "openvino/npu:0", "decode/.*": "webgpu:0"}
"""The devices of that page."""

HAND, WHOLE = "three sessions by hand, both cores", "one session, both cores, I/O binding"
MAPPED, ALONE, MANY = "a core for the denoiser, one for the rest", "placed for one picture", "placed for many pictures"
WAYS: Mapping[str, Mapping[str, Any]] = {
    MAPPED: {"device_map": {"text/.*": "cpu:0", "denoise.*": "cpu:1", "decode/.*": "cpu:0"}},
    ALONE: {},
    MANY: {"objective": "throughput"},
}


def measure(settings: Settings) -> list[Table]:
    """Return what its parts take, one picture, many pictures, and what is predicted for an AI PC."""
    folder = settings.folder / "here"
    folder.mkdir()
    pipeline = write_pipeline(QUICK_SIZES if settings.quick else SIZES, folder)
    common: dict[str, Any] = {"devices": CORES, "shape": {"batch": 1}}
    bundles = {
        what: compile_case(pipeline.program, what, settings, **common, **options) for what, options in WAYS.items()
    }
    return [
        measure_parts(pipeline, bundles[MAPPED], settings),
        *measure_pictures(pipeline, bundles, settings),
        predict_elsewhere(settings),
    ]


def measure_parts(pipeline: Pipeline, bundle: Bundle, settings: Settings) -> Table:
    """Return what each model takes on one core, next to the costs of its nodes in the program."""
    unet, random = pipeline.sizes.unet, np.random.default_rng(0)
    feeds = pipeline.feeds()
    inputs = {
        "text": {"prompt": feeds["prompt"]},
        "denoise": {
            "latents": feeds["noise"],
            "time": schedule(pipeline.sizes)[0][0],
            "added": random.standard_normal((1, unet.added), np.float32),
            "text": random.standard_normal((1, 77, unet.cross), np.float32),
        },
        "decode": {"latents": feeds["noise"]},
    }
    sessions = {part: BoundSession(path, inputs[part], threads=1) for part, path in pipeline.parts.items()}
    timings = time_calls({part: session.run for part, session in sessions.items()}, settings)
    costs = sum_costs(bundle)
    names = dict(zip(PARTS, ("text encoder", "one step of the denoiser", "decoder of the picture")))
    rows = [timed_row(names[part], timings[part], costs[part]) for part in PARTS]
    steps = pipeline.sizes.steps
    whole = timings["text"].seconds + steps * timings["denoise"].seconds + timings["decode"].seconds
    share = steps * timings["denoise"].seconds / whole
    return Table(
        "The three models, each on one core",
        rows,
        how=settings.how,
        remarks=[f"The {steps} steps of the denoiser are {share:.0%} of a picture."],
    )


def sum_costs(bundle: Bundle) -> dict[str, float]:
    """Return the seconds of each model on one core, by the costs of the program's nodes; of the first step only.

    The bundle has whole operators: costs of parts of operators would be counted for each part.
    """
    nodes = json.loads(bundle.file("costs.json").read_text())["nodes"]
    sums = dict.fromkeys(PARTS, 0.0)
    for name, node in nodes.items():
        part = name.partition("/")[0]
        part = "denoise" if part == "denoise0" else part
        if part in sums:
            sums[part] += min(second for second in node["seconds"].values() if not isinstance(second, str))
    return sums


def measure_pictures(pipeline: Pipeline, bundles: Mapping[str, Bundle], settings: Settings) -> list[Table]:
    """Return the tables of one picture, and of several in flight."""
    feeds = pipeline.feeds()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    parts = {part: onnxruntime.InferenceSession(path, options) for part, path in pipeline.parts.items()}
    whole = BoundSession(pipeline.program, feeds)
    with ExitStack() as stack:
        sessions = {name: stack.enter_context(onnxplace.InferenceSession(item)) for name, item in bundles.items()}
        calls: dict[str, Callable[[], object]] = {HAND: partial(pipeline.run, parts, feeds), WHOLE: whole.run}
        calls |= {name: partial(session.run, None, feeds) for name, session in sessions.items()}
        report_progress("measuring one picture")
        timings = time_calls(calls, settings)
        expected = pipeline.run(parts, feeds)
        check_outputs(WHOLE, whole.fetch(), expected)
        for name, session in sessions.items():
            check_outputs(name, dict(zip(expected, session.run(None, feeds))), expected)
        report_progress(f"measuring {IN_FLIGHT} pictures in flight")
        rates = time_rates({name: calls[name] for name in (HAND, WHOLE)}, sessions, feeds, settings)
    alone, many = list[Row](), list[Row]()
    for name, timing in timings.items():
        predicted = bundles[name].manifest.predicted if name in bundles else None
        note = describe(bundles[name]) if name in bundles else ""
        alone.append(timed_row(name, timing, predicted.step_seconds if predicted else None, note))
        rate = 1 / predicted.interval_seconds if predicted and predicted.interval_seconds else None
        many.append(Row(name, rate, *rates[name], unit="requests/s", note=note))
    return [
        Table("One picture", alone, WHOLE, settings.how),
        Table(
            f"{IN_FLIGHT} pictures in flight; sessions of ONNX Runtime take one after the other",
            many,
            WHOLE,
            how="medians of {1} turns of {0} pictures, in brackets the least and the most".format(
                *RATES[settings.quick]
            ),
        ),
    ]


def time_rates(
    plain: Mapping[str, Callable[[], object]],
    sessions: Mapping[str, onnxplace.InferenceSession],
    feeds: Feeds,
    settings: Settings,
) -> dict[str, tuple[float, float, float]]:
    """Return pictures per second of each way, in turns: the median, the least and the most."""
    pictures, turns = RATES[settings.quick]
    rates: dict[str, list[float]] = {name: [] for name in (*plain, *sessions)}
    for _ in range(turns):
        for name, call in plain.items():
            began = time.perf_counter()
            for _ in range(pictures):
                call()
            rates[name].append(pictures / (time.perf_counter() - began))
        for name, session in sessions.items():
            began = time.perf_counter()
            futures = [session.submit(feeds) for _ in range(IN_FLIGHT)]
            for position in range(pictures):
                futures[position].result()
                if len(futures) < pictures:
                    futures.append(session.submit(feeds))
            rates[name].append(pictures / (time.perf_counter() - began))
    return {name: (median(values), min(values), max(values)) for name, values in rates.items()}


def describe(bundle: Bundle) -> str:
    """Say how a bundle uses its devices."""
    manifest = bundle.manifest
    if manifest.routes:
        return describe_copies(manifest)
    used = sum(device.peak_bytes > 0 for device in manifest.devices)
    count = len(manifest.segments)
    return f"{count} segment{'s' * (count > 1)} on {used} device{'s' * (used > 1)}"


def predict_elsewhere(settings: Settings) -> Table:
    """Return what is predicted for a PC with processor, GPU and NPU: a picture alone, and many of them."""
    folder, sizes = settings.folder / "elsewhere", QUICK_SIZES if settings.quick else LARGE
    folder.mkdir()
    pipeline = write_pipeline(sizes, folder, np.float16, holes=True)
    common: dict[str, Any] = {"shape": {"batch": 1}, "fixed_sizes": True}
    report_progress(f"planning for {MACHINE}")
    target = parse_machine(MACHINE).to_target()
    plan = plan_model(pipeline.program, target=target, estimate=True, effort="low", **common)
    options: dict[str, Any] = {"machine": MACHINE, "device_map": BY_HAND, "link_weights": True, "effort": "low"}
    bundle = compile_case(pipeline.program, "by hand", settings, **options, **common)
    hand = bundle.manifest.predicted
    rows = [
        Row("by hand: CPU, NPU, GPU", hand.step_seconds, note=format_rate(hand.interval_seconds)),
        *(
            Row(f"{item.name}, {item.devices} devices" if item.devices > 1 else item.name, item.step_seconds,
                note=format_rate(item.interval_seconds))
            for item in plan.strategies if item.step_seconds is not None
        ),
    ]  # fmt: skip
    seconds = {part: predict_part(path, common) for part, path in pipeline.parts.items()}
    loop = MANY_STEPS * 2 * seconds["denoise"]
    rest = seconds["text"] + seconds["decode"]
    remarks = [
        f"On the fastest device for each: text encoder {seconds['text'] * 1e3:.1f} ms, a step of the denoiser"
        f" {seconds['denoise'] * 1e3:.1f} ms, decoder {seconds['decode'] * 1e3:.1f} ms. With {MANY_STEPS} steps of"
        f" two rows, encoder and decoder are {rest / (rest + loop):.0%} of a picture, which is the most that a better"
        " place for both can gain.",
        "Estimates by published peak rates; they assume that the NPU takes every node. Nothing ran on such a PC.",
    ]
    return Table(f"Estimated for {MACHINE}, one picture", rows, rows[0].what, remarks=remarks)


def predict_part(path: Path, common: Mapping[str, Any]) -> float:
    """Return the estimated seconds of a model on the device that is fastest for it."""
    plan = plan_model(path, target=parse_machine(MACHINE).to_target(), estimate=True, effort="low", **common)
    return min(item.step_seconds for item in plan.strategies if item.name == "one device" and item.step_seconds)


def format_rate(interval_seconds: float | None) -> str:
    """Format pictures per second, with many in flight."""
    return f"{1 / interval_seconds:.2f} pictures/s" if interval_seconds else ""


if __name__ == "__main__":
    run_case(CASE, measure)
