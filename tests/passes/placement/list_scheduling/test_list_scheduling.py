"""The list scheduler behind m-ETF and m-SCT: what it decides, tie by tie, and that it does not refuse without need."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.cost_graph.cost_graphs import parse_cost_graph
from onnxplace.errors import InfeasibleError
from onnxplace.passes.placement.list_scheduling.list_planner import fill_devices, find_best_plan, plan
from onnxplace.problem import PlacementProblem, placement_problem, sort_by_start
from onnxplace.state import State


def asked(nodes, edges, devices=2, memory=1 << 40, links="duplex", latency=10):
    """A problem from {name: (microseconds, bytes of output)} and (source, reader) pairs."""
    index = {name: i for i, name in enumerate(nodes)}
    data = {
        "nodes": [
            {"id": i, "compute_time_us": us, "output_bytes": size} for i, (us, size) in enumerate(nodes.values())
        ],
        "edges": [{"src": index[a], "dst": index[b], "bytes": nodes[a][1], "tensor": a} for a, b in edges],
        "devices": [{"id": i, "memory_bytes": memory} for i in range(devices)],
        "comm": {"coef_us_per_byte": 0.0, "intercept_us": latency},
    }
    built = parse_cost_graph(data)
    return placement_problem(State(replace(built.target, link_model=links)).with_facts(built.profile))


def nobody(built: PlacementProblem):
    return np.full(len(built.graph), -1, dtype=np.int32)


def planned(built: PlacementProblem, favourite=None):
    device, start = plan(built, built.limit_bytes, nobody(built) if favourite is None else favourite, False)
    return device.tolist(), (start * 1e6).round(6).tolist()


def random_problem(seed, memory, links="duplex"):
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 14))
    nodes = {str(i): (int(random.integers(1, 50)), int(random.integers(1, 100))) for i in range(count)}
    edges = [(str(i), str(j)) for j in range(count) for i in range(j) if random.random() < 0.3]
    return asked(nodes, edges, int(random.integers(1, 4)), memory, links, int(random.integers(0, 30)))


def test_equal_candidates_go_by_topological_position_to_the_first_device():
    built = asked({"a": (3, 1), "b": (3, 1), "c": (3, 1)}, [], devices=2)
    assert planned(built) == ([0, 1, 0], [0, 0, 3])


def test_sums_of_times_that_are_equal_are_ties():
    # In floats, 0.1 + 0.2 is more than 0.3, and device 1 would seem to be free first.
    built = asked({"a": (0.1, 1), "b": (0.3, 1), "c": (0.2, 1), "d": (1, 1)}, [])
    assert planned(built) == ([0, 1, 0, 0], [0, 0, 0.1, 0.3])


def test_a_value_that_has_been_sent_to_a_device_is_there_for_its_other_readers():
    nodes = {"w": (1, 1), "u": (5, 1), "x": (1000, 1), "y": (100, 1), "z": (9, 1)}
    built = asked(nodes, [("w", "x"), ("w", "y"), ("w", "z")], links="sequential", latency=50)
    assert planned(built) == ([0, 1, 0, 1, 1], [0, 0, 1, 51, 151])


def test_a_device_keeps_itself_for_a_ready_favourite_child():
    # At 10, device 0 could run c, but keeps itself for d, whose other input comes at 15; device 2 is busy, so that
    # nothing is urgent.
    nodes = {"a": (10, 1), "b": (10, 1), "e": (100, 1), "c": (50, 1), "d": (10, 1)}
    built = asked(nodes, [("a", "d"), ("b", "d"), ("a", "c")], devices=3, latency=5)
    favourite = nobody(built)
    assert planned(built) == ([0, 1, 2, 0, 1], [0, 0, 0, 10, 15])
    favourite[0] = 4
    assert planned(built, favourite) == ([0, 1, 2, 1, 0], [0, 0, 0, 15, 15])


def test_a_node_that_could_have_started_anywhere_goes_before_the_favourite_child():
    nodes = {"a": (10, 1), "b": (10, 1), "c": (50, 1), "d": (10, 1)}
    built = asked(nodes, [("a", "d"), ("b", "d"), ("a", "c")], latency=5)
    favourite = nobody(built)
    favourite[0] = 3
    device, start = planned(built, favourite)
    assert (device[2], start[2]) == (0, 15)


def test_a_device_does_not_wait_for_a_favourite_whose_other_parents_are_still_running():
    built = asked({"a": (10, 1), "b": (100, 1), "c": (50, 1), "d": (10, 1)}, [("a", "d"), ("b", "d"), ("a", "c")])
    favourite = nobody(built)
    favourite[0] = 3
    device, start = planned(built, favourite)
    assert (device[2], start[2]) == (0, 10)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["duplex", "parallel", "sequential"]))
def test_plans_place_everything_and_start_no_node_before_its_inputs(seed, links):
    built = random_problem(seed, 1 << 40, links)
    device, start = plan(built, built.limit_bytes, nobody(built), False)
    finish = start + built.seconds[device, np.arange(len(start))]
    before = built.graph.predecessors
    assert device.min() >= 0
    assert all(start[node] >= finish[p] - 1e-12 for node in range(len(start)) for p in before[node])
    order = np.lexsort((start, device))
    together = device[order][1:] == device[order][:-1]
    assert (start[order][1:] >= finish[order][:-1] - 1e-12)[together].all()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10_000), st.integers(20, 900), st.booleans())
def test_a_graph_that_fits_on_one_device_is_always_placed(seed, memory, guided):
    built = random_problem(seed, memory)
    favourite = nobody(built)
    if guided:
        for node, reader in zip(built.graph.successors.rows[::-1], built.graph.successors.items[::-1]):
            favourite[node] = reader if reader not in favourite else favourite[node]
    alone = [
        built.simulate(np.full(len(built.graph), d, np.int32), built.graph.order).peak_bytes[d]
        for d in range(len(built.target.devices))
    ]
    try:
        device, start = find_best_plan(built, favourite)
    except InfeasibleError:
        assert min(alone) > memory
    else:
        simulated = built.simulate(device, sort_by_start(built.graph, start))
        assert not built.excess_bytes(simulated).any()


def test_a_limit_is_held_to_the_byte():
    # a's and b's values wait for the last node: 130 bytes at its end, and one byte less is refused with a reason.
    built = asked({"a": (1, 60), "b": (1, 60), "end": (1, 10)}, [("a", "end"), ("b", "end")], devices=1, memory=129)
    with pytest.raises(InfeasibleError, match="P002"):
        find_best_plan(built, nobody(built))
    device, _ = find_best_plan(replace(built, limit_bytes=np.array([130])), nobody(built))
    assert device.tolist() == [0, 0, 0]


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_costs_of_any_size_give_the_same_plan(scale):
    built = random_problem(7, 1 << 40)
    scaled = replace(built, seconds=built.seconds * scale, target=replace(built.target, links=tuple(
        replace(link, latency_seconds=link.latency_seconds * scale) for link in built.target.links)))  # fmt: skip
    device, start = plan(built, built.limit_bytes, nobody(built), False)
    other, destination = plan(scaled, scaled.limit_bytes, nobody(scaled), False)
    if scale >= 1.0:
        assert other.tolist() == device.tolist()
    assert destination == pytest.approx(start * scale, rel=1e-3, abs=1e-11)


def test_a_pinned_node_keeps_its_device_in_every_plan_that_is_tried():
    built = random_problem(3, 1 << 40)
    pinned = nobody(built)
    pinned[0] = len(built.target.devices) - 1
    device, _ = find_best_plan(replace(built, pinned=pinned), nobody(built))
    assert device[0] == pinned[0]


def test_filling_looks_at_weights_and_workspace_before_and_counts_outputs_afterwards():
    # Each node outputs 10 bytes; the mark is an equal share of 60 and the largest, 30 + 10, reached by the fourth.
    built = asked(dict.fromkeys("abcdef", (1, 10)), [], devices=2)
    assert fill_devices(built).tolist() == [0, 0, 0, 0, 1, 1]
    with_workspace = replace(built, graph=replace(built.graph, workspace_bytes=np.array([0, 0, 0, 20, 0, 0])))
    # 80 // 2 + 30 = 70: the fourth needs 20 free beforehand, and the sixth node finds exactly 70 used.
    assert fill_devices(with_workspace).tolist() == [0, 0, 0, 0, 0, 1]
