"""Measure the memory of a bundle on this machine.

CPU devices are threads of one process, so each device's part is measured alone. A fresh process runs only that
device's program, on the values that it receives. Linux reports the process's peak memory (VmHWM: anonymous memory and
resident pages of files). The whole bundle is measured the same way, and GPUs by their own counters.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from onnxplace.bundle.bundle import Bundle, extract_device_part
from onnxplace.bundle.bundle_routes import list_route_devices
from onnxplace.errors import Diagnostic, OnnxplaceError
from onnxplace.machine.hardware import available_cores, list_accelerators
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import list_operator_libraries, make_session_options, use_custom_operators
from onnxplace.measure.compare import open_reference
from onnxplace.measure.step_inputs import RepeatedStep, choose_step_inputs
from onnxplace.pipeline.pipeline import Observer
from onnxplace.pipeline.registry import create_runtime
from onnxplace.target.device_kinds import ISOLATE
from onnxplace.utils.file_locks import temporary_folder
from onnxplace.utils.files import disk_error
from onnxplace.utils.ort import build_one_node_model
from onnxplace.utils.subprocesses import run_in_child

T = TypeVar("T")

# The arena grows during the first few runs.
MEMORY_RUNS = 4
GPU_POLL_SECONDS = 0.002
# Takes the place of a device where all plans of a bundle are measured.
ALL_PLANS = "all plans"
# Writing 5 there resets the peak memory of this process (proc(5)).
_CLEAR_REFS = Path("/proc/self/clear_refs")
_LIBRARY_PATTERN = re.compile(r"\.so(\.|$)")


@dataclass(frozen=True)
class Opening:
    """What it takes to open sessions, in a process that has loaded ONNX Runtime and opened no model yet."""

    seconds: float
    peak_bytes: int
    """Most memory meanwhile, without what the process had before, and without newly loaded library code."""
    resident_bytes: int
    """The same, once they are open."""


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of a process that opened a bundle and ran it."""

    opening: Opening

    opening_bytes: int
    """Peak of the process meanwhile, with all that it had before."""
    running_bytes: int
    """Peak while it ran requests; pages of files that several sessions mapped count once."""
    own_bytes: int
    """Part of `running_bytes` that the bundle added, without newly loaded library code."""
    gpu_bytes: Mapping[str, int]
    """Peak in use on each GPU, minus the memory in use before."""


@dataclass(frozen=True)
class BundleMemory:
    """Memory of a bundle; absent values could not be measured."""

    process: ProcessMemory | None = None
    all_plans_bytes: int | None = None
    """The peak of one that ran all plans, if there are several."""
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[Diagnostic, ...] = ()
    """Why some values could not be measured."""


@dataclass(frozen=True)
class StoredFeeds(Mapping[str, Any]):
    """Feeds by name, arrays in files: an array is mapped on access and takes memory only while in use."""

    files: Mapping[str, Path]
    others: Mapping[str, Any]

    @staticmethod
    def write(values: Mapping[str, Any], folder: Path) -> StoredFeeds:
        """Write the arrays among the values to a folder; raises ExecutionError or UsageError if it is full."""
        files, others = {}, {}
        try:
            for index, (name, value) in enumerate(values.items()):
                if isinstance(value, np.ndarray) and value.dtype.kind in "fiubc" and value.nbytes:
                    files[name] = folder / f"{index}.npy"
                    np.save(files[name], value)
                else:
                    others[name] = value
        except OSError as problem:
            raise disk_error(problem, str(folder)) from None
        return StoredFeeds(files, others)

    def select(self, names: Collection[str]) -> StoredFeeds:
        """Return the feeds with these names; missing ones are ignored."""
        files, others = ({k: v for k, v in part.items() if k in names} for part in (self.files, self.others))
        return StoredFeeds(files, others)

    def __getitem__(self, name: str) -> Any:
        return np.asarray(np.load(self.files[name], mmap_mode="c")) if name in self.files else self.others[name]

    def __iter__(self) -> Iterator[str]:
        yield from (*self.files, *self.others)

    def __len__(self) -> int:
        return len(self.files) + len(self.others)


@dataclass(frozen=True)
class MemoryJob:
    """A bundle to open and run in its own process."""

    bundle: Path
    feeds: StoredFeeds
    device: str = ""
    """The device whose part is run; empty for the whole bundle, `ALL_PLANS` for random inputs of each plan's size."""
    runs: int = MEMORY_RUNS
    libraries: tuple[str, ...] = field(default_factory=list_operator_libraries)
    """Libraries of custom operators."""


def can_measure_memory() -> bool:
    """Return whether this system reports the peak memory of a process; Linux does."""
    return _CLEAR_REFS.exists()


