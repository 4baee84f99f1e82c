"""The options `--quiet` and `--verbose`, which every command has."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click

from onnxplace.cli.output import print_text
from onnxplace.errors import OnnxplaceError

# Under this name, the contexts of a command and of its groups share what the user wants to hear.
_META_KEY = "onnxplace.verbosity"


def is_quiet() -> bool:
    """Return whether the user wants errors only on stderr."""
    return _read() == "quiet"


def is_verbose() -> bool:
    """Return whether the user wants the time of each step on stderr."""
    return _read() == "verbose"


def _read() -> str:
    context = click.get_current_context(silent=True)
    return str(context.meta.get(_META_KEY, "")) if context else ""


def add_verbosity_options(command: click.Command) -> None:
    """Add `--quiet` and `--verbose` to a command, and to the commands of a group."""
    for subcommand in command.commands.values() if isinstance(command, click.Group) else ():
        add_verbosity_options(subcommand)
    command.params += [
        _make_option("-q", "--quiet", "No progress and no notes on stderr: errors only."),
        _make_option("-v", "--verbose", "Print each step and its time on stderr, and where a plugin failed."),
    ]


def _make_option(short: str, name: str, text: str) -> click.Option:
    def keep(context: click.Context, _: click.Parameter, given: bool) -> None:
        if not given or context.resilient_parsing:
            return
        word, earlier = name.lstrip("-"), context.meta.get(_META_KEY)
        if earlier not in (None, word):
            raise click.UsageError(f"--{earlier} and --{word} exclude each other", context)
        context.meta[_META_KEY] = word

    return click.Option([short, name], is_flag=True, expose_value=False, callback=keep, help=text)


@contextmanager
def report_total_time(context: click.Context) -> Iterator[None]:
    """Print the time of a command, and the exception behind its error, if the user wants to know."""
    began = time.perf_counter()
    try:
        yield
    except OnnxplaceError as error:
        if context.meta.get(_META_KEY) == "verbose" and error.__cause__ is not None:
            with suppress(OSError):
                print_text("".join(traceback.format_exception(error.__cause__)).rstrip(), err=True)
        raise
    finally:
        if context.meta.get(_META_KEY) == "verbose":
            with suppress(OSError):
                print_text(f"{context.invoked_subcommand}: {time.perf_counter() - began:.2f} s in all", err=True)
