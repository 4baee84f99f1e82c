"""Control flow and local functions: captures, weights and costs of subgraphs."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, external_data_helper, helper, numpy_helper, parser

from onnxplace.errors import ModelError, UsageError
from onnxplace.model.loading import load
from onnxplace.model.model import Model
from onnxplace.model.nested_graphs import captured_names, rename_reads
from onnxplace.passes.profiling.roofline import MAX_ITERATIONS, estimate_seconds
from tests.support.random_models import Feeds, reference
from tests.support.random_placements import RandomPlacement, assert_same, compiled_with, run_together

HEADER = '<ir_version: 9, opset_import: ["": 18]>'
X = np.array([[1, -2, 3], [-4, 5, -6]], dtype=np.float32)
LARGE = np.arange(2 * 300, dtype=np.float32).reshape(2, 300)[:, :3].repeat(150, axis=0)  # 3600 bytes


def parse_model(text: str) -> ModelProto:
    return parser.parse_model(text if text.startswith("<") else HEADER + text)


def find_branch(model: ModelProto, node: str, attribute: str) -> onnx.GraphProto:
    """Return the subgraph of the first node of type `node`."""
    return next(a.g for n in model.graph.node if n.op_type == node for a in n.attribute if a.name == attribute)


def check_cut(model: ModelProto | Path, folder: Path, *feeds: Feeds) -> None:
    """Cut a model at every node, and compare its outputs with those of the whole model."""
    bundle = compiled_with(model, RandomPlacement((0, 1)), folder, optimized=False)
    whole = onnx.load(model) if isinstance(model, Path) else model
    assert_same(run_together(bundle, feeds), reference(whole, feeds))


# --- weights inside subgraphs -------------------------------------------------------------------------------------


IF = """graph (float[300, 3] x, bool c) => (float[300, 3] y) {
    a = Neg(x)
    b = If(c) <
        then_branch = t () => (float[300, 3] u) { u = Mul(a, w) },
        else_branch = e () => (float[300, 3] v) { v = Add(a, w) }
    >
    y = Neg(b)
}"""
IF_FEEDS: tuple[Feeds, ...] = tuple({"x": LARGE, "c": np.array(c)} for c in (True, False))


def test_large_weights_of_subgraphs_become_initializers_of_the_model(tmp_path: Path):
    model = parse_model(IF)
    for name, factor in (("then_branch", 2), ("else_branch", 3)):  # siblings may share a name
        find_branch(model, "If", name).initializer.append(numpy_helper.from_array(LARGE * factor, "w"))
    loaded = load(model)
    assert len(loaded.initializers) == 2
    assert all(not list(g.initializer) for n in loaded.nodes for a in n.attribute for g in [a.g] if a.HasField("g"))
    node = next(index for index, item in enumerate(loaded.nodes) if item.op_type == "If")
    assert set(loaded.initializers) < set(loaded.reads[node])
    check_cut(model, tmp_path, *IF_FEEDS)


def test_large_constants_of_subgraphs_become_initializers_of_the_model(tmp_path: Path):
    model = parse_model(IF)
    for name in ("then_branch", "else_branch"):
        subgraph = find_branch(model, "If", name)
        subgraph.node.insert(0, helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(LARGE)))
    assert len(load(model).initializers) == 2
    check_cut(model, tmp_path, *IF_FEEDS)


def test_external_weights_of_subgraphs_stay_in_their_file(tmp_path: Path):
    model = parse_model(IF)
    for name in ("then_branch", "else_branch"):
        find_branch(model, "If", name).initializer.append(numpy_helper.from_array(LARGE, "w"))
    check_cut(model, tmp_path / "inside", *IF_FEEDS)
    path = tmp_path / "model.onnx"
    with (tmp_path / "data.bin").open("wb") as file:
        for name in ("then_branch", "else_branch"):
            tensor = find_branch(model, "If", name).initializer[0]
            external_data_helper.set_external_data(tensor, "data.bin", file.tell(), len(tensor.raw_data))
            file.write(tensor.raw_data)
            tensor.ClearField("raw_data")
    path.write_bytes(model.SerializeToString())
    assert all(t.data_location == TensorProto.EXTERNAL for t in load(path).initializers.values())
    bundle = compiled_with(path, RandomPlacement((0, 1)), tmp_path / "out", optimized=False)
    for tensor in onnx.load(bundle.file("segments/whole.onnx"), load_external_data=False).graph.initializer:
        assert tensor.data_location == TensorProto.EXTERNAL


def test_a_weight_that_a_subgraph_returns_stays_inside(tmp_path: Path):
    model = parse_model(
        """graph (float[300, 3] x, bool c) => (float[300, 3] y) {
            a = Neg(x)
            b = If(c) <
                then_branch = t () => (float[300, 3] w) { d = Mul(a, a) },
                else_branch = e () => (float[300, 3] v) { v = Add(a, a) }
            >
            y = Neg(b)
        }"""
    )
    find_branch(model, "If", "then_branch").initializer.append(numpy_helper.from_array(LARGE, "w"))
    assert not load(model).initializers
    check_cut(model, tmp_path, *IF_FEEDS)


def test_weights_of_nested_subgraphs_respect_scopes(tmp_path: Path):
    model = parse_model(
        """graph (float[300, 3] x, bool c) => (float[300, 3] y) {
            a = Neg(x)
            b = If(c) <
                then_branch = t () => (float[300, 3] u) {
                    m = Constant<value_int = 2>()
                    d = Loop(m, "", a) <body = body (int64 i, bool go, float[300, 3] v) => (bool on, float[300, 3] n) {
                        on = Identity(go)
                        n = Add(v, w)
                    }>
                    u = Sub(d, w)
                },
                else_branch = e () => (float[300, 3] v) { v = Identity(a) }
            >
            y = Neg(b)
        }"""
    )
    outer = find_branch(model, "If", "then_branch")
    outer.initializer.append(numpy_helper.from_array(LARGE, "w"))
    inner = next(a.g for n in outer.node if n.op_type == "Loop" for a in n.attribute)
    assert list(captured_names(inner)) == ["w"]
    check_cut(model, tmp_path, *IF_FEEDS)


def test_renaming_leaves_values_of_the_subgraph_alone():
    model = parse_model(
        """graph (float[2, 3] x, bool c) => (float[2, 3] y) {
            y = If(c) <
                then_branch = t () => (float[2, 3] u) { k = Neg(p) u = Add(k, q) },
                else_branch = e () => (float[2, 3] v) { q = Neg(p) v = Abs(q) }
            >
        }"""
    )
    rename_reads(model.graph.node[0], {"p": "P", "q": "Q"})
    assert list(captured_names(find_branch(model, "If", "then_branch"))) == ["P", "Q"]
    assert list(captured_names(find_branch(model, "If", "else_branch"))) == ["P"]


def test_nodes_inside_and_outside_of_subgraphs_get_different_names():
    loaded = load(
        parse_model(
            """graph (float[2, 3] x, bool c) => (float[2, 3] y) {
                [n] a = Neg(x)
                y = If(c) <
                    then_branch = t () => (float[2, 3] u) { [n] u = Neg(a) },
                    else_branch = e () => (float[2, 3] v) { [n] v = Abs(a) }
                >
            }"""
        )
    )
    inner = [item.name for node in loaded.nodes for a in node.attribute for item in a.g.node]
    names = [node.name for node in loaded.nodes] + inner
    assert len(set(names)) == len(names) == 4


# --- costs of subgraphs -------------------------------------------------------------------------------------------


def build_loop(iterations: int) -> Model:
    """Return a model of one Loop of Neg nodes."""
    return load(
        parse_model(
            f"""graph (float[2, 3] x) => (float[2, 3] y) <int64 m = {{{iterations}}}> {{
                y = Loop(m, "", x) <body = body (int64 i, bool go, float[2, 3] v) => (bool on, float[2, 3] n) {{
                    on = Identity(go)
                    n = Neg(v)
                }}>
            }}"""
        )
    )


def estimate_total_seconds(model: Model) -> float:
    return float(estimate_seconds(model, {}, "cpu/1").sum())


def test_a_loop_costs_its_subgraph_times_its_iterations():
    once = estimate_total_seconds(build_loop(1)) - estimate_total_seconds(build_loop(0))
    assert once > 0
    assert estimate_total_seconds(build_loop(100)) - estimate_total_seconds(build_loop(0)) == pytest.approx(100 * once)


def test_a_loop_of_unknown_length_has_a_limited_cost():
    assert estimate_total_seconds(build_loop(2**62)) < estimate_total_seconds(build_loop(MAX_ITERATIONS))


def test_an_if_costs_its_more_expensive_branch_with_captured_weights():
    def cost(weight: np.ndarray) -> float:
        model = parse_model(
            """graph (float[1000] x, bool c) => (float[n] y) {
                y = If(c) <
                    then_branch = t () => (float[n] u) { u = Add(x, w) },
                    else_branch = e () => (float[n] v) { v = Identity(x) }
                >
            }"""
        )
        model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
        return estimate_total_seconds(load(model))

    small, large = (cost(np.zeros(count, np.float32)) for count in (1, 1 << 20))
    assert large > 2 * small


def test_a_scan_costs_its_subgraph_for_each_slice():
    def cost(count: int) -> float:
        model = load(
            parse_model(
                f"""graph (float[{count}, 3] x, float[3] s) => (float[3] t, float[{count}, 3] y) {{
                    t, y = Scan<num_scan_inputs = 1, body = b (float[3] p, float[3] q) => (float[3] r, float[3] o) {{
                        r = Add(p, q)
                        o = Neg(q)
                    }}>(s, x)
                }}"""
            )
        )
        return float(estimate_seconds(model, {"x": (count, 3)}, "cpu/1").sum())

    assert cost(60) - cost(40) == pytest.approx(cost(40) - cost(20))
    assert cost(40) > 1.5 * cost(20)


# --- local functions: always inlined, so that they can be cut -----------------------------------------------------


CALLS = '<ir_version: 9, opset_import: ["": 18, "l": 1]>\n'


@pytest.mark.parametrize(
    ("functions", "path"),
    [
        ("f (p) => (q) { h = Neg(p) q = l.f(h) }", "l.f -> l.f"),
        ("f (p) => (q) { q = l.g(p) }|g (p) => (q) { q = l.f(p) }", "l.f -> l.g -> l.f"),
        (
            "f (p) => (q) { c = Constant<value = bool {1}>() q = If(c) <then_branch = t () => (u) { u = l.f(p) }, "
            "else_branch = e () => (v) { v = Neg(p) }> }",
            "l.f -> l.f",
        ),
    ],
)
def test_a_function_that_calls_itself_is_refused_with_the_path(functions: str, path: str):
    text = CALLS + "graph (float[2] x) => (float[2] y) { y = l.f(x) }"
    for function in functions.split("|"):
        text += f'\n<domain: "l", opset_import: ["": 18, "l": 1]> {function}'
    with pytest.raises(ModelError, match=path):
        load(parser.parse_model(text))


def test_nested_functions_with_subgraphs_and_other_opsets_are_cut(tmp_path: Path):
    model = parser.parse_model(
        CALLS
        + """graph (float[2, 3] x, bool c) => (float[2, 3] y) { a = l.outer(x, c) b = l.inner(a) y = Neg(b) }
        <domain: "l", opset_import: ["": 17]> inner (p) => (q) { h = Abs(p) q = Neg(h) }
        <domain: "l", opset_import: ["": 18, "l": 1]> outer (p, c) => (q) {
            h = l.inner(p)
            m = Constant<value_int = 2>()
            k = Loop(m, "", h) <body = body (int64 i, bool go, v) => (bool on, n) {
                on = Identity(go)
                n = If(c) <
                    then_branch = t () => (u) { u = l.inner(v) },
                    else_branch = e () => (w) { w = Sub(v, h) }
                >
            }>
            q = Add(k, p)
        }"""
    )
    check_cut(model, tmp_path, *({"x": X, "c": np.array(c)} for c in (True, False)))
    assert len(load(model).nodes) > 6


# --- the user's own placement -------------------------------------------------------------------------------------


def test_a_device_map_cannot_place_nodes_of_a_subgraph(tmp_path: Path):
    from onnxplace.driver.compile import compile_model

    model = parse_model(
        """graph (float[2, 3] x) => (float[2, 3] y) <int64 m = {3}> {
            [first] a = Neg(x)
            [loop] y = Loop(m, "", a) <body = body (int64 i, bool go, float[2, 3] v) => (bool on, float[2, 3] n) {
                [go_on] on = Identity(go)
                [inside] n = Neg(v)
            }>
        }"""
    )
    (tmp_path / "map.json").write_text(json.dumps({"inside": "cpu:1"}))
    steps = f"profile{{estimate=true}},coplace{{device_map={tmp_path / 'map.json'}}},m-etf,split,emit"
    with pytest.raises(UsageError, match="inside") as refused:
        compile_model(model, tmp_path / "out", devices="cpu:0,cpu:1", pipeline=steps)
    assert "loop" in str(refused.value)


# --- sparse weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linear", [True, False])
def test_sparse_weights_are_made_dense(tmp_path: Path, linear: bool):
    dense = np.zeros((2, 3), np.float32)
    dense[0, 1], dense[1, 2] = 5, -7
    model = parse_model("graph (float[2, 3] x) => (float[2, 3] y) { a = Neg(x) b = Mul(a, w) y = Neg(b) }")
    values = numpy_helper.from_array(np.array([5, -7], np.float32), "w")
    places = np.array([1, 5]) if linear else np.array([[0, 1], [1, 2]])
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(places, "places"), [2, 3])
    model.graph.sparse_initializer.append(sparse)
    np.testing.assert_array_equal(numpy_helper.to_array(load(model).initializers["w"]), dense)
    bundle = compiled_with(model, RandomPlacement((0, 1)), tmp_path)
    assert_same(run_together(bundle, [{"x": X}]), [[X * dense]])
    del model.graph.sparse_initializer[:]
    model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], sparse_value=sparse))
    np.testing.assert_array_equal(numpy_helper.to_array(load(model).initializers["w"]), dense)


def test_values_captured_by_a_subgraph_are_inputs_of_its_segment(tmp_path: Path):
    model = parse_model(
        """graph (float[2, 3] x, bool c) => (float[2, 3] y) {
            [one] a = Neg(x)
            [two] y = If(c) <
                then_branch = t () => (float[2, 3] u) { u = Abs(a) },
                else_branch = e () => (float[2, 3] v) { v = Sub(a, x) }
            >
        }"""
    )
    bundle = compiled_with(model, RandomPlacement((0, 1)), tmp_path, optimized=False)
    one, two = bundle.manifest.segments
    assert (one.device, two.device) == ("cpu:0", "cpu:1")
    assert set(two.inputs) == {"a", "c", "x"}
    assert bundle.manifest.values["a"].readers == (two.id,)
