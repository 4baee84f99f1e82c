"""A CPU and an NPU in simulation: python benchmarks/mixed_devices.py [MODEL ...] [--factor 5] [--batch 64].

For each model of the zoo, exported by torch's dynamo with random weights: which nodes the NPU of this machine takes
(by QNN's simulator where there is no hardware) and what they cost on the CPU are measured; on the NPU, they are said
to take FACTOR times less. Then the predicted step, with the cost of every segment and transfer, on the CPU alone, on
the NPU alone, by ONNX Runtime's own priority order (each node that the NPU takes is there), and as onnxplace places the
nodes. Needs `pip install -e '.[cpu,dev,zoo]' onnxruntime-qnn`. docs/accelerators.md holds the latest table.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

# For modules that benchmarks share with each other and with tests.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from _tables import Row, print_table, report_progress
from _zoo_models import ZOO, export

from onnxplace.facts import REFUSED_SECONDS, Profile, is_refused
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.problem import device_seconds, predict_single_device_seconds, predict_step_seconds
from onnxplace.state import State
from onnxplace.target.target import Target

# Those without caches, which have one size of a batch for all inputs.
MODELS = ("bert", "gpt2", "llama", "t5", "vit", "whisper", "mixtral", "detr", "segformer", "mobilenet")
COLUMNS = ("model", "nodes", "taken", "CPU", "NPU", "priority order", "placed", "speedup_best")


def profile_model(name: str, batch: int, target: Target, folder: Path) -> State:
    """Return a model with fixed sizes and its costs: the CPU's, and which nodes the NPU refuses."""
    architecture = ZOO[name]
    path = folder / f"{name}.onnx"
    export(architecture, "dynamo", path)
    sizes = {**architecture.sizes[0], "batch": batch}
    front = Pipeline.parse("optimize{fixed_sizes=true},profile{seconds=1}")
    return front.run(State(target).with_facts(bind(load(path), sizes, {})))[0]


def scale_costs(state: State, factor: float) -> State:
    """Return the state with costs of the NPU that are the CPU's, divided by a factor, for the nodes that it takes."""
    profile = state[Profile]
    cpu, npu = (device.cost_class for device in state.target.devices)
    seconds = np.where(is_refused(profile.seconds[npu]), REFUSED_SECONDS, profile.seconds[cpu] / factor)
    scaled = replace(
        profile, seconds={cpu: profile.seconds[cpu], npu: seconds}, whole_seconds=MappingProxyType({}), quality={}
    )
    return state.with_facts(scaled)


def predict(state: State, pipeline: str) -> float:
    """Return the predicted step after further passes, in seconds."""
    return predict_step_seconds(Pipeline.parse(pipeline).run(state)[0])


def compare(name: str, args: argparse.Namespace, target: Target) -> Row:
    """Return the row of a model."""
    report_progress(name)
    with tempfile.TemporaryDirectory() as folder:
        state = scale_costs(profile_model(name, args.batch, target, Path(folder)), args.factor)
        refused = is_refused(device_seconds(state[Profile], target)[1])
        cpu, npu = predict_single_device_seconds(state).tolist()
        priority = npu
        if refused.any():
            names = state[Profile].graph.names
            ids = [device.id for device in target.devices]
            pins = Path(folder, "map.json")
            pins.write_text(json.dumps({re.escape(item): ids[not lost] for item, lost in zip(names, refused)}))
            priority = predict(state, f"coplace{{device_map={pins},join=never}},m-etf,split")
        placed = min(cpu, npu, *(predict(state, f"{front},auto,split") for front in ("coplace", "coplace{join=never}")))
    return {
        "model": name,
        "nodes": len(refused),
        "taken": 1 - float(refused.mean()),
        "CPU": cpu,
        "NPU": npu if np.isfinite(npu) else "refuses nodes",
        "priority order": priority,
        "placed": placed,
        "speedup_best": min(cpu, npu, priority) / placed,
    }


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--factor", type=float, default=5.0, help="The NPU is this much faster than the CPU.")
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    target = local_target("cpu:0,npu:0")

    def rows() -> Iterator[Row]:
        for name in args.models:
            yield compare(name, args, target)

    print_table(f"Batch {args.batch}, an NPU {args.factor:g} times as fast as the CPU", COLUMNS, rows())
    return 0


if __name__ == "__main__":
    sys.exit(main())
