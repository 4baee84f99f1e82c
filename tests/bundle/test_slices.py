"""Bundles derived from a bundle: recordings of crossing values and parts of devices compute the same as the whole."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, assume, given, settings
from onnx import parser

import onnxplace
from onnxplace.bundle.bundle import Bundle, extract_device_part, list_crossing_values, record_crossing_values
from onnxplace.bundle.manifest_checks import check_programs
from onnxplace.pipeline.registry import find_plugin
from tests.support.random_models import RandomModel, random_models, reference
from tests.support.random_placements import RandomPlacement, assert_same, compiled_with, placements

# Both towers read values of the other one, twice.
TOWERS = """
<ir_version: 8, opset_import: ["" : 17]>
towers (float[n] x, float[n] total) => (float[n] y, float[n] total_next) {
    [left] a = Relu(x)
    [right] b = Neg(total)
    [left_too] c = Add(a, b)
    [right_too] d = Mul(a, b)
    [both] y = Add(c, d)
    [next] total_next = Add(d, total)
}
"""
MAP = '{"left.*|both": "cpu:0", ".*": "cpu:1"}'
FEEDS = {"x": np.array([1, -2, 3], "f4"), "total": np.array([4, 5, 6], "f4")}


def run(bundle: Bundle, feeds: dict) -> dict:
    """Return the outputs of a bundle, states included, by the runtime alone."""
    with find_plugin("runtimes", "onnxruntime")().open(bundle) as session:
        return dict(session.run(feeds, [item.output for item in bundle.manifest.states]).outputs)


def fed(bundle: Bundle, values: dict) -> dict:
    """Return the values that are inputs of a bundle."""
    return {item.name: values[item.name] for item in bundle.inputs if item.name in values}


def used(bundle: Bundle) -> list[str]:
    return [device for device, program in bundle.manifest.programs.items() if program]


@pytest.fixture(scope="module")
def towers(tmp_path_factory) -> Bundle:
    folder = tmp_path_factory.mktemp("towers")
    (folder / "map.json").write_text(MAP)
    onnx.save(parser.parse_model(TOWERS), folder / "m.onnx")
    steps = f"optimize,profile{{estimate=true}},coplace{{join=never,device_map={folder / 'map.json'}}},m-etf,split,emit"
    return onnxplace.compile(
        folder / "m.onnx", folder / "bundle", devices="cpu:0,cpu:1,cpu:2", shape={"n": 3}, pipeline=steps,
        state=["total_next=total"],
    )  # fmt: skip


def test_crossing_values_are_listed_by_source_and_destination(towers):
    assert list_crossing_values(towers.manifest) == {("cpu:0", "cpu:1"): ("a",), ("cpu:1", "cpu:0"): ("b", "d")}


def test_a_recording_bundle_returns_crossing_values_and_stores_no_states(towers):
    bundle = record_crossing_values(towers)
    assert bundle.manifest.states == ()
    outputs = run(bundle, FEEDS)
    x, total = FEEDS.values()
    for name, value in (("a", np.maximum(x, 0)), ("b", -total), ("d", np.maximum(x, 0) * -total)):
        np.testing.assert_array_equal(outputs.pop(name), value)
    assert outputs == {}


@pytest.mark.slow
def test_a_part_has_the_inputs_it_reads_and_the_outputs_it_computes(towers):
    first, second, third = (extract_device_part(towers, device) for device in ("cpu:0", "cpu:1", "cpu:2"))
    assert [item.name for item in first.inputs] == ["x", "b", "d"]
    assert [item.name for item in first.outputs] == ["y"]
    assert [item.name for item in second.inputs] == ["total", "a"]
    assert [item.name for item in second.outputs] == ["total_next"]
    assert (third.inputs, third.outputs, third.manifest.segments) == ([], [], ())
    steps = [step for part in (first, second) for program in part.manifest.programs.values() for step in program]
    assert {step.op for step in steps} == {"run", "free"}
    assert first.manifest.values["b"].producer is None


def test_the_bundle_itself_is_unchanged(towers):
    before = towers.manifest.model_dump_json()
    record_crossing_values(towers)
    extract_device_part(towers, "cpu:0")
    assert towers.manifest.model_dump_json() == before


def test_parts_of_a_bundle_with_states_compute_its_first_step(towers):
    values = FEEDS | run(record_crossing_values(towers), FEEDS)
    computed = {}
    for device in used(towers):
        part = extract_device_part(towers, device)
        computed |= run(part, fed(part, values))
    expected = run(towers, FEEDS)
    for name in ("y", "total_next"):
        np.testing.assert_array_equal(computed[name], expected[name])


def test_parts_free_values_after_their_last_reader(towers):
    """At the end the towers hold only what they return; the dry run refuses a value that is freed twice."""
    for device in used(towers):
        part = extract_device_part(record_crossing_values(towers), device)
        check_programs(part.manifest, Path("m"))
        freed = [step.value for step in part.manifest.programs[device] if step.op == "free"]
        assert len(freed) == len(set(freed))
    without = replace(
        towers,
        manifest=extract_device_part(towers, "cpu:1").manifest.model_copy(update={"inputs": towers.manifest.inputs}),
    )
    with pytest.raises(onnxplace.errors.BundleError, match="'a'"):
        check_programs(without.manifest, Path("m"))


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(random_models(), placements())
def test_parts_compute_the_same_as_the_whole_bundle(model: RandomModel, placement: RandomPlacement) -> None:
    try:
        reference(model.proto, model.feeds)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        assume(False)
    with tempfile.TemporaryDirectory() as name:
        bundle = compiled_with(model.proto, placement, Path(name), dimensions=model.dimensions)
        record = record_crossing_values(bundle)
        check_programs(record.manifest, Path(name))
        for feeds in model.feeds:
            crossed, expected = run(record, feeds), run(bundle, feeds)
            assert set(crossed) == {
                value for values in list_crossing_values(bundle.manifest).values() for value in values
            }
            outputs: dict = {}
            for device in used(bundle):
                for whole in (bundle, record):  # the values it returns, and those it would send
                    part = extract_device_part(whole, device)
                    check_programs(part.manifest, Path(name))
                    outputs |= run(part, fed(part, {**feeds, **crossed}))
            computed = {output for segment in bundle.manifest.segments for output in segment.outputs}
            expected_part = {
                item.name: expected[item.name] for item in bundle.manifest.outputs if item.value in computed
            }
            for output, value in {**expected_part, **crossed}.items():
                assert_same(outputs[output], value)
