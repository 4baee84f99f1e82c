"""Bundles with two plans: the model on one device, and placed on two; and changes to their manifests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

import onnxplace
from onnxplace.bundle.bundle import MANIFEST_FILE, Bundle
from onnxplace.bundle.manifest import SizeRecord
from onnxplace.driver.join_plans import join_plans
from tests.conftest import FAST_PIPELINE, branches

ONE_DEVICE = "optimize,profile{estimate=true},coplace,single,split,emit"
BRANCH_SIZES: Sequence[Mapping[str, int]] = ({"batch": 4}, {"batch": 64})


def make_plan_bundle(
    folder: Path,
    model: onnx.ModelProto | None = None,
    sizes: Sequence[Mapping[str, int]] = BRANCH_SIZES,
    second: str = FAST_PIPELINE,
    **options: Any,
) -> Bundle:
    """Return a bundle of a model, by default of two branches, with plans for two sizes; further ones are between.

    The pipeline of the second plan is `second`.
    """
    file = folder / "model.onnx"
    onnx.save(model or branches(), file)
    bundles = [
        onnxplace.compile(
            file, folder / name, devices="cpu:0,cpu:1", shape=size, pipeline=pipeline, trial=False, **options
        )
        for name, size, pipeline in zip(("planned.bundle", "other"), sizes, (ONE_DEVICE, second))
    ]
    records = [
        SizeRecord(dimensions=dict(size), seconds=seconds, weight=weight)
        for size, seconds, weight in zip(sizes, ((1e-4, 2e-4), (4e-3, 3e-3), (2e-3, 2e-3)), (1, 0.5, 0))
    ]
    return Bundle.open(join_plans(bundles, {}, records).path)


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest."""
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def edit_plan(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of the second plan, whose hash the bundle gets."""
    edit(bundle / "plan1" / MANIFEST_FILE, change)
    edit(bundle / MANIFEST_FILE, lambda data: data["files"].update(describe(bundle, f"plan1/{MANIFEST_FILE}")))


def replace_plan_file(bundle: Path, name: str, content: bytes) -> None:
    """Replace a file of the second plan, as if the compiler had written it."""
    (bundle / "plan1" / name).write_bytes(content)
    edit(bundle / MANIFEST_FILE, lambda data: data["files"].update(describe(bundle, f"plan1/{name}")))
    edit_plan(bundle, lambda data: data["files"].update(describe(bundle / "plan1", name)))


def describe(folder: Path, name: str) -> dict[str, Any]:
    """Return the entry of a file in a manifest."""
    content = (folder / name).read_bytes()
    return {name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}}
