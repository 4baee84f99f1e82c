"""What several commands take and print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace.errors import UsageError

if TYPE_CHECKING:
    from onnxplace.state import Diagnostic

as_json = click.option("--json", "json_", is_flag=True, help="Print one JSON object on stdout and nothing else there.")
inputs_option = click.option("--inputs", type=click.Path(path_type=Path), metavar="F.npz", help="Real inputs, by name.")
runtime_option = click.option(
    "--runtime", default="onnxruntime", show_default=True, metavar="NAME", help="`onnxplace runtimes` lists them."
)
seed_option = click.option(
    "--seed", default=0, callback=lambda *said: _seed(said[-1]), show_default=True, help="For inputs that are drawn."
)
objective_option = click.option(
    "--objective",
    type=click.Choice(["latency", "throughput", "fit"]),
    default="latency",
    show_default=True,
    help="Least time for one step, most steps a second, or least traffic such that everything fits.",
)
budget_option = click.option(
    "--budget", type=click.FloatRange(0), metavar="SECONDS", help="How long the placer may search  [default: 2]"
)
shape_option = click.option("--shape", metavar="batch=8,seq=128", default="", help="Values for symbolic dimensions.")


def with_operator_libraries(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the option `--custom-op-library`, whose libraries are in use while it runs."""

    @wraps(command)
    def run(*arguments: Any, custom_op_library: tuple[Path, ...], **options: Any) -> None:
        if not custom_op_library:
            command(*arguments, **options)
            return
        from onnxplace.sessions import custom_operators

        with custom_operators(custom_op_library):
            command(*arguments, **options)

    option = click.option(
        "--custom-op-library",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A shared library with operators that ONNX Runtime has not; may be repeated.",
    )
    return option(run)


def _seed(value: int) -> int:
    if value < 0:
        raise UsageError("U012", f"a seed cannot be {value}", where="--seed", hint="give 0 or more")
    return value


def parse_shape(text: str) -> dict[str, int]:
    """Read `batch=8,seq=128`; raises UsageError."""
    sizes = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, size = item.partition("=")
        if not key or not size.strip().isdecimal():
            raise UsageError("U011", f"not a dimension: {item!r}", where="--shape", hint="write it as batch=8,seq=128")
        sizes[key.strip()] = int(size)
    return sizes


def tell_of_compiling() -> None:
    """Say on stderr, if that is a terminal, that kernels are being compiled: after an installation it takes a while."""
    if not sys.stderr.isatty():
        return
    from onnxplace.jit import on_compiling

    on_compiling(
        lambda: click.echo("compiling kernels for this machine; they are kept, so this wait comes only once", err=True)
    )


@contextmanager
def progress(quiet: bool, first: str) -> Iterator[Callable[[str, int, int], None] | None]:
    """Show on stderr what is being done, `first` and then what the observer is told, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(first) as status:
        yield lambda name, index, count: status.update(f"[{index + 1}/{count}] {name}")


def say(diagnostics: Sequence[Diagnostic]) -> None:
    """Print notes on stderr."""
    for note in diagnostics:
        place = f"{note.where}: " if note.where else ""
        hint = f"\n  hint: {note.hint}" if note.hint else ""
        click.echo(f"note[{note.code}] {place}{note.message}{hint}", err=True)


def print_json(data: Mapping[str, Any]) -> None:
    click.echo(json.dumps(data, indent=1, default=str))
