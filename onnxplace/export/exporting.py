"""Export a bundle to a folder for another program."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from onnxplace._version import __version__
from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import Manifest
from onnxplace.bundle.staging import EXPORT_FILE, EXPORT_FORMAT, prepare_output, stage_output
from onnxplace.errors import Diagnostic, InputError, UsageError, format_count, format_names, suggest_nearest
from onnxplace.export.segment_models import BundleModels
from onnxplace.pipeline.registry import list_options
from onnxplace.plugins import blame_plugin, list_entries, load_plugin
from onnxplace.utils.files import cannot_write_error, disk_error, format_path


class ExportOptions(dict[str, Any]):
    """Options that only some formats have, by name.

    >>> ExportOptions(layout="python", max_batch=8)
    {'layout': 'python', 'max_batch': 8}
    """


@dataclass(frozen=True)
class Exported:
    """A folder that was exported."""

    path: Path
    to: str
    files: tuple[str, ...]
    """Paths below the folder, without the record of the export."""
    diagnostics: tuple[Diagnostic, ...] = ()


def export_bundle(
    bundle: Bundle | str | Path,
    to: str,
    output: str | Path,
    *,
    force: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Exported:
    """Export a bundle to a folder, in the format of another program.

    Args:
        bundle: A bundle, or its path.
        to: The format: "stages", "triton", "ort-genai", "ort-layers" or "onnx-metadata", or one of a plugin.
        output: The folder, which must not exist.
        force: Whether an earlier export there is replaced.
        options: Options of the format, such as `{"layout": "python"}` for Triton (docs/export.md).

    Raises:
        BundleError: The bundle is damaged.
        UsageError: There is no such format, an option belongs to another one, or the folder exists.
        InputError: The format cannot express this bundle; the message says why.
        ExecutionError: The disk is full.
        PluginError: The format is of a plugin that has failed.

    >>> export_bundle("model.bundle", "stages", "stages").files  # doctest: +SKIP
    ('cpu0-000.onnx', 'cpu1-000.onnx', 'run.py', 'stages.json', 'weights.bin')
    """
    write = _find_writer(to, options or {})
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle, "all")
    path = Path(output)
    if path.resolve().is_relative_to(opened.path.resolve()):
        raise cannot_write_error(f"it is in {format_path(opened.path)}, which is read", path)
    notes = prepare_output(path, force, kind="export")
    with stage_output(path, force, "export") as staging:
        try:
            staging.folder.mkdir()
            notes += write(BundleModels(opened), staging.folder)
            entries = sorted(item.relative_to(staging.folder).as_posix() for item in staging.folder.rglob("*"))
            record = {
                "format": EXPORT_FORMAT,
                "to": to,
                "model": opened.manifest.model,
                "model_digest": opened.manifest.model_digest,
                "version": __version__,
                "files": entries,
            }
            (staging.folder / EXPORT_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        except OSError as problem:
            raise disk_error(problem, format_path(path)) from None
        files = tuple(name for name in entries if (staging.folder / name).is_file())
        staging.place(staging.folder)
    return Exported(path, to, files, tuple(notes))


def _find_writer(to: str, options: Mapping[str, Any]) -> Callable[[BundleModels, Path], tuple[Diagnostic, ...]]:
    """Return the writer of a format; raises UsageError for unknown formats and for options of other formats."""
    if to not in (known := list_entries("export_formats")):
        hint = f"{suggest_nearest(to, known)}; formats are {format_names(known, quoted=False)}"
        raise UsageError("U001", f"there is no format {to!r}", where="--to", hint=hint)
    write, entry = load_plugin("export_formats", to)
    with blame_plugin("export_formats", entry):
        accepted = signature(write).parameters
    for option in options:
        if option not in accepted:
            owners = [name for name, others in list_options("export_options").items() if option in others]
            hint = f"omit it, or export --to {' or '.join(owners)}" if owners else "omit it"
            flag = f"--{option.replace('_', '-')}"
            raise UsageError("U004", f"the format {to} has no option {flag}", where=flag, hint=hint)
    return partial(blame_plugin("export_formats", entry)(write), **options)


def note_routes(manifest: Manifest, to: str) -> tuple[Diagnostic, ...]:
    """Return the note that further copies of the segments are left out, if there are any."""
    if not manifest.routes:
        return ()
    message = f"the export has the first route only: {format_count(len(manifest.routes), 'further route')} left out"
    return (Diagnostic("I001", message, where=to, hint="start the exported program once for each copy"),)


def note_plans(manifest: Manifest, to: str) -> tuple[Diagnostic, ...]:
    """Return the note that plans for other sizes are left out, if there are any."""
    if not manifest.plans:
        return ()
    message = f"the export has plan 0 only, without {format_names(manifest.plans, quoted=False)}, for other sizes"
    return (Diagnostic("I001", message, where=to, hint="export another plan by its folder, BUNDLE/plan1"),)


def require_one_host(manifest: Manifest, to: str) -> None:
    """Raise InputError for a bundle of several hosts."""
    hosts = [device.host for device in manifest.target.target().devices if device.host]
    if hosts:
        message = f"the bundle is for several hosts ({format_names(dict.fromkeys(hosts))}), expected devices of one"
        hint = "compile for the devices of one host, or run it with --runtime mpi"
        raise InputError("I015", message, where=f"--to {to}", hint=hint)
