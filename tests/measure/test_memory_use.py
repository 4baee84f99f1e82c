"""Memory of a process that runs a bundle: measurement, and the default limit of devices."""

import sys

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

import onnxplace
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.machine import hardware
from onnxplace.machine.hardware import RUNTIME_BYTES, local_target
from onnxplace.measure.memory_use import can_measure_memory, measure_model_opening, measure_process_memory
from onnxplace.measure.trial import count_process_bytes

MIB = 1 << 20


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
    steps = "optimize,profile{estimate=true},m-topo,split,emit"
    return onnxplace.compile(folder / "m.onnx", folder / "bundle", devices="cpu:0,cpu:1", pipeline=steps)


@pytest.mark.skipif(not can_measure_memory(), reason="only Linux tells the most a process held")
def test_what_a_trial_needs_is_close_to_the_measurement(large_bundle):
    measured = measure_process_memory(large_bundle, random_feeds(large_bundle.inputs, {}), runs=3)
    needs = count_process_bytes(large_bundle.manifest)
    assert measured.running_bytes > 96 * MIB
    assert needs / 1.5 <= measured.running_bytes <= needs * 1.5
    for opening in (measured.opening, measure_model_opening(large_bundle, None)):
        assert 90 * MIB < opening.resident_bytes < 130 * MIB, "96 MiB of weights"
        assert opening.resident_bytes <= opening.peak_bytes < 200 * MIB
        assert 0 < opening.seconds < 60


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
    for file in (tmp_path / "bundle" / "segments").glob("*.optimised.onnx"):  # nothing would be rewritten
        file.unlink()
    memory = measure_process_memory(bundle, random_feeds(bundle.inputs, {}), runs=3)
    assert memory.running_bytes < memory.opening_bytes - 18 * MIB
