"""The simulator against a slow reference that shares nothing with it, and against steps computed by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.graph.op_graph import OpGraph
from onnxplace.simulation.lower_bounds import lower_bound_seconds
from onnxplace.simulation.simulator import Simulation, device_weights, simulate
from onnxplace.target.target import LINK_MODELS, Target
from onnxplace.testing.pass_contract import TICK_SECONDS, random_graph, random_target
from tests.support.reference_simulator import (
    CannotRunError,
    even_target,
    graph_of,
    reference_simulate,
    share_at_random,
)

# Times are exact (TICK_SECONDS), so everything is compared for equality.
thorough = settings(deadline=None, derandomize=True, max_examples=400)
seeds = st.integers(0, 2**32 - 1)


def random_order(graph: OpGraph, random: np.random.Generator) -> np.ndarray:
    """Return a random topological order: by depth, then by chance."""
    depth = np.zeros(len(graph))
    for node in graph.order:
        depth[node] = 1 + max((depth[p] for p in graph.predecessors[node]), default=0)
    # A node may run anywhere between its predecessors and its successors: draw a rank that keeps edges in order.
    rank = np.zeros(len(graph))
    for node in graph.order:
        rank[node] = max((rank[p] for p in graph.predecessors[node]), default=0) + random.random() * depth[node]
    return np.lexsort((depth, rank)).astype(np.int32)


def run(graph: OpGraph, seconds: list[float], target: Target, device: list[int], order=None) -> Simulation:
    """Simulate with the same seconds on each device, in topological order unless another is given."""
    matrix = np.tile(np.array(seconds, dtype=np.float64), (len(target.devices), 1))
    order = graph.order if order is None else np.array(order, dtype=np.int32)
    return simulate(graph, matrix, target, np.array(device, dtype=np.int32), order)


def sent(step: Simulation, graph: OpGraph) -> list[tuple[str, int, int, float, float]]:
    """Return transfers as (value, source, destination, start, finish)."""
    t = step.transfers
    names = [graph.value_names[v] for v in t.value]
    return list(zip(names, t.source.tolist(), t.destination.tolist(), t.start_seconds.tolist(), t.finish_seconds))


@st.composite
def placed_graphs(draw, shared=False):
    """Draw graph, seconds, target, device and order; few different times make many things happen at one instant.

    With `shared`, devices share processors.
    """
    seed, nodes, devices = draw(seeds), draw(st.integers(0, 20)), draw(st.integers(1, 4))
    random = np.random.default_rng(seed)
    graph = random_graph(seed, nodes, shuffled=draw(st.booleans()))
    if draw(st.booleans()) and nodes:
        graph = _coarser(graph, random)
    highest = draw(st.sampled_from([1, 2, 4, 400]))
    seconds = random.integers(0, highest, (devices, len(graph))) * TICK_SECONDS
    target = random_target(seed, devices, link_model=draw(st.sampled_from(LINK_MODELS)))
    if draw(st.booleans()):
        links = tuple(replace(link, latency_seconds=0.0, bytes_per_second=2.0**31) for link in target.links)
        target = replace(target, links=links)
    target = share_at_random(target, random) if shared else target
    device = random.integers(0, devices, len(graph)).astype(np.int32)
    return graph, seconds, target, device, random_order(graph, random)


def _coarser(graph: OpGraph, random: np.random.Generator) -> OpGraph:
    """Contract stretches of the topological order, which are convex, so that values leave and arrive in bunches."""
    cluster = np.empty(len(graph), dtype=np.int32)
    cluster[graph.order] = np.cumsum(random.random(len(graph)) < 0.6).astype(np.int32)
    return graph.contract(cluster - cluster.min())


@thorough
@given(st.one_of(placed_graphs(), placed_graphs(shared=True)))
def test_times_and_transfers_are_those_of_the_reference(case):
    graph, seconds, target, device, order = case
    step, reference = simulate(*case), reference_simulate(graph, seconds, target, device, order)
    assert step.start_seconds.tolist() == reference.start
    assert step.finish_seconds.tolist() == reference.finish
    assert step.makespan_seconds == reference.makespan
    transfers = step.transfers
    assert transfers.value.tolist() == [t.value for t in reference.transfers]
    assert transfers.source.tolist() == [t.source for t in reference.transfers]
    assert transfers.destination.tolist() == [t.destination for t in reference.transfers]
    assert transfers.ready_seconds.tolist() == [t.ready for t in reference.transfers]
    assert transfers.start_seconds.tolist() == [t.start for t in reference.transfers]
    assert transfers.finish_seconds.tolist() == [t.finish for t in reference.transfers]


@thorough
@given(st.one_of(placed_graphs(), placed_graphs(shared=True)))
def test_peak_memory_is_that_of_the_reference(case):
    graph, seconds, target, device, order = case
    assert simulate(*case).peak_bytes.tolist() == reference_simulate(graph, seconds, target, device, order).peak_bytes


@thorough
@given(st.one_of(placed_graphs(), placed_graphs(shared=True)), seeds)
def test_an_order_is_refused_exactly_when_the_reference_cannot_run_it(case, seed):
    graph, seconds, target, device, _ = case
    order = np.random.default_rng(seed).permutation(len(graph)).astype(np.int32)
    try:
        expected = reference_simulate(graph, seconds, target, device, order).makespan
    except CannotRunError:
        with pytest.raises(ValueError, match="cannot be run"):
            simulate(graph, seconds, target, device, order)
    else:
        assert simulate(graph, seconds, target, device, order).makespan_seconds == expected


@thorough
@given(st.one_of(placed_graphs(), placed_graphs(shared=True)))
def test_no_channel_carries_two_transfers_at_once_and_each_serves_in_order_of_readiness(case):
    target = case[2]
    t = simulate(*case).transfers
    if target.link_model == "parallel":
        assert (t.start_seconds == t.ready_seconds).all()
        return
    duplex = target.link_model == "duplex"
    channels = [
        mine
        for d in range(len(target.devices))
        for mine in ([t.source == d, t.destination == d] if duplex else [(t.source == d) | (t.destination == d)])
    ]
    for mine in channels:
        assert (np.diff(t.ready_seconds[mine]) >= 0).all()
        assert (t.start_seconds[mine][1:] >= t.finish_seconds[mine][:-1]).all()


@thorough
@given(st.one_of(placed_graphs(), placed_graphs(shared=True)))
def test_nodes_start_after_their_inputs_and_one_at_a_time_on_a_device(case):
    graph, seconds, _, device, order = case
    step = simulate(*case)
    t = step.transfers
    arrival = {(v, d): when for v, d, when in zip(t.value, t.destination, t.finish_seconds)}
    for node in range(len(graph)):
        for value in graph.inputs[node]:
            source = graph.producer[value]
            if source >= 0:
                there = device[source] == device[node]
                when = step.finish_seconds[source] if there else arrival[value, device[node]]
                assert step.start_seconds[node] >= when
    for d in range(len(seconds)):
        mine = order[device[order] == d]
        assert (step.start_seconds[mine][1:] >= step.finish_seconds[mine][:-1]).all()


@thorough
@given(st.one_of(placed_graphs(), placed_graphs(shared=True)))
def test_each_value_crosses_once_to_each_device_that_reads_it(case):
    graph, _, _, device, _ = case
    t = simulate(*case).transfers
    expected = {
        (int(v), int(device[graph.producer[v]]), int(device[r]))
        for v in range(len(graph.value_names))
        for r in graph.readers[v]
        if graph.producer[v] >= 0 and device[graph.producer[v]] != device[r]
    }
    crossed = list(zip(t.value.tolist(), t.source.tolist(), t.destination.tolist()))
    assert sorted(crossed) == sorted(expected)


@thorough
@given(placed_graphs())
def test_each_device_holds_its_weights_once_and_computes_the_sum_of_its_nodes(case):
    graph, seconds, _, device, _ = case
    step = simulate(*case)
    for d in range(len(seconds)):
        nodes = np.flatnonzero(device == d)
        stored = {int(w) for n in nodes for w in graph.weights[n]}
        assert step.weights_bytes[d] == sum(graph.weight_bytes[w] for w in stored)
        assert step.compute_seconds[d] == sum(seconds[d][nodes])


@thorough
@given(placed_graphs())
def test_the_lower_bound_is_never_above_the_makespan(case):
    graph, seconds, *_ = case
    assert lower_bound_seconds(graph, seconds) <= simulate(*case).makespan_seconds


@thorough
@given(placed_graphs())
def test_a_placement_on_one_device_sends_nothing_and_takes_the_sum_of_all_nodes(case):
    graph, seconds, target, device, order = case
    step = simulate(graph, seconds, target, np.zeros_like(device), order)
    assert len(step.transfers) == 0
    assert step.makespan_seconds == seconds[0].sum()


@thorough
@given(st.one_of(placed_graphs(), placed_graphs(shared=True)))
def test_simulating_is_deterministic_and_leaves_its_input_unchanged(case):
    _, seconds, _, device, order = case
    remaining = seconds.copy(), device.copy(), order.copy()
    first, again = simulate(*case), simulate(*case)
    assert all((a == b).all() for a, b in zip(remaining, (seconds, device, order)))
    assert first.finish_seconds.tobytes() == again.finish_seconds.tobytes()
    assert first.peak_bytes.tolist() == again.peak_bytes.tolist()


def test_a_chain_over_two_devices_waits_for_its_transfer():
    graph = graph_of({"a": [], "b": ["a"]}, sizes={"a": 3, "b": 5}, outputs=["b"])
    step = run(graph, [2, 1], even_target(latency=1), [0, 1])
    assert step.start_seconds.tolist() == [0, 6]
    assert sent(step, graph) == [("a", 0, 1, 2, 6)]
    assert step.makespan_seconds == 7
    assert step.peak_bytes.tolist() == [3, 8]


def test_a_fork_computes_its_branches_at_the_same_time_and_joins_when_the_later_is_back():
    graph = graph_of({"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]})
    step = run(graph, [1, 4, 1, 1], even_target(), [0, 0, 1, 0])
    assert step.start_seconds.tolist() == [0, 1, 2, 5]
    assert sent(step, graph) == [("a", 0, 1, 1, 2), ("c", 1, 0, 3, 4)]
    assert step.makespan_seconds == 6
    assert step.compute_seconds.tolist() == [6, 1]


@pytest.mark.parametrize(("link_model", "begins"), [("duplex", [1, 3]), ("sequential", [1, 3]), ("parallel", [1, 1])])
def test_two_transfers_out_of_one_device_follow_each_other_unless_links_are_parallel(link_model, begins):
    graph = graph_of({"a": [], "b": ["a"], "c": ["a"]}, sizes={"a": 2})
    step = run(graph, [1, 1, 1], even_target(3, link_model=link_model), [0, 1, 2])
    assert sent(step, graph) == [("a", 0, there, begin, begin + 2) for there, begin in zip([1, 2], begins)]


@pytest.mark.parametrize(("link_model", "begins"), [("duplex", [1, 1]), ("sequential", [1, 3]), ("parallel", [1, 1])])
def test_opposite_transfers_meet_only_where_a_device_has_one_channel_for_both_directions(link_model, begins):
    graph = graph_of({"a": [], "b": [], "from_a": ["a"], "from_b": ["b"]}, sizes={"a": 2, "b": 2})
    step = run(graph, [1, 1, 1, 1], even_target(link_model=link_model), [0, 1, 1, 0])
    assert sent(step, graph) == [("a", 0, 1, begins[0], begins[0] + 2), ("b", 1, 0, begins[1], begins[1] + 2)]


@pytest.mark.parametrize("link_model", LINK_MODELS)
def test_a_transfer_that_becomes_ready_later_never_delays_an_earlier_one(link_model):
    """The earlier one is long, waits for a busy receiver, and a short one would fit in before it."""
    reads = {"block": [], "early": [], "late": ["early"], "x": ["block"], "y": ["early"], "z": ["late"]}
    sizes = {"block": 10, "early": 10, "late": 1}
    device = [0, 1, 1, 2, 2, 3]
    with_late = graph_of(reads, sizes=sizes)
    without = graph_of({name: row for name, row in reads.items() if name != "z"}, sizes=sizes)
    target = even_target(4, link_model=link_model)
    both = {t[0]: t for t in sent(run(with_late, [1, 2, 1, 1, 1, 1], target, device), with_late)}
    alone = {t[0]: t for t in sent(run(without, [1, 2, 1, 1, 1], target, device[:5]), without)}
    assert both["early"] == alone["early"]
    assert both["early"][3:] == ((2, 12) if link_model == "parallel" else (11, 21))
    assert both["late"][3:] == ((3, 4) if link_model == "parallel" else (21, 22))


def test_links_differ_by_pair_and_direction():
    target = even_target()
    fast, slow = target.links
    target = replace(target, links=(replace(fast, bytes_per_second=4.0), replace(slow, latency_seconds=8.0)))
    graph = graph_of({"a": [], "b": ["a"], "c": ["b"]}, sizes={"a": 4, "b": 4})
    step = run(graph, [1, 1, 1], target, [0, 1, 0])
    assert sent(step, graph) == [("a", 0, 1, 1, 2), ("b", 1, 0, 3, 15)]


def test_a_value_read_twice_on_one_device_is_sent_once_and_stays_until_its_last_reader():
    graph = graph_of({"a": [], "b": ["a"], "c": ["a"], "d": []}, sizes={"a": 8, "b": 1, "c": 1, "d": 100})
    step = run(graph, [1, 1, 1, 1], even_target(), [0, 1, 1, 1], order=[0, 1, 2, 3])
    assert sent(step, graph) == [("a", 0, 1, 1, 9)]
    assert step.start_seconds.tolist() == [0, 9, 10, 11]
    assert step.peak_bytes.tolist() == [8, 100]


def test_a_value_is_held_while_it_is_sent_although_its_local_readers_are_done():
    graph = graph_of({"a": [], "b": ["a"], "c": ["b"], "far": ["a"]}, sizes={"a": 8, "b": 2, "c": 4})
    step = run(graph, [1, 1, 1, 1], even_target(), [0, 0, 0, 1])
    assert step.start_seconds.tolist() == [0, 1, 2, 9]
    assert step.peak_bytes.tolist() == [8 + 2 + 4, 8 + 1]


def test_outputs_of_the_model_stay_to_the_end_and_other_values_until_they_are_read():
    reads = {"a": [], "b": ["a"], "c": ["b"], "d": ["c"]}
    plain = graph_of(reads, sizes=dict.fromkeys(reads, 10))
    remaining = graph_of(reads, sizes=dict.fromkeys(reads, 10), outputs=["a", "d"])
    assert run(plain, [1] * 4, even_target(1), [0] * 4).peak_bytes.tolist() == [20]
    assert run(remaining, [1] * 4, even_target(1), [0] * 4).peak_bytes.tolist() == [30]


def test_inputs_of_the_model_are_on_each_device_that_reads_them_until_their_last_reader_there():
    graph = graph_of({"a": ["x"], "b": ["a"], "c": ["x"]}, fed=["x"], sizes={"x": 100, "a": 7, "b": 9, "c": 2})
    step = run(graph, [1, 1, 1], even_target(), [0, 0, 1])
    assert len(step.transfers) == 0
    assert step.peak_bytes.tolist() == [107, 102]


def test_weights_count_once_on_each_device_that_reads_them():
    graph = graph_of(
        {"a": [], "b": [], "c": []}, weights={"a": ["w"], "b": ["w", "v"], "c": ["w"]}, sizes={"w": 10, "v": 4}
    )
    assert device_weights(graph, np.array([0, 0, 1], dtype=np.int32), 3).tolist() == [14, 10, 0]
    assert run(graph, [1, 1, 1], even_target(3), [0, 0, 1]).weights_bytes.tolist() == [14, 10, 0]


def test_workspace_counts_only_while_its_node_runs():
    graph = graph_of({"a": [], "b": ["a"]}, sizes={"a": 5, "b": 6}, workspace={"a": 100, "b": 20})
    assert run(graph, [1, 1], even_target(1), [0, 0]).peak_bytes.tolist() == [105]


def test_a_view_shares_the_memory_of_its_source_and_keeps_it_alive():
    reads = {"a": [], "v": ["a"], "b": [], "c": ["v"]}
    sizes = {"a": 10, "v": 10, "b": 3, "c": 1}
    order = [0, 1, 2, 3]
    view = run(graph_of(reads, sizes=sizes, views={"v": "a"}), [1] * 4, even_target(1), [0] * 4, order)
    copy = run(graph_of(reads, sizes=sizes), [1] * 4, even_target(1), [0] * 4, order)
    assert view.peak_bytes.tolist() == [10 + 3]
    assert copy.peak_bytes.tolist() == [10 + 10]


def test_a_view_of_a_received_value_shares_the_copy_on_its_own_device():
    graph = graph_of({"a": [], "v": ["a"], "c": ["v"]}, sizes={"a": 10, "v": 10, "c": 1}, views={"v": "a"})
    step = run(graph, [1] * 3, even_target(), [0, 1, 1])
    assert step.peak_bytes.tolist() == [10, 11]


def test_a_sent_view_takes_memory_where_it_arrives_and_keeps_its_source_alive_until_then():
    graph = graph_of({"a": [], "v": ["a"], "b": [], "c": ["v"]}, sizes={"a": 10, "v": 10, "b": 3}, views={"v": "a"})
    step = run(graph, [1] * 4, even_target(), [0, 0, 0, 1], order=[0, 1, 2, 3])
    assert step.peak_bytes.tolist() == [13, 11]


def test_a_view_of_an_input_of_the_model_takes_no_memory():
    graph = graph_of({"v": ["x"], "c": ["v"]}, fed=["x"], sizes={"x": 10, "v": 10, "c": 1}, views={"v": "x"})
    assert run(graph, [1, 1], even_target(1), [0, 0]).peak_bytes.tolist() == [11]


def test_an_input_is_there_while_a_node_that_takes_no_time_reads_it_at_once():
    graph = graph_of({"shape": ["x"]}, fed=["x"], sizes={"x": 100, "shape": 8}, workspace={"shape": 1})
    assert run(graph, [0], even_target(1), [0]).peak_bytes.tolist() == [109]


def test_an_output_is_still_there_while_a_node_that_takes_no_time_runs_last():
    graph = graph_of({"a": [], "b": []}, sizes={"a": 100, "b": 10}, outputs=["a"])
    assert run(graph, [1, 0], even_target(1), [0, 0], order=[0, 1]).peak_bytes.tolist() == [110]


def test_the_source_of_a_view_is_alive_while_a_node_without_time_reads_the_view():
    graph = graph_of({"a": [], "v": ["a"], "b": ["v"]}, sizes={"a": 10, "v": 10, "b": 5}, views={"v": "a"})
    assert run(graph, [1, 1, 0], even_target(1), [0] * 3).peak_bytes.tolist() == [15]


def test_of_nodes_that_finish_at_one_instant_the_lowest_number_sends_first():
    graph = graph_of({"a": [], "b": [], "c": ["b"], "d": ["a"]})
    step = run(graph, [1, 1, 1, 1], even_target(3), [0, 1, 2, 2], order=[1, 0, 2, 3])
    assert [t[0] for t in sent(step, graph)] == ["a", "b"]


def test_a_deadlock_is_an_error_that_names_the_waiting_node():
    graph = graph_of({"a": [], "b": ["a"], "c": []})
    with pytest.raises(ValueError, match="'b' waits for a node that is behind it"):
        run(graph, [1, 1, 1], even_target(1), [0, 0, 0], order=[1, 0, 2])


def test_a_graph_without_nodes_takes_no_time_and_no_memory():
    step = run(graph_of({}, fed=["x"]), [], even_target(), [])
    assert (step.makespan_seconds, step.peak_bytes.tolist(), len(step.transfers)) == (0, [0, 0], 0)
    assert lower_bound_seconds(graph_of({}), np.zeros((2, 0))) == 0


def test_the_lower_bound_is_the_critical_path_or_the_work_shared_equally():
    chain = graph_of({"a": [], "b": ["a"], "c": ["b"]})
    apart = graph_of({"a": [], "b": [], "c": []})
    seconds = np.array([[2.0, 4.0, 6.0], [4.0, 2.0, 6.0]])
    assert lower_bound_seconds(chain, seconds) == 2 + 2 + 6
    assert lower_bound_seconds(apart, seconds) == 6
    assert lower_bound_seconds(apart, np.full((2, 3), 4.0)) == 6


def test_devices_that_send_to_each_other_at_one_time_do_not_wait_for_each_other() -> None:
    """An all-gather takes as long as a device needs to send to all others."""
    devices = 5
    parts = {f"part{d}": [] for d in range(devices)}
    graph = graph_of(parts | {f"copy{d}": list(parts) for d in range(devices)})
    step = run(graph, [1.0] * 2 * devices, even_target(devices), [*range(devices), *range(devices)])
    assert step.makespan_seconds == 1.0 + (devices - 1) + 1.0


def test_a_transfer_fills_a_gap_of_the_channel_that_receives() -> None:
    """The value of c goes to device 0 while that waits for the one of b, which device 1 sends after another one."""
    graph = graph_of(
        {"a": [], "b": ["a"], "c": [], "far": ["a"], "near": ["b"], "here": ["c"]},
        sizes={"a": 4, "b": 1, "c": 1},
    )
    step = run(graph, [1.0, 0.0, 3.0, 0.0, 0.0, 0.0], even_target(3), [1, 1, 2, 2, 0, 0])
    assert sent(step, graph) == [("a", 1, 2, 1.0, 5.0), ("b", 1, 0, 5.0, 6.0), ("c", 2, 0, 3.0, 4.0)]
