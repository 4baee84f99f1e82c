"""Bundles of segments with one or a few nodes, and samples of their times on a busy machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import (
    SCHEMA_VERSION,
    InputRecord,
    Manifest,
    Predicted,
    SegmentRecord,
    Step,
    TargetRecord,
    ValueRecord,
)
from onnxplace.feeds.feeds import Array
from onnxplace.machine.repeated_runs import read_run_delays
from onnxplace.runtime.interface import Event, RuntimeSession
from onnxplace.target.target import Target
from onnxplace.utils.progress import report_progress

# -------------------------------------------------------------------------------------------------------------- bundles


# The type of values whose size each request chooses.
ANY_SIZE = "float[?]"


@dataclass(frozen=True)
class Probe:
    """A segment to time: its device, nodes, inputs and outputs."""

    device: str
    nodes: str
    """Statements of ONNX's text form, over the names of its inputs and outputs."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kind: str = ANY_SIZE
    """Type of all inputs and outputs, in ONNX's text form."""
    stage: int = 0
    """Position in a bundle of several probes: after all probes of lower stages."""


def write_probe_bundle(folder: Path, target: Target, probes: Sequence[Probe]) -> Bundle:
    """Write a segment per probe to `folder` and return the bundle that runs them in this order.

    Segments are named by their position. Values pass between devices as in bundles of `split`, and are freed after
    their last reader. Values without a producer are inputs. There are no outputs.
    """
    producers = {name: index for index, probe in enumerate(probes) for name in probe.outputs}
    fed = dict.fromkeys(name for probe in probes for name in probe.inputs if name not in producers)
    segments = tuple(_write_segment(folder, str(index), probe) for index, probe in enumerate(probes))
    kinds = {name: probe.kind.partition("[")[0] for probe in probes for name in (*probe.inputs, *probe.outputs)}
    values = {
        name: ValueRecord(
            dtype=f"tensor({kind})",
            shape=None,
            bytes=0,
            producer=str(producers[name]) if name in producers else None,
            readers=tuple(str(index) for index, probe in enumerate(probes) if name in probe.inputs),
        )
        for name, kind in kinds.items()
    }
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        model="probe",
        model_digest="",
        dimensions={},
        pipeline="",
        placer="",
        versions={},
        target=TargetRecord(devices=target.devices, links=target.links, link_model=target.link_model),
        inputs=tuple(InputRecord(name=name, dtype=values[name].dtype, shape=None) for name in fed),
        outputs=(),
        segments=segments,
        values=values,
        programs=_build_programs(probes, producers),
        predicted=Predicted(step_seconds=0, single_device_seconds=0, lower_bound_seconds=0, interval_seconds=0),
        devices=(),
        transfers=0,
        transfer_bytes=0,
        diagnostics=(),
        files={},
    )
    return Bundle(folder, manifest)


def _write_segment(folder: Path, name: str, probe: Probe) -> SegmentRecord:
    from onnx import parser

    inputs, outputs = (
        ", ".join(f"{probe.kind} {value}" for value in values) for values in (probe.inputs, probe.outputs)
    )
    text = f'<ir_version: 8, opset_import: ["": 17]> probe ({inputs}) => ({outputs}) {{ {probe.nodes} }}'
    (folder / f"{name}.onnx").write_bytes(parser.parse_model(text).SerializeToString())
    return SegmentRecord(
        id=name,
        file=f"{name}.onnx",
        device=probe.device,
        nodes=0,
        inputs=probe.inputs,
        outputs=probe.outputs,
        seconds=0,
        weights_bytes=0,
        workspace_bytes=0,
    )


def _build_programs(probes: Sequence[Probe], producers: Mapping[str, int]) -> dict[str, tuple[Step, ...]]:
    """Return the steps of each device: receive, run, send, free."""
    last_readers = {(name, probe.device): index for index, probe in enumerate(probes) for name in probe.inputs}
    programs: dict[str, list[Step]] = {probe.device: [] for probe in probes}
    received: set[tuple[str, str]] = set()
    for index, probe in enumerate(probes):
        program, device = programs[probe.device], probe.device
        for name in probe.inputs:
            source = probes[producers[name]].device if name in producers else device
            if source != device and (name, device) not in received:
                program.append(Step(op="receive", value=name, peer=source))
                received.add((name, device))
        program.append(Step(op="run", segment=str(index)))
        readers = [(name, reader) for name in probe.outputs for reader in programs if (name, reader) in last_readers]
        program += [Step(op="send", value=name, peer=reader) for name, reader in readers if reader != device]
        unused = [name for name in probe.inputs if last_readers[name, device] == index]
        unused += [name for name in probe.outputs if (name, device) not in last_readers]
        program += [Step(op="free", value=name) for name in unused]
    return {device: tuple(program) for device, program in programs.items()}


