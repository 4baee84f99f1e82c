"""What the driver and its ranks say to each other when a bundle is opened, and errors on their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields as dataclass_fields
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
from onnxplace.hosts import is_this_machine, list_versions
from onnxplace.machine import list_operator_libraries, uses_optimisations
from onnxplace.runtimes.ranks.frames import Frame
from onnxplace.runtimes.ranks.rank_plans import RankPlan


def find_clock() -> str:
    """Return what tells the clocks of `time.perf_counter` apart: all processes of a running Linux have the same."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@dataclass(frozen=True)
class Opening:
    """What the driver says when it opens a bundle."""

    bundle: Bundle
    devices: Sequence[str]
    """The device of each rank."""
    trace: bool
    libraries: Sequence[str]
    """Shared libraries with custom operators."""
    versions: Mapping[str, str]
    """Versions of all that has to be equal on hosts, as the driver has them."""
    optimises: bool
    """Whether ONNX Runtime optimises the segments."""
    remote: Sequence[int]
    """Ranks on other machines than the driver's, which fetch what they need of the bundle."""
    probe: Sequence[Any] = ()
    """Memory that ranks try to share; empty if there is none."""
    clock: str = field(default_factory=find_clock)
    """The clock of the driver's events."""

    @staticmethod
    def of(bundle: Bundle, plan: RankPlan, trace: bool, *, fetches: bool) -> Opening:
        """Return what the ranks of a plan are told; `fetches` if some may be on other machines."""
        return Opening(
            bundle=bundle,
            devices=plan.devices,
            trace=trace,
            libraries=list_operator_libraries(),
            versions=list_versions(),
            optimises=uses_optimisations(),
            remote=[rank for rank, host in enumerate(plan.hosts) if fetches and not is_this_machine(host)],
        )

    def to_frame(self) -> Frame:
        """Return it as a frame, with the manifest as a buffer; `from_frame` is the inverse."""
        others = {item.name: getattr(self, item.name) for item in dataclass_fields(self) if item.name != "bundle"}
        manifest = np.frombuffer(self.bundle.manifest.model_dump_json().encode(), np.uint8)
        return Frame("open", {"path": str(self.bundle.path.resolve()), **others}, [manifest])

    @staticmethod
    def from_frame(frame: Frame) -> Opening:
        """Return it as a rank reads it."""
        path, manifest = frame.fields["path"], Manifest.model_validate_json(bytes(frame.buffers[0]))
        others = {name: value for name, value in frame.fields.items() if name != "path"}
        return Opening(Bundle(Path(path), manifest), **others)


def describe_error(problem: OnnxplaceError) -> dict[str, str]:
    """Return an error as plain data; `rebuild_error` is the inverse."""
    parts = {name: getattr(problem, name) for name in ("code", "message", "where", "hint")}
    return {"class": type(problem).__name__, **parts}


def rebuild_error(data: Mapping[str, str], place: str) -> OnnxplaceError:
    """Return the error of a rank, which says where it arose.

    Args:
        data: Of `describe_error`.
        place: The rank, for errors that name no place.
    """
    kinds = {kind.__name__: kind for kind in (BundleError, FeedError, ModelError, PluginError, TargetError, UsageError)}
    kind = kinds.get(data["class"], ExecutionError)
    return kind(data["code"], data["message"], where=data["where"] or place, hint=data["hint"])
