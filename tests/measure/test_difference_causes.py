"""Segments that run one by one compute what bundles of all kinds compute, so that only wrong ones are blamed."""

import json
import tempfile
import warnings
from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, assume, given, settings

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import NoteWarning
from onnxplace.measure.compare import OutputDifference
from onnxplace.measure.difference_causes import Explanation, find_cause
from onnxplace.measure.step_inputs import choose_step_inputs
from tests.cli.test_difference_causes import damage
from tests.conftest import FAST_PIPELINE, branches
from tests.support.chains import cached_decoder
from tests.support.large_chains import compile_chain, write_chain
from tests.support.random_models import random_models, reference
from tests.support.random_placements import compiled_with, placements
from tests.support.static_device import static_kind

NAMES = ("cpu:0", "static:0", "static:1", "cpu:1", "cpu:2", "cpu:3")


def blame(bundle: Bundle, count: int = 1) -> Explanation:
    """Return the cause of a difference in a step, and in all outputs, that there is not."""
    differing = [OutputDifference(item.name, False, 1.0, 1.0) for item in bundle.outputs]
    return find_cause(bundle, None, choose_step_inputs(bundle, None, {}, 0), [[]] * (count - 1) + [differing])


def is_nothing_wrong(explanation: Explanation) -> bool:
    return explanation.message == "the error is gone when segments run alone, without optimisations"


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(random_models(), placements())
def test_no_segment_of_a_right_bundle_is_blamed(model, placement):
    try:
        reference(model.proto, model.feeds)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        assume(False)
    with static_kind(), tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", NoteWarning)
        bundle = compiled_with(model.proto, placement, Path(folder), dimensions=model.dimensions, names=NAMES)
        explanation = blame(bundle)
    assert is_nothing_wrong(explanation), explanation


@pytest.mark.usefixtures("no_gpus")
def test_weights_that_stream_are_those_of_the_bundle(tmp_path):
    bundle = compile_chain(write_chain(tmp_path / "chain.onnx"), tmp_path / "out")
    assert bundle.manifest.streamed
    assert list(bundle.streamed_weights()) == list(bundle.manifest.streamed)
    assert is_nothing_wrong(blame(bundle))


@pytest.mark.usefixtures("no_gpus")
def test_weights_in_files_of_the_model_are_found(tmp_path):
    onnx.save(branches(), tmp_path / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    options = {"devices": "cpu:0,cpu:1", "shape": {"batch": 4}, "pipeline": FAST_PIPELINE}
    bundle = onnxplace.compile(tmp_path / "model.onnx", tmp_path / "out", link_weights=True, **options)
    assert bundle.manifest.linked
    assert is_nothing_wrong(blame(bundle))


@pytest.mark.usefixtures("no_gpus")
def test_states_are_carried_from_step_to_step(tmp_path):
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[4] x, float[4] s) => (float[4] y, float[4] t)
    { [add] t = Add(s, x) [neg] y = Neg(t) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    (tmp_path / "map.json").write_text(json.dumps({"add": "cpu:0", "neg": "cpu:1"}))
    pipeline = FAST_PIPELINE.replace("join=never", f"join=never,device_map={tmp_path / 'map.json'}")
    options = {"devices": "cpu:0,cpu:1", "state": ["t=s"], "pipeline": pipeline}
    bundle = onnxplace.compile(tmp_path / "model.onnx", tmp_path / "out", **options)
    assert is_nothing_wrong(blame(bundle, 3))


@pytest.mark.usefixtures("no_gpus")
def test_operators_and_states_that_are_split_are_compared_where_the_model_has_their_values(tmp_path):
    pipeline = "optimize,profile{estimate=true},shard{ways=2,exact=true,weights=least},coplace,fuse,m-etf,split,emit"
    options = {"devices": "cpu:0,cpu:1", "shape": {"seq": 1, "past": 5}, "state": ["present=past"]}
    bundle = onnxplace.compile(cached_decoder(), tmp_path / "out", pipeline=pipeline, **options)
    assert len(bundle.manifest.sharding.states[0].inputs) == 2
    assert is_nothing_wrong(blame(bundle, 2))
    (added,) = [item.id for item in bundle.manifest.segments if "y" in item.outputs]
    damage(bundle, "p/part1", "LogSoftmax")
    explanation = onnxplace.verify(bundle, sizes=0).explanation
    assert (explanation.cause, explanation.segment) == ("split", added)
