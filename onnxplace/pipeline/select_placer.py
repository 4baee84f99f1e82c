"""Choose a placer by name or by objective; report idle devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Literal

import numpy as np

from onnxplace.errors import Diagnostic, InfeasibleError, UsageError, suggest_nearest
from onnxplace.facts import Placement, Profile, Routes
from onnxplace.pipeline.pipeline import make_pass
from onnxplace.pipeline.text_form import PassSpec, parse_pipeline
from onnxplace.plugins import OFFERED, list_entries
from onnxplace.state import Pass, State

ObjectiveName = Literal["latency", "worst-ratio", "throughput", "fit", "step"]
OBJECTIVES: Mapping[ObjectiveName, str] = MappingProxyType(
    {"latency": "auto", "worst-ratio": "auto", "throughput": "stages", "fit": "fit", "step": "auto"}
)
"""The placer for each objective: least step time, of several sizes the least ratio to the best step of each, most steps
per second, least traffic of placements that fit, and least time of a training step, which is compared with other ways
to use the devices."""
USE_FEWER_DEVICES = "ask for fewer with --devices N"
"""The hint for idle devices of a cost graph."""
CHAIN_SHARE = 0.9
"""A model is a chain if so much of its computing lies on one path."""
BAECHI = ("m-topo", "m-etf", "m-sct")
"""The placers of Baechi (SoCC 2020), which join nodes to their only readers before placing."""


def choose_placer(
    placer: str | None, objective: ObjectiveName = "latency", seconds: float | None = None, seed: int | None = None
) -> PassSpec:
    """Return a placer with its options, by name or by objective.

    `seconds` limits its search.

    Raises:
        UsageError: it is not a placer; both a placer and an objective other than latency are given; the placer does
            not search; or the time limit is not positive.

    >>> str(choose_placer("auto{seed=1}", seconds=3))
    'auto{seed=1,seconds=3}'
    """
    if seconds is not None and not seconds > 0:
        hint = "auto{seconds=0,proposals=N} limits the search by number of moves"
        raise UsageError("U005", f"expected more than 0 seconds, got {seconds:g} seconds", where="--budget", hint=hint)
    if objective not in OBJECTIVES:
        raise UsageError("U001", f"unknown objective {objective!r}", hint=suggest_nearest(str(objective), OBJECTIVES))
    if placer and objective != "latency":
        hint = f"omit --placer to use {OBJECTIVES[objective]!r}, or omit --objective"
        raise UsageError("U042", "--placer and --objective exclude each other", hint=hint)
    specs = parse_pipeline(placer or OBJECTIVES[objective])
    spec = specs[0]
    if len(specs) > 1:
        hint = "name one pass; --pipeline of `onnxplace compile` takes several"
        raise UsageError("U001", f"{placer!r} is not a placer but a pipeline", where="--placer", hint=hint)
    options = dict(spec.options)
    known = {item.name for item in fields(_make_placer(spec))}
    if seconds is not None:
        if "seconds" not in known:
            message = f"placer {spec.name!r} does not search, so it has no time limit"
            raise UsageError("U042", message, where="--budget", hint="omit it, or choose --placer auto")
        options["seconds"] = f"{seconds:g}"
    if seed is not None and "seed" in known:
        options["seed"] = str(seed)
    chosen = PassSpec(spec.name, options)
    make_pass(chosen.name, chosen.options)
    return chosen


def _make_placer(spec: PassSpec) -> Pass:
    """Return the pass; raises UsageError unless it places without a placement."""
    known = list_entries("passes")
    # Whether a plugin is a placer is not known before it is loaded.
    placers = [name for name, entry in known.items() if entry.distribution or entry.summary.startswith("placer:")]
    hint = f"{suggest_nearest(spec.name, placers)} (`onnxplace passes` lists them)"
    if spec.name not in known and spec.name not in OFFERED["passes"]:  # of those, make_pass says where they are
        raise UsageError("U001", f"unknown placer {spec.name!r}", where="--placer", hint=hint)
    placer = make_pass(spec.name, spec.options)
    if Placement not in placer.provides:
        raise UsageError("U001", f"pass {spec.name!r} is not a placer", where="--placer", hint=hint)
    if Placement in placer.requires:
        message = f"pass {spec.name!r} is not a placer: it starts from a placement"
        hint = f"put it after a placer in a --pipeline, as in m-etf,{spec.name}; --placer auto searches by itself"
        raise UsageError("U001", message, where="--placer", hint=hint)
    return placer


def report_idle_devices(state: State, names: Sequence[object] = ()) -> list[Diagnostic]:
    """Return a note for each idle device: it gets no work, and none of its processors gets any by another device.

    There is none after `fit`, which aims at few devices. `names` are the device names of a cost graph, if any.
    """
    if Placement not in state or state[Placement].placer == OBJECTIVES["fit"]:
        return []
    used = set(state[Placement].device.tolist())
    if Routes in state:
        used |= {device for route in state[Routes].routes for device in route.device.tolist()}
    idle = np.flatnonzero(~state.target.conflicts[:, sorted(used)].any(axis=1)).tolist()
    reason = _explain_idleness(state) if idle else ""
    return [
        Diagnostic(
            "P010",
            f"this device{f', {names[index]!r} in the graph,' if names else ''} gets no work from "
            f"placer {state[Placement].placer!r}{reason}",
            where=state.target.devices[index].id,
            hint=f"try another --placer, or {USE_FEWER_DEVICES if names else 'omit the device'}",
        )
        for index in idle
    ]


def _explain_idleness(state: State) -> str:
    """Return why more devices would not help, by the costs of nodes; empty where they do not show it."""
    if Profile not in state:
        return ""
    graph, seconds = state[Profile].graph, np.stack([state[Profile].seconds[kind] for kind in state[Profile].seconds])
    fastest = np.where(np.isfinite(seconds), seconds, np.inf).min(axis=0, initial=np.inf)
    if not np.isfinite(fastest).all() or (total := float(fastest.sum())) <= 0:
        return ""
    finish = np.zeros(len(graph))
    for node in graph.order.tolist():
        producers = graph.producer[graph.inputs[node]]
        finish[node] = fastest[node] + finish[producers[producers >= 0]].max(initial=0.0)
    if (share := float(finish.max(initial=0.0)) / total) >= CHAIN_SHARE:
        return f": {share:.0%} of the computing is one chain, in which each node needs the one before"
    figures = [figure for note in state.diagnostics if note.code == "P040" for figure in note.figures]
    ids = {device.id for device in state.target.devices}
    one, several = ([item.seconds for item in figures if (item.name in ids) == alone] for alone in (True, False))
    if not one or not several or min(several) <= min(one):
        return ""
    return f": the best of several devices takes {min(several) / min(one) - 1:.0%} longer than one"


def require_all_devices_used(unused: Sequence[Diagnostic], remedy: str = "omit the device") -> None:
    """Raise InfeasibleError for the first idle device (`--strict`).

    `remedy` says how to compile without that device.
    """
    if unused:
        hint = f"{remedy}, try another --placer, or omit --strict"
        raise InfeasibleError("P010", unused[0].message, where=unused[0].where, hint=hint)
