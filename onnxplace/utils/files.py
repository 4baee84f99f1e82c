"""Write files whole or not at all; read the small files that users give, with errors that name the file."""

from __future__ import annotations

import errno
import io
import json
import os
import select
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from onnxplace.errors import ExecutionError, InputError, OnnxplaceError, UsageError
from onnxplace.utils.leases import hold_lease

# A cost file of a million nodes has about as much. Models, weights and arrays are read by other means.
MAX_TEXT_BYTES = 256 << 20
# How long to wait for a program to open the other end of a pipe. Once one has, it may take as long as it likes.
PIPE_SECONDS = 2.0
_PIECE_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Longer paths are shown without their middle.
_MAX_SHOWN = 300


def path_text(path: str | os.PathLike[str]) -> str:
    r"""Return a path as one readable line: escaped where it is not printable, and not too long.

    >>> path_text("a\nb"), path_text(b"caf\xe9".decode(errors="surrogateescape"))
    ('a\\nb', 'caf\\udce9')
    """
    text = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in os.fspath(path)
    )
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN // 2]}...{text[-_MAX_SHOWN // 2 :]}"


def is_full(problem: OSError) -> bool:
    """Return whether a file system has no room, or a limit of the user's or the process's was reached."""
    return problem.errno in _FULL


def disk_error(problem: OSError, where: str) -> OnnxplaceError:
    """Return the error for a file system that refuses: exit 4, with advice where it is full."""
    if is_full(problem):
        hint = "free some space, or choose another -o (for temporary files, another TMPDIR)"
        return ExecutionError("E001", "no space left", where=where, hint=hint)
    return ExecutionError(
        "E002", f"cannot be written: {problem.strerror or problem}", where=where, hint="check the place"
    )


def cannot_write_error(problem: OSError | ValueError | str, path: Path) -> UsageError:
    """Return the error for a place that the user chose and where nothing can be written."""
    reason = (problem.strerror or problem) if isinstance(problem, OSError) else problem
    return UsageError("U032", f"cannot write there: {reason}", where=path_text(path), hint="choose another place")


def require_name(path: Path) -> None:
    """Raise UsageError unless a path can be written to a manifest and handed to ONNX Runtime."""
    if "\0" in os.fspath(path):
        raise cannot_write_error("embedded null byte", path)
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise cannot_write_error("expected a name in UTF-8", path) from None


def require_place(path: Path, *inputs: Path) -> None:
    """Raise UsageError if a file cannot be written there: before the work, not after it.

    `inputs` are files, and bundles, that the same command reads: it does not write over them.
    """
    require_name(path)
    try:
        for other in inputs:
            inside = other.is_dir() and path.resolve().is_relative_to(other.resolve())
            if inside or (path.exists() and other.exists() and path.samefile(other)):
                raise cannot_write_error(f"it is {'in ' if inside else ''}{path_text(other)}, which is read", path)
        about = path.stat() if path.exists() else None
        folder = path.absolute().parent
        if about is not None and stat.S_ISDIR(about.st_mode):
            reason = "it is a folder"
        elif not folder.is_dir():
            reason = f"there is no folder {path_text(folder)}"
        elif about is not None and not stat.S_ISREG(about.st_mode):  # a device, or a pipe
            return
        elif not os.access(folder, os.W_OK):
            reason = f"{path_text(folder)} cannot be written to"
        else:
            return
    except OSError as problem:
        raise cannot_write_error(problem, path) from None
    raise cannot_write_error(reason, path)


