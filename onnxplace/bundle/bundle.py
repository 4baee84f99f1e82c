"""A compiled model on disk: a manifest, one ONNX file per segment, each weight once.

    bundle/manifest.json            devices, segments, values, programs, predictions, hashes
    bundle/costs.json               the costs it was compiled with
    bundle/segments/cpu0-000.onnx   plain ONNX, one per segment
    bundle/segments/whole.onnx      the optimised model, unsplit, over the same weights
    bundle/segments/weights.bin     every weight once
    bundle/plan1/                   a further plan, for other sizes: a bundle over the same weights

Compiled with `--link-weights`, it holds no weights: they stay in the model's own files, in or below the folder that
contains the bundle. Nothing in a bundle is executed except ONNX. No path in it may lead out of it, or out of that
folder.
"""

from __future__ import annotations

import _thread
import hashlib
import os
import queue
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from pydantic import ValidationError

from onnxplace._version import __version__
from onnxplace.bundle.bundle_routes import find_route_of_device, move_to_route
from onnxplace.bundle.manifest import (
    SCHEMA_VERSION,
    FileRecord,
    InitialRecord,
    InputRecord,
    LinkRecord,
    Manifest,
    OutputRecord,
    StateRecord,
    ValueRecord,
)
from onnxplace.bundle.manifest_checks import DAMAGED_HINT, check_manifest, check_plans
from onnxplace.errors import BundleError, InputError, TargetError, UsageError, format_count, format_names
from onnxplace.feeds.feeds import Array, Declared, numpy_type
from onnxplace.feeds.synthetic import zero_feeds
from onnxplace.target.kind_table import import_by_path
from onnxplace.target.target import Target
from onnxplace.utils.file_locks import find_moved_aside
from onnxplace.utils.files import format_path, open_input, parse_json, suggest_file
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.quantities import format_bytes, format_first, format_milliseconds, format_object

BUNDLE_FORMAT = "onnxplace bundle"
MANIFEST_FILE = "manifest.json"
COSTS_FILE = "costs.json"
SEGMENTS_FOLDER = "segments"
WHOLE_MODEL_FILE = f"{SEGMENTS_FOLDER}/whole.onnx"
WEIGHTS_FILE = "weights.bin"
# Files up to this size are hashed whenever a bundle is opened; larger ones only with check="all".
MAX_SMALL_FILE_BYTES = 16 << 20
# Files up to this size are hashed before sessions open: it takes no longer than to let another thread do it.
MAX_TINY_FILE_BYTES = 256 << 10

# A trial is unsure beyond this share of waiting or drift; otherwise the doubt is one of costs.
DOUBTFUL_SHARE = 0.05

Check = Literal["small", "all"]
HashedFiles = Literal["tiny", Check]
UNTRUSTED_HINT = "do not trust this bundle; compile the model again"
# A manifest of 100 000 segments takes about 100 MiB.
MAX_MANIFEST_BYTES = 256 << 20


def describe_step(manifest: Manifest) -> str:
    """Return one line: the step, how many times as fast as one device it is, and how far above the bound.

    The step is that of the trial, as is one device's if it took part; without a trial, both follow from costs.
    """
    predicted, trial, speedup = manifest.predicted, manifest.trial, manifest.speedup
    parts = [f"{format_milliseconds(manifest.step_seconds)} a step{'' if trial else ', predicted'}"]
    if manifest.streams:
        parts.append(f"of which {format_milliseconds(predicted.weight_wait_seconds)} waits for weights")
    if len({segment.device for segment in manifest.segments}) == 1 and not manifest.routes:
        parts.append(
            "on one device" if predicted.single_device_fits else "on one device, which cannot hold all weights"
        )
    elif speedup is not None:
        single = format_milliseconds(predicted.single_device_seconds)
        where = single if predicted.single_device_fits else f"{single}, where it does not fit"
        if trial and trial.one_device_seconds:
            where += f"; {trial.speedup_low:.2f} to {trial.speedup_high:.2f} in eight of ten turns"
        parts.append(f"{speedup:.2f} times as fast as one device ({where})")
    elif predicted.single_device_seconds == 0:
        parts.append("no single device takes all nodes")
    if manifest.gap is not None:
        planned = f"planned as {format_milliseconds(trial.planned_seconds)}, " if trial else ""
        parts.append(f"{planned}{describe_gap(manifest.gap)}")
    if manifest.is_unsure:
        waiting, drift = (trial.waiting, trial.uncertainty) if trial else (0.0, 0.0)
        share, cause = max(
            (waiting, f"other programs used the cores for {waiting:.0%} of the time"),
            (drift, f"the speed of the machine drifted by {drift:.0%}"),
        )
        reason = cause if share > DOUBTFUL_SHARE else "see note C004"
        parts.append(f"unsure: {reason}, repeat when the machine is idle")
    return ", ".join(parts)


