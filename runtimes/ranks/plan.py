"""Which device is which rank, and on which host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from onnxplace.bundle import Manifest, list_route_devices
from onnxplace.errors import TargetError, format_count, format_names
from onnxplace.hosts import HostSlots, is_this_machine, parse_slots
from onnxplace.target import split_host

_WHERE = "--hosts"


@dataclass(frozen=True)
class RankPlan:
    """The ranks of a bundle: one for each device that works, those of one host one after another."""

    devices: tuple[str, ...]
    """By rank."""
    hosts: tuple[str, ...]
    """By rank; rank 0 is on this machine if any is."""

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
        raise TargetError("K009", message, where=_WHERE, hint=hint)
    return given[0].name if given else "localhost"


def _require_places(places: Sequence[str], devices: Sequence[str], given: Sequence[HostSlots]) -> None:
    """Raise TargetError if a host of a device is not given, or has too few slots."""
    slots = {item.name: item.slots for item in given}
    for host, count in Counter(places).items():
        if given and host not in slots:
            message = f"the bundle has devices on host {host}, which is not among the hosts given"
            missing = ",".join(f"{name}:{number}" for name, number in Counter(places).items())
            raise TargetError("K009", message, where=_WHERE, hint=f"as in --hosts {missing}")
        available = slots.get(host)
        if available is not None and count > available:
            mine = format_names([device for device, place in zip(devices, places) if place == host], quoted=False)
            found = f"got {format_count(available, 'slot')}"
            message = f"{format_count(count, 'device')} of the bundle on host {host} ({mine}), {found}"
            raise TargetError("K009", message, where=_WHERE, hint=f"write {host}:{count}, or compile for fewer devices")
