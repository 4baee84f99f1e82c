"""The command `onnxplace explain`: what docs/errors.md, which is a part of the package, says about an error code."""

from __future__ import annotations

import re
import textwrap
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from onnxplace.cli.shared_options import as_json, print_result
from onnxplace.errors import UsageError, suggest_nearest

# ---------------------------------------------------------------------------------------------------- the documentation


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


def complete_codes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the error codes that begin so."""
    pages = read_error_pages().values()
    return [CompletionItem(page.code, help=page.meaning) for page in pages if page.code.startswith(incomplete.upper())]


# ---------------------------------------------------------------------------------------------------------- the command


COLUMNS = 100


@click.command(short_help="Say what an error code means, and what to do.")
@click.argument("code", required=False, shell_complete=complete_codes)
@as_json
def explain(code: str | None, json_: bool) -> None:
    """Say what the error code CODE means, its usual cause, and what to do; without CODE, list all codes."""
    from onnxplace.reports.text import format_table

    pages = read_error_pages()
    if code is None:
        rows = [(page.code, page.exit, page.meaning) for page in pages.values()]
        text = format_table(("code", "exit", "meaning"), rows, left=3)
        print_result(json_, {"errors": [asdict(page) for page in pages.values()]}, text)
        return
    named = re.search(r"\b[A-Za-z][0-9]{3}\b", code)  # a line of a terminal, such as "error[P010] auto: ...", has one
    page = pages.get(named[0].upper()) if named else None
    if page is None:
        raise UsageError("U005", f"there is no error code {code!r}", where="CODE", hint=suggest_code(code, pages))
    print_result(json_, asdict(page), format_page(page))


def suggest_code(code: str, pages: dict[str, ErrorPage]) -> str:
    """Return a hint at the codes nearest to an unknown one: those of its letter, else of similar spelling."""
    letter, digits = code.strip().upper()[:1], code.strip()[1:]
    similar = [known for known in pages if known[0] == letter]
    if not similar or not re.fullmatch("[0-9]{1,9}", digits):
        return f"{suggest_nearest(code, pages)} (`onnxplace explain` lists all)"
    nearest = sorted(similar, key=lambda known: abs(int(known[1:]) - int(digits)))[:3]
    return f"nearest: {', '.join(nearest)} (`onnxplace explain` lists all)"


def format_page(page: ErrorPage) -> str:
    """Return a page as text for a terminal."""
    exit_text = page.exit if page.exit == "note" else f"exit code {page.exit}"
    lines = [f"{page.code}: {page.meaning}", ""]
    wrapper = textwrap.TextWrapper(COLUMNS, subsequent_indent=" " * 7, break_long_words=False, break_on_hyphens=False)
    for label, text in (("kind", exit_text), ("cause", page.cause), ("do", page.fix)):
        if text:
            lines += wrapper.wrap(f"{label + ':':7}{text}")
    return "\n".join(lines)
