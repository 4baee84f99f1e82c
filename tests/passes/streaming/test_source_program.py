"""The integer program that chooses devices and sources: against all choices, with many slots, and spread evenly."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.passes.streaming.source_program import DISK, HOST, RESIDENT, SourceProblem, choose_sources


def make_problem(slots, devices=2, room=0.5, seed=0, kinds=3, pool=8 << 20):
    """Return slots of some kinds on devices of which the first is fastest, with room for a part of the weights."""
    random = np.random.default_rng(seed)
    kind = np.arange(slots, dtype=np.int32) % kinds
    size = random.integers(1, 9, kinds)[kind] * (1 << 20)
    first = int(room * size.sum()) + pool - 2000 * (seed % 2)
    seconds = np.stack([size / 1e9 * (1 + 9 * device) for device in range(devices)])
    return SourceProblem(
        seconds=seconds,
        streaming_seconds=seconds * random.uniform(1, 2, kinds)[kind],
        held_bytes=np.full((devices, slots), 1000),
        streamed_bytes=np.tile(size, (devices, 1)),
        crossing_seconds=np.full((devices, slots), 1e-4),
        room_bytes=np.array([first, *[2 * int(size.sum())] * (devices - 1)]),
        pool_bytes=np.full(devices, pool),
        host_bytes=float(size.sum()) / 3,
        rates=np.stack([np.full(devices, np.inf), [2e9] + [0.0] * (devices - 1), np.full(devices, 0.7e9)]),
        group=np.arange(slots, dtype=np.int32),
    )


def find_step(problem, device, source):
    """Return the step of a choice, and whether it keeps all limits: from the definition, slot by slot."""
    at = device, np.arange(len(device))
    held = source == RESIDENT
    seconds = np.where(held, problem.seconds[at], problem.streaming_seconds[at]).sum()
    seconds += problem.crossing_seconds[at][1:][device[1:] != device[:-1]].sum()
    moved = np.where(held, 0, problem.streamed_bytes[at])
    steps = [seconds, moved[source == DISK].sum() / problem.rates[DISK].max()]
    fits = moved[source == HOST].sum() <= problem.host_bytes
    for index, room in enumerate(problem.room_bytes):
        own = device == index
        with np.errstate(divide="ignore", invalid="ignore"):
            steps.append(float((moved[own] / problem.rates[source, device][own]).sum()))
        stays = problem.held_bytes[at][own].sum() + problem.streamed_bytes[at][own & held].sum()
        fits &= stays + problem.pool_bytes[index] * moved[own].any() <= room
    return max(steps), bool(fits and (problem.rates[source, device] > 0).all())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.floats(0.0, 1.1), st.integers(1, 2))
def test_no_choice_is_clearly_shorter(seed, room, devices):
    problem = make_problem(3, devices, room, seed, pool=64 << 20)  # blocks are small next to the pool
    choice, steps = choose_sources(problem), []
    for devices_, sources in product(product(range(devices), repeat=3), product((RESIDENT, HOST, DISK), repeat=3)):
        step, fits = find_step(problem, np.array(devices_), np.array(sources))
        steps += [step] if fits else []
    if choice is None:
        assert not steps
        return
    step, fits = find_step(problem, choice.device, choice.source)
    assert fits
    # Ties are decided by a thousandth of seconds and streams; the search ends two thousandths from the bound.
    assert step <= min(steps) * 1.01
    assert choice.bound_seconds <= step * 1.01


@pytest.mark.parametrize("devices", [1, 2])
def test_many_slots_are_placed_in_runs_within_all_limits(devices, monkeypatch):
    problem = make_problem(60, devices, room=0.3)
    exact = choose_sources(problem)
    monkeypatch.setattr("onnxplace.passes.streaming.source_program.MAX_BINARIES", 40)
    choice = choose_sources(problem)
    step, fits = find_step(problem, choice.device, choice.source)
    assert fits
    assert choice.bound_seconds <= step <= 1.25 * find_step(problem, exact.device, exact.source)[0]


def test_weights_of_nodes_that_lose_most_stay():
    problem = make_problem(20, devices=1, kinds=2)
    size = np.full((1, 20), 4 << 20)
    factor = np.where(np.arange(20) % 2 == 0, 50.0, 1.1)
    problem = replace(
        problem, streamed_bytes=size, seconds=np.full((1, 20), 1e-3), streaming_seconds=1e-3 * factor[None]
    )
    problem = replace(problem, room_bytes=np.array([48 << 20]))
    choice = choose_sources(problem)
    assert (choice.source[::2] == RESIDENT).sum() >= 9


def test_equal_slots_stream_in_turns():
    problem = make_problem(24, devices=1, room=0.5, kinds=1)
    moves = choose_sources(problem).source != RESIDENT
    places = np.flatnonzero(moves)
    assert 8 <= len(places) <= 16
    assert max(np.diff(places)) <= 6


def test_slots_of_one_group_share_a_device():
    problem = make_problem(8, devices=2, room=0.2)
    choice = choose_sources(replace(problem, group=np.array([0, 1, 2, 3, 0, 1, 2, 3], dtype=np.int32)))
    assert choice.device[:4].tolist() == choice.device[4:].tolist()


def test_what_fits_nowhere_has_no_choice():
    problem = make_problem(4, devices=1)
    assert choose_sources(replace(problem, room_bytes=np.array([100]))) is None
