"""Placements keep the pools of memory that devices share, and errors name the pool that lacks memory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Placement, Profile, Schedule, Segments
from onnxplace.passes.placement.exact.exact_solver import solve_exactly
from onnxplace.passes.split import Split
from onnxplace.pipeline.pipeline import Pipeline, make_pass, run_pass
from onnxplace.problem import find_excess, interchangeable_devices, placement_problem
from onnxplace.state import State
from onnxplace.target.target import Pool, Target
from onnxplace.testing.pass_contract import random_state
from tests.passes.placement.test_placers import state_of
from tests.passes.segments.test_memory_limits import commit_by_hand
from tests.simulation.test_pool_peaks import sum_over_time
from tests.support.reference_simulator import even_target, graph_of

PLACERS = (
    "single",
    "m-topo",
    "m-etf",
    "m-sct",
    "fit{seconds=0}",
    "stages{seconds=0}",
    "stages{contiguous=false,seconds=0}",
    "m-etf,adjust{by=memory}",
    "multilevel{proposals=50}",
    "auto{proposals=50}",
    "exact{seconds=0.05}",
)


def pooled(target: Target, limits: list[int], pool_bytes: int, *members: int) -> Target:
    """Return the target with limits of its devices, of which some share a pool."""
    ids = tuple(target.devices[index].id for index in members)
    devices = tuple(replace(device, memory_bytes=size) for device, size in zip(target.devices, limits))
    return replace(target, devices=devices, pools=(Pool(ids, pool_bytes),))


def draw_state(data) -> State:
    """Return a random state on devices of which two or more share a pool, with more or less memory."""
    seed, devices = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(2, 4))
    state = random_state(seed, data.draw(st.integers(1, 20)), devices, pinned=data.draw(st.booleans()))
    alone = int(placement_problem(state).alone_bytes().max())
    limits = [int(alone * data.draw(st.sampled_from([0.4, 0.7, 1.0, 2.0]))) for _ in range(devices)]
    members = data.draw(st.integers(2, devices))
    pool_bytes = int(alone * data.draw(st.sampled_from([0.5, 0.8, 1.0, 1.3])))
    return State(pooled(state.target, limits, pool_bytes, *range(members)), state.facts)


def check_limits(state: State) -> None:
    """Assert that a placement keeps all limits, by a plain sum over time."""
    graph, device, schedule = state[Profile].graph, state[Placement].device, state[Schedule]
    for index, item in enumerate(state.target.devices):
        assert sum_over_time(graph, device, schedule.order, schedule.simulation, [index]) <= item.memory_bytes
    for pool in state.target.pools:
        members = [state.target.position(name) for name in pool.devices]
        assert sum_over_time(graph, device, schedule.order, schedule.simulation, members) <= pool.memory_bytes


@pytest.mark.parametrize("placer", PLACERS)
@settings(deadline=None, derandomize=True, max_examples=40)
@given(data=st.data())
def test_every_placer_keeps_the_limits_of_devices_and_pools_or_says_what_lacks(placer, data):
    state, codes = draw_state(data), set[str]()
    try:
        after, _ = Pipeline.parse(placer).run(state)
    except InfeasibleError as error:
        codes.add(error.code)
    else:
        check_limits(after)
    assert codes <= {"P001", "P002", "P003"}


@settings(deadline=None, derandomize=True, max_examples=20)
@given(st.data())
def test_a_model_that_one_device_holds_within_its_pool_is_always_placed(data):
    seed, devices = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(2, 3))
    state = random_state(seed, data.draw(st.integers(1, 20)), devices)
    needs = int(placement_problem(state).alone_bytes().max())
    state = State(pooled(state.target, [needs] * devices, needs, *range(devices)), state.facts)
    for placer in ("m-etf", "fit{seconds=0}", "stages{seconds=0}", "multilevel{proposals=1}", "single"):
        check_limits(run_pass(Pipeline.parse(placer).passes[0], state))


def chains(size: int) -> State:
    """Return four independent nodes with a weight each, on three devices, of which two share a pool."""
    names = ("a", "b", "c", "d")
    sizes = {**dict.fromkeys(names, 1), **{f"{name}_w": size for name in names}}
    graph = graph_of({name: [] for name in names}, sizes=sizes, weights={name: [f"{name}_w"] for name in names})
    return state_of(graph, [1.0] * 4, even_target(3))


@pytest.mark.parametrize(
    "placer", ["m-topo", "m-etf", "m-sct", "fit{seconds=0}", "stages{seconds=0}", "multilevel{proposals=50}",
               "auto{proposals=50}", "exact{seconds=1}"]
)  # fmt: skip
def test_what_fits_only_within_the_pool_is_found(placer):
    # Each device has room for four nodes, the pool for two: the third device has to take the others.
    state = chains(100)
    state = State(pooled(state.target, [404, 404, 202], 202, 0, 1), state.facts)
    after = run_pass(Pipeline.parse(placer).passes[0], state)
    assert np.bincount(after[Placement].device, minlength=3)[2] == 2
    check_limits(after)


def test_the_proof_of_the_exact_placer_holds_with_pools():
    # Without a pool, two devices take 2 s; with a pool for one node of each step, one device takes 4 s.
    free = chains(0)
    graph = graph_of({name: [] for name in "abcd"}, workspace=dict.fromkeys("abcd", 10))
    state = state_of(graph, [1.0] * 4, even_target(2))
    assert free[Profile].graph.names == graph.names
    for pool_bytes, expected in ((22, 2.0), (11, 4.0)):
        limited = State(pooled(state.target, [22, 22], pool_bytes, 0, 1), state.facts)
        best = solve_exactly(placement_problem(limited), 2.0, 0.0, 0)
        assert best.makespan_seconds == expected
        assert best.bound_seconds <= expected


def test_devices_inside_and_outside_of_a_pool_are_not_interchangeable():
    state = chains(100)
    assert interchangeable_devices(placement_problem(state)).tolist() == [0, 0, 0]
    state = State(pooled(state.target, [404] * 3, 404, 0, 1), state.facts)
    assert interchangeable_devices(placement_problem(state)).tolist() == [0, 0, 2]


@pytest.mark.parametrize("placer", ["single", "m-etf"])
def test_a_pool_that_is_too_small_is_named_with_its_missing_bytes(placer):
    state = chains(100)
    target = state.target.choose_devices(("cpu:0", "cpu:1"))
    state = State(pooled(target, [1000, 1000], 300, 0, 1), state.facts)
    with pytest.raises(InfeasibleError) as caught:
        make_pass(placer).run(state)
    assert "the pool of cpu:0 and cpu:1 lacks " in caught.value.message
    assert "may use 300)" in caught.value.message
    assert "cpu:0 lacks" not in caught.value.message.replace("pool of cpu:0", "")


def test_segments_are_cut_where_only_the_pool_lacks_memory():
    # Two chains of caches, which a segment would hold at one time, on two devices of a pool.
    reads = {f"{side}{i}": [f"{side}_old{i}"] for side in "ab" for i in range(3)}
    graph = graph_of(reads, fed=[row[0] for row in reads.values()], outputs=list(reads))
    state = state_of(graph, [1.0] * 6, even_target(2))
    for pool_bytes, count in ((12, 2), (11, 4), (8, 6)):
        placed = commit_by_hand(
            State(pooled(state.target, [100, 100], pool_bytes, 0, 1), state.facts), [0] * 3 + [1] * 3, [0, 1, 2] * 2
        )
        split = run_pass(Split(), placed)
        assert len(split[Segments].segments) == count
        split[Segments].check(split)
        assert split[Segments].simulation.pool_peak_bytes.max() <= pool_bytes
    smaller = State(pooled(state.target, [100, 100], 7, 0, 1), placed.facts)
    with pytest.raises(InfeasibleError, match=r"the pool of cpu:0 and cpu:1 lacks 1 bytes.* node 'a0'"):
        run_pass(Split(), smaller)
    with pytest.raises(ValueError, match="the pool of cpu:0 and cpu:1 needs 8 bytes of 7"):
        split[Segments].check(smaller)


def test_a_model_that_fits_in_none_of_two_pools_is_refused():
    state = chains(100)
    state = state_of(state[Profile].graph, [1.0] * 4, even_target(4))
    target = replace(state.target, pools=(Pool(("cpu:0", "cpu:1"), 310), Pool(("cpu:2", "cpu:3"), 150)))
    with pytest.raises(InfeasibleError, match=r"the pool of cpu:0 and cpu:1 lacks 91 .* cpu:2 and cpu:3 lacks 251 "):
        make_pass("single").run(State(target, state.facts))
    check_limits(make_pass("m-etf").run(State(target, state.facts)))


def test_what_a_pool_lacks_is_shared_by_what_its_devices_hold():
    graph = graph_of({"a": [], "b": []}, weights={"a": ["v"], "b": ["w"]}, sizes={"a": 0, "b": 0, "v": 90, "w": 30})
    state = state_of(graph, [1.0] * 2, even_target(3))
    problem = placement_problem(State(pooled(state.target, [100] * 3, 100, 0, 1), state.facts))
    step = problem.simulate(np.array([0, 1], dtype=np.int32), graph.order)
    assert problem.excess_bytes(step).tolist() == [15, 5, 0]
    no_bytes = np.zeros(3, dtype=np.int64)
    assert find_excess(problem.target, problem.limit_bytes, step, no_bytes).tolist() == [10, 10, 0]
    limits = [item.limit_bytes.tolist() for item in problem.divide_pools()]
    assert limits == [[100, 100, 100], [50, 50, 100], [100, 0, 100], [0, 100, 100]]
    assert len(list(placement_problem(state).divide_pools())) == 1
