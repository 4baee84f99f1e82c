"""`export --to onnx-metadata`: devices of nodes in ONNX's own words."""

import json

import onnx
import pytest

from onnxplace.driver.compile import compile_model
from onnxplace.export.exporting import export_bundle
from tests.export.samples import assert_same_outputs, draw_feeds, run_file
from tests.support.chains import mlp
from tests.support.commands import node_names


def metadata(node: onnx.NodeProto) -> dict[str, str]:
    return {item.key: item.value for item in node.metadata_props}


def test_every_node_says_its_device_as_specification_and_as_metadata(decoder_bundle, tmp_path):
    export_bundle(decoder_bundle, "onnx-metadata", tmp_path / "out")
    model = onnx.load(tmp_path / "out" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version >= 11
    (configuration,) = model.configuration
    assert (configuration.num_devices, list(configuration.device)) == (2, ["cpu:0", "cpu:1"])
    expected = {name: device for device, names in node_names(decoder_bundle).items() for name in names}
    for node in model.graph.node:
        (entry,) = node.device_configurations
        device = expected[node.name]
        assert metadata(node)["onnxplace.device"] == device
        assert metadata(node)["onnxplace.segment"].startswith(device.replace(":", ""))
        assert entry.pipeline_stage == int(device[-1])
        assert {spec.tensor_name for spec in entry.sharding_spec} == set(node.output)
        assert {tuple(spec.device) for spec in entry.sharding_spec} == {(int(device[-1]),)}


def test_onnx_runtime_computes_the_same_with_it(decoder_bundle, tmp_path):
    export_bundle(decoder_bundle, "onnx-metadata", tmp_path / "out")
    feeds = draw_feeds(decoder_bundle)
    expected = run_file(decoder_bundle.file("segments/whole.onnx"), feeds)
    assert_same_outputs(run_file(tmp_path / "out" / "model.onnx", feeds), expected)


@pytest.mark.parametrize("with_layouts", [True, False])
def test_split_operators_have_sharding_specifications_if_the_bundle_has_them(with_layouts, tmp_path):
    onnx.save(mlp(), tmp_path / "model.onnx")
    shard = "shard{ways=2,exact=true,metadata=true}" if with_layouts else "shard{ways=2,exact=true}"
    pipeline = f"optimize,profile{{estimate=true}},{shard},coplace{{join=never}},fuse,m-etf,split,emit"
    bundle = compile_model(
        tmp_path / "model.onnx", tmp_path / "bundle", devices="cpu:0,cpu:1", pipeline=pipeline
    ).bundle
    exported = export_bundle(bundle, "onnx-metadata", tmp_path / "out")
    model = onnx.load(tmp_path / "out" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    specs = [s for node in model.graph.node for entry in node.device_configurations for s in entry.sharding_spec]
    assert any(spec.sharded_dim for spec in specs) == with_layouts
    assert [note.code for note in exported.diagnostics] == ([] if with_layouts else ["I001"])
    feeds = draw_feeds(bundle)
    (expected,), (actual,) = (
        run_file(path, feeds).values() for path in (bundle.file("segments/whole.onnx"), tmp_path / "out" / "model.onnx")
    )
    assert abs(expected - actual).max() <= 1e-3 * abs(expected).max()


def test_an_exported_model_is_a_device_map_for_its_origin(decoder_bundle, tmp_path):
    export_bundle(decoder_bundle, "onnx-metadata", tmp_path / "out")
    model = tmp_path / "out" / "model.onnx"
    device_map = json.dumps(str(model))
    again = compile_model(
        model, tmp_path / "again", devices="cpu:0,cpu:1", shape=dict(decoder_bundle.manifest.dimensions),
        pipeline=f"optimize,profile{{estimate=true}},coplace{{join=never,device_map={device_map}}},m-etf,split,emit",
    )  # fmt: skip
    assert node_names(again.bundle) == node_names(decoder_bundle)
    assert [note.code for note in again.diagnostics if "pins" in note.message] == ["U025"]


def test_an_export_says_nothing_of_the_devices_that_its_model_named_before(decoder_bundle, tmp_path):
    export_bundle(decoder_bundle, "onnx-metadata", tmp_path / "first")
    device_map = json.dumps(json.dumps({".*": "cpu:1"}))
    moved = compile_model(
        tmp_path / "first" / "model.onnx", tmp_path / "moved", devices="cpu:0,cpu:1",
        shape=dict(decoder_bundle.manifest.dimensions),
        pipeline=f"optimize,profile{{estimate=true}},coplace{{device_map={device_map}}},single,split,emit",
    ).bundle  # fmt: skip
    export_bundle(moved, "onnx-metadata", tmp_path / "second")
    for node in onnx.load(tmp_path / "second" / "model.onnx").graph.node:
        assert sorted(item.key for item in node.metadata_props if item.key.startswith("onnxplace.")) == [
            "onnxplace.device",
            "onnxplace.segment",
        ]
        assert metadata(node)["onnxplace.device"] == "cpu:1"
        (entry,) = node.device_configurations
        assert {tuple(spec.device) for spec in entry.sharding_spec} == {(1,)}
