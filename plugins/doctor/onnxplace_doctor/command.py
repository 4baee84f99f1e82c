"""The command `onnxplace doctor`."""

from __future__ import annotations

from pathlib import Path

import click

from onnxplace.cli.completion import PATH, complete_devices
from onnxplace.cli.shared_options import as_json, format_json, print_json, print_text, show_progress

DEFAULT_OUTPUT = Path("onnxplace-doctor.json")
# As shells report a process that SIGINT ended: 128 + 2.
INTERRUPTED_EXIT_CODE = 130


@click.command(short_help="Check that bundles run right on the devices here.")
@click.option(
    "--devices", shell_complete=complete_devices, metavar="cpu:0,cuda:0", help="Default: every kind that works here."
)
@click.option("--seconds", type=float, help="Approximate time for all checks  [default: 120]")
@click.option("-o", "--output", type=PATH, metavar="F.json", help=f"The report  [default: {DEFAULT_OUTPUT}]")
@as_json
def doctor(devices: str | None, seconds: float | None, output: Path | None, json_: bool) -> None:
    """Check that bundles run right on the devices of this machine, and measure it.

    Operators, copies in all directions, order of enqueued work, states, limits of memory, failures, links and
    predictions, on each device and each pair; crashes and hangs are reported too. Exit 1 if a check fails. The report
    has no paths, host names or user names: send it to us, above all from machines with GPUs. With --json, it
    is only written with --output.
    """
    from onnxplace.utils.files import require_writable, write_file
    from onnxplace_doctor.doctor_report import format_report
    from onnxplace_doctor.examination import DEFAULT_SECONDS, examine

    output = output or (None if json_ else DEFAULT_OUTPUT)
    if output:
        require_writable(output)
    with show_progress(json_, "starting", similar=True) as observer:
        report = examine(devices, seconds=DEFAULT_SECONDS if seconds is None else seconds, observer=observer)
    data = report.to_json()
    if output:
        write_file(output, lambda stream: stream.write(format_json(data).encode()))
    if json_:
        print_json(data)
    else:
        print_text(format_report(report))
        print_text(
            f"\nWhat to send us: {output}\n"
            "It holds the checks above with all figures, the processor, GPUs, drivers and versions of packages.\n"
            "It holds no model, no paths, no host name and no user name."
        )
    if report.interrupted:
        raise SystemExit(INTERRUPTED_EXIT_CODE)
    if not report.ok:
        raise SystemExit(1)
