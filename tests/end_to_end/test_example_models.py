"""Real architectures, every placer, one to three devices: valid ONNX files, equal results.

The nine light architectures of the onnx wheel and the examples of this repository, with random weights. The six with
32 MB of weights and more have an eighth of their channels; alexnet as a whole is in tests/export/test_merge.py.
"""

import json
import os
import shutil
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnx
import onnxruntime
import pytest

import models
import onnxplace
import onnxplace.model.model
from onnxplace.machine.hardware import local_target
from onnxplace.measure.compare import compare_output
from tests.support.narrow_models import WIDE, narrow_model

# Placers by the number of devices. Any placer makes of one device what `single` makes; cuts of the others are alike.
PLACERS = {1: ("single",), 2: ("m-topo", "m-etf", "m-sct"), 3: ("m-etf",)}
SHAPES = {
    "two-tower": {"images": 2, "texts": 3},
    "transformer": {"batch": 2, "seq": 16},
    "decoder": {"batch": 2, "seq": 3, "past": 16},
}
PROFILE = "profile{repeat=3,seconds=0.5}"


def whole_model_outputs(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds)))


def assert_valid_onnx(bundle: onnxplace.Bundle) -> None:
    for name in bundle.manifest.files:
        if name.endswith(".onnx"):
            onnx.checker.check_model(bundle.path / name)


@pytest.mark.parametrize("name", sorted(models.MODELS))
@pytest.mark.sampled(6)
def test_bundles_of_real_architectures_are_valid_and_compute_the_same_as_the_model(name: str, tmp_path: Path):
    path = tmp_path / "model.onnx"
    models.save(narrow_model(name) if name in WIDE else models.build(name), path)
    shape = SHAPES.get(name, {})
    feeds = onnxplace.model.bind(onnxplace.model.load(path), shape, {}).feeds()
    expected = whole_model_outputs(path, feeds)
    costs: dict[frozenset[str], Path] = {}
    for devices, placers in PLACERS.items():
        ids = [f"cpu:{index}" for index in range(devices)]
        classes = frozenset(device.cost_class for device in local_target(ids).devices)
        for placer in placers:
            profile = f"profile{{costs={json.dumps(str(costs[classes]))}}}" if classes in costs else PROFILE
            bundle = onnxplace.compile(
                path,
                tmp_path / "bundle",
                devices=ids,
                shape=shape,
                pipeline=f"optimize,{profile},coplace,fuse,{placer},split,emit",
            )
            assert_valid_onnx(bundle)
            with onnxplace.InferenceSession(bundle) as session:
                outputs = dict(zip([item.name for item in session.get_outputs()], session.run(None, feeds)))
            assert outputs.keys() == expected.keys()
            for output, want in expected.items():
                difference = compare_output(output, outputs[output], want)
                assert difference.equal, f"{name}, {placer}, {devices} devices: {difference}"
                assert np.ptp(want.astype(np.float64)) > 0, "a constant output would prove nothing"
            if classes not in costs:
                costs[classes] = shutil.copy(bundle.path / "costs.json", tmp_path / f"costs-{devices}.json")
            shutil.rmtree(bundle.path)
