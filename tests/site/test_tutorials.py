"""The tutorials run as they stand, and print what they say."""

from pathlib import Path

import pytest

from tests.support.tutorials import Block, Surroundings, list_blocks, matches, read_blocks, run_page

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "tutorials"
NOT_HERE = {"README", "training"}  # plugins/training/tests/torch runs the tutorial on training
TUTORIALS = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem not in NOT_HERE)


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs_as_it_stands(name, tmp_path):
    assert run_page(FOLDER / f"{name}.md", tmp_path, Surroundings({"PIP_NO_BUILD_ISOLATION": "0"})) > 2


@pytest.mark.slow
def test_the_quickstart_runs_at_smaller_sizes(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    smaller = Surroundings(replaced={"--shape images=4,texts=8": "--shape images=1,texts=2"})
    # The environment is there already.
    assert run_page(ROOT / "docs/quickstart.md", tmp_path, smaller, skip="-m venv") > 4


def test_every_tutorial_is_in_the_list():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"]({path.name})" in text for path in FOLDER.glob("*.md") if path.name != "README.md")


PAGE = """
```python
# one.py: a file
print("one")
```

```sh
python one.py; echo 12 ms
```

```output
one
... ms
```

```toml
key = 1
```
"""


def test_blocks_are_files_commands_and_their_output(tmp_path):
    file, command = read_blocks(PAGE)
    assert file.file_name == "one.py"
    assert command == Block("sh", "python one.py; echo 12 ms\n", "one\n... ms\n")
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    assert run_page(path, tmp_path) == 2


def test_marks_say_what_becomes_of_a_block(tmp_path):
    page = PAGE.replace("```sh", "<!-- run by: tests/other.py -->\n```sh").replace(
        "```toml", "<!-- file: a.toml -->\n```toml"
    )
    page += "\n<!-- not run: it needs a cluster -->\n```sh\nfalse\n```\n"
    assert [block.kind for block in list_blocks(page)] == ["", "run by", "file", "not run"]
    assert [block.file_name for block in read_blocks(page)] == ["one.py", "a.toml"]
    (block,) = read_blocks(page, "tests/other.py")
    assert block.output == "one\n... ms\n"
    path = tmp_path / "page.md"
    path.write_text(page)
    assert run_page(path, tmp_path, Surroundings(replaced={"key = 1": "key = 2"}, after="grep 'key = 2' a.toml")) == 2
    with pytest.raises(AssertionError, match=r"does not contain .'key = 3'"):
        run_page(path, tmp_path, Surroundings(replaced={"key = 3": ""}))


@pytest.mark.parametrize(("old", "new"), [("... ms", "... s"), ("echo 12 ms", "false"), ('print("one")', "1 / 0")])
def test_a_page_that_says_something_else_fails(old, new, tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE.replace(old, new))
    with pytest.raises(AssertionError, match=r"page\.md"):
        run_page(path, tmp_path)


def test_blocks_together_are_one_program_whose_parts_print_what_the_page_shows(tmp_path):
    text = "```python\nx = 1\n```\n```python\nprint(x)\n```\n```output\n1\n```\n```sh\ntrue\n```\n"
    path = tmp_path / "page.md"
    path.write_text(text)
    assert run_page(path, tmp_path, Surroundings(together=True)) == 3
    for wrong in (text.replace("\n1\n", "\n2\n"), text.replace("x = 1", "print(1); x = 2")):
        path.write_text(wrong)
        with pytest.raises(AssertionError, match=r"page\.md"):
            run_page(path, tmp_path, Surroundings(together=True))


def test_output_without_a_command_is_refused():
    with pytest.raises(ValueError, match="no command"):
        read_blocks("```output\none\n```\n")


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a  1", "a      1", True),
        ("a\n...\nb", "a\nb", True),
        ("a\n...\nb", "a\nx\ny\nb", True),
        ("a\n...\nb", "a\nx\nbc", False),
        ("took ... ms", "took 3.5 ms", True),
        ("took ... ms", "took 3.5 s", False),
        ("a", "a\nb", False),
    ],
)
def test_dots_stand_for_any_text(expected, printed, same):
    assert matches(expected, printed) is same
