"""Equal nodes and equal layers are recognised by structure, share their costs, and are shown."""

import json

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto, helper, numpy_helper, parser

from onnxplace.facts import Profile, Repeat
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind, build_op_graph, infer_static_shapes, value_bytes
from onnxplace.passes.profiling.repeat_kernels import find_runs
from onnxplace.passes.profiling.repeated_layers import find_repeats, node_kinds, pool_by_kind, substring_names
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State


def kinds_of(text: str, *weights: onnx.TensorProto) -> dict[str, int]:
    """Return the kind of each node of a model given as text, by name."""
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18, "own": 1]> {text}')
    proto.graph.initializer.extend(weights)
    model = load(proto)
    shapes = {**infer_static_shapes(model), **model.input_shapes()}
    return dict(zip([node.name for node in model.nodes], node_kinds(model, shapes).tolist()))


def tensor(name: str, values, dtype=np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(values, dtype), name)


def graph_and_kinds(proto: onnx.ModelProto, **sizes):
    model = bind(load(proto), sizes, {})
    shapes = {**infer_static_shapes(model), **model.input_shapes()}
    graph = build_op_graph(model, value_bytes(model, shapes))
    return graph, node_kinds(model, shapes)


def layered_proto(layers: int, width: int = 8, prologue: int = 1, skip_at: int = -1) -> onnx.ModelProto:
    """Return residual layers of six nodes, between nodes of other kinds.

    Layer `skip_at` reads the output of the layer before the previous one.
    """
    nodes = [helper.make_node("Tanh", ["x" if i == 0 else f"p{i - 1}"], [f"p{i}"]) for i in range(prologue)]
    value, previous, weights = f"p{prologue - 1}", f"p{prologue - 1}", []
    for k in range(layers):
        weights.append(tensor(f"w{k}", np.full((width, width), k / 9)))
        source = previous if k == skip_at else value
        outputs = [f"{op}{k}" for op in ("n", "m", "s", "g", "h", "out")]
        nodes += [
            helper.make_node("Neg", [source], [outputs[0]], name=f"layer{k}"),
            helper.make_node("MatMul", [outputs[0], f"w{k}"], [outputs[1]]),
            helper.make_node("Sigmoid", [outputs[1]], [outputs[2]]),
            helper.make_node("Mul", [outputs[1], outputs[2]], [outputs[3]]),
            helper.make_node("Relu", [outputs[3]], [outputs[4]]),
            helper.make_node("Add", [outputs[4], outputs[2] if k == skip_at else value], [outputs[5]]),
        ]
        value, previous = outputs[5], value
    nodes.append(helper.make_node("Softmax", [value], ["y"]))
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", width]) for n in "xy"]
    graph = helper.make_graph(nodes, "blocks", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# ---------------------------------------------------------------------------------------------- sequences


def repetitions(items: list[int]) -> set[tuple[int, int, int]]:
    """Return start, end and period of all maximal repetitions, by exhaustive search."""
    triples = set()
    for period in range(1, len(items) // 2 + 1):
        start = 0
        while start + period < len(items):
            end = start
            while end + period < len(items) and items[end] == items[end + period]:
                end += 1
            if end - start >= period:
                word = items[start : end + period]
                shorter = any(word[p:] == word[:-p] for p in range(1, period))
                triples |= set() if shorter else {(start, end + period, period)}
            start = max(end, start + 1)
    return triples


@given(st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters - 1), min_size=2, max_size=40)))
def test_exactly_all_repetitions_are_found(items):
    columns = find_runs(substring_names(np.array(items, dtype=np.int32)))
    assert set(zip(*(column.tolist() for column in columns))) == repetitions(items)


# ---------------------------------------------------------------------------------------------- kinds


def test_nodes_of_equal_operator_attributes_and_shapes_are_of_one_kind():
    kinds = kinds_of(
        """g (float[2,4] x) => (float y, float z) {
            [a] p = MatMul(x, u)
            [b] q = MatMul(p, v)
            [c] r = Softmax <axis = 1> (q)
            [d] s = Softmax <axis = 1> (r)
            [e] y = Softmax <axis = 0> (s)
            [f] t = Transpose(s)
            [g] z = Softmax <axis = 1> (t)
        }""",
        tensor("u", np.ones((4, 4))),
        tensor("v", np.zeros((4, 4))),
    )
    assert kinds["a"] == kinds["b"]
    assert kinds["c"] == kinds["d"]
    assert len({kinds[name] for name in "acefg"}) == 5


def test_weights_values_types_and_absent_inputs_are_different_kinds():
    kinds = kinds_of(
        """g (float[4] x, double[4] d) => (float y, double z) {
            [weight] p = Add(x, w)
            [value] y = Add(p, x)
            [double] z = Add(d, d)
            [absent] a = Clip(y)
            [given] b = Clip(y, low)
        }""",
        tensor("w", np.ones(4)),
        tensor("low", 0.0),
    )
    assert len(set(kinds.values())) == len(kinds)


def test_axes_count_by_content_and_indices_do_not():
    kinds = kinds_of(
        """g (float[4,4] x) => (float y, float z, float u, float v) {
            [first] y = ReduceSum <keepdims = 0> (x, zero)
            [second] z = ReduceSum <keepdims = 0> (x, one)
            [third] u = Gather(x, zero)
            [fourth] v = Gather(x, one)
        }""",
        tensor("zero", [0], np.int64),
        tensor("one", [1], np.int64),
    )
    assert kinds["first"] != kinds["second"]
    assert kinds["third"] == kinds["fourth"]


