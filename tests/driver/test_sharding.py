"""The decision between placing whole operators and splitting them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxplace.driver.candidates import Profiled, Strategy, create_pass, predict
from onnxplace.driver.compile import compile_model
from onnxplace.errors import InfeasibleError
from onnxplace.facts import Profile, Shards
from onnxplace.model.loading import load
from onnxplace.passes.sharding.apply import apply_sharding
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.problem import device_seconds, predict_step_seconds
from onnxplace.simulation.lower_bounds import bound_divisible_work
from onnxplace.state import State
from onnxplace.target.target import Device, Link, Target
from onnxplace.utils.quantities import format_milliseconds
from tests.conftest import branches
from tests.support.chains import mlp

pytestmark = pytest.mark.usefixtures("no_gpus", "work_here")

SPLIT = "shard{ways=2,exact=true},coplace{join=never},m-etf"


@pytest.fixture
def work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fast_target(*cores: int) -> Target:
    """Return CPU devices with these numbers of cores, between which exchanges cost almost nothing."""
    devices = tuple(
        Device(f"cpu:{index}", 1 << 30, cores=count, segment_seconds=1e-7, operations_per_second=1e9 * count)
        for index, count in enumerate(cores)
    )
    links = tuple(Link(a.id, b.id, 1e-7, 1e11) for a in devices for b in devices if a is not b)
    return Target(devices, links)


def compiled(model: onnx.ModelProto, target: Target, **options: object):
    return compile_model(model, "out", target=target, trial=False, force=True, costs=None, **options)  # type: ignore[arg-type]


def test_a_chain_is_split_where_that_is_shorter():
    result = compiled(mlp(), fast_target(64, 64))
    manifest = result.bundle.manifest
    assert manifest.sharding is not None
    assert manifest.predicted.step_seconds < 0.7 * manifest.predicted.single_device_seconds
    assert "shard" in manifest.pipeline
    (note,) = [note for note in result.diagnostics if note.code == "P062"]
    # The note has the times of the manifest, overhead of a request included.
    assert f"one device: {format_milliseconds(manifest.predicted.single_device_seconds)};" in note.message
    assert f": {format_milliseconds(manifest.predicted.step_seconds)}: kept sharding" in note.message


def test_independent_branches_of_equal_size_are_placed_not_split():
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    towers (float[96, 96] a, float[96, 96] b) => (float[96, 96] y)
    { a1 = MatMul(a, a) a2 = MatMul(a1, a1) a3 = MatMul(a2, a2)
      b1 = MatMul(b, b) b2 = MatMul(b1, b1) b3 = MatMul(b2, b2) y = Add(a3, b3) }""")
    result = compiled(model, fast_target(64, 64))
    assert result.bundle.manifest.sharding is None
    assert "shard" not in result.bundle.manifest.pipeline


def test_sharding_is_not_tried_where_whole_operators_already_share_the_work_evenly(monkeypatch):
    asked, shard_state = [], apply_sharding.shard_state
    monkeypatch.setattr("onnxplace.passes.shard.shard_state", lambda *given: asked.append(1) or shard_state(*given))
    compiled(mlp(), fast_target(64, 64))
    assert asked == [1]
    towers = """<ir_version: 8, opset_import: ["": 17]>
    towers (float[512, 512] a, float[512, 512] b) => (float[512, 512] y, float[512, 512] z)
    { a1 = MatMul(a, a) y = MatMul(a1, a1) b1 = MatMul(b, b) z = MatMul(b1, b1) }"""
    result = compiled(parser.parse_model(towers), fast_target(64, 64))
    assert asked == [1]
    assert not any(note.code in ("P062", "P064") for note in result.diagnostics)
    assert len({device.nodes for device in result.bundle.manifest.devices}) == 1


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_split_model_that_cannot_be_as_fast_as_it_has_to_is_not_placed(share):
    target = fast_target(64, 64)
    state, _ = Pipeline.parse("optimize,profile{estimate=true}").run(State(target).with_facts(load(mlp())))
    passes = Pipeline.parse("shard{ways=2,exact=true},coplace{join=never},m-etf,split").passes
    profiled = Profiled((), state, (), create_pass("emit"))
    strategy, steps = Strategy("split", "sharded", passes), list[str]()
    seconds = predict(strategy, profiled).step_seconds
    assert predict(replace(strategy, max_seconds=1.1 * seconds), profiled).step_seconds == seconds
    with pytest.raises(InfeasibleError, match="gains nothing"):
        predict(replace(strategy, max_seconds=share * seconds / 2), profiled, lambda name, *_: steps.append(name))
    assert steps == ["shard"]


@pytest.mark.parametrize("cores", [(64, 64), (96, 32), (8, 8, 8, 8)])
def test_no_split_model_takes_less_than_its_share_of_the_work(cores):
    target = fast_target(*cores)
    state, _ = Pipeline.parse("optimize,profile{estimate=true}").run(State(target).with_facts(load(mlp())))
    bound = bound_divisible_work(device_seconds(state[Profile], target), target.processors)
    split, _ = Pipeline.parse(f"shard{{ways={len(cores)},exact=true}},coplace{{join=never}},m-etf,split").run(state)
    assert split[Shards].ways == len(cores)
    assert bound <= predict_step_seconds(split)


