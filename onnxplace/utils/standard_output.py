"""Standard output that belongs to this program alone."""

from __future__ import annotations

import os
import sys
from typing import Any


def keep_stdout() -> int:
    """Send what native libraries of this process print on stdout to stderr; Python's own output goes where it went.

    They write to the file descriptor 1, also when the process ends. Nothing changes where stdout or stderr is closed,
    or is that of a test.

    Returns:
        The file descriptor of Python's stdout from now on.
    """
    if sys.stdout is None or sys.stdout is not sys.__stdout__:
        return 1
    stream: Any = sys.stdout
    try:
        stream.flush()
        copy = os.dup(stream.fileno())
        os.dup2(2, stream.fileno())
    except (OSError, ValueError):
        return 1
    buffering = 1 if stream.line_buffering else -1
    sys.stdout = open(  # noqa: SIM115 - until the process ends
        copy, "w", buffering, encoding=stream.encoding, errors=stream.errors
    )
    return copy
