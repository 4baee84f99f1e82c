"""What one session of ONNX Runtime takes for a bundle, by the costs that the bundle was compiled with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxplace.bundle.bundle import COSTS_FILE, WHOLE_MODEL_FILE
from onnxplace.errors import OnnxplaceError
from onnxplace.export.segment_models import BundleModels
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.passes.cost_files.cost_file import read_costs
from onnxplace.problem import placement_problem
from onnxplace.state import State
from onnxplace_formats.one_session import OneSession, find_hub, session_seconds

# Of larger models, the best placement is not looked for: that is a linear program.
MAX_NODES = 2000
SEARCH_SECONDS = 5.0


@dataclass(frozen=True)
class SessionPrediction:
    """Seconds of a step in one session."""

    step_seconds: float
    """With the placement of the bundle."""
    best_seconds: float | None
    """With the best placement, which may part what was grouped; None if it is not known."""


def predict_session(models: BundleModels) -> SessionPrediction | None:
    """Return what one session takes for a bundle; None where its costs do not fit its nodes, as of split operators."""
    bundle, manifest = models.bundle, models.manifest
    device_of = {node.name: item.record.device for item in models.segments for node in item.proto.graph.node}
    try:
        model = bind(load(bundle.file(WHOLE_MODEL_FILE)), manifest.dimensions, {})
        profile, _ = read_costs(bundle.file(COSTS_FILE), model, bundle.target)
        if any(name not in device_of for name in profile.graph.names):
            return None
        state = State(bundle.target).with_facts(profile)
        problem = placement_problem(state)
        device = np.array([bundle.target.position(device_of[name]) for name in profile.graph.names], dtype=np.int32)
        # CPU devices are one there.
        hosts = [index for index, item in enumerate(bundle.target.devices) if item.is_host]
        device[np.isin(device, hosts)] = hosts[0] if hosts else -1
        hub = find_hub(bundle.target, np.unique(np.append(device, hosts[:1])).astype(np.int32))
        step_seconds, best_seconds = session_seconds(problem, device, hub), None
        if len(device) <= MAX_NODES:
            # Within limits of memory, the placement of the bundle may be better than what is found.
            best_seconds = min(OneSession(seconds=SEARCH_SECONDS).find_best(state, problem).step_seconds, step_seconds)
        return SessionPrediction(step_seconds, best_seconds)
    except OnnxplaceError:
        return None
