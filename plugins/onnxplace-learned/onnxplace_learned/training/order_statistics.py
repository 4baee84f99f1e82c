"""Which visiting orders differ: geometric means, bootstrapped intervals, and paired comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from onnxplace.errors import InputError
from onnxplace.graph import Floats
from onnxplace_learned.training.traversal import StudyRow

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
    """Of the better to the worse, geometric mean over graphs and seeds."""
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
        raise InputError("H014", message, hint="finish the study with --resume")
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
