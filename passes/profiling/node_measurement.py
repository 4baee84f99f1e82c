"""Measure a model with ONNX Runtime, kernel by kernel.

One session runs the model as it will be run, first with the profiler, then without it. The times of the kernels are
scaled to add up to an unprofiled run. Where the profiler adds hardly anything, its own runs tell how long that takes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxplace.facts import Quality
from onnxplace.graph.op_graph import Floats, Ints
from onnxplace.machine.isolated_sessions import IsolatedSession, open_session
from onnxplace.machine.ort_sessions import (
    list_operator_libraries,
    make_session_options,
    pin_thread,
    use_custom_operators,
)
from onnxplace.machine.ort_values import make_runner
from onnxplace.machine.repeated_runs import BUSY_WAITING_SHARE, RepeatPolicy, Runs
from onnxplace.machine.session_errors import find_disk_full
from onnxplace.model.model import Model, store_for_session
from onnxplace.model.tensors import packed_size
from onnxplace.passes.profiling.kernel_attribution import PROFILER_SECONDS, attribute_kernels, remove_overhead
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.kind_table import find_kind
from onnxplace.utils.file_locks import temporary_folder
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.progress import progress_part
from onnxplace.utils.subprocesses import run_in_child

Feeds = Mapping[str, NDArray[Any]]
# Unmeasured runs of each series: this many, or fewer once they have taken this time.
WARM_UP_RUNS, WARM_UP_SECONDS = 2, 0.05
# Most events that a profile may hold (640 bytes each on disk), though not fewer than those of three runs.
MAX_EVENTS = 5_000


@dataclass(frozen=True)
class Measurement:
    """The times of a model's nodes on one class of device."""

    seconds: Floats
    """Per node, scaled so that they add up to an unprofiled run of the whole model."""
    unit: Ints
    """Dense id per node: nodes of one kernel."""
    ran: NDArray[np.bool_]
    """Per node: False if ONNX Runtime folded it away."""
    measured: NDArray[np.bool_]
    """Per node: False if it could not be run, so that its time is unknown."""
    spread: Floats
    """Per node, half the distance between the quartiles of its times, in seconds."""
    whole_seconds: float | None = None
    """The time of one unprofiled run; None if the model never ran as a whole."""
    value_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the values that survived fusion, by name."""
    quality: Quality | None = None
    """None if the model never ran as a whole."""


@dataclass(frozen=True)
class MeasurementOptions:
    """How to measure: the device, and when to stop."""

    device: DeviceAddress
    cores: tuple[int, ...]
    repeat: int
    """Most runs."""
    seconds: float
    """About how long to run, with the profiler and again without it; at least three runs each."""
    tolerance: float = 0.02
    """Stop when the standard error of the median run is below this share of it."""
    thorough: bool = False
    """Whether to run without the profiler, too, where that adds hardly anything to a run."""

    def measure(self, model: Model, feeds: Feeds) -> tuple[Measurement, list[Any]]:
        """Measure the whole model; return measurement and last results.

        On a GPU the profiled runs happen in a child process whose launches wait for their kernels: ONNX Runtime's
        times would be those of the launches otherwise. The unprofiled runs, to whose time all is scaled, are
        ordinary ones.
        """
        with temporary_folder() as folder, pin_thread(self.cores):
            source, entries = store_for_session(model, folder)
            max_runs = max(MAX_EVENTS // max(len(model.nodes), 1), 3)
            policy = RepeatPolicy(min(self.repeat, max_runs), self.seconds, self.tolerance)
            job = ProfilingJob(
                source=source,
                entries=entries,
                device=self.device,
                cores=self.cores,
                feeds=dict(feeds),
                policy=policy,
                folder=str(folder),
                where=model.name,
            )
            with progress_part(0, 2):
                if find_kind(self.device.kind).is_host:
                    kernels, session, runs, results = profile(job)
                    added = PROFILER_SECONDS * len(kernels.seconds)
                    is_known = not self.thorough and added <= self.tolerance * runs.seconds
                else:
                    kernels, is_known, added = profile_blocking(job), False, 0.0
                    session = open_session(
                        source, make_session_options(self.cores, "all", entries), self.device, model.name
                    )
            with progress_part(1, 2):
                if is_known:
                    runs = replace(runs, elapsed_seconds=runs.elapsed_seconds - added)
                else:
                    policy = RepeatPolicy(self.repeat, self.seconds, self.tolerance)
                    runs, results = run_repeatedly(session, job.where, job.feeds, job.cores, policy)
            del session
            fused, ran = (
                onnx.load(folder / f"{level}.onnx", load_external_data=False) for level in ("extended", "all")
            )
        return _attribute_measurement(model, fused, ran, kernels, runs), results


@dataclass(frozen=True)
class ProfilingJob:
    """The settings of a profiling run; can be sent to another process."""

    source: bytes | Path
    entries: Mapping[str, str]
    device: DeviceAddress
    cores: tuple[int, ...]
    feeds: Feeds
    policy: RepeatPolicy
    folder: str
    """Receives the graphs after fusion and after all optimisations, as extended.onnx and all.onnx."""
    where: str
    libraries: tuple[str, ...] = field(default_factory=list_operator_libraries)
    """Libraries of custom operators."""


@dataclass(frozen=True)
class Kernels:
    """The profile of each kernel, by its name."""

    seconds: Mapping[str, float]
    spread: Mapping[str, float]
    """Half the distance between the quartiles, in seconds."""
    output_bytes: Mapping[str, Sequence[int]]
    """-1 for outputs that are no plain tensor."""


def profile_blocking(job: ProfilingJob) -> Kernels:
    """Profile in a child process, with CUDA launches that wait."""
    return run_in_child(_profile_kernels, job, "profiling", job.device.id, CUDA_LAUNCH_BLOCKING="1")


def _profile_kernels(job: ProfilingJob) -> Kernels:
    return profile(job)[0]


def profile(job: ProfilingJob) -> tuple[Kernels, Any, Runs, list[Any]]:
    """Run with the profiler; return kernels, the session, which no longer profiles, the runs and last results."""
    with use_custom_operators(job.libraries), pin_thread(job.cores):
        # This session never runs: packing its weights would take as long as for one that does.
        open_session(job.source, _saving_options(job, "extended", prepacks=False), job.device, job.where)
        options = _saving_options(job, "all")
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(job.folder) / "profile")
        session = open_session(job.source, options, job.device, job.where)
        runs, results = run_repeatedly(session, job.where, job.feeds, job.cores, job.policy)
    return collect_kernels(_read_events(session.end_profiling(), job.folder), runs), session, runs, results


def _read_events(path: str, folder: str) -> list[Mapping[str, Any]]:
    """Return the profiler's events; raises ExecutionError if the disk is full."""
    try:
        events: list[Mapping[str, Any]] = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        if full := find_disk_full(folder):
            raise full from None
        raise
    return events


