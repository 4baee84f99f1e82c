"""What holds of the WebGPU provider: it is used, it fails clearly, threads do not hurt, and processes end."""

import gc
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from onnx import parser

import onnxplace
from onnxplace.errors import TargetError
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.passes.profiling.node_measurement import MeasurementOptions
from onnxplace.runtimes.execution.bound_memory import BoundValue
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.kind_table import find_kind
from tests.conftest import Ran
from tests.support.commands import only_json

CHAIN = """<ir_version: 8, opset_import: ["": 17]>
chain (float[4, 4] x) => (float[4, 4] y) { a = Relu(x) b = MatMul(a, x) c = Add(b, x) y = MatMul(c, a) }"""
PIPELINE = "profile{estimate=true},m-etf,split,emit"


def compile_chain(folder):
    return onnxplace.compile(parser.parse_model(CHAIN), folder / "chain", devices="webgpu:0", pipeline=PIPELINE)


def compute_chain(x):
    a = np.maximum(x, 0)
    return (a @ x + x) @ a


def run_python(source, **environment):
    return subprocess.run(
        [sys.executable, "-c", source], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


def test_segments_run_on_the_provider(tmp_path):
    with onnxplace.InferenceSession(compile_chain(tmp_path)) as session:
        for segment in session._session.engine._routes[0].segments.values():
            assert segment.session.get_providers()[0] == "WebGpuExecutionProvider"


def test_the_target_has_memory_and_other_indices_are_refused():
    (device,) = local_target("webgpu:0").devices
    assert device.memory_bytes > 0
    with pytest.raises(TargetError, match=r"T011.*webgpu:1.*first GPU alone"):
        local_target("webgpu:1")


def test_without_a_driver_the_reason_is_reported_and_nothing_else_is_printed():
    source = "import sys; from onnxplace.cli.app import main; sys.exit(main(['devices', '--json']))"
    result = run_python(source, VK_DRIVER_FILES="/nowhere", VK_ICD_FILENAMES="/nowhere")
    accelerators = only_json(Ran(result.returncode, result.stdout, ""))["accelerators"]
    (gpu,) = [item for item in accelerators if item["id"] != "qnn/npu:0"]
    assert gpu["id"] == "webgpu:0"
    assert gpu["problem"].startswith("ONNX Runtime cannot open it: Failed to get a WebGPU adapter")


def test_several_sessions_in_several_threads_compute_the_same(tmp_path):
    bundle = compile_chain(tmp_path)
    inputs = [np.random.default_rng(seed).standard_normal((4, 4)).astype(np.float32) for seed in range(40)]
    sessions = [onnxplace.InferenceSession(bundle) for _ in range(3)]

    def run(session):
        for _ in range(5):
            for x in inputs:
                np.testing.assert_allclose(session.run(None, {"x": x})[0], compute_chain(x), rtol=1e-3, atol=1e-4)

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(run, session) for session in sessions * 2]:
            future.result(120)
    for session in sessions:
        session.close()


def test_a_new_session_computes_after_all_others_are_gone(tmp_path):
    bundle, x = compile_chain(tmp_path), np.ones((4, 4), dtype=np.float32)
    for _ in range(3):
        session = onnxplace.InferenceSession(bundle)
        np.testing.assert_allclose(session.run(None, {"x": x})[0], compute_chain(x))
        session.close()
        del session
        gc.collect()


def test_sessions_of_two_segments_pass_values_on_the_gpu(tmp_path):
    """Two cuts around a CPU node leave two segments on the GPU, the second of which reads a value of the first."""
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"middle": "cpu:0", ".*": "webgpu:0"}))
    text = """<ir_version: 8, opset_import: ["": 17]> two (float[4] x) => (float[4] y) {
        [first] a = Relu(x) [middle] b = Neg(a) [last] y = Add(a, b) }"""
    coplace = f"coplace{{join=never,device_map={json.dumps(str(file))}}}"
    bundle = onnxplace.compile(
        parser.parse_model(text),
        tmp_path / "two",
        devices="webgpu:0,cpu:0",
        pipeline=f"profile{{estimate=true}},{coplace},m-etf,split,emit",
    )
    kept = []
    with onnxplace.InferenceSession(bundle) as session:
        first = next(
            item for item in session._session.engine._routes[0].segments.values() if item.record.outputs == ("a",)
        )
        run = first.run

        def watch(values, *arguments):
            run(values, *arguments)
            kept.append(type(values["a"]))

        first.run = watch
        np.testing.assert_array_equal(session.run(None, {"x": np.arange(4, dtype=np.float32)})[0], np.zeros(4))
    assert kept == [BoundValue]


@pytest.mark.parametrize("end", ["", "session.close()", "del session"], ids=["open", "closed", "deleted"])
def test_a_process_ends_while_the_gpu_has_work(tmp_path, end):
    compile_chain(tmp_path)
    source = f"""
import numpy as np, onnxplace
session = onnxplace.InferenceSession({str(tmp_path / "chain")!r})
futures = [session.submit({{"x": np.ones((4, 4), "f4")}}) for _ in range(8)]
{end}
print("end")
"""
    result = run_python(source)
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr


@pytest.mark.parametrize("devices", [["webgpu:0"], ["webgpu:0", "cpu:0"], ["cpu:0", "webgpu:0"]], ids=",".join)
def test_failed_runs_keep_nothing_that_is_freed_after_their_session(devices):
    """Freed memory is overwritten here: an exception used to keep the binding of its run until after the session."""
    source = f"""
import gc
from onnxplace.runtimes.onnxruntime import OnnxRuntime
from onnxplace.testing.runtime_contract import check_runtime
for _ in range(3):
    check_runtime(OnnxRuntime, devices={devices})
    gc.collect()
"""
    result = run_python(source, MALLOC_PERTURB_="165")
    assert result.returncode == 0, result.stderr


def test_a_tensor_that_is_too_large_fails_and_the_next_run_works(tmp_path):
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[1] x, int64[2] size) => (float y) { large = Expand(x, size) y = ReduceSum<keepdims = 0>(large) }"""
    bundle = onnxplace.compile(parser.parse_model(text), tmp_path / "out", devices="webgpu:0", pipeline=PIPELINE)
    one = np.ones(1, dtype=np.float32)
    with onnxplace.InferenceSession(bundle) as session:
        with pytest.raises(onnxplace.ExecutionError, match=r"X010.*ran out of memory.*Buffer size"):
            session.run(None, {"x": one, "size": np.array([1 << 14, 5 << 12])})
        (y,) = session.run(None, {"x": one, "size": np.array([2, 2])})
    assert y == 4


def test_costs_are_times_on_the_gpu_and_not_those_of_launches():
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[192, 192] x) => (float[192, 192] y) { [small] a = Neg(x) [large] y = MatMul(a, x) }"""
    x = np.ones((192, 192), dtype=np.float32)
    options = MeasurementOptions(DeviceAddress.of("webgpu:0"), (0,), 5, 1.0)
    measurement = options.measure(load(parser.parse_model(text)), {"x": x})[0]
    small, large = measurement.seconds
    assert large > 5 * small > 0, "the product takes about 50 times as long; both launches take about 10 us"


def test_the_lock_is_one_for_the_process_and_may_be_taken_twice():
    kind = find_kind(DeviceAddress.of("webgpu:0").kind)
    with kind.lock.hold(), kind.lock.hold():
        assert kind.lock.hold() is kind.lock.hold()
