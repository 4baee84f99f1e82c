"""The machine that a model is compiled for: devices, their memory, and their links."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from onnxplace.errors import MAX_LISTED, TargetError, format_count, format_names, format_value, suggest_nearest
from onnxplace.target.device_kinds import ISOLATE, PROVIDER_OPTION, THREADS, DeviceAddress
from onnxplace.target.hosts import (
    ALL_TO_ALL,
    PER_HOST,
    list_hosts,
    require_hosts_on_all,
    require_hosts_together,
    require_links,
    split_host,
)
from onnxplace.target.kind_table import find_kind
from onnxplace.target.limits import (
    MAX_BYTES_PER_SECOND,
    MAX_CORES,
    MAX_LATENCY_SECONDS,
    MAX_MEMORY_BYTES,
    MAX_RATE,
    MAX_SECONDS,
    MAX_SLOWDOWN,
    MIN_BYTES_PER_SECOND,
    require_device_limit,
    require_number,
)
from onnxplace.target.parsing import parse_device_id, require_device_options
from onnxplace.target.product_times import ProductTimes
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.quantities import format_bytes, format_first, format_object

LinkModel = Literal["duplex", "parallel", "sequential"]
LINK_MODELS: tuple[LinkModel, ...] = ("duplex", "parallel", "sequential")

# Types of numbers whose peak rates may differ from that of float32; `tf32` is that of products of float32.
DATA_TYPES = ("tf32", "float16", "bfloat16", "int8", "fp8")
# Types in which devices compute values of float32, the most precise first.
PRECISIONS = ("float32", "tf32", "float16", "bfloat16", "int8")

# One session shares copies of weights, layouts and caches among its nodes. Segments do not: each takes about this much
# longer (docs/measurements.md). The call takes the rest of SEGMENT_SECONDS, which `devices --calibrate` measures.
SEGMENT_OVERHEAD_SECONDS = 35e-6
SEGMENT_SECONDS = 40e-6
# A call of a session in another process, and back (benchmarks/provider_cores.py).
HAND_OVER_SECONDS = 150e-6
# Overhead of each request. On several devices, waking the workers, which then wake the caller, comes on top.
REQUEST_SECONDS, WAKING_SECONDS = 10e-6, 45e-6


@dataclass(frozen=True)
class Device:
    """A processor with memory, which runs one segment at a time."""

    id: str
    """Kind and index: `cpu:0`, `cuda:1`; `cuda:0/1` is the second logical device of a GPU.

    In targets of several hosts, the host comes first: `node1/cuda:1`.
    """
    memory_bytes: int
    """Memory that a placement may use."""
    cores: int = 1
    """Processor cores that it computes with; 1 for a GPU."""
    model: str = ""
    """Name of the hardware, for GPUs; costs are equal on devices of one kind and model."""
    segment_seconds: float = SEGMENT_SECONDS
    """Overhead of each segment: its call, and its own caches and copies."""
    input_seconds: float = 0.0
    """Additional overhead for each input of a segment."""
    output_seconds: float = 0.0
    """Additional overhead for each output of a segment."""
    operations_per_second: float = 0.0
    """Peak rate of floating-point operations, for estimates; 0 for what is typical of its kind."""
    type_operations_per_second: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Peak rates of further types of numbers, by `DATA_TYPES`; others count as `operations_per_second`."""
    memory_bytes_per_second: float = 0.0
    """Peak rate of its memory, for estimates; 0 for what is typical of its kind."""
    kernel_seconds: float = 0.0
    """The least that an operator takes, for estimates; 0 for what is typical of its kind."""
    products: Mapping[str, ProductTimes] = field(default_factory=dict, hash=False)
    """Times of matrix products by `DATA_TYPES`, for estimates; peak rates hold for types that are missing."""
    options: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Options of its kind, such as `provider`: `tensorrt` for a GPU."""
    processors: tuple[str, ...] = ()
    """Names of the processors that it computes on, by default one of its own.

    A processor runs one node at a time. Devices that have one in common take turns; a device with several, such as one
    session on all cores, runs a node when all of them are free.
    """
    computes_in: str = ""
    """The least precise type in which it was found to compute float32; empty for what its kind and options declare."""

    def __post_init__(self) -> None:
        parse_device_id(self.id, "a device")
        if len(set(self.processors)) < len(self.processors) or not all(self.processors):
            raise TargetError("T007", "expected names of processors, each once", where=self.id)
        if self.computes_in not in ("", *PRECISIONS):
            message = f"expected one of {', '.join(PRECISIONS)} for computes_in, got {format_value(self.computes_in)}"
            raise TargetError("T007", message, where=self.id)
        require_device_options(self.id, self.options, self.id)
        require_number(self, "memory_bytes", self.id, 0, MAX_MEMORY_BYTES, whole=True)
        require_number(self, "cores", self.id, 1, MAX_CORES, whole=True)
        for name in ("operations_per_second", "memory_bytes_per_second"):
            require_number(self, name, self.id, 0, MAX_RATE)
        for name in ("segment_seconds", "input_seconds", "output_seconds", "kernel_seconds"):
            require_number(self, name, self.id, 0, MAX_SECONDS)
        for name, rate in {**dict.fromkeys(self.products, 1.0), **self.type_operations_per_second}.items():
            if name not in DATA_TYPES:
                message = f"there is no rate for {format_value(name)}"
                raise TargetError("T007", message, where=self.id, hint=suggest_nearest(str(name), DATA_TYPES))
            if not 0 < rate <= MAX_RATE:
                message = f"expected a number above 0, up to {MAX_RATE}, for {name}, got {format_value(rate)}"
                raise TargetError("T007", message, where=self.id)

    @property
    def host(self) -> str:
        """Return the name of its host; empty in targets of one machine."""
        return split_host(self.id)[0]

    @property
    def local(self) -> Device:
        """Return the device of this machine that has the same place on its host."""
        return replace(self, id=split_host(self.id)[1])

    @property
    def kind(self) -> str:
        return split_host(self.id)[1].partition(":")[0]

    @property
    def is_host(self) -> bool:
        """Return whether it is a set of processor cores, by ONNX Runtime's own provider."""
        return find_kind(self.kind).is_host

    @property
    def has_cores(self) -> bool:
        """Return whether it computes on processor cores, whoever provides it."""
        return find_kind(self.kind).has_cores

    @property
    def needs_static_shapes(self) -> bool:
        """Return whether its sessions need the sizes of all inputs."""
        return find_kind(self.kind).needs_static_shapes

    @property
    def precision(self) -> str:
        """Return the least precise type in which it computes values of float32."""
        return self.computes_in or find_kind(self.kind).precision(self.address)

    @property
    def compiles(self) -> bool:
        """Return whether its provider makes one kernel of neighbouring nodes, and refuses some nodes."""
        return find_kind(self.kind).compiles

    @property
    def address(self) -> DeviceAddress:
        """Return what ONNX Runtime has to know about it, on its host."""
        address, cores = DeviceAddress.of(split_host(self.id)[1]), self.cores if self.has_cores else 0
        return replace(address, options=self.options, memory_bytes=self.memory_bytes, cores=cores)

    @property
    def cost_class(self) -> str:
        """Return the key of node costs: `cpu/2` (two cores), `cuda/NVIDIA H100`, `cuda/NVIDIA H100/tensorrt`."""
        name = f"cpu/{self.cores}" if self.kind == "cpu" else f"{self.kind}/{self.model or 'unknown'}"
        name += f"/{self.cores}" if self.has_cores and self.kind != "cpu" else ""
        if not self.options:
            return name
        defaults = find_kind(self.kind).options
        # Nodes are measured within the process of an isolated device, and cost the same there; threads are its cores.
        values = [item for item in sorted(self.options.items()) if item[0] not in (ISOLATE, THREADS)]
        values = [(key, value) for key, value in values if value not in defaults.get(key, ())[:1]]
        own = {key: f"{key.removeprefix(PROVIDER_OPTION)}={value}" for key, value in values if key not in defaults}
        return "/".join([name, *(own.get(key) or (key if value == "true" else value) for key, value in values)])