def test_subgraphs_count_by_structure_whatever_their_values_are_called():
    def body(prefix: str, op: str) -> str:
        return f"g{prefix} () => (float[2] {prefix}out) {{ {prefix}in = {op}(x) {prefix}out = Neg({prefix}in) }}"

    kinds = kinds_of(
        f"""g (bool c, float[2] x) => (float[2] y1, float[2] y2, float[2] y3) {{
            [one] y1 = If (c) <then_branch = {body("a", "Abs")}, else_branch = {body("b", "Exp")}>
            [two] y2 = If (c) <then_branch = {body("d", "Abs")}, else_branch = {body("e", "Exp")}>
            [other] y3 = If (c) <then_branch = {body("h", "Abs")}, else_branch = {body("i", "Sin")}>
        }}"""
    )
    assert kinds["one"] == kinds["two"] != kinds["other"]


# ---------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("prologue", [1, 3])
def test_layers_begin_where_the_fewest_values_cross(prologue):
    graph, kinds = graph_and_kinds(layered_proto(5, prologue=prologue), batch=2)
    (repeat,) = find_repeats(kinds, graph)
    assert repeat == Repeat(prologue, 6, 5)
    assert graph.names[repeat.start] == "layer0"


def test_a_layer_with_other_wiring_ends_a_repeat():
    graph, kinds = graph_and_kinds(layered_proto(9, skip_at=4), batch=2)
    repeats = find_repeats(kinds, graph)
    assert [(item.nodes, item.count) for item in repeats] == [(6, 4), (6, 4)]
    assert repeats[1].start == repeats[0].stop + 6


def test_few_nodes_are_no_repeat():
    graph, kinds = graph_and_kinds(layered_proto(2), batch=2)
    assert find_repeats(kinds, graph) == ()


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60))
def test_repeats_do_not_overlap_and_layers_are_equal(items):
    ops = ("Neg", "Relu", "Tanh")
    nodes = [helper.make_node(ops[k], [f"v{i}"], [f"v{i + 1}"], name=f"n{i}") for i, k in enumerate(items)]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("v0", f"v{len(items)}")]
    proto = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]), ir_version=8)
    graph, kinds = graph_and_kinds(proto)
    stop = 0
    for repeat in find_repeats(kinds, graph):
        assert repeat.start >= stop
        stop = repeat.stop
        layers = kinds[repeat.start : stop].reshape(repeat.count, repeat.nodes)
        assert (layers == layers[0]).all()
    assert stop <= len(items)


# ---------------------------------------------------------------------------------------------- costs


def test_equal_kernels_share_the_median_and_the_sum_stays():
    kinds = np.array([0, 1, 0, 1, 0, 1, 2, 1], dtype=np.int32)
    unit = np.array([0, 0, 1, 1, 2, 2, 3, 4], dtype=np.int32)
    seconds = np.array([1, 1, 2, 2, 9, 9, 5, 7], dtype=np.float64)
    pooled = pool_by_kind(seconds, unit, np.ones(8, dtype=bool), kinds)
    assert pooled.sum() == pytest.approx(seconds.sum())
    assert pooled / pooled[0] == pytest.approx([1, 1, 1, 1, 1, 1, 2.5, 3.5])


def test_folded_nodes_stay_free():
    pooled = pool_by_kind(np.array([0.0, 4.0, 2.0]), np.arange(3, dtype=np.int32), np.array([False, True, True]),
                   np.zeros(3, dtype=np.int32))  # fmt: skip
    assert pooled == pytest.approx([0, 3, 3])


def test_equal_nodes_cost_the_same_after_profiling():
    state = State(local_target("cpu:0,cpu:1")).with_facts(bind(load(layered_proto(4)), {"batch": 2}, {}))
    profile = Pipeline.parse("profile{repeat=3,seconds=0}").run(state)[0][Profile]
    assert profile.repeats == (Repeat(1, 6, 4),)
    for seconds in profile.seconds.values():
        layers = seconds[1:25].reshape(4, 6)
        assert layers[1] == pytest.approx(layers[2])  # the first and the last may be fused with their neighbours
        assert layers.sum() > 0


# ---------------------------------------------------------------------------------------------- shown


def test_the_summary_and_the_manifest_name_equal_layers(tmp_path, run_cli):
    (tmp_path / "model.onnx").write_bytes(layered_proto(5).SerializeToString())
    arguments = ["compile", tmp_path / "model.onnx", "--devices", "cpu:0,cpu:1", "--shape", "batch=2", "--pipeline",
                 "optimize,profile{estimate=true},coplace{join=never},m-etf,split,emit"]  # fmt: skip
    ran = run_cli(*arguments)
    assert ran.code == 0, ran.err
    assert "repeats: 5 x layer of 6 nodes (from 'layer0')" in ran.out.splitlines()
    ran = run_cli(*arguments, "--force", "--json")
    expected = [{"count": 5, "nodes": 6, "first": "layer0"}]
    assert json.loads(ran.out)["repeats"] == expected
    assert json.loads((tmp_path / "model.bundle" / "manifest.json").read_text())["repeats"] == expected


def test_a_model_without_equal_layers_reports_no_repeats(model_file, run_cli):
    ran = run_cli("compile", model_file, "--devices", "cpu:0,cpu:1", "--shape", "batch=2", "--pipeline",
                  "optimize,profile{estimate=true},coplace{join=never},m-etf,split,emit")  # fmt: skip
    assert "repeats" not in ran.out
