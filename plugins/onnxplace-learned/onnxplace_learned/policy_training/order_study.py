"""The study of visiting orders: one policy, one budget, all orders, many seeds; and which orders differ.

After Wang, Payberah, Hagos and Vlassov (arXiv 2201.09676). Graphs and seeds are resampled (bootstrap), and differences
of pairs of orders are corrected after Holm.
"""

from __future__ import annotations

import csv
import io
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from functools import lru_cache
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from onnxplace.errors import InputError
from onnxplace.graph.op_graph import Floats
from onnxplace.utils.files import format_path, read_text, require_writable, write_file
from onnxplace_learned.graphs.graph_sets import GraphSet
from onnxplace_learned.policies.environment import ORDERS, Order, Start
from onnxplace_learned.policies.placeto_network import Policy, Shape
from onnxplace_learned.policies.placing import place_with_policy
from onnxplace_learned.policy_training.learning_graphs import LearningGraph, draw_problems
from onnxplace_learned.pytorch import require_torch

# Episodes start from one device: from m-ETF's placement, orders hardly differ.
START: Start = "first-device"


@dataclass(frozen=True)
class StudyOptions:
    """What a study compares."""

    families: tuple[str, ...]
    orders: tuple[Order, ...] = tuple(ORDERS)
    seeds: int = 10
    """Seeds of policies and episodes, for each graph."""
    graphs: int = 6
    """Number of graphs of each family."""
    nodes: int = 60
    """Approximate number of nodes of each graph."""
    devices: int = 3
    episodes: int = 50
    """Episodes of training, for each graph, order and seed."""
    workers: int = 1
    """Number of processes."""


@dataclass(frozen=True)
class StudyRun:
    """One training of a policy on one graph, from nothing."""

    family: str
    graph: int
    order: Order
    seed: int
    nodes: int
    """As in the options."""
    devices: int
    episodes: int


@dataclass(frozen=True)
class StudyRow(StudyRun):
    """A finished run."""

    cost: float
    """The simulated step of the best placement that was found; 1 is all work on the fastest device."""

    @property
    def run(self) -> StudyRun:
        return StudyRun(*astuple(self)[:-1])


StudyObserver = Callable[[int, int], None]
"""Called with the numbers of finished runs and of all runs."""


def list_runs(options: StudyOptions) -> list[StudyRun]:
    """Return the runs of a study: seeds first, so that an interrupted study has all orders of some seeds."""
    return [
        StudyRun(
            family=family,
            graph=graph,
            order=order,
            seed=seed,
            nodes=options.nodes,
            devices=options.devices,
            episodes=options.episodes,
        )
        for seed in range(options.seeds)
        for family in options.families
        for graph in range(options.graphs)
        for order in options.orders
    ]


def run_study(
    options: StudyOptions, output: Path | None = None, *, resume: bool = False, observer: StudyObserver | None = None
) -> list[StudyRow]:
    """Train a policy for each run, and return the rows in the order of `list_runs`.

    Rows depend on options and seeds only, not on the number of workers. An interruption leaves the rows so far in
    `output`, from where `resume` continues.

    Args:
        options: What to compare.
        output: A CSV file of the rows.
        resume: Whether to keep the rows of `output` that belong to the study.
        observer: Called after each run.

    Raises:
        UsageError: torch is missing, a family is unknown or has too few graphs, or the file cannot be written.
        InputError: There is nothing to resume from.
    """
    require_torch()
    for family in options.families:
        _draw_graphs(family, options.graphs, options.nodes, options.devices)
    runs = list_runs(options)
    wanted = set(runs)
    rows = {row.run: row for row in read_rows(output) if row.run in wanted} if resume and output else {}
    if output:
        require_writable(output)
    remaining = [run for run in runs if run not in rows]
    try:
        for row in _run_all(remaining, options):
            rows[row.run] = row
            if output and len(rows) % 50 == 0:
                write_rows(output, [rows[run] for run in runs if run in rows])
            if observer:
                observer(len(rows), len(runs))
    finally:
        finished = [rows[run] for run in runs if run in rows]
        if output:
            write_rows(output, finished)
    return finished


