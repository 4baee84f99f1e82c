"""Output of commands on a terminal: results, notes and progress, as much as `--quiet` and `--verbose` ask for.

A command begins steps, by the observer that it passes on. What computes reports the share of a step that is done
(`onnxplace.utils.report_progress`), and the display estimates the remaining time from that.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace import _startup
from onnxplace.errors import Diagnostic, OnnxplaceError, format_name, shorten

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


# -------------------------------------------------------------------------------------------------------------- results

as_json = click.option("--json", "json_", is_flag=True, help="Print one JSON object on stdout, also for an error.")

# Where a line says that its figures are unsure, up to the reason's end.
_DOUBT = re.compile(r"\bunsure\b[^;]*")


def print_text(text: str, err: bool = False) -> None:
    """Print human-readable lines, doubts in grey; names in them can neither control a terminal nor fill it."""
    lines = [
        _DOUBT.sub(lambda doubt: click.style(doubt[0], fg="bright_black"), shorten(item)) for item in text.split("\n")
    ]
    click.echo("\n".join(lines), err=err)


def print_aside(text: str) -> None:
    """Print human-readable lines on stderr; that they cannot be printed is no reason to stop."""
    with suppress(OSError):
        print_text(text, err=True)


def print_json(data: Mapping[str, Any]) -> None:
    """Print a result as JSON on stdout; names in it are whole, in ASCII."""
    click.echo(format_json(data))


def print_result(json_: bool, data: Mapping[str, Any], text: str) -> None:
    """Print a result as JSON, or as text."""
    print_json(data) if json_ else print_text(text)


def format_json(data: Mapping[str, Any]) -> str:
    """Return a result as JSON, which has no numbers that are not finite: null is in their place."""
    finite = json.loads(json.dumps(data, default=_encode), parse_constant=lambda _: None)
    return json.dumps(finite, indent=1, allow_nan=False)


def _encode(value: object) -> object:
    """Return what stands for a value that JSON does not have: fields of a note or a manifest's record, or its text."""
    if isinstance(value, Diagnostic):
        return describe_note(value)
    return value.model_dump() if hasattr(value, "model_dump") else str(value)


def describe_note(note: Diagnostic | OnnxplaceError) -> dict[str, str]:
    """Return a note or an error as JSON has it."""
    return {"code": note.code, "message": note.message, "where": note.where, "hint": note.hint}


# ------------------------------------------------------------------------------------------------------------ verbosity


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
    texts = {
        "quiet": "No progress and no notes on stderr: errors only.",
        "verbose": "Print each step and its time on stderr, all of the notes, and where a plugin failed.",
    }
    command.params += [
        click.Option(
            [f"-{name[0]}", f"--{name}"], is_flag=True, expose_value=False, callback=_keep_verbosity, help=text
        )
        for name, text in texts.items()
    ]


def _keep_verbosity(context: click.Context, option: click.Parameter, given: bool) -> None:
    if not given or context.resilient_parsing:
        return
    earlier = context.meta.get(_META_KEY)
    if earlier not in (None, option.name):
        raise click.UsageError(f"--{earlier} and --{option.name} exclude each other", context)
    context.meta[_META_KEY] = option.name


# Under this name, they share the clock of the command.
_CLOCK_KEY = "onnxplace.clock"


class PartClock:
    """The time of a command, of which each moment belongs to one part: there is no gap between two parts."""

    def __init__(self, began: float) -> None:
        self._began, self.seconds, self.parts = began, 0.0, 0

    def end_part(self) -> str:
        """End the current part and begin the next one; return its seconds, of which the sum is `seconds`, as text."""
        before, self.seconds, self.parts = self.seconds, round(time.monotonic() - self._began, 2), self.parts + 1
        return f"{self.seconds - before:.2f} s"


@contextmanager
def report_total_time(context: click.Context) -> Iterator[None]:
    """Print the time of a command, and the exception behind its error, if the user wants to know."""
    clock = context.meta[_CLOCK_KEY] = PartClock(_find_start())
    try:
        yield
    except OnnxplaceError as error:
        if context.meta.get(_META_KEY) == "verbose" and error.__cause__ is not None:
            print_aside("".join(traceback.format_exception(error.__cause__)).rstrip())
        raise
    finally:
        if context.meta.get(_META_KEY) == "verbose":
            ending = f"ending: {clock.end_part()}\n" * (clock.parts > 1)  # a command without steps has no parts
            print_aside(f"{ending}{context.invoked_subcommand}: {clock.seconds:.2f} s in all")


