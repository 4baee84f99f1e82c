"""Run ONNX's conformance suite through `compile` with forced placements; print the table of docs/conformance.md.

    python -m benchmarks.conformance [--jobs 2] [--kinds node,light] [--list failed] [--shard|--exports|--ranks|--empty]

With `--shard`, the cases are not placed: every sharding strategy of every node is run, over two and three devices.
With `--exports`, ONNX Runtime runs what `merge` and `export` make of a bundle on two devices, and a report is made.
With `--ranks`, bundles run on two processes over MPI (extra [mpi]).
With `--empty`, axes of inputs are empty, one after the other and several at once, and `verify` compares; the models of
the sharding rules are tried, too, with ONNX Runtime's own operators.
Some minutes with two processes. A case that ends its process counts as failed, and the others go on. Exit code 1 if a
case fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from time import perf_counter
from typing import Any

from tests.passes.sharding.test_rules import CASES
from tests.support.conformance import KINDS, STATUSES, Outcome, names, outcome
from tests.support.empty_cases import EmptyOutcome, empty_case
from tests.support.export_cases import export_case
from tests.support.forced_sharding import ShardOutcome, shard_case
from tests.support.rank_cases import rank_case

Cases = Sequence[tuple[str, str]]
# What runs a case, by the option.
RUNS: Mapping[str, Callable[[str, str], Outcome | ShardOutcome | EmptyOutcome]] = {
    "": outcome,
    "--shard": shard_case,
    "--exports": export_case,
    "--ranks": rank_case,
    "--empty": empty_case,
}


def main() -> int:
    """Run the selected cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of cases, of: " + ", ".join(KINDS))
    parser.add_argument("--list", default="failed", metavar="STATUS", help="name the cases whose status starts so")
    parser.add_argument("--shard", action="store_true", help="run all sharding strategies instead of placements")
    parser.add_argument("--exports", action="store_true", help="run exports of bundles")
    parser.add_argument("--ranks", action="store_true", help="run bundles on two processes over MPI")
    parser.add_argument("--empty", action="store_true", help="verify with empty axes")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    mode = next((name for name in RUNS if name and vars(options)[name.strip("-")]), "")
    if options.worker:
        return _run_worker(RUNS[mode])
    cases = [(kind, name) for kind in options.kinds.split(",") for name in names(kind)][::-1]  # large models first
    cases += [("rules", name) for name in CASES] if options.empty else []
    started = perf_counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        shares = [cases[start :: options.jobs] for start in range(options.jobs)]
        finished = pool.map(lambda share: list(_run_in_processes(share, mode)), shares)
        results = [item for share in finished for item in share]
    kinds, seconds = options.kinds.split(","), perf_counter() - started
    if options.shard:
        return _print_shard_report([ShardOutcome(**item) for item in results], kinds, seconds)
    if options.empty:
        return _print_empty_report([EmptyOutcome(**item) for item in results], [*kinds, "rules"], seconds)
    outcomes = [Outcome(**item) for item in results]
    _print_report(outcomes, kinds, options.list, seconds)
    return 1 if any(item.status == "failed" for item in outcomes) else 0


def _run_worker(run: Callable[[str, str], Outcome | ShardOutcome | EmptyOutcome]) -> int:
    """Run the cases on stdin; print a line of JSON for each."""
    warnings.simplefilter("ignore")
    for kind, name in json.load(sys.stdin):
        print(json.dumps(vars(run(kind, name))), flush=True)
    return 0


def _run_in_processes(cases: Cases, mode: str) -> Iterator[dict[str, Any]]:
    """Yield the fields of the outcome of each case; a new process continues where one has died."""
    while cases:
        command = [sys.executable, "-m", "benchmarks.conformance", "--worker", *([mode] if mode else [])]
        worker = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=False)
        finished = [json.loads(line) for line in worker.stdout.splitlines() if line.startswith("{")]
        yield from finished
        cases = cases[len(finished) :]
        if cases:
            kind, name = cases[0]
            last_line = (worker.stderr.strip().splitlines() or [""])[-1]
            problem = f"its process ended with {worker.returncode}: {last_line}"
            failure = (
                {"failures": [problem]} if mode in ("--shard", "--empty") else {"status": "failed", "detail": problem}
            )
            yield {"name": name, "kind": kind, **failure}
            cases = cases[1:]