@dataclass(frozen=True)
class Link:
    """A directed connection: a transfer takes `latency_seconds + bytes / bytes_per_second`."""

    source: str
    """A device; or a host, for all its devices without their own link to the destination.

    `per-host` stands for every two devices of one host, `all-to-all` for every two devices; both without other links.
    """
    destination: str
    """A device, or a host if the source is one; `per-host` or `all-to-all` if the source is."""
    latency_seconds: float
    bytes_per_second: float
    via: str = ""
    """The kind of connection, for people: `memory`, `nvlink`, `pcie` (from GPU to GPU), `host` (through its memory)."""

    def __post_init__(self) -> None:
        where = f"link {self.source} -> {self.destination}"
        require_number(self, "latency_seconds", where, 0, MAX_LATENCY_SECONDS)
        if self.bytes_per_second != math.inf:  # transfers that take no time
            require_number(self, "bytes_per_second", where, MIN_BYTES_PER_SECOND, sys.float_info.max)


@dataclass(frozen=True)
class Shared:
    """Devices that share a resource, such as memory bandwidth, and slow each other down.

    Each factor holds while one other device is busy all the time. With n of them, the part above 1 is n times as large.
    """

    devices: tuple[str, ...]
    memory_slowdown: float = 1.0
    """Factor for the time of memory-bound work."""
    compute_slowdown: float = 1.0
    """Factor for the time of compute-bound work."""
    memory_bytes_per_second: float = 0.0
    """Memory bandwidth of one device while the others are idle; 0 where it was not measured."""

    def __post_init__(self) -> None:
        where = f"shared {', '.join(map(str, self.devices[:MAX_LISTED]))}"
        for name in ("memory_slowdown", "compute_slowdown"):
            require_number(self, name, where, 1, MAX_SLOWDOWN)
        require_number(self, "memory_bytes_per_second", where, 0, MAX_BYTES_PER_SECOND)
        _require_group(self.devices, where)


