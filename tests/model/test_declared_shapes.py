"""Shapes that a file declares: sizes of values of which inference finds none."""

from pathlib import Path

import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, parser

from onnxplace.facts import Profile
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind, list_declared_shapes
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.target import Device, Target
from tests.support.commands import only_json

# How many turns there are, and so the size of what they collect, depends on the request.
LOOP = """<ir_version: 9, opset_import: ["": 18]>
g (float[b, 64] x, int64 n) => (float[t, b, 64] y) <bool go = {1}, DECLARED> {
    [start] s = Relu (x)
    [loop] last, all = Loop (n, go, s) <body = body (int64 i, bool c, float[p, q] state)
        => (bool d, float[p, q] next, float[p, q] turn) {
        d = Identity (c)
        next = Tanh (state)
        turn = Neg (next)
    }>
    [after] behind = Abs (all)
    [end] y = Exp (behind)
}"""
RIGHT = "float[4, b, 64] all, float[4, b, 64] behind"


def model(declared: str = RIGHT) -> ModelProto:
    return parser.parse_model(LOOP.replace("DECLARED", declared))


def estimated(proto: ModelProto) -> tuple[dict[str, int], list[str]]:
    """Return the bytes of values, and the codes of notes, without a measurement."""
    state = State(Target((Device("cpu:0", 1 << 30),))).with_facts(bind(load(proto), {"b": 2}, {}))
    after, _ = Pipeline.parse("profile{estimate=true}").run(state)
    graph = after[Profile].graph
    return dict(zip(graph.value_names, graph.value_bytes.tolist())), [note.code for note in after.diagnostics]


def test_what_a_loop_collects_has_the_size_that_the_file_declares():
    sizes, codes = estimated(model())
    assert (sizes["all"], sizes["behind"]) == (4 * 2 * 64 * 4,) * 2
    assert "C002" not in codes


def test_without_a_declaration_the_size_is_unknown():
    sizes, codes = estimated(model("float[b, 64] last"))
    assert sizes["all"] == 0
    assert "C002" in codes


def test_costs_of_nodes_follow_from_declared_sizes(tmp_path: Path):
    def seconds(proto: ModelProto) -> float:
        state = State(Target((Device("cpu:0", 1 << 30),))).with_facts(bind(load(proto), {"b": 2}, {}))
        profile = Pipeline.parse("profile{estimate=true}").run(state)[0][Profile]
        return float(profile.seconds["cpu/1"][profile.graph.names.index("after")])

    assert seconds(model("float[4000, b, 64] all, float[4000, b, 64] behind")) > 2 * seconds(model())


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param("[4, 3, 64]", id="another batch than is bound"),
        pytest.param("[2, 32]", id="other sizes"),
        pytest.param("[128]", id="another rank"),
        pytest.param("[2, 64, 1]", id="one axis more"),
        pytest.param("[]", id="a number"),
        pytest.param("[b, other]", id="a symbol without a size"),
        pytest.param("[1048576, 1048576, 1048576]", id="impossible"),
    ],
)
def test_declarations_that_cannot_be_are_left_out(shape: str):
    # Inference finds [b, 64] for the result of Relu.
    declared = list_declared_shapes(bind(load(model(f"float{shape} s")), {"b": 2}, {}))
    assert "s" not in declared
    sizes, _ = estimated(model(f"float{shape} s"))
    assert sizes["s"] == 2 * 64 * 4


def test_an_impossible_size_of_what_nothing_infers_is_left_out():
    sizes, codes = estimated(model("float[1048576, 1048576, 1048576] all"))
    assert sizes["all"] == 0
    assert "C002" in codes


def test_declarations_of_no_value_do_no_harm():
    proto = model()
    proto.graph.value_info.append(helper.make_tensor_value_info("none", TensorProto.FLOAT, [3]))
    proto.graph.value_info.append(helper.make_tensor_sequence_value_info("odd", TensorProto.FLOAT, None))
    proto.graph.value_info.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [9, 9]))
    assert estimated(proto) == estimated(model())


def test_compile_without_measuring_takes_them(run_cli, tmp_path: Path):
    onnx.save(model(), tmp_path / "m.onnx")
    compiled = run_cli(
        "compile", tmp_path / "m.onnx", "--shape", "b=2", "--effort", "low", "--devices", "cpu:0,cpu:1", "--json"
    )
    codes = [note["code"] for note in only_json(compiled)["diagnostics"]]
    assert "C002" not in codes
