"""`onnxplace devices`, `passes` and `runtimes`."""

import tomllib
from pathlib import Path

import pytest

from tests.support.commands import FAST, SHAPE, only_json

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")


def test_devices_shows_the_hardware(run_cli):
    result = run_cli("devices")
    assert result.code == 0
    assert "onnxruntime" in result.out
    data = only_json(run_cli("devices", "--json"))
    assert set(data) >= {"host", "accelerators", "onnxruntime", "default"}
    assert data["default"]


def test_a_target_that_devices_wrote_compiles(run_cli, model_file):
    assert run_cli("devices", "-o", "target.toml").code == 0
    written = [device["id"] for device in tomllib.loads(Path("target.toml").read_text())["devices"]]
    data = only_json(run_cli("compile", model_file, *FAST, "--target", "target.toml", "--json"))
    assert [device["id"] for device in data["devices"]] == written


def test_a_target_of_another_machine_compiles_with_estimates(run_cli, model_file, monkeypatch):
    monkeypatch.setattr("onnxplace.machine.hardware.find_device_problem", lambda device: "there is none here")
    device = '[[devices]]\nid = "cuda:{}"\nmemory_bytes = 80000000000\nmodel = "Imaginary 9000"\n'
    Path("target.toml").write_text(device.format(0) + device.format(1))
    result = run_cli("compile", model_file, *SHAPE, "--target", "target.toml", "--json")
    data = only_json(result)
    assert result.code == 0
    assert [item["id"] for item in data["devices"]] == ["cuda:0", "cuda:1"]
    assert "C001" in {note["code"] for note in data["diagnostics"]}
    assert run_cli("run", "model.bundle", "--runtime", "simulated").code == 0


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("passes", ["optimize", "profile", "coplace", "fuse", "single", "m-topo", "m-etf", "split", "emit"]),
        ("runtimes", ["onnxruntime", "simulated"]),
    ],
)
def test_passes_and_runtimes_are_listed_with_a_line_each(run_cli, command, names):
    data = only_json(run_cli(command, "--json"))[command]
    assert set(names) <= {entry["name"] for entry in data}
    assert all(entry["summary"] for entry in data)
    lines = {line.split()[0]: line for line in run_cli(command).out.splitlines()}
    assert set(names) <= set(lines)


def test_summaries_stand_in_one_column(run_cli):
    lines = run_cli("passes").out.splitlines()[1:]
    assert len({len(line) - len(line.split(maxsplit=1)[1]) for line in lines}) == 1


def test_a_pass_is_shown_with_its_options_and_defaults(run_cli):
    result = run_cli("passes", "profile")
    assert result.code == 0
    for words in ("Measure", "repeat", "int", "estimate", "False"):
        assert words in result.out
    data = only_json(run_cli("passes", "profile", "--json"))
    assert data["name"] == "profile"
    assert {"name", "type", "default"} <= set(data["options"][0])
    assert next(option for option in data["options"] if option["name"] == "estimate")["default"] is False


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("auto", "seconds=2.0  (float, at least 0)"),
        ("m-sct", "threshold=0.1  (float, at least 0, at most 1)"),
        ("profile", "repeat=100  (int, at least 1)"),
        ("profile", "estimate=False  (bool)"),
    ],
)
def test_the_type_of_an_option_is_in_words(run_cli, name, shown):
    assert shown in run_cli("passes", name).out


def test_a_runtime_is_shown_with_its_description(run_cli):
    assert "ONNX Runtime" in run_cli("runtimes", "onnxruntime").out


def test_the_list_of_commands_has_a_whole_sentence_for_each(run_cli):
    commands = run_cli("--help").out.partition("Commands:\n")[2].splitlines()
    assert len(commands) > 15
    for line in commands:
        assert line.endswith("."), line
        assert not line.endswith("..."), line
