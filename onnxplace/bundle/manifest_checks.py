"""Check what a manifest says: programs cannot hang, routes and states exist, values and axes fit.

Programs are checked by a dry run: those that pass find every value they need. Each value has one producer and crosses
at most once to each device. So programs that run to their ends in one order do so in every order (a Kahn process
network): the check holds for any runtime.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from onnxplace.bundle.bundle_routes import list_routes, list_working_devices
from onnxplace.errors import BundleError
from onnxplace.feeds.feeds import numpy_type
from onnxplace.simulation.weight_streams import measure_block
from onnxplace.utils.groups import group_pairs

if TYPE_CHECKING:
    from onnxplace.bundle.manifest import InitialRecord, InputRecord, Manifest, OutputRecord, SegmentRecord, Step

DAMAGED_HINT = "the bundle is damaged; compile the model again"
# Shares are rounded when they are written.
SHARE_TOLERANCE = 1e-6


def check_manifest(manifest: Manifest, where: Path) -> None:
    """Raise BundleError for the first fault: N002 if nothing could run, N002 if a part does not fit another."""
    check_programs(manifest, where)
    check_routes(manifest, where)
    faults = (list_split_faults, _list_initial_faults, _list_stream_faults, _list_batching_faults, _list_size_faults)
    for fault in chain.from_iterable(list_faults(manifest) for list_faults in faults):
        raise BundleError("N002", fault, where=str(where), hint=DAMAGED_HINT)


def check_plans(manifest: Manifest, plans: Sequence[Manifest], where: Path) -> None:
    """Raise BundleError unless a bundle's further plans are of its model, and have no plans themselves."""
    for name, plan in zip(manifest.plans, plans):
        if plan.plans or _name_interface(plan) != _name_interface(manifest):
            fault = "it has plans of its own, or another model, inputs, outputs or states"
            raise BundleError("N002", fault, where=f"{where}, plan {name}", hint=DAMAGED_HINT)


def check_programs(manifest: Manifest, where: Path) -> None:
    """Raise BundleError unless all programs run to their ends and produce every output.

    The error names device and step. Takes time proportional to the number of steps.
    """
    try:
        _DryRun(manifest).run()
    except ValueError as problem:
        message = f"its programs cannot run: {problem}"
        raise BundleError("N002", message, where=str(where), hint=DAMAGED_HINT) from None


def check_routes(manifest: Manifest, where: Path) -> None:
    """Raise BundleError unless each route gives the program of each device to another device of the target."""
    for fault in _list_route_faults(manifest):
        raise BundleError("N002", f"its routes cannot be taken: {fault}", where=str(where), hint=DAMAGED_HINT)


# ------------------------------------------------------------------------------------------------------------- programs


