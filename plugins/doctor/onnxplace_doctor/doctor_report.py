"""The report of a self-check: plain records, as JSON and as text, without what identifies a machine or its users."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from onnxplace.reports.text import format_table

# -------------------------------------------------------------------------------------------------------------- privacy


# An absolute path of two parts or more; ids of devices such as cuda:0/1, and units such as MiB/s, have a character
# before their slash.
_PATH = re.compile(r"(?<![\w.:/<>)])(?:/[^\s/:'\",;()\[\]]+){2,}/?|\b[A-Za-z]:[\\/][^\s:'\",;()\[\]]+")
# Shorter names are part of too many words.
MIN_NAME_CHARACTERS = 3


def hide_private(value: Any) -> Any:
    """Return plain data whose texts have no paths, host names and user names; keys of mappings stay.

    >>> hide_private({"detail": "cannot open /data/secret/model.onnx"})
    {'detail': 'cannot open <path>'}
    """
    if isinstance(value, str):
        for pattern, replacement in _list_private():
            value = pattern.sub(replacement, value)
        return value
    if isinstance(value, Mapping):
        return {key: hide_private(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide_private(item) for item in value]
    return value


@cache
def _list_private() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return what to replace, and by what: folders whose names may have spaces, other paths, names of host and user."""
    folders = {tempfile.gettempdir(), sys.prefix, sys.base_prefix, str(Path(__file__).parents[2])}
    with suppress(OSError, RuntimeError):
        folders |= {str(Path.home()), os.getcwd()}
    hosts = {platform.node(), socket.gethostname()}
    names = dict.fromkeys([*hosts, *(host.partition(".")[0] for host in hosts)], "<host>")
    with suppress(OSError, KeyError, ImportError, RuntimeError):
        names = dict.fromkeys((getpass.getuser(), Path.home().name), "<user>") | names
    # The longest first, so that nothing is left of a name that another one begins.
    return (
        *(
            (re.compile(re.escape(folder) + r"[^\s:'\",;()\[\]]*"), "<path>")
            for folder in sorted(folders, key=len, reverse=True)
            if len(Path(folder).parts) > 1
        ),
        (_PATH, "<path>"),
        *(
            (re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE), names[name])
            for name in sorted(names, key=len, reverse=True)
            if len(name) >= MIN_NAME_CHARACTERS
        ),
    )


# -------------------------------------------------------------------------------------------------------------- records


SCHEMA_VERSION = 1
# The name of the result that says how the process of a group of checks ended.
EXIT_CHECK = "exit"
Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check on some devices."""

    check: str
    """Its name, as in docs/doctor.md."""
    devices: tuple[str, ...]
    """What it ran on; the kind's name for checks of kinds, empty for those of the machine."""
    status: Status
    detail: str = ""
    """What was found, or why it failed or was skipped."""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Measured values by name, with the unit in the name; plain data."""


@dataclass(frozen=True)
class DoctorReport:
    """All results of a self-check."""

    environment: Mapping[str, Any]
    """Machine and versions."""
    devices: tuple[str, ...]
    """The devices that were checked."""
    checks: tuple[CheckResult, ...]
    """In the order in which they ran."""
    seconds: float
    interrupted: bool = False
    """Whether the user ended it early."""

    @property
    def ok(self) -> bool:
        """Return whether no check failed."""
        return all(result.status != "failed" for result in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data, without paths and names of this machine and its users."""
        return {
            "schema_version": SCHEMA_VERSION,
            "ok": self.ok,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 3),
            "environment": hide_private(self.environment),
            "devices": list(self.devices),
            "checks": [
                asdict(result)
                | {"devices": list(result.devices), "seconds": round(result.seconds, 3)}
                | {"detail": hide_private(result.detail), "figures": hide_private(result.figures)}
                for result in self.checks
            ],
        }


# ----------------------------------------------------------------------------------------------------------------- text


# Characters of a line of a detail in the table.
MAX_DETAIL = 100


def format_report(report: DoctorReport) -> str:
    """Return the table of checks with their details, then failures again, then the verdict."""
    results = [item for item in report.checks if (item.check, item.status) != (EXIT_CHECK, "ok")]
    rows = [(item.status, item.check, " ".join(item.devices), f"{item.seconds:.1f} s") for item in results]
    lines = format_table(("result", "check", "on", "time"), rows, left=3).splitlines()
    details = [hide_private(item.detail) for item in results]
    indent = "\n" + " " * (len(lines[0]) + 2)
    wrapped = ["", *(indent.join(textwrap.wrap(text, MAX_DETAIL, break_on_hyphens=False)) for text in details)]
    table = [f"{line}  {text}".rstrip() for line, text in zip(lines, wrapped)]
    rest = [
        f"{item.status} {item.check} {' '.join(item.devices)}: {text}".replace(" :", ":")
        for item, text in zip(results, details)
        if item.status == "failed"
    ]
    counts = Counter(item.status for item in results)
    verdict = ", ".join(f"{counts[status]} {status}" for status in ("ok", "failed", "skipped") if counts[status])
    end = f"{'interrupted: ' if report.interrupted else ''}{verdict}, in {report.seconds:.0f} s"
    return "\n".join([*table, *(["", *rest] if rest else []), "", end])
