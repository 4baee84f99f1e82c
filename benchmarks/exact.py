"""How near the best `exact` gets: python benchmarks/exact.py [FOLDER] [--seconds S] [--every K].

    python benchmarks/exact.py --every 6        a sixth of the generated graphs
    python benchmarks/exact.py graphs           cost graphs of a folder that fuse to few enough groups
    python benchmarks/exact.py graphs --whole --gap 0.001       as they are, without groups and with their own

Generated graphs have 10, 20 and 30 groups, a few of them of several nodes, or are larger ones that `coplace` and
`fuse` bring below that. Each is placed on 2 and 3 devices, on links as Baechi measured them and on links 20 times as
fast; memory is ample, or each device has the given part of what one device would need for the whole graph: as little,
in tenths, as m-ETF can do with.
Prints Markdown tables; progress goes to stderr. Steps and bounds are of the graph that the placers see, fused or not.
`auto` searches for its default 2 s. Kernels are warm.
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
from _tables import Row, over, progress, table

from onnxplace.cost_graph import GENERATORS, CostGraph, read_cost_graph
from onnxplace.driver import with_devices
from onnxplace.errors import InfeasibleError, OnnxplaceError
from onnxplace.facts import Groups, Profile, Schedule
from onnxplace.graph import Ints
from onnxplace.pipeline import Pipeline, make_pass, run_pass
from onnxplace.problem import placement_problem
from onnxplace.state import State
from onnxplace.target import LINK_MODELS, LinkModel

SIZES, DEVICES = (10, 20, 30), (2, 3)
MAX_GROUPS, MAX_NODES = 30, 62
# Nodes of a graph that is fused, and nodes per group of one that is not.
LARGE, PER_GROUP = 120, 1.2
FASTER = 20
GOAL = 0.01
# From few to very few nodes, as long as there are too many.
FUSERS = (
    "coplace,fuse", "coplace,fuse{merge=runs}", "coplace{join=always},fuse", "coplace{join=always},fuse{merge=runs}"
)  # fmt: skip
KEYS = ("graph", "nodes", "groups", "devices", "links", "memory", "step_seconds", "bound_seconds", "gap",
        "place_seconds", "auto_seconds", "to_auto")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A problem to be solved."""

    name: str
    state: State
    """With a Profile and Groups, nothing left to fuse."""
    links: str
    memory: str = "ample"


def joined(graph: CostGraph, groups: int, seed: int) -> State:
    """Return a graph whose nodes are in `groups` groups: neighbours are joined along edges drawn at random."""
    random, shape = np.random.default_rng(seed), graph.profile.graph
    group = np.arange(len(shape), dtype=np.int32)
    before = shape.predecessors
    for edge in random.permutation(len(before.items)).tolist():
        if len(np.unique(group)) <= groups:
            break
        group[group == group[before.items[edge]]] = group[before.rows[edge]]
    return graph.state().having(free(np.unique(group, return_inverse=True)[1].astype(np.int32)))


def free(group: Ints) -> Groups:
    """Return groups of nodes that may go anywhere."""
    count = int(group.max(initial=-1)) + 1
    return Groups(group, np.full(count, -1, dtype=np.int32), ("",) * count)


def fused(graph: CostGraph) -> State | None:
    """Return the fused graph as a graph of its own, so that bounds are its; None if that has too many groups."""
    for text in FUSERS:
        asked = placement_problem(Pipeline.parse(text).run(graph.state())[0])
        if len(asked.pinned) <= MAX_GROUPS and (len(asked.graph) <= MAX_NODES or text == FUSERS[-1]):
            names = [device.cost_class for device in asked.target.devices]
            sources = {name: np.zeros(len(asked.graph), dtype=np.uint8) for name in names}
            single = np.arange(len(asked.graph), dtype=np.int32)
            profile = Profile(asked.graph, dict(zip(names, asked.seconds)), MappingProxyType(sources), single)
            return State(asked.target).having(profile, Groups(asked.group, asked.pinned, ("",) * len(asked.pinned)))
    return None


def generated(devices: Sequence[int], links: LinkModel) -> Iterator[Case]:
    """Yield graphs of every family, size and kind of machine."""
    for seed, family in enumerate(GENERATORS):
        for count in devices:
            for faster in (1, FASTER):
                name = links if faster == 1 else f"{links}, fast"
                for groups in SIZES:
                    graph = on(GENERATORS[family](int(PER_GROUP * groups), seed), count, links, faster)
                    yield from roomy_and_tight(Case(family, joined(graph, groups, seed), name))
                whole = fused(on(GENERATORS[family](LARGE, seed), count, links, faster))
                if whole is not None:
                    yield from roomy_and_tight(Case(f"{family}, fused", whole, name))


def stored(folder: Path, devices: Sequence[int], links: LinkModel) -> Iterator[Case]:
    """Yield the cost graphs of a folder that can be fused to few groups, with the memory that their devices have."""
    for path in sorted(path for path in folder.glob("*.json*") if path.name != "figures.json"):
        graph = read_cost_graph(path)
        for count in devices:
            whole = fused(on(graph, count, links, 1))
            if whole is None:
                progress(f"{graph.name}: more than {MAX_GROUPS} groups")
                break
            yield Case(graph.name, whole, links, "given")


