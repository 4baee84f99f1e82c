"""Run the blocks of a page of the documentation in order, as a reader would who pastes them into a terminal.

- A block in `sh` is run by bash, and one in `python` by Python, in one folder for the whole page.
- A block whose first line is a comment with a file's name (`# placer.py`) is written to that file instead.
- A block in `output` after one of them is what that prints. `...` stands for any text, and alone on a line any lines.

A comment of HTML on the line before a block, which readers do not see, says something else:

- `<!-- file: costs.json -->`: the block is written to that file.
- `<!-- not run: the reason -->`: no test runs it.
- `<!-- run by: plugins/training/tests/torch/test_pages.py -->`: another test does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

BLOCK = re.compile(
    r"^(?:<!-- (?P<kind>file|not run|run by): (?P<mark>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FILE_NAME = re.compile(r"# ([\w/.-]+\.\w+)\b")
NEXT_BLOCK = "-- next block --"  # printed between the blocks of a page that are one program
SECONDS = 1200  # for one block, on a busy machine whose compiled loops are not cached yet


@dataclass(frozen=True)
class Block:
    """A block of a page, with the output that the page shows for it."""

    language: str
    text: str
    output: str | None = None
    kind: str = ""
    """Of its mark: file, not run, run by; "" without a mark."""
    mark: str = ""

    @property
    def file_name(self) -> str | None:
        """The file that the block is to be written to, if any."""
        name = FILE_NAME.match(self.text)
        return self.mark if self.kind == "file" else name[1] if name else None

    @property
    def is_used(self) -> bool:
        """Whether the block is a program or a file, not only shown."""
        return self.language in ("sh", "python") or self.file_name is not None


def list_blocks(page: str) -> list[Block]:
    """Return all blocks of a page in order; raises ValueError for an output without a command."""
    blocks: list[Block] = []
    for block in BLOCK.finditer(page):
        language, text = block["language"], block["text"]
        if language == "output":
            if not blocks or blocks[-1].output is not None or blocks[-1].file_name:
                raise ValueError(f"no command prints this output:\n{text}")
            blocks[-1] = replace(blocks[-1], output=text)
        else:
            blocks.append(Block(language, text, None, block["kind"] or "", block["mark"] or ""))
    return blocks


def read_blocks(page: str, runner: str = "") -> list[Block]:
    """Return the blocks that are written or run, in order; raises ValueError for an output without a command.

    These are the blocks that the page leaves to `runner`, the path of a test; by default those without such a mark.
    """
    used = [block for block in list_blocks(page) if block.is_used and block.kind != "not run"]
    return [block for block in used if (block.mark if block.kind == "run by" else "") == runner]


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


@dataclass(frozen=True)
class Surroundings:
    """What a page leaves to its reader."""

    environment: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Texts of blocks, with what to write instead."""
    prelude: str = ""
    """Python in front of each block in Python."""
    before: str = ""
    """Commands before the first block."""
    after: str = ""
    """Commands after the last block."""
    together: bool = False
    """Whether the blocks in Python are one program, as if pasted one after the other."""


def run_page(
    page: Path, folder: Path, surroundings: Surroundings = Surroundings(), *, runner: str = "", skip: str = "\0"
) -> int:
    """Run the blocks of a page in a folder and return how many; raises AssertionError where one fails.

    Blocks that contain the text `skip` are left out; `runner` as for `read_blocks`.
    """
    blocks = [block for block in read_blocks(page.read_text(encoding="utf-8"), runner) if skip not in block.text]
    unused = set(surroundings.replaced)
    ran = len(blocks)
    if surroundings.together:
        blocks = join_programs(blocks)
    edges = [[Block("sh", text)] if text else [] for text in (surroundings.before, surroundings.after)]
    for block in [*edges[0], *blocks, *edges[1]]:
        text = block.text
        for old, new in surroundings.replaced.items():
            if old in text:
                unused.discard(old)
                text = text.replace(old, new)
        if block.file_name:
            target = folder / block.file_name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        else:
            text = surroundings.prelude + text if block.language == "python" else text
            run_block(page.name, replace(block, text=text), folder, surroundings.environment)
    assert not unused, f"{page.name} does not contain {sorted(unused)}"
    return ran


def join_programs(blocks: list[Block]) -> list[Block]:
    """Return the blocks with one in place of those in Python, which prints a line between what each of them prints."""
    programs = [block for block in blocks if block.language == "python" and not block.file_name]
    text = f"print({NEXT_BLOCK!r})\n".join(block.text for block in programs)
    output = f"{NEXT_BLOCK}\n".join("...\n" if block.output is None else block.output for block in programs)
    return [Block("python", text, output), *(block for block in blocks if block not in programs)]


def run_block(page: str, block: Block, folder: Path, environment: Mapping[str, str]) -> None:
    """Run a block in a folder; raises AssertionError if it fails or prints something else than the page shows."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    done = subprocess.run(
        [*command, block.text],
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "120", **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    shown = f"{page}:\n{block.text}\nprinted:\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, shown
    assert block.output is None or matches(block.output, done.stdout), f"{shown}\nexpected:\n{block.output}"
