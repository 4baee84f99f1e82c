"""Which placer: by name, or by what is wanted of it; and which devices it left without work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Literal

from onnxplace.errors import Diagnostic, InfeasibleError, UsageError, nearest
from onnxplace.facts import Placement
from onnxplace.pipeline.pipeline import make_pass
from onnxplace.pipeline.registry import list_entries
from onnxplace.pipeline.text_form import PassSpec, parse_pipeline
from onnxplace.state import Pass, State

Objective = Literal["latency", "throughput", "fit"]
OBJECTIVES: Mapping[Objective, str] = MappingProxyType({"latency": "auto", "throughput": "stages", "fit": "fit"})
"""The placer for each: least time for one step, most steps per second, least traffic such that everything fits."""
USE_FEWER_DEVICES = "ask for fewer with --devices N"
"""How to do without a device of a cost graph."""
BAECHI = ("m-topo", "m-etf", "m-sct")
"""The placers of Baechi (SoCC 2020), which join nodes to their only readers before they place."""


def choose_placer(
    placer: str | None, objective: Objective = "latency", seconds: float | None = None, seed: int | None = None
) -> PassSpec:
    """Return the placer asked for, with its options: `auto{seed=1}`, or the one for the objective.

    `seconds` is for how long it may search. Raises UsageError if it is no placer, if both a placer and an objective
    other than latency are given, if the placer does not search, or if it would have no time to.
    """
    if seconds is not None and not seconds > 0:
        hint = "give more than 0 seconds; auto{seconds=0,proposals=N} searches by number of moves"
        raise UsageError("U053", f"cannot search for {seconds:g} seconds", where="--budget", hint=hint)
    if objective not in OBJECTIVES:
        raise UsageError("U048", f"no such objective: {objective!r}", hint=nearest(str(objective), OBJECTIVES))
    if placer and objective != "latency":
        hint = f"leave --placer out for {OBJECTIVES[objective]!r}, or --objective"
        raise UsageError("U046", "--placer and --objective exclude each other", hint=hint)
    specs = parse_pipeline(placer or OBJECTIVES[objective])
    spec = specs[0]
    if len(specs) > 1:
        hint = "name one; --pipeline of `onnxplace compile` takes several passes"
        raise UsageError("U043", f"{placer!r} is not a placer but a pipeline", where="--placer", hint=hint)
    made = _made(spec)
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


def _made(spec: PassSpec) -> Pass:
    """Return the pass; raises UsageError, with a placer that may have been meant, unless it places from nothing."""
    known = list_entries("passes")
    # Whether a plugin is a placer is not known before it is loaded.
    placers = [name for name, entry in known.items() if entry.distribution or entry.summary.startswith("placer:")]
    hint = f"{nearest(spec.name, placers)} (`onnxplace passes` lists them)"
    if spec.name not in known:
        raise UsageError("U001", f"unknown placer {spec.name!r}", where="--placer", hint=hint)
    made = make_pass(spec.name, spec.options)
    if Placement not in made.provides:
        raise UsageError("U043", f"pass {spec.name!r} is not a placer", where="--placer", hint=hint)
    if Placement in made.requires:
        message = f"pass {spec.name!r} is not a placer: it starts from a placement"
        hint = f"put it after a placer in a --pipeline, as in m-etf,{spec.name}; --placer auto searches by itself"
        raise UsageError("U043", message, where="--placer", hint=hint)
    return made


def report_idle_devices(state: State, names: Sequence[object] = ()) -> list[Diagnostic]:
    """Return a note for each device that gets no work; none if `fit` placed it, since few devices is what that is for.

    `names` are what a cost graph calls the devices, if that is what was placed.
    """
    if Placement not in state or state[Placement].placer == OBJECTIVES["fit"]:
        return []
    used = set(state[Placement].device.tolist())
    return [
        Diagnostic(
            "P010",
            f"this device{f', {names[index]!r} in the graph,' if names else ''} was asked for and gets no work from "
            f"placer {state[Placement].placer!r}",
            where=device.id,
            hint=f"try another --placer, or {USE_FEWER_DEVICES if names else 'leave it out'}",
        )
        for index, device in enumerate(state.target.devices)
        if index not in used
    ]


def require_all_devices_used(unused: Sequence[Diagnostic], remedy: str = "leave it out") -> None:
    """Raise InfeasibleError if there is a device without work (`--strict`); `remedy` says how to do without it."""
    if unused:
        hint = f"{remedy}, try another --placer, or leave --strict out"
        raise InfeasibleError("P010", unused[0].message, where=unused[0].where, hint=hint)
