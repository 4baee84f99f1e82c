"""Numbers beyond any machine are refused by name, before any work."""

import gzip
import json
import math

import networkx
import numpy as np
import pytest

from onnxplace.cost_graph.cost_graphs import MAX_COST, parse_cost_graph, read_cost_graph
from onnxplace.cost_graph.part_functions import from_networkx
from onnxplace.driver.place import replace_devices
from onnxplace.errors import FeedError, InputError, TargetError, UsageError
from onnxplace.feeds.npz import read_npz
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.target.limits import MAX_DEVICES
from onnxplace.target.parsing import parse_devices
from onnxplace.target.target import Device, Link, Shared, Target
from onnxplace.target.target_file import read_target
from tests.cli.test_fuzz_inputs import HEADERS, with_header
from tests.machine.test_damaged_cache import QUALITY

DEVICES = '[[devices]]\nid = "cpu:0"\nmemory_bytes = {}\n[[devices]]\nid = "cpu:1"\nmemory_bytes = 1000000000\n'
LINK = '[[links]]\nsource = "cpu:0"\ndestination = "cpu:1"\nlatency_seconds = {}\nbytes_per_second = {}\n'
SHARED = '[[shared]]\ndevices = ["cpu:0", "cpu:1"]\n'
ABSURD = ("9223372036854775808", "1e308", "inf", "nan", "-1", "true", "1" * 5000, "1" * 400)


def target_texts():
    """Yield the text of a target file and the name of its absurd number."""
    for value in ABSURD:
        yield DEVICES.format(value), "memory_bytes"
        for name in ("cores", "segment_seconds", "input_seconds", "output_seconds", "kernel_seconds"):
            yield f"{DEVICES.format(10**9)}{name} = {value}\n", name
        yield DEVICES.format(10**9) + LINK.format(value, 1e9), "latency_seconds"
        if value not in ("inf", "1e308", "9223372036854775808"):  # transfers that take no time
            yield DEVICES.format(10**9) + LINK.format(0.1, value), "bytes_per_second"
        for name in ("memory_slowdown", "compute_slowdown", "memory_bytes_per_second"):
            if (name, value) != ("memory_bytes_per_second", "9223372036854775808"):
                yield f"{DEVICES.format(10**9)}{SHARED}{name} = {value}\n", name
    yield DEVICES.format(10**9) + LINK.format(0.1, "1e-320"), "bytes_per_second"
    yield DEVICES.format(2**60 + 1), "memory_bytes"


def test_absurd_numbers_in_a_target_file_are_refused_by_name(tmp_path):
    path = tmp_path / "t.toml"
    for text, name in target_texts():
        path.write_text(text)
        with pytest.raises(TargetError) as caught:
            read_target(path)
        problem = caught.value
        assert problem.code == "T007", text[:300]
        assert problem.where.startswith(str(path))
        assert name in problem.message or "5000" in text or "digits" in problem.message, text[:300]
        assert len(str(problem)) < 600


def test_a_target_of_the_largest_numbers_is_read(tmp_path):
    path = tmp_path / "t.toml"
    path.write_text(
        DEVICES.format(2**60) + "cores = 65536\n" + LINK.format("1e12", "inf") + SHARED + "compute_slowdown = 1e6\n"
    )
    target = read_target(path)
    assert target.devices[0].memory_bytes == 2**60
    assert target.link_arrays()[1][0, 1] == 0


@pytest.mark.parametrize("value", [True, None, "16", 1.5, 2**63, -1, math.nan, [], np.float64(1)])
def test_a_device_from_python_has_the_same_limits(value):
    with pytest.raises(TargetError, match="T007"):
        Device("cpu:0", value)
    assert Device("cpu:0", np.int64(5)).memory_bytes == 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link("cpu:0", "cpu:1", "0", 1e9),
        lambda: Link("cpu:0", "cpu:1", 0.0, None),
        lambda: Shared(("cpu:0", "cpu:1"), compute_slowdown="2"),
        lambda: Device("cpu:0", 1, segment_seconds=True),
    ],
)
def test_links_and_sharing_from_python_have_the_same_limits(make):
    with pytest.raises(TargetError, match="T007"):
        make()


@pytest.mark.parametrize("text", ["9" * 500, "99999999999TiB", "1" * 100_000 + "!", "0." + "1" * 100_000, "2000000TiB"])
def test_too_much_memory_is_refused(run_cli, model_file, text):
    for amount in (text, f"cpu:0={text}"):
        result = run_cli(
            "compile", model_file, "--shape", "batch=4", "--devices", "cpu:0,cpu:1", "--max-memory", amount
        )
        assert (result.code, result.err.partition("]")[0]) == (2, "error[U005")
        assert len(result.err) < 400


