"""Predict sets of plans for several sizes of requests, without building a bundle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from onnxplace.driver.candidates import Candidate, Profiled, Result, Strategy, create_pass, predict
from onnxplace.driver.other_sizes import predict_elsewhere, predict_move_seconds
from onnxplace.driver.plan_sets import choose_set, find_move, fits_together, hold_together, list_sets
from onnxplace.errors import InfeasibleError
from onnxplace.facts import Placement, Prediction
from onnxplace.pipeline.pipeline import Pipeline

# Of each size, so many strategies are combined with those of others; sets that are listed, next to single plans.
MAX_COMBINED, MAX_LISTED = 4, 5
# As `compile` has it.
MAX_PLANS = 3
# Their steps are those of one copy.
_COPIES = ("copies", "copied stages")


@dataclass(frozen=True)
class PlannedSet:
    """Plans that one bundle would have, of which each size of requests takes the fastest; predicted."""

    names: tuple[str, ...]
    """The plan of each size, in the order of the sizes."""
    step_seconds: tuple[float, ...]
    """Of each size."""
    move_seconds: float
    """What it takes to move the states, when a request takes another plan than the one before."""
    mean_seconds: float
    """A step, weighted by how often its size is, with the moves."""
    plans: int
    devices: int
    """Number of devices that get work."""
    peak_bytes: int
    """Memory on the device or in the pool that needs most: weights of all plans, and values of one."""
    is_best: bool = False


def predict_sets(
    results: Sequence[Sequence[Result]], profiled: Sequence[Profiled], weights: Sequence[float]
) -> tuple[PlannedSet, ...]:
    """Return the best set of plans first, then others by their weighted step, with one for each single device.

    Args:
        results: The strategies of each size.
        profiled: The model with each size.
        weights: How often each size is.
    """
    target, candidates = profiled[0].state.target, list(_list_candidates(results, profiled[0]))
    steps = np.array([[predict_elsewhere(item, other) for other in profiled] for item in candidates])
    moves = np.array([[predict_move_seconds(a, b, target) for b in candidates] for a in candidates])
    predict_memory = Pipeline((create_pass("predict"),))
    memory = [predict_memory.run(item.state)[0][Prediction] for item in candidates]

    def fits(plans: Sequence[int]) -> bool:
        return fits_together([memory[plan] for plan in plans], target.pools)

    sets = list_sets(steps, np.array(weights), MAX_PLANS, fits, moves) if candidates else []
    if not sets:
        return ()
    best = choose_set(sets)
    fastest = {item.plans: steps[list(item.plans)].argmin(axis=0) for item in sets}
    useful = [item for item in sets if len({*fastest[item.plans].tolist()}) == len(item.plans)]
    ranked = sorted(useful, key=lambda item: item.loss)
    alone = [item for item in ranked if len(item.plans) == 1]
    singles = [item for item in alone if candidates[item.plans[0]].devices == 1]
    planned = []
    for item in {item.plans: item for item in (best, *ranked[:MAX_LISTED], *alone[:1], *singles)}.values():
        own = [candidates[plan] for plan in item.plans]
        held = hold_together([memory[plan] for plan in item.plans])
        pools = [sum(held.get(name, 0) for name in pool.devices) for pool in target.pools]
        used = {entry.state.target.devices[index].id for entry in own for index in set(entry.state[Placement].device)}
        planned.append(
            PlannedSet(
                names=tuple(own[index].name for index in fastest[item.plans]),
                step_seconds=tuple(item.seconds.tolist()),
                move_seconds=find_move(item, moves),
                mean_seconds=item.loss / sum(weights),
                plans=len(own),
                devices=len(used),
                peak_bytes=max(*held.values(), *pools),
                is_best=item is best,
            )
        )
    return tuple(planned)


def _list_candidates(results: Sequence[Sequence[Result]], profiled: Profiled) -> Iterator[Candidate]:
    """Yield one device of each class alone, then the fastest strategies of each size; equal placements once."""
    seen = set[object]()
    classes = {device.cost_class: device.id for device in reversed(profiled.state.target.devices)}
    found = list[Candidate]()
    for name in classes.values():
        with suppress(InfeasibleError):  # it has no room for the whole model
            passes = profiled.replace_placer(create_pass("single"))
            found.append(predict(Strategy(name, "one device", passes, devices=(name,)), profiled))
    for number, items in enumerate(results, 1):
        fitting = [item for item in items if isinstance(item, Candidate) and item.strategy.kind not in _COPIES]
        for item in sorted(fitting, key=lambda item: item.step_seconds)[:MAX_COMBINED]:
            name = f"{item.name}, as for size {number}"
            found.append(replace(item, strategy=replace(item.strategy, name=name)))
    for item in found:
        homes = np.array([device.id for device in item.state.target.devices])[item.state[Placement].device]
        key = (item.name,) if item.is_rewritten else tuple(homes.tolist())
        if key not in seen:
            seen.add(key)
            yield item
