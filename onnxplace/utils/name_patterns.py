"""Match names with users' patterns, in bounded time for every pattern.

A regular expression may try exponentially many ways to match one name, as `(a+)+b` does, and Python cannot interrupt
it. Such patterns are matched in a child process, which can be killed; ordinary ones are matched in this process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence

from onnxplace.errors import UsageError

MAX_SECONDS = 10.0
"""Time limit for the child process, which matches all slow patterns of one call."""
MAX_STEPS = 10_000_000
"""Patterns with fewer steps are matched in this process; they take well under a second."""
# Characters with a meaning in regular expressions; other texts match only themselves.
_SPECIAL = frozenset("\\.^$*+?{}[]|()")
# Each repetition multiplies the attempts by the length of the name, each choice by two.
_REPEATS, _CHOICES = re.compile(r"[*+{]"), re.compile(r"[?|]")
# A repeated group, for which no such estimate holds; flag x allows blanks between a group and its repetition.
_NESTED = re.compile(r"\)[*+{]|\(\?[a-zA-Z]*x")
# Reads {"patterns", "names"} as JSON; writes a line per pattern: the positions of the names that it matches.
_CHILD = """
import json, re, sys, warnings
warnings.simplefilter("ignore")
job = json.load(sys.stdin)
for pattern in map(re.compile, job["patterns"]):
    print(json.dumps([i for i, name in enumerate(job["names"]) if pattern.fullmatch(name)]), flush=True)
"""


def match_names(patterns: Sequence[str], names: Sequence[str], where: str) -> list[list[int]]:
    """Return, per regular expression, the positions of the names that it matches completely.

    Raises UsageError at `where` for an invalid pattern (U022), and for one that takes too long (U024).

    >>> match_names(["enc.*", "dec"], ["enc0", "enc1", "dec"], "--colocate")
    [[0, 1], [2]]
    """
    expressions = {pattern: _compile(pattern, where) for pattern in patterns}
    slow = [pattern for pattern in expressions if not _is_quick(pattern, names)]
    matches = _match_in_child(slow, names, where) if slow and _can_start_python() else {}
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        positions.setdefault(name, []).append(position)
    for pattern, expression in expressions.items():
        if pattern not in matches:
            is_plain = _SPECIAL.isdisjoint(pattern)
            matches[pattern] = positions.get(pattern, []) if is_plain else _match_here(expression, names)
    return [matches[pattern] for pattern in patterns]


def _match_here(expression: re.Pattern[str], names: Sequence[str]) -> list[int]:
    """Return the positions of the names that an expression matches."""
    return [position for position, name in enumerate(names) if expression.fullmatch(name)]


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
    raise UsageError("U022", f"not a regular expression: {text}: {reason}", where=where)


def _is_quick(pattern: str, names: Sequence[str]) -> bool:
    """Return whether an upper bound on the steps, estimated from the pattern's characters, is small."""
    if _NESTED.search(pattern):
        return False
    repeats, choices = len(_REPEATS.findall(pattern)), len(_CHOICES.findall(pattern))
    if repeats + choices > 64:  # far beyond any limit; the numbers below would be huge
        return False
    return bool(sum((len(name) + 1) ** repeats for name in names) << choices <= MAX_STEPS)


def _can_start_python() -> bool:
    """Return whether `sys.executable` is Python: not in programs that embed or freeze it."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def _match_in_child(patterns: Sequence[str], names: Sequence[str], where: str) -> dict[str, list[int]]:
    """Return the positions that each pattern matches; raises UsageError naming a pattern that takes too long."""
    job = json.dumps({"patterns": patterns, "names": list(names)})
    # In isolated mode and without site packages, Python starts in about 20 ms.
    command = [sys.executable, "-I", "-S", "-c", _CHILD]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        output = child.communicate(job.encode(), timeout=MAX_SECONDS)[0]
    except BaseException as problem:
        child.kill()
        output = child.communicate()[0]
        if not isinstance(problem, subprocess.TimeoutExpired):
            raise
    lines = output.decode().splitlines(keepends=True)
    done = [json.loads(line) for line in lines if line.endswith("\n")]
    if len(done) < len(patterns):
        raise UsageError(
            "U024",
            f"matching {patterns[len(done)]!r} takes more than {MAX_SECONDS:g} s",
            where=where,
            hint="it can match in too many ways: avoid nested repetitions such as (a+)+, and use fewer .*",
        )
    return dict(zip(patterns, done))


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
