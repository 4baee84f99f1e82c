"""Placers where devices share processors: proofs against brute force, and which devices compute at the same time."""

from dataclasses import replace
from types import MappingProxyType
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from onnxplace.errors import UsageError
from onnxplace.facts import Placement, Profile, Schedule, Source
from onnxplace.graph.op_graph import OpGraph
from onnxplace.passes.placement.exact import exact_solver
from onnxplace.passes.placement.exact.branch_and_bound import branch_and_bound_search, build_tables
from onnxplace.pipeline.pipeline import Pipeline, make_pass, run_pass
from onnxplace.pipeline.select_placer import report_idle_devices
from onnxplace.problem import interchangeable_devices, placement_problem
from onnxplace.state import State
from onnxplace.target.target import Device, Link, Target
from onnxplace.testing.pass_contract import random_state
from tests.passes.placement.exact.test_exact import brute_force, gap_said, tiny_states
from tests.passes.placement.test_placers import chains, state_of
from tests.support.reference_simulator import graph_of

seeds = st.integers(0, 2**32 - 1)
cases = settings(deadline=None, derandomize=True, max_examples=30)
fewer_cases = settings(cases, max_examples=10)

# Searches end by their moves, so that results do not depend on the clock.
SEARCHED = ("auto{seconds=0,proposals=60}", "multilevel{seconds=0,proposals=60}")
SEARCHED = (*SEARCHED, "m-topo,refine{seconds=0,proposals=60}", "m-topo,adjust")
PLACERS = ("m-topo", "m-etf", "m-sct", "single", "exact{seconds=1}", "stages{seconds=0.1}", "fit{seconds=0.1}")


def share(state, processors):
    """Return a state whose devices compute on these processors."""
    devices = tuple(
        replace(device, processors=tuple(f"core{number}" for number in numbers))
        for device, numbers in zip(state.target.devices, processors)
    )
    return replace(state, target=replace(state.target, devices=devices))


@st.composite
def shared(draw, states):
    """Draw a state with devices on one or more of three processors each."""
    state = draw(states)
    some = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)
    count = len(state.target.devices)
    after = share(state, draw(st.lists(some, min_size=count, max_size=count)))
    assume(after.target.shares_processors)
    return after


@st.composite
def states(draw, nodes=14, devices=4, *, pinned=True):
    return random_state(draw(seeds), draw(st.integers(1, nodes)), draw(st.integers(2, devices)), pinned=pinned)


def cores(graph: OpGraph, core_seconds, span_seconds, names=("cpu:0", "cpu:1", "cpu:0-1")) -> State:
    """Return a state of single cores and a session on both, whose transfers take no time."""
    processors = {"cpu:0": ("cpu:0",), "cpu:1": ("cpu:1",), "cpu:0-1": ("cpu:0", "cpu:1")}
    devices = tuple(Device(name, 1 << 40, len(processors[name]), processors=processors[name]) for name in names)
    links = (Link("all-to-all", "all-to-all", 0.0, np.inf),)
    seconds = {"cpu/1": np.array(core_seconds, dtype=float), "cpu/2": np.array(span_seconds, dtype=float)}
    seconds = {kind: seconds[kind] for kind in dict.fromkeys(device.cost_class for device in devices)}
    given = {kind: np.full(len(graph), Source.GIVEN, dtype=np.uint8) for kind in seconds}
    unit = np.arange(len(graph), dtype=np.int32)
    return State(Target(devices, links)).with_facts(
        Profile(graph, MappingProxyType(seconds), MappingProxyType(given), unit)
    )


def run_in_turns(state):
    """Return whether no two nodes run on one processor at the same time."""
    device, simulation = state[Placement].device, state[Schedule].simulation
    start, finish = simulation.start_seconds, simulation.finish_seconds
    overlap = (start[:, None] < finish) & (start < finish[:, None]) & ~np.eye(len(start), dtype=bool)
    return not (overlap & state.target.conflicts[np.ix_(device, device)]).any()


# Every placer


@pytest.mark.parametrize("placer", [*PLACERS, *SEARCHED])
@fewer_cases
@given(shared(states()))
def test_no_two_nodes_run_on_one_processor_at_a_time(placer, state):
    pins = placement_problem(state).pinned
    if placer == "single" and len(set(pins[pins >= 0].tolist())) > 1:
        return
    after, _ = Pipeline.parse(placer).run(state)
    assert run_in_turns(after)
    assert after[Schedule].lower_bound_seconds <= after[Schedule].simulation.makespan_seconds


@fewer_cases
@given(shared(states(6, 3, pinned=False)))
def test_exact_is_never_longer_than_another_placer(state):
    best = run_pass(make_pass("exact", {"gap": "0", "seconds": "2"}), state)[Schedule].simulation.makespan_seconds
    for placer in ("m-topo", "m-etf", "m-sct", "single", *SEARCHED):
        after, _ = Pipeline.parse(placer).run(state)
        assert best <= after[Schedule].simulation.makespan_seconds * (1 + 1e-9)


# exact


