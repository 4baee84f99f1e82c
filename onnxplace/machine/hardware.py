"""Cores, memory and GPUs of this machine."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from onnxplace.errors import OnnxplaceError, PluginError, TargetError, format_names, format_value, suggest_nearest
from onnxplace.machine.measurement_cache import processor
from onnxplace.machine.ort_sessions import make_session_options, open_session
from onnxplace.target.device_kinds import PROVIDER_OPTION, THREADS, DeviceAddress, Hardware, list_provider_options
from onnxplace.target.hosts import split_host
from onnxplace.target.kind_table import (
    SHORT_NAMES,
    find_kind,
    is_isolated,
    is_known_kind,
    list_kind_names,
    resolve_short_name,
)
from onnxplace.target.parsing import DeviceSpec, name_variant, name_whole, parse_devices
from onnxplace.target.target import HAND_OVER_SECONDS, Device, Pool, Target, count_cores_by_processor
from onnxplace.target.unused_hardware import list_unused_hardware
from onnxplace.utils.control_groups import count_cores, count_free_bytes, list_cores
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.ort import build_one_node_model, import_onnxruntime
from onnxplace.utils.subprocesses import run_in_child

if TYPE_CHECKING:
    from onnxplace.machine.device_probe import DeviceTraits

# Where the system tells the node of each core: tests have others.
CORES_FOLDER = Path("/sys/devices/system/cpu")
# Memory of a process that runs bundles, before it has a model: Python, packages, ONNX Runtime (benchmarks/memory.py).
RUNTIME_BYTES = 82 << 20
# Share of the memory that stays free for what a schedule does not count: structures of the sessions, holes in the
# arena, weights that several segments of a device copy, other programs (docs/measurements.md).
HEADROOM_SHARE = 0.10


def available_cores() -> tuple[int, ...]:
    """Return the processor cores of this process, in order: as many as its container may use the time of.

    These are whole cores, at least one. A thread that pinned itself gets all of them too.
    """
    return tuple(list_cores()[: count_cores()])


def available_memory_bytes() -> int:
    """Return the free host memory, within the limit of the container."""
    return count_free_bytes()


def divide_cores(count: int) -> list[int]:
    """Return the number of cores of each processor, at least one."""
    share, extra = divmod(len(available_cores()), count)
    return [max(share + (index < extra), 1) for index in range(count)]


def find_node(core: int) -> int:
    """Return the number of the node of memory that is near a core; 0 where the system does not say."""
    return _read_node(CORES_FOLDER, core)


@cache  # it never changes, and listing it for many cores takes as long as opening a small bundle
def _read_node(folder: Path, core: int) -> int:
    return min((int(path.name.removeprefix("node")) for path in folder.glob(f"cpu{core}/node[0-9]*")), default=0)


def assign_cores(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the cores of each CPU device, of one node of memory where one has enough.

    Devices share cores only if there are too few.

    Args:
        sizes: The number of cores of each device.
    """
    cores = sorted((find_node(core), core) for core in available_cores())
    assignment, free = list[tuple[int, ...]](), list(cores)
    for size in (min(size, len(cores)) for size in sizes):
        if len(free) < size:
            free += [place for place in cores if place not in free]
        counts = Counter(node for node, _ in free)
        node = next((number for number in sorted(counts) if counts[number] >= size), None)
        chosen = sorted(free, key=lambda place: node is not None and place[0] != node)[:size]
        assignment.append(tuple(core for _, core in chosen))
        for place in chosen:
            free.remove(place)
    return assignment


def find_cores(devices: Sequence[Device]) -> dict[str, tuple[int, ...]]:
    """Return the cores of each device of one host that computes on cores, by its id: those of its processors."""
    with_cores, sizes = [device for device in devices if device.has_cores], count_cores_by_processor(devices)
    processors = {device.id: device.processors or (device.id,) for device in with_cores}
    cores = dict(zip(sizes, assign_cores(list(sizes.values()))))
    joined = {key: [core for name in names for core in cores[name]] for key, names in processors.items()}
    return {device.id: tuple(joined[device.id][: device.cores]) for device in with_cores}