def measure_process_memory(bundle: Bundle, feeds: Mapping[str, Any], runs: int = MEMORY_RUNS) -> ProcessMemory:
    """Open a bundle and run it in a fresh process; raises OnnxplaceError if that fails.

    States that keep their shapes are carried from run to run, as in a training.
    """
    with temporary_folder() as folder:
        job = MemoryJob(bundle.path, StoredFeeds.write(feeds, folder), runs=runs)
        return _run_in_child(job)


def measure_memory(
    bundle: Bundle, values: Mapping[str, Any], observer: Observer | None = None, around: Bundle | None = None
) -> BundleMemory:
    """Measure the process, and the part of each device that computes.

    Empty if `can_measure_memory` is false. Jobs that fail are noted and left out.

    Args:
        bundle: the bundle on disk.
        values: the feeds, and the values that cross between devices (`record_crossing_values`). A device is left out
            if a value that it receives is missing.
        observer: called before each job.
        around: the bundle whose plan it is; by default the bundle itself.
    """
    if not can_measure_memory():
        return BundleMemory()
    used = list_route_devices(bundle.manifest)
    notes: list[Diagnostic] = []
    processes: dict[str, ProcessMemory] = {}
    with temporary_folder() as folder:
        try:
            stored = StoredFeeds.write(values, folder)
        except OnnxplaceError as problem:
            return BundleMemory(notes=(_describe_failure(problem, ""),))
        jobs = _list_jobs(bundle, used, stored)
        if (around or bundle).manifest.plans:
            jobs[ALL_PLANS] = MemoryJob((around or bundle).path, StoredFeeds({}, {}), ALL_PLANS)
        for index, (device, job) in enumerate(jobs.items()):
            if observer:
                observer(f"memory of {device or 'the process'}", index, len(jobs))
            try:
                processes[device] = _run_in_child(job)
            except OnnxplaceError as problem:
                notes.append(_describe_failure(problem, device))
    whole, plans = processes.pop("", None), processes.pop(ALL_PLANS, None)
    device_bytes = {device: process.own_bytes for device, process in processes.items()}
    if whole:
        device_bytes |= {device: whole.own_bytes for device in used if len(used) == 1 and device.startswith("cpu:")}
        device_bytes |= whole.gpu_bytes
    return BundleMemory(whole, plans.running_bytes if plans else None, device_bytes, tuple(notes))


def _list_jobs(bundle: Bundle, used: Sequence[str], stored: StoredFeeds) -> dict[str, MemoryJob]:
    """Return a job for the whole bundle, by the empty name, and one for each CPU device of several used ones."""
    jobs = {"": MemoryJob(bundle.path, stored.select([item.name for item in bundle.inputs]))}
    for device in used if len(used) > 1 else ():
        if device.startswith("cpu:"):
            inputs = extract_device_part(bundle, device).inputs
            if all(item.name in stored or item.optional for item in inputs):
                jobs[device] = MemoryJob(bundle.path, stored.select([item.name for item in inputs]), device)
    return jobs


def _describe_failure(problem: OnnxplaceError, device: str) -> Diagnostic:
    message = f"the memory of {device or 'the process'} was not measured: {problem.message}"
    return Diagnostic(problem.code, message, where=problem.where, hint=problem.hint)


def _run_in_child(job: MemoryJob) -> ProcessMemory:
    return run_in_child(run_memory_job, job, "measuring memory", job.device or str(job.bundle))


def run_memory_job(job: MemoryJob) -> ProcessMemory:
    """Open and run a bundle in this process, which should be fresh."""
    bundle = _without_isolation(Bundle.open(job.bundle))
    if job.device == ALL_PLANS:
        bundles = [_without_isolation(plan) for plan in bundle.plans]
        steps = [RepeatedStep(plan, choose_step_inputs(plan, None, {}, 0).first) for plan in bundles]
    else:
        bundles = [extract_device_part(bundle, job.device) if job.device else bundle]
        # A caller keeps the feeds of the whole bundle; the values sent to a part are freed by its program.
        steps = [RepeatedStep(bundles[0], job.feeds if job.device else dict(job.feeds))]
    runtime = create_runtime("onnxruntime")
    gpu_ids = [device.id for item in bundles for device in item.target.devices if not device.is_host]
    with use_custom_operators(job.libraries), _watch_gpus(gpu_ids) as gpu_bytes:
        _open_first_session()
        before, code = _read_memory_status("VmRSS"), _sum_library_bytes()
        sessions, opening = _measure_opening(lambda: [runtime.open(item) for item in bundles])
        with ExitStack() as stack:
            peak = _read_memory_status("VmHWM")
            _reset_peak()
            for session, step in zip(map(stack.enter_context, sessions), steps):
                for _ in range(job.runs):
                    session.run(step.prepare(session))
            running = _read_memory_status("VmHWM") - _sum_repeated_bytes()
    own_bytes = max(running - before - (_sum_library_bytes() - code), 0)
    return ProcessMemory(opening, peak, running, own_bytes, gpu_bytes)


