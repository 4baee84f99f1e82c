"""Machines by name, their catalogue, and links that stand for many pairs of devices."""

import pytest
from hypothesis import assume, given, strategies as st

from onnxplace.errors import TargetError
from onnxplace.target.catalogue import read_catalogue
from onnxplace.target.machines import parse_machine
from onnxplace.target.target import DATA_TYPES, Device, Link, Target
from onnxplace.target.target_file import format_target, read_target

CATALOGUE = read_catalogue()
GPUS = [name for name, item in CATALOGUE.devices.items() if item.fabrics]
NETWORKS = [name for name, item in CATALOGUE.fabrics.items() if item.family == "network"]


def test_every_figure_of_the_catalogue_has_a_source_and_a_date():
    for item in CATALOGUE.devices.values():
        assert item.source.startswith("https://")
        assert item.published[:2] == "20"
        assert CATALOGUE.entered > item.published
        if not item.parts:
            assert "float32" in item.rates
            assert set(item.rates) <= {"float32", *DATA_TYPES}
            assert item.memory_bytes_per_second > 0
        assert item.memory_bytes > 0
    for fabric in CATALOGUE.fabrics.values():
        assert fabric.source.startswith("https://")
        assert fabric.bytes_per_second > 1e9
    assert all(name in CATALOGUE.fabrics for item in CATALOGUE.devices.values() for name in item.fabrics)


def test_names_and_aliases_are_unique_however_they_are_spelt():
    for table in (CATALOGUE.devices, CATALOGUE.fabrics):
        names = [alias.lower().replace("-", "") for item in table.values() for alias in {item.name, *item.aliases}]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("item", CATALOGUE.devices.values(), ids=lambda item: item.name)
def test_every_device_is_a_machine_by_all_its_names(item):
    for name in (item.name, *item.aliases):
        machine = parse_machine(name)
        assert machine.device == item
        assert machine == parse_machine(machine.name)
        assert len(machine.to_target().devices) == max(len(item.parts), 1)


def test_the_devices_of_an_ai_pc_share_its_memory():
    machine = parse_machine("AI-PC")
    target = machine.to_target()
    (pool,) = target.pools
    assert pool.devices == tuple(device.id for device in target.devices)
    assert target.total_bytes == pool.memory_bytes == machine.device.memory_bytes == 32_000_000_000
    assert sum(device.memory_bytes for device in target.devices) > pool.memory_bytes
    assert parse_machine("2xL4").to_target().pools == ()


@given(st.sampled_from(GPUS), st.integers(2, 5), st.integers(2, 4), st.sampled_from(NETWORKS), st.data())
def test_a_machine_survives_its_name_and_its_file(tmp_path_factory, device, devices, hosts, network, data):
    fabric = data.draw(st.sampled_from(CATALOGUE.devices[device].fabrics))
    # A100-80-PCIe4 is a card of its own.
    assume(not any(f"{device}-{fabric}" in item.aliases for item in CATALOGUE.devices.values()))
    machine = parse_machine(f"{hosts}x({devices}x{device}-{fabric})-{network}")
    assert (machine.device.name, machine.devices, machine.hosts) == (device, devices, hosts)
    assert (machine.fabric.name, machine.network.name) == (fabric, network)
    assert parse_machine(machine.name) == machine
    assert parse_machine(machine.name.lower().replace("-", " ")) == machine
    target, file = machine.to_target(), tmp_path_factory.getbasetemp() / "machine.toml"
    for compact in (False, True):
        file.write_text(format_target(target, compact=compact))
        assert read_target(file) == target
    latency, per_byte = target.link_arrays()
    inner, outer = CATALOGUE.fabrics[fabric], CATALOGUE.fabrics[network]
    assert per_byte[0, devices - 1] == pytest.approx(1 / inner.bytes_per_second)
    assert per_byte[0, devices] == per_byte[devices, 0] == pytest.approx(1 / outer.bytes_per_second)
    assert latency[0, devices] >= latency[0, 1] > 0


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("8xH100-NVLink", "8xH100-SXM-NVLink4"),
        ("8 x h100 nvlink", "8xH100-SXM-NVLink4"),
        ("2xA100-80-PCIe4", "2xA100-80-PCIe"),
        ("2xH100-PCIe", "2xH100-PCIe"),
        ("2xH100-PCIe4", "2xH100-SXM-PCIe4"),
        ("2x8xH100-NVLink-IB400", "2x(8xH100-SXM-NVLink4)-IB400"),
        ("2×(8×H100)-InfiniBand", "2x(8xH100-SXM-NVLink4)-IB400"),
        ("8xT4-100GbE", "8x(T4)-100GbE"),
        ("4xL4-PCIe3", "4xL4-PCIe3"),
        ("ai pc", "Intel-AI-PC"),
    ],
)
def test_names_are_parsed_generously(text, name):
    assert parse_machine(text).name == name


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("8xH1000-NVLink", "unknown machine '8xH1000-NVLink'", "did you mean '8xH100-NVLink'?"),
        ("8xH100-NVLimk", "unknown machine '8xH100-NVLimk'", "did you mean '8xH100-NVLink'?"),
        ("L40", "unknown machine 'L40'", "did you mean 'L4"),
        ("banana", "unknown machine 'banana'", "onnxplace machines"),
        ("", "unknown machine ''", "onnxplace machines"),
        ("0xH100", "expected 1 to 256 devices, got '0xH100'", "8xH100-NVLink"),
        ("-1xH100", "expected 1 to 256 devices, got '-1xH100'", "8xH100-NVLink"),
        ("2x(-8xH100-NVLink)-IB400", "expected 1 to 256 devices, got '2x(-8xH100-NVLink)-IB400'", "8xH100-NVLink"),
        ("257xH100", "expected 1 to 256 devices", "8xH100-NVLink"),
        ("99999999999999999999xH100", "expected 1 to 256 devices", "8xH100-NVLink"),
        ("2x8xH100", "'2x8xH100' names no network between 2 hosts", "2x(8xH100-NVLink)-IB400"),
        ("H100-IB400", "'H100-IB400' names a network for one host", "2x(8xH100-NVLink)-IB400"),
        ("2xL4-NVLink", "L4 does not have NVLink", "it has PCIe4"),
        ("2xL4-PCIe5", "L4 does not have PCIe5", "it has PCIe4"),
        ("2xEPYC-9654-PCIe5", "EPYC-9654 does not have PCIe5", "leave the fabric out"),
        ("2xAI-PC", "Intel-AI-PC is a machine of its own", "onnxplace machines"),
        ("x" * 1000, "unknown machine", "onnxplace machines"),
    ],
)
def test_a_wrong_name_is_refused_with_what_to_write(text, message, hint):
    with pytest.raises(TargetError) as caught:
        parse_machine(text)
    assert caught.value.code == "T014"
    assert message in caught.value.message
    assert hint in caught.value.hint


