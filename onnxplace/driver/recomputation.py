"""Compute values again where no placement fits otherwise."""

from __future__ import annotations

from collections.abc import Callable

from onnxplace.driver.sharding import PlacedModel
from onnxplace.driver.slices import insert_pass, run_slice
from onnxplace.errors import InfeasibleError
from onnxplace.facts import Profile, Recomputation
from onnxplace.pipeline import Observer, PassSpec, Pipeline, Timing
from onnxplace.problem import placement_problem
from onnxplace.state import State

RECOMPUTE = "recompute"
"""The pass that adds clones of nodes."""
# Limits that are tried in turn, as shares of the memory of all devices. A schedule that just fits one device is cut
# into many segments, so a smaller one comes first. Several devices are never filled evenly.
SHARES_OF_ONE = (0.9, 1.0, 0.8, 0.7)
SHARES_OF_SEVERAL = (0.95, 0.8, 0.65, 0.5, 0.4)
# Beyond, the choice takes minutes, which a user has to ask for.
MAX_NODES = 20_000

PlaceFunction = Callable[[Pipeline, State, int], tuple[PlacedModel, tuple[Timing, ...]]]


def place_or_recompute(
    steps: Pipeline, state: State, first: int, *, mode: str, place: PlaceFunction, observer: Observer | None
) -> tuple[PlacedModel, tuple[Timing, ...]]:
    """Run the passes of a pipeline from position `first` on with `place`; where nothing fits, after recomputation.

    Args:
        steps: The pipeline.
        state: With a profile.
        first: The position behind the pass that measures.
        mode: `auto`, `off`, `always`, or the limit of the pass `recompute`.
        place: Runs the passes from a position on, except the last one.
        observer: Hears of each pass.
    """
    if mode == "off":
        return place(steps, state, first)
    if mode != "auto":
        steps = insert_pass(steps, first, PassSpec(RECOMPUTE, {"limit": "0" if mode == "always" else mode}))
        state, timings = run_slice(steps, state, first, first + 1, observer)
        placed, more = place(steps, state, first + 1)
        return placed, timings + more
    try:
        return place(steps, state, first)
    except InfeasibleError as problem:
        if len(state[Profile].graph) > MAX_NODES:
            raise
        result = _recompute_until_it_fits(steps, state, first, place, observer)
        if result is None:
            raise problem from None
        return result


def _recompute_until_it_fits(
    steps: Pipeline, state: State, first: int, place: PlaceFunction, observer: Observer | None
) -> tuple[PlacedModel, tuple[Timing, ...]] | None:
    """Return the first placement that fits with more and more recomputation; None if there is none."""
    problem = placement_problem(state)
    total = int(problem.limit_bytes.sum())
    is_alone = len(state.target.devices) == 1
    peaks = set[int]()
    for share in SHARES_OF_ONE if is_alone else SHARES_OF_SEVERAL:
        limit = int(share * (total if is_alone else min(total, int(problem.alone_bytes().min()))))
        changed = insert_pass(steps, first, PassSpec(RECOMPUTE, {"limit": str(limit)}))
        after, timings = run_slice(changed, state, first, first + 1, observer)
        peak = after[Recomputation].peak_after_bytes
        if after[Recomputation].whole is None or peak in peaks or (is_alone and peak > total):
            continue
        peaks.add(peak)
        try:
            placed, more = place(changed, after, first + 1)
        except InfeasibleError:
            continue
        return placed, timings + more
    return None
