"""Devices, open segments and routes as workers use them, and the device that takes over from others."""

from __future__ import annotations

import copy
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.bundle_routes import list_routes
from onnxplace.bundle.manifest import SegmentRecord, StaticRecord
from onnxplace.errors import (
    BundleError,
    Diagnostic,
    ExecutionError,
    FallbackWarning,
    ModelError,
    NoteWarning,
    OnnxplaceError,
)
from onnxplace.machine.hardware import available_cores, describe_optimiser, find_node
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import (
    make_session_options,
    open_in_threads,
    pin_thread,
    uses_optimisations,
    without_optimisations,
)
from onnxplace.machine.ort_values import is_absent, is_native_type, to_ort_value_if_possible, to_python
from onnxplace.runtimes.execution.host_memory import HostMemory, IsolatedMemory, return_freed_memory
from onnxplace.target.device_kinds import ISOLATE, DeviceAddress
from onnxplace.target.device_memory import DeviceMemory
from onnxplace.target.kind_table import find_kind, import_memory, is_isolated
from onnxplace.target.target import Device
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.ort import build_one_node_model
from onnxplace.utils.quantities import format_milliseconds
from onnxplace.utils.threads import call_guarded

MAX_PATTERN_BYTES = 4 << 20


class PlacedDevice:
    """A device as workers use it: its cores and its memory."""

    def __init__(self, device: Device, cores: Sequence[int], owner: str = "") -> None:
        self.id = device.id
        self.cores = cores
        self.processors = frozenset(device.processors or (device.id,))
        """Of which each runs one segment at a time."""
        self.kind = find_kind(device.kind)
        address = replace(device.address, owner=owner)
        memory = import_memory(self.kind)
        if is_isolated(address):  # said outright: where the main thread is pinned, all cores would be one
            memory, address = IsolatedMemory, replace(address, options={**address.options, ISOLATE: "true"})
        self.memory: DeviceMemory = memory(address, cores)
        self.slow_openings: list[tuple[str, float]] = []
        """Why a segment was compiled again although it has a compiled model, and the seconds to open it."""
        self._has_warned = False

    def report_host(self, message: str) -> None:
        """Warn, once, that the host computes in the place of this device."""
        if not self._has_warned:
            hint = "compile for further sizes by --shape batch=1,4"
            note = Diagnostic("F009", f"{message}; the host computes it", where=self.id, hint=hint)
            call_guarded(warnings.warn, NoteWarning(note))
        self._has_warned = True

    def report_slow_openings(self) -> None:
        """Warn, once for all segments, that compiled models were not used."""
        if self.slow_openings:
            seconds = format_milliseconds(sum(seconds for _, seconds in self.slow_openings))
            message = f"{self.slow_openings[0][0]}; compiling anew took {seconds}"
            self.slow_openings.clear()
            note = Diagnostic("N012", message, where=self.id, hint="compile the model again on this machine")
            call_guarded(warnings.warn, NoteWarning(note))