def describe_gap(gap: float) -> str:
    """Return how far a step is above the lower bound of the same costs, in words.

    >>> describe_gap(0.061), describe_gap(0.0), describe_gap(2.4)
    ('6 % above the bound', 'at the bound', '3.4 times the bound')
    """
    if gap < 0.005:
        return "at the bound"
    return f"{100 * gap:.0f} % above the bound" if gap < 1 else f"{gap + 1:.1f} times the bound"


@dataclass(frozen=True)
class Bundle:
    """A compiled model: its folder and its manifest."""

    path: Path
    manifest: Manifest

    def __repr__(self) -> str:
        manifest = self.manifest
        devices = [
            f"{item.id}: {format_count(item.nodes, 'node')}, peak {format_bytes(item.peak_bytes)}"
            for item in manifest.devices
        ]
        names = (format_names((item.name for item in items), quoted=False) for items in (self.inputs, self.outputs))
        return format_object(
            f"Bundle {str(self.path)!r}: {manifest.model}, placer {manifest.placer}",
            format_first(devices),
            describe_step(manifest),
            " -> ".join(names),
        )

    def _repr_html_(self) -> str | None:
        """Return what a notebook shows."""
        # By name: reports know bundles, and not the other way round.
        show_bundle: Callable[[Bundle], str | None] = import_by_path("onnxplace.reports.page_rendering:show_bundle")
        return show_bundle(self)

    @staticmethod
    def open(path: str | Path, check: Check = "small") -> Bundle:
        """Open a bundle and check its files.

        Raises BundleError, naming the file, if anything is missing, altered, unsafe or too new.

        >>> Bundle.open("bundle").manifest.predicted.step_seconds  # doctest: +SKIP
        """
        if check not in get_args(Check):
            message = f"expected the check 'small' or 'all', got {check!r}"
            raise UsageError("U001", message, where="load", hint="'small' hashes small files only, 'all' every file")
        bundle = Bundle(Path(path), _read_manifest(Path(path)))
        bundle._check(check)
        return bundle

    @staticmethod
    @contextmanager
    def open_while_hashing(path: str | Path) -> Iterator[Bundle]:
        """Yield a bundle whose larger files, among those that `open` hashes, are hashed during the block.

        The block may open sessions, which may only be used after it: its end waits for the hashes. Raises the errors of
        `open` before the block or at its end, there in place of the block's own errors, which they explain. Files that
        changed meanwhile are refused, too: sessions may have read other bytes than were hashed.
        """
        bundle = Bundle(Path(path), _read_manifest(Path(path)))
        files, names = bundle.manifest.files, bundle.list_files(with_compiled=False)
        larger = [name for name in names if MAX_TINY_FILE_BYTES < files[name].bytes <= MAX_SMALL_FILE_BYTES]
        states, answers = bundle._read_states(larger), queue.SimpleQueue[bool]()

        def hash_larger() -> None:
            answers.put(True)
            with suppress(Exception):  # `open` raises it again
                bundle.check_files(*larger, check="small")
                answers.put(True)
            answers.put(False)

        # A `threading.Thread` would make the main thread wait for another one, too.
        _thread.start_new_thread(hash_larger, ()) if larger else hash_larger()
        answers.get()  # the thread has the interpreter, until it hashes

        def require_hashed() -> None:
            if not answers.get() or bundle._read_states(larger) != states:
                Bundle.open(path)
                message = "its files changed while it was opened"
                raise BundleError("N002", message, where=str(path), hint="open it when no program writes to it")

        try:
            bundle._check("tiny")
            yield bundle
        except Exception:  # no interrupts, which do not wait
            require_hashed()
            raise
        require_hashed()

    def _read_states(self, names: Sequence[str]) -> list[tuple[int, int, int]]:
        """Return what changes with each of these files; nothing if one is missing."""
        with suppress(OSError):
            return [(s.st_ino, s.st_size, s.st_mtime_ns) for s in map(os.stat, map(self.file, names))]
        return []

    def _check(self, check: HashedFiles) -> None:
        path, manifest = self.path, self.manifest
        try:
            self.check_files(*self.list_files(with_compiled=check == "all"), check=check)
            for name, link in manifest.linked.items():
                _check_link(self.linked_file(name), link, check)
        except OSError as problem:
            message = f"a file listed in the manifest cannot be read: {problem.strerror}"
            raise BundleError("N002", message, where=str(problem.filename or path), hint=DAMAGED_HINT) from None
        weights = f"{SEGMENTS_FOLDER}/{WEIGHTS_FILE}"
        models = [item.file for segment in manifest.segments for item in (segment, segment.static) if item]
        plans = [f"{name}/{MANIFEST_FILE}" for name in manifest.plans]
        for name in (WHOLE_MODEL_FILE, weights, *models, *plans, *sorted(self.compiled_files)):
            if name not in manifest.files:
                message = f"expected {name!r} among the files of the manifest"
                raise BundleError("N002", message, where=str(path / MANIFEST_FILE))
        check_manifest(manifest, path / MANIFEST_FILE)
        # Only read here, as a plan may link to itself.
        check_plans(manifest, [_read_manifest(self.file(name)) for name in manifest.plans], path / MANIFEST_FILE)

    def file(self, name: str) -> Path:
        """Return the path of a file in the bundle; raises BundleError if the name leads outside."""
        return self._resolve_inside(self._root, name, "the bundle")

    @cached_property
    def compiled_files(self) -> frozenset[str]:
        """Return the files of compiled and optimised models, also those of further plans, which users may remove."""
        segments, plans = self.manifest.segments, tuple(f"{name}/" for name in self.manifest.plans)
        names = {name for segment in segments for item in segment.compiled for name in item.files}
        names |= {name for name in self.manifest.files if name.startswith(plans) and _COMPILED_PATTERN.search(name)}
        return frozenset(names | {segment.optimised for segment in segments} - {""})

    def list_files(self, with_compiled: bool) -> list[str]:
        """Return the files that have to be here, and those of compiled models that are, if asked for."""
        files = self.manifest.files
        is_here = {name: with_compiled and self.file(name).exists() for name in self.compiled_files}
        return [name for name in files if is_here.get(name, True)]

    def check_files(self, *names: str, check: HashedFiles = "all") -> None:
        """Raise BundleError unless these files are as the compiler wrote them."""
        for name in names:
            _check_file(self.file(name), self.manifest.files[name], check)

    def linked_file(self, name: str) -> Path:
        """Return the path of a linked weights file; raises BundleError if the name leads elsewhere."""
        return self._resolve_inside(self.link_root, name, "the folder that contains the bundle")

    def _resolve_inside(self, folder: Path, name: str, folder_text: str) -> Path:
        # By os.path: methods of Path take three times as long, a quarter of the time to open many small segments.
        parts, inside = name.replace(os.sep, "/").split("/"), os.path.join(folder, "")
        unsafe = "\0" in name or os.path.isabs(name) or ".." in parts
        # Where nothing below the folder is a link, nothing leads outside; Windows has other links, too.
        paths = accumulate(parts[1:], "{}/{}".format, initial=inside + parts[0])
        has_links = os.name != "posix" or any(map(os.path.islink, paths))
        if unsafe or (has_links and not os.path.join(os.path.realpath(inside + name), "").startswith(inside)):
            message, where = f"it names a file outside {folder_text}: {name!r}", str(self.path / MANIFEST_FILE)
            raise BundleError("N002", message, where=where, hint=UNTRUSTED_HINT)
        return (self.path if folder is self._root else folder) / name

    @cached_property
    def _root(self) -> Path:
        return self.path.resolve()

    @property
    def link_root(self) -> Path:
        """Return the folder below which the paths of linked weights begin; raises BundleError for one too far above."""
        if self.manifest.link_levels > 1 and not (self._root.parent / MANIFEST_FILE).is_file():
            raise BundleError("N002", "this plan is not in its bundle", where=str(self.path), hint=UNTRUSTED_HINT)
        return self._root.parents[self.manifest.link_levels - 1]

    @cached_property
    def plans(self) -> tuple[Bundle, ...]:
        """Return this bundle and its plans for other sizes, which run as bundles of their own; raises BundleError."""
        return (self, *(Bundle.open(self.file(name)) for name in self.manifest.plans))

    @property
    def is_plan(self) -> bool:
        """Return whether it is a further plan of the bundle around it, which has the hash of its manifest."""
        manifest = self.manifest
        return manifest.link_levels > 1 or any(link.is_shared for link in manifest.linked.values())

    @property
    def session_entries(self) -> dict[str, str]:
        """Return the session options by which ONNX Runtime finds linked weights."""
        return external_data_options(self.link_root) if self.manifest.linked else {}

    @cached_property
    def target(self) -> Target:
        """Return the devices and links that the bundle was compiled for."""
        return self.manifest.target.target()

    @property
    def inputs(self) -> list[Declared]:
        """Return the inputs in the model's order."""
        return [Declared(item.name, item.dtype, item.shape, item.optional) for item in self.manifest.inputs]

    def takes_sizes(self, feeds: Mapping[str, Any]) -> bool:
        """Return whether the fixed sizes of inputs are those of feeds, which have the parts of split states."""
        values = self.manifest.values
        shapes = ((values[name].shape, getattr(feeds[name], "shape", ())) for name in feeds if name in values)
        return all(size == fed for own, other in shapes for size, fed in zip(own or (), other) if isinstance(size, int))

    @property
    def outputs(self) -> list[Declared]:
        """Return the outputs in the model's order."""
        return [Declared(item.name, item.dtype, item.shape) for item in self.manifest.outputs]

    @property
    def returned_outputs(self) -> list[Declared]:
        """Return the outputs that a run returns by default: all except states."""
        state_outputs = {item.output for item in self.manifest.states}
        return [item for item in self.outputs if item.name not in state_outputs]

    @property
    def state_inputs(self) -> list[Declared]:
        """Return the inputs that default to values of the previous call."""
        state_inputs = {item.input for item in self.manifest.states}
        return [item for item in self.inputs if item.name in state_inputs]

    def zero_states(self, **sizes: int) -> dict[str, Array]:
        """Return zeros for the first call, by state input.

        Args:
            sizes: sizes of symbolic dimensions, by name.

        Raises:
            FeedError: listing the dimensions that have no size.

        >>> session.run(None, {"tokens": prompt, **bundle.zero_states(batch=1, past=0)})  # doctest: +SKIP
        """
        return zero_feeds(self.state_inputs, sizes)

    def initial_states(self) -> dict[str, Array]:
        """Return the initial values that the model has for its states, by state input.

        They are those of a first call that feeds no states, such as the parameters of a training step. The arrays share
        the memory of the bundle's files, read-only.

        >>> bundle.initial_states()["layers.0.weight"].shape  # doctest: +SKIP
        (64, 32)
        """
        return {state.input: self.read_initial_state(state) for state in self.manifest.states if state.initial}

    def read_initial_state(self, state: StateRecord) -> Array:
        """Return the initial value of a state that has one; it shares the memory of its file, read-only."""
        assert state.initial is not None
        dtype = next(item.dtype for item in self.manifest.inputs if item.name == state.input)
        return self._map_value(state.initial, dtype)

    def streamed_weights(self) -> dict[str, Array]:
        """Return the weights that stream, by name; they share the memory of their files, read-only."""
        return {name: self._map_value(record, record.dtype) for name, record in self.manifest.streamed.items()}

    def _map_value(self, record: InitialRecord, dtype: str) -> Array:
        """Return a value that shares the memory of its file, read-only; `dtype` is ONNX Runtime's name."""
        element = numpy_type(dtype)
        assert element is not None, "checked when the bundle was opened"
        if not record.bytes:
            return np.zeros(record.shape, element)
        file = (self.linked_file if record.linked else self.file)(record.file)
        array = np.asarray(np.memmap(file, element, "r", record.offset, record.shape))
        return array if array.flags.aligned else array.copy()


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST_FILE
    if not os.path.lexists(file):
        hint = "`onnxplace compile MODEL -o DIR` writes one"
        if aside := find_moved_aside(path):
            hint = f"an interrupted compile moved it to {aside}; move it back, or compile again, which restores it"
        elif os.path.isfile(path):  # unlike Path.is_file, it takes any text
            hint = _suggest_bundle(path)
        elif not os.path.lexists(path):
            hint = suggest_file(path) or hint
            raise BundleError("N001", "not a bundle: there is no such folder", where=format_path(path), hint=hint)
        raise BundleError("N001", "not a bundle: it has no manifest.json", where=format_path(path), hint=hint)
    data = _parse_manifest(path, file)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, str) or not _VERSION_PATTERN.fullmatch(version):
        message = f"expected a schema_version such as {SCHEMA_VERSION!r}"
        raise BundleError("N002", message, where=str(file), hint=DAMAGED_HINT)
    major = SCHEMA_VERSION.partition(".")[0]
    if int(version.partition(".")[0]) > int(major):
        expected = f"expected {major}.x, which onnxplace {__version__} reads"
        message = f"a newer onnxplace wrote it in format {version}, {expected}"
        hint = "update onnxplace, or compile the model again with this one"
        raise BundleError("N003", message, where=str(file), hint=hint)
    try:
        manifest = Manifest.model_validate(data)
        manifest.target.target()
        return manifest
    except TargetError as problem:
        message, where = f"its devices are invalid: {problem.message}", f"{file}, {problem.where}"
        raise BundleError("N002", message, where=where, hint=DAMAGED_HINT) from None
    except ValidationError as problem:
        first = problem.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BundleError("N002", f"the manifest is malformed at {field!r}: {first['msg']}", where=str(file)) from None


