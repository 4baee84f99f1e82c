"""Requests can be joined: proven for a model only if its results then are those of single requests."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, note, settings, strategies as st
from onnx import ModelProto, printer

from onnxplace.bundle.manifest import BatchingRecord
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.state_binding import bind_states
from onnxplace.passes.batching import batch_flow
from onnxplace.passes.batching.batch_flow import find_batch_axes
from onnxplace.passes.sharding.rules.layouts import PARTIAL
from onnxplace.passes.sharding.space.strategy_space import build_space
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts
from tests.passes.sharding.test_rules import CASES, draw_feeds, parse
from tests.support.batch_models import COUPLED, JOINABLE, draw_inputs, make, sizes_of
from tests.support.batches import check_joined_run, draw_requests, make_symbolic, prove
from tests.support.forced_sharding import DIVISIONS
from tests.support.random_models import RandomModel, random_models, reference, run_plain
from tests.support.shardable_models import make_model

EXAMPLES = int(os.environ.get("ONNXPLACE_EXAMPLES", "0"))
"""Number of models; unless it is set, they are always the same."""


@pytest.mark.parametrize("name", JOINABLE)
def test_requests_of_these_models_can_be_joined(name):
    text, inputs, outputs = JOINABLE[name]
    proto = make(text)
    sizes = sizes_of(proto)
    axes = prove(proto, sizes)
    assert (axes.inputs, axes.outputs, axes.reason) == (inputs, outputs, "")
    feeds = draw_inputs(proto, sizes)
    for seed, cuts in enumerate(([1], [1, 3, 2], [2, 1, 1, 1])):
        check_joined_run(proto, axes, draw_requests(proto, axes, feeds, cuts, seed), 1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.sampled(5)
def test_requests_of_these_models_cannot_whatever_the_size_they_are_compiled_for(name, size):
    text, reason, node = COUPLED[name]
    proto = make(text)
    axes = prove(proto, dict.fromkeys(sizes_of(proto), size))
    assert (axes.dimension, axes.inputs, axes.outputs) == ("", {}, {})
    assert reason in axes.reason
    assert node is None or axes.node == node


def test_a_model_with_states_is_refused():
    model = load(make("(float[N, 4] x, float[4] a) => (y, b) { y = Neg(x) b = Neg(a) }"))
    states = bind_states(bind(model, {"N": 2}, {}), ("b=a",))
    assert find_batch_axes(states).reason == "the model carries states from call to call"


def test_a_model_that_cannot_be_analysed_gets_a_reason(monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(batch_flow, "infer_shapes_and_values", fail)
    axes = prove(make("(float[N, 4] x) => (y) { y = Neg(x) }"), {"N": 2})
    assert axes.reason == "along dimension 'N', it cannot be analysed: RuntimeError: a defect"


def test_a_default_value_does_not_follow_the_batch():
    text = "(float[N, 4] x, float[N, 4] z) => (y) <float[1, 4] z = {1, 2, 3, 4}> { y = Add(x, z) }"
    assert "default value" in prove(make(text), {"N": 1}).reason


@pytest.mark.parametrize("name", ["x", "z"])
def test_a_model_with_an_input_of_unknown_rank_is_refused(name):
    proto = make("(float[N, 4] x, float[M] z) => (y) { y = Neg(x) }")
    next(item for item in proto.graph.input if item.name == name).type.tensor_type.ClearField("shape")
    model = bind(load(proto), {}, {"x": np.ones((2, 4), np.float32), "z": np.ones(1, np.float32)})
    assert find_batch_axes(model).reason == f"the model does not declare the shape of input {name!r}"


def list_splits(name: str) -> list[tuple[ModelProto, dict[str, np.ndarray], dict[str, int]]]:
    """Return the model of a rule's case for each way to split it, with feeds, and the axes of the split inputs."""
    case = CASES[name]
    proto = parse(case)
    feeds = dict(draw_feeds(proto, case))
    facts = TensorFacts.of(bind(load(proto), {}, feeds))
    splits = []
    for strategy in build_space(facts, DIVISIONS["2 ways"]).strategies[0][1:]:
        axes = {
            name: layout.axis
            for name, layout in zip(facts.model.nodes[0].input, strategy.inputs)
            if layout is not None and layout.is_split and name in feeds
        }
        if axes and PARTIAL not in strategy.outputs and axes not in [item[2] for item in splits]:
            splits.append((proto, feeds, axes))
    return splits


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(5)
def test_rules_join_only_what_can_be_joined(name):
    for proto, feeds, split in list_splits(name):
        if len({feeds[item].shape[axis] for item, axis in split.items()}) > 1:
            continue
        symbolic = make_symbolic(proto, split)
        size = next(feeds[item].shape[axis] for item, axis in split.items())
        axes = find_batch_axes(bind(load(symbolic), {"batch": size}, {}))
        if axes.dimension:
            check_joined_run(symbolic, axes, draw_requests(symbolic, axes, feeds, [size, 1, 2], 0), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, EXAMPLES or 400, 100))
