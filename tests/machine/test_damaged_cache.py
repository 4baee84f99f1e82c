"""Damaged entries of the cost cache count as absent and are removed."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import onnxplace
from onnxplace.errors import Diagnostic
from onnxplace.facts import Profile, Quality
from onnxplace.machine import measurement_cache
from onnxplace.machine.hardware import local_target
from onnxplace.measure import trial
from onnxplace.measure.cached_trials import recall_trials
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.passes.profiling.node_measurement import Measurement
from onnxplace.passes.profiling.profile_model import recall_measurement, store_measurement
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State

NODES = 3
QUALITY = Quality(17, 0.1, 0.01, 0.0, 3, 1e-3, 1e-6)
NEEDS_POSIX = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes in folders")


def path_of(name: str) -> Path:
    return measurement_cache.folder() / f"{name}.json"


def keep_one(name: str = "one") -> dict:
    """Store a measurement, and return the content of its file."""
    measurement = Measurement(
        seconds=np.array([1e-3, 0.0, 2e-3]),
        unit=np.array([0, 0, 1], dtype=np.int32),
        ran=np.array([True, False, True]),
        measured=np.ones(NODES, dtype=bool),
        whole_seconds=3e-3,
        value_bytes={"a": 4},
        spread=np.zeros(NODES),
        quality=QUALITY,
    )
    store_measurement(name, measurement, [Diagnostic("C004", "busy")])
    return json.loads(path_of(name).read_text())


def test_a_stored_measurement_is_recalled_unchanged():
    keep_one()
    measurement, notes = recall_measurement("one", NODES)
    assert measurement.seconds.tolist() == [1e-3, 0.0, 2e-3]
    assert (measurement.unit.dtype, measurement.ran.tolist()) == (np.int32, [True, False, True])
    assert measurement.quality == QUALITY
    assert type(measurement.quality.runs) is int
    assert notes == [Diagnostic("C004", "busy")]
    assert recall_measurement("other", NODES) is None


ODD = (None, True, "1", -1, 1e308, 2**63, 10**400, float("nan"), float("inf"), [], {}, [[1]], [1, 2, 3, 4])


@pytest.mark.parametrize(
    "field", ["seconds", "spread", "unit", "ran", "whole_seconds", "value_bytes", "quality", "notes"]
)
def test_an_entry_with_an_odd_field_is_damaged_and_removed(field):
    good = keep_one()
    for odd in ODD:
        candidates = [odd]
        if isinstance(good[field], list):
            candidates.append([odd, *good[field][1:]])
        if isinstance(good[field], dict):
            candidates.append({**good[field], next(iter(good[field])): odd})
        for value in candidates:
            if is_valid_for(field, value):
                continue
            path_of("one").write_text(json.dumps({**good, field: value}))
            with pytest.raises(ValueError, match="is damaged") as caught:
                recall_measurement("one", NODES)
            assert "one.json" in str(caught.value)
            assert not path_of("one").exists(), (field, value)


def is_valid_for(field: str, value: object) -> bool:
    """Return whether a value that is odd for other fields is valid for this one."""
    if value is None and field in ("whole_seconds", "quality"):
        return True
    if field == "ran":
        return value == [True, False, True]
    return (field, value) in [("notes", []), ("value_bytes", {})]


def test_impossible_value_sizes_are_damage():
    good = keep_one()
    path_of("one").write_text(json.dumps({**good, "value_bytes": {str(n): 1 << 50 for n in range(5000)}}))
    with pytest.raises(ValueError, match="more bytes"):
        recall_measurement("one", NODES)


DAMAGES = {
    "binary": lambda path: path.write_bytes(b"\xff\x00\xfe" * 100),
    "empty": lambda path: path.write_bytes(b""),
    "nested": lambda path: path.write_text("[" * 200_000),
    "digits": lambda path: path.write_text("1" * 5000),
    "list": lambda path: path.write_text("[1]"),
    "large": lambda path: os.truncate(path, 1 << 40),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "zeros": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "loop": lambda path: (path.unlink(), path.symlink_to(path)),
    "folder link": lambda path: (path.unlink(), path.symlink_to(path.parent)),
}


@NEEDS_POSIX
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_anything_in_the_place_of_an_entry_is_replaced(damage):
    keep_one()
    damage(path_of("one"))
    with pytest.raises(ValueError, match=r"one\.json"):
        recall_measurement("one", NODES)
    assert not path_of("one").exists()
    keep_one()
    assert recall_measurement("one", NODES) is not None
    assert not path_of("one").is_symlink()


@NEEDS_POSIX
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_an_entry_is_written_over_anything_in_its_place(damage):
    keep_one()
    damage(path_of("one"))
    keep_one()
    assert recall_measurement("one", NODES) is not None
    assert Path("/dev/zero").is_char_device()


def test_a_folder_with_files_in_the_place_of_an_entry_stays():
    path_of("one").mkdir(parents=True)
    (path_of("one") / "mine").write_text("")
    with pytest.raises(ValueError, match="damaged"):
        recall_measurement("one", NODES)
    with pytest.raises(ValueError, match=r"one\.json"):
        keep_one()
    assert (path_of("one") / "mine").exists()


def test_a_damaged_entry_is_reported_once_and_measured_again(model_file):
    def run_profile() -> State:
        model = bind(load(model_file), {"batch": 4}, {})
        return Pipeline.parse("optimize,profile{repeat=3,seconds=0}").run(
            State(local_target("cpu:0")).with_facts(model)
        )[0]

    first = run_profile()
    (path,) = measurement_cache.folder().glob("*.json")
    data = json.loads(path.read_text())
    for damaged in ({**data, "whole_seconds": 1e308}, {**data, "notes": 3}, {**data, "value_bytes": [1]}):
        path.write_text(json.dumps(damaged))
        state = run_profile()
        assert [note.code for note in state.diagnostics] == ["C006"]
        assert max(state[Profile].whole_seconds.values()) < 10
        assert len(state[Profile].unit) == len(first[Profile].unit)
        assert not run_profile().diagnostics


# ---------------------------------------------------------------------------------------------- trials


@pytest.fixture
def kept_trial(compiled):
    """A bundle, feeds, and the path of its stored trial."""
    bundle = onnxplace.load(compiled)
    feeds = {"x": np.ones((4, 64), dtype=np.float32)}
    trial.run_trials([bundle], feeds)
    (path,) = measurement_cache.folder().glob("*.json")
    return bundle, feeds, path


def test_a_damaged_trial_counts_as_absent_and_is_removed(kept_trial):
    bundle, feeds, path = kept_trial
    good = json.loads(path.read_text())
    (trial_entry,) = good["trials"]
    name = path.stem
    assert recall_trials(name, trial.Trial, [bundle])
    segment = next(iter(trial_entry["segment_seconds"]))
    changes = [{field: odd} for field in ("step_seconds", "request_seconds", "requests", "waiting") for odd in ODD]
    changes += [{"segment_seconds": {**trial_entry["segment_seconds"], segment: odd}} for odd in ODD]
    changes += [{"segment_seconds": odd} for odd in ODD]
    for damaged in [*({**good, "trials": [{**trial_entry, **change}]} for change in changes), {**good, "trials": 5},
                    {**good, "trials": []}, {**good, "trials": [trial_entry, trial_entry]}, {"key": name}]:  # fmt: skip
        path.write_text(json.dumps(damaged))
        assert not recall_trials(name, trial.Trial, [bundle])
        assert not path.exists()
    (repeated,) = trial.run_trials([bundle], feeds)
    assert 0 < repeated.step_seconds < 10
    assert path.exists()


# ---------------------------------------------------------------------------------------------- the oldest go first


def test_entries_dated_in_the_future_do_not_displace_new_ones(monkeypatch):
    monkeypatch.setattr(measurement_cache, "MAX_FILES", 3)
    for name in ("a", "b", "c"):
        measurement_cache.write(name, {})
    ahead = time.time() + 1e8
    for name in ("a", "b"):
        os.utime(path_of(name), (ahead, ahead))
    for name in ("d", "e"):
        measurement_cache.write(name, {})
        assert measurement_cache.read(name)
    assert sorted(path.stem for path in measurement_cache.folder().glob("*.json")) == ["c", "d", "e"]


def test_a_new_entry_stays_even_if_the_clock_is_wrong(monkeypatch):
    monkeypatch.setattr(measurement_cache, "MAX_FILES", 1)
    for name in ("a", "b", "c"):
        measurement_cache.write(name, {})
        assert [path.stem for path in measurement_cache.folder().glob("*.json")] == [name]


def test_an_entry_that_is_too_large_is_not_stored(monkeypatch):
    monkeypatch.setattr(measurement_cache, "MAX_FILE_BYTES", 100)
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        measurement_cache.write("one", {"text": "a" * 100})
