"""Values between ranks, on one host and on two that are both this machine."""

import sys

import numpy as np
import pytest
from onnx import parser

import onnxplace
from tests.support.random_placements import assert_same
from tests.support.two_hosts import TWO_HOSTS, compile_alternating

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPICH is not installed here")

WAIT_SECONDS = 60.0
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
