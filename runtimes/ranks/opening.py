"""What the driver and its ranks say to each other when a bundle is opened, and errors on their way."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.bundle import Bundle, Manifest
from onnxplace.errors import (
    BundleError,
    ExecutionError,
    FeedError,
    ModelError,
    OnnxplaceError,
    PluginError,
    TargetError,
    UsageError,
)
from onnxplace.runtimes.ranks.frames import Frame


def find_clock() -> str:
    """Return what tells the clocks of `time.perf_counter` apart: all processes of a running Linux have the same."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@dataclass(frozen=True)
class Opening:
    """What the driver says when it opens a bundle."""

    bundle: Bundle
    devices: tuple[str, ...]
    """By rank."""
    trace: bool
    libraries: tuple[str, ...]
    """Of custom operators."""
    versions: Mapping[str, str]
    """The driver's."""
    optimises: bool = True
    """Whether ONNX Runtime optimises the segments."""
    remote: tuple[int, ...] = ()
    """Ranks on other machines than the driver's."""
    probe: tuple[Any, ...] = ()
    """Memory that ranks try to share; empty if there is none."""
    clock: str = field(default_factory=find_clock)
    """The clock of its events."""

    def to_frame(self) -> Frame:
        """Return it as a frame, with the manifest as a buffer."""
        fields = {
            "path": str(self.bundle.path.resolve()),
            "devices": self.devices,
            "trace": self.trace,
            "libraries": self.libraries,
            "versions": dict(self.versions),
            "optimises": self.optimises,
            "remote": self.remote,
            "probe": self.probe,
            "clock": self.clock,
        }
        return Frame("open", fields, [np.frombuffer(self.bundle.manifest.model_dump_json().encode(), np.uint8)])

    @staticmethod
    def from_frame(frame: Frame) -> Opening:
        """Return it as a rank reads it."""
        fields = frame.fields
        manifest = Manifest.model_validate_json(bytes(frame.buffers[0]))
        bundle = Bundle(Path(fields["path"]), manifest)
        return Opening(
            bundle=bundle,
            devices=tuple(fields["devices"]),
            trace=fields["trace"],
            libraries=tuple(fields["libraries"]),
            versions=fields["versions"],
            optimises=fields["optimises"],
            remote=tuple(fields["remote"]),
            probe=tuple(fields["probe"]),
            clock=fields["clock"],
        )


def describe_error(problem: OnnxplaceError) -> dict[str, str]:
    """Return an error as plain data; `rebuild_error` is the inverse."""
    return {
        "class": type(problem).__name__,
        "code": problem.code,
        "message": problem.message,
        "where": problem.where,
        "hint": problem.hint,
    }


def rebuild_error(data: Mapping[str, str], place: str) -> OnnxplaceError:
    """Return the error of a rank, which says where it arose.

    Args:
        data: Of `describe_error`.
        place: The rank, for errors that name no place.
    """
    kinds = {kind.__name__: kind for kind in (BundleError, FeedError, ModelError, PluginError, TargetError, UsageError)}
    kind = kinds.get(data["class"], ExecutionError)
    return kind(data["code"], data["message"], where=data["where"] or place, hint=data["hint"])
