"""Texts in, features out: a tokenizer that must stay on the processor, and an encoder that belongs on a GPU.

    python examples/cases/host_control.py [--quick]

The tokenizer takes each text apart in a Loop, as a SequenceMap does. A session of ONNX Runtime spreads the nodes of the
Loop over GPU and processor, so that values cross in each iteration. A placement keeps a Loop whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from _case import (
    BoundSession,
    Case,
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
from onnx import TensorProto, helper

import onnxplace
from _builder import GraphBuilder, float_value
from onnxplace.machine.hardware import local_target
from onnxplace.target import Target
from onnxplace.target.machines import parse_machine
from transformer_block import StackSizes, add_transformer_blocks

CASE = Case(
    "Shape and control nodes next to heavy compute",
    {"onnxruntime #23154": "https://github.com/microsoft/onnxruntime/issues/23154"},
    "A tokenizer and a text encoder are one model. Most of the time is spent in the Loop of the tokenizer, because its "
    "nodes are placed on the GPU, while one of them must run on the processor.",
)

GPU = "L4"
"""A GPU by name for the simulated rows."""
BASELINE = "one session, all cores"
ALONE = "processor alone"

WORDS = ["the", "graph", "a", "device", "places", "copies", "limits", "and", "each", "choice", "costs", "time"]
LENGTH = 32
"""Tokens of a text: others are cut off, missing ones are 0."""


def encoder_of_texts(seed: int = 0, *, layers: int, hidden: int, heads: int) -> onnx.ModelProto:
    """Build a model from `texts`, strings [batch], to `features`, float32 [batch, hidden]."""
    builder = GraphBuilder("encoder_of_texts", seed)
    ids = _add_tokenizer(builder)
    table = builder.random("embedding/token_table", (len(WORDS) + 1, hidden), 1.0)
    tokens = builder.node("Gather", [table, ids], "embedding/tokens", axis=0)
    used = builder.node("Cast", [ids], "mask/used", to=TensorProto.BOOL)
    mask = builder.node("Where", [used, builder.scalar(0.0), builder.scalar(-1e4)], "mask/scores")
    mask = builder.node("Unsqueeze", [mask, builder.integers(1, 2)], "mask/broadcast")
    encoded = add_transformer_blocks(builder, tokens, StackSizes(layers, hidden, heads), "encoder", mask)
    builder.node("ReduceMean", [encoded, builder.integers(1)], "features", keepdims=0)
    model = builder.model(
        [helper.make_tensor_value_info("texts", TensorProto.STRING, ["batch"])],
        [float_value("features", "batch", hidden)],
    )
    model.ir_version = 9
    del model.opset_import[:]
    model.opset_import.extend([helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 4)])
    return model


def _add_tokenizer(builder: GraphBuilder) -> str:
    """Append a Loop over the texts; return the ids, int32 [batch, LENGTH]."""
    node, value = helper.make_node, helper.make_tensor_value_info
    body = helper.make_graph(
        [
            node("Gather", ["texts", "index"], ["text"], name="tokenizer/text", axis=0),
            node("StringSplit", ["text"], ["words", "count"], name="tokenizer/split"),
            node(
                "LabelEncoder",
                ["words"],
                ["numbers"],
                name="tokenizer/numbers",
                domain="ai.onnx.ml",
                keys_strings=WORDS,
                values_int64s=list(range(1, len(WORDS) + 1)),
                default_int64=0,
            ),
            node("Cast", ["numbers"], ["found"], name="tokenizer/found", to=TensorProto.INT32),
            node("Concat", ["found", "empty"], ["longer"], name="tokenizer/longer", axis=0),
            node("Slice", ["longer", "zero", "length", "zero"], ["row"], name="tokenizer/row"),
            node("Identity", ["condition"], ["goes_on"], name="tokenizer/goes_on"),
        ],
        "tokenize",
        [value("index", TensorProto.INT64, []), value("condition", TensorProto.BOOL, [])],
        [value("goes_on", TensorProto.BOOL, []), value("row", TensorProto.INT32, [LENGTH])],
        [
            helper.make_tensor("zero", TensorProto.INT64, [1], [0]),
            helper.make_tensor("length", TensorProto.INT64, [1], [LENGTH]),
            helper.make_tensor("empty", TensorProto.INT32, [LENGTH], [0] * LENGTH),
        ],
    )
    count = builder.node("Shape", ["texts"], "tokenizer/batch")
    count = builder.node("Squeeze", [count], "tokenizer/trips")
    always = builder.constant("tokenizer/always", np.array(True))
    return builder.node("Loop", [count, always], "tokenizer/loop", body=body)


def make_texts(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.object_]]:
    """Return texts of 4 to 24 words."""
    random = np.random.default_rng(seed)
    return np.array([" ".join(random.choice(WORDS, random.integers(4, 25))) for _ in range(count)], dtype=object)


def count_spread_copies(batch: int) -> int:
    """Return how many values cross in a session that spreads the Loop: two for each text, and the ids at the end."""
    return 2 * batch + 1


LARGE, SMALL = ({"layers": 4, "hidden": 256, "heads": 4}, {"layers": 2, "hidden": 64, "heads": 4})


def measure(settings: Settings) -> list[Table]:
    """Return the tables: counted copies where this environment has the WebGPU provider, otherwise times."""
    many = 8 if settings.quick else 64
    if has_webgpu():  # what crosses is the tokenizer's, whatever follows
        model = write_model("counted", SMALL, settings)
        return [count_copies(model, batch, settings) for batch in (many, 1)]
    return [
        *compare_times(write_model("large", LARGE, settings), many, settings),
        *compare_times(write_model("small", SMALL, settings), 1, settings),
    ]


def write_model(name: str, sizes: Mapping[str, int], settings: Settings) -> Path:
    """Write a model of these sizes; return its path."""
    path = settings.folder / f"{name}.onnx"
    onnx.save(encoder_of_texts(**sizes), path)
    return path


def describe_texts(count: int) -> str:
    """Return the number of texts in words."""
    return "one text" if count == 1 else f"{count} texts"


def has_webgpu() -> bool:
    """Return whether this ONNX Runtime has the WebGPU provider: that of `onnxplace[webgpu]` has."""
    return "WebGpuExecutionProvider" in onnxruntime.get_available_providers()


def compare_times(model: Path, batch: int, settings: Settings) -> list[Table]:
    """Return a table of this processor, measured, and one of a GPU by name next to it, simulated."""
    return [measure_processor(model, batch, settings), simulate_gpu(model, batch, settings)]


def measure_processor(model: Path, batch: int, settings: Settings) -> Table:
    """Return the times of plain sessions and of a bundle."""
    feeds, shape = {"texts": make_texts(batch)}, {"batch": batch}
    here = compile_case(model, "processor", settings, devices="cpu:0", shape=shape)
    whole, single = BoundSession(model, feeds), BoundSession(model, feeds, threads=1)
    with onnxplace.InferenceSession(here) as session:
        calls = {"whole": whole.run, "single": single.run, "bundle": lambda: session.run(None, feeds)}
        timings = time_calls(calls, settings)
        check_outputs("cpu:0", dict(zip(["features"], session.run(None, feeds))), whole.fetch())
    rows = [
        timed_row(BASELINE, timings["whole"]),
        timed_row("one session, one core", timings["single"]),
        timed_row("onnxplace, all cores", timings["bundle"], here.manifest.predicted.step_seconds),
    ]
    caption = f"{model.stem.capitalize()} encoder, this processor"
    return Table(caption, rows, BASELINE, settings.how, [f"A request has {describe_texts(batch)}."])


def simulate_gpu(model: Path, batch: int, settings: Settings) -> Table:
    """Return what is predicted for a GPU by name next to this processor, all by the same costs."""
    shape = {"batch": batch}
    target = Target((*parse_machine(GPU).to_target().devices, *local_target("cpu:0").devices))
    plan = compile_case(model, GPU, settings, target=target, shape=shape).manifest
    alone = compile_case(model, ALONE, settings, target=target, shape=shape, device_map={".*": "cpu:0"}).manifest
    latency = float(target.link_arrays()[0].max())
    seconds, spread = plan.predicted.step_seconds, count_spread_copies(batch)
    rows = [Row(ALONE, alone.predicted.step_seconds)]
    if plan.transfers:  # one more crossing takes at least the latency of the link
        note = f"{spread} copies"
        rows.append(
            Row(
                f"encoder on the {GPU}, Loop spread over both", seconds + latency * (spread - plan.transfers), note=note
            )
        )
    used = " and ".join(device.id for device in plan.devices if device.nodes)
    rows.append(Row(f"onnxplace, {GPU} and processor", seconds, note=f"{plan.transfers} copies, on {used}"))
    caption = f"{model.stem.capitalize()} encoder, {GPU} and this processor, simulated"
    return Table(caption, rows, ALONE, remarks=[f"A request has {describe_texts(batch)}."])


def count_copies(model: Path, batch: int, settings: Settings) -> Table:
    """Return how many values cross in one request, as observed in a session with the WebGPU provider and a bundle."""
    feeds = {"texts": make_texts(batch)}
    report_progress(f"profiling {model.stem}")
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(settings.folder / "profile")
    session = onnxruntime.InferenceSession(
        model, options, providers=["WebGpuExecutionProvider", "CPUExecutionProvider"]
    )
    expected = session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text())
    copies = [item for item in events if item.get("args", {}).get("op_name", "").startswith("Memcpy")]
    spread = len([item for item in copies if item["name"].endswith("kernel_time")])
    if spread != count_spread_copies(batch):
        raise SystemExit(f"ONNX Runtime makes {spread} copies, expected {count_spread_copies(batch)}")
    pins = {"tokenizer/.*": "cpu:0", "(?!tokenizer/).*": "webgpu:0"}
    settled: dict[str, Any] = {"devices": "webgpu:0,cpu:0", "shape": {"batch": batch}, "device_map": pins}
    # The map decides, whatever nodes cost.
    bundle = compile_case(model, "webgpu", settings, **settled, effort="low", trial=False)
    with onnxplace.InferenceSession(bundle, trace=True) as opened:
        check_outputs("webgpu:0", dict(zip(["features"], opened.run(None, feeds))), dict(zip(["features"], expected)))
        # Process 1 of the trace is what was measured, the other one what was predicted.
        made = [item for item in opened.trace(last=1)["traceEvents"] if (item["pid"], item.get("cat")) == (1, "copy")]
    return Table(
        f"Values that cross, {'one text' if batch == 1 else 'many texts'}",
        [
            Row("one session, WebGPU first", measured=spread, unit="count"),
            Row("onnxplace, encoder on webgpu:0", bundle.manifest.transfers, len(made), unit="count"),
        ],
        "one session, WebGPU first",
        remarks=[f"A request has {describe_texts(batch)}."],
    )


if __name__ == "__main__":
    run_case(CASE, measure)
