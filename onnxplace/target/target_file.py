"""Target files: devices and links as TOML (docs/target.md)."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from onnxplace.errors import InputError, TargetError, format_names, format_one_line, format_value, suggest_nearest
from onnxplace.target.hosts import ALL_TO_ALL, PER_HOST
from onnxplace.target.limits import require_device_limit
from onnxplace.target.target import LINK_MODELS, Device, Link, Pool, Shared, Target
from onnxplace.utils.files import read_text

Record = TypeVar("Record")
# The tables and values at the top level of a target file.
_ENTRIES = ("devices", "links", "link_model", "shared", "pools")
# Numbers of devices or hosts, in ids of several equal devices: `cuda:[0-7]`.
_RANGE = re.compile(r"\[([0-9]{1,4})-([0-9]{1,4})\]")


def read_target(path: str | Path) -> Target:
    """Read a target file (TOML, docs/target.md); raises TargetError naming file and entry.

    >>> read_target("target.toml").devices[0].id  # doctest: +SKIP
    'cpu:0'
    """
    data = read_toml(path, "T007")
    try:
        return _parse_target(data)
    except TargetError as problem:
        place = f"{path}, {problem.where}" if problem.where else str(path)
        raise TargetError(problem.code, problem.message, where=place, hint=problem.hint) from None
    except ValueError as problem:
        raise TargetError("T007", f"not a target: {problem}", where=str(path), hint="see docs/target.md") from None


def read_toml(path: str | Path, code: str, hint: str = "see docs/target.md") -> dict[str, object]:
    """Read a TOML file; raises TargetError with this code, and this hint at its syntax."""
    try:
        return tomllib.loads(read_text(path, code, "TOML"))
    except InputError as problem:
        raise TargetError(code, problem.message, where=problem.where, hint=problem.hint) from None
    except RecursionError:
        raise TargetError(code, "not TOML: it is nested too deeply", where=str(path), hint=hint) from None
    except ValueError as problem:  # a syntax error, or a number of thousands of digits
        raise TargetError(code, f"not TOML: {format_one_line(problem)}", where=str(path), hint=hint) from None


def _parse_target(data: dict[str, object]) -> Target:
    """Return the target that the tables of a file describe; raises TargetError or ValueError."""
    for key in data:
        if key not in _ENTRIES:
            raise ValueError(f"unknown entry {format_value(key)}; {suggest_nearest(key, _ENTRIES)}")
    model = data.get("link_model", "duplex")
    if model not in LINK_MODELS:
        raise ValueError(f"expected one of {format_names(LINK_MODELS)} for link_model, got {format_value(model)}")
    data = {**data, "devices": _expand_devices(data.get("devices")), "links": _expand_links(data.get("links", []))}
    devices, links = _parse_records(data, "devices", Device), _parse_records(data, "links", Link)
    return Target(devices, links, model, _parse_records(data, "shared", Shared), _parse_records(data, "pools", Pool))


def _expand_devices(entries: object) -> object:
    """Return the tables of devices, an entry for each of `cuda:[0-7]`; `processor` is one of `processors`.

    Options that are no texts are those of JSON: numbers, and tables of a provider.
    """
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return [] if entries is None else entries
    for entry in entries:
        if isinstance(options := entry.get("options"), dict):
            options |= {
                key: json.dumps(item, default=str) for key, item in options.items() if not isinstance(item, str)
            }
        if "processor" in entry and "processors" not in entry:
            entry["processors"] = [entry.pop("processor")]
    return [{**e, "id": i} if "id" in e else e for e in entries for i in _expand_ids(e.get("id"))]


def _expand_ids(text: object) -> list[object]:
    """Return the ids that a text with ranges stands for."""
    match = _RANGE.search(text) if isinstance(text, str) else None
    if match is None or not isinstance(text, str):
        return [text]
    first, last = int(match[1]), int(match[2])
    require_device_limit(last - first + 1, "")
    if first > last:
        raise ValueError(f"expected an ascending range, as in cuda:[0-7], got {format_value(text)}")
    before, after = text[: match.start()], text[match.end() :]
    return [item for number in range(first, last + 1) for item in _expand_ids(f"{before}{number}{after}")]


def _expand_links(entries: object) -> object:
    """Return the tables of links, with `between` as their two ends."""
    if not isinstance(entries, list):
        return entries
    links = []
    for entry in entries:
        if isinstance(entry, dict) and "between" in entry:
            between = entry["between"]
            if between not in (ALL_TO_ALL, PER_HOST) or "source" in entry or "destination" in entry:
                expected = f"{ALL_TO_ALL} or {PER_HOST}, without source and destination,"
                raise ValueError(f"expected {expected} for between in links, got {format_value(between)}")
            rest = {name: value for name, value in entry.items() if name != "between"}
            entry = {"source": between, "destination": between, **rest}
        links.append(entry)
    return links


def _parse_records(data: Mapping[str, object], key: str, kind: type[Record]) -> tuple[Record, ...]:
    """Return a table as records of a dataclass, by their fields; raises ValueError in one line."""
    from pydantic import TypeAdapter, ValidationError

    entries = data.get(key, [])
    if not isinstance(entries, list):
        raise ValueError(f"expected a list of tables for {key!r}, got {format_value(entries)}; write [[{key}]]")
    if key == "devices":
        require_device_limit(len(entries), "")
    names = [item.name for item in fields(kind) if item.init]  # type: ignore[arg-type]
    for entry in (entry for entry in entries if isinstance(entry, dict)):
        for name, value in entry.items():
            if name not in names:
                raise ValueError(f"unknown entry {format_value(name)} in {key}; {suggest_nearest(name, names)}")
            if isinstance(value, bool):  # pydantic would take it for 0 or 1
                message = f"expected a number, a text or a list for {name} in {key}, got {str(value).lower()}"
                raise ValueError(message)
    try:
        return TypeAdapter(tuple[kind, ...]).validate_python(entries)  # type: ignore[valid-type]
    except ValidationError as problem:
        first = problem.errors()[0]
        raise ValueError(f"{'.'.join(str(part) for part in (key, *first['loc']))}: {first['msg']}") from None


def format_target(target: Target, *, compact: bool = False) -> str:
    """Return the text of a target file, which `read_target` reads back equal.

    Args:
        target: Devices and links.
        compact: Whether defaults are left out, and equal devices that follow one another are one entry.

    >>> print(format_target(Target((Device("cpu:0", 1024),))).splitlines()[3])
    id = "cpu:0"
    """
    lines = [f'link_model = "{target.link_model}"', ""]
    tables: tuple[tuple[str, Sequence[Device | Link | Shared | Pool]], ...] = (
        ("[[devices]]", target.devices),
        ("[[links]]", target.links),
        ("[[shared]]", target.shared),
        ("[[pools]]", target.pools),
    )
    for heading, records in tables:
        for entries in map(_list_entries, records) if not compact else _list_compact_entries(records):
            lines += [heading, *[f"{name} = {_format_value(value)}" for name, value in entries.items()], ""]
    return "\n".join(lines)


def _list_entries(record: Device | Link | Shared | Pool) -> dict[str, object]:
    """Return the fields of a record, as a file has them."""
    entries = asdict(record)
    if isinstance(record, Link) and record.source in (ALL_TO_ALL, PER_HOST):
        del entries["destination"]
        return {"between": entries.pop("source"), **entries}
    return entries


def _list_compact_entries(records: Sequence[Device | Link | Shared | Pool]) -> list[dict[str, object]]:
    """Return the fields of records that differ from defaults; of equal devices in a row, one record for all."""
    keyed = []
    for position, record in enumerate(records):
        defaults = {item.name: item.default if item.default is not MISSING else {} for item in fields(record)}
        entries = {k: v for k, v in _list_entries(record).items() if k not in defaults or v != defaults[k]}
        kind, _, index = str(entries.get("id", "")).rpartition(":")
        # Devices in a row have the same distance between index and position.
        distance = int(index) - position if index.isdecimal() else str(position)
        keyed.append(({**entries, "id": kind, "distance": distance}, entries, index))
    grouped = []
    for key, group in groupby(keyed, key=lambda item: item[0]):
        (_, entries, start), *others = group
        grouped.append({**entries, "id": f"{key['id']}:[{start}-{others[-1][2]}]"} if others else entries)
    return grouped


def _format_value(value: object) -> str:
    """Return a value as TOML text; JSON strings are TOML strings, except for the delete character."""
    if isinstance(value, tuple):
        return f"[{', '.join(_format_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name} = {_format_value(item)}' for name, item in value.items())}}}"
    return json.dumps(value, ensure_ascii=True).replace("\\u007f", "\\u007F") if isinstance(value, str) else repr(value)