class OpenSegment:
    """A segment's session, called with values that stay on the device."""

    def __init__(
        self, record: SegmentRecord, session: Any, device: PlacedDevice, leaving: Collection[str] = ()
    ) -> None:
        self.record = record
        self.session = session
        self.device = device
        types = [item.type for item in (*session.get_inputs(), *session.get_outputs())]
        self.owns_buffers = all(kind.startswith("tensor(") and kind != "tensor(string)" for kind in types)
        """Whether all inputs and outputs are tensors whose bytes ONNX Runtime owns."""
        self._maps = any("map(" in kind for kind in types)  # these exist only as Python objects
        self._is_plain = all(is_native_type(kind) or kind == "tensor(string)" for kind in types)
        self.is_native = device.kind.is_host and all(is_native_type(kind) for kind in types)
        self._inputs, self._names = (*record.inputs, *record.streamed), list(record.outputs)
        self._leaving = leaving
        self.inner = getattr(session, "_sess", session)
        """The session without ONNX Runtime's class in Python, whose checks take 2 us, and 1 us more for each input."""

    def on(self, device: PlacedDevice) -> OpenSegment:
        """Return the same session for a device."""
        twin = copy.copy(self)
        twin.device = device
        return twin

    def run(self, values: dict[str, Any], kept_alive: list[Any], options: Any) -> None:
        """Compute this segment's outputs from `values` and add them there.

        Args:
            values: Values on the device, by name.
            kept_alive: receives feeds that an optional or a sequence may still refer to after `values` drops them.
            options: ONNX Runtime's RunOptions.
        """
        inputs = {name: values[name] for name in self._inputs if name in values}
        memory = self.device.memory
        if self.is_native:  # the cheapest call, with no more copies than the others
            arrays = {name: item if type(item) is np.ndarray else to_python(item) for name, item in inputs.items()}
            outputs = self.run_native(arrays, options)
        elif self.owns_buffers:
            outputs = memory.run(self.session, inputs, self._names, self._leaving, options)
        else:
            inputs = {name: memory.to_host(value) for name, value in inputs.items()}
            outputs = memory.run_unbound(lambda: self._run_unbound(inputs, options))
            kept_alive.append(inputs)
        values.update(zip(self._names, outputs))

    def run_native(self, inputs: Mapping[str, Any], options: Any) -> Sequence[Any]:
        """Run with arrays of types that numpy has."""
        return list(self.inner.run(self._names, inputs, options))

    def _run_unbound(self, inputs: Mapping[str, Any], options: Any) -> Sequence[Any]:
        """Run with sequences, maps, optionals or strings, which cannot be bound."""
        # Passing an empty optional back as an OrtValue crashes the process, so it is passed as a Python object.
        needs_arrays = self._maps or any(is_absent(value) for value in inputs.values())
        if needs_arrays or self._is_plain:  # with strings, arrays are the cheapest call
            # Bytes that are no text are in OrtValues only.
            with suppress(*(() if needs_arrays else (UnicodeDecodeError,))):
                arrays = {name: to_python(value) for name, value in inputs.items()}
                return list(self.session.run(self._names, arrays, options))
        feeds = {name: to_ort_value_if_possible(value) for name, value in inputs.items()}
        return list(self.session.run_with_ort_values(self._names, feeds, options))


class StaticSegment(OpenSegment):
    """A segment on a device that needs static shapes: a session for the compiled sizes, and one on the host for others.

    The host has all cores, and opens its session when a request first needs it.

    Args:
        bundle: Has the segment.
        record: The segment.
        session: Its session on the device; None if that cannot be opened, or if its sizes depend on data.
        device: The device.
    """

    def __init__(self, bundle: Bundle, record: SegmentRecord, session: Any, device: PlacedDevice) -> None:
        host = PlacedDevice(Device("cpu:0", 1), available_cores())
        self._static, self._open_host = session, cache(partial(_open, bundle, record, record.file, host))
        super().__init__(record, session or self._open_host(), device, _find_leaving(bundle, record))

    def run(self, values: dict[str, Any], kept_alive: list[Any], options: Any) -> None:
        """Compute the outputs with the session for the sizes of the inputs."""
        static = self.record.static
        if static and self._static and _has_size(static, values):
            self.session, inputs = self._static, _list_inputs(self.record)
        else:
            self.session, inputs = self._open_host(), self.record.inputs
            varying = [name for name in (static.shapes if static else ()) if name in values]
            found = ", ".join(f"{name!r} {list(_shape_of(values[name]))}" for name in varying)
            self.device.report_host(f"no session of segment {self.record.id} is for {found or 'these sizes'}")
        self._inputs = (*inputs, *self.record.streamed)
        super().run(values, kept_alive, options)


def _list_inputs(record: SegmentRecord) -> tuple[str, ...]:
    """Return the inputs of a segment that are not constants in its model of static shapes."""
    return tuple(name for name in record.inputs if not record.static or name not in record.static.values)


