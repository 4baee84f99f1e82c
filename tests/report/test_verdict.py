"""The verdict of reports: its numbers, what would help, and which of two to take."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.bundle.bundle import Bundle
from onnxplace.reports.differences import compare_pages
from onnxplace.reports.page_data import describe_bundle
from onnxplace.reports.page_records import Attempt, AttemptGroup, Bound, Entry, Quantity
from onnxplace.reports.step_analysis import PlacedStep, explain_step
from onnxplace.reports.verdict import MIN_SHARE, RATE_LABEL, ReportContext, judge_step
from onnxplace.simulation.simulator import simulate
from tests.report.placed_graphs import draw_graph, place_at_random

COSTS = ReportContext("from node costs")


def bound_of(step: PlacedStep, single: float = 0.0, lowest: float = 0.0, request: float = 0.0) -> Bound:
    return explain_step(step, step.simulation.makespan_seconds + request, lowest, single, request)


@settings(max_examples=25)
@given(nodes=st.integers(2, 60), seed=st.integers(0, 10_000), devices=st.integers(2, 4))
def test_a_verdict_has_the_numbers_of_the_step_and_advice_that_simulation_confirms(nodes, seed, devices):
    step = place_at_random(draw_graph(nodes, seed, devices), seed)
    seconds = step.simulation.makespan_seconds
    verdict = judge_step(step, bound_of(step, 1.5 * seconds, 0.8 * seconds), COSTS)
    assert verdict.times_as_fast == pytest.approx(1.5)
    assert verdict.above_bound == pytest.approx(0.25)
    used = {step.device_names[device] for device in step.device.tolist()}
    assert verdict.limit in used | {"transfers"}
    start = "1.50 times as fast as one device" if len(used) > 1 else "All of it runs on one device"
    assert verdict.sentence.startswith(start)
    assert "; 25 % above the lower bound; limited by " in verdict.sentence
    for advice in verdict.advice:
        if advice.step_seconds is not None:
            assert advice.step_seconds < seconds * (1 - MIN_SHARE)
        if advice.text.startswith("Links twice as fast"):
            links = step.target.with_all_links()
            faster = tuple(
                replace(link, latency_seconds=link.latency_seconds / 2, bytes_per_second=link.bytes_per_second * 2)
                for link in links.links
            )
            after = simulate(step.graph, step.seconds, replace(links, links=faster), step.device, step.order)
            assert advice.step_seconds == pytest.approx(after.makespan_seconds)


def on_one_device() -> PlacedStep:
    step = place_at_random(draw_graph(20, 1, devices=2), 1)
    device = np.zeros_like(step.device)
    return replace(step, device=device, simulation=simulate(step.graph, step.seconds, step.target, device, step.order))


def test_work_on_one_device_is_limited_by_it():
    step = on_one_device()
    seconds = step.simulation.makespan_seconds
    verdict = judge_step(step, bound_of(step, seconds, seconds), COSTS)
    name = step.device_names[0]
    assert verdict.sentence == (
        f"All of it runs on one device, {name}; at the lower bound; "
        f"limited by what {name} computes (100 % of the step)."
    )
    assert verdict.advice[0].text.startswith(f"A device twice as fast in place of {name}: the step would take ")
    assert verdict.advice[0].step_seconds == pytest.approx(seconds / 2)


def test_a_model_that_fits_no_single_device_is_said_to():
    step = place_at_random(draw_graph(40, 3), 3)
    verdict = judge_step(step, bound_of(step, 1e-3), replace(COSTS, single_device_fits=False))
    assert "times as fast as one device would be, which it does not fit on" in verdict.sentence
    assert verdict.above_bound is None


def test_slow_requests_call_for_a_larger_batch_only_where_there_is_a_size():
    step = on_one_device()
    bound = bound_of(step, request=10 * step.simulation.makespan_seconds)
    (text,) = [
        item.text
        for item in judge_step(step, bound, replace(COSTS, sizes="batch = 4")).advice
        if item.text.startswith("A larger batch")
    ]
    assert text.startswith("A larger batch (now batch = 4): ")
    assert not any("batch" in item.text for item in judge_step(step, bound, COSTS).advice)
    assert "limited by the request" in judge_step(step, bound, COSTS).sentence


def test_splitting_requests_in_flight_and_one_device_are_advised_where_they_are_faster():
    step = place_at_random(draw_graph(40, 3), 3)
    seconds = step.simulation.makespan_seconds
    attempts = (Attempt("sharded 2 ways", 0.5, False), Attempt("whole operators", 1.0, True))
    known = ReportContext(
        "from trial", interval_seconds=seconds / 3, attempts=(AttemptGroup("Whole or split", "P062", attempts),)
    )
    texts = [item.text for item in judge_step(step, bound_of(step, seconds), known).advice]
    assert texts[0].startswith("One device is as fast")
    assert any(text.startswith("Splitting operators: sharded 2 ways was predicted at 500 ms") for text in texts)
    kept = tuple(replace(item, is_kept=not item.is_kept) for item in attempts)
    known = replace(known, attempts=(AttemptGroup("Whole or split", "P062", kept),))
    texts = [item.text for item in judge_step(step, bound_of(step, seconds * 2), known).advice]
    assert not any("Splitting" in text or "One device" in text for text in texts)
    assert any(text.startswith("Several requests in flight: a result every ") for text in texts)


def test_a_slower_placement_than_one_device_is_said_to_be_slower():
    step = place_at_random(draw_graph(40, 3), 3)
    seconds = step.simulation.makespan_seconds
    verdict = judge_step(step, bound_of(step, seconds / 2, seconds / 4), COSTS)
    assert verdict.sentence.startswith("0.50 times as fast as one device; 4.0 times the lower bound; limited by ")
    assert verdict.advice[0].text.startswith("One device is faster: it takes ")


@pytest.fixture(scope="module")
def data(compiled):
    return describe_bundle(Bundle.open(compiled))


def at(page, seconds: float, **changes):
    return replace(page, verdict=replace(page.verdict, step_seconds=seconds), **changes)


def test_the_faster_report_is_taken_and_its_price_is_named(data):
    larger = tuple(replace(device, peak_bytes=device.peak_bytes + (1 << 20)) for device in data.devices)
    slow, fast = at(data, 3e-3), at(data, 2e-3, devices=larger)
    assert compare_pages(slow, fast).sentence == (
        "Take B: its step takes 2 ms, 1.50 times as fast as A's 3 ms; its devices hold 2.0 MiB more."
    )
    assert compare_pages(fast, slow).sentence.startswith("Take A: its step takes 2 ms")
    trial = replace(fast, verdict=replace(fast.verdict, basis="from trial"))
    assert compare_pages(slow, trial).sentence.endswith("; A's time is from node costs, B's from trial.")
    rates = [(Quantity(RATE_LABEL, "", value, lower_is_better=True),) for value in (1e-3, 2e-3)]
    busy = compare_pages(replace(slow, summary=rates[0]), replace(fast, summary=rates[1]))
    assert "with several requests in flight, A gives results more often" in busy.sentence


def test_equally_fast_reports_are_chosen_by_memory_and_other_models_are_not_compared(data):
    larger = tuple(replace(device, peak_bytes=device.peak_bytes * 2) for device in data.devices)
    assert compare_pages(data, replace(data, devices=larger)).sentence.startswith(
        "Take A: the steps are equal within 2%"
    )
    assert compare_pages(data, data).sentence.startswith("Take either")
    assert "different models" in compare_pages(data, replace(data, title="other")).sentence


def test_reports_of_other_sizes_are_not_compared(data):
    pages = [replace(data, origin=(Entry("sizes", f"batch = {size}"),)) for size in (1, 16)]
    assert compare_pages(*pages).sentence == (
        "They are compiled for other sizes, A for batch = 1, B for batch = 16, so their times do not compare."
    )


@pytest.mark.parametrize(
    ("before", "after", "lower_is_better", "difference", "better"),
    [
        (2.0, 1.0, True, "−50%", "B"),
        (1.0, 2.0, True, "+100%", "A"),
        (1.0, 2.0, False, "+100%", ""),
        (5, 3, False, "−2", ""),
        (0, 3, True, "from none", "A"),
        (3, 3, True, "equal", ""),
        (None, 3, True, "", ""),
    ],
)
def test_differences_say_which_is_better(data, before, after, lower_is_better, difference, better):
    pages = [
        replace(data, summary=(Quantity("figure", str(value), value, lower_is_better=lower_is_better),))
        for value in (before, after)
    ]
    (row,) = compare_pages(*pages).rows
    assert (row.difference, row.better) == (difference, better)
