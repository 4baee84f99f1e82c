"""The command `onnxplace train`: as a user runs it, resumed, interrupted, and with all that can be wrong."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxplace
from onnxplace_training import BatchSampler, Trainer, map_arrays
from plugins.training.tests.test_trainer import compile_model
from tests.support.fault_checks import HUNG_SECONDS, wait_until
from tests.support.training_models import make_mlp, make_two_tower


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> onnxplace.Bundle:
    return compile_model(make_mlp("adamw"), tmp_path_factory.mktemp("mlp") / "step.bundle")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    random = np.random.default_rng(0)
    x = random.normal(size=(22, 8)).astype("f4")
    file = tmp_path_factory.mktemp("data") / "data.npz"
    np.savez(file, x=x, target=np.tanh(x[:, :4]))
    return file


@pytest.fixture
def train(run_cli, bundle, data):
    return lambda *arguments: run_cli("train", bundle.path, "--data", data, *arguments)


def read_losses(file: Path) -> list[str]:
    return [row["loss"] for row in csv.DictReader(file.read_text().splitlines())]


def test_a_run_writes_all_that_was_asked_for(train, tmp_path):
    files = {name: tmp_path / f"out.{name}" for name in ("safetensors", "csv", "png", "onnx")}
    options = ("--save", files["safetensors"], "--log", files["csv"], "--plot", files["png"], "--export", files["onnx"])
    result = train("--steps", 40, "--lr", 0.01, *options)
    assert result.code == 0, result
    assert "step 40: loss" in result.out
    assert "ms a step" in result.out
    losses = [float(text) for text in read_losses(files["csv"])]
    assert len(losses) == 40
    assert losses[-1] < losses[0]
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    onnx.checker.check_model(str(files["onnx"]))
    from safetensors.numpy import load_file

    assert "layers.0.weight.exp_avg" in load_file(files["safetensors"])


def test_json_says_the_same(train):
    result = train("--steps", 3, "--json")
    report = json.loads(result.out)
    assert (report["step"], report["steps"], report["rows"], report["batch"]) == (3, 3, 22, 4)
    assert report["loss"] > 0
    assert result.err == ""


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(train, tmp_path, schedule):
    whole, parts = tmp_path / "whole.csv", tmp_path / "parts.csv"
    save, other = tmp_path / "c.safetensors", tmp_path / "d.safetensors"
    more = ("--lr", 0.02, "--seed", 3)
    if schedule != "constant":
        more += ("--schedule", schedule, "--warmup", 2)
    assert train("--steps", 17, "--log", whole, "--save", other, *more).code == 0
    # As if Ctrl-C had come after step 8: the checkpoint of --save-every is of a run to step 17.
    assert train("--steps", 17, "--log", parts, "--save", save, "--save-every", 8, *more).code == 0
    expected = read_losses(whole)
    assert read_losses(parts) == expected
    if schedule == "constant":
        assert train("--steps", 6, "--log", parts, "--save", save, *more).code == 0
        result = train("--steps", 17, "--log", parts, "--resume", save, "--save", save, *more[:2])
        assert result.code == 0, result
        assert read_losses(parts) == expected
    assert save.read_bytes() == other.read_bytes()


def test_nothing_is_left_to_do_after_the_last_step(train, tmp_path):
    save = tmp_path / "c.safetensors"
    train("--steps", 2, "--save", save)
    result = train("--steps", 2, "--resume", save)
    assert result.code == 0
    assert "nothing to do: the checkpoint is of step 2" in result.out


def test_other_data_of_a_resumed_run_is_noted(train, tmp_path, run_cli, bundle, data):
    save, fewer = tmp_path / "c.safetensors", tmp_path / "fewer.npz"
    train("--steps", 2, "--save", save)
    np.savez(fewer, **{name: array[:9] for name, array in np.load(data).items()})
    result = run_cli("train", bundle.path, "--data", fewer, "--steps", 4, "--resume", save)
    assert result.code == 0
    assert "note[L058]" in result.err
    assert "22 as number of rows, this run has 9" in result.err


def test_each_epoch_has_all_rows_in_another_order(bundle, data):
    arrays = np.load(data)
    sampler = BatchSampler(bundle, data, seed=5)
    assert (sampler.rows, sampler.batch, sampler.steps_per_epoch) == (22, 4, 5)
    epochs = []
    for epoch in range(2):
        batches = [sampler.draw(1 + epoch * 5 + number) for number in range(5)]
        rows = np.concatenate([batch["x"] for batch in batches])
        numbers = [int(np.flatnonzero((arrays["x"] == row).all(axis=1))[0]) for row in rows]
        assert len(set(numbers)) == 20
        np.testing.assert_array_equal(np.concatenate([batch["target"] for batch in batches]), arrays["target"][numbers])
        epochs.append(numbers)
    assert epochs[0] != epochs[1]
    np.testing.assert_array_equal(BatchSampler(bundle, data, seed=5).draw(8)["x"], sampler.draw(8)["x"])
    assert (BatchSampler(bundle, data, seed=6).draw(1)["x"] != sampler.draw(1)["x"]).any()


# ---------------------------------------------------------------------------------------------------- what can be wrong


def save_arrays(folder: Path, **arrays: np.ndarray) -> Path:
    np.savez(folder / "bad.npz", **arrays)
    return folder / "bad.npz"


X, TARGET = np.zeros((8, 8), "f4"), np.zeros((8, 4), "f4")


@pytest.mark.parametrize(
    ("arrays", "options", "code", "message"),
    [
        ({"x": X}, (), "F002", "it has no array 'target', which the step takes"),
        ({"x": X, "targets": TARGET}, (), "F002", "did you mean 'targets'"),
        ({"x": X, "target": TARGET[:5]}, (), "F011", "'target' has 5 rows, 'x' has 8"),
        ({"x": X[:3], "target": TARGET[:3]}, (), "F011", "expected at least the 4 rows of a batch, its arrays have 3"),
        ({"x": X, "target": TARGET}, ("--batch", 5), "F011", "expected 4 rows, as the model takes of 'x', got 5"),
        ({"x": np.zeros((8, 9), "f4"), "target": TARGET}, (), "F003", "its shape is [4, 9]"),
        ({"x": X.astype("f8"), "target": TARGET}, (), "F003", "its type is float64"),
        ({"x": X, "target": TARGET}, ("--lr", -1), "U005", "expected a learning rate of 0 or more, got -1"),
        ({"x": X, "target": TARGET}, ("--lr", "nan"), "U005", "expected a learning rate of 0 or more, got nan"),
        ({"x": X, "target": TARGET}, ("--lr", "fast"), "U000", "'fast' is not a valid float"),
        ({"x": X, "target": TARGET}, ("--schedule", "cosine"), "U042", "a schedule needs a learning rate"),
        ({"x": X, "target": TARGET}, ("--save-every", 2), "U042", "--save-every needs a file"),
        ({"x": X, "target": TARGET}, ("--plot", "loss.txt"), "U032", "expected a file that ends with .png, .svg, .pdf"),
        ({"x": X, "target": TARGET}, ("--save", "/nowhere/c.safetensors"), "U032", "there is no folder /nowhere"),
        ({"x": X, "target": TARGET}, ("--log", "a.csv", "--plot", "a.csv"), "U032", "name the same file"),
    ],
)
def test_bad_data_and_options_are_named(run_cli, bundle, tmp_path, arrays, options, code, message):
    result = run_cli("train", bundle.path, "--data", save_arrays(tmp_path, **arrays), "--steps", 2, "--json", *options)
    assert result.code == 2, result
    assert message in result.err
    assert json.loads(result.out)["error"]["code"] == code


def test_the_data_file_is_not_overwritten(train, data):
    result = train("--steps", 1, "--log", data)
    assert result.code == 2
    assert "which is read" in result.err


def test_a_bundle_of_another_model_is_named(run_cli, compiled, data):
    result = run_cli("train", compiled, "--data", data, "--steps", 1)
    assert result.code == 2
    assert "error[L040]" in result.err
    assert "this bundle is not one of a training step" in result.err


def test_a_checkpoint_of_another_model_names_the_first_difference(train, run_cli, tmp_path, bundle):
    other = compile_model(make_mlp("adamw", widths=(8, 12, 16, 4)), tmp_path / "other.bundle")
    with Trainer(other) as trainer:
        trainer.save(tmp_path / "other.safetensors")
    towers = compile_model(make_two_tower(), tmp_path / "towers.bundle")
    with Trainer(towers) as trainer:
        trainer.save(tmp_path / "towers.safetensors")
    result = train("--steps", 1, "--resume", tmp_path / "other.safetensors")
    assert result.code == 2
    assert "error[L041]" in result.err
    assert "'layers.0.weight' has the shape [8, 12], expected [8, 16]" in result.err
    result = train("--steps", 1, "--resume", tmp_path / "towers.safetensors")
    assert "it has no 'layers.0.weight', which this model has" in result.err


def test_damaged_checkpoints_are_refused(train, tmp_path):
    save = tmp_path / "c.safetensors"
    train("--steps", 1, "--save", save)
    whole = save.read_bytes()
    for content in (b"", whole[:5], whole[:300], whole[:-10], b"x" * 100, b"\xff" * 8 + whole[8:]):
        save.write_bytes(content)
        result = train("--steps", 2, "--resume", save)
        assert result.code == 2, content[:20]
        assert "error[L041]" in result.err
    result = train("--steps", 2, "--resume", tmp_path / "missing.safetensors")
    assert result.code == 2
    assert "error[L041]" in result.err


def test_another_seed_than_the_checkpoints_is_refused(train, tmp_path):
    save = tmp_path / "c.safetensors"
    train("--steps", 1, "--save", save, "--seed", 4)
    assert train("--steps", 2, "--resume", save, "--seed", 4).code == 0
    result = train("--steps", 2, "--resume", save, "--seed", 5)
    assert result.code == 2
    assert "the checkpoint was trained with seed 4, got 5" in result.err


@pytest.mark.parametrize(
    "text", ["a,b\n1,2\n", "step,loss\n1,2,3\n", "step,loss,seconds\n1,2\n", f"step,{'x' * 200_000}\n"]
)
def test_a_file_that_is_no_loss_curve_is_not_continued(text, train, tmp_path):
    save, log = tmp_path / "c.safetensors", tmp_path / "log.csv"
    train("--steps", 1, "--save", save)
    log.write_text(text)
    result = train("--steps", 2, "--resume", save, "--log", log)
    assert result.code == 2
    assert "error[U031]" in result.err
    assert log.read_text() == text


def test_without_matplotlib_the_extra_is_named(train, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = train("--steps", 1, "--plot", tmp_path / "loss.png")
    assert result.code == 2
    assert "error[U110]" in result.err
    assert "pip install 'onnxplace[train]'" in result.err


def test_a_nan_loss_ends_the_run_and_saves_the_states_before_it(run_cli, bundle, tmp_path):
    x = np.zeros((4, 8), "f4")
    x[2] = np.nan
    data = save_arrays(tmp_path, x=x, target=TARGET[:4])
    save = tmp_path / "c.safetensors"
    result = run_cli("train", bundle.path, "--data", data, "--steps", 3, "--save", save, "--json")
    assert result.code == 4
    assert json.loads(result.out)["error"]["code"] == "L045"
    assert "the loss is NaN in step 1; the states are those after step 0" in result.err
    assert not save.exists()
    result = run_cli("train", bundle.path, "--data", data, "--steps", 3, "--on-nan", "continue", "--json")
    assert result.code == 0
    assert json.loads(result.out)["loss"] is None


# ---------------------------------------------------------------------------------------------------------- full disks

FULL = Path("/dev/full")


@pytest.fixture
def full_disk(tmp_path):
    """Return a function that returns a file on a full disk."""
    if not FULL.exists():
        pytest.skip("no such device")

    def link(name: str) -> Path:
        (tmp_path / name).symlink_to(FULL)
        return tmp_path / name

    return link


def read_step(file: Path) -> int:
    return int(map_arrays(file, "L041", "").metadata["step"])


@pytest.mark.parametrize("json_", [(), ("--json",)])
def test_files_that_cannot_be_written_lose_no_other_result(train, tmp_path, full_disk, json_):
    save, model, log, plot = tmp_path / "c.safetensors", tmp_path / "m.onnx", full_disk("l.csv"), full_disk("p.png")
    options = ("--save", save, "--export", model, "--log", log, "--plot", plot)
    result = train("--steps", 3, *options, *json_)
    assert result.code == 2, result
    assert result.err.count("error[") == result.err.count("No space left on device") == 2
    assert read_step(save) == 3
    onnx.checker.check_model(str(model))
    if json_:
        assert json.loads(result.out)["error"]["code"] == "U032"


def test_a_checkpoint_that_cannot_be_written_loses_no_other_result(train, tmp_path, full_disk):
    model, log, plot = (tmp_path / name for name in ("m.onnx", "l.csv", "p.png"))
    result = train("--steps", 3, "--save", full_disk("c"), "--export", model, "--log", log, "--plot", plot)
    assert result.code == 2, result
    assert result.err.count("error[") == 1
    assert len(read_losses(log)) == 3
    assert plot.read_bytes().startswith(b"\x89PNG")
    onnx.checker.check_model(str(model))


def test_a_failed_run_is_saved_even_if_its_losses_cannot_be(run_cli, bundle, data, tmp_path, full_disk):
    arrays = dict(np.load(data))
    last = BatchSampler(bundle, data).draw(5)["x"][0]  # in the fifth step, by the default seed
    arrays["x"][(arrays["x"] == last).all(axis=1)] = np.nan
    save, log = tmp_path / "c.safetensors", full_disk("log.csv")
    file = save_arrays(tmp_path, **arrays)
    result = run_cli("train", bundle.path, "--data", file, "--steps", 9, "--save", save, "--log", log)
    assert result.code == 4
    assert "ended after step 4 of 9" in result.err
    assert "No space left on device" in result.err
    assert "error[L045]" in result.err
    assert read_step(save) == 4


# ----------------------------------------------------------------------------------------------------------- interrupts

KILLED_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
from onnxplace.cli.app import main
from onnxplace_training import array_files
array_files.os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
main(sys.argv[1:])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals and locks")
@pytest.mark.slow
def test_what_a_killed_save_left_is_removed_by_the_next_one(train, bundle, data, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / ".onnxplace-notes").write_text("mine")
    command = ("train", bundle.path, "--data", data, "--steps", "2", "--save", folder / "c.safetensors")
    script = [sys.executable, "-c", KILLED_WHILE_SAVING, *map(str, command)]
    assert subprocess.run(script, timeout=HUNG_SECONDS, check=False).returncode == -signal.SIGKILL
    assert len(list(folder.iterdir())) == 2  # with what was written up to then
    assert train("--steps", 2, "--save", folder / "c.safetensors").code == 0
    assert {path.name for path in folder.iterdir()} == {"c.safetensors", ".onnxplace-notes"}


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_an_interrupted_run_is_saved_and_continues_bit_for_bit(number, bundle, data, tmp_path, run_cli):
    save, log, whole = tmp_path / "c.safetensors", tmp_path / "log.csv", tmp_path / "whole.csv"
    command = [sys.executable, "-m", "onnxplace", "train", str(bundle.path), "--data", str(data)]
    files = ["--save", str(save), "--log", str(log)]
    options = ["--steps", "1000000", "--save-every", "20", *files]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env={**os.environ})
    wait_until(lambda: save.exists() or process.poll() is not None)
    process.send_signal(number)
    _, err = process.communicate(timeout=HUNG_SECONDS)
    assert process.returncode == 128 + number, err
    assert "ended after step" in err
    assert f"continue with --resume {save}" in err
    steps = int(err.split("ended after step ")[1].split()[0])
    losses = read_losses(log)
    assert len(losses) == steps
    result = run_cli("train", bundle.path, "--data", data, "--steps", steps + 5, "--resume", save, *files)
    assert result.code == 0, result
    assert run_cli("train", bundle.path, "--data", data, "--steps", steps + 5, "--log", whole).code == 0
    assert read_losses(log) == read_losses(whole)
