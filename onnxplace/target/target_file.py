"""Target files: devices and links as TOML (docs/target.md)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from onnxplace.errors import InputError, TargetError, format_names, format_one_line, format_value, suggest_nearest
from onnxplace.target.limits import require_device_limit
from onnxplace.target.target import LINK_MODELS, Device, Link, Shared, Target
from onnxplace.utils import read_text

Record = TypeVar("Record")
# The tables and values at the top level of a target file.
_ENTRIES = ("devices", "links", "link_model", "shared")


def read_target(path: str | Path) -> Target:
    """Read a target file (TOML, docs/target.md); raises TargetError naming file and entry.

    >>> read_target("target.toml").devices[0].id  # doctest: +SKIP
    'cpu:0'
    """
    try:
        data = tomllib.loads(read_text(path, "T007", "TOML"))
    except InputError as problem:
        raise TargetError("T007", problem.message, where=problem.where, hint=problem.hint) from None
    except RecursionError:
        raise TargetError("T007", "not TOML: it is nested too deeply", where=str(path)) from None
    except ValueError as problem:  # a syntax error, or a number of thousands of digits
        raise TargetError("T007", f"not TOML: {format_one_line(problem)}", where=str(path)) from None
    try:
        return _parse_target(data)
    except TargetError as problem:
        place = f"{path}, {problem.where}" if problem.where else str(path)
        raise TargetError(problem.code, problem.message, where=place, hint=problem.hint) from None
    except ValueError as problem:
        raise TargetError("T007", f"not a target: {problem}", where=str(path), hint="see docs/target.md") from None


def _parse_target(data: dict[str, object]) -> Target:
    """Return the target that the tables of a file describe; raises TargetError or ValueError."""
    for key in data:
        if key not in _ENTRIES:
            raise ValueError(f"unknown entry {format_value(key)}; {suggest_nearest(key, _ENTRIES)}")
    model = data.get("link_model", "duplex")
    if model not in LINK_MODELS:
        raise ValueError(f"expected one of {format_names(LINK_MODELS)} for link_model, got {format_value(model)}")
    shared = _parse_records(data, "shared", Shared)
    return Target(_parse_records(data, "devices", Device), _parse_records(data, "links", Link), model, shared)


def _parse_records(data: Mapping[str, object], key: str, kind: type[Record]) -> tuple[Record, ...]:
    """Return a table as records of a dataclass, by their fields; raises ValueError in one line."""
    from pydantic import TypeAdapter, ValidationError

    entries = data.get(key, [])
    if not isinstance(entries, list):
        raise ValueError(f"expected a list of tables for {key!r}, got {format_value(entries)}; write [[{key}]]")
    if key == "devices":
        require_device_limit(len(entries), "")
    names = [item.name for item in fields(kind) if item.init]  # type: ignore[arg-type]
    for entry in entries:
        if isinstance(entry, dict):
            _require_plain_fields(entry, key, names)
    try:
        return TypeAdapter(tuple[kind, ...]).validate_python(entries)  # type: ignore[valid-type]
    except ValidationError as problem:
        first = problem.errors()[0]
        raise ValueError(f"{'.'.join(str(part) for part in (key, *first['loc']))}: {first['msg']}") from None


def _require_plain_fields(entry: Mapping[str, object], key: str, names: Sequence[str]) -> None:
    """Raise ValueError unless all fields of an entry have these names, and none is true or false."""
    for name, value in entry.items():
        if name not in names:
            raise ValueError(f"unknown entry {format_value(name)} in {key}; {suggest_nearest(name, names)}")
        if isinstance(value, bool):  # pydantic would take it for 0 or 1
            raise ValueError(f"expected a number, a text or a list for {name} in {key}, got {str(value).lower()}")


def format_target(target: Target) -> str:
    """Return the text of a target file, which `read_target` reads back equal.

    >>> print(format_target(Target((Device("cpu:0", 1024),))).splitlines()[3])
    id = "cpu:0"
    """
    lines = [f'link_model = "{target.link_model}"', ""]
    tables: tuple[tuple[str, tuple[Device | Link | Shared, ...]], ...] = (
        ("[[devices]]", target.devices),
        ("[[links]]", target.links),
        ("[[shared]]", target.shared),
    )
    for heading, records in tables:
        for record in records:
            entries = [(item.name, getattr(record, item.name)) for item in fields(record)]
            lines += [heading, *[f"{name} = {_format_value(value)}" for name, value in entries], ""]
    return "\n".join(lines)


def _format_value(value: object) -> str:
    """Return a value as TOML text; JSON strings are TOML strings, except for the delete character."""
    if isinstance(value, tuple):
        return f"[{', '.join(_format_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name} = {_format_value(item)}' for name, item in value.items())}}}"
    return json.dumps(value, ensure_ascii=True).replace("\\u007f", "\\u007F") if isinstance(value, str) else repr(value)
