"""An example plugin: a round-robin placer, a runtime without threads, a kind of devices, two formats, and a command."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import click
import numpy as np

from onnxplace import Bundle, ExecutionError, Pass, Runtime, RuntimeSession, State
from onnxplace.cli import as_json, print_json, print_text
from onnxplace.cost_graph import CostGraph, GraphFormat, TimedPlacement, parse_cost_graph
from onnxplace.devices import DeviceAddress, DeviceKind, Hardware
from onnxplace.errors import Diagnostic
from onnxplace.export import BundleModels
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.problem import commit_placement, placement_problem
from onnxplace.runtime import Event, Result


@dataclass(frozen=True)
class RoundRobin(Pass):
    """Assign groups of nodes to the devices in turn, in topological order; pinned groups keep their device."""

    name: ClassVar[str] = "round-robin"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    first: int = 0
    """The device that gets the first group."""

    def run(self, state: State) -> State:
        problem = placement_problem(state)
        device_of_group, next_device = problem.pinned.copy(), self.first
        for group in problem.group[problem.graph.order].tolist():
            if device_of_group[group] < 0:
                device_of_group[group] = next_device % len(state.target.devices)
                next_device += 1
        device = device_of_group[problem.group].astype(np.int32)
        order = problem.graph.order
        return commit_placement(state, problem, device, problem.simulate(device, order).start_seconds, self.name)


class OneThread(Runtime):
    """Run all segments one after the other in the caller's thread, whatever their device."""

    name: ClassVar[str] = "one-thread"
    summary: ClassVar[str] = "run all segments in order in one thread, for debugging"

    def open(self, bundle: Bundle, *, trace: bool = False) -> RuntimeSession:
        """Open every segment with ONNX Runtime on the CPU."""
        return _Session(bundle)


class _Session(RuntimeSession):
    def __init__(self, bundle: Bundle) -> None:
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        import onnxruntime

        self._manifest, self._closed = bundle.manifest, False
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        self._sessions = [
            onnxruntime.InferenceSession(bundle.file(segment.file), options, providers=["CPUExecutionProvider"])
            for segment in bundle.manifest.segments
        ]

    def submit(self, feeds: Mapping[str, Any], states: Collection[str] = ()) -> Future[Result]:
        """Return a completed future; `states` are carried states to return, which this runtime does not support."""
        if self._closed:
            raise ExecutionError("X901", "the session is closed")
        future: Future[Result] = Future()
        try:
            future.set_result(self._run(feeds))
        except ExecutionError as problem:
            future.set_exception(problem)
        return future

    def close(self, timeout: float | None = None) -> None:
        """Drop the sessions; no request is ever in progress."""
        self._closed, self._sessions = True, []

    def _run(self, feeds: Mapping[str, Any]) -> Result:
        values, events, origin = dict(feeds), [], time.perf_counter()
        for segment, session in zip(self._manifest.segments, self._sessions):
            start = time.perf_counter() - origin
            try:
                outputs = session.run(segment.outputs, {n: values[n] for n in segment.inputs if n in values})
            except Exception as problem:  # ONNX Runtime raises its own unrelated types
                raise ExecutionError(
                    "X902", f"segment {segment.id} failed: {problem}", where=segment.device
                ) from problem
            values.update(zip(segment.outputs, outputs))
            events.append(Event(segment.device, "run", segment.id, start, time.perf_counter() - origin))
        outputs = {output.name: values[output.value] for output in self._manifest.outputs}
        return Result(outputs, tuple(events), time.perf_counter() - origin)


class Emulated(DeviceKind):
    """A device that is said to be a GPU, for trying out programs and tools; ONNX Runtime runs it on the CPU."""

    name: ClassVar[str] = "emulated"
    title: ClassVar[str] = "emulated GPU"
    providers: ClassVar[Mapping[str, str]] = {"cpu": "CPUExecutionProvider"}
    memory: ClassVar[str] = "onnxplace.runtimes.execution:HostMemory"
    is_divisible: ClassVar[bool] = True
    value_options: ClassVar[Mapping[str, tuple[str, ...]]] = {"mood": ("calm", "excited")}
    operations_per_second: ClassVar[float] = 80e9
    memory_bytes_per_second: ClassVar[float] = 16e9
    kernel_seconds: ClassVar[float] = 4e-6
    link_latency_seconds: ClassVar[float] = 20e-6
    link_bytes_per_second: ClassVar[float] = 10e9

    def list_hardware(self) -> tuple[Hardware, ...]:
        """Return one device with 1 GiB."""
        return (Hardware(0, "Emulated 1000", 1 << 30, 1 << 30),)

    def find_problem(self, address: DeviceAddress) -> str | None:
        """Return why a device cannot be used: there is only the first one."""
        return "this machine emulates one device only" if address.index else None

    def list_providers(self, address: DeviceAddress) -> list[tuple[str, dict[str, str]]]:
        """Return nothing: each session has the CPU's provider."""
        return []


def write_table(models: BundleModels, folder: Path, *, separator: str = ",") -> tuple[Diagnostic, ...]:
    """Write a table of the segments: `onnxplace export --to table`, with the option `--separator`."""
    rows = [(item.record.id, item.record.device, str(len(item.proto.graph.node))) for item in models.segments]
    (folder / "segments.csv").write_text("".join(f"{separator.join(row)}\n" for row in rows))
    return ()


TABLE_OPTIONS = {"separator": click.Option(["--separator"], default=",", help="table: between columns.")}


class Edges(GraphFormat):
    """Cost graphs in files `*.edges`: in each line the ids of two nodes and the microseconds of the first."""

    def read(self, data: bytes, name: str, where: str, device_count: int | None) -> CostGraph:
        """Return the cost graph of a file."""
        rows = [line.split() for line in data.decode().splitlines()]
        seconds = {node: 0.0 for row in rows for node in row[:2]} | {row[0]: float(row[2]) for row in rows}
        graph = {
            "nodes": [{"id": node, "compute_time_us": cost} for node, cost in seconds.items()],
            "edges": [{"src": source, "dst": destination} for source, destination, _ in rows],
            "devices": [{} for _ in range(device_count or 1)],
        }
        return parse_cost_graph(graph, name)

    def write(self, graph: CostGraph | State, placement: TimedPlacement | None, where: str) -> bytes:
        """Return a line for each placed node, with its device."""
        devices = placement.placement if placement else {}
        return "".join(f"{node} {device}\n" for node, device in devices.items()).encode()


@click.command(short_help="Show how many nodes each device of a bundle has.")
@click.argument("path", type=click.Path(path_type=Path), metavar="BUNDLE")
@as_json
def shares(path: Path, json_: bool) -> None:
    """Show how many nodes each device of BUNDLE has."""
    nodes = {device.id: device.nodes for device in Bundle.open(path).manifest.devices}
    if json_:
        print_json(nodes)
    else:
        print_text("\n".join(f"{device}  {count}" for device, count in nodes.items()))
