"""Devices are asked what they compute, and those that say something else are found out."""

import json

import numpy as np
import pytest

from onnxplace.errors import ModelError
from onnxplace.machine import device_probe, measurement_cache
from onnxplace.machine.device_probe import DeviceTraits
from onnxplace.machine.hardware import find_precision, local_target, probe_device
from onnxplace.target.target import Device
from tests.support.lying_device import LIES, Lying, lying_kind as lying_kind

SORTS = ("products", "convolutions", "normalisation", "softmax", "elementwise")
TYPES = {"double", "float16", "int64", "uint64", "int32", "uint32", "uint8", "bool"}


def ask(monkeypatch, *lies: str) -> DeviceTraits:
    monkeypatch.setattr(Lying, "lies", lies)
    traits = probe_device(Device("lying:0", 1 << 30))
    assert traits is not None
    return traits


def test_an_honest_device_keeps_everything(monkeypatch):
    traits = ask(monkeypatch)
    assert traits.precision == dict.fromkeys(SORTS, "float32")
    assert (traits.changes, traits.loses, traits.least_precise) == ({}, (), "float32")
    assert set(traits.keeps) >= TYPES  # this CPU need not have bfloat16
    assert traits.describe() == []


@pytest.mark.parametrize("name", ["tf32", "float16", "bfloat16"])
def test_the_type_that_float32_is_computed_in_is_found(monkeypatch, name):
    traits = ask(monkeypatch, name)
    assert traits.precision == dict.fromkeys(SORTS, name)
    assert traits.describe()[0] == f"float32 is computed in {name} ({', '.join(SORTS)})"
    assert set(traits.keeps) >= TYPES


@pytest.mark.parametrize(
    ("lie", "changes"),
    [
        ("int64 in int32", {"int64": "int32"}),
        ("uint64 in int32", {"uint64": "int32"}),
        ("int64 in float64", {"int64": "float64"}),
        ("int32 in float32", {"int32": "float32"}),
        ("double in float32", {"double": "float32"}),
        ("float16 in bfloat16", {"float16": "bfloat16"}),
    ],
)
def test_a_type_that_is_not_kept_is_found(monkeypatch, lie, changes):
    traits = ask(monkeypatch, lie)
    assert traits.changes == changes
    assert set(traits.keeps) >= TYPES - changes.keys()
    assert traits.least_precise == "float32"
    ((name, found),) = changes.items()
    assert f"{name} is computed as {found}" in traits.describe()


@pytest.mark.parametrize(
    ("lie", "lost"),
    [
        ("no NaN", "NaN"),
        ("no infinity", "infinities"),
        ("no subnormals", "subnormal numbers"),
        ("no negative zero", "negative zero"),
    ],
)
def test_a_special_value_that_is_lost_is_found(monkeypatch, lie, lost):
    traits = ask(monkeypatch, lie)
    assert traits.loses == (lost,)
    assert traits.describe() == [f"{lost} are not kept"]
    assert traits.least_precise == "float32"


def test_several_lies_are_told_apart(monkeypatch):
    traits = ask(monkeypatch, "float16", "int64 in int32")
    assert (traits.least_precise, traits.changes) == ("float16", {"int64": "int32"})
    assert find_precision(Device("lying:0", 1)) == "float16"


def test_all_lies_are_tried():
    assert len(LIES) == 13  # those of the tests above


def test_a_device_is_asked_once_and_the_answer_kept_on_disk(monkeypatch):
    first = ask(monkeypatch, "bfloat16", "no NaN")
    monkeypatch.setattr(device_probe, "_examine", lambda _: pytest.fail("it was asked again"))
    assert probe_device(Device("lying:0", 1)) is first
    monkeypatch.setattr(device_probe, "_known", {})
    assert probe_device(Device("lying:0", 1)) == first
    assert probe_device(Device("lying:0", 1, options={"isolate": "false"})) == first