@cases
@given(shared(tiny_states()))
def test_exact_finds_and_proves_the_best_of_all_steps(state):
    best = brute_force(placement_problem(state))
    after = run_pass(make_pass("exact", {"gap": "0", "seconds": "20"}), state)
    assert after[Schedule].lower_bound_seconds <= best * (1 + 1e-9)
    assert after[Schedule].simulation.makespan_seconds >= best * (1 - 1e-9)
    is_exact = state.target.link_model == "parallel" or (
        state.target.link_model == "duplex" and len(state.target.devices) == 2
    )
    takes_time = all((seconds > 0).all() for seconds in state[Profile].seconds.values())
    proven = gap_said(after).startswith("optimal:")
    assert proven or not (is_exact and takes_time)
    if proven:
        assert after[Schedule].simulation.makespan_seconds == pytest.approx(best, rel=1e-9)
        assert after[Schedule].lower_bound_seconds == pytest.approx(best, rel=1e-9)


@cases
@given(shared(tiny_states()))
def test_bounds_of_the_search_hold_at_any_width(state):
    problem = placement_problem(state)
    best, tables = brute_force(problem), build_tables(problem)
    for width in (1, 3, 1000):
        for variant in (tables, tables._replace(receives=True, delays=True)):
            result = branch_and_bound_search(problem, variant, np.inf, 1e-9, width, np.inf)
            assert result.bound_seconds <= best * (1 + 1e-9)
            assert result.makespan_seconds >= best * (1 - 1e-9)


@cases
@given(shared(tiny_states()))
def test_bounds_of_blocks_in_series_add_up_to_a_bound(state):
    best = brute_force(placement_problem(state))
    with mock.patch.object(exact_solver, "MAX_NODES", 3):
        solved = exact_solver.solve_exactly(placement_problem(state), 1.0, 0.0, 0)
    assert solved.bound_seconds <= best * (1 + 1e-9)


def in_turns(reads: dict[str, list[str]], seconds: list[float], pins: list[int]) -> State:
    """Return a state of four devices, two on each of two processors, whose transfers take no time."""
    devices = tuple(Device(f"cpu:{index}", 99, processors=(f"core{index // 2}",)) for index in range(4))
    target = Target(devices, (Link("all-to-all", "all-to-all", 0.0, np.inf),), "parallel")
    return state_of(graph_of(reads), seconds, target, list(range(len(pins))), pins)


def test_a_node_that_asked_earlier_goes_first_and_that_is_proven():
    # b is ready at 2, and d needs it on another device; c is ready at 1, when a runs, so that b waits for c.
    reads = {"p": [], "a": ["p"], "b": ["a"], "c": ["p"], "d": ["b"], "q": ["c", "d"]}
    state = in_turns(reads, [1, 1, 1, 10, 10, 1], [0, 0, 0, 1, 2, 0])
    after = run_pass(make_pass("exact", {"gap": "0"}), state)
    assert after[Schedule].simulation.makespan_seconds == after[Schedule].lower_bound_seconds == 24
    assert gap_said(after).startswith("optimal:")


def test_a_node_in_no_block_may_keep_one_from_asking_first():
    # As above, but x may go before c on its device. The block without x takes 23 s from the end of p.
    reads = {"p": [], "a": ["p"], "b": ["a"], "c": ["p"], "d": ["b"], "q": ["c", "d"], "x": ["b"]}
    state = in_turns(reads, [1, 1, 1, 10, 10, 1, 1], [0, 0, 0, 1, 2, 0, 1])
    problem = placement_problem(state)
    step = problem.simulate(problem.pinned, np.array([0, 1, 2, 6, 3, 4, 5], dtype=np.int32))
    assert step.makespan_seconds == 15
    with mock.patch.object(exact_solver, "MAX_NODES", 6):
        solved = exact_solver.solve_exactly(problem, 0.2, 0.0, 0)
    assert solved.bound_seconds <= 15


def test_a_node_of_lower_index_comes_second_if_a_node_of_no_time_lets_it_ask_later():
    reads = {"a": ["c"], "b": [], "c": [], "d": ["b"]}
    problem = placement_problem(in_turns(reads, [10, 1, 0, 10], [0, 1, 2, 3]))
    tables = build_tables(problem)._replace(in_turn=1, patient=True)
    result = branch_and_bound_search(problem, tables, np.inf, 1e-9, 1000, np.inf)
    assert result.makespan_seconds == result.bound_seconds == 11


def test_a_state_in_which_nodes_are_ready_earlier_may_be_worse():
    state = random_state(125, 5, 2)
    state = share(replace(state, target=replace(state.target, link_model="duplex")), [[0], [0]])
    after = run_pass(make_pass("exact", {"gap": "0"}), state)
    best = pytest.approx(brute_force(placement_problem(state)), rel=1e-9)
    assert after[Schedule].simulation.makespan_seconds == best
    assert after[Schedule].lower_bound_seconds == best


