"""What a bundle takes of this machine's memory, beside what was predicted.

CPU devices are threads of one process, so each device's part is measured alone: a fresh process runs that device's
program and nothing else, on the values that it receives, and Linux says how much it held at most (VmHWM: anonymous
memory and resident pages of files). The whole bundle is measured the same way, and GPUs by their own counters.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from onnxplace.bundle import Bundle, extract_device_part
from onnxplace.errors import Diagnostic, OnnxplaceError
from onnxplace.machine import (
    list_gpus,
    one_node_model,
    open_session,
    operator_libraries,
    session_options,
    use_custom_operators,
)
from onnxplace.pipeline import Observer, find_plugin
from onnxplace.runtime import Runtime
from onnxplace.utils import disk_error, run_in_child, temporary_folder

# What a run leaves in the arena grows for the first few.
MEMORY_RUNS = 4
GPU_POLL_SECONDS = 0.002
_CLEAR_REFS = Path("/proc/self/clear_refs")
_LIBRARY_PATTERN = re.compile(r"\.so(\.|$)")


@dataclass(frozen=True)
class ProcessMemory:
    """What a process held that opened a bundle and ran it."""

    opening_bytes: int
    """At most while it opened sessions."""
    running_bytes: int
    """At most while it ran steps."""
    own_bytes: int
    """Of the latter, what was not there before, less code of libraries that was needed for the first time."""
    gpu_bytes: Mapping[str, int]
    """Per GPU, the most in use beyond what was in use before."""


@dataclass(frozen=True)
class BundleMemory:
    """What a bundle takes, as far as it could be measured."""

    process: ProcessMemory | None = None
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[Diagnostic, ...] = ()
    """What could not be measured, and why."""


@dataclass(frozen=True)
class StoredFeeds(Mapping[str, Any]):
    """Values by name, arrays in files: each is mapped when it is asked for, and takes memory while it is used."""

    files: Mapping[str, Path]
    others: Mapping[str, Any]

    @staticmethod
    def write(values: Mapping[str, Any], folder: Path) -> StoredFeeds:
        """Write the arrays among these values into a folder; raises ExecutionError or UsageError if it is full."""
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

    def only(self, names: Collection[str]) -> StoredFeeds:
        """Return those of these names that are there."""
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
    """A bundle to open and run in a process of its own."""

    bundle: Path
    feeds: StoredFeeds
    device: str = ""
    """The device whose part is run; empty for all of the bundle."""
    runs: int = MEMORY_RUNS
    libraries: tuple[str, ...] = field(default_factory=operator_libraries)
    """Of custom operators."""


def can_measure_memory() -> bool:
    """Return whether this system tells the most that a process held: Linux does."""
    return _CLEAR_REFS.exists()


def measure_process_memory(bundle: Bundle, feeds: Mapping[str, Any], runs: int = MEMORY_RUNS) -> ProcessMemory:
    """Open a bundle and run it in a fresh process; raises OnnxplaceError if that fails."""
    with temporary_folder() as folder:
        return _run_in_child(MemoryJob(bundle.path, StoredFeeds.write(feeds, folder), runs=runs))


def measure_memory(bundle: Bundle, values: Mapping[str, Any], observer: Observer | None = None) -> BundleMemory:
    """Measure the process, and the part of each device that computes; nothing where `can_measure_memory` is false.

    `values` are the feeds, and what crosses between devices (`recording`): a device without what it receives is left
    out. What fails is noted, and left out.
    """
    if not can_measure_memory():
        return BundleMemory()
    used = [device for device, program in bundle.manifest.programs.items() if any(s.op == "run" for s in program)]
    parts = {
        device: extract_device_part(bundle, device) for device in used if device.startswith("cpu:") and len(used) > 1
    }
    notes: list[Diagnostic] = []
    found: dict[str, ProcessMemory] = {}
    with temporary_folder() as folder:
        try:
            stored = StoredFeeds.write(values, folder)
        except OnnxplaceError as problem:
            return BundleMemory(notes=(_describe_failure(problem, ""),))
        jobs = {"": MemoryJob(bundle.path, stored.only([item.name for item in bundle.inputs]))}
        for device, part in parts.items():
            needed = [item.name for item in part.inputs]
            if all(item.name in stored or item.optional for item in part.inputs):
                jobs[device] = MemoryJob(bundle.path, stored.only(needed), device)
        for index, (device, job) in enumerate(jobs.items()):
            if observer:
                observer(f"memory of {device or 'the process'}", index, len(jobs))
            try:
                found[device] = _run_in_child(job)
            except OnnxplaceError as problem:
                notes.append(_describe_failure(problem, device))
    whole = found.pop("", None)
    taken = {device: process.own_bytes for device, process in found.items()}
    if whole:
        taken |= {device: whole.own_bytes for device in used if len(used) == 1 and device.startswith("cpu:")}
        taken |= whole.gpu_bytes
    return BundleMemory(whole, taken, tuple(notes))


def _describe_failure(problem: OnnxplaceError, device: str) -> Diagnostic:
    what = f"the memory of {device or 'the process'} was not measured"
    return Diagnostic(problem.code, f"{what}: {problem.message}", where=problem.where, hint=problem.hint)


def _run_in_child(job: MemoryJob) -> ProcessMemory:
    return run_in_child(run_memory_job, job, "measuring memory", job.device or str(job.bundle))


def run_memory_job(job: MemoryJob) -> ProcessMemory:
    """Open and run a bundle in this process, which should have done nothing before."""
    bundle = Bundle.open(job.bundle)
    if job.device:
        bundle = extract_device_part(bundle, job.device)
    # A caller holds what the whole is fed; what a part was sent is freed by its program.
    feeds = job.feeds if job.device else dict(job.feeds)
    runtime = cast("type[Runtime]", find_plugin("runtimes", "onnxruntime"))()
    gpu_ids = [device.id for device in bundle.target.devices if device.kind == "cuda"]
    with use_custom_operators(job.libraries), _watch_gpus(gpu_ids) as gpu_bytes:
        open_session(one_node_model(), session_options(()))  # what the first one takes belongs to no bundle
        before, code = _read_memory_status("VmRSS"), _sum_library_bytes()
        _reset_peak()
        with runtime.open(bundle) as session:
            opening = _read_memory_status("VmHWM")
            _reset_peak()
            for _ in range(job.runs):
                session.reset_state()
                session.run(feeds)
            running = _read_memory_status("VmHWM")
    return ProcessMemory(opening, running, max(running - before - (_sum_library_bytes() - code), 0), gpu_bytes)


def _read_memory_status(which: str) -> int:
    """Return the bytes that this process holds (VmRSS), or held at most since `_reset_peak` (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{which}:")).split()[1]) << 10


def _reset_peak() -> None:
    """Begin anew with the most that this process held."""
    _CLEAR_REFS.write_text("5", encoding="ascii")


def _sum_library_bytes() -> int:
    """Return the bytes of libraries, code and data, that this process holds."""
    total, counts = 0, False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            first, *rest = line.split(maxsplit=5)
            if not first.endswith(":"):
                counts = len(rest) == 5 and bool(_LIBRARY_PATTERN.search(rest[4].strip()))
            elif counts and first == "Rss:":
                total += int(rest[0]) << 10
    return total


@contextmanager
def _watch_gpus(devices: Collection[str]) -> Iterator[dict[str, int]]:
    """Note the most that each of these GPUs has in use, beyond what it has now, until the block ends.

    Nothing without nvidia-ml-py. What ONNX Runtime takes of a GPU before it has a model is in it.
    """
    most: dict[str, int] = {}
    before = _read_used_gpu_bytes(devices) if devices else {}
    if not before:
        yield most
        return
    over = threading.Event()

    def look() -> None:
        while True:
            for device, size in _read_used_gpu_bytes(devices).items():
                most[device] = max(most.get(device, 0), size - before[device])
            if over.wait(GPU_POLL_SECONDS):
                return

    watcher = threading.Thread(target=look, name="onnxplace memory", daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()


def _read_used_gpu_bytes(devices: Collection[str]) -> dict[str, int]:
    """Return the bytes in use on each of these GPUs that the driver lists."""
    found = {f"cuda:{gpu.index}": gpu.memory_bytes - gpu.free_bytes for gpu in list_gpus()}
    return {device: size for device, size in found.items() if device in devices}
