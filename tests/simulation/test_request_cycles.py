"""Requests that come back to a device: the predicted interval against requests that run one event after the other."""

import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.simulation.steady_state import WAITS, predict_request_rates, steady_state_loads
from onnxplace.target.target import Device, Link, Target
from tests.support.reference_simulator import even_target, graph_of

REQUESTS = 120


def run_requests(graph, own_seconds, delays, device, requests):
    """Return when each request ends, by a heap of events: workers take their nodes in order, request after request."""
    programs = {home: [node for node in range(len(graph)) if device[node] == home] for home in set(device.tolist())}
    queues = {home: [(k, node) for k in range(requests) for node in nodes] for home, nodes in programs.items()}
    heads, busy = dict.fromkeys(queues, 0), dict.fromkeys(queues, False)
    arrived: dict[tuple[int, int], set[int]] = {}
    needed = [{int(v) for v in graph.inputs[node] if graph.producer[v] >= 0} for node in range(len(graph))]
    ends, left = [0.0] * requests, [len(graph)] * requests
    events: list[tuple[float, int, str, int, int]] = []

    def start_next(home, now):
        if busy[home] or heads[home] == len(queues[home]):
            return
        request, node = queues[home][heads[home]]
        if needed[node] <= arrived.get((request, home), set()):
            busy[home] = True
            heapq.heappush(events, (now + own_seconds[node], 1, "end", request, node))

    for home in queues:
        start_next(home, 0.0)
    while events:
        now, _, what, request, item = heapq.heappop(events)
        if what == "end":
            home = int(device[item])
            busy[home], heads[home] = False, heads[home] + 1
            ends[request], left[request] = max(ends[request], now), left[request] - 1
            for value in np.flatnonzero(graph.producer == item).tolist():
                arrived.setdefault((request, home), set()).add(value)
                for other in queues:
                    if other != home:
                        code = value * len(delays) + other
                        heapq.heappush(events, (now + delays[home, other], 0, "arrival", request, code))
            start_next(home, now)
        else:
            value, home = divmod(item, len(delays))
            arrived.setdefault((request, home), set()).add(value)
            start_next(home, now)
    assert not any(left)
    return ends


def chain(count):
    """Return a -> b -> c -> ... of so many nodes."""
    names = "abcdefgh"[:count]
    return graph_of({name: [names[index - 1]] if index else [] for index, name in enumerate(names)})


@st.composite
def segments(draw):
    """Return a random graph of segments, a target without contention on links, costs and a placement."""
    count, devices = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    reads = {}
    for index in range(count):
        before = [f"n{i}" for i in range(index)]
        reads[f"n{index}"] = draw(st.lists(st.sampled_from(before), max_size=3, unique=True)) if before else []
    graph = graph_of(reads)
    target = even_target(devices, latency=draw(st.integers(0, 3)), link_model="parallel")
    target = replace(target, links=tuple(replace(link, bytes_per_second=1e30) for link in target.links))
    seconds = np.array([draw(st.integers(0, 9)) for _ in range(count)], dtype=np.float64)
    device = np.array([draw(st.integers(0, devices - 1)) for _ in range(count)], dtype=np.int32)
    return graph, target, seconds, device


@settings(max_examples=150, deadline=None)
@given(segments())
def test_the_interval_is_that_of_workers_that_end_one_request_before_the_next(case):
    graph, target, own, device = case
    seconds = np.broadcast_to(own, (len(target.devices), len(own)))
    predicted = predict_request_rates(graph, seconds, target, [device]).interval_seconds
    delays = target.link_arrays()[0]
    ends = run_requests(graph, own, delays, device, REQUESTS)
    # After k requests, their times differ from k intervals by less than what one request takes in all.
    slack = (own.sum() + delays.max() * len(graph)) / (REQUESTS / 2)
    measured = (ends[-1] - ends[REQUESTS // 2 - 1]) / (REQUESTS / 2)
    if own.sum():
        assert measured == pytest.approx(predicted, abs=2 * slack + 1e-6)


def test_a_device_that_waits_within_a_request_limits_the_rate():
    graph, target = chain(3), even_target(2, latency=0.5)
    seconds = np.array([[2.0, 4.0, 1.0]] * 2)
    device = np.array([0, 1, 0], dtype=np.int32)
    rates = predict_request_rates(graph, seconds, target, [device])
    there_and_back = 2 * float((target.link_arrays()[0] + target.link_arrays()[1])[0, 1])
    assert rates.interval_seconds == pytest.approx(7 + there_and_back)
    assert rates.limit == WAITS
    forward = predict_request_rates(graph, seconds, target, [np.array([0, 1, 1], dtype=np.int32)])
    assert forward.interval_seconds == pytest.approx(5)
    assert forward.limit == "computes"


def test_two_devices_that_wait_for_each_other_have_the_mean_of_their_spans():
    # The first device does a, then d; the second one c, then b. Neither comes back to itself.
    graph = graph_of({"a": [], "c": [], "d": ["c"], "b": ["a"]})
    device = np.array([0, 1, 0, 1], dtype=np.int32)
    target = even_target(2, latency=0.0, link_model="parallel")
    target = replace(
        target, links=tuple(replace(link, latency_seconds=3.0, bytes_per_second=1e30) for link in target.links)
    )
    seconds = np.ones((2, 4))
    loads = steady_state_loads(graph, seconds, target, device, order=np.arange(4))
    assert loads.span_seconds == pytest.approx(np.array([[2.0, 5.0], [5.0, 2.0]]))
    assert loads.cycle_seconds == pytest.approx(5.0)
    assert steady_state_loads(graph, seconds, target, device).interval_seconds == 2.0, "without an order, no waits"


def test_routes_on_devices_of_their_own_each_have_their_waits():
    devices = tuple(Device(f"cpu:{index}", 1 << 40) for index in range(4))
    names = [device.id for device in devices]
    target = Target(devices, tuple(Link(a, b, 0.0, 1e30) for a in names for b in names if a != b))
    seconds = np.array([[2.0, 4.0, 1.0]] * 4)
    routes = [np.array(homes, dtype=np.int32) for homes in ([0, 1, 0], [2, 3, 2])]
    rates = predict_request_rates(chain(3), seconds, target, routes)
    assert rates.interval_seconds == pytest.approx(3.5)
    assert rates.shares == pytest.approx([0.5, 0.5])
