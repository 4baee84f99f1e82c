"""Placers compared: python benchmarks/placers.py [FOLDER] [--generated SIZES] [--models] [--scaling].

    python benchmarks/placers.py                          generated graphs of 1 000 nodes, in under a minute
    python benchmarks/placers.py graphs                   every cost graph of a folder
    python benchmarks/placers.py --models gnmt,resnet50   example models, profiled here, on two CPU devices
    python benchmarks/placers.py --scaling                time to place from 1 000 to 1 000 000 nodes, and its exponent

Prints Markdown tables; progress goes to stderr. A step is simulated, peak memory is the largest over the devices,
and the time to place is the whole call from cost graph to schedule: loops are compiled before, and cached results of
earlier calls are dropped. A folder may hold a figures.json with the results of Baechi (SoCC 2020), which are then
compared.
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
from _tables import Row, divide, print_table, report_progress
from step_times import SHAPES

from onnxplace.cost_graph.cost_graphs import read_cost_graph
from onnxplace.cost_graph.data import CostGraph
from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.driver.place import Grouping, place_cost_graph
from onnxplace.errors import InfeasibleError, OnnxplaceError
from onnxplace.facts import Profile, Schedule, Segments
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.pipeline.text_form import format_pipeline, parse_pipeline
from onnxplace.state import State
from onnxplace.target.target import LINK_MODELS, LinkModel
from onnxplace.utils import jit

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import models

PLACERS = "m-topo,m-etf,m-sct"
SCALING_PLACER = "m-etf"
SCALING_SIZES = "1000,10000,100000,1000000"
DEFAULT_SIZE = "1000"
# Our name of a grouping -> whether groups are contracted, and its name in figures.json.
GROUPINGS: Mapping[Grouping, tuple[bool, str]] = {
    "none": (False, "none"),
    "coplace": (True, "coplace"),
    "given": (False, "color"),
    "given+coplace": (True, "coplace+color"),
}
# Groupings that are equal for graphs without groups.
SAME_WITHOUT: Mapping[Grouping, Grouping] = {"given": "none", "given+coplace": "coplace"}
# Only calls below this total time are repeated; searches use their whole budget.
QUICK_SECONDS = 0.5
REPEAT = 5
PLACED = ("step_seconds", "bound_seconds", "to_bound", "one_device_seconds", "speedup_one_device")


@dataclass(frozen=True)
class Setting:
    """The placers, groupings and links to compare."""

    placers: Sequence[str]
    groups: Sequence[Grouping]
    links: LinkModel


def drop_cached_results(profile: Profile) -> Profile:
    """Return the profile with a graph without cached results."""
    return replace(profile, graph=replace(profile.graph))


def place_graph(graph: CostGraph, placer: str, groups: Grouping, links: LinkModel) -> Row:
    """Place a cost graph several times if that is quick; return a row with the median time."""
    head = {"graph": graph.name, "nodes": len(graph.ids), "placer": placer, "groups": groups}
    seconds_per_call: list[float] = []
    try:
        while not seconds_per_call or (len(seconds_per_call) < REPEAT and sum(seconds_per_call) < QUICK_SECONDS):
            uncached = replace(graph, profile=drop_cached_results(graph.profile))
            result = place_cost_graph(uncached, placer, links=links, groups=groups, fuse=GROUPINGS[groups][0])
            seconds_per_call.append(result.seconds)
    except InfeasibleError as error:
        return {**head, "step_seconds": f"infeasible ({error.code})"}
    return {
        **head,
        "step_seconds": result.makespan_seconds,
        "bound_seconds": result.lower_bound_seconds,
        "to_bound": divide(result.makespan_seconds, result.lower_bound_seconds),
        "peak_bytes": int(result.peak_bytes.max()),
        "place_seconds": statistics.median(seconds_per_call),
    }


def compare_placers(graphs: Iterable[CostGraph], figures: Mapping[str, Any], setting: Setting) -> Iterator[Row]:
    """Yield a row per graph, placer and grouping."""
    for graph in graphs:
        one = place_graph(graph, "single", "none", setting.links)["step_seconds"]
        entry = figures.get(graph.name, {})
        grouped = bool((graph.profile.user_groups is not None) and (graph.profile.user_groups >= 0).any())
        for placer in setting.placers:
            for groups in (name for name in setting.groups if grouped or SAME_WITHOUT.get(name) not in setting.groups):
                report_progress(f"{graph.name}: {placer}, groups {groups}")
                row = place_graph(graph, placer, groups, setting.links)
                step = row["step_seconds"]
                published_step = find_published_step(entry, placer, find_published_grouping(entry, groups, grouped))
                yield {
                    **row,
                    "one_device_seconds": one,
                    "speedup_one_device": divide(one, step),
                    "expert_seconds": find_published_step(entry, "expert", "none"),
                    "baechi_seconds": published_step,
                    "speedup_baechi": divide(published_step, step),
                }


def find_published_grouping(entry: Mapping[str, Any], groups: Grouping, grouped: bool) -> str:
    """Return the name of a grouping in figures.json.

    If no run for a graph with groups is marked as such, all runs used the groups: Baechi always respects the colocation
    of TensorFlow.
    """
    if grouped and not any("color" in item["groups"] for item in entry.get("baechi", ())):
        return {"given": "none", "given+coplace": "coplace"}.get(groups, "not run")
    return GROUPINGS[groups][1]


def find_published_step(entry: Mapping[str, Any], placer: str, groups: str) -> float | None:
    """Return the step of Baechi in figures.json; None if it failed or was not run."""
    for item in entry.get("baechi", ()):
        if item["method"] == placer.replace("-", "_") and item["groups"] == groups and item["makespan_us"]:
            return float(item["makespan_us"]) * 1e-6
    return None


def list_best(rows: Sequence[Row], figures: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row per graph: our best, one device, an expert, and Baechi's best."""
    for name in dict.fromkeys(row["graph"] for row in rows):
        fitting = [row for row in rows if row["graph"] == name and isinstance(row["step_seconds"], float)]
        if fitting:
            best = min(fitting, key=lambda row: row["step_seconds"])
            steps = [item["makespan_us"] for item in figures.get(name, {}).get("baechi", ()) if item["makespan_us"]
                     and item["method"] != "expert"]  # fmt: skip
            published_step = min(steps) * 1e-6 if steps else None
            how = f"{best['placer']}, {best['groups']}"
            yield {
                **best,
                "best": how,
                "baechi_seconds": published_step,
                "speedup_baechi": divide(published_step, best["step_seconds"]),
            }


