"""`onnxplace plan --explain` and `plan --diff`, as a user runs them."""

import json
from pathlib import Path

import onnx
import pytest

import onnxplace
from tests.cli.test_refused_nodes import TARGET
from tests.passes.placement.test_refused import model as model_with_erf
from tests.support.chains import mlp
from tests.support.commands import only_json

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")

TWO = ("--estimate", "--devices", "cpu:0,cpu:1")


@pytest.fixture
def chain() -> str:
    Path("chain.onnx").write_bytes(mlp().SerializeToString())
    return "chain.onnx"


# ------------------------------------------------------------------------------------------------------------- explain


def test_devices_and_layouts_of_a_node_are_compared(run_cli, chain):
    result = run_cli("plan", chain, *TWO, "--explain", "layer1_up")
    assert result.code == 0
    table, explanation = result.out.split("\nMatMul layer1_up:\n")
    assert "sharded 2 ways" in table
    devices, layouts = explanation.split("sharded 2 ways: the step with another layout")
    assert "whole operators placed: the simulated step if it is on another device" in devices
    assert ", kept" in devices
    assert " longer" in devices
    lines = {line.split("  ")[0]: line for line in layouts.splitlines()}
    assert lines.keys() > {"axis 0", "axis 1", "summed axis", "whole"}
    assert sum(", kept" in line for line in lines.values()) == 1
    assert any("+1 reduce-scatter" in line or "+1 all-" in line for line in lines.values())
    assert any("layer1_act: " in line for line in lines.values())


def test_values_inputs_and_weights_are_decided_by_a_node_in_json_and_python(run_cli, chain):
    names = ["layer1_up", "u1", "x", "v2"]
    options = [text for name in names for text in ("--explain", name)]
    data = only_json(run_cli("plan", chain, *TWO, *options, "--json"))
    node, value, entry, weight = data["explanations"]
    assert [item["name"] for item in data["explanations"]] == names
    assert [item["node"] for item in data["explanations"]] == ["layer1_up", "layer1_up", "layer0_up", "layer2_down"]
    assert [item["is_kept"] for item in node["layouts"]] == [True] + [False] * (len(node["layouts"]) - 1)
    assert {item["layout"] for item in value["layouts"]} == {"replicated", "partial", "axis 0", "axis 1"}
    assert {item["layout"] for item in weight["layouts"]} == {"replicated", "axis 0", "axis 1"}
    assert value["layouts"][0]["seconds"] == node["layouts"][0]["seconds"] == entry["layouts"][0]["seconds"]
    plan = onnxplace.plan(chain, devices="cpu:0,cpu:1", estimate=True, explain="v2")
    assert plan.explanations[0].layouts[1].seconds == weight["layouts"][1]["seconds"]


def test_an_unknown_name_is_refused_before_any_work_with_the_nearest_one(run_cli, chain):
    result = run_cli("plan", chain, *TWO, "--explain", "layer1_pu")
    assert result.code == 2
    assert "error[U020] --explain: no node, module or value of the optimised model matches 'layer1_pu'" in result.err
    assert "did you mean 'layer1_up'?" in result.err
    assert "whole operators placed" not in result.err


def test_a_device_that_does_not_take_the_node_is_named(run_cli):
    onnx.save(model_with_erf(), "model.onnx")
    Path("target.toml").write_text(TARGET)
    times = {"cpu/1": 0.1, "cuda/Tiny": 0.001}
    nodes = {name: {"seconds": times} for name in ("product", "relu", "last")}
    nodes["erf"] = {"seconds": {"cpu/1": 0.01, "cuda/Tiny": "refused"}}
    Path("costs.json").write_text(json.dumps({"format": "onnxplace-costs", "version": 1, "nodes": nodes}))
    options = ("--target", "target.toml", "--costs", "costs.json", "--explain", "erf", "--explain", "product")
    data = only_json(run_cli("plan", "model.onnx", *options, "--json"))
    kept, other = data["explanations"][0]["devices"]
    assert (kept["device"], kept["is_kept"]) == ("cpu:0", True)
    assert other["step_seconds"] is None
    assert other["problem"] == "it does not take Erf 'erf'"
    kept, other = data["explanations"][1]["devices"]
    assert kept["device"] == "cuda:0"
    assert other["step_seconds"] == pytest.approx(kept["step_seconds"] + 0.099, rel=0.05)
    assert "it does not take Erf 'erf'" in run_cli("plan", "model.onnx", *options).out


def test_several_machines_are_explained_each(run_cli, chain):
    result = run_cli("plan", chain, "--machine", "2xT4", "--machine", "2xL4", "--explain", "layer1_up")
    for machine in ("2xT4-PCIe3", "2xL4-PCIe4"):
        assert f"MatMul layer1_up on {machine}:" in result.out