def test_unlike_devices_get_parts_in_proportion_to_their_speed():
    result = compiled(mlp(), fast_target(96, 32))
    manifest = result.bundle.manifest
    assert manifest.sharding is not None
    compute = [device.compute_seconds for device in manifest.devices]
    assert max(compute) < 1.4 * min(compute)


def test_one_device_is_never_split():
    assert compiled(branches(), fast_target(4), shape={"batch": 4}).bundle.manifest.sharding is None


def test_options_that_say_how_to_place_turn_the_comparison_off():
    for options in ({"placer": "m-etf"}, {"device_map": {".*": "cpu:0"}}, {"objective": "throughput"}):
        result = compiled(mlp(), fast_target(64, 64), **options)
        assert result.bundle.manifest.sharding is None
        assert not any(note.code == "P062" for note in result.diagnostics)


def test_throughput_with_ways_makes_stages_of_split_operators():
    result = compiled(mlp(), fast_target(8, 8, 8, 8), objective="throughput", shard=2)
    sharding = result.bundle.manifest.sharding
    assert sharding is not None
    assert (sharding.ways, sharding.stages) == (2, 2)


def test_a_model_without_split_operators_is_noted():
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    small (float[2] x) => (float[2] y) { y = Relu(x) }""")
    result = compiled(model, fast_target(4, 4), shard=2)
    assert any(note.code == "P064" for note in result.diagnostics)
    assert Path("out").is_dir()


def test_the_placers_of_parts_that_have_their_devices_are_not_listed():
    assert not any(note.code == "P040" for note in compiled(mlp(), fast_target(64, 64)).diagnostics)


def test_expensive_operators_that_stay_whole_are_named():
    model = mlp()
    # Along an axis that only the caller knows, a cumulative sum cannot be split.
    model.graph.input.append(onnx.helper.make_tensor_value_info("axis", onnx.TensorProto.INT64, []))
    sums = [
        onnx.helper.make_node("CumSum", [f"s{index}", "axis"], [f"s{index + 1}"], name=f"sum{index}")
        for index in range(40)
    ]
    model.graph.node.insert(0, onnx.helper.make_node("Identity", ["x"], ["s0"], name="begin"))
    for index, node in enumerate(sums):
        model.graph.node.insert(1 + index, node)
    first = next(node for node in model.graph.node if node.name == "layer0_up")
    first.input[0] = "s40"
    notes = [note for note in compiled(model, fast_target(64, 64)).diagnostics if note.code == "P061"]
    assert len(notes) == 1
    assert "CumSum" in notes[0].message


def test_stages_of_split_operators_around_a_whole_one_are_not_contiguous():
    # Along an axis that only the caller knows, a cumulative sum cannot be split: values run to it and back.
    model = mlp()
    model.graph.input.append(onnx.helper.make_tensor_value_info("axis", onnx.TensorProto.INT64, []))
    index = len(model.graph.node) // 2
    hidden = model.graph.node[index].input[0]
    model.graph.node.insert(index, onnx.helper.make_node("CumSum", [hidden, "axis"], ["sums"], name="sums"))
    model.graph.node[index + 1].input[0] = "sums"
    feeds = {"x": np.zeros((128, 512), np.float32), "axis": np.array(1)}
    shard = "shard{ways=2,stages=1,exact=true}"
    steps = f"optimize,profile{{estimate=true}},{shard},coplace,fuse,stages,split,emit"
    result = compiled(model, fast_target(8, 8), pipeline=steps, inputs=feeds)
    assert result.bundle.manifest.sharding is not None
    (note,) = [note for note in result.diagnostics if note.code == "P021"]
    assert "not necessarily contiguous" in note.message


def test_a_cache_whose_length_has_no_name_is_split_by_heads(run_cli):
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    decode (float[1, 4, N, 8] x, float[1, 4, past, 8] cache) => (float[1, 4, N, 8] y, float[1, 4, all, 8] grown)
    { grown = Concat<axis = 2>(cache, x) turned = Transpose<perm = [0, 1, 3, 2]>(grown) scores = MatMul(x, turned)
      weights = Softmax<axis = -1>(scores) y = MatMul(weights, grown) }""")
    for value in (model.graph.input[1], model.graph.output[1]):
        value.type.tensor_type.shape.dim[2].Clear()
    sizes, pipeline = {"N": 1, "cache.2": 4096}, f"optimize,profile{{estimate=true}},{SPLIT},split,emit"
    options = {"shape": sizes, "state": {"grown": "cache"}, "pipeline": pipeline}
    manifest = compiled(model, fast_target(64, 64), **options).bundle.manifest
    assert [state.axis for state in manifest.sharding.states] == [1]
    assert dict(manifest.dimensions) == sizes
    result = run_cli("verify", "out")
    assert result.code == 0, result
    assert "cache.2=8192" in result.out