def _run_all(runs: Sequence[StudyRun], options: StudyOptions) -> Iterator[StudyRow]:
    """Yield rows as they are finished."""
    if options.workers == 1 or len(runs) < 2:
        yield from (run_once(run, options.graphs) for run in runs)
        return
    with _open_pool(options.workers) as pool:
        futures = [pool.submit(run_once, run, options.graphs) for run in runs]
        for future in as_completed(futures):
            yield future.result()


@contextmanager
def _open_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Open processes that leave Ctrl-C to this one; when the block ends early, they finish the runs that they began."""
    # Forked children could inherit locks of torch's threads.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def run_once(run: StudyRun, graphs: int) -> StudyRow:
    """Train a policy on one graph from nothing, and return the best placement that was found.

    `graphs` is the number of graphs that the study draws of each family.
    """
    torch = require_torch()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        graph = _draw_graphs(run.family, graphs, run.nodes, run.devices)[run.graph]
        shape = Shape(run.devices)
        policy = Policy(shape, shape.draw_parameters(run.seed), run.order, START, run.family, seed=run.seed)
        result = place_with_policy(
            graph.problem, policy, run.order, episodes=run.episodes, seed=run.seed, max_nodes=len(graph.problem.graph)
        )
    finally:
        torch.set_num_threads(threads)
    return StudyRow(**asdict(run), cost=min(item.cost for item in result.visited))


@lru_cache(maxsize=64)
def _draw_graphs(family: str, graphs: int, nodes: int, devices: int) -> list[LearningGraph]:
    return draw_problems(GraphSet(family, graphs, nodes), devices)


def write_rows(path: Path, rows: Sequence[StudyRow]) -> None:
    """Write rows as CSV; the file is replaced at once."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(item.name for item in fields(StudyRow))
    writer.writerows(astuple(row) for row in rows)
    write_file(path, lambda file: file.write(text.getvalue().encode()))


def read_rows(path: Path) -> list[StudyRow]:
    """Read rows from CSV; raises InputError if they are not those of a study."""
    lines = list(csv.reader(read_text(path, "U031", "the rows of a study").splitlines()))
    try:
        if not lines or lines[0] != [item.name for item in fields(StudyRow)]:
            raise ValueError("it has other columns")
        # Annotations are texts.
        convert = [{"int": int, "float": float}.get(str(item.type), str) for item in fields(StudyRow)]
        return [StudyRow(*(kind(text) for kind, text in zip(convert, line, strict=True))) for line in lines[1:]]
    except (ValueError, TypeError) as problem:
        hint = "omit --resume to start anew"
        raise InputError("U031", f"not the rows of a study ({problem})", where=format_path(path), hint=hint) from None


RESAMPLES, LEVEL = 10_000, 0.05


@dataclass(frozen=True)
class OrderQuality:
    """The steps that an order leads to, relative to one device."""

    order: str
    mean: float
    """Geometric mean over graphs and seeds."""
    low: float
    """95 % interval of the mean."""
    high: float


@dataclass(frozen=True)
class OrderDifference:
    """Two orders that differ significantly."""

    better: str
    worse: str
    ratio: float
    """Ratio of the better to the worse, geometric mean over graphs and seeds."""
    p: float
    """Two-sided, corrected for all pairs of the family after Holm."""


@dataclass(frozen=True)
class FamilyStudy:
    """What a study says about one family."""

    family: str
    qualities: tuple[OrderQuality, ...]
    """Best first."""
    differences: tuple[OrderDifference, ...]
    """The significant ones."""
    recommendation: str


