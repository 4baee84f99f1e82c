"""Trials in the cache of measurements: the same segments with the same inputs are not measured twice.

A kind of trial is a frozen dataclass. The limits of its fields are those of an entry: a damaged one counts as absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from onnxplace.bundle.bundle import COSTS_FILE, WHOLE_MODEL_FILE, Bundle
from onnxplace.feeds.feeds import Array
from onnxplace.machine import measurement_cache
from onnxplace.machine.ort_sessions import list_operator_libraries
from onnxplace.target.limits import MAX_SECONDS
from onnxplace.utils.ort import import_onnxruntime

# Limits of the numbers in trials, which are also the limits of entries in the cache.
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
RequestCount = Annotated[int, Field(ge=1, le=10**9)]
Share = Annotated[float, Field(ge=0, le=1)]


class KindOfTrial(Protocol):
    """What all kinds of trials have."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def segment_seconds(self) -> Mapping[str, float]:
        """Return the time of each segment."""

    @property
    def is_doubtful(self) -> bool:
        """Return whether other work on the machine may have slowed it."""


AnyTrial = TypeVar("AnyTrial", bound=KindOfTrial)


def measure_once(
    kind: type[AnyTrial],
    parts: Sequence[str],
    bundles: Sequence[Bundle],
    feeds: Mapping[str, Array],
    cached: bool,
    kept: bool,
    measure: Callable[[], tuple[AnyTrial, ...]],
) -> tuple[AnyTrial, ...]:
    """Return the trials of bundles, of earlier measurements of equal segments and feeds if there are any.

    Args:
        kind: The kind of trial.
        parts: What else the measurement depends on.
        bundles: What is run.
        feeds: Inputs.
        cached: Whether trials may be read from the cache.
        kept: Whether trials are written there, in the place of earlier ones, unless other work disturbed them.
        measure: Runs the bundles.
    """
    name = measurement_cache.key([*parts, *(build_trial_key(bundle, feeds) for bundle in bundles)])
    if cached and (trials := recall_trials(name, kind, bundles)):
        return trials
    trials = measure()
    if kept and not any(trial.is_doubtful for trial in trials):
        with suppress(ValueError):  # for example a full disk: then it is measured again next time
            measurement_cache.write(name, {"trials": [asdict(trial) for trial in trials]})
    return trials


def recall_trials(name: str, kind: type[AnyTrial], bundles: Sequence[Bundle]) -> tuple[AnyTrial, ...]:
    """Return the trials under a key of the cache; nothing if there are none, or invalid ones, which are removed."""
    try:
        entry = measurement_cache.read(name)
    except ValueError:
        return ()
    if entry is None:
        return ()
    segments = [{segment.id for segment in bundle.manifest.segments} for bundle in bundles]
    with suppress(ValidationError):
        adapter: TypeAdapter[tuple[AnyTrial, ...]] = TypeAdapter(tuple[kind, ...])  # type: ignore[valid-type]
        trials = adapter.validate_json(json.dumps(entry.get("trials")), strict=True)
        if [set(trial.segment_seconds) for trial in trials] == segments:
            return trials
    measurement_cache.damaged(name, "it does not hold these trials")
    return ()


def build_trial_key(bundle: Bundle, feeds: Mapping[str, Array]) -> str:
    """Return the cache key of a trial: segments and their devices, machine, inputs."""
    manifest = bundle.manifest
    unread = {COSTS_FILE, WHOLE_MODEL_FILE, *bundle.compiled_files}  # equal models may be compiled to other bytes
    run_files = {name: record for name, record in manifest.files.items() if name not in unread}
    return measurement_cache.key(
        [
            *(measurement_cache.processor(), import_onnxruntime().__version__),
            *map(measurement_cache.file_described, list_operator_libraries()),
            *(f"{device.id} {device.cores} {device.model}" for device in manifest.target.devices),
            manifest.model_dump_json(include={"programs", "states"}),
            *(str(sorted(route.devices.items())) for route in manifest.routes),
            *(f"pool {stream.device} {stream.pool_bytes}" for stream in manifest.streams),
            *(f"home {name} {record.home}" for name, record in sorted(manifest.streamed.items())),
            *(f"{name} {record.sha256}" for name, record in sorted({**run_files, **manifest.linked}.items())),
            *(f"{name} {measurement_cache.described(value)}" for name, value in sorted(feeds.items())),
        ]
    )
