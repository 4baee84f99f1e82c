"""The pipeline checks the order before any work, and the contract of each pass, with dummy passes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from onnxplace.errors import BrokenPassError, Diagnostic, InfeasibleError, OnnxplaceError, PluginError, UsageError
from onnxplace.facts import Emitted
from onnxplace.model.model import Model
from onnxplace.pipeline.pipeline import Pipeline, find_stale_facts, make_pass, run_pass
from onnxplace.state import Fact, Pass, State
from onnxplace.target.target import Device, Target
from onnxplace.utils import jit

TARGET = Target((Device("cpu:0", 1000), Device("cpu:1", 1000)))
EMPTY = State(TARGET)


@dataclass(frozen=True)
class Soil:
    """The first fact; wrong below zero, and its own check fails beyond 100."""

    derived_from: ClassVar[tuple[type, ...]] = ()
    value: int = 0

    def check(self, state: State) -> None:
        if self.value < 0:
            raise ValueError(f"{self.value} is below zero")
        if self.value > 100:
            raise IndexError("out of the list")


@dataclass(frozen=True)
class Plant(Soil):
    derived_from: ClassVar[tuple[type, ...]] = (Soil,)


@dataclass(frozen=True)
class Fruit(Soil):
    derived_from: ClassVar[tuple[type, ...]] = (Plant,)


@dataclass(frozen=True)
class Stone(Soil):
    """Depends on nothing."""

    derived_from: ClassVar[tuple[type, ...]] = ()


Kinds = tuple[type, ...]


def dummy(
    run: Callable[[State], object],
    *,
    name: str = "dummy",
    requires: Kinds = (),
    provides: Kinds = (),
    preserves: Kinds = (),
) -> Pass:
    """Return a pass with this `run` and these declarations."""
    members = {
        "name": name,
        "requires": requires,
        "provides": provides,
        "preserves": preserves,
        "run": lambda self, state: run(state),
    }
    return type("Dummy", (Pass,), members)()


def provide(*facts: Fact, name: str = "provide", requires: Kinds = (), preserves: Kinds = ()) -> Pass:
    """Return an honest pass that provides these facts."""
    kinds = tuple(type(fact) for fact in facts)
    return dummy(lambda s: s.with_facts(*facts), name=name, requires=requires, provides=kinds, preserves=preserves)


def fail_if_run(state: State) -> State:
    pytest.fail("this pass must not run")


# ---------------------------------------------------------------------------------------------- order


def test_passes_run_in_order_and_hand_their_facts_on():
    grow = dummy(lambda s: s.with_facts(Plant(s[Soil].value + 1)), requires=(Soil,), provides=(Plant,))
    state, timings = Pipeline((provide(Soil(3)), grow)).run(EMPTY)
    assert (state[Soil], state[Plant]) == (Soil(3), Plant(4))
    assert [timing.name for timing in timings] == ["provide", "dummy"]
    assert all(timing.seconds >= 0 for timing in timings)


def test_the_time_of_a_pass_excludes_the_compilation_of_loops(monkeypatch):
    now = [100.0]

    def compile_and_work(state: State) -> State:
        jit.compilation_clock.notify(SimpleNamespace(is_start=True))
        now[0] += 17
        jit.compilation_clock.notify(SimpleNamespace(is_start=False))
        now[0] += 2
        return state

    monkeypatch.setattr(jit, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(jit.compilation_clock, "seconds", jit.compilation_clock.seconds)
    assert [timing.seconds for timing in Pipeline((dummy(compile_and_work),)).run(EMPTY)[1]] == [pytest.approx(2)]


def test_a_wrong_order_is_refused_before_any_work():
    steps = Pipeline((dummy(fail_if_run, provides=(Soil,)), dummy(fail_if_run, name="picky", requires=(Fruit,))))
    with pytest.raises(UsageError) as caught:
        steps.run(EMPTY)
    assert caught.value.message == "pass 'picky' needs Fruit, which no earlier pass provides"


def test_facts_of_later_passes_do_not_count():
    steps = Pipeline((dummy(fail_if_run, name="early", requires=(Soil,)), provide(Soil())))
    with pytest.raises(UsageError, match="'early' needs Soil"):
        steps.run(EMPTY)


def test_stale_facts_do_not_count():
    steps = Pipeline(
        (provide(Soil()), provide(Plant()), provide(Soil(1)), dummy(fail_if_run, name="late", requires=(Plant,)))
    )
    with pytest.raises(UsageError, match="'late' needs Plant"):
        steps.run(EMPTY)


def test_facts_of_the_state_count():
    steps = Pipeline((dummy(lambda s: s, requires=(Soil,)),))
    assert steps.run(EMPTY.with_facts(Soil()))[0][Soil] == Soil()


def test_the_hint_names_the_built_in_passes_that_would_provide_it():
    with pytest.raises(UsageError) as caught:
        Pipeline.parse("split").require(())
    assert caught.value.hint == "put profile before it"
    with pytest.raises(UsageError) as caught:
        Pipeline((dummy(fail_if_run, requires=(Fruit,)),)).run(EMPTY)
    assert caught.value.hint == "a plugin must provide Fruit"


def test_an_empty_pipeline_changes_nothing():
    assert Pipeline(()).run(EMPTY) == (EMPTY, ())


# ---------------------------------------------------------------------------------------------- broken passes


def run_broken(step: Pass, state: State = EMPTY) -> BrokenPassError:
    with pytest.raises(BrokenPassError) as caught:
        Pipeline((step,)).run(state)
    assert caught.value.where == f"pass {step.name!r}"
    assert caught.value.exit_code == 4
    return caught.value


def test_a_pass_that_replaces_facts_of_its_input_is_caught():
    def meddle(state: State) -> State:
        object.__setattr__(state, "facts", {Soil: Soil(9)})
        return state

    assert run_broken(dummy(meddle, requires=(Soil,)), EMPTY.with_facts(Soil(1))).code == "B002"


def test_a_pass_that_removes_facts_from_its_input_is_caught():
    def meddle(state: State) -> State:
        object.__setattr__(state, "facts", {})
        return state

    assert run_broken(dummy(meddle), EMPTY.with_facts(Soil(1))).code == "B002"


def test_a_pass_that_omits_a_declared_fact_is_caught():
    error = run_broken(dummy(lambda s: s.with_facts(Soil()), provides=(Soil, Plant)))
    assert (error.code, error.message) == ("B002", "it did not provide Plant")


@pytest.mark.parametrize(
    "change",
    [lambda s: s.with_facts(Stone(2)), lambda s: s.with_facts(Plant()), lambda s: s.without(Stone)],
    ids=["replaced", "added", "dropped"],
)
def test_a_pass_that_changes_an_undeclared_fact_is_caught(change):
    step = dummy(lambda s: change(s.with_facts(Soil())), provides=(Soil,))
    error = run_broken(step, EMPTY.with_facts(Stone(1)))
    assert error.code == "B002"
    assert "which it does not list in `provides`" in error.message


def test_an_invalid_fact_is_caught_with_its_error():
    error = run_broken(provide(Soil(-3)))
    assert (error.code, error.message) == ("B002", "its Soil is wrong: -3 is below zero")


def test_an_exception_of_a_pass_is_caught_with_its_text():
    def fail(state: State) -> State:
        return {}["nothing"]

    error = run_broken(dummy(fail))
    assert (error.code, error.message) == ("B001", "KeyError: 'nothing'")
    assert "report" in error.hint
    assert isinstance(error.__cause__, KeyError)


@pytest.mark.parametrize("fault", [UsageError, InfeasibleError, PluginError])
def test_errors_of_onnxplace_pass_through(fault):
    def refuse(state: State) -> State:
        raise fault("X001", "on purpose")

    with pytest.raises(fault, match="on purpose"):
        Pipeline((dummy(refuse),)).run(EMPTY)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError, OSError])
def test_errors_that_are_not_the_fault_of_a_pass_pass_through(fault):
    def suffer(state: State) -> State:
        raise fault

    with pytest.raises(fault):
        Pipeline((dummy(suffer),)).run(EMPTY)


def test_nothing_after_a_broken_pass_runs():
    with pytest.raises(BrokenPassError):
        Pipeline((provide(Soil(-1)), dummy(fail_if_run))).run(EMPTY)


@pytest.mark.parametrize("result", [None, 42])
def test_a_pass_that_does_not_return_a_state_is_caught(result):
    run_broken(dummy(lambda s: result, provides=(Soil,)))


def test_an_exception_of_a_check_is_caught():
    assert run_broken(provide(Soil(101))).code == "B002"


@pytest.mark.parametrize(
    "change",
    [
        lambda s: replace(s, target=Target((Device("cpu:7", 1),))),
        lambda s: replace(s, diagnostics=()),
    ],
    ids=["target", "diagnostics"],
)
def test_a_pass_that_changes_the_target_or_drops_diagnostics_is_caught(change):
    run_broken(dummy(change), EMPTY.with_notes(Diagnostic("X001", "remember")))


@dataclass(frozen=True)
class Heap:
    """A fact that holds an array, as most do."""

    derived_from: ClassVar[tuple[type, ...]] = ()
    grains: np.ndarray

    def check(self, state: State) -> None:
        """Any heap will do."""


def test_a_pass_that_replaces_an_array_of_its_input_by_a_copy_is_caught():
    def meddle(state: State) -> State:
        object.__setattr__(state, "facts", {Heap: Heap(state[Heap].grains.copy())})
        return state

    assert run_broken(dummy(meddle), EMPTY.with_facts(Heap(np.zeros(3)))).code == "B002"


# ---------------------------------------------------------------------------------------------- stale facts

GROWN = EMPTY.with_facts(Soil(1), Plant(1), Fruit(1), Stone(1))


def test_facts_derived_from_a_changed_fact_are_dropped():
    state, _ = Pipeline((provide(Soil(2)),)).run(GROWN)
    assert set(state.facts) == {Soil, Stone}
    state, _ = Pipeline((provide(Plant(2)),)).run(GROWN)
    assert set(state.facts) == {Soil, Plant, Stone}


def test_facts_that_a_pass_provides_together_stay():
    state, _ = Pipeline((provide(Soil(2), Plant(2)),)).run(GROWN)
    assert set(state.facts) == {Soil, Plant, Stone}


def test_preserved_facts_stay():
    state, _ = Pipeline((provide(Soil(2), preserves=(Plant, Fruit)),)).run(GROWN)
    assert state.facts == GROWN.with_facts(Soil(2)).facts
    state, _ = Pipeline((provide(Soil(2), preserves=(Fruit,)),)).run(GROWN)
    assert set(state.facts) == {Soil, Fruit, Stone}


def test_preserved_facts_count_for_the_order():
    steps = (provide(Soil(2), preserves=(Plant,)), dummy(lambda s: s, requires=(Plant,)))
    assert Pipeline(steps).run(GROWN)[0][Plant] == Plant(1)


def test_a_pass_that_only_reads_drops_nothing():
    assert Pipeline((dummy(lambda s: s, requires=(Soil,)),)).run(GROWN)[0] == GROWN


def test_stale_facts_are_found_without_running_passes():
    assert find_stale_facts(provide(Soil()), [Soil, Plant, Fruit, Stone]) == {Plant, Fruit}
    assert find_stale_facts(provide(Soil()), [Soil, Stone]) == set()


def test_diagnostics_of_all_passes_are_kept_in_order():
    notes = [Diagnostic("X001", "one"), Diagnostic("X002", "two")]
    steps = tuple(dummy(lambda s, note=note: s.with_notes(note)) for note in notes)
    assert Pipeline(steps).run(EMPTY)[0].diagnostics == tuple(notes)


# ---------------------------------------------------------------------------------------------- the rest


def test_the_observer_is_called_before_each_pass():
    calls: list[tuple[str, int, int]] = []
    counts: list[int] = []

    def look(state: State) -> State:
        counts.append(len(calls))
        return state

    steps = tuple(dummy(look, name=name) for name in ("one", "two", "three"))
    Pipeline(steps).run(EMPTY, lambda *message: calls.append(message))
    assert calls == [("one", 0, 3), ("two", 1, 3), ("three", 2, 3)]
    assert counts == [1, 2, 3]


def test_requirements_of_a_single_pass_are_checked():
    with pytest.raises(UsageError, match="'picky' needs Soil"):
        run_pass(dummy(fail_if_run, name="picky", requires=(Soil,)), EMPTY)


def test_a_pass_is_built_from_its_name_and_options():
    assert str(Pipeline((make_pass("profile", {"repeat": "5"}),))) == "profile{repeat=5}"
    with pytest.raises(UsageError, match="did you mean 'profile'"):
        make_pass("profil")


def test_every_default_pipeline_is_in_order():
    for placer in ("single", "m-topo", "m-etf"):
        for middle in ("coplace,fuse,", "coplace,", ""):
            steps = Pipeline.parse(f"optimize,profile,{middle}{placer},split,emit")
            steps.require((Model,))
            assert Emitted in steps.passes[-1].provides


def test_errors_of_a_pipeline_are_errors_of_onnxplace():
    with pytest.raises(OnnxplaceError):
        Pipeline.parse("optimize,")
