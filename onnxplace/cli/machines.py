"""The command `onnxplace machines`: the catalogue of devices and fabrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from onnxplace.cli.shared_options import as_json, print_json, print_text

if TYPE_CHECKING:
    from onnxplace.target import Catalogue


@click.command(short_help="List devices and fabrics for --machine.")
@as_json
def machines(json_: bool) -> None:
    """List the devices and fabrics that names of machines are made of, such as 8xH100-NVLink.

    Figures are those of data sheets; --json has the source of each, and further names.
    """
    from onnxplace.target import read_catalogue

    catalogue = read_catalogue()
    print_json(asdict(catalogue)) if json_ else print_text(format_catalogue(catalogue))


def format_catalogue(catalogue: Catalogue) -> str:
    """Return devices and fabrics as tables, and how to name a machine."""
    from onnxplace.reports import format_table
    from onnxplace.target import DATA_TYPES
    from onnxplace.utils import format_bytes

    types = ("float32", *DATA_TYPES)
    devices = []
    for item in catalogue.devices.values():
        rates = (f"{item.rates[name] / 1e12:.4g}" if name in item.rates else "-" for name in types)
        sizes = format_bytes(item.memory_bytes), f"{item.memory_bytes_per_second / 1e9:.0f}"
        devices += [] if item.parts else [(item.name, item.kind, *sizes, *rates, ", ".join(item.fabrics[:1]) or "-")]
    fabrics = []
    for fabric in catalogue.fabrics.values():
        latency = "-" if fabric.latency_seconds is None else f"{fabric.latency_seconds * 1e6:.2g} us"
        ends = "hosts" if fabric.family == "network" else "devices of a host"
        fabrics.append((fabric.name, ends, f"{fabric.bytes_per_second / 1e9:.4g}", latency))
    whole = [f"{item.name}: {' and '.join(item.parts)}" for item in catalogue.devices.values() if item.parts]
    return "\n".join(
        [
            format_table(("device", "kind", "memory", "GB/s", *types, "fabric"), devices, left=2),
            "peak rates without sparsity, in 10^12 operations/s",
            *whole,
            "",
            format_table(("fabric", "between", "GB/s each way", "latency"), fabrics, left=2),
            "",
            "--machine H100, 8xH100-NVLink, 2x(8xH100-NVLink)-IB400; sources: onnxplace machines --json",
        ]
    )
