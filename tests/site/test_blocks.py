"""Every block of every page is run by a test, or the page says why not."""

import re
from pathlib import Path

import pytest

from tests.support.page_setups import SETUPS, run_with_setup
from tests.support.tutorials import list_blocks

ROOT = Path(__file__).parents[2]
# Other tests run these pages: test_tutorials.py, test_questions.py and plugins/training/tests/torch.
ELSEWHERE = re.compile(r"docs/tutorials/.*|docs/quickstart\.md|docs/questions\.md")
COMMAND = re.compile(r"^(onnxplace|pip|python3?|\.venv/\S+) ", re.MULTILINE)
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
    )
)


def list_untested(name: str, text: str) -> list[str]:
    """Return what keeps each block from being tested that no test runs and no mark excuses."""
    untested = []
    if len(re.findall(r"^ *```\w*$", text, re.MULTILINE)) != len(re.findall(r"^```\w*$", text, re.MULTILINE)):
        untested.append("an indented block")
    for block in list_blocks(text):
        start = block.text.splitlines()[0]
        if block.kind == "run by":
            runner = ROOT / block.mark
            if not runner.is_file() or name not in runner.read_text(encoding="utf-8"):
                untested.append(f"{block.mark} does not run {name}: {start}")
        elif not block.is_used and block.kind != "not run" and (block.language or COMMAND.search(block.text)):
            untested.append(f"neither a program nor a file: {start}")
        elif block.is_used and block.kind != "not run" and name not in SETUPS and not ELSEWHERE.fullmatch(name):
            untested.append(f"no setup in tests/support/page_setups.py: {start}")
    return untested


@pytest.mark.parametrize("name", PAGES)
def test_every_block_is_run_or_says_why_not(name):
    assert list_untested(name, (ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("```sh\nonnxplace devices\n```\n", "no setup in tests/support/page_setups.py: onnxplace devices"),
        ("```\nonnxplace devices\n```\n", "neither a program nor a file: onnxplace devices"),
        ("```json\n{}\n```\n", "neither a program nor a file: {}"),
        ("- a\n\n  ```sh\n  ls\n  ```\n", "an indented block"),
        ("<!-- run by: tests/nowhere.py -->\n```sh\nls\n```\n", "tests/nowhere.py does not run docs/new.md: ls"),
        ("<!-- not run: it needs a cluster -->\n```sh\nls\n```\n", ""),
        ("```\na picture -> of words\n```\n", ""),
    ],
)
def test_a_block_that_nothing_runs_is_found(text, words):
    assert list_untested("docs/new.md", text) == ([words] if words else [])


def test_most_blocks_are_run():
    blocks = [block for name in PAGES for block in list_blocks((ROOT / name).read_text(encoding="utf-8"))]
    used = [block for block in blocks if block.is_used]
    assert sum(block.kind != "not run" for block in used) > 0.85 * len(used)


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_the_blocks_of_a_page_run(name, store, tmp_path):
    run_with_setup(name, SETUPS[name], store, tmp_path)