def summarise_study(rows: Sequence[StudyRow]) -> list[FamilyStudy]:
    """Compare the orders of each family, in the order of the rows.

    Graphs and seeds are resampled, each with replacement (bootstrap), the same ones for all orders. Two orders differ
    significantly if the 95 % interval of their ratio excludes 1 after Holm's correction for all pairs.

    Raises InputError unless each order has a row for each graph and seed.
    """
    return [_summarise_family(family, rows) for family in dict.fromkeys(row.family for row in rows)]


def _summarise_family(family: str, rows: Sequence[StudyRow]) -> FamilyStudy:
    mine = [row for row in rows if row.family == family]
    orders = list(dict.fromkeys(row.order for row in mine))
    costs = _arrange_costs(mine, orders)
    means, drawn = np.mean(costs, axis=(1, 2)), _resample_means(costs)
    low, high = np.quantile(drawn, [LEVEL / 2, 1 - LEVEL / 2], axis=1)
    ranked = np.argsort(means, kind="stable").tolist()
    qualities = tuple(
        OrderQuality(orders[index], *(float(np.exp(item[index])) for item in (means, low, high))) for index in ranked
    )
    differences = _find_differences(orders, means, drawn)
    return FamilyStudy(family, qualities, differences, _recommend(qualities, differences))


def _arrange_costs(rows: Sequence[StudyRow], orders: Sequence[str]) -> Floats:
    """Return logarithms of costs: [order, graph, seed]."""
    graphs, seeds = (sorted({getattr(row, name) for row in rows}) for name in ("graph", "seed"))
    costs = np.full((len(orders), len(graphs), len(seeds)), np.nan)
    for row in rows:
        costs[orders.index(row.order), graphs.index(row.graph), seeds.index(row.seed)] = np.log(row.cost)
    if np.isnan(costs).any():
        order, graph, seed = np.argwhere(np.isnan(costs))[0].tolist()
        message = f"{rows[0].family}: no row of graph {graphs[graph]}, order {orders[order]}, seed {seeds[seed]}"
        raise InputError("U031", message, hint="finish the study with --resume")
    return costs


def _resample_means(costs: Floats) -> Floats:
    """Return means over resampled graphs and seeds: [order, resample]."""
    rng = np.random.default_rng(0)
    _, graphs, seeds = costs.shape
    of_graphs = rng.multinomial(graphs, np.full(graphs, 1 / graphs), RESAMPLES)
    of_seeds = rng.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES)
    weights = (of_graphs[:, :, None] * of_seeds[:, None, :]).reshape(RESAMPLES, -1)
    means: Floats = costs.reshape(len(costs), -1) @ weights.T / (graphs * seeds)
    return means


def _find_differences(orders: Sequence[str], means: Floats, drawn: Floats) -> tuple[OrderDifference, ...]:
    """Return the pairs that differ significantly, the surest first."""
    pairs = []
    for first, second in combinations(range(len(orders)), 2):
        better, worse = (first, second) if means[first] <= means[second] else (second, first)
        # Resamples in which both are equal, up to rounding, speak against a difference.
        contrary = float((drawn[better] >= drawn[worse] - 1e-12).mean())
        pairs.append((min(1.0, 2 * max(contrary, 1 / drawn.shape[1])), better, worse))
    differences, corrected = [], 0.0
    for position, (p, better, worse) in enumerate(sorted(pairs)):
        corrected = max(corrected, min(1.0, p * (len(pairs) - position)))
        if corrected > LEVEL:
            break
        ratio = float(np.exp(means[better] - means[worse]))
        differences.append(OrderDifference(orders[better], orders[worse], ratio, corrected))
    return tuple(differences)


def _recommend(qualities: Sequence[OrderQuality], differences: Sequence[OrderDifference]) -> str:
    """Return the best orders, or why none is recommended."""
    if not differences:
        return "none: no difference is significant"
    best = qualities[0].order
    beaten = {item.worse for item in differences if item.better == best}
    if not beaten:
        return "none: the best order is not significantly better than any other"
    equal = [item.order for item in qualities[1:] if item.order not in beaten]
    return f"{best}; not significantly worse: {', '.join(equal)}" if equal else best