@dataclass(frozen=True)
class Pool:
    """Devices that take their memory from one pool, such as the processor and the integrated GPU of a laptop."""

    devices: tuple[str, ...]
    memory_bytes: int
    """What all of them together may use."""

    def __post_init__(self) -> None:
        where = f"pool {', '.join(map(str, self.devices[:MAX_LISTED]))}"
        require_number(self, "memory_bytes", where, 0, MAX_MEMORY_BYTES, whole=True)
        _require_group(self.devices, where)

    @property
    def id(self) -> str:
        """Return what errors call it."""
        return f"the pool of {' and '.join(self.devices)}"

    def describe(self) -> str:
        """Return its devices and its memory, as a text."""
        return f"{', '.join(self.devices)} share {format_bytes(self.memory_bytes)}"


def _require_group(devices: tuple[str, ...], where: str) -> None:
    """Raise TargetError unless a group has two or more devices of one host, each once."""
    if len(set(devices)) < max(len(devices), 2):
        raise TargetError("T007", "expected two or more devices, each named once", where=where)
    if len({split_host(name)[0] for name in devices}) > 1:
        message = f"expected devices of one host, got devices of {format_names(list_hosts(devices))}"
        raise TargetError("T007", message, where=where, hint="write an entry for each host")


@dataclass(frozen=True)
class Target:
    """Devices in order, and the links between each pair."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    """Only those that differ from the default for their kinds of device."""
    link_model: LinkModel = "duplex"
    shared: tuple[Shared, ...] = ()
    """Devices that slow each other down."""
    pools: tuple[Pool, ...] = ()
    """Devices that share their memory: the sum of what they hold keeps the limit of the pool."""
    _position: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.devices:
            raise TargetError("T005", "the list of devices is empty", hint="name at least one, such as cpu:0")
        require_device_limit(len(self.devices), "target")
        position = {device.id: index for index, device in enumerate(self.devices)}
        if len(position) < len(self.devices):
            where = ", ".join(device.id for device in self.devices)
            raise TargetError("T005", "a device is named twice", where=where, hint="name each device once")
        require_hosts_on_all(list(position), "target")
        require_hosts_together(list(position), "target")
        require_links(list(position), [(link.source, link.destination) for link in self.links])
        entries: tuple[Shared | Pool, ...] = (*self.shared, *self.pools)
        for entry in entries:
            for device_id in entry.devices:
                if device_id not in position:
                    message = f"the {type(entry).__name__.lower()} entry names an unknown device: {device_id!r}"
                    raise TargetError("T007", message, where="target", hint=suggest_nearest(device_id, position))
        pooled = [device_id for pool in self.pools for device_id in pool.devices]
        if len(set(pooled)) < len(pooled):
            twice = next(name for name in pooled if pooled.count(name) > 1)
            raise TargetError("T007", f"{twice} is in two pools", where="target", hint="name it in one of them")
        object.__setattr__(self, "_position", position)

    def __repr__(self) -> str:
        kinds = group_pairs((f"{d.cost_class}, {format_bytes(d.memory_bytes)}", d.id) for d in self.devices)
        groups = [f"{format_names(ids, quoted=False)}: {kind}" for kind, ids in kinds.items()]
        given = f"{format_count(len(self.links), 'link')} given, {self.link_model}"
        return format_object(f"Target of {format_count(len(self.devices), 'device')}", format_first(groups), given)

    @cached_property
    def processors(self) -> NDArray[np.bool_]:
        """Return [device, processor]: whether the device computes on the processor.

        Processors that the same devices compute on count as one.
        """
        names = [[f"{d.host}/{name}".lstrip("/") for name in d.processors] or [d.id] for d in self.devices]
        users = dict.fromkeys(tuple(name in row for row in names) for own in names for name in own)
        return np.array(list(zip(*users)))

    @property
    def shares_processors(self) -> bool:
        """Return whether some devices cannot compute at the same time."""
        return bool((self.processors.sum(axis=0) > 1).any())

    @cached_property
    def conflicts(self) -> NDArray[np.bool_]:
        """Return [device, device]: whether they have a processor in common, as each device has with itself."""
        processors = self.processors.astype(np.float32)  # numpy multiplies booleans slowly
        return processors @ processors.T > 0

    @cached_property
    def independent_devices(self) -> tuple[int, ...]:
        """Return devices that can all compute at the same time, by index: no two of them share a processor.

        Those of few processors are taken first, and those that come first: of `cpu:0,cpu:1,cpu:0-1`, the first two.
        """
        chosen = list[int]()
        for device in np.argsort(self.processors.sum(axis=1), kind="stable").tolist():
            if not self.conflicts[device, chosen].any():
                chosen.append(device)
        return tuple(sorted(chosen))

    def choose_devices(self, device_ids: Collection[str]) -> Target:
        """Return the target with these devices only, in their order here, and with the pools that still limit them."""
        kept = [device for device in self.devices if device.id in device_ids]
        ends = {*(device.id for device in kept), *(device.host for device in kept), ALL_TO_ALL, PER_HOST}

        def restrict(entries: Iterable[Any]) -> tuple[Any, ...]:
            kept = [(item, tuple(name for name in item.devices if name in ends)) for item in entries]
            return tuple(replace(item, devices=names) for item, names in kept if len(names) > 1)

        links = tuple(link for link in self.links if link.source in ends and link.destination in ends)
        own = {device.id: device.memory_bytes for device in kept}
        # A pool that holds what all of its devices may hold is no limit.
        pools = [item for item in restrict(self.pools) if item.memory_bytes < sum(own[name] for name in item.devices)]
        return replace(self, devices=tuple(kept), links=links, shared=restrict(self.shared), pools=tuple(pools))

    @property
    def memories(self) -> tuple[Device | Pool, ...]:
        """Return what has a limit of memory: all devices, then all pools."""
        return (*self.devices, *self.pools)

    @cached_property
    def pool_of(self) -> NDArray[np.int64]:
        """Return, per device, the index of its pool; the number of pools for a device with memory of its own."""
        pools = {device_id: index for index, pool in enumerate(self.pools) for device_id in pool.devices}
        return np.array([pools.get(device.id, len(self.pools)) for device in self.devices], dtype=np.int64)

    @property
    def pool_bytes(self) -> NDArray[np.float64]:
        """Return the limit of each pool, and at last infinity, for devices with memory of their own."""
        return np.array([*(pool.memory_bytes for pool in self.pools), np.inf])

    @property
    def limit_bytes(self) -> NDArray[np.int64]:
        """Return, per device, what it may use while others of its pool use nothing."""
        pool_bytes = self.pool_bytes[self.pool_of]
        return np.array([min(d.memory_bytes, size) for d, size in zip(self.devices, pool_bytes)], dtype=np.int64)

    @property
    def total_bytes(self) -> int:
        """Return what all devices may use together."""
        sums = np.bincount(self.pool_of, self.limit_bytes, len(self.pools) + 1)
        return int(np.minimum(sums, self.pool_bytes).sum())

    def describe_memory(self) -> str:
        """Return the limits of devices and pools, as a text."""
        return ", ".join(f"{memory.id} ({memory.memory_bytes} bytes)" for memory in self.memories)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the hosts of its devices, in their order; empty for one machine."""
        return list_hosts(device.id for device in self.devices)

    def position(self, device_id: str) -> int:
        """Return the index of a device; raises TargetError with the nearest name if there is none."""
        if device_id not in self._position:
            message = f"no device {device_id!r} in this target"
            raise TargetError("T005", message, hint=suggest_nearest(device_id, self._position))
        return self._position[device_id]

    def with_all_links(self) -> Target:
        """Return this target with a link for each pair of devices, independent of defaults and of links of hosts."""
        return replace(self, links=tuple(link or default_link(a, b) for a, b, link in self._list_pairs()))

    def list_assumed_links(self) -> list[tuple[str, str]]:
        """Return the pairs of devices whose link is a default: none is given for them or for their hosts."""
        return [(a.id, b.id) for a, b, link in self._list_pairs() if link is None]

    def _list_pairs(self) -> Iterator[tuple[Device, Device, Link | None]]:
        """List the pairs of devices, with the links that are given for them or for their hosts."""
        given = {(link.source, link.destination): link for link in self.links}
        return ((a, b, _find_given(given, a, b)) for a, b in permutations(self.devices, 2))

    def link_arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return latency (seconds) and seconds per byte, both [source, destination] with a zero diagonal."""
        latency, per_byte = self._link_arrays
        return latency.copy(), per_byte.copy()

    def remote_link_arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return latency (seconds) and seconds per byte of each pair of different devices."""
        is_remote = ~np.eye(len(self.devices), dtype=bool)
        latency, per_byte = self._link_arrays
        return latency[is_remote], per_byte[is_remote]

    @cached_property
    def _link_arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        # Each simulation needs them, and for 256 devices they are of 65280 links.
        count = len(self.devices)
        latency, per_byte = np.zeros((count, count)), np.zeros((count, count))
        for source, destination, given in self._list_pairs():
            ends = self._position[source.id], self._position[destination.id]
            link = given or default_link(source, destination)
            latency[ends], per_byte[ends] = link.latency_seconds, 1.0 / link.bytes_per_second
        return latency, per_byte

    def limiting(self, limits: Mapping[str, int]) -> Target:
        """Return this target with other memory limits (bytes by device id); pools keep theirs.

        >>> Target((Device("cpu:0", 1024),)).limiting({"cpu:0": 512}).devices[0].memory_bytes
        512
        """
        for device_id in limits:
            self.position(device_id)
        devices = (replace(device, memory_bytes=limits.get(device.id, device.memory_bytes)) for device in self.devices)
        return replace(self, devices=tuple(devices))


