"""Commands with isolated devices: what a crash of their process does, with and without `--fallback`."""

from pathlib import Path

import numpy as np
import pytest

import onnxplace
from plugins.serving.tests.test_serve_command import served as served
from tests.conftest import FAST_PIPELINE
from tests.support.commands import SHAPE, only_json, run_unsplit
from tests.support.faulty_plugin import install_faulty_kind
from tests.support.isolated import crash_at_next_run, list_children

DEVICES = "cpu:0,cpu:1{isolate=true}"


@pytest.fixture
def isolated(run_cli, model_file, tmp_path, monkeypatch) -> Path:
    """A bundle with an isolated device, as a user compiles it."""
    monkeypatch.chdir(tmp_path)
    result = run_cli("compile", model_file, "--devices", DEVICES, *SHAPE, "--pipeline", FAST_PIPELINE, "-o", "isolated")
    assert result.code == 0, result.err
    assert not list_children()
    return tmp_path / "isolated"


def test_an_isolated_device_computes_what_the_model_does(run_cli, isolated):
    assert [dict(device.options) for device in onnxplace.load(isolated).target.devices] == [{}, {"isolate": "true"}]
    feeds = {"x": np.random.default_rng(7).standard_normal((5, 64)).astype("f4")}
    np.savez("feeds.npz", **feeds)
    result = run_cli("run", isolated, "--inputs", "feeds.npz", "--outputs", "out.npz")
    assert (result.code, result.err) == (0, "")
    with np.load("out.npz") as outputs:
        np.testing.assert_allclose(outputs["y"], run_unsplit(feeds), rtol=1e-4, atol=1e-4)
    assert not list_children()


def test_a_crash_ends_the_command_with_device_segment_and_what_to_do(run_cli, isolated, monkeypatch):
    crash_at_next_run(monkeypatch)
    result = run_cli("run", isolated)
    assert (result.code, result.out) == (4, "")
    first, hint = result.err.splitlines()
    assert first.startswith("error[X016] cpu:1: segment cpu1-00")
    assert first.endswith(" failed: the process of this device ended: SIGKILL")
    assert hint == "  hint: its sessions are isolated, so all else goes on; open a new session, or use --fallback cpu:0"


COMMANDS = {
    "run": ("run", "--repeat", 3),
    "run for programs": ("run", "--json"),
    "serve": ("serve", "--warmup", "--port", 0, "--grpc-port", 0),
    "bench": ("bench", "--no-memory", "--repeat", 1),
}


@pytest.mark.parametrize("name", [*list(COMMANDS)[:3], pytest.param("bench", marks=pytest.mark.slow)])
def test_with_a_fallback_the_command_goes_on_and_says_so_once(run_cli, isolated, served, monkeypatch, name):
    crash_at_next_run(monkeypatch)
    command, *options = COMMANDS[name]
    result = run_cli(command, isolated, *options, "--fallback", "cpu:0")
    assert result.code == 0, result.err
    notes = [line for line in result.err.splitlines() if "X016" in line]
    assert [line.startswith("note[X016] cpu:1: segment cpu1-00") for line in notes] == [True]
    assert notes[0].endswith("the process of this device ended: SIGKILL; cpu:0 runs its segments from now on")
    if "--json" in options:
        assert only_json(result)["outputs"]["y"]["shape"] == [4, 64]


def test_a_crash_while_opening_is_an_error_of_one_line(run_cli, model_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with install_faulty_kind(tmp_path, monkeypatch):
        devices = ("--devices", "faulty:0{isolate=true}", *SHAPE, "--pipeline", FAST_PIPELINE, "-o", "faulty")
        assert run_cli("compile", model_file, *devices).code == 0
        monkeypatch.setenv("FAULTY_DEVICE", "opening")
        result = run_cli("run", "faulty")
        assert (result.code, result.out) == (4, "")
        assert result.err.startswith(
            "error[X016] faulty:0: segment faulty0-000 failed: the process of this device ended: SIGSEGV"
        )
        assert run_cli("compile", model_file, *SHAPE, "--pipeline", FAST_PIPELINE, "-o", "plain").code == 0
        assert run_cli("run", "plain").code == 0


@pytest.mark.slow
def test_costs_and_memory_of_an_isolated_device_are_measured(run_cli, model_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_cli("compile", model_file, "--devices", "cpu:0{isolate=true}", *SHAPE, "-o", "isolated").code == 0
    bundle = onnxplace.load("isolated")
    assert bundle.manifest.trial is not None
    result = run_cli("bench", "isolated", "--repeat", 1, "--json")
    (device,) = only_json(result)["devices"]
    weights = bundle.manifest.devices[0].weights_bytes
    assert device["peak_bytes"] > weights > 0, "its sessions are counted, although they are in another process"
    assert not list_children()
