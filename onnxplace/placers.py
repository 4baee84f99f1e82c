"""Which placer: by name, or by what is wanted of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Literal

from onnxplace.errors import UsageError, nearest
from onnxplace.facts import Placement
from onnxplace.pipeline import make_pass
from onnxplace.registry import entries
from onnxplace.spec import PassSpec, parse_pipeline

Objective = Literal["latency", "throughput", "fit"]
OBJECTIVES: Mapping[Objective, str] = MappingProxyType({"latency": "auto", "throughput": "stages", "fit": "fit"})
"""The placer for each: least time for one step, most steps per second, least traffic such that everything fits."""
BAECHI = ("m-topo", "m-etf", "m-sct")
"""The placers of Baechi (SoCC 2020), which join nodes to their only readers before they place."""


def choose_placer(
    placer: str | None, objective: Objective = "latency", seconds: float | None = None, seed: int | None = None
) -> PassSpec:
    """Return the placer asked for, with its options: `auto{seed=1}`, or the one for the objective.

    `seconds` is for how long it may search. Raises UsageError if it is no placer, if both a placer and an objective
    other than latency are given, or if the placer does not search.
    """
    if objective not in OBJECTIVES:
        raise UsageError("U048", f"no such objective: {objective!r}", hint=nearest(str(objective), OBJECTIVES))
    if placer and objective != "latency":
        hint = f"leave --placer out for {OBJECTIVES[objective]!r}, or --objective"
        raise UsageError("U046", "--placer and --objective exclude each other", hint=hint)
    specs = parse_pipeline(placer or OBJECTIVES[objective])
    spec = specs[0]
    made = make_pass(spec.name, spec.options)
    if len(specs) > 1 or Placement not in made.provides or Placement in made.requires:
        hint = f"{nearest(spec.name, _placers())} (`onnxplace passes` lists them)"
        raise UsageError("U043", f"pass {placer!r} is not a placer", where="--placer", hint=hint)
    options = dict(spec.options)
    known = {item.name for item in fields(made)}
    for option, flag, value in (("seconds", "--budget", seconds), ("seed", "--seed", seed)):
        if value is None:
            continue
        if option not in known:
            if option == "seconds":
                message = f"placer {spec.name!r} does not search: it takes the time it takes"
                raise UsageError("U047", message, where=flag, hint="leave it out, or choose --placer auto")
            continue
        options[option] = f"{value:g}" if option == "seconds" else str(value)
    chosen = PassSpec(spec.name, options)
    make_pass(chosen.name, chosen.options)
    return chosen


def _placers() -> list[str]:
    """Return the names of the built-in placers."""
    return [name for name, entry in entries("passes").items() if entry.summary.startswith("placer:")]
