"""The errors of onnxplace, as one tree.

    OnnxplaceError
    |-- InputError            exit 2: the user's model, bundle, feeds, options or files
    |   |-- UsageError        an unknown name, a bad option value, a pipeline in the wrong order
    |   |   `-- ArgumentError an argument in Python that does not exist or has a wrong type; also Python's TypeError
    |   |-- ModelError        a model that cannot be read, checked, bound or run
    |   |-- FeedError         inputs that do not fit the model
    |   |-- TargetError       devices or links that do not exist or contradict each other
    |   `-- BundleError       a bundle that is damaged, unsafe or too new
    |-- InfeasibleError       exit 3: no placement fits
    |-- ExecutionError        exit 4: a failure while running
    |   `-- RunTimeoutError   no result in time; also Python's TimeoutError
    |-- BrokenPassError       exit 4: a pass that does not keep its own declaration
    `-- PluginError           exit 4: a plugin that cannot be loaded

Every error has a code, a place, a message that says what is wrong, and mostly a hint that says what to try. These name
options as commands have them, `--max-memory 1GiB`; outside of a command, the text of an error has the argument instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

# Names in one list; longer lists are too long to read.
MAX_LISTED = 10
# Characters of one value in a message: enough to recognize the value.
MAX_SHOWN = 60
# Characters of a name or path, which is shown without its middle if it is longer.
MAX_NAME_CHARACTERS = 300
# Characters of a line, message, place or hint: about a screen. Names, and errors of other programs, may be much longer.
MAX_CHARACTERS = 4096
# Names that people know from other programs; by spelling alone, the nearest to `gpu` would be `cpu`.
_ALIASES = {"gpu": "cuda"}
# A command to type, which stays as it is; or an option, with the next word if that is a value: it has a digit or is a
# placeholder, or ends a part of the sentence.
_OPTION = re.compile(
    r"`[^`]*`|\b(?:onnxplace|optimum|optimum-cli|pip|python)[ :][^;,)\n]*"
    r"|(?<![^\s(])(?P<option>--(?!verbose|save-target)[a-z][a-z-]+|-o\b)"
    r"(?: (?P<value>'[^'\n]+'|[^\s-]*\d\S*?(?=[,;:)]?(?:\s|$))|[A-Z]+\b(?!=)(?:\.\w+)?|\w[^\s,;:)]*(?=[,;:)]|$)))?",
    re.MULTILINE,
)
# What ONNX Runtime says of a guard, whose name is the reason (onnxplace/model/empty_axes.py).
_GUARD = re.compile(
    r"Non-zero status code returned while running Gather node\. "
    r"Name:'(ONNX Runtime ends .*? is empty) \(\d+\)' Status Message: .*"
)
# Arguments of Python whose names are not those of the options.
_ARGUMENTS = {
    "-o": "output", "--budget": "budget_seconds", "--custom-op-library": "custom_op_libraries", "--force": "force=True",
    "--no-cache": "cache=False", "--no-trial": "trial=False", "--start-timeout": "timeout",
}  # fmt: skip
_in_command = False


@contextmanager
def name_options() -> Iterator[None]:
    """Let errors name options rather than arguments of Python, for what the command line runs."""
    global _in_command
    before, _in_command = _in_command, True
    try:
        yield
    finally:
        _in_command = before


def name_arguments(text: str) -> str:
    """Return a text about options with the arguments of Python in their place.

    >>> print(name_arguments("raise --max-memory, try --placer m-etf, or omit --shape 'a b=8'; see `run --json`"))
    raise `max_memory`, try `placer="m-etf"`, or omit `shape={"a b": 8}`; see `run --json`
    """
    return _OPTION.sub(_name_argument, text)


def _name_argument(match: re.Match[str]) -> str:
    option, value = match["option"], (match["value"] or "").strip("'")
    if option is None:
        return match[0]
    name = _ARGUMENTS.get(option, option.lstrip("-").replace("-", "_"))
    if name == "shape" and (sizes := re.findall(r"([^=]+)=(\d+),?", value)):
        return "`shape={{{}}}`".format(", ".join(f'"{key}": {size}' for key, size in sizes))
    if re.fullmatch(r"[A-Z]*(\.\w+)?", value):  # none, or what stands for a value: F.npz
        return f"`{name}`"
    return f"`{name}={value}`" if value.isdecimal() else f'`{name}="{value}"`'


class OnnxplaceError(Exception):
    """The base of all errors that onnxplace raises on purpose.

    `code` is stable and documented in docs/errors.md. `where` names the node, value, file or device, and `hint` says
    what to try. The command line returns `exit_code`.

    >>> str(OnnxplaceError("X001", "it is broken", where="node 'left'"))
    "error[X001] node 'left': it is broken"
    """

    exit_code: ClassVar[int] = 4

    def __init__(self, code: str, message: str, *, where: str = "", hint: str = "") -> None:
        self.code = code
        self.message, self.where, self.hint = shorten(message), format_name(where), shorten(hint)
        super().__init__(str(self))

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        hint = f"\n  hint: {self.hint}" if self.hint else ""
        text = f"error[{self.code}] {place}{self.message}{hint}"
        return text if _in_command else name_arguments(text)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), where=self.where, hint=self.hint), (self.code, self.message)


class InputError(OnnxplaceError):
    """An error in the user's input."""

    exit_code = 2


