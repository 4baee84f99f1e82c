"""The pass `recompute`: what it computes, what it holds, and what it leaves alone."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from onnx import TensorProto, helper

import onnxplace
from onnxplace.errors import UsageError
from onnxplace.facts import Original, Profile, Recomputation, Shards, Source
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind, build_op_graph, infer_static_shapes, value_bytes
from onnxplace.model.model import Model
from onnxplace.model_metadata import TrainingRoles
from onnxplace.passes.recomputation.apply_recomputation import _reorder, _Work
from onnxplace.passes.recomputation.cloned_model import find_ranks
from onnxplace.passes.recompute import Recompute
from onnxplace.passes.shard import Shard
from onnxplace.simulation.simulator import simulate
from onnxplace.state import State
from tests.support.random_models import RandomModel, random_models, reference
from tests.support.training_models import draw_batch, make_mlp, make_recurrent, make_transformer, make_two_tower


def make_state(proto, dimensions=None):
    """Return a state with costs that follow from the sizes of values."""
    model = bind(load(proto), dimensions or {}, {})
    graph = build_op_graph(model, value_bytes(model, infer_static_shapes(model)))
    target = local_target("cpu:0")
    produced = np.array([graph.value_bytes[graph.outputs[node]].sum() for node in range(len(graph))])
    read = np.array([graph.value_bytes[graph.inputs[node]].sum() for node in range(len(graph))])
    seconds = 1e-6 + (produced + read) * np.where(np.array(graph.ops) == "MatMul", 1e-8, 1e-10)
    kind = target.devices[0].cost_class
    profile = Profile(
        graph=graph,
        seconds={kind: seconds},
        sources={kind: np.full(len(graph), Source.ESTIMATED, dtype=np.uint8)},
        unit=np.arange(len(graph), dtype=np.int32),
    )
    return State(target).with_facts(model, profile)


def run_plainly(model, feeds):
    """Run a model node by node in its own order, without optimisations."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    proto = model.whole_proto()
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def feeds_of(proto):
    known = {value.name for value in proto.graph.input}
    return {**draw_batch(proto), **({"step": np.array(1, np.int64)} if "step" in known else {})}


def peak_of(state):
    """Return the peak that the simulator finds for one device in the model's order."""
    graph = state[Profile].graph
    seconds = np.stack(list(state[Profile].seconds.values()))
    device = np.zeros(len(graph), np.int32)
    return int(simulate(graph, seconds, state.target, device, graph.order).peak_bytes[0])


