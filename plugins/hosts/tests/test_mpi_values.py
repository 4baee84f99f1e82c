"""Values between ranks, on one host and on two that are both this machine."""

import os
import sys
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnxplace
from onnxplace.utils.ort import import_onnxruntime
from onnxplace_hosts import mpi
from onnxplace_hosts.connection import Connection
from onnxplace_hosts.ranks import opening
from onnxplace_hosts.ranks.opening import Opening
from onnxplace_hosts.ranks.shared_blocks import SharedBlocks
from tests.support.random_placements import assert_same
from tests.support.ranks import read_rank_ids
from tests.support.two_hosts import TWO_HOSTS, compile_alternating

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPICH is not installed here")

WAIT_SECONDS = 300.0
MANY_TYPES = """
<ir_version: 10, opset_import: ["": 21]>
many (float[2, 3] x, float[0, 3] empty, string[2] text, float[300, 1000] big, float single)
    => (float[2, 3] y, float[0, 3] e, string[4] t, float[300, 1000] b, float s, seq(float[2, 3]) q, int64[1, k] n)
    <float scale = {1}, int4 zero = {0}, int64[1] axis = {0}>
{
    half = Cast<to = 10>(x)
    bits = Cast<to = 9>(half)
    bytes = Cast<to = 2>(bits)
    brain = Cast<to = 16>(bytes)
    small = Cast<to = 17>(brain)
    whole = Cast<to = 1>(small)
    four = QuantizeLinear(whole, scale, zero)
    y = DequantizeLinear(four, scale, zero)
    e0 = Neg(empty)
    e = Neg(e0)
    t0 = Concat<axis = 0>(text, text)
    t = Identity(t0)
    b0 = Neg(big)
    b1 = Neg(b0)
    b = Neg(b1)
    s0 = Neg(single)
    s = Neg(s0)
    q0 = SequenceConstruct(x, y)
    q1 = Identity(q0)
    q = Identity(q1)
    n0 = ReduceSum<keepdims = 0>(x)
    n1 = Unsqueeze(n0, axis)
    n = NonZero(n1)
}
"""


TWO_PRODUCTS = """
<ir_version: 8, opset_import: ["": 17]>
products (float[2, 256] x) => (float[2, 256] y) { a = MatMul(x, v) y = MatMul(a, w) }
"""


LARGE = """
<ir_version: 8, opset_import: ["": 17]>
large (float[400, 400] x) => (float[400, 400] y) { a = Neg(x) y = MatMul(a, a) }
"""


def compile_many(folder, *devices):
    model = parser.parse_model(MANY_TYPES)
    return compile_alternating(model, folder, *devices)


