"""The command line: it parses, calls the library and prints.

Commands import heavy modules only when they run.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import traceback
from _thread import interrupt_main
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any, TextIO

import click
from click.shell_completion import shell_complete

from onnxplace.cli.bench import bench
from onnxplace.cli.compile import compile as compile_
from onnxplace.cli.completion import COMPLETE_VARIABLE, PROGRAM, complete_passes, complete_runtimes, completion
from onnxplace.cli.explain import explain
from onnxplace.cli.export import export, merge
from onnxplace.cli.place import place
from onnxplace.cli.plan import plan
from onnxplace.cli.report import report
from onnxplace.cli.run import run
from onnxplace.cli.shared_options import (
    as_json,
    describe_note,
    print_json,
    print_result,
    show_session_notes,
    suggest_command,
)
from onnxplace.cli.terminal import add_verbosity_options, is_terminal, print_aside, report_total_time
from onnxplace.cli.verify import verify
from onnxplace.errors import ExecutionError, OnnxplaceError, PluginError, UsageError, name_options, suggest_nearest
from onnxplace.machine.interrupts import register_ending_handler
from onnxplace.utils.files import disk_error, find_library_error
from onnxplace.utils.standard_output import keep_stdout

# Errors about paths that are not a model, a bundle or a cost graph, with the command that takes such a path.
COMMANDS_BY_PATH_ERROR = {"M001": "compile", "M002": "compile", "N001": "run", "D001": "place"}


class CommandGroup(click.Group):
    """The commands, and those of plugins, which are listed without being imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names, those of this distribution first; a plugin cannot take one of these."""
        from onnxplace.plugins import list_entries

        plugins = list_entries("commands")
        parts = [name for name, entry in plugins.items() if not entry.distribution]
        return [*dict.fromkeys((*sorted((*self.commands, *parts)), *sorted(plugins)))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; of a plugin from elsewhere, one that only says where it comes from."""
        from onnxplace.plugins import list_entries

        if cmd_name not in self.commands and (entry := list_entries("commands").get(cmd_name)):
            if not entry.distribution:
                return load_plugin_command(cmd_name)
            return click.Command(cmd_name, short_help=f"Of the {entry.summary}.")
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the name and command of the first argument, and the rest.

        Raises UsageError for an unknown name, and UsageError or PluginError for a command of a plugin that is not
        installed or broken.
        """
        from onnxplace.plugins import OFFERED

        name = args[0]
        if name in self.commands:
            return super().resolve_command(ctx, args)
        known = [*dict.fromkeys((*self.commands, *self.list_commands(ctx)))]
        if name in known or (name in OFFERED["commands"] and not ctx.resilient_parsing):
            return name, load_plugin_command(name), args[1:]
        if ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        hint = f"{suggest_nearest(name, known)}; `{ctx.command_path} --help` says more"
        raise UsageError("U000", f"no such command {name!r}", where=ctx.command_path, hint=hint)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; with `--verbose`, print its time. Raises PluginError for a defect of a plugin's command."""
        try:
            with report_total_time(ctx), show_session_notes():
                return super().invoke(ctx)
        except click.UsageError as problem:
            if problem.ctx is None and (name := ctx.invoked_subcommand):  # for an option without its value
                problem.ctx = click.Context(self.get_command(ctx, name) or self, parent=ctx, info_name=name)
            raise
        except (OnnxplaceError, click.ClickException, click.exceptions.Exit, click.Abort, OSError, MemoryError):
            raise
        except Exception as problem:
            from onnxplace.plugins import list_entries

            name = str(ctx.invoked_subcommand)
            if name in self.commands or not (distribution := list_entries("commands")[name].distribution):
                raise
            where = f"command {name!r} from {distribution}"
            hint = "this is a defect of the plugin, please report it; --verbose shows where"
            raise PluginError("G001", f"{type(problem).__name__}: {problem}", where=where, hint=hint) from problem


@cache
def load_plugin_command(name: str) -> click.Command:
    """Import and return a command of a plugin, with the options that all commands have.

    Raises UsageError or PluginError.
    """
    from onnxplace.plugins import load_plugin

    command, entry = load_plugin("commands", name)
    if not isinstance(command, click.Command):
        where, hint = f"command {name!r} from {entry.distribution}", "decorate a function with click.command"
        raise PluginError("G001", f"{entry.path} is not a click.Command", where=where, hint=hint)
    add_verbosity_options(command)
    return command


