"""Modules and nodes of exports with `dynamo=True`, as users name them in commands and find them in reports."""

import json
from pathlib import Path

import onnx
import pytest

import onnxplace
from onnxplace.bundle.bundle import Bundle
from tests.support.commands import node_names, only_json
from tests.support.dynamo_models import dynamo_model

pytestmark = pytest.mark.usefixtures("no_gpus", "model_here")

SIZES = ("--devices", "cpu:0,cpu:1", "--shape", "batch=8")
COMPILE = ("compile", "model.onnx", *SIZES, "-o", "out", "--no-trial", "--force")
PLAN = ("plan", "model.onnx", *SIZES, "--estimate")
LAYER = {
    "model.layers.1.mlp.up/node_linear_2",
    "model.layers.1.mlp/node_relu_1",
    "model.layers.1.mlp.down/node_linear_3",
    "model.layers.1/node_add_1",
}


@pytest.fixture
def model_here(work_in_temporary_folder: None) -> None:
    onnx.save(dynamo_model(size=64), "model.onnx")


@pytest.mark.parametrize(
    "rules",
    [
        {"": 0, "model.layers.1": 1},
        {"model.layers.1": "cpu:1", "model": "cpu:0", "node_logits": "cpu:0"},
        {r"model\.layers\.1\b.*": "cpu:1", ".*": "cpu:0"},
    ],
)
def test_a_device_map_names_modules(run_cli, rules):
    Path("map.json").write_text(json.dumps(rules))
    assert run_cli(*COMPILE, "--device-map", "map.json").code == 0
    assert node_names(Bundle.open(Path("out")))["cpu:1"] == LAYER


def test_colocated_modules_share_a_device(run_cli):
    Path("map.json").write_text('{"node_relu": "cpu:1", "lm_head": "cpu:0", "model.layers.1": "cpu:0"}')
    result = run_cli(*COMPILE, "--device-map", "map.json", "--colocate", r"model\.layers\.0")
    assert result.code == 0, result.err
    nodes = node_names(Bundle.open(Path("out")))["cpu:1"]
    assert sorted(name.rpartition("/")[0] for name in nodes) == [
        "model.layers.0", "model.layers.0.mlp", "model.layers.0.mlp.down", "model.layers.0.mlp.up",
    ]  # fmt: skip


def test_a_shard_map_names_modules(run_cli):
    result = run_cli(*COMPILE, "--shard", "2", "--shard-map", '{"model.layers.*.up": "columns", ".*": "whole"}')
    assert result.code == 0, result.err
    names = {name for nodes in node_names(Bundle.open(Path("out"))).values() for name in nodes}
    split = {name.removesuffix("/shard1") for name in names if name.endswith("/shard1")}
    assert {name for name in split if name.removesuffix("/shard1") + "/shard0" in names} >= {
        "model.layers.0.mlp.up/node_linear_0", "model.layers.1.mlp.up/node_linear_2",
    }  # fmt: skip


def test_explain_takes_modules_and_names_nodes_by_their_modules(run_cli):
    result = run_cli(*PLAN, "--explain", "model.layers.1", "--explain", "node_logits", "--explain", "add")
    assert result.code == 0, result.err
    assert all(f"MatMul {name}:" in result.out for name in LAYER if "linear" in name)
    assert "MatMul lm_head/node_logits:" in result.out
    data = only_json(run_cli(*PLAN, "--json", "--explain", "model/layers.1/.*", "--explain", "add"))
    assert {item["name"] for item in data["explanations"][:-1]} == LAYER
    assert (data["explanations"][-1]["name"], data["explanations"][-1]["node"]) == ("add", "model.layers.0/node_add")
    plan = onnxplace.plan("model.onnx", devices="cpu:0", shape={"batch": 8}, estimate=True, explain="model.layers.*.up")
    assert len(plan.explanations) == 2


@pytest.mark.parametrize(
    ("command", "options", "what"),
    [
        (COMPILE, ("--device-map", "map.json"), "no module 'model.layers.1.mpl' in this model"),
        (COMPILE, ("--colocate", "model.layers.1.mpl"), "no node or module matches 'model.layers.1.mpl'"),
        (COMPILE, ("--shard-map", '{"model.layers.1.mpl": "whole"}'), "no node or module matches 'model.layers.1.mpl'"),
        (PLAN, ("--explain", "model.layers.1.mpl"), "no node, module or value of the optimised model matches"),
    ],
)
def test_a_misspelt_module_is_refused_with_the_nearest_one(run_cli, command, options, what):
    Path("map.json").write_text('{"model.layers.1.mpl": 0}')
    result = run_cli(*command, *options)
    assert result.code == 2
    assert f"error[U020] {options[0] if options[1] != 'map.json' else 'map.json'}: {what}" in result.err
    assert "did you mean 'model.layers.1.mlp'?" in result.err


def test_reports_show_modules_as_layers(run_cli):
    Path("map.json").write_text('{"": 0, "model.layers.1": 1}')
    assert run_cli(*COMPILE, "--device-map", "map.json").code == 0
    (page,) = json.loads(run_cli("report", "out", "--json").out)["pages"]
    tree = page["layers"]
    layers = [label for label, op in zip(tree["label"], tree["op"]) if not op]
    assert layers == ["model", "layers.0 … layers.1: 2 equal layers", "layers.0", "mlp", "layers.1", "mlp"]
    nodes = [label for label, op in zip(tree["label"], tree["op"]) if op]
    assert nodes[:4] == ["up/node_linear_0", "node_relu", "down/node_linear_1", "node_add"]
    assert nodes[-1] == "lm_head/node_logits"
    assert {segment["title"].partition(":")[0] for segment in page["segments"]} >= {"model.layers.0", "model.layers.1"}


def test_a_model_with_devices_for_its_nodes_is_a_device_map_for_the_export(run_cli):
    """Names agree, although the annotated model has modules in its names, and the export has none."""
    Path("map.json").write_text('{"": 0, "model.layers.1": 1}')
    assert run_cli(*COMPILE, "--device-map", "map.json").code == 0
    assert run_cli("export", "out", "--to", "onnx-metadata", "-o", "annotated").code == 0
    assert run_cli(*COMPILE, "--device-map", "annotated/model.onnx").code == 0
    assert node_names(Bundle.open(Path("out")))["cpu:1"] == LAYER