def measure_model_opening(bundle: Bundle, against: str | Path | None) -> Opening:
    """Open the unsplit model, the bundle's or the file `against`, with all cores in a fresh process.

    Raises OnnxplaceError if that fails.
    """
    job = (bundle.path, against, list_operator_libraries())
    return run_in_child(_open_model, job, "measuring memory", str(against or bundle.path))


def _open_model(job: tuple[Path, str | Path | None, Sequence[str]]) -> Opening:
    """Open an unsplit model in this process, which should be fresh."""
    path, against, libraries = job
    bundle = Bundle.open(path)
    with use_custom_operators(libraries):
        _open_first_session()
        return _measure_opening(lambda: open_reference(bundle, against, available_cores()))[1]


def _open_first_session() -> None:
    """Open a session of one node: the memory of the first session of a process belongs to no model."""
    open_session(build_one_node_model(), make_session_options(()))


def _measure_opening(open_sessions: Callable[[], T]) -> tuple[T, Opening]:
    """Return what a function opens, and what that took."""
    before, code = _read_memory_status("VmRSS"), _sum_library_bytes()
    _reset_peak()
    began = time.perf_counter()
    opened = open_sessions()
    seconds = time.perf_counter() - began
    resident, peak = (_read_memory_status(name) for name in ("VmRSS", "VmHWM"))
    before += _sum_library_bytes() - code
    return opened, Opening(seconds, max(peak - before, 0), max(resident - before, 0))


def _without_isolation(bundle: Bundle) -> Bundle:
    """Return a bundle whose devices are all in this process, so that their memory is counted."""
    target = bundle.manifest.target
    devices = tuple(replace(item, options={**item.options, ISOLATE: "false"}) for item in target.devices)
    manifest = bundle.manifest.model_copy(update={"target": target.model_copy(update={"devices": devices})})
    return replace(bundle, manifest=manifest)


def _read_memory_status(field_name: str) -> int:
    """Return the resident bytes of this process now (VmRSS), or their peak since `_reset_peak` (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{field_name}:")).split()[1]) << 10


def _reset_peak() -> None:
    """Reset the peak memory of this process to its current memory."""
    _CLEAR_REFS.write_text("5", encoding="ascii")


def _sum_library_bytes() -> int:
    """Return the resident bytes of shared libraries, code and data, in this process."""
    return sum(size for (_, path), size in _iterate_mappings() if _LIBRARY_PATTERN.search(path))


def _sum_repeated_bytes() -> int:
    """Return the resident bytes of files in this process that were counted before, as they are mapped again."""
    mappings = sorted(_iterate_mappings(), key=itemgetter(1))
    return sum(size for _, size in mappings) - sum(dict(mappings).values())  # the largest of each is kept


def _iterate_mappings() -> Iterator[tuple[tuple[str, str], int]]:
    """Yield the offset, path and resident bytes of each mapping of a file in this process."""
    place = ("", "")
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            first, *rest = line.split(maxsplit=5)
            if not first.endswith(":"):
                place = (rest[1], rest[4].strip() if len(rest) == 5 else "")
            elif first == "Rss:" and place[1].startswith("/"):
                yield place, int(rest[0]) << 10


@contextmanager
def _watch_gpus(devices: Collection[str]) -> Iterator[dict[str, int]]:
    """Yield the peak bytes in use per GPU, minus those in use now, updated until the block ends.

    Empty without nvidia-ml-py. Includes the memory that ONNX Runtime takes on a GPU before it loads a model.
    """
    peaks: dict[str, int] = {}
    before = _read_used_gpu_bytes(devices) if devices else {}
    if not before:
        yield peaks
        return
    ended = threading.Event()

    def poll() -> None:
        while True:
            for device, size in _read_used_gpu_bytes(devices).items():
                peaks[device] = max(peaks.get(device, 0), size - before[device])
            if ended.wait(GPU_POLL_SECONDS):
                return

    watcher = threading.Thread(target=poll, name="onnxplace memory", daemon=True)
    watcher.start()
    try:
        yield peaks
    finally:
        ended.set()
        watcher.join()


def _read_used_gpu_bytes(devices: Collection[str]) -> dict[str, int]:
    """Return the bytes in use on each of these GPUs that the driver lists."""
    used = {device: gpu.memory_bytes - gpu.free_bytes for device, gpu, _ in list_accelerators(plugins=True)}
    return {device: size for device, size in used.items() if device in devices}
