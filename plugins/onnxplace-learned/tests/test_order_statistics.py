"""Which orders differ significantly: known differences are found, noise is not."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.errors import InputError
from onnxplace_learned.policy_training.order_study import StudyRow, summarise_study

ORDERS = ("alpha", "bfs", "random")


def make_rows(effects, noise, *, family="chains", graphs=4, seeds=8, seed=0):
    """Return rows whose costs are the effect of their order, the difficulty of their graph, and noise."""
    rng = np.random.default_rng(seed)
    difficulty = rng.uniform(0.3, 0.9, graphs)
    return [
        StudyRow(family, graph, order, number, 60, 3, 50, difficulty[graph] * effect * np.exp(noise * rng.normal()))
        for order, effect in zip(ORDERS, effects)
        for graph in range(graphs)
        for number in range(seeds)
    ]


def test_a_difference_that_all_graphs_and_seeds_show_is_significant():
    (study,) = summarise_study(make_rows((1.0, 0.9, 1.0), 0.005))
    assert study.qualities[0].order == "bfs"
    assert {(item.better, item.worse) for item in study.differences} == {("bfs", "alpha"), ("bfs", "random")}
    assert all(item.ratio == pytest.approx(0.9, rel=0.01) and item.p <= 0.05 for item in study.differences)
    assert study.recommendation == "bfs"


def test_orders_as_good_as_the_best_are_named():
    (study,) = summarise_study(make_rows((0.9, 0.9, 1.0), 0.005))
    assert study.recommendation in ("alpha; not significantly worse: bfs", "bfs; not significantly worse: alpha")


def test_equal_orders_are_not_told_apart():
    for effects, noise in (((1.0, 1.0, 1.0), 0.0), ((1.0, 1.0, 1.0), 0.1)):
        (study,) = summarise_study(make_rows(effects, noise))
        assert study.differences == ()
        assert study.recommendation == "none: no difference is significant"


def test_noise_alone_is_rarely_significant():
    """Of 40 families without a difference, about two may have one by chance."""
    rows = [row for seed in range(40) for row in make_rows((1, 1, 1), 0.05, family=str(seed), seed=seed)]
    assert sum(bool(study.differences) for study in summarise_study(rows)) <= 6


def test_one_graph_that_differs_is_not_a_family_that_does():
    rows = make_rows((1.0, 1.0, 1.0), 0.0)
    rows = [
        StudyRow(**{**vars(row), "cost": row.cost * 0.5}) if (row.graph, row.order) == (0, "bfs") else row
        for row in rows
    ]
    (study,) = summarise_study(rows)
    assert study.qualities[0].order == "bfs"
    assert study.recommendation == "none: no difference is significant"


def test_an_incomplete_study_is_refused():
    rows = make_rows((1.0, 1.0, 1.0), 0.1)
    with pytest.raises(InputError, match=r"U031.*no row of graph 3, order random, seed 7"):
        summarise_study(rows[:-1])


@settings(max_examples=10)
@given(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3), st.floats(0, 0.3), st.integers(0, 99))
def test_intervals_hold_the_means_and_do_not_depend_on_the_order_of_rows(effects, noise, seed):
    rows = make_rows(effects, noise, graphs=2, seeds=3, seed=seed)
    (study,), (again,) = summarise_study(rows), summarise_study([*rows[9:], *rows[:9]])
    for quality in study.qualities:
        assert quality.low <= quality.mean * (1 + 1e-9)
        assert quality.mean <= quality.high * (1 + 1e-9)
    means = {quality.order: quality.mean for quality in again.qualities}
    assert means == pytest.approx({quality.order: quality.mean for quality in study.qualities})
