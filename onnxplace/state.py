"""The two ideas: a State flows through the pipeline, a Pass maps State to State."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar, runtime_checkable

from onnxplace.errors import Diagnostic

if TYPE_CHECKING:
    from onnxplace.target import Target


@runtime_checkable
class Fact(Protocol):
    """Something a pass found out; a frozen record with invariants."""

    derived_from: ClassVar[tuple[type, ...]]
    """Facts this one becomes stale with: when one of them is provided anew, this one is dropped."""

    def check(self, state: State) -> None:
        """Raise ValueError, naming the place, if an invariant is broken."""


F = TypeVar("F", bound=Fact)


@dataclass(frozen=True)
class State:
    """What is known so far: the devices, and facts by their class. Never altered, only replaced."""

    target: Target
    facts: Mapping[type, Fact] = field(default_factory=lambda: MappingProxyType({}))
    diagnostics: tuple[Diagnostic, ...] = ()

    def __getitem__(self, kind: type[F]) -> F:
        fact = self.facts[kind]
        assert isinstance(fact, kind)
        return fact

    def __contains__(self, kind: type) -> bool:
        return kind in self.facts

    def having(self, *facts: Fact) -> State:
        """Return this state with `facts` added or replaced."""
        merged = {**self.facts, **{type(fact): fact for fact in facts}}
        return replace(self, facts=MappingProxyType(merged))

    def without(self, *kinds: type) -> State:
        """Return this state without the facts of these classes."""
        left = {kind: fact for kind, fact in self.facts.items() if kind not in kinds}
        return replace(self, facts=MappingProxyType(left))

    def saying(self, *diagnostics: Diagnostic) -> State:
        """Return this state with `diagnostics` appended."""
        return replace(self, diagnostics=self.diagnostics + diagnostics)


@dataclass(frozen=True)
class Pass(ABC):
    """One step of the compiler. Subclasses are frozen dataclasses; their fields are their options."""

    name: ClassVar[str]
    requires: ClassVar[tuple[type, ...]] = ()
    provides: ClassVar[tuple[type, ...]] = ()
    preserves: ClassVar[tuple[type, ...]] = ()

    @abstractmethod
    def run(self, state: State) -> State:
        """Return `state` with the facts in `provides`; never alter the input."""