def write_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write a file through a temporary one beside it; raises UsageError or ExecutionError naming it.

    A link is followed; what is no regular file (a device, a pipe) is written to, never replaced.
    """
    try:
        require_name(path)
        path = path.resolve() if path.is_symlink() else path
        if path.exists() and not path.is_file():
            with _open_existing(path) as stream:
                _fill(stream, fill)
            return
    except OSError as problem:
        raise cannot_write_error(problem, path) from None
    try:
        with hold_lease(path.parent) as lease:
            with lease.path.open("wb") as stream:
                fill(stream)
            lease.path.replace(path)
    except OSError as problem:
        raise disk_error(problem, path_text(path)) if is_full(problem) else cannot_write_error(problem, path) from None


def read_json(path: str | Path, code: str, what: str) -> Any:
    """Read a JSON file; raises InputError with `code`, naming the file and `what` it should have been."""
    return parse_json(read_bytes(path, code), code, what, path_text(path))


def read_text(path: str | Path, code: str, what: str, encoding: str = "utf-8") -> str:
    """Read a text; raises InputError with `code`, naming the file and `what` it should have been."""
    try:
        return read_bytes(path, code).decode(encoding)
    except UnicodeDecodeError:
        raise InputError(code, f"not {what}: it is a binary file", where=path_text(path)) from None


def read_bytes(path: str | Path, code: str, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Read a file, or what comes through a pipe, whole; raises InputError with `code`, naming it.

    Waits for a program that has the other end of a pipe open. What is neither file nor pipe, or more than
    `max_bytes`, is refused.
    """
    try:
        with open_input(path, code, pipes=True) as stream:
            about = os.fstat(stream.fileno())
            if about.st_size > max_bytes:
                raise _too_large(path, code, max_bytes, f"{about.st_size} bytes")
            data = _read_up_to(stream, max_bytes + 1, is_pipe=stat.S_ISFIFO(about.st_mode))
    except OSError as problem:
        raise InputError(code, f"it cannot be read: {problem.strerror or problem}", where=path_text(path)) from None
    if data is None:
        hint = "start the program that writes to it first"
        raise InputError(code, "it is a pipe to which nothing is written", where=path_text(path), hint=hint)
    if len(data) > max_bytes:
        raise _too_large(path, code, max_bytes, "more")
    return data


def open_input(path: str | Path, code: str, *, pipes: bool = False) -> io.FileIO:
    """Open a file that the user named, without waiting; raises InputError with `code` for what is no file.

    A pipe is opened with `pipes` only, and does not block then.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise InputError(code, "there is no such file", where=path_text(path)) from None
    except (OSError, ValueError) as problem:
        if sys.platform == "win32" and os.path.isdir(path):
            raise InputError(code, "it is a folder, not a file", where=path_text(path)) from None
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise InputError(code, f"it cannot be read: {reason}", where=path_text(path)) from None
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind) or (pipes and stat.S_ISFIFO(kind)):
        return io.FileIO(descriptor)
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise InputError(code, "it is a folder, not a file", where=path_text(path))
    raise InputError(
        code,
        f"expected a file, got a {'pipe' if stat.S_ISFIFO(kind) else 'device'}",
        where=path_text(path),
        hint="write it to a file first, and name that",
    )


def parse_json(data: bytes | str, code: str, what: str, where: str) -> Any:
    """Return what JSON text says; raises InputError with `code`, also where one object has a key twice."""
    try:
        return json.loads(data, object_pairs_hook=_once)
    except UnicodeDecodeError:
        reason = "it is a binary file"
    except json.JSONDecodeError as problem:
        reason = f"no JSON at line {problem.lineno}, column {problem.colno}: {problem.msg}" if data else "it is empty"
    except ValueError as problem:
        reason = str(problem)
    except RecursionError:
        reason = "it is nested too deeply"
    raise InputError(code, f"not {what}: {reason}", where=where)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raises ValueError for a key that it has twice, of which Python would drop one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        inside = next((f" in the object whose {key} is {found[key]!r}" for key in ("id", "name") if key in found), "")
        raise ValueError(f"{twice!r} is given twice{inside}")
    return found


def _fill(stream: BinaryIO, fill: Callable[[BinaryIO], object]) -> None:
    """Fill a stream that may not be able to seek."""
    buffer = io.BytesIO()
    fill(buffer)
    stream.write(buffer.getvalue())


def _open_existing(path: Path) -> BinaryIO:
    """Open a device or a pipe to write to; raises OSError, also if nothing reads from a pipe."""
    patience = time.monotonic() + PIPE_SECONDS
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
            break
        except OSError as problem:
            if problem.errno != errno.ENXIO or time.monotonic() > patience:
                raise
            time.sleep(0.01)
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "wb")


def _read_up_to(stream: io.FileIO, count: int, is_pipe: bool) -> bytes | None:
    """Read a file or a pipe, which does not block, to its end or so many bytes; None if nothing writes to the pipe."""
    data, connected, patience = bytearray(), not is_pipe, time.monotonic() + PIPE_SECONDS
    while len(data) < count:
        piece = stream.read(min(_PIECE_BYTES, count - len(data)))
        if piece:
            data += piece
            connected = True
        elif piece is None:  # a program has the other end open, and has not written yet
            connected = True
            waiting = select.poll()
            waiting.register(stream, select.POLLIN)
            waiting.poll()
        elif connected:
            break
        elif time.monotonic() > patience:
            return None
        else:
            time.sleep(0.01)
    return bytes(data)


def _too_large(path: str | Path, code: str, max_bytes: int, size: str) -> InputError:
    hint = "is it the file you meant?"
    return InputError(code, f"expected at most {max_bytes} bytes, got {size}", where=path_text(path), hint=hint)
