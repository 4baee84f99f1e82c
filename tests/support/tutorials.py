"""Run the blocks of a page of the documentation in order, as a reader would who pastes them into a terminal.

- A block in `sh` is run by bash, and one in `python` by Python, in one folder for the whole page.
- A block whose first line is a comment with a file's name (`# placer.py`) is written to that file instead.
- A block in `output` after one of them is what that prints. `...` stands for any text, and alone on a line any lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w/.-]+\.\w+)\b")
SECONDS = 300  # for one block, on a busy machine whose compiled loops are not cached yet


@dataclass(frozen=True)
class Block:
    """A block of a page, with the output that the page shows for it."""

    language: str
    text: str
    output: str | None = None

    @property
    def file_name(self) -> str | None:
        """The file that the block is to be written to, if any."""
        name = FILE_NAME.match(self.text)
        return name[1] if name else None


def read_blocks(page: str) -> list[Block]:
    """Return the blocks that are written or run, in order; raises ValueError for an output without a command."""
    blocks: list[Block] = []
    for language, text in BLOCK.findall(page):
        if language == "output":
            if not blocks or blocks[-1].output is not None or blocks[-1].file_name:
                raise ValueError(f"no command prints this output:\n{text}")
            blocks[-1] = Block(blocks[-1].language, blocks[-1].text, text)
        elif language in ("sh", "python") or FILE_NAME.match(text):
            blocks.append(Block(language, text))
    return blocks


def matches(expected: str, printed: str) -> bool:
    """Say whether a text is what a page shows, however many blanks stand between its words."""
    lines = []
    for line in expected.strip().splitlines():
        if line.strip() == "...":
            lines.append(r"(?:.*\n)*?")
        else:
            words = [re.escape(word).replace(r"\.\.\.", ".*?") for word in line.split()]
            lines.append(r"[ \t]*" + r"[ \t]+".join(words) + r"[ \t]*\n")
    return re.fullmatch("".join(lines), printed.strip() + "\n") is not None


def run_page(page: Path, folder: Path, environment: Mapping[str, str] | None = None, skip: str = "\0") -> int:
    """Run the blocks of a page in a folder and return how many; raises AssertionError where one fails.

    Blocks that contain the text `skip` are left out.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "COLUMNS": "120", **(environment or {})}
    blocks = [block for block in read_blocks(page.read_text(encoding="utf-8")) if skip not in block.text]
    for block in blocks:
        if block.file_name:
            target = folder / block.file_name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
            continue
        command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
        done = subprocess.run(
            [*command, block.text],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        shown = f"{page.name}:\n{block.text}\nprinted:\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, shown
        assert block.output is None or matches(block.output, done.stdout), f"{shown}\nexpected:\n{block.output}"
    return len(blocks)
