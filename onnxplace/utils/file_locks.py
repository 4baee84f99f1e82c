"""File locks: locked names for unfinished work, so that leftovers of dead processes are recognized and removed.

A file lock is a locked file `.onnxplace-<16 random hexadecimal digits>`. The unfinished work is that file itself (it is
renamed once it is complete), or has its name and an ending, in the same folder. The system releases the lock
when the process ends, for whatever reason. On file systems without locks, nothing is ever removed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NAME = re.compile(r"\.onnxplace-[0-9a-f]{16}")
# Between the lock and the former name of a folder that was moved aside.
_ASIDE = ".old."
# Errors of a rename onto an existing file or folder; only an empty folder is replaced.
OCCUPIED_ERRORS = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@dataclass(frozen=True)
class FileLock:
    """A name in a folder, which no other process takes, for work in progress."""

    path: Path
    """The locked file."""
    descriptor: int
    """The lock's file descriptor, which child processes may inherit; -1 on systems without locks."""

    def path_with_ending(self, ending: str) -> Path:
        """Return the path with this ending, which belongs to the lock."""
        return self.path.with_name(f"{self.path.name}.{ending}")

    def path_aside(self, path: Path) -> Path:
        """Return where a folder is moved aside, from where the end of the lock or a later sweep puts it back."""
        return self.path.with_name(f"{self.path.name}{_ASIDE}{path.name}")

    def temporary_folder(self) -> tempfile.TemporaryDirectory[str]:
        """Return a new folder of the lock, which only this user may read. Raises OSError."""
        return tempfile.TemporaryDirectory(prefix=f"{self.path.name}.", dir=self.path.parent)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the file descriptors with which a child process holds the lock, too."""
        return () if self.descriptor < 0 else (self.descriptor,)


@dataclass(frozen=True)
class Leftover:
    """A leftover of a process, which was removed or put back."""

    path: Path
    restored: bool
    """Whether it is a folder that was put back; else it was removed."""


@contextmanager
def hold_file_lock(folder: Path) -> Iterator[FileLock]:
    """Hold a lock in a folder; at the end, all that belongs to it is removed. Raises OSError."""
    lock = _create_lock(folder)
    try:
        yield lock
    finally:
        try:
            _end_lock(lock)
        except BaseException:  # Ctrl-C may interrupt even this
            _end_lock(lock)
            raise
        finally:
            if lock.descriptor >= 0:
                os.close(lock.descriptor)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder for temporary files, which is removed at the end. Raises OSError.

    >>> with temporary_folder() as folder:
    ...     folder.is_dir()
    True
    """
    with hold_file_lock(Path(tempfile.gettempdir())) as lock, lock.temporary_folder() as name:
        yield Path(name)


def sweep_leftovers(folder: Path) -> list[Leftover]:
    """Remove the leftovers of dead processes in a folder, and put back folders that they moved aside."""
    swept: list[Leftover] = []
    with suppress(OSError):
        for name in sorted(filter(NAME.fullmatch, os.listdir(folder))):
            with suppress(OSError):
                swept += _sweep_lock(folder / name)
    return swept


def find_moved_aside(path: Path) -> Path | None:
    """Return the current path of a folder that a dead process had moved aside from `path`; None if none."""
    aside = re.compile(NAME.pattern + re.escape(f"{_ASIDE}{path.name}"))
    with suppress(OSError):
        return next((item for item in path.parent.iterdir() if aside.fullmatch(item.name) and item.is_dir()), None)
    return None


def _create_lock(folder: Path) -> FileLock:
    """Create a lock, and lock it before another process takes it for a leftover."""
    while True:
        path = folder / f".onnxplace-{os.urandom(8).hex()}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # the system applies the umask
        if sys.platform == "win32":  # where an open file cannot be renamed, and the standard library has no such lock
            os.close(descriptor)
            return FileLock(path, -1)
        with suppress(OSError):  # a file system without locks
            _lock(descriptor, wait=True)
        if _is_at(descriptor, path):
            return FileLock(path, descriptor)
        os.close(descriptor)  # another process swept it before it was locked


def _lock(descriptor: int, wait: bool) -> None:
    """Lock a file exclusively; raises OSError if it cannot be locked."""
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still at a path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False


def _end_lock(lock: FileLock) -> None:
    """Remove this process's lock and all that belongs to it; a later sweep removes what resists."""
    with suppress(OSError):
        _clean_up(lock.path)


def _sweep_lock(path: Path) -> list[Leftover]:
    """Clean up after a lock unless its process lives. Raises OSError."""
    status = path.lstat()
    if sys.platform == "win32" or not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return []
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        _lock(descriptor, wait=False)
        return _clean_up(path) if _is_at(descriptor, path) else []
    finally:
        os.close(descriptor)


def _clean_up(path: Path) -> list[Leftover]:
    """Put back folders that were moved aside, if they are missing, and remove the rest. Raises OSError."""
    belongings, aside = sorted(path.parent.glob(f"{path.name}.*")), f"{path.name}{_ASIDE}"
    restored = [_put_back(item, aside) for item in belongings if item.name.startswith(aside)]
    return [*filter(None, restored), *_remove(path, belongings)]


def _put_back(old: Path, aside: str) -> Leftover | None:
    """Put back a folder that was moved aside, unless something else is in its place; any user may have put it there."""
    name = old.name.removeprefix(aside)
    destination = old.parent / name
    if (
        name in ("", ".", "..")
        or not _is_own_folder(old)
        or (os.path.lexists(destination) and not _is_own_folder(destination))
    ):
        return None
    try:
        old.rename(destination)  # replaces an empty folder only
    except OSError as problem:
        if problem.errno in OCCUPIED_ERRORS:  # by the new folder
            return None
        raise
    return Leftover(destination, restored=True)


def _is_own_folder(path: Path) -> bool:
    """Return whether a path is a folder of this user, and not a link to one."""
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISDIR(status.st_mode) and (sys.platform == "win32" or status.st_uid == os.geteuid())
    return False


def _remove(path: Path, belongings: Sequence[Path]) -> list[Leftover]:
    """Remove all that belongs to a lock, and the lock last; returns what was removed."""
    swept: list[Leftover] = []
    for item in belongings:
        if not os.path.lexists(item):
            continue
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item, ignore_errors=True)
        else:
            with suppress(OSError):
                item.unlink()
        if os.path.lexists(item):  # keep the lock, so that the next sweep tries again
            return swept
        swept.append(Leftover(item, restored=False))
    with suppress(FileNotFoundError):
        path.unlink()
        swept.append(Leftover(path, restored=False))
    return swept
