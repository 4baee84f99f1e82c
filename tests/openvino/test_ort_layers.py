"""`export --to ort-layers` with a provider that compiles its nodes, claims all of them, and comes as a package."""

import json
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import numpy as np
import onnx
import pytest
from onnx import parser

import onnxplace
from onnxplace.errors import InputError
from onnxplace.export.exporting import export_bundle
from tests.export.samples import draw_feeds, run_file
from tests.openvino.devices import OPENVINO, perceptron, place
from tests.support.commands import node_names

LAYER = "session.layer_assignment_settings"
MODEL = """
<ir_version: 8, opset_import: ["": 17]>
g (float[4] x) => (float[4] y) { [a] u = Relu(x) [b] v = Exp(u) [c] y = Neg(v) }
"""


def list_assigned(session) -> dict[str, str]:
    groups = session.get_provider_graph_assignment_info()
    return {node.name: group.ep_name for group in groups for node in group.get_nodes()}


def open_export(folder: Path):
    return run_path(str(folder / "session.py"))["open_session"](folder)


@pytest.fixture
def exported(tmp_path):
    """An export whose nodes are all on OpenVINO."""
    bundle = place(perceptron(), tmp_path / "p", OPENVINO, {".*": OPENVINO}, shape={"batch": 4})
    export_bundle(bundle, "ort-layers", tmp_path / "out")
    return bundle, tmp_path / "out"


def test_onnx_runtime_reports_the_assignment_that_was_asked_for(exported):
    bundle, folder = exported
    settings = json.loads((folder / "session_options.json").read_text())
    assert settings[LAYER] == f"OpenVINOExecutionProvider(={OPENVINO})"
    session = open_export(folder)
    (nodes,) = node_names(bundle).values()
    assert list_assigned(session) == dict.fromkeys(nodes, "OpenVINOExecutionProvider")
    feeds = draw_feeds(bundle)
    expected = run_file(bundle.file("segments/whole.onnx"), feeds)
    for item, result in zip(session.get_outputs(), session.run(None, feeds)):
        np.testing.assert_allclose(result, expected[item.name], rtol=1e-3, atol=1e-4)


def test_the_script_counts_the_nodes_of_the_provider(exported):
    command = [sys.executable, exported[1] / "session.py"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["12", "OpenVINOExecutionProvider"]


def test_the_placer_takes_either_the_cpu_or_openvino(tmp_path):
    bundle = onnxplace.compile(
        perceptron(), tmp_path / "b", devices=f"cpu:0,{OPENVINO}", shape={"batch": 64}, placer="one-session"
    )
    assert len({segment.device for segment in bundle.manifest.segments}) == 1
    export_bundle(bundle, "ort-layers", tmp_path / "out")
    assert open_export(tmp_path / "out").run(None, draw_feeds(bundle))


@pytest.mark.parametrize(("host_first", "problem"), [(False, "num_nodes_processed"), (True, "Could not find an impl")])
def test_onnx_runtime_still_opens_no_session_with_a_part_on_openvino(host_first, problem, tmp_path):
    """Once this fails, the export need not refuse it, and the placer need not avoid it."""
    mixed = place(parser.parse_model(MODEL), tmp_path / "m", f"cpu:0,{OPENVINO}", {"a|c": "cpu:0", "b": OPENVINO})
    with pytest.raises(InputError, match="shares no session with cpu:0"):
        export_bundle(mixed, "ort-layers", tmp_path / "mixed")
    whole = place(parser.parse_model(MODEL), tmp_path / "w", OPENVINO, {".*": OPENVINO})
    export_bundle(whole, "ort-layers", tmp_path / "out")
    model = onnx.load(tmp_path / "out" / "model.onnx")
    for node in model.graph.node:
        (entry,) = node.metadata_props
        entry.value = {"b": OPENVINO}.get(node.name, "cpu:0")
    onnx.save(model, tmp_path / "out" / "model.onnx")
    settings = json.loads((tmp_path / "out" / "session_options.json").read_text())
    if host_first:
        settings["providers"].reverse()
    else:
        settings[LAYER] += ";CPUExecutionProvider(=cpu:0)"
    (tmp_path / "out" / "session_options.json").write_text(json.dumps(settings))
    with pytest.raises(Exception, match=problem):
        open_export(tmp_path / "out")
