"""Lists of hosts, as people, Slurm and MPI write them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onnxplace.errors import TargetError, UsageError, format_value
from onnxplace.target.hosts import require_host_name
from onnxplace.utils.files import read_text

MAX_HOSTS, MAX_SLOTS = 64, 1024
# Commas outside of brackets separate hosts: `node[1-3,7],gpu01`.
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\]|[\[\]])+")
_BRACKETS = re.compile(r"(?P<before>[^\[\]]*)\[(?P<ranges>[0-9,-]+)\](?P<after>[^\[\]]*)")
_RANGE = re.compile(r"(?P<first>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9}))?")
_COUNT = re.compile(r"[0-9]{1,9}")
# A line of a hostfile: the name, and perhaps slots as Open MPI (`slots=2`) or MPICH (`:2`) writes them.
_LINE = re.compile(r"(?P<name>[^\s:]+)(?::(?P<count>[0-9]+))?(?:\s+slots=(?P<slots>[0-9]+))?")
_HINT = "name two or more hosts, as in --hosts node1,node2, --hosts node[1-4] or --hosts @hostfile"


@dataclass(frozen=True)
class HostSlots:
    """A host, and how many devices may run there."""

    name: str
    slots: int | None = None
    """None for as many as a bundle has."""


def parse_slots(text: str) -> tuple[HostSlots, ...]:
    """Parse `node1:2,node2:1`, Slurm's `node[1-2]` or `@hostfile` into hosts and their slots.

    Raises UsageError or TargetError that names the bad part.

    >>> parse_slots("localhost:2")
    (HostSlots(name='localhost', slots=2),)
    """
    hosts = _list_hosts(text)
    if not 0 < len(hosts) <= MAX_HOSTS:
        message = f"expected 1 to {MAX_HOSTS} hosts, got {format_value(text)}"
        raise UsageError("K001", message, where="--hosts", hint="as in --hosts localhost:2 or --hosts node1:1,node2:1")
    return hosts


def parse_hosts(text: str) -> tuple[str, ...]:
    """Parse `node1,node2`, Slurm's `node[1-2]` or `@hostfile` into names of hosts; numbers of slots are left out.

    Raises UsageError or TargetError that names the bad part.

    >>> parse_hosts("node[08-10],gpu1")
    ('node08', 'node09', 'node10', 'gpu1')
    """
    hosts = _list_hosts(text)
    if len(hosts) < 2:
        message = f"expected two or more hosts, got {format_value(text)}"
        hint = f"{_HINT}; of one host, `onnxplace devices --calibrate` measures the devices and links"
        raise UsageError("K001", message, where="--hosts", hint=hint)
    if len(hosts) > MAX_HOSTS:
        message = f"expected at most {MAX_HOSTS} hosts, got more in {format_value(text)}"
        raise UsageError("K001", message, where="--hosts", hint="name fewer hosts")
    return tuple(host.name for host in hosts)


def _list_hosts(text: str) -> tuple[HostSlots, ...]:
    """Return the hosts of a list or hostfile, at most one more than the most; raises an error for a bad one."""
    hosts: dict[str, HostSlots] = {}
    for item in _read_hostfile(text[1:]) if text.startswith("@") else _expand_list(text):
        name, colon, count = item.partition(":")
        require_host_name(name, "--hosts")
        if colon and not (_COUNT.fullmatch(count) and 0 < int(count) <= MAX_SLOTS):
            message = f"expected a number of devices from 1 to {MAX_SLOTS} after the colon, got {format_value(item)}"
            raise UsageError("K001", message, where="--hosts", hint="as in --hosts node1:2,node2:1")
        if name in hosts:
            message = f"host {name!r} is named twice"
            raise UsageError("K001", message, where="--hosts", hint="name each host once")
        hosts[name] = HostSlots(name, int(count) if colon else None)
        if len(hosts) > MAX_HOSTS:  # a range may have a thousand million hosts
            break
    return tuple(hosts.values())


def _expand_list(text: str) -> Iterator[str]:
    """Yield the hosts of a list with commas and brackets."""
    for item in filter(None, map(str.strip, _ITEM.findall(text))):
        if not set("[]") & set(item):
            yield item
            continue
        match = _BRACKETS.fullmatch(item)
        if match is None:
            message = f"expected one pair of brackets with numbers, as in node[1-4,7], got {format_value(item)}"
            raise UsageError("K001", message, where="--hosts", hint=_HINT)
        for number in _expand_ranges(match["ranges"], item):
            yield f"{match['before']}{number}{match['after']}"


def _expand_ranges(text: str, item: str) -> Iterator[str]:
    """Yield the numbers of `1-4,7`, with as many leading zeros as the first number of a range has."""
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match["last"] or match["first"]) < int(match["first"]):
            message = f"expected numbers or ascending ranges, as in node[1-4,7], got {format_value(item)}"
            raise UsageError("K001", message, where="--hosts", hint=_HINT)
        for number in range(int(match["first"]), int(match["last"] or match["first"]) + 1):
            yield f"{number:0{len(match['first'])}d}"


def _read_hostfile(path: str) -> Iterator[str]:
    """Yield the hosts of a file with one a line, and comments after `#`; those with slots as `name:slots`."""
    lines = read_text(Path(path), "K001", "a hostfile").splitlines()
    for number, line in enumerate(lines, 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            message = f"expected a host name on a line, as in `node1` or `node1 slots=2`, got {format_value(content)}"
            raise TargetError("K001", message, where=f"{path}, line {number}", hint="name one host on each line")
        slots = match["count"] or match["slots"]
        yield f"{match['name']}:{slots}" if slots else match["name"]
