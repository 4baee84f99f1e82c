"""Targets of several hosts: names, links between hosts, refusals, and placements that honour the network."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace.errors import TargetError
from onnxplace.machine.hardware import local_target
from onnxplace.passes.segments.cut_segments import name_segments
from onnxplace.target.hosts import require_host_name, split_host
from onnxplace.target.parsing import parse_devices, parse_memory
from onnxplace.target.target import Device, Link, Shared, Target, default_link
from onnxplace.target.target_file import format_target, read_target

host_names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,5}[a-z0-9])?(\.[a-z0-9]{1,4})?", fullmatch=True)
local_ids = st.sampled_from(["cpu:0", "cpu:17", "cuda:0", "cuda:1/2", "webgpu:0"])
BOTH_WAYS = (Link("a", "b", 1e-4, 1e8), Link("b", "a", 2e-4, 2e8))


def make_target(*ids: str, links: tuple[Link, ...] = BOTH_WAYS) -> Target:
    return Target(tuple(Device(name, 1 << 30) for name in ids), links)


@given(host_names, local_ids)
def test_a_device_id_is_its_host_and_its_id_there(host, local_id):
    device = Device(f"{host}/{local_id}", 1)
    assert split_host(device.id) == (device.host, device.local.id) == (host, local_id)
    assert replace(device, id=local_id) == device.local == device.local.local
    assert (device.kind, device.address, device.cost_class) == (
        device.local.kind,
        device.local.address,
        device.local.cost_class,
    )
    assert [item.id for item in parse_devices(device.id)] == [device.id]
    assert split_host(local_id) == ("", local_id)
    assert Device(local_id, 1).host == ""


@pytest.mark.parametrize(
    "name", ["", "Node1", "a b", "-a", "a-", ".a", "a..b", "a_b", "a/b", "x" * 64, "n\u00f6de", "../x"]
)
def test_bad_host_names_are_refused_with_an_example(name):
    with pytest.raises(TargetError, match="T005") as caught:
        require_host_name(name, "--hosts")
    assert "as in node1" in caught.value.hint
    with pytest.raises(TargetError, match=r"T005|T005"):
        Device(f"{name}/cpu:0", 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node1/cudda:0", ("T005", "unknown device 'cudda:0'", "cuda:0")),
        ("node1/cpu", ("T005", "unknown device 'node1/cpu'")),
        ("node1/cpu:0,cpu:0", ("T005", "cpu:0 names no host, node1/cpu:0 does", "node1/cpu:0")),
        ("node1/cuda:0,node1/cuda:0/1", ("T005", "node1/cuda:0 is named as a whole and in parts")),
        ("node1/cpu:0,node1/cpu:00", ("T005", "twice")),
        ("node1/cuda:0{provider=tensorflow}", ("T005", "expected one of cuda, tensorrt")),
    ],
)
def test_bad_devices_of_hosts_are_refused(text, words):
    with pytest.raises(TargetError) as caught:
        parse_devices(text)
    for word in words:
        assert word in str(caught.value)


def test_equal_devices_of_two_hosts_are_different_devices():
    target = make_target("a/cpu:0", "b/cpu:0")
    assert target.hosts == ("a", "b")
    assert (target.position("a/cpu:0"), target.position("b/cpu:0")) == (0, 1)
    assert parse_memory("b/cpu:0=1KiB", ["a/cpu:0", "b/cpu:0"]) == {"b/cpu:0": 1024}
    assert len(parse_devices("a/cuda:0,b/cuda:0/1")) == 2
    assert make_target("cpu:0", links=()).hosts == ()


def test_links_of_devices_come_before_those_of_hosts_and_those_before_defaults():
    own = Link("a/cpu:1", "b/cpu:0", 3e-4, 3e8, via="infiniband")
    target = make_target("a/cpu:0", "a/cpu:1", "b/cpu:0", links=(*BOTH_WAYS, own))
    links = {(link.source, link.destination): link for link in target.with_all_links().links}
    assert len(links) == 6
    assert links["a/cpu:0", "b/cpu:0"] == Link("a/cpu:0", "b/cpu:0", 1e-4, 1e8)
    assert links["a/cpu:1", "b/cpu:0"] == own
    assert links["b/cpu:0", "a/cpu:1"] == Link("b/cpu:0", "a/cpu:1", 2e-4, 2e8)
    assert links["a/cpu:0", "a/cpu:1"] == default_link(*target.devices[:2])
    assert target.list_assumed_links() == [("a/cpu:0", "a/cpu:1"), ("a/cpu:1", "a/cpu:0")]
    for given_array, all_array in zip(target.link_arrays(), target.with_all_links().link_arrays()):
        np.testing.assert_array_equal(given_array, all_array)


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ((), ("T007", "no link from host a to host b", 'source = "a"', "too much for a default")),
        (BOTH_WAYS[:1], ("T007", "no link from host b to host a")),
        ((*BOTH_WAYS, Link("a", "c", 0, 1)), ("T007", "'c'", "known: a/cpu:0, b/cpu:0, a, b")),
        ((*BOTH_WAYS, Link("a", "b/cpu:1", 0, 1)), ("T007", "'b/cpu:1'", "did you mean 'b/cpu:0'?")),
        ((*BOTH_WAYS, Link("a", "a", 0, 1)), ("T007", "from a host to itself", "a/cpu:0")),
        ((*BOTH_WAYS, Link("a", "b/cpu:0", 0, 1)), ("T007", "link a -> b/cpu:0", "got one of each", "hosts: a, b")),
    ],
)
def test_missing_and_wrong_links_of_hosts_are_refused(links, words):
    with pytest.raises(TargetError) as caught:
        make_target("a/cpu:0", "b/cpu:0", links=links)
    for word in words:
        assert word in str(caught.value)


def test_links_of_all_pairs_of_devices_stand_for_a_link_of_hosts():
    links = tuple(Link(a, b, 0, 1) for a, b in (("a/cpu:0", "b/cpu:0"), ("b/cpu:0", "a/cpu:0")))
    assert make_target("a/cpu:0", "b/cpu:0", links=links).list_assumed_links() == []
    with pytest.raises(TargetError, match="T007"):
        make_target("a/cpu:0", "a/cpu:1", "b/cpu:0", links=links)


def test_devices_of_two_hosts_share_nothing():
    with pytest.raises(TargetError, match=r"T007.*expected devices of one host, got devices of 'a', 'b'"):
        Shared(("a/cpu:0", "b/cpu:0"), memory_slowdown=1.2)


def test_a_target_names_the_host_of_all_devices_or_of_none():
    with pytest.raises(TargetError, match="cpu:1 names no host, a/cpu:0 does"):
        make_target("a/cpu:0", "cpu:1", links=())


def test_devices_of_a_host_are_listed_together():
    message = "expected the devices of host a one after another, got a/cpu:1 after one of b"
    with pytest.raises(TargetError, match=f"T005.*{message}"):
        make_target("a/cpu:0", "b/cpu:0", "a/cpu:1")
    make_target("b/cpu:0", "b/cpu:2", "a/cpu:1", "a/cpu:0")


def test_a_target_of_hosts_is_read_back_equal(tmp_path):
    target = make_target("a/cpu:0", "a.b/cuda:0/1", links=(Link("a", "a.b", 0.0, 1.0), Link("a.b", "a", 0.0, 1.0)))
    (tmp_path / "t.toml").write_text(format_target(target))
    assert read_target(tmp_path / "t.toml") == target


def test_devices_of_hosts_are_no_devices_of_this_machine():
    with pytest.raises(TargetError, match=r"T005.*expected devices of this machine"):
        local_target("node1/cpu:0")


# ---------------------------------------------------------------------------------------------- the commands


def write_target(path: Path, latency_seconds: float) -> None:
    rates = (latency_seconds, 1e10)
    links = (Link("a", "b", *rates), Link("b", "a", *rates))
    devices = tuple(Device(name, 1 << 30, kernel_seconds=1e-3) for name in ("a/cpu:0", "b/cpu:0"))
    path.write_text(format_target(Target(devices, links)))


@pytest.mark.parametrize(("latency_seconds", "used"), [(1e-6, {"a/cpu:0", "b/cpu:0"}), (10.0, {"a/cpu:0"})])
def test_a_slow_network_keeps_the_model_on_one_host(
    run_cli, monkeypatch, tmp_path, model_file, fast_pipeline, latency_seconds, used
):
    monkeypatch.chdir(tmp_path)
    fast_pipeline = fast_pipeline.replace("m-etf", "auto{seconds=0,proposals=300}")  # m-etf does not look ahead
    write_target(Path("t.toml"), latency_seconds)
    options = ("--shape", "batch=2", "--target", "t.toml", "--pipeline", fast_pipeline, "-o", "hosts.bundle")
    compiled = run_cli("compile", model_file, *options)
    assert compiled.code == 0, compiled.err
    manifest = json.loads(Path("hosts.bundle/manifest.json").read_text())
    assert {segment["device"] for segment in manifest["segments"]} == used
    assert {segment["id"][:6] for segment in manifest["segments"]} == {
        name.replace("/cpu:", "-cpu")[:6] for name in used
    }
    assert {link["latency_seconds"] for link in manifest["target"]["links"]} == {latency_seconds}
    assert run_cli("run", "hosts.bundle", "--runtime", "simulated").code == 0
    for command in ("run", "bench", "verify"):
        refused = run_cli(command, "hosts.bundle")
        assert refused.code == 2
        assert "error[T011] a/cpu:0: it is a device of host a" in refused.err
        assert "F008" not in refused.err


def test_costs_measured_here_are_noted_where_they_stand_for_other_hosts(run_cli, monkeypatch, tmp_path, model_file):
    monkeypatch.chdir(tmp_path)
    write_target(Path("t.toml"), 1e-4)
    compiled = run_cli("compile", model_file, "--shape", "batch=2", "--target", "t.toml", "-o", "hosts.bundle")
    assert compiled.code == 0, compiled.err
    assert "note[C001] cpu/1: measured on this machine, and used for devices of a, b" in compiled.err
    assert "note[C020] a/cpu:0: no trial was run: it is a device of host a" in compiled.err
    assert "T013" not in compiled.err


def test_the_target_of_hosts_in_the_documentation_can_be_read(tmp_path):
    text = (Path(__file__).parents[2] / "docs/target.md").read_text(encoding="utf-8")
    block = text.split("## Several hosts")[1].split("```toml\n")[1].split("```")[0]
    (tmp_path / "t.toml").write_text(block)
    assert read_target(tmp_path / "t.toml").hosts == ("node1", "node2")


def test_segments_of_equal_devices_of_two_hosts_have_names_of_their_own():
    target = make_target("a/cpu:0", "a/cuda:0/1", "b/cpu:0")
    names = name_segments([0, 2, 1, 0], target)
    assert names == ["a-cpu0-000", "b-cpu0-000", "a-cuda0p1-000", "a-cpu0-001"]
