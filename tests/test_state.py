"""A State is never altered, only replaced; a Pass is a frozen record."""

from dataclasses import FrozenInstanceError, dataclass
from typing import ClassVar

import pytest

from onnxplace.errors import Diagnostic
from onnxplace.state import Fact, Pass, State
from onnxplace.target.target import Device, Target

TARGET = Target((Device("cpu:0", 1),))


@dataclass(frozen=True)
class Color:
    derived_from: ClassVar[tuple[type, ...]] = ()
    name: str = "red"

    def check(self, state: State) -> None:
        """Any color is valid."""


@dataclass(frozen=True)
class Shade(Color):
    derived_from: ClassVar[tuple[type, ...]] = (Color,)


def test_having_adds_and_replaces_facts_in_a_new_state():
    empty = State(TARGET)
    red = empty.with_facts(Color("red"))
    blue = red.with_facts(Color("blue"), Shade("dark"))
    assert (Color in empty, Color in red, Shade in red) == (False, True, False)
    assert (red[Color].name, blue[Color].name, blue[Shade].name) == ("red", "blue", "dark")


def test_facts_are_looked_up_by_their_own_class_only():
    state = State(TARGET).with_facts(Shade())
    assert Shade in state
    assert Color not in state


def test_without_drops_facts_and_ignores_missing_ones():
    state = State(TARGET).with_facts(Color(), Shade())
    assert set(state.without(Color).facts) == {Shade}
    assert set(State(TARGET).without(Color).facts) == set()
    assert set(state.facts) == {Color, Shade}


def test_saying_appends_in_order():
    first, second = Diagnostic("X001", "one"), Diagnostic("X002", "two")
    state = State(TARGET).with_notes(first)
    assert state.with_notes(second, first).diagnostics == (first, second, first)
    assert state.diagnostics == (first,)


def test_each_method_keeps_everything_else():
    note = Diagnostic("X001", "one")
    state = State(TARGET).with_notes(note).with_facts(Color()).without(Color)
    assert state == State(TARGET, diagnostics=(note,))
    assert state.target is TARGET


def test_a_missing_fact_raises_key_error():
    with pytest.raises(KeyError):
        State(TARGET)[Color]


def test_a_state_cannot_be_altered():
    state = State(TARGET).with_facts(Color())
    with pytest.raises(FrozenInstanceError):
        state.target = TARGET  # type: ignore[misc]
    with pytest.raises(TypeError):
        state.facts[Color] = Color("blue")  # type: ignore[index]


def test_changing_the_original_dictionary_does_not_change_the_state():
    facts = {Color: Color()}
    state = State(TARGET, facts).with_facts()
    facts.clear()
    assert Color in state


def test_any_class_with_check_and_derived_from_is_a_fact():
    assert isinstance(Color(), Fact)
    assert not isinstance(object(), Fact)


@dataclass(frozen=True)
class Paint(Pass):
    """Make it blue."""

    name: ClassVar[str] = "paint"
    provides: ClassVar[tuple[type, ...]] = (Color,)

    tone: str = "blue"

    def run(self, state: State) -> State:
        return state.with_facts(Color(self.tone))


def test_passes_with_equal_options_are_equal():
    assert Paint() == Paint("blue") != Paint("green")
    assert len({Paint(), Paint("blue"), Paint("green")}) == 2


def test_a_pass_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Paint().tone = "green"  # type: ignore[misc]


def test_a_pass_declares_nothing_by_default():
    assert (Paint.requires, Paint.preserves) == ((), ())


def test_a_pass_without_run_cannot_be_created():
    class Lazy(Pass):
        name = "lazy"

    with pytest.raises(TypeError, match="run"):
        Lazy()
