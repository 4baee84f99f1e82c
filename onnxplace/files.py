"""Write files and folders whole or not at all; read JSON with errors that name the file."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from onnxplace.errors import ExecutionError, InputError, OnnxplaceError, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def disk_error(problem: OSError, where: str) -> OnnxplaceError:
    """Return the error for a file system that refuses: exit 4, with advice where it is full."""
    if problem.errno in _FULL:
        hint = "free some space, or choose another -o (for temporary files, another TMPDIR)"
        return ExecutionError("E001", "no space left", where=where, hint=hint)
    return ExecutionError(
        "E002", f"cannot be written: {problem.strerror or problem}", where=where, hint="check the place"
    )


def require_free(path: Path, force: bool, marker: str) -> None:
    """Raise UsageError unless nothing is at `path`, or with `force` a folder that holds the file `marker`."""
    try:
        if path.is_symlink():
            raise UsageError(
                "U031",
                "it is a link, not a bundle, so --force does not replace it",
                where=str(path),
                hint="name the folder itself",
            )
        parent = next(folder for folder in path.absolute().parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            reason = "is no folder" if not parent.is_dir() else "cannot be written to"
            raise UsageError(
                "U032", f"cannot write there: {parent} {reason}", where=str(path), hint="choose another place"
            )
        if path.resolve() == Path.cwd():
            hint = "name a folder inside it"
            raise UsageError(
                "U031",
                "it is not a bundle but the current folder, so --force does not replace it",
                where=str(path),
                hint=hint,
            )
        if not path.exists():
            return
        if not force:
            hint = "choose another -o, or replace it with --force"
            raise UsageError("U030", "it exists already", where=str(path), hint=hint)
        if not path.is_dir() or not ((path / marker).exists() or not any(path.iterdir())):
            hint = "choose another -o"
            raise UsageError("U031", "it is not a bundle, so --force does not replace it", where=str(path), hint=hint)
    except (OSError, ValueError) as problem:
        raise _cannot_write(problem, path) from None


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder beside `path` that becomes `path` at the end.

    Whatever goes wrong, nothing new is left behind, and what was at `path` stays.
    """
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as problem:
        _remove_empty(missing)
        raise _cannot_write(problem, path) from None
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())
        put_in_place(folder, path)
    except BaseException as problem:
        shutil.rmtree(folder, ignore_errors=True)
        _remove_empty(missing)
        if isinstance(problem, OSError):
            raise disk_error(problem, str(path)) from None
        raise


def put_in_place(folder: Path, path: Path) -> None:
    """Put `folder` in the place of `path`, which is given back if that fails."""
    if not path.exists():
        folder.rename(path)
        return
    aside = folder.with_name(f"{folder.name}.old")
    path.rename(aside)
    try:
        folder.rename(path)
    except BaseException:
        aside.rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:  # the innermost first
        try:
            folder.rmdir()
        except OSError:
            return


def write_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write a file through a temporary one beside it; raises UsageError or ExecutionError naming it.

    A link is followed; what is no regular file (a device, a pipe) is written to, never replaced.
    """
    try:
        path = path.resolve() if path.is_symlink() else path
        if path.exists() and not path.is_file():
            with path.open("wb") as stream:
                _fill(stream, fill)
            return
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(descriptor)
    except (OSError, ValueError) as problem:
        raise _cannot_write(problem, path) from None
    temporary = Path(name)
    try:
        with temporary.open("wb") as stream:
            fill(stream)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException as problem:
        temporary.unlink(missing_ok=True)
        if isinstance(problem, OSError):
            raise disk_error(problem, str(path)) if problem.errno in _FULL else _cannot_write(problem, path) from None
        raise


def read_json(path: str | Path, code: str, what: str) -> Any:
    """Read a JSON file; raises InputError with `code`, naming the file and `what` it should have been."""
    return parse_json(read_bytes(path, code), code, what, str(path))


def read_bytes(path: str | Path, code: str) -> bytes:
    """Read a file whole; raises InputError with `code`, naming it."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(code, "there is no such file", where=str(path)) from None
    except IsADirectoryError:
        raise InputError(code, "it is a folder, not a file", where=str(path)) from None
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise InputError(code, f"it cannot be read: {reason}", where=str(path)) from None


def open_input(path: str | Path, code: str, *, pipes: bool = False) -> io.FileIO:
    """TEMPORARY: replaced by the one of branch files."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise InputError(code, "there is no such file", where=str(path)) from None
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise InputError(code, f"it cannot be read: {reason}", where=str(path)) from None
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return io.FileIO(descriptor)
    os.close(descriptor)
    raise InputError(code, "expected a file, got a device", where=str(path))


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


def _umask() -> int:
    """Return the process's mask for new files, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _cannot_write(problem: OSError | ValueError, path: Path) -> UsageError:
    reason = problem.strerror if isinstance(problem, OSError) else problem
    return UsageError("U032", f"cannot write there: {reason}", where=str(path), hint="choose another place")