class _DryRun:
    """A run without computation: values present on each device, values in transit, and each program's position."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.segments: dict[str, SegmentRecord] = {segment.id: segment for segment in manifest.segments}
        self.inputs = {item.name for item in manifest.inputs}
        self.devices = {device.id for device in manifest.target.devices}
        self.values: dict[str, set[str]] = {device: set() for device in self.devices}
        """Device -> values present there: at first, the inputs of the model that its segments read."""
        for segment in manifest.segments:
            if segment.device in self.values:
                self.values[segment.device] |= self.inputs.intersection(segment.inputs)
        self.producers: dict[str, str] = {}
        """Value -> the device that computes it."""
        self.sent: dict[tuple[str, str], str] = {}
        """(value, device it goes to) -> device it comes from."""
        self.received: set[tuple[str, str]] = set()
        self.waiting: dict[str, Step] = {}
        """Device -> the receive step at which it waits."""
        self.ran: set[str] = set()

    def run(self) -> None:
        """Run all programs; raises ValueError describing the first fault."""
        self._check_names()
        self._check_values()
        programs = {device: iter(program) for device, program in self.manifest.programs.items()}
        ready = list(reversed(programs))
        while ready:
            ready += self._advance(ready.pop(), programs)
        if self.waiting:
            device = min(self.waiting)
            raise ValueError(f"{device} waits for {self.waiting[device].value!r} forever")
        self._check_end()

    def _advance(self, device: str, programs: Mapping[str, Iterator[Step]]) -> list[str]:
        """Run a device's program until it waits or ends; returns the devices that stop waiting."""
        released = []
        step = self.waiting.pop(device, None) or next(programs[device], None)
        while step is not None:
            if step.op == "receive" and (step.value, device) not in self.sent:
                self.waiting[device] = step
                break
            if fault := self._execute(device, step):
                raise ValueError(fault)
            waits_at = self.waiting.get(step.peer) if step.op == "send" else None
            if waits_at is not None and waits_at.value == step.value:
                released.append(step.peer)
            step = next(programs[device], None)
        return released

    def _execute(self, device: str, step: Step) -> str:
        """Simulate a step; return why it is impossible, or an empty text."""
        values, name, peer = self.values[device], step.value, step.peer
        if step.op == "run":
            segment = self.segments.get(step.segment)
            if segment is None or segment.device != device or segment.id in self.ran:
                reasons = "which does not exist, belongs to another device, or has run already"
                return f"{device} is to run segment {step.segment!r}, {reasons}"
            for name in segment.inputs:
                if name not in values:
                    return f"segment {segment.id} on {device} needs {name!r}, which {device} does not have"
            self.ran.add(segment.id)
            values.update(segment.outputs)
        elif step.op == "receive":
            if peer != (source := self.sent[name, device]):
                return f"{device} is to receive {name!r} from {peer!r}, but {source} sends it"
            if (name, device) in self.received or name in values:
                return f"{device} is to receive {name!r}, which it has already received or computed"
            self.received.add((name, device))
            values.add(name)
        elif name not in values:
            return f"{device} is to {step.op} {name!r}, which it does not have"
        elif step.op == "free":
            values.discard(name)
        elif peer not in self.devices or peer == device:
            return f"{device} is to send {name!r} to {peer!r}, expected another device"
        elif name in self.inputs:
            return f"{device} is to send {name!r}, an input of the model, which is fed to each device instead"
        elif (name, peer) in self.sent:
            return f"{name!r} is sent to {peer} twice, by {self.sent[name, peer]} and {device}"
        else:
            self.sent[name, peer] = device
        return ""

    def _check_names(self) -> None:
        """Raise ValueError unless devices exist and each segment, input and value is defined once."""
        for device in self.manifest.programs:
            if device not in self.devices:
                raise ValueError(f"the target has no device {device!r}")
        if len(self.segments) < len(self.manifest.segments):
            raise ValueError("two segments have the same id")
        if len(self.inputs) < len(self.manifest.inputs):
            raise ValueError("two inputs have the same name")
        for segment in self.manifest.segments:
            for name in segment.outputs:
                if name in self.producers or name in self.inputs:
                    raise ValueError(f"value {name!r} has two producers, the second is segment {segment.id}")
                self.producers[name] = segment.device

    def _check_values(self) -> None:
        """Raise ValueError unless each value that is read or computed is listed, with its true producer."""
        producers = {name: segment.id for segment in self.manifest.segments for name in segment.outputs}
        read = {name for segment in self.manifest.segments for name in segment.inputs}
        returned = {output.value for output in self.manifest.outputs}
        if missing := (read | returned | producers.keys()) - self.manifest.values.keys():
            raise ValueError(f"value {min(missing)!r} is not listed among the values")
        for name, value in self.manifest.values.items():
            if value.producer is not None and value.producer != producers.get(name):
                raise ValueError(f"value {name!r} names the producer {value.producer!r}, which does not compute it")
            if value.producer is None and name in producers:
                raise ValueError(f"value {name!r} names no producer, but segment {producers[name]!r} computes it")

    def _check_end(self) -> None:
        if not_run := set(self.segments) - self.ran:
            raise ValueError(f"segment {min(not_run)!r} never runs")
        if unreceived := self.sent.keys() - self.received:
            value, device = min(unreceived)
            raise ValueError(f"{value!r} is sent to {device}, which never receives it")
        self._check_states()
        for output in self.manifest.outputs:
            if output.value in self.inputs:
                continue
            device = self.producers.get(output.value, "")
            if not device or output.value not in self.values[device]:
                raise ValueError(f"output {output.name!r} returns {output.value!r}, which no device has at the end")

    def _check_states(self) -> None:
        """Raise ValueError unless each state is computed on its device, and read only there in the next call."""
        value_of = {output.name: output.value for output in self.manifest.outputs}
        readers = group_pairs((name, item.device) for item in self.manifest.segments for name in item.inputs)
        for state in self.manifest.states:
            if state.input not in self.inputs or self.producers.get(value_of.get(state.output, "")) != state.device:
                raise ValueError(f"state {state.output!r} = {state.input!r} is not computed on {state.device!r}")
            for device in sorted({*readers.get(state.input, ())} - {state.device}):
                raise ValueError(f"state {state.input!r} is on {state.device!r}, but a segment on {device!r} reads it")


