"""Devices that share processors take turns: steps by hand, rules checked node by node, rates, contention and bounds."""

from dataclasses import replace
from itertools import combinations, permutations, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.bundle.bundle_simulation import (
    SubmittedRequest,
    predict_interval_seconds,
    simulate_manifest,
    simulate_requests,
)
from onnxplace.driver.compile import compile_model
from onnxplace.passes.emit import Emit
from onnxplace.passes.optimize import Optimize
from onnxplace.passes.profile import ProfileCosts
from onnxplace.passes.split import Split
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.problem import bound_speedup
from onnxplace.simulation.lower_bounds import lower_bound_seconds
from onnxplace.simulation.simulated_contention import busy_slowdowns, simulate_with_contention
from onnxplace.simulation.simulator import simulate
from onnxplace.simulation.steady_state import predict_request_rates, steady_state_loads
from onnxplace.simulation.weight_streams import WeightStream
from onnxplace.target.target import LINK_MODELS, Device, Shared, Target
from onnxplace.testing.pass_contract import TICK_SECONDS, random_graph, random_target
from tests.simulation.test_simulate import placed_graphs, random_order, run
from tests.simulation.test_weight_streams import list_inputs_seconds
from tests.support.random_placements import RandomPlacement
from tests.support.reference_simulator import even_target, graph_of, share_at_random, share_processors

thorough = settings(deadline=None, derandomize=True, max_examples=300)
seeds = st.integers(0, 2**32 - 1)


def placed(*device: int) -> np.ndarray:
    return np.array(device, dtype=np.int32)


# ---------------------------------------------------------------------------------------------------- one step


@thorough
@given(placed_graphs(shared=True))
def test_a_node_starts_when_all_have_finished_that_asked_before_and_never_two_run_on_a_processor(case):
    graph, _, target, device, order = case
    step = simulate(*case)
    start, finish, ready = step.start_seconds, step.finish_seconds, np.zeros(len(graph))
    for index in range(len(target.devices)):
        free = 0.0
        for node in order[device[order] == index].tolist():
            ready[node] = max(free, list_inputs_seconds(graph, device, step, node))
            free = finish[node]
    for node in range(len(graph)):
        rivals = [other for other in range(len(graph)) if target.conflicts[device[node], device[other]]]
        before = [finish[other] for other in rivals if ready[other] < ready[node]]
        at_once = [finish[other] for other in rivals if other != node and ready[other] == ready[node]]
        assert start[node] in {max([ready[node], *before]), *at_once}
        assert start[node] >= max([ready[node], *before])
        assert all(start[other] >= finish[node] or finish[other] <= start[node] for other in rivals if other != node)


@thorough
@given(placed_graphs(), st.sampled_from(["", "0 1", "2 3 4"]))
def test_processors_of_ones_own_change_nothing(case, names):
    graph, seconds, target, device, order = case
    own = [" ".join(f"{index}{name}" for name in names.split()) for index in range(len(target.devices))]
    alone = simulate(graph, seconds, share_processors(target, *own), device, order)
    assert alone.finish_seconds.tolist() == simulate(*case).finish_seconds.tolist()


def test_nodes_take_a_processor_in_the_order_in_which_they_are_ready():
    graph = graph_of({"a": [], "second": ["a"], "b": [], "first": ["b"], "busy": []}, sizes={"a": 3, "b": 2})
    target = share_processors(even_target(4), "x", "x", "x", "y")
    step = run(graph, [0, 1, 0, 1, 9], target, [3, 0, 3, 1, 2])
    # The value of b arrives at 5, behind that of a, which arrives at 3; both readers wait until 9.
    assert step.start_seconds.tolist() == [0, 9, 0, 10, 0]
    later = run(graph, [0, 1, 0, 1, 9], target, [3, 0, 3, 1, 2], order=[2, 3, 0, 1, 4])
    assert later.start_seconds.tolist() == [0, 10, 0, 9, 0]


