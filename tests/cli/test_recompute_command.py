"""`onnxplace compile` of training steps that need more memory than there is."""

import json

import numpy as np
import onnx
import pytest

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.driver.compile import compile_model
from onnxplace.errors import InfeasibleError, UsageError
from tests.support.training_models import ReferenceTrainer, draw_batch, make_mlp


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A step whose activations are three quarters of its memory, with the bytes it needs on one device."""
    folder = tmp_path_factory.mktemp("step")
    proto = make_mlp("adam", widths=[32] * 9, batch=512)
    onnx.save(proto, folder / "step.onnx")
    whole = compile_model(folder / "step.onnx", folder / "whole.bundle", devices="cpu:0", trial=False)
    return proto, folder / "step.onnx", whole.bundle.manifest.devices[0].peak_bytes


def run_steps(bundle, proto, count=4):
    feeds = draw_batch(proto)
    with onnxplace.InferenceSession(bundle) as session:
        return [float(session.run(["loss"], {**feeds, "step": np.array(i + 1, np.int64)})[0]) for i in range(count)]


def reference_losses(proto, count=4):
    reference, feeds = ReferenceTrainer(proto), draw_batch(proto)
    return [reference.step(feeds) for _ in range(count)]


@pytest.mark.parametrize(("devices", "share"), [("cpu:0", 0.7), ("cpu:0,cpu:1", 0.55)])
@pytest.mark.slow
def test_a_step_too_large_for_its_devices_is_recomputed_and_trains_as_before(step, tmp_path, devices, share):
    proto, path, peak = step
    limit = int(share * peak)
    options = {"devices": devices, "max_memory": str(limit), "trial": False}
    compiled = compile_model(path, tmp_path / "small.bundle", **options)
    manifest = compiled.bundle.manifest
    assert all(device.peak_bytes <= limit for device in manifest.devices)
    assert all(segment.keeps_order for segment in manifest.segments)
    if "recompute" in compiled.pipeline:
        assert any(note.code == "L070" for note in compiled.diagnostics)
    np.testing.assert_allclose(run_steps(tmp_path / "small.bundle", proto), reference_losses(proto), rtol=1e-5)


@pytest.mark.slow
def test_one_device_with_two_thirds_of_the_memory_needs_recomputation(step, tmp_path):
    _, path, peak = step
    options = {"devices": "cpu:0", "max_memory": str(int(0.6 * peak)), "trial": False}
    with pytest.raises(InfeasibleError):
        compile_model(path, tmp_path / "off.bundle", recompute="off", **options)
    compiled = compile_model(path, tmp_path / "auto.bundle", **options)
    assert "recompute{limit=" in compiled.pipeline
    whole = onnx.load(tmp_path / "auto.bundle" / "segments" / "whole.onnx", load_external_data=False)
    assert len(whole.graph.node) < sum(segment.nodes for segment in compiled.bundle.manifest.segments)


def test_what_no_recomputation_makes_fit_fails_as_before(step, tmp_path):
    _, path, peak = step
    with pytest.raises(InfeasibleError) as caught:
        compile_model(path, tmp_path / "no.bundle", devices="cpu:0", max_memory=str(peak // 20), trial=False)
    assert caught.value.code.startswith("P00")
    assert not (tmp_path / "no.bundle").exists()


def test_the_command_recomputes_when_asked(step, tmp_path, run_cli):
    _, path, peak = step
    output = tmp_path / "asked.bundle"
    size = str(int(0.7 * peak))
    command = ["compile", str(path), "-o", str(output), "--devices", "cpu:0", "--recompute", size, "--no-trial"]
    result = run_cli(*command, "--json")
    data = json.loads(result.out)
    assert any(note["code"] == "L070" for note in data["diagnostics"])
    assert Bundle.open(output).manifest.devices[0].peak_bytes < peak


@pytest.mark.parametrize("text", ["sometimes", "60%", ""])
def test_a_wrong_word_is_refused_before_any_work(step, tmp_path, text):
    _, path, _ = step
    with pytest.raises(UsageError, match="expected auto, off, always or a size") as caught:
        compile_model(path, tmp_path / "no.bundle", recompute=text)
    assert caught.value.code == "U005"


def test_a_pipeline_excludes_the_option(step, tmp_path):
    _, path, _ = step
    with pytest.raises(UsageError) as caught:
        compile_model(path, tmp_path / "no.bundle", recompute="always", pipeline="optimize,profile,single,split,emit")
    assert caught.value.code == "U042"
