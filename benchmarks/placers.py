"""Placers compared: python benchmarks/placers.py [FOLDER] [--generated SIZES] [--models] [--scaling].

    python benchmarks/placers.py                          generated graphs of 1 000 nodes, in under a minute
    python benchmarks/placers.py graphs                   every cost graph of a folder
    python benchmarks/placers.py --models gnmt,resnet50   example models, profiled here, on two CPU devices
    python benchmarks/placers.py --scaling                time to place from 1 000 to 1 000 000 nodes, and its exponent

Prints Markdown tables; progress goes to stderr. A step is simulated, peak memory is the largest over the devices, and
the time to place is the whole call from cost graph to schedule: kernels are warm, and nothing that a graph remembers
from an earlier call is used. A folder may hold a figures.json with the results of Baechi (SoCC 2020) on its graphs,
which are then shown beside ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from _tables import Row, over, progress, table
from step_times import SHAPES

from onnxplace.cost_graph import GENERATORS, CostGraph, read_cost_graph
from onnxplace.driver import Grouping, place_cost_graph
from onnxplace.errors import InfeasibleError, OnnxplaceError
from onnxplace.facts import Profile, Schedule, Segments
from onnxplace.machine import local_target
from onnxplace.model import bind, load
from onnxplace.pipeline import Pipeline, format_pipeline, parse_pipeline
from onnxplace.state import State
from onnxplace.target import LINK_MODELS, LinkModel

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import models

PLACERS = "m-topo,m-etf,m-sct"
SCALING_PLACER = "m-etf"
SCALING_SIZES = "1000,10000,100000,1000000"
SMALL = "1000"
# Ours -> whether nodes of a group are contracted, and what figures.json calls it.
GROUPINGS: Mapping[Grouping, tuple[bool, str]] = {
    "none": (False, "none"),
    "coplace": (True, "coplace"),
    "given": (False, "color"),
    "given+coplace": (True, "coplace+color"),
}
# What a grouping amounts to where the graph has no groups of its own.
SAME_WITHOUT: Mapping[Grouping, Grouping] = {"given": "none", "given+coplace": "coplace"}
# Searches take what their budget allows; only quick calls are repeated.
QUICK_SECONDS = 0.5
REPEAT = 5
PLACED = ("step_seconds", "bound_seconds", "to_bound", "one_device_seconds", "to_one_device")


@dataclass(frozen=True)
class Setting:
    """What the command line asks for."""

    placers: Sequence[str]
    groups: Sequence[Grouping]
    links: LinkModel


def forgetful(profile: Profile) -> Profile:
    """Return the profile with a graph that remembers nothing of earlier calls."""
    return replace(profile, graph=replace(profile.graph))


def placed(graph: CostGraph, placer: str, groups: Grouping, links: LinkModel) -> Row:
    """Place a cost graph as often as that is quick; returns what came out, and the median time."""
    head = {"graph": graph.name, "nodes": len(graph.ids), "placer": placer, "groups": groups}
    taken: list[float] = []
    try:
        while not taken or (len(taken) < REPEAT and sum(taken) < QUICK_SECONDS):
            fresh = replace(graph, profile=forgetful(graph.profile))
            found = place_cost_graph(fresh, placer, links=links, groups=groups, fuse=GROUPINGS[groups][0])
            taken.append(found.seconds)
    except InfeasibleError as refused:
        return {**head, "step_seconds": f"infeasible ({refused.code})"}
    return {
        **head,
        "step_seconds": found.makespan_seconds,
        "bound_seconds": found.lower_bound_seconds,
        "to_bound": over(found.makespan_seconds, found.lower_bound_seconds),
        "peak_bytes": int(found.peak_bytes.max()),
        "place_seconds": statistics.median(taken),
    }


def compared(graphs: Iterable[CostGraph], figures: Mapping[str, Any], setting: Setting) -> Iterator[Row]:
    """Yield a row per graph, placer and grouping."""
    for graph in graphs:
        one = placed(graph, "single", "none", setting.links)["step_seconds"]
        entry = figures.get(graph.name, {})
        grouped = bool((graph.profile.given is not None) and (graph.profile.given >= 0).any())
        for placer in setting.placers:
            for groups in (name for name in setting.groups if grouped or SAME_WITHOUT.get(name) not in setting.groups):
                progress(f"{graph.name}: {placer}, groups {groups}")
                row = placed(graph, placer, groups, setting.links)
                step = row["step_seconds"]
                theirs = published(entry, placer, their_name(entry, groups, grouped))
                yield {
                    **row,
                    "one_device_seconds": one,
                    "to_one_device": over(step, one),
                    "expert_seconds": published(entry, "expert", "none"),
                    "baechi_seconds": theirs,
                    "to_baechi": over(step, theirs),
                }


def their_name(entry: Mapping[str, Any], groups: Grouping, grouped: bool) -> str:
    """Return what figures.json calls a grouping of ours, for a graph that has groups of its own or not.

    Where it tells none of its runs with a graph's own groups apart, all of them kept those: Baechi always keeps the
    colocation that TensorFlow asks for.
    """
    if grouped and not any("color" in item["groups"] for item in entry.get("baechi", ())):
        return {"given": "none", "given+coplace": "coplace"}.get(groups, "not run")
    return GROUPINGS[groups][1]


def published(entry: Mapping[str, Any], placer: str, groups: str) -> float | None:
    """Return the step that figures.json gives for Baechi in this setting; None if it failed or was not run."""
    for item in entry.get("baechi", ()):
        if item["method"] == placer.replace("-", "_") and item["groups"] == groups and item["makespan_us"]:
            return float(item["makespan_us"]) * 1e-6
    return None


def summary(rows: Sequence[Row], figures: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row per graph: the best that we found, beside one device, a human expert and Baechi's best."""
    for name in dict.fromkeys(row["graph"] for row in rows):
        fitting = [row for row in rows if row["graph"] == name and isinstance(row["step_seconds"], float)]
        if fitting:
            best = min(fitting, key=lambda row: row["step_seconds"])
            steps = [item["makespan_us"] for item in figures.get(name, {}).get("baechi", ()) if item["makespan_us"]
                     and item["method"] != "expert"]  # fmt: skip
            theirs = min(steps) * 1e-6 if steps else None
            how = f"{best['placer']}, {best['groups']}"
            yield {**best, "best": how, "baechi_seconds": theirs, "to_baechi": over(best["step_seconds"], theirs)}


