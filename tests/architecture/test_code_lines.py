"""The core keeps within a number of code lines, in total and in each room: `line_limits.toml`.

A code line holds a token that is neither comment nor docstring. Whoever needs more lines raises the numbers in the same
commit and says there why; whoever deletes lines lowers them, so that the gain is kept. `python
tests/architecture/test_code_lines.py` writes the numbers of the tree into the table.
"""

from __future__ import annotations

import ast
import io
import tokenize
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT, TABLE = Path(__file__).parents[2], Path(__file__).with_name("line_limits.toml")
CORE = ("onnxplace", "passes", "runtimes")
# Numbers may be higher than the tree by this: small changes need not touch the table.
SLACK = 15
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count_code_lines(text: str) -> int:
    """Return the number of lines with code."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        for item in (getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else ())
        if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)
        for line in range(item.lineno, (item.end_lineno or item.lineno) + 1)
    }
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings)


@cache
def count_rooms() -> Counter[str]:
    """Return the code lines of each package below the three folders of the core, and of the files next to them."""
    lines = Counter[str]()
    for top in CORE:
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            # `onnxplace/passes` and `onnxplace/runtimes` are links to the folders next to them.
            if not any(parent.is_symlink() for parent in path.parents if parent != ROOT and ROOT in parent.parents):
                lines["/".join(parts[:2]) if len(parts) > 2 else top] += count_code_lines(
                    path.read_text(encoding="utf-8")
                )
    return lines


def test_each_room_and_the_core_keep_within_their_lines():
    limits, rooms = tomllib.loads(TABLE.read_text(encoding="utf-8")), count_rooms()
    assert set(limits["rooms"]) == set(rooms)
    larger = {room: lines - limits["rooms"][room] for room, lines in rooms.items() if lines > limits["rooms"][room]}
    assert not larger, f"raise these numbers in {TABLE.name}, and say in the commit why: {larger}"
    assert sum(rooms.values()) <= limits["core"]


def test_the_table_keeps_what_was_gained():
    limits, rooms = tomllib.loads(TABLE.read_text(encoding="utf-8")), count_rooms()
    smaller = {room: limits["rooms"][room] - lines for room, lines in rooms.items()}
    assert max(smaller.values()) <= SLACK, f"lower these numbers in {TABLE.name}: {smaller}"
    assert limits["core"] <= sum(rooms.values()) + SLACK


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", 0),
        ('"""Text\nof two lines."""\n\n# A comment.\nx = 1  # another\n', 1),
        ("def f():\n    '''Text.'''\n    return (\n        1\n    )\n", 4),
        ("x = '''a\nb'''\n", 2),
    ],
)
def test_only_lines_with_code_count(text, lines):
    assert count_code_lines(text) == lines


if __name__ == "__main__":
    rooms = count_rooms()
    rows = "\n".join(f'"{room}" = {lines}' for room, lines in sorted(rooms.items()))
    TABLE.write_text(f"core = {sum(rooms.values())}\n\n[rooms]\n{rows}\n", encoding="utf-8")
