"""Predicted steps next to measured ones, and progress while a sender computes, on two hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from onnx import parser

import onnxplace
from onnxplace.driver.compile import compile_model
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.measure.trial import apply_trial, run_trials
from onnxplace.runtime.interface import RuntimeSession
from onnxplace_hosts.connection import Connection
from onnxplace_hosts.mpi import Mpi
from onnxplace_hosts.survey import survey_hosts
from tests.support.namespaces import NAMES, NODES, TwoNodes
from tests.support.ranks import read_rank_ids
from tests.support.two_hosts import make_target

SURVEY_SECONDS, START_SECONDS, STEPS, KEPT_STEPS = 4.0, 120.0, 60, 15
COMPUTING_SECONDS = 0.03
# node1 sends 8 MiB and computes while they are on their way. A small value to node2 and back comes before that, so that
# sending and computing are two segments.
PROGRESS = """
<ir_version: 8, opset_import: ["" : 17]>
progress (float[2097152] x, int64 limit, int64[1] one) => (float[2097152] y, float[1] z)
{
    a = Neg(x)
    t = Gather(x, one)
    b = Neg(t)
    z = Loop (limit, , b) <body = round (int64 i, bool go, float[1] before) => (bool again, float[1] after) {
        again = Identity(go)
        after = Neg(before)
    }>
    y = Neg(a)
}
"""
PLACES = {"a|t|z": NODES[0], "b|y": NODES[1]}


def open_on_nodes(bundle: onnxplace.Bundle, nodes: TwoNodes, *, trace: bool = False) -> onnxplace.InferenceSession:
    """Return a session of which both hosts have a part."""
    with nodes.on_first():
        return onnxplace.InferenceSession(
            bundle,
            runtime="mpi",
            remote_shell=nodes.remote_shell,
            interface=nodes.interface,
            timeout=START_SECONDS,
            trace=trace,
        )


class PreferredMpi(Mpi):
    """A runtime whose ranks come before other work on the machine."""

    def open(self, bundle: onnxplace.Bundle, **options: Any) -> RuntimeSession:
        """Start the ranks, and raise their priority."""
        session = super().open(bundle, **options)
        prefer(session.engine.worker._cluster._processes.values())  # type: ignore[attr-defined]
        return session


def prefer(processes: Iterable[int]) -> None:
    """Let processes come before others, where Linux weighs sessions of processes and allows it."""
    for item in processes:
        with suppress(OSError):
            Path(f"/proc/{item}/autogroup").write_text("-19")


def measure_progress(folder: Path, nodes: TwoNodes) -> str:
    """Return the row of the time after which 8 MiB arrive while their sender computes."""
    model = parser.parse_model(PROGRESS)
    for node in model.graph.node:
        node.name = node.output[0]
    options: dict[str, Any] = {"device_map": PLACES, "placer": "m-topo", "trial": False}
    bundle = compile_model(model, folder / "progress.bundle", target=make_target(*NODES), **options).bundle
    rounds, computing = 100, 0.0
    arrivals: list[float] = []
    feeds = {"x": np.ones(1 << 21, np.float32), "one": np.array([1])}
    with open_on_nodes(bundle, nodes, trace=True) as session:
        prefer([*read_rank_ids(session), os.getpid()])
        while computing < COMPUTING_SECONDS or len(arrivals) < STEPS:
            events = session.submit({**feeds, "limit": np.array(rounds)}).result(START_SECONDS).events
            runs = sorted((item for item in events if item.kind == "run"), key=lambda item: item.start_seconds)
            own = [item for item in runs if item.device == NODES[0]]
            computing = own[-1].finish_seconds - own[-1].start_seconds
            if computing < COMPUTING_SECONDS:
                rounds, arrivals = 2 * rounds, []
                continue
            (wait,) = [item for item in events if item.kind == "wait" and item.name == "a"]
            arrivals.append(wait.finish_seconds - own[0].finish_seconds)
    return f"| {computing * 1e3:.0f} | {median(arrivals) * 1e3:.1f} | {np.quantile(arrivals, 0.9) * 1e3:.1f} |"


def measure_prediction(name: str, model: Any, folder: Path, nodes: TwoNodes, **options: Any) -> str:
    """Return the row of a model: steps as predicted from a survey of the hosts, and as measured there."""
    connection = Connection(nodes.remote_shell, nodes.interface)
    with nodes.on_first():
        survey = survey_hosts(NAMES, devices="cpu:0", seconds=SURVEY_SECONDS, connection=connection)
        bundle = compile_model(model, folder / f"{name}.bundle", target=survey.target, trial=False, **options).bundle
    feeds = random_feeds(bundle.inputs, bundle.manifest.dimensions)
    with onnxplace.InferenceSession(bundle, runtime="simulated") as session:
        predicted = session.submit(feeds).result().seconds
    with nodes.on_first():
        runtime = PreferredMpi(remote_shell=nodes.remote_shell, interface=nodes.interface, timeout=START_SECONDS)
        (trial,) = run_trials([bundle], feeds, runtime=runtime)
    tried = apply_trial(bundle.manifest, trial).predicted.step_seconds
    with open_on_nodes(bundle, nodes) as session:
        prefer(read_rank_ids(session))
        before = nodes.count_crossed_bytes()
        seconds, waiting = time_undisturbed(lambda: session.run(None, feeds), read_rank_ids(session))
        crossed = (nodes.count_crossed_bytes() - before) / STEPS
    hops = sum(step.op == "send" for program in bundle.manifest.programs.values() for step in program)
    fit = survey.links[0].fit
    link = f"{fit.latency_seconds * 1e6:.0f} us, {fit.bytes_per_second / 1e9:.1f} GB/s, {fit.worst_error:.0%}"
    cells = [link, f"{predicted * 1e3:.1f}", f"{tried * 1e3:.1f}", f"{seconds * 1e3:.1f}"]
    cells += [f"{predicted / seconds - 1:+.0%}", f"{tried / seconds - 1:+.0%}", f"{waiting:.0%}"]
    return f"| {name} | {hops} | {crossed / 1e6:.1f} | {' | '.join(cells)} |"


def time_undisturbed(call: Callable[[], object], processes: Sequence[int]) -> tuple[float, float]:
    """Return the median time of the calls in which processes waited least for a core, and that share of time."""
    steps = []
    for _ in range(STEPS):
        delay, began = read_run_delay(processes), time.perf_counter()
        call()
        seconds = time.perf_counter() - began
        steps.append(((read_run_delay(processes) - delay) / seconds, seconds))
    kept = sorted(steps)[:KEPT_STEPS]
    return median(seconds for _, seconds in kept), median(share for share, _ in kept)


def read_run_delay(processes: Sequence[int]) -> float:
    """Return the seconds that the main threads of processes have waited for a core."""
    return sum(int(Path(f"/proc/{item}/schedstat").read_text().split()[1]) for item in processes) / 1e9