def models_placed(names: Sequence[str], setting: Setting) -> Iterator[Row]:
    """Yield a row per example model and placer: its predicted step, segment by segment, on two CPU devices."""
    for name in names:
        progress(f"{name}: profiling")
        with tempfile.TemporaryDirectory(prefix="onnxplace-bench-") as folder:
            path = Path(folder) / "model.onnx"
            models.save(models.build(name), path)
            state = State(local_target("cpu:0,cpu:1")).having(bind(load(path), SHAPES.get(name, {}), {}))
            state, _ = Pipeline.parse("optimize,profile,coplace,fuse").run(state)
            one = model_placed(state, "single")["step_seconds"]
            for placer in setting.placers:
                progress(f"{name}: {placer}")
                row = model_placed(state, placer)
                ratio = over(row["step_seconds"], one)
                yield {"model": name, **row, "one_device_seconds": one, "to_one_device": ratio}


def model_placed(state: State, placer: str) -> Row:
    """Place and split a profiled model."""
    profile = forgetful(state[Profile])
    head = {"nodes": len(profile.graph), "placer": placer}
    try:
        after, timings = Pipeline.parse(f"{placer},split").run(state.having(profile))
    except InfeasibleError as refused:
        return {**head, "step_seconds": f"infeasible ({refused.code})"}
    schedule, step = after[Schedule], after[Segments].simulation.makespan_seconds
    bound = schedule.lower_bound_seconds
    return {
        **head,
        "step_seconds": step,
        "bound_seconds": bound,
        "to_bound": over(step, bound),
        "peak_bytes": int(schedule.simulation.peak_bytes.max()),
        "place_seconds": timings[0].seconds,
    }


def scaling(families: Sequence[str], sizes: Sequence[int], setting: Setting) -> Iterator[Row]:
    """Yield a row per family and placer: seconds to place each size, and the exponent of time over nodes."""
    for family in families:
        for placer in setting.placers:
            times: dict[int, Any] = {}
            for size in sizes:
                progress(f"{family}, {size} nodes: {placer}")
                row = placed(GENERATORS[family](size, 0), placer, "none", setting.links)
                times[size] = row.get("place_seconds", row["step_seconds"])
            known = [(size, taken) for size, taken in times.items() if isinstance(taken, float)]
            shown = {in_thousands(size): taken for size, taken in times.items()}
            fits = {"exponent": exponent(known), "last_exponent": exponent(known[-2:])}
            yield {"family": family, "placer": placer, **shown, **fits}


def in_thousands(size: int) -> str:
    """Write 20000 as 20 000."""
    return f"{size:,}".replace(",", " ")


