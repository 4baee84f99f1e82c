"""Run the stages of a model with ONNX Runtime and numpy: python run.py inputs.npz outputs.npz."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

FOLDER = Path(__file__).parent


def read_plan() -> Any:
    """Return what stages.json says."""
    return json.loads((FOLDER / "stages.json").read_text(encoding="utf-8"))


def open_stage(stage: dict[str, Any]) -> Any:
    """Open a session on the device of a stage."""
    options = ort.SessionOptions()
    if stage["keeps_order"]:  # a training step: its own order needs the least memory
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(FOLDER / stage["file"], options, providers=list(map(tuple, stage["providers"])))


def run_stage(session: Any, stage: dict[str, Any], values: dict[str, Any]) -> Any:
    """Return the outputs of a stage; those whose types numpy lacks as OrtValues."""
    feeds = {name: values[name] for name in stage["inputs"] if name in values}
    if stage["fits_numpy"]:
        return session.run(stage["outputs"], feeds)
    wrap = ort.OrtValue.ortvalue_from_numpy
    feeds = {name: value if isinstance(value, ort.OrtValue) else wrap(value) for name, value in feeds.items()}
    return session.run_with_ort_values(stage["outputs"], feeds)


def run(plan: Any, sessions: list[Any], feeds: dict[str, Any]) -> dict[str, Any]:
    """Return the outputs of the model, among them its states; feed these to the next call."""
    values = dict(feeds)
    for session, stage in zip(sessions, plan["stages"]):
        values.update(zip(stage["outputs"], run_stage(session, stage, values)))
        for name in stage["frees"]:
            values.pop(name, None)
    return {output["name"]: values[output["value"]] for output in plan["outputs"]}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    stages = read_plan()
    opened = [open_stage(stage) for stage in stages["stages"]]
    np.savez(sys.argv[2], **run(stages, opened, dict(np.load(sys.argv[1]))))