def _find_start() -> float:
    """Return when this process was started if that was for a command, else now, both by `time.monotonic`."""
    now = time.monotonic()
    if not _startup.IS_COMMAND:
        return now
    try:
        ticks = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK"))
    except (AttributeError, IndexError, OSError, ValueError):  # other systems: it has hardly waited since then
        return now - time.process_time()


# ------------------------------------------------------------------------------------------------------------- progress


# Between two lines where there is no terminal; the first one comes after a third of it.
LINE_SECONDS = 15.0
# Often enough to look alive, and rarely enough not to disturb what is measured meanwhile.
REFRESHES_PER_SECOND = 2
# Reports that follow one another faster are not worth the time to show them.
MIN_REPORT_SECONDS = 0.05
# An estimate from a smaller share says nothing.
MIN_SHARE = 0.01
BAR_COLUMNS = 24


class Display:
    """Where a command stands; the base of both ways to show it.

    Calling it begins a step: it is an observer of pipelines. `similar`: all steps take about the same time, so the
    remaining time is that of all of them.
    """

    def __init__(self, first: str, similar: bool = False) -> None:
        self.similar = similar
        self._last_report = 0.0
        self._clock: PartClock | None = click.get_current_context().meta[_CLOCK_KEY] if is_verbose() else None
        if self._clock:
            print_aside(f"starting: {self._clock.end_part()}")
        self._set_step(first, 0, 0)

    def _set_step(self, name: str, index: int, count: int) -> None:
        self.name, self.index, self.count = name, index, count
        self.detail, self.share, self._first_share = "", 0.0, 0.0
        self._step_began, self._latest_end = time.monotonic(), math.inf
        self._work_began: float | None = None
        if index == 0:  # for example of the strategies that follow after profiling
            self._began = self._step_began

    def __call__(self, name: str, index: int, count: int) -> None:
        """Begin a step: its name, its position from 0, and the number of steps."""
        self._end_step()
        self._set_step(name, index, count)
        self._show()

    def advance(self, share: float, detail: str = "") -> None:
        """Take the finished share of the current step; a share below an earlier one is ignored.

        The first report of 0 says that preparations are over, which do not count for the speed.
        """
        now = time.monotonic()
        if share == 0 and self._work_began is None:
            self._work_began = now
        if now - self._last_report < MIN_REPORT_SECONDS and share < 1:
            return
        self._last_report, self.detail = now, detail or self.detail
        if share > self.share:
            self.share = share
            self._show()

    def resume_at(self, share: float) -> None:
        """Begin the current step at a share that was finished earlier, and says nothing about the speed."""
        self.share = self._first_share = share

    def limit(self, seconds: float) -> None:
        """Take the time after which the current step ends at the latest."""
        self._latest_end = time.monotonic() + seconds

    @property
    def total_share(self) -> float | None:
        """Return the finished share of what the remaining time is for; None if it is unknown."""
        if self.similar and self.count:
            return (self.index + self.share) / self.count
        if self.share or self._latest_end == math.inf:
            return self.share or None
        elapsed = time.monotonic() - self._step_began
        return min(elapsed / max(self._latest_end - self._step_began, 1e-9), 1.0)

    def estimate_remaining(self) -> float | None:
        """Return the seconds that the step, or all similar steps, may still take; None if it is unknown."""
        now, share = time.monotonic(), self.total_share or 0.0
        if self.similar:
            began, first, limit = self._began, 0.0, math.inf
        else:
            began, first = self._work_began or self._step_began, self._first_share
            limit = max(self._latest_end - now, 0.0)
        # Without a reported share, the limit is all that is known.
        if share - first >= MIN_SHARE and (self.share or limit == math.inf):
            limit = min(limit, (now - began) * (1 - share) / (share - first))
        return None if limit == math.inf else limit

    def describe(self) -> str:
        """Return the position and name of the step, with details."""
        position = f"[{self.index + 1}/{self.count}] " if self.count > 1 else ""
        return format_name(f"{position}{self.name}{': ' * bool(self.detail)}{self.detail}")

    def describe_remaining(self) -> str:
        """Return the remaining time; if that is unknown, the time since the step began."""
        remaining = self.estimate_remaining()
        if remaining is None:
            return format_duration(time.monotonic() - self._step_began)
        return f"{format_duration(remaining)} left"

    def _end_step(self) -> None:
        if self._clock:
            self._print(f"{self.describe()}: {self._clock.end_part()}")

    def _show(self) -> None:
        """Show what changed."""

    def _print(self, line: str) -> None:
        """Print a line that stays."""
        print_aside(line)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._end_step()


