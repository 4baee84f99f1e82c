"""The report of a self-check: plain records, and their form as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from onnxplace.doctor.privacy import hide_private

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
                {
                    "check": result.check,
                    "devices": list(result.devices),
                    "status": result.status,
                    "detail": hide_private(result.detail),
                    "seconds": round(result.seconds, 3),
                    "figures": hide_private(result.figures),
                }
                for result in self.checks
            ],
        }
