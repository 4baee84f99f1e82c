"""The pages of the documentation site hold what they have to, and their commands exist."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import click
import pytest

from onnxplace.cli.app import cli
from onnxplace.cli.help import GroupedCommand
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.plugins import BUILTIN, OFFERED, list_entries

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted([*(ROOT / "examples").rglob("*.md"), *(ROOT / "plugins").rglob("*.md")])
# What a reader fills in, and plugins that are not installed here.
PLACEHOLDER = re.compile(r"[A-Z]+(?:\.[a-z]+)?")
MISSING = {kind: set(names) - set(list_entries(kind)) for kind, names in OFFERED.items()}
MISSING["commands"].add("shares")
PLUGINS = re.compile("|".join(["round-robin", "one-thread", "emulated", "by-name", "^table$", *MISSING["passes"]]))


@cache
def load(path: str) -> ModuleType:
    """Return a script outside of the package as a module."""
    spec = spec_from_file_location(Path(path).stem, ROOT / path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each call of onnxplace in the blocks and spans of a page."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"(?<!`)`(onnxplace [^`]+)`(?!`)", text)
    # In a span, brackets are what may be left out, bars what is chosen from; the last option may lack its value.
    spans = [f"{span} VALUE" if re.search(r" --?[\w-]+$", span) else span for span in spans]
    lines = [re.sub(r"[\[\]]|(?<=\w)\|[\w|]+", "", " ".join(span.split())) for span in spans]
    for block in blocks:
        lines += block.replace("\\\n", " ").splitlines()
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>()")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("&|;<>()"):
                words.append(word)
                continue
            if words and Path(words[0]).name == "onnxplace" and words[1:]:
                yield words[1:]
            words = []


def check_command(words: list[str]) -> None:
    """Parse the words of a command as the command line does, without looking at files; raises click.UsageError."""
    if any(word in ("...", "COMMAND") for word in words):
        return
    command: click.Command = cli
    context = click.Context(cli, info_name="onnxplace")
    while isinstance(command, click.Group):
        name = words[0] if words else "--help"
        if name.startswith("-"):
            break
        if command is cli and name in MISSING["commands"]:
            return
        if name not in command.list_commands(context):
            raise click.UsageError(f"no command {name!r}")
        _, command, words = command.resolve_command(context, words)
        context = click.Context(command, info_name=name, parent=context)
    if isinstance(command, GroupedCommand):
        command.add_runtime_options(context)
    values, _, _ = command.make_parser(context).parse_args(list(words))
    for parameter in command.get_params(context):
        value = values.get(parameter.name)
        if value is None or PLUGINS.search(str(value)):
            continue
        for text in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(text, str) and not PLACEHOLDER.fullmatch(text):
                check_value(parameter, text, context)


def check_value(parameter: click.Parameter, text: str, context: click.Context) -> None:
    """Check a value by the type of its option; pipelines and placers are parsed."""
    if isinstance(parameter.type, click.Choice) or not isinstance(parameter.type, (click.Path, click.File)):
        parameter.type.convert(text, parameter, context)
    if parameter.name in ("pipeline", "placer"):
        Pipeline.parse(text.removeprefix("...,"))


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_every_command_on_a_page_parses(page):
    for words in read_commands(page.read_text(encoding="utf-8")):
        try:
            check_command(words)
        except Exception as problem:
            raise AssertionError(f"{page.name}: onnxplace {shlex.join(words)}: {problem}") from problem


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("onnxplace compil model.onnx", "no command"),
        ("cd x && .venv/bin/onnxplace compile model.onnx --divices cpu:0", "--divices"),
        ("onnxplace place graph.json --placer m-eft", "m-eft"),
        ("onnxplace compile model.onnx --pipeline 'optimize,profile{repeet=3}'", "repeet"),
        ("onnxplace place graph.json --objective fast  # quick", "fast"),
    ],
)
def test_a_wrong_command_is_found(line, message):
    (words,) = read_commands(f"```sh\n{line}\n```\n")
    with pytest.raises(Exception, match=message):
        check_command(words)


def test_the_pages_have_enough_commands_for_the_tests_to_mean_something():
    assert sum(1 for page in PAGES for _ in read_commands(page.read_text(encoding="utf-8"))) > 120


def test_every_pass_has_a_page_with_its_description_and_options():
    folder, index = ROOT / "docs/reference/passes", (ROOT / "docs/reference/passes.md").read_text(encoding="utf-8")
    own = {name for name, entry in list_entries("passes").items() if not entry.distribution}
    names = {*own, *OFFERED["passes"]}
    assert {page.stem for page in folder.iterdir()} == names
    for name in names:
        page = (folder / f"{name}.md").read_text(encoding="utf-8")
        assert page.startswith(f"# `{name}`\n\n"), name
        assert "\n- Time: " in page, f"{name} has no complexity"
        assert page.endswith(f"\n<!-- generated: pass {name} -->\n"), name
        assert f"- [{name}](passes/{name}.md): " in index, name
    placers = index.partition("## Placers")[2].partition("## Other passes")[0]
    for name in re.findall(r"^- \[(.+?)\]", placers, re.MULTILINE):
        baseline = "baseline" in placers.partition(f"- [{name}]")[2].partition("\n")[0]
        assert baseline or "\n- Paper: " in (folder / f"{name}.md").read_text(encoding="utf-8"), f"{name} has no paper"


def test_every_runtime_has_a_section_with_its_description():
    page = (ROOT / "docs/reference/runtimes.md").read_text(encoding="utf-8")
    names = {name for name, entry in list_entries("runtimes").items() if not entry.distribution}
    sections = {name: page.partition(f"\n## `{name}`\n")[2].partition("\n#")[0] for name in names}
    for name, section in sections.items():
        assert f"<!-- generated: runtime {name} -->" in section, f"docs/reference/runtimes.md has no section for {name}"
    assert set(re.findall(r"^## `(.+)`$", page, re.MULTILINE)) == names


@pytest.mark.slow
def test_generated_parts_hold_commands_passes_and_fields():
    generated = load("docs/site/generated.py")
    commands = generated.render_part("commands")
    assert all(f"## `onnxplace {name}`" in commands for name in cli.list_commands(click.Context(cli)))
    assert "--max-memory" in commands
    assert "| `seconds` | `2.0` | float, at least 0 | How long to search" in generated.render_part("pass auto")
    assert "- `InfeasibleError`: no cut fits the memory." in generated.render_part("pass pipelined")
    manifest = generated.render_part("manifest")
    schema = generated.build_manifest_schema()
    for name, record in {"Manifest": schema, **schema["$defs"]}.items():
        section = manifest.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert all(f"| `{field}` |" in section for field in record.get("properties", {})), name


@pytest.mark.slow
def test_every_mark_on_a_page_is_replaced():
    generated = load("docs/site/generated.py")
    marks = [mark for page in PAGES for mark in generated.MARK.findall(page.read_text(encoding="utf-8"))]
    assert len(marks) > len(BUILTIN["passes"])
    for mark in marks:
        assert generated.render_part(mark).strip(), mark
    with pytest.raises(KeyError):
        generated.replace_marks("<!-- generated: weather -->\n")


def test_every_test_that_the_threat_model_names_exists():
    page = (ROOT / "docs/threats.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:plugins/[\w-]+/)?tests/[\w/]+\.py)::(test_\w+)`", page)
    assert len(named) > 25
    for path, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), f"{path}::{name}"


def test_pages_that_load_from_the_network_are_named(tmp_path, capsys):
    check = load(".ci/check_site.py")
    (tmp_path / "a.html").write_text("<a href='https://x.example'>link</a><img src='local.png'><script>1</script>")
    assert check.main(tmp_path) == 0
    (tmp_path / "b.html").write_text("<script src='//cdn.example/x.js'></script>")
    (tmp_path / "c.css").write_text("@import 'https://fonts.example/f.css'; .a { background: url(local.png) }")
    assert check.main(tmp_path) == 1
    error = capsys.readouterr().err
    assert "b.html loads //cdn.example/x.js" in error
    assert "c.css loads https://fonts.example/f.css" in error


def test_a_site_without_pages_fails(tmp_path):
    assert load(".ci/check_site.py").main(tmp_path) == 1
