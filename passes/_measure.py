"""Measure a model with ONNX Runtime, and trace each kernel it ran back to the nodes of the model.

ONNX Runtime fuses nodes. What it really runs is read from the graph it saves: each node there computes a value of
the model from other values that survived, so the nodes between them are one kernel (docs/decisions/0003-fusion.md).
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxplace.errors import ExecutionError
from onnxplace.graph import Floats, Ints
from onnxplace.model import INLINE_LIMIT_BYTES, Model, WeightFile
from onnxplace.sessions import custom_operators, open_session, operator_libraries, pinned, run_whole, session_options

Feeds = Mapping[str, NDArray[Any]]
WARM_UPS = 2


@dataclass(frozen=True)
class Measurement:
    """What one device class needs for the model."""

    seconds: Floats
    """Per node, scaled so that they add up to an unprofiled run of the whole model."""
    unit: Ints
    """Dense id per node: nodes of one kernel."""
    ran: NDArray[np.bool_]
    """Per node: False if ONNX Runtime folded it away."""
    measured: NDArray[np.bool_]
    """Per node: False if it could not be run, so that nothing is known of it."""
    whole_seconds: float | None
    """Of one unprofiled run; None if the model never ran as a whole."""
    value_bytes: Mapping[str, int]
    """Bytes of the values that survived fusion, by name."""


def measure(
    model: Model, feeds: Feeds, device_id: str, cores: Sequence[int], repeat: int, seconds: float
) -> Measurement:
    """Measure a model as a `Timer` does."""
    return Timer(device_id, tuple(cores), repeat, seconds).measure(model, feeds)[0]


@dataclass(frozen=True)
class Timer:
    """How to measure: the device, how many runs, or about how many seconds."""

    device_id: str
    cores: tuple[int, ...]
    repeat: int
    seconds: float

    def measure(self, model: Model, feeds: Feeds) -> tuple[Measurement, list[Any]]:
        """Run the whole model, profiled and unprofiled; returns also what it gave back the last time.

        On a GPU the profiled runs happen in a child process whose launches wait for their kernels: ONNX Runtime's
        times would be those of the launches otherwise. The unprofiled runs, to whose time all is scaled, are
        ordinary ones.
        """
        with tempfile.TemporaryDirectory(prefix="onnxplace-") as folder, pinned(self.cores):
            source, entries = stored(model, Path(folder))
            session = open_session(source, session_options(self.cores, "all", entries), self.device_id, model.name)
            taken, made = _run_repeatedly(session, feeds, self.repeat, self.seconds, model.name)
            del session
            how = self.device_id, self.cores, dict(feeds), self.repeat, self.seconds
            job = _Job(source, entries, *how, folder, model.name)
            kernel_seconds, output_bytes = _profile(job) if self.device_id.startswith("cpu:") else in_child(job)
            optimized = onnx.load(Path(folder) / "optimized.onnx", load_external_data=False)
        return _attribute(model, optimized, kernel_seconds, output_bytes, float(np.median(taken))), made


@dataclass(frozen=True)
class _Job:
    """What a profiling run needs; can be sent to another process."""

    source: bytes | Path
    entries: Mapping[str, str]
    device_id: str
    cores: tuple[int, ...]
    feeds: Feeds
    repeat: int
    seconds: float
    folder: str
    """Receives the graph that was really run, as optimized.onnx."""
    where: str
    libraries: tuple[str, ...] = field(default_factory=operator_libraries)
    """Of custom operators."""


Kernels = tuple[dict[str, float], dict[str, list[int]]]


def in_child(job: _Job) -> Kernels:
    """Profile in a fresh process in which each CUDA launch waits until its kernel is done.

    The process runs this module and nothing of the caller's, so that it works from any script.
    """
    with tempfile.TemporaryDirectory(prefix="onnxplace-") as folder:
        asked, answer = Path(folder) / "job", Path(folder) / "kernels"
        asked.write_bytes(pickle.dumps(job))
        command = [sys.executable, "-m", __name__, str(asked), str(answer)]
        environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            said = ended.stderr.strip().splitlines()[-1:] or [f"exit {ended.returncode}"]
            raise ExecutionError("X004", f"profiling failed in its own process: {said[0]}", where=job.device_id)
        kernels: Kernels = pickle.loads(answer.read_bytes())
        return kernels


def stored(model: Model, folder: Path, more: Sequence[onnx.ValueInfoProto] = ()) -> tuple[bytes | Path, dict[str, str]]:
    """Return what a session opens, and the options it needs; `more` values are outputs too.

    Weights beyond 1 GiB go through a file in `folder`.
    """
    if model.inline_bytes <= INLINE_LIMIT_BYTES:
        return model.whole_proto(more=more).SerializeToString(), model.session_entries
    with WeightFile(folder / "weights.bin", "weights.bin") as weights:
        (folder / "whole.onnx").write_bytes(model.whole_proto(weights, more).SerializeToString())
    return folder / "whole.onnx", {}


def _run_repeatedly(
    session: Any, feeds: Feeds, repeat: int, seconds: float, where: str
) -> tuple[list[float], list[Any]]:
    """Run until `repeat` or the time is used up, at least three times.

    Returns the seconds of each run, and what the last one gave back.
    """
    for _ in range(WARM_UPS):
        run_whole(session, None, feeds, where)
    taken: list[float] = []
    while len(taken) < repeat and (len(taken) < 3 or sum(taken) < seconds):
        began = time.perf_counter()
        made = run_whole(session, None, feeds, where)
        taken.append(time.perf_counter() - began)
    return taken, made


def _profile(job: _Job) -> Kernels:
    """Run with the profiler on; returns the median seconds per kernel and the bytes of its outputs.

    Fusion stops short of the layout level here, because that one renames nearly all values.
    """
    folder = Path(job.folder)
    saved = {
        **job.entries,
        "session.optimized_model_external_initializers_file_name": "optimized.bin",
        "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
    }
    with custom_operators(job.libraries):
        options = session_options(job.cores, "extended", saved)
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    with pinned(job.cores):
        session = open_session(job.source, options, job.device_id, job.where)
        _run_repeatedly(session, job.feeds, job.repeat, job.seconds, job.where)
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return _kernels([event for event in events if event.get("cat") == "Node" and event["name"].endswith(_SUFFIX)])


_SUFFIX = "_kernel_time"


def _kernels(events: Sequence[dict[str, Any]]) -> Kernels:
    """Return, per kernel name, the median seconds after warm-up and the bytes of each output."""
    durations: dict[str, list[float]] = {}
    sizes: dict[str, list[int]] = {}
    for event in events:
        name = event["name"].removesuffix(_SUFFIX)
        durations.setdefault(name, []).append(event["dur"] * 1e-6)
        sizes[name] = [_bytes_of(shape) for shape in event["args"].get("output_type_shape", [])]
    return {name: float(np.median(taken[WARM_UPS:] or taken)) for name, taken in durations.items()}, sizes


_WIDTHS = {
    "float": 4,
    "double": 8,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


def _bytes_of(shape: Mapping[str, Sequence[int]]) -> int:
    """Return the bytes of a tensor as the profiler describes it: `{"float": [1, 64]}`; -1 if it is no plain tensor."""
    for kind, dims in shape.items():
        if kind in _WIDTHS:
            return int(np.prod(dims, dtype=np.int64)) * _WIDTHS[kind]
    return -1


def _attribute(
    model: Model,
    optimized: onnx.ModelProto,
    kernel_seconds: Mapping[str, float],
    output_bytes: Mapping[str, Sequence[int]],
    whole_seconds: float,
) -> Measurement:
    """Give each node of the model its kernel, and its share of that kernel's time."""
    owner = _owners(model, optimized)
    seconds = np.zeros(len(model.nodes))
    sizes = {}
    for kernel in optimized.graph.node:
        for name, size in zip(kernel.output, output_bytes.get(kernel.name, ())):
            if size >= 0:
                sizes[name] = size
    cluster_seconds, cluster_of = _cluster_times(
        optimized, kernel_seconds, {n for node in model.nodes for n in node.output}
    )
    members: dict[int, list[int]] = {}
    for node, kernel_index in enumerate(owner):
        if kernel_index >= 0:
            members.setdefault(cluster_of[kernel_index], []).append(node)
    for cluster, nodes in members.items():
        seconds[nodes] = cluster_seconds[cluster] / len(nodes)
    total = seconds.sum()
    scale = whole_seconds / total if total > 0 else 1.0
    keys = [cluster_of[k] if k >= 0 else -1 - n for n, k in enumerate(owner)]
    unit = np.unique(np.asarray(keys, dtype=np.int64), return_inverse=True)[1].astype(np.int32)
    ran = np.asarray([k >= 0 for k in owner], dtype=bool)
    return Measurement(seconds * scale, unit, ran, np.ones(len(ran), dtype=bool), whole_seconds, sizes)


