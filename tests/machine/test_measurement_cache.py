"""The cache of measurements: entries are reused, shared by processes, and never required."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnxplace.facts import Profile, Source
from onnxplace.machine import measurement_cache
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model
from onnxplace.passes.profiling.node_measurement import MeasurementOptions
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State

ROOT = Path(__file__).parents[2]


@pytest.fixture
def measured_models(monkeypatch) -> list[Model]:
    """Return a list that takes each model that is measured from now on."""
    models: list[Model] = []
    actual = MeasurementOptions.measure
    monkeypatch.setattr(
        MeasurementOptions, "measure", lambda self, part, feeds: models.append(part) or actual(self, part, feeds)
    )
    return models


def run_profile(model_source: bytes | Path, options: str = "", batch: int = 4, devices: str = "cpu:0") -> State:
    model = bind(load(model_source), {"batch": batch}, {})
    text = f"optimize,profile{{repeat=3,seconds=0{options}}}"
    return Pipeline.parse(text).run(State(local_target(devices)).with_facts(model))[0]


def list_files() -> list[Path]:
    return sorted(measurement_cache.folder().glob("*"))


def test_a_second_profile_measures_nothing(model_file, measured_models):
    first, second = run_profile(model_file)[Profile], run_profile(model_file)[Profile]
    assert len(measured_models) == 1
    for kind in first.seconds:
        assert (first.seconds[kind] == second.seconds[kind]).all()
        assert (first.sources[kind] == second.sources[kind]).all()
    assert (first.unit == second.unit).all()
    assert (first.graph.value_bytes == second.graph.value_bytes).all()
    assert first.whole_seconds == second.whole_seconds


def test_a_measurement_on_a_busy_machine_is_reported_and_not_stored(model_file, measured_models, monkeypatch):
    actual = MeasurementOptions.measure

    def measure(self, part, feeds):
        measurement, entry = actual(self, part, feeds)
        return replace(measurement, quality=replace(measurement.quality, waiting=0.2)), entry

    monkeypatch.setattr(MeasurementOptions, "measure", measure)
    monkeypatch.setattr("onnxplace.passes.profiling.profile_model.DOUBTFUL_WAITING_SHARE", 0.05)
    for _ in range(2):
        (note,) = [note for note in run_profile(model_file).diagnostics if note.code == "C004"]
        assert "runs waited 20% of their time for a core" in note.message
        assert "not kept" in note.hint
    assert len(measured_models) == 2


@pytest.mark.parametrize("other", [{"batch": 8}, {"options": ",seed=1"}, {"options": ",tolerance=0.5"}], ids=str)
def test_other_inputs_or_options_are_measured(model_file, measured_models, other):
    run_profile(model_file)
    run_profile(model_file, **other)
    assert len(measured_models) == 2


def test_another_processor_or_version_of_onnxruntime_is_measured(model_file, measured_models, monkeypatch):
    run_profile(model_file)
    monkeypatch.setattr(measurement_cache, "processor", lambda: "another")
    run_profile(model_file)
    assert len(measured_models) == 2
    monkeypatch.setattr(measurement_cache, "VERSION", 99)
    run_profile(model_file)
    assert len(measured_models) == 3


def test_without_the_cache_nothing_is_read_and_what_is_measured_replaces_an_entry(model_file, measured_models):
    run_profile(model_file, ",cache=false")
    (file,) = list_files()
    run_profile(model_file)
    assert len(measured_models) == 1
    wrong = json.loads(file.read_text())
    wrong["seconds"] = [1e3 for _ in wrong["seconds"]]  # measured while something disturbed it
    file.write_text(json.dumps(wrong))
    run_profile(model_file, ",cache=false")
    assert len(measured_models) == 2
    assert list_files() == [file]
    assert max(json.loads(file.read_text())["seconds"]) < 1e3


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: "{",
        lambda data: "[]",
        lambda data: json.dumps({**data, "key": "other"}),
        lambda data: json.dumps({**data, "seconds": data["seconds"][1:]}),
        lambda data: json.dumps({**data, "seconds": [-1.0] * len(data["seconds"])}),
        lambda data: json.dumps({**data, "seconds": [float("nan")] * len(data["seconds"])}),
        lambda data: json.dumps({**data, "seconds": ["x"] * len(data["seconds"])}),
        lambda data: json.dumps({**data, "quality": {"other": 1}}),
        lambda data: json.dumps({name: value for name, value in data.items() if name != "unit"}),
    ],
)
def test_a_damaged_file_is_reported_and_replaced_by_a_new_measurement(model_file, measured_models, damage):
    run_profile(model_file)
    (path,) = list_files()
    path.write_text(damage(json.loads(path.read_text())))
    state = run_profile(model_file)
    assert [note.code for note in state.diagnostics] == ["C006"]
    assert path.name in state.diagnostics[0].message
    (sources,) = state[Profile].sources.values()
    assert set(sources.tolist()) <= {Source.MEASURED, Source.KNOWN}
    assert not run_profile(model_file).diagnostics
    assert len(measured_models) == 2


def test_a_cache_that_cannot_be_written_is_reported_and_profiles_all_the_same(model_file, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONNXPLACE_CACHE_DIR", str(tmp_path / "file"))
    state = run_profile(model_file)
    assert {note.code for note in state.diagnostics} == {"C006"}
    assert "not kept" in state.diagnostics[-1].message
    assert state[Profile].whole_seconds


def test_the_oldest_files_are_removed_first(monkeypatch):
    monkeypatch.setattr(measurement_cache, "MAX_FILES", 2)
    for number, name in enumerate(("a", "b", "c")):
        measurement_cache.write(name, {"number": number})
        os.utime(measurement_cache.folder() / f"{name}.json", (number, number))
    measurement_cache.write("d", {})
    assert [path.stem for path in list_files()] == ["c", "d"]
    assert measurement_cache.read("a") is None
    assert measurement_cache.read("c") == {"key": "c", "number": 2}
    assert measurement_cache.contents().files == 2


def test_processes_that_write_concurrently_leave_a_complete_file():
    script = "from onnxplace.machine import measurement_cache\n"
    script += "for n in range(50): measurement_cache.write('same', {'list': [n] * 5000})"
    running = [subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) for _ in range(3)]
    while any(process.poll() is None for process in running):
        measurement = measurement_cache.read("same")  # raises if it is damaged
        assert measurement is None or len(set(measurement["list"])) == 1
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len(list_files()) == 1


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="these have folders of their own")
def test_the_folder_follows_the_conventions_of_the_system(monkeypatch, tmp_path):
    monkeypatch.delenv("ONNXPLACE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measurement_cache.folder() == tmp_path / "onnxplace" / "costs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert measurement_cache.folder() == tmp_path / ".cache" / "onnxplace" / "costs"


def test_boundaries_between_parts_of_a_key_matter():
    assert measurement_cache.key(["ab", "c"]) != measurement_cache.key(["a", "bc"])
    assert measurement_cache.key(["ab", "c"]) == measurement_cache.key([b"ab", b"c"])


def test_the_command_measures_once_unless_the_cache_is_off(run_cli, model_file, measured_models):
    options = ("compile", model_file, "--shape", "batch=4", "--devices", "cpu:0,cpu:1", "--placer", "single", "--force")
    for more, count in (((), 1), ((), 1), (("--no-cache",), 2)):
        result = run_cli(*options, *more)
        assert result.code == 0, result.err
        assert len(measured_models) == count


LONG = ["a" * 3000, "b" * 3000]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array(LONG, dtype=object), np.array([LONG[0] + "x", LONG[1]], dtype=object)),
        (np.array(["a"] * 2000, dtype=object), np.array(["a"] * 999 + ["b"] * 1001, dtype=object)),
        ([np.zeros(5000), np.ones(5000)], [np.zeros(5000), np.arange(5000)]),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.full(3, 1.0), np.full(3, 1.0 + 1e-12)),
    ],
    ids=["text", "texts", "list", "shape", "digits"],
)
def test_every_element_of_an_input_matters_in_a_key(one, other):
    assert measurement_cache.described(one) == measurement_cache.described(copy.deepcopy(one))
    assert measurement_cache.described(one) != measurement_cache.described(other)


def test_a_rebuilt_library_has_another_key(tmp_path):
    path = tmp_path / "library.so"
    path.write_bytes(b"one")
    first = measurement_cache.file_described(str(path))
    path.write_bytes(b"other")
    assert measurement_cache.file_described(str(path)) != first
    path.unlink()
    assert measurement_cache.file_described(str(path)) == str(path)


def test_what_was_measured_while_the_machine_was_slower_is_measured_again(monkeypatch):
    monkeypatch.setattr(measurement_cache, "MAX_SLOWDOWN", 1.1)
    now = [50e-6]
    monkeypatch.setattr(measurement_cache, "find_least_reference_seconds", lambda: now[0])
    measurement_cache.write("a", {"number": 1})
    now[0] = 80e-6  # slower now: what was measured before is the better figure
    assert measurement_cache.read("a") == {"key": "a", "number": 1}
    now[0] = 40e-6
    assert measurement_cache.read("a") is None
    measurement_cache.write("a", {"number": 2})
    assert measurement_cache.read("a") == {"key": "a", "number": 2}


def test_what_a_later_measurement_contradicts_is_forgotten():
    for name in ("read", "written", "other"):
        measurement_cache.write(name, {})
    measurement_cache.forget_used()
    assert not list_files()
    measurement_cache.write("kept", {})
    assert [path.stem for path in list_files()] == ["kept"]
