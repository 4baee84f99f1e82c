"""The command `devices --calibrate`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from onnxplace.target.target import SEGMENT_OVERHEAD_SECONDS, SEGMENT_SECONDS
from onnxplace.target.target_file import read_target
from onnxplace_doctor import calibrator
from plugins.doctor.tests.test_calibration import DIRECTIONS

TINY = ("devices", "--calibrate", "--devices", "cpu:0,cpu:1", "--sizes", "1,4KiB,1MiB", "--seconds", "0.2")


@pytest.fixture
def work_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_measures_every_pair_and_writes_a_target_that_compiles(
    run_cli, work_folder, model_file, fast_pipeline
):
    result = run_cli(*TINY, "-o", "target.toml", "--json")
    assert result.code == 0, result.err
    answer = json.loads(result.out)
    links = {(link["source"], link["destination"]): link for link in answer["calibration"]["links"]}
    assert set(links) == set(DIRECTIONS)
    for link in links.values():
        assert [point["bytes"] for point in link["points"]] == [1, 4096, 1 << 20]
        assert all(point["seconds"] > 0 for point in link["points"])
        assert link["via"] == "memory"
    assert {device["id"] for device in answer["calibration"]["devices"]} == {"cpu:0", "cpu:1"}
    written = read_target(work_folder / "target.toml")
    assert {(link.source, link.destination): link.latency_seconds for link in written.links} == {
        direction: link["latency_seconds"] for direction, link in links.items()
    }
    for device, printed in zip(written.devices, answer["calibration"]["devices"], strict=True):
        assert device.id == printed["id"]
        assert device.segment_seconds == printed["segment_seconds"]
        assert printed["segment_seconds"] == pytest.approx(printed["call_seconds"] + printed["assumed_apart_seconds"])
        assert (device.input_seconds, device.output_seconds) == (printed["input_seconds"], printed["output_seconds"])
    assert [device["segment_seconds"] for device in answer["default"]] == [SEGMENT_SECONDS] * 2
    assert answer["output"] == "target.toml"
    compiled = run_cli(
        *("compile", model_file, "--shape", "batch=2", "--target", "target.toml", "--pipeline", fast_pipeline, "--json")
    )
    assert compiled.code == 0, compiled.err


def test_a_target_file_names_its_machine_and_is_replaced_by_the_next(run_cli, work_folder, monkeypatch):
    monkeypatch.setattr(
        "onnxplace.machine.measurement_cache.processor",
        lambda: json.dumps({"model name": "Imaginary 9000", "flags": "x"}),
    )
    assert run_cli("devices", "--devices", "cpu:0,cpu:1", "-o", "target.toml").code == 0
    before = Path("target.toml").read_text(encoding="utf-8")
    assert before.startswith("# machine: Imaginary 9000, ")
    assert "not measured" in before.splitlines()[1]
    read_target("target.toml")
    result = run_cli(*TINY, "-o", "target.toml")
    assert result.code == 0
    assert result.out.endswith("target: target.toml\n")
    header = next(line for line in result.out.splitlines() if line.startswith("each segment"))
    assert re.split(" {2,}", header) == [
        *("each segment", "costs", "its call, measured", "caches and copies, assumed", "each input", "each output")
    ]
    row = result.out.splitlines()[result.out.splitlines().index(header) + 1].split()
    device = read_target("target.toml").devices[0]
    assert row[:3] == ["cpu:0", f"{device.segment_seconds * 1e6:.1f}", "us"]
    assert float(row[3]) + float(row[5]) == pytest.approx(float(row[1]), abs=0.11)
    after = Path("target.toml").read_text(encoding="utf-8")
    assert after.splitlines()[0] == before.splitlines()[0]
    assert "measured by devices --calibrate" in after.splitlines()[1]
    assert [link.via for link in read_target("target.toml").links] == ["memory"] * 2
    assert [path.name for path in work_folder.iterdir()] == ["target.toml"]


def test_the_summary_shows_the_fit_for_each_size_and_names_the_file_option(run_cli, work_folder):
    result = run_cli(*TINY)
    assert result.code == 0
    assert "target: " not in result.out
    assert "cpu:0" in result.out
    assert "1048576" in result.out
    assert "GB/s" in result.out
    assert "--target" in result.err
    assert list(work_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--sizes", "1"), "--calibrate"),
        (("--seconds", "1"), "--calibrate"),
        (("--calibrate", "--sizes", "lots"), "lots"),
        (("--calibrate", "--sizes", "0"), "got 0"),
        (("--calibrate", "--seconds", "0"), "--seconds"),
        (("--calibrate", "--seconds", "nan"), "--seconds"),
        (("--calibrate", "--devices", "cuda:99"), "cuda:99"),
        (("--calibrate", "--devices", "tpu:0"), "tpu:0"),
        (("--calibrate", "-o", "nowhere/target.toml"), "nowhere"),
        (("--calibrate", "-o", "."), "folder"),
    ],
)
def test_invalid_options_are_reported_before_any_work(run_cli, work_folder, monkeypatch, arguments, text):
    monkeypatch.setattr(calibrator, "prepare_calls", lambda *_: pytest.fail("measured"))
    result = run_cli("devices", *arguments)
    assert result.code == 2
    assert text in result.err
    assert list(work_folder.iterdir()) == []


def test_an_interrupted_calibration_leaves_the_old_file_and_nothing_else(run_cli, work_folder, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    Path("target.toml").write_text("old")
    monkeypatch.setattr(calibrator, "prepare_hops", interrupted)
    assert run_cli(*TINY, "-o", "target.toml").code == 130
    assert [path.name for path in work_folder.iterdir()] == ["target.toml"]
    assert Path("target.toml").read_text() == "old"


def test_a_single_device_has_no_links_and_no_sharing(run_cli, work_folder):
    result = run_cli("devices", "--calibrate", "--devices", "cpu:0", "--seconds", "0.1", "--json", "-o", "one.toml")
    assert result.code == 0, result.err
    calibration = json.loads(result.out)["calibration"]
    assert (calibration["links"], calibration["shared"]) == ([], [])
    expected = calibration["devices"][0]["call_seconds"] + SEGMENT_OVERHEAD_SECONDS
    assert read_target("one.toml").devices[0].segment_seconds == pytest.approx(expected)