def place_models(names: Sequence[str], setting: Setting) -> Iterator[Row]:
    """Yield a row per example model and placer with its step on two CPU devices."""
    for name in names:
        report_progress(f"{name}: profiling")
        with tempfile.TemporaryDirectory(prefix="onnxplace-bench-") as folder:
            path = Path(folder) / "model.onnx"
            models.save(models.build(name), path)
            state = State(local_target("cpu:0,cpu:1")).with_facts(bind(load(path), SHAPES.get(name, {}), {}))
            state, _ = Pipeline.parse("optimize,profile,coplace,fuse").run(state)
            one = place_model(state, "single")["step_seconds"]
            for placer in setting.placers:
                report_progress(f"{name}: {placer}")
                row = place_model(state, placer)
                speedup = divide(one, row["step_seconds"])
                yield {"model": name, **row, "one_device_seconds": one, "speedup_one_device": speedup}


def place_model(state: State, placer: str) -> Row:
    """Place and split a profiled model."""
    profile = drop_cached_results(state[Profile])
    head = {"nodes": len(profile.graph), "placer": placer}
    try:
        after, timings = Pipeline.parse(f"{placer},split").run(state.with_facts(profile))
    except InfeasibleError as error:
        return {**head, "step_seconds": f"infeasible ({error.code})"}
    schedule, step = after[Schedule], after[Segments].simulation.makespan_seconds
    bound = schedule.lower_bound_seconds
    return {
        **head,
        "step_seconds": step,
        "bound_seconds": bound,
        "to_bound": divide(step, bound),
        "peak_bytes": int(schedule.simulation.peak_bytes.max()),
        "place_seconds": timings[0].seconds,
    }


def measure_scaling(families: Sequence[str], sizes: Sequence[int], setting: Setting) -> Iterator[Row]:
    """Yield a row per family and placer: times to place, and their exponent."""
    for family in families:
        for placer in setting.placers:
            times: dict[int, Any] = {}
            for size in sizes:
                report_progress(f"{family}, {size} nodes: {placer}")
                row = place_graph(GENERATORS[family](size, 0), placer, "none", setting.links)
                times[size] = row.get("place_seconds", row["step_seconds"])
            known = [
                (size, seconds_per_call)
                for size, seconds_per_call in times.items()
                if isinstance(seconds_per_call, float)
            ]
            shown = {format_count(size): seconds_per_call for size, seconds_per_call in times.items()}
            fits = {"exponent": fit_exponent(known), "last_exponent": fit_exponent(known[-2:])}
            yield {"family": family, "placer": placer, **shown, **fits}


def format_count(size: int) -> str:
    """Write 20000 as 20 000."""
    return f"{size:,}".replace(",", " ")


def fit_exponent(points: Sequence[tuple[int, float]]) -> float | None:
    """Return k of the least-squares fit seconds = c * nodes ** k on logarithms; None for fewer than two sizes."""
    if len({size for size, _ in points}) < 2:
        return None
    sizes, seconds = np.log(np.array(points)).T
    return float(np.polyfit(sizes, seconds, 1)[0])


