"""Match names with patterns that users write, in bounded time whatever the pattern.

A regular expression may try exponentially many ways to match one name, as `(a+)+b` does, and Python cannot stop it. So
a pattern that might is matched in a process of its own, which can be ended; ordinary ones are matched here.
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
"""For all patterns of one call that are matched in a process of their own, its start included."""
MAX_STEPS = 10_000_000
"""A pattern that surely takes fewer steps is matched in this process: well under a second."""
_SPECIAL = frozenset("\\.^$*+?{}[]|()")
# Each of these may be tried for every length of what it repeats, each of the others for one alternative more.
_REPEATS, _CHOICES = re.compile(r"[*+{]"), re.compile(r"[?|]")
# A group that is repeated; or blanks and comments anywhere, even between the two (flag x).
_NESTED = re.compile(r"\)[*+{]|\(\?[a-zA-Z]*x")
# Reads {"patterns", "names"}; writes a line per pattern: the positions of the names that it matches.
_CHILD = """
import json, re, sys, warnings
warnings.simplefilter("ignore")
job = json.load(sys.stdin)
for pattern in map(re.compile, job["patterns"]):
    print(json.dumps([i for i, name in enumerate(job["names"]) if pattern.fullmatch(name)]), flush=True)
"""


def match_names(patterns: Sequence[str], names: Sequence[str], where: str) -> list[list[int]]:
    """Return, for each regular expression, the positions of the names that it matches whole.

    Raises UsageError at `where` for a pattern that is no regular expression (U022), or that takes too long (U024).
    """
    expressions = {pattern: _compile(pattern, where) for pattern in patterns}
    slow = [pattern for pattern in expressions if not _is_quick(pattern, names)]
    matches = _match_in_child(slow, names, where) if slow and _can_start() else {}
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        positions.setdefault(name, []).append(position)
    for pattern, expression in expressions.items():
        if pattern not in matches:
            plain = _SPECIAL.isdisjoint(pattern)
            matches[pattern] = positions.get(pattern, []) if plain else _matching(expression, names)
    return [matches[pattern] for pattern in patterns]


def _matching(expression: re.Pattern[str], names: Sequence[str]) -> list[int]:
    return [position for position, name in enumerate(names) if expression.fullmatch(name)]


def _compile(pattern: str, where: str) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python may read otherwise one day
            return re.compile(pattern)
    except re.error as problem:
        reason = str(problem)
    except OverflowError:
        reason = "it repeats something too often"
    except RecursionError:
        reason = "it is nested too deeply"
    shown = repr(pattern) if len(pattern) <= 200 else f"{pattern[:200]!r}..."
    raise UsageError("U022", f"not a regular expression: {shown}: {reason}", where=where)


def _is_quick(pattern: str, names: Sequence[str]) -> bool:
    """Return whether matching surely takes few steps: an estimate from above, by the characters of the pattern."""
    if _NESTED.search(pattern):
        return False
    repeats, choices = len(_REPEATS.findall(pattern)), len(_CHOICES.findall(pattern))
    if repeats + choices > 64:  # far beyond any limit, and so would be the numbers
        return False
    return bool(sum((len(name) + 1) ** repeats for name in names) << choices <= MAX_STEPS)


def _can_start() -> bool:
    """Return whether `sys.executable` is Python; in a program that embeds or freezes it, it is not."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def _match_in_child(patterns: Sequence[str], names: Sequence[str], where: str) -> dict[str, list[int]]:
    """Return the positions of what each pattern matches; raises UsageError naming the pattern that takes too long."""
    job = json.dumps({"patterns": patterns, "names": list(names)})
    # Isolated and without packages, it starts in some 20 ms.
    command = [sys.executable, "-I", "-S", "-c", _CHILD]
    ended = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        output = ended.communicate(job.encode(), timeout=MAX_SECONDS)[0]
    except BaseException as problem:
        ended.kill()
        output = ended.communicate()[0]
        if not isinstance(problem, subprocess.TimeoutExpired):
            raise
    lines = output.decode().splitlines(keepends=True)
    done = [json.loads(line) for line in lines if line.endswith("\n")]
    if len(done) < len(patterns):
        raise UsageError(
            "U024",
            f"matching {patterns[len(done)]!r} takes more than {MAX_SECONDS:g} s",
            where=where,
            hint="it can match in too many ways: repeat nothing that holds a repeat, such as (a+)+, and use fewer .*",
        )
    return dict(zip(patterns, done))


def match_stars(left: str, right: str, first: str, second: str) -> list[str] | None:
    """Return what the stars of two patterns stand for in two texts, the same in both; None if they do not fit.

    Linear in the length of the text, times stars and the length of what is between them.

    >>> star_fits("present.*", "past.*", "present.0.key", "past.0.key")
    ['0.key']
    """
    lefts, rights = left.split("*"), right.split("*")
    if not first.startswith(lefts[0]) or not second.startswith(rights[0]):
        return None
    # `ends` holds where, in `first`, the texts so far may end; in `second`, that is `shift` further.
    ends, shift, before = {len(lefts[0])}, len(rights[0]) - len(lefts[0]), []
    for one, other in zip(lefts[1:], rights[1:]):
        before.append(ends)
        starts = _reach(ends, first, second, shift)
        ends = {at + len(one) for at in starts if first.startswith(one, at) and second.startswith(other, at + shift)}
        shift += len(other) - len(one)
    if len(first) not in ends or len(first) + shift != len(second):
        return None
    return _stars(lefts, before, first)


def _reach(starts: set[int], first: str, second: str, shift: int) -> list[int]:
    """Return where a star may end that begins at one of `starts` in `first`, and `shift` further in `second`."""
    reached, alive = [], False
    for at in range(min(starts, default=len(first) + 1), len(first) + 1):
        alive = at in starts or (alive and first[at - 1 : at] == second[at - 1 + shift : at + shift])
        if alive:
            reached.append(at)
    return reached


def _stars(parts: Sequence[str], before: Sequence[set[int]], text: str) -> list[str]:
    """Return what each star stands for, the last ones as little as can be."""
    stars, end = [], len(text)
    for part, starts in zip(reversed(parts[1:]), reversed(before)):
        end -= len(part)
        begin = max(start for start in starts if start <= end)
        stars.append(text[begin:end])
        end = begin
    return stars[::-1]