def make_feeds(seed):
    random = np.random.default_rng(seed)
    return {
        "x": np.array([[np.nan, 1, -2], [0, -0.0, seed]], np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "text": np.array(["ä", f"{seed}"], object),
        "big": random.standard_normal((300, 1000), np.float32),
        "single": np.array(seed, np.float32),
    }


def run_all(bundle, **options):
    with onnxplace.InferenceSession(bundle, **options) as session:
        return [session.submit(make_feeds(seed)).result(WAIT_SECONDS).outputs for seed in range(3)]


def test_values_of_all_types_cross_from_rank_to_rank_as_between_threads(tmp_path):
    bundle = compile_many(tmp_path, "cpu:0", "cpu:1")
    expected = run_all(bundle)
    actual = run_all(bundle, runtime="mpi", timeout=WAIT_SECONDS)
    for want, outputs in zip(expected, actual):
        assert set(outputs) == set(want)
        for name in want:
            assert_same(outputs[name], want[name])


@pytest.mark.parametrize("shares", [True, False])
def test_large_outputs_belong_to_the_caller_whether_ranks_share_memory_or_not(tmp_path, monkeypatch, shares):
    text = '<ir_version: 8, opset_import: ["": 17]> big (float[20000] x) => (float[20000] a, float[20000] y) '
    text += "{ a = Neg(x) y = Neg(a) }"
    bundle = compile_alternating(parser.parse_model(text), tmp_path, "cpu:0", "cpu:1")
    if not shares:
        monkeypatch.setattr(SharedBlocks, "make_probe", lambda self: [])
    with onnxplace.InferenceSession(bundle, runtime="mpi", timeout=WAIT_SECONDS) as session:
        assert bool(session._session.engine.worker._taken) == shares
        kept = []
        for seed in range(1, 7):
            kept.append(session.run(["a", "y"], {"x": np.full(20_000, seed, np.float32)}))
            for output in kept[-1]:
                output *= 10
        for seed, (a, y) in enumerate(kept, 1):
            assert set(a) == {-10.0 * seed}
            assert set(y) == {10.0 * seed}


@pytest.mark.slow
def test_large_inputs_of_requests_in_flight_stay_apart_whether_ranks_share_memory_or_not(tmp_path, monkeypatch):
    text = '<ir_version: 8, opset_import: ["": 17]> big (float[110000] x) => (float[110000] y) '
    text += "{ a = Neg(x) y = Neg(a) }"
    bundle = compile_alternating(parser.parse_model(text), tmp_path, "cpu:0", "cpu:1")
    feeds = [{"x": np.full(110_000, seed, np.float32)} for seed in range(8)]
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr(SharedBlocks, "make_probe", lambda self: [])
        with onnxplace.InferenceSession(bundle, runtime="mpi", timeout=WAIT_SECONDS) as session:
            assert bool(session._session.engine.worker._cluster.maps) == shares
            for futures in [[session.submit(item) for item in feeds] for _ in range(3)]:
                for item, future in zip(feeds, futures):
                    np.testing.assert_array_equal(future.result(WAIT_SECONDS).outputs["y"], item["x"])


PLACED = """
<ir_version: 8, opset_import: ["": 17]>
large (float[n, 1024] x, float[n, 1024] total) => (float[n, 1024] y, int64[2, k] places, float[n, 1024] next)
{
    a = Neg(x)
    p = NonZero(x)
    b = Neg(a)
    next = Add(total, a)
    y0 = Add(a, b)
    places = Neg(p)
    y = Sub(y0, next)
}
"""


def test_large_values_of_all_sizes_stay_apart_while_they_are_read_on_several_devices_and_as_states(tmp_path):
    state = ("next=total",)
    bundle = compile_alternating(
        parser.parse_model(PLACED), tmp_path, "cpu:0", "cpu:1", "cpu:2", state=state, shape={"n": 150}
    )
    expected, actual = [], []
    for results, options in ((expected, {}), (actual, {"runtime": "mpi", "timeout": WAIT_SECONDS})):
        random = np.random.default_rng(0)
        with onnxplace.InferenceSession(bundle, **options) as session:
            for rows in (150, 150, 150, 200, 150):
                start = {"total": random.standard_normal((rows, 1024), np.float32)}
                futures = []
                for _ in range(4):
                    x = random.standard_normal((rows, 1024), np.float32)
                    x[: random.integers(2)] = 0  # so the number of places varies
                    futures.append(session.submit({"x": x, **start}))
                    start = {}
                with suppress(onnxplace.ExecutionError):  # a request that is ended somewhere on its way
                    session.run(None, {"x": x}, timeout=2e-3)
                results += [future.result(WAIT_SECONDS).outputs for future in futures]
                session.reset_state()
    for want, outputs in zip(expected, actual):
        for name in want:
            np.testing.assert_array_equal(outputs[name], want[name])


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
    return compile_many(tmp_path_factory.mktemp("hosts"), *TWO_HOSTS)


def test_a_bundle_of_two_hosts_runs_there_and_its_trace_names_their_devices(two_hosts):
    with onnxplace.InferenceSession(two_hosts, runtime="mpi", trace=True, timeout=WAIT_SECONDS) as session:
        results = [session.submit(make_feeds(seed)).result(WAIT_SECONDS) for seed in range(3)]
    for seed, result in enumerate(results):
        np.testing.assert_array_equal(result.outputs["b"], -make_feeds(seed)["big"])
        assert {event.device for event in result.events} == set(TWO_HOSTS)
        assert all(0 <= event.start_seconds <= event.finish_seconds <= result.seconds for event in result.events)


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Let ranks believe that they are on other machines, with a cache of their own, where the bundle is missing."""
    monkeypatch.setenv("ONNXPLACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(opening, "is_this_machine", lambda host: False)
    to_frame = Opening.to_frame

    def with_other_path(opening):
        frame = to_frame(opening)
        frame.fields["path"] = "/nowhere/model.bundle"
        return frame

    monkeypatch.setattr(Opening, "to_frame", with_other_path)
    return tmp_path / "cache" / "bundles"


def test_ranks_without_the_bundle_fetch_their_segments_and_the_ranges_of_weights_that_these_need(tmp_path, elsewhere):
    model = parser.parse_model(TWO_PRODUCTS)
    random = np.random.default_rng(0)
    for name, shape in (("v", (256, 512)), ("w", (512, 256))):
        model.graph.initializer.append(numpy_helper.from_array(random.standard_normal(shape, np.float32), name))
    bundle = compile_alternating(model, tmp_path, *TWO_HOSTS)
    feeds = {"x": random.standard_normal((2, 256), np.float32)}
    open_both = partial(onnxplace.InferenceSession, bundle, runtime="mpi", timeout=WAIT_SECONDS)
    with open_both() as session:
        outputs = session.run(None, feeds)
    copies = sorted(path for path in elsewhere.iterdir() if path.is_dir())
    weights = bundle.file("segments/weights.bin").stat()
    assert len(copies) == 2
    assert all((copy / "segments/weights.bin").stat().st_size == weights.st_size for copy in copies)
    assert all((copy / "segments/weights.bin").stat().st_blocks < weights.st_blocks for copy in copies)  # holes
    assert {path.name for copy in copies for path in copy.glob("segments/*.onnx")} == {
        segment.file.partition("/")[2] for segment in bundle.manifest.segments
    }
    times = [path.stat().st_mtime_ns for copy in copies for path in copy.glob("segments/*")]
    with open_both() as session:
        np.testing.assert_array_equal(session.run(None, feeds)[0], outputs[0])
    assert [path.stat().st_mtime_ns for copy in copies for path in copy.glob("segments/*")] == times
    plain = import_onnxruntime().InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(outputs[0], plain.run(None, feeds)[0], rtol=1e-4, atol=1e-2)


def test_a_bundle_that_is_there_is_used_there(tmp_path, elsewhere, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("ONNXPLACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(opening, "is_this_machine", lambda host: False)
    bundle = compile_many(tmp_path, *TWO_HOSTS)
    with onnxplace.InferenceSession(bundle, runtime="mpi", timeout=WAIT_SECONDS) as session:
        session.run(None, make_feeds(0))
    assert [path for path in elsewhere.iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_events_of_a_machine_with_another_clock_are_on_the_clock_of_the_first(two_hosts, monkeypatch):
    shift = 1000.0

    class Shifted(Connection):
        """Starts ranks of which rank 1 has another clock."""

        def make_ranks_command(self, counts, module, *arguments):
            code = (
                "import time\nfrom mpi4py import MPI\nread = time.perf_counter\n"
                f"if MPI.COMM_WORLD.rank:\n    time.perf_counter = lambda: read() + {shift}\n"
                f"from {module} import main\nmain()"
            )
            *command, _, _ = super().make_ranks_command(counts, module)
            return [*command, "-c", code, *arguments]

    monkeypatch.setattr(mpi, "Connection", Shifted)
    monkeypatch.setattr(opening, "is_this_machine", lambda host: host == "localhost")
    with onnxplace.InferenceSession(two_hosts, runtime="mpi", trace=True, timeout=WAIT_SECONDS) as session:
        result = session.submit(make_feeds(0)).result(WAIT_SECONDS)
    for event in result.events:
        assert 0 <= event.start_seconds <= event.finish_seconds <= result.seconds + 0.1
    sent = min(event.finish_seconds for event in result.events if event.device == TWO_HOSTS[0] and event.kind == "run")
    used = max(event.finish_seconds for event in result.events if event.device == TWO_HOSTS[1] and event.kind == "run")
    assert sent < used


SUMS = """
<ir_version: 8, opset_import: ["": 17]>
sums (float[4] x, float[4] total) => (float[4] y, float[4] total_next) {
    total_next = Add(total, x)
    y = Neg(total_next)
}
"""


def test_states_stay_on_their_rank_and_are_read_kept_restored_and_told_apart(tmp_path):
    bundle = compile_alternating(parser.parse_model(SUMS), tmp_path, *TWO_HOSTS, state=("total_next=total",))
    one = {"x": np.ones(4, np.float32)}
    start = {**one, "total": np.full(4, 10, np.float32)}
    with onnxplace.InferenceSession(bundle, runtime="mpi", timeout=WAIT_SECONDS) as session:
        session.protect_states()
        session.run(None, start)
        for total in (12, 13):
            np.testing.assert_array_equal(session.run(None, one)[0], np.full(4, -total, np.float32))
        np.testing.assert_array_equal(session.read_states()["total"], np.full(4, 13, np.float32))
        session.restore_states()
        np.testing.assert_array_equal(session.read_states()["total"], np.full(4, 12, np.float32))
        assert session.count_state_changes() == 2
        with session.conversation() as other:
            np.testing.assert_array_equal(other.run(None, start)[0], np.full(4, -11, np.float32))
        np.testing.assert_array_equal(session.run(None, one)[0], np.full(4, -13, np.float32))
        session.reset_state()
        with pytest.raises(onnxplace.FeedError, match="S007"):
            session.run(None, one)


def test_a_rank_that_only_receives_gives_memory_back_also_where_it_never_waits(tmp_path):
    bundle = compile_alternating(parser.parse_model(LARGE), tmp_path, "cpu:0", "cpu:1")
    feeds, count, in_flight = {"x": np.ones((400, 400), np.float32)}, 100, 4
    with onnxplace.InferenceSession(bundle, runtime="mpi", hosts="localhost:2") as session:
        futures = deque(session.submit(feeds) for _ in range(in_flight))
        for _ in range(count):
            futures.append(session.submit(feeds))
            futures.popleft().result(WAIT_SECONDS)
        links = [path for rank in read_rank_ids(session) for path in Path(f"/proc/{rank}/fd").iterdir()]
        assert sum("memfd:onnxplace" in os.readlink(path) for path in links) < count
