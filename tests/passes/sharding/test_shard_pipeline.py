"""Sharded bundles compute the same as their models: random models, random strategies, whole pipelines."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from pathlib import Path
from random import Random

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnxplace
from onnxplace.bundle.bundle import WHOLE_MODEL_FILE
from onnxplace.driver.compile import compile_model
from onnxplace.facts import Shards
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.passes.sharding.choose.layout_choice import ChoiceProblem, LayoutChoice
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.target import Device, Target
from tests.passes.sharding.test_random_sharding import assert_close, run_sizes
from tests.support.chains import mlp
from tests.support.random_models import run_plain
from tests.support.shardable_models import make_model
from tests.support.shardings import choose_randomly

EXAMPLES = int(os.environ.get("ONNXPLACE_EXAMPLES", "0"))
"""Number of models; unless it is set, they are always the same."""
# `weights=least`: operators of a few numbers never gain by themselves.
PIPELINE = "optimize,profile{estimate=true},shard{weights=least},coplace,m-etf,split,emit"


@pytest.mark.slow
@pytest.mark.parametrize("is_random", [False, True], ids=["chosen", "random"])
def test_sharded_bundles_compute_the_same_at_every_size(
    is_random: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(EXAMPLES or 20):
        random = Random(seed)
        model = make_model(random)
        results = run_sizes(model.proto, model.feeds)
        if not results:
            continue
        if is_random:

            def choose(problem: ChoiceProblem, random: Random = random) -> LayoutChoice:
                return choose_randomly(problem.space, random)

            monkeypatch.setattr(ChoiceProblem, "solve_least_weights", choose)
        devices = tuple(Device(f"cpu:{index}", 1 << 30) for index in range(random.choice((2, 3))))
        compiled = compile_model(
            model.proto,
            tmp_path / f"bundle{seed}",
            target=Target(devices),
            shape=model.dimensions[0],
            pipeline=PIPELINE,
        )
        try:
            with onnxplace.InferenceSession(compiled.bundle) as session:
                for feeds, expected in results:
                    assert_close(list(session.run(None, feeds)), expected, model.tolerance)
                    actual = run_plain(compiled.bundle.file(WHOLE_MODEL_FILE), [feeds])[0]
                    assert_close(actual, expected, model.tolerance)
        except Exception as problem:
            problem.add_note(f"seed {seed}, model {model!r}")
            raise


# Rows stay apart from the first node to the last: in a loop, in a scan, and in what is quantised by one range.
ROWS = """
<ir_version: 8, opset_import: ["": 18]>
g (float[8, 16] x) => (float[8, 16] y) <int64 turns = {3}> {
    a = MatMul(x, w)
    b = Loop(turns, , a) <body = turn (int64 i, bool go, float[8, 16] s) => (bool on, float[8, 16] t) {
        on = Identity(go) p = MatMul(s, w) t = Tanh(p)
    }>
    c = Scan<num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
        body = column (float[8] e) => (float[8] o) { o = Mul(e, e) }>(b)
    q, scale, zero = DynamicQuantizeLinear(c)
    d = DequantizeLinear(q, scale, zero)
    y = MatMul(d, w)
}
"""


def test_rows_stay_apart_in_subgraphs_and_quantisers(tmp_path: Path) -> None:
    model = parser.parse_model(ROWS)
    random = np.random.default_rng(0)
    weight = random.normal(size=(16, 16)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    feeds = {"x": random.normal(size=(8, 16)).astype(np.float32)}
    (tmp_path / "map.json").write_text('{"MatMul.*|Loop.*|Scan.*|Dynamic.*": "rows"}')
    compiled = compile_model(
        model,
        tmp_path / "bundle",
        target=Target((Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30))),
        pipeline=f"optimize,profile{{estimate=true}},shard{{ways=2,map={tmp_path}/map.json}},coplace,m-etf,split,emit",
    )
    sharding = compiled.bundle.manifest.sharding
    assert sharding is not None
    layouts = {kind.op: kind.layout for kind in sharding.kinds}
    assert {layouts[op] for op in ("MatMul", "Loop", "Scan", "DynamicQuantizeLinear")} == {"axis 0"}
    with onnxplace.InferenceSession(compiled.bundle) as session:
        assert_close(list(session.run(None, feeds)), run_plain(model.SerializeToString(), [feeds])[0], 1e-5)


# Each expert computes all tokens, weighted by the gates of the two that the router chooses.
EXPERTS = """
<ir_version: 8, opset_import: ["": 18]>
g (float[tokens, 16] x) => (float[tokens, 16] y)
<int64[1] two = {2}, int64[1] last = {-1}, int64[1] first = {0}, float nought = {0.0}> {
    logits = MatMul(x, router)
    probabilities = Softmax(logits)
    best, indices = TopK(probabilities, two)
    zeros = Mul(probabilities, nought)
    sparse = ScatterElements<axis = 1>(zeros, indices, best)
    columns = Transpose(sparse)
    gates = Unsqueeze(columns, last)
    a = MatMul(x, up)
    b = Relu(a)
    c = MatMul(b, down)
    d = Mul(c, gates)
    y = ReduceSum<keepdims = 0>(d, first)
}
"""


def test_mixtures_of_stacked_experts_are_split_by_expert(tmp_path: Path) -> None:
    model = parser.parse_model(EXPERTS)
    random = np.random.default_rng(0)
    for name, shape in (("router", (16, 8)), ("up", (8, 16, 32)), ("down", (8, 32, 16))):
        model.graph.initializer.append(numpy_helper.from_array(random.normal(size=shape).astype(np.float32), name))
    compiled = compile_model(
        model,
        tmp_path / "bundle",
        target=Target((Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30))),
        shape={"tokens": 6},
        pipeline=PIPELINE,
    )
    sharding = compiled.bundle.manifest.sharding
    assert sharding is not None
    layouts = {(kind.op, kind.layout) for kind in sharding.kinds}
    assert {("MatMul", "axis 0"), ("Relu", "axis 0")} <= layouts, layouts
    with onnxplace.InferenceSession(compiled.bundle) as session:
        for tokens in (6, 1, 9):
            feeds = {"x": random.normal(size=(tokens, 16)).astype(np.float32)}
            assert_close(list(session.run(None, feeds)), run_plain(model.SerializeToString(), [feeds])[0], 1e-4)


def test_operators_are_split_over_devices_that_share_no_processor() -> None:
    processors = {"cpu:0": ("cpu:0",), "cpu:1": ("cpu:1",), "cpu:0-1": ("cpu:0", "cpu:1")}
    for names in (("cpu:0", "cpu:1", "cpu:0-1"), ("cpu:0-1", "cpu:1", "cpu:0")):
        devices = tuple(Device(name, 1 << 30, processors=processors[name]) for name in names)
        state = State(Target(devices)).with_facts(bind(load(mlp()), {}, {}))
        for options in ("weights=least", "weights=least,ways=3,exact=true"):
            after = Pipeline.parse(f"optimize,profile{{estimate=true}},shard{{{options}}}").run(state)[0]
            assert {names[device] for device in after[Shards].device} == {"cpu:0", "cpu:1"}
