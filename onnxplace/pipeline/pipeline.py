"""Run passes one after the other: checked before any work, and held to what they declare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from onnxplace.errors import BrokenPassError, InfeasibleError, OnnxplaceError, UsageError
from onnxplace.facts import Placement, Schedule
from onnxplace.pipeline.registry import find_plugin
from onnxplace.pipeline.text_form import build_pass, format_pipeline, parse_pipeline, spec_of
from onnxplace.state import Fact, Pass, State
from onnxplace.utils import budget_clock


@dataclass(frozen=True)
class Timing:
    """How long a pass took."""

    name: str
    seconds: float
    """By the wall clock, without compiling the kernels that were used first."""


Observer = Callable[[str, int, int], None]
"""Told of each pass before it runs: its name, its position from 0, how many there are."""


@dataclass(frozen=True)
class Pipeline:
    """Passes in order. `str()` gives the text that `Pipeline.parse` reads back."""

    passes: tuple[Pass, ...]

    @staticmethod
    def parse(text: str) -> Pipeline:
        """Build a pipeline from its text; raises UsageError or PluginError."""
        return Pipeline(tuple(make_pass(spec.name, spec.options) for spec in parse_pipeline(text)))

    def __str__(self) -> str:
        return format_pipeline(spec_of(step) for step in self.passes)

    def require(self, given: Iterable[type]) -> None:
        """Raise UsageError if a pass needs a fact that no earlier pass provides."""
        known = set(given)
        for step in self.passes:
            for kind in step.requires:
                if kind not in known:
                    raise UsageError(
                        "U002",
                        f"pass {step.name!r} needs {kind.__name__}, which nothing before it provides",
                        where=f"pipeline {self}",
                        hint=_providers_hint(kind),
                    )
            known = (known - stale_after(step, known)) | set(step.provides)

    def run(self, state: State, observer: Observer | None = None) -> tuple[State, tuple[Timing, ...]]:
        """Run every pass; returns the last state and how long each pass took.

        Raises UsageError before any work if the order is wrong, BrokenPassError if a pass breaks its word.
        """
        self.require(state.facts)
        timings = []
        for index, step in enumerate(self.passes):
            if observer:
                observer(step.name, index, len(self.passes))
            began = budget_clock()
            try:
                state = run_pass(step, state)
            except InfeasibleError as problem:
                raise _naming_another(problem, step, state) from None
            timings.append(Timing(step.name, budget_clock() - began))
        return state, tuple(timings)


def make_pass(name: str, options: Mapping[str, str] = MappingProxyType({})) -> Pass:
    """Return a pass by name, with options as text by key."""
    kind: type[Pass] = find_plugin("passes", name)
    return build_pass(kind, options)


def stale_after(step: Pass, known: Iterable[type]) -> set[type]:
    """Return the known facts that a pass makes stale: those derived from what it provides, unless it keeps them."""
    changed = set(step.provides)
    stale: set[type] = set()
    remaining = [kind for kind in known if kind not in changed]
    while fresh := {kind for kind in remaining if kind not in stale and _derived_from(kind) & (changed | stale)}:
        stale |= fresh
    return stale - set(step.preserves)


def _derived_from(kind: type) -> set[type]:
    return set(getattr(kind, "derived_from", ()))


def run_pass(step: Pass, state: State) -> State:
    """Run one pass and hold it to its declaration and to the invariants of its facts."""
    for kind in step.requires:
        if kind not in state:
            raise UsageError("U002", f"pass {step.name!r} needs {kind.__name__}", hint=_providers_hint(kind))
    before = dict(state.facts)
    try:
        after = step.run(state)
    except (OnnxplaceError, KeyboardInterrupt, OSError, MemoryError):
        raise
    except Exception as problem:
        raise BrokenPassError(
            "B001",
            f"{type(problem).__name__}: {problem}",
            where=f"pass {step.name!r}",
            hint="this is a defect of the pass, please report it",
        ) from problem
    if not isinstance(after, State):
        raise BrokenPassError("B006", f"it returned {after!r}, not a State", where=f"pass {step.name!r}")
    _hold_to_word(step, state, before, after)
    return after.without(*stale_after(step, after.facts))


# Placers that answer within moments, those that are likeliest to be of use first.
QUICK = ("m-etf", "m-topo", "fit", "single")


def _naming_another(problem: InfeasibleError, failed: Pass, state: State) -> InfeasibleError:
    """Return the refusal of a placer with another one named that fits, if there is one."""
    if Placement not in failed.provides or Placement in failed.requires:
        return problem
    for name in QUICK:
        if name == failed.name:
            continue
        try:
            found = run_pass(make_pass(name), state)
        except OnnxplaceError:
            continue
        step = found[Schedule].simulation.makespan_seconds
        hint = f"placer {name} fits, with a step of {step * 1e3:.4g} ms: --placer {name}"
        return InfeasibleError(problem.code, problem.message, where=problem.where, hint=hint)
    return problem


def _hold_to_word(step: Pass, state: State, before: dict[type, Fact], after: State) -> None:
    if list(state.facts) != list(before) or any(state.facts[kind] is not fact for kind, fact in before.items()):
        raise BrokenPassError("B002", "it altered its input", where=f"pass {step.name!r}")
    if after.target != state.target or after.diagnostics[: len(state.diagnostics)] != state.diagnostics:
        what = "the target" if after.target != state.target else "earlier diagnostics"
        raise BrokenPassError("B007", f"it changed {what}", where=f"pass {step.name!r}")
    for kind in step.provides:
        if kind not in after:
            raise BrokenPassError("B003", f"it did not provide {kind.__name__}", where=f"pass {step.name!r}")
    touched = [kind for kind in {**before, **after.facts} if before.get(kind) is not after.facts.get(kind)]
    for kind in touched:
        if kind not in step.provides:
            raise BrokenPassError("B004", f"it changed {kind.__name__} without saying so", where=f"pass {step.name!r}")
        try:
            after.facts[kind].check(after)
        except Exception as problem:
            raise BrokenPassError(
                "B005", f"its {kind.__name__} is wrong: {problem}", where=f"pass {step.name!r}"
            ) from problem


def _providers_hint(kind: type) -> str:
    from onnxplace.pipeline.registry import BUILTIN

    names: Sequence[str] = [
        name for name in BUILTIN["passes"] if kind in getattr(find_plugin("passes", name), "provides", ())
    ]
    return f"put {' or '.join(names)} before it" if names else f"a plugin must provide {kind.__name__}"