def _has_size(static: StaticRecord, values: Mapping[str, Any]) -> bool:
    """Return whether the inputs of a segment are those that its model of static shapes is for."""
    return all(name in values and _shape_of(values[name]) == shape for name, shape in static.shapes.items()) and all(
        to_python(values[name]).tobytes().hex() == digits for name, digits in static.values.items()
    )


def _shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor in the host's memory."""
    return tuple(value.shape if isinstance(value, np.ndarray) else value.shape())


def open_segment(bundle: Bundle, record: SegmentRecord, device: PlacedDevice) -> OpenSegment:
    """Open a segment on its device.

    Raises BundleError if its file changed since the compile or contradicts the manifest, and ModelError if ONNX Runtime
    refuses it although it did not change.
    """
    if not device.kind.needs_static_shapes:
        return OpenSegment(record, _open_fastest(bundle, record, device), device, _find_leaving(bundle, record))
    session = None
    if record.static:
        updates = {"file": record.static.file, "inputs": _list_inputs(record), "optimised": ""}
        try:
            session = _open_fastest(bundle, record.model_copy(update=updates), device)
        except ModelError as problem:  # a provider may claim nodes and then fail to compile them
            device.report_host(f"segment {record.id} cannot be opened on it: {problem.message}")
    return StaticSegment(bundle, record, session, device)


def _open_fastest(bundle: Bundle, record: SegmentRecord, device: PlacedDevice) -> Any:
    """Return the session of a segment on its device, from a compiled model if one was made for this device."""
    address, reason = device.memory.address, ""
    is_fitting = record.optimised and uses_optimisations() and not device.kind.list_providers(address)
    if is_fitting and bundle.manifest.optimised_for == describe_optimiser():
        with suppress(OnnxplaceError), without_optimisations():  # it may be removed, or damaged
            bundle.check_files(record.optimised)
            return _open(bundle, record, record.optimised, device)
    fitting = record.compiled if uses_optimisations() else ()
    made_for = device.kind.describe_compiler(address) if fitting else ""
    for item in (item for item in fitting if item.made_for == made_for):
        try:
            bundle.check_files(*item.files, check="small")
            return _open(bundle, record, item.files[0], device)
        except OnnxplaceError as problem:
            reason = f"its compiled model {item.files[0]} cannot be used: {problem.message}"
    start = time.perf_counter()
    session = _open(bundle, record, record.file, device)
    if made_for:
        reason = reason or f"its segments were compiled for {fitting[0].made_for}; here is {made_for}"
        device.slow_openings.append((reason, time.perf_counter() - start))
    return session


def _open(bundle: Bundle, record: SegmentRecord, file: str, device: PlacedDevice) -> Any:
    """Return a session of a segment, whose model is in `file`, on its device."""
    entries = {**bundle.session_entries, **device.memory.session_entries()}
    if bundle.session_entries and file in bundle.compiled_files:  # its binary files are here, not where weights are
        entries["ep.context_file_path"] = str(bundle.file(file))
    if len(device.processors) > 1:  # threads that spin after a run would keep others from their cores
        entries["session.force_spinning_stop"] = "1"
    options = make_session_options(device.cores, entries=entries, keeps_order=record.keeps_order)
    # One block for all memory of a run saves an eighth of a call of 0.15 ms; on the CPU it comes on top of others.
    is_small = not device.kind.is_host or record.workspace_bytes <= MAX_PATTERN_BYTES
    options.enable_mem_pattern = is_small and not record.keeps_order
    where, address, provider_options = f"segment {record.id}", device.memory.address, device.memory.provider_options()
    try:
        session = open_session(bundle.file(file), options, address, where, provider_options)
    except ModelError:
        bundle.check_files(file)  # larger files were not hashed when the bundle was opened
        raise
    _require_declared_interface(bundle, record, session)
    device.memory.adopt(session, where)
    return session


