"""A cache of measurements on this machine.

There is one file for each model, device class and versions.

The files are in `$ONNXPLACE_CACHE_DIR` if it is set, else in the folder `onnxplace` of the user's cache
(`$XDG_CACHE_HOME` or `~/.cache`, `~/Library/Caches`, `%LOCALAPPDATA%`). They are replaced as a whole, so that processes
may share them. A damaged file counts as absent and is removed. Beyond 256 files, the oldest are removed. What was
measured while the machine was slower than it is now is measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace._version import __version__
from onnxplace.errors import OnnxplaceError
from onnxplace.machine.repeated_runs import MAX_SLOWDOWN, find_least_reference_seconds
from onnxplace.utils.control_groups import find_core_limit
from onnxplace.utils.files import write_file

# Part of every key, next to our version: raise it when the measurements, or their format, change.
VERSION = 2
# The field with the time of the reference loop in the process that measured.
_REFERENCE = "reference_seconds"
# The oldest files beyond this number are removed.
MAX_FILES = 256
# Largest size of a file, enough for a million nodes.
MAX_FILE_BYTES = 1 << 27
# A file dated further in the future counts as old: a wrong clock dated it.
MAX_AHEAD_SECONDS = 60.0


@dataclass(frozen=True)
class Contents:
    """Place and size of the cache."""

    folder: Path
    files: int
    size_bytes: int


def folder() -> Path:
    """Return the folder of the cache, which need not exist."""
    if configured := os.environ.get("ONNXPLACE_CACHE_DIR"):
        return Path(configured) / "costs"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or _find_home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = _find_home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or _find_home() / ".cache")
    return base / "onnxplace" / "costs"


def _find_home() -> Path:
    """Return the user's folder, or else one for temporary files."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir())


def contents() -> Contents:
    """Return the place and size of the cache."""
    sizes = [size for _, _, size in _list_files()]
    return Contents(folder(), len(sizes), sum(sizes))


def key(parts: Iterable[str | bytes]) -> str:
    """Return the key of a measurement that these parts describe.

    The order of the parts matters. Below a core, the quota of the container does too: what is measured contains it.
    """
    digest = hashlib.sha256(f"{__version__} {VERSION} {min(find_core_limit(), 1):.2g}".encode())
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:40]


def described(value: Any) -> str:
    """Return the part of a key for an input value.

    It depends on type, shape and all elements.
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(described, value))}]"
    if isinstance(value, np.ndarray):
        data = repr(value.tolist()).encode() if value.dtype == object else np.ascontiguousarray(value).tobytes()
        return f"{value.dtype}{value.shape} {key([data])}"
    return repr(value)


def file_described(path: str) -> str:
    """Return the part of a key for a file.

    It has path, size and times of the file.
    """
    try:
        status = os.stat(path)
    except OSError:
        return path
    return f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def read(name: str) -> dict[str, Any] | None:
    """Return the entry of a key; None if there is none, or this machine was slower when it was measured.

    Raises ValueError with the reason if the entry cannot be read or is damaged. A damaged entry is removed.
    """
    path = folder() / f"{name}.json"
    try:
        data = _read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem}") from None
    try:
        entry = json.loads(data) if data is not None else None
    except (ValueError, RecursionError) as problem:
        raise damaged(name, str(problem)) from None
    if not isinstance(entry, dict) or entry.get("key") != name:
        raise damaged(name, "its content does not match its name")
    if not entry.pop(_REFERENCE, 0.0) <= MAX_SLOWDOWN * find_least_reference_seconds():
        return None
    _used.add(name)
    with suppress(OSError):  # the time of use: the least recently used file is removed first
        os.utime(path)
    return entry


_used: set[str] = set()


def forget_used() -> None:
    """Remove the entries that this process has read or written: a later measurement contradicts one of them."""
    while _used:
        _remove(folder() / f"{_used.pop()}.json")


def damaged(name: str, reason: str) -> ValueError:
    """Remove the entry of a key, and return the error."""
    path = folder() / f"{name}.json"
    _remove(path)
    return ValueError(f"{path} is damaged: {reason}")


def _read_regular(path: Path) -> bytes | None:
    """Return the bytes of a regular file.

    Returns None for large files, and for pipes and devices, which may never end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        return None
    with path.open("rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    return data if len(data) <= MAX_FILE_BYTES else None


def _remove(path: Path) -> None:
    """Remove a file, link, pipe or empty folder, if possible."""
    with suppress(OSError):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def write(name: str, data: dict[str, Any]) -> None:
    """Store plain data under a key.

    Raises ValueError with the reason if that fails.
    """
    path = folder() / f"{name}.json"
    text = json.dumps({"key": name, _REFERENCE: find_least_reference_seconds(), **data}).encode()
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"{path} would be larger than {MAX_FILE_BYTES} bytes")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or not path.is_file():
            _remove(path)  # so that nothing is written through a link
        write_file(path, lambda stream: stream.write(text))
    except OnnxplaceError as problem:
        raise ValueError(f"{path}: {problem.message}") from None
    except OSError as problem:
        raise ValueError(f"{path} cannot be written: {problem.strerror}") from None
    _used.add(name)
    _remove_oldest(path)


def _remove_oldest(newest: Path) -> None:
    """Remove the least recently used files beyond `MAX_FILES`, except `newest`."""
    latest = time.time() + MAX_AHEAD_SECONDS
    others = sorted((used <= latest, used, file) for used, file, _ in _list_files() if file != newest)
    for _, _, file in others[: max(len(others) + 1 - MAX_FILES, 0)]:
        _remove(file)


def _list_files() -> list[tuple[float, Path, int]]:
    """Return (time of last use, path, bytes) for each file."""
    files = []
    with suppress(OSError):
        for path in folder().glob("*.json"):
            with suppress(OSError):  # another process removed it
                status = path.lstat()
                files.append((status.st_mtime, path, status.st_size))
    return files


@cache
def processor() -> str:
    """Return a description of the processor with its features.

    Processors of one name may differ in these.
    """
    names = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "CPU part", "Features")
    properties: dict[str, str] = {}
    with suppress(OSError, UnicodeDecodeError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                properties.setdefault(name.strip(), value.strip())
    return json.dumps(properties) if properties else f"{platform.machine()} {platform.processor()}"
