"""`onnxplace infer-specs`: specifications of a few nodes, completed to those of the whole model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, external_data_helper, parser

from light_models import light_model
from onnxplace.driver.compile import compile_model
from onnxplace.errors import InfeasibleError, InputError
from onnxplace.model.device_metadata import read_device_metadata
from onnxplace.passes.sharding.apply.sharding_specs import read_layout
from onnxplace.passes.sharding.rules.layouts import REPLICATED, Division, Layout
from onnxplace.target.target import Device, Target
from onnxplace_formats.spec_inference import choose_layouts, infer_specs
from tests.support.annotated_models import annotate_nodes, list_specs, save_annotated, strip_nodes
from tests.support.chains import mlp
from tests.support.random_models import run_plain
from transformer import transformer

PIPELINE = "optimize,profile{estimate=true},shard{ways=%d,exact=true,metadata=true},coplace,m-etf,split,emit"
MODELS: dict[str, tuple[Callable[[], ModelProto], dict[str, int]]] = {
    "transformer": (lambda: transformer(layers=2, hidden=64, heads=4, vocab=50, positions=64), {"batch": 4, "seq": 64}),
    "mlp": (mlp, {}),
    "convnet": (lambda: light_model("squeezenet", seed=0), {}),
}
TANH = """
<ir_version: 11, opset_import: ["": 18]>
g (float[N, 512] x, float[512, 2048] w, float[2048, 512] v) => (float[N, 512] y)
{ [up] h = MatMul(x, w) [act] a = Tanh(h) [down] d = MatMul(a, v) [out] y = Relu(d) }
"""


def make_target(devices: int, memory_bytes: int = 1 << 40) -> Target:
    return Target(tuple(Device(f"cpu:{index}", memory_bytes) for index in range(devices)))


def infer(model: ModelProto, folder: Path, **options: object) -> ModelProto:
    """Return the completed model."""
    onnx.save(model, folder / "few.onnx")
    infer_specs(folder / "few.onnx", folder / "all.onnx", force=True, **options)  # type: ignore[arg-type]
    onnx.checker.check_model(folder / "all.onnx")
    return onnx.load(folder / "all.onnx")


def list_all(model: ModelProto) -> dict[str, dict[str, bytes]]:
    return {node.name: list_specs(node) for node in model.graph.node}


# ------------------------------------------------------------------------------------------------- what plans were


@pytest.fixture(scope="module", params=[(name, ways) for name in MODELS for ways in (2, 4)], ids=str)
def planned(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelProto, Target, dict]:
    """A model with the layouts of a plan, the devices that it is for, and its sizes."""
    name, ways = request.param
    build, sizes = MODELS[name]
    folder, target, model = tmp_path_factory.mktemp("planned"), make_target(ways), build()
    options = {"shape": sizes, "pipeline": PIPELINE % ways, "trial": False}
    bundle = compile_model(model, folder / "bundle", target=target, **options).bundle
    # The bundle's own copy also has nodes that put its weights together from their parts.
    whole = onnx.load(bundle.path / "segments" / "whole.onnx")
    layouts = {node.name: node.device_configurations for node in whole.graph.node}
    for node in model.graph.node:
        node.device_configurations.extend(layouts.get(node.name, ()))
    model.configuration.extend(whole.configuration)
    model.ir_version = whole.ir_version
    return model, target, sizes


def list_given(model: ModelProto, kinds: tuple[str, ...] = ()) -> list[str]:
    """Return the nodes that have specifications, those of some operators if these are named."""
    return [node.name for node in model.graph.node if list_specs(node) and (not kinds or node.op_type in kinds)]


def test_products_give_the_layouts_of_the_plan(planned, tmp_path):
    model, target, sizes = planned
    given = list_given(model, ("MatMul", "Gemm", "Conv"))
    completed = infer(strip_nodes(model, given), tmp_path, target=target, shape=sizes)
    assert 0 < len(given) < len(list_given(model)) / 2
    assert list_all(completed) == list_all(model)


def test_any_nodes_keep_what_they_have_and_all_get_what_they_lack(planned, tmp_path):
    model, target, sizes = planned
    before = list_all(model)
    for seed in range(2):
        given = {name for name in list_given(model) if Random(f"{seed} {name}").random() < 0.2}
        completed = list_all(infer(strip_nodes(model, given), tmp_path, target=target, shape=sizes))
        assert {name: completed[name] for name in given} == {name: before[name] for name in given}
        assert completed.keys() == before.keys()
        # Nodes of summands alone, or of rows that are not valid, have none: ONNX cannot express these.
        assert len(list(filter(None, completed.values()))) >= 0.9 * len(completed)


def test_a_plan_is_completed_to_one_as_good(planned, tmp_path):
    model, target, sizes = planned
    names, seconds = list_given(model), []
    for count in (1, len(names) // 3, len(names)):
        onnx.save(strip_nodes(model, names[:count]), tmp_path / "few.onnx")
        given = read_device_metadata(tmp_path / "few.onnx").sharded
        _, choice = choose_layouts(tmp_path / "few.onnx", given, target, sizes)
        seconds.append(choice.choice.seconds)
    # All of them is the plan itself, and what is best with fewer is never worse.
    assert seconds == pytest.approx([seconds[-1]] * 3)


# -------------------------------------------------------------------------------------------------------- what is given


def read_layouts(node: NodeProto, shapes: dict[str, list[int]], devices: int = 2) -> dict[str, Layout | str]:
    division = Division((1.0,) * devices)
    (entry,) = node.device_configurations
    return {spec.tensor_name: read_layout(spec, shapes[spec.tensor_name], division) for spec in entry.sharding_spec}


WIDE, NARROW = [8192, 2048], [8192, 512]
SHAPES = {"x": NARROW, "w": [512, 2048], "v": [2048, 512], "h": WIDE, "a": WIDE, "d": NARROW, "y": NARROW}
COLUMNS, ROWS = Layout(1, 1, 2), Layout(0, 1, 2)


def test_one_weight_lays_out_the_block_around_it(tmp_path):
    model = infer(annotate_nodes(parser.parse_model(TANH), {"up": {"w": 1}}), tmp_path, shape={"N": 8192})
    up, act, down, _ = model.graph.node
    assert read_layouts(up, SHAPES) == {"x": REPLICATED, "w": COLUMNS, "h": COLUMNS}
    assert read_layouts(act, SHAPES) == {"h": COLUMNS, "a": COLUMNS}
    # Its result is a summand on each device, which ONNX cannot express.
    assert read_layouts(down, SHAPES) == {"a": COLUMNS, "v": ROWS}


def test_what_is_given_stays_to_the_byte_and_the_rest_of_the_file_too(tmp_path):
    given = annotate_nodes(parser.parse_model(TANH), {"up": {"w": 1}, "down": {"v": 0, "d": None}})
    given.graph.doc_string, given.producer_name = "text", "me"
    given.graph.node[1].metadata_props.add(key="mine", value="1")
    given.graph.node[0].device_configurations[0].pipeline_stage = 0
    completed = infer(given, tmp_path, shape={"N": 8192})
    for before, after in zip(given.graph.node, completed.graph.node):
        assert list_specs(before).items() <= list_specs(after).items()
    assert completed.graph.node[0].device_configurations[0].HasField("pipeline_stage")
    for model in (given, completed):
        for node in model.graph.node:
            del node.device_configurations[:]
    assert given == completed


def test_all_layouts_whole_give_whole_layouts(tmp_path):
    given = annotate_nodes(parser.parse_model(TANH), {"up": {"x": None, "w": None, "h": None}})
    completed = infer(given, tmp_path, shape={"N": 1}, target=make_target(2))
    assert {layout for node in completed.graph.node for layout in read_layouts(node, SHAPES).values()} == {REPLICATED}


def test_nodes_whose_values_onnx_cannot_express_are_named(tmp_path):
    model = parser.parse_model(TANH.replace("Relu", "Identity"))
    save_annotated(tmp_path / "few.onnx", model, {"up": {"w": 1}})
    result = infer_specs(tmp_path / "few.onnx", tmp_path / "all.onnx", shape={"N": 8192})
    bare = [node.name for node in onnx.load(tmp_path / "all.onnx").graph.node if not list_specs(node)]
    assert bare == ["out"]
    text = "1 node got none, such as 'out': ONNX has no words for summands, nor for rows that are not valid"
    assert text in [note.message for note in result.diagnostics]


def test_constants_and_unnamed_nodes_get_layouts_and_calls_of_functions_a_note(tmp_path):
    model = parser.parse_model("""
    <ir_version: 11, opset_import: ["": 18, "f": 1]>
    g (float[4, 8] x, float[8, 16] w) => (y)
    { s = Constant <value = float[1] {2.0}> () t = Neg(s) h = MatMul(x, w) b = f.act(h) y = Mul(b, t) }
    <domain: "f", opset_import: ["": 18]> act (v) => (r) { r = Tanh(v) }
    """)
    model.graph.node[2].name = "up"
    onnx.save(annotate_nodes(model, {"up": {"w": 1}}), tmp_path / "few.onnx")
    result = infer_specs(tmp_path / "few.onnx", tmp_path / "all.onnx")
    assert (result.given, result.completed, result.devices) == (1, 3, 2)
    assert "1 call of functions got none, such as 'act'" in [note.message for note in result.diagnostics]
    completed = onnx.load(tmp_path / "all.onnx")
    shapes = {"s": [1], "t": [1], "h": [4, 16], "b": [4, 16], "x": [4, 8], "w": [8, 16], "y": [4, 16]}
    constant, negative, up, call, last = completed.graph.node
    assert read_layouts(constant, shapes) == {"s": REPLICATED}
    assert read_layouts(negative, shapes) == {"s": REPLICATED, "t": REPLICATED}
    assert read_layouts(up, shapes)["h"] == COLUMNS
    assert not call.device_configurations
    assert read_layouts(last, shapes)["t"] == REPLICATED


def test_an_entry_of_a_misspelt_configuration_is_completed_itself(tmp_path):
    """Once, the node got a second entry, with layouts of its own."""
    given = annotate_nodes(parser.parse_model(TANH), {"up": {"w": 1}})
    given.graph.node[0].device_configurations[0].configuration_id = "mien"
    completed = infer(given, tmp_path, shape={"N": 8192})
    assert read_layouts(completed.graph.node[0], SHAPES) == {"x": REPLICATED, "w": COLUMNS, "h": COLUMNS}


@pytest.mark.parametrize("group", [[1], [0, 2]])
def test_all_values_of_a_node_on_some_of_the_devices_are_there(group, tmp_path):
    """Once, the others were on all devices, so that the result was refused as a map, and by this command."""
    model = annotate_nodes(parser.parse_model(TANH), {"up": {"x": None, "w": None, "h": None}, "act": {"a": None}}, 3)
    model.graph.node[1].device_configurations[0].sharding_spec[0].index_to_device_group_map[0].value[:] = group
    completed = infer(model, tmp_path, shape={"N": 64})
    placed = read_device_metadata(tmp_path / "all.onnx")
    assert [*placed.sharded["act"].devices] == group
    assert {*list_specs(completed.graph.node[1])} == {"h", "a"}
    assert infer(completed, tmp_path, shape={"N": 64}) == completed


def test_what_does_not_count_is_noted(tmp_path):
    model = parser.parse_model("""
    <ir_version: 11, opset_import: ["": 18, "f": 1]>
    g (float[4, 8] x, float[8, 16] w, bool c) => (y)
    { [up] h = MatMul(x, w) [call] b = f.act(h)
      y = If(c) <then_branch = t () => (p) { [inner] p = Tanh(b) }, else_branch = e () => (q) { q = Relu(b) }> }
    <domain: "f", opset_import: ["": 18]> act (v) => (r) { r = Tanh(v) }
    """)
    model = annotate_nodes(model, {"up": {"w": 1}, "call": {"h": 1}})
    inner = model.graph.node[2].attribute[0].g.node[0]
    inner.device_configurations.extend(model.graph.node[1].device_configurations)
    onnx.save(model, tmp_path / "few.onnx")
    result = infer_specs(tmp_path / "few.onnx", tmp_path / "all.onnx")
    text = "those of 2 nodes in subgraphs, or calls of functions, do not count, such as of 'inner'"
    assert text in [note.message for note in result.diagnostics]


def test_a_model_of_which_no_operator_is_shared_is_refused(tmp_path):
    model = annotate_nodes(parser.parse_model(TANH), {"up": {"h": None}}, 1)
    model.configuration[0].num_devices = 2
    onnx.save(model, tmp_path / "few.onnx")
    with pytest.raises(InputError, match="on 1 device at most, and configuration 'mine' has 2") as caught:
        infer_specs(tmp_path / "few.onnx", tmp_path / "all.onnx", shape={"N": 8192})
    assert "names several devices" in (caught.value.hint or "")


def test_a_model_without_a_configuration_is_refused(tmp_path):
    model = annotate_nodes(parser.parse_model(TANH), {"up": {"w": 1}})
    del model.configuration[:]
    onnx.save(model, tmp_path / "few.onnx")
    with pytest.raises(InputError, match="the model has no device configuration") as caught:
        infer_specs(tmp_path / "few.onnx", tmp_path / "all.onnx", shape={"N": 8192})
    assert caught.value.code == "U023"


def test_a_map_of_the_result_is_the_choice_that_was_made(tmp_path):
    infer(annotate_nodes(mlp(), {"layer0_up": {"w0": 0}}), tmp_path, target=make_target(2))
    for name in ("few.onnx", "all.onnx"):
        options = PIPELINE.replace("metadata=true", f'map="{tmp_path / name}"') % 2
        bundle = compile_model(mlp(), tmp_path / name[:3], target=make_target(2), pipeline=options, trial=False).bundle
        assert bundle.manifest.sharding is not None
    first, second = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("few", "all"))
    assert first["sharding"] == second["sharding"]


@pytest.mark.parametrize("devices", [(), (0, 1)])
def test_what_onnx_ir_shards_is_completed_and_its_checker_accepts_the_result(devices, tmp_path):
    ir: Any = pytest.importorskip("onnx_ir", minversion="1.0", reason="the extra [dev] has it")
    model = ir.from_proto(parser.parse_model(TANH))
    product = model.graph[0]
    pair = model.add_device_configuration("pair", device_names=("cuda:0", "cuda:1"))
    product.shard(product.inputs[1], configuration=pair, axis=-1, num_shards=2, device_indices=devices)
    ir.save(model, tmp_path / "few.onnx")
    result = infer_specs(tmp_path / "few.onnx", tmp_path / "all.onnx", shape={"N": 8192})
    assert (result.given, result.completed) == (1, 3)
    completed = ir.load(tmp_path / "all.onnx")
    assert ir._multi_device._check_device_configurations(completed) == []
    down = completed.graph[2]
    (spec,) = down.sharding_of(down.inputs[1])
    assert [dimension.axis for dimension in spec.sharded_dims] == [0]


# --------------------------------------------------------------------------------------------------------------- files


def save_outside(folder: Path) -> Path:
    """Write a model whose weights are in a file of their own, in a folder; return its path."""
    folder.mkdir(parents=True)
    model = annotate_nodes(mlp(), {"layer0_up": {"w0": 1}})
    external_data_helper.convert_model_to_external_data(model, location="weights.bin")
    onnx.save(model, folder / "few.onnx")
    return folder / "few.onnx"


def test_weights_of_a_file_stay_there_in_the_same_folder_and_are_copied_to_another_one(tmp_path):
    few = save_outside(tmp_path / "model")
    (tmp_path / "other").mkdir()
    feeds = {"x": np.ones((128, 512), np.float32)}
    expected = run_plain(few, [feeds])[0]
    for output in (few.parent / "all.onnx", tmp_path / "other" / "all.onnx"):
        infer_specs(few, output)
        assert all(np.array_equal(*pair) for pair in zip(run_plain(output, [feeds])[0], expected, strict=True))
        assert (output.parent / "weights.bin").read_bytes() == (few.parent / "weights.bin").read_bytes()
        assert output.stat().st_size < 1 << 16
    assert sorted(path.name for path in few.parent.iterdir()) == ["all.onnx", "few.onnx", "weights.bin"]


def test_a_result_in_place_of_weights_is_refused_with_force_too(tmp_path):
    """Once, the model replaced its own weights."""
    few = save_outside(tmp_path / "model")
    (tmp_path / "other").mkdir()
    before = few.with_name("weights.bin").read_bytes()
    for folder, words in ((few.parent, "which is read"), (tmp_path / "other", "are copied to a file of this name")):
        with pytest.raises(InputError, match=words) as caught:
            infer_specs(few, folder / "weights.bin", force=True)
        assert caught.value.code == "U032"
    assert few.with_name("weights.bin").read_bytes() == before
    assert not [*(tmp_path / "other").iterdir()]


def test_only_the_file_that_weights_are_read_from_is_copied(tmp_path):
    """Of two locations the last one counts. Once, the first one was copied too, from and to folders outside."""
    few = save_outside(tmp_path / "in" / "model")
    model = onnx.load(few, load_external_data=False)
    for tensor in model.graph.initializer:
        entries = [*tensor.external_data]
        del tensor.external_data[:]
        tensor.external_data.add(key="location", value="../secret")
        tensor.external_data.extend(entries)
    onnx.save(model, few)
    (tmp_path / "in" / "secret").write_text("secret")
    (tmp_path / "out" / "model").mkdir(parents=True)
    infer_specs(few, tmp_path / "out" / "model" / "all.onnx")
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == ["all.onnx", "model", "weights.bin"]


def test_weights_that_would_be_overwritten_are_refused_without_force(tmp_path):
    few = save_outside(tmp_path / "model")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "weights.bin").write_text("mine")
    with pytest.raises(InputError, match="already exists") as caught:
        infer_specs(few, tmp_path / "other" / "all.onnx")
    assert caught.value.code == "U030"
    assert (tmp_path / "other" / "weights.bin").read_text() == "mine"
    assert not (tmp_path / "other" / "all.onnx").exists()
    infer_specs(few, tmp_path / "other" / "all.onnx", force=True)
    assert len(run_plain(tmp_path / "other" / "all.onnx", [{"x": np.ones((128, 512), np.float32)}])) == 1


def test_omitted_results_are_nobodys(tmp_path):
    model = parser.parse_model("""
    <ir_version: 11, opset_import: ["": 18]>
    g (float[64, 8] x, float[8, 16] w) => (float[64, 16] y, float[64, 16] z)
    { [up] h = MatMul(x, w) [first] y = Dropout(h) [second] z = Dropout(y) }
    """)
    for node in model.graph.node[1:]:
        node.output.append("")
    model = infer(annotate_nodes(model, {"up": {"x": 0}}), tmp_path, target=make_target(2))
    assert [{*list_specs(node)} for node in model.graph.node] == [{"x", "w", "h"}, {"h", "y"}, {"y", "z"}]


def test_a_file_may_have_any_name(tmp_path):
    path = save_annotated(tmp_path / "few.model", parser.parse_model(TANH), {"up": {"w": 1}})
    assert infer_specs(path, tmp_path / "all.model", shape={"N": 8192}).completed == 3


def test_a_model_beyond_the_devices_is_refused(tmp_path):
    path = save_annotated(tmp_path / "few.onnx", mlp(), {"layer0_up": {"w0": 1}})
    with pytest.raises(InfeasibleError, match="the model does not fit"):
        infer_specs(path, tmp_path / "all.onnx", target=make_target(2, memory_bytes=1 << 10))
    assert not (tmp_path / "all.onnx").exists()


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_command_says_what_it_inferred(run_cli):
    save_annotated(Path("few.onnx"), parser.parse_model(TANH), {"up": {"w": 1}})
    result = run_cli("infer-specs", "few.onnx", "-o", "all.onnx", "--shape", "N=8192")
    assert result.code == 0
    assert "all.onnx: specifications of 1 node were given, 3 more nodes have some now" in result.out
    assert "MatMul    summed axis" in result.out
    assert "estimated step on 2 devices: " in result.out
    assert set(read_device_metadata(Path("all.onnx")).sharded) == {"up", "act", "down", "out"}
    assert "got none" not in result.err


def test_json_holds_the_result(run_cli):
    save_annotated(Path("few.onnx"), parser.parse_model(TANH), {"up": {"w": 1}})
    for options in ((), ("--machine", "2xL4"), ("--devices", "cpu:0,cpu:1")):
        result = run_cli(
            "infer-specs", "few.onnx", "-o", "all.onnx", "--shape", "N=8192", "--json", "--force", *options
        )
        data = json.loads(result.out)
        assert set(data) == {"output", "devices", "given", "completed", "step_seconds", "kinds", "diagnostics"}
        assert (data["output"], data["devices"], data["given"]) == ("all.onnx", 2, 1)
        assert 2 <= data["completed"] <= 3
        assert data["step_seconds"] > 0


@pytest.mark.parametrize(
    ("axes", "devices", "options", "words"),
    [
        ({}, 2, (), ("U023", "few.onnx", "no node of this model has a sharding specification", "such as its products")),
        ({"up": {"x": 1, "w": 1}}, 2, (), ("U023", "few.onnx", "'up'", "'w'", "axis 1", "axis 0")),
        ({"act": {"h": 1, "a": 0}}, 2, (), ("U023", "'act'", "'a'", "it can: axis 1")),
        ({"up": {"w": 1}}, 2, ("--machine", "4xL4"), ("T005", "for 2 devices, and 4")),
        ({"up": {"w": 1}}, 2, ("--machine", "2xL4", "--devices", "cpu:0,cpu:1"), ("U042", "exclude each other")),
        ({"up": {"w": 1}}, 2, ("-o", "few.onnx"), ("few.onnx", "which is read")),
        ({"up": {"w": 1}}, 2, ("-o", "no/all.onnx"), ("there is no folder",)),
        ({"up": {"w": 1}}, 2, ("-o", "there.onnx"), ("U030", "there.onnx", "--force")),
    ],
)
def test_wrong_wishes_are_refused_by_name_and_leave_nothing(run_cli, axes, devices, options, words):
    save_annotated(Path("few.onnx"), parser.parse_model(TANH), axes, devices)
    Path("there.onnx").write_text("")
    before = sorted(Path().iterdir())
    result = run_cli("infer-specs", "few.onnx", "-o", "all.onnx", "--shape", "N=8192", *options)
    assert result.code == 2
    for word in words:
        assert word in result.err
    assert sorted(Path().iterdir()) == before


def test_sizes_that_are_missing_are_named(run_cli):
    save_annotated(Path("few.onnx"), parser.parse_model(TANH), {"up": {"w": 1}})
    result = run_cli("infer-specs", "few.onnx", "-o", "all.onnx")
    assert result.code == 2
    assert "without a value: N" in result.err
    assert "--shape" in result.err


def test_a_file_of_several_stages_is_refused(run_cli):
    model = annotate_nodes(parser.parse_model(TANH), {"up": {"w": 1}})
    model.configuration[0].num_devices = 4
    onnx.save(model, "few.onnx")
    result = run_cli("infer-specs", "few.onnx", "-o", "all.onnx", "--shape", "N=8192")
    assert result.code == 2
    assert "operators are on 2 devices at most, and configuration 'mine' has 4" in result.err