def _saving_options(job: ProfilingJob, level: Any, *, prepacks: bool = True) -> Any:
    """Return options for a session that saves its optimised graph, without its weights."""
    with suppress(OSError):  # without links, as on Windows, weights are written; a link may be left by the last session
        (Path(job.folder) / "discarded").symlink_to(os.devnull)
    saved = {
        **job.entries,
        "session.optimized_model_external_initializers_file_name": "discarded",
        "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        "session.disable_prepacking": "0" if prepacks else "1",
    }
    options = make_session_options(job.cores, level, saved)
    options.optimized_model_filepath = str(Path(job.folder) / f"{level}.onnx")
    return options


def run_repeatedly(
    session: Any, where: str, feeds: Mapping[str, Any], cores: Sequence[int], policy: RepeatPolicy
) -> tuple[Runs, list[Any]]:
    """Warm up and run repeatedly; return times and last results."""
    if isinstance(session, IsolatedSession):  # in its process, since the way there is no part of a node's time
        runs: tuple[Runs, list[Any]] = session.call(run_repeatedly, where, feeds, cores, policy)
        return runs
    call, began = partial(make_runner(session, where), feeds), time.perf_counter()
    for number in range(WARM_UP_RUNS):
        if not number or time.perf_counter() - began < WARM_UP_SECONDS:
            call()
    return policy.run(call, pool=len(cores) > 1)


_KERNEL_SUFFIX = "_kernel_time"


