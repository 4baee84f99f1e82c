"""Compare groups of training steps: predicted step, segments and traffic, for each placer.

    python benchmarks/coplacement.py STEP.onnx ... [--devices cpu:0,cpu:1] [--shape batch=16]

Costs are measured once per model, so that all rows of a table count with the same ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from onnxplace.facts import Placement, Profile, Segments
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.state_binding import bind_states
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.problem import single_device_seconds
from onnxplace.reports.text import format_table
from onnxplace.state import State
from onnxplace.utils.quantities import format_bytes, format_milliseconds

PLACERS = {"m-etf": "worth", "m-sct": "worth", "m-topo": "worth", "auto": "never"}
"""Placer -> when nodes join their only reader, as `compile` has it."""
GROUPINGS = {
    "free": "parameters=free",
    "parameters together": "parameters=together",
    "backward follows": "backward=follow",
    "backward follows, no chains": "backward=follow,join=never",
    "backward follows, and chains": "backward=follow,join=always",
}


def measure_rows(state: State) -> list[tuple[str, ...]]:
    """Return a row for each placer and grouping."""
    graph, rows = state[Profile].graph, list[tuple[str, ...]]()
    size = dict(zip(graph.value_names, graph.value_bytes.tolist()))
    for placer, join in PLACERS.items():
        for name, options in GROUPINGS.items():
            joined = options if "join" in options else f"join={join},{options}"
            after, _ = Pipeline.parse(f"coplace{{{joined}}},fuse,{placer},split").run(state)
            sent = [size[item.value] for program in after[Segments].programs for item in program if item.op == "send"]
            step = format_milliseconds(after[Segments].simulation.makespan_seconds)
            devices = len(set(after[Placement].device.tolist()))
            counts = (str(devices), str(len(after[Segments].segments)), str(len(sent)))
            rows.append((placer, name, *counts, format_bytes(sum(sent)), step))
    return rows


def main() -> None:
    """Print a table per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--shape", action="append", default=[], metavar="batch=16")
    arguments = parser.parse_args()
    sizes = {name: int(size) for name, _, size in (text.partition("=") for text in arguments.shape)}
    for path in arguments.models:
        model = bind_states(bind(load(path), sizes, {}), ())
        state, _ = Pipeline.parse("optimize,profile").run(State(local_target(arguments.devices)).with_facts(model))
        alone = format_milliseconds(float(single_device_seconds(state[Profile], state.target).min()))
        print(f"{path.name}: {len(state[Profile].graph)} nodes, one device {alone}")
        header = ("placer", "groups", "devices", "segments", "transfers", "sent", "step")
        print(format_table(header, measure_rows(state), left=2), flush=True)


if __name__ == "__main__":
    main()
