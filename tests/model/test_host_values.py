"""Sequences, optionals, maps and strings cannot be on a GPU: their producers and readers stay together on a host."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import json
from pathlib import Path

import pytest
from onnx import parser

from onnxplace.driver.compile import compile_model
from onnxplace.driver.trials import Compiled
from onnxplace.model.cut_constraints import list_uncompilable
from onnxplace.model.loading import load
from onnxplace.target.target import Device, Target

GPUS = (Device("cuda:0", 1 << 30, model="G"), Device("cuda:1", 1 << 30, model="G"))
HEADER = '<ir_version: 9, opset_import: ["": 18, "ai.onnx.ml": 1]>'
MODELS = {
    "sequence": """graph (float[2, 3] x) => (float[2, 3] y) <int64 zero = {0}> {
        [first] a = Neg(x)
        [pack] s = SequenceConstruct(a, x)
        [take] b = SequenceAt(s, zero)
        [last] y = Abs(b)
    }""",
    "optional": """graph (float[2, 3] x) => (float[2, 3] y) {
        [first] a = Neg(x)
        [pack] o = Optional(a)
        [take] b = OptionalGetElement(o)
        [last] y = Abs(b)
    }""",
    "string": """graph (float[2, 3] x) => (bool[2, 3] y) <string[1] one = {"1"}> {
        [first] a = Neg(x)
        [pack] s = Cast<to = 8>(a)
        [take] b = Equal(s, one)
        [last] y = Not(b)
    }""",
    "map": """graph (float[1, 2] x) => (seq(map(int64, float)) m, float[1, 2] y) {
        [first] a = Neg(x)
        [pack] m = ai.onnx.ml.ZipMap<classlabels_int64s = [1, 2]>(a)
        [last] y = Abs(a)
    }""",
}


def compile_on(model: str, folder: Path, devices: tuple[Device, ...], device_map: dict[str, str]) -> Compiled:
    """Compile a model for these devices, with nodes placed by a device map."""
    (folder / "map.json").write_text(json.dumps(device_map))
    steps = f"profile{{estimate=true}},coplace{{join=never,device_map={folder / 'map.json'}}},fuse,m-etf,split,emit"
    proto = parser.parse_model(HEADER + model)
    return compile_model(proto, folder / "bundle", target=Target(devices), pipeline=steps)


def find_devices(compiled: Compiled) -> dict[str, str]:
    """Return the device of each node."""
    import onnx

    return {
        node.name: segment.device
        for segment in compiled.bundle.manifest.segments
        for node in onnx.load(compiled.bundle.file(segment.file)).graph.node
    }


@pytest.mark.parametrize("kind", MODELS)
def test_host_values_stay_on_the_host_device(tmp_path: Path, kind: str):
    device_map = {"first": "cuda:0", "last": "cuda:1"}
    compiled = compile_on(MODELS[kind], tmp_path, (*GPUS, Device("cpu:0", 1 << 30)), device_map)
    devices = find_devices(compiled)
    assert {devices[name] for name in ("pack", "take") if name in devices} == {"cpu:0"}
    assert {name: devices[name] for name in device_map} == device_map
    (note,) = [note for note in compiled.diagnostics if note.code == "G012"]
    assert note.where == "cpu:0"
    for word in ("pack", "sequence" if kind == "map" else kind, "GPU"):
        assert word in note.message


def test_without_a_host_device_they_stay_together_and_the_note_names_one(tmp_path: Path):
    compiled = compile_on(MODELS["sequence"], tmp_path, GPUS, {"first": "cuda:0", "last": "cuda:1"})
    devices = find_devices(compiled)
    assert devices["pack"] == devices["take"]
    (note,) = [note for note in compiled.diagnostics if note.code == "G012"]
    assert "cpu:0" in note.hint


def test_the_placement_of_the_user_takes_precedence(tmp_path: Path):
    compiled = compile_on(MODELS["sequence"], tmp_path, (*GPUS, Device("cpu:0", 1 << 30)), {"take": "cuda:1"})
    devices = find_devices(compiled)
    assert devices["pack"] == devices["take"] == "cuda:1"
    (note,) = [note for note in compiled.diagnostics if note.code == "G012"]
    assert note.where == "cuda:1"


def test_between_cpu_devices_host_values_may_cross(tmp_path: Path):
    cpus = (Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30))
    compiled = compile_on(MODELS["sequence"], tmp_path, cpus, {"pack": "cpu:0", "take": "cpu:1"})
    assert find_devices(compiled)["pack"] != find_devices(compiled)["take"]
    assert not [note for note in compiled.diagnostics if note.code == "G012"]


def test_models_of_plain_tensors_get_no_note(tmp_path: Path):
    model = "graph (float[2, 3] x) => (float[2, 3] y) { [first] a = Neg(x) [last] y = Abs(a) }"
    compiled = compile_on(model, tmp_path, (*GPUS, Device("cpu:0", 1 << 30)), {"first": "cuda:0"})
    assert not [note for note in compiled.diagnostics if note.code == "G012"]


@pytest.mark.parametrize(
    ("name", "expected"), [("sequence", "pack take"), ("optional", "pack take"), ("string", "pack take")]
)
def test_providers_that_compile_segments_get_no_node_with_such_values(name, expected):
    model = load(parser.parse_model(f"{HEADER} {MODELS[name]}"))
    barred = [node.name for node, is_barred in zip(model.nodes, list_uncompilable(model)) if is_barred]
    assert barred == expected.split()


def test_providers_that_compile_segments_get_no_node_with_a_value_of_unknown_rank():
    text = """graph (float[n, 4] x, int64[k] shape) => (float[a, b] y) {
        [first] a = Neg(x) [second] b = Abs(a) [shape] c = Reshape(b, shape) [last] y = Relu(c) }"""
    model = load(parser.parse_model(f"{HEADER} {text}"))
    assert list_uncompilable(model) == [False, False, True, True]
