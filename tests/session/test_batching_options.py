"""Options of serving: what is accepted, and what the errors say."""

import math

import numpy as np
import pytest

import onnxplace
from onnxplace import Batching
from onnxplace.errors import FeedError, UsageError
from onnxplace.runtime.interface import open_session
from onnxplace.session.batched_session import check_in_flight, require_batching
from tests.conftest import FAST_PIPELINE, branches
from tests.support.batch_models import make

SOFTMAX = "(float[N, 4] x) => (float[N, 4] y) { [soft] y = Softmax<axis=0>(x) }"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    return onnxplace.compile(branches(), folder / "b", devices="cpu:0", shape={"batch": 2}, pipeline=FAST_PIPELINE)


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "8", None, 1 << 40])
def test_max_batch_is_a_positive_whole_number(value):
    with pytest.raises(UsageError, match=r"expected max_batch to be an integer from 1 to \d+, got") as caught:
        Batching(max_batch=value)
    assert (caught.value.code, caught.value.hint) == ("U005", "such as Batching(max_batch=8)")
    assert repr(value) in caught.value.message


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, 60_001, True, "2", None])
def test_max_delay_is_a_number_of_milliseconds(value):
    with pytest.raises(UsageError, match="expected max_delay_ms to be a number from 0 to 60000, got") as caught:
        Batching(max_delay_ms=value)
    assert caught.value.code == "U005"
    assert repr(value) in caught.value.message


def test_numbers_of_numpy_are_numbers():
    assert Batching(np.int64(4), np.float32(0.5)) == Batching(4, 0.5)
    assert check_in_flight(np.int32(4), "in_flight") == 4


@pytest.mark.parametrize("value", [8, True, False, {"max_batch": 8}])
def test_a_session_takes_its_batching_as_an_object(bundle, value):
    with pytest.raises(UsageError, match=r"error\[U005\] batching: expected a Batching, got") as caught:
        onnxplace.InferenceSession(bundle, batching=value)
    assert caught.value.hint == "such as batching=onnxplace.Batching(max_batch=8)"


@pytest.mark.parametrize("value", [0, 1025, 2.0, True, "4"])
def test_requests_in_flight_have_a_bound(bundle, value):
    with pytest.raises(UsageError, match="expected max_in_flight to be an integer from 1 to 1024, got") as caught:
        onnxplace.InferenceSession(bundle, max_in_flight=value)
    assert caught.value.code == "U005"
    with (
        onnxplace.InferenceSession(bundle) as session,
        pytest.raises(UsageError, match="expected in_flight to be an integer from 1 to 1024, got"),
    ):
        session.stream([], in_flight=value)


def test_a_runtime_without_a_bound_says_so(bundle):
    class Unbounded(onnxplace.Runtime):
        name = "unbounded"

        def open(self, bundle: onnxplace.Bundle, *, trace: bool = False) -> onnxplace.RuntimeSession:
            raise AssertionError

    with pytest.raises(UsageError, match="runtime 'unbounded' has no bound on requests in flight") as caught:
        open_session(Unbounded(), bundle, trace=False, max_in_flight=4)
    assert (caught.value.code, caught.value.hint) == ("U045", "leave max_in_flight out")


def test_a_model_that_mixes_requests_is_refused_with_the_node(tmp_path):
    bundle = onnxplace.compile(make(SOFTMAX), tmp_path / "b", devices="cpu:0", shape={"N": 2}, pipeline=FAST_PIPELINE)
    with pytest.raises(
        UsageError, match=r"node 'soft': requests cannot be joined: along dimension 'N', Softmax"
    ) as caught:
        onnxplace.InferenceSession(bundle, batching=Batching())
    assert (caught.value.code, caught.value.hint) == (
        "U083",
        "leave batching out; requests still overlap across devices",
    )


def test_a_model_of_fixed_size_is_refused(tmp_path):
    proto = make("(float[2, 4] x) => (float[2, 4] y) { y = Neg(x) }")
    bundle = onnxplace.compile(proto, tmp_path / "b", devices="cpu:0", pipeline=FAST_PIPELINE)
    with pytest.raises(UsageError, match="requests cannot be joined: no input has a symbolic dimension"):
        require_batching(bundle)


def test_a_model_with_states_is_refused_with_the_state(tmp_path):
    proto = make("(float[N, 4] x, float[N, 4] a) => (float[N, 4] y, float[N, 4] b) { y = Neg(x) b = Add(x, a) }")
    bundle = onnxplace.compile(
        proto, tmp_path / "b", devices="cpu:0", shape={"N": 2}, state={"b": "a"}, pipeline=FAST_PIPELINE
    )
    with pytest.raises(UsageError, match="each takes the states of the one before, such as 'a'") as caught:
        onnxplace.InferenceSession(bundle, batching=Batching())
    assert caught.value.hint == "leave batching out, or compile without --state"


def test_a_bundle_of_an_earlier_format_has_to_be_compiled_again(bundle):
    old = onnxplace.Bundle(bundle.path, bundle.manifest.model_copy(update={"batching": None}))
    with pytest.raises(UsageError, match="does not say whether requests can be joined") as caught:
        require_batching(old)
    assert caught.value.hint == "compile the model again"


@pytest.mark.parametrize(("feeds", "kind"), [({"x": 1}, "dict"), (5, "int"), (None, "NoneType")])
def test_a_stream_takes_many_feeds(bundle, feeds, kind):
    with (
        onnxplace.InferenceSession(bundle) as session,
        pytest.raises(FeedError, match=f"iterable.*got {kind}") as caught,
    ):
        session.stream(feeds)
    assert caught.value.code == "U054"


def test_a_session_that_joins_requests_has_no_conversations(bundle):
    with (
        onnxplace.InferenceSession(bundle, batching=Batching()) as session,
        pytest.raises(UsageError, match="requests that are joined have no states, and no conversations") as caught,
    ):
        session.conversation()
    assert (caught.value.code, caught.value.hint) == ("U045", "open the session without batching")
