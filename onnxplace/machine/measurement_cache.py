"""What was measured here before, kept for this user: a file per model, class of device and versions.

In `$ONNXPLACE_CACHE_DIR` if it is set, else in the folder `onnxplace` of the user's cache (`$XDG_CACHE_HOME` or
`~/.cache`, `~/Library/Caches`, `%LOCALAPPDATA%`). Files are replaced as a whole, so that processes may share them; one
that is damaged counts as not there and is removed. The oldest are removed beyond 256 files.
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
from onnxplace.utils import write_file

# Counts in every key, as our version does: raise it when what is measured, or how it is kept, changes.
VERSION = 1
MAX_FILES = 256
# Of one file: more than a million nodes.
MAX_FILE_BYTES = 1 << 27
# A file dated later than this in the future was not used last, but by a clock that was wrong.
AHEAD_SECONDS = 60.0


@dataclass(frozen=True)
class Contents:
    """What the cache holds."""

    folder: Path
    files: int
    size_bytes: int


def folder() -> Path:
    """Return where the cache is; it need not exist."""
    if given := os.environ.get("ONNXPLACE_CACHE_DIR"):
        return Path(given) / "costs"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or _home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = _home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache")
    return base / "onnxplace" / "costs"


def _home() -> Path:
    """Return the user's folder; where there is none, one for what need not last."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir())


def contents() -> Contents:
    """Return how much the cache holds."""
    sizes = [size for _, _, size in _files()]
    return Contents(folder(), len(sizes), sum(sizes))


def key(parts: Iterable[str | bytes]) -> str:
    """Return the key of what is described by these parts, in this order, as this onnxplace measures it."""
    digest = hashlib.sha256(f"{__version__} {VERSION}".encode())
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:40]


def described(value: Any) -> str:
    """Return what counts in a key of a value that is fed: all of it."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(described, value))}]"
    if isinstance(value, np.ndarray):
        data = repr(value.tolist()).encode() if value.dtype == object else np.ascontiguousarray(value).tobytes()
        return f"{value.dtype}{value.shape} {key([data])}"
    return repr(value)


def file_described(path: str) -> str:
    """Return what counts in a key of a file: where it is, and whether it is another one than before."""
    try:
        about = os.stat(path)
    except OSError:
        return path
    return f"{path} {about.st_size} {about.st_mtime_ns}"


def read(name: str) -> dict[str, Any] | None:
    """Return what is kept under a key; None if nothing is.

    Raises ValueError, saying what, if it cannot be read or is damaged; what is damaged is removed.
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
        raise damaged(name, "it is not what its name says")
    with suppress(OSError):  # so that what is used is not what is removed first
        os.utime(path)
    return entry


def damaged(name: str, reason: str) -> ValueError:
    """Remove what is kept under a key, and return the error that says so."""
    path = folder() / f"{name}.json"
    _remove(path)
    return ValueError(f"{path} is damaged: {reason}")


def _read_regular(path: Path) -> bytes | None:
    """Return what a file holds; None if it is too large or no file: a pipe would never end, nor would some devices."""
    if not stat.S_ISREG(path.stat().st_mode):
        return None
    with path.open("rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    return data if len(data) <= MAX_FILE_BYTES else None


def _remove(path: Path) -> None:
    """Remove a file, a link, a pipe or an empty folder, as far as that can be."""
    with suppress(OSError):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def write(name: str, data: dict[str, Any]) -> None:
    """Keep plain data under a key; raises ValueError, saying why, if that cannot be."""
    path = folder() / f"{name}.json"
    text = json.dumps({"key": name, **data}).encode()
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"{path} would be larger than {MAX_FILE_BYTES} bytes")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or not path.is_file():
            _remove(path)  # never written through
        write_file(path, lambda stream: stream.write(text))
    except OnnxplaceError as problem:
        raise ValueError(f"{path}: {problem.message}") from None
    except OSError as problem:
        raise ValueError(f"{path} cannot be written: {problem.strerror}") from None
    latest = time.time() + AHEAD_SECONDS
    others = sorted((used <= latest, used, other) for used, other, _ in _files() if other != path)
    for _, _, old in others[: max(len(others) + 1 - MAX_FILES, 0)]:
        _remove(old)


def _files() -> list[tuple[float, Path, int]]:
    """Return when each file was last used, the file, and its bytes."""
    files = []
    with suppress(OSError):
        for path in folder().glob("*.json"):
            with suppress(OSError):  # removed meanwhile
                about = path.lstat()
                files.append((about.st_mtime, path, about.st_size))
    return files


@cache
def processor() -> str:
    """Return which processor this is, as precisely as the system says: two of one name may differ in what they can."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "CPU part", "Features")
    found: dict[str, str] = {}
    with suppress(OSError, UnicodeDecodeError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                found.setdefault(name.strip(), value.strip())
    return json.dumps(found) if found else f"{platform.machine()} {platform.processor()}"
