"""Which plan is the fastest at a size: exact at known sizes, between them elsewhere, corrected by what is measured."""

import math

import pytest
from hypothesis import given, strategies as st

from onnxplace.bundle.manifest import SizeRecord
from onnxplace.session.plan_choice import TRIAL_PERIOD, UNTRIED_RATIO, SizeSteps, StepTable

SIZES = st.dictionaries(st.just("batch"), st.integers(0, 64), min_size=1).flatmap(
    lambda batch: st.fixed_dictionaries({"batch": st.just(batch["batch"]), "seq": st.integers(0, 4096)})
)
STEPS = st.floats(1e-6, 10)
RECORDS = st.lists(
    st.builds(lambda sizes, one, two: SizeRecord(dimensions=sizes, seconds=(one, two)), SIZES, STEPS, STEPS),
    min_size=1,
    max_size=6,
    unique_by=lambda record: tuple(record.dimensions.items()),
)


def record(size, *seconds):
    return SizeRecord(dimensions={"n": size}, seconds=seconds)


@given(RECORDS)
def test_steps_at_known_sizes_are_exact(records):
    table = StepTable(records)
    for item in records:
        assert table.predict(item.dimensions) == pytest.approx(item.seconds, rel=1e-9)


@given(RECORDS, SIZES)
def test_ratios_of_plans_are_between_those_at_known_sizes(records, sizes):
    one, two = StepTable(records).predict(sizes)
    ratios = [item.seconds[1] / item.seconds[0] for item in records]
    assert min(ratios) * (1 - 1e-9) <= two / one <= max(ratios) * (1 + 1e-9)


@given(st.integers(9, 10**9))
def test_beyond_the_known_sizes_the_nearest_one_holds(size):
    assert StepTable([record(1, 1, 2), record(9, 9, 4)]).predict({"n": size}) == pytest.approx([9, 4])


def test_the_nearer_size_counts_more():
    table = StepTable([record(1, 1, 3), record(100, 3, 1)])
    assert SizeSteps(table.predict({"n": 4})).choice == 0
    assert SizeSteps(table.predict({"n": 30})).choice == 1


def test_a_plan_that_was_not_tried_at_a_size_is_taken_for_slower():
    table = StepTable([record(1, 1, None), record(100, None, 4)])
    assert table.predict({"n": 1}) == pytest.approx([1, UNTRIED_RATIO])
    assert table.predict({"n": 100}) == pytest.approx([4 * UNTRIED_RATIO, 4])
    assert SizeSteps(table.predict({"n": 30})).choice == 1


def test_dimensions_without_a_size_and_unknown_ones_do_not_count():
    records = [
        SizeRecord(dimensions={"seq": 1, "past": 100}, seconds=(1, 2)),
        SizeRecord(dimensions={"seq": 100, "past": 0}, seconds=(2, 1)),
    ]
    table = StepTable(records)
    assert table.predict({"seq": 1, "other": 7}) == pytest.approx([1, 2])
    assert table.predict({"seq": 100}) == pytest.approx([2, 1])
    assert table.predict({}) == pytest.approx([math.sqrt(2), math.sqrt(2)])


def test_sizes_that_follow_from_others_do_not_count():
    records = [
        SizeRecord(dimensions={"past": 100, "seq": 1, "past + seq": 101}, seconds=(1, 2)),
        SizeRecord(dimensions={"past": 0, "seq": 64, "past + seq": 64}, seconds=(2, 1)),
    ]
    assert StepTable(records).predict({"seq": 64, "past + seq": 164}) == pytest.approx([2, 1])


def test_measurements_correct_the_choice():
    size = SizeSteps([1.0, 1.2])
    for plan in (0, 0, 1, 1):
        size.add(plan, 1.0 if plan == 0 else 0.5)
    assert (size.choice, size.seconds) == (1, [1.0, 0.5])


def test_the_first_request_of_a_plan_does_not_count():
    size = SizeSteps([1.0, 1.2])
    size.add(0, 100.0)
    assert (size.choice, size.seconds) == (0, [1.0, 1.2])


def test_what_is_measured_of_one_plan_scales_the_predictions_of_others():
    size = SizeSteps([1.0, 1.2, 4.0])
    for _ in range(2):
        size.add(0, 10.0)
    assert size.seconds == pytest.approx([10, 12, 40])
    assert size.choice == 0


def test_a_gain_below_a_tenth_changes_nothing():
    size = SizeSteps([1.0, 1.2])
    for plan in (0, 0, 1, 1):
        size.add(plan, (1.0, 0.95)[plan])
    assert size.choice == 0


@given(st.lists(st.floats(0.5, 1e6), min_size=1, max_size=4))
def test_a_disturbed_request_counts_as_twice_the_time(outliers):
    size = SizeSteps([1.0, 5.0])
    for seconds in (1.0, 1.0, *outliers[:1]):
        size.add(0, seconds)
    assert size.seconds[0] <= 1.2 + 1e-9


def test_another_plan_is_tried_now_and_then_if_it_is_close():
    close, far = SizeSteps([1.0, 1.2]), SizeSteps([1.0, 1.3])
    assert [close.choose() for _ in range(2 * TRIAL_PERIOD)].count(1) == 2
    assert {far.choose() for _ in range(2 * TRIAL_PERIOD)} == {0}


def test_a_plan_that_does_not_take_a_size_is_never_chosen():
    size = SizeSteps([math.inf, 1.0])
    for _ in range(3):
        size.add(1, 5.0)
    assert {size.choose() for _ in range(2 * TRIAL_PERIOD)} == {1}
    assert size.seconds == [math.inf, 5.0]
