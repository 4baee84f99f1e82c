"""The commands `onnxplace devices` and `machines`: what devices there are, and what links take."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace._version import __version__
from onnxplace.cli.shared_options import (
    FiniteNumber,
    as_json,
    devices_option,
    print_hint,
    print_json,
    print_result,
    print_text,
    show_progress,
    target_output_option,
)
from onnxplace.errors import UsageError, format_count
from onnxplace.reports.text import format_table
from onnxplace.utils.files import require_writable, write_file
from onnxplace.utils.quantities import format_bytes

if TYPE_CHECKING:
    from onnxplace.target.catalogue import Catalogue
    from onnxplace.target.target import Target
    from onnxplace_doctor.calibrator import Calibration, LinkMeasurement


@click.command()
@devices_option
@click.option("--calibrate", is_flag=True, help="Measure links, calls and shared resources.")
@click.option("--sizes", metavar="1,4KiB,64MiB", help="Sizes of transferred values  [default: 1 B to 256 MiB]")
@click.option("--seconds", type=FiniteNumber(max=86400), help="Approximate time to measure  [default: 30]")
@target_output_option
@as_json
def devices(
    devices: str | None, calibrate: bool, sizes: str | None, seconds: float | None, output: Path | None, json_: bool
) -> None:
    """Show the devices of this machine that ONNX Runtime can use.

    With -o, write them to a target file; with --calibrate, measure them first.
    """
    from onnxplace.machine import measurement_cache
    from onnxplace.machine.hardware import local_target
    from onnxplace.target.target_file import format_target
    from onnxplace_doctor.machine_description import describe_machine

    if (sizes or seconds is not None) and not calibrate:
        raise UsageError("U042", "--sizes and --seconds are options of --calibrate", hint="add --calibrate")
    if output:
        require_writable(output)
    default = local_target(devices)
    calibration = _calibrate(default, sizes, seconds, json_) if calibrate else None
    target = calibration.target if calibration else default.with_all_links()
    about, cache = describe_machine(), measurement_cache.contents()
    if output:
        heading = _format_heading(about, measurement_cache.processor(), calibration is not None)
        write_file(output, lambda stream: stream.write(f"{heading}\n{format_target(target)}".encode()))
    if json_:
        about["cost_cache"] = {"folder": str(cache.folder), "files": cache.files, "bytes": cache.size_bytes}
        measured = {"calibration": _build_calibration_json(calibration)} if calibration else {}
        written = {"output": str(output)} if output else {}
        print_json({**about, "default": [asdict(device) for device in default.devices], **measured, **written})
        return
    print_text(format_devices(about, default))
    print_text(
        f"cached costs: {format_count(cache.files, 'file')}, {format_bytes(cache.size_bytes)}, in {cache.folder}"
    )
    if calibration:
        print_text(f"\n{format_calibration(calibration)}")
        if not output:
            print_hint("to compile with these figures, write them to a file with -o, and pass it to --target")
    if output:
        print_text(f"target: {output}")


def _format_heading(about: Mapping[str, Any], processor: str, measured: bool) -> str:
    """Return the comments on top of a target file: machine and source."""
    name = json.loads(processor).get("model name", "processor unknown") if processor.startswith("{") else processor
    accelerators = [f"{item['id']} {item['name']}" for item in about["accelerators"]]
    parts = [name, f"{len(about['host']['cores'])} cores", *accelerators]
    source = "measured by devices --calibrate" if measured else "links and calls by default, not measured"
    versions = f"onnxplace {__version__}, onnxruntime {about['onnxruntime']}"
    lines = (f"machine: {', '.join(parts)}", f"{source}: {datetime.date.today()}, {versions}")
    return "\n".join(f"# {' '.join(line.split())}" for line in lines)


def _calibrate(target: Any, sizes: str | None, seconds: float | None, quiet: bool) -> Calibration:
    from onnxplace.target.parsing import parse_bytes
    from onnxplace_doctor.calibrator import DEFAULT_SECONDS, TRANSFER_SIZES_BYTES, calibrate

    sizes_bytes = [parse_bytes(text) for text in sizes.split(",")] if sizes else TRANSFER_SIZES_BYTES
    with show_progress(quiet, "measuring", similar=True) as observer:
        return calibrate(
            target, sizes=sizes_bytes, seconds=DEFAULT_SECONDS if seconds is None else seconds, observer=observer
        )


def _build_calibration_json(measured: Calibration) -> dict[str, Any]:
    return {
        "seconds": measured.seconds,
        "link_model": measured.target.link_model,
        "links": [_build_link_json(link) for link in measured.links],
        "devices": [_build_calls_json(measured, device) for device in measured.call_costs],
        "shared": [
            {"devices": list(measured.cpu_devices), **{name: asdict(item) for name, item in vars(slower).items()}}
            for slower in ([measured.contention] if measured.contention else [])
        ],
        "notes": list(measured.notes),
    }


def _build_calls_json(measured: Calibration, device: str) -> dict[str, Any]:
    """Return the costs of a segment on a device, and their parts.

    The keys are those of target files.
    """
    from onnxplace.target.target import SEGMENT_OVERHEAD_SECONDS

    calls, costs = measured.call_costs[device], measured.target.devices[measured.target.position(device)]
    return {
        "id": device,
        "segment_seconds": costs.segment_seconds,
        "call_seconds": calls.segment_seconds,
        "assumed_apart_seconds": SEGMENT_OVERHEAD_SECONDS,
        "input_seconds": costs.input_seconds,
        "output_seconds": costs.output_seconds,
        "copied_seconds": calls.copied_seconds,
    }


def _build_link_json(measured: LinkMeasurement) -> dict[str, Any]:
    points = [
        {**asdict(point), "undisturbed_samples": measured.undisturbed_samples[point.bytes]}
        for point in measured.fit.points
    ]
    return {
        **asdict(measured.link),
        "symmetric": measured.symmetric,
        "waking_seconds": measured.waking_seconds,
        "worst_relative_error": measured.fit.worst_error,
        "points": points,
    }


def format_calibration(measured: Calibration) -> str:
    """Return a calibration on one screen: links with their fits, calls, contention."""
    from onnxplace.target.target import SEGMENT_OVERHEAD_SECONDS

    blocks = [
        _format_link(link) for link in measured.links if not (link.symmetric and _is_return_direction(link, measured))
    ]
    calls = []
    for device in measured.target.devices:
        call_seconds = device.segment_seconds, measured.call_costs[device.id].segment_seconds, SEGMENT_OVERHEAD_SECONDS
        figures = (*call_seconds, device.input_seconds, device.output_seconds)
        calls.append((device.id, *(f"{seconds * 1e6:.1f} us" for seconds in figures)))
    header = ("each segment", "costs", "its call, measured", "caches and copies, assumed", "each input", "each output")
    blocks.append(format_table(header, calls))
    if measured.contention:
        rows = [
            (name, f"{slower.factor:.2f}x" if slower.seen else "not seen")
            for name, slower in vars(measured.contention).items()
        ]
        blocks.append(format_table((f"{', '.join(measured.cpu_devices)} at once", "slower"), rows))
    return "\n\n".join([*blocks, *[f"note: {note}" for note in measured.notes]])


def _is_return_direction(link: LinkMeasurement, measured: Calibration) -> bool:
    ends = (link.link.destination, link.link.source)
    return any((m.link.source, m.link.destination) == ends for m in measured.links[: measured.links.index(link)])


def _format_link(measured: LinkMeasurement) -> str:
    link, arrow = measured.link, "<->" if measured.symmetric else "->"
    rows = [
        (
            f"{point.bytes}",
            f"{point.seconds * 1e6:.1f}",
            f"{(1 + point.relative_error) * point.seconds * 1e6:.1f}",
            f"{point.relative_error:+.0%}",
            "outlier" if point.outlier else "",
        )
        for point in measured.fit.points
    ]
    title = (
        f"{link.source} {arrow} {link.destination} ({link.via}): {link.latency_seconds * 1e6:.1f} us "
        f"+ bytes at {link.bytes_per_second / 1e9:.2f} GB/s"
    )
    return f"{title}\n{format_table(('bytes', 'measured us', 'fit us', 'error', ''), rows, left=0)}"


def format_devices(about: Mapping[str, Any], target: Target) -> str:
    """Return the hardware of this machine, that without a provider too, and the default devices."""
    host = about["host"]
    limit = "" if host["core_limit"] is None else f" (its container may use the time of {host['core_limit']:.3g})"
    lines = [
        f"host: {format_count(len(host['cores']), 'core')}{limit}, {format_bytes(host['available_memory_bytes'])} "
        f"available; onnxruntime {about['onnxruntime']}"
    ]
    lines += [_format_accelerator(item) for item in about["accelerators"]]
    lines += [
        f"{item['name']}: found, but no provider for it is installed: {item['install_hint']}"
        for item in about["without_provider"]
    ]
    if not about["accelerators"]:
        lines.append("no GPU or NPU found that has a provider")
    from onnxplace.machine.hardware import find_cores, find_node

    cores = find_cores(target.devices)
    near = {name: ", ".join(str(n) for n in sorted(set(map(find_node, own)))) for name, own in cores.items()}
    header, count = ("device", "cores", "memory", "cost class", "node of memory"), 4 + (len(set(near.values())) > 1)
    rows = [
        (d.id, str(d.cores), format_bytes(d.memory_bytes), d.cost_class, near.get(d.id, "")) for d in target.devices
    ]
    return "\n".join(
        [
            *lines,
            "",
            "used unless --devices says otherwise:",
            format_table(header[:count], [row[:count] for row in rows]),
            *(pool.describe() for pool in target.pools),
        ]
    )


def _format_accelerator(item: Mapping[str, Any]) -> str:
    """Return name, memory and provider of an accelerator, what it cannot do, and what it lacks."""
    from onnxplace.machine.device_probe import DeviceTraits

    free = f"{format_bytes(item['free_bytes'])} free"
    assumed = "" if item["problem"] else f"its memory is unknown: that of the host is assumed, {free}"
    name = ", ".join(filter(None, (item["name"], free if item["memory_is_known"] else assumed)))
    limits = [
        f"takes {', '.join(item['takes'])}" if item.get("takes") else "",
        "inputs of fixed sizes only" if item.get("needs_static_shapes") else "",
        *(DeviceTraits(**item["probed"]).describe() if item.get("probed") else ()),
        f"NOT usable: {item['problem']}" if item["problem"] else "",
        item.get("install_hint", ""),
    ]
    provider = f"{item['package']} {item['version']}".strip()
    return "; ".join(filter(None, (f"{item['id']}: {name}", provider, *limits)))


# -------------------------------------------------------------------------------------------------------- the catalogue


@click.command(short_help="List devices and fabrics for --machine.")
@as_json
def machines(json_: bool) -> None:
    """List the devices and fabrics that names of machines are made of, such as 8xH100-NVLink.

    Figures are those of data sheets; --json has the source of each, and further names.
    """
    from onnxplace.target.catalogue import read_catalogue

    catalogue = read_catalogue()
    print_result(json_, asdict(catalogue), format_catalogue(catalogue))


def format_catalogue(catalogue: Catalogue) -> str:
    """Return devices and fabrics as tables, and how to name a machine."""
    from onnxplace.target.target import DATA_TYPES

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
    whole = [
        f"{item.name}: {' and '.join(item.parts)}, which share {format_bytes(item.memory_bytes)}"
        for item in catalogue.devices.values()
        if item.parts
    ]
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
