"""The runtime `mpi` next to threads, on this machine: python benchmarks/hosts.py [--turns 20] [--deaths 0] [--seed 0].

For each bundle, sessions take turns of some calls: threads, a process for each device, and processes of two hosts. As
root, these are network namespaces with a cable between them; for others, `localhost` and `127.0.0.1` are two hosts for
MPI. Speeds are how many times as fast as threads: medians over turns, of the median call of a turn, and of results per
second with four requests in flight. Outputs have to be the same bits. The last column is the processor time of the
user's process in a step on two hosts. A second table has the times to open and to close a session, and the processor
time of an idle rank; as root, a third has the time after which 8 MiB arrive while their sender computes.

With `--predict`, as root, models are compiled for a survey of two such hosts with one core each. The predicted step,
from measured costs of nodes and links, stands next to the measured one; so does the prediction with times of segments
from a trial there. `--bert FILE` adds a model to those.

With `--deaths N`, N sessions lose a rank at a random moment while requests run, by SIGKILL or SIGSTOP. The time until
the first request fails is printed, and whether a request had a wrong answer or a process was left.

With `--copy-deaths N`, a session of two copies (`replicas=2`) loses a rank N times in the same way, each time when both
are open. Answers that were wrong, requests that failed, and the time until the copy was back are printed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

import onnxplace
from onnxplace.driver.compile import compile_model
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.machine.hardware import available_cores
from onnxplace.measure.rate_trial import RequestStream

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from _host_predictions import measure_prediction, measure_progress, open_on_nodes, prefer

import models
from tests.support.namespaces import NODES, TwoNodes, connect_two_nodes, find_obstacle
from tests.support.ranks import await_gone, read_rank_ids, read_ranks_of_copies
from tests.support.two_hosts import TWO_HOSTS, compile_alternating, make_target

HOPS = 40
THREADS, ONE_HOST, TWO = "threads", "one host", "two hosts"
# After a call, ranks look for messages for 20 ms, which takes processor time from the others.
PAUSE_SECONDS, TURN_SECONDS, MAX_CALLS = 0.05, 0.2, 20
IN_FLIGHT = 4
START_SECONDS = 120.0


@dataclass(frozen=True)
class Case:
    """A model for devices of one machine, and for the same devices on two hosts."""

    name: str
    near: onnxplace.Bundle
    far: onnxplace.Bundle


def build_chain(size_bytes: int) -> ModelProto:
    """Return a chain of negations of one vector of float32."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size_bytes // 4]) for name in ("v0", f"v{HOPS}")]
    nodes = [helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(HOPS)]
    graph = helper.make_graph(nodes, f"chain{size_bytes}", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def compile_cases(folder: Path, far_ids: tuple[str, ...]) -> list[Case]:
    """Compile all models for threads and for the devices of two hosts; both have the same segments."""
    cases = []
    for name, size in (("40 hops of 256 B", 256), ("40 hops of 1 MiB", 1 << 20)):
        places = [folder / name / place for place in ("near", "far")]
        for place in places:
            place.mkdir(parents=True)
        near = compile_alternating(build_chain(size), places[0], "cpu:0", "cpu:1")
        cases.append(Case(name, near, compile_alternating(build_chain(size), places[1], *far_ids)))
    model, shape = models.build("two-tower"), {"images": 4, "texts": 8}
    device_map = {"image.*": 0, ".*": 1}
    bundles = []
    for distance, ids in (("near", ("cpu:0", "cpu:1")), ("far", far_ids)):
        placed = {pattern: ids[index] for pattern, index in device_map.items()}
        output = folder / f"two-tower-{distance}.bundle"
        options: dict[str, Any] = {"shape": shape, "device_map": placed, "placer": "m-etf", "trial": False}
        bundles.append(compile_model(model, output, target=make_target(*ids), **options).bundle)
    return [Case("two-tower", *bundles), *cases]


def open_sessions(case: Case, stack: ExitStack, nodes: TwoNodes | None) -> dict[str, onnxplace.InferenceSession]:
    """Open a bundle with threads, and with processes of one host and of two."""
    sessions = {
        THREADS: onnxplace.InferenceSession(case.near),
        ONE_HOST: onnxplace.InferenceSession(case.near, runtime="mpi", hosts="localhost:2", timeout=START_SECONDS),
        TWO: open_on_nodes(case.far, nodes)
        if nodes
        else onnxplace.InferenceSession(case.far, runtime="mpi", timeout=START_SECONDS),
    }
    for session in sessions.values():
        stack.enter_context(session)
    return sessions


def time_turn(call: Callable[[], object]) -> float:
    """Return the median time of the calls of one turn."""
    time.sleep(PAUSE_SECONDS)
    call()
    seconds: list[float] = []
    while len(seconds) < MAX_CALLS and sum(seconds) < TURN_SECONDS:
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def measure_case(case: Case, turns: int, nodes: TwoNodes | None) -> str:
    """Return the row of a case: latencies, ratios, throughputs, processor time of this process."""
    feeds = random_feeds(case.near.inputs, case.near.manifest.dimensions)
    with ExitStack() as stack:
        sessions = open_sessions(case, stack, nodes)
        outputs = {name: session.run(None, feeds) for name, session in sessions.items()}
        for name, values in outputs.items():
            for value, expected in zip(values, outputs[THREADS]):
                assert np.array_equal(value, expected), f"{case.name}: {name} has other bits"
        times: list[Mapping[str, float]] = []
        rates: list[Mapping[str, float]] = []
        for _ in range(turns):
            times.append({name: time_turn(lambda s=item: s.run(None, feeds)) for name, item in sessions.items()})  # type: ignore[misc]
            rates.append({name: _measure_rate(item, feeds) for name, item in sessions.items()})
        shares = [_measure_share(lambda: sessions[TWO].run(None, feeds)) for _ in range(turns)]
    cells = [f"{median(turn[THREADS] for turn in times) * 1e3:.3g}"]
    for name in (ONE_HOST, TWO):
        cells.append(f"{median(turn[THREADS] / turn[name] for turn in times):.2f}")
    for name in (ONE_HOST, TWO):
        cells.append(f"{median(turn[name] / turn[THREADS] for turn in rates):.2f}")
    cells.append(f"{median(shares):.1%}")
    return f"| {case.name} | {' | '.join(cells)} |"


def _measure_share(call: Callable[[], object]) -> float:
    """Return the processor time of this process as a share of the time of calls."""
    used, began = time.process_time(), time.perf_counter()
    for _ in range(MAX_CALLS):
        call()
    return (time.process_time() - used) / (time.perf_counter() - began)


def _measure_rate(session: onnxplace.InferenceSession, feeds: Mapping[str, Any]) -> float:
    """Return results per second with requests in flight."""
    stream = RequestStream(lambda: session.submit(feeds), IN_FLIGHT)
    return 1 / stream.take_turn().interval_seconds


def measure_session(bundle: onnxplace.Bundle) -> str:
    """Return what it takes to open and close a session, and to keep it."""
    began = time.perf_counter()
    with onnxplace.InferenceSession(bundle):
        threads_opened = time.perf_counter() - began
    began = time.perf_counter()
    session = onnxplace.InferenceSession(bundle, runtime="mpi", hosts="localhost:2", timeout=START_SECONDS)
    opened = time.perf_counter() - began
    time.sleep(1.0)
    ranks, seconds = read_rank_ids(session), 10.0
    before = [read_processor_seconds(rank) for rank in ranks]
    time.sleep(seconds)
    shares = [(read_processor_seconds(rank) - first) / seconds for rank, first in zip(ranks, before)]
    began = time.perf_counter()
    session.close()
    closed = time.perf_counter() - began
    idle = ", ".join(f"{share:.1%}" for share in shares)
    return f"| {threads_opened:.2f} | {opened:.2f} | {closed:.2f} | {idle} |"


def read_processor_seconds(process_id: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def kill_ranks(bundle: onnxplace.Bundle, times: int, seed: int) -> None:
    """Let sessions lose a rank while requests run; print when that was reported."""
    generator, seconds = random.Random(seed), dict[str, list[float]]()
    feeds = random_feeds(bundle.inputs, bundle.manifest.dimensions)
    with onnxplace.InferenceSession(bundle) as session:
        expected = session.run(None, feeds)
    requests = wrong = left = 0
    for _ in range(times):
        session = onnxplace.InferenceSession(bundle, runtime="mpi", hosts="localhost:2", timeout=START_SECONDS)
        ranks, number = read_rank_ids(session), generator.choice([signal.SIGKILL, signal.SIGSTOP])
        killed: list[float] = []

        def kill(rank: int, number: signal.Signals, killed: list[float]) -> None:
            killed.append(time.monotonic())
            os.kill(rank, number)

        timer = threading.Timer(generator.random(), kill, (generator.choice(ranks), number, killed))
        timer.start()
        try:
            while True:
                futures = [session.submit(feeds) for _ in range(IN_FLIGHT)]
                for future in futures:
                    outputs = list(future.result(60.0).outputs.values())
                    wrong += not all(np.array_equal(one, other) for one, other in zip(outputs, expected))
                    requests += 1
        except onnxplace.ExecutionError as problem:
            timer.join()
            if problem.code != "K011":
                raise
            seconds.setdefault(number.name, []).append(time.monotonic() - killed[0])
        session.close()
        left += len(await_gone(ranks))
    print(f"\n{times} sessions, {requests} answers, {wrong} wrong, {left} processes left")
    print("| signal | times | median s | slowest s |\n|---|---|---|---|")
    for name, values in sorted(seconds.items()):
        print(f"| {name} | {len(values)} | {median(values):.3f} | {max(values):.3f} |")


def kill_copies(bundle: onnxplace.Bundle, times: int, seed: int) -> None:
    """Let a session of two copies lose ranks, one after the other, while requests run; print what was noticed."""
    generator = random.Random(seed)
    feeds = random_feeds(bundle.inputs, bundle.manifest.dimensions)
    with onnxplace.InferenceSession(bundle) as session:
        expected = session.run(None, feeds)
    requests = wrong = failed = 0
    slowest, back = 0.0, list[float]()
    with onnxplace.InferenceSession(
        bundle, runtime="mpi", hosts="localhost:4", replicas=2, timeout=START_SECONDS
    ) as session:
        for _ in range(times):
            victim = generator.randrange(2)
            rank = generator.choice(read_ranks_of_copies(session)[victim])
            deaths = session.list_copies()[victim].failures
            number = generator.choice([signal.SIGKILL, signal.SIGSTOP])
            timer = threading.Timer(0.5 * generator.random(), os.kill, (rank, number))
            timer.start()
            began = time.monotonic()
            while session.list_copies()[victim].failures == deaths or not session.list_copies()[victim].is_open:
                submitted = time.monotonic()
                for future in [session.submit(feeds) for _ in range(IN_FLIGHT)]:
                    try:
                        outputs = list(future.result(60.0).outputs.values())
                    except onnxplace.ExecutionError:
                        failed += 1
                        continue
                    wrong += not all(np.array_equal(one, other) for one, other in zip(outputs, expected))
                    requests += 1
                slowest = max(slowest, time.monotonic() - submitted)
            back.append(time.monotonic() - began)
    print(f"\n{times} deaths among two copies: {requests} answers, {wrong} wrong, {failed} failed")
    print(f"four requests took at most {slowest:.2f} s")
    print(f"a copy was back after a median of {median(back):.1f} s, at most {max(back):.1f} s")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--deaths", type=int, default=0)
    parser.add_argument("--copy-deaths", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--bert", type=Path)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start; {options.turns} turns\n")
    with tempfile.TemporaryDirectory() as name:
        folder, obstacle = Path(name), find_obstacle()
        if obstacle:
            print(f"two hosts by the loopback device: {obstacle}\n")
        if options.turns or options.deaths or options.copy_deaths:
            cases = compile_cases(folder, TWO_HOSTS if obstacle else NODES)
        if options.turns:
            with nullcontext() if obstacle else connect_two_nodes(folder) as nodes:
                print_turns(cases, options.turns, folder, nodes)
        if options.predict and not obstacle:
            # The cores that devices have on one host, one for each host.
            with connect_two_nodes(folder, tuple(available_cores()[:2])) as nodes:
                print_predictions(folder, nodes, options.bert)
        if options.deaths:
            kill_ranks(cases[1].near, options.deaths, options.seed)
        if options.copy_deaths:
            kill_copies(cases[1].near, options.copy_deaths, options.seed)


def print_turns(cases: list[Case], turns: int, folder: Path, nodes: TwoNodes | None) -> None:
    """Print the tables of sessions that take turns, and of sessions alone."""
    speeds = (f"{what}, {name}" for what in ("speed", "rate") for name in (ONE_HOST, TWO))
    names = ("bundle", "threads ms", *speeds, "user's process")
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for case in cases:
        print(measure_case(case, turns, nodes), flush=True)
    print("\n| threads open s | open s | close s | idle ranks |\n|---|---|---|---|")
    print(measure_session(cases[0].near), flush=True)
    if nodes:
        print("\n| sender computes ms | 8 MiB arrive after ms | of ten, nine within |\n|---|---|---|")
        print(measure_progress(folder, nodes), flush=True)


def print_predictions(folder: Path, nodes: TwoNodes, bert: Path | None) -> None:
    """Print the table of predicted and measured steps."""
    names = (
        "bundle",
        "messages",
        "MB",
        "link, its error",
        "predicted ms",
        "with a trial ms",
        "measured ms",
        "error",
        "with a trial",
    )
    print(f"\n| {' | '.join((*names, 'ranks waited for a core'))} |\n{'|---' * (len(names) + 1)}|")
    shape = {"images": 4, "texts": 8}
    prefer([os.getpid()])
    print(measure_prediction("two-tower", models.build("two-tower"), folder, nodes, shape=shape), flush=True)
    if bert:
        print(measure_prediction(bert.stem, bert, folder, nodes), flush=True)


if __name__ == "__main__":
    main()