STEPS = {
    "mlp": lambda: make_mlp("adam", widths=[32] * 9, batch=256),
    "transformer": lambda: make_transformer("adamw", layers=3, width=32, tokens=32, batch=8),
    "two towers": lambda: make_two_tower("momentum", width=24, depth=6, batch=128),
    "recurrent": lambda: make_recurrent("sgd", width=16, steps=8, batch=128),
    "without metadata": lambda: make_mlp("adam", widths=[32] * 9, batch=256, has_metadata=False),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_within_three_quarters_of_its_memory_computes_the_same_bit_for_bit(name):
    proto = STEPS[name]()
    before = make_state(proto)
    limit = int(0.75 * peak_of(before))
    after = Recompute(limit=str(limit)).run(before)
    after[Recomputation].check(after)
    after[Profile].check(after)
    after[Model].check(after)
    assert peak_of(after) == after[Recomputation].peak_after_bytes <= limit
    assert after[Recomputation].nodes > 0
    expected, actual = run_plainly(before[Model], feeds_of(proto)), run_plainly(after[Model], feeds_of(proto))
    assert all(np.array_equal(one, other) for one, other in zip(expected, actual, strict=True))


@settings(deadline=None, max_examples=15)
@given(st.integers(2, 6), st.integers(1, 64), st.floats(0.3, 1.0), st.sampled_from(["sgd", "momentum", "adam"]))
def test_any_limit_gives_the_same_results_and_the_promised_peak(layers, batch, share, optimizer):
    proto = make_mlp(optimizer, widths=[8] * (layers + 1), batch=batch)
    before = make_state(proto)
    peak = peak_of(before)
    after = Recompute(limit=str(int(share * peak))).run(before)
    fact = after[Recomputation]
    assert peak_of(after) == fact.peak_after_bytes <= peak
    codes = {note.code for note in after.diagnostics}
    assert (fact.peak_after_bytes > int(share * peak)) == ("L071" in codes)
    expected, actual = run_plainly(before[Model], feeds_of(proto)), run_plainly(after[Model], feeds_of(proto))
    assert all(np.array_equal(one, other) for one, other in zip(expected, actual, strict=True))


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(random_models(max_nodes=24))
def test_random_models_with_as_little_memory_as_possible_compute_the_same(model: RandomModel):
    try:
        expected = reference(model.proto, model.feeds)
        before = make_state(model.proto, model.dimensions)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        assume(False)
    after = Recompute(limit="0").run(before)
    after[Model].check(after)
    assert peak_of(after) == after[Recomputation].peak_after_bytes <= peak_of(before)
    for feeds, results in zip(model.feeds, expected, strict=True):
        for one, other in zip(results, run_plainly(after[Model], feeds), strict=True):
            np.testing.assert_equal(other, one)


def test_a_model_that_fits_stays_as_it_is():
    before = make_state(make_mlp("sgd"))
    after = Recompute(limit="1GiB").run(before)
    assert after[Model] is before[Model]
    assert after[Original].model is after[Model]
    assert [note.code for note in after.diagnostics] == ["L072"]


def test_random_nodes_run_once():
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["noise"], name="noise"),
        helper.make_node("Tanh", ["noise"], ["a"], name="tanh"),
    ]
    nodes += [helper.make_node("Exp", ["a" if i == 0 else f"b{i - 1}"], [f"b{i}"], name=f"exp{i}") for i in range(6)]
    nodes += [helper.make_node("ReduceSum", ["b5"], ["s"], name="sum", keepdims=1)]
    nodes += [helper.make_node("Mul", ["s", "noise"], ["c"], name="late")]
    nodes += [helper.make_node("Mul", ["c", "a"], ["d"], name="later")]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 64])
    d = helper.make_tensor_value_info("d", TensorProto.FLOAT, [64, 64])
    proto = helper.make_model(
        helper.make_graph(nodes, "noisy", [x], [d]), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    after = Recompute(limit="0").run(make_state(proto))
    ops = [node.op_type for node in after[Model].nodes]
    assert ops.count("RandomNormalLike") == 1


@pytest.mark.parametrize("limit", ["", "many", "-3", "60%"])
def test_a_limit_that_is_no_size_is_refused(limit):
    with pytest.raises(UsageError, match="expected bytes or fit") as caught:
        Recompute(limit=limit).run(make_state(make_mlp("sgd")))
    assert caught.value.code == "U005"


def test_a_model_whose_operators_were_split_can_be_recomputed(tmp_path):
    """Once a defect: what `shard` says of devices is gone after it, and the file asked for it."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[4, 64] x) => (float[4, 64] y) {
        first = Relu(x) a = MatMul(x, v) b = Relu(a) c = MatMul(b, w) d = Exp(c) e = Sum(d, first) y = Add(e, c)
    }"""
    proto = onnx.parser.parse_model(text)
    for name, shape in {"v": (64, 256), "w": (256, 64)}.items():
        array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    passes = (
        "optimize,profile{estimate=true},shard{weights=least},recompute{limit=1},coplace{join=never},m-etf,split,emit"
    )
    bundle = onnxplace.compile(proto, tmp_path / "b", devices="cpu:0,cpu:1", pipeline=passes, trial=False)
    assert {segment.device for segment in bundle.manifest.segments} == {"cpu:0", "cpu:1"}
    assert onnxplace.verify(bundle).equal


def test_the_original_of_what_was_recomputed_stays_where_nothing_is_split():
    """It is the reference of the bundle, and other compilations use its costs."""
    before = make_state(make_mlp("sgd"))
    recomputed = Recompute(limit="0").run(before)
    assert recomputed[Recomputation].is_changed
    after = Shard().run(recomputed)
    assert after[Shards].ways == 1
    assert after[Original].model is before[Model]
    assert after[Original].profile is before[Profile]


def test_what_is_known_per_node_follows_the_nodes_to_their_places():
    state = make_state(STEPS["transformer"]())
    graph, number = state[Profile].graph, np.arange(len(state[Profile].graph), dtype=np.int32)
    roles = TrainingRoles(state[Model].training, (number % 3).astype(np.uint8), number, np.full_like(number, -1))
    errors = {name: number.astype(float) for name in state[Profile].seconds}
    state = state.with_facts(replace(state[Profile], training=roles, errors=errors))
    work = _Work(state[Model], state[Profile], find_ranks(state[Model]))
    reordered = _reorder(work).profile
    before = [graph.names.index(name) for name in reordered.graph.names]
    assert before != number.tolist()
    assert reordered.training.phase.tolist() == roles.phase[before].tolist()
    assert reordered.training.parameter.tolist() == before
    assert [found.tolist() for found in reordered.errors.values()] == [before]
    after = Recompute(limit=str(int(0.75 * peak_of(state)))).run(state)[Profile]
    place = {name: index for index, name in enumerate(after.graph.names)}
    assert after.training.parameter[[place[name] for name in graph.names]].tolist() == number.tolist()
