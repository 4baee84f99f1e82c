"""The catalogue of machines: devices and fabrics with the figures that their vendors publish (docs/machines.md)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from onnxplace.target.product_times import ProductTimes

# Fabrics of this family connect hosts; all others connect the devices of one host.
NETWORK = "network"


@dataclass(frozen=True)
class CatalogueDevice:
    """A device as its vendor publishes it, or a machine of several different ones."""

    name: str
    vendor: str
    source: str
    """Address of the data sheet."""
    published: str
    """Year and month in which the figures appeared, approximately."""
    aliases: tuple[str, ...] = ()
    kind: str = ""
    """Kind of device that runs it, such as `cuda`."""
    model: str = ""
    """Name that the driver or the operating system reports."""
    cores: int = 1
    memory_bytes: int = 0
    """Of a machine: what its devices share."""
    memory_bytes_per_second: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)
    """Data type -> peak rate in operations per second, without sparsity; types that are not published are absent."""
    products: Mapping[str, ProductTimes] = field(default_factory=dict)
    """Data type -> coefficients of measured products; `products_source` has the measurements."""
    products_source: str = ""
    fabrics: tuple[str, ...] = ()
    """What connects such devices in one host, the default first."""
    parts: tuple[str, ...] = ()
    """Names of the devices of a machine."""
    basis: str = ""
    """How figures follow from published ones, where they are not the same."""


@dataclass(frozen=True)
class Fabric:
    """A connection between devices of one host, or between hosts."""

    name: str
    family: str
    """`NVLink`, `PCIe`, `InfinityFabric`; `network` between hosts."""
    bytes_per_second: float
    """In one direction."""
    source: str
    aliases: tuple[str, ...] = ()
    latency_seconds: float | None = None
    """Of the hardware; None where it is not published."""
    basis: str = ""


@dataclass(frozen=True)
class Catalogue:
    """All devices and fabrics, by name."""

    devices: Mapping[str, CatalogueDevice]
    fabrics: Mapping[str, Fabric]
    entered: str
    """Date on which the figures were entered."""


@cache
def read_catalogue() -> Catalogue:
    """Return the catalogue that comes with onnxplace.

    >>> read_catalogue().devices["T4"].memory_bytes
    16000000000
    """
    from pydantic import TypeAdapter

    data = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
    for name, entry in (*data["devices"].items(), *data["fabrics"].items()):
        entry["name"] = name
    return TypeAdapter(Catalogue).validate_python(data)
