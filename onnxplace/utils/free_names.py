"""Names for what a program adds to a graph."""

from __future__ import annotations


def claim_name(name: str, taken: set[str]) -> str:
    """Return a name that is not taken, with `_` at its end as often as needed, and mark it as taken.

    >>> taken = {"x"}
    >>> claim_name("x", taken), claim_name("x", taken), claim_name("y", taken)
    ('x_', 'x__', 'y')
    """
    while name in taken:
        name += "_"
    taken.add(name)
    return name