class UsageError(InputError):
    """A name, option or combination that does not exist."""


class ArgumentError(UsageError, TypeError):
    """An argument of a Python function that does not exist, or has a wrong type."""


class ModelError(InputError):
    """A model that cannot be read, checked, bound or run."""


class FeedError(InputError):
    """Inputs whose names, shapes or types do not fit the model."""


class TargetError(InputError):
    """Devices or links that do not exist or contradict each other."""


class BundleError(InputError):
    """A bundle that is damaged, unsafe or written by a newer onnxplace."""


class InfeasibleError(OnnxplaceError):
    """No placement keeps every device within its memory."""

    exit_code = 3


class ExecutionError(OnnxplaceError):
    """A failure while running: a kernel, a full disk, a lost device."""


class RunTimeoutError(ExecutionError, TimeoutError):
    """A run without a result within its time limit."""


class BrokenPassError(OnnxplaceError):
    """A pass that does not do what it declares."""


class PluginError(OnnxplaceError):
    """A plugin that cannot be loaded; names its distribution."""


def format_one_line(problem: BaseException) -> str:
    r"""Return the message of an error in one line, a hint behind a semicolon.

    >>> format_one_line(ValueError("first\nsecond\n  hint: third"))
    'first second; hint: third'
    """
    return _GUARD.sub(r"\1", " ".join(str(problem).replace("\n  hint: ", "; hint: ").split()))


def shorten(text: str) -> str:
    """Return a text of bounded length, with unprintable characters escaped."""
    shown = escape_unprintable(text[: MAX_CHARACTERS + 1])
    return shown if len(shown) <= MAX_CHARACTERS else f"{shown[:MAX_CHARACTERS]}..."


def format_name(name: str) -> str:
    r"""Return a name or path within one readable line: escaped where unprintable, and shortened.

    >>> format_name("a\nb"), format_name(b"caf\xe9".decode(errors="surrogateescape"))
    ('a\\nb', 'caf\\udce9')
    """
    text, half = escape_unprintable(name).replace("\n", "\\n"), MAX_NAME_CHARACTERS // 2
    return text if len(text) <= MAX_NAME_CHARACTERS else f"{text[:half]}...{text[-half:]}"


def escape_unprintable(text: str) -> str:
    r"""Return a text with unprintable characters escaped, except for line ends.

    Names in files from strangers may hold control sequences, which a terminal would obey.

    >>> escape_unprintable("a\x1b[2J")
    'a\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode("ascii") for char in text
    )


def format_value(value: object) -> str:
    """Return a value as it appears in messages: shortened, and a text in quotes.

    >>> format_value("a" * 100)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa..."
    """
    if isinstance(value, str):
        value = value[: MAX_SHOWN + 1]
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits, lists in lists
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, in singular or plural.

    >>> format_count(0, "value"), format_count(1, "value")
    ('0 values', '1 value')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_names(names: Iterable[str], *, quoted: bool = True) -> str:
    """Return names separated by commas, at most ten.

    >>> format_names(["noise", "mask"])
    "'noise', 'mask'"
    """
    texts = [repr(name) if quoted else format_name(name) for name in names]
    more = f", and {len(texts) - MAX_LISTED} more" if len(texts) > MAX_LISTED else ""
    return ", ".join(texts[:MAX_LISTED]) + more


def suggest_nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that offers the nearest known name, or lists all.

    Case does not matter, nor does `_` for `-`.

    >>> suggest_nearest("m_eft", ["single", "m-etf"]), suggest_nearest("gpu:0", ["cpu:0", "cuda:0"])
    ("did you mean 'm-etf'?", "did you mean 'cuda:0'?")
    """
    names = list(known)
    if close := _find_nearest(name, names):
        return f"did you mean '{format_name(close)}'?"
    return f"known: {format_names(names, quoted=False)}"


def _find_nearest(name: str, names: list[str]) -> str | None:
    """Return the known name that was probably meant: of similar spelling, or the only one with this beginning."""
    normalized = _normalize(name)
    kind, colon, index = normalized.partition(":")
    known = {_normalize(candidate): candidate for candidate in reversed(names)}
    if kind in _ALIASES:
        return known.get(_ALIASES[kind] + colon + index)
    completions = [candidate for candidate in known if kind and candidate.startswith(normalized)]
    matches = completions if len(completions) == 1 else difflib.get_close_matches(normalized, known, n=1, cutoff=0.6)
    return known[matches[0]] if matches else None


def _normalize(name: object) -> str:
    """Return a name in lower case, with `-` for `_`."""
    return str(name).strip().lower().replace("_", "-")


class Figure(NamedTuple):
    """A time that a note compares with others, such as the step of one placer."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Diagnostic:
    """A note for the user: nothing failed."""

    code: str
    message: str
    where: str = ""
    hint: str = ""
    figures: tuple[Figure, ...] = ()
    """The times that the message compares; the first one is that of what was kept."""


class NoteWarning(RuntimeWarning):
    """A note of a session at work, as a warning: commands print the note, and Python shows it once."""

    def __init__(self, note: Diagnostic) -> None:
        super().__init__(f"{note.where}: {note.message}")
        self.note = note


class FallbackWarning(NoteWarning):
    """A device was lost while a session was open, and another one has taken over its segments."""
