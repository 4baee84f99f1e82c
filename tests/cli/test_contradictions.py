"""Device maps, `--colocate` and states that contradict each other or name removed nodes."""

import json

import onnx
import pytest
from onnx import parser

from onnxplace.errors import MAX_LISTED
from onnxplace.model.loading import load
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.target import Device, Target
from tests.conftest import FAST_PIPELINE

FOLDED = """
<ir_version: 8, opset_import: ["": 17]>
g (float[2] x) => (float[2] y)
<float[1] one = {1}>
{
    [twice] two = Add(one, one)
    [unread] dead = Neg(x)
    [first] a = Mul(x, two)
    [last] y = Relu(a)
}
"""


@pytest.fixture
def folded(tmp_path):
    """A model of which `optimize` removes the nodes `twice` and `unread`."""
    onnx.save(parser.parse_model(FOLDED), tmp_path / "folded.onnx")
    return tmp_path / "folded.onnx"


CALLING = """
<ir_version: 8, opset_import: ["": 17, "own": 1]>
g (float[2] x) => (float[2] y)
{
    [one] c = Constant <value = float[1] {1}> ()
    [call] a = own.Twice(x)
    [last] y = Add(a, c)
}
<opset_import: ["": 17], domain: "own">
Twice (u) => (v) { [inner] v = Add(u, u) }
"""


@pytest.fixture
def compile_with(run_cli, tmp_path):
    """Compile for two devices with more options, a device map among them."""

    def run(model, *options, device_map=None):
        if device_map is not None:
            (tmp_path / "map.json").write_text(json.dumps(device_map))
            options = (*options, "--device-map", tmp_path / "map.json")
        all_options = ("--devices", "cpu:0,cpu:1", "--no-trial", "--force", *options)
        return run_cli("compile", model, "-o", tmp_path / "out", *all_options)

    return run


def test_a_device_map_may_name_nodes_that_optimisation_removed(compile_with, folded, tmp_path):
    result = compile_with(folded, device_map={"twice": "cpu:1", "un.*": "cpu:1", "first": "cpu:1"})
    assert result.code == 0, result.err
    (note,) = [line for line in result.err.splitlines() if "U025" in line]
    assert note.startswith(f"note[U025] {tmp_path / 'map.json'}: only nodes that were removed (")
    assert "'twice' ('twice'), 'un.*' ('unread')" in note
    assert "'first'" not in note


@pytest.mark.parametrize("name", ["one", "call"])
def test_constants_and_calls_of_functions_count_as_removed(compile_with, tmp_path, name):
    onnx.save(parser.parse_model(CALLING), tmp_path / "calling.onnx")
    for options in ({"device_map": {name: "cpu:1"}}, {"device_map": {}, "colocate": name}):
        colocate = ("--colocate", options["colocate"]) if "colocate" in options else ()
        result = compile_with(tmp_path / "calling.onnx", *colocate, device_map=options["device_map"])
        assert result.code == 0, result.err
        assert f"match {name!r} ({name!r}): no effect" in result.err
    result = compile_with(tmp_path / "calling.onnx", device_map={"nothing": "cpu:1"})
    assert result.code == 2
    assert "hint: names look like" in result.err


def test_colocated_nodes_may_be_among_those_that_optimisation_removed(compile_with, folded):
    result = compile_with(folded, "--colocate", "twice|unread", "--colocate", "first|twice")
    assert result.code == 0, result.err
    assert "note[U025] --colocate: only nodes that were removed (" in result.err
    assert "match 'twice|unread' ('twice')" in result.err
    assert "first" not in result.err


@pytest.mark.parametrize("options", [("--colocate", "nowhere")])
def test_a_pattern_without_any_node_is_refused(compile_with, folded, options):
    result = compile_with(folded, *options)
    assert (result.code, result.err.partition("]")[0]) == (2, "error[U020")
    result = compile_with(folded, device_map={"twice": "cpu:0", "nowhere": "cpu:0"})
    assert result.code == 2
    assert "no node is left for 'nowhere'\n" in result.err


def test_a_pattern_whose_nodes_matched_earlier_patterns_is_refused(compile_with, folded):
    result = compile_with(folded, device_map={".*": "cpu:0", "first": "cpu:1"})
    assert "error[U020]" in result.err
    assert "no node is left for 'first'" in result.err


def test_a_second_optimisation_remembers_removed_nodes():
    target = Target((Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30)))
    state = State(target).with_facts(load(parser.parse_model(FOLDED)))
    steps = FAST_PIPELINE.removesuffix(",m-etf,split,emit").replace(
        "never}", 'never,device_map="{\\"twice\\": \\"cpu:1\\"}"}'
    )
    done = Pipeline.parse(f"optimize,{steps}").run(state)[0]
    assert "U025" in {note.code for note in done.diagnostics}


def test_all_contradictions_between_patterns_and_a_device_map_are_listed(compile_with, model_file):
    result = compile_with(
        model_file, "--shape", "batch=4", "--colocate", "left|right", "--colocate", "relu|tanh",
        device_map={"left|relu": "cpu:0", "right|tanh": "cpu:1"},
    )  # fmt: skip
    assert result.code == 2
    assert "error[U021] --colocate:" in result.err
    assert "'left|right', with 'right'; 'relu|tanh', with 'tanh'" in result.err


def states_model(count: int) -> onnx.ModelProto:
    """Return a model whose states `s0`, `s1`, ... are each made by one node and read by another."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    names = [f"s{number}" for number in range(count)]
    nodes = [helper.make_node("Neg", [name], [f"{name}_mid"], name=f"read_{name}") for name in names]
    nodes += [helper.make_node("Relu", [f"{name}_mid"], [f"{name}_next"], name=f"make_{name}") for name in names]
    inputs = [helper.make_tensor_value_info(name, kind, [2]) for name in names]
    outputs = [helper.make_tensor_value_info(f"{name}_next", kind, [2]) for name in names]
    graph = helper.make_graph(nodes, "states", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("count", [2, MAX_LISTED + 3])
def test_all_states_that_a_device_map_separates_are_listed(compile_with, tmp_path, count):
    onnx.save(states_model(count), tmp_path / "states.onnx")
    device_map = {"read_.*": "cpu:0", "make_.*": "cpu:1"}
    result = compile_with(tmp_path / "states.onnx", "--state", "*_next=*", device_map=device_map)
    assert result.code == 2
    assert result.err.count("stays on one device") == min(count, MAX_LISTED)
    assert "state 's0_next' = 's0'" in result.err
    assert "state 's1_next' = 's1'" in result.err
    assert ("and 3 more" in result.err) == (count > MAX_LISTED)