def test_a_session_on_all_cores_runs_what_cannot_be_spread():
    # a and d are alone, b and c run side by side: a session on both cores takes 5 s for what one core does in 8 s.
    state = cores(graph_of({"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}), [8, 8, 8, 8], [5, 5, 5, 5])
    after = run_pass(make_pass("exact", {"gap": "0"}), state)
    device = after[Placement].device
    assert device[[0, 3]].tolist() == [2, 2]
    assert sorted(device[[1, 2]]) == [0, 1]
    assert after[Schedule].simulation.makespan_seconds == after[Schedule].lower_bound_seconds == 18


def test_devices_are_interchangeable_only_with_equal_conflicts():
    state = cores(graph_of({"a": []}), [1], [1])
    assert interchangeable_devices(placement_problem(state)).tolist() == [0, 0, 2]
    alike = tuple(replace(device, cores=1) for device in state.target.devices)
    alike = share(replace(state, target=replace(state.target, devices=alike)), [[0], [1], [1]])
    assert interchangeable_devices(placement_problem(alike)).tolist() == [0, 1, 1]


# Devices that work at the same time


def test_independent_devices_are_those_of_few_processors_first():
    target = cores(graph_of({"a": []}), [1], [1], ("cpu:0-1", "cpu:1", "cpu:0")).target
    assert target.independent_devices == (1, 2)
    assert target.choose_devices(["cpu:0-1", "cpu:0"]).independent_devices == (1,)
    assert target.choose_devices(["cpu:0-1"]).independent_devices == (0,)


@given(shared(states(1)))
def test_independent_devices_share_no_processor_and_no_further_one_fits(state):
    target = state.target
    chosen = list(target.independent_devices)
    conflicts = target.conflicts
    assert conflicts[np.ix_(chosen, chosen)].sum() == len(chosen)
    assert conflicts[:, chosen].any(axis=1).all()


def test_m_topo_gives_a_session_on_all_cores_no_share():
    state = cores(chains(1, 6), [1] * 6, [1] * 6)
    assert run_pass(make_pass("m-topo"), state)[Placement].device.tolist() == [0, 0, 0, 0, 1, 1]


def test_m_topo_uses_the_memory_of_further_devices_where_it_is_needed():
    graph = graph_of({"a": [], "b": ["a"]}, sizes={"u": 9, "v": 9, "a": 1, "b": 1}, weights={"a": ["u"], "b": ["v"]})
    state = cores(graph, [1, 1], [1, 1], ("cpu:0", "cpu:0-1"))
    limited = replace(state, target=state.target.limiting({"cpu:0": 12, "cpu:0-1": 12}))
    assert run_pass(make_pass("m-topo"), limited)[Placement].device.tolist() == [0, 1]


def test_m_etf_lets_a_device_wait_for_its_processors():
    state = cores(chains(2, 1), [3, 3], [3, 3], ("cpu:0", "cpu:0-1"))
    after = run_pass(make_pass("m-etf"), state)
    assert sorted(after[Schedule].simulation.start_seconds) == [0, 3]


@pytest.mark.parametrize("contiguous", ["true", "false"])
def test_stages_are_on_devices_that_share_no_processor(contiguous):
    state = cores(chains(1, 6), [1] * 6, [0.9] * 6)
    after = run_pass(make_pass("stages", {"contiguous": contiguous, "seconds": "1"}), state)
    assert sorted(np.bincount(after[Placement].device, minlength=3)) == [0, 3, 3]
    assert not (after[Placement].device == 2).any()
    assert "one result every 3000 ms" in gap_said(after)


@pytest.mark.parametrize("contiguous", ["true", "false"])
def test_one_session_on_all_cores_is_better_than_stages_if_it_is_fast(contiguous):
    state = cores(chains(1, 6), [1] * 6, [0.4] * 6)
    after = run_pass(make_pass("stages", {"contiguous": contiguous, "seconds": "1"}), state)
    assert after[Placement].device.tolist() == [2] * 6
    assert "one result every 2400 ms" in gap_said(after)


def test_stages_may_be_pinned_to_devices_that_share_a_processor():
    state = share(random_state(3, 8, 2, pinned=True), [[0], [0]])
    after = run_pass(make_pass("stages", {"seconds": "1"}), state)
    assert run_in_turns(after)


def test_stages_are_not_copied_to_devices_that_share_a_processor():
    state = cores(chains(1, 6), [1] * 6, [1] * 6)
    with pytest.raises(UsageError, match=r"stages on 1 \+ 2 devices need devices that share no processor"):
        run_pass(make_pass("stages", {"replicas": "1;2"}), state)
    after = run_pass(make_pass("stages", {"replicas": "1;1", "seconds": "1"}), state)
    assert set(after[Placement].device.tolist()) == {0, 1}


def test_a_device_whose_processors_others_use_is_not_idle():
    state = cores(chains(1, 2), [1] * 2, [0.9] * 2)
    on_all_cores = run_pass(make_pass("single"), state)
    assert set(on_all_cores[Placement].device.tolist()) == {2}
    assert report_idle_devices(on_all_cores) == []
    on_one_core = run_pass(make_pass("single"), cores(chains(1, 2), [1] * 2, [2] * 2))
    assert [note.where for note in report_idle_devices(on_one_core)] == ["cpu:1"]