def test_sizes_and_devices_of_thousands_of_digits_are_refused(run_cli, model_file):
    digits = "9" * 5000
    result = run_cli("compile", model_file, "--shape", f"batch={digits}", "--devices", "cpu:0,cpu:1")
    assert (result.code, result.err.partition("]")[0]) == (2, "error[M022")
    result = run_cli("compile", model_file, "--shape", "batch=4", "--devices", f"cpu:0,cpu:{digits}")
    assert (result.code, result.err.partition("]")[0]) == (2, "error[T005")
    assert [item.id for item in parse_devices(f"cpu:{'0' * 5000}7")] == ["cpu:7"]


@pytest.mark.parametrize("digits", ["٢", "²", "9" * 5000])
def test_only_short_numbers_in_plain_digits_are_numbers(run_cli, model_file, digits):
    """Python takes Arabic digits for numbers, and superscripts for digits."""
    for code, *command in (
        ("M022", "compile", model_file, "--shape", f"batch={digits}"),
        ("U005", "explain", f"P{digits}"),
    ):
        result = run_cli(*command)
        assert (result.code, result.err.partition("]")[0]) == (2, f"error[{code}")


# ---------------------------------------------------------------------------------------------- how many devices


def test_too_many_devices_are_refused_everywhere(run_cli, model_file, tmp_path):
    many = range(3000)
    graph = {"nodes": [{"id": 0, "compute_time_us": 1}], "devices": [{"id": i, "memory_bytes": 9} for i in many]}
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    (tmp_path / "small.json").write_text(json.dumps({**graph, "devices": graph["devices"][:2]}))
    (tmp_path / "t.toml").write_text("".join(f'[[devices]]\nid = "cpu:{i}"\nmemory_bytes = 9\n' for i in many))
    for command in (
        ("compile", model_file, "--devices", ",".join(f"cpu:{i}" for i in many)),
        ("compile", model_file, "--target", tmp_path / "t.toml"),
        ("place", tmp_path / "graph.json"),
        ("place", tmp_path / "small.json", "--devices", "3000"),
    ):
        result = run_cli(*command)
        assert (result.code, result.out, result.err.partition("]")[0]) == (2, "", "error[T005")
        assert f"expected at most {MAX_DEVICES} devices, got 3000" in result.err


def test_the_maximum_number_of_devices_is_accepted():
    devices = [{"id": index, "memory_bytes": 9} for index in range(MAX_DEVICES)]
    graph = parse_cost_graph({"nodes": [{"id": 0, "compute_time_us": 1}], "devices": devices})
    assert len(replace_devices(graph, MAX_DEVICES, 5).target.devices) == MAX_DEVICES
    with pytest.raises(TargetError, match="T005"):
        Target(tuple(Device(f"cpu:{index}", 1) for index in range(MAX_DEVICES + 1)))


# ---------------------------------------------------------------------------------------------- cost graphs