def exponent(points: Sequence[tuple[int, float]]) -> float | None:
    """Return k of the least-squares fit seconds = c * nodes ** k on logarithms; None for fewer than two sizes."""
    if len({size for size, _ in points}) < 2:
        return None
    sizes, seconds = np.log(np.array(points)).T
    return float(np.polyfit(sizes, seconds, 1)[0])


def sections(chosen: argparse.Namespace, setting: Setting) -> Iterator[tuple[str, list[Row]]]:
    """Print every section that was asked for; yields its name and its rows."""
    ends, families = ("peak_bytes", "place_seconds"), chosen.families.split(",")
    if chosen.folder:
        listed = chosen.folder / "figures.json"
        figures = json.loads(listed.read_text(encoding="utf-8"))["graphs"] if listed.exists() else {}
        paths = sorted(path for path in chosen.folder.glob("*.json*") if path != listed)
        beside = ("expert_seconds", "baechi_seconds", "to_baechi") if figures else ()
        rows = compared((read_cost_graph(path) for path in paths), figures, setting)
        keys = ("graph", "nodes", "placer", "groups", *PLACED, *beside[1:], *ends)
        found = table(f"Cost graphs, links {setting.links}", keys, rows)
        yield "graphs", found
        keys = ("graph", "nodes", *PLACED, *beside, "best")
        yield "best", table("The best of each graph", keys, summary(found, figures))
    if chosen.generated:
        sizes = integers(chosen.generated)
        graphs = (GENERATORS[family](size, 0) for family in families for size in sizes)
        keys = ("graph", "nodes", "placer", "groups", *PLACED, *ends)
        yield "generated", table(f"Generated graphs, links {setting.links}", keys, compared(graphs, {}, setting))
    if chosen.models is not None:
        names = chosen.models.split(",") if chosen.models else list(models.MODELS)
        keys = ("model", "nodes", "placer", *PLACED, *ends)
        yield "models", table("Example models, two CPU devices", keys, models_placed(names, setting))
    if chosen.scaling:
        sizes = integers(chosen.scaling)
        keys = ("family", "placer", *map(in_thousands, sizes), "exponent", "last_exponent")
        yield "scaling", table(f"Time to place, links {setting.links}", keys, scaling(families, sizes, setting))


def integers(text: str) -> list[int]:
    """Read `1000,20000`."""
    return [int(item) for item in text.split(",")]


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="cost graphs: .json or .json.gz")
    parser.add_argument("--links", default="duplex", choices=LINK_MODELS)
    parser.add_argument("--placers", metavar="NAMES", help=f"default: {PLACERS}; with --scaling {SCALING_PLACER}")
    parser.add_argument("--groups", default=",".join(GROUPINGS), help="groupings to try; default: all four")
    parser.add_argument("--generated", nargs="?", const=SMALL, metavar="SIZES", help=f"generated graphs [{SMALL}]")
    parser.add_argument("--families", default=",".join(GENERATORS), help="of generated graphs; default: all")
    parser.add_argument("--models", nargs="?", const="", metavar="NAMES", help="of examples/models.py [all]")
    parser.add_argument("--scaling", nargs="?", const=SCALING_SIZES, metavar="SIZES", help=f"[{SCALING_SIZES}]")
    parser.add_argument("--json", type=Path, metavar="F", help="write all rows there, in seconds and bytes")
    chosen = parser.parse_args()
    if not (chosen.folder or chosen.generated or chosen.scaling) and chosen.models is None:
        chosen.generated = SMALL
    for family in chosen.families.split(","):
        if family not in GENERATORS:
            parser.error(f"there is no family {family!r}, only {', '.join(GENERATORS)}")
    for groups in chosen.groups.split(","):
        if groups not in GROUPINGS:
            parser.error(f"there is no grouping {groups!r}, only {', '.join(GROUPINGS)}")
    for name in (chosen.models or "").split(","):
        if name and name not in models.MODELS:
            parser.error(f"there is no model {name!r}, only {', '.join(models.MODELS)}")
    return chosen


def main() -> None:
    """Print the tables that were asked for."""
    chosen = options()
    text = chosen.placers or (SCALING_PLACER if chosen.scaling else PLACERS)
    try:
        placers = [format_pipeline([spec]) for spec in parse_pipeline(text)]
        setting = Setting(placers, chosen.groups.split(","), chosen.links)
        for placer in ("single", *placers):
            progress(f"warming up {placer}")
            for groups in setting.groups:
                placed(GENERATORS["tf_like"](100, 0), placer, groups, setting.links)
        rows = dict(sections(chosen, setting))
    except OnnxplaceError as problem:
        raise SystemExit(str(problem)) from None
    if chosen.json:
        chosen.json.write_text(json.dumps({"links": chosen.links, **rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
