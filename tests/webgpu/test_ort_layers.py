"""`export --to ort-layers` on a GPU: ONNX Runtime runs each node on the device that was asked for, in one session."""

import json
import re
from pathlib import Path
from runpy import run_path

import numpy as np
import onnxruntime
import pytest

import models
import onnxplace
from onnxplace.model.loading import load
from tests.export.samples import draw_feeds, run_file
from tests.support.commands import node_names

PROVIDERS = {"cpu:0": "CPUExecutionProvider", "webgpu:0": "WebGpuExecutionProvider"}
MODELS = {
    "transformer": ({"layers": 2, "hidden": 64, "vocab": 100, "positions": 32}, {"batch": 1, "seq": 8}),
    "decoder": (
        {"layers": 2, "hidden": 32, "heads": 2, "vocab": 40, "positions": 64},
        {"batch": 1, "seq": 3, "past": 5},
    ),
    "two-tower": ({}, {"images": 1, "texts": 1}),
    "two-encoders": ({}, {}),
    "squeezenet": ({}, {}),
    "densenet121": ({}, {}),
    "shufflenet": ({}, {}),
}


def compile_in_thirds(name: str, folder: Path) -> onnxplace.Bundle:
    """Compile an example with the second third of its nodes on the GPU."""
    options, shape = MODELS[name]
    model = models.build(name, **options)
    names = [node.name for node in model.graph.node]
    middle = names[len(names) // 3 : 2 * len(names) // 3]
    folder.mkdir()
    places = {**{re.escape(name): "webgpu:0" for name in middle}, ".*": "cpu:0"}
    (folder / "map.json").write_text(json.dumps(places))
    coplace = f"coplace{{join=never,device_map={json.dumps(str(folder / 'map.json'))}}}"
    pipeline = f"optimize,profile{{estimate=true}},{coplace},m-etf,split,emit"
    return onnxplace.compile(model, folder / "b", devices="cpu:0,webgpu:0", shape=shape, pipeline=pipeline)


def run_profiled(folder: Path, feeds: dict[str, np.ndarray], *, optimises: bool) -> tuple[dict, dict[str, str]]:
    """Run an export as its own script opens it; return the outputs, and the provider of each kernel that ran.

    Kernels have the names of their nodes, and new ones a number more where the provider wants another layout. What
    `get_provider_graph_assignment_info` says leaves out this provider.
    """
    script = run_path(str(folder / "session.py"))
    settings = script["read_settings"](folder)
    options = script["make_options"](settings)
    options.log_severity_level = 4
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    if not optimises:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    providers = [(item["name"], item["options"]) for item in settings["providers"]]
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=providers)
    outputs = dict(zip([item.name for item in session.get_outputs()], session.run(None, feeds)))
    events = json.loads(Path(session.end_profiling()).read_text())
    kernels = [item for item in events if item.get("cat") == "Node" and item["name"].endswith("_kernel_time")]
    names = [re.sub(r"(_token_\d+)?_kernel_time$", "", item["name"]) for item in kernels]
    return outputs, {name: item["args"]["provider"] for name, item in zip(names, kernels)}


@pytest.mark.parametrize("name", MODELS)
def test_every_node_runs_where_it_was_asked_to(name, tmp_path):
    bundle = compile_in_thirds(name, tmp_path / "c")
    onnxplace.export_bundle(bundle, "ort-layers", tmp_path / "out")
    feeds = draw_feeds(bundle)
    expected = run_file(bundle.file("segments/whole.onnx"), feeds)
    asked = {node: PROVIDERS[device] for device, nodes in node_names(bundle).items() for node in nodes}
    outputs, ran = run_profiled(tmp_path / "out", feeds, optimises=False)
    named = {node: provider for node, provider in ran.items() if node in asked}
    other = {node: (asked[node], provider) for node, provider in named.items() if asked[node] != provider}
    # ONNX Runtime computes shapes on the CPU wherever they were asked for; nothing else is elsewhere.
    assert {provider for _, provider in other.values()} <= {"CPUExecutionProvider"}
    assert len(other) <= len(named) // 10
    assert set(named.values()) == set(PROVIDERS.values())
    assert [name for name in ran.keys() - asked.keys() if not name.startswith(("Memcpy", "Transpose"))] == []
    # Those of a layout that the provider wants may undo one of the model.
    left_out = {node.op_type for node in load(bundle.file("segments/whole.onnx")).nodes if node.name not in ran}
    assert left_out <= {"Transpose"}
    for value, result in outputs.items():
        np.testing.assert_allclose(result, expected[value], rtol=1e-2, atol=1e-3)


def test_a_session_with_optimisations_computes_the_same_and_uses_both(tmp_path):
    bundle = compile_in_thirds("transformer", tmp_path / "c")
    onnxplace.export_bundle(bundle, "ort-layers", tmp_path / "out")
    feeds = draw_feeds(bundle)
    outputs, ran = run_profiled(tmp_path / "out", feeds, optimises=True)
    assert set(ran.values()) == set(PROVIDERS.values())
    expected = run_file(bundle.file("segments/whole.onnx"), feeds)
    for value, result in outputs.items():
        np.testing.assert_allclose(result, expected[value], rtol=1e-2, atol=1e-3)


def test_the_script_opens_a_session_with_both_providers(tmp_path):
    bundle = compile_in_thirds("transformer", tmp_path / "c")
    onnxplace.export_bundle(bundle, "ort-layers", tmp_path / "out")
    session = run_path(str(tmp_path / "out" / "session.py"))["open_session"](tmp_path / "out")
    assert session.get_providers() == ["WebGpuExecutionProvider", "CPUExecutionProvider"]


def test_measured_costs_give_a_placement_that_the_session_runs(run_cli, model_file, tmp_path):
    result = run_cli(
        "compile", model_file, "-o", tmp_path / "b", "--devices", "webgpu:0,cpu:0", "--shape", "batch=4",
        "--placer", "one-session",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert run_cli("export", tmp_path / "b", "--to", "ort-layers", "-o", tmp_path / "out").code == 0
    bundle = onnxplace.load(tmp_path / "b")
    outputs, _ = run_profiled(tmp_path / "out", draw_feeds(bundle), optimises=True)
    assert set(outputs) == {item.name for item in bundle.manifest.outputs}