# ------------------------------------------------------------------------------------------------ links of many pairs

GROUPED = """
[[devices]]
id = "node[1-2]/cuda:[0-3]"
memory_bytes = 80_000_000_000

[[links]]
between = "per-host"
latency_seconds = 2e-6
bytes_per_second = 4e11

[[links]]
between = "all-to-all"
latency_seconds = 2e-5
bytes_per_second = 5e10

[[links]]
source = "node1/cuda:0"
destination = "node2/cuda:0"
latency_seconds = 1e-3
bytes_per_second = 1e9
"""


def test_a_short_file_describes_many_devices_and_links_and_the_most_specific_link_holds(tmp_path):
    (tmp_path / "short.toml").write_text(GROUPED)
    target = read_target(tmp_path / "short.toml")
    assert [device.id for device in target.devices] == [f"node{h}/cuda:{i}" for h in (1, 2) for i in range(4)]
    latency, _ = target.link_arrays()
    assert latency[0, 3] == latency[7, 4] == 2e-6
    assert latency[0, 5] == latency[4, 0] == 2e-5
    assert latency[0, 4] == 1e-3
    assert target.list_assumed_links() == []
    assert Target(target.devices, target.with_all_links().links).link_arrays()[0].tolist() == latency.tolist()


@pytest.mark.parametrize(
    ("changed", "into", "message"),
    [
        ("all-to-all", "all", "expected all-to-all or per-host, without source and destination, for between in links"),
        ('between = "per-host"', 'between = "per-host"\nsource = "node1"', "without source and destination"),
        ("[0-3]", "[3-0]", "expected an ascending range"),
        ("[0-3]", "[0-999]", "expected at most 256 devices, got 1000"),
        ("[0-3]", "[0-3", "device 'cuda:[0-3' has no index"),
    ],
)
def test_a_wrong_group_in_a_file_is_refused(tmp_path, changed, into, message):
    (tmp_path / "wrong.toml").write_text(GROUPED.replace(changed, into))
    with pytest.raises(TargetError, match=r"wrong\.toml") as caught:
        read_target(tmp_path / "wrong.toml")
    assert message in caught.value.message


def test_equal_devices_in_a_row_are_one_entry_of_a_compact_file(tmp_path):
    devices = (Device("cpu:0", 1), Device("cpu:1", 1), Device("cpu:3", 1), Device("cuda:0/0", 1), Device("cuda:0/1", 1))
    target = Target(devices, (Link("cpu:0", "cpu:1", 1e-6, 1e9),))
    text = format_target(target, compact=True)
    assert [line for line in text.splitlines() if line.startswith("id")] == [
        'id = "cpu:[0-1]"', 'id = "cpu:3"', 'id = "cuda:0/0"', 'id = "cuda:0/1"'
    ]  # fmt: skip
    (tmp_path / "compact.toml").write_text(text)
    assert read_target(tmp_path / "compact.toml") == target


@pytest.mark.parametrize(
    ("rates", "message"),
    [({"int4": 1e12}, "there is no rate for 'int4'"), ({"int8": -1.0}, "expected a number above 0")],
)
def test_rates_of_types_are_checked(rates, message):
    with pytest.raises(TargetError, match=message):
        Device("cuda:0", 1, type_operations_per_second=rates)
