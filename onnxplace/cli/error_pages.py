"""What docs/errors.md says about each error code; the file is a part of the package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# In the wheel, then in a source tree.
_PLACES = tuple(folder / "docs" / "errors.md" for folder in Path(__file__).parents[1:3])
_ROW = re.compile(r"^\| ([A-Z]\d{3}) \| (.+?) \| (.+?) \|$", re.MULTILINE)
_ENTRY = re.compile(r"^- \*\*([A-Z]\d{3})\*\* (.+?)\s\*\*Do:\*\*\s(.+?)(?=\n[-#\n]|\n*\Z)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\(([^)]+)\)")


@dataclass(frozen=True)
class ErrorPage:
    """The explanation of an error code."""

    code: str
    exit: str
    """The exit code, or `note`, or both."""
    meaning: str
    cause: str
    """A usual cause; empty if the documentation has none."""
    fix: str
    """What to do."""


@cache
def read_error_pages() -> dict[str, ErrorPage]:
    """Return the pages by code, in the order of the documentation.

    >>> read_error_pages()["N001"].meaning
    'not a bundle'
    """
    text = next(path for path in _PLACES if path.is_file()).read_text(encoding="utf-8")
    entries = {code: (_plain(cause), _plain(fix)) for code, cause, fix in _ENTRY.findall(text)}
    return {
        code: ErrorPage(code, exit_code, _plain(meaning), *entries.get(code, ("", "")))
        for code, exit_code, meaning in _ROW.findall(text)
    }


def _plain(text: str) -> str:
    """Return a text in one line, with links as paths below docs/."""
    return _LINK.sub(r"docs/\1", " ".join(text.split()))
