"""Names of unfinished work, locked while its process lives, so that others can tell and remove what a dead one left.

A lease is a locked file `.onnxplace-<16 hexadecimal digits>` of random digits. What is unfinished is the lease itself
(a file that is renamed once it is complete), or beside it under its name with an ending. The system releases the lock
when the process ends, however that happens. Where files cannot be locked, nothing is ever removed.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NAME = re.compile(r"\.onnxplace-[0-9a-f]{16}")
OLD_SUFFIX = "old"
# How systems say that a folder cannot be renamed to where something is; an empty folder is replaced.
OCCUPIED_ERRORS = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
# What the lease of a folder says while that folder is moved in several steps; the name follows, as JSON.
_JOURNAL = b"onnxplace moves to "
# Names are longer nowhere, even with each character escaped.
_MAX_JOURNAL_BYTES = 8192


@dataclass(frozen=True)
class Lease:
    """A name that no other process takes, in a folder where something is to come."""

    path: Path
    """Of the file that is locked."""
    descriptor: int
    """Of the lock; a process that inherits it holds the lock as well. -1 where there are no locks."""

    def beside(self, ending: str) -> Path:
        """Return the path of something that belongs to the lease."""
        return self.path.with_name(f"{self.path.name}.{ending}")

    def temporary_folder(self) -> tempfile.TemporaryDirectory[str]:
        """Return a new folder that belongs to the lease and that only this user may read. Raises OSError."""
        return tempfile.TemporaryDirectory(prefix=f"{self.path.name}.", dir=self.path.parent)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return what a child has to inherit in order to hold the lease as long as it lives."""
        return () if self.descriptor < 0 else (self.descriptor,)

    def note_move(self, name: str) -> None:
        """Write down that `name`, in the same folder, is about to be moved aside, or has been claimed."""
        self.path.write_bytes(_JOURNAL + json.dumps(name).encode())

    def forget_move(self) -> None:
        """Write down that nothing is moved."""
        self.path.write_bytes(b"")


@dataclass(frozen=True)
class Swept:
    """Something that a process left when it was ended."""

    path: Path
    restored: bool
    """Whether it is a folder that was put back in its place; else it was removed."""


