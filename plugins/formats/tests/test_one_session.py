"""The placer `one-session`: the least sum of nodes and copies, as one session of ONNX Runtime takes."""

from dataclasses import replace
from itertools import pairwise, product
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.errors import InfeasibleError
from onnxplace.facts import REFUSED_SECONDS, Groups, Placement, Profile, Schedule, Source
from onnxplace.graph.op_graph import Csr, OpGraph
from onnxplace.pipeline.pipeline import make_pass
from onnxplace.problem import PlacementProblem, placement_problem
from onnxplace.state import State
from onnxplace.target.target import Device, Link, Target
from onnxplace.testing.pass_contract import check_pass, random_graph
from onnxplace_formats.one_session import OneSession, find_hub, list_device_choices, session_seconds
from onnxplace_formats.ort_providers import name_provider

AMPLE = 1 << 40
DEVICES = (
    ("cpu:0",),
    ("cpu:0", "cuda:0"),
    ("cpu:0", "cpu:1"),
    ("cuda:0", "webgpu:0"),
    ("cpu:0", "openvino/npu:0"),
    ("cpu:0", "qnn/npu:0"),
    ("cpu:0", "cuda:0", "cuda:1"),
    ("cpu:0", "cuda:0", "webgpu:0"),
    ("cpu:0", "cuda:0", "qnn/npu:0"),
    ("cpu:0", "cuda:0", "openvino/npu:0"),
)


def make_target(names: tuple[str, ...], memory_bytes: int = AMPLE, seed: int = 0) -> Target:
    """Return devices of different models with random links."""
    random = np.random.default_rng(seed)
    devices = tuple(Device(name, memory_bytes, 1 + index, model=str(index)) for index, name in enumerate(names))
    links = tuple(
        Link(a, b, float(random.integers(0, 200)) * 1e-6, float(random.integers(1, 50)) * 1e6)
        for a, b in product(names, names)
        if a != b
    )
    return Target(devices, links)


def make_state(graph: OpGraph, target: Target, seed: int, *, refused: float = 0.0, grouped: bool = False) -> State:
    """Return a state with random times; devices but the first refuse a share of the nodes."""
    random, seconds = np.random.default_rng(seed), {}
    for index, device in enumerate(target.devices):
        times = random.integers(0, 400, len(graph)) * 1e-6
        seconds[device.cost_class] = np.where(
            (random.random(len(graph)) < refused) & (index > 0), REFUSED_SECONDS, times
        )
    sources = {name: np.full(len(graph), Source.GIVEN, dtype=np.uint8) for name in seconds}
    unit = np.arange(len(graph), dtype=np.int32)
    profile = Profile(graph, MappingProxyType(seconds), MappingProxyType(sources), unit)
    state = State(target).with_facts(profile)
    if not grouped or not len(graph):
        return state
    group = np.unique(random.integers(0, max(len(graph) - 1, 1), len(graph)), return_inverse=True)[1].astype(np.int32)
    pinned = np.where(random.random(group.max() + 1) < 0.2, 0, -1).astype(np.int32)
    return state.with_facts(Groups(group, pinned, ("",) * len(pinned)))


def reference_seconds(problem: PlacementProblem, device: np.ndarray) -> float:
    """Return what one session takes, node by node; infinite where it cannot run the placement."""
    graph, target = problem.graph, problem.target
    used = {int(index) for index in device}
    if len({name_provider(target.devices[index]) for index in used}) < len(used) or problem.refuses(device):
        return np.inf
    accelerators = [target.devices[index] for index in used if target.devices[index].kind != "cpu"]
    if len(accelerators) > 1 and any(item.compiles for item in accelerators):
        return np.inf
    if len(used) > 1 and any("openvino" in item.kind for item in accelerators):
        return np.inf
    latency, per_byte = target.link_arrays()
    total = sum(problem.seconds[device[node], node] for node in range(len(graph)))
    hosts = [index for index, item in enumerate(target.devices) if item.kind == "cpu"]
    for value, producer in enumerate(graph.producer.tolist()):
        if producer < 0:
            continue
        source = int(device[producer])
        readers = {int(device[node]) for node in graph.readers[value]} - {source}
        hops = set()
        for reader in readers:
            between = [index for index in hosts if index in used]
            direct = not hosts or source in hosts or reader in hosts
            middle = (between or hosts)[:1]
            path = [source, reader] if direct else [source, *middle, reader]
            hops |= set(pairwise(path))
        total += sum(latency[hop] + per_byte[hop] * graph.value_bytes[value] for hop in hops)
    return float(total)


def list_placements(problem: PlacementProblem) -> list[np.ndarray]:
    """Return all placements that keep groups and pins."""
    free = [range(len(problem.target.devices)) if pin < 0 else [pin] for pin in problem.pinned.tolist()]
    return [np.array(homes, dtype=np.int32)[problem.group] for homes in product(*free)]


cases = st.tuples(st.integers(0, 7), st.integers(0, 10**6), st.sampled_from(DEVICES), st.booleans(), st.booleans())


