"""Instances of the ASPLOS/EuroSys 2025 contest on layouts: python benchmarks/layouts.py FOLDER [--seconds S] [--json].

    python benchmarks/layouts.py FOLDER                   every *.json and *.json.gz in the folder, 60 s each
    python benchmarks/layouts.py FOLDER --only K P --seconds 300

An instance is a graph of nodes with strategies; node and edge costs add up, and memory is limited at every time (the
format is described at github.com/google/iopddl). Costs are added up in whole numbers, apart from the solver. `bound` is
proven: no assignment within the limit costs less. `best` and `to_best` compare with best.json, if the folder has one.
Loops are compiled before.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _tables import Row, report_progress

from onnxplace.passes.sharding.choose.elimination import Factor
from onnxplace.passes.sharding.choose.factor_network import Holding
from onnxplace.passes.sharding.choose.factor_solver import FactorProblem, solve

KEYS = ("instance", "cost", "bound", "fits", "seconds", "best", "to_best")
# Costs from here on forbid a choice.
FORBIDDEN = 1e17


@dataclass(frozen=True)
class Instance:
    """A file of the contest."""

    name: str
    nodes: dict[str, Any]
    edges: dict[str, Any]
    limit: int

    def problem(self) -> FactorProblem:
        """Return the instance as a problem of the solver."""
        sizes = [len(costs) for costs in self.nodes["costs"]]
        factors = [Factor((node,), _forbid(costs)) for node, costs in enumerate(self.nodes["costs"])]
        for nodes, costs in zip(self.edges["nodes"], self.edges["costs"]):
            factors.append(Factor(tuple(nodes), _forbid(costs).reshape([sizes[node] for node in nodes])))
        intervals = [interval or (0, 0) for interval in self.nodes["intervals"]]
        return FactorProblem(
            sizes=sizes,
            factors=factors,
            holdings=[
                Holding(node, begin, end, np.array(usages, np.float64))
                for node, ((begin, end), usages) in enumerate(zip(intervals, self.nodes["usages"]))
            ],
            limit=self.limit,
        )

    def cost(self, values: Sequence[int]) -> int:
        """Return what the contest's checker adds up."""
        total = sum(costs[value] for costs, value in zip(self.nodes["costs"], values))
        sizes = [len(costs) for costs in self.nodes["costs"]]
        for nodes, costs in zip(self.edges["nodes"], self.edges["costs"]):
            place = 0
            for node in nodes:
                place = place * sizes[node] + values[node]
            total += costs[place]
        return int(total)

    def fits(self, values: Sequence[int]) -> bool:
        """Return whether the assignment keeps within the limit at every time."""
        changes: dict[int, int] = {}
        for interval, usages, value in zip(self.nodes["intervals"], self.nodes["usages"], values):
            if interval and interval[0] < interval[1]:
                changes[interval[0]] = changes.get(interval[0], 0) + usages[value]
                changes[interval[1]] = changes.get(interval[1], 0) - usages[value]
        held = 0
        for moment in sorted(changes):
            held += changes[moment]
            if held > self.limit:
                return False
        return True


def _forbid(costs: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    entries = np.array(costs, np.float64)
    return np.where(entries < FORBIDDEN, entries, math.inf)


def read_instance(path: Path) -> Instance:
    """Return the instance in a file, which may be compressed.

    Raises:
        SystemExit: The file is damaged or no instance.
    """
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        problem = json.loads(text)["problem"]
        return Instance(path.name.split(".")[0], problem["nodes"], problem["edges"], problem["usage_limit"])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"{path}: expected an instance of the contest, found {type(error).__name__}: {error}"
        ) from None


def measure(path: Path, seconds: float, best: dict[str, Any]) -> Row:
    """Return the row of an instance; the seconds include reading and checking it."""
    begin = time.monotonic()
    instance = read_instance(path)
    problem = instance.problem()
    elapsed = time.monotonic() - begin
    # The rest is for checking, which takes about as long as setting the problem up.
    solution = solve(problem, seconds=seconds - 2 * elapsed)
    cost = instance.cost(solution.values)
    row = {
        "instance": instance.name,
        "cost": cost,
        "bound": math.floor(solution.lower_bound) if math.isfinite(solution.lower_bound) else None,
        "fits": instance.fits(solution.values),
        "seconds": time.monotonic() - begin,
    }
    known = best.get(instance.name, {}).get("best")
    return row | ({"best": int(known), "to_best": cost / known} if known else {})


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each instance of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some instances")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each instance, with reading it; default 60")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args(arguments)
    paths = sorted(path for path in options.folder.glob("*.json*") if path.name not in ("best.json", "example.json"))
    paths = [path for path in paths if not options.only or path.name.split(".")[0] in options.only]
    if not paths:
        raise SystemExit(f"{options.folder}: expected instances of the contest (*.json or *.json.gz), found none")
    best_path = options.folder / "best.json"
    best = json.loads(best_path.read_text()) if best_path.exists() else {}
    # An instance of two nodes that do not fit at their cheapest goes through all loops.
    tiny = FactorProblem(
        [2, 2], [Factor((0, 1), np.eye(2))], [Holding(v, 0, 1, np.array([2.0, 1.0])) for v in range(2)], 3
    )
    solve(tiny, seconds=1)
    rows = []
    for path in paths:
        report_progress(path.name)
        rows.append(measure(path, options.seconds, best))
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"| {' | '.join(KEYS)} |\n|{'---|' * len(KEYS)}")
    for row in rows:
        cells = (row.get(key, "-") for key in KEYS)
        print(f"| {' | '.join(f'{cell:.4f}' if isinstance(cell, float) else str(cell) for cell in cells)} |")


if __name__ == "__main__":
    main()
