"""An NPU that computes in float16: QNN's simulator, in a process of its own, all of whose sessions then do."""

from typing import Any

import numpy as np
import pytest

import models
import onnxplace
from onnxplace.driver.compile import compile_model
from onnxplace.facts import Profile
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model
from onnxplace.passes.profiling.node_errors import measure_errors
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.utils.subprocesses import run_in_child

pytestmark = pytest.mark.slow
DEVICES = "qnn/npu:0{precision=float16},cpu:0"
# Costs are estimates: the simulator takes hundreds of times as long as the CPU.
PIPELINE = "optimize,profile{estimate=true},coplace{join=never},m-etf,split,emit"


def compile_within(maximum: float) -> dict[str, Any]:
    """Return what `compile` and `verify` say of a small network of convolutions."""
    compiled = compile_model(
        models.build("squeezenet"), "out.bundle", devices=DEVICES, pipeline=PIPELINE, max_error=maximum, force=True
    )
    verified = onnxplace.verify(compiled.bundle, sizes=0)
    nodes = {device.id: device.nodes for device in compiled.bundle.manifest.devices}
    return {"nodes": nodes, "pipeline": compiled.pipeline, "verified": verified}


def add_up_errors(_: None) -> tuple[float, float, float]:
    """Return the root of the sum of squared errors of a transformer's nodes, their sum, and the error of the whole."""
    model = bind(load(models.build("transformer")), {"batch": 1, "seq": 16}, {})
    state, _ = Pipeline.parse("optimize,profile{repeat=3,seconds=0}").run(
        State(local_target("cpu:0")).with_facts(model)
    )
    model, profile = state[Model], state[Profile]
    npu, _ = local_target(DEVICES).devices
    errors = measure_errors(model, profile.graph, model.feeds(), npu.address, profile.unit)
    of_units = np.array([errors[profile.unit == unit].max() for unit in range(profile.unit.max() + 1)])
    # All nodes as one kernel: the error of what leaves it, which are the outputs.
    whole = measure_errors(model, profile.graph, model.feeds(), npu.address, np.zeros_like(profile.unit))
    return float(np.sqrt((of_units**2).sum())), float(of_units.sum()), float(whole.max())


def test_errors_of_nodes_add_up_as_their_squares():
    together, total, whole = run_in_child(add_up_errors, None, "adding up errors", "qnn/npu:0")
    assert whole / 3 < together < 3 * whole
    assert total > 3 * whole


@pytest.mark.parametrize("maximum", [1e-1, 1e-3])
def test_the_npu_computes_what_the_maximum_allows(maximum, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run_in_child(compile_within, maximum, "compiling", "qnn/npu:0")
    on_npu, on_cpu = result["nodes"].values()
    assert (on_npu > 0, on_cpu > 0) == (True, maximum < 1e-1)
    assert ("limit-errors" in result["pipeline"]) == (maximum < 1e-1)
    assert result["verified"].equal
    assert result["verified"].outputs[0].max_rel_error <= maximum
    assert result["verified"].precisions["qnn/npu:0"] == "float16"