def _suggest_bundle(file: Path) -> str:
    """Return what to do with a file, probably a model, where a bundle is expected."""
    bundle = file.with_suffix(".bundle")
    if os.path.isfile(bundle / MANIFEST_FILE):
        return f"{format_path(bundle)} is one"
    return f"a model is compiled first: onnxplace compile {format_path(file)} -o {format_path(bundle)}"


_COMPILED_PATTERN = re.compile(r"\.(compiled|optimised)[._]")
_VERSION_PATTERN = re.compile(r"[0-9]{1,6}\.[0-9]{1,6}")


def _parse_manifest(path: Path, file: Path) -> Any:
    """Return a manifest's JSON; raises BundleError if the file is not JSON or lies outside the bundle."""
    try:
        if os.path.islink(file) and not file.resolve().is_relative_to(path.resolve()):
            raise BundleError("N002", "it is a link out of the bundle", where=str(file), hint=UNTRUSTED_HINT)
        with open_input(file, "N002") as stream:
            if (size := os.fstat(stream.fileno()).st_size) > MAX_MANIFEST_BYTES:
                message = f"expected at most {MAX_MANIFEST_BYTES} bytes, got {size}"
                raise BundleError("N002", message, where=str(file), hint=UNTRUSTED_HINT)
            return parse_json(stream.read(size), "N002", "a manifest", str(file))
    except BundleError:
        raise
    except InputError as problem:
        raise BundleError(problem.code, problem.message, where=problem.where, hint=DAMAGED_HINT) from None
    except (OSError, ValueError, RuntimeError) as problem:  # RuntimeError: links in a circle, before Python 3.13
        reason = problem.strerror if isinstance(problem, OSError) else problem
        message = f"the manifest cannot be read: {reason}"
        raise BundleError("N002", message, where=str(file), hint=DAMAGED_HINT) from None


