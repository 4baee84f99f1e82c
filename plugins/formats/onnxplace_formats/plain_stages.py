"""Export a bundle as plain ONNX files, and a script that runs them with ONNX Runtime and numpy alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnxplace.errors import Diagnostic
from onnxplace.export.exporting import note_plans, note_routes, require_one_host
from onnxplace.export.segment_models import BundleModels
from onnxplace.model.tensors import parse_type
from onnxplace.target.kind_table import find_kind
from onnxplace.target.target import Device
from onnxplace_formats.segment_files import write_segment_files

PLAN_FILE, SCRIPT_FILE = "stages.json", "run.py"
# Parts of the names of element types that numpy does not have.
FOREIGN_ELEMENTS = ("bfloat16", "float8", "float6", "float4", "int4", "int2")


def write_stages(models: BundleModels, folder: Path) -> tuple[Diagnostic, ...]:
    """Write a file for each segment, their weights, the plan that connects them, and the script."""
    require_one_host(models.manifest, "stages")
    names = [f"{segment.record.id}.onnx" for segment in models.segments]
    write_segment_files(folder, [(name, models, segment) for name, segment in zip(names, models.segments)])
    plan = build_plan(models, names)
    (folder / PLAN_FILE).write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("run_stages.py"), folder / SCRIPT_FILE)
    return note_routes(models.manifest, "stages") + note_plans(models.manifest, "stages")


def build_plan(models: BundleModels, names: Sequence[str]) -> dict[str, Any]:
    """Return what the script has to know: stages in their order, and the names of values between them."""
    manifest, segments = models.manifest, models.segments
    returned = {output.value for output in manifest.outputs}
    last_reader = {name: index for index, segment in enumerate(segments) for name in segment.record.inputs}
    frees: list[list[str]] = [[] for _ in segments]
    for name, index in last_reader.items():
        if name not in returned:
            frees[index].append(name)
    return {
        "model": manifest.model,
        "inputs": [
            {"name": item.name, "type": item.dtype, "shape": item.shape, "element": kind.tensor_type.elem_type}
            for item in manifest.inputs
            if (kind := parse_type(item.dtype, None))
        ],
        "outputs": [{"name": item.name, "type": item.dtype, "value": item.value} for item in manifest.outputs],
        "states": [{"output": state.output, "input": state.input} for state in manifest.states],
        "stages": [
            {
                "file": name,
                "device": segment.record.device,
                "providers": list_providers(models.devices[segment.record.device]),
                "inputs": segment.record.inputs,
                "outputs": segment.record.outputs,
                "fits_numpy": all(is_numpy_type(manifest.values[value].dtype) for value in segment.record.outputs),
                "keeps_order": segment.record.keeps_order,
                "frees": freed,
            }
            for name, segment, freed in zip(names, segments, frees)
        ],
    }


def list_providers(device: Device) -> list[tuple[str, dict[str, str]]]:
    """Return the execution providers of a device with their options, the CPU's last."""
    return [*find_kind(device.kind).list_providers(device.address), ("CPUExecutionProvider", {})]


def is_numpy_type(dtype: str) -> bool:
    """Return whether numpy has the elements of a type.

    >>> is_numpy_type("tensor(float16)"), is_numpy_type("tensor(bfloat16)")
    (True, False)
    """
    return not any(name in dtype for name in FOREIGN_ELEMENTS)
