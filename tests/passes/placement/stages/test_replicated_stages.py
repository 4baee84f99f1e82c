"""Stages that several devices share: against brute force over contiguous splits of chains."""

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.errors import UsageError
from onnxplace.facts import Placement, Profile
from onnxplace.graph.op_graph import Csr, OpGraph
from onnxplace.passes.stages import Stages
from onnxplace.state import State
from onnxplace.target.target import Device, Link, Target


def chain_state(costs: list[float], devices: int) -> State:
    """Return a chain of nodes with these costs, between which transfers take no time."""
    count = len(costs)
    graph = OpGraph(
        names=tuple(f"n{i}" for i in range(count)),
        ops=("op",) * count,
        value_names=("x", *(f"v{i}" for i in range(count))),
        value_bytes=np.zeros(count + 1, dtype=np.int64),
        producer=np.arange(-1, count, dtype=np.int32),
        is_output=np.arange(count + 1) == count,
        alias=np.full(count + 1, -1, dtype=np.int32),
        inputs=Csr.of([[i] for i in range(count)]),
        weight_names=(),
        weight_bytes=np.zeros(0, dtype=np.int64),
        weights=Csr.of([[] for _ in range(count)]),
        workspace_bytes=np.zeros(count, dtype=np.int64),
    )
    ids = [f"cpu:{index}" for index in range(devices)]
    links = tuple(Link(a, b, 0.0, float("inf")) for a in ids for b in ids if a != b)
    target = Target(tuple(Device(name, 1 << 30, segment_seconds=0.0) for name in ids), links)
    seconds, sources = {"cpu/1": np.array(costs)}, {"cpu/1": np.zeros(count, dtype=np.uint8)}
    return State(target).with_facts(Profile(graph, seconds, sources, np.arange(count, dtype=np.int32)))


def best_interval(costs: list[float], replicas: tuple[int, ...]) -> float:
    """Return the least of max(load / replicas) over contiguous splits and orders of the groups."""
    best = float("inf")
    for used in range(1, len(replicas) + 1):
        for groups in set(permutations(replicas, used)):
            for cuts in combinations(range(1, len(costs)), used - 1):
                bounds = [0, *cuts, len(costs)]
                loads = [sum(costs[a:b]) / r for a, b, r in zip(bounds, bounds[1:], groups)]
                best = min(best, max(loads))
    return best


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.1, 4), min_size=2, max_size=7),
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
)
def test_the_largest_load_per_device_is_the_least_of_all_splits(costs, replicas):
    if len(replicas) > len(costs):
        return
    state = Stages(replicas=replicas, seconds=5).run(chain_state(costs, sum(replicas)))
    firsts = np.concatenate([[0], np.cumsum(replicas)[:-1]])
    device = state[Placement].device
    assert set(device.tolist()) <= set(firsts.tolist()), "stages are on the first device of their group"
    loads = [np.array(costs)[device == first].sum() / count for first, count in zip(firsts, replicas)]
    assert max(loads) == pytest.approx(best_interval(costs, replicas))


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(UsageError, match="U075") as raised:
        Stages(replicas=(2, 3)).run(chain_state([1, 1], 4))
    assert "2 + 3 devices need 5, there are 4" in raised.value.message
