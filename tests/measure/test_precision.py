"""The tolerance of floats follows from the least precise type in which a device of the bundle computes."""

import numpy as np
import pytest

import onnxplace
from onnxplace.measure.compare import compare_output, find_bundle_lineages, list_precisions
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.kind_table import find_kind
from tests.conftest import FAST_PIPELINE
from tests.support.half_device import half_kind as half_kind


@pytest.fixture
def bundle(model_file, tmp_path):
    names = {"left|relu": "half:0", ".*": "cpu:0"}
    pipeline = FAST_PIPELINE.replace("join=never", f"join=never,device_map={tmp_path / 'map.json'}")
    (tmp_path / "map.json").write_text(str(names).replace("'", '"'))
    return onnxplace.compile(
        model_file, tmp_path / "bundle", devices="cpu:0,half:0", shape={"batch": 4}, pipeline=pipeline
    )


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("float32", 1e-3), ("tf32", 2e-2), ("float16", 2e-2), ("bfloat16", 5e-2), ("int8", 5e-2)],
)
def test_a_device_sets_the_tolerance_as_a_type_of_the_model_does(bundle, monkeypatch, precision, tolerance):
    monkeypatch.setattr("onnxplace.measure.compare.find_precision", lambda device: precision)
    lineage = find_bundle_lineages(bundle)["y"]
    for factor, is_equal in ((0.99, True), (1.01, False)):
        reference = np.float32([1.0, 2.0])
        difference = compare_output("y", reference + np.float32([0, 2 * factor * tolerance]), reference, lineage)
        assert difference.equal == is_equal


def test_precisions_are_those_of_devices_that_compute_the_least_precise_first(bundle):
    assert list(list_precisions(bundle).items()) == [("half:0", "float16"), ("cpu:0", "float32")]


def test_integers_must_be_equal_whatever_devices_compute_in(bundle):
    lineage = find_bundle_lineages(bundle)["y"]
    assert not compare_output("y", np.int8([100]), np.int8([101]), lineage).equal


def test_the_precision_of_a_device_is_its_option_or_the_first_of_its_kind():
    assert find_kind("cpu").precision(DeviceAddress.of("cpu:0")) == "float32"
    assert find_kind("half").precision(DeviceAddress.of("half:0")) == "float16"
    chosen = DeviceAddress("half", 0, options={"precision": "bfloat16"})
    assert find_kind("half").precision(chosen) == "bfloat16"
