"""What can go wrong, as one tree.

    OnnxplaceError
    |-- InputError            exit 2: the user's model, bundle, feeds, options or files
    |   |-- UsageError        an unknown name, a bad option value, a pipeline in the wrong order
    |   |-- ModelError        a model that cannot be read, checked, bound or run
    |   |-- FeedError         inputs that do not fit the model
    |   |-- TargetError       devices or links that do not exist or contradict each other
    |   `-- BundleError       a bundle that is damaged, unsafe or too new
    |-- InfeasibleError       exit 3: no placement fits
    |-- ExecutionError        exit 4: a failure while running
    |   `-- RunTimeoutError   no result in time; also Python's TimeoutError
    |-- BrokenPassError       exit 4: a pass that does not keep its own declaration
    `-- PluginError           exit 4: a plugin that cannot be loaded

Every error names a code, the place, what is wrong there, and what to try.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

# Longer lists of names help nobody.
MAX_LISTED = 10
# Longer texts than this say no more of what is wrong in them.
MAX_SHOWN = 60
# Of a message, place or hint: a screen full. What users give, and what others say, may be much longer.
MAX_CHARACTERS = 4096
# Names that people know from elsewhere; by spelling alone, the nearest to `gpu` would be `cpu`.
_ELSEWHERE = {"gpu": "cuda"}


class OnnxplaceError(Exception):
    """Anything onnxplace raises on purpose.

    `code` is stable and documented in docs/errors.md, `where` names the node, value, file or device, `hint`
    says what to try; `exit_code` is what the command line returns.
    """

    exit_code: ClassVar[int] = 4

    def __init__(self, code: str, message: str, *, where: str = "", hint: str = "") -> None:
        self.code = code
        self.message, self.where, self.hint = (_cut(text) for text in (message, where, hint))
        super().__init__(str(self))

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        hint = f"\n  hint: {self.hint}" if self.hint else ""
        return f"error[{self.code}] {place}{self.message}{hint}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.code, self.message, self.where, self.hint)


def _rebuild(kind: type[OnnxplaceError], code: str, message: str, where: str, hint: str) -> OnnxplaceError:
    return kind(code, message, where=where, hint=hint)


class InputError(OnnxplaceError):
    """Something the user gave is wrong."""

    exit_code = 2


class UsageError(InputError):
    """A name, option or combination that does not exist."""


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
    """A run that gave no result in the time it was given."""


class BrokenPassError(OnnxplaceError):
    """A pass that does not do what it declares."""


class PluginError(OnnxplaceError):
    """A plugin that cannot be loaded; names the distribution it came from."""


def one_line(problem: BaseException) -> str:
    """Return what an error says, in one line."""
    return " ".join(str(problem).split())


def _cut(text: str) -> str:
    return printable(text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}...")


def printable(text: str) -> str:
    r"""Return a text that a terminal shows as it is: names in files of strangers may hold anything.

    >>> printable("a\x1b[2J")
    'a\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode("ascii") for char in text
    )


def shown(value: object) -> str:
    """Return a value as a message shows it: a text in quotes, what is long cut.

    >>> shown("a" * 100)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa..."
    """
    if isinstance(value, str):
        value = value[: MAX_SHOWN + 1]
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits, lists in lists
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def counted(number: int, noun: str) -> str:
    """Return how many of something there are.

    >>> counted(0, "value"), counted(1, "value")
    ('0 values', '1 value')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(names: Iterable[str]) -> str:
    """Return names as people list them, at most ten of them.

    >>> listed(["noise", "mask"])
    "'noise', 'mask'"
    """
    quoted = [repr(name) for name in names]
    more = f", and {len(quoted) - MAX_LISTED} more" if len(quoted) > MAX_LISTED else ""
    return ", ".join(quoted[:MAX_LISTED]) + more


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that offers the nearest known name, or lists them; case and `_` for `-` count for nothing.

    >>> nearest("m_eft", ["single", "m-etf"]), nearest("gpu:0", ["cpu:0", "cuda:0"])
    ("did you mean 'm-etf'?", "did you mean 'cuda:0'?")
    """
    names = list(known)
    if close := _closest(name, names):
        return f"did you mean '{close}'?"
    more = f", and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return "known: " + ", ".join(names[:MAX_LISTED]) + more


def _closest(name: str, names: list[str]) -> str | None:
    """Return the known name that was probably meant: spelt alike, or the only one that begins so."""
    kind, colon, rest = _plain(name).partition(":")
    plain = {_plain(each): each for each in reversed(names)}
    if kind in _ELSEWHERE:
        return plain.get(_ELSEWHERE[kind] + colon + rest)
    begun = [each for each in plain if kind and each.startswith(_plain(name))]
    close = begun if len(begun) == 1 else difflib.get_close_matches(_plain(name), plain, n=1, cutoff=0.6)
    return plain[close[0]] if close else None


def _plain(name: object) -> str:
    return str(name).strip().lower().replace("_", "-")


@dataclass(frozen=True)
class Diagnostic:
    """Something the user should know although nothing failed."""

    code: str
    message: str
    where: str = ""
    hint: str = ""