def collect_kernels(events: Sequence[Mapping[str, Any]], runs: Runs) -> Kernels:
    """Return the times of kernels in undisturbed runs.

    These runs are the last in the profile. Times are whole microseconds, so the mean of the middle half says more than
    the median; in runs that waited for a core, the mean of the smaller half does.
    """
    begins = np.sort([event["ts"] for event in events if event["name"] == "model_run"])[-len(runs.elapsed_seconds) :]
    counted = set(runs.undisturbed.tolist())
    durations: dict[str, list[int]] = {}
    output_bytes: dict[str, list[int]] = {}
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith(_KERNEL_SUFFIX):
            continue
        name = event["name"].removesuffix(_KERNEL_SUFFIX)
        if int(np.searchsorted(begins, event["ts"], "right")) - 1 in counted:
            durations.setdefault(name, []).append(event["dur"])
            output_bytes[name] = [_tensor_bytes(shape) for shape in event["args"].get("output_type_shape", [])]
    durations.update(_collect_device_durations(events, len(begins), runs))
    middle = slice(0, 0.5) if runs.waiting > BUSY_WAITING_SHARE else slice(0.25, 0.75)
    ordered = {name: np.sort(times) * 1e-6 for name, times in durations.items()}
    seconds = {
        name: float(_between_quantiles(times, middle.start, middle.stop).mean()) for name, times in ordered.items()
    }
    spread = {name: float(np.subtract(*np.quantile(times, (0.75, 0.25)))) / 2 for name, times in ordered.items()}
    return Kernels(seconds, spread, output_bytes)


def _collect_device_durations(events: Sequence[Mapping[str, Any]], counted: int, runs: Runs) -> dict[str, list[int]]:
    """Return the times on the device itself, by kernel; empty unless the provider reports them.

    WebGPU's provider does: a kernel's own event is only its launch. The events of its programs are called
    `kernel&operator&program`. They come in the order of the runs, but have another clock.
    """
    own = (event for event in events if event.get("cat") == "Api" and event["name"].count("&") >= 2)
    programs = group_pairs((event["name"].rsplit("&", 2)[0], event["dur"]) for event in own)
    runs_in_profile = sum(event["name"] == "model_run" for event in events)
    durations = {}
    for name, times in programs.items():
        if len(times) % runs_in_profile == 0:  # data may decide how many programs run
            of_runs = np.array(times).reshape(runs_in_profile, -1).sum(axis=1)
            durations[name] = of_runs[-counted:][runs.undisturbed].tolist()
    return durations


def _between_quantiles(times: Floats, start: float, stop: float) -> Floats:
    """Return the sorted times between two quantiles, at least one."""
    first = int(start * len(times))
    return times[first : max(int(np.ceil(stop * len(times))), first + 1)]


_ELEMENT_TYPES = dict(onnx.TensorProto.DataType.items())


def _tensor_bytes(shape: Mapping[str, Sequence[int]]) -> int:
    """Return the bytes of a tensor in the profiler's form.

    For example `{"float": [1, 64]}` or `{"Int4x2": [3]}`; -1 for values that are no plain tensor.
    """
    for kind, dims in shape.items():
        name = kind.upper().removesuffix("X2").removesuffix("X4")
        if name in _ELEMENT_TYPES and name != "STRING":
            return packed_size(_ELEMENT_TYPES[name], dims)
    return -1


def _attribute_measurement(
    model: Model, fused: onnx.ModelProto, ran: onnx.ModelProto, kernels: Kernels, runs: Runs
) -> Measurement:
    """Distribute the times of kernels over the nodes whose work they do."""
    attribution = attribute_kernels(model, fused, ran)
    names = [kernel.name for kernel in ran.graph.node]
    raw = np.array([kernels.seconds.get(name, 0.0) for name in names])
    raw[attribution.kernel < 0] = 0.0
    seconds, overhead = remove_overhead(raw, runs.seconds)
    scale = float(seconds.sum()) / max(float(raw.sum()), 1e-12)
    spread = np.array([kernels.spread.get(name, 0.0) for name in names]) * scale
    sizes = {
        value: size
        for kernel in ran.graph.node
        for value, size in zip(kernel.output, kernels.output_bytes.get(kernel.name, ()))
        if size >= 0
    }
    quality = Quality(
        runs=len(runs.computing_seconds),
        spread=runs.spread,
        uncertainty=min(runs.uncertainty, 1.0),
        waiting=runs.waiting,
        kernels=len(names),
        kernel_seconds=float(raw.sum()),
        overhead_seconds=overhead,
    )
    return Measurement(
        seconds=attribution.per_node(seconds),
        unit=attribution.unit,
        ran=attribution.ran,
        measured=np.ones(len(model.nodes), dtype=bool),
        whole_seconds=runs.seconds,
        value_bytes=sizes,
        spread=attribution.per_node(spread),
        quality=quality,
    )
