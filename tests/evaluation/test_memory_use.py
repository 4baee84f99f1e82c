"""Memory of a process that runs a bundle: prediction, measurement, and the default limit of devices."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

import onnxplace
from onnxplace.bundle import Manifest
from onnxplace.evaluation import measure_process_memory
from onnxplace.evaluation.memory_use import can_measure_memory
from onnxplace.facts import Segment
from onnxplace.feeds import random_feeds
from onnxplace.graph import OpGraph
from onnxplace.machine import RUNTIME_BYTES, hardware, local_target
from onnxplace.passes.segments.process_footprint import (
    HOLES_SHARE,
    KERNELS_BYTES,
    NODE_BYTES,
    SESSION_BYTES,
    Footprint,
    predict_footprint,
)
from onnxplace.report import compile_summary
from onnxplace.simulation import simulate
from onnxplace.target import Device, Target
from tests.support.reference_simulator import even_target, graph_of

MIB = 1 << 20
BASE = RUNTIME_BYTES + KERNELS_BYTES


def chain(ops: list[str], weights: dict[str, list[str]], sizes: dict[str, int] | None = None) -> OpGraph:
    """Return a chain of nodes n0, n1, ... of these operators; values have a size of 0."""
    names = [f"n{index}" for index in range(len(ops))]
    reads = {name: [before] for before, name in zip(["x", *names], names)}
    graph = graph_of(reads, fed=["x"], sizes=dict.fromkeys(["x", *names], 0) | (sizes or {}), weights=weights)
    return replace(graph, ops=tuple(ops))


def predict_memory(graph: OpGraph, pieces: list[list[int]], devices: list[int], target: Target) -> Footprint:
    """Return the predicted memory of a graph split into segments, each on a device."""
    segments = [Segment(home, np.array(nodes, dtype=np.int32), (), ()) for nodes, home in zip(pieces, devices)]
    device = np.zeros(len(graph), dtype=np.int32)
    for segment in segments:
        device[segment.nodes] = segment.device
    seconds = np.ones((len(target.devices), len(graph)))
    return predict_footprint(graph, segments, simulate(graph, seconds, target, device, graph.order), target)


def records(sessions: int, nodes: int) -> int:
    return sessions * SESSION_BYTES + nodes * NODE_BYTES


def test_each_session_that_reads_a_weight_holds_a_copy():
    graph = chain(["MatMul"] * 3, {"n0": ["w"], "n1": ["w"], "n2": ["w"]}, {"w": 10 * MIB})
    single = predict_memory(graph, [[0, 1, 2]], [0], even_target(1))
    three = predict_memory(graph, [[0], [1], [2]], [0, 0, 0], even_target(1))
    assert single.device_bytes == (10 * MIB + records(1, 3),)
    assert three.device_bytes == (30 * MIB + records(3, 3),)
    assert single.running_bytes == BASE + single.device_bytes[0]


def test_weights_of_lookups_stay_in_the_file():
    graph = chain(["Gather", "MatMul"], {"n0": ["table"], "n1": ["w"]}, {"table": 100 * MIB, "w": MIB})
    assert predict_memory(graph, [[0, 1]], [0], even_target(1)).device_bytes == (MIB + records(1, 2),)
    tied = chain(["Gather", "MatMul"], {"n0": ["w"], "n1": ["w"]}, {"w": MIB})
    assert predict_memory(tied, [[0, 1]], [0], even_target(1)).device_bytes == (MIB + records(1, 2),)


def test_one_weight_is_held_twice_while_weights_are_packed():
    graph = chain(["Gemm"] * 3, {"n0": ["a"], "n1": ["b"], "n2": ["c"]}, {"a": 50 * MIB, "b": 20 * MIB, "c": MIB})
    memory = predict_memory(graph, [[0, 1, 2]], [0], even_target(1))
    assert memory.opening_bytes == BASE + records(1, 3) + 100 * MIB, "the first one: 50 and 50, before 71 and 1"


@pytest.mark.parametrize(("operator", "packed_bytes"), [("Relu", 40 * MIB), ("BatchNormalization", 80 * MIB)])
def test_weights_of_convolutions_are_rewritten_completely(operator, packed_bytes):
    graph = chain(["Conv", operator], {"n0": ["w"]}, {"w": 40 * MIB})
    memory = predict_memory(graph, [[0, 1]], [0], even_target(1))
    assert memory.opening_bytes == BASE + records(1, 2) + 40 * MIB + packed_bytes
    assert memory.running_bytes == BASE + records(1, 2) + 40 * MIB, "the additional memory is returned"


def test_sessions_are_opened_one_after_the_other():
    graph = chain(["Conv", "Conv"], {"n0": ["a"], "n1": ["b"]}, {"a": 40 * MIB, "b": 10 * MIB})
    memory = predict_memory(graph, [[0], [1]], [0, 1], even_target(2))
    assert memory.opening_bytes == BASE + records(1, 1) + 80 * MIB, "the second has 40 there, and takes 20 more"


def test_values_of_all_devices_share_an_arena_and_its_fragmentation():
    sizes = {"x": 0, "n0": 30 * MIB, "n1": 10 * MIB}
    memory = predict_memory(chain(["Relu", "Relu"], {}, sizes), [[0], [1]], [0, 1], even_target(2))
    values = [round((size - records(1, 1)) / (1 + HOLES_SHARE)) for size in memory.device_bytes]
    assert 0 < min(values) < max(values)
    assert memory.running_bytes == BASE + 2 * records(1, 1) + sum(values) + int(HOLES_SHARE * max(values))


def test_a_gpu_adds_nothing_to_the_process():
    graph = chain(["MatMul", "MatMul"], {"n0": ["a"], "n1": ["b"]}, {"a": 40 * MIB, "b": 10 * MIB, "n0": MIB})
    mixed = Target((Device("cuda:0", 1 << 40), Device("cpu:0", 1 << 40)))
    memory = predict_memory(graph, [[0], [1]], [0, 1], mixed)
    assert memory.device_bytes[0] == 0
    assert 10 * MIB <= memory.device_bytes[1] < 12 * MIB


def test_an_empty_bundle_takes_the_memory_of_the_bare_process():
    memory = predict_memory(chain(["Relu"], {}), [], [], even_target(1))
    assert memory == Footprint((0,), BASE, BASE)


def test_limits_leave_room_for_the_process_itself(monkeypatch):
    monkeypatch.setattr(hardware, "available_memory_bytes", lambda: 10 << 30)
    (alone,), pair = local_target("cpu:0").devices, local_target("cpu:0,cpu:1").devices
    assert alone.memory_bytes == int(((10 << 30) - RUNTIME_BYTES) * 0.9)
    assert sum(device.memory_bytes for device in pair) in (alone.memory_bytes, alone.memory_bytes - 1)
    monkeypatch.setattr(hardware, "available_memory_bytes", lambda: RUNTIME_BYTES - 1)
    assert [device.memory_bytes for device in local_target("cpu:0,cpu:1").devices] == [0, 0]


@pytest.fixture(scope="module")
def large_bundle(tmp_path_factory):
    """Six matrices of 16 MiB each, as a bundle for two devices."""
    folder = tmp_path_factory.mktemp("large")
    width = 2048
    matrix = np.random.default_rng(0).standard_normal((width, width)).astype(np.float32)
    weights = [numpy_helper.from_array(matrix + index, f"w{index}") for index in range(6)]
    nodes = [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"], name=f"n{i}") for i in range(6)]
    inputs_and_outputs = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, width])] for name in ("x0", "x6")]
    graph = helper.make_graph(nodes, "large", *inputs_and_outputs, weights)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "m.onnx")
    return onnxplace.compile(folder / "m.onnx", folder / "bundle", devices="cpu:0,cpu:1", placer="m-topo")


@pytest.mark.slow
def test_the_manifest_predicts_the_memory_of_process_and_devices(large_bundle):
    manifest = large_bundle.manifest
    assert sum(device.nodes for device in manifest.devices) == 6
    for device in manifest.devices:
        assert device.peak_bytes <= device.process_bytes <= device.peak_bytes + MIB
    parts = sum(device.process_bytes for device in manifest.devices)
    assert BASE + parts - MIB <= manifest.predicted.running_bytes <= BASE + parts
    assert manifest.predicted.opening_bytes > BASE + 96 * MIB
    assert "a process that runs it takes" in compile_summary(large_bundle)


def test_old_bundles_have_no_memory_prediction(large_bundle):
    data = large_bundle.manifest.model_dump(mode="json")
    for name in ("running_bytes", "opening_bytes"):
        del data["predicted"][name]
    for device in data["devices"]:
        del device["process_bytes"]
    old = Manifest.model_validate(data)
    assert (old.predicted.running_bytes, old.predicted.opening_bytes, old.devices[0].process_bytes) == (0, 0, 0)
    assert "a process that runs it takes" not in compile_summary(replace(large_bundle, manifest=old))


@pytest.mark.skipif(not can_measure_memory(), reason="only Linux tells the most a process held")
def test_the_prediction_is_close_to_the_measurement(large_bundle):
    measured = measure_process_memory(large_bundle, random_feeds(large_bundle.inputs, {}), runs=3)
    predicted = large_bundle.manifest.predicted
    assert measured.running_bytes > 96 * MIB
    assert predicted.running_bytes / 1.5 <= measured.running_bytes <= predicted.running_bytes * 1.5
    assert predicted.opening_bytes / 1.5 <= measured.opening_bytes <= predicted.opening_bytes * 1.5


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps it")
@pytest.mark.slow
def test_memory_for_rewriting_convolutions_is_returned(tmp_path):
    """Four normalised convolutions of 9 MiB each: the C library used to keep three of them."""
    nodes, weights = [], []
    for i in range(4):
        sizes = {f"w{i}": (512, 512, 3, 3), **{f"{name}{i}": (512,) for name in ("scale", "bias", "mean", "variance")}}
        weights += [numpy_helper.from_array(np.full(size, 0.01, np.float32), name) for name, size in sizes.items()]
        nodes.append(helper.make_node("Conv", [f"x{i}", f"w{i}"], [f"c{i}"], name=f"conv{i}", pads=[1] * 4))
        nodes.append(
            helper.make_node("BatchNormalization", [f"c{i}", *list(sizes)[1:]], [f"x{i + 1}"], name=f"norm{i}")
        )
    inputs_and_outputs = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 512, 4, 4])] for name in ("x0", "x4")
    ]
    graph = helper.make_graph(nodes, "convolutions", *inputs_and_outputs, weights)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    bundle = onnxplace.compile(tmp_path / "m.onnx", tmp_path / "bundle", devices="cpu:0", placer="single")
    memory = measure_process_memory(bundle, random_feeds(bundle.inputs, {}), runs=3)
    assert memory.running_bytes < memory.opening_bytes - 18 * MIB
