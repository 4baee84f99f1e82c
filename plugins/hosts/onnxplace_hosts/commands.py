"""The command `onnxplace hosts`, and the options of the runtime `mpi` in commands that run bundles."""

from __future__ import annotations

import datetime
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace.cli.shared_options import FiniteNumber, as_json, print_json, print_text, target_output_option
from onnxplace.cli.terminal import show_progress
from onnxplace.errors import format_count
from onnxplace.reports.text import format_table
from onnxplace.utils.files import require_writable, write_file
from onnxplace.utils.quantities import format_bytes

if TYPE_CHECKING:
    from onnxplace_hosts.survey import HostLink, HostSurvey

# By argument of `Mpi`.
RUN_OPTIONS = {
    "hosts": click.Option(["--hosts"], metavar="node1:1,node2:1", help="Hosts, and how many devices may run on each."),
    "replicas": click.Option(
        ["--replicas"], type=int, metavar="N", help="Copies of the bundle, on slots of their own  [default: 1]"
    ),
    "timeout": click.Option(
        ["--start-timeout"],
        type=FiniteNumber(min=0.1),
        metavar="SECONDS",
        help="Time for processes to start and open the bundle  [default: 30]",
    ),
    "remote_shell": click.Option(
        ["--remote-shell"], metavar="PROGRAM", help="Runs a command on a host  [default: ssh]"
    ),
    "interface": click.Option(["--interface"], metavar="eth0", help="Network for messages  [default: MPI's choice]"),
}


@click.command(short_help="Show the devices of several hosts, and measure links.")
@click.option("--hosts", required=True, metavar="node1,node2", help="Two or more hosts; or node[1-4], or @hostfile.")
@click.option(
    "--devices", metavar="cpu:0,cpu:1", default="", help="Devices of each host  [default: those of `devices`]"
)
@click.option("--seconds", type=float, help="Approximate time to measure links  [default: 10]")
@click.option("--remote-shell", default="ssh", show_default=True, metavar="PROGRAM", help="Runs a command on a host.")
@click.option("--interface", default="", metavar="eth0", help="Network for messages  [default: MPI's choice]")
@click.option("--timeout", type=FiniteNumber(min=0.1), default=30.0, show_default=True, help="To reach a host.")
@target_output_option
@as_json
def hosts(
    hosts: str,
    devices: str,
    seconds: float | None,
    remote_shell: str,
    interface: str,
    timeout: float,
    output: Path | None,
    json_: bool,
) -> None:
    """Show the devices of several hosts, and measure the links between them.

    With -o, write a target of all of them for `compile --target` and `plan --target`. Every host needs onnxplace[mpi]
    of the same version at the same path. Messages are neither encrypted nor authenticated: use trusted networks only.
    """
    from onnxplace.target.target_file import format_target
    from onnxplace_hosts.connection import Connection
    from onnxplace_hosts.host_lists import parse_hosts
    from onnxplace_hosts.survey import DEFAULT_SECONDS, survey_hosts

    names = parse_hosts(hosts)
    if output:
        require_writable(output)
    with show_progress(json_, "reaching hosts") as observer:
        survey = survey_hosts(
            names,
            devices=devices,
            seconds=DEFAULT_SECONDS if seconds is None else seconds,
            connection=Connection(remote_shell, interface, timeout),
            observer=observer,
        )
    if output:
        text = f"{_format_survey_heading(survey)}\n{format_target(survey.target)}"
        write_file(output, lambda stream: stream.write(text.encode()))
    if json_:
        print_json({**_build_survey_json(survey), **({"output": str(output)} if output else {})})
        return
    print_text(format_survey(survey))
    if output:
        print_text(f"target: {output}")


def _format_survey_heading(survey: HostSurvey) -> str:
    """Return the comments on top of a target file."""
    versions = ", ".join(f"{name} {version}" for name, version in survey.hosts[0].versions.items() if version)
    source = f"links between hosts measured by `onnxplace hosts`: {datetime.date.today()}"
    return f"# hosts: {', '.join(host.name for host in survey.hosts)}\n# {source}, {versions}"


def _build_survey_json(survey: HostSurvey) -> dict[str, Any]:
    """Return hosts and links as plain data."""
    return {
        "hosts": [
            {
                "name": host.name,
                "versions": dict(host.versions),
                "devices": [asdict(item) for item in host.target.devices],
            }
            for host in survey.hosts
        ],
        "links": [_build_host_link_json(link) for link in survey.links],
    }


def _build_host_link_json(link: HostLink) -> dict[str, Any]:
    return {
        "hosts": list(link.hosts),
        "latency_seconds": link.to_links()[0].latency_seconds,
        "bytes_per_second": link.fit.bytes_per_second,
        "message_seconds": link.fit.latency_seconds,
        "assumed_waking_seconds": link.waking_seconds,
        "worst_relative_error": link.fit.worst_error,
        "points": [asdict(point) for point in link.fit.points],
    }


def format_survey(survey: HostSurvey) -> str:
    """Return a survey on one screen: devices of hosts, and links between them."""
    rows = [
        (
            f"{host.name}/{item.id}",
            format_count(item.cores, "core") if item.is_host else item.model,
            format_bytes(item.memory_bytes),
        )
        for host in survey.hosts
        for item in host.target.devices
    ]
    links = [
        (
            " - ".join(link.hosts),
            f"{link.fit.latency_seconds * 1e6:.1f} us",
            f"{link.waking_seconds * 1e6:.0f} us",
            f"{link.fit.bytes_per_second / 1e9:.3g} GB/s",
            f"{link.fit.worst_error:.0%}",
        )
        for link in survey.links
    ]
    header = ("hosts", "message, measured", "waking, assumed", "bandwidth", "worst error of the fit")
    return f"{format_table(('device', 'hardware', 'memory'), rows, left=2)}\n\n{format_table(header, links)}"
