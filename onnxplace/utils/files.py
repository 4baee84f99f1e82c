"""Write files atomically; read the small files that users name, with errors that name the file."""

from __future__ import annotations

import difflib
import errno
import io
import itertools
import json
import os
import re
import select
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from onnxplace.errors import ExecutionError, InputError, OnnxplaceError, UsageError, format_name, format_names
from onnxplace.utils.file_locks import hold_file_lock, sweep_leftovers

# About the size of a cost file with a million nodes. Models, weights and arrays have their own readers.
MAX_TEXT_BYTES = 256 << 20
# How long to wait for a program to open the other end of a pipe. Once it is open, the program may take any time.
PIPE_SECONDS = 2.0
# Bytes of one read.
_READ_BYTES = 1 << 20
# Errors for a full disk, a quota, and a limit on the size of files.
_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# At most this many names of a folder are read for the suggestion of another file.
_MAX_NAMES = 1000
# Of the messages of loaders of Linux, macOS and Windows.
_LIBRARY_WORDS = re.compile(
    r"shared (object|library)|undefined symbol|dlopen|invalid ELF|file too short|\.(so|dylib|dll)\b"
)
# The escape of half of a character outside the first 65536, which is a character only together with its other half.
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def format_path(path: str | os.PathLike[str]) -> str:
    r"""Return a path as one readable line: escaped where unprintable, and shortened.

    >>> format_path("a\nb"), format_path(b"caf\xe9".decode(errors="surrogateescape"))
    ('a\\nb', 'caf\\udce9')
    """
    return format_name(os.fspath(path))


def is_disk_full(problem: OSError) -> bool:
    """Return whether an error means that a disk is full, or that a quota or limit is reached."""
    return problem.errno in _FULL_ERRORS


def disk_error(problem: OSError, where: str) -> OnnxplaceError:
    """Return the error for a file system that refuses to write: exit 4, with advice for a full one."""
    if library_error := find_library_error(problem):
        return library_error
    if is_disk_full(problem):
        hint = "free some space, or choose another -o (for temporary files, another TMPDIR)"
        return ExecutionError("E001", "no space left", where=where, hint=hint)
    message = f"cannot be written: {problem.strerror or problem}"
    return ExecutionError("U032", message, where=where, hint="check the folder and its permissions")


def find_library_error(problem: OSError | ImportError) -> UsageError | None:
    """Return the error for a library that cannot be loaded, if that is the cause: such an OSError has no number."""
    if getattr(problem, "errno", None) is not None or not _LIBRARY_WORDS.search(str(problem)):
        return None
    hint = "reinstall the package that it belongs to, and what that needs"
    return UsageError("U110", f"a library cannot be loaded: {problem}", hint=hint)


def cannot_write_error(problem: OSError | ValueError | str, path: Path) -> UsageError:
    """Return the error for a path that the user chose and that cannot be written."""
    reason = (problem.strerror or problem) if isinstance(problem, OSError) else problem
    return UsageError("U032", f"cannot write there: {reason}", where=format_path(path), hint="choose another place")


def write_refused_error(problem: OSError, path: Path) -> OnnxplaceError:
    """Return the error for a path that the user chose and that cannot be written: exit 4 if the disk is full, or 2."""
    return disk_error(problem, format_path(path)) if is_disk_full(problem) else cannot_write_error(problem, path)


def require_valid_path(path: Path) -> None:
    """Raise UsageError unless manifests and ONNX Runtime can take a path: UTF-8, without NUL."""
    if "\0" in os.fspath(path):
        raise cannot_write_error("embedded null byte", path)
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise cannot_write_error("expected a name in UTF-8", path) from None


def require_writable(path: Path, *inputs: Path) -> None:
    """Raise UsageError if a file cannot be written, before any work is done.

    `inputs` are files and bundles that the same command reads, and must not overwrite.
    """
    require_valid_path(path)
    try:
        reason = _find_obstacle(path, inputs)
    except OSError as problem:
        raise cannot_write_error(problem, path) from None
    if reason:
        raise cannot_write_error(reason, path)