class LineDisplay(Display):
    """A plain line now and then, for pipes, logs and dumb terminals."""

    def __init__(self, first: str, similar: bool = False) -> None:
        super().__init__(first, similar)
        self._next_line = time.monotonic() + LINE_SECONDS / 3

    def _show(self) -> None:
        now = time.monotonic()
        if now < self._next_line:
            return
        self._next_line, share = now + LINE_SECONDS, self.total_share
        done = f", {share:.0%}" if share is not None else ""
        remaining = self.estimate_remaining()
        left = f", {format_duration(remaining)} left" if remaining is not None else ""
        self._print(f"{self.describe()}{done}{left}")


class LiveDisplay(Display):
    """A line on a terminal that is redrawn, and cleared at the end."""

    def __init__(self, console: Console, first: str, similar: bool = False) -> None:
        from rich.live import Live

        super().__init__(first, similar)
        self._live = Live(
            console=console,
            transient=True,
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=False,
            get_renderable=self._draw,
        )

    def _draw(self) -> Table:
        """Return the step, a bar if its share is known, and the remaining time, all as of now."""
        from rich.progress_bar import ProgressBar
        from rich.table import Column, Table
        from rich.text import Text

        share = self.total_share
        line = Table.grid(
            Column(no_wrap=True, overflow="ellipsis"), Column(), Column(no_wrap=True, min_width=9), padding=(0, 1)
        )
        line.add_row(
            Text(self.describe()),  # names are no markup
            "" if share is None else ProgressBar(1.0, share, BAR_COLUMNS),
            Text(self.describe_remaining()),
        )
        return line

    def __call__(self, name: str, index: int, count: int) -> None:
        super().__call__(name, index, count)
        self._live.refresh()

    def _print(self, line: str) -> None:
        from rich.text import Text

        self._live.console.print(Text(line))

    def __enter__(self) -> Display:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            super().__exit__(kind, *rest)
        finally:
            self._live.stop()


@contextmanager
def show_progress(json_: bool, first: str, *, similar: bool = False) -> Iterator[Display | None]:
    """Show progress on stderr while the block runs: live on a terminal, in rare lines elsewhere.

    Nothing with `--quiet`, and nothing with `--json` unless the user wants details. Yields an observer of steps, or
    None. In the block, `onnxplace.utils.report_progress` reports the share of the current step that is done.

    Args:
        json_: Whether the command prints JSON, mostly for programs.
        first: The first step.
        similar: Whether all steps take about the same time.
    """
    from onnxplace.utils.progress import observe_progress

    if is_quiet() or (json_ and not is_verbose()):
        yield None
        return
    with _choose_display(first, similar) as display, observe_progress(display):
        yield display


def _choose_display(first: str, similar: bool) -> Display:
    """Return a live display for a terminal that can redraw a line, else one of lines."""
    if not is_terminal() or os.environ.get("CI") or os.environ.get("TERM", "") in ("dumb", "unknown"):
        return LineDisplay(first, similar)
    from rich.console import Console

    class VisibleConsole(Console):
        """Leaves the cursor alone, so that it is there even if the process is killed."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

    console: Any = VisibleConsole(stderr=True)
    return LiveDisplay(console, first, similar) if console.is_interactive else LineDisplay(first, similar)


def is_terminal() -> bool:
    """Return whether stderr is a terminal."""
    try:
        return sys.stderr.isatty()
    except ValueError:  # it is closed
        return False


def format_duration(seconds: float) -> str:
    """Return a time in minutes and seconds, and in hours where there are any.

    >>> format_duration(75), format_duration(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