# ----------------------------------------------------------------------------------------- routes, states, and batching


def _list_route_faults(manifest: Manifest) -> Iterator[str]:
    working, known = set(list_working_devices(manifest)), {device.id for device in manifest.target.devices}
    segments = {segment.id for segment in manifest.segments}
    taken = {tuple((device, device) for device in sorted(working))}
    for number, route in enumerate(manifest.routes, 1):
        stand_ins = list(route.devices.values())
        if route.devices.keys() != working:
            yield f"route {number} is for {_join(route.devices)}, the programs for {_join(working)}"
        elif unknown := set(stand_ins) - known:
            yield f"route {number} names {_join(unknown)}, which the target does not have"
        elif len(set(stand_ins)) < len(stand_ins):
            yield f"route {number} gives two programs to one device"
        elif route.seconds.keys() != segments:
            yield f"route {number} has times for {_join(route.seconds)}, expected one per segment"
        elif (key := tuple(sorted(route.devices.items()))) in taken:
            yield f"route {number} is there twice"
        else:
            taken.add(key)
    if (total := sum(route.share for route in manifest.routes)) > 1 + SHARE_TOLERANCE:
        yield f"expected shares of at most 1 in all, got {total:g}"


def _join(names: object) -> str:
    return ", ".join(sorted(map(str, names))) or "nothing"  # type: ignore[call-overload]


def list_split_faults(manifest: Manifest) -> Iterator[str]:
    """Name split states whose parts are not states of the bundle, or have no size."""
    pairs = {(state.input, state.output) for state in manifest.states}
    for state in manifest.sharding.states if manifest.sharding else ():
        parts = list(zip(state.inputs, state.outputs))
        complete = len(parts) == len(state.inputs) == len(state.outputs) > 0
        sized = state.axis < 0 or (len(state.sizes) == len(parts) and len(parts) % state.copies == 0)
        if not (complete and sized and pairs.issuperset(parts)):
            yield f"the parts of state {state.input!r} are not states of the bundle, each with a size"


def _list_initial_faults(manifest: Manifest) -> Iterator[str]:
    """Name initial values that do not fit their inputs, or are in no file of the bundle."""
    inputs = {item.name: item for item in manifest.inputs}
    for state in manifest.states:
        if state.initial is None:
            continue
        item = inputs[state.input]
        if fault := _find_stored_fault(manifest, state.initial, item.dtype) or _find_shape_fault(state.initial, item):
            yield f"the initial value of state {state.input!r} {fault}"


def _find_stored_fault(manifest: Manifest, record: InitialRecord, dtype: str) -> str:
    """Return what is wrong unless plain bytes of a value are in a file of the bundle."""
    files = manifest.linked if record.linked else manifest.files
    element, listed = numpy_type(dtype), files.get(record.file)
    if listed is None:
        return f"is in {record.file!r}, which is not a file of the bundle"
    if record.offset + record.bytes > listed.bytes:
        return f"ends at byte {record.offset + record.bytes} of {record.file!r}, which has {listed.bytes}"
    if element is None:
        return f"is of type {dtype}, which cannot be stored"
    if (size := math.prod(record.shape) * element.itemsize) != record.bytes:
        return f"has {record.bytes} bytes, expected {size}"
    return ""