def _find_leaving(bundle: Bundle, record: SegmentRecord) -> frozenset[str]:
    """Return the outputs of a segment that no segment of its device reads, now or, as states, in the next request."""
    manifest = bundle.manifest
    value_of = {item.name: item.value for item in manifest.outputs}
    read = {name for segment in manifest.segments if segment.device == record.device for name in segment.inputs}
    read |= {value_of[state.output] for state in manifest.states}
    return frozenset(record.outputs) - read


def _require_declared_interface(bundle: Bundle, record: SegmentRecord, session: Any) -> None:
    """Raise BundleError unless a session has the inputs and outputs that the manifest declares."""
    values, inputs = bundle.manifest.values, {item.name: item for item in bundle.manifest.inputs}
    defaults = session.get_overridable_initializers()  # some exist only to keep ONNX Runtime from folding them
    for kind, names, items, optional in (
        ("inputs", (*record.inputs, *record.streamed), session.get_inputs(), defaults),
        ("outputs", record.outputs, session.get_outputs(), ()),
    ):
        actual = {item.name: item for item in (*items, *optional)}
        required = {item.name for item in items if kind == "inputs"}
        if not required <= set(names) <= set(actual):
            message = f"its {kind} are {_format_names(actual)}, the manifest says {_format_names(names)}"
            raise _wrong_segment_error(record, message)
        for name in names:
            declared = [(item.dtype, item.shape) for item in (values.get(name), inputs.get(name)) if item is not None]
            for dtype, shape in declared:
                if not _is_compatible(dtype, shape, item := actual[name]):
                    message = f"{name!r} is {item.type} {item.shape}, the manifest says {dtype} {shape}"
                    raise _wrong_segment_error(record, message)


def _is_compatible(dtype: str, shape: Sequence[int | str | None] | None, item: Any) -> bool:
    """Return whether a type and shape of the manifest are possible for a session's input or output."""
    if dtype != item.type:
        return False
    if shape is None or not dtype.startswith("tensor(") or not item.shape:
        return True  # an empty list means a scalar or an unknown shape
    sizes = list(zip(shape, item.shape))
    return len(shape) == len(item.shape) and all(a == b for a, b in sizes if isinstance(a, int) and isinstance(b, int))


def _format_names(names: Any) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"


def _wrong_segment_error(record: SegmentRecord, message: str) -> BundleError:
    hint = "the file belongs to another segment or was altered; compile the model again"
    return BundleError("N002", message, where=f"segment {record.id} ({record.file})", hint=hint)


# Open routes: the devices and sessions that a request may take.

# A route that the prediction leaves out is taken only if the others are this much busier.
MIN_SHARE = 1e-3


@dataclass(frozen=True)
class OpenRoute:
    """A route with its sessions."""

    index: int
    devices: Mapping[str, str]
    """Device with a program -> the device that follows this program on this route."""
    programs: Mapping[str, str]
    """The inverse."""
    segments: dict[str, OpenSegment]
    """Open segments by id, each on its device of this route; empty once the engine is closed."""
    share: float
    """Share of the requests that take it, as predicted."""


def open_routes(bundle: Bundle, devices: Mapping[str, PlacedDevice]) -> list[OpenRoute]:
    """Open the segments of all routes that run on some devices, each once on each of these, or on several at once.

    CPU devices, of which each has its own cores, do so at the same time.

    Raises the errors of `open_segment`.
    """
    manifest, routes = bundle.manifest, list_routes(bundle.manifest)
    # A single route runs each segment on one device, which shares it with no other.
    groups = {item.id: _find_sharing_group(item) if len(routes) > 1 else item.id for item in devices.values()}
    needed: dict[tuple[str, str], tuple[SegmentRecord, PlacedDevice]] = {}  # by segment and group
    for route in routes:
        for record in manifest.segments:
            if (device := devices.get(route.devices[record.device])) is not None:  # else another process has it
                needed.setdefault((record.id, groups[device.id]), (record, device))
    queues = group_pairs((device, key) for key, (_, device) in needed.items())

    def open_queue(device: PlacedDevice) -> dict[tuple[str, str], OpenSegment]:
        with pin_thread(device.cores):
            opened = {key: open_segment(bundle, *needed[key]) for key in queues[device]}
        return_freed_memory(sum(needed[key][0].weights_bytes for key in queues[device]))
        return opened

    at_once = [device for device in queues if device.kind.is_host and type(device.memory) is HostMemory]
    parts = [open_queue(device) for device in queues if device not in at_once]  # other providers
    # Not in this thread, however small they are: it would stay on the cores of the last one, whose worker needs them.
    parts += open_in_threads([partial(open_queue, device) for device in at_once])
    opened = {key: segment for part in parts for key, segment in part.items()}
    usable = list[OpenRoute]()
    for index, route in enumerate(routes):
        segments = {
            record.id: opened[record.id, groups[device.id]].on(device)
            for record in manifest.segments
            if (device := devices.get(route.devices[record.device])) is not None
        }
        programs = {device: home for home, device in route.devices.items()}
        usable.append(OpenRoute(index, route.devices, programs, segments, max(route.share, MIN_SHARE)))
    for device in devices.values():
        device.report_slow_openings()
    return usable