@pytest.mark.parametrize("key", ["compute_time_us", "memory_bytes", "temp_bytes", "output_bytes"])
def test_costs_of_a_graph_that_add_up_to_too_much_are_refused(key):
    nodes = [{"id": index, "compute_time_us": 1, key: MAX_COST // 2} for index in range(3)]
    with pytest.raises(InputError, match=f"{key} add up to 1.5e") as caught:
        parse_cost_graph({"nodes": nodes, "devices": [{"id": 0}]})
    assert caught.value.code == "D002"
    nodes = [{"id": index, "compute_time_us": 1} for index in range(21)]
    edges = [{"src": index, "dst": index + 1, "bytes": MAX_COST // 2} for index in range(20)]
    with pytest.raises(InputError, match=r"bytes add up to 1e\+19"):
        parse_cost_graph({"nodes": nodes, "edges": edges, "devices": [{"id": 0}]})


def test_a_gzipped_graph_that_expands_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("onnxplace.cost_graph.cost_graphs.MAX_FILE_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    for data in (gzip.compress(b" " * (50 << 20)), gzip.compress(b" " * (1 << 19)) * 50, b" " * (2 << 20)):
        path.write_bytes(data)
        with pytest.raises(InputError, match="it holds more than 1048576 bytes") as caught:
            read_cost_graph(path)
        assert (caught.value.code, caught.value.where) == ("D001", str(path))


def test_a_gzipped_graph_may_be_in_parts_and_filled_up(tmp_path):
    text = json.dumps({"nodes": [{"id": 0, "compute_time_us": 1}], "devices": [{"id": 0}]}).encode()
    path = tmp_path / "parts.json.gz"
    path.write_bytes(gzip.compress(text[:9]) + gzip.compress(text[9:]) + b"\0" * 100)
    assert read_cost_graph(path).ids == (0,)
    path.write_bytes(gzip.compress(text) + b"junk")
    with pytest.raises(InputError, match="cut off or damaged"):
        read_cost_graph(path)


@pytest.mark.parametrize("seconds", [-1, 10**400, math.nan, "1", True, None, math.inf])
def test_a_networkx_graph_with_an_absurd_time_is_refused_by_name(seconds):
    graph = networkx.DiGraph()
    graph.add_node("odd", seconds=seconds)
    with pytest.raises(InputError, match="seconds of node 'odd'"):
        from_networkx(graph, Target((Device("cpu:0", 9),)))


def test_a_networkx_graph_may_hold_numbers_of_numpy():
    graph = networkx.DiGraph()
    graph.add_node("a", seconds=np.float32(0.5), weights_bytes=np.int64(7))
    profile = from_networkx(graph, Target((Device("cpu:0", 9),))).profile
    assert profile.seconds["cpu/1"].tolist() == [0.5]
    assert profile.graph.weight_bytes.tolist() == [7]


# ---------------------------------------------------------------------------------------------- options of passes


@pytest.mark.parametrize(
    "placer", ["auto{proposals=9,", "exact{", "stages{", "stages{contiguous=false,", "fit{", "multilevel{"]
)
@pytest.mark.sampled(5)
def test_a_seed_may_be_of_any_size(run_cli, tmp_path, placer):
    nodes = [{"id": index, "compute_time_us": 5 + index, "memory_bytes": 5} for index in range(9)]
    edges = [{"src": a, "dst": b, "bytes": 10 * a + b} for a in range(9) for b in range(a + 1, 9) if (a * b) % 3 == 1]
    devices = [{"id": index, "memory_bytes": 800} for index in range(2)]
    text = json.dumps({"nodes": nodes, "edges": edges, "devices": devices, "comm": {"coef_us_per_byte": 0.01}})
    (tmp_path / "graph.json").write_text(text)
    for seed in (2**32, 2**63 - 1, 10**30):
        result = run_cli("place", tmp_path / "graph.json", "--placer", f"{placer}seconds=0.1,seed={seed}}}")
        assert result.code == 0, result.err


@pytest.mark.parametrize(
    "option", ["fit{seconds=nan}", "fit{seconds=-1}", "fit{seed=-1}", "stages{seconds=nan}", "stages{seed=-1}"]
)
def test_wrong_times_and_seeds_are_refused(option):
    with pytest.raises(UsageError, match="U005"):
        Pipeline.parse(option)


# ---------------------------------------------------------------------------------------------- archives


def test_an_archive_that_expands_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("onnxplace.feeds.npz.MAX_UNPACKED_BYTES", 1 << 20)
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros(1 << 20, dtype=np.float32))
    with pytest.raises(FeedError, match=r"its \d+ bytes expand to 4194") as caught:
        read_npz(tmp_path / "bomb.npz")
    assert caught.value.code == "F006"
    np.savez(tmp_path / "large.npz", x=np.zeros(1 << 20, dtype=np.float32))
    assert read_npz(tmp_path / "large.npz")["x"].nbytes == 4 << 20


def test_an_array_too_large_for_any_memory_is_refused(tmp_path):
    (tmp_path / "x.npz").write_bytes(with_header(HEADERS[0]))
    with pytest.raises(FeedError, match="too large for this machine's memory"):
        read_npz(tmp_path / "x.npz")


# ---------------------------------------------------------------------------------------------- cost files


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"value_bytes": {str(n): 1 << 50 for n in range(1025)}}, "value_bytes add up to 1.15e"),
        ({"value_bytes": {"a": 2**63}}, "value_bytes of 'a' is 9223372036854775808"),
        ({"whole_seconds": {"cpu/1": 1e308}}, "whole_seconds of 'cpu/1' is 1e"),
        ({"measured": {"cpu/1": {**vars(QUALITY), "kernel_seconds": 1e308}}}, "'measured' is invalid"),
        ({"measured": {"cpu/1": {**vars(QUALITY), "runs": True}}}, "'measured' is invalid"),
    ],
)
def test_absurd_numbers_in_a_cost_file_are_refused_by_name(run_cli, model_file, tmp_path, changes, words):
    nodes = {name: {"seconds": {"cpu/1": 1e-3}} for name in ("left", "right", "relu", "tanh", "sum")}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"format": "onnxplace-costs", "version": 1, "nodes": nodes, **changes}))
    result = run_cli("compile", model_file, "--shape", "batch=4", "--devices", "cpu:0,cpu:1", "--costs", path)
    assert (result.code, result.err.partition("]")[0]) == (2, "error[C011")
    assert words in result.err
