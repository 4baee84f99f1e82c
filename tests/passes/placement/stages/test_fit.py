"""Fit: one device if one will do, else the least traffic within the limits; slow devices are a last resort."""

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Clusters, Groups, Placement, Profile, Schedule
from onnxplace.passes.fit import Fit
from onnxplace.pipeline.pipeline import make_pass, run_pass
from onnxplace.problem import placement_problem
from onnxplace.simulation.steady_state import list_transfers
from onnxplace.target.target import Device, Target
from onnxplace.testing.pass_contract import check_pass, random_state
from tests.passes.placement.test_placers import state_of
from tests.support.reference_simulator import even_target, graph_of

thorough = settings(deadline=None, derandomize=True, max_examples=40)
seeds = st.integers(0, 2**32 - 1)


def traffic(graph, device, devices):
    """Return bytes and number of the values that cross."""
    value, _, _ = list_transfers(graph, np.array(device, dtype=np.int32), devices)
    return int(graph.value_bytes[value].sum()), len(value)


def by_brute_force(state):
    """Return the least traffic of all placements that fit."""
    asked, devices = placement_problem(state), len(state.target.devices)
    result = []
    for home in product(range(devices), repeat=len(asked.pinned)):
        device = np.array(home, dtype=np.int32)[asked.group]
        if not asked.excess_bytes(asked.simulate(device, asked.graph.order)).any():
            result.append(traffic(asked.graph, device, devices))
    return min(result, default=None)


def crossing(expected):
    """Return how many bytes in how many values cross, as the note says it."""
    size, count = expected
    if not count:
        return "nothing crosses"
    return f"{count} value{'s' * (count > 1)} with {size} byte{'s' * (size > 1)} cross{'es' * (count == 1)}"


def answered(state):
    after = run_pass(Fit(), state)
    (note,) = after.diagnostics
    assert note.code == "P021"
    return after[Placement].device.tolist(), note.message


def weighty(reads, sizes, weight, memory):
    """Return a state of nodes with a weight of their own each; all compute for a second."""
    graph = graph_of(
        reads,
        sizes={**{name: sizes.get(name, 1) for name in reads}, **{f"w{name}": weight.get(name, 100) for name in reads}},
        weights={name: [f"w{name}"] for name in reads},
    )
    return state_of(graph, [1.0] * len(reads), even_target(len(memory), memory_bytes=memory))


# One device


@thorough
@given(seed=seeds, nodes=st.integers(1, 25), devices=st.integers(1, 4))
def test_nothing_is_cut_when_one_device_fits(seed, nodes, devices):
    device, message = answered(random_state(seed, nodes, devices, facts=(Profile, Groups)))
    assert len(set(device)) == 1
    assert message.endswith("; nothing crosses")


def test_the_fastest_device_that_fits_gets_everything():
    devices = tuple(Device(f"cpu:{i}", memory, cores) for i, (memory, cores) in enumerate([(10, 1), (5, 2), (10, 3)]))
    graph = graph_of({"a": []}, weights={"a": ["w"]}, sizes={"w": 8})
    assert answered(state_of(graph, [[3.0], [1.0], [2.0]], Target(devices)))[0] == [2]


# Several


@thorough
@given(sizes=st.lists(st.integers(1, 50), min_size=2, max_size=6), devices=st.integers(2, 3), room=st.integers(2, 4))
def test_a_chain_is_cut_where_it_is_thinnest(sizes, devices, room):
    names = [f"n{index}" for index in range(len(sizes))]
    reads = {name: [names[index - 1]] if index else [] for index, name in enumerate(names)}
    state = weighty(reads, dict(zip(names, sizes)), {}, [100 * room + 99] * devices)
    expected = by_brute_force(state)
    if expected is None:
        with pytest.raises(InfeasibleError):
            answered(state)
        return
    device, message = answered(state)
    assert traffic(state[Profile].graph, device, devices) == expected
    assert crossing(expected) in message


@thorough
@given(
    sizes=st.lists(st.integers(1, 30), min_size=8, max_size=8),
    weight=st.lists(st.integers(100, 300), min_size=8, max_size=8),
)
def test_two_branches_are_cut_as_brute_force_would(sizes, weight):
    """A fork, two branches of three, and a join."""
    reads = {"s": [], "a": ["s"], "b": ["a"], "c": ["b"], "d": ["s"], "e": ["d"], "f": ["e"], "t": ["c", "f"]}
    state = weighty(reads, dict(zip(reads, sizes)), dict(zip(reads, weight)), [sum(weight) * 2 // 3 + 99] * 2)
    expected = by_brute_force(state)
    assert expected is not None
    assert traffic(state[Profile].graph, answered(state)[0], 2) == expected


def test_of_equal_traffic_fewer_values_cross():
    reads = {"a": [], "b": [], "c": ["a", "b"], "d": ["c"], "e": ["d"]}
    state = weighty(reads, {"a": 5, "b": 5, "c": 10, "d": 50}, {}, [399, 399])
    device, message = answered(state)
    assert message.endswith("; 1 value with 10 bytes crosses")
    assert device[:3] == [device[0]] * 3


def test_a_slow_device_gets_only_what_fits_nowhere_else():
    devices = (Device("cpu:0", 10_000, 1), Device("cuda:0", 250, model="g"), Device("cuda:1", 250, model="g"))
    names = [f"n{index}" for index in range(5)]
    graph = graph_of(
        {name: [names[index - 1]] if index else [] for index, name in enumerate(names)},
        weights={name: [f"w{name}"] for name in names},
        sizes={f"w{name}": 100 for name in names},
    )
    device, _ = answered(state_of(graph, [[50.0] * 5, [1.0] * 5, [1.0] * 5], Target(devices)))
    assert sorted(device) == [0, 1, 1, 2, 2]


def test_a_pin_brings_its_device_in():
    graph = graph_of({"a": [], "b": ["a"]})
    state = state_of(graph, [1, 1], even_target(3), groups=[0, 1], pins=[2, -1])
    assert answered(state)[0] == [2, 2]
    apart = state_of(graph, [1, 1], even_target(3), groups=[0, 1], pins=[2, 1])
    assert answered(apart)[0] == [2, 1]


def test_a_placement_that_does_not_fit_reports_the_missing_bytes():
    with pytest.raises(InfeasibleError, match="cpu:0 lacks"):
        answered(weighty({"a": [], "b": ["a"]}, {}, {}, [90, 90]))


@thorough
@given(data=st.data())
def test_limits_groups_and_pins_hold_and_what_m_etf_fits_fits(data):
    facts = data.draw(st.sampled_from([(Profile,), (Profile, Groups), (Profile, Groups, Clusters)]))
    seed, nodes = data.draw(seeds), data.draw(st.integers(1, 30))
    state = random_state(seed, nodes, 3, facts=facts, tight=True, pinned=seed % 2 == 0)
    try:
        after = run_pass(Fit(seconds=0.3), state)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            run_pass(make_pass("m-etf"), state)
        assume(False)
    peaks = after[Schedule].simulation.peak_bytes
    assert all(peak <= device.memory_bytes for peak, device in zip(peaks, state.target.devices))


def test_fit_keeps_the_contract_of_passes_on_random_states():
    check_pass(lambda: make_pass("fit"))
