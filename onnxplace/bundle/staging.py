"""Write a bundle or an export atomically: check its destination, build it under a temporary name, then rename it.

The destination's state at the rename decides, not its state before the work. Without `force` the rename fails if
anything exists there. With `force` it replaces only what it writes, a bundle or an export, and only if that contains
no file of the user's.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from onnxplace.bundle.bundle import BUNDLE_FORMAT, MANIFEST_FILE
from onnxplace.errors import MAX_LISTED, Diagnostic, InputError, OnnxplaceError, UsageError
from onnxplace.utils.file_locks import OCCUPIED_ERRORS, FileLock, hold_file_lock, sweep_leftovers
from onnxplace.utils.files import (
    cannot_write_error,
    disk_error,
    format_path,
    read_json,
    require_valid_path,
    write_refused_error,
)
from onnxplace.utils.renames import exchange_names, rename_new

# Folders that `--force` may replace, each only by its own kind, and the file that marks it.
OutputKind = Literal["bundle", "export"]
EXPORT_FILE = "onnxplace-export.json"
EXPORT_FORMAT = "onnxplace export"
_TITLES: dict[OutputKind, str] = {"bundle": "a bundle", "export": "an export of onnxplace"}
# Other programs may create or remove the destination between a check and a rename, but hardly as often as this.
_MAX_ATTEMPTS = 100


@dataclass(frozen=True)
class Staging:
    """A temporary name next to a bundle's destination."""

    folder: Path
    """Path of the unfinished bundle, in the same folder as the finished one, as linked weights demand."""
    path: Path
    """Path of the finished bundle."""
    force: bool
    """Whether a bundle at `path` is replaced."""
    lock: FileLock
    kind: OutputKind = "bundle"
    part: str = ""
    """The name of one of several bundles that are built for `path`."""

    def for_part(self, number: int) -> Staging:
        """Return the staging of one of several bundles that are built for `path`."""
        part = f"part{number:03}"
        return replace(self, folder=self.lock.path_with_ending(part), part=part)

    def with_final_name(self, text: str) -> str:
        """Return a text with the unfinished bundle's name replaced by the finished one's."""
        return re.sub(rf"{re.escape(self.lock.path.name)}\.\w+", lambda _: self.path.name, text)

    def rename_in_error(self, problem: OnnxplaceError) -> OnnxplaceError:
        """Return an error whose texts name the finished bundle."""
        texts = {"where": self.with_final_name(problem.where), "hint": self.with_final_name(problem.hint)}
        return type(problem)(problem.code, self.with_final_name(problem.message), **texts)

    def sibling_path(self, ending: str) -> Path:
        """Return another temporary path like `folder`, removed at the end unless it is placed."""
        return self.lock.path_with_ending(self.part + ending)

    def clear(self) -> None:
        """Remove what was built so far, which is not good enough."""
        for path in self.folder.parent.glob(f"{self.lock.path.name}.{self.part}*"):
            shutil.rmtree(path, ignore_errors=True)

    def place(self, folder: Path) -> None:
        """Move a finished folder, one next to `path`, to `path`; raises UsageError or ExecutionError."""
        try:
            for _ in range(_MAX_ATTEMPTS):
                if _try_place(self, folder):
                    return
        except OSError as problem:
            raise disk_error(problem, format_path(self.path)) from None
        raise cannot_write_error("other programs keep replacing it", self.path)


