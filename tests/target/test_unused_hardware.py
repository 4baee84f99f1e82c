"""NPUs and GPUs that Linux lists and that no installed provider reaches, in a copy of its folders."""

import pytest

from onnxplace.target import plugin_providers, unused_hardware
from onnxplace.target.unused_hardware import list_unused_hardware
from tests.support.commands import only_json


@pytest.fixture
def add_device(tmp_path, monkeypatch):
    """Let Linux list a device; no provider is installed."""
    monkeypatch.setattr(unused_hardware, "SYSFS", tmp_path)
    monkeypatch.setattr(plugin_providers, "has_family", lambda family: False)

    def add(path, vendor):
        folder = tmp_path / path / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")

    return add


@pytest.mark.parametrize(
    ("path", "vendor", "name", "hint"),
    [
        ("accel/accel0", "0x8086", "Intel NPU", "pip install onnxruntime-ep-openvino"),
        ("accel/accel0", "0x1022", "AMD NPU", "Ryzen AI"),
        ("accel/accel0", "0x17cb", "Qualcomm NPU", ""),  # its provider may be installed here
        ("accel/accel0", "0x5143", "Qualcomm NPU", ""),
        ("drm/card0", "0x8086", "Intel GPU", "pip install onnxruntime-ep-openvino"),
        ("drm/card1", "0x1002", "AMD GPU", "it is in the wheel onnxruntime-migraphx"),
        ("drm/card0", "0x10de", "NVIDIA GPU", "pip install 'onnxplace[gpu]'"),
    ],
)
def test_hardware_without_a_provider_comes_with_what_to_install(run_cli, add_device, path, vendor, name, hint):
    add_device(path, vendor)
    (item,) = only_json(run_cli("devices", "--json"))["without_provider"]
    assert item["name"] == name
    assert hint in item["install_hint"]
    lines = run_cli("devices").out.splitlines()
    assert f"{name}: found, but no provider for it is installed: {item['install_hint']}" in lines


def test_equal_devices_are_named_once_and_others_not(add_device):
    add_device("accel/accel0", "0x8086")
    add_device("accel/accel1", "0x8086")
    add_device("accel/accel2", "0x1da3")
    add_device("drm/renderD128", "0x8086")
    assert [item.name for item in list_unused_hardware()] == ["Intel NPU"]


def test_hardware_with_a_provider_is_not_named(add_device, monkeypatch):
    add_device("accel/accel0", "0x8086")
    add_device("drm/card0", "0x8086")
    monkeypatch.setattr(plugin_providers, "has_family", lambda family: family == "openvino")
    assert list_unused_hardware() == ()


def test_a_machine_without_such_folders_has_none(add_device):
    assert list_unused_hardware() == ()


def test_the_hint_of_a_short_name_is_about_the_hardware_that_is_there(run_cli, add_device, monkeypatch):
    monkeypatch.setattr("onnxplace.machine.hardware.resolve_short_name", lambda kind, index: None)
    monkeypatch.setattr("onnxplace.target.kind_table.resolve_short_name", lambda kind, index: None)
    add_device("accel/accel0", "0x8086")
    result = run_cli("devices", "--devices", "npu:0")
    assert result.code == 2
    assert "for the Intel NPU of this machine: pip install onnxruntime-ep-openvino" in result.err