def unfused(folder: Path, links: LinkModel) -> Iterator[Case]:
    """Yield the cost graphs of a folder on their own devices, each node free to go anywhere and with their groups."""
    for path in sorted(path for path in folder.glob("*.json*") if path.name != "figures.json"):
        graph = on(read_cost_graph(path), 0, links, 1)
        given = graph.profile.given
        for name, options in (("none", "join=never,given=false"), ("given", "join=never")):
            if name == "none" or (given is not None and (given >= 0).any()):
                yield Case(
                    f"{graph.name}, {name}", Pipeline.parse(f"coplace{{{options}}}").run(graph.state())[0], links
                )


def on(graph: CostGraph, devices: int, links: LinkModel, faster: int) -> CostGraph:
    """Return the graph on so many devices (0: as many as it names), with links so much faster."""
    made = with_devices(graph, devices or None, None)
    quick = tuple(
        replace(link, latency_seconds=link.latency_seconds / faster, bytes_per_second=link.bytes_per_second * faster)
        for link in made.target.links
    )
    return replace(made, target=replace(made.target, links=quick, link_model=links))


def roomy_and_tight(case: Case) -> Iterator[Case]:
    """Yield the case, and again with as little memory as m-ETF can do with, to a tenth of what one device needs."""
    yield case
    asked, tight = placement_problem(case.state), None
    alone = asked.simulate(np.zeros(len(asked.graph), dtype=np.int32), asked.graph.order).peak_bytes[0]
    for tenths in range(9, 0, -1):
        limits = {device.id: int(alone * tenths / 10) for device in case.state.target.devices}
        state = replace(case.state, target=case.state.target.limiting(limits))
        if isinstance(step_of("m-etf", state), str):
            break
        tight = replace(case, state=state, memory=f"{tenths}0 %")
    if tight:
        yield tight


def solved(cases: Iterable[Case], seconds: float, gap: float = GOAL) -> Iterator[Row]:
    """Yield a row per case: what `exact` found and proved, beside `auto`."""
    for case in cases:
        shape, groups = case.state[Profile].graph, case.state[Groups]
        progress(f"{case.name}: {len(groups.pinned)} groups, {len(case.state.target.devices)} devices, {case.memory}")
        head = {
            "graph": case.name, "nodes": len(shape), "groups": len(groups.pinned),
            "devices": len(case.state.target.devices), "links": case.links, "memory": case.memory,
        }  # fmt: skip
        auto = step_of("auto", case.state)
        began = time.perf_counter()
        try:
            done = run_pass(make_pass("exact", {"seconds": str(seconds), "gap": str(gap)}), case.state)[Schedule]
        except InfeasibleError as refused:
            yield {**head, "step_seconds": f"infeasible ({refused.code})", "auto_seconds": auto}
            continue
        step, bound = done.simulation.makespan_seconds, done.lower_bound_seconds
        yield {
            **head, "step_seconds": step, "bound_seconds": bound, "gap": 1 - bound / step if step else 0.0,
            "place_seconds": time.perf_counter() - began, "auto_seconds": auto, "to_auto": over(step, auto),
        }  # fmt: skip


def step_of(placer: str, state: State) -> float | str:
    """Return the step that a placer finds, or that it finds none."""
    try:
        return run_pass(make_pass(placer, {}), state)[Schedule].simulation.makespan_seconds
    except InfeasibleError as refused:
        return f"infeasible ({refused.code})"


def verdict(rows: Sequence[Row]) -> str:
    """Say in a line how many were proven, and how long that took."""
    gaps = [row["gap"] for row in rows if "gap" in row]
    proven = [row["place_seconds"] for row in rows if row.get("gap", 1.0) <= GOAL]
    if not proven:
        return f"0 of {len(rows)} within {GOAL:.0%}"
    times = f"median {statistics.median(proven):.2f} s, longest {max(proven):.1f} s"
    return f"{len(proven)} of {len(rows)} within {GOAL:.0%} ({times}); largest gap {max(gaps):.1%}"


def options() -> argparse.Namespace:
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
    """Print the table that was asked for."""
    chosen = options()
    devices = [int(count) for count in chosen.devices.split(",")]
    try:
        if chosen.folder:
            whole = unfused(chosen.folder, chosen.links)
            cases = whole if chosen.whole else stored(chosen.folder, devices, chosen.links)
        else:
            cases = generated(devices, chosen.links)
        progress("warming up")
        list(solved([Case("warm-up", joined(on(GENERATORS["layered"](20, 1), 3, chosen.links, 1), 15, 1), "")], 5.0))
        taken = [case for index, case in enumerate(cases) if index % chosen.every == chosen.first]
        rows = table(f"exact, at most {chosen.seconds:.0f} s each", KEYS, solved(taken, chosen.seconds, chosen.gap))
    except OnnxplaceError as problem_found:
        raise SystemExit(str(problem_found)) from None
    print(f"\n{verdict(rows)}")
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
