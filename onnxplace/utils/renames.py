"""Renames that the standard library does not have: without replacing, and as an exchange.

Linux has both as `renameat2`, on most file systems. Elsewhere the functions return False and change nothing.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

# From <linux/fs.h>.
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
# From <fcntl.h>: relative paths start at the current folder.
_AT_FDCWD = -100
# The kernel, the file system or a sandbox does not support the call or the flag.
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


def rename_new(source: Path, destination: Path) -> bool:
    """Rename atomically; raises FileExistsError if `destination` exists, even as an empty folder.

    Returns False, without a change, if the system does not support it.
    """
    if sys.platform == "win32":  # a plain rename never replaces there
        source.rename(destination)
        return True
    return _renameat2(source, destination, RENAME_NOREPLACE)


def exchange_names(first: Path, second: Path) -> bool:
    """Exchange two names atomically; raises FileNotFoundError if one is missing.

    Returns False, without a change, if the system does not support it.
    """
    return _renameat2(first, second, RENAME_EXCHANGE)


def _renameat2(source: Path, destination: Path, flags: int) -> bool:
    """Call Linux's `renameat2`; returns False if it is not supported, and raises OSError as `os.rename` does."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:  # the C library is older than the call
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(destination), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(source), None, str(destination))
