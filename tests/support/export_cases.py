"""ONNX's conformance suite through merge and the exports: what they write is run by ONNX Runtime alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime

import onnxplace
from onnxplace.machine.ort_values import to_ort_value, to_python
from onnxplace.reports.page_data import describe_bundle
from onnxplace.reports.page_rendering import render_page
from tests.support.conformance import (
    Case,
    Outcome,
    PlainSession,
    compile_on_two_devices,
    fed_names,
    first_line,
    judge,
    require_similar,
)

Feeds = Mapping[str, Any]
Run = Callable[[Feeds], Sequence[Any]]


def export_case(kind: str, name: str) -> Outcome:
    """Return what becomes of a case in each export of a bundle whose nodes are on two devices in random order."""
    return judge(kind, name, list_export_failures)


def list_export_failures(found: Case) -> Iterator[str]:
    """Yield what goes wrong in each export."""
    fed = [dict(zip(fed_names(found.model), given)) for given, _ in found.data_sets]
    with TemporaryDirectory(prefix="onnxplace-") as name:
        folder = Path(name)
        try:
            bundle = compile_on_two_devices(found, fed[0], folder / "bundle")
        except Exception as problem:  # noqa: BLE001 - whatever it is, it counts
            yield f"compile: {first_line(problem)}"
            return
        ways = {
            "merge": _merge,
            "stages": _export_stages,
            "onnx-metadata": _export_metadata,
            "ort-layers": _export_layers,
        }
        ways["report"] = _report
        for way, prepare in ways.items():
            try:
                run = prepare(bundle, folder, found)
                for feeds, (_, expected) in zip(fed, found.data_sets):
                    if run is not None:
                        require_similar(expected, run(feeds), found)
            except Exception as problem:  # noqa: BLE001
                yield f"{way}: {type(problem).__name__}: {first_line(problem)}"


def _merge(bundle: onnxplace.Bundle, folder: Path, found: Case) -> Run:
    merged = onnxplace.merge_bundle(bundle, folder / "merged.onnx")
    return partial(_run_plain, merged.path)


def _export_metadata(bundle: onnxplace.Bundle, folder: Path, found: Case) -> Run:
    onnxplace.export_bundle(bundle, "onnx-metadata", folder / "annotated")
    path = folder / "annotated" / "model.onnx"
    onnx.checker.check_model(path)
    return partial(_run_plain, path)


def _export_layers(bundle: onnxplace.Bundle, folder: Path, found: Case) -> Run:
    onnxplace.export_bundle(bundle, "ort-layers", folder / "layers")
    return partial(_run_plain, folder / "layers" / "model.onnx")


def _run_plain(path: Path, feeds: Feeds) -> Sequence[Any]:
    model = onnx.load(path)
    return PlainSession(model).run([feeds[name] for name in fed_names(model) if name in feeds])


def _export_stages(bundle: onnxplace.Bundle, folder: Path, found: Case) -> Run:
    onnxplace.export_bundle(bundle, "stages", folder / "stages")
    script = run_path(str(folder / "stages" / "run.py"))
    plan = script["read_plan"]()
    types = PlainSession(found.model).input_types
    sessions = [script["open_stage"](stage) for stage in plan["stages"]]

    def run(feeds: Feeds) -> Sequence[Any]:
        given = {name: _fit_numpy(value, types[name]) for name, value in feeds.items() if value is not None}
        outputs = script["run"](plan, sessions, given).values()
        return [to_python(item) if isinstance(item, onnxruntime.OrtValue) else item for item in outputs]

    return run


def _fit_numpy(value: Any, kind: str) -> Any:
    """Return an input as users of the exported script feed it: as OrtValue where numpy lacks its type."""
    is_native = not isinstance(value, np.ndarray | np.generic) or np.dtype(value.dtype).isbuiltin == 1
    return (np.asarray(value) if isinstance(value, np.generic) else value) if is_native else to_ort_value(value, kind)


def _report(bundle: onnxplace.Bundle, folder: Path, found: Case) -> None:
    render_page([describe_bundle(bundle)])
