"""The machine a model is compiled for: devices, their memory, and the links between them."""

from __future__ import annotations

import json
import math
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxplace.errors import (
    MAX_LISTED,
    MAX_SHOWN,
    InputError,
    TargetError,
    UsageError,
    counted,
    nearest,
    one_line,
    shown,
)
from onnxplace.utils import read_text

KINDS = ("cpu", "cuda")
LinkModel = Literal["duplex", "parallel", "sequential"]
LINK_MODELS: tuple[LinkModel, ...] = ("duplex", "parallel", "sequential")

# A hand-off between two worker threads, and a copy, as `devices --calibrate` measures them on a machine of two cores.
CPU_LATENCY_SECONDS = 45e-6
CPU_BYTES_PER_SECOND = 10e9
# PCIe 4.0 x16 through host memory, a deliberately cautious default; `devices --calibrate` measures.
CUDA_LATENCY_SECONDS = 20e-6
CUDA_BYTES_PER_SECOND = 12e9
# Nodes in segments of their own take longer than in one session, which shares copies of weights, layouts and caches:
# about this much per segment (docs/measurements.md). A call takes the rest, as `devices --calibrate` measures it.
SEGMENT_OVERHEAD_SECONDS = 35e-6
SEGMENT_SECONDS = 40e-6
# What a request takes beyond that, on one device; and on several: workers are woken, and wake the caller.
REQUEST_SECONDS, WAKING_SECONDS = 10e-6, 45e-6
# Each pair of devices has its links.
MAX_DEVICES = 256
# Beyond these, sums of bytes over devices leave 64 bits, and times and rates lose their meaning.
MAX_MEMORY_BYTES, MAX_CORES, MAX_INDEX = 1 << 60, 1 << 16, 10**6 - 1
MAX_SECONDS, MAX_LATENCY_SECONDS, MAX_SLOWDOWN = 1e6, 1e12, 1e6
MIN_BYTES_PER_SECOND, MAX_BYTES_PER_SECOND = 1e-12, 1e18


def _require_number(record: object, name: str, where: str, least: float, most: float, whole: bool = False) -> None:
    """Raise TargetError unless a field of a record is a number from `least` to `most`."""
    value = getattr(record, name)
    number = isinstance(value, (int, np.integer) if whole else (int, float, np.integer, np.floating))
    if not number or isinstance(value, bool) or not least <= value <= most:
        hint = f"it must be a {'whole ' if whole else ''}number from {least} to {most}"
        raise TargetError("T008", f"{name} cannot be {shown(value)}", where=where, hint=hint)


def require_device_limit(count: int, where: str) -> None:
    """Raise TargetError for more devices than onnxplace takes."""
    if count > MAX_DEVICES:
        message = f"{counted(count, 'device')}, and there can be {MAX_DEVICES} at most"
        hint = "each pair of devices has its links: name fewer"
        raise TargetError("T015", message, where=where, hint=hint)


@dataclass(frozen=True)
class Device:
    """Something that holds weights and computes one thing at a time."""

    id: str
    """`cpu:0`, `cuda:1`: the kind, and which one of it."""
    memory_bytes: int
    """What a placement may use here."""
    cores: int = 1
    """Processor cores of a CPU device; 1 for a GPU."""
    model: str = ""
    """What the hardware calls itself, for GPUs; devices of one kind and model cost the same."""
    segment_seconds: float = SEGMENT_SECONDS
    """What each segment costs besides its nodes: its call, and what caches and copies of its own cost it."""
    input_seconds: float = 0.0
    """What each value that a segment takes adds to that."""
    output_seconds: float = 0.0
    """What each value that a segment gives adds to that."""

    def __post_init__(self) -> None:
        device_id(self.id, "a device")
        _require_number(self, "memory_bytes", self.id, 0, MAX_MEMORY_BYTES, whole=True)
        _require_number(self, "cores", self.id, 1, MAX_CORES, whole=True)
        for name in ("segment_seconds", "input_seconds", "output_seconds"):
            _require_number(self, name, self.id, 0, MAX_SECONDS)

    @property
    def kind(self) -> str:
        return self.id.partition(":")[0]

    @property
    def index(self) -> int:
        return int(self.id.partition(":")[2])

    @property
    def cost_class(self) -> str:
        """Return the name under which operator times are kept: `cpu/2` (two cores), `cuda/NVIDIA H100`."""
        return f"cpu/{self.cores}" if self.kind == "cpu" else f"{self.kind}/{self.model or 'unknown'}"


