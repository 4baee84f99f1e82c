"""`onnxplace compile --shard-map MODEL`: layouts that a model gives by its sharding specifications are kept."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import onnxplace
from tests.support.annotated_models import annotate_nodes, list_specs, save_annotated
from tests.support.chains import mlp
from tests.support.commands import only_json
from transformer import transformer

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")

PIPELINE = "optimize,profile{estimate=true},shard{ways=2,exact=true,metadata=true%s},coplace,m-etf,split,emit"


@pytest.fixture
def chain() -> str:
    Path("chain.onnx").write_bytes(mlp().SerializeToString())
    return "chain.onnx"


def test_a_bundle_with_given_layouts_computes_the_same_on_two_devices(run_cli, chain):
    save_annotated(Path("given.onnx"), mlp(), {"layer0_up": {"w0": 0}, "layer1_down": {"d1": 0}})
    result = run_cli("compile", chain, "--shard", "2", "--shard-map", "given.onnx", "--no-trial", "-o", "out")
    assert result.code == 0
    bundle = onnxplace.load("out", "all")
    assert {segment.device for segment in bundle.manifest.segments} == {"cpu:0", "cpu:1"}
    assert bundle.manifest.sharding is not None
    assert ("MatMul", "summed axis") in {(kind.op, kind.layout) for kind in bundle.manifest.sharding.kinds}
    assert run_cli("verify", "out", "--against", chain).code == 0


def test_an_annotated_model_is_its_own_map(run_cli):
    save_annotated(Path("given.onnx"), mlp(), {"layer0_up": {"w0": 0}})
    data = only_json(run_cli("compile", "given.onnx", "--shard-map", "given.onnx", "--no-trial", "-o", "out", "--json"))
    assert data["sharding"]["ways"] == 2
    assert run_cli("verify", "out", "--against", "given.onnx").code == 0


def test_the_layouts_of_an_export_are_those_of_its_bundle(run_cli):
    onnx.save(transformer(layers=1, hidden=64, heads=4, vocab=50, positions=64), "model.onnx")
    sizes = ("--shape", "batch=2,seq=32")
    assert run_cli("compile", "model.onnx", "--pipeline", PIPELINE % "", *sizes, "-o", "first").code == 0
    assert run_cli("export", "first", "--to", "onnx-metadata", "-o", "exported").code == 0
    again = PIPELINE % ',map="exported/model.onnx"'
    assert run_cli("compile", "model.onnx", "--pipeline", again, *sizes, "-o", "second").code == 0
    first, second = (onnx.load(f"{name}/segments/whole.onnx") for name in ("first", "second"))
    assert [*map(list_specs, first.graph.node)] == [*map(list_specs, second.graph.node)]
    assert run_cli("verify", "second", "--against", "model.onnx").code == 0


def test_layouts_that_are_not_asked_for_are_noted(run_cli):
    save_annotated(Path("given.onnx"), mlp(), {"layer0_up": {"w0": 0}})
    result = run_cli("compile", "given.onnx", "--shard", "2", "--no-trial", "-o", "out")
    assert result.code == 0
    text = "note[U025] given.onnx: what its nodes say of devices counts if it is the --device-map, or the --shard-map"
    assert text in result.err


@pytest.mark.parametrize(
    ("axes", "devices", "words"),
    [
        (
            {"layer0_act": {"u0": 1, "a0": 0}},
            2,
            ("U023", "given.onnx", "layer0_act", "'a0'", "axis 0", "it can: axis 1"),
        ),
        ({"layer0_act": {"u0": 1}}, 3, ("T005", "given.onnx", "for 3 devices, and 2 would")),
        ({}, 2, ("U023", "given.onnx", "no node of this model names a device")),
    ],
)
def test_wrong_layouts_are_refused_by_name_and_leave_nothing(run_cli, chain, axes, devices, words):
    save_annotated(Path("given.onnx"), mlp(), axes, devices)
    result = run_cli("compile", chain, "--shard", "2", "--shard-map", "given.onnx", "-o", "out")
    assert result.code == 2
    for word in words:
        assert word in result.err
    assert not Path("out").exists()


def test_layouts_of_another_model_are_refused(run_cli, chain):
    model = annotate_nodes(mlp(), {"layer0_up": {"w0": 0}})
    for node in model.graph.node:
        node.name = f"other_{node.name}"
    onnx.save(model, "given.onnx")
    result = run_cli("compile", chain, "--shard-map", "given.onnx", "-o", "out")
    assert result.code == 2
    assert "U020" in result.err
    assert "got 'other_layer0_up'" in result.err
