"""The attempts of the compiler: the figures of its notes."""

from __future__ import annotations

from collections.abc import Iterable

from onnxplace.bundle import DiagnosticRecord
from onnxplace.errors import Diagnostic
from onnxplace.report.page_records import Attempt, AttemptGroup, Note

_TITLES = {
    "P040": "Placers: seconds of a step, by the costs of nodes",
    "P042": "Several devices or one: seconds of a step, measured in a trial",
    "P043": "Strategies: seconds between two results, as predicted",
    "P046": "Groups of a training step: seconds of a step, as predicted",
    "P062": "Whole or split operators: seconds of a step, as predicted",
}


def list_attempts(notes: Iterable[Diagnostic | DiagnosticRecord]) -> tuple[AttemptGroup, ...]:
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


def list_notes(notes: Iterable[Diagnostic | DiagnosticRecord]) -> tuple[Note, ...]:
    """Return the diagnostics as the page shows them."""
    return tuple(Note(note.code, note.message, note.where, note.hint) for note in notes)