@dataclass(frozen=True)
class Link:
    """A directed connection: a transfer takes `latency_seconds + bytes / bytes_per_second`."""

    source: str
    destination: str
    latency_seconds: float
    bytes_per_second: float
    via: str = ""
    """What connects the two: `memory`, `nvlink`, `pcie` (from GPU to GPU), `host` (through its memory); for people."""

    def __post_init__(self) -> None:
        where = f"link {self.source} -> {self.destination}"
        _require_number(self, "latency_seconds", where, 0, MAX_LATENCY_SECONDS)
        if self.bytes_per_second != math.inf:  # transfers that take no time
            _require_number(self, "bytes_per_second", where, MIN_BYTES_PER_SECOND, sys.float_info.max)


@dataclass(frozen=True)
class Shared:
    """Devices that share something, such as the bandwidth of one memory: each is slower while others are busy.

    Each factor is for one other device that is busy all the time; n of them make it 1 + n times what it exceeds 1 by.
    """

    devices: tuple[str, ...]
    memory_slowdown: float = 1.0
    """Of work that waits for memory."""
    compute_slowdown: float = 1.0
    """Of work that does not."""
    memory_bytes_per_second: float = 0.0
    """What one of them alone reads from memory; 0 where nobody measured it."""

    def __post_init__(self) -> None:
        where = f"shared {', '.join(map(str, self.devices[:MAX_LISTED]))}"
        for name in ("memory_slowdown", "compute_slowdown"):
            _require_number(self, name, where, 1, MAX_SLOWDOWN)
        _require_number(self, "memory_bytes_per_second", where, 0, MAX_BYTES_PER_SECOND)
        if len(set(self.devices)) < max(len(self.devices), 2):
            raise TargetError("T008", "sharing takes two devices or more, each named once", where=where)


@dataclass(frozen=True)
class Target:
    """Devices in order, and the links between each pair of them."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    """Only those that differ from the defaults for their kinds of device."""
    link_model: LinkModel = "duplex"
    shared: tuple[Shared, ...] = ()
    """Devices that slow each other down."""
    _position: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.devices:
            raise TargetError("T001", "the list of devices is empty", hint="name at least one, such as cpu:0")
        require_device_limit(len(self.devices), "target")
        position = {device.id: index for index, device in enumerate(self.devices)}
        if len(position) < len(self.devices):
            raise TargetError(
                "T002", "a device is named twice", where=", ".join(d.id for d in self.devices), hint="name each once"
            )
        for link in self.links:
            if link.source == link.destination:
                hint = "what stays on a device crosses no link; leave it out"
                where = f"link {link.source} -> {link.destination}"
                raise TargetError("T008", "a link cannot lead from a device to itself", where=where, hint=hint)
        named: list[tuple[str, tuple[str, ...]]] = [("link", (link.source, link.destination)) for link in self.links]
        named += [("shared entry", entry.devices) for entry in self.shared]
        for what, ends in named:
            for end in ends:
                if end not in position:
                    raise TargetError(
                        "T003",
                        f"the {what} names a device that is not there: {end!r}",
                        where="target",
                        hint=nearest(end, position),
                    )
        object.__setattr__(self, "_position", position)

    def position(self, device_id: str) -> int:
        """Return the index of a device; raises TargetError with the nearest name if it is not there."""
        if device_id not in self._position:
            raise TargetError(
                "T004", f"no device {device_id!r} in this target", hint=nearest(device_id, self._position)
            )
        return self._position[device_id]

    def with_all_links(self) -> Target:
        """Return this target with every link spelt out, so that it does not depend on our defaults."""
        given = {(link.source, link.destination): link for link in self.links}
        links = tuple(
            given.get((a.id, b.id), default_link(a, b)) for a in self.devices for b in self.devices if a is not b
        )
        return replace(self, links=links)

    def link_arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return latency (seconds) and seconds per byte, both [source, destination]; zero on the diagonal."""
        count = len(self.devices)
        latency, per_byte = np.zeros((count, count)), np.zeros((count, count))
        for i, source in enumerate(self.devices):
            for j, destination in enumerate(self.devices):
                if i != j:
                    link = default_link(source, destination)
                    latency[i, j], per_byte[i, j] = link.latency_seconds, 1.0 / link.bytes_per_second
        for link in self.links:
            i, j = self.position(link.source), self.position(link.destination)
            latency[i, j], per_byte[i, j] = link.latency_seconds, 1.0 / link.bytes_per_second
        return latency, per_byte

    def limiting(self, limits: Mapping[str, int]) -> Target:
        """Return this target with other memory limits (bytes by device id)."""
        for device_id in limits:
            self.position(device_id)
        return replace(
            self,
            devices=tuple(
                replace(device, memory_bytes=limits.get(device.id, device.memory_bytes)) for device in self.devices
            ),
        )


