"""Streams: order, a bounded number in flight, errors in their turn, and nothing left behind."""

from collections.abc import Iterator
from concurrent.futures import Future
from itertools import count, islice

import numpy as np
import pytest

import onnxplace
from onnxplace.errors import FeedError, UsageError
from onnxplace.runtime.interface import Result
from onnxplace.session.streams import stream_results
from tests.conftest import FAST_PIPELINE, branches
from tests.support.random_models import reference


class Requests:
    """Requests that end when their result is read, unless they fail."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.submitted: list[int] = []
        self.cancelled: list[Future[Result]] = []
        self._failing = failing

    def submit(self, item: int) -> Future[Result]:
        self.submitted.append(item)
        future: Future[Result] = Future()
        if item in self._failing:
            future.set_exception(RuntimeError(f"request {item}"))
        else:
            future.set_result(Result({"y": item}, (), 0.0))
        return future

    def stream(self, items, in_flight: int = 3):
        return stream_results(items, in_flight, self.submit, self.cancelled.append, lambda result: result.outputs["y"])


def count_taken(taken: list[int]) -> Iterator[int]:
    for number in count():
        taken.append(number)
        yield number


def fail_at(number: int) -> Iterator[int]:
    yield from range(number)
    raise OSError("the source broke")


def test_results_come_in_the_order_of_the_items():
    assert list(Requests().stream(range(10))) == list(range(10))
    assert list(Requests().stream([])) == []


def test_an_item_is_taken_only_when_a_result_is_asked_for_and_a_place_is_free():
    taken: list[int] = []
    stream = Requests().stream(count_taken(taken), in_flight=3)
    assert taken == []
    for number in range(4):
        assert next(stream) == number
        assert len(taken) == number + 3


def test_an_error_of_a_request_comes_after_the_results_before_it():
    requests = Requests(failing=(2,))
    stream = requests.stream(range(9), in_flight=4)
    assert list(islice(stream, 2)) == [0, 1]
    with pytest.raises(RuntimeError, match="request 2"):
        next(stream)
    assert list(stream) == []
    assert requests.submitted == [0, 1, 2, 3, 4, 5][: len(requests.submitted)]
    assert len(requests.cancelled) == len(requests.submitted) - 2


def test_an_error_of_the_items_comes_after_the_results_before_it():
    stream = Requests().stream(fail_at(2), in_flight=4)
    assert list(islice(stream, 2)) == [0, 1]
    with pytest.raises(OSError, match="the source broke"):
        next(stream)
    assert list(stream) == []


def test_an_item_that_is_refused_fails_in_its_turn():
    def refuse(item: int) -> Future[Result]:
        if item == 1:
            raise FeedError("F001", "refused")
        return requests.submit(item)

    requests = Requests()
    stream = stream_results(range(5), 3, refuse, requests.cancelled.append, lambda result: result.outputs["y"])
    assert next(stream) == 0
    with pytest.raises(FeedError, match="refused"):
        next(stream)
    assert requests.submitted == [0]


def test_a_closed_stream_ends_its_requests():
    requests = Requests()
    stream = requests.stream(count(), in_flight=3)
    next(stream)
    stream.close()
    assert len(requests.submitted) == 3
    assert len(requests.cancelled) == 2


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    return onnxplace.compile(
        branches(), folder / "b", devices="cpu:0,cpu:1", shape={"batch": 2}, pipeline=FAST_PIPELINE
    )


@pytest.mark.parametrize("in_flight", [1, 2, 7])
@pytest.mark.parametrize("batching", [None, onnxplace.Batching(max_batch=4)])
def test_a_session_streams_what_run_returns(bundle, in_flight, batching):
    random = np.random.default_rng(0)
    items = [{"x": random.standard_normal((size, 64)).astype("f4")} for size in (1, 3, 0, 2, 9, 1, 1)]
    with onnxplace.InferenceSession(bundle, batching=batching) as session:
        outputs = list(session.stream(iter(items), in_flight=in_flight))
    for (y,), (expected,) in zip(outputs, reference(branches(), items), strict=True):
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-4)


def test_a_session_streams_named_outputs_and_refuses_others(bundle):
    with onnxplace.InferenceSession(bundle) as session:
        assert len(next(session.stream([{"x": np.ones((1, 64), "f4")}], output_names=["y"]))) == 1
        with pytest.raises(UsageError, match="has no output 'z'"):
            session.stream([], output_names=["z"])


def test_refused_feeds_name_what_they_should_be(bundle):
    with onnxplace.InferenceSession(bundle) as session:
        stream = session.stream([{"x": np.ones((1, 64), "f4")}, {"x": np.ones((1, 63), "f4")}])
        next(stream)
        with pytest.raises(FeedError, match="axis 1 must be 64"):
            next(stream)