# -------------------------------------------------------------------------------------------------------------- samples


# A sample in which threads waited for a core for more than this share of its time is disturbed.
MAX_WAITING_SHARE = 0.05
# With fewer undisturbed samples than this, the shortest of all is a better estimate than their median.
MIN_UNDISTURBED_SAMPLES = 3
LOWER_QUARTILE, MEDIAN = 0.25, 0.5


@dataclass
class Samples:
    """Samples of one time, and the share in which threads of this process waited for a core."""

    seconds: list[float] = field(default_factory=list)
    waiting_shares: list[float] = field(default_factory=list)
    """Per sample: seconds waited over seconds elapsed."""

    def add(self, seconds: Iterable[float], waiting_share: float) -> None:
        """Add samples that were taken in one request."""
        for sample in seconds:
            self.seconds.append(sample)
            self.waiting_shares.append(waiting_share)

    @property
    def undisturbed_count(self) -> int:
        """Return the number of samples that did not wait."""
        return len(self.list_undisturbed())

    def list_undisturbed(self) -> list[float]:
        """Return the samples that did not wait."""
        return [seconds for seconds, share in zip(self.seconds, self.waiting_shares) if share <= MAX_WAITING_SHARE]

    def estimate(self, quantile: float) -> float:
        """Return a quantile of undisturbed samples, or the shortest sample if there are too few.

        Other programs use caches and memory of the machine, or of a virtual machine's host, for seconds at a time. The
        median varies with the share of time in which they do, the lower quartile less.
        """
        undisturbed = self.list_undisturbed()
        if len(undisturbed) < MIN_UNDISTURBED_SAMPLES:
            return min(self.seconds)
        return float(np.quantile(undisturbed, quantile))


@dataclass(frozen=True)
class RequestTimes:
    """Events of one request, and whether they waited for a core."""

    events: tuple[Event, ...]
    waiting_share: float
    """Seconds that threads waited for a core, over the seconds of the request."""

    def get_runs(self) -> dict[str, Event]:
        """Return the runs by the name of their segment."""
        return {event.name: event for event in self.events if event.kind == "run"}

    def list_run_seconds(self) -> list[float]:
        """Return the seconds of each run of a segment."""
        return [event.finish_seconds - event.start_seconds for event in self.events if event.kind == "run"]


def run_once(session: RuntimeSession, feeds: Mapping[str, Array]) -> RequestTimes:
    """Run a request of a tracing session, and measure how long its threads wait for a core."""
    before, began = read_waited_seconds(), time.perf_counter()
    events = session.submit(feeds).result().events
    return RequestTimes(events, (read_waited_seconds() - before) / max(time.perf_counter() - began, 1e-9))


def read_waited_seconds() -> float:
    """Return how long other threads of this process waited for a core; 0 on systems that do not report it.

    The calling thread is left out: its wait after the others have finished is not part of their time.
    """
    caller = str(threading.get_native_id())
    return sum(nanoseconds for task, nanoseconds in read_run_delays(pool=True).items() if task != caller) * 1e-9


def take_turns(tasks: Sequence[Callable[[], object]], seconds: float, min_runs: int) -> None:
    """Run tasks in turn, so that a temporary disturbance of the machine affects all of them a little.

    Each task runs `min_runs` times. After that, until the time is over, the task with the least total time is next.
    """
    began = time.perf_counter()
    total_seconds, counts = [0.0] * len(tasks), [0] * len(tasks)
    while min(counts, default=min_runs) < min_runs or (tasks and time.perf_counter() - began <= seconds):
        order = counts if min(counts) < min_runs else total_seconds
        chosen = min(range(len(tasks)), key=order.__getitem__)
        before = time.perf_counter()
        tasks[chosen]()
        total_seconds[chosen] += time.perf_counter() - before
        counts[chosen] += 1
        report_progress(time.perf_counter() - began, seconds)