def print_sections(options: argparse.Namespace, setting: Setting) -> Iterator[tuple[str, list[Row]]]:
    """Print the selected sections; yield their names and rows."""
    ends, families = ("peak_bytes", "place_seconds"), options.families.split(",")
    if options.folder:
        figures_file = options.folder / "figures.json"
        figures = json.loads(figures_file.read_text(encoding="utf-8"))["graphs"] if figures_file.exists() else {}
        paths = sorted(path for path in options.folder.glob("*.json*") if path != figures_file)
        published_keys = ("expert_seconds", "baechi_seconds", "speedup_baechi") if figures else ()
        rows = compare_placers((read_cost_graph(path) for path in paths), figures, setting)
        keys = ("graph", "nodes", "placer", "groups", *PLACED, *published_keys[1:], *ends)
        result = print_table(f"Cost graphs, links {setting.links}", keys, rows)
        yield "graphs", result
        keys = ("graph", "nodes", *PLACED, *published_keys, "best")
        yield "best", print_table("The best of each graph", keys, list_best(result, figures))
    if options.generated:
        sizes = parse_integers(options.generated)
        graphs = (GENERATORS[family](size, 0) for family in families for size in sizes)
        keys = ("graph", "nodes", "placer", "groups", *PLACED, *ends)
        yield (
            "generated",
            print_table(f"Generated graphs, links {setting.links}", keys, compare_placers(graphs, {}, setting)),
        )
    if options.models is not None:
        names = options.models.split(",") if options.models else list(models.MODELS)
        keys = ("model", "nodes", "placer", *PLACED, *ends)
        yield "models", print_table("Example models, two CPU devices", keys, place_models(names, setting))
    if options.scaling:
        sizes = parse_integers(options.scaling)
        keys = ("family", "placer", *map(format_count, sizes), "exponent", "last_exponent")
        yield (
            "scaling",
            print_table(f"Time to place, links {setting.links}", keys, measure_scaling(families, sizes, setting)),
        )


def parse_integers(text: str) -> list[int]:
    """Read `1000,20000`."""
    return [int(item) for item in text.split(",")]


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="cost graphs: .json or .json.gz")
    parser.add_argument("--links", default="duplex", choices=LINK_MODELS)
    parser.add_argument("--placers", metavar="NAMES", help=f"default: {PLACERS}; with --scaling {SCALING_PLACER}")
    parser.add_argument("--groups", default=",".join(GROUPINGS), help="groupings to try; default: all four")
    parser.add_argument(
        "--generated", nargs="?", const=DEFAULT_SIZE, metavar="SIZES", help=f"generated graphs [{DEFAULT_SIZE}]"
    )
    parser.add_argument("--families", default=",".join(GENERATORS), help="of generated graphs; default: all")
    parser.add_argument("--models", nargs="?", const="", metavar="NAMES", help="of examples/models.py [all]")
    parser.add_argument("--scaling", nargs="?", const=SCALING_SIZES, metavar="SIZES", help=f"[{SCALING_SIZES}]")
    parser.add_argument("--json", type=Path, metavar="F", help="write all rows there, in seconds and bytes")
    options = parser.parse_args()
    if not (options.folder or options.generated or options.scaling) and options.models is None:
        options.generated = DEFAULT_SIZE
    for family in options.families.split(","):
        if family not in GENERATORS:
            parser.error(f"no family {family!r}, expected one of {', '.join(GENERATORS)}")
    for groups in options.groups.split(","):
        if groups not in GROUPINGS:
            parser.error(f"no grouping {groups!r}, expected one of {', '.join(GROUPINGS)}")
    for name in (options.models or "").split(","):
        if name and name not in models.MODELS:
            parser.error(f"no model {name!r}, expected one of {', '.join(models.MODELS)}")
    return options


def main() -> None:
    """Print the tables that the options select."""
    options = parse_options()
    text = options.placers or (SCALING_PLACER if options.scaling else PLACERS)
    try:
        placers = [format_pipeline([spec]) for spec in parse_pipeline(text)]
        setting = Setting(placers, options.groups.split(","), options.links)
        jit.MAX_INTERPRETED_ELEMENTS = -1  # all loops are compiled by the calls that warm up
        for placer in ("single", *placers):
            report_progress(f"warming up {placer}")
            for groups in setting.groups:
                place_graph(GENERATORS["tf_like"](100, 0), placer, groups, setting.links)
        rows = dict(print_sections(options, setting))
    except OnnxplaceError as problem:
        raise SystemExit(str(problem)) from None
    if options.json:
        options.json.write_text(json.dumps({"links": options.links, **rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