@click.group(
    cls=CommandGroup,
    commands=[compile_, run, verify, bench, report, merge, export, plan, place, explain, completion],
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="onnxplace")
def cli() -> None:
    """Split an ONNX model over several devices, and run it there.

    \b
    Get started: onnxplace compile model.onnx --devices cpu:0,cpu:1 --shape batch=8
                 onnxplace verify model.bundle
                 onnxplace run model.bundle --inputs feeds.npz --outputs out.npz

    Exit codes: 0 success, 1 a comparison failed, 2 bad usage or input, 3 infeasible (no placement fits), 4 a failure
    while running, 130 or 143 interrupted. With --json, an error is also printed on stdout as {"error": {code,
    message, where, hint}}; `onnxplace explain CODE` says more.
    """  # noqa: D301 - \b tells click to keep the line breaks


@cli.command(short_help="List the passes; with a NAME, its options.")
@click.argument("name", required=False, shell_complete=complete_passes)
@as_json
def passes(name: str | None, json_: bool) -> None:
    """List the passes, built in and from plugins.

    With NAME, show its options.
    Passes marked "placer" are for --placer, which accepts options: --placer 'auto{seed=1}'.
    """
    _list_entries("passes", name, json_)


@cli.command(short_help="List the runtimes; with a NAME, describe it.")
@click.argument("name", required=False, shell_complete=complete_runtimes)
@as_json
def runtimes(name: str | None, json_: bool) -> None:
    """List the runtimes for `onnxplace run --runtime`; with NAME, describe it."""
    _list_entries("runtimes", name, json_)


def _list_entries(kind: Any, name: str | None, json_: bool) -> None:
    from onnxplace.cli.help import format_pass_help
    from onnxplace.pipeline.registry import find_plugin
    from onnxplace.plugins import list_entries
    from onnxplace.reports.text import format_table

    if name:
        text, fields = format_pass_help(find_plugin(kind, name))
        print_result(json_, {"name": name, **fields}, text)
        return
    known = list_entries(kind).values()
    text = format_table(("name", ""), [(entry.name, entry.summary) for entry in known], left=2)
    print_result(json_, {kind: [asdict(entry) for entry in known]}, text)


for command in cli.commands.values():
    add_verbosity_options(command)


# As shells report a process that SIGTERM ended: 128 + 15.
SIGTERM_EXIT_CODE = 143
# How click begins what it says of a wrong value.
_QUOTED = re.compile("'([^']*)'")


