"""Which plans a bundle gets that is compiled for several sizes."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace.driver.plan_sets import MIN_PLAN_GAIN, find_middle, rank_sets
from onnxplace.driver.sources import list_sizes
from onnxplace.errors import InfeasibleError, UsageError

STEP = st.one_of(st.floats(1e-4, 10.0), st.just(np.inf))


def choose_plans(*arguments, **options) -> tuple[int, ...]:
    """Return the plans that a bundle gets."""
    return rank_sets(*arguments, **options)[0].plans


def everything_fits(plans) -> bool:
    return True


@st.composite
def matrices(draw):
    sizes, plans = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows = st.lists(STEP, min_size=sizes, max_size=sizes)
    steps = np.array(draw(st.lists(rows, min_size=plans, max_size=plans)))
    steps[0, ~np.isfinite(steps).any(axis=0)] = 1.0
    return steps, np.array(draw(st.lists(st.floats(0.1, 10), min_size=sizes, max_size=sizes)))


@given(matrices(), st.integers(1, 4), st.booleans())
def test_the_set_is_small_and_nearly_as_fast_as_any_other(drawn, most, is_worst_ratio):
    steps, weights = drawn

    def loss(plans) -> float:
        seconds = steps[list(plans)].min(axis=0)
        return float((seconds / steps.min(axis=0)).max() if is_worst_ratio else seconds @ weights)

    sets = [plans for count in range(1, most + 1) for plans in combinations(range(len(steps)), count)]
    least = min(map(loss, sets), default=np.inf)
    if not np.isfinite(least):
        with pytest.raises(InfeasibleError, match="no plans take all sizes"):
            choose_plans(steps, weights, most, everything_fits, is_worst_ratio=is_worst_ratio)
        return
    chosen = choose_plans(steps, weights, most, everything_fits, is_worst_ratio=is_worst_ratio)
    assert len(chosen) <= most
    assert loss(chosen) <= (1 + MIN_PLAN_GAIN) * least * (1 + 1e-9)
    others = [plans for plans in sets if len(plans) < len(chosen)]
    best = steps[list(min((plans for plans in sets if loss(plans) <= least * (1 + 1e-9)), key=len))].min(axis=0)
    assert all(loss(plans) > least or (steps[list(plans)].min(axis=0) > best).any() for plans in others), (
        "fewer plans are as fast at each size"
    )


@pytest.mark.parametrize(
    ("most", "move", "chosen"),
    [(3, 0.0, (0, 1)), (1, 0.0, (1,)), (3, 1.0, (1,))],
    ids=["two plans", "one plan", "states that take long to move"],
)
def test_the_issues_transformer_gets_a_plan_for_each_size_unless_that_costs_more(most, move, chosen):
    steps = np.array([[1.1e-3, 96e-3], [2.24e-3, 69e-3]])
    assert choose_plans(steps, np.ones(2), most, everything_fits, move_seconds=move) == chosen


def test_a_small_size_counts_although_it_hardly_changes_the_weighted_step():
    steps = np.array([[1e-6, 1.0], [2e-6, 0.5]])
    assert choose_plans(steps, np.ones(2), 2, everything_fits) == (0, 1)


def test_a_plan_that_gains_less_than_opening_is_worth_is_left_out():
    steps = np.array([[1.0, 2.0], [1.03, 1.98]])
    assert len(choose_plans(steps, np.ones(2), 2, everything_fits)) == 1


def test_plans_that_do_not_fit_together_are_not_chosen_together():
    steps = np.array([[1.0, 9.0], [2.0, 3.0]])
    assert choose_plans(steps, np.ones(2), 2, lambda item: len(item.plans) == 1) == (1,)


def test_the_worst_ratio_prefers_the_plan_that_is_bad_at_no_size():
    steps = np.array([[1.0, 30.0], [1.8, 20.0], [9.0, 10.0]])
    assert choose_plans(steps, np.ones(2), 1, everything_fits) == (2,)
    assert choose_plans(steps, np.ones(2), 1, everything_fits, is_worst_ratio=True) == (1,)


@given(st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(0, 4096), st.integers(0, 4096)), min_size=1))
def test_the_middle_is_between_the_ends(ends):
    low, high = ({name: pair[index] for name, pair in ends.items()} for index in (0, 1))
    assert all(min(ends[name]) <= size <= max(ends[name]) for name, size in find_middle(low, high).items())


def test_sizes_that_follow_from_others_are_left_out_of_the_middle():
    low, high = {"past": 0, "seq": 128, "past + seq": 128}, {"past": 128, "seq": 1, "past + seq": 129}
    assert find_middle(low, high) == {"past": 10, "seq": 15}


def test_sizes_are_one_or_several_with_weights():
    assert list_sizes(None) == [({}, 1.0)]
    assert list_sizes([{"batch": 1}, ({"batch": 8}, 0.5)]) == [({"batch": 1}, 1.0), ({"batch": 8}, 0.5)]
    assert list_sizes({"batch": [1, 8], "seq": 4})[1] == ({"batch": 8, "seq": 4}, 1.0)


@pytest.mark.parametrize("shape", [["batch"], [({"batch": 1}, 0)], [({"batch": 1}, "often")], [3]])
def test_other_things_than_sizes_are_refused(shape):
    with pytest.raises(UsageError, match="expected sizes, or a pair of them and a weight") as caught:
        list_sizes(shape)
    assert "--shape batch=1 --shape batch=8=0.1" in caught.value.hint


def test_forty_sizes_that_take_only_their_own_plan_get_forty_plans():
    steps = np.where(np.eye(40, dtype=bool), 1.0, np.inf)
    assert choose_plans(steps, np.ones(40), 40, everything_fits) == tuple(range(40))
    with pytest.raises(InfeasibleError, match="no plans take all sizes"):
        choose_plans(steps, np.ones(40), 39, everything_fits)


def test_of_many_plans_the_few_that_matter_are_found():
    steps = np.full((40, 12), 5.0)
    steps[range(0, 36, 3), range(12)] = 1.0
    assert choose_plans(steps, np.ones(12), 30, everything_fits) == tuple(range(0, 36, 3))


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), 1e308, "2", None])
def test_a_weight_is_a_number_above_zero(weight):
    with pytest.raises(UsageError, match="a weight above 0"):
        list_sizes([{"batch": 1}, ({"batch": 8}, weight)])
