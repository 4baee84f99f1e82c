"""Gaps that `exact` proves: python benchmarks/exact.py [FOLDER] [--seconds S] [--every K].

    python benchmarks/exact.py --every 6        a sixth of the generated graphs
    python benchmarks/exact.py graphs           cost graphs of a folder that fuse to few enough groups
    python benchmarks/exact.py graphs --whole --gap 0.001       as they are, without groups and with their own

Generated graphs have 10, 20 and 30 groups, a few of them of several nodes, or are larger ones that `coplace` and
`fuse` bring below that. Each is placed on 2 and 3 devices, on links as Baechi measured them and on links 20 times as
fast. Memory is ample, or a share of what one device needs for the whole graph: the smallest tenth with which m-ETF
finds a placement.
Prints Markdown tables; progress goes to stderr. Steps and bounds are of the graph that the placers see, fused or not.
`auto` searches for its default 2 s. Loops are compiled before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from _tables import Row, divide, print_table, report_progress

from onnxplace.cost_graph.cost_graphs import read_cost_graph
from onnxplace.cost_graph.data import CostGraph
from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.driver.place import replace_devices
from onnxplace.errors import InfeasibleError, OnnxplaceError
from onnxplace.facts import Groups, Profile, Schedule
from onnxplace.graph.op_graph import Ints
from onnxplace.pipeline.pipeline import Pipeline, make_pass, run_pass
from onnxplace.problem import placement_problem
from onnxplace.state import State
from onnxplace.target.target import LINK_MODELS, LinkModel

SIZES, DEVICES = (10, 20, 30), (2, 3)
MAX_GROUPS, MAX_NODES = 30, 62
# Nodes of a graph that is fused, and nodes per group of one that is not.
LARGE, PER_GROUP = 120, 1.2
FASTER = 20
GOAL = 0.01
# Passes that reduce the number of groups, weakest first; the first that suffices is used.
FUSERS = (
    "coplace,fuse", "coplace,fuse{merge=runs}", "coplace{join=always},fuse", "coplace{join=always},fuse{merge=runs}"
)  # fmt: skip
KEYS = ("graph", "nodes", "groups", "devices", "links", "memory", "step_seconds", "bound_seconds", "gap",
        "place_seconds", "auto_seconds", "speedup_auto")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A placement problem with its place in the table."""

    name: str
    state: State
    """With a Profile and Groups; there is nothing to fuse."""
    links: str
    memory: str = "ample"


def group_randomly(graph: CostGraph, groups: int, seed: int) -> State:
    """Return a graph in `groups` groups, joined along random edges."""
    random, shape = np.random.default_rng(seed), graph.profile.graph
    group = np.arange(len(shape), dtype=np.int32)
    before = shape.predecessors
    for edge in random.permutation(len(before.items)).tolist():
        if len(np.unique(group)) <= groups:
            break
        group[group == group[before.items[edge]]] = group[before.rows[edge]]
    return graph.state().with_facts(make_free_groups(np.unique(group, return_inverse=True)[1].astype(np.int32)))


def make_free_groups(group: Ints) -> Groups:
    """Return groups without pins."""
    count = int(group.max(initial=-1)) + 1
    return Groups(group, np.full(count, -1, dtype=np.int32), ("",) * count)


def fuse_graph(graph: CostGraph) -> State | None:
    """Return the fused graph as a graph of its own, so that bounds apply to it.

    None if it has too many groups.
    """
    for text in FUSERS:
        problem = placement_problem(Pipeline.parse(text).run(graph.state())[0])
        if len(problem.pinned) <= MAX_GROUPS and (len(problem.graph) <= MAX_NODES or text == FUSERS[-1]):
            names = [device.cost_class for device in problem.target.devices]
            sources = {name: np.zeros(len(problem.graph), dtype=np.uint8) for name in names}
            single = np.arange(len(problem.graph), dtype=np.int32)
            profile = Profile(problem.graph, dict(zip(names, problem.seconds)), MappingProxyType(sources), single)
            return State(problem.target).with_facts(
                profile, Groups(problem.group, problem.pinned, ("",) * len(problem.pinned))
            )
    return None


def generate_cases(devices: Sequence[int], links: LinkModel) -> Iterator[Case]:
    """Yield graphs of every family, size and kind of machine."""
    for seed, family in enumerate(GENERATORS):
        for count in devices:
            for faster in (1, FASTER):
                name = links if faster == 1 else f"{links}, fast"
                for groups in SIZES:
                    graph = change_machine(GENERATORS[family](int(PER_GROUP * groups), seed), count, links, faster)
                    yield from vary_memory(Case(family, group_randomly(graph, groups, seed), name))
                whole = fuse_graph(change_machine(GENERATORS[family](LARGE, seed), count, links, faster))
                if whole is not None:
                    yield from vary_memory(Case(f"{family}, fused", whole, name))


def read_fused_cases(folder: Path, devices: Sequence[int], links: LinkModel) -> Iterator[Case]:
    """Yield the cost graphs of a folder that fuse to few groups."""
    for path in sorted(path for path in folder.glob("*.json*") if path.name != "figures.json"):
        graph = read_cost_graph(path)
        for count in devices:
            whole = fuse_graph(change_machine(graph, count, links, 1))
            if whole is None:
                report_progress(f"{graph.name}: more than {MAX_GROUPS} groups")
                break
            yield Case(graph.name, whole, links, "given")


