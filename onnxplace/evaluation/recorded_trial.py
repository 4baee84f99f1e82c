"""Record the trial of a bundle that was compiled before, where it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from onnxplace.bundle import MANIFEST_FILE, Bundle, DiagnosticRecord, Manifest
from onnxplace.evaluation.trial import DOUBT, apply_trial, find_trial_doubt, run_trials
from onnxplace.feeds import Array
from onnxplace.runtime import Runtime
from onnxplace.utils import write_file

# Notes that there was no trial, or that it failed: they are wrong once a later one is recorded.
NO_TRIAL_CODES = ("C020", "C021")


def replace_manifest(bundle: Bundle, manifest: Manifest) -> Bundle:
    """Replace the manifest of a bundle atomically."""
    text = manifest.model_dump_json(indent=1)
    write_file(bundle.path / MANIFEST_FILE, lambda stream: stream.write(text.encode()))
    return Bundle(bundle.path, manifest)


def record_trial(bundle: Bundle, feeds: Mapping[str, Array], runtime: Runtime) -> Bundle:
    """Run a bundle in a trial where it is used, such as on several hosts, and write the times into its manifest.

    Predictions then follow these times. An earlier trial is replaced, and so are the notes about it, or its absence.

    Args:
        bundle: It is replaced on the disk, by name and at once.
        feeds: Inputs of the sizes that the bundle was compiled for, states included.
        runtime: What runs it.

    Raises ExecutionError if a segment fails, TargetError if a device is missing, UsageError if the manifest cannot be
    written.
    """
    (trial,) = run_trials([bundle], feeds, runtime=runtime)
    manifest = apply_trial(bundle.manifest, trial)
    notes = [item for item in manifest.diagnostics if not _is_about_trial(item)]
    if doubt := find_trial_doubt(trial, manifest.model):
        notes.append(DiagnosticRecord(**asdict(doubt)))
    return replace_manifest(bundle, manifest.model_copy(update={"diagnostics": tuple(notes)}))


def _is_about_trial(note: DiagnosticRecord) -> bool:
    return note.code in NO_TRIAL_CODES or note.message.startswith(DOUBT)
