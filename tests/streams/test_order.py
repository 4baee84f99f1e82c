"""What is enqueued, what waits, and what is held: by the calls of the driver and by results when all work is late."""

import gc

import numpy as np
import pytest
from onnx import helper, numpy_helper, parser

import onnxplace
from onnxplace.machine import ort_sessions
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.runtimes.execution import stream_memory
from onnxplace.target import device_kinds
from onnxplace.target.device_kinds import DeviceKind
from onnxplace.target.target import Device, Target
from tests.support.fake_streams import FakeDriver, use_fake_driver
from tests.support.fault_checks import HUNG_SECONDS
from tests.support.state_checks import pipeline

LAYERS = 6
SIDE = 8
WEIGHTS = np.random.default_rng(0).integers(-2, 3, (LAYERS, SIDE, SIDE)).astype("f4")


def compile_chain(folder, names):
    """Compile a chain of products whose layers take turns on the devices."""
    nodes = [
        helper.make_node("MatMul", [f"h{layer}", f"w{layer}"], [f"h{layer + 1}"], name=f"layer{layer}")
        for layer in range(LAYERS)
    ]
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> chain (float[n,{SIDE}] h0) => (float[n,{SIDE}] h{LAYERS}) {{}}'
    )
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(numpy_helper.from_array(WEIGHTS[layer], f"w{layer}") for layer in range(LAYERS))
    places = {f"layer{layer}": names[layer % len(names)] for layer in range(LAYERS)}
    target = Target(tuple(Device(name, 1 << 30) for name in dict.fromkeys(names)))
    return onnxplace.compile(
        model, folder / "chain.bundle", target=target, shape={"n": 2}, pipeline=pipeline(folder, places)
    )


def make_rows(number, rows=2):
    return (np.arange(rows * SIDE, dtype="f4").reshape(rows, SIDE) + number) % 5 - 2


def compute_chain(rows):
    for weights in WEIGHTS:
        rows = rows @ weights
    return rows


@pytest.mark.parametrize(
    "names",
    [("fake:0", "fake:1"), ("fake:0", "fake:1", "fake:2"), ("fake:0/0", "fake:0/1"), ("fake:0", "cpu:0", "fake:1")],
    ids=",".join,
)
@pytest.mark.parametrize("has_peer_access", [True, False], ids=["peer", "host"])
@pytest.mark.parametrize("eagerness", [0.0, 0.5])
@pytest.mark.sampled(5)
def test_many_requests_of_many_sizes_in_flight_are_all_right(tmp_path, names, has_peer_access, eagerness):
    with use_fake_driver(FakeDriver(5, has_peer_access, eagerness)) as driver:
        bundle = compile_chain(tmp_path, names)
        with onnxplace.InferenceSession(bundle, max_in_flight=16) as session:
            rows = [make_rows(number, 1 + number % 5) for number in range(80)]
            futures = [session.submit({"h0": item}) for item in rows]
            for item, future in zip(rows, futures):
                np.testing.assert_array_equal(future.result(HUNG_SECONDS).outputs[f"h{LAYERS}"], compute_chain(item))
        gc.collect()
        assert driver.used_bytes
        assert not any(driver.used_bytes.values())


def count_calls(tmp_path, names, **options):
    """Return a driver that has counted the calls of one run. Its work is executed only where something waits for it."""
    with use_fake_driver(FakeDriver(1, eagerness=0.0, has_places=False, **options)) as driver:
        with onnxplace.InferenceSession(compile_chain(tmp_path, names)) as session:
            session.run(None, {"h0": make_rows(0)})
            driver.counts.clear()
            (result,) = session.run(None, {"h0": make_rows(3)})
        np.testing.assert_array_equal(result, compute_chain(make_rows(3)))
        return driver


def test_no_thread_waits_between_segments(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_memory, "PIECE_BYTES", 4 << 20)
    driver = count_calls(tmp_path, ("fake:0", "fake:1"))
    # One for the checkpoint of each device, one for the output's copy; then those of `close`.
    assert driver.counts["synchronize"] <= 3 + 6
    assert driver.longest_queue > LAYERS
    assert driver.counts["copy_to_peer"] == LAYERS - 1
    assert driver.counts["copy_to_host"] == 1


def test_logical_devices_of_one_gpu_share_values(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_memory, "PIECE_BYTES", 4 << 20)
    driver = count_calls(tmp_path, ("fake:0/0", "fake:0/1"))
    assert "copy_to_peer" not in driver.counts
    assert driver.counts["copy_to_host"] == driver.counts["copy_to_device"] == 1


