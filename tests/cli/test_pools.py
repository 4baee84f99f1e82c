"""Pools of memory on the command line: targets with pools, what is refused, and what reports say of them."""

import json
import re
from pathlib import Path

import pytest

from onnxplace.bundle.bundle import Bundle
from tests.support.bad_input import SHAPE

pytestmark = pytest.mark.usefixtures("no_gpus")

TARGET = """
[[devices]]
id = "cpu:[0-1]"
memory_bytes = 1_000_000_000

[[pools]]
devices = ["cpu:0", "cpu:1"]
memory_bytes = {}
"""


@pytest.fixture
def write_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(pool_bytes: int) -> Path:
        path = tmp_path / "pool.toml"
        path.write_text(TARGET.format(pool_bytes))
        return path

    return write


def test_a_pool_without_room_for_the_weights_is_refused_before_measuring(refused, model_file, write_target):
    # The weights have 32768 bytes.
    words = refused(3, (), "compile", model_file, *SHAPE, "--target", write_target(20000))
    assert "P002" in words
    assert "12768 bytes more than all devices have together" in words
    assert "the pool of cpu:0 and cpu:1 (20000 bytes)" in words


@pytest.mark.parametrize("placer", ["single", "m-topo", "m-etf", "fit", "multilevel", "stages"])
def test_a_pool_without_room_for_the_values_is_named(refused, model_file, fast_pipeline, write_target, placer):
    options = ("--target", write_target(33500), "--pipeline", fast_pipeline.replace("m-etf", placer))
    words = refused(3, (placer,), "compile", model_file, *SHAPE, *options)
    assert re.search(r"P00[12]", words)
    assert re.search(r"the pool of cpu:0 and cpu:1 lacks \d+ bytes \(needs \d+, may use 33500\)", words)


def test_a_pool_of_enough_memory_is_in_the_bundle_and_in_reports(run_cli, model_file, fast_pipeline, write_target):
    options = ("--target", write_target(50000), "--pipeline", fast_pipeline, "-o", "pool.bundle")
    result = run_cli("compile", model_file, *SHAPE, *options)
    assert result.code == 0, result.err
    assert re.search(r"^cpu:0, cpu:1 share 48.8 KiB, and hold at most \S+ KiB$", result.out, re.MULTILINE)
    bundle = Bundle.open("pool.bundle")
    assert [pool.memory_bytes for pool in bundle.target.pools] == [50000]
    assert run_cli("report", "pool.bundle", "-o", "report.html").code == 0
    assert "Memory: cpu:0, cpu:1 share 48.8 KiB, and hold at most" in Path("report.html").read_text(encoding="utf-8")


def test_a_limit_of_a_device_leaves_its_pool_as_it_is(refused, model_file, fast_pipeline, write_target):
    options = ("--target", write_target(33500), "--pipeline", fast_pipeline, "--max-memory", "40KiB")
    words = refused(3, (), "compile", model_file, *SHAPE, *options)
    assert "the pool of cpu:0 and cpu:1 lacks" in words


def test_copies_of_a_model_need_memory_of_their_own_in_a_pool(run_cli, model_file, fast_pipeline, write_target):
    pipeline = fast_pipeline.replace("m-etf", "single").replace("split", "split,replicate{routes=cpu:1}")
    for pool_bytes, code in ((200_000, 0), (50_000, 3)):
        options = ("--target", write_target(pool_bytes), "--pipeline", pipeline, "--force", "-o", "copies.bundle")
        result = run_cli("compile", model_file, *SHAPE, *options)
        assert result.code == code, result.err
        assert ("its copies do not fit: the pool of cpu:0 and cpu:1 lacks" in result.err) == bool(code)


def test_plans_leave_out_ways_for_which_a_pool_has_no_room(run_cli, model_file, write_target):
    for pool_bytes in (1_000_000, 50_000):
        result = run_cli("plan", model_file, *SHAPE, "--target", write_target(pool_bytes), "--json")
        assert result.code == 0, result.err
        ways = {item["name"]: item for item in json.loads(result.out)["strategies"]}
        assert ways["one device"]["problem"] == ""
        has_no_room = "the pool of cpu:0 and cpu:1 lacks" in ways["2 copies of the model"]["problem"]
        assert has_no_room == (pool_bytes == 50_000)


def test_devices_lists_what_shares_memory(run_cli):
    result = run_cli("devices", "--devices", "cpu:0,cpu:1,cpu:0-1")
    assert re.search(r"^cpu:0, cpu:1, cpu:0-1 share \S+ [MG]iB$", result.out, re.MULTILINE)
    assert " share " not in run_cli("devices", "--devices", "cpu:0,cpu:1").out


def test_cost_graphs_are_placed_within_the_pool_of_a_machine(run_cli, write_target, tmp_path):
    # The GPU of an AI-PC may use 16 GB, its processor 32 GB, and both together 32 GB.
    for node_bytes, code in ((7_900_000_000, 0), (8_500_000_000, 3)):
        nodes = [{"id": name, "compute_time_us": 10, "memory_bytes": node_bytes} for name in "abcd"]
        graph = {"devices": [{"id": 0, "memory_bytes": 1 << 30}], "nodes": nodes, "edges": []}
        (write_target(1).parent / "graph.json").write_text(json.dumps(graph))
        devices = dict.fromkeys("a", "webgpu:0") | dict.fromkeys("bcd", "cpu:0")
        (tmp_path / "placement.json").write_text(json.dumps(devices))
        placed = run_cli("place", "graph.json", "--machine", "AI-PC", "--json")
        assert placed.code == code, placed.err
        given = run_cli("place", "graph.json", "--machine", "AI-PC", "--placement", "placement.json", "--json")
        assert json.loads(given.out)["feasible"] == (not code)