def test_joined_runs_of_proven_models_compute_the_same(first: int) -> None:
    proven: Counter[bool] = Counter()
    for seed in range(first, first + 100):
        random = Random(seed)
        model = make_model(random)
        axes = prove(model.proto, model.dimensions[0])
        proven[bool(axes.dimension)] += 1
        if not axes.dimension:
            assert axes.reason
            continue
        requests = draw_requests(model.proto, axes, model.feeds[0], random.choices((1, 2, 3, 7), k=3), seed)
        for name in axes.inputs:
            if requests[0][name].dtype.kind == "f":  # neighbours of an infinite number must not notice it
                requests[0][name].reshape(-1)[-1:] = np.inf
        try:
            run_plain(model.proto.SerializeToString(), requests)
        except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
            continue
        try:
            check_joined_run(model.proto, axes, requests, model.tolerance)
        except Exception as problem:
            problem.add_note(f"seed {seed}, {axes}, model {model!r}")
            raise
    assert min(proven[True], proven[False]) > 5, "the property says something about both"


@settings(
    max_examples=EXAMPLES or 150,
    deadline=None,
    derandomize=not EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(random_models(max_nodes=8), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 99))
def test_joined_runs_of_any_proven_model_have_the_same_bits(model: RandomModel, sizes: list[int], seed: int) -> None:
    assume(model.dimensions)
    axes = BatchingRecord()
    try:
        reference(model.proto, model.feeds)
        axes = prove(model.proto, model.dimensions)
    except Exception:  # noqa: BLE001 - ONNX Runtime and the compiler refuse some models
        assume(False)
    assume(axes.dimension and all(model.feeds[0][name].shape[axis] for name, axis in axes.inputs.items()))
    note(printer.to_text(model.proto))
    requests = draw_requests(model.proto, axes, model.feeds[0], sizes, seed)
    check_joined_run(model.proto, axes, requests)


@settings(max_examples=EXAMPLES or 60, deadline=None, derandomize=not EXAMPLES)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.lists(st.integers(-2, 5), min_size=1, max_size=3),
    st.sampled_from(["Add(column, scaled)", "Add(scaled, column)"]),
)
def test_picks_of_a_flattened_batch_are_joined_exactly_if_all_are_in_their_row(width, stride, columns, shift):
    text = f"""(float[N, {width}] x) => (y) <int64 zero = {{0}}, int64 one = {{1}}, int64[1] ones = {{1}},
        int64 stride = {{{stride}}}, int64[{len(columns)}] column = {{{", ".join(map(str, columns))}}},
        int64[1] flat = {{-1}}> {{
        s = Shape(x) n = Gather(s, zero) r = Range(zero, n, one) rows = Unsqueeze(r, ones) scaled = Mul(rows, stride)
        i = {shift} f = Reshape(x, flat) y = Gather(f, i) }}"""
    proto = make(text)
    axes = prove(proto, {"N": 2})
    assert bool(axes.dimension) == (stride == width and all(0 <= column < width for column in columns))
    if axes.dimension:
        feeds = {"x": np.arange(3 * width, dtype=np.float32).reshape(3, width)}
        check_joined_run(proto, axes, draw_requests(proto, axes, feeds, [1, 3, 2], seed=width))