def _print_empty_report(outcomes: Sequence[EmptyOutcome], kinds: Sequence[str], seconds: float) -> int:
    """Print the table of cases with empty axes and the failures; return the exit code."""
    groups = [[item for item in outcomes if item.kind == kind] for kind in kinds]
    rows: dict[str, Callable[[Sequence[EmptyOutcome]], int]] = {
        "cases with empty axes": lambda items: sum(bool(item.compared or item.refused) for item in items),
        "choices that agree": lambda items: sum(item.compared for item in items),
        "choices that the model refuses": lambda items: sum(item.refused for item in items),
        "cases with a failure": lambda items: sum(bool(item.failures) for item in items),
    }
    print("| | " + " | ".join((*kinds, "all")) + " |")
    print("|---|" + "---:|" * (len(kinds) + 1))
    for title, count in rows.items():
        print(f"| {title} | " + " | ".join(str(count(group)) for group in (*groups, outcomes)) + " |")
    print(f"\nonnx {version('onnx')}, onnxruntime {version('onnxruntime')}; {seconds:.0f} s\n")
    failed = [item for item in outcomes if item.failures]
    for item in failed:
        print(f"{item.kind}/{item.name}  {'; '.join(item.failures[:3])}")
    return 1 if failed else 0


def _print_shard_report(outcomes: Sequence[ShardOutcome], kinds: Sequence[str], seconds: float) -> int:
    """Print the table of sharded cases, the operators and the failures; return the exit code."""
    groups = [[item for item in outcomes if item.kind == kind] for kind in kinds]
    rows: dict[str, Callable[[Sequence[ShardOutcome]], int]] = {
        "cases that ONNX Runtime runs": lambda items: sum(not item.refused for item in items),
        "cases with a split strategy": lambda items: sum(item.tried > 0 for item in items),
        "strategies tried": lambda items: sum(item.tried for item in items),
        "cases with a failure": lambda items: sum(bool(item.failures) for item in items),
    }
    print("| | " + " | ".join((*kinds, "all")) + " |")
    print("|---|" + "---:|" * (len(kinds) + 1))
    for title, count in rows.items():
        print(f"| {title} | " + " | ".join(str(count(group)) for group in (*groups, outcomes)) + " |")
    operators: Counter[str] = Counter()
    for item in outcomes:
        operators.update(item.operators)
    print(f"\nonnx {version('onnx')}, onnxruntime {version('onnxruntime')}; {seconds:.0f} s\n")
    print(f"{len(operators)} operators: " + ", ".join(f"{name} {count}" for name, count in sorted(operators.items())))
    failed = [item for item in outcomes if item.failures]
    for item in failed:
        print(f"{item.kind}/{item.name}  {'; '.join(item.failures[:3])}")
    return 1 if failed else 0


def _print_report(outcomes: Sequence[Outcome], kinds: Sequence[str], listed: str, seconds: float) -> None:
    """Print the table, and the cases with the listed status."""
    counts = Counter((item.kind, item.status) for item in outcomes)
    print("| | " + " | ".join((*kinds, "all")) + " |")
    print("|---|" + "---:|" * (len(kinds) + 1))
    for status in STATUSES:
        row = [counts[kind, status] for kind in kinds]
        print(f"| {status} | " + " | ".join(str(count) for count in (*row, sum(row))) + " |")
    totals = [sum(counts[kind, status] for status in STATUSES) for kind in kinds]
    print("| cases | " + " | ".join(str(count) for count in (*totals, sum(totals))) + " |")
    print(f"\nonnx {version('onnx')}, onnxruntime {version('onnxruntime')}; {seconds:.0f} s\n")
    for item in outcomes:
        if item.status.startswith(listed):
            print(f"{item.status}  {item.kind}/{item.name}  {item.detail}")


if __name__ == "__main__":
    sys.exit(main())