def count_cores_by_processor(devices: Sequence[Device]) -> dict[str, int]:
    """Return the number of cores of each processor that devices of one host compute on, by its name.

    >>> count_cores_by_processor([Device("cpu:0", 1, cores=2), Device("cpu:1", 1, cores=4, processors=("cpu:0", "x"))])
    {'cpu:0': 2, 'x': 2}
    """
    cores: dict[str, int] = {}
    for device in (item for item in devices if item.has_cores):
        names = device.processors or (device.id,)
        cores.update({name: max(cores.get(name, 1), device.cores // len(names)) for name in names})
    return cores


def request_overhead_seconds(devices: int) -> float:
    """Return the overhead of a request that this many devices work on.

    >>> request_overhead_seconds(1)
    1e-05
    """
    return REQUEST_SECONDS + WAKING_SECONDS * (devices > 1)


def _find_given(links: Mapping[tuple[str, str], Link], source: Device, destination: Device) -> Link | None:
    """Return the most specific link that is given for two devices, or None."""
    if link := links.get((source.id, destination.id)):
        return link
    for ends in ((source.host, destination.host), (PER_HOST, PER_HOST), (ALL_TO_ALL, ALL_TO_ALL)):
        if (ends[0] != PER_HOST or source.host == destination.host) and (link := links.get(ends)):
            return replace(link, source=source.id, destination=destination.id)
    return None


def default_link(source: Device, destination: Device) -> Link:
    """Return the link that is assumed between two devices of one host without measurements.

    >>> default_link(Device("cpu:0", 1024), Device("cpu:1", 1024)).bytes_per_second
    10000000000.0
    """
    kinds = [kind for kind in map(find_kind, (source.kind, destination.kind)) if not kind.has_cores]
    latency = max((kind.link_latency_seconds for kind in kinds), default=0.0)
    rate = min((kind.link_bytes_per_second for kind in kinds), default=0.0)
    host = find_kind("cpu")
    return Link(source.id, destination.id, latency or host.link_latency_seconds, rate or host.link_bytes_per_second)