def read_whole_cases(folder: Path, links: LinkModel) -> Iterator[Case]:
    """Yield the cost graphs of a folder without groups and with their own."""
    for path in sorted(path for path in folder.glob("*.json*") if path.name != "figures.json"):
        graph = change_machine(read_cost_graph(path), 0, links, 1)
        given = graph.profile.user_groups
        for name, coplace_options in (("none", "join=never,given=false"), ("given", "join=never")):
            if name == "none" or (given is not None and (given >= 0).any()):
                yield Case(
                    f"{graph.name}, {name}",
                    Pipeline.parse(f"coplace{{{coplace_options}}}").run(graph.state())[0],
                    links,
                )


def change_machine(graph: CostGraph, devices: int, links: LinkModel, faster: int) -> CostGraph:
    """Return the graph on a number of devices, with faster links.

    0 devices: as many as the graph names.
    """
    changed = replace_devices(graph, devices or None, None)
    fast_links = tuple(
        replace(link, latency_seconds=link.latency_seconds / faster, bytes_per_second=link.bytes_per_second * faster)
        for link in changed.target.links
    )
    return replace(changed, target=replace(changed.target, links=fast_links, link_model=links))


def vary_memory(case: Case) -> Iterator[Case]:
    """Yield the case, and again with the least memory that m-ETF can use.

    Limits are tenths of what one device needs for the whole graph.
    """
    yield case
    problem, tight = placement_problem(case.state), None
    alone = problem.simulate(np.zeros(len(problem.graph), dtype=np.int32), problem.graph.order).peak_bytes[0]
    for tenths in range(9, 0, -1):
        limits = {device.id: int(alone * tenths / 10) for device in case.state.target.devices}
        state = replace(case.state, target=case.state.target.limiting(limits))
        if isinstance(find_step("m-etf", state), str):
            break
        tight = replace(case, state=state, memory=f"{tenths}0 %")
    if tight:
        yield tight


def solve_cases(cases: Iterable[Case], seconds: float, gap: float = GOAL) -> Iterator[Row]:
    """Yield a row per case: the step and bound of `exact`, and the step of `auto`."""
    for case in cases:
        shape, groups = case.state[Profile].graph, case.state[Groups]
        report_progress(
            f"{case.name}: {len(groups.pinned)} groups, {len(case.state.target.devices)} devices, {case.memory}"
        )
        head = {
            "graph": case.name, "nodes": len(shape), "groups": len(groups.pinned),
            "devices": len(case.state.target.devices), "links": case.links, "memory": case.memory,
        }  # fmt: skip
        auto = find_step("auto", case.state)
        start = time.perf_counter()
        try:
            schedule = run_pass(make_pass("exact", {"seconds": str(seconds), "gap": str(gap)}), case.state)[Schedule]
        except InfeasibleError as error:
            yield {**head, "step_seconds": f"infeasible ({error.code})", "auto_seconds": auto}
            continue
        step, bound = schedule.simulation.makespan_seconds, schedule.lower_bound_seconds
        yield {
            **head, "step_seconds": step, "bound_seconds": bound, "gap": 1 - bound / step if step else 0.0,
            "place_seconds": time.perf_counter() - start, "auto_seconds": auto, "speedup_auto": divide(auto, step),
        }  # fmt: skip


def find_step(placer: str, state: State) -> float | str:
    """Return the step that a placer finds, or its error."""
    try:
        return run_pass(make_pass(placer, {}), state)[Schedule].simulation.makespan_seconds
    except InfeasibleError as error:
        return f"infeasible ({error.code})"


def summarise(rows: Sequence[Row]) -> str:
    """Return a line with the number of proofs and their times."""
    gaps = [row["gap"] for row in rows if "gap" in row]
    proven = [row["place_seconds"] for row in rows if row.get("gap", 1.0) <= GOAL]
    if not proven:
        return f"0 of {len(rows)} within {GOAL:.0%}"
    times = f"median {statistics.median(proven):.2f} s, longest {max(proven):.1f} s"
    return f"{len(proven)} of {len(rows)} within {GOAL:.0%} ({times}); largest gap {max(gaps):.1%}"


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="cost graphs: .json or .json.gz")
    parser.add_argument("--whole", action="store_true", help="the graphs of the folder as they are")
    parser.add_argument("--gap", type=float, default=GOAL, help="when to stop [0.01]")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for each graph [60]")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="take one graph of K [1]")
    parser.add_argument("--first", type=int, default=0, metavar="I", help="which of the K, from 0 [0]")
    parser.add_argument("--devices", default=",".join(map(str, DEVICES)), help="default: 2,3; not with --whole")
    parser.add_argument("--links", default="duplex", choices=LINK_MODELS)
    parser.add_argument("--json", type=Path, metavar="F", help="write all rows there, in seconds and bytes")
    return parser.parse_args()


def main() -> None:
    """Print the table that the options select."""
    options = parse_options()
    devices = [int(count) for count in options.devices.split(",")]
    try:
        if options.folder:
            whole = read_whole_cases(options.folder, options.links)
            cases = whole if options.whole else read_fused_cases(options.folder, devices, options.links)
        else:
            cases = generate_cases(devices, options.links)
        report_progress("warming up")
        list(
            solve_cases(
                [
                    Case(
                        "warm-up",
                        group_randomly(change_machine(GENERATORS["layered"](20, 1), 3, options.links, 1), 15, 1),
                        "",
                    )
                ],
                5.0,
            )
        )
        selected = [case for index, case in enumerate(cases) if index % options.every == options.first]
        rows = print_table(
            f"exact, at most {options.seconds:.0f} s each", KEYS, solve_cases(selected, options.seconds, options.gap)
        )
    except OnnxplaceError as error:
        raise SystemExit(str(error)) from None
    print(f"\n{summarise(rows)}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