@contextmanager
def hold_lease(folder: Path) -> Iterator[Lease]:
    """Hold a lease in a folder; whatever has its name at the end is removed. Raises OSError."""
    lease = _create(folder)
    try:
        yield lease
    finally:
        try:
            _end(lease)
        except BaseException:  # Ctrl-C at this very moment
            _end(lease)
            raise
        finally:
            if lease.descriptor >= 0:
                os.close(lease.descriptor)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Give a folder for temporary files, which is removed at the end. Raises OSError."""
    with hold_lease(Path(tempfile.gettempdir())) as lease, lease.temporary_folder() as name:
        yield Path(name)


def sweep_leftovers(folder: Path) -> list[Swept]:
    """Remove what processes that ended left in a folder; a folder that one of them had moved aside is put back."""
    swept: list[Swept] = []
    with suppress(OSError):
        names = sorted(name for name in os.listdir(folder) if NAME.match(name))
        for name in filter(NAME.fullmatch, names):
            with suppress(OSError):
                belongings = [folder / other for other in names if other.startswith(f"{name}.")]
                swept += _sweep_lease(folder / name, belongings)
    return swept


def find_moved_aside(path: Path) -> Path | None:
    """Return where the folder is that belongs at `path`, if a process was ended while it was moved."""
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            old = path.with_name(f"{entry.name}.{OLD_SUFFIX}")
            if NAME.fullmatch(entry.name) and old.is_dir() and _journal(Path(entry.path)) == path.name:
                return old
    return None


def _create(folder: Path) -> Lease:
    """Make a lease, and lock it before anybody can take it for one that was left."""
    while True:
        path = folder / f".onnxplace-{os.urandom(8).hex()}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # the system applies the umask
        if sys.platform == "win32":  # where an open file cannot be renamed, and the standard library has no such lock
            os.close(descriptor)
            return Lease(path, -1)
        with suppress(OSError):  # a file system without locks
            _lock(descriptor, wait=True)
        if _is_at(descriptor, path):
            return Lease(path, descriptor)
        os.close(descriptor)  # another process, between the two calls, swept it


def _lock(descriptor: int, wait: bool) -> None:
    """Lock a file against all others; raises OSError if that cannot be."""
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one at a path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False


def _end(lease: Lease) -> None:
    """Remove a lease of ours and all that belongs to it; what cannot be removed now is swept later."""
    with suppress(OSError):
        _finish(lease.path, _belongings(lease.path.parent, lease.path.name))


def _belongings(folder: Path, name: str) -> list[Path]:
    with suppress(OSError):
        return [folder / other for other in os.listdir(folder) if other.startswith(f"{name}.")]
    return []


def _sweep_lease(path: Path, belongings: Iterable[Path]) -> list[Swept]:
    """Remove a lease with all that belongs to it, unless its process lives. Raises OSError."""
    about = path.lstat()
    if sys.platform == "win32" or not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
        return []
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        _lock(descriptor, wait=False)
        if not _is_at(descriptor, path):
            return []
        return _finish(path, belongings)
    finally:
        os.close(descriptor)


def _finish(path: Path, belongings: Iterable[Path]) -> list[Swept]:
    """End a lease: put back what was moved aside, if it is missing, and remove the rest. Raises OSError."""
    return [*_put_back(path), *_remove(path, belongings)]


def _put_back(path: Path) -> list[Swept]:
    """Put back the folder that the process of a lease had moved aside, unless another is in its place."""
    if (name := _journal(path)) is None:
        return []
    old, place = path.with_name(f"{path.name}.{OLD_SUFFIX}"), path.with_name(name)
    if not _is_own_folder(old):  # nothing was moved, or what is there is none of ours: a lease may come from anybody
        with suppress(OSError):  # the process claimed the place with an empty folder; one that holds anything stays
            place.rmdir()
        return []
    # Only where nothing is, or the empty folder with which the process claimed the place: a folder replaces no other.
    if os.path.lexists(place) and not _is_own_folder(place):
        return []
    try:
        old.rename(place)
    except OSError as problem:
        if problem.errno in OCCUPIED_ERRORS:  # by the new one
            return []
        raise
    return [Swept(place, restored=True)]


def _is_own_folder(path: Path) -> bool:
    """Return whether there is a folder, not a link to one, of this user's."""
    with suppress(OSError):
        about = path.lstat()
        return stat.S_ISDIR(about.st_mode) and (sys.platform == "win32" or about.st_uid == os.geteuid())
    return False


def _journal(path: Path) -> str | None:
    """Return the name that the process of a lease was about to move; None if none."""
    with suppress(OSError, ValueError), _open_regular(path) as stream:
        data = stream.read(_MAX_JOURNAL_BYTES)
        name = json.loads(data[len(_JOURNAL) :]) if data.startswith(_JOURNAL) else None
        if isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", ".."):
            return name
    return None


def _open_regular(path: Path) -> io.FileIO:
    """Open a file that anybody may have put there; raises OSError for what is no regular file, and never waits."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return io.FileIO(descriptor)


def _remove(path: Path, belongings: Iterable[Path]) -> list[Swept]:
    """Remove a lease, last of all, and what belongs to it; returns what was removed."""
    swept: list[Swept] = []
    for item in belongings:
        if not os.path.lexists(item):
            continue
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item, ignore_errors=True)
        else:
            with suppress(OSError):
                item.unlink()
        if os.path.lexists(item):  # the lease stays with it, so that it is tried again
            return swept
        swept.append(Swept(item, restored=False))
    with suppress(FileNotFoundError):
        path.unlink()
        swept.append(Swept(path, restored=False))
    return swept
