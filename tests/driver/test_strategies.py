"""Strategies for many requests in flight: ways through groups of devices, partitions, and predictions."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.driver.candidates import (
    Candidate,
    InfeasibleStrategy,
    Profiled,
    list_ways_through,
    predict,
    predict_all,
)
from onnxplace.driver.choose import list_copied_stages, list_simple, make_throughput_objective
from onnxplace.errors import InfeasibleError
from onnxplace.facts import Placement, Routes
from onnxplace.model.lowering import bind
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.target import Device, Link, Target
from tests.support.chains import mlp

REST = "coplace{join=never},fuse,stages{seconds=1},split"


def make_target(count: int, memory: int = 1 << 30, cores: int = 1) -> Target:
    """Return equal CPU devices between which transfers take almost no time."""
    devices = tuple(
        Device(f"cpu:{index}", memory, cores=cores, segment_seconds=1e-7, operations_per_second=1e9 * cores)
        for index in range(count)
    )
    return Target(devices, tuple(Link(a.id, b.id, 1e-7, 1e11) for a in devices for b in devices if a is not b))


def profiled(target: Target, layers: int = 3) -> Profiled:
    from onnxplace.model.loading import load

    state = State(target).with_facts(bind(load(mlp(layers=layers)), {}, {}))
    front = Pipeline.parse("optimize,profile{estimate=true}").passes
    return Profiled(front, Pipeline(front).run(state)[0], Pipeline.parse(REST).passes, Pipeline.parse("emit").passes[0])


def predict_strategies(target: Target, layers: int = 3) -> dict[str, Candidate | InfeasibleStrategy]:
    def propose(model, results):
        yield list_simple(model)
        yield from list_copied_stages(model, results)

    return {item.strategy.name: item for item in predict_all(propose, profiled(target, layers))}


def list_partitions(count: int) -> list[tuple[tuple[int, ...], ...]]:
    rounds = list_copied_stages(profiled(make_target(count)))
    return [item.groups for strategies in rounds for item in strategies]


def test_split_operators_are_candidates_unless_the_user_said_how_to_place():
    names = [
        {item.name for strategies in objective.propose(profiled(make_target(4)), []) for item in strategies}
        for objective in (make_throughput_objective(may_shard=may_shard) for may_shard in (True, False))
    ]
    assert names[0] - names[1] == {
        "2 copies, each sharded 2 ways",
        "2 stages, each sharded 2 ways",
        "sharded 4 ways",
    }


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_ways_through_groups_load_all_devices_of_a_group_equally(sizes):
    groups, first = [], 0
    for size in sizes:
        groups.append(tuple(range(first, first + size)))
        first += size
    ways = list_ways_through(groups)
    assert ways[0] == tuple(group[0] for group in groups), "the first way is that of the programs"
    assert len(set(ways)) == len(ways) <= first
    # Their shares are the distances between bounds.
    bounds = sorted({Fraction(part, size) for size in sizes for part in range(size)} | {Fraction(1)})
    share = Counter()
    for way, begin, end in zip(ways, bounds, bounds[1:]):
        for device in way:
            share[device] += end - begin
    assert share == {device: Fraction(1, len(group)) for group in groups for device in group}


@pytest.mark.parametrize("count", range(2, 9))
def test_all_ways_to_share_devices_are_listed(count):
    listed = list_partitions(count)
    sizes = [tuple(map(len, groups)) for groups in listed]
    partitions = {2: 2, 3: 3, 4: 5, 5: 7, 6: 11, 7: 15, 8: 22}[count]
    assert len(set(sizes)) == len(sizes) == partitions - 2, "all except one stage, and one device for each"
    assert all(sum(parts) == count for parts in sizes)
    for groups in listed:
        assert sorted(device for group in groups for device in group) == list(range(count))


def test_many_devices_are_shared_evenly_only():
    sizes = [tuple(map(len, groups)) for groups in list_partitions(12)]
    assert sizes == [(6, 6), (4, 4, 4), (3, 3, 3, 3), (2,) * 6]


def test_copies_give_as_many_requests_as_there_are_devices():
    results = predict_strategies(make_target(3))
    one, copies = results["one device"], results["3 copies of the model"]
    assert copies.devices == 3
    assert copies.interval_seconds == pytest.approx(one.interval_seconds / 3)
    assert results["stages"].interval_seconds >= copies.interval_seconds * (1 - 1e-9)


def test_a_model_that_fits_on_no_device_is_put_on_copied_stages():
    results = predict_strategies(make_target(4, memory=7 << 20), layers=2)
    assert isinstance(results["4 copies of the model"], InfeasibleStrategy)
    pairs = results["2 copies of 2 stages"]
    assert isinstance(pairs, Candidate)
    assert pairs.devices == 4
    assert len(pairs.state[Routes].routes) == 1
    assert pairs.interval_seconds <= results["stages"].interval_seconds * (1 + 1e-6)


def test_more_stages_than_one_beyond_the_fewest_are_left_out():
    results = predict_strategies(make_target(5), layers=2)
    stages = {len(item.strategy.groups) for item in results.values() if item.strategy.kind == "copied stages"}
    assert stages == {2, 3}


def test_a_copy_without_room_is_refused_with_a_reason():
    target = Target((Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 20)))
    model = profiled(target)
    copies = next(item for item in list_simple(model) if item.everywhere)
    with pytest.raises(InfeasibleError, match="no room for a second copy"):
        predict(copies, model)


def test_copies_leave_out_devices_without_room():
    big, small = make_target(3).devices[:2], make_target(3, memory=1 << 20).devices[2]
    prediction = predict_strategies(Target((*big, small)))["2 copies of the model"]
    assert prediction.devices == 2


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.integers(1, 4), st.sampled_from([1 << 30, 7 << 20, 5 << 20]))
def test_predictions_use_devices_of_the_target_and_keep_limits(count, layers, memory):
    for item in predict_strategies(make_target(count, memory), layers).values():
        if isinstance(item, Candidate):
            assert 1 <= item.devices <= count
            assert item.interval_seconds > 0
            assert set(item.state[Placement].device.tolist()) <= set(range(count))
            shares = [route.share for route in item.state[Routes].routes] if Routes in item.state else []
            assert 0 <= sum(shares) <= 1