def test_a_value_on_its_way_reserves_no_processor():
    """The reader asks once the value is there: a node that is ready before that is not held up."""
    graph = graph_of({"far": [], "reader": ["far"], "before": [], "here": ["before"]}, sizes={"far": 9})
    target = share_processors(even_target(3), "x", "x", "y")
    step = run(graph, [1, 1, 5, 2], target, [2, 0, 1, 1])
    assert step.start_seconds.tolist() == [0, 10, 0, 5]


def test_a_device_on_several_processors_waits_for_all_and_holds_all_from_then_on():
    # s is ready at 1 and waits for x to 4. What is ready at 2 on the processor y waits for s.
    graph = graph_of({"x": [], "y": [], "s": ["z"], "after": ["y"], "z": []}, sizes={"z": 0, "y": 0})
    target = share_processors(even_target(4), "x", "y", "x y", "z")
    step = run(graph, [4, 2, 1, 1, 1], target, [0, 1, 2, 1, 3])
    assert step.start_seconds.tolist() == [0, 0, 4, 5, 0]


def test_of_nodes_that_are_ready_at_once_the_first_of_the_graph_goes_first():
    target = share_processors(even_target(3), "x", "x", "x")
    assert run(graph_of({"a": [], "b": [], "c": []}), [1, 2, 3], target, [2, 0, 1]).start_seconds.tolist() == [0, 1, 3]


def test_what_ends_at_one_instant_ends_before_anybody_asks():
    graph = graph_of({"low": ["c"], "high": ["a"], "a": [], "c": []}, sizes={"a": 1, "c": 0})
    target = share_processors(even_target(4), "x", "x", "y", "z")
    # At 1, the value of a arrives, and c ends: both readers are ready.
    assert run(graph, [2, 3, 0, 1], target, [0, 1, 2, 3]).start_seconds.tolist() == [1, 3, 0, 0]


def test_weights_that_stream_are_awaited_before_the_processors():
    graph = graph_of({"a": [], "b": []})
    target, device = share_processors(even_target(2), "x", "x"), placed(0, 1)
    stream = WeightStream.of(np.array([3.0, 0.0]), np.array([1, 0]), device, graph.order, 2)
    stream = replace(stream, loaded_seconds=np.zeros(2))
    step = simulate(graph, np.full((2, 2), 4.0), target, device, graph.order, stream=stream)
    # The weights of a arrive at 3; b does not wait for that, but a for b.
    assert step.arrival_seconds[0] == 3
    assert step.start_seconds.tolist() == [4, 0]


# ---------------------------------------------------------------------------------------------------- many requests


def test_devices_on_one_processor_do_not_slow_each_other_down():
    graph = graph_of({"a": [], "b": [], "c": []})
    shared = (Shared(("cpu:0", "cpu:1", "cpu:2"), 1.5, 1.5),)
    target = replace(share_processors(even_target(3), "x", "x", "y"), shared=shared)
    alone = simulate_with_contention(graph, np.ones((3, 3)), target, placed(0, 1, 1), graph.order)
    assert alone.compute_seconds.tolist() == [1, 2, 0]
    assert alone.makespan_seconds == 3
    # With one on another processor, one other device is busy at any time, not two.
    both = simulate_with_contention(graph, np.full((3, 3), [1.0, 1.0, 2.0]), target, placed(0, 1, 2), graph.order)
    assert both.makespan_seconds == pytest.approx(3.0, rel=1e-3)
    factors = busy_slowdowns(graph, np.ones((3, 3)), target, np.array([0.5, 0.25, 0.75]))
    assert factors[:, 0].tolist() == [1 + 0.5 * 0.75, 1 + 0.5 * 0.75, 1 + 0.5 * 0.75]


@pytest.mark.parametrize("count", ["max", "sum"])
def test_the_interval_is_the_load_of_the_busiest_processor(count):
    graph, seconds = graph_of({"a": [], "b": [], "c": [], "d": []}), np.tile([1.0, 2.0, 4.0, 6.0], (4, 1))
    target = share_processors(even_target(4), "x", "y", "x y", "z")
    loads = steady_state_loads(graph, seconds, target, placed(0, 1, 2, 3), count)
    assert loads.interval_seconds == 6.0
    assert loads.largest[0] == 2  # of those on the processor y, it computes longest
    assert steady_state_loads(graph, seconds, even_target(4), placed(0, 1, 2, 3), count).largest[0] == 3


