"""Match names with users' patterns, in bounded time for every pattern, and choose names that are free."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Sequence

from onnxplace.errors import UsageError
from onnxplace.utils.groups import group_pairs

MAX_SECONDS = 10.0
"""Time limit for all patterns of one call, looked at after each name."""
MAX_STEPS = 10_000_000
"""Python cannot interrupt the match of one name; this many steps take less than a second."""
# Characters with a meaning in regular expressions; other texts match only themselves.
_SPECIAL = frozenset("\\.^$*+?{}[]|()")
# Each repetition multiplies the attempts by the length of the name, each choice by two.
_REPEATS, _CHOICES = re.compile(r"[*+{]"), re.compile(r"[?|]")
# A repeated group, for which no such estimate holds; flag x allows blanks between a group and its repetition.
_NESTED = re.compile(r"\)[*+{]|\(\?[a-zA-Z]*x")


def match_names(patterns: Sequence[str], names: Sequence[str], where: str) -> list[list[int]]:
    """Return, per regular expression, the positions of the names that it matches completely.

    Raises UsageError at `where` for an invalid pattern (U023), and for one that may take too long (U023).

    >>> match_names(["enc.*", "dec"], ["enc0", "enc1", "dec"], "--colocate")
    [[0, 1], [2]]
    """
    expressions = {pattern: _compile(pattern, where) for pattern in patterns}
    positions = group_pairs((name, position) for position, name in enumerate(names))
    longest, end = max(map(len, names), default=0), time.monotonic() + MAX_SECONDS
    matches: dict[str, list[int]] = {}
    for pattern, expression in expressions.items():
        if _SPECIAL.isdisjoint(pattern):
            matches[pattern] = positions.get(pattern, [])
            continue
        if not _is_quick(pattern, longest):
            raise _too_slow_error(pattern, where, "repeat no group, as (a+)+ does, and use fewer .*")
        matches[pattern] = []
        for position, name in enumerate(names):
            if expression.fullmatch(name):
                matches[pattern].append(position)
            if time.monotonic() > end:
                raise _too_slow_error(pattern, where, f"it took more than {MAX_SECONDS:g} s: use fewer .*")
    return [matches[pattern] for pattern in patterns]


def _compile(pattern: str, where: str) -> re.Pattern[str]:
    """Return a compiled pattern; raises UsageError for an invalid one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about syntax whose meaning may change in later versions of Python
            return re.compile(pattern)
    except re.error as problem:
        reason = str(problem)
    except OverflowError:
        reason = "it repeats something too often"
    except RecursionError:
        reason = "it is nested too deeply"
    text = repr(pattern) if len(pattern) <= 200 else f"{pattern[:200]!r}..."
    raise UsageError("U023", f"not a regular expression: {text}: {reason}", where=where)


def _is_quick(pattern: str, length: int) -> bool:
    """Return whether an upper bound on the steps for a name, estimated from the pattern's characters, is small."""
    repeats, choices = len(_REPEATS.findall(pattern)), len(_CHOICES.findall(pattern))
    # More than 64 are far beyond any limit, and make huge numbers.
    return not _NESTED.search(pattern) and repeats + choices <= 64 and (length + 1) ** repeats << choices <= MAX_STEPS


def _too_slow_error(pattern: str, where: str, hint: str) -> UsageError:
    text = repr(pattern) if len(pattern) <= 200 else f"{pattern[:200]!r}..."
    return UsageError("U023", f"{text} can match in too many ways", where=where, hint=hint)


def match_stars(left: str, right: str, first: str, second: str) -> list[str] | None:
    """Return the texts of the stars in two patterns, equal in both; None without a match.

    `left` matches `first`, and `right` matches `second`. Linear in the length of the text, times the number of stars
    and the length of the parts between them.

    >>> match_stars("present.*", "past.*", "present.0.key", "past.0.key")
    ['0.key']
    """
    left_parts, right_parts = left.split("*"), right.split("*")
    if not first.startswith(left_parts[0]) or not second.startswith(right_parts[0]):
        return None
    # `ends` holds all positions in `first` where the parts so far may end. In `second`, each is `shift` further.
    ends, shift, before = {len(left_parts[0])}, len(right_parts[0]) - len(left_parts[0]), []
    for left_part, right_part in zip(left_parts[1:], right_parts[1:]):
        before.append(ends)
        ends = {
            start + len(left_part)
            for start in _find_star_ends(ends, first, second, shift)
            if first.startswith(left_part, start) and second.startswith(right_part, start + shift)
        }
        shift += len(right_part) - len(left_part)
    if len(first) not in ends or len(first) + shift != len(second):
        return None
    return _extract_stars(left_parts, before, first)


def _find_star_ends(starts: set[int], first: str, second: str, shift: int) -> list[int]:
    """Return all ends of a star that begins at one of `starts` in `first`, and `shift` further in `second`."""
    ends, is_equal = [], False
    for end in range(min(starts, default=len(first) + 1), len(first) + 1):
        is_equal = end in starts or (is_equal and first[end - 1 : end] == second[end - 1 + shift : end + shift])
        if is_equal:
            ends.append(end)
    return ends


def _extract_stars(parts: Sequence[str], before: Sequence[set[int]], text: str) -> list[str]:
    """Return the text of each star; the last ones are as short as possible.

    `before` holds, per star, the positions where it may begin.
    """
    stars, end = [], len(text)
    for part, starts in zip(reversed(parts[1:]), reversed(before)):
        end -= len(part)
        begin = max(start for start in starts if start <= end)
        stars.append(text[begin:end])
        end = begin
    return stars[::-1]


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
