"""Rates of requests over routes: against brute force, known optima, and the loads of one route."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.facts import Profile
from onnxplace.problem import device_seconds
from onnxplace.simulation.steady_state import (
    HANDOVER_SECONDS,
    QUEUED_REQUEST_SECONDS,
    Loads,
    divide_requests,
    predict_python_seconds,
    predict_request_rates,
    steady_state_loads,
)
from onnxplace.target.target import Device, Link, Shared, Target


def load(*compute: float) -> Loads:
    nothing = np.zeros(len(compute))
    own = np.eye(len(compute), dtype=bool)
    return Loads(np.array(compute), nothing, nothing, "duplex", "max", own, np.where(own, np.diag(compute), -np.inf))


@pytest.mark.parametrize(
    ("loads", "rates"),
    [
        ([load(2.0)], [0.5]),
        ([load(1, 0), load(0, 1)], [1, 1]),  # copies
        ([load(1, 0), load(0, 4)], [1, 0.25]),  # unlike devices get what they can do
        ([load(1, 2, 0), load(1, 0, 2)], [0.5, 0.5]),  # a stage with two devices
        ([load(2, 1, 0), load(2, 0, 1)], [0.25, 0.25]),  # the bottleneck is common: even
        ([load(0, 0)], [1e12]),
    ],
)
def test_requests_divide_to_give_the_largest_rate(loads, rates):
    assert divide_requests(loads) == pytest.approx(np.array(rates), rel=1e-6)


@settings(max_examples=40)
@given(st.lists(st.lists(st.floats(0.05, 4), min_size=3, max_size=3), min_size=2, max_size=2))
def test_the_rate_is_the_best_of_all_divisions(table):
    rates = divide_requests([load(*row) for row in table])
    shares = np.linspace(0, 1, 2001)
    mixed = shares[:, None] * np.array(table[0]) + (1 - shares)[:, None] * np.array(table[1])
    best = (1 / mixed.max(axis=1)).max()
    assert rates.sum() >= best * (1 - 1e-6)
    assert (rates @ np.array(table)).max() <= 1 + 1e-6, "no device works more than all the time"


@settings(max_examples=20)
@given(st.integers(0, 50), st.integers(2, 4))
def test_one_route_has_the_interval_of_its_loads(seed, count):
    state = GENERATORS["layered"](20, seed=seed).state()
    graph, seconds = state[Profile].graph, device_seconds(state[Profile], state.target)
    device = np.random.default_rng(seed).integers(0, count, len(graph)).astype(np.int32)
    rates = predict_request_rates(graph, seconds, state.target, [device])
    loads = steady_state_loads(graph, seconds, state.target, device, order=graph.order)
    assert rates.interval_seconds == pytest.approx(loads.interval_seconds)
    assert rates.limit == loads.largest[1]
    assert rates.shares.tolist() == [1]


def shared_copies(count: int, slowdown: float) -> tuple:
    """Return graph, costs and a target of `count` devices that slow each other down."""
    graph = GENERATORS["layered"](10, seed=1).state()[Profile].graph
    devices = tuple(Device(f"cpu:{index}", 1 << 40) for index in range(count))
    names = tuple(device.id for device in devices)
    links = tuple(Link(a, b, 0.0, 1e12) for a in names for b in names if a != b)
    shared = (Shared(names, slowdown, slowdown),) if slowdown > 1 else ()
    seconds = np.tile(np.linspace(0.01, 0.02, len(graph)), (count, 1))
    return graph, seconds, Target(devices, links, shared=shared)


@pytest.mark.parametrize(("count", "slowdown"), [(1, 1.0), (2, 1.0), (2, 1.3), (4, 1.2)])
def test_busy_copies_slow_each_other_down(count, slowdown):
    graph, seconds, target = shared_copies(max(count, 2), slowdown)
    copies = [np.full(len(graph), index, dtype=np.int32) for index in range(count)]
    rates = predict_request_rates(graph, seconds, target, copies)
    factor = 1 + (count - 1) * (slowdown - 1)
    assert rates.interval_seconds == pytest.approx(seconds[0].sum() * factor / count, rel=1e-4)
    assert rates.shares == pytest.approx(np.full(count, 1 / count))


def test_an_idle_half_slows_the_other_down_less_than_a_busy_one():
    graph, seconds, target = shared_copies(2, 1.5)
    uneven = np.zeros(len(graph), dtype=np.int32)
    uneven[graph.order[-2:]] = 1
    rates = predict_request_rates(graph, seconds, target, [uneven])
    own = seconds[0, uneven == 0].sum()
    assert own < rates.interval_seconds < 1.5 * own


@pytest.mark.parametrize(
    ("hosts", "devices", "seconds"),
    [
        (("", ""), [[0]], QUEUED_REQUEST_SECONDS),
        (("", ""), [[0], [1]], 2 * HANDOVER_SECONDS),
        (("", ""), [[0, 1, 0, 1]], 6 * HANDOVER_SECONDS),
        (("", ""), [[], []], QUEUED_REQUEST_SECONDS),
        (("a/", "b/"), [[0], [1]], QUEUED_REQUEST_SECONDS),
    ],
    ids=["one device", "copies", "stages", "no nodes", "interpreters of their own"],
)
def test_threads_of_several_devices_hand_one_interpreter_on(hosts, devices, seconds):
    links = (Link("a", "b", 1e-5, 1e9), Link("b", "a", 1e-5, 1e9)) if hosts[0] else ()
    target = Target(tuple(Device(f"{host}cpu:{index}", 1 << 30) for index, host in enumerate(hosts)), links)
    assert predict_python_seconds(target, [np.array(item, dtype=np.int32) for item in devices]) == seconds
