"""Where a bundle goes: whether it may, a name next to it while it is unfinished, and one stroke to put it in place.

What is at the place at that moment decides, not what was there before the work: without `force` the stroke fails where
anything is, and with it only a bundle is replaced, one that holds no file of the user's.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from onnxplace.bundle.bundle import FORMAT, MANIFEST_FILE
from onnxplace.bundle.manifest import Manifest
from onnxplace.errors import MAX_LISTED, Diagnostic, InputError, OnnxplaceError, UsageError
from onnxplace.utils import (
    OCCUPIED_ERRORS,
    OLD_SUFFIX,
    Lease,
    cannot_write_error,
    disk_error,
    exchange_names,
    hold_lease,
    is_full,
    path_text,
    read_json,
    rename_new,
    require_name,
    sweep_leftovers,
)

# What every manifest holds that was written before manifests said their format.
_ALWAYS = ("schema_version", "pipeline", "programs", "segments", "files")
# Others may put something there, or take it away, between a look and a rename; hardly as often as this.
_ATTEMPTS = 100


@dataclass(frozen=True)
class Staging:
    """A place beside that of a bundle, where nothing is yet."""

    folder: Path
    """Where the unfinished bundle goes, in the same folder as the finished one, as linked weights demand."""
    path: Path
    """Where the finished one goes."""
    force: bool
    """Whether a bundle there is replaced."""
    lease: Lease

    def named(self, text: str) -> str:
        """Return a text in which the unfinished bundle has the name of the finished one."""
        return re.sub(rf"{re.escape(self.lease.path.name)}\.\w+", lambda _: self.path.name, text)

    def renamed(self, problem: OnnxplaceError) -> OnnxplaceError:
        """Return an error that is about the finished bundle."""
        texts = {"where": self.named(problem.where), "hint": self.named(problem.hint)}
        return type(problem)(problem.code, self.named(problem.message), **texts)

    def beside(self, ending: str) -> Path:
        """Return another place like `folder`, which goes away unless it is put in place."""
        return self.lease.beside(ending)

    def place(self, folder: Path) -> None:
        """Put a finished folder, one beside `path`, in its place; raises UsageError or ExecutionError."""
        try:
            for _ in range(_ATTEMPTS):
                if _placed(self.lease, folder, self.path, self.force):
                    return
        except OSError as problem:
            raise disk_error(problem, path_text(self.path)) from None
        raise cannot_write_error("other programs keep replacing it", self.path)


def require_output_free(path: Path, force: bool) -> None:
    """Raise UsageError unless nothing is at `path`, or with `force` a bundle without files of the user's."""
    require_name(path)
    try:
        if path.is_symlink():
            raise _irreplaceable(path, "it is a link, not a bundle", "name the folder itself")
        if path.resolve() == Path.cwd():
            raise _irreplaceable(path, "it is not a bundle but the current folder", "name a folder inside it")
        if path.name in ("", ".."):
            raise _irreplaceable(path, "it is not a bundle but a folder above", "name a folder inside it")
        parent = next(folder for folder in path.absolute().parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            reason = "is no folder" if not parent.is_dir() else "cannot be written to"
            raise cannot_write_error(f"{path_text(parent)} {reason}", path)
        if path.exists():
            if not force:
                raise _occupied(path)
            with suppress(FileNotFoundError):  # gone by now
                _require_replaceable(path, path)
    except (OSError, ValueError) as problem:
        raise cannot_write_error(problem, path) from None


def prepare_output(path: Path, force: bool, *more: Path) -> list[Diagnostic]:
    """Sweep where a bundle goes, and the folders `more`; then do what `require_output_free` does. Returns notes."""
    require_name(path)
    notes = sweep_output(path, *more)
    try:
        require_output_free(path, force)
    except UsageError as problem:
        if any(note.code == "U035" and note.where == path_text(path.absolute()) for note in notes):
            message = f"{problem.message}: an interrupted compile had moved it, and it was put back"
            raise UsageError(problem.code, message, where=problem.where, hint=problem.hint) from None
        raise
    return notes


@contextmanager
def stage_output(path: Path, force: bool) -> Iterator[Staging]:
    """Hold a place beside `path` for a bundle, which the caller puts in place once it is complete.

    Whatever goes wrong before that, nothing new is left behind, and what was at `path` stays. Errors that are about
    the unfinished folder name `path` instead.
    """
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        with _leased_beside(path) as lease:
            staging = Staging(lease.beside("new"), path, force, lease)
            try:
                yield staging
            except OnnxplaceError as problem:
                if staging.folder.name in str(problem):
                    raise staging.renamed(problem) from None
                raise
    finally:
        if not path.exists():
            _remove_empty(missing)


def sweep_output(path: Path, *more: Path) -> list[Diagnostic]:
    """Remove what ended processes left beside `path`, in the folders `more` and among temporary files; say what."""
    folders = dict.fromkeys(folder.absolute() for folder in (path.parent, *more, Path(tempfile.gettempdir())))
    notes = []
    for folder in folders:
        swept = sweep_leftovers(folder)
        notes += [
            Diagnostic(
                "U035", "an interrupted compile had moved this bundle; it was put back", where=path_text(item.path)
            )
            for item in swept
            if item.restored
        ]
        if names := [item.path.name for item in swept if not item.restored]:
            more_names = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
            message = f"what an interrupted process had left was removed: {', '.join(names[:MAX_LISTED])}{more_names}"
            notes.append(Diagnostic("U034", message, where=path_text(folder)))
    return notes


@contextmanager
def _leased_beside(path: Path) -> Iterator[Lease]:
    """Hold a lease in the folder that `path` is in, which is made if need be; raises UsageError where it cannot be."""
    with ExitStack() as stack:
        for attempt in range(_ATTEMPTS):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                lease = stack.enter_context(hold_lease(path.parent))
                break
            except OSError as problem:
                # Another compile may have failed, and removed the folder that both had to make.
                if not isinstance(problem, FileNotFoundError) or attempt == _ATTEMPTS - 1:
                    failure = (
                        disk_error(problem, path_text(path)) if is_full(problem) else cannot_write_error(problem, path)
                    )
                    raise failure from None
        yield lease


def _placed(lease: Lease, folder: Path, path: Path, force: bool) -> bool:
    """Put a folder in place; returns False if others changed what is there at this moment. Raises OSError."""
    if not os.path.lexists(path):
        if _put(lease, folder, path):
            return True
        if not force:
            raise _occupied(path)
        return False
    if not force:
        raise _occupied(path)
    try:
        _require_replaceable(path, path)
        if not exchange_names(folder, path):
            return _replace_in_two_steps(lease, folder, path)
    except FileNotFoundError:
        return False
    try:
        _require_replaceable(folder, path)  # what was there at the stroke, which may be another than was looked at
    except UsageError:
        exchange_names(folder, path)
        raise
    return True


def _put(lease: Lease, folder: Path, path: Path) -> bool:
    """Rename a folder to where nothing is; returns False if something is. Raises OSError."""
    try:
        if rename_new(folder, path):
            return True
        _claim(lease, path)
        folder.rename(path)  # which replaces a folder as long as it is empty
    except OSError as problem:
        if problem.errno in OCCUPIED_ERRORS:
            return False
        raise
    return True


def _claim(lease: Lease, path: Path) -> None:
    """Make an empty folder where nothing is; raises FileExistsError."""
    moved = lease.beside(OLD_SUFFIX).exists()  # then the lease says already which name it is about
    if not moved:
        lease.note_move(path.name)
    try:
        path.mkdir()
    except OSError:
        if not moved:
            lease.forget_move()
        raise


def _replace_in_two_steps(lease: Lease, folder: Path, path: Path) -> bool:
    """Move away what is at `path`, then put a folder there; the end of the lease puts back what is missing then."""
    old = lease.beside(OLD_SUFFIX)
    shutil.rmtree(old, ignore_errors=True)  # of an attempt before this one
    lease.note_move(path.name)
    path.rename(old)
    try:
        _require_replaceable(old, path)
    except UsageError:
        _put(lease, old, path)
        raise
    return _put(lease, folder, path)


def _require_replaceable(folder: Path, path: Path) -> None:
    """Raise UsageError, about `path`, unless a folder is empty or a bundle that holds no file of the user's.

    What another program replaces while it is looked at is looked at again. Raises FileNotFoundError if it is gone.
    """
    for _ in range(_ATTEMPTS):
        before = os.lstat(folder)
        try:
            _require_only_bundle(folder, path)
            return
        except FileNotFoundError:  # of a bundle that another compile is removing
            continue
        except UsageError:
            if os.path.samestat(before, os.lstat(folder)):
                raise
    raise cannot_write_error("other programs keep replacing it", path)


def _require_only_bundle(folder: Path, path: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        raise _irreplaceable(path, "it is not a bundle", "choose another -o")
    entries = {item.relative_to(folder).as_posix() for item in folder.rglob("*")}
    if not entries:
        return
    if (own := _own_files(folder / MANIFEST_FILE)) is None:
        raise _irreplaceable(path, "it is not a bundle", "choose another -o")
    own |= {parent.as_posix() for name in own for parent in Path(name).parents}
    if foreign := sorted(entries - own):
        names = ", ".join(path_text(name) for name in foreign[:MAX_LISTED])
        more = f" and {len(foreign) - MAX_LISTED} more" if len(foreign) > MAX_LISTED else ""
        hint = "move them elsewhere, or choose another -o"
        raise _irreplaceable(path, f"it holds what is not of the bundle: {names}{more}", hint)


def _own_files(manifest: Path) -> set[str] | None:
    """Return the names of a bundle's files, the manifest among them; None if it is not the manifest of a bundle."""
    try:
        data: Any = read_json(manifest, "N002", "a manifest")
    except InputError:
        return None
    if not isinstance(data, dict) or not isinstance(data.get("files"), dict):
        return None
    if data.get("format", FORMAT) != FORMAT or not all(key in data for key in _ALWAYS):
        return None
    if "format" not in data:  # one of the first, which did not say so: then it has to be one in every detail
        try:
            Manifest.model_validate(data)
        except ValidationError:
            return None
    return {MANIFEST_FILE, *data["files"]}


def _irreplaceable(path: Path, why: str, hint: str) -> UsageError:
    return UsageError("U031", f"{why}, so --force does not replace it", where=path_text(path), hint=hint)


def _occupied(path: Path) -> UsageError:
    hint = "choose another -o, or replace it with --force"
    return UsageError("U030", "it exists already", where=path_text(path), hint=hint)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:  # the innermost first
        with suppress(OSError):
            folder.rmdir()