def test_copies_on_one_processor_give_no_more_results():
    graph, seconds = graph_of({"a": []}), np.ones((3, 1))
    rates = predict_request_rates(graph, seconds, even_target(3), [placed(0), placed(1), placed(2)])
    assert rates.interval_seconds == pytest.approx(1 / 3)
    target = share_processors(even_target(3), "x", "x", "y")
    rates = predict_request_rates(graph, seconds, target, [placed(0), placed(1), placed(2)])
    assert rates.interval_seconds == pytest.approx(1 / 2)
    assert rates.shares.tolist() == pytest.approx([0.25, 0.25, 0.5])


# ---------------------------------------------------------------------------------------------------- bounds


def bound(names: list[str], seconds, graph=None, **more) -> float:
    target = share_processors(even_target(len(names)), *names)
    seconds = np.array(seconds, dtype=np.float64)
    graph = graph or graph_of({f"n{index}": [] for index in range(seconds.shape[1])})
    return lower_bound_seconds(graph, seconds, target, **more)


def test_devices_on_one_processor_do_all_work_one_after_the_other():
    assert bound(["x", "x", "x"], np.ones((3, 6))) == 6
    assert bound(["x", "x", "y"], np.ones((3, 6))) == 3


def test_a_device_on_two_processors_counts_on_both():
    assert bound(["x", "y", "x y"], [[4.0] * 6, [4.0] * 6, [3.0] * 6]) == 12
    assert bound(["x", "y", "x y"], [[4.0] * 6, [4.0] * 6, [1.0] * 6]) == 6


def test_the_weights_of_processors_differ_where_that_bounds_more():
    # All work is on z, the processor of both devices.
    assert bound(["x z", "z y"], np.ones((2, 6))) > 5


def test_work_that_is_pinned_to_devices_on_one_processor_adds_up():
    names, seconds = ["x", "x", "y", "y"], np.full((4, 4), 3.0)
    more = {"group": np.arange(4, dtype=np.int32), "pinned": placed(0, 1, 0, -1)}
    assert bound(names, seconds, **more) == 9
    assert bound(["x", "z", "y", "w"], seconds, **more) == 6


@settings(deadline=None, derandomize=True, max_examples=40)
@given(seeds, st.integers(1, 4), st.integers(2, 3), st.sampled_from(LINK_MODELS))
def test_bounds_hold_for_the_best_of_all_placements_and_orders(seed, nodes, devices, link_model):
    random, graph = np.random.default_rng(seed), random_graph(seed, nodes)
    seconds = random.integers(1, 100, (devices, nodes)) * TICK_SECONDS
    target = share_at_random(random_target(seed, devices, link_model=link_model), random)
    best, pins = np.inf, np.where(random.random(nodes) < 0.3, random.integers(0, devices, nodes), -1).astype(np.int32)
    pinned_best = np.inf
    for order in permutations(range(nodes)):
        for device in product(range(devices), repeat=nodes):
            try:
                step = simulate(graph, seconds, target, placed(*device), placed(*order)).makespan_seconds
            except ValueError:
                continue
            best = min(best, step)
            if ((pins < 0) | (pins == device)).all():
                pinned_best = min(pinned_best, step)
    assert lower_bound_seconds(graph, seconds, target) <= best * (1 + 1e-12)
    group = np.arange(nodes, dtype=np.int32)
    assert lower_bound_seconds(graph, seconds, target, group, pins) <= pinned_best * (1 + 1e-12)


