"""OpenVINO computes float32 in float32, although its own default is bfloat16 on processors that have it."""

from pathlib import Path

import pytest

import onnxplace
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.kind_table import find_kind
from tests.openvino.devices import OPENVINO, perceptron, place, squeezenet, transformer

MODELS = {perceptron: {"batch": 32}, transformer: {"batch": 2, "seq": 16}, squeezenet: {}}
FLAGS = {"avx512_bf16", "amx_bf16"}


def has_bfloat16() -> bool:
    return bool(FLAGS & set(Path("/proc/cpuinfo").read_text().split()))


def find_error(bundle: onnxplace.Bundle) -> float:
    """Return the largest error of the outputs relative to the largest value of each."""
    return max(output.max_rel_error for output in onnxplace.verify(bundle, sizes=0).outputs)


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_float32_is_computed_in_float32_by_default(tmp_path, build):
    bundle = place(build(), tmp_path, OPENVINO, {".*": OPENVINO}, shape=MODELS[build])
    assert find_error(bundle) < 1e-5


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
@pytest.mark.skipif(not has_bfloat16(), reason="this processor has no bfloat16")
def test_bfloat16_is_an_option(tmp_path, build):
    device = f"{OPENVINO}{{precision=bfloat16}}"
    bundle = place(build(), tmp_path, device, {".*": OPENVINO}, shape=MODELS[build])
    assert 1e-4 < find_error(bundle) < 5e-2
    found = onnxplace.verify(bundle, sizes=0)
    assert (found.equal, found.precisions) == (True, {OPENVINO: "bfloat16"})


def test_two_precisions_of_one_processor_are_two_devices_of_a_bundle(tmp_path):
    fast = f"{OPENVINO}/bfloat16"
    devices = f"{OPENVINO},{OPENVINO}{{precision=bfloat16}}"
    places = {"product[0-2]|relu[0-2]": OPENVINO, ".*": fast}
    bundle = place(perceptron(), tmp_path, devices, places, shape={"batch": 32})
    assert {segment.device for segment in bundle.manifest.segments} == {OPENVINO, fast}
    error = find_error(bundle)
    assert error < 5e-2
    assert error > 1e-4 or not has_bfloat16()


def test_the_record_knows_both():
    kind = find_kind("openvino/cpu")
    assert kind.options["precision"] == ("float32", "bfloat16")
    assert kind.precision(DeviceAddress.of(OPENVINO)) == "float32"