def default_link(source: Device, destination: Device) -> Link:
    """Return the link assumed between two devices of which nothing was measured."""
    if source.kind == destination.kind == "cpu":
        return Link(source.id, destination.id, CPU_LATENCY_SECONDS, CPU_BYTES_PER_SECOND)
    return Link(source.id, destination.id, CUDA_LATENCY_SECONDS, CUDA_BYTES_PER_SECOND)


def device_id(text: str, where: str) -> str:
    """Return a device id in its one spelling; raises TargetError with the nearest kind for what is none.

    >>> device_id("cpu:00", "--devices")
    'cpu:0'
    """
    kind, _, index = text.partition(":")
    if kind not in KINDS:
        if together := re.fullmatch(r"([A-Za-z]+)([0-9]+)", text):
            kind, index = together.groups()
        number = index if index.isascii() and index.isdecimal() else "0"
        hint = nearest(f"{kind}:{number}", [f"{known}:{number}" for known in KINDS])
        hint += " (devices are written kind:index, such as cpu:0)"
        raise TargetError("T005", f"unknown device {text!r}", where=where, hint=hint)
    if not (index.isascii() and index.isdecimal()):
        hint = f"write {kind}:0 for the first one"
        raise TargetError("T005", f"device {text!r} has no index", where=where, hint=hint)
    index = index.lstrip("0") or "0"
    if len(index) > len(str(MAX_INDEX)):
        hint = f"the index is at most {MAX_INDEX}"
        raise TargetError("T005", f"device {shown(text)} has too large an index", where=where, hint=hint)
    return f"{kind}:{index}"


def parse_device_ids(text: str | Sequence[str], where: str = "--devices") -> tuple[str, ...]:
    """Split `cuda:0,cpu:1` into ids; raises TargetError that names the bad one.

    >>> parse_device_ids("cuda:0, cpu:1")
    ('cuda:0', 'cpu:1')
    """
    items = text.split(",") if isinstance(text, str) else list(text)
    items = [item.strip() for item in items if item.strip()]
    require_device_limit(len(items), where)
    ids = tuple(device_id(item, where) for item in items)
    if not ids:
        raise TargetError("T001", "the list of devices is empty", where=where, hint="try --devices cpu:0,cpu:1")
    if len(set(ids)) < len(ids):
        raise TargetError("T002", "a device is named twice", where=f"{where} {','.join(ids)}", hint="name each once")
    return ids


_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(text: str) -> int:
    """Read an amount of memory such as `16GiB`, `500MB` or `1024`.

    >>> parse_bytes("1.5KiB")
    1536
    """
    hint = "write it as 16GiB, 500MB or 1048576"
    short = text if len(text) <= MAX_SHOWN else ""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", short)
    if not match or match[2].lower() not in _UNITS:
        raise UsageError("U010", f"not an amount of memory: {shown(text)}", hint=hint)
    amount = float(match[1]) * _UNITS[match[2].lower()]
    if amount > MAX_MEMORY_BYTES:
        raise UsageError("U010", f"no device has so much memory: {text!r}", hint=f"{hint}, up to 2**60 bytes")
    return int(amount)