@thorough
@given(seeds, st.integers(0, 25), st.integers(1, 4), st.booleans())
def test_no_step_is_shorter_than_the_bound_of_its_pins(seed, nodes, devices, alike):
    random = np.random.default_rng(seed)
    graph = random_graph(seed, nodes, shuffled=True)
    seconds = random.integers(0, 100, (devices, len(graph))) * TICK_SECONDS
    seconds = np.tile(seconds[0], (devices, 1)) if alike else seconds
    target = share_at_random(random_target(seed, devices), random)
    device = random.integers(0, devices, len(graph)).astype(np.int32)
    pinned = np.where(random.random(len(graph)) < 0.5, device, -1).astype(np.int32)
    step = simulate(graph, seconds, target, device, random_order(graph, random))
    most = lower_bound_seconds(graph, seconds, target, np.arange(len(graph), dtype=np.int32), pinned)
    assert most <= step.makespan_seconds * (1 + 1e-12)
    loads = steady_state_loads(graph, seconds, target, device)
    assert (loads.compute_seconds @ target.processors <= step.makespan_seconds * (1 + 1e-12)).all()


def test_devices_on_the_same_processors_are_no_faster_together():
    seconds = {"cpu/1": np.array([4.0, 4.0]), "cpu/2": np.array([3.0, 1.0])}
    profile = SimpleNamespace(seconds=seconds, unsharded_seconds={}, needs_host=False)

    def speedup(*devices: tuple[str, int, str]) -> float:
        listed = tuple(Device(name, 1, cores, processors=tuple(own.split())) for name, cores, own in devices)
        return bound_speedup(profile, Target(listed))

    assert speedup(("cpu:0", 1, "x"), ("cpu:1", 1, "x")) == 1
    assert speedup(("cpu:0", 1, "x"), ("cpu:1", 1, "y")) == 2
    # The span is faster for the second node, single processors for the first one.
    span = (("cpu:0", 1, "x"), ("cpu:1", 1, "y"), ("cpu:0-1", 2, "x y"))
    assert speedup(*span) == pytest.approx(4 / (2 + 1))


def test_processors_of_the_same_devices_count_as_one():
    target = share_processors(even_target(3), "a b", "b a c", "d")
    assert target.processors.astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    assert target.conflicts.astype(int).tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


# ---------------------------------------------------------------------------------------------------- bundles


def test_the_predictions_of_a_bundle_have_devices_take_turns(run_cli, model_file, tmp_path):
    placement = RandomPlacement((0, 1, 2, 0), (0,))
    target = Target(tuple(Device(name, 1 << 30) for name in ("cpu:0", "cpu:1", "cpu:0-1")))
    target = share_processors(target, "cpu:0", "cpu:1", "cpu:0 cpu:1")
    steps = (Optimize(), ProfileCosts(estimate=True), placement, Split(), Emit())
    bundle = compile_model(
        model_file, tmp_path / "b", target=target, shape={"batch": 4}, pipeline=Pipeline(steps)
    ).bundle
    manifest = bundle.manifest
    assert {segment.device for segment in manifest.segments} == {"cpu:0", "cpu:1", "cpu:0-1"}
    step = simulate_manifest(manifest)
    predicted = manifest.predicted
    assert predicted.lower_bound_seconds <= step.makespan_seconds
    assert step.makespan_seconds + predicted.request_seconds == pytest.approx(predicted.step_seconds)
    busy = {item.id: item.compute_seconds for item in manifest.devices}
    most = busy["cpu:0-1"] + max(busy["cpu:0"], busy["cpu:1"])
    assert predict_interval_seconds(manifest) >= most
    result = run_cli("run", bundle.path, "--runtime", "simulated", "--trace", tmp_path / "trace.json")
    assert result.code == 0, result.err
    # With requests in flight, what runs on the span excludes all else, and results come no faster than the interval.
    requests = simulate_requests(manifest, [SubmittedRequest(0.0) for _ in range(8)])
    device = [segment.device for segment in manifest.segments]
    runs = sorted(
        (start, finish, home)
        for request in requests
        for start, finish, home in zip(request.start_seconds, request.finish_seconds, device)
    )
    for (_, finish, home), (start, _, other) in combinations(runs, 2):
        assert start >= finish or {home, other} == {"cpu:0", "cpu:1"}
    assert requests[-1].end_seconds >= 8 * most
