"""Lower bounds: never above any step, equal to the best one where that is known by hand."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.graph.op_graph import Csr
from onnxplace.simulation.lower_bounds import bound_divisible_work, heads_and_tails, lower_bound_seconds, node_bytes
from onnxplace.simulation.simulator import simulate
from onnxplace.target.target import LINK_MODELS
from onnxplace.testing.pass_contract import TICK_SECONDS, random_graph, random_target
from tests.simulation.test_simulate import random_order
from tests.support.reference_simulator import even_target, graph_of

thorough = settings(deadline=None, derandomize=True, max_examples=200)
seeds = st.integers(0, 2**32 - 1)


@thorough
@given(seeds, st.integers(0, 25), st.integers(1, 4), st.sampled_from(LINK_MODELS), st.booleans(), st.booleans())
def test_no_step_is_shorter(seed, nodes, devices, link_model, alike, pins):
    random = np.random.default_rng(seed)
    graph = random_graph(seed, nodes, shuffled=True)
    seconds = random.integers(0, 100, (devices, len(graph))) * TICK_SECONDS
    if alike:
        seconds = np.tile(seconds[0], (devices, 1))
    target = random_target(seed, devices, link_model=link_model)
    device = random.integers(0, devices, len(graph)).astype(np.int32)
    group = random.integers(0, devices + 1, len(graph)).astype(np.int32) + (devices + 1) * device
    group = np.unique(group, return_inverse=True)[1].astype(np.int32)
    home = np.zeros(int(group.max(initial=-1)) + 1, dtype=np.int32)
    home[group] = device
    pinned = np.where(random.random(len(home)) < 0.3 * pins, home, -1).astype(np.int32)
    step = simulate(graph, seconds, target, device, random_order(graph, random))
    limits = {d.id: int(step.peak_bytes[i]) for i, d in enumerate(target.devices)}
    bound = lower_bound_seconds(graph, seconds, target.limiting(limits), group, pinned)
    assert bound <= step.makespan_seconds * (1 + 1e-12)


@thorough
@given(seeds, st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_no_parts_of_nodes_load_devices_less_than_the_bound_on_divisible_work(seed, nodes, devices, alike):
    random = np.random.default_rng(seed)
    seconds = random.integers(0, 100, (devices, nodes)) * TICK_SECONDS
    if alike:
        seconds = np.tile(seconds[0], (devices, 1))
    shares = random.dirichlet(np.full(devices, 0.5), nodes).T
    bound = bound_divisible_work(seconds, np.eye(devices, dtype=bool))
    assert bound <= (shares * seconds).sum(axis=1).max() * (1 + 1e-12)
    if alike:
        assert bound == pytest.approx(seconds[0].sum() / devices)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(seeds, st.integers(1, 5), st.sampled_from(LINK_MODELS))
def test_bounds_hold_for_the_best_of_all_placements(seed, nodes, link_model):
    graph = random_graph(seed, nodes)
    seconds = np.random.default_rng(seed).integers(1, 100, (2, nodes)) * TICK_SECONDS
    target = random_target(seed, 2, link_model=link_model)
    best = min(
        simulate(graph, seconds, target, np.array(device, dtype=np.int32), graph.order).makespan_seconds
        for device in product(range(2), repeat=nodes)
    )
    assert lower_bound_seconds(graph, seconds, target) <= best * (1 + 1e-12)


def bound(graph, seconds, target=None, **more):
    count = len(target.devices) if target else 2
    return lower_bound_seconds(graph, np.tile(np.array(seconds, dtype=np.float64), (count, 1)), target, **more)


def test_successors_queue_on_the_device_or_wait_for_a_transfer():
    # The source takes 1; two readers of 4 follow: one after the other (9), or one behind a transfer of 3 (8).
    graph = graph_of({"a": [], "b": ["a"], "c": ["a"]}, sizes={"a": 3})
    assert bound(graph, [1, 4, 4], even_target()) == 8
    assert bound(graph, [1, 4, 4], even_target(latency=1)) == 9
    assert bound(graph, [1, 4, 4]) == 5


def test_predecessors_are_treated_as_successors_are():
    graph = graph_of({"b": [], "c": [], "a": ["b", "c"]}, sizes={"b": 3, "c": 3})
    assert bound(graph, [4, 4, 1], even_target()) == 8


def test_one_channel_out_of_a_source_is_a_bottleneck():
    # Four values of 4 from one source, read by one node of 4 each: half stay, and half leave one after the other.
    reads = {"s": [], **{name: [f"v{name}"] for name in "abcd"}}
    graph = graph_of({**reads}, fed=[f"v{name}" for name in "abcd"], sizes={f"v{name}": 4 for name in "abcd"})
    graph = replace(graph, producer=np.array([0, 0, 0, 0, 0, 1, 2, 3, 4], dtype=np.int32))
    many = even_target(8)
    assert bound(graph, [1, 4, 4, 4, 4], many) == 1 + 8
    assert bound(graph, [1, 4, 4, 4, 4], replace(many, link_model="parallel")) == 1 + 8
    wide = replace(graph, inputs=Csr.of([[], [0], [1], [2], [3]]))
    assert bound(wide, [1, 8, 8, 8, 8], many) >= 1 + 8 + 4


def test_work_between_a_first_and_a_last_node_is_shared():
    middle = {name: ["first"] for name in "abcd"}
    graph = graph_of({"first": [], **middle, "last": list("abcd")}, sizes=dict.fromkeys(["first", *"abcd"], 0))
    assert bound(graph, [5, 2, 2, 2, 2, 7], even_target()) == 5 + 4 + 7


def test_devices_of_different_speed_share_as_well_as_a_fraction_could():
    apart = graph_of({name: [] for name in "abcdef"})
    seconds = np.array([[1.0] * 6, [2.0] * 6])
    # Two thirds on the fast one: 4 seconds; counting each node at its best would give 3.
    assert 3.8 <= lower_bound_seconds(apart, seconds) <= 4


def test_pinned_work_shares_its_device():
    apart = graph_of({name: [] for name in "abc"})
    pins = {"group": np.arange(3, dtype=np.int32), "pinned": np.array([1, 1, -1], dtype=np.int32)}
    assert bound(apart, [3, 3, 3], even_target(), **pins) == 6


def test_work_of_one_group_shares_its_device():
    apart = graph_of({name: [] for name in "abc"})
    assert bound(apart, [3, 3, 3], even_target(), group=np.array([0, 1, 1], dtype=np.int32)) == 6


def test_a_graph_that_fits_on_no_device_is_cut_at_the_cheapest_edge():
    graph = graph_of({"a": [], "b": ["a"]}, sizes={"a": 5, "u": 10, "v": 10}, weights={"a": ["u"], "b": ["v"]})
    assert bound(graph, [1, 2], even_target(memory_bytes=100)) == 3
    assert bound(graph, [1, 2], even_target(memory_bytes=20)) == 3 + 5


def test_pins_apart_force_a_cut_too():
    graph = graph_of({"a": [], "b": ["a"]}, sizes={"a": 5})
    pins = {"group": np.arange(2, dtype=np.int32), "pinned": np.array([0, 1], dtype=np.int32)}
    assert bound(graph, [1, 2], even_target(), **pins) == 8


def test_one_device_takes_all_the_time_there_is():
    graph = graph_of({"a": [], "b": ["a"], "c": ["a"]})
    assert bound(graph, [1, 2, 4], even_target(1)) == pytest.approx(7)


def test_a_graph_without_nodes_takes_no_time():
    assert lower_bound_seconds(graph_of({}), np.zeros((2, 0)), even_target()) == 0


def test_heads_and_tails_leave_the_node_itself_out():
    around = heads_and_tails(graph_of({"a": [], "b": ["a"], "c": ["b"]}), np.array([[1.0, 2.0, 4.0]]), even_target(1))
    assert around.head.tolist() == [0, 1, 3]
    assert around.tail.tolist() == [6, 4, 0]


def test_a_node_needs_memory_for_inputs_and_outputs_except_views():
    graph = graph_of(
        {"a": ["x"], "b": ["a"]}, fed=["x"], sizes={"x": 2, "a": 3, "b": 9}, views={"b": "a"}, workspace={"b": 7}
    )
    assert node_bytes(graph).tolist() == [5, 10]
