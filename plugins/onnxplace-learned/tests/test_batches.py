"""Many placements at once: every figure is that of the simulator of one placement."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace.simulation.simulator import simulate
from onnxplace.testing.pass_contract import TICK_SECONDS
from onnxplace_learned.policies.batch_simulator import BatchSimulator
from tests.simulation.test_simulate import placed_graphs, random_order, seeds, thorough
from tests.support.reference_simulator import even_target, graph_of


@thorough
@given(
    st.one_of(placed_graphs(), placed_graphs(shared=True)), seeds, st.integers(1, 5), st.booleans(), st.integers(1, 3)
)
def test_each_figure_equals_that_of_simulate(case, seed, count, is_one_order, threads):
    graph, seconds, target, _, order = case
    random = np.random.default_rng(seed)
    devices = random.integers(0, len(target.devices), (count, len(graph))).astype(np.int32)
    orders = order if is_one_order else np.array([random_order(graph, random) for _ in range(count)])
    steps = BatchSimulator(graph, seconds, target).simulate(devices, orders, memory=True, threads=threads)
    for item, device in enumerate(devices):
        one = simulate(graph, seconds, target, device, order if is_one_order else orders[item])
        assert steps.makespan_seconds[item] == one.makespan_seconds
        assert steps.start_seconds[item].tolist() == one.start_seconds.tolist()
        assert steps.finish_seconds[item].tolist() == one.finish_seconds.tolist()
        assert steps.peak_bytes[item].tolist() == one.peak_bytes.tolist()


@thorough
@given(placed_graphs())
def test_the_topological_order_is_the_default_and_peaks_are_optional(case):
    graph, seconds, target, device, _ = case
    steps = BatchSimulator(graph, seconds, target).simulate(device[None])
    assert steps.makespan_seconds.tolist() == [simulate(graph, seconds, target, device, graph.order).makespan_seconds]
    assert steps.peak_bytes is None


@given(placed_graphs(), seeds)
def test_an_order_is_refused_exactly_when_simulate_refuses_it(case, seed):
    graph, seconds, target, device, _ = case
    order = np.random.default_rng(seed).permutation(len(graph)).astype(np.int32)
    simulator = BatchSimulator(graph, seconds, target)
    try:
        expected = simulate(graph, seconds, target, device, order).makespan_seconds
    except ValueError:
        with pytest.raises(ValueError, match="placement 1 cannot be run"):
            simulator.simulate(np.stack([device, device]), np.stack([graph.order, order]), memory=True)
    else:
        assert simulator.simulate(device[None], order).makespan_seconds.tolist() == [expected]


def test_no_placements_are_no_steps():
    graph = graph_of({"a": [], "b": ["a"]})
    steps = BatchSimulator(graph, np.ones((2, 2)), even_target(2)).simulate(np.zeros((0, 2), dtype=np.int32))
    assert len(steps.makespan_seconds) == 0


def test_weights_that_placements_share_count_anew_for_each():
    graph = graph_of({"a": [], "b": ["a"]}, weights={"a": ["w"], "b": ["w"]}, sizes={"w": 100, "a": 0, "b": 0})
    placements = np.array([[0, 0], [0, 1], [1, 1], [0, 0]], dtype=np.int32)
    steps = BatchSimulator(graph, np.full((2, 2), TICK_SECONDS), even_target(2)).simulate(placements, memory=True)
    assert steps.peak_bytes.tolist() == [[100, 0], [100, 100], [0, 100], [100, 0]]
