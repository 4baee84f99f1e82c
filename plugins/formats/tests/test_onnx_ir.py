"""Multi-device annotations as onnx-ir checks, edits and writes them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import onnx
import pytest
from hypothesis import given, settings, strategies as st
from onnx import parser

import models
import onnxplace
from onnxplace.bundle.bundle import WHOLE_MODEL_FILE
from onnxplace.driver.compile import compile_model
from onnxplace.export.exporting import export_bundle
from onnxplace.model.device_metadata import list_groups, read_device_metadata
from onnxplace.passes.sharding.apply.derived_facts import annotate_model
from onnxplace.passes.sharding.apply.sharding_specs import read_layout, specify
from onnxplace.passes.sharding.rules.layouts import PARTIAL, Division, Layout
from tests.export.test_merge import SHAPES
from tests.support.chains import cached_decoder, mlp
from tests.support.commands import node_names
from tests.support.narrow_models import WIDE, narrow_model
from tests.support.random_placements import RandomPlacement, compiled_with
from tests.support.shardings import WIDE_SHARES, choose_randomly, make_space
from tests.support.tutorials import list_blocks

ir: Any = pytest.importorskip("onnx_ir", minversion="1.0", reason="the extra [dev] has it")

CHAIN = """<ir_version: 9, opset_import: ["": 18]> g (float[4, 6] x, float[6, 8] w) => (float[4, 8] y)
{ a = Neg(x) p = MatMul(a, w) y = Relu(p) }"""


@pytest.fixture
def run_here(run_cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run commands in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return run_cli


def list_faults(path: Path) -> list[str]:
    """Return what onnx-ir's checker of multi-device annotations finds wrong in a file."""
    faults: list[str] = ir._multi_device._check_device_configurations(ir.load(path))
    return faults


def save_again(path: Path, folder: Path) -> Path:
    """Return a file that onnx-ir has read and written."""
    ir.save(ir.load(path), folder / "again.onnx")
    return folder / "again.onnx"


