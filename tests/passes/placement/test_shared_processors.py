"""Placers where devices share processors: valid placements, proofs against brute force, and which devices work at once."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Groups, Placement, Profile, Schedule
from onnxplace.passes.placement.exact.branch_and_bound import branch_and_bound_search, build_tables
from onnxplace.pipeline.pipeline import Pipeline, make_pass, run_pass
from onnxplace.problem import interchangeable_devices, placement_problem
from onnxplace.target.target import LINK_MODELS, Device, Target
from onnxplace.testing.pass_contract import random_state
from tests.passes.placement.exact.test_exact import brute_force, gap_said
from tests.passes.placement.test_placers import state_of
from tests.support.reference_simulator import graph_of

seeds = st.integers(0, 2**32 - 1)
cases = settings(deadline=None, derandomize=True, max_examples=40)

# Placers with few moves, so that results do not depend on the clock.
SEARCHED = ("auto{seconds=0,proposals=60}", "multilevel{seconds=0,proposals=60}")
PLACERS = ("m-topo", "m-etf", "m-sct", "single", "exact{seconds=2}", "stages{seconds=0.2}", *SEARCHED)


def shared(state, processors):
    """Return a state whose devices compute on these processors."""
    devices = tuple(
        replace(device, processors=tuple(f"core{number}" for number in numbers))
        for device, numbers in zip(state.target.devices, processors)
    )
    return replace(state, target=replace(state.target, devices=devices))


@st.composite
def states(draw, nodes, devices=(2, 3), *, tight=False):
    """Draw a state with devices on one or more of three processors."""
    facts = (Profile, Groups) if draw(st.booleans()) else (Profile,)
    count = draw(st.integers(*devices))
    state = random_state(draw(seeds), draw(st.integers(*nodes)), count, facts=facts, tight=tight, pinned=True)
    state = replace(state, target=replace(state.target, link_model=draw(st.sampled_from(LINK_MODELS))))
    some = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)
    return shared(state, draw(st.lists(some, min_size=count, max_size=count)))


def run_alone(state):
    """Return whether no two nodes of devices with a common processor overlap."""
    device, simulation = state[Placement].device, state[Schedule].simulation
    start, finish = simulation.start_seconds, simulation.finish_seconds
    overlap = (start[:, None] < finish) & (start < finish[:, None]) & ~np.eye(len(start), dtype=bool)
    return not (overlap & state.target.conflicts[np.ix_(device, device)]).any()


@pytest.mark.parametrize("placer", PLACERS)
@settings(deadline=None, derandomize=True, max_examples=15)
@given(states((1, 14), (2, 4)))
def test_placements_are_valid_and_no_two_nodes_run_on_one_processor(placer, state):
    try:
        after = run_pass(make_pass(*parse(placer)), state)
    except InfeasibleError as error:
        assert placer == "single" and error.code == "P003"
        return
    assert run_alone(after)
    assert after[Schedule].lower_bound_seconds <= after[Schedule].simulation.makespan_seconds


def parse(text):
    name, _, rest = text.partition("{")
    return name, dict(item.split("=") for item in rest.rstrip("}").split(",") if item)


@cases
@given(states((1, 5)))
def test_exact_is_the_best_of_all_steps_with_turns_on_processors(state):
    best = brute_force(placement_problem(state))
    after = run_pass(make_pass("exact", {"gap": "0", "seconds": "20"}), state)
    assert after[Schedule].lower_bound_seconds <= best * (1 + 1e-9)
    assert after[Schedule].simulation.makespan_seconds >= best * (1 - 1e-9)
    proven = gap_said(after).startswith("optimal:")
    if proven:
        assert after[Schedule].simulation.makespan_seconds == pytest.approx(best, rel=1e-9)
    print("PROVEN" if proven else f"OPEN {after[Schedule].simulation.makespan_seconds/best-1:.3f} {after[Schedule].lower_bound_seconds/best-1:.3f}", state.target.link_model, len(state.target.devices))


@cases
@given(states((1, 5)))
def test_bounds_of_the_search_hold_with_shared_processors(state):
    problem = placement_problem(state)
    best, tables = brute_force(problem), build_tables(problem)
    for width in (1, 3, 1000):
        for variant in (tables, tables._replace(receives=True, delays=True)):
            result = branch_and_bound_search(problem, variant, np.inf, 1e-9, width, np.inf)
            assert result.bound_seconds <= best * (1 + 1e-9)
            assert result.makespan_seconds >= best * (1 - 1e-9)
