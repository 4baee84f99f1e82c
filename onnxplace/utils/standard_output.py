"""Standard output that belongs to this program alone."""

from __future__ import annotations

import os
import sys


def keep_stdout() -> int:
    """Send what native libraries of this process print on stdout to stderr; Python's own output goes where it went.

    They write to the file descriptor 1, also when the process ends. Nothing changes where stdout or stderr is closed,
    or is that of a test.

    Returns:
        The file descriptor of Python's stdout from now on.
    """
    stream = sys.stdout
    try:
        if stream.fileno() != 1:
            return 1
        stream.flush()
        copy = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError):
        return 1
    buffering = 1 if stream.line_buffering else -1
    sys.stdout = sys.__stdout__ = open(  # noqa: SIM115 - until the process ends
        copy, "w", buffering, encoding=stream.encoding, errors=stream.errors
    )
    return copy
