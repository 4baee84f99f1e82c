"""The parts of pages that come from the code: commands, passes, and the fields of the manifest.

A page has a line `<!-- generated: NAME -->` where such a part goes. It also says which command prints the same.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import click

from onnxplace.bundle.manifest import Manifest, Record, TrainingRecord
from onnxplace.cli.app import cli
from onnxplace.cli.help import format_pass_help
from onnxplace.errors import Diagnostic
from onnxplace.model_metadata import CarriedTensor, InferencePart, Labels, Parameter
from onnxplace.pipeline import find_plugin
from onnxplace.target import Device, Link, Shared
from onnxplace.utils import read_field_docs

MARK = re.compile(r"^<!-- generated: (.+) -->$", re.MULTILINE)
HELP_COLUMNS = 100


def replace_marks(text: str) -> str:
    """Return the text of a page with its generated parts; raises KeyError or UsageError if there is no such part."""
    return MARK.sub(lambda mark: render_part(mark[1]), text)


def render_part(name: str) -> str:
    """Return a part as Markdown, such as `pass m-etf`, `runtime mpi`, `commands` or `manifest`."""
    kind, _, argument = name.partition(" ")
    return PARTS[kind](argument) if argument else PARTS[kind]()


def render_pass(name: str) -> str:
    """Return the description and the options of a pass."""
    _, fields = format_pass_help(find_plugin("passes", name))
    rows = [(f"`{row['name']}`", f"`{row['default']!r}`", row["type"], row["about"]) for row in fields["options"]]
    table = render_table(("option", "default", "type", "meaning"), rows) if rows else "No options."
    return f"{render_docstring(fields['about'])}\n\n{table}"


def render_runtime(name: str) -> str:
    """Return the description of a runtime."""
    return render_docstring(format_pass_help(find_plugin("runtimes", name))[1]["about"])


def render_docstring(text: str) -> str:
    """Return a docstring as Markdown, with its section of errors as a list."""
    body, _, errors = text.partition("\nRaises:\n")
    items = re.findall(r"^    (\w+): ((?:.|\n(?:        ))*)", errors, re.MULTILINE)
    lines = [f"- `{kind}`: {' '.join(about.split())}" for kind, about in items]
    return body.strip() + ("\n\nErrors:\n\n" + "\n".join(lines) if lines else "")


def render_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table; bars in its cells are escaped."""
    titles = list(titles)
    lines = [" | ".join(titles), " | ".join("---" for _ in titles)]
    lines += [" | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def list_commands(command: click.Command = cli, path: str = "onnxplace") -> Iterator[tuple[str, click.Command]]:
    """Yield all commands with what a user types, groups before their commands."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            _, subcommand, _ = command.resolve_command(context, [name])
            if subcommand:
                yield from list_commands(subcommand, f"{path} {name}")


def render_commands() -> str:
    """Return the help of every command."""
    settings = {**cli.context_settings, "terminal_width": HELP_COLUMNS, "max_content_width": HELP_COLUMNS}
    sections = []
    for path, command in list_commands():
        text = click.Context(command, info_name=path, **settings).get_help()
        sections.append(f"## `{path}`\n\n```text\n{text}\n```")
    return "\n\n".join(sections)


def render_manifest() -> str:
    """Return a section for the manifest and for each kind of record in it."""
    schema = build_manifest_schema()
    records = {"Manifest": schema, **dict(sorted(schema["$defs"].items()))}
    return "\n\n".join(render_record(name, record) for name, record in records.items())


def build_manifest_schema() -> dict[str, Any]:
    """Return the JSON Schema of manifest.json, with a description of each field: docs/manifest.schema.json."""
    schema = Manifest.model_json_schema()
    parts = {Manifest.__name__: schema, **schema["$defs"]}
    dataclasses = (Diagnostic, Device, Link, Shared)
    for dataclass_type in dataclasses:  # pydantic before 2.13 leaves out their docstrings
        parts[dataclass_type.__name__]["description"] = inspect.getdoc(dataclass_type)
    training = (CarriedTensor, Parameter, InferencePart, Labels, TrainingRecord)
    for record_type in (*dataclasses, *training, *list_records(Record)):
        # pydantic could do this as well, but as soon as the classes are defined, which takes 30 ms of each start.
        for name, description in read_field_docs(record_type).items():
            if name in parts.get(record_type.__name__, {}).get("properties", {}):
                parts[record_type.__name__]["properties"][name]["description"] = description
    return schema


def list_records(record_type: type[Record]) -> Iterator[type[Record]]:
    """Yield all classes that derive from a record, directly or not."""
    for derived in record_type.__subclasses__():
        yield derived
        yield from list_records(derived)


def render_record(name: str, record: Mapping[str, Any]) -> str:
    """Return the section of one kind of record."""
    rows = []
    for field, about in record.get("properties", {}).items():
        default = f"`{about['default']!r}`" if "default" in about else ""
        default = "required" if field in record.get("required", ()) else default
        rows.append((f"`{field}`", describe_type(about), default, about.get("description", "")))
    description = record.get("description", "")
    return f"## {name}\n\n{description}\n\n{render_table(('field', 'type', 'default', 'meaning'), rows)}"


def describe_type(about: Mapping[str, Any]) -> str:
    """Return the type of a field in words, with links to other records."""
    if "$ref" in about:
        name = about["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in about:
        return " or ".join(describe_type(choice) for choice in about["anyOf"])
    if "enum" in about:
        return " or ".join(f"`{value}`" for value in about["enum"])
    if "const" in about:
        return f"`{about['const']}`"
    if about.get("type") == "array":
        return f"list of {describe_type(about.get('items', {}))}"
    if isinstance(about.get("additionalProperties"), Mapping):
        return f"names to {describe_type(about['additionalProperties'])}"
    return str(about.get("type", "any value"))


PARTS: dict[str, Callable[..., str]] = {
    "commands": render_commands,
    "manifest": render_manifest,
    "pass": render_pass,
    "runtime": render_runtime,
}
