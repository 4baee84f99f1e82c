"""Requests can be joined: proven for a model only if its results then are those of single requests."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, note, settings, strategies as st
from onnx import ModelProto, parser, printer

from onnxplace.model import bind, bind_states, load
from onnxplace.passes.sharding import BatchAxes, batch_axis, find_batch_axes
from onnxplace.passes.sharding.layouts import PARTIAL
from onnxplace.passes.sharding.space import build_space
from onnxplace.passes.sharding.tensor_facts import TensorFacts
from tests.passes.sharding.test_rules import CASES, draw_feeds, parse
from tests.support.batches import check_joined_run, draw_requests, make_symbolic, prove
from tests.support.forced_sharding import DIVISIONS
from tests.support.random_models import RandomModel, random_models, reference, run_plain
from tests.support.shardable_models import make_model

EXAMPLES = int(os.environ.get("ONNXPLACE_EXAMPLES", "0"))
"""Number of models; unless it is set, they are always the same."""
IDS = "int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] last = {-1}, int64 first = {0}"


def make(text: str, opset: int = 18) -> ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]> g {text}')


# Per model: the expected axes of its inputs and outputs, and sizes to compile for.
JOINABLE = {
    "a computed target of a Reshape": (
        f"""(float[N, T, 6] x) => (float[N, T, 2, 3] y) <{IDS}, int64[2] heads = {{2, 3}}> {{
            s = Shape(x) n = Gather(s, first) nn = Unsqueeze(n, zero) t = Slice(s, one, two)
            target = Concat<axis=0>(nn, t, heads)
            y = Reshape(x, target) }}""",
        {"x": 0},
        {"y": 0},
    ),
    "rows of all requests in one axis": (
        f"""(float[N, T, 6] x) => (y) <{IDS}, int64[2] rows = {{-1, 6}}> {{
            r = Reshape(x, rows) a = Relu(r) s = Shape(x) y = Reshape(a, s) }}""",
        {"x": 0},
        {"y": 0},
    ),
    "an output of all rows": (
        "(float[N, T, 6] x) => (y) <int64[2] rows = {-1, 6}> { y = Reshape(x, rows) }",
        {"x": 0},
        {"y": 0},
    ),
    "the batch behind time": (
        """(float[4, N, 6] x) => (y) <int64[2] rows = {-1, 6}, int64[3] back = {4, -1, 6}> {
            r = Reshape(x, rows) a = Tanh(r) y = Reshape(a, back) }""",
        {"x": 1},
        {"y": 1},
    ),
    "a class token for each request": (
        f"""(float[N, 3, 4] x) => (y) <{IDS}, float[1, 1, 4] token = {{1, 2, 3, 4}}> {{
            s = Shape<start=0, end=1>(x) sizes = Concat<axis=0>(s, last, last)
            minus = Constant<value_ints = [-1, -1, -1]>()
            ones = Constant<value_ints = [1, 1, 1]>() is_free = Equal(sizes, minus) target = Where(is_free, ones, sizes)
            t = Expand(token, target) y = Concat<axis=1>(t, x) }}""",
        {"x": 0},
        {"y": 0},
    ),
    "an initial state of the size of the batch": (
        f"""(float[N, 5] x) => (y) <{IDS}, int64[1] width = {{5}}> {{
            s = Shape<end=1>(x) shape = Concat<axis=0>(s, width) z = ConstantOfShape<value = float[1] {{2}}>(shape)
            y = Add(x, z) }}""",
        {"x": 0},
        {"y": 0},
    ),
    "a doubled batch, split again": (
        """(float[N, 4] x) => (y) {
            n = Neg(x) d = Concat<axis=0>(x, n) r = Exp(d) a, b = Split<axis=0, num_outputs=2>(r) y = Sub(a, b) }""",
        {"x": 0},
        {"y": 0},
    ),
    "an input that all requests share": (
        "(float[N, 4] x, float[4] shared) => (y, z) { y = Mul(x, shared) z = Neg(shared) }",
        {"x": 0},
        {"y": 0},
    ),
    "two inputs": (
        "(float[N, 4] x, float[3, N] z) => (y) { t = Transpose(z) y = Concat<axis=1>(x, t) }",
        {"x": 0, "z": 1},
        {"y": 0},
    ),
    "a slice that keeps the batch": (
        """(float[N, 6] x) => (y) <int64[2] s = {0, 1}, int64[2] e = {9223372036854775807, 4}, int64[2] a = {0, 1}> {
            y = Slice(x, s, e, a) }""",
        {"x": 0},
        {"y": 0},
    ),
    "the second of two dimensions": (
        "(float[M, 2] a, float[N, 4] x) => (y, z) { s = ReduceSum(a) y = Add(x, s) z = Softmax(x) }",
        {"x": 0},
        {"y": 0, "z": 0},
    ),
}
# Per model: what the reason says, and the node.
COUPLED = {
    "softmax over the batch": ("(float[N, 4] x) => (y) { [soft] y = Softmax<axis=0>(x) }", "combines", "soft"),
    "mean over the batch": (
        "(float[N, 4] x) => (y) <int64[1] a = {0}> { [mean] m = ReduceMean(x, a) y = Sub(x, m) }",
        "combines",
        "mean",
    ),
    "sum of everything": ("(float[N, 4] x) => (y) { [sum] s = ReduceSum(x) y = Div(x, s) }", "combines", "sum"),
    "running sum": (
        "(float[N, 4] x) => (y) <int64 a = {0}> { [sums] y = CumSum(x, a) }",
        "combines",
        "sums",
    ),
    "products of requests": (
        "(float[N, 4] x) => (y) { t = Transpose(x) [gram] y = MatMul(x, t) }",
        "combines",
        "gram",
    ),
    "pairs by broadcasting": (
        "(float[N, 1] x) => (y) { t = Transpose(x) [pairs] y = Add(x, t) }",
        "combines",
        "pairs",
    ),
    "a fixed batch in a Reshape": (
        "(float[N, 4] x) => (y) <int64[2] s = {2, -1}> { [fixed] y = Reshape(x, s) }",
        "combines",
        "fixed",
    ),
    "the batch mixed into rows": (
        "(float[N, 4] x) => (y) <int64[2] s = {4, -1}> { [mixed] y = Reshape(x, s) }",
        "combines",
        "mixed",
    ),
    "training statistics": (
        """(float[N, 2] x) => (y) <float[2] one = {1, 1}, float[2] zero = {0, 0}> {
            [norm] y, m, v = BatchNormalization<training_mode=1>(x, one, zero, zero, one) }""",
        "combines",
        "norm",
    ),
    "random numbers": (
        "(float[N, 4] x) => (y) { [noise] r = RandomNormalLike(x) y = Add(x, r) }",
        "RandomNormalLike is random",
        "noise",
    ),
    "the number of requests": (
        "(float[N, 4] x) => (y) { s = Shape<end=1>(x) [size] f = Cast<to=1>(s) [scaled] y = Div(x, f) }",
        "computes with the size",
        "scaled",
    ),
    "positions in the batch": (
        f"""(float[N, 4] x) => (y) <{IDS}, int64 step = {{1}}> {{
            s = Shape(x) n = Gather(s, first) [count] r = Range(first, n, step) f = Cast<to=1>(r) u = Unsqueeze(f, one)
            y = Add(x, u) }}""",
        "of the batch",
        None,
    ),
    "a bound that some sizes reach": (
        f"""(float[N, 4] x) => (y) <{IDS}, int64 many = {{4000}}> {{
            s = Shape(x) n = Gather(s, first) [less] l = Less(n, many) f = Cast<to=1>(l) y = Mul(x, f) }}""",
        "computes with the size",
        "less",
    ),
    "half of the batch": (
        f"""(float[N, 4] x) => (y) <{IDS}> {{
            s = Shape<end=1>(x) [half] h = Div(s, two) e = Mul(h, two)
            t = Concat<axis=0>(e, last) y = Reshape(x, t) }}""",
        "computes with the size",
        "half",
    ),
    "the first request for all": (
        "(float[N, 4] x) => (y) <int64[1] i = {0}> { [pick] f = Gather<axis=0>(x, i) y = Add(x, f) }",
        "combines",
        "pick",
    ),
    "a row per request, chosen in another": (
        "(float[N, 4] x, int64[N] i) => (y) { [pick] y = Gather<axis=0>(x, i) }",
        "combines",
        "pick",
    ),
    "the requests of all rows": (
        "(float[3, N] x) => (y) <int64[1] s = {-1}> { [flat] y = Reshape(x, s) }",
        "output 'y' do not follow one another",
        "flat",
    ),
    "a scale of all requests": (
        "(float[N, 4] x) => (y, s, z) { [quantise] y, s, z = DynamicQuantizeLinear(x) }",
        "combines",
        "quantise",
    ),
    "a squeeze of whatever is one": (
        "(float[N, 1, 4] x) => (y) { [squeeze] y = Squeeze(x) }",
        "combines",
        "squeeze",
    ),
    "a branch on the batch": (
        """(float[N, 4] x, bool c) => (y) { [branch] y = If(c) <
            then_branch = t () => (float[N, 4] u) { u = Neg(x) },
            else_branch = e () => (float[N, 4] v) { v = Abs(x) }> }""",
        "has subgraphs",
        "branch",
    ),
    "only fixed sizes": ("(float[2, 4] x) => (y) { y = Neg(x) }", "no input has a symbolic dimension", ""),
    "a square of requests": ("(float[N, N] x) => (y) { y = Neg(x) }", "several axes", ""),
    "no output of the batch": (
        "(float[N, 4] x, float[4] b) => (y) { y = Neg(b) }",
        "no output has this dimension",
        "",
    ),
    "the size of the batch": (
        "(float[N, 4] x) => (y) { [size] y = Shape<end=1>(x) }",
        "output 'y' do not follow one another",
        "size",
    ),
}


def sizes_of(proto: ModelProto) -> dict[str, int]:
    symbols = {dim.dim_param for value in proto.graph.input for dim in value.type.tensor_type.shape.dim}
    return dict.fromkeys(sorted(symbols - {""}), 3)


def draw_inputs(proto: ModelProto, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    feeds = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in kind.shape.dim]
        feeds[value.name] = random.integers(-4, 5, shape).astype(np.float32)
    return feeds


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

    monkeypatch.setattr(batch_axis, "infer_shapes_and_values", fail)
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
        requests = draw_requests(model.proto, axes, model.feeds[0], random.choices((1, 2, 3), k=3), seed)
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
    axes = BatchAxes()
    try:
        reference(model.proto, model.feeds)
        axes = prove(model.proto, model.dimensions)
    except Exception:  # noqa: BLE001 - ONNX Runtime and the compiler refuse some models
        assume(False)
    assume(axes.dimension and all(model.feeds[0][name].shape[axis] for name, axis in axes.inputs.items()))
    note(printer.to_text(model.proto))
    requests = draw_requests(model.proto, axes, model.feeds[0], sizes, seed)
    check_joined_run(model.proto, axes, requests)
