"""The weights files of an open bundle, which may be cut or overwritten, or fail to be read, while it runs.

ONNX Runtime maps files, and keeps those parts mapped that it does not rewrite. A change of the file then changes
results, and the system ends a process with SIGBUS if it reads a page that is cut off, or that the disk does not give.

Nothing is copied, as that would take the memory that mapping saves. Instead, the end of each request looks whether its
files are as they were, which takes a microsecond. Another name, link or permission changes the time of a file's last
change, and so does writing to it and putting its time back: only then is the file read again. A handler of SIGBUS puts
zeros in the place of the mapping, so that the run goes on, and notes that the file is lost, so that its result is
discarded.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from io import FileIO
from pathlib import Path

from onnxplace.bundle.bundle import SEGMENTS_FOLDER, WEIGHTS_FILE, Bundle
from onnxplace.bundle.manifest import FileRecord
from onnxplace.errors import ExecutionError
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.kind_table import is_isolated

# Reading this many bytes takes hundreds of times as long as looking at their file.
MIN_WATCHED_BYTES = 1 << 20
# Of Linux, on x86 and ARM.
_MAP_FIXED, _SA_SIGINFO, _BUS_ADRERR = 0x10, 4, 2
_CODE_OFFSET, _ADDRESS_OFFSET = 8, 16  # in siginfo_t


class WatchedFile:
    """A weights file from now on; what was read before is not affected."""

    def __init__(self, path: Path, record: FileRecord) -> None:
        self.path, self._record, self._lock = path, record, threading.Lock()
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        status = os.fstat(self.descriptor)
        self._state, self._inode = (status.st_mtime_ns, record.bytes, status.st_ctime_ns), status.st_ino
        self.is_lost = False
        """Whether a run read zeros in its place."""

    def has_changed(self) -> bool:
        """Return whether its bytes may be others than they were, or cannot be read."""
        status = os.fstat(self.descriptor)
        state = (status.st_mtime_ns, status.st_size, status.st_ctime_ns)
        if state == self._state or self.is_lost:
            return self.is_lost
        with self._lock:
            is_same = state == self._state  # another thread was faster
            if not is_same and state[:2] == self._state[:2]:
                with suppress(OSError), open(self.descriptor, "rb", closefd=False) as file:
                    file.seek(0)
                    is_same = hashlib.file_digest(file, "sha256").hexdigest() == self._record.sha256
                self._state = state if is_same else self._state
            return not is_same

    def is_behind(self, inode: int, path: str) -> bool:
        """Return whether a mapping is one of this file; file systems in layers may show another inode."""
        return inode == self._inode or path == str(self.path)

    def describe_change(self) -> str:
        """Return what has happened to it."""
        if (size := os.fstat(self.descriptor).st_size) != (expected := self._record.bytes):
            return f"this file of weights was cut or overwritten while it was in use: {size} bytes, expected {expected}"
        reason = "could not be read" if self.is_lost else "was modified"
        return f"this file of weights {reason} while it was in use"


class WeightFiles:
    """The weights files of a bundle whose segments are open."""

    def __init__(self, bundle: Bundle, devices: Iterable[DeviceAddress]) -> None:
        self.bundle, manifest, name = bundle, bundle.manifest, f"{SEGMENTS_FOLDER}/{WEIGHTS_FILE}"
        records = {bundle.file(name): manifest.files[name]} if name in manifest.files else {}
        records |= {bundle.linked_file(link): record for link, record in manifest.linked.items()}
        self._are_read_elsewhere = bool(manifest.streams) or any(map(is_isolated, devices))
        self._files = {
            path: WatchedFile(path.resolve(), record)
            for path, record in records.items()
            if record.bytes >= MIN_WATCHED_BYTES or (record.bytes and manifest.streams)
        }
        descriptors = {file.descriptor: file for file in self._files.values()}
        _watched.update(descriptors)
        self.close = weakref.finalize(self, _forget, list(descriptors))
        self.close.atexit = False  # requests may still be in flight
        if self._files and sys.platform == "linux":
            _handle_lost_pages()

    def check(self) -> None:
        """Raise ExecutionError if results since the last call may be wrong, because a file has changed."""
        for file in self._files.values():
            if file.has_changed() and (file.is_lost or self._are_read_elsewhere or _is_mapped(file)):
                hint = "restore the file, or compile the model again; then open a new session"
                raise ExecutionError("X017", file.describe_change(), where=str(file.path), hint=hint)

    def open_again(self, path: Path) -> FileIO:
        """Open a file once more, to read it elsewhere; raises OSError if another one has its place."""
        file = FileIO(path)
        if not os.path.sameopenfile(file.fileno(), self._files[path].descriptor):
            file.close()
            raise OSError("the file was replaced while it was in use")
        return file


_watched: dict[int, WatchedFile] = {}
"""The watched files of all open bundles, by descriptor."""


def _forget(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        del _watched[descriptor]
        os.close(descriptor)


def _is_mapped(file: WatchedFile) -> bool:
    """Return whether this process maps a part of a file; true where the system does not say it."""
    return sys.platform != "linux" or any(file.is_behind(inode, path) for *_, inode, path in _list_mappings())


def _list_mappings() -> Iterator[tuple[int, int, int, str]]:
    """Yield the first and last address of each mapping of this process, and inode and path of its file."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            addresses, _, _, _, inode, *path = line.split(maxsplit=5)
            first, end = (int(item, 16) for item in addresses.split("-"))
            yield first, end, int(inode), "".join(path).rstrip("\n")


# ---------------------------------------------------------------------------------------------- the handler of SIGBUS


class _Action(ctypes.Structure):
    """The `struct sigaction` of Linux's C libraries."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * (1024 // (8 * ctypes.sizeof(ctypes.c_ulong)))),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@cache
def _handle_lost_pages() -> object:
    """Replace mappings of watched files when SIGBUS says that a page is lost; return what has to be kept alive.

    Only threads that compute read these mappings, in the middle of a kernel. They hold neither the interpreter nor a
    lock, so that the handler may be a function of Python.
    """
    library = ctypes.CDLL(None)
    map_memory = library.mmap
    map_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    map_memory.restype = ctypes.c_void_p
    previous, flags = _Action(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED

    def handle(_: int, information: int, __: int) -> None:
        is_replaced = False
        try:
            if ctypes.c_int.from_address(information + _CODE_OFFSET).value == _BUS_ADRERR:
                address = ctypes.c_void_p.from_address(information + _ADDRESS_OFFSET).value or 0
                is_replaced = replace(address)
        finally:
            if not is_replaced:  # the instruction is repeated, with what handled it before
                library.sigaction(signal.SIGBUS, ctypes.byref(previous), None)

    def replace(address: int) -> bool:
        first, end, inode, path = next(item for item in _list_mappings() if item[0] <= address < item[1])
        files = [file for file in list(_watched.values()) if file.is_behind(inode, path)]
        for file in files:
            file.is_lost = True  # before any thread can read zeros
        if files:
            map_memory(first, end - first, mmap.PROT_READ, flags, -1, 0)
        return bool(files) or not inode  # else another thread has just replaced it

    callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(handle)
    action = _Action(handler=ctypes.cast(callback, ctypes.c_void_p).value, flags=_SA_SIGINFO)
    library.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(previous))
    return callback
