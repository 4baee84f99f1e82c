"""The search behind `multilevel`, `auto` and `refine`: its simulation, its moves, and what comes of it."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.errors import BrokenPassError, InfeasibleError
from onnxplace.facts import Groups, Placement, Profile, Quality, Schedule
from onnxplace.passes.placement.search import placement_search, portfolio
from onnxplace.passes.placement.search.anneal_kernels import (
    BIASED_NODE,
    CHAIN_LENGTH,
    REGION_SIZE,
    accept,
    build_atoms,
    propose,
    start_state,
    undo,
)
from onnxplace.passes.placement.search.decode_kernels import (
    AHEAD,
    NOTHING,
    build_wiring,
    decode,
    new_scratch,
    run_order,
)
from onnxplace.passes.placement.search.heft_kernels import critical_path_plan
from onnxplace.passes.placement.search.placement_search import (
    WORK_SHARES,
    Budget,
    Explored,
    SearchSpace,
    coarsen,
    decode_candidate,
    evaluate_candidate,
    explore,
    improve,
    place_on_one_device,
    project,
)
from onnxplace.passes.placement.search.portfolio import MAX_COST_ERROR, estimate_cost_error
from onnxplace.pipeline.pipeline import Pipeline, make_pass, run_pass
from onnxplace.problem import placement_problem
from onnxplace.target.target import LINK_MODELS, Device, Target
from onnxplace.testing.pass_contract import check_pass, random_state
from tests.passes.placement.test_placers import state_of
from tests.support.reference_simulator import even_target, graph_of, share_at_random, share_processors

FEW_PROPOSALS = {"seconds": "0", "proposals": "300"}
seeds = st.integers(0, 2**32 - 1)
thorough = settings(deadline=None, derandomize=True, max_examples=150)


def without_calls(target, link_model):
    """Return a target whose cuts cost transfers only, as in the simulator."""
    devices = tuple(replace(device, segment_seconds=0.0) for device in target.devices)
    return replace(target, link_model=link_model, devices=devices)


@st.composite
def problems(draw, facts=(Profile,), tight=False, shared=False):
    state = random_state(
        draw(seeds), draw(st.integers(1, 40)), draw(st.integers(1, 4)), facts=facts, tight=tight, pinned=True
    )
    target = without_calls(state.target, draw(st.sampled_from(LINK_MODELS)))
    target = share_at_random(target, np.random.default_rng(draw(seeds))) if shared else target
    return placement_problem(replace(state, target=target))


def place_at_random(problem, random):
    home = random.integers(0, len(problem.target.devices), len(problem.pinned))
    return np.where(problem.pinned >= 0, problem.pinned, home)[problem.group].astype(np.int32)


def score(problem, device, bias, level_weight=1.0, limit=np.inf):
    wiring = build_wiring(problem.graph, problem.seconds, problem.target)
    scratch = new_scratch(wiring)
    return decode(wiring, device, bias, level_weight, limit, scratch), scratch


# ---------------------------------------------------------------------------------------------- simulation


def require_agreement(problem, seed, level_weight):
    """Assert that search and simulator agree on a random placement with random urgencies."""
    random = np.random.default_rng(seed)
    device = place_at_random(problem, random)
    (seconds, traffic), scratch = score(problem, device, random.normal(size=len(device)), level_weight)
    simulation = problem.simulate(device, run_order(problem.graph, scratch))
    assert seconds == pytest.approx(simulation.finish_seconds.max(), rel=1e-12)
    assert scratch.start == pytest.approx(simulation.start_seconds, rel=1e-12, abs=1e-15)
    transfers = simulation.transfers
    assert traffic == pytest.approx((transfers.finish_seconds - transfers.start_seconds).sum(), rel=1e-9, abs=1e-15)


@thorough
@given(st.one_of(problems(), problems(shared=True)), seeds, st.sampled_from([0.0, 1.0]))
def test_what_the_search_scores_is_what_the_simulator_says(problem, seed, level_weight):
    require_agreement(problem, seed, level_weight)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("link_model", LINK_MODELS)
def test_the_search_and_the_simulator_agree_on_nodes_that_take_no_time(link_model, shared):
    """Where most nodes take no time, many run at one instant on one device: their order is not in their times."""
    for seed in range(150):
        state = random_state(seed, nodes=24, devices=3 if shared else 2)
        if shared:
            state = replace(state, target=share_at_random(state.target, np.random.default_rng(seed)))
        profile = state[Profile]
        kept = np.arange(24) % 4 == seed % 4
        seconds = {name: np.where(kept, costs, 0.0) for name, costs in profile.seconds.items()}
        state = replace(state, target=without_calls(state.target, link_model))
        problem = placement_problem(state.with_facts(replace(profile, seconds=seconds)))
        require_agreement(problem, seed, level_weight=float(seed % 2))


@thorough
@given(st.one_of(problems(), problems(shared=True)), seeds, st.floats(0.2, 1.5))
def test_a_simulation_stops_exactly_when_the_limit_is_exceeded(problem, seed, share):
    random = np.random.default_rng(seed)
    device, none = place_at_random(problem, random), np.zeros(len(problem.graph))
    (seconds, _), _ = score(problem, device, none)
    (limited, _), _ = score(problem, device, none, limit=share * seconds)
    assert limited == (seconds if share >= 1.0 or seconds == 0.0 else np.inf)


def test_more_urgent_nodes_run_first():
    # One source, then a long and a short branch on the same device.
    graph = graph_of({"a": [], "short": ["a"], "long": ["a"]})
    problem = placement_problem(state_of(graph, [1.0, 1.0, 5.0], even_target(1)))
    _, scratch = score(problem, np.zeros(3, dtype=np.int32), np.zeros(3))
    assert scratch.start.tolist() == [0.0, 6.0, 1.0]
    _, scratch = score(problem, np.zeros(3, dtype=np.int32), np.array([0.0, 100.0, 0.0]))
    assert scratch.start.tolist() == [0.0, 1.0, 2.0]


def test_a_node_that_waited_for_its_processor_names_the_one_that_had_it():
    graph = graph_of({"a": [], "b": [], "c": []})
    problem = placement_problem(state_of(graph, [4.0, 1.0, 2.0], share_processors(even_target(3), "x", "y", "x y")))
    (seconds, _), scratch = score(problem, np.array([0, 1, 2], dtype=np.int32), np.zeros(3))
    assert seconds == 6.0
    assert scratch.blame.tolist() == [-1, -1, 0]
    assert scratch.blame_kind.tolist() == [NOTHING, NOTHING, AHEAD]


def test_the_search_moves_work_from_a_busy_processor_to_an_idle_one():
    graph = graph_of({f"n{index}": [] for index in range(8)})
    for names, best in ((["x", "x", "y"], 4), (["x", "y", "x y"], 4), (["x", "x", "x"], 8)):
        state = state_of(graph, [1.0] * 8, share_processors(even_target(3), *names))
        done = run_pass(make_pass("multilevel", FEW_PROPOSALS), state)
        assert done[Schedule].simulation.makespan_seconds == done[Schedule].lower_bound_seconds == best


def test_a_cut_costs_a_call_on_both_sides():
    graph = graph_of({"a": [], "b": ["a"]})
    target = even_target(2)
    calls = tuple(replace(device, segment_seconds=0.5) for device in target.devices)
    none = tuple(replace(device, segment_seconds=0.0) for device in target.devices)
    free, dear = (placement_problem(state_of(graph, [1.0, 1.0], replace(target, devices=d))) for d in (none, calls))
    apart = np.array([0, 1], dtype=np.int32)
    assert score(dear, apart, np.zeros(2))[0][0] == score(free, apart, np.zeros(2))[0][0] + 1.0
    assert score(dear, 0 * apart, np.zeros(2))[0][0] == 2.0


# ---------------------------------------------------------------------------------------------- moves


@thorough
@given(problems(facts=(Profile, Groups)), seeds)
def test_moves_keep_groups_and_pins_and_can_be_undone(problem, seed):
    if len(problem.target.devices) < 2:
        return
    random = np.random.default_rng(seed)
    device = place_at_random(problem, random)
    wiring, atoms = build_wiring(problem.graph, problem.seconds, problem.target), build_atoms(problem)
    scratch, walk = (
        new_scratch(wiring),
        start_state(device, np.zeros(len(device)), len(problem.pinned), seed),
    )
    for _ in range(40):
        walk.times[3], walk.times[4] = decode(wiring, walk.device, walk.bias, 1.0, np.inf, scratch)
        accept(scratch, walk)
        assert 0 < walk.counts[CHAIN_LENGTH] <= len(device)
        before, bias = walk.device.copy(), walk.bias.copy()
        propose(len(wiring.latency), atoms, walk)
        home = np.full(len(problem.pinned), -1)
        home[problem.group] = walk.device
        assert (home[problem.group] == walk.device).all()
        assert ((problem.pinned < 0) | (problem.pinned == home)).all()
        assert (walk.device != before).any() == (walk.counts[REGION_SIZE] > 0)
        assert (walk.bias == bias).all() or walk.counts[BIASED_NODE] >= 0
        moved = walk.device.copy()
        undo(atoms, walk)
        assert (walk.device == before).all()
        assert (walk.bias == bias).all()
        walk.device[:] = moved


@thorough
@given(problems(facts=(Profile, Groups)), seeds)
def test_a_search_is_deterministic_and_never_worse_than_its_start(problem, seed):
    space = SearchSpace(problem)
    device = place_at_random(problem, np.random.default_rng(seed))
    start = decode_candidate(space, "random", device, np.zeros(len(device)), 1.0)
    if not space.fits(start.device, start.order):
        return
    best, proposals = improve(space, start, Budget(0, 60), 7)
    repeated, _ = improve(space, start, Budget(0, 60), 7)
    assert best.seconds <= start.seconds
    assert proposals <= 60
    assert best.device.tolist() == repeated.device.tolist()
    assert best.bias.tolist() == repeated.bias.tolist()
    assert space.fits(best.device, best.order)


@thorough
@given(problems(facts=(Profile, Groups)), seeds)
def test_coarser_levels_keep_groups_and_project_to_finer_ones(problem, seed):
    ladder = coarsen(problem)
    for fine, coarse in pairwise(ladder):
        assert len(coarse.problem.pinned) < len(fine.problem.pinned)
        assert len(coarse.problem.graph) <= len(fine.problem.graph)
        assert len(coarse.problem.graph.order) == len(coarse.problem.graph)
        assert coarse.problem.seconds.sum() == pytest.approx(fine.problem.seconds.sum())
        device = place_at_random(coarse.problem, np.random.default_rng(seed))
        down = device[coarse.cluster]
        for group in range(len(fine.problem.pinned)):
            assert len(set(down[fine.problem.group == group].tolist())) <= 1
        pin = fine.problem.pinned[fine.problem.group]
        assert ((pin < 0) | (pin == down)).all()
        spaces = SearchSpace(fine.problem), SearchSpace(coarse.problem)
        best = evaluate_candidate(spaces[1], "random", device, coarse.problem.graph.order)
        if best and (projected := project(spaces[0], best, coarse.cluster)):
            assert projected.device.tolist() == down.tolist()


def test_a_value_with_one_reader_is_joined_before_one_with_many():
    # Sixteen readers have to follow "wide" to save its transfer; one is enough for "narrow", which is smaller.
    readers = {f"r{index:02}": ["wide"] for index in range(16)}
    reads = {"wide": [], **readers, "narrow": [], "end": ["narrow"]}
    sizes = {"wide": 1000, "narrow": 900} | dict.fromkeys((*readers, "end"), 1)
    problem = placement_problem(
        state_of(graph_of(reads, sizes=sizes), [1.0] * len(reads), even_target(2, memory_bytes=1 << 40))
    )
    first = coarsen(problem)[1]
    names = list(reads)
    assert (
        first.problem.group[first.cluster[names.index("narrow")]]
        == first.problem.group[first.cluster[names.index("end")]]
    )
    assert first.cluster[names.index("wide")] != first.cluster[names.index("r15")]


def test_the_largest_values_are_joined_first_and_no_node_gets_too_much_work():
    # Twenty chains of twenty nodes; the value in the middle of each is small, the others are large.
    reads = {f"{c}.{n}": [f"{c}.{n - 1}"] if n else [] for c in range(20) for n in range(20)}
    sizes = {name: 1 if name.endswith(".9") else 1000 for name in reads}
    problem = placement_problem(state_of(graph_of(reads, sizes=sizes), [1.0] * 400, even_target(2)))
    ladder = coarsen(problem)
    assert [len(level.problem.graph) for level in ladder] == sorted(
        (len(level.problem.graph) for level in ladder), reverse=True
    )
    assert all(level.problem.seconds.max() <= WORK_SHARES[-1] * 200 for level in ladder)
    halves = next(level for level in ladder if level.problem.seconds.max() > 5).problem
    names = np.array(list(reads))
    for cluster in range(len(halves.graph)):
        members = names[halves.members == cluster].tolist()
        assert not {name.split(".")[1] for name in members} >= {"9", "10"}


# ---------------------------------------------------------------------------------------------- plans


@thorough
@given(
    st.one_of(problems(facts=(Profile, Groups)), problems(facts=(Profile, Groups), shared=True)),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_list_schedules_by_bottom_level_keep_groups_and_pins_and_run_inputs_first(problem, weight):
    device, start = critical_path_plan(problem, build_wiring(problem.graph, problem.seconds, problem.target), weight)
    assert (device >= 0).all()
    for group in range(len(problem.pinned)):
        assert len(set(device[problem.group == group].tolist())) == 1
    pin = problem.pinned[problem.group]
    assert ((pin < 0) | (pin == device)).all()
    before = problem.graph.predecessors
    assert (start[before.items] <= start[before.rows] + 1e-12).all()
    for users in problem.target.processors.T:
        own = np.flatnonzero(users[device])
        own = own[np.lexsort((problem.seconds[device[own], own], start[own]))]
        finish = start[own] + problem.seconds[device[own], own]
        assert (start[own[1:]] >= finish[:-1] - 1e-12).all()


def test_a_chain_stays_where_it_runs_fastest():
    graph = graph_of({"a": [], "b": ["a"], "c": ["b"]})
    target = Target((Device("cpu:0", 1 << 40), Device("cuda:0", 1 << 40)))
    problem = placement_problem(state_of(graph, [[5.0] * 3, [1.0] * 3], target))
    device, start = critical_path_plan(problem, build_wiring(problem.graph, problem.seconds, target), 1.0)
    assert device.tolist() == [1, 1, 1]
    assert start.tolist() == [0.0, 1.0, 2.0]


def test_weights_that_fill_a_device_send_the_rest_to_the_next():
    graph = graph_of({"a": [], "b": []}, weights={"a": ["v"], "b": ["w"]}, sizes={"v": 60, "w": 60})
    target = even_target(2, memory_bytes=100)
    problem = placement_problem(state_of(graph, [1.0, 1.0], target))
    device, _ = critical_path_plan(problem, build_wiring(problem.graph, problem.seconds, target), 1.0)
    assert sorted(device.tolist()) == [0, 1]
    full = placement_problem(state_of(graph, [1.0, 1.0], even_target(1, memory_bytes=100)))
    device, _ = critical_path_plan(full, build_wiring(full.graph, full.seconds, full.target), 1.0)
    assert sorted(device.tolist()) == [-1, 0]


# ---------------------------------------------------------------------------------------------- placers


@pytest.mark.parametrize("name", ["multilevel", "auto", "refine"])
def test_searching_passes_keep_the_contract_of_passes(name):
    check_pass(lambda: make_pass(name, {**FEW_PROPOSALS, "proposals": "40"}))


def makespan(state, *passes):
    for placement_pass in passes:
        state = run_pass(placement_pass, state)
    return state[Schedule].simulation.makespan_seconds


@pytest.mark.parametrize("family", sorted(GENERATORS))
@pytest.mark.parametrize("groups", ["", "coplace{join=never}", "coplace{join=always},fuse"])
def test_auto_is_never_worse_than_other_placers_and_refine_than_its_input(family, groups):
    state = GENERATORS[family](150, 3).state()
    if groups:
        state, _ = Pipeline.parse(groups).run(state)
    others = {name: makespan(state, make_pass(name)) for name in ("single", "m-topo", "m-etf", "m-sct")}
    assert makespan(state, make_pass("auto", FEW_PROPOSALS)) <= min(others.values()) * (1 + 1e-12)
    for name in ("m-topo", "m-etf"):
        refined = makespan(state, make_pass(name), make_pass("refine", FEW_PROPOSALS))
        assert refined <= others[name] * (1 + 1e-12)


@thorough
@given(seeds, st.integers(1, 30), st.integers(1, 4), st.booleans())
def test_auto_fits_wherever_another_placer_does(seed, nodes, devices, pinned):
    state = random_state(seed, nodes, devices, facts=(Profile, Groups), tight=True, pinned=pinned)
    # Calls of segments cost nothing, so that the schedule shows all that auto counts.
    free = tuple(replace(device, segment_seconds=0.0) for device in state.target.devices)
    state = replace(state, target=replace(state.target, devices=free))
    fits = []
    for name in ("single", "m-topo", "m-etf", "m-sct"):
        try:
            fits.append(makespan(state, make_pass(name)))
        except InfeasibleError:
            continue
    try:
        best = makespan(state, make_pass("auto", {**FEW_PROPOSALS, "proposals": "50"}))
    except InfeasibleError:
        assert not fits
    else:
        assert best <= min(fits, default=np.inf) * (1 + 1e-12)


def test_a_note_of_auto_lists_the_plans_and_the_gap():
    state = run_pass(make_pass("auto", FEW_PROPOSALS), GENERATORS["layered"](100, 0).state())
    (note,) = [note for note in state.diagnostics if note.code == "P040"]
    assert state[Placement].placer == "auto"
    for word in ("kept", "over the lower bound", "m-topo", "m-etf", "m-sct", "cuda:0", "moves"):
        assert word in note.message


@pytest.mark.parametrize(
    ("gains", "options", "rounds"),
    [
        ([0.0], {"eager": "true"}, 1),
        ([0.1, 0.0], {"eager": "true"}, 2),
        ([0.1, 0.1, 0.0], {"eager": "true", "seconds": "0"}, 3),
        ([0.1], {"eager": "true", "seconds": "1e-9"}, 1),
        ([0.1], {}, 1),
    ],
    ids=["nothing gained", "then nothing", "always gained", "no time left", "not eager"],
)
def test_an_eager_search_goes_on_while_that_gains_something(monkeypatch, gains, options, rounds):
    proposals = []

    def explored(ladder, given, budget, *others):
        best = min(given, key=lambda candidate: candidate.seconds)
        proposals.append(budget.proposals)
        return Explored(replace(best, seconds=best.seconds * (1 - gains[len(proposals) - 1])), 1)

    monkeypatch.setattr(portfolio, "explore", explored)
    monkeypatch.setattr(portfolio, "plan_blocks", lambda *_: [])
    monkeypatch.setattr(portfolio, "_goal_seconds", lambda problem: 0.0)
    state = run_pass(make_pass("auto", {"seconds": "10", **options}), GENERATORS["layered"](100, 0).state())
    assert len(proposals) == rounds
    assert proposals == sorted(proposals)
    assert all(proposals) == ("eager" in options)
    assert f"{rounds} moves" in state.diagnostics[-1].message


def test_an_eager_search_ends_near_the_lower_bound(monkeypatch):
    budgets, actual = [], portfolio.explore
    monkeypatch.setattr(portfolio, "explore", lambda *args: budgets.append(args[2]) or actual(*args))
    monkeypatch.setattr(portfolio, "NEAR_BOUND_RATIO", 1e9)
    run_pass(make_pass("auto", {"seconds": "0.3", "eager": "true"}), GENERATORS["layered"](100, 0).state())
    assert len(budgets) == 1


def test_an_eager_search_does_not_begin_where_one_device_is_near_the_bound(monkeypatch):
    """A chain: several devices gain nothing."""
    monkeypatch.setattr(portfolio, "plan_blocks", lambda *_: pytest.fail("blocks are searched"))
    state = state_of(graph_of({"a": [], "b": ["a"], "c": ["b"], "d": []}), [1.0, 1.0, 1.0, 0.02], even_target(2))
    message = run_pass(make_pass("auto", {"eager": "true"}), state).diagnostics[-1].message
    assert "moves" not in message
    assert "cpu:0" in message
    monkeypatch.undo()
    assert "moves" in run_pass(make_pass("auto", FEW_PROPOSALS), state).diagnostics[-1].message


def test_a_defect_behind_the_search_is_not_hidden(monkeypatch):
    def fail(*_):
        raise KeyError("defect")

    monkeypatch.setattr(portfolio, "_simulate_if_fitting", fail)
    with pytest.raises(BrokenPassError, match="KeyError"):
        run_pass(make_pass("auto", FEW_PROPOSALS), GENERATORS["layered"](20, 0).state())


def measured(state, runs, spread):
    """Return a state whose times were measured in so many runs, with this spread as a share of each."""
    profile = state[Profile]
    quality = {name: Quality(runs, spread, 0.0, 0.0, 1, 1.0, 0.0) for name in profile.seconds}
    spreads = {name: spread * seconds for name, seconds in profile.seconds.items()}
    return state.with_facts(replace(profile, spread=spreads, quality=quality))


def test_the_error_of_a_step_falls_with_runs_and_with_independent_nodes():
    state = state_of(graph_of({name: [] for name in "abcd"}), [1.0] * 4, even_target(2))
    assert estimate_cost_error(state[Profile]) == 0.0
    assert estimate_cost_error(measured(state, 100, 0.1)[Profile]) == pytest.approx(1.86 * 0.1 / 2 / 10)
    assert estimate_cost_error(measured(state, 100, 0.05)[Profile]) == pytest.approx(1.86 * 0.05 / 2 / 10)
    assert estimate_cost_error(measured(state, 1, 1.0)[Profile]) == MAX_COST_ERROR


@settings(deadline=None, derandomize=True, max_examples=25)
@given(seeds, st.sampled_from(sorted(GENERATORS)), st.integers(12, 80), st.sampled_from([0.0, 0.02, 0.5]))
def test_a_search_that_stops_early_is_never_worse_than_a_placer_that_it_tried(seed, family, nodes, spread):
    state = GENERATORS[family](nodes, seed % 1000).state()
    state = measured(state, 10, spread) if spread else state
    placed = run_pass(make_pass("auto", {"eager": "true", "seconds": "0"}), state)
    step = placed[Schedule].simulation.makespan_seconds
    assert step <= min(figure.seconds for figure in placed.diagnostics[-1].figures)
    assert placed[Schedule].lower_bound_seconds <= step


def test_an_eager_search_ends_where_costs_cannot_tell_its_step_from_the_bound(monkeypatch):
    goals, actual = [], portfolio.explore
    monkeypatch.setattr(portfolio, "explore", lambda *args: goals.append(args[4]) or actual(*args))
    state = GENERATORS["layered"](60, 0).state()
    for options in ({"eager": "true"}, {}):
        run_pass(make_pass("auto", {"seconds": "0", "proposals": "200", **options}), measured(state, 1, 1.0))
    assert max(goals) == pytest.approx(min(goals) * (1 + MAX_COST_ERROR))
    assert goals[-1] == min(goals)  # without `eager`, it goes on to the bound itself


def test_independent_work_is_spread_evenly():
    graph = graph_of({name: [] for name in "abcdefgh"})
    best = makespan(state_of(graph, [1.0] * 8, even_target(4)), make_pass("multilevel", FEW_PROPOSALS))
    assert best == 2.0


def test_work_that_cannot_be_spread_stays_together():
    graph = graph_of({"a": [], "b": ["a"], "c": ["b"], "d": ["c"]}, sizes=dict.fromkeys("abc", 1 << 30))
    state = run_pass(make_pass("auto", FEW_PROPOSALS), state_of(graph, [1.0] * 4, even_target(3)))
    assert len(set(state[Placement].device.tolist())) == 1


def test_a_slow_device_is_the_last_resort():
    # Three weights, two of which the fast device can hold.
    weights = {"a": ["u"], "b": ["v"], "c": ["w"]}
    graph = graph_of({"a": [], "b": ["a"], "c": ["b"]}, weights=weights, sizes=dict.fromkeys("uvw", 40))
    target = Target((Device("cuda:0", 100), Device("cpu:0", 1 << 40)))
    state = run_pass(make_pass("auto", FEW_PROPOSALS), state_of(graph, [[1.0] * 3, [50.0] * 3], target))
    assert sorted(state[Placement].device.tolist()) == [0, 0, 1]


@settings(thorough, max_examples=60)
@given(seeds, st.integers(1, 25), st.integers(2, 4), st.sampled_from([1.0, 3.0, 100.0]))
def test_on_unlike_devices_auto_is_never_worse_than_the_best_device_that_fits(seed, nodes, devices, slowest):
    random = np.random.default_rng(seed)
    state = random_state(seed, nodes, devices, facts=(Profile, Groups))
    profile, target = state[Profile], state.target
    # The last device is the slowest, and the only one that surely holds everything.
    share = np.append(random.uniform(0.05, 1, devices - 1), 1.0)
    slower = np.append(random.uniform(1, slowest, devices - 1), slowest)
    unlike = tuple(
        replace(device, model=f"kind {index}", memory_bytes=int(device.memory_bytes * part), segment_seconds=0.0)
        for index, (device, part) in enumerate(zip(target.devices, share))
    )
    first = target.devices[0].cost_class
    seconds = {device.cost_class: profile.seconds[first] * times for device, times in zip(unlike, slower)}
    sources = dict.fromkeys(seconds, profile.sources[first])
    state = replace(state, target=replace(target, devices=unlike)).with_facts(
        replace(profile, seconds=seconds, sources=sources, whole_seconds={}), state[Groups]
    )
    simulation = run_pass(make_pass("auto", {**FEW_PROPOSALS, "proposals": "50"}), state)[Schedule].simulation
    problem = placement_problem(state)
    assert not problem.excess_bytes(simulation).any()
    for device in range(devices):
        alone = problem.simulate(place_on_one_device(problem, device), problem.graph.order)
        if not problem.excess_bytes(alone).any():
            assert simulation.makespan_seconds <= alone.makespan_seconds * (1 + 1e-12)


def test_where_everything_is_pinned_there_is_nothing_to_search():
    graph = graph_of({"a": [], "b": ["a"]})
    state = state_of(graph, [1.0, 1.0], even_target(2), groups=[0, 1], pins=[1, 0])
    assert run_pass(make_pass("auto", FEW_PROPOSALS), state)[Placement].device.tolist() == [1, 0]


def test_one_device_for_the_rest_of_a_pinned_graph():
    graph = graph_of({"a": [], "b": ["a"], "c": ["a"]})
    problem = placement_problem(state_of(graph, [1.0] * 3, even_target(2), groups=[0, 1, 2], pins=[-1, 1, -1]))
    assert place_on_one_device(problem, 0).tolist() == [0, 1, 0]


# ---------------------------------------------------------------------------------------------- promising candidates


def record_starts(monkeypatch):
    """Note the nodes of the problem and the start of each search."""
    starts = []

    def note(space, start, budget, *arguments, **options):
        if budget.proposals > 1:  # not the call that compiles the loops
            starts.append((len(space.problem.graph), start.name))
        return improve(space, start, budget, *arguments, **options)

    monkeypatch.setattr(placement_search, "improve", note)
    return starts


@pytest.mark.parametrize("is_promising", [False, True])
def test_one_of_the_first_searches_starts_from_a_promising_candidate(monkeypatch, is_promising):
    problem = placement_problem(GENERATORS["layered"](600, 0).state())
    space, ladder = SearchSpace(problem), coarsen(problem)
    assert len(ladder) > 2, "else no coarser version would be left out"
    random = place_at_random(problem, np.random.default_rng(0))
    candidate = evaluate_candidate(space, "promising", random, problem.graph.order)
    starts = record_starts(monkeypatch)
    explored = explore(ladder, [candidate], Budget(0, 300), 0, 0.0, candidate if is_promising else None)
    assert ((len(problem.graph), "promising") in starts) == is_promising
    coarsest, finer = len(ladder[-1].problem.graph), len(ladder[1].problem.graph)
    searched = {nodes for nodes, _ in starts}
    assert coarsest in searched
    assert explored.best.seconds < candidate.seconds
    assert len([nodes for nodes, _ in starts if nodes == finer]) == (1 if is_promising else 2)


@given(problems(facts=(Profile, Groups)), seeds)
def test_a_search_with_a_cancelled_budget_ends(problem, seed):
    space = SearchSpace(problem)
    start = decode_candidate(
        space, "random", place_at_random(problem, np.random.default_rng(seed)), np.zeros(len(problem.graph)), 1.0
    )
    budget = Budget(0, 0)
    budget.cancelled.set()
    best, proposals = improve(space, start, budget.part(0.5), 7)
    assert proposals == 0
    assert best.seconds <= start.seconds
