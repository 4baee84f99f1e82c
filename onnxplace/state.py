"""The two central ideas: a State flows through the pipeline, and a Pass maps State to State."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar, runtime_checkable

from onnxplace.errors import Diagnostic

if TYPE_CHECKING:
    from onnxplace.target.target import Target


@runtime_checkable
class Fact(Protocol):
    """A result of a pass: a frozen record with invariants."""

    derived_from: ClassVar[tuple[type, ...]]
    """Facts that make this one stale: when one of them is provided again, this one is dropped."""

    def check(self, state: State) -> None:
        """Raise ValueError, naming the place, if an invariant is broken."""


F = TypeVar("F", bound=Fact)


@dataclass(frozen=True)
class State:
    """The state of a compilation: devices, and facts by class; replaced, never altered.

    >>> from onnxplace.target import Device, Target
    >>> State(Target((Device("cpu:0", 1024),))).with_notes(Diagnostic("X001", "hello")).diagnostics[0].message
    'hello'
    """

    target: Target
    facts: Mapping[type, Fact] = field(default_factory=lambda: MappingProxyType({}))
    diagnostics: tuple[Diagnostic, ...] = ()

    def __getitem__(self, kind: type[F]) -> F:
        fact = self.facts[kind]
        assert isinstance(fact, kind)
        return fact

    def __contains__(self, kind: type) -> bool:
        return kind in self.facts

    def with_facts(self, *facts: Fact) -> State:
        """Return this state with these facts added or replaced."""
        merged = {**self.facts, **{type(fact): fact for fact in facts}}
        return replace(self, facts=MappingProxyType(merged))

    def without(self, *kinds: type) -> State:
        """Return this state without the facts of these classes."""
        facts = {kind: fact for kind, fact in self.facts.items() if kind not in kinds}
        return replace(self, facts=MappingProxyType(facts))

    def with_notes(self, *diagnostics: Diagnostic) -> State:
        """Return this state with these diagnostics appended."""
        return replace(self, diagnostics=self.diagnostics + diagnostics)


@dataclass(frozen=True)
class Pass(ABC):
    """One step of the compiler. Subclasses are frozen dataclasses; their fields are their options."""

    name: ClassVar[str]
    requires: ClassVar[tuple[type, ...]] = ()
    """Facts that must be there before the pass runs."""
    provides: ClassVar[tuple[type, ...]] = ()
    """Facts that the pass adds or replaces."""
    preserves: ClassVar[tuple[type, ...]] = ()
    """Facts that stay valid although one that they derive from is replaced."""

    @abstractmethod
    def run(self, state: State) -> State:
        """Return `state` with the facts in `provides`; never alter the input."""
