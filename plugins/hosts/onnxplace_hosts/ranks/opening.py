"""What the driver and its ranks say to each other when a bundle is opened, and the files that ranks fetch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields as dataclass_fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import Manifest, SegmentRecord
from onnxplace.errors import (
    BundleError,
    ExecutionError,
    FeedError,
    ModelError,
    OnnxplaceError,
    PluginError,
    TargetError,
    UsageError,
)
from onnxplace.machine import measurement_cache
from onnxplace.machine.ort_sessions import list_operator_libraries, uses_optimisations
from onnxplace.model.nested_graphs import iterate_tensors
from onnxplace.utils.files import disk_error
from onnxplace_hosts.connection import is_this_machine
from onnxplace_hosts.describe_host import list_versions
from onnxplace_hosts.ranks.frames import Frame
from onnxplace_hosts.ranks.rank_plans import RankPlan


def find_clock() -> str:
    """Return what tells the clocks of `time.perf_counter` apart: all processes of a running Linux have the same."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@dataclass(frozen=True)
class Opening:
    """What the driver says when it opens a bundle."""

    bundle: Bundle
    devices: Sequence[str]
    """The device of each rank."""
    trace: bool
    libraries: Sequence[str]
    """Shared libraries with custom operators."""
    versions: Mapping[str, str]
    """Versions of all that has to be equal on hosts, as the driver has them."""
    optimises: bool
    """Whether ONNX Runtime optimises the segments."""
    remote: Sequence[int]
    """Ranks on other machines than the driver's, which fetch what they need of the bundle."""
    probe: Sequence[Any] = ()
    """Memory that ranks try to share; empty if there is none."""
    clock: str = field(default_factory=find_clock)
    """The clock of the driver's events."""

    @staticmethod
    def of(bundle: Bundle, plan: RankPlan, trace: bool, *, fetches: bool) -> Opening:
        """Return what the ranks of a plan are told; `fetches` if some may be on other machines."""
        return Opening(
            bundle=bundle,
            devices=plan.devices,
            trace=trace,
            libraries=list_operator_libraries(),
            versions=list_versions(),
            optimises=uses_optimisations(),
            remote=[rank for rank, host in enumerate(plan.hosts) if fetches and not is_this_machine(host)],
        )

    def to_frame(self) -> Frame:
        """Return it as a frame, with the manifest as a buffer; `from_frame` is the inverse."""
        others = {item.name: getattr(self, item.name) for item in dataclass_fields(self) if item.name != "bundle"}
        manifest = np.frombuffer(self.bundle.manifest.model_dump_json().encode(), np.uint8)
        return Frame("open", {"path": str(self.bundle.path.resolve()), **others}, [manifest])

    @staticmethod
    def from_frame(frame: Frame) -> Opening:
        """Return it as a rank reads it."""
        path, manifest = frame.fields["path"], Manifest.model_validate_json(bytes(frame.buffers[0]))
        others = {name: value for name, value in frame.fields.items() if name != "path"}
        return Opening(Bundle(Path(path), manifest), **others)


def rebuild_error(data: Mapping[str, str], place: str) -> OnnxplaceError:
    """Return the error of a rank, which says where it arose.

    Args:
        data: What `describe_error` returned.
        place: The rank, for errors that name no place.
    """
    kinds = {kind.__name__: kind for kind in (BundleError, FeedError, ModelError, PluginError, TargetError, UsageError)}
    kind = kinds.get(data["class"], ExecutionError)
    return kind(data["code"], data["message"], where=data["where"] or place, hint=data["hint"])


# The files of a bundle on a host that does not have them: a rank fetches what its segments need.
#
# That are the segments themselves, and the ranges of the weights file that they refer to. They are kept in the user's
# cache folder, and used again as long as the bundle is the same.

# Bytes that are asked for at a time.
PIECE_BYTES = 8 << 20
# Copies that no session has opened for this time are removed.
MAX_UNUSED_SECONDS = 30 * 86400.0

Fetch = Callable[[str, int, int], Any]
"""Returns the bytes of a file of the bundle from an offset on, of this length."""


def obtain_bundle(bundle: Bundle, segments: Sequence[SegmentRecord], states: Iterable[str], fetch: Fetch) -> Bundle:
    """Return a bundle whose files are on this host: this one, or a copy of what some segments need.

    Args:
        bundle: The driver's manifest, and the path of the bundle there, which may exist here.
        segments: Those of this rank.
        states: State inputs whose initial values this rank needs.
        fetch: Asks the driver for bytes.

    Raises:
        TargetError: the weights are linked, and not here.
        ExecutionError: the copy cannot be written, or the driver does not answer.
    """
    if _is_here(bundle):
        return bundle
    if bundle.manifest.linked:
        message = f"{bundle.path} is not on this host as it was compiled, and its weights are in the model's own files"
        hint = "copy bundle and model to the same path on all hosts, or compile without --link-weights"
        raise TargetError("N009", message, hint=hint)
    digest = _digest(bundle, [segment.id for segment in segments])
    folder = _find_folder()
    place = folder / digest
    try:
        _remove_unused(folder)
        if not place.is_dir():
            _copy(bundle, segments, set(states), fetch, folder, place)
        os.utime(place)
    except OSError as problem:
        raise disk_error(problem, str(place)) from None
    return replace(bundle, path=place)


