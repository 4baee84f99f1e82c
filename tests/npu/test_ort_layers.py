"""`export --to ort-layers` for an NPU with a compiler: the CPU's provider takes its nodes first."""

import json
from pathlib import Path
from runpy import run_path

import numpy as np
import onnx
import pytest

import onnxplace
from onnxplace.export.exporting import export_bundle
from tests.export.samples import draw_feeds, run_file
from tests.support.commands import node_names
from tests.support.npu_models import NPU, fixed_branches

PLACES = [
    {"left|relu": NPU, ".*": "cpu:0"},
    {"left|relu": "cpu:0", ".*": NPU},
    {".*": NPU},
]


def compile_placed(folder: Path, places: dict[str, str]) -> onnxplace.Bundle:
    (folder / "map.json").write_text(json.dumps(places))
    coplace = f"coplace{{join=never,device_map={json.dumps(str(folder / 'map.json'))}}}"
    pipeline = f"optimize,profile{{estimate=true}},{coplace},m-etf,split,emit"
    return onnxplace.compile(fixed_branches(), folder / "b", devices=f"cpu:0,{NPU}", pipeline=pipeline)


def open_export(folder: Path):
    return run_path(str(folder / "session.py"))["open_session"](folder)


def list_assigned(session) -> dict[str, str]:
    groups = session.get_provider_graph_assignment_info()
    return {node.name: group.ep_name for group in groups for node in group.get_nodes()}


@pytest.mark.parametrize("places", PLACES)
def test_onnx_runtime_reports_the_assignment_that_was_asked_for(places, tmp_path):
    bundle = compile_placed(tmp_path, places)
    export_bundle(bundle, "ort-layers", tmp_path / "out")
    session = open_export(tmp_path / "out")
    providers = {"cpu:0": "CPUExecutionProvider", NPU: "qnn"}
    asked = {node: providers[device] for device, nodes in node_names(bundle).items() for node in nodes}
    assigned = list_assigned(session)
    # ONNX Runtime makes one node of a product and the addition behind it, called after the product.
    assert {name.partition("/")[0]: provider for name, provider in assigned.items()}.items() <= asked.items()
    assert set(assigned.values()) == set(asked.values())
    feeds = draw_feeds(bundle)
    expected = run_file(bundle.file("segments/whole.onnx"), feeds)
    for item, result in zip(session.get_outputs(), session.run(None, feeds)):
        np.testing.assert_allclose(result, expected[item.name], rtol=1e-2, atol=1e-2)


def test_the_command_places_and_exports_and_the_export_is_a_device_map(run_cli, tmp_path):
    onnx.save(fixed_branches(), tmp_path / "model.onnx")
    arguments = ("compile", tmp_path / "model.onnx", "--devices", f"cpu:0,{NPU}", "--no-trial")
    placed = run_cli(*arguments, "-o", tmp_path / "b", "--placer", "one-session")
    assert placed.code == 0, placed.err
    assert run_cli("export", tmp_path / "b", "--to", "ort-layers", "-o", tmp_path / "out").code == 0
    assert open_export(tmp_path / "out").run(None, draw_feeds(onnxplace.load(tmp_path / "b")))
    again = run_cli(*arguments, "-o", tmp_path / "again", "--device-map", tmp_path / "out" / "model.onnx")
    assert again.code == 0, again.err
    bundles = [onnxplace.load(tmp_path / name) for name in ("b", "again")]
    assert node_names(bundles[0]) == node_names(bundles[1])