def _find_shape_fault(record: InitialRecord, item: InputRecord) -> str:
    declared = record.shape if item.shape is None else item.shape
    pairs = zip(record.shape, declared)
    if len(record.shape) != len(declared) or any(isinstance(entry, int) and entry != size for size, entry in pairs):
        return f"has the shape {list(record.shape)}, expected {list(declared)}"
    return ""


def _list_stream_faults(manifest: Manifest) -> Iterator[str]:
    """Name weights that stream and are in no file of the bundle, and blocks that do not fit into their pool."""
    for name, record in manifest.streamed.items():
        if fault := _find_stored_fault(manifest, record, record.dtype):
            yield f"weight {name!r}, which streams, {fault}"
    streams = {stream.device: stream for stream in manifest.streams}
    for device in streams.keys() - {device.id for device in manifest.target.devices}:
        yield f"weights stream to {device!r}, which the target does not have"
    for segment in (segment for segment in manifest.segments if segment.streamed):
        if unknown := [name for name in segment.streamed if name not in manifest.streamed]:
            yield f"segment {segment.id} reads weight {unknown[0]!r}, and no file has it"
            continue
        size = measure_block(manifest.streamed[name].bytes for name in segment.streamed)
        homes = {manifest.streamed[name].home for name in segment.streamed}
        stream = streams.get(segment.device)
        if stream is None or not homes <= stream.bytes_per_second.keys():
            yield f"weights of segment {segment.id} stream to {segment.device}, and its stream is not described"
            continue
        devices = (route.devices[segment.device] for route in list_routes(manifest))
        if size > (room := min(streams.get(device, stream).pool_bytes for device in devices)):
            yield f"the weights of segment {segment.id} take {size} bytes, and their pool has {room}"


def _list_batching_faults(manifest: Manifest) -> Iterator[str]:
    """Name what is wrong unless the axes of a batch are symbolic axes of inputs, and axes of outputs."""
    record = manifest.batching
    if record is None or not record.dimension:
        return
    begin = "its batching does not fit its inputs and outputs"
    shapes = {item.name: item.shape for item in manifest.inputs}
    if not record.inputs or not record.outputs:
        yield f"{begin}: it has no inputs or no outputs"
    for name, axis in record.inputs.items():
        shape = shapes.get(name)
        if shape is None or axis >= len(shape) or isinstance(shape[axis], int):
            yield f"{begin}: input {name!r} has no symbolic axis {axis}"
    for name in record.outputs.keys() - {item.name for item in manifest.outputs}:  # declared shapes may be wrong
        yield f"{begin}: there is no output {name!r}"


# ---------------------------------------------------------------------------------------------------------------- plans


def _list_size_faults(manifest: Manifest) -> Iterator[str]:
    """Name plans that are not folders as the compiler names them, and sizes that do not fit the plans."""
    count = 1 + len(manifest.plans)
    if manifest.plans != tuple(f"plan{number}" for number in range(1, count)):
        yield f"its plans are {_join(manifest.plans)}, expected plan1, plan2 and so on"
    for item in manifest.sizes:
        if len(item.seconds) != count or not any(seconds is not None for seconds in item.seconds):
            yield f"expected a step of each plan, {count} in all, at {item.dimensions}, got {list(item.seconds)}"


def _name_interface(manifest: Manifest) -> tuple[object, ...]:
    """Return the model, the types of its inputs and outputs, and its states, by the names that callers use."""
    split = manifest.sharding.states if manifest.sharding else ()
    whole = {part: state.input for state in split for part in state.inputs}
    whole |= {part: state.output for state in split for part in state.outputs}
    declared: list[InputRecord | OutputRecord] = [*manifest.inputs, *manifest.outputs]
    types = {(whole.get(item.name, item.name), item.dtype) for item in declared}
    states = {(whole.get(item.input, item.input), whole.get(item.output, item.output)) for item in manifest.states}
    return manifest.model_digest, types, states
