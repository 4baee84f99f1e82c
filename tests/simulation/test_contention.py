"""Devices that share memory slow each other down, by as much as they are busy at the same time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace.cost_graph.cost_graphs import parse_cost_graph
from onnxplace.simulation.simulated_contention import memory_share, simulate_with_contention
from onnxplace.simulation.simulator import simulate
from onnxplace.target.target import Device, Link, Shared, Target


def machine(count: int, **slower: float) -> Target:
    """Return CPU devices with links that take no time; those named in `slower` share."""
    devices = tuple(Device(f"cpu:{index}", 1 << 40, segment_seconds=0.0) for index in range(count))
    links = tuple(Link(a.id, b.id, 0.0, 1e30) for a in devices for b in devices if a is not b)
    return Target(devices, links, shared=(Shared(tuple(d.id for d in devices), **slower),) if slower else ())


def graph(seconds: list[float], edges: list[tuple[int, int]] = (), weights: list[int] | None = None):
    """Return an operator graph of nodes that take so long, and their costs on two devices or more."""
    nodes = [
        {"id": index, "compute_time_us": taken * 1e6, "memory_bytes": weights[index] if weights else 0}
        for index, taken in enumerate(seconds)
    ]
    data = {
        "nodes": nodes,
        "edges": [{"src": a, "dst": b, "bytes": 0} for a, b in edges],
        "devices": [{"id": 0, "memory_bytes": 1 << 40}],
        "comm": {"coef_us_per_byte": 0, "intercept_us": 0},
    }
    return parse_cost_graph(data).profile.graph


def step(seconds, device, target, edges=(), weights=None):
    result = graph(seconds, list(edges), weights)
    costs = np.tile(np.array(seconds, dtype=np.float64), (len(target.devices), 1))
    placed = np.array(device, dtype=np.int32)
    return simulate_with_contention(result, costs, target, placed, np.arange(len(seconds), dtype=np.int32))


def test_two_devices_busy_all_the_time_take_the_whole_slowdown():
    result = step([1.0, 1.0], [0, 1], machine(2, memory_slowdown=1.5))
    assert result.makespan_seconds == pytest.approx(1.5, rel=1e-3)
    np.testing.assert_allclose(result.compute_seconds, [1.5, 1.5], rtol=1e-3)


def test_only_the_time_that_both_are_busy_counts():
    result = step([1.0, 0.5], [0, 1], machine(2, memory_slowdown=1.5))
    # The short one is slow to its end at 0.75; until then the long one did a half of its work.
    np.testing.assert_allclose(result.finish_seconds, [1.25, 0.75], rtol=1e-3)


def test_devices_that_work_in_turn_do_not_slow_each_other_down():
    result = step([1.0, 1.0, 1.0], [0, 1, 0], machine(2, memory_slowdown=3.0), edges=[(0, 1), (1, 2)])
    assert result.makespan_seconds == pytest.approx(3.0)


def test_each_further_busy_device_adds_the_same():
    result = step([1.0, 1.0, 1.0], [0, 1, 2], machine(3, memory_slowdown=1.5))
    assert result.makespan_seconds == pytest.approx(2.0, rel=1e-3)


def test_devices_outside_the_group_are_left_alone():
    target = machine(3)
    target = replace(target, shared=(Shared(("cpu:0", "cpu:1"), memory_slowdown=2.0),))
    result = step([1.0, 1.0, 1.0], [0, 1, 2], target)
    np.testing.assert_allclose(result.finish_seconds, [2.0, 2.0, 1.0], rtol=1e-3)


def test_without_shared_memory_contention_changes_nothing():
    target = machine(2)
    result = step([1.0, 2.0, 0.5], [0, 1, 0], target, edges=[(0, 2)])
    plain = simulate(
        graph([1.0, 2.0, 0.5], [(0, 2)]),
        np.tile([1.0, 2.0, 0.5], (2, 1)),
        target,
        np.array([0, 1, 0], dtype=np.int32),
        np.arange(3, dtype=np.int32),
    )
    np.testing.assert_array_equal(result.finish_seconds, plain.finish_seconds)


def test_work_is_slowed_by_how_much_of_it_waits_for_memory():
    # One node reads its weights for a half of its time, the other computes all the time.
    target = machine(2, memory_slowdown=2.0, compute_slowdown=1.0, memory_bytes_per_second=1e9)
    result = step([1.0, 1.0], [0, 1], target, weights=[500_000_000, 0])
    np.testing.assert_allclose(result.finish_seconds[1], 1.0, rtol=1e-6)
    # At 1.5 times the time alone while the other runs: two thirds of the work until then.
    np.testing.assert_allclose(result.finish_seconds[0], 1.0 + (1 - 1 / 1.5), rtol=1e-3)


def test_the_share_of_memory_is_at_most_all_of_the_time():
    share = memory_share(graph([1.0, 1.0, 0.0], weights=[10**8, 10**10, 10**6]), np.array([1.0, 1.0, 0.0]), 1e9)
    np.testing.assert_allclose(share, [0.1, 1.0, 1.0])


def test_an_empty_graph_takes_no_time():
    assert step([], [], machine(2, memory_slowdown=2.0)).makespan_seconds == 0


@given(
    st.lists(st.tuples(st.floats(1e-6, 1.0), st.integers(0, 2)), min_size=1, max_size=12),
    st.floats(1.0, 4.0),
    st.randoms(use_true_random=False),
)
def test_a_step_is_longer_than_alone_and_no_longer_than_with_everything_slow(nodes, slowdown, random):
    seconds, device = [taken for taken, _ in nodes], [home for _, home in nodes]
    edges = [(a, b) for b in range(len(nodes)) for a in range(b) if random.random() < 0.2]
    alone = step(seconds, device, machine(3), edges)
    result = step(seconds, device, machine(3, memory_slowdown=slowdown), edges)
    worst = 1 + 2 * (slowdown - 1)
    assert alone.makespan_seconds * (1 - 1e-9) <= result.makespan_seconds
    assert result.makespan_seconds <= alone.makespan_seconds * worst * (1 + 1e-3)
    taken = result.finish_seconds - result.start_seconds
    assert (taken >= np.array(seconds) * (1 - 1e-9)).all()
    assert (taken <= np.array(seconds) * worst * (1 + 1e-3)).all()


def test_devices_without_work_share_nothing():
    target = machine(3, memory_slowdown=2.0)
    target = replace(target, shared=(replace(target.shared[0], devices=("cpu:1", "cpu:2")),))
    costs = np.tile([1.0, 2.0], (3, 1))
    device, order = np.zeros(2, np.int32), np.arange(2, dtype=np.int32)
    result = simulate_with_contention(graph([1.0, 2.0]), costs, target, device, order)
    assert result.makespan_seconds == simulate(graph([1.0, 2.0]), costs, target, device, order).makespan_seconds
