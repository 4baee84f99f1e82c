"""Memory limits that no placement meets, and idle devices."""

import json
import re

import pytest

from tests.support.bad_input import SHAPE

pytestmark = pytest.mark.usefixtures("no_gpus")


def test_limits_below_the_weights_are_refused_before_measuring(refused, model_file, monkeypatch):
    monkeypatch.setattr(
        "onnxplace.passes.profiling.node_measurement.MeasurementOptions.measure",
        lambda *_: pytest.fail("no need to measure"),
    )
    expected_words = refused(
        3, ("--max-memory",), "compile", model_file, *SHAPE, "--max-memory", "cpu:0=1000,cpu:1=2000"
    )
    assert (
        "the weights need 29768 bytes more than all devices have together: cpu:0 (1000 bytes), cpu:1 (2000 bytes)"
        in expected_words
    )
    assert "a number without GiB or MiB is in bytes" in expected_words


@pytest.mark.parametrize("placer", ["single", "m-topo", "m-etf"])
@pytest.mark.parametrize("limit", [18000])
def test_limits_below_the_model_name_a_device_and_its_missing_bytes(refused, model_file, fast_pipeline, placer, limit):
    # 18000 bytes hold each weight (16384), without room for the values.
    options = ("--max-memory", limit, "--pipeline", fast_pipeline.replace("m-etf", placer))
    expected_words = refused(3, (placer, "--max-memory"), "compile", model_file, *SHAPE, *options)
    assert re.search(rf"cpu:[01] lacks \d+ bytes \(needs \d+, may use {limit}\)", expected_words)


@pytest.mark.parametrize("placer", ["single", "m-topo", "m-etf"])
def test_limits_below_the_model_exit_with_3_and_name_all_devices(refused, model_file, fast_pipeline, placer):
    options = ("--max-memory", "cpu:0=17000,cpu:1=18000", "--pipeline", fast_pipeline.replace("m-etf", placer))
    expected_words = refused(
        3, (placer, "cpu:0", "cpu:1", "may use 17000", "may use 18000"), "compile", model_file, *SHAPE, *options
    )
    assert re.search(r"lacks? \d+ bytes", expected_words)


def test_a_device_without_work_fails_a_strict_compilation(refused, model_file, fast_pipeline):
    options = ("--pipeline", fast_pipeline.replace("m-etf", "single"), "--strict")
    refused(3, ("cpu:1", "no work", "'single'", "--strict"), "compile", model_file, *SHAPE, *options)


def test_a_device_without_work_is_noted_otherwise(run_cli, model_file, fast_pipeline):
    options = ("--pipeline", fast_pipeline.replace("m-etf", "single"), "--json")
    result = run_cli("compile", model_file, *SHAPE, *options)
    assert result.code == 0
    assert re.search(r"^note\[P010\] cpu:1: .*no work", result.err, re.MULTILINE)
    notes = [note for note in json.loads(result.out)["diagnostics"] if note["code"] == "P010"]
    assert [note["where"] for note in notes] == ["cpu:1"]
    assert "no work" in notes[0]["message"]
    assert notes[0]["hint"]


def test_a_device_without_work_is_in_the_summary(run_cli, model_file, fast_pipeline):
    result = run_cli("compile", model_file, *SHAPE, "--pipeline", fast_pipeline.replace("m-etf", "single"))
    assert re.search(r"^cpu:1 +0 ", result.out, re.MULTILINE)
