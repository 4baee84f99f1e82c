"""Rates of disks and links: measured once a day, and taken from the target where it gives them."""

import json
import os

import numpy as np
import pytest

from onnxplace.machine import measurement_cache, transfer_rates
from onnxplace.machine.hardware import local_target
from onnxplace.machine.transfer_rates import find_host_rate, measure_read_rate
from onnxplace.target.machines import parse_machine
from onnxplace.target.target import Device, Link, Target

MIB = 1 << 20
CPU, GPU = Device("cpu:0", 1 << 30), Device("cuda:0", 1 << 30, model="NVIDIA H100 PCIe")


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(MIB) * 4)
    return path


@pytest.fixture
def reads(monkeypatch):
    """Return a list that takes the files that are measured from now on."""
    paths = []
    monkeypatch.setattr(transfer_rates, "_read_pieces", lambda path: paths.append(path) or 2.5e9)
    return paths


def test_a_file_is_read_for_a_while_at_a_rate_that_a_disk_may_have(weights, monkeypatch):
    monkeypatch.setattr(transfer_rates, "READ_SECONDS", 0.02)
    assert 1e5 < measure_read_rate(weights) < 1e12


def test_the_page_cache_keeps_nothing_of_what_was_read(weights, monkeypatch):
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system has no posix_fadvise")
    monkeypatch.setattr(transfer_rates, "READ_SECONDS", 1e-9)
    weights.read_bytes()
    measure_read_rate(weights)
    assert count_resident_pages(weights) < 0.1 * (weights.stat().st_size // 4096)


def count_resident_pages(path):
    import ctypes
    import mmap

    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as memory:
        flags = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(memory)
        failed = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(start), ctypes.c_size_t(size), flags)
        del start
        if failed:
            pytest.skip("this system does not tell which pages are in memory")
        return sum(flag & 1 for flag in flags)


def test_a_large_file_stands_for_its_filesystem_for_a_day(tmp_path, reads, monkeypatch):
    for name in ("a", "b"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(transfer_rates.MIN_SHARED_BYTES)
        assert measure_read_rate(tmp_path / name) == 2.5e9
    assert reads == [tmp_path / "a"]
    later = transfer_rates.time.time() + 25 * 3600
    monkeypatch.setattr(transfer_rates.time, "time", lambda: later)
    measure_read_rate(tmp_path / "b")
    assert reads == [tmp_path / "a", tmp_path / "b"]


def test_a_small_file_speaks_for_itself_alone(weights, reads):
    measure_read_rate(weights)
    measure_read_rate(weights)
    assert len(reads) == 2
    assert not list(measurement_cache.folder().glob("*"))


@pytest.mark.parametrize("rate", [0.0, -1.0, "fast", None, float("inf"), 3])
def test_a_damaged_rate_is_measured_again(tmp_path, reads, rate):
    with (tmp_path / "a").open("wb") as file:
        file.truncate(transfer_rates.MIN_SHARED_BYTES)
    measure_read_rate(tmp_path / "a")
    (path,) = measurement_cache.folder().glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "bytes_per_second": rate}))
    assert measure_read_rate(tmp_path / "a") == 2.5e9
    assert len(reads) == 2


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        measure_read_rate(tmp_path / "absent")


def test_a_link_of_the_target_counts_first():
    target = Target((CPU, GPU), (Link("cpu:0", "cuda:0", 1e-5, 7e9),))
    assert find_host_rate(target, GPU) == 7e9
    on_hosts = Target(
        (Device("a/cpu:0", 1), Device("b/cpu:0", 1), Device("b/cuda:0", 1)),
        (Link("a", "b", 0, 1e9), Link("b", "a", 0, 1e9), Link("b/cpu:0", "b/cuda:0", 0, 5e9)),
    )
    assert find_host_rate(on_hosts, on_hosts.devices[2]) == 5e9


def test_a_gpu_that_is_not_here_has_the_published_rate_of_its_slot():
    target = parse_machine("RTX-4090").to_target()
    assert find_host_rate(target, target.devices[0]) == 31.5e9
    assert find_host_rate(Target((CPU, GPU)), GPU) == 63e9


def test_an_unknown_gpu_has_the_rate_that_links_are_assumed_to_have():
    gpu = Device("cuda:0", 1 << 30, model="Something else")
    assert find_host_rate(Target((CPU, gpu)), gpu) == 12e9


def test_copies_in_the_memory_of_this_machine_are_measured_once_a_day(monkeypatch):
    monkeypatch.setattr(transfer_rates, "COPY_BYTES", MIB)
    target = local_target("cpu:0,cpu:1")
    rate = find_host_rate(target, target.devices[0])
    assert 1e8 < rate < 1e13
    monkeypatch.setattr(np, "copyto", None)
    assert find_host_rate(target, target.devices[0]) == rate


def test_a_processor_that_is_not_here_has_the_default_rate():
    other = Device("cpu:0", 1 << 30, model="A processor of another machine")
    assert find_host_rate(Target((other,)), other) == 10e9