def _check_file(file: Path, record: FileRecord, check: HashedFiles) -> None:
    """Raise BundleError unless a file has the recorded size and, if `check` demands it, the recorded hash."""
    if not os.path.isfile(file):
        reason = "expected a regular file of the bundle" if file.exists() else "this file of the bundle is missing"
        raise BundleError("N002", reason, where=str(file), hint=DAMAGED_HINT)
    size = os.path.getsize(file)
    if size != record.bytes:
        message = f"expected {record.bytes} bytes, as the manifest says, got {size}"
        hint = "it was altered or truncated; compile the model again"
        raise BundleError("N002", message, where=str(file), hint=hint)
    limit = MAX_TINY_FILE_BYTES if check == "tiny" else MAX_SMALL_FILE_BYTES
    if (check == "all" or size <= limit) and compute_sha256(file) != record.sha256:
        message = "this file changed since the compile: its SHA-256 differs"
        raise BundleError("N002", message, where=str(file), hint="it was altered; compile the model again")


def _check_link(file: Path, link: LinkRecord, check: HashedFiles) -> None:
    """Raise BundleError if a linked weights file changed since the compile."""
    hint = "compile the model again, or restore the file as it was then"
    if not file.is_file():
        hint = "keep bundle and weights in the folder where it was compiled, and a plan in its bundle; or compile again"
        message = "this weights file, to which the bundle refers, is missing"
        raise BundleError("N009", message, where=str(file), hint=hint)
    status = file.stat()
    if status.st_size != link.bytes:
        message = f"this weights file changed since the compile: expected {link.bytes} bytes, got {status.st_size}"
        raise BundleError("N009", message, where=str(file), hint=hint)
    # A copy, or a file that was only touched, has other times and the same bytes.
    is_same = (status.st_mtime_ns, status.st_ctime_ns) == (link.mtime_ns, link.ctime_ns)
    if link.is_shared:
        is_same = status.st_size > MAX_SMALL_FILE_BYTES
    if (check == "all" or not is_same) and compute_sha256(file) != link.sha256:
        message = "this weights file changed since the compile: its SHA-256 differs"
        raise BundleError("N009", message, where=str(file), hint=hint)