def require_different_files(**paths: Path | None) -> None:
    """Raise UsageError if two options name the same file, of which one result would overwrite the other."""
    options: dict[Path, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        require_valid_path(path)
        option = f"--{name.replace('_', '-')}"
        try:
            other = options.setdefault(path.resolve(), option)
            # Devices and pipes take any number of texts.
            is_replaced = path.is_file() or path.is_dir() or not path.exists()
        except OSError:
            continue  # no file can have this name, which is reported where it is written
        if other != option and is_replaced:
            raise cannot_write_error(f"{other} and {option} name the same file", path)


def _find_obstacle(path: Path, inputs: Sequence[Path]) -> str:
    """Return why a file cannot be written; empty if it can. Raises OSError."""
    for source in inputs:
        inside = source.is_dir() and path.resolve().is_relative_to(source.resolve())
        if inside or (path.exists() and source.exists() and path.samefile(source)):
            return f"it is {'in ' if inside else ''}{format_path(source)}, which is read"
    mode = path.stat().st_mode if path.exists() else None
    folder = path.absolute().parent
    if mode is not None and stat.S_ISDIR(mode):
        return "it is a folder"
    if not folder.is_dir():
        return f"there is no folder {format_path(folder)}"
    is_replaced = mode is None or stat.S_ISREG(mode)  # devices and pipes are written to in place
    if is_replaced and not os.access(folder, os.W_OK):
        return f"{format_path(folder)} cannot be written to"
    return ""


def write_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write a file through a temporary one in its folder; raises UsageError or ExecutionError.

    A link is followed. A device or a pipe is written to, never replaced.
    """
    try:
        require_valid_path(path)
        path = path.resolve() if path.is_symlink() else path
        if path.exists() and not path.is_file():
            with _open_existing(path) as stream:
                buffer = io.BytesIO()  # a pipe cannot seek
                fill(buffer)
                stream.write(buffer.getvalue())
            return
    except OSError as problem:
        raise cannot_write_error(problem, path) from None
    try:
        sweep_leftovers(path.parent)  # such as those of a program that was killed while it wrote this file
        with hold_file_lock(path.parent) as lock:
            with lock.path.open("wb") as stream:
                fill(stream)
            lock.path.replace(path)
    except OSError as problem:
        raise write_refused_error(problem, path) from None


def write_each(*writes: Callable[[], object]) -> None:
    """Call all functions that write a result, the most precious first; then raise the first error.

    The other errors are its notes, so that all are reported.
    """
    failures = []
    for write in writes:
        try:
            write()
        except Exception as problem:  # noqa: BLE001 - no failure of one result may lose another
            failures.append(problem)
    if failures:
        first, *others = failures
        for other in others:
            first.add_note(str(other))
        raise first


def read_json(path: str | Path, code: str, what: str) -> Any:
    """Read a JSON file; raises InputError with `code`, naming the file and the expected kind `what`."""
    return parse_json(read_bytes(path, code), code, what, format_path(path))


def read_text(path: str | Path, code: str, what: str, encoding: str = "utf-8") -> str:
    """Read a text file; raises InputError with `code`, naming the file and the expected kind `what`."""
    try:
        return read_bytes(path, code).decode(encoding)
    except UnicodeDecodeError:
        raise InputError(code, f"not {what}: it is a binary file", where=format_path(path)) from None


def read_bytes(path: str | Path, code: str, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Read a whole file or pipe; raises InputError with `code`, naming it.

    Waits for a program that has the other end of a pipe open. Refuses anything other than a file or a pipe, and more
    than `max_bytes`.
    """
    try:
        with open_input(path, code, pipes=True) as stream:
            status = os.fstat(stream.fileno())
            if status.st_size > max_bytes:
                raise _too_large_error(path, code, max_bytes, f"{status.st_size} bytes")
            data = _read_up_to(stream, max_bytes + 1, is_pipe=stat.S_ISFIFO(status.st_mode))
    except OSError as problem:
        raise InputError(code, f"it cannot be read: {problem.strerror or problem}", where=format_path(path)) from None
    if data is None:
        hint = "start the program that writes to it first"
        raise InputError(code, "it is a pipe to which nothing is written", where=format_path(path), hint=hint)
    if len(data) > max_bytes:
        raise _too_large_error(path, code, max_bytes, "more")
    return data


def open_input(path: str | Path, code: str, *, pipes: bool = False) -> io.FileIO:
    """Open a file that the user named, without waiting; raises InputError with `code`.

    Pipes are opened only with `pipes`; reading them does not block.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        hint = suggest_file(Path(path))
        raise InputError(code, "there is no such file", where=format_path(path), hint=hint) from None
    except (OSError, ValueError) as problem:
        if sys.platform == "win32" and os.path.isdir(path):
            raise InputError(code, "it is a folder, not a file", where=format_path(path)) from None
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise InputError(code, f"it cannot be read: {reason}", where=format_path(path)) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode)):
        return io.FileIO(descriptor)
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise InputError(code, "it is a folder, not a file", where=format_path(path))
    message = f"expected a file, got a {'pipe' if stat.S_ISFIFO(mode) else 'device'}"
    raise InputError(code, message, where=format_path(path), hint="write its content to a file, and name that")


def suggest_file(missing: Path) -> str:
    """Return a hint at a name in the folder of a missing file that is near, else at names with the same ending.

    Returns "" if there are none.
    """
    folder = missing.parent
    try:
        with os.scandir(folder) as entries:
            names = sorted(format_path(entry.name) for entry in itertools.islice(entries, _MAX_NAMES))
    except FileNotFoundError:
        return f"there is no folder {format_path(folder)}"
    except OSError:
        return ""
    if near := difflib.get_close_matches(missing.name, names, 1, 0.75):
        return f"did you mean {near[0]!r}?"
    similar = [name for name in names if Path(name).suffix == missing.suffix != ""]
    return f"known: {format_names(similar, quoted=False)}" if similar else ""


def parse_json(data: bytes | str, code: str, what: str, where: str) -> Any:
    """Return JSON text as Python values; raises InputError with `code`, also for repeated keys.

    >>> parse_json('{"a": 1}', "D001", "a cost graph", "graph.json")
    {'a': 1}
    """
    try:
        text = data.decode(json.detect_encoding(data)) if isinstance(data, bytes) else data
        parsed = json.loads(text, object_pairs_hook=_build_object)
        if _HALF_CHARACTER.search(text):
            json.dumps(parsed, ensure_ascii=False).encode()
        return parsed
    except UnicodeDecodeError:
        reason = "it is a binary file"
    except UnicodeEncodeError as problem:
        half = problem.object[problem.start]
        reason = f"expected text, found {half!r}, which is half of a character"
    except json.JSONDecodeError as problem:
        reason = (
            f"invalid JSON at line {problem.lineno}, column {problem.colno}: {problem.msg}" if data else "it is empty"
        )
    except ValueError as problem:
        reason = str(problem)
    except RecursionError:
        reason = "it is nested too deeply"
    raise InputError(code, f"not {what}: {reason}", where=where)


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raises ValueError for a repeated key, whose first value Python would drop."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        names = (f" in the object whose {key} is {entries[key]!r}" for key in ("id", "name") if key in entries)
        raise ValueError(f"{repeated!r} is given twice{next(names, '')}")
    return entries


def _open_existing(path: Path) -> BinaryIO:
    """Open a device or a pipe for writing; raises OSError, also if no program reads the pipe."""
    deadline = time.monotonic() + PIPE_SECONDS
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
            break
        except OSError as problem:
            if problem.errno != errno.ENXIO or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "wb")


def _read_up_to(stream: io.FileIO, count: int, is_pipe: bool) -> bytes | None:
    """Read a file or a non-blocking pipe, at most `count` bytes; None if no program writes to the pipe."""
    data, connected, deadline = bytearray(), not is_pipe, time.monotonic() + PIPE_SECONDS
    while len(data) < count:
        block = stream.read(min(_READ_BYTES, count - len(data)))
        if block:
            data += block
            connected = True
        elif block is None:  # a program has the other end open, and has not written yet
            connected = True
            poll = select.poll()
            poll.register(stream, select.POLLIN)
            poll.poll()
        elif connected:
            break
        elif time.monotonic() > deadline:
            return None
        else:
            time.sleep(0.01)
    return bytes(data)


def _too_large_error(path: str | Path, code: str, max_bytes: int, size: str) -> InputError:
    """Return the error for a file or pipe with more than `max_bytes`."""
    hint = "is it the file you meant?"
    return InputError(code, f"expected at most {max_bytes} bytes, got {size}", where=format_path(path), hint=hint)
