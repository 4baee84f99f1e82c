"""Run passes in order, and check what they declare before and after."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from onnxplace.errors import BrokenPassError, InfeasibleError, OnnxplaceError, UsageError
from onnxplace.facts import Placement, Schedule
from onnxplace.pipeline.registry import find_plugin
from onnxplace.pipeline.text_form import PassSpec, build_pass, format_pipeline, make_spec, parse_pipeline
from onnxplace.plugins import list_entries
from onnxplace.state import Fact, Pass, State
from onnxplace.utils.jit import budget_clock
from onnxplace.utils.progress import report_time_limit


@dataclass(frozen=True)
class Timing:
    """The time that a pass took."""

    name: str
    seconds: float
    """Wall-clock time, without the import of numba and the compilation of loops on first use."""


Observer = Callable[[str, int, int], None]
"""Called before each pass with its name, its position from 0 and the number of passes."""


@dataclass(frozen=True)
class Pipeline:
    """Passes in order. `str()` gives the text that `Pipeline.parse` reads.

    >>> str(Pipeline.parse("optimize, profile{estimate=true}"))
    'optimize,profile{estimate=true}'
    """

    passes: tuple[Pass, ...]

    @staticmethod
    def parse(text: str) -> Pipeline:
        """Build a pipeline from its text; raises UsageError or PluginError."""
        return Pipeline.of(parse_pipeline(text))

    @staticmethod
    def of(specs: Iterable[PassSpec]) -> Pipeline:
        """Build a pipeline from passes with options as text; raises UsageError or PluginError."""
        return Pipeline(tuple(make_pass(spec.name, spec.options) for spec in specs))

    def __str__(self) -> str:
        return format_pipeline(make_spec(step) for step in self.passes)

    def require(self, given: Iterable[type]) -> None:
        """Raise UsageError if no earlier pass provides a required fact."""
        known = set(given)
        for step in self.passes:
            for kind in step.requires:
                if kind not in known:
                    message = f"pass {step.name!r} needs {kind.__name__}, which no earlier pass provides"
                    raise UsageError("U002", message, where=f"pipeline {self}", hint=_suggest_providers(kind))
            known = (known - find_stale_facts(step, known)) | set(step.provides)

    def run(self, state: State, observer: Observer | None = None) -> tuple[State, tuple[Timing, ...]]:
        """Run every pass.

        Return the last state and the time of each pass.
        Raises UsageError before any work if the order is wrong, BrokenPassError if a pass breaks its contract.
        """
        self.require(state.facts)
        timings = []
        for index, step in enumerate(self.passes):
            if observer:
                observer(step.name, index, len(self.passes))
            if Placement in step.provides and (limit_seconds := getattr(step, "seconds", 0)):
                report_time_limit(limit_seconds)
            start = budget_clock()
            try:
                state = run_pass(step, state)
            except InfeasibleError as problem:
                raise _suggest_placer(problem, step, state) from None
            timings.append(Timing(step.name, budget_clock() - start))
        return state, tuple(timings)


def make_pass(name: str, options: Mapping[str, object] = MappingProxyType({})) -> Pass:
    """Return a pass by name, with its options given as texts or values; raises UsageError for wrong ones."""
    kind: type[Pass] = find_plugin("passes", name)
    return build_pass(kind, options)


def find_stale_facts(step: Pass, known: Collection[type]) -> set[type]:
    """Return the known facts that a pass makes stale.

    These are the facts derived from those that it provides, except the ones that it preserves.
    """
    changed = set(step.provides)
    derived = {kind: getattr(kind, "derived_from", ()) for kind in known}
    while fresh := {kind for kind in derived.keys() - changed if not changed.isdisjoint(derived[kind])}:
        changed |= fresh
    return changed.difference(step.provides, step.preserves)


def run_pass(step: Pass, state: State) -> State:
    """Run one pass; check its declaration and the invariants of its facts."""
    for kind in step.requires:
        if kind not in state:
            raise UsageError("U002", f"pass {step.name!r} needs {kind.__name__}", hint=_suggest_providers(kind))
    before = dict(state.facts)
    try:
        after = step.run(state)
    except BrokenPassError as problem:
        raise _make_defect(step, problem.code, problem.message) from problem
    except (OnnxplaceError, KeyboardInterrupt, OSError, MemoryError):
        raise
    except Exception as problem:
        raise _make_defect(step, "B001", f"{type(problem).__name__}: {problem}") from problem
    if not isinstance(after, State):
        raise _make_defect(step, "B002", f"expected it to return a State, got {after!r}")
    _check_declaration(step, state, before, after)
    return after.without(*find_stale_facts(step, after.facts))


def _make_defect(step: Pass, code: str, message: str) -> BrokenPassError:
    """Return the error of a pass that fails or breaks its contract; it names the plugin that the pass is from."""
    entry = list_entries("passes").get(step.name)
    where = f"pass {step.name!r}{f' from {entry.distribution}' if entry and entry.distribution else ''}"
    hint = f"this is a defect of the pass, please report it{'; --verbose shows where' * (code == 'B001')}"
    return BrokenPassError(code, message, where=where, hint=hint)


# Placers that take milliseconds, the most useful suggestions first.
QUICK_PLACERS = ("m-etf", "m-topo", "fit", "single")


def _suggest_placer(problem: InfeasibleError, failed: Pass, state: State) -> InfeasibleError:
    """Return the error of a placer, with a hint at one that fits."""
    if Placement not in failed.provides or Placement in failed.requires:
        return problem
    for name in QUICK_PLACERS:
        if name == failed.name:
            continue
        try:
            candidate = run_pass(make_pass(name), state)
        except OnnxplaceError:
            continue
        seconds = candidate[Schedule].simulation.makespan_seconds
        hint = f"placer {name} fits, with a step of {seconds * 1e3:.4g} ms: --placer {name}"
        return InfeasibleError(problem.code, problem.message, where=problem.where, hint=hint)
    return problem


def _check_declaration(step: Pass, state: State, before: dict[type, Fact], after: State) -> None:
    """Raise BrokenPassError unless a pass changed only valid facts that it provides."""
    if list(state.facts) != list(before) or any(state.facts[kind] is not fact for kind, fact in before.items()):
        raise _make_defect(step, "B002", "it altered its input")
    if after.target != state.target or after.diagnostics[: len(state.diagnostics)] != state.diagnostics:
        changed = "the target" if after.target != state.target else "earlier diagnostics"
        raise _make_defect(step, "B002", f"it changed {changed}")
    for kind in step.provides:
        if kind not in after:
            raise _make_defect(step, "B002", f"it did not provide {kind.__name__}")
    changed_kinds = [kind for kind in {**before, **after.facts} if before.get(kind) is not after.facts.get(kind)]
    for kind in changed_kinds:
        if kind not in step.provides:
            raise _make_defect(step, "B002", f"it changed {kind.__name__}, which it does not list in `provides`")
        try:
            after.facts[kind].check(after)
        except Exception as problem:
            raise _make_defect(step, "B002", f"its {kind.__name__} is wrong: {problem}") from problem


def _suggest_providers(kind: type) -> str:
    """Return a hint at the passes that provide a fact."""
    own = [name for name, entry in list_entries("passes").items() if not entry.distribution]
    plugins: dict[str, type[Pass]] = {name: find_plugin("passes", name) for name in own}
    names = [name for name, plugin in plugins.items() if kind in plugin.provides and kind not in plugin.requires]
    return f"put {' or '.join(names)} before it" if names else f"a plugin must provide {kind.__name__}"