def require_output_free(path: Path, force: bool, kind: OutputKind = "bundle") -> None:
    """Raise UsageError unless `path` is free, or a bundle (or export) that `force` may replace."""
    require_valid_path(path)
    title = _TITLES[kind]
    try:
        if path.is_symlink():
            raise _irreplaceable_error(path, f"expected {title}, got a symbolic link", "name the folder itself")
        if (is_current := path.resolve() == Path.cwd()) or path.name in ("", ".."):
            message = f"expected {title}, got {'the current' if is_current else 'a parent'} folder"
            raise _irreplaceable_error(path, message, "name a folder inside it")
        parent = next(folder for folder in path.absolute().parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            reason = "is not a folder" if not parent.is_dir() else "is not writable"
            raise cannot_write_error(f"{format_path(parent)} {reason}", path)
        if path.exists():
            if not force:
                raise _occupied_error(path)
            with suppress(FileNotFoundError):  # removed in the meantime
                _require_replaceable(path, path, kind)
    except (OSError, ValueError) as problem:
        raise cannot_write_error(problem, path) from None


def prepare_output(path: Path, force: bool, *more: Path, kind: OutputKind = "bundle") -> list[Diagnostic]:
    """Remove leftovers at a bundle's destination, then require that it is free.

    Args:
        path: destination of the bundle.
        force: whether a bundle there may be replaced.
        more: other folders in which to remove leftovers.
        kind: what is written, and what `force` may replace.

    Returns:
        notes on what was removed or restored.
    """
    require_valid_path(path)
    notes = sweep_output(path, *more)
    try:
        require_output_free(path, force, kind)
    except UsageError as problem:
        if any(note.code == "U035" and note.where == format_path(path.absolute()) for note in notes):
            message = f"{problem.message}: an interrupted compile had moved it, and it was restored"
            raise UsageError(problem.code, message, where=problem.where, hint=problem.hint) from None
        raise
    return notes


@contextmanager
def stage_output(path: Path, force: bool, kind: OutputKind = "bundle") -> Iterator[Staging]:
    """Yield a temporary path next to `path`, where the caller builds a bundle and then places it.

    After any failure before that, nothing new is left behind and `path` is unchanged. Errors about the unfinished
    folder name `path` instead.
    """
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        with _hold_lock_next_to(path) as lock:
            staging = Staging(lock.path_with_ending("new"), path, force, lock, kind)
            try:
                yield staging
            except OnnxplaceError as problem:
                if lock.path.name in str(problem):
                    raise staging.rename_in_error(problem) from None
                raise
    finally:
        if not path.exists():
            _remove_empty_folders(missing)


def sweep_output(path: Path, *more: Path) -> list[Diagnostic]:
    """Remove files that ended processes left next to `path`, in `more` and in the temporary folder."""
    folders = dict.fromkeys(folder.absolute() for folder in (path.parent, *more, Path(tempfile.gettempdir())))
    notes = []
    for folder in folders:
        leftovers = sweep_leftovers(folder)
        message = "an interrupted compile had moved this bundle; it was restored"
        notes += [Diagnostic("U035", message, where=format_path(item.path)) for item in leftovers if item.restored]
        if names := [item.path.name for item in leftovers if not item.restored]:
            more_names = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
            message = f"removed leftovers of an interrupted process: {', '.join(names[:MAX_LISTED])}{more_names}"
            notes.append(Diagnostic("U034", message, where=format_path(folder)))
    return notes


@contextmanager
def _hold_lock_next_to(path: Path) -> Iterator[FileLock]:
    """Hold a lock in the folder of `path`, creating that folder if needed; raises UsageError if it fails."""
    with ExitStack() as stack:
        for attempt in range(_MAX_ATTEMPTS):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(hold_file_lock(path.parent))
                break
            except OSError as problem:
                # Another compile may have failed, and removed the folder that both had to create.
                if not isinstance(problem, FileNotFoundError) or attempt == _MAX_ATTEMPTS - 1:
                    raise write_refused_error(problem, path) from None
        yield lock


def _try_place(staging: Staging, folder: Path) -> bool:
    """Move a folder to its place; returns False if other programs changed that meanwhile. Raises OSError."""
    path, kind = staging.path, staging.kind
    is_free = not os.path.lexists(path)
    if is_free and _rename_if_free(folder, path):
        return True
    if not staging.force:
        raise _occupied_error(path)
    if is_free:  # it was, until a moment ago
        return False
    try:
        _require_replaceable(path, path, kind)
        if not exchange_names(folder, path):
            return _replace_in_two_steps(staging, folder)
    except FileNotFoundError:
        return False
    try:
        _require_replaceable(folder, path, kind)  # the exchanged folder, which may differ from the one checked before
    except UsageError:
        exchange_names(folder, path)
        raise
    return True


def _rename_if_free(folder: Path, path: Path) -> bool:
    """Rename a folder to a free path; returns False if the path is occupied. Raises OSError."""
    try:
        if not rename_new(folder, path):
            folder.rename(path)  # replaces an empty folder only
    except OSError as problem:
        if problem.errno in OCCUPIED_ERRORS:
            return False
        raise
    return True


def _replace_in_two_steps(staging: Staging, folder: Path) -> bool:
    """Move the old bundle aside, then rename a folder to `path`; the end of the lock restores a missing one."""
    path, old = staging.path, staging.lock.path_aside(staging.path)
    shutil.rmtree(old, ignore_errors=True)  # left by a previous attempt
    path.rename(old)
    try:
        _require_replaceable(old, path, staging.kind)
    except UsageError:
        _rename_if_free(old, path)
        raise
    return _rename_if_free(folder, path)


def _require_replaceable(folder: Path, path: Path, kind: OutputKind) -> None:
    """Raise UsageError, about `path`, unless a folder is empty or of this kind, without files of the user's.

    A folder that another program replaces meanwhile is checked again. Raises FileNotFoundError if it disappeared.
    """
    for _ in range(_MAX_ATTEMPTS):
        before = os.lstat(folder)
        try:
            _require_only_own_files(folder, path, kind)
            return
        except FileNotFoundError:  # another compile is removing this bundle
            continue
        except UsageError:
            if os.path.samestat(before, os.lstat(folder)):
                raise
    raise cannot_write_error("other programs keep replacing it", path)


def _require_only_own_files(folder: Path, path: Path, kind: OutputKind) -> None:
    if folder.is_symlink() or not folder.is_dir():
        raise _irreplaceable_error(path, f"it is not {_TITLES[kind]}", "choose another -o")
    entries = {item.relative_to(folder).as_posix() for item in folder.rglob("*")}
    if not entries:
        return
    own_files = _read_own_files(folder, kind)
    if own_files is None:
        raise _irreplaceable_error(path, f"it is not {_TITLES[kind]}", "choose another -o")
    own_files |= {parent.as_posix() for name in own_files for parent in Path(name).parents}
    if foreign := sorted(entries - own_files):
        names = ", ".join(format_path(name) for name in foreign[:MAX_LISTED])
        more = f" and {len(foreign) - MAX_LISTED} more" if len(foreign) > MAX_LISTED else ""
        hint = "move them elsewhere, or choose another -o"
        message = f"it contains files that are not the {kind}'s: {names}{more}"
        raise _irreplaceable_error(path, message, hint)


def _read_own_files(folder: Path, kind: OutputKind) -> set[str] | None:
    """Return the names of the files of a bundle or export, its own record included; None if the folder is not one."""
    # A manifest has a record of each file by name, the record of an export has their names alone.
    is_bundle = kind == "bundle"
    record, mark, files = (MANIFEST_FILE, BUNDLE_FORMAT, dict) if is_bundle else (EXPORT_FILE, EXPORT_FORMAT, list)
    try:
        data: Any = read_json(folder / record, "N002", "a manifest")
    except InputError:
        return None
    is_own = isinstance(data, dict) and data.get("format") == mark and isinstance(data.get("files"), files)
    return {record, *map(str, data["files"])} if is_own else None


def _irreplaceable_error(path: Path, reason: str, hint: str) -> UsageError:
    return UsageError("U031", f"{reason}, so --force does not replace it", where=format_path(path), hint=hint)


def _occupied_error(path: Path) -> UsageError:
    hint = "choose another -o, or replace it with --force"
    return UsageError("U030", "it already exists", where=format_path(path), hint=hint)


def _remove_empty_folders(folders: list[Path]) -> None:
    for folder in folders:  # the innermost first
        with suppress(OSError):
            folder.rmdir()
