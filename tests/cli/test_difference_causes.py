"""`onnxplace verify` says where a difference comes from: a device, a segment's file, or the model that is compared."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxplace
from onnxplace.bundle.bundle import Bundle, compute_sha256
from onnxplace.errors import ExecutionError
from onnxplace.measure import difference_causes
from onnxplace.measure.size_comparison import compare_at_another_size
from onnxplace.runtimes.execution.sessions import EngineSession
from onnxplace.target.device_kinds import Hardware
from tests.bundle.test_hostile_bundles import edit
from tests.conftest import FAST_PIPELINE
from tests.support.commands import only_json
from tests.support.half_device import NAME, Half, half_kind as half_kind

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder", "two_halves")

# Twice the difference of two products that are almost equal: errors of 2^-11 become thirty times as large.
CANCELLING = """<ir_version: 8, opset_import: ["": 17]> cancelling (float[N, 64] x) => (float[N, 64] y, float[N, 64] z)
{
    [left] a = MatMul(x, v)
    [right] b = MatMul(x, w)
    [difference] y = Sub(a, b)
    [left_too] c = MatMul(y, v)
    [right_too] d = MatMul(y, w)
    [difference_too] z = Sub(c, d)
}"""
SUM = """<ir_version: 8, opset_import: ["": 17]> sum (float[4] x, float[4] total) => (float[4] y, float[4] total_next)
{
    [add] total_next = Add(total, x)
    [neg] y = Neg(total_next)
}"""


@pytest.fixture
def two_halves(monkeypatch):
    """Let two devices that compute in float16 be taken for ones of float32, unless their option says otherwise.

    They compute in float32 while they are asked.
    """
    for module in ("machine.hardware", "measure.difference_causes", "passes.profile"):
        monkeypatch.setattr(f"onnxplace.{module}.probe_device", lambda device: None)
    monkeypatch.setattr(Half, "value_options", {"precision": ("float32", "float16")})
    monkeypatch.setattr(Half, "list_hardware", lambda _: tuple(Hardware(i, NAME, 1 << 30, 1 << 30) for i in (0, 1)))


def place(places: dict[str, str], text: str = CANCELLING, option: str = "", **options) -> Bundle:
    """Compile a model with nodes, by patterns of their names, on devices; all others are on cpu:0."""
    model = parser.parse_model(text)
    weight = np.random.default_rng(7).standard_normal((64, 64)).astype(np.float32)
    for name, factor in (("v", 1), ("w", 0.97)):
        model.graph.initializer.append(numpy_helper.from_array(weight * np.float32(factor), name))
    onnx.save(model, "model.onnx")
    Path("map.json").write_text(json.dumps({**places, ".*": "cpu:0"}))
    pipeline = FAST_PIPELINE.replace("join=never", "join=never,device_map=map.json")
    devices = ",".join(dict.fromkeys(("cpu:0", *places.values())))
    devices = devices.replace("half:0", f"half:0{option}")
    return onnxplace.compile("model.onnx", "out", devices=devices, pipeline=pipeline, **options)


def find_segment(bundle: Bundle, value: str) -> str:
    """Return the segment that computes a value."""
    return bundle.manifest.values[value].producer


def damage(bundle: Bundle, value: str, operator: str = "") -> str:
    """Exchange the inputs of the node that computes a value, or its operator, as if emit had; return its segment."""
    models = [(item, onnx.load(bundle.file(item.file), load_external_data=False)) for item in bundle.manifest.segments]
    segment, model, node = next(
        (segment, model, node) for segment, model in models for node in model.graph.node if value in node.output
    )
    path = bundle.file(segment.file)
    node.op_type, node.input[:] = operator or node.op_type, node.input[::-1]
    onnx.save(model, path)

    def change(manifest: dict) -> None:
        manifest["files"][segment.file] = {"sha256": compute_sha256(path), "bytes": path.stat().st_size}
        for item in manifest["segments"]:
            item["optimised"] = ""

    edit(bundle.path, change)
    return segment.id


def verify(run_cli, *options) -> tuple[str, dict]:
    """Return the text and the explanation that `verify` prints for a bundle that differs."""
    result = run_cli("verify", "out", *options)
    data = only_json(run_cli("verify", "out", *options, "--json"))
    assert (result.code, result.err, data["equal"]) == (1, "", False)
    explanation = data["explanation"]
    assert f"\n{explanation['message']}\nhint: {explanation['hint']}\n" in result.out
    return result.out, explanation


def test_a_segment_on_a_less_precise_device_is_named_with_what_to_do(run_cli):
    bundle = place({"left": "half:0"}, shape={"N": 3})
    text, explanation = verify(run_cli)
    segment = find_segment(bundle, "a")
    assert (explanation["cause"], explanation["device"], explanation["segment"]) == ("device", "half:0", segment)
    assert explanation["message"].startswith(f"the error is gone when segment {segment} on half:0 runs on the CPU: ")
    assert f"float32 is less precise there ({segment} alone is off by 0.000" in explanation["message"]
    for words in ("--max-error", "--device-map", "onnxplace doctor"):
        assert words in explanation["hint"]
    line = text.splitlines()[0]
    assert line.startswith("DIFFERS y  max abs error ")
    assert line.endswith(", allowed is 0.001, as float32 is the coarsest type on the way to it, first with N=3")


def test_the_precision_of_the_device_allows_for_it(run_cli):
    place({"left": "half:0"}, shape={"N": 3}, option="{precision=float16}")
    data = only_json(run_cli("verify", "out", "--json"))
    assert (data["equal"], data["explanation"]) == (True, None)
    assert [(item["tolerance"], item["tolerance_type"]) for item in data["outputs"]] == [(0.02, "float16")] * 2


def test_a_device_is_named_if_no_single_segment_explains_the_difference(run_cli):
    place({"left.*": "half:0"}, shape={"N": 3})
    _, explanation = verify(run_cli, "--sizes", "0")
    assert (explanation["cause"], explanation["device"], explanation["segment"]) == ("device", "half:0", "")
    assert "when all segments on half:0 run on the CPU, and no single one explains it" in explanation["message"]


def test_no_device_is_named_if_it_takes_several(run_cli):
    place({"left": "half:0", "left_too": "half:1"}, shape={"N": 3})
    _, explanation = verify(run_cli, "--sizes", "0")
    assert (explanation["cause"], explanation["device"], explanation["segment"]) == ("device", "", "")
    assert "when all segments run on the CPU, and no single device explains it" in explanation["message"]


def test_results_that_are_further_off_than_a_type_are_called_so(run_cli, monkeypatch):
    bundle = place({"left": "half:0"}, shape={"N": 3})
    monkeypatch.setattr("tests.support.half_device.round_to_half", lambda value: value * np.float32(1.5))
    _, explanation = verify(run_cli, "--sizes", "0")
    assert (explanation["device"], explanation["segment"]) == ("half:0", find_segment(bundle, "a"))
    assert explanation["message"].endswith("values are wrong there (half0-000 alone is off by 0.5)")


@pytest.mark.parametrize("device", ["cpu:0", "half:0"])
@pytest.mark.parametrize("value", ["a", "b", "y", "d", "z"])
def test_a_wrong_file_of_a_segment_is_named(run_cli, device, value):
    bundle = place({"right|difference|left_too": device, "left": "cpu:1"}, shape={"N": 64})
    segment = damage(bundle, value)
    _, explanation = verify(run_cli, "--sizes", "0")
    assert (explanation["cause"], explanation["segment"], explanation["device"]) == ("split", segment, "")
    assert explanation["message"].startswith(f"segment {segment} (segments/{segment}.onnx) computes other values")
    assert "please report it" in explanation["hint"]


def test_the_step_that_differs_first_is_explained(run_cli):
    bundle = place({"neg": "cpu:1"}, SUM, state=["total_next=total"])
    segment = damage(bundle, "total_next", "Max")
    np.savez("inputs.npz", x=np.ones(4, np.float32), total=np.zeros(4, np.float32))
    text, explanation = verify(run_cli, "--inputs", "inputs.npz")
    assert ", first in step 2\n" in text
    assert (explanation["cause"], explanation["segment"]) == ("split", segment)


def test_another_model_is_told_from_a_wrong_bundle(run_cli):
    place({"left": "cpu:1"}, shape={"N": 3})
    model = onnx.load("model.onnx")
    model.graph.node[2].op_type = "Add"
    onnx.save(model, "other.onnx")
    _, explanation = verify(run_cli, "--against", "other.onnx")
    assert explanation["cause"] == "model"
    assert explanation["message"].endswith("the bundle's own copy of the model differs from other.onnx, too")


def test_segments_that_are_right_one_by_one_are_not_blamed(run_cli, monkeypatch):
    place({"left": "cpu:1"}, shape={"N": 3})
    submit = EngineSession.submit

    def submit_wrong(self, feeds, *rest):
        return submit(self, {**feeds, "x": feeds["x"] + np.float32(1)}, *rest)

    monkeypatch.setattr(EngineSession, "submit", submit_wrong)  # `verify` submits, the explanation runs
    _, explanation = verify(run_cli, "--sizes", "0")
    assert (explanation["cause"], explanation["device"], explanation["segment"]) == ("unknown", "", "")
    assert "please report it" in explanation["hint"]


def test_a_cause_that_cannot_be_found_does_not_hide_the_difference(run_cli, monkeypatch):
    damage(place({"left": "cpu:1"}, shape={"N": 3}), "y")

    def fail(*_, **__):
        raise ExecutionError("X001", "out of order")

    monkeypatch.setattr(difference_causes, "open_session", fail)
    text, explanation = verify(run_cli, "--sizes", "0")
    assert text.startswith("DIFFERS y")
    assert (explanation["cause"], explanation["message"]) == ("unknown", "its cause was not found: out of order")


def test_python_gets_the_explanation_too(run_cli):
    segment = damage(place({"left": "cpu:1"}, shape={"N": 3}), "z")
    explanation = onnxplace.verify("out", sizes=0).explanation
    assert (explanation.cause, explanation.segment) == ("split", segment)


def test_given_inputs_of_other_sizes_are_explained(run_cli):
    segment = damage(place({"left": "cpu:1"}, shape={"N": 3}), "y")
    np.savez("inputs.npz", x=np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32))
    text, explanation = verify(run_cli, "--inputs", "inputs.npz")
    assert text.endswith("compared with N=5\n")
    assert (explanation["cause"], explanation["segment"]) == ("split", segment)


def test_the_trial_explains_a_difference_at_another_size(monkeypatch):
    bundle = place({"left": "half:0"}, shape={"N": 4})
    wrong = "tests.support.half_device.round_to_half"
    monkeypatch.setattr(wrong, lambda value: value if value.shape[0] == 4 else value * np.float32(1.5))
    with pytest.raises(ExecutionError, match="output 'y' differs from the unsplit model's with N=5; ") as caught:
        compare_at_another_size(bundle)
    assert caught.value.code == "C022"
    segment = find_segment(bundle, "a")
    assert f"the error is gone when segment {segment} on half:0 runs on the CPU: values are wrong" in str(caught.value)
    assert caught.value.hint.startswith("place nodes elsewhere with --device-map")
    assert caught.value.hint.endswith("--no-trial writes the bundle all the same, for `onnxplace verify`")