def test_one_device_leaves_nothing_to_explain(run_cli, chain):
    result = run_cli("plan", chain, "--estimate", "--devices", "cpu:0", "--explain", "layer1_up")
    assert result.code == 0
    assert "\nMatMul layer1_up:\nthere is no other device\nno strategy splits operators" in result.out


# ---------------------------------------------------------------------------------------------------------------- diff


def compile_to(run_cli, chain: str, path: str, *passes: str) -> None:
    pipeline = ",".join(("optimize,profile{estimate=true}", *passes, "coplace{join=never},fuse,m-etf,split,emit"))
    assert run_cli("compile", chain, "--devices", "cpu:0,cpu:1", "--pipeline", pipeline, "-o", path).code == 0


def test_two_bundles_differ_in_devices_layouts_and_passes(run_cli, chain):
    compile_to(run_cli, chain, "a")
    compile_to(run_cli, chain, "b", "shard{ways=2,exact=true}")
    result = run_cli("plan", "--diff", "a", "b")
    assert result.code == 0
    assert result.out.startswith("Take B: ")
    for words in ("difference", "Nodes on other devices", "cpu:0+cpu:1", "only in", "MatMul", "exact = true"):
        assert words in result.out
    data = only_json(run_cli("plan", "--diff", "a", "b", "--json"))
    rows = {table["header"][1]: table["rows"] for table in data["tables"]}
    assert rows["in B on"][0][:2] == ["cpu:0", "cpu:0+cpu:1"]
    assert {row[0] for row in rows["operator"]} == {row[0] for row in rows["exchange"]} == {"B"}
    assert rows["A"] == [["shard", "-", "ways = 2, exact = true"]]
    report = only_json(run_cli("report", "a", "b", "--json"))
    assert report["comparison"] == data


def test_equal_bundles_do_not_differ(run_cli, chain):
    compile_to(run_cli, chain, "a")
    result = run_cli("plan", "--diff", "a", "a")
    assert result.out == "Take either: their steps and their memory are equal within 2%.\n"


def test_saved_plans_are_compared_strategy_by_strategy(run_cli, chain):
    data = only_json(run_cli("plan", chain, "--estimate", "--devices", "cpu:0", "--json"))
    Path("a.json").write_text(json.dumps(data))
    (alone,) = data["strategies"]
    alone |= {"step_seconds": 2 * alone["step_seconds"]}
    data["strategies"] += [{"name": "nothing", "problem": "it does not fit"}, {**alone, "name": "new"}]
    Path("b.json").write_text(json.dumps(data))
    result = run_cli("plan", "--diff", "a.json", "b.json")
    assert result.code == 0
    assert result.out.startswith("Least latency in A: one device, ")
    assert "+100%" in result.out
    rows = {row["label"]: row for row in only_json(run_cli("plan", "--diff", "a.json", "b.json", "--json"))["rows"]}
    assert rows["one device: latency"]["better"] == "A"
    assert rows["one device: memory"]["difference"] == "equal"
    assert rows["new: latency"]["texts"][0] == "–"
    assert not any(label.startswith("nothing") for label in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a", "nowhere"), ("U042", "expected two bundles, or two files")),
        (("nowhere", "nothing"), ("U005", "nowhere")),
        (("folder", "folder"), ("N001", "folder")),
        (("a", "other"), ("U005", "--diff", "A is of the model 'mlp', B of 'other'")),
        (("bad.json", "bad.json"), ("U005", "bad.json", "not a plan", "plan MODEL --json")),
        (("text.json", "text.json"), ("U005", "text.json")),
    ],
)
def test_what_cannot_be_compared_is_refused(run_cli, chain, arguments, words):
    proto = onnx.load(chain)
    proto.graph.name = "other"
    onnx.save(proto, "other.onnx")
    for name, model in (("a", chain), ("other", "other.onnx")):
        if name in arguments:
            compile_to(run_cli, model, name)
    Path("folder").mkdir()
    Path("bad.json").write_text('{"model": "mlp"}')
    Path("text.json").write_text("no json")
    result = run_cli("plan", "--diff", *arguments)
    assert result.code == 2
    assert result.out == ""
    for word in words:
        assert word in result.err


def test_a_model_or_a_difference_is_asked_for(run_cli, chain):
    for arguments in ((), (chain, "--diff", "a", "b")):
        result = run_cli("plan", *arguments)
        assert result.code == 2
        assert "error[U042] plan: expected a model, or --diff with two bundles or plans" in result.err
