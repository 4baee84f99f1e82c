"""Placements on published benchmarks, in their own models of cost: python benchmarks/published.py FOLDER.

    python benchmarks/published.py FOLDER [--only msr-load,msr-latency,doppler,moirai] [--json F]

FOLDER holds what the authors published, one folder each; those that are missing are left out:

- `msr`: github.com/msr-fiddle/dnn-partitioning, of "Efficient Algorithms for Device Placement of DNN Graph Operators"
  (NeurIPS 2020);
- `doppler`: github.com/xinyuyao/Doppler (ICLR 2026);
- `moirai`: the sheets in sample-data of github.com/moirai-placement/moirai, saved as CSV by a spreadsheet program.

A placer of onnxplace places each graph in the nearest model of time that it has. Then the paper's own rule scores the
placement (`placed`), and a search under that rule, of a given number of moves, begins there (`ours`). The bound holds
under the paper's rule for every placement. CPU seconds are of both, without the compilation of loops.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx
import numpy as np
from _published_models import CallLatency, Costs, FirstInFirstOut, MaxLoad, Score, improve
from _tables import Row, divide, report_progress
from numpy.typing import NDArray

from onnxplace.cost_graph.data import CostGraph
from onnxplace.cost_graph.part_functions import GENERATORS, from_networkx
from onnxplace.driver.place import place_cost_graph
from onnxplace.errors import InfeasibleError
from onnxplace.graph.op_graph import Floats, Ints
from onnxplace.target.target import Device, Link, LinkModel, Target

# Bytes per second of links whose transfers are given in seconds: a value has as many bytes as its transfer has 0.1 us.
RATE = 1e7
MOVES = 40_000
KEYS = (
    "benchmark", "graph", "nodes", "devices", "published", "by", "placed", "ours", "speed-up", "bound", "cpu_seconds",
)  # fmt: skip

DP = "their dp.cpp"
# Milliseconds per sample that dp.cpp of msr-fiddle/dnn-partitioning (commit b207b6a) finds: contiguous, optimal.
MAX_LOAD_MS: Mapping[str, float] = {
    "LayerGraphs/bert24_inference": 17.7899, "LayerGraphs/gnmt_inference": 32.9107,
    "LayerGraphs/resnet50_inference": 33.7747, "LayerGraphs/bert24_training": 41.7458,
    "LayerGraphs/gnmt_training": 107.004, "LayerGraphs/resnet50_training": 78.6318,
    "OperatorGraphs/bert_l-3_inference": 27.9186, "OperatorGraphs/bert_l-6_inference": 29.5795,
    "OperatorGraphs/bert_l-12_inference": 147.478, "OperatorGraphs/resnet50_inference": 124.349,
    "OperatorGraphs/bert_l-3_training": 65.3031, "OperatorGraphs/bert_l-6_training": 72.865,
    "OperatorGraphs/resnet50_training": 255.194,
}  # fmt: skip


GREEDY = "their greedy.cpp"
# Milliseconds of one sample that greedy.cpp of the same commit finds. Their integer program needs Gurobi.
LATENCY_MS: Mapping[str, float] = {
    "LayerGraphs/bert24_inference": 100.2185, "LayerGraphs/gnmt_inference": 268.5005,
    "LayerGraphs/inceptionv3_inference": 2485.2396, "LayerGraphs/resnet50_inference": 4197.0555,
    "OperatorGraphs/bert_l-12_inference": 867.8395, "OperatorGraphs/bert_l-3_inference": 416.2044,
    "OperatorGraphs/bert_l-6_inference": 494.1352, "OperatorGraphs/resnet50_inference": 839.5363,
}  # fmt: skip


@dataclass(frozen=True)
class Instance:
    """A graph of a benchmark, with its rule and the figure to compare with."""

    benchmark: str
    graph: CostGraph
    costs: Costs
    score: Score | None
    """None for the model of time of onnxplace."""
    placers: Sequence[str]
    links: LinkModel = "duplex"
    groups: Ints | None = None
    """Per node; None for nodes that move alone."""
    published: float | None = None
    """Seconds."""
    by: str = "-"
    bound: float | None = None
    """Seconds; None for that of the graph."""
    folded: tuple[CostGraph, Callable[[Ints], Ints]] | None = None
    """For a training step: forward nodes with the costs of both directions, and what carries their devices over."""


def solve_instance(instance: Instance, moves: int) -> Row:
    """Place a graph with each placer, search on from the best under its rule; return a row in seconds."""
    began, nodes = time.process_time(), len(instance.graph.ids)
    groups = np.arange(nodes, dtype=np.int32) if instance.groups is None else instance.groups
    starts: list[tuple[float, Ints]] = []
    for placer in instance.placers:
        try:
            result = place_cost_graph(instance.graph, placer, links=instance.links, groups="given")
        except InfeasibleError:
            continue
        device = result.device.astype(np.int32)
        starts.append((result.makespan_seconds if instance.score is None else instance.score(device), device))
    if instance.folded is not None and instance.score is not None:
        device = instance.folded[1](place_cost_graph(instance.folded[0], instance.placers[0], groups="given").device)
        starts.append((instance.score(device), device))
    placed, device = min(starts, key=lambda start: start[0])
    ours = placed
    if instance.score is not None:
        ours = improve(instance.score, device, instance.costs, groups, moves, 0)[1]
    bound = result.lower_bound_seconds if instance.bound is None else instance.bound
    return {
        "benchmark": instance.benchmark, "graph": instance.graph.name, "nodes": nodes,
        "devices": len(instance.graph.target.devices), "published": instance.published, "by": instance.by,
        "placed": placed, "ours": ours, "speed-up": divide(instance.published, ours), "bound": bound,
        "cpu_seconds": time.process_time() - began,
    }  # fmt: skip


def build_graph(name: str, costs: Costs, devices: Sequence[Device], groups: Ints | None = None) -> CostGraph:
    """Return a cost graph with links on which each output takes its transfer time."""
    digraph, classes = networkx.MultiDiGraph(name=name), [device.cost_class for device in devices]
    for node in range(costs.seconds.shape[1]):
        times = {f"seconds:{kind}": float(costs.seconds[index, node]) for index, kind in enumerate(classes)}
        group = {} if groups is None else {"group": str(groups[node])}
        seconds = float(costs.seconds[0, node])
        digraph.add_node(node, seconds=seconds, weights_bytes=int(costs.sizes[node]), **times, **group)
    for source, reader in costs.edges.tolist():
        digraph.add_edge(source, reader, bytes=round(float(costs.transfer_seconds[source]) * RATE), tensor=str(source))
    return from_networkx(digraph, Target(tuple(devices), (Link("all-to-all", "all-to-all", 0.0, RATE),)))


def fold_backward(
    costs: Costs, groups: Ints, backward: NDArray[np.bool_]
) -> tuple[Costs, Ints, Callable[[Ints], Ints]]:
    """Return the forward nodes of a training step with the costs of both directions, and a function of their devices.

    Stages are contiguous there, as dp.cpp wants them, and each backward node follows a forward node of its colour
    class. The function returns the device of each node of the step; a backward node of no such class follows a
    neighbour.
    """
    forward = np.flatnonzero(~backward)
    position = {node: index for index, node in enumerate(forward.tolist())}
    home = {int(groups[node]): index for node, index in position.items()}
    seconds, sizes = costs.seconds[:, forward].copy(), costs.sizes[forward].copy()
    for node in np.flatnonzero(backward).tolist():
        if (index := home.get(int(groups[node]))) is not None:
            seconds[:, index] += costs.seconds[:, node]
            sizes[index] += costs.sizes[node]
    edges = [(position[a], position[b]) for a, b in costs.edges.tolist() if a in position and b in position]
    folded = Costs(seconds, 2 * costs.transfer_seconds[forward], np.array(edges), sizes, costs.limit)

    def unfold(device: Ints) -> Ints:
        by_group = {group: int(device[index]) for group, index in home.items()}
        left = True
        while left:
            left = False
            for a, b in (pair for edge in groups[costs.edges].tolist() for pair in (edge, edge[::-1])):
                if a in by_group and b not in by_group:
                    by_group[b] = by_group[a]
                    left = True
        return np.array([by_group.get(group, 0) for group in groups.tolist()], dtype=np.int32)

    return folded, groups[forward], unfold


def read_msr(path: Path) -> tuple[Costs, Ints, NDArray[np.bool_]]:
    """Return the costs of a graph of dnn-partitioning, its colour classes, and which nodes are backward."""
    data = json.loads(path.read_text(encoding="utf-8"))
    nodes, position = data["nodes"], {node["id"]: index for index, node in enumerate(data["nodes"])}
    edges = np.array([(position[edge["sourceId"]], position[edge["destId"]]) for edge in data["edges"]])
    transfer = np.zeros(len(nodes))
    transfer[edges[:, 0]] = [edge["cost"] * 1e-3 for edge in data["edges"]]
    accelerators = int(data["maxFPGAs"])
    own, host = (np.array([node[key] for node in nodes]) * 1e-3 for key in ("fpgaLatency", "cpuLatency"))
    colours = [node.get("colorClass", f"own {index}") for index, node in enumerate(nodes)]
    groups = np.unique([str(colour) for colour in colours], return_inverse=True)[1].reshape(-1).astype(np.int32)
    sizes = np.array([float(node.get("size", 0)) for node in nodes])
    seconds = np.stack([own] * accelerators + [host])
    backward = np.array([bool(node["isBackwardNode"]) for node in nodes])
    return Costs(seconds, transfer, edges, sizes, float(data["maxSizePerFPGA"])), groups, backward


def list_msr(folder: Path, kind: str) -> Iterator[Instance]:
    """Yield the graphs of dnn-partitioning: `throughput` or `latency`."""
    for path in sorted((folder / "msr" / f"{kind}-inputs").glob("*/*.json")):
        name = f"{path.parent.name}/{path.stem}"
        costs, groups, backward = read_msr(path)
        memory = int(costs.limit)
        folded: tuple[CostGraph, Callable[[Ints], Ints]] | None = None
        devices = [Device(f"cuda:{index}", memory, segment_seconds=0.0) for index in range(len(costs.seconds) - 1)]
        devices.append(Device("cpu:0", 10**15, segment_seconds=0.0))
        graph, fastest = build_graph(name, costs, devices, groups), costs.seconds.min(axis=0)
        if kind == "latency":
            yield Instance(
                "MSR latency", graph, costs, CallLatency(costs), ("stages{load=sum}", "stages", "auto"), groups=groups,
                published=milliseconds(LATENCY_MS.get(name)), by=GREEDY, bound=find_longest_path(costs),
            )  # fmt: skip
            continue
        if backward.any():
            forward, own, unfold = fold_backward(costs, groups, backward)
            folded = build_graph(name, forward, devices, own), unfold
        # The largest load is at least the mean one, and at least that of the longest node.
        bound = max(float(fastest.sum()) / len(devices), float(fastest.max()))
        yield Instance(
            "MSR max-load", graph, costs, MaxLoad(costs), ("stages{load=sum}", "stages{load=sum,contiguous=false}"),
            groups=groups, published=milliseconds(MAX_LOAD_MS.get(name)), by=DP, bound=bound, folded=folded,
        )  # fmt: skip


def milliseconds(figure: float | None) -> float | None:
    """Return a figure in ms as seconds."""
    return None if figure is None else figure * 1e-3


def make_digraph(costs: Costs) -> networkx.DiGraph[int]:
    """Return the nodes and edges, without costs."""
    digraph: networkx.DiGraph[int] = networkx.DiGraph()
    digraph.add_nodes_from(range(costs.seconds.shape[1]))
    digraph.add_edges_from(costs.edges.tolist())
    return digraph


def find_longest_path(costs: Costs) -> float:
    """Return the seconds of the longest path, each node on its fastest device, without transfers."""
    digraph = make_digraph(costs)
    finish: dict[int, float] = {}
    for node in networkx.topological_sort(digraph):
        start = max((finish[before] for before in digraph.predecessors(node)), default=0.0)
        finish[node] = start + float(costs.seconds[:, node].min())
    return max(finish.values())


def read_doppler(path: Path, devices: int) -> Costs:
    """Return the costs of a graph of Doppler; 1e10 of its units are a second of its simulator, as we count them."""
    lines = path.read_text(encoding="utf-8").splitlines()
    inputs, sources, readers = ([int(number) for number in re.findall(r"\d+", line)] for line in lines[1:4])
    rows = [[int(number) for number in line.split(",")[:2]] for line in lines[4 : 4 + int(lines[0]) - len(inputs)]]
    compute, transfer = np.array(rows, dtype=np.float64).T / 1e10
    edges = np.array(sorted(dict.fromkeys(zip(sources, readers)), key=lambda edge: edge[0]))
    seconds = np.tile(compute, (devices, 1)) * 1e-3
    return Costs(seconds, transfer * 1e-3, edges, np.zeros(len(compute)), np.inf)


def schedule_critical_path(costs: Costs) -> Ints:
    """Return the placement by critical path, the teacher of Doppler: the longest way to the end first.

    Each node goes to the device on which it can start first. Ties go to the first node and the first device; theirs
    are random.
    """
    devices, nodes = costs.seconds.shape
    digraph = make_digraph(costs)
    level = np.zeros(nodes)
    for node in reversed(list(networkx.topological_sort(digraph))):
        after = [level[reader] for reader in digraph.successors(node)]
        level[node] = costs.seconds[0, node] + (max(after) + costs.transfer_seconds[node] if after else 0.0)
    device, free, finish = np.zeros(nodes, dtype=np.int32), np.zeros(devices), np.zeros(nodes)
    waiting = dict(digraph.in_degree())
    ready = {node for node, count in waiting.items() if not count}
    while ready:
        node = min(ready, key=lambda candidate: (-level[candidate], candidate))
        ready.remove(node)
        start = free.copy()
        for before in digraph.predecessors(node):
            arrival = finish[before] + costs.transfer_seconds[before] * (np.arange(devices) != device[before])
            start = np.maximum(start, arrival)
        device[node] = int(start.argmin())
        finish[node] = free[device[node]] = start.min() + costs.seconds[0, node]
        for reader in digraph.successors(node):
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.add(reader)
    return device


def list_doppler(folder: Path) -> Iterator[Instance]:
    """Yield the graphs of Doppler, those for four and for eight GPUs."""
    for path in sorted((folder / "doppler" / "compute_graph").glob("*.txt")):
        if not path.name.startswith("gdp_"):
            count = 8 if path.name.startswith("8gpu_") else 4
            costs = read_doppler(path, count)
            devices = [Device(f"cuda:{index}", 10**15, segment_seconds=0.0) for index in range(count)]
            graph, score = build_graph(path.stem, costs, devices), FirstInFirstOut(costs)
            published = score(schedule_critical_path(costs))
            yield Instance("Doppler", graph, costs, score, ("auto",), "parallel", None, published, "critical path")


def read_moirai(name: str, rows: Sequence[Sequence[Any]]) -> Instance:
    """Return a graph of Moirai from the rows of its sheet: times in ms per device, and per edge and pair of devices."""

    def split(cell: Any, kind: Callable[[Any], Any]) -> list[Any]:
        texts = cell.split(",") if isinstance(cell, str) else [cell]
        return [kind(float(text)) for text in texts if text != ""]

    count = sum(re.fullmatch(r"p\d+", str(cell)) is not None for cell in rows[0])
    first_pair, size, digraph = 4 + count, 4 + count + count**2, networkx.MultiDiGraph(name=name)
    pairs = [(a, b) for a in range(count) for b in range(count)]
    transfers: list[Floats] = []
    for row in rows[1:]:
        times = {f"seconds:cuda/gpu{k}": float(row[4 + k]) * 1e-3 for k in range(count)}
        digraph.add_node(int(float(row[0])), seconds=float(row[4]) * 1e-3, weights_bytes=int(float(row[size])), **times)
    for row in rows[1:]:
        columns = [split(row[first_pair + index], float) for index in range(len(pairs))]
        for position, reader in enumerate(split(row[2], int)):
            # Edges from virtual nodes carry nothing.
            milliseconds = np.array([column[position] if column else 0.0 for column in columns])
            digraph.add_edge(
                int(float(row[0])), reader, bytes=round(milliseconds[1] * 1e6), tensor=f"{row[0]}-{reader}"
            )
            transfers.append(milliseconds)
    # Times of all pairs are in the same proportion for each edge: that of the sums.
    ratio = np.sum(transfers, axis=0)
    links = tuple(
        Link(f"cuda:{a}", f"cuda:{b}", 0.0, 1e9 * float(ratio[1] / ratio[index]))
        for index, (a, b) in enumerate(pairs)
        if a != b
    )
    memory = [int(float(rows[1][size + 1 + k])) for k in range(count)]
    devices = tuple(Device(f"cuda:{k}", memory[k], model=f"gpu{k}", segment_seconds=0.0) for k in range(count))
    graph = from_networkx(digraph, Target(devices, links))
    published = place_cost_graph(graph, "m-sct", groups="none").makespan_seconds
    no_costs = Costs(np.zeros((count, 0)), np.zeros(0), np.zeros((0, 2), dtype=np.int64), np.zeros(0), np.inf)
    return Instance("Moirai", graph, no_costs, None, ("auto", "exact{seconds=20}"), "duplex", None, published, "m-SCT")


def list_moirai(folder: Path) -> Iterator[Instance]:
    """Yield the networks of Moirai."""
    for path in sorted((folder / "moirai").glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            yield read_moirai(path.stem, list(csv.reader(file)))


LISTS: Mapping[str, Callable[[Path], Iterator[Instance]]] = {
    "msr-load": lambda folder: list_msr(folder, "throughput"),
    "msr-latency": lambda folder: list_msr(folder, "latency"),
    "doppler": list_doppler,
    "moirai": list_moirai,
}


def print_row(row: Row) -> None:
    """Print a row of the Markdown table, times in ms and CPU time in seconds."""
    cells = []
    for key in KEYS:
        value = row[key]
        if isinstance(value, float):
            value = f"{value:.2f}" if key in ("speed-up", "cpu_seconds") else f"{value * 1e3:.5g}"
        cells.append("-" if value is None else str(value))
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the folders msr, doppler and moirai")
    parser.add_argument("--only", default=",".join(LISTS), help="benchmarks, separated by commas; default: all")
    parser.add_argument("--moves", type=int, default=MOVES, help=f"of the search under each rule [{MOVES}]")
    parser.add_argument("--json", type=Path, metavar="F", help="write all rows there, in seconds")
    options = parser.parse_args()
    for name in options.only.split(","):
        if name not in LISTS:
            parser.error(f"no benchmark {name!r}, expected one of {', '.join(LISTS)}")
    report_progress("warming up")
    for placer in ("auto", "stages{load=sum}", "exact{seconds=1}"):
        place_cost_graph(GENERATORS["tf_like"](40, 0), placer)
    print(f"| {' | '.join(KEYS)} |\n|{'---|' * len(KEYS)}")
    rows = []
    for name in options.only.split(","):
        for instance in LISTS[name](options.folder):
            report_progress(f"{instance.benchmark}: {instance.graph.name}")
            rows.append(solve_instance(instance, options.moves))
            print_row(rows[-1])
    if not rows:
        raise SystemExit(f"no benchmark in {options.folder}: expected the folders msr, doppler or moirai")
    known = [row["speed-up"] for row in rows if row["speed-up"] is not None]
    print(f"\n{sum(speedup >= 0.9995 for speedup in known)} of {len(known)} at or below the published figure")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