def local_target(
    devices: str | Sequence[str] | None = None, providers: Sequence[str] = (), *, has_max_error: bool = False
) -> Target:
    """Return a target of devices of this machine.

    By default, these are all usable GPUs of one built-in kind, or else two CPU devices, or one on a single core.

    A memory limit is the memory that is free now, less `HEADROOM_SHARE`. CPU devices share the host's memory equally,
    less `RUNTIME_BYTES`, and logical devices of a GPU share that of the GPU.

    Args:
        devices: Device ids, such as `cuda:0,cuda:1`, with options, such as `cuda:0{provider=tensorrt}`.
        providers: Further execution providers for the hardware of these devices, such as `openvino`, as further
            devices with the same processors; with them, one that spans all processors, as one session on all cores.
        has_max_error: Whether the faster types in which they compute float32 are further devices, too.

    Raises:
        TargetError: A GPU does not exist, ONNX Runtime cannot use it, a device names its host, or none of them can be
            used by a provider.

    >>> [device.id for device in local_target("cpu:0,cpu:1").devices]
    ['cpu:0', 'cpu:1']
    """
    specs = [resolve_device(spec) for spec in parse_devices(devices or list_default_device_ids())]
    if host := split_host(specs[0].id)[0]:
        message = f"{specs[0].id} is a device of host {host}; expected devices of this machine"
        hint = "leave the host out, or describe several hosts in a file for --target (docs/target.md)"
        raise TargetError("T005", message, where="--devices", hint=hint)
    if providers or has_max_error:
        specs = _add_alternatives(specs, providers, has_max_error=has_max_error)
    addresses = [DeviceAddress.of(spec.id) for spec in specs]
    with_cores = [address for address in addresses if find_kind(address.kind).has_cores]
    numbers = sorted({number for address in with_cores for number in _list_processors(address)})
    core_counts = dict(zip(numbers, divide_cores(len(numbers)) if numbers else ()))
    usable_bytes = int(max(available_memory_bytes() - RUNTIME_BYTES, 0) * (1 - HEADROOM_SHARE))
    whole = Counter((address.kind, address.index) for address in addresses if not isinstance(address.part, str))
    described = list[Device]()
    for spec, address in zip(specs, addresses):
        own = [n for n in _list_processors(address) if n in core_counts] if find_kind(address.kind).has_cores else []
        device = Device(spec.id, usable_bytes * len(own) // max(len(numbers), 1), options=spec.options)
        if own:
            cores = int(spec.options.get(THREADS, 0)) or sum(core_counts[n] for n in own)
            if cores > max(len(available_cores()), len(own)):
                message = f"{THREADS}={cores} is more than the {len(available_cores())} cores of this machine"
                raise TargetError("T005", message, where=spec.id, hint="name fewer, or describe another machine")
            device = replace(device, cores=cores, processors=tuple(f"cpu:{n}" for n in own))
        if not device.is_host:
            device = _describe_accelerator(device, max(whole[address.kind, address.index], 1))
            found = find_precision(device)
            device = replace(device, computes_in="" if found == device.precision else found)
        if is_isolated(device.address):
            device = replace(device, segment_seconds=device.segment_seconds + HAND_OVER_SECONDS)
        described.append(device)
    return _join_processors(tuple(described))


def _add_alternatives(specs: list[DeviceSpec], providers: Sequence[str], *, has_max_error: bool) -> list[DeviceSpec]:
    """Return devices and further ways to use the same hardware: other providers, faster types, spans."""
    ways = list(specs)
    for provider in providers:
        own = [way for spec in specs if (way := _use_provider(spec, provider)) is not None]
        if not own:
            from onnxplace.target.plugin_providers import RECORDS, list_families  # which other targets do not need

            ids = format_names([spec.id for spec in specs], quoted=False)
            hint = suggest_nearest(provider, (*RECORDS, *list_families(), "tensorrt"))
            message = f"{format_value(provider)} is no other provider for {ids}"
            raise TargetError("T005", message, where="--providers", hint=hint)
        ways += own
    for way in list(ways) if has_max_error else ():
        if "precision" not in way.options:
            for precision in find_kind(way.id.partition(":")[0]).list_values("precision", way.options)[1:]:
                given = {"precision": precision}
                ways.append(DeviceSpec(name_variant(way.id, given), {**way.options, **given}))
    ways += _list_spans(ways)
    return list({way.id: way for way in ways}.values())


def _use_provider(spec: DeviceSpec, provider: str) -> DeviceSpec | None:
    """Return a device as another provider uses it; None if it is none of that provider."""
    address = DeviceAddress.of(spec.id)
    kind, name = find_kind(address.kind), f"{provider}/cpu"
    if kind.is_host and is_known_kind(name):
        return DeviceSpec(replace(address, kind=name).id)
    if provider in kind.options.get("provider", ()) and kind.provider(spec.options) != kind.providers[provider]:
        given = {"provider": provider}
        return DeviceSpec(name_variant(spec.id, given), {**spec.options, **given})
    return None


def _list_spans(specs: Sequence[DeviceSpec]) -> list[DeviceSpec]:
    """Return, for devices with cores of one kind with equal options, one that has the cores of all."""
    groups: dict[tuple[object, ...], list[DeviceSpec]] = {}
    for spec in specs:
        address = DeviceAddress.of(spec.id)
        if find_kind(address.kind).has_cores and address.last is None:
            groups.setdefault((address.kind, address.part, *sorted(spec.options.items())), []).append(spec)
    spans = []
    for group in groups.values():
        numbers = sorted(DeviceAddress.of(spec.id).index for spec in group)
        if 0 < numbers[-1] - numbers[0] == len(group) - 1:
            span = replace(DeviceAddress.of(group[0].id), index=numbers[0], last=numbers[-1])
            spans.append(replace(group[0], id=span.id))
    return spans


def _list_processors(address: DeviceAddress) -> range:
    """Return the numbers of the processors that a device with cores computes on."""
    return range(address.index, (address.index if address.last is None else address.last) + 1)


def _join_processors(devices: tuple[Device, ...]) -> Target:
    """Return devices that share processors and memory where they are the same hardware, and else have their own."""
    # Parts of a GPU stand for GPUs of their own.
    own = [device.id if isinstance(device.address.part, int) else name_whole(device.id) for device in devices]
    names = [device.processors or (name,) for device, name in zip(devices, own)]
    uses = Counter(name for row in names for name in row)
    shares = [len(row) > 1 or any(uses[name] > 1 for name in row) for row in names]
    devices = tuple(replace(d, processors=row if shared else ()) for d, row, shared in zip(devices, names, shares))
    if not any(shares):
        return Target(devices)
    groups = group_pairs(("host" if device.has_cores else name_whole(device.id), device) for device in devices)
    # Logical devices that are parts have their shares of the memory already.
    shared = [group for group in groups.values() if len(group) > 1 and any(device.processors for device in group)]
    # Together, they may use what those have that share no processor.
    sums = [sum(group[index].memory_bytes for index in Target(tuple(group)).independent_devices) for group in shared]
    pools = [Pool(tuple(device.id for device in group), size) for group, size in zip(shared, sums)]
    return Target(devices, pools=tuple(pools))


def resolve_device(spec: DeviceSpec) -> DeviceSpec:
    """Return the device of this machine that is meant by `npu:0`, if there is one; other devices as they are."""
    address = DeviceAddress.of(spec.id) if not split_host(spec.id)[0] else None
    found = resolve_short_name(address.kind, address.index) if address and address.kind in SHORT_NAMES else None
    return replace(spec, id=replace(address, kind=found[0], index=found[1]).id) if address and found else spec


def list_default_device_ids() -> tuple[str, ...]:
    """Return the usable GPUs of the first kind that has any, or else two CPU devices; one where there is one core."""
    for kind in map(find_kind, list_kind_names(plugins=False)):
        addresses = [DeviceAddress(kind.name, hardware.index) for hardware in kind.list_hardware()]
        if usable := tuple(address.id for address in addresses if kind.find_problem(address) is None):
            return usable
    return ("cpu:0", "cpu:1")[: len(available_cores())]


def _describe_accelerator(device: Device, sharers: int) -> Device:
    """Return a GPU, or one of several logical devices that share it, with its name and memory.

    Raises TargetError if it cannot be used.
    """
    require_device(device)
    hardware = find_hardware(device)
    if hardware is None:
        raise TargetError(
            "T011",
            "its memory cannot be read: the driver does not list it",
            where=device.id,
            hint="pip install nvidia-ml-py, or describe the machine with --target",
        )
    if device.has_cores:  # its memory is the host's
        return replace(device, model=hardware.name)
    usable_bytes = int(hardware.free_bytes * (1 - HEADROOM_SHARE)) // sharers
    return replace(device, memory_bytes=usable_bytes, model=hardware.name)


def find_precision(device: Device) -> str:
    """Return the least precise type in which a device computes float32: as found on this machine, else as declared."""
    traits = probe_device(device)
    return (traits and traits.least_precise) or device.precision


def probe_device(device: Device) -> DeviceTraits | None:
    """Return what an accelerator of this machine computes; None for one that is not here, or cannot be used."""
    hardware = None if device.host or device.is_host else find_hardware(device)
    if hardware is None or device.model not in ("", hardware.name):
        return None
    from onnxplace.machine.device_probe import find_traits  # not for CPUs alone

    return find_traits(device, hardware, find_device_problem)


def find_hardware(device: Device) -> Hardware | None:
    """Return the GPU of this machine behind a device, if its driver lists it."""
    listed = find_kind(device.kind).list_hardware()
    index = 0 if device.has_cores else device.address.index  # all processors are one piece of hardware
    return next((hardware for hardware in listed if hardware.index == index), None)


def find_device_problem(device: Device) -> str | None:
    """Return why ONNX Runtime cannot use a device on this machine; None if it can."""
    if device.host:
        return f"it is a device of host {device.host}, and this runtime uses devices of this machine only"
    # One that is isolated for its cores only may be tried here, where it was tried before.
    if device.is_host or not is_isolated(replace(device.address, cores=0)):
        return _find_problem(device.address)
    return run_in_child(_find_problem, device.address, "the search for it", device.id)


def _find_problem(address: DeviceAddress) -> str | None:
    problem = find_kind(address.kind).find_problem(address)
    if problem is None and list_provider_options(address.options):  # which only the provider knows
        try:
            open_session(build_one_node_model(), make_session_options(()), address)
        except OnnxplaceError as refusal:
            return refusal.message
    return problem


def find_measurement_obstacle(device: Device) -> str | None:
    """Return why a device cannot be measured on this machine, if so.

    The device in the same place here stands for that of another host.
    """
    device = device.local
    if not device.is_host:
        hardware = find_hardware(device)
        if device.model and hardware is not None and device.model != hardware.name:
            return f"{device.id} on this machine is {hardware.name or 'a GPU without a name'}"
        return find_device_problem(device)
    if device.cores > len(available_cores()):
        return f"it has {device.cores} cores, this machine {len(available_cores())}"
    if device.model not in processor():
        return f"it stands for {device.model}, and this machine has another processor"
    return None


def require_device(device: Device, instead: str = "") -> None:
    """Raise TargetError with the reason unless ONNX Runtime can use this device here.

    Args:
        device: Any device, such as the GPU `cuda:0`.
        instead: A way to do without it, for the hint.
    """
    problem = find_device_problem(device)
    if problem:
        if device.host:
            hints = ["use --runtime mpi, or compile for devices of this machine", instead]
        elif (own := list_provider_options(device.options)) and find_device_problem(_drop(device, own)) is None:
            given = ", ".join(f"{name}={value}" for name, value in own.items())
            problem, hints = f"its provider refuses {given}: {problem}", ["its documentation lists options", instead]
        else:
            elsewhere = "to plan for a machine that is not here: --machine H100 (`onnxplace machines`)"
            hints = [find_install_hint(device), "`onnxplace devices` lists all devices", instead, elsewhere]
        raise TargetError("T011", problem, where=device.id, hint="; ".join(filter(None, hints)))


def _drop(device: Device, own: Collection[str]) -> Device:
    """Return a device without these options of its provider."""
    names = {PROVIDER_OPTION + name for name in own}
    return replace(device, options={name: value for name, value in device.options.items() if name not in names})


def find_install_hint(device: Device) -> str:
    """Return how to install what a device needs; empty where the first device of its kind works already."""
    kind, first = find_kind(device.kind), replace(device.address, index=0, part=None)
    if device.kind in SHORT_NAMES:
        here = [item for item in list_unused_hardware() if device.kind.endswith(item.type)]
        return "; ".join(f"for the {item.name} of this machine: {item.install_hint}" for item in here)
    is_installed = device.address.index > 0 and kind.find_problem(first) is None
    return "" if is_installed else kind.install_hint


def find_link_technology(source: str, destination: str) -> str:
    """Return the link between two devices of this machine.

    It is `memory`, `nvlink`, `pcie` or `host`: through the host's memory. Devices of two kinds have `memory` where both
    compute in the host's, as processors and most NPUs do, else `host`.

    >>> find_link_technology("cpu:0", "cpu:1")
    'memory'
    """
    ends = (Device(source, 0), Device(destination, 0))
    if ends[0].kind != ends[1].kind:
        return "memory" if all(find_kind(end.kind).shares_memory(end.address.index) for end in ends) else "host"
    return find_kind(ends[0].kind).find_link(ends[0].address.index, ends[1].address.index)


def list_accelerators(*, plugins: bool = False) -> list[tuple[str, Hardware, str | None]]:
    """Return each GPU of this machine as its id, its hardware, and why it cannot be used, if so.

    Args:
        plugins: Whether to list kinds of plugins too, and those that cannot be loaded by the name of their kind.
    """
    listed: list[tuple[str, Hardware, str | None]] = []
    for name in list_kind_names(plugins=plugins):
        try:
            kind = find_kind(name)
        except PluginError as problem:
            listed.append((name, Hardware(0, problem.where, 0, 0), problem.message))
            continue
        for hardware in kind.list_hardware():
            address = DeviceAddress(name, hardware.index)
            listed.append((address.id, hardware, kind.find_problem(address)))
    return listed


def describe_optimiser() -> str:
    """Return all that decides how ONNX Runtime optimises a model for this processor; empty where that is unknown."""
    if sys.platform != "linux":
        return ""
    runtime, features = import_onnxruntime(), hashlib.sha256(processor().encode()).hexdigest()
    return f"ONNX Runtime {runtime.__version__} ({runtime.get_build_info()}), processor {features}"
