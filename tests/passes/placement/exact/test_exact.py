"""`exact` against brute force, and what it says about its own result."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Groups, Placement, Profile, Schedule
from onnxplace.passes.placement.exact.bound_kernels import fill_level
from onnxplace.passes.placement.exact.branch_and_bound import (
    _root_layer,
    branch_and_bound_search,
    build_tables,
    held_bytes,
    reachable,
)
from onnxplace.passes.placement.exact.state_kernels import apply_action
from onnxplace.pipeline.pipeline import make_pass, run_pass
from onnxplace.problem import placement_problem
from onnxplace.simulation.lower_bounds import lower_bound_seconds
from onnxplace.target.target import LINK_MODELS
from onnxplace.testing.pass_contract import check_pass, random_state
from tests.passes.placement.test_placers import state_of
from tests.support.reference_simulator import even_target, graph_of

seeds = st.integers(0, 2**32 - 1)
cases = settings(deadline=None, derandomize=True, max_examples=40)


def orders(graph, done=()):
    """Yield every topological order."""
    if len(done) == len(graph):
        yield done
    for node in range(len(graph)):
        if node not in done and set(graph.predecessors[node].tolist()) <= set(done):
            yield from orders(graph, (*done, node))


def brute_force(asked):
    """Return the shortest step over all placements and orders that fit; infinite if none does."""
    best, every = np.inf, [np.array(order, dtype=np.int32) for order in orders(asked.graph)]
    for homes in product(range(len(asked.target.devices)), repeat=len(asked.pinned)):
        if any(pin >= 0 and pin != home for pin, home in zip(asked.pinned, homes)):
            continue
        device = np.array(homes, dtype=np.int32)[asked.group]
        for order in every:
            step = asked.simulate(device, order)
            if step.makespan_seconds < best and not asked.excess_bytes(step).any():
                best = step.makespan_seconds
    return best


@st.composite
def tiny_states(draw, tight=False):
    facts = (Profile, Groups) if draw(st.booleans()) else (Profile,)
    devices = draw(st.integers(2, 3))
    state = random_state(draw(seeds), draw(st.integers(1, 5)), devices, facts=facts, tight=tight, pinned=True)
    target = replace(state.target, link_model=draw(st.sampled_from(LINK_MODELS)))
    if not draw(st.booleans()):
        return replace(state, target=target)
    # All devices alike, so that they can be exchanged.
    target = replace(target, links=tuple(replace(target.links[0], source=a.source, destination=a.destination)
                                         for a in target.links))  # fmt: skip
    seconds = state[Profile].seconds
    one = dict.fromkeys(seconds, next(iter(seconds.values())))
    return replace(state, target=target).with_facts(
        replace(state[Profile], seconds=one), *[state[kind] for kind in facts[1:]]
    )


def gap_said(state):
    (note,) = [d for d in state.diagnostics if d.code == "P021"]
    return note.message


@cases
@given(tiny_states())
def test_the_result_is_the_best_of_all_steps(state):
    best = brute_force(placement_problem(state))
    done = run_pass(make_pass("exact", {"gap": "0", "seconds": "20"}), state)
    schedule = done[Schedule]
    assert schedule.lower_bound_seconds <= best * (1 + 1e-9)
    duplex_pair = state.target.link_model == "duplex" and len(state.target.devices) == 2
    proven = gap_said(done).startswith("optimal:")
    assert proven or not (duplex_pair or state.target.link_model == "parallel")
    if proven:
        assert schedule.simulation.makespan_seconds == pytest.approx(best, rel=1e-9)
        assert schedule.lower_bound_seconds == pytest.approx(best, rel=1e-9)


@cases
@given(tiny_states(tight=True))
def test_memory_holds_and_bounds_hold_where_it_is_tight(state):
    best = brute_force(placement_problem(state))
    exact = make_pass("exact", {"gap": "0", "seconds": "5"})
    if not np.isfinite(best):
        with pytest.raises(InfeasibleError):
            run_pass(exact, state)
        return
    done = run_pass(exact, state)
    assert done[Schedule].lower_bound_seconds <= best * (1 + 1e-9)
    assert done[Schedule].simulation.makespan_seconds >= best * (1 - 1e-9)


@cases
@given(tiny_states())
def test_bounds_of_the_search_hold_at_any_width(state):
    asked = placement_problem(state)
    best, known = brute_force(asked), build_tables(asked)
    for width in (1, 3, 1000):
        for variant in (known, known._replace(receives=True, delays=True)):
            result = branch_and_bound_search(asked, variant, np.inf, 1e-9, width, np.inf)
            assert result.bound_seconds <= best * (1 + 1e-9)
            assert result.makespan_seconds >= best * (1 - 1e-9)


def fork(devices=2, memory_bytes=1 << 40, weights=None):
    graph = graph_of(
        {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]},
        sizes={**dict.fromkeys("abcd", 1), "u": 10, "v": 10},
        weights=weights or {"b": ["u"], "c": ["v"]},
    )
    return state_of(graph, [1, 4, 4, 1], even_target(devices, memory_bytes=memory_bytes))


def test_a_fork_is_split_and_proven():
    done = run_pass(make_pass("exact", {"gap": "0"}), fork())
    assert done[Schedule].simulation.makespan_seconds == done[Schedule].lower_bound_seconds == 7
    assert gap_said(done) == "optimal: step 7000 ms, bound 7000 ms"


def test_weights_that_fit_no_single_device_are_spread():
    done = run_pass(make_pass("exact", {"gap": "0"}), fork(memory_bytes=15))
    device = done[Placement].device
    assert device[1] != device[2]


def test_a_graph_that_fits_nowhere_is_infeasible():
    with pytest.raises(InfeasibleError, match="lacks"):
        run_pass(make_pass("exact", {"seconds": "2"}), fork(memory_bytes=9))


def test_a_device_that_sends_has_less_time_than_the_one_it_sends_to():
    # One device from 0, the others from 2 after they open.
    assert fill_level(np.zeros(2), 0, 0.0, 2.0, 10.0) == 6
    assert fill_level(np.zeros(2), 0, 0.0, 20.0, 10.0) == 10
    assert fill_level(np.array([0.0, 1.0, 5.0]), 1, 1.0, 0.0, 5.0) == 3


def test_chains_that_end_in_one_node_are_bounded_by_what_they_must_send():
    # Half of 8 on each device would end after 4; what is not where `end` is has to be sent first, for 2.
    chains = {name: [] for name in "abcd"}
    state = state_of(
        graph_of({**chains, "end": list("abcd")}, sizes=dict.fromkeys("abcd", 2)), [2] * 4 + [1], even_target()
    )
    asked = placement_problem(state)
    result = branch_and_bound_search(asked, build_tables(asked), np.inf, 1e-9, 1, np.inf)
    assert lower_bound_seconds(asked.graph, asked.seconds, asked.target) < result.bound_seconds <= brute_force(asked)


def test_a_group_holds_what_it_reads_later():
    group = np.array([0, 1, 1, 0], dtype=np.int32)

    def stored(reads):
        graph = graph_of(reads, sizes={"a": 4, "b": 3, "c": 2, "d": 1})
        return held_bytes(graph, group, reachable(graph.order, graph.predecessors))[:, 0].tolist()

    assert stored({"a": [], "b": ["a"], "c": ["b"], "d": ["a", "c"]}) == [0, 0, 4, 0]  # b reads it itself
    assert stored({"a": [], "b": [], "c": ["b"], "d": ["a", "c"]}) == [0, 0, 0, 0]  # nothing has to run in between
    assert stored({"a": [], "b": ["a"], "c": ["b"], "d": ["c"]}) == [0, 0, 0, 0]  # read by another group only


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_value_on_hand_takes_memory_also_if_it_was_there_from_the_start(seconds):
    graph = graph_of({"a": [], "b": [], "c": ["a", "b"]}, sizes={"a": 100, "b": 1, "c": 1})
    tables = build_tables(placement_problem(state_of(graph, [seconds, 1, 1], even_target(1))))._replace(careful=True)
    for limit, fits in ((100, False), (101, True)):
        root, tight = _root_layer(tables), tables._replace(limit=np.array([float(limit)]))
        started = apply_action(root.reals[0], root.ints[0], root.masks[0], 0, tight)
        assert started == 1
        assert (apply_action(root.reals[0], root.ints[0], started, 1, tight) >= 0) == fits


def test_a_graph_too_large_to_search_gets_an_honest_gap():
    state = random_state(1, 70, 3)
    done = run_pass(make_pass("exact", {"seconds": "0.5"}), state)
    schedule = done[Schedule]
    assert schedule.lower_bound_seconds <= schedule.simulation.makespan_seconds
    assert gap_said(done).startswith(("stopped at a gap of", "optimal"))


def test_a_contracted_graph_keeps_the_bound_of_its_nodes():
    state = random_state(3, 20, 2, facts=(Profile, Groups))
    fused = run_pass(make_pass("fuse"), state)
    exact = make_pass("exact", {"seconds": "0.5"})
    done = run_pass(exact, fused)
    assert done[Schedule].lower_bound_seconds <= done[Schedule].simulation.makespan_seconds
    again = run_pass(exact, state)
    assert done[Schedule].lower_bound_seconds <= again[Schedule].simulation.makespan_seconds


def test_devices_that_are_alike_are_found():
    asked = placement_problem(fork(3))
    assert build_tables(asked).alike.tolist() == [0, 0, 0]
    pinned = replace(asked, pinned=np.array([1, -1, -1, -1], dtype=np.int32))
    assert build_tables(pinned).alike.tolist() == [0, 1, 0]


def test_the_same_input_gives_the_same_answer():
    check_pass(
        lambda: make_pass("exact", {"gap": "0.05"}),
        [random_state(seed, 8, 2, facts=(Profile, Groups)) for seed in range(3)],
    )
