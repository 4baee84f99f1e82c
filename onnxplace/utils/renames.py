"""Renames that the standard library does not have: onto nothing, and two folders in exchange.

Linux has both as `renameat2`, on most of its file systems; elsewhere the functions return False and change nothing.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100
# The system, its file system, or a sandbox around it does not know the call or the flag.
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


def rename_new(source: Path, destination: Path) -> bool:
    """Rename at one stroke; raises FileExistsError if anything is at `destination`, even an empty folder.

    Returns False, with nothing changed, where the system has no such call.
    """
    if sys.platform == "win32":  # there a plain rename refuses what exists
        source.rename(destination)
        return True
    return _renameat2(source, destination, RENAME_NOREPLACE)


def exchange_names(first: Path, second: Path) -> bool:
    """Let two names change places at one stroke; raises FileNotFoundError if one of them is missing.

    Returns False, with nothing changed, where the system has no such call.
    """
    return _renameat2(first, second, RENAME_EXCHANGE)


def _renameat2(source: Path, destination: Path, flags: int) -> bool:
    """Call Linux's `renameat2`; raises OSError as `os.rename` does."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:  # a C library that is older than the call
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(destination), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(source), None, str(destination))