@settings(max_examples=120)
@given(cases)
def test_no_placement_is_faster_than_the_one_found(case):
    nodes, seed, names, refused, grouped = case
    graph = random_graph(seed, nodes)
    state = make_state(graph, make_target(names, seed=seed), seed, refused=0.3 * refused, grouped=grouped)
    problem = placement_problem(state)
    least = min(reference_seconds(problem, device) for device in list_placements(problem))
    after = OneSession().run(state)
    assert reference_seconds(problem, after[Placement].device) == pytest.approx(least, abs=1e-9)
    assert "no other placement is faster" in after.diagnostics[-1].message


@settings(max_examples=80)
@given(cases, st.floats(0.3, 1.0))
def test_limits_of_memory_are_kept_and_what_is_called_the_best_is_the_best_that_fits(case, share):
    nodes, seed, names, _, grouped = case
    graph = random_graph(seed, nodes)
    memory = int(share * (graph.total_weight_bytes + graph.value_bytes.sum() + graph.workspace_bytes.sum()))
    state = make_state(graph, make_target(names, memory, seed), seed, grouped=grouped)
    problem = placement_problem(state)

    def fits(device):
        return not problem.excess_bytes(problem.simulate(device, graph.order)).any()

    fitting = [reference_seconds(problem, device) for device in list_placements(problem) if fits(device)]
    try:
        after = OneSession().run(state)
    except InfeasibleError:
        return
    seconds = reference_seconds(problem, after[Placement].device)
    assert min(fitting) <= seconds + 1e-9
    assert seconds < np.inf
    if "no other placement is faster" in after.diagnostics[-1].message:
        assert seconds == pytest.approx(min(fitting), abs=1e-9)


@settings(max_examples=40)
@given(cases)
def test_weights_alone_are_split_in_the_best_way_that_fits(case):
    nodes, seed, names, _, _ = case
    graph = random_graph(seed, nodes, views=0)
    graph = replace(graph, value_bytes=0 * graph.value_bytes, workspace_bytes=0 * graph.workspace_bytes)
    state = make_state(graph, make_target(names, int(0.7 * graph.total_weight_bytes), seed), seed)
    problem = placement_problem(state)
    placements = list_placements(problem)
    fitting = [item for item in placements if not problem.excess_bytes(problem.simulate(item, graph.order)).any()]
    least = min((reference_seconds(problem, device) for device in fitting), default=np.inf)
    if least == np.inf:
        with pytest.raises(InfeasibleError, match="P002"):
            OneSession().run(state)
    else:
        assert reference_seconds(problem, OneSession().run(state)[Placement].device) == pytest.approx(least, abs=1e-9)


@settings(max_examples=50)
@given(cases)
def test_the_time_that_it_states_is_that_of_its_placement(case):
    nodes, seed, names, _, grouped = case
    state = make_state(random_graph(seed, nodes), make_target(names, seed=seed), seed, grouped=grouped)
    problem = placement_problem(state)
    for chosen in list_device_choices(problem):
        device = np.random.default_rng(seed).choice(chosen, len(problem.pinned)).astype(np.int32)[problem.group]
        if np.isfinite(expected := reference_seconds(problem, device)):
            assert session_seconds(problem, device, find_hub(problem.target, chosen)) == pytest.approx(expected)


@pytest.mark.parametrize("seed", [0, 2, 4, 6])
def test_what_a_list_scheduler_fits_into_memory_is_not_refused_and_not_better(seed):
    """Values need most of the memory here, which the program knows only by trying."""
    graph, names = random_graph(seed, 60), ("cpu:0", "cuda:0")
    alone = placement_problem(make_state(graph, make_target(names, seed=seed), seed))
    peak = alone.simulate(np.zeros(60, dtype=np.int32), graph.order).peak_bytes.max()
    state = make_state(graph, make_target(names, int(0.75 * peak), seed), seed)
    problem = placement_problem(state)
    listed = make_pass("m-etf", {}).run(state)[Placement].device
    assert not problem.excess_bytes(problem.simulate(listed, graph.order)).any()
    device = OneSession(seconds=1).run(state)[Placement].device
    assert session_seconds(problem, device, 0) <= session_seconds(problem, listed, 0) + 1e-12


@pytest.mark.parametrize(
    ("room", "weights", "least"), [(11_000, 10, "29 ms"), (6_500, 5, "34 ms"), (4_200, 3, "36 ms")]
)
def test_a_device_is_filled_as_far_as_values_leave_room(room, weights, least):
    """A chain of 20 nodes, each of 1000 bytes and half as fast on the CPU, with two values of 500 bytes at a time."""
    count = 20
    graph = OpGraph(
        names=(names := tuple(map(str, range(count)))),
        ops=names,
        value_names=names,
        value_bytes=np.full(count, 500, dtype=np.int64),
        producer=np.arange(count, dtype=np.int32),
        is_output=np.arange(count) == count - 1,
        alias=np.full(count, -1, dtype=np.int32),
        inputs=Csr.of([[], *([index] for index in range(count - 1))]),
        weight_names=names,
        weight_bytes=np.full(count, 1000, dtype=np.int64),
        weights=Csr.of([[index] for index in range(count)]),
        workspace_bytes=np.zeros(count, dtype=np.int64),
    )
    devices = (Device("cpu:0", AMPLE, model="cpu"), Device("cuda:0", room, model="gpu"))
    target = Target(devices, (Link("cpu:0", "cuda:0", 0, 1e15), Link("cuda:0", "cpu:0", 0, 1e15)))
    times = {devices[0].cost_class: np.full(count, 2e-3), devices[1].cost_class: np.full(count, 1e-3)}
    sources = {name: np.full(count, Source.GIVEN, dtype=np.uint8) for name in times}
    profile = Profile(graph, MappingProxyType(times), MappingProxyType(sources), np.arange(count, dtype=np.int32))
    after = OneSession().run(State(target).with_facts(profile))
    assert int(after[Placement].device.sum()) == weights
    assert after.diagnostics[-1].message.endswith(f"none in these limits takes less than {least}")


