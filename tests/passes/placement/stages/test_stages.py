"""Stages for throughput: against brute force over all contiguous splits, on ideals, groups, pins, memory."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Clusters, Groups, Placement, Profile, Schedule
from onnxplace.passes.placement.stages.ideal_kernels import find_inseparable
from onnxplace.passes.placement.stages.stage_dp import build_chain_lattice, enumerate_lattice
from onnxplace.passes.stages import Stages
from onnxplace.pipeline.pipeline import Pipeline, run_pass
from onnxplace.problem import placement_problem
from onnxplace.simulation.steady_state import steady_state_loads
from onnxplace.target.target import LINK_MODELS, Device, Link, Target
from onnxplace.testing.pass_contract import check_pass, random_graph, random_state
from tests.passes.placement.test_placers import state_of
from tests.support.reference_simulator import even_target, graph_of

thorough = settings(deadline=None, derandomize=True, max_examples=120)
seeds = st.integers(0, 2**32 - 1)


def numbered(seed, nodes):
    graph = random_graph(seed, nodes)
    assert graph.order.tolist() == list(range(nodes))
    return graph


def interval(state, device, count):
    asked = placement_problem(state)
    return steady_state_loads(
        asked.graph, asked.seconds, state.target, np.array(device, dtype=np.int32), count
    ).interval_seconds


def contiguous(graph, device, devices):
    """Return whether the devices can be put in an order in which all values run forward."""
    edges = {
        (device[p], device[n])
        for n in range(len(graph))
        for p in graph.predecessors[n].tolist()
        if device[p] != device[n]
    }
    left = set(range(devices))
    while left:
        first = [d for d in left if not any(b == d and a in left for a, b in edges)]
        if not first:
            return False
        left -= set(first)
    return True


def by_brute_force(state, count, *, split=True):
    """Return the smallest interval of all placements that keep groups and pins, contiguous ones only if `split`."""
    asked, devices = placement_problem(state), len(state.target.devices)
    choices = [[pin] if pin >= 0 else range(devices) for pin in asked.pinned.tolist()]
    best = float("inf")
    for home in product(*choices):
        device = np.array(home, dtype=np.int32)[asked.group]
        if not split or contiguous(asked.graph, device.tolist(), devices):
            best = min(
                best, steady_state_loads(asked.graph, asked.seconds, state.target, device, count).interval_seconds
            )
    return best


def answered(state, **options):
    after = run_pass(Stages(**options), state)
    (note,) = after.diagnostics
    assert note.code == "P021"
    return after[Placement].device.tolist(), note.message


def alike(state, latency, per_byte, link_model):
    ids = [device.id for device in state.target.devices]
    links = tuple(Link(a, b, latency, per_byte) for a in ids for b in ids if a != b)
    return replace(state, target=Target(state.target.devices, links, link_model))


# Ideals


@thorough
@given(seed=seeds, nodes=st.integers(1, 9))
def test_ideals_are_all_sets_with_their_predecessors_each_once_and_behind_their_subsets(seed, nodes):
    graph = numbered(seed, nodes)
    before = [set(graph.predecessors[node].tolist()) for node in range(nodes)]
    expected = {
        frozenset(some)
        for size in range(nodes + 1)
        for some in combinations(range(nodes), size)
        if all(before[node] <= set(some) for node in some)
    }
    lattice = enumerate_lattice(graph, 1 << nodes | 16)
    ideals = [frozenset(np.flatnonzero(lattice.inside(i, nodes)).tolist()) for i in range(len(lattice.parent))]
    assert len(ideals) == len(expected)
    assert set(ideals) == expected
    for i, ideal in enumerate(ideals):
        assert not any(ideals[j] < ideal for j in range(i, len(ideals)))
        removable = lattice.node[lattice.starts[i] : lattice.starts[i + 1]].tolist()
        below = lattice.below[lattice.starts[i] : lattice.starts[i + 1]].tolist()
        assert removable == sorted(node for node in ideal if ideal - {node} in expected)
        assert [ideals[j] for j in below] == [ideal - {node} for node in removable]


def test_too_many_ideals_return_none():
    wide = graph_of({f"n{i}": [] for i in range(12)})
    assert enumerate_lattice(wide, 4096) is not None
    assert enumerate_lattice(wide, 4095) is None
    assert enumerate_lattice(graph_of({f"n{i}": [] for i in range(300)}), 50_000) is None


def test_a_chain_has_the_ideals_of_its_order_and_may_be_cut_at_few_of_them():
    lattice = build_chain_lattice(10, 5)
    assert len(lattice.parent) == 11
    assert np.flatnonzero(lattice.is_cut).tolist() == [0, 2, 4, 6, 8, 10]
    assert np.flatnonzero(lattice.inside(3, 10)).tolist() == [0, 1, 2]


@thorough
@given(seed=seeds, nodes=st.integers(1, 20), groups=st.integers(1, 10))
def test_groups_that_wait_for_each_other_are_inseparable_and_others_are_not(seed, nodes, groups):
    graph = random_graph(seed, nodes, shuffled=True)
    drawn = np.random.default_rng(seed).integers(0, groups, nodes)
    group = np.unique(drawn, return_inverse=True)[1].astype(np.int32)
    unit = find_inseparable(graph, group)
    assert sorted(set(unit.tolist())) == list(range(unit.max() + 1))
    assert len(graph.contract(unit).order) == unit.max() + 1
    reach = np.zeros((group.max() + 1,) * 2, dtype=bool)
    reach[group[graph.predecessors.items], group[graph.predecessors.rows]] = True
    for via in range(len(reach)):
        reach |= np.outer(reach[:, via], reach[via])
    np.fill_diagonal(reach, True)
    for a, b in product(range(nodes), repeat=2):
        assert (unit[a] == unit[b]) == bool(reach[group[a], group[b]] and reach[group[b], group[a]])


# Optimal


@pytest.mark.parametrize("count", ["max", "sum"])
@thorough
@given(data=st.data())
def test_contiguous_stages_are_the_optimum_of_brute_force_where_links_are_alike(count, data):
    facts = data.draw(st.sampled_from([(Profile,), (Profile, Groups), (Profile, Groups, Clusters)]))
    nodes, devices = data.draw(st.sampled_from([(1, 3), (5, 3), (7, 3), (9, 2), (5, 4)]))
    state = random_state(data.draw(seeds), nodes, devices, facts=facts, shuffled=data.draw(st.booleans()))
    latency = data.draw(st.sampled_from([0.0, 2.0**-16, 2.0**-13]))
    state = alike(state, latency, 2.0 ** data.draw(st.integers(22, 28)), data.draw(st.sampled_from(LINK_MODELS)))
    device, message = answered(state, load=count)
    assert "contiguous, optimal" in message
    assert contiguous(state[Profile].graph, device, devices)
    asked = placement_problem(state)
    coarse = np.zeros(len(asked.graph), dtype=np.int32)
    coarse[asked.members] = device
    assert interval(state, coarse, count) == pytest.approx(by_brute_force(state, count), rel=1e-9)


@pytest.mark.parametrize("count", ["max", "sum"])
@thorough
@given(seed=seeds, pinned=st.booleans())
def test_proofs_and_bounds_hold_where_links_differ_and_groups_are_pinned(count, seed, pinned):
    state = random_state(seed, 6, 3, facts=(Profile, Groups), pinned=pinned)
    optimum = by_brute_force(state, count)
    try:
        device, message = answered(state, load=count)
    except InfeasibleError:
        assert pinned
        assert optimum == float("inf")
        return
    reached = interval(state, device, count)
    assert reached >= optimum * (1 - 1e-9)
    if "contiguous, optimal" in message:
        assert reached == pytest.approx(optimum, rel=1e-9)
    elif "less than" in message:
        bound = float(message.rpartition("less than ")[2].split()[0]) / 1e3
        assert bound <= optimum * (1 + 1e-3)


@pytest.mark.parametrize("count", ["max", "sum"])
@thorough
@given(seed=seeds, nodes=st.integers(1, 14), devices=st.integers(1, 4))
def test_stages_that_need_not_be_contiguous_are_never_worse(count, seed, nodes, devices):
    state = random_state(seed, nodes, devices, facts=(Profile, Groups))
    contiguously, _ = answered(state, load=count)
    freely, message = answered(state, load=count, contiguous=False)
    assert "not necessarily contiguous" in message
    assert interval(state, freely, count) <= interval(state, contiguously, count) * (1 + 1e-12)


def test_a_value_read_by_several_later_stages_is_sent_to_each():
    """Stages ab, c, d would compute for 6 seconds at most, but `a` would be sent twice, with `b` for 9 seconds."""
    graph = graph_of({"a": [], "b": ["a"], "c": ["a", "b"], "d": ["a", "c"]}, sizes={"a": 4})
    state = state_of(graph, [1, 5, 5, 5], even_target(3))
    device, message = answered(state)
    assert "contiguous, optimal" in message
    assert interval(state, device, "max") == by_brute_force(state, "max") == 9


def test_the_note_says_the_interval_and_what_is_busiest():
    state = state_of(graph_of({"a": [], "b": ["a"]}), [2e-3, 3e-3], even_target(2, latency=1e-9))
    state = replace(state, target=replace(state.target, link_model="parallel"))
    device, message = answered(state)
    assert device[0] != device[1]
    assert message == (
        f"one result every 3 ms in steady state (largest load: cpu:{device[1]} computes 3 ms); contiguous, optimal"
    )


# Devices, memory


def test_a_slower_device_gets_less_to_do():
    devices = (Device("cpu:0", 1 << 40, 1), Device("cpu:1", 1 << 40, 3))
    links = tuple(Link(a, b, 0.0, 1e9) for a, b in (("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")))
    graph = graph_of({"a": [], "b": ["a"], "c": ["b"], "d": ["c"]})
    state = state_of(graph, [[3, 3, 3, 3], [1, 1, 1, 1]], Target(devices, links))
    device, message = answered(state)
    assert "contiguous, optimal" in message
    assert sorted(device) == [0, 1, 1, 1]


def test_a_limit_moves_the_cut():
    weights = {name: [f"w{name}"] for name in "abcd"}
    graph = graph_of({"a": [], "b": ["a"], "c": ["b"], "d": ["c"]}, weights=weights, sizes={"wa": 90})
    roomy = state_of(graph, [1, 1, 5, 5], even_target(2))
    device, _ = answered(roomy)
    assert device[0] == device[1] == device[2] != device[3]
    tight = state_of(graph, [1, 1, 5, 5], even_target(2, memory_bytes=[92, 60]))
    device, _ = answered(tight)
    assert device == [0, 1, 1, 1]


def test_a_graph_that_fits_nowhere_is_infeasible_with_a_name():
    graph = graph_of({"a": []}, weights={"a": ["w"]}, sizes={"w": 90})
    with pytest.raises(InfeasibleError, match="cpu:1 lacks"):
        answered(state_of(graph, [1], even_target(2, memory_bytes=50)))


@thorough
@given(seed=seeds, nodes=st.integers(1, 30), contiguous_=st.booleans())
def test_memory_groups_and_pins_hold_under_tight_limits(seed, nodes, contiguous_):
    state = random_state(seed, nodes, 3, facts=(Profile, Groups), tight=True, pinned=seed % 2 == 0)
    try:
        after = run_pass(Stages(contiguous=contiguous_, seconds=0.5), state)
    except InfeasibleError:
        assume(False)
    peaks = after[Schedule].simulation.peak_bytes
    assert all(peak <= device.memory_bytes for peak, device in zip(peaks, state.target.devices))
    if contiguous_:
        assert contiguous(state[Profile].graph, after[Placement].device.tolist(), 3)


def test_distinct_devices_beyond_what_the_table_holds_still_get_an_answer():
    devices = tuple(Device(f"cpu:{i}", (1 << 40) + i, 1) for i in range(24))
    graph = graph_of({f"n{i}": [f"n{i - 1}"] if i else [] for i in range(40)}, sizes={f"n{i}": 0 for i in range(40)})
    state = state_of(graph, [1.0] * 40, Target(devices))
    assert interval(state, answered(state, seconds=1.0)[0], "max") <= 4


@pytest.mark.parametrize("text", ["stages", "stages{load=sum}", "stages{contiguous=false}"])
def test_stages_keep_the_contract_of_passes_on_random_states(text):
    check_pass(lambda: Pipeline.parse(text).passes[0])
