"""Format times, sizes, and the lines with which objects show themselves."""

from __future__ import annotations

from collections.abc import Sequence

from onnxplace.errors import format_name


def format_milliseconds(seconds: float) -> str:
    """Format a time in ms, with three digits.

    >>> format_milliseconds(0.0123)
    '12.3 ms'
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def format_time(seconds: float) -> str:
    """Format a time in ms with three digits, below one in µs.

    >>> format_time(0.0123), format_time(0.0000451)
    ('12.3 ms', '45.1 µs')
    """
    return f"{seconds * 1e6:.3g} µs" if 0 < abs(seconds) < 0.9995e-3 else format_milliseconds(seconds)


def format_bytes(size: int) -> str:
    """Format an amount of memory.

    >>> format_bytes(3 << 20)
    '3.0 MiB'
    """
    if size < 2**10:
        return f"{size} B"
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def format_object(*lines: str) -> str:
    """Return the text of an object for `repr`: a line, and indented ones with details.

    >>> print(format_object("Target: 1 device", "cpu:0: 1 core"))
    Target: 1 device
      cpu:0: 1 core
    """
    return "\n  ".join(map(format_name, lines))


def list_first(texts: Sequence[str], most: int, noun: str = "more") -> list[str]:
    """Return the first texts, and after them how many more there are.

    >>> list_first(["a", "b", "c"], 1), list_first(["a"], 1)
    (['a', '2 more'], ['a'])
    """
    return [*texts[:most], f"{len(texts) - most} {noun}"] if len(texts) > most else [*texts]


def format_first(texts: Sequence[str], most: int = 3) -> str:
    """Return the first texts in one line, and how many more there are.

    >>> format_first(["a", "b", "c"], most=1)
    'a; and 2 more'
    """
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return "; ".join([*texts[:most], *more])