def test_it_keeps_the_contract_of_passes():
    check_pass(OneSession)


def test_it_is_chosen_by_name_with_its_options():
    assert make_pass("one-session", {"seconds": "2"}) == OneSession(seconds=2)


def chain(target: Target, seconds: dict[str, list[float]]) -> State:
    """Return nodes a, b, ..., each of which reads a value of 1000 bytes of the one before."""
    count = len(next(iter(seconds.values())))
    names = tuple("abcdefgh"[:count])
    graph = OpGraph(
        names=names,
        ops=names,
        value_names=tuple(f"v{name}" for name in names),
        value_bytes=np.full(count, 1000, dtype=np.int64),
        producer=np.arange(count, dtype=np.int32),
        is_output=np.arange(count) == count - 1,
        alias=np.full(count, -1, dtype=np.int32),
        inputs=Csr.of([[], *([index] for index in range(count - 1))]),
        weight_names=(),
        weight_bytes=np.zeros(0, dtype=np.int64),
        weights=Csr.of([[]] * count),
        workspace_bytes=np.zeros(count, dtype=np.int64),
    )
    times = {device.cost_class: np.array(seconds[device.id]) for device in target.devices}
    sources = {name: np.full(count, Source.GIVEN, dtype=np.uint8) for name in times}
    profile = Profile(graph, MappingProxyType(times), MappingProxyType(sources), np.arange(count, dtype=np.int32))
    return State(target).with_facts(profile)


def link_all(*names: str, seconds: float = 1e-3) -> Target:
    links = tuple(Link(a, b, seconds, 1e15) for a in names for b in names if a != b)
    return Target(tuple(Device(name, AMPLE, model=name) for name in names), links)


def test_the_example_of_its_docstring():
    seconds = {"cpu:0": [1e-3, 5e-3, 1e-3], "cuda:0": [1e-3, 1e-3, 3e-3]}
    after = OneSession().run(chain(link_all("cpu:0", "cuda:0"), seconds))
    assert after[Placement].device.tolist() == [1, 1, 0]
    assert "one session takes 4 ms" in after.diagnostics[-1].message
    assert after[Schedule].simulation.makespan_seconds == pytest.approx(4e-3)


def test_a_provider_that_compiles_has_only_the_cpu_next_to_it():
    names = ("cpu:0", "cuda:0", "qnn/npu:0")
    seconds = {"cpu:0": [9e-3] * 3, "cuda:0": [1e-3, 8e-3, 1e-3], "qnn/npu:0": [8e-3, 1e-3, 8e-3]}
    after = OneSession().run(chain(link_all(*names), seconds))
    assert after[Placement].device.tolist() == [1, 1, 1]
    seconds["qnn/npu:0"][0] = seconds["cpu:0"][2] = 1e-3
    after = OneSession().run(chain(link_all(*names), seconds))
    assert after[Placement].device.tolist() == [2, 2, 0]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("cuda:0", "cuda:1"), "are devices of CUDAExecutionProvider, of which a session of ONNX Runtime has one"),
        (("cuda:0", "qnn/npu:0"), "qnn/npu:0 shares a session with the CPU only, not with cuda:0"),
        (("cpu:0", "openvino/npu:0"), "openvino/npu:0 shares no session with cpu:0"),
        (("cpu:0", "cpu:1"), "CPU devices are one in a session"),
    ],
)
def test_nodes_pinned_to_devices_that_share_no_session_are_an_error_that_names_them(names, reason):
    groups = Groups(np.arange(2, dtype=np.int32), np.array([0, 1], dtype=np.int32), ("", ""))
    state = chain(link_all(*names), dict.fromkeys(names, [1e-3] * 2)).with_facts(groups)
    with pytest.raises(InfeasibleError, match=f"pinned to {' and '.join(names)}: .*{reason}"):
        OneSession().run(state)


def test_three_devices_without_a_cpu_are_an_error_that_says_what_to_add():
    names = ("cuda:0", "webgpu:0", "directml/gpu:0")
    with pytest.raises(InfeasibleError, match="add cpu:0"):
        OneSession().run(chain(link_all(*names), dict.fromkeys(names, [1e-3] * 2)))