@name_options()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Errors of the user show no traceback.
    """
    if arguments is None and COMPLETE_VARIABLE in os.environ:
        with suppress(Exception):  # the user sees no completion, instead of an error in the line that is being typed
            return shell_complete(cli, {}, PROGRAM, COMPLETE_VARIABLE, os.environ[COMPLETE_VARIABLE])
        return 1
    json_ = "--json" in (sys.argv[1:] if arguments is None else arguments)
    stdout, stderr = sys.stdout, sys.stderr
    try:
        result = cli.main(args=arguments, prog_name="onnxplace", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except OnnxplaceError as problem:
        if _signals:  # its exception was swallowed, for example in a callback of numba, and led to this error
            return _print_interruption(_signals[0], json_)
        return _print_error(_add_path_hint(problem), json_)
    except click.ClickException as problem:
        return _print_error(_make_usage_error(problem), json_)
    except (KeyboardInterrupt, click.Abort):
        return _print_interruption(_signals[0] if _signals else signal.SIGINT, json_)
    except SystemExit as request:
        if request.code == SIGTERM_EXIT_CODE:
            return _print_interruption(signal.SIGTERM, json_)
        if sys.stdout is not stdout:  # click replaces it, and exits with 1, after a broken pipe
            sys.stdout, sys.stderr = stdout, stderr
            _redirect_to_null(sys.stdout)
            return 0
        return request.code if isinstance(request.code, int) else 4
    except MemoryError:
        hint = "close other programs, or use a machine with more memory"
        return _print_error(ExecutionError("X010", "out of memory", hint=hint), json_)
    except BrokenPipeError:
        _redirect_to_null(sys.stdout)
        return 0
    except OSError as problem:
        if any(frame.f_code is click.echo.__code__ for frame, _ in traceback.walk_tb(problem.__traceback__)):
            return _print_error(_make_output_error(problem), json_=False)
        return _print_error(disk_error(problem, str(problem.filename or "a file")), json_)
    except ImportError as problem:
        if not (error := find_library_error(problem)):
            raise
        return _print_error(error, json_)


def _make_usage_error(problem: click.ClickException) -> UsageError:
    """Return the error for what click says of wrong arguments, with the option or value that was probably meant."""
    context, kind = getattr(problem, "ctx", None), getattr(getattr(problem, "param", None), "type", None)
    command = context.command_path if context else "onnxplace"
    hint, message, name, known = f"`{command} --help` says more", problem.format_message(), "", list[str]()
    if isinstance(problem, click.NoSuchOption):
        from onnxplace.plugins import describe_missing

        options = [option for item in context.command.params for option in item.opts] if context else []
        name, known = problem.option_name, [item for item in options if item.startswith("-")]
        if (error := describe_missing("runtime_options", name)) and "--runtime" in known:
            return error
        message = f"no such option {name!r}"  # versions of click have other words
    elif isinstance(kind, click.Choice) and (value := _QUOTED.match(problem.message)):
        name, known = value[1], list(kind.choices)
    if known:
        hint = f"{suggest_nearest(name, known)}; {hint}"
    # What the user typed may have line breaks.
    text = " ".join(message.split()).rstrip(".")
    return UsageError("U000", text[:1].lower() + text[1:], where=command, hint=hint)


def _print_error(problem: OnnxplaceError, json_: bool, shown: bool = False) -> int:
    """Print an error on stderr unless `shown`, and as JSON on stdout.

    Returns its exit code, or that of a failure if the JSON cannot be printed.
    """
    if not shown:
        # If it cannot be printed, the exit code still tells the kind of error.
        print_aside("\n".join((str(problem), *getattr(problem, "__notes__", ()))))
        if is_terminal() and problem.code != "U000":
            print_aside(f"  more: onnxplace explain {problem.code}")
    if json_:
        try:
            print_json({"error": describe_note(problem)})
        except BrokenPipeError:
            _redirect_to_null(sys.stdout)
        except OSError as cause:
            return _print_error(_make_output_error(cause), json_=False)
    return problem.exit_code


def _print_interruption(number: int, json_: bool) -> int:
    """Report that a signal ended the command; return its exit code."""
    message = "interrupted" if number == signal.SIGINT else "interrupted (SIGTERM)"
    print_aside(f"{message}; nothing half-written was left")
    _print_error(ExecutionError("X011", message), json_, shown=True)
    return 128 + number


def _make_output_error(problem: OSError) -> ExecutionError:
    """Return the error for output that cannot be printed; discard the rest."""
    _redirect_to_null(sys.stdout)
    cause = disk_error(problem, "standard output")
    return ExecutionError(
        cause.code, cause.message, where=cause.where, hint="the output is lost: redirect it to a file on another disk"
    )


def _add_path_hint(problem: OnnxplaceError) -> OnnxplaceError:
    """Add a hint at the command that takes the path of an error."""
    if problem.code not in COMMANDS_BY_PATH_ERROR or not (
        hint := suggest_command(Path(problem.where), COMMANDS_BY_PATH_ERROR[problem.code])
    ):
        return problem
    return type(problem)(problem.code, problem.message, where=problem.where, hint=hint)


def _redirect_to_null(stream: TextIO) -> None:
    """Let the buffer of a stream, which Python would write at its end, go nowhere."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_defect(defect: Exception) -> int:
    """Report a defect of onnxplace, unless a signal caused it.

    Return the exit code.
    """
    json_ = "--json" in sys.argv[1:]
    if _signals:
        return _print_interruption(_signals[0], json_)
    print_aside(f"{traceback.format_exc()}this is a defect of onnxplace, please report it")
    error = ExecutionError("X012", f"{type(defect).__name__}: {defect}", hint="this is a defect, please report it")
    return _print_error(error, json_, shown=True)


# Signals that should end the command: libraries may swallow the exceptions that they raise.
_signals: list[int] = []


def _handle_signal(number: int, _: object) -> None:
    _signals.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(SIGTERM_EXIT_CODE)


def _repeat_interrupt(problem: sys.UnraisableHookArgs) -> None:
    """Interrupt once more if Python dropped an interrupt, as it does with any exception of a destructor."""
    if issubclass(problem.exc_type, KeyboardInterrupt):
        Timer(0.02, interrupt_main).start()
    else:
        sys.__unraisablehook__(problem)


def entry() -> None:
    """Run the console script; SIGTERM unwinds like Ctrl-C, and leaves no files."""
    for name in ("stdout", "stderr"):  # closed by the user (`>&-`); some versions of click fail then
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
    descriptor = keep_stdout()
    sys.argv = [item.replace("/dev/stdout", f"/dev/fd/{descriptor}") for item in sys.argv]
    register_ending_handler(_handle_signal)
    signal.signal(signal.SIGTERM, _handle_signal)
    sys.unraisablehook = _repeat_interrupt
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):  # it is ignored for example by `nohup`
        signal.signal(signal.SIGINT, _handle_signal)
    try:
        code = main()
    except KeyboardInterrupt:  # a second one, while the first was handled
        code = _print_interruption(signal.SIGINT, json_=False)
    except Exception as defect:  # noqa: BLE001 - Python's own exit code for it is 1, which means a failed comparison
        code = _print_defect(defect)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _redirect_to_null(sys.stdout)
    except OSError as problem:
        code = _print_error(_make_output_error(problem), json_=False)
    try:
        sys.stderr.flush()
    except OSError:
        _redirect_to_null(sys.stderr)
    gc.freeze()  # at the end, Python would search all objects for cycles, which takes 0.2 s
    sys.exit(code)