def read_piece(bundle: Bundle, name: str, offset: int, length: int) -> bytes:
    """Return bytes of a file of a bundle, for a rank that fetches them; raises BundleError for other files."""
    if name not in bundle.manifest.files or not 0 <= length <= PIECE_BYTES:
        raise BundleError("N002", f"a rank asked for {length} bytes of {name!r}", where=str(bundle.path))
    with bundle.file(name).open("rb") as stream:
        stream.seek(offset)
        return stream.read(length)


def _is_here(bundle: Bundle) -> bool:
    """Return whether the bundle's files are here, all bytes as compiled."""
    try:
        for name in bundle.list_files(with_compiled=True):
            _check_once(bundle, name)
    except (BundleError, OSError):
        return False
    return not bundle.manifest.linked or all(
        bundle.linked_file(name).is_file() and bundle.linked_file(name).stat().st_size == link.bytes
        for name, link in bundle.manifest.linked.items()
    )


def _check_once(bundle: Bundle, name: str) -> None:
    """Raise BundleError unless a file is as compiled; a file that did not change is not hashed again."""
    path = bundle.file(name)
    stat, record = path.stat(), bundle.manifest.files[name]
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino} {record.sha256}"
    marker = _find_folder() / f"checked-{hashlib.sha256(key.encode()).hexdigest()}"
    if stat.st_size != record.bytes or not marker.exists():
        bundle.check_files(name)
    with suppress(OSError):  # then it is hashed next time, too
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def _find_folder() -> Path:
    """Return the folder of copies, in the user's cache."""
    return measurement_cache.folder().parent / "bundles"


def _digest(bundle: Bundle, segments: Sequence[str]) -> str:
    """Return a name for the part of a bundle that some segments need."""
    hashes = {name: record.sha256 for name, record in bundle.manifest.files.items()}
    return hashlib.sha256(json.dumps([hashes, sorted(segments)], sort_keys=True).encode()).hexdigest()


def _copy(
    bundle: Bundle, segments: Sequence[SegmentRecord], states: set[str], fetch: Fetch, folder: Path, place: Path
) -> None:
    """Fetch files into a new folder, and put it in place when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
    try:
        copy, ranges = replace(bundle, path=temporary), set[tuple[str, int, int]]()
        for segment in segments:
            _fetch_range(copy, segment.file, 0, bundle.manifest.files[segment.file].bytes, fetch)
            copy.check_files(segment.file)
            parent = os.path.dirname(segment.file)
            for location, offset, length in _list_external_ranges(copy.file(segment.file)):
                ranges.add((os.path.normpath(f"{parent}/{location}"), offset, length))
        stored = [state.initial for state in bundle.manifest.states if state.initial and state.input in states]
        stored += [bundle.manifest.streamed[name] for segment in segments for name in segment.streamed]
        ranges |= {(record.file, record.offset, record.bytes) for record in stored}
        for name, offset, length in sorted(ranges):
            _fetch_range(copy, name, offset, length, fetch)
        with suppress(OSError):  # another rank was faster
            temporary.rename(place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _list_external_ranges(path: Path) -> list[tuple[str, int, int]]:
    """Return (location, offset, length) of all external data of a model file, in the order of the bytes.

    Locations are relative to the folder of the file. Nothing is read but the model itself.
    """
    graph = onnx.load(path, load_external_data=False).graph
    tensors = [*graph.initializer, *(tensor for node in graph.node for tensor in iterate_tensors(node))]
    ranges = set()
    for tensor in tensors:
        if tensor.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            ranges.add((entries["location"], int(entries.get("offset") or 0), int(entries["length"])))
    return sorted(ranges)


def _fetch_range(copy: Bundle, name: str, offset: int, length: int, fetch: Fetch) -> None:
    """Fetch a range of a file; the rest of the file is a hole."""
    path = copy.file(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "w+b") as stream:
        stream.truncate(copy.manifest.files[name].bytes)
        stream.seek(offset)
        for start in range(0, length, PIECE_BYTES):
            piece = fetch(name, offset + start, min(PIECE_BYTES, length - start))
            if len(piece) != min(PIECE_BYTES, length - start):
                message = f"got {len(piece)} bytes of {name!r} at {offset + start}"
                raise ExecutionError("K007", message, hint="the bundle has changed since it was opened")
            stream.write(piece)


def _remove_unused(folder: Path) -> None:
    """Remove copies that were not used for long, and unfinished ones."""
    for path in folder.glob("*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > MAX_UNUSED_SECONDS:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
