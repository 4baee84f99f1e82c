"""What the devices of a pool hold at one time, compared with plain references."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings, strategies as st

from onnxplace.graph.op_graph import OpGraph
from onnxplace.simulation.simulator import Simulation, list_memory_changes, simulate
from onnxplace.target.target import Pool, Target
from tests.simulation.test_simulate import placed_graphs, run
from tests.support.reference_simulator import even_target, graph_of, reference_simulate

thorough = settings(deadline=None, derandomize=True, max_examples=200)


def sum_over_time(graph: OpGraph, device: np.ndarray, order: np.ndarray, step: Simulation, members: list[int]) -> int:
    """Return the most bytes of these devices at one time, by adding up one change after the other."""
    times = step.start_seconds, step.finish_seconds, step.transfers, step.makespan_seconds
    changes = list_memory_changes(graph, device, order, *times)
    weights = {(int(device[node]), int(w)) for node in range(len(graph)) for w in graph.weights[node]}
    held = most = sum(int(graph.weight_bytes[w]) for home, w in weights if home in members)
    for home, change in zip(changes.device.tolist(), changes.change_bytes.tolist()):
        held += change if home in members else 0
        most = max(most, held)
    return most


def draw_pools(data, target: Target) -> Target:
    """Return the target with pools of two or more devices, or none."""
    numbers = data.draw(st.lists(st.integers(0, 2), min_size=len(target.devices), max_size=len(target.devices)))
    groups = [[d.id for d, own in zip(target.devices, numbers) if own == number] for number in (1, 2)]
    return replace(target, pools=tuple(Pool(tuple(group), 1) for group in groups if len(group) > 1))


@thorough
@given(placed_graphs(), st.data())
def test_peaks_of_pools_are_those_of_the_reference(case, data):
    graph, seconds, target, device, order = case
    target = draw_pools(data, target)
    step = simulate(graph, seconds, target, device, order)
    assert step.pool_peak_bytes.tolist() == reference_simulate(graph, seconds, target, device, order).pool_peak_bytes
    for pool, peak in zip(target.pools, step.pool_peak_bytes.tolist(), strict=True):
        members = [target.position(name) for name in pool.devices]
        assert peak == sum_over_time(graph, device, order, step, members)
        assert step.peak_bytes[members].max() <= peak <= step.peak_bytes[members].sum()
    plain = simulate(graph, seconds, replace(target, pools=()), device, order)
    assert plain.peak_bytes.tolist() == step.peak_bytes.tolist()


def test_a_pool_holds_a_weight_once_for_each_device_and_values_while_they_are_needed():
    # a -> b on the first device, c -> d on the second, which starts when a value of 8 bytes has arrived.
    graph = graph_of(
        {"a": [], "b": ["a"], "c": ["b"], "d": ["c"]},
        sizes={"a": 50, "b": 8, "c": 60, "w": 5},
        weights={"a": ["w"], "c": ["w"]},
        outputs=["d"],
    )
    target = replace(even_target(2), pools=(Pool(("cpu:0", "cpu:1"), 1000),))
    step = run(graph, [1, 1, 1, 1], target, [0, 0, 1, 1])
    assert step.peak_bytes.tolist() == [5 + 50 + 8, 5 + 8 + 60]
    assert step.pool_peak_bytes.tolist() == [10 + 8 + 60]