def _find_sharing_group(device: PlacedDevice) -> str:
    """Return the name of the devices that can run one session, with one copy of its weights; otherwise the device's.

    A session on one core has no threads: those of its callers compute. Weights are shared in one node of
    memory only, since others are slower to reach.
    """
    if not device.kind.is_host or type(device.memory) is not HostMemory or len(device.cores) != 1:
        return device.id
    node, options = find_node(device.cores[0]), sorted(device.memory.address.options.items())
    return f"cores of {node} {options}"


def choose_route(routes: Sequence[OpenRoute], taken: Iterable[int]) -> OpenRoute:
    """Return the route of a new request, given the indices of those that requests in flight have taken.

    It is the one that then has the fewest requests in flight relative to its share. A request alone takes the first
    route.
    """
    counts = Counter(taken)
    if not counts:
        return routes[0]
    return min(routes, key=lambda route: ((counts[route.index] + 1) / route.share, route.index))


# The fallback of a session: the device that takes over the segments of devices that are lost while it runs.


class Fallback:
    """A device that stands in for others, under their names.

    Args:
        bundle: An open bundle.
        device: The device, of this machine.
        cores: Its cores.
    """

    def __init__(self, bundle: Bundle, device: Device, cores: Sequence[int]) -> None:
        self._bundle, self._device, self._cores = bundle, device, cores

    def is_needed(self, device: PlacedDevice, failure: ExecutionError) -> bool:
        """Return whether a device that failed is lost: its process ended, or it does not run a single node any more."""
        address = device.memory.address
        return address != self._device.address and (failure.code == "X016" or not _is_usable(address))

    def take_over(self, device: PlacedDevice, routes: Sequence[OpenRoute], failure: ExecutionError) -> None:
        """Open the segments of a lost device on this one, and warn of it; for the thread that works for the device.

        Raises ExecutionError if they cannot be opened.
        """
        stand_in = PlacedDevice(self._device, self._cores)
        try:
            opened = open_routes(self._bundle, {device.id: stand_in})
        except OnnxplaceError as problem:
            message = f"{failure.message}; {self._device.id} cannot take over: {problem.message}"
            raise ExecutionError("X016", message, where=device.id, hint=problem.hint) from failure
        for route, part in zip(routes, opened):
            route.segments.update(part.segments)
        device.cores, device.processors = stand_in.cores, stand_in.processors
        device.kind, device.memory = stand_in.kind, stand_in.memory
        message = f"{failure.message}; {self._device.id} runs its segments from now on"
        call_guarded(warnings.warn, FallbackWarning(Diagnostic("X016", message, where=device.id)))


def _is_usable(device: DeviceAddress) -> bool:
    """Return whether a device still runs a node."""
    try:
        open_session(build_one_node_model(), make_session_options(()), device).run(None, {"x": np.zeros(1, np.float32)})
    except Exception:  # noqa: BLE001 - a device that is gone may fail in any way
        return False
    return True