def test_other_options_and_versions_are_asked_for_themselves(monkeypatch):
    asked = []
    monkeypatch.setattr(
        device_probe, "_examine", lambda device: asked.append(device.options) or DeviceTraits(keeps=("bool",))
    )
    for options in ({}, {"option.speed": "high"}, {}):
        probe_device(Device("lying:0", 1, options=options))
    assert asked == [{}, {"option.speed": "high"}]
    monkeypatch.setattr(measurement_cache, "VERSION", -1)
    probe_device(Device("lying:0", 1))
    assert asked[2:] == [{}]


def test_a_damaged_entry_is_replaced(monkeypatch):
    first = ask(monkeypatch, "tf32")
    for path in measurement_cache.folder().glob("*.json"):
        data = json.loads(path.read_text())
        if "traits" in data:
            path.write_text(json.dumps({**data, "traits": {"precision": 3}}))
    monkeypatch.setattr(device_probe, "_known", {})
    assert probe_device(Device("lying:0", 1)) == first


def test_devices_that_are_not_here_are_not_asked(monkeypatch):
    monkeypatch.setattr(device_probe, "_examine", lambda _: pytest.fail("it was asked"))
    for device in (
        Device("cpu:0", 1),
        Device("node1/lying:0", 1),
        Device("lying:1", 1),
        Device("lying:0", 1, model="H100"),
    ):
        assert probe_device(device) is None
        assert find_precision(device) == "float32"
    monkeypatch.setattr(Lying, "find_problem", lambda self, address: "its driver is missing")
    assert probe_device(Device("lying:0", 1)) is None


def test_what_a_provider_refuses_does_not_hide_the_rest(monkeypatch):
    opened = device_probe.open_session

    def refuse(model, *arguments):
        if b"int64" in model or b"Softmax" in model:
            raise ModelError("M017", "not implemented")
        return opened(model, *arguments)

    monkeypatch.setattr(device_probe, "open_session", refuse)
    traits = ask(monkeypatch, "bfloat16")
    assert traits.precision == dict.fromkeys((sort for sort in SORTS if sort != "softmax"), "bfloat16")
    assert "int64" not in {*traits.keeps, *traits.changes}
    assert "int32" in traits.keeps


def test_what_a_provider_leaves_to_the_cpu_does_not_count(monkeypatch):
    taken = device_probe.list_taken_nodes
    monkeypatch.setattr(device_probe, "_CASES", device_probe._CASES[:6])
    monkeypatch.setattr(device_probe, "list_taken_nodes", lambda *names: taken(*names) & {"node0", "node1"})
    traits = ask(monkeypatch)
    assert traits.precision == {"products": "float32"}
    assert (traits.keeps, traits.changes, traits.loses) == ((), {}, ())


def test_a_device_that_answers_nothing_is_asked_again_by_the_next_process(monkeypatch):
    def fail(*_):
        raise ModelError("M017", "out of order")

    monkeypatch.setattr(device_probe, "open_session", fail)
    monkeypatch.setattr(device_probe, "MAX_SESSIONS", 3)
    assert ask(monkeypatch) == DeviceTraits()
    assert find_precision(Device("lying:0", 1)) == "float32"
    monkeypatch.undo()
    monkeypatch.setattr(device_probe, "_known", {})
    assert ask(monkeypatch).least_precise == "float32"


def test_a_target_of_this_machine_has_what_was_found(monkeypatch):
    (device,) = local_target("lying:0").devices
    assert (device.computes_in, device.precision) == ("float16", "float16")
    monkeypatch.setattr(Lying, "lies", ())
    (device,) = local_target("lying:0").devices
    assert (device.computes_in, device.precision) == ("", "float32")


def test_sums_are_long_enough_for_errors_to_show():
    values = device_probe._list_values(device_probe._CASES)
    products = values["x_float"].astype(np.float64) @ values["weights_float"].astype(np.float64)
    assert products.shape == (32, 64)
    assert abs(products).max() > 5
