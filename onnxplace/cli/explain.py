"""The command `onnxplace explain`."""

from __future__ import annotations

import re
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from onnxplace.cli.completers import complete_codes
from onnxplace.cli.options import as_json, print_json, print_text
from onnxplace.errors import UsageError, suggest_nearest

if TYPE_CHECKING:
    from onnxplace.cli.error_pages import ErrorPage

COLUMNS = 100


@click.command(short_help="Say what an error code means, and what to do.")
@click.argument("code", required=False, shell_complete=complete_codes)
@as_json
def explain(code: str | None, json_: bool) -> None:
    """Say what the error code CODE means, its usual cause, and what to do; without CODE, list all codes."""
    from onnxplace.cli.error_pages import read_error_pages
    from onnxplace.report import format_table

    pages = read_error_pages()
    if code is None:
        if json_:
            print_json({"errors": [asdict(page) for page in pages.values()]})
        else:
            print_text(
                format_table(("code", "exit", "meaning"), [(p.code, p.exit, p.meaning) for p in pages.values()], left=3)
            )
        return
    named = re.search(r"\b[A-Za-z][0-9]{3}\b", code)  # a line of a terminal, such as "error[P010] auto: ...", has one
    page = pages.get(named[0].upper()) if named else None
    if page is None:
        raise UsageError("U005", f"there is no error code {code!r}", where="CODE", hint=suggest_code(code, pages))
    if json_:
        print_json(asdict(page))
    else:
        print_text(format_page(page))


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
    for label, text in (("kind", exit_text), ("cause", page.cause), ("do", page.fix)):
        if text:
            lines += textwrap.wrap(
                f"{label + ':':7}{text}",
                COLUMNS,
                subsequent_indent=" " * 7,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)
