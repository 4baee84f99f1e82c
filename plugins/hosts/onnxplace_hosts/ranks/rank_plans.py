"""Which device is which rank, on which host, and in which copy of the bundle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxplace.bundle.bundle_routes import list_route_devices
from onnxplace.bundle.manifest import Manifest
from onnxplace.errors import TargetError, UsageError, format_count, format_names
from onnxplace.target.hosts import split_host
from onnxplace_hosts.connection import is_this_machine
from onnxplace_hosts.host_lists import HostSlots, parse_slots

# Which device is which rank, and on which host.

_WHERE = "--hosts"


@dataclass(frozen=True)
class RankPlan:
    """The ranks of a bundle: one for each device that works, those of one host one after another."""

    devices: tuple[str, ...]
    """The device of each rank."""
    hosts: tuple[str, ...]
    """The host of each rank; rank 0 is on this machine if any is."""

    @property
    def is_remote(self) -> bool:
        """Return whether all ranks are on other machines."""
        return not self.near_count

    @property
    def near_count(self) -> int:
        """Return the number of ranks on this machine, which come first."""
        return sum(map(is_this_machine, self.hosts))

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of ranks of each host."""
        return dict(Counter(self.hosts))

    def describe(self, rank: int) -> str:
        """Return the device and host of a rank, for messages.

        >>> RankPlan(("cpu:0",), ("localhost",)).describe(0)
        'cpu:0 (rank 0 on localhost)'
        """
        return f"{self.devices[rank]} (rank {rank} on {self.hosts[rank]})"


def plan_ranks(manifest: Manifest, hosts: str) -> RankPlan:
    """Assign the devices of a bundle to ranks on hosts.

    Args:
        manifest: The bundle's.
        hosts: Hosts and how many devices may run on each, as in `node1:2,node2:1`; empty for the hosts that the device
            ids name, or this machine.

    Raises:
        UsageError: the list of hosts is impossible.
        TargetError: it does not fit the devices.
    """
    given = parse_slots(hosts) if hosts else ()
    devices = list_devices(manifest)
    named = [split_host(device)[0] for device in devices]
    places = named if all(named) else [_choose_only_host(given)] * len(devices)
    _require_places(places, devices, given)
    return order_ranks(devices, places)


def list_devices(manifest: Manifest) -> tuple[str, ...]:
    """Return the devices that need a rank."""
    return list_route_devices(manifest) or tuple(device.id for device in manifest.target.devices[:1])


def order_ranks(devices: Sequence[str], places: Sequence[str]) -> RankPlan:
    """Return ranks in the order of the devices, but with those of this machine first."""
    # Devices of a host follow one another in a target.
    first = next(filter(is_this_machine, places), places[0])
    order = sorted(range(len(devices)), key=lambda index: places[index] != first)
    return RankPlan(tuple(devices[index] for index in order), tuple(places[index] for index in order))


def _choose_only_host(given: Sequence[HostSlots]) -> str:
    """Return the host of devices that name none; raises TargetError for several hosts."""
    if len(given) > 1:
        names = format_names([item.name for item in given], quoted=False)
        message = f"its devices name no host, expected one host, got {names}"
        hint = "compile for devices of these hosts: `onnxplace hosts --hosts A,B -o F.toml`, `compile --target F.toml`"
        raise TargetError("K001", message, where=_WHERE, hint=hint)
    return given[0].name if given else "localhost"


def _require_places(places: Sequence[str], devices: Sequence[str], given: Sequence[HostSlots]) -> None:
    """Raise TargetError if a host of a device is not given, or has too few slots."""
    slots = {item.name: item.slots for item in given}
    for host, count in Counter(places).items():
        if given and host not in slots:
            message = f"the bundle has devices on host {host}, which is not among the hosts given"
            missing = ",".join(f"{name}:{number}" for name, number in Counter(places).items())
            raise TargetError("K001", message, where=_WHERE, hint=f"as in --hosts {missing}")
        available = slots.get(host)
        if available is not None and count > available:
            mine = format_names([device for device, place in zip(devices, places) if place == host], quoted=False)
            found = f"got {format_count(available, 'slot')}"
            message = f"{format_count(count, 'device')} of the bundle on host {host} ({mine}), {found}"
            raise TargetError("K001", message, where=_WHERE, hint=f"write {host}:{count}, or compile for fewer devices")


# Which copy of a bundle runs on which hosts.

MAX_COPIES = 64


def require_copy_count(count: int) -> None:
    """Raise UsageError unless a bundle can have so many copies."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_COPIES:
        message = f"expected 1 to {MAX_COPIES} copies of the bundle, got {count!r}"
        raise UsageError("K001", message, where="replicas", hint="as in replicas=2, or --replicas 2")


def plan_copies(manifest: Manifest, hosts: str, count: int) -> tuple[RankPlan, ...]:
    """Assign the devices of several copies of a bundle to ranks on hosts.

    A host of the bundle stands for one host of each copy. The first copy takes hosts of its own names, as far as they
    are given. Each copy takes those with the fewest copies, in the order given. A host without a number of slots has
    room for a part of one copy.

    Raises:
        UsageError: the list of hosts is impossible.
        TargetError: there are too few hosts or slots.
    """
    devices = list_devices(manifest)
    named = [split_host(device)[0] for device in devices]
    sizes = Counter(named)
    given = parse_slots(hosts) if hosts else ()
    room: dict[str, int | None] = {item.name: item.slots for item in given}
    used: Counter[str] = Counter()
    plans: list[RankPlan] = []
    for _ in range(count):
        chosen = _choose_hosts(sizes, given, room, used, is_first=not plans)
        if len(chosen) < len(sizes):
            raise _make_shortage(count, len(plans), sizes, hosts)
        for name, host in chosen.items():
            slots = room[host]
            room[host] = 0 if slots is None else slots - sizes[name]
            used[host] += 1
        plans.append(order_ranks(devices, [chosen[name] for name in named]))
    return tuple(plans)


def _choose_hosts(
    sizes: Mapping[str, int],
    given: Sequence[HostSlots],
    room: Mapping[str, int | None],
    used: Mapping[str, int],
    is_first: bool,
) -> dict[str, str]:
    """Return the host of each host of the bundle for one copy; some are missing if there is no room."""

    def has_room(host: str, size: int) -> bool:
        slots = room.get(host, 0)
        return slots is None or slots >= size

    chosen = {name: name for name, size in sizes.items() if is_first and has_room(name, size)}
    order = [item.name for item in given]
    # The largest parts first: a host with room for one of them has room for all smaller ones.
    for name in sorted(sizes, key=lambda item: -sizes[item]):
        hosts = [host for host in order if host not in chosen.values() and has_room(host, sizes[name])]
        if name not in chosen and hosts:
            chosen[name] = min(hosts, key=lambda host: (used[host], order.index(host)))
    return chosen


def _make_shortage(count: int, fitting: int, sizes: Mapping[str, int], hosts: str) -> TargetError:
    """Return the error for hosts that are too few."""
    needs = " and ".join(f"a host with {format_count(size, 'slot')}" for size in sizes.values())
    offer = f"{hosts}, where {fitting} of them fit" if hosts else "no list of hosts"
    message = f"{count} copies of the bundle need {needs} each, got {offer}"
    names = [f"node{number}:{size}" for number, size in enumerate(list(sizes.values()) * count, 1)]
    return TargetError("K001", message, where=_WHERE, hint=f"as in --hosts {','.join(names)}")
