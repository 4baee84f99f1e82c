"""What messages say about names of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from onnxplace.errors import MAX_LISTED, Diagnostic
from onnxplace.graph import OpGraph
from onnxplace.utils import match_names


def match_removed(patterns: Sequence[str], removed: Sequence[str], where: str) -> dict[str, str]:
    """Return the patterns that match nodes that were removed, each with the first such node."""
    if not patterns or not removed:
        return {}
    matches = match_names(patterns, removed, where)
    return {pattern: removed[positions[0]] for pattern, positions in zip(patterns, matches) if positions}


def note_removed(removed_matches: Mapping[str, str], where: str) -> Diagnostic:
    """Return the note that patterns have no effect; each comes with the first removed node that it matches."""
    listed = format_list(f"{pattern!r} ({name!r})" for pattern, name in removed_matches.items())
    message = f"only nodes that were removed (constants, calls of functions, unused ones) match {listed}: no effect"
    return Diagnostic("U025", message, where=where, hint="leave it out, or name nodes that remain")


def suggest_names(graph: OpGraph) -> str:
    """Return a hint that shows some names of nodes."""
    return f"names look like {', '.join(repr(name) for name in graph.names[:3])}"


def format_list(items: Iterable[str], separator: str = ", ") -> str:
    """Join the first of several items to one text, with the number of the others."""
    entries = list(items)
    more = len(entries) - MAX_LISTED
    return separator.join(entries[:MAX_LISTED]) + (f"{separator}and {more} more" if more > 0 else "")
