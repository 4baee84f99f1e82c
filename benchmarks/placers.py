"""Every placer on every cost graph of a folder: python benchmarks/placers.py FOLDER [--links duplex].

Prints a Markdown table: step, lower bound and milliseconds to place, beside the figures of other placers where the
folder has a figures.json. Kernels are warmed up first. The graphs are other people's data and not part of this
repository.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxplace.cost_graph import CostGraph, read_cost_graph
from onnxplace.errors import InfeasibleError
from onnxplace.placing import Grouping, place

PLACERS = ("m-topo", "m-etf", "m-sct")
GROUPINGS: tuple[tuple[Grouping, bool, str, str], ...] = (
    ("none", False, "none", "none"),
    ("coplace", True, "coplace", "coplace"),
    ("given", False, "given", "color"),
    ("given+coplace", True, "given+coplace", "coplace+color"),
)


def published(figures: Mapping[str, Any], graph: str, placer: str, groups: str) -> float | None:
    """Return the step in ms that figures.json has for Baechi in this setting; None if it failed or was not run."""
    for entry in figures.get("graphs", {}).get(graph, {}).get("baechi", ()):
        if entry["method"] == placer.replace("-", "_") and entry["groups"] == groups and entry["makespan_us"]:
            return float(entry["makespan_us"]) / 1e3
    return None


def row(
    graph: CostGraph, figures: Mapping[str, Any], placer: str, links: Any, setting: tuple[Grouping, bool, str, str]
) -> str:
    """Place one graph and return its line."""
    groups, fuse, label, theirs = setting
    baechi = published(figures, graph.name, placer, theirs)
    head = f"| {graph.name} | {len(graph.ids)} | {placer} | {label} "
    try:
        found = place(graph, placer, links=links, groups=groups, fuse=fuse)
    except InfeasibleError as refused:
        return f"{head}| infeasible ({refused.code}) | | {f'{baechi:.1f}' if baechi else '-'} | | |"
    step, bound = found.makespan_seconds * 1e3, found.lower_bound_seconds * 1e3
    beside = f"{baechi:.1f} | {step / baechi:.2f}x" if baechi else "- | "
    return f"{head}| {step:.1f} | {bound:.1f} | {beside} | {found.seconds * 1e3:.1f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--links", default="duplex", choices=["duplex", "parallel", "sequential"])
    chosen = parser.parse_args()
    figures_file = chosen.folder / "figures.json"
    figures = json.loads(figures_file.read_text()) if figures_file.exists() else {}
    graphs = [read_cost_graph(path) for path in sorted(chosen.folder.glob("*.json.gz"))]
    for placer in PLACERS:
        place(graphs[0], placer)
    print("| graph | nodes | placer | groups | step ms | bound ms | Baechi ms | ratio | ms to place |\n|" + "---|" * 9)
    for graph in graphs:
        for placer in PLACERS:
            for setting in GROUPINGS:
                print(row(graph, figures, placer, chosen.links, setting), flush=True)


if __name__ == "__main__":
    main()
