"""What the cases about memory and pipelines are made of; test_cases.py runs them as a user does."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples" / "cases"))

import _case
import _diffusion
import diffusion_pipeline
import twice_its_memory
import two_cards

SIZES = diffusion_pipeline.QUICK_SIZES


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return _diffusion.write_pipeline(SIZES, tmp_path_factory.mktemp("pipeline"))


def open_session(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_the_program_makes_the_picture_that_the_three_models_make(pipeline):
    feeds = pipeline.feeds()
    expected = pipeline.run({name: open_session(path) for name, path in pipeline.parts.items()}, feeds)
    picture = open_session(pipeline.program).run(["picture"], feeds)[0]
    side = 8 * SIZES.unet.latent
    assert picture.shape == (1, 3, side, side)
    assert picture.std() > 1e-3
    np.testing.assert_allclose(picture, expected["picture"], atol=1e-4)


def test_each_step_has_its_own_nodes_and_all_read_the_same_weights(pipeline):
    models = {name: onnx.load(path, load_external_data=False) for name, path in pipeline.parts.items()}
    program = onnx.load(pipeline.program, load_external_data=False)
    onnx.checker.check_model(pipeline.program)
    nodes = {name: len(model.graph.node) for name, model in models.items()}
    steps = SIZES.steps * (nodes["denoise"] + 2)  # and what takes the noise away
    assert len(program.graph.node) == nodes["text"] + steps + nodes["decode"]
    weights = sum(len(model.graph.initializer) for model in models.values())
    assert len(program.graph.initializer) == weights + 2 * SIZES.steps  # the time of each step, and its share


def test_the_schedule_takes_all_of_the_noise_away():
    times, shares = zip(*_diffusion.schedule(replace(SIZES, steps=5)))
    assert sum(shares) == pytest.approx(1)
    assert {item.shape for item in times} == {(1, SIZES.unet.channels[0])}
    assert len({item.tobytes() for item in times}) == 5


def make_record(seconds, **others):
    return {"opening": 1.0, "first": 0.1, "steps": [seconds], "is_limited": True, **others}


def test_a_process_that_was_killed_has_no_figures():
    joined = twice_its_memory.join_records([make_record(0.1), {"failure": "killed"}])
    assert joined == {"failure": "killed"}
    assert twice_its_memory.list_openings({"one": joined}) == []


def test_records_of_a_way_are_joined_with_their_largest_memory():
    joined = twice_its_memory.join_records([make_record(0.1, anonymous_bytes=3), make_record(0.2, anonymous_bytes=5)])
    assert joined["steps"] == [0.1, 0.2]
    assert joined["anonymous_bytes"] == 5


@pytest.fixture
def job(tmp_path):
    """Return the job of a process that runs a tiny model."""
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) {y = Abs(x)}'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    np.savez(tmp_path / "feeds.npz", x=np.float32([-1, 2]))
    files = {"model": "model.onnx", "feeds": "feeds.npz", "outputs": "outputs.npz"}
    return {"session": "bound", "steps": 2, **{key: str(tmp_path / name) for key, name in files.items()}}


def test_a_process_with_too_little_memory_is_killed_and_one_with_enough_is_not(job):
    try:
        with twice_its_memory.ControlGroup(1 << 30):
            pass
    except SystemExit as problem:
        pytest.skip(str(problem))
    record = twice_its_memory.run_job(job, 1 << 30)
    assert len(record["steps"]) == 2
    assert record["is_limited"]
    with np.load(job["outputs"]) as outputs:
        assert outputs["y"].tolist() == [1, 2]
    assert twice_its_memory.run_job(job, 16 << 20)["failure"] == "killed"


@pytest.mark.parametrize("session", ["bound", "mapped"])
def test_without_the_right_to_make_a_group_a_process_runs_without_a_limit(session, job, monkeypatch):
    def refuse(limit):
        raise SystemExit("no control group can be made here")

    monkeypatch.setattr(twice_its_memory, "ControlGroup", refuse)
    record = twice_its_memory.run_job({**job, "session": session}, 16 << 20)
    assert len(record["steps"]) == 2
    assert not record["is_limited"]


def make_bundle(*peaks, limit=100):
    devices = [SimpleNamespace(peak_bytes=peak, limit_bytes=limit) for peak in peaks]
    return SimpleNamespace(manifest=SimpleNamespace(devices=devices))


def test_cards_with_work_are_counted():
    assert "one: 1 of 2 cards" in two_cards.describe_limits({"one": make_bundle(90, 0)})


def test_a_prediction_above_its_limit_ends_the_case():
    with pytest.raises(SystemExit, match="one: a card needs more than its limit"):
        two_cards.describe_limits({"one": make_bundle(90, 101)})


@pytest.mark.slow
def test_a_model_that_fits_one_card_keeps_its_limit_and_one_that_does_not_is_divided(tmp_path):
    settings = _case.Settings(quick=True, folder=tmp_path)
    path = tmp_path / "decoder.onnx"
    two_cards.models.save(two_cards.decoder(**two_cards.QUICK_SIZES), path, external=True)
    bundles = two_cards.compile_ways(path, settings)
    for bundle in bundles.values():
        assert all(device.peak_bytes <= device.limit_bytes for device in bundle.manifest.devices)
    for what in ("layers, 70 %", "shared operators, 70 %"):
        assert all(device.weights_bytes > 0 for device in bundles[what].manifest.devices)