def parse_memory(text: str, device_ids: Iterable[str]) -> dict[str, int]:
    """Read `16GiB` (every device) or `cuda:0=16GiB,cpu:0=64GiB` into bytes by device id."""
    ids = list(device_ids)
    if "=" not in text:
        return dict.fromkeys(ids, parse_bytes(text))
    limits: dict[str, int] = {}
    for item in text.split(","):
        device_id, _, amount = item.strip().partition("=")
        if device_id not in ids:
            raise TargetError(
                "T004", f"no device {device_id!r} to limit", where="--max-memory", hint=nearest(device_id, ids)
            )
        if device_id in limits:
            raise TargetError("T002", f"{device_id} is limited twice", where="--max-memory", hint="name each once")
        limits[device_id] = parse_bytes(amount)
    return limits


def read_target(path: str | Path) -> Target:
    """Read a target file (TOML, docs/target.md); raises TargetError naming the file and the bad entry."""
    try:
        data = tomllib.loads(read_text(path, "T006", "TOML"))
    except InputError as problem:
        raise TargetError("T006", problem.message, where=problem.where, hint=problem.hint) from None
    except RecursionError:
        raise TargetError(
            "T006", "not TOML that describes a target: it is nested too deeply", where=str(path)
        ) from None
    except ValueError as problem:  # no TOML, or a number of thousands of digits
        raise TargetError("T006", f"not TOML: {one_line(problem)}", where=str(path)) from None
    try:
        return _target_from(data)
    except TargetError as problem:
        place = f"{path}, {problem.where}" if problem.where else str(path)
        raise TargetError(problem.code, problem.message, where=place, hint=problem.hint) from None
    except ValueError as problem:
        raise TargetError("T007", f"not a target: {problem}", where=str(path), hint="see docs/target.md") from None


_ENTRIES = ("devices", "links", "link_model", "shared")


def _target_from(data: dict[str, object]) -> Target:
    for key in data:
        if key not in _ENTRIES:
            raise ValueError(f"unknown entry {shown(key)}; {nearest(key, _ENTRIES)}")
    model = data.get("link_model", "duplex")
    if model not in LINK_MODELS:
        raise ValueError(f"link_model cannot be {shown(model)}, only {', '.join(repr(name) for name in LINK_MODELS)}")
    shared = _records(data, "shared", Shared)
    return Target(_records(data, "devices", Device), _records(data, "links", Link), model, shared)


R = TypeVar("R")


def _records(data: Mapping[str, object], key: str, kind: type[R]) -> tuple[R, ...]:
    """Read a table of records by the fields of a dataclass; raises ValueError in one line."""
    from pydantic import TypeAdapter, ValidationError

    entries = data.get(key, [])
    if not isinstance(entries, list):
        raise ValueError(f"{key!r} is no list; write [[{key}]]")
    if key == "devices":
        require_device_limit(len(entries), "")
    known = [item.name for item in fields(kind) if item.init]  # type: ignore[arg-type]
    for entry in entries:
        for name, value in entry.items() if isinstance(entry, dict) else ():
            if name not in known:
                raise ValueError(f"unknown entry {shown(name)} in {key}; {nearest(name, known)}")
            if isinstance(value, bool):  # pydantic would take it for 0 or 1
                raise ValueError(f"{name} in {key} cannot be {str(value).lower()}")
    try:
        return TypeAdapter(tuple[kind, ...]).validate_python(entries)  # type: ignore[valid-type]
    except ValidationError as problem:
        first = problem.errors()[0]
        raise ValueError(f"{'.'.join(str(part) for part in (key, *first['loc']))}: {first['msg']}") from None


def format_target(target: Target) -> str:
    """Return the text of a target file that `read_target` reads back equal."""
    lines = [f'link_model = "{target.link_model}"', ""]
    tables: tuple[tuple[str, tuple[Device | Link | Shared, ...]], ...] = (
        ("[[devices]]", target.devices),
        ("[[links]]", target.links),
        ("[[shared]]", target.shared),
    )
    for heading, records in tables:
        for record in records:
            entries = [(item.name, getattr(record, item.name)) for item in fields(record)]
            lines += [heading, *[f"{name} = {_toml(value)}" for name, value in entries], ""]
    return "\n".join(lines)


def _toml(value: object) -> str:
    """Return a value as TOML writes it; JSON strings are TOML strings."""
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=True).replace("\\u007f", "\\u007F") if isinstance(value, str) else repr(value)