def _owners(model: Model, optimized: onnx.ModelProto) -> list[int]:
    """Return, per node of the model, the index of the kernel that does its work; -1 if none does."""
    producer = {name: i for i, node in enumerate(model.nodes) for name in node.output if name}
    alive = {name for kernel in optimized.graph.node for name in kernel.output if name}
    owner = [-1] * len(model.nodes)
    for index, kernel in enumerate(optimized.graph.node):
        stack = [producer[name] for name in kernel.output if name in producer]
        while stack:
            node = stack.pop()
            if owner[node] < 0:
                owner[node] = index
                stack += [producer[name] for name in model.reads[node] if name in producer and name not in alive]
    return owner


def _cluster_times(
    optimized: onnx.ModelProto, kernel_seconds: Mapping[str, float], names: set[str]
) -> tuple[dict[int, float], list[int]]:
    """Join kernels that make only values unknown to the model (inserted reshapes, casts) with a kernel that reads them.

    Returns the seconds per cluster and each kernel's cluster.
    """
    kernels = list(optimized.graph.node)
    reader: dict[str, int] = {}
    for index, kernel in enumerate(kernels):
        for name in kernel.input:
            reader.setdefault(name, index)
    cluster = list(range(len(kernels)))
    for index in range(len(kernels) - 1, -1, -1):
        if not any(name in names for name in kernels[index].output):
            following = [reader[name] for name in kernels[index].output if name in reader]
            cluster[index] = cluster[following[0]] if following else index
    seconds: dict[int, float] = {}
    for index, kernel in enumerate(kernels):
        seconds[cluster[index]] = seconds.get(cluster[index], 0.0) + kernel_seconds.get(kernel.name, 0.0)
    return seconds, cluster


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(pickle.dumps(_profile(pickle.loads(Path(sys.argv[1]).read_bytes()))))
