"""Parallel branches: ONNX Runtime's parallel mode, its settings, and a device for each branch.

    python examples/cases/parallel_branches.py [--quick]

`few-large` has two branches of 12 recurrent layers in all, `many-small` about 1200 small nodes, of which many could run
at the same time. Parallel mode hands each node to a pool of threads, which costs more than a small node takes.
"""

from __future__ import annotations

import onnx
import onnxruntime
from _case import (
    BoundSession,
    Case,
    Settings,
    Table,
    check_outputs,
    compile_case,
    report_progress,
    run_case,
    time_calls,
    timed_row,
)

import models
import onnxplace
from onnxplace.feeds.synthetic import random_feeds

CASE = Case(
    "Parallel branches that parallel mode makes slower",
    {"onnxruntime #23303": "https://github.com/microsoft/onnxruntime/issues/23303"},
    "A vision backbone runs 50 times slower with ORT_PARALLEL than with ORT_SEQUENTIAL; its profile shows nodes that "
    "are spread over threads, with idle time between them, and none that run at the same time.",
)

PARALLEL = onnxruntime.ExecutionMode.ORT_PARALLEL
BASELINE = "one session, sequential, all cores"
SESSIONS = {
    BASELINE: {},
    "one session, sequential, one core": {"intra_op_num_threads": 1},
    "one session, parallel, defaults": {"execution_mode": PARALLEL},
    "one session, parallel, a thread for each of two nodes": {
        "execution_mode": PARALLEL,
        "inter_op_num_threads": 2,
        "intra_op_num_threads": 1,
    },
}


def make_models(settings: Settings) -> dict[str, onnx.ModelProto]:
    """Return a model with few large branches, and one with many small nodes."""
    steps = 100 if settings.quick else 1000
    return {"few-large": models.build("two-encoders", steps=steps), "many-small": models.build("gnmt")}


def measure_model(name: str, model: onnx.ModelProto, settings: Settings) -> Table:
    """Return the row of each way to run a model."""
    path = settings.folder / f"{name}.onnx"
    models.save(model, path)
    bundle = compile_case(path, "two devices", settings, devices="cpu:0,cpu:1")
    manifest = bundle.manifest
    feeds = random_feeds(bundle.inputs, manifest.dimensions, 0)
    report_progress(f"running {name}")
    sessions = {what: BoundSession(path, feeds, options=options) for what, options in SESSIONS.items()}
    with onnxplace.InferenceSession(bundle) as placed:
        timings = time_calls(
            {**{what: item.run for what, item in sessions.items()}, "bundle": lambda: placed.run(None, feeds)}, settings
        )
        names = [item.name for item in placed.get_outputs()]
        check_outputs(name, dict(zip(names, placed.run(None, feeds))), sessions[BASELINE].fetch())
    used = [device.id for device in manifest.devices if device.nodes]
    rows = [timed_row(what, timings[what]) for what in sessions]
    where = "each branch on its own device" if len(used) > 1 else "keeps one device"
    rows.append(timed_row(f"onnxplace: {where}", timings["bundle"], manifest.predicted.step_seconds))
    return Table(f"{name}: {len(model.graph.node)} nodes", rows, BASELINE, settings.how)


def measure(settings: Settings) -> list[Table]:
    """Return a table for each model."""
    return [measure_model(name, model, settings) for name, model in make_models(settings).items()]


if __name__ == "__main__":
    run_case(CASE, measure)