def test_without_peer_access_copies_go_through_two_buffers_of_the_host(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_memory, "PIECE_BYTES", 8)
    pieces = make_rows(0).nbytes // 8
    driver = count_calls(tmp_path, ("fake:0", "fake:1"), has_peer_access=False)
    assert "copy_to_peer" not in driver.counts
    assert driver.counts["copy_to_device"] == driver.counts["copy_to_host"] == LAYERS * pieces
    # The input's and the output's pieces are in flight together; the crossings need two each.
    assert driver.counts.get("allocate_host", 0) <= 2 * pieces + 2 * (LAYERS - 1)


def test_memory_is_held_only_until_the_work_that_needs_it_is_over(tmp_path, driver):
    bundle = compile_chain(tmp_path, ("fake:0", "fake:1"))
    with onnxplace.InferenceSession(bundle) as session:
        for number in range(20):
            session.run(None, {"h0": make_rows(number)})
        for device in session._session.engine._devices.values():
            device.memory.finish()
        gc.collect()
        assert not any(driver.used_bytes.values())


def test_page_locked_memory_is_reused_and_freed(tmp_path, driver):
    bundle = compile_chain(tmp_path, ("fake:0", "fake:1"))
    with onnxplace.InferenceSession(bundle) as session:
        for number in range(10):
            session.run(None, {"h0": make_rows(number)})
        allocated = driver.counts["allocate_host"]
        for number in range(10):
            session.run(None, {"h0": make_rows(number)})
        assert driver.counts["allocate_host"] <= allocated + 2
    gc.collect()
    assert driver.counts["free_host"] == driver.counts["allocate_host"]


def test_packed_and_half_types_pass_between_devices(tmp_path):
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    types (float[5] whole, bfloat16[3] brain, float16[3] half, bool[3] truth)
        => (float[5] a, bfloat16[3] b, float16[3] c, bool[3] d, int4[5] packed) {
        [first] packed = Cast<to = 22>(whole)
        [second] a = Cast<to = 1>(packed)
        [third] brain2 = Identity(brain)
        [fourth] b = Identity(brain2)
        [fifth] half2 = Neg(half)
        [sixth] c = Neg(half2)
        [seventh] truth2 = Not(truth)
        [eighth] d = Not(truth2)
    }"""
    import ml_dtypes

    feeds = {
        "whole": np.array([-8, 7, 0, 3, -1], np.float32),
        "brain": np.array([1.5, -2, 3], ml_dtypes.bfloat16),
        "half": np.array([1.5, -2, 3], np.float16),
        "truth": np.array([True, False, True]),
    }
    places = {"first|third|fifth|seventh": "fake:0", ".*": "fake:1"}
    target = Target((Device("fake:0", 1 << 30), Device("fake:1", 1 << 30)))
    bundle = onnxplace.compile(
        parser.parse_model(text),
        tmp_path / "types.bundle",
        target=target,
        pipeline=pipeline(tmp_path, places).removeprefix("optimize,"),
    )
    with onnxplace.InferenceSession(bundle) as session:
        packed = feeds["whole"].astype(ml_dtypes.int4)
        for output, expected in zip(session.run(None, feeds), (*feeds.values(), packed), strict=True):
            assert output.dtype == expected.dtype
            np.testing.assert_array_equal(output.astype("f4"), expected.astype("f4"))


def test_sessions_get_the_options_of_their_memory(monkeypatch):
    seen = []

    class Provided(DeviceKind):
        name, title, providers, memory = "provided", "", {"cpu": "CPUExecutionProvider"}, ""

        def list_hardware(self):
            return ()

        def find_problem(self, address):
            return None

        def list_providers(self, address):
            return [("CUDAExecutionProvider", {"device_id": "1"})]

    class Runtime:
        @staticmethod
        def InferenceSession(source, options, providers, **_):  # noqa: N802 - ONNX Runtime's name
            seen.extend(providers)
            raise RuntimeError("seen")

    monkeypatch.setattr(ort_sessions, "find_kind", lambda name: Provided())
    options = make_session_options([0])
    monkeypatch.setattr(device_kinds, "import_onnxruntime", lambda: Runtime)
    with pytest.raises(onnxplace.OnnxplaceError, match="seen"):
        open_session(b"", options, provider_options={"user_compute_stream": "77"})
    assert seen == [("CUDAExecutionProvider", {"device_id": "1", "user_compute_stream": "77"}), "CPUExecutionProvider"]
