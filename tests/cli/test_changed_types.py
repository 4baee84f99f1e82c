"""Devices refuse nodes with types that they were found to change, and what they compute is said."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

import onnxplace
from onnxplace.facts import Profile, is_refused
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.passes.profile import ProfileCosts
from onnxplace.state import State
from tests.support.commands import only_json
from tests.support.lying_device import Lying, lying_kind as lying_kind

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")

# Tokens, of which a Gather takes rows, and a mask, of which the values are anything.
TEXT = """<ir_version: 8, opset_import: ["": 17]> tokens (int64[N] ids, int64[N] mask) => (float[N, 4] y, int64[N] z)
<float[4, 4] table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, int64 big = {-6696874842932477345},
 int64[1] axes = {1}>
{
    [rows] a = Gather(table, ids)
    [shape] s = Shape(a)
    [cast] m = Cast<to=1>(mask)
    [widen] w = Unsqueeze(m, axes)
    [scale] b = Mul(a, w)
    [product] c = MatMul(b, table)
    [fold] y = Reshape(c, s)
    [add] z = Add(mask, big)
}"""
REFUSED = {"cast", "add"}
COSTS = "profile{costs=costs.json},coplace{join=never,device_map=map.json},fuse,m-etf,split,emit"


@pytest.fixture
def costs():
    """Write model.onnx and costs.json, of which a device that cannot be measured in its own process has some."""
    onnx.save(parser.parse_model(TEXT), "model.onnx")
    model = replace(load("model.onnx"), dimensions={"N": 3})
    ProfileCosts(estimate=True, save="costs.json").run(State(local_target("cpu:0,lying:0")).with_facts(model))
    return model


def profile(model, devices="cpu:0,lying:0") -> State:
    return ProfileCosts(costs="costs.json").run(State(local_target(devices)).with_facts(model))


def find_refused(state: State, kind: str = "lying") -> set[str]:
    fact = state[Profile]
    (name,) = (name for name in fact.seconds if name.startswith(kind))
    return {name for name, refused in zip(fact.graph.names, is_refused(fact.seconds[name])) if refused}


def list_notes(state: State) -> list[str]:
    return [f"{note.code} {note.where}: {note.message}" for note in state.diagnostics if note.code in ("C008", "C009")]


def test_nodes_with_numbers_of_64_bits_are_refused_and_counted(costs):
    state = profile(costs)
    assert find_refused(state) == REFUSED
    assert not find_refused(state, "cpu")
    assert list_notes(state) == [
        "C009 lying:0: float32 is computed in float16 (products, convolutions, normalisation, softmax, elementwise), "
        "where float32 is declared",
        "C008 lying:0: 2 of 8 nodes stay elsewhere, because it computes int64 as int32",
    ]


def test_an_honest_device_takes_all_and_nothing_is_said(costs, monkeypatch):
    monkeypatch.setattr(Lying, "lies", ())
    path = Path("costs.json")
    path.write_text(path.read_text().replace("Liar float16, int64 in int32", "Liar "))
    state = profile(costs)
    assert (find_refused(state), list_notes(state)) == (set(), [])


def test_estimates_alone_ask_no_device(costs, monkeypatch):
    monkeypatch.setattr("onnxplace.passes.profile.probe_device", lambda _: pytest.fail("it was asked"))
    state = ProfileCosts(estimate=True).run(State(local_target("cpu:0,lying:0")).with_facts(costs))
    assert not find_refused(state)


def test_a_device_with_options_is_asked_for_itself(costs, monkeypatch):
    monkeypatch.setattr(Lying, "value_options", {"precision": ("float32", "float16")})
    target = local_target("lying:0{precision=float16}")
    assert (target.devices[0].precision, target.devices[0].computes_in) == ("float16", "")


def test_a_bundle_has_these_nodes_elsewhere_and_is_right(costs, run_cli):
    Path("map.json").write_text('{"cast|add": "cpu:0", ".*": "lying:0"}')
    result = run_cli("compile", "model.onnx", "--shape", "N=3", "--devices", "cpu:0,lying:0", "--pipeline", COSTS)
    assert result.code == 0
    table = [line.split() for line in result.out.splitlines()]
    assert ["lying:0", "float16"] in [[row[0], row[-1]] for row in table if row]
    assert "2 of 8 nodes stay elsewhere, because it computes int64 as int32" in result.err
    bundle = onnxplace.load("model.bundle")
    (device,) = (item for item in bundle.target.devices if item.id == "lying:0")
    assert device.computes_in == "float16"
    on_device = {device.id: device.nodes for device in bundle.manifest.devices}
    assert on_device == {"lying:0": 6, "cpu:0": 2}
    np.savez("inputs.npz", ids=np.array([1, 0, 3]), mask=np.array([1, 1 << 40, -(1 << 50)]))
    feeds = dict(np.load("inputs.npz"))
    with onnxplace.InferenceSession(bundle) as session:
        _, z = session.run(None, feeds)
    with np.errstate(over="ignore"):
        assert z.tolist() == (feeds["mask"] + np.int64(-6696874842932477345)).tolist()
    data = only_json(run_cli("verify", "model.bundle", "--json"))
    assert (data["equal"], data["precisions"]["lying:0"]) == (True, "float16")
    text = run_cli("verify", "model.bundle").out
    assert "compared within float16's precision, because lying:0 computes in it" in text


def test_a_node_that_was_put_there_is_an_error(costs, refused):
    Path("map.json").write_text('{"add": "lying:0", ".*": "cpu:0"}')
    words = ("P004", "lying:0 does not take Add 'add'")
    refused(3, words, "compile", "model.onnx", "--shape", "N=3", "--devices", "cpu:0,lying:0", "--pipeline", COSTS)


def test_devices_says_what_was_found(run_cli):
    text = run_cli("devices", "--devices", "cpu:0").out
    (line,) = (line for line in text.splitlines() if line.startswith("lying:0"))
    sorts = "products, convolutions, normalisation, softmax, elementwise"
    assert f"; float32 is computed in float16 ({sorts}); int64 is computed as int32; " in line
    data = only_json(run_cli("devices", "--devices", "cpu:0", "--json"))
    (item,) = (item for item in data["accelerators"] if item["id"] == "lying:0")
    assert item["precision"] == "float32"
    assert item["probed"]["precision"]["products"] == "float16"
    assert item["probed"]["changes"] == {"int64": "int32"}
    assert "int32" in item["probed"]["keeps"]
