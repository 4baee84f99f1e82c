"""Which waiting requests make a batch, and when; without threads or clocks."""

from hypothesis import given, strategies as st

from onnxplace.session.batcher import BatchQueue, WaitingRequest

WAIT = 1.0


def make_queue(*requests: WaitingRequest, max_batch: int = 4) -> BatchQueue:
    queue = BatchQueue(max_batch, WAIT)
    for request in requests:
        queue.add(request)
    return queue


def request(size: int = 1, group: str | None = "a", arrival: float = 0.0) -> WaitingRequest:
    return WaitingRequest({}, size, group, arrival)


def test_nothing_is_due_without_requests():
    queue = make_queue()
    assert queue.take(9.0, at_once=True) == []
    assert queue.find_deadline() is None


def test_a_request_waits_for_others_only_while_something_is_in_flight():
    first, second = request(), request(arrival=0.5)
    queue = make_queue(first, second)
    assert queue.take(0.5, at_once=False) == []
    assert queue.find_deadline() == WAIT
    assert queue.take(0.5, at_once=True) == [first, second]


def test_a_request_waits_no_longer_than_the_delay():
    first, second = request(), request(arrival=0.9)
    queue = make_queue(first, second)
    assert queue.take(0.99, at_once=False) == []
    assert queue.take(1.0, at_once=False) == [first, second]


def test_a_full_batch_does_not_wait():
    requests = [request() for _ in range(5)]
    queue = make_queue(*requests)
    assert queue.take(0.0, at_once=False) == requests[:4]
    assert queue.take(0.0, at_once=False) == []
    assert queue.take(0.0, at_once=True) == requests[4:]


def test_a_request_that_no_longer_fits_completes_the_batch():
    first, second = request(3), request(2)
    queue = make_queue(first, second)
    assert queue.take(0.0, at_once=False) == [first]
    assert queue.take(0.0, at_once=False) == []


def test_a_request_larger_than_the_largest_batch_runs_alone_and_at_once():
    first, large, last = request(), request(9), request()
    queue = make_queue(first, large, last)
    assert [queue.take(0.0, at_once=False) for _ in range(3)] == [[first], [large], []]


def test_requests_of_different_groups_are_not_joined():
    first, other, second = request(), request(group="b", arrival=0.1), request(arrival=0.2)
    queue = make_queue(first, other, second)
    assert [queue.take(5.0, at_once=False) for _ in range(3)] == [[first, second], [other], []]


def test_a_request_without_a_group_runs_alone_and_at_once():
    first, second = request(0, None), request(0, None)
    queue = make_queue(first, second)
    assert [queue.take(0.0, at_once=False) for _ in range(3)] == [[first], [second], []]


def test_a_removed_request_is_forgotten():
    first, second, alone = request(), request(), request(0, None)
    queue = make_queue(first, second, alone)
    assert [queue.remove(item) for item in (first, alone, first)] == [True, True, False]
    assert queue.clear() == [second]
    assert queue.find_deadline() is None


@given(
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from(["a", "b", None]), st.booleans()), max_size=30),
    st.integers(1, 8),
)
def test_each_request_is_in_one_batch_in_the_order_of_its_group(items, max_batch):
    queue, taken, added = make_queue(max_batch=max_batch), [], []
    for time, (size, group, takes) in enumerate(items):
        added.append(request(size, group, time))
        queue.add(added[-1])
        if takes and (batch := queue.take(time, at_once=False)):
            taken.append(batch)
    while batch := queue.take(len(items), at_once=True):
        taken.append(batch)
    assert sorted(added, key=id) == sorted((item for batch in taken for item in batch), key=id)
    for batch in taken:
        assert len({item.group for item in batch}) == 1
        assert len(batch) == 1 or sum(item.size for item in batch) <= max_batch
        assert len(batch) == 1 or batch[0].group is not None
    for group in ("a", "b"):
        arrivals = [item.arrival for batch in taken for item in batch if item.group == group]
        assert arrivals == sorted(arrivals)