def describe_linked_file(file: Path) -> LinkRecord:
    """Describe a weights file as it is now; reads it once."""
    status = file.stat()
    sha256, times = compute_sha256(file), {"mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
    return LinkRecord(sha256=sha256, bytes=status.st_size, **times)


def external_data_options(folder: Path) -> dict[str, str]:
    """Return the session option that makes ONNX Runtime look for external data below `folder`."""
    return {"session.model_external_initializers_file_folder_path": str(folder)}


def compute_sha256(file: Path) -> str:
    """Return the SHA-256 of a file, without loading a large one whole."""
    with open(file, "rb", buffering=0) as stream:
        # At once, as each step waits for the interpreter, which the thread that opens sessions has.
        if os.fstat(stream.fileno()).st_size <= MAX_SMALL_FILE_BYTES:
            return hashlib.sha256(stream.read()).hexdigest()
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------------- bundles of a bundle


# They run like any other bundle, from the same files; nothing is written. They have one route.


def list_crossing_values(manifest: Manifest) -> Mapping[tuple[str, str], tuple[str, ...]]:
    """Return the values that cross in one inference, by source and destination, in sending order."""
    steps = ((device, step) for device, program in manifest.programs.items() for step in program if step.op == "send")
    crossing = group_pairs(((device, step.peer), step.value) for device, step in steps)
    return {ends: tuple(values) for ends, values in crossing.items()}


def record_crossing_values(bundle: Bundle) -> Bundle:
    """Return a bundle whose outputs are the values that cross between devices.

    Each output has the name of its value. States are no longer stored: their inputs have to be fed. Crossing values
    stay until the end of a request.
    """
    manifest = bundle.manifest
    sent = {name: device for (device, _), names in list_crossing_values(manifest).items() for name in names}
    programs = {
        device: tuple(step for step in program if not (step.op == "free" and sent.get(step.value) == device))
        for device, program in manifest.programs.items()
    }
    outputs = tuple(
        OutputRecord(name=name, dtype=manifest.values[name].dtype, shape=manifest.values[name].shape, value=name)
        for name in sent
    )
    updates = {"programs": programs, "outputs": outputs, "states": (), "routes": ()}
    return replace(bundle, manifest=manifest.model_copy(update=updates))


def extract_device_part(bundle: Bundle, device: str) -> Bundle:
    """Return a bundle of one device's part.

    Its inputs are those of the model that it reads, then the values that it received. Its outputs are those of the
    model that it computes; it sends nothing. States are no longer stored: their inputs have to be fed. The part is that
    of the first route that uses the device.
    """
    manifest = bundle.manifest
    if (route := find_route_of_device(manifest, device)) is not None:
        manifest = move_to_route(manifest, route)
    program = manifest.programs.get(device, ())
    segments = tuple(segment for segment in manifest.segments if segment.device == device)
    read = {name for segment in segments for name in segment.inputs}
    computed = {name for segment in segments for name in segment.outputs}
    received = [step.value for step in program if step.op == "receive"]
    present, kept = read | computed | set(received), {segment.id for segment in segments}
    records = {name: record for name, record in manifest.values.items() if name in present}
    inputs = [item for item in manifest.inputs if item.name in read]
    inputs += [InputRecord(name=name, dtype=records[name].dtype, shape=records[name].shape) for name in received]
    updates = {
        "inputs": tuple(inputs),
        "outputs": tuple(item for item in manifest.outputs if item.value in computed),
        "states": (),
        "routes": (),
        "segments": segments,
        "streams": tuple(stream for stream in manifest.streams if stream.device == device),
        "values": {name: _keep_segments(record, kept) for name, record in records.items()},
        "programs": {device: tuple(step for step in program if step.op in ("run", "free"))},
    }
    return replace(bundle, manifest=manifest.model_copy(update=updates))


def _keep_segments(record: ValueRecord, kept: Set[str]) -> ValueRecord:
    """Return the record of a value where there are only some segments, by id: its producer and readers among them."""
    readers = tuple(reader for reader in record.readers if reader in kept)
    producer = record.producer if record.producer in kept else None
    return record.model_copy(update={"producer": producer, "readers": readers})
