"""What the compiler considered: the figures of its notes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from onnxplace.errors import Figure
from onnxplace.report.page_records import Attempt, AttemptGroup, Note

_TITLES = {
    "P040": "Placers: seconds of a step, by the costs of nodes",
    "P042": "Several devices or one: seconds of a step, measured in a trial",
    "P043": "Strategies: seconds between two results, as predicted",
    "P046": "Groups of a training step: seconds of a step, as predicted",
    "P062": "Whole or split operators: seconds of a step, as predicted",
}


class CompilerNote(Protocol):
    """A diagnostic, of the compiler or of a manifest."""

    @property
    def code(self) -> str: ...

    @property
    def message(self) -> str: ...

    @property
    def where(self) -> str: ...

    @property
    def hint(self) -> str: ...

    @property
    def figures(self) -> tuple[Figure, ...]: ...


def list_attempts(notes: Iterable[CompilerNote]) -> tuple[AttemptGroup, ...]:
    """Return what was compared, the shortest first in each comparison."""
    return tuple(
        AttemptGroup(
            title=_TITLES.get(note.code, "Compared"),
            code=note.code,
            attempts=tuple(
                Attempt(figure.name, figure.seconds, index == 0)
                for index, figure in sorted(enumerate(note.figures), key=lambda item: (item[1].seconds, item[0]))
            ),
        )
        for note in notes
        if note.figures
    )


def list_notes(notes: Iterable[CompilerNote]) -> tuple[Note, ...]:
    """Return the diagnostics as the page shows them."""
    return tuple(Note(note.code, note.message, note.where, note.hint) for note in notes)
