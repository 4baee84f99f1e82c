"""Machines by name, such as `8xH100-NVLink` and `2x(8xH100-NVLink)-IB400`.

A name is hosts, devices, device, fabric and network: only the device is required. Case, hyphens, spaces and
parentheses do not matter, so that a name is parsed as a text without them: numbers first, then the longest device that
leaves a fabric, a network, both or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from onnxplace.errors import MAX_SHOWN, TargetError, format_value, suggest_nearest
from onnxplace.target.catalogue import NETWORK, CatalogueDevice, Fabric, read_catalogue
from onnxplace.target.hosts import ALL_TO_ALL, PER_HOST
from onnxplace.target.limits import MAX_DEVICES
from onnxplace.target.target import Device, Link, Pool, Target, default_link

# Numbers are followed by an x, before a device: `2x8xh100nvlink`.
_NUMBERS = re.compile(r"((?:[0-9]+x){0,2})(.+)")
# Hyphens do not matter, except before a number of devices or hosts: `-1xH100`, `2x(-8xH100)`.
_NEGATIVE = re.compile(r"(?:^|[0-9]\s*[xX×*])[\s(]*-\s*[0-9]+\s*[xX×*]")
_HINT = "as in 8xH100-NVLink or 2x(8xH100-NVLink)-IB400; `onnxplace machines` lists devices and fabrics"


@dataclass(frozen=True)
class Machine:
    """Equal hosts of equal devices, or one host of different devices."""

    device: CatalogueDevice
    devices: int = 1
    """Devices of each host."""
    hosts: int = 1
    fabric: Fabric | None = None
    """Connects the devices of a host; None for a single device and for processors."""
    network: Fabric | None = None
    """Connects hosts."""

    @property
    def name(self) -> str:
        """Return the canonical name, which `parse_machine` reads back equal."""
        count = f"{self.devices}x" if self.devices > 1 else ""
        is_known = not self.fabric or (
            self.fabric.family in self.device.name and self.fabric.name in self.device.fabrics
        )
        host = f"{count}{self.device.name}" + (f"-{self.fabric.name}" if self.fabric and not is_known else "")
        return f"{self.hosts}x({host})-{self.network.name}" if self.network else host

    @property
    def parts(self) -> tuple[CatalogueDevice | Fabric, ...]:
        """Return the entries of the catalogue that it is made of."""
        devices = [read_catalogue().devices[name] for name in self.device.parts] or [self.device]
        return (*devices, *(fabric for fabric in (self.fabric, self.network) if fabric))

    def to_target(self) -> Target:
        """Return its devices, their links, and the pool of memory that the devices of one machine share.

        A link takes the latency of its hardware, where it is published, and that of handing a value over, which is the
        default of the kind of device.
        """
        catalogue = read_catalogue().devices
        parts = [catalogue[name] for name in self.device.parts] or [self.device] * self.devices
        hosts = [f"node{number}/" for number in range(1, self.hosts + 1)] if self.network else [""]
        devices = tuple(_make_device(f"{host}{item}", part) for host in hosts for item, part in _number(parts))
        pairs = ((self.fabric, PER_HOST if self.network else ALL_TO_ALL), (self.network, ALL_TO_ALL))
        links = tuple(_make_link(fabric, ends, devices[0]) for fabric, ends in pairs if fabric)
        pool = (Pool(tuple(device.id for device in devices), self.device.memory_bytes),) if self.device.parts else ()
        return Target(devices, links, pools=pool)


def _number(parts: list[CatalogueDevice]) -> Iterator[tuple[str, CatalogueDevice]]:
    """Yield the devices of a host with their ids."""
    for index, part in enumerate(parts):
        yield f"{part.kind}:{sum(earlier.kind == part.kind for earlier in parts[:index])}", part


def _make_device(device_id: str, part: CatalogueDevice) -> Device:
    return Device(
        device_id,
        part.memory_bytes,
        cores=part.cores,
        model=part.model,
        operations_per_second=part.rates["float32"],
        type_operations_per_second={name: rate for name, rate in part.rates.items() if name != "float32"},
        memory_bytes_per_second=part.memory_bytes_per_second,
        products=part.products,
    )


def _make_link(fabric: Fabric, ends: str, device: Device) -> Link:
    latency = default_link(device, device).latency_seconds + (fabric.latency_seconds or 0.0)
    return Link(ends, ends, latency, fabric.bytes_per_second, fabric.name)


def parse_machine(text: str, where: str = "--machine") -> Machine:
    """Parse the name of a machine; raises TargetError with the nearest name.

    >>> parse_machine("8xh100 nvlink").name, parse_machine("2x4xL4-100GbE").name
    ('8xH100-SXM-NVLink4', '2x(4xL4-PCIe4)-100GbE')
    """
    match = _NUMBERS.fullmatch(_normalize(text[: 2 * MAX_SHOWN]))
    numbers, rest = (match[1], match[2]) if match else ("", "")
    parts = _split(rest)
    if parts is None:
        raise _make_unknown_error(text, numbers, where)
    device, fabric, network = parts
    counts = [int(number) for number in re.findall(r"[0-9]+", numbers)] or [1]
    if len(counts) < 2:  # one number counts devices, or hosts of one device that a network alone connects
        counts = [*counts, 1] if network and not fabric else [1, *counts]
    hosts, devices = counts
    if _NEGATIVE.search(text) or not 0 < hosts * devices * max(len(device.parts), 1) <= MAX_DEVICES:
        message = f"expected 1 to {MAX_DEVICES} devices, got {format_value(text)}"
        raise TargetError("T014", message, where=where, hint=_HINT)
    if (hosts > 1) != bool(network):
        message = f"{format_value(text)} names {'a network for' if network else 'no network between'} {hosts} hosts"
        hint = "name hosts, devices, and a network: 2x(8xH100-NVLink)-IB400"
        raise TargetError("T014", message.replace(" 1 hosts", " one host"), where=where, hint=hint)
    if device.parts and devices * hosts > 1:
        raise TargetError("T014", f"{device.name} is a machine of its own, without a fabric", where=where, hint=_HINT)
    return Machine(device, devices, hosts, _choose_fabric(device, fabric, devices, where), network)


def _normalize(text: str) -> str:
    return re.sub(r"[-_\s()]", "", text.lower().replace("×", "x").replace("*", "x"))


def _split(text: str) -> tuple[CatalogueDevice, str, Fabric | None] | None:
    """Return the device, the name of a fabric or its family, and the network that a normalised text names, if so."""
    catalogue = read_catalogue()
    devices = {_normalize(alias): item for item in catalogue.devices.values() for alias in (item.name, *item.aliases)}
    fabrics, networks = {"": ""}, dict[str, Fabric | None]({"": None})
    for item in catalogue.fabrics.values():
        for alias in map(_normalize, (item.name, *item.aliases)):
            networks |= {alias: item} if item.family == NETWORK else {}
            fabrics |= {alias: item.name, _normalize(item.family): item.family} if item.family != NETWORK else {}
    tails = {a + b: (name, network) for a, name in fabrics.items() for b, network in networks.items()}
    for alias in sorted(devices, key=len, reverse=True):
        if text.startswith(alias) and text[len(alias) :] in tails:
            return (devices[alias], *tails[text[len(alias) :]])
    return None


def _choose_fabric(device: CatalogueDevice, name: str, devices: int, where: str) -> Fabric | None:
    """Return a device's fabric of a name or family, else its first one; raises TargetError if it does not have it."""
    fabrics = read_catalogue().fabrics
    own = [fabrics[item] for item in device.fabrics]
    # A slower generation than the device's own is a matter of the mainboard.
    possible = [item for item in own if not name or name in (item.name, item.family)]
    if not possible and name in fabrics:
        wanted = fabrics[name]
        is_slower = any(o.family == wanted.family and o.bytes_per_second > wanted.bytes_per_second for o in own)
        possible = [wanted] if is_slower else []
    if name and not possible:
        hint = f"it has {', '.join(device.fabrics)}" if own else "leave the fabric out: its link is a copy in memory"
        raise TargetError("T014", f"{device.name} does not have {name}", where=where, hint=hint)
    return possible[0] if possible and devices > 1 else None


def _make_unknown_error(text: str, numbers: str, where: str) -> TargetError:
    """Return the error for a name that is none, with the nearest machine of the same numbers."""
    catalogue = read_catalogue()
    names = [name for item in catalogue.devices.values() for name in (item.name, *item.aliases)]
    known = [f"{name}{tail}" for name in names for tail in ("", "-NVLink", *(f"-{f}" for f in catalogue.fabrics))]
    rest = re.sub(r"^\W*(?:[0-9]+\s*[x×*]\W*){0,2}", "", text[: 2 * MAX_SHOWN], flags=re.IGNORECASE)
    hint = suggest_nearest(rest, known)
    if hint.startswith("did you mean '"):
        hint = f"{hint.replace(chr(39), chr(39) + numbers, 1)} (`onnxplace machines` lists devices and fabrics)"
    else:
        hint = _HINT
    return TargetError("T014", f"unknown machine {format_value(text)}", where=where, hint=hint)
