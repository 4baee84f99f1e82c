"""The command line. It parses, calls the library, prints; heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from onnxplace._cli_bundle import bench, run, verify
from onnxplace._cli_compile import compile as compile_
from onnxplace._cli_devices import devices
from onnxplace._cli_options import as_json, print_json
from onnxplace._cli_place import place
from onnxplace.errors import OnnxplaceError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="onnxplace")
def cli() -> None:
    """Split an ONNX model over several devices, and run the parts together.

    Exit codes: 0 done, 1 the answer is no, 2 bad usage or input, 3 infeasible, 4 a failure while running, 130 or 143
    interrupted.
    """


for command in (compile_, run, verify, bench, place, devices):
    cli.add_command(command)


def vars_of(device: object) -> dict[str, Any]:
    """Return a frozen record as a plain dictionary."""
    from dataclasses import asdict

    return asdict(device)  # type: ignore[call-overload, no-any-return]


@cli.command()
@click.argument("name", required=False)
@as_json
def passes(name: str | None, json_: bool) -> None:
    """List the passes, built in and plugged in; with NAME, show its options."""
    _list_entries("passes", name, json_)


@cli.command()
@click.argument("name", required=False)
@as_json
def runtimes(name: str | None, json_: bool) -> None:
    """List the runtimes, built in and plugged in."""
    _list_entries("runtimes", name, json_)


def _list_entries(kind: Any, name: str | None, json_: bool) -> None:
    from onnxplace.registry import entries, find
    from onnxplace.report import pass_help, table

    if name:
        found = find(kind, name)
        click.echo(json.dumps({"name": name, **pass_help(found)[1]}) if json_ else pass_help(found)[0])
        return
    known = entries(kind)
    if json_:
        print_json({kind: [vars_of(entry) for entry in known.values()]})
    else:
        click.echo(table(("name", ""), [(entry.name, entry.summary) for entry in known.values()], left=2))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nobody sees a traceback for their own mistake."""
    try:
        result = cli.main(args=arguments, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except OnnxplaceError as problem:
        click.echo(str(problem), err=True)
        return problem.exit_code
    except click.ClickException as problem:
        problem.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; nothing half-written was left", err=True)
        return 130
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 4
    except MemoryError:
        click.echo("error[X010] out of memory\n  hint: close other programs, or use a machine with more", err=True)
        return 4
    except BrokenPipeError:
        _abandon_stdout()
        return 0
    except OSError as problem:
        from onnxplace.files import disk_error

        click.echo(str(disk_error(problem, str(problem.filename or "a file"))), err=True)
        return 4


def _abandon_stdout() -> None:
    """Whoever read our output has gone; leave nothing in the buffer that Python would try to write at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def entry() -> None:
    """Console script. A request to terminate unwinds like Ctrl-C, so that nothing is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    code = main()
    try:
        sys.stdout.flush()
    except OSError:
        _abandon_stdout()
    sys.exit(code)