def list_specs(path: Path) -> list[tuple[str, onnx.NodeDeviceConfigurationProto]]:
    """Return what the nodes of a file say of devices."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    return [(node.name, entry) for node in nodes for entry in node.device_configurations]


# ------------------------------------------------------------------------------------------------ what onnxplace writes


@pytest.mark.parametrize("name", sorted(models.MODELS))
@pytest.mark.sampled(4)
def test_onnx_ir_accepts_and_keeps_the_devices_of_every_example(name: str, tmp_path: Path):
    models.save(narrow_model(name) if name in WIDE else models.build(name), tmp_path / "model.onnx")
    placement, sizes = RandomPlacement((0, 0, 0, 0, 1, 1, 1)), SHAPES.get(name, {})
    bundle = compiled_with(tmp_path / "model.onnx", placement, tmp_path, fused=True, dimensions=sizes)
    export_bundle(bundle, "onnx-metadata", tmp_path / "out")
    path = tmp_path / "out" / "model.onnx"
    assert list_faults(path) == []
    again = save_again(path, tmp_path / "out")
    assert read_device_metadata(again) == read_device_metadata(path)
    assert list_specs(again) == list_specs(path)


@pytest.mark.parametrize("name", sorted(models.MODELS))
@pytest.mark.sampled(4)
def test_onnx_ir_accepts_the_layouts_of_every_example_and_all_are_read_again(name: str, tmp_path: Path):
    """Random layouts of all nodes, on each number of devices; summands and rows that are not valid are left out."""
    proto, random = narrow_model(name) if name in WIDE else models.build(name), Random(name)
    for shares in random.sample(WIDE_SHARES, 3):
        space = make_space(proto, SHAPES.get(name, {}), shares)
        choice, model = choose_randomly(space, random), space.facts.model
        stages = {index: index * 2 // len(model.nodes) for index in range(len(model.nodes))}
        ids = [f"cpu:{index}" for index in range(2 * len(shares))]
        annotated = annotate_model(model, space, choice.strategies, ids, stages)
        onnx.save(annotated.whole_proto(), tmp_path / "model.onnx")
        assert list_faults(tmp_path / "model.onnx") == []
        entries = list_specs(save_again(tmp_path / "model.onnx", tmp_path))
        assert len(entries) == len(model.nodes)
        for (node_name, entry), node, strategy, stage in zip(entries, model.nodes, choice.strategies, stages.values()):
            assert (node_name, entry.pipeline_stage) == (node.name, stage)
            devices = range(stage * len(shares), (stage + 1) * len(shares))
            layouts = dict((*zip(node.input, strategy.inputs), *zip(node.output, strategy.outputs)))
            assert {
                spec.tensor_name: read_layout(
                    spec, space.facts.shapes.get(spec.tensor_name, ()), space.division, devices
                )
                for spec in entry.sharding_spec
            } == {
                value: layout
                for value, layout in layouts.items()
                if value and layout is not None and layout != PARTIAL and not layout.valid
            }


@given(st.sampled_from(WIDE_SHARES), st.integers(1, 40), st.integers(1, 3), st.booleans())
@settings(max_examples=60)
def test_specifications_pass_through_onnx_ir_unchanged(
    shares: tuple[float, ...], inner: int, outer: int, in_runs: bool
) -> None:
    division, shape = Division(shares), (3, inner * outer)
    layout = division.split(1, shape[1], outer)
    if layout is not None and in_runs:
        layout = layout.in_runs(shape[1])
    spec = specify("y", layout or Layout(-1), shape, division)
    entry = onnx.NodeDeviceConfigurationProto(configuration_id="c", pipeline_stage=1, sharding_spec=[spec])
    value = ir.Value(name="y")
    read = ir.serde.deserialize_node_device_configuration(entry, values={"y": value})
    assert ir.serde.serialize_node_device_configuration(read) == entry
    value.name = "z"
    assert ir.serde.serialize_node_device_configuration(read).sharding_spec[0].tensor_name == "z"


SHARDED = {
    "mlp": (mlp, {}, {}),
    "decoder": (cached_decoder, {"seq": 1, "past": 5}, {"present": "past"}),
    "convolutions": (lambda: narrow_model("resnet50"), {}, {}),
}


@pytest.mark.parametrize(
    ("kind", "ways", "stages"),
    [("mlp", 2, 1), ("mlp", 2, 2), ("mlp", 4, 1), ("decoder", 2, 1), ("decoder", 3, 1), ("convolutions", 2, 1)],
)
def test_files_of_sharded_plans_carry_layouts_and_stages(kind: str, ways: int, stages: int, tmp_path: Path):
    build, sizes, states = SHARDED[kind]
    onnx.save(build(), tmp_path / "model.onnx")
    shard = f"shard{{ways={ways},stages={stages},exact=true,weights=least,metadata=true}}"
    ids = ",".join(f"cpu:{index}" for index in range(ways * stages))
    pipeline = f"optimize,profile{{estimate=true}},{shard},coplace{{join=never}},fuse,m-etf,split,emit"
    bundle = compile_model(
        tmp_path / "model.onnx", tmp_path / "bundle", devices=ids, pipeline=pipeline, shape=sizes, state=states
    ).bundle
    export_bundle(bundle, "onnx-metadata", tmp_path / "out")
    for path in (tmp_path / "out" / "model.onnx", bundle.file(WHOLE_MODEL_FILE)):
        onnx.checker.check_model(path, full_check=True)
        assert list_faults(path) == []
        assert read_device_metadata(path).devices == tuple(ids.split(","))
        entries = [entry for _, entry in list_specs(path)]
        assert [entry.HasField("pipeline_stage") for entry in entries] == [stages > 1] * len(entries)
        found = [entry.pipeline_stage for entry in entries]
        assert (found, set(found)) == (sorted(found), set(range(stages)))
        assert any(spec.sharded_dim for entry in entries for spec in entry.sharding_spec)
        for entry in entries:
            numbers = {number for spec in entry.sharding_spec for group in list_groups(spec) for number in group}
            assert not numbers or numbers == set(range(entry.pipeline_stage * ways, (entry.pipeline_stage + 1) * ways))


def test_the_parts_of_an_operator_are_in_one_stage(tmp_path: Path):
    onnx.save(mlp(layers=4), tmp_path / "model.onnx")
    pipeline = (
        "optimize,profile{estimate=true},shard{ways=2,stages=3,exact=true},coplace{join=never},fuse,m-etf,split,emit"
    )
    bundle = compile_model(
        tmp_path / "model.onnx", tmp_path / "bundle", devices=[f"cpu:{index}" for index in range(6)], pipeline=pipeline
    ).bundle
    stage_of: dict[str, set[int]] = {}
    for device, names in node_names(bundle).items():
        for name in names:
            stage_of.setdefault(name.partition("/shard")[0], set()).add(int(device[-1]) // 2)
    parts = {name: stages for name, stages in stage_of.items() if name.endswith(("_up", "_down"))}
    assert len(parts) == 8
    assert {len(stages) for stages in parts.values()} == {1}
    assert set.union(*parts.values()) == {0, 1, 2}


def test_what_a_model_said_of_devices_goes_with_its_configuration(tmp_path: Path):
    """Nodes that refer to a configuration that the file lacks are invalid."""
    model = parser.parse_model("""<ir_version: 11, opset_import: ["": 18]> g (float[2] x, bool c) => (float[2] y)
        { y = If (c) <then_branch = t () => (float[2] a) { a = Neg(x) },
                      else_branch = e () => (float[2] b) { b = Abs(x) }> }""")
    model.configuration.add(name="two", num_devices=2)
    node = model.graph.node[0]
    for item in (node, node.attribute[0].g.node[0]):
        item.device_configurations.add(configuration_id="two", pipeline_stage=1)
    onnx.save(model, tmp_path / "model.onnx")
    assert list_faults(tmp_path / "model.onnx") == []
    expected = model.SerializeToString()
    for source in (tmp_path / "model.onnx", model):
        bundle = onnxplace.compile(source, tmp_path / "bundle", devices="cpu:0", trial=False, force=True)
        onnxplace.merge_bundle(bundle, tmp_path / "merged.onnx", force=True)
        export_bundle(bundle, "onnx-metadata", tmp_path / "out", force=True)
        for path in (tmp_path / "merged.onnx", bundle.file(WHOLE_MODEL_FILE), tmp_path / "out" / "model.onnx"):
            assert list_faults(path) == []
    assert model.SerializeToString() == expected, "the caller's model is left as it was"


# -------------------------------------------------------------------------------------------------- what onnx-ir writes


def test_a_file_that_onnx_ir_changed_is_a_device_map(tmp_path: Path):
    """Values get other names; the specifications follow them."""
    onnx.save(parser.parse_model(CHAIN.replace("ir_version: 9", "ir_version: 11")), tmp_path / "model.onnx")
    bundle = compiled_with(tmp_path / "model.onnx", RandomPlacement((0, 1, 0)), tmp_path, optimized=False)
    export_bundle(bundle, "onnx-metadata", tmp_path / "out")
    model = ir.load(tmp_path / "out" / "model.onnx")
    for node in model.graph:
        for output in node.outputs:
            output.name = f"{output.name}_renamed"
    ir.save(model, tmp_path / "renamed.onnx")
    assert list_faults(tmp_path / "renamed.onnx") == []
    named = {spec.tensor_name for _, entry in list_specs(tmp_path / "renamed.onnx") for spec in entry.sharding_spec}
    assert named == {"a_renamed", "p_renamed", "y_renamed"}
    device_map = json.dumps(str(tmp_path / "renamed.onnx"))
    again = compile_model(
        tmp_path / "model.onnx", tmp_path / "again", devices="cpu:0,cpu:1",
        pipeline=f"profile{{estimate=true}},coplace{{join=never,device_map={device_map}}},m-etf,split,emit",
    )  # fmt: skip
    assert node_names(again.bundle) == node_names(bundle)


def make_by_onnx_ir(path: Path) -> None:
    """Write a model of which onnx-ir shards the product, and stages the other nodes."""
    proto = parser.parse_model(CHAIN.replace("ir_version: 9", "ir_version: 11"))
    for node, name in zip(proto.graph.node, ("neg", "product", "relu")):
        node.name = name
    model = ir.from_proto(proto)
    pair = model.add_device_configuration("pair", device_names=("cpu:0", "cpu:1"))
    neg, product, relu = list(model.graph)
    neg.set_pipeline_stage(pair, 0)
    product.shard(product.inputs[1], configuration=pair, axis=-1, num_shards=2, device_indices=(0, 1))
    product.shard(product.inputs[0], configuration=pair, axis=0, num_shards=1, device_indices=(0, 1))
    product.shard(product.outputs[0], configuration=pair, axis=1, num_shards=2, pipeline_stage=0)
    relu.set_pipeline_stage(pair, 1)
    ir.save(model, path)


def test_a_file_of_node_shard_is_a_device_map_and_says_layouts(tmp_path: Path):
    path = tmp_path / "model.onnx"
    make_by_onnx_ir(path)
    assert list_faults(path) == []
    metadata = read_device_metadata(path)
    assert (metadata.by_stage, metadata.split) == ({"neg": 0, "relu": 1}, ("product",))
    ((_, entry),) = [item for item in list_specs(path) if item[0] == "product"]
    shapes, even = {"a": (4, 6), "w": (6, 8), "p": (4, 8)}, Division((1.0, 1.0))
    layouts = {spec.tensor_name: read_layout(spec, shapes[spec.tensor_name], even) for spec in entry.sharding_spec}
    assert layouts == {"w": even.split(1, 8), "a": Layout(-1), "p": even.split(1, 8)}


def test_the_command_takes_a_file_of_node_shard_as_a_map(run_here: Any):
    make_by_onnx_ir(Path("model.onnx"))
    options = ("--devices", "cpu:0,cpu:1", "--no-trial", "-o", "out")
    result = run_here("compile", "model.onnx", "--device-map", "model.onnx", *options)
    assert result.code == 0
    assert "note[U025]" in result.err
    assert "pins 2 nodes of 3" in result.err
    assert "1 node on several devices, such as 'product'" in result.err
    devices = {name: device for device, names in node_names(onnxplace.load("out")).items() for name in names}
    assert (devices["neg"], devices["relu"]) == ("cpu:0", "cpu:1")


def test_the_example_in_the_manual_stages_a_model(run_here: Any):
    """The block of docs/export.md, and the command that it is for."""
    onnx.save(parser.parse_model(CHAIN), "model.onnx")
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text(encoding="utf-8")
    (block,) = (block for block in list_blocks(page) if block.text.startswith("import onnx_ir"))
    exec(block.text, {})
    assert list_faults(Path("staged.onnx")) == []
    options = ("--devices", "cpu:0,cpu:1", "--no-trial", "-o", "out")
    assert run_here("compile", "model.onnx", "--device-map", "staged.onnx", *options).code == 0
    assert [device for device, _ in node_names(onnxplace.load("out")).items()] == ["cpu:0", "cpu:1"]


def test_the_command_names_the_node_and_tensor_of_a_bad_map(run_here: Any):
    make_by_onnx_ir(Path("model.onnx"))
    model = onnx.load("model.onnx")
    model.graph.node[1].device_configurations[0].sharding_spec[0].device[1] = -1
    onnx.save(model, "model.onnx")
    result = run_here("compile", "model.onnx", "--device-map", "model.onnx", "--devices", "cpu:0,cpu:1")
    assert result.code == 2
    for words in ("error[U023]", "node 'product'", "tensor 'w' is on -1", "index_to_device_group_map"):
        assert words in result.err
