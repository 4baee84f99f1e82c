"""What every placer keeps, what each of them decides on small graphs, and how they refuse."""

import json
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.errors import InfeasibleError, UsageError
from onnxplace.facts import Clusters, Groups, Placement, Profile, Schedule, Source
from onnxplace.graph.op_graph import OpGraph
from onnxplace.pipeline.pipeline import Pipeline, make_pass, run_pass
from onnxplace.problem import commit_placement, placement_problem
from onnxplace.state import Pass, State
from onnxplace.target.target import Device, Target
from onnxplace.testing.pass_contract import check_pass, random_state
from tests.support.reference_simulator import even_target, graph_of

PLACERS = ("single", "m-topo", "m-etf")
# Also those that may cut clusters.
ALL_PLACERS = (*PLACERS, "pipelined")
thorough = settings(deadline=None, derandomize=True, max_examples=200)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def states(draw, facts=(Profile,), pinned=False):
    return random_state(
        draw(seeds),
        draw(st.integers(1, 30)),
        draw(st.integers(1, 4)),
        facts=facts,
        tight=draw(st.booleans()),
        pinned=pinned,
        shuffled=draw(st.booleans()),
    )


def state_of(
    graph: OpGraph,
    seconds: list[float] | list[list[float]],
    target: Target,
    groups: list[int] | None = None,
    pins: list[int] | None = None,
    unit: list[int] | None = None,
) -> State:
    """Return a state by hand: seconds per node, or per device and node; groups and pins if given."""
    table = np.broadcast_to(np.array(seconds, dtype=np.float64), (len(target.devices), len(graph)))
    classes = {device.cost_class: table[index].copy() for index, device in enumerate(target.devices)}
    profile = Profile(
        graph,
        MappingProxyType(classes),
        MappingProxyType({name: np.full(len(graph), Source.GIVEN, dtype=np.uint8) for name in classes}),
        np.array(range(len(graph)) if unit is None else unit, dtype=np.int32),
    )
    state = State(target).with_facts(profile)
    if groups is None:
        return state
    count = max(groups) + 1
    pinned = np.array(pins or [-1] * count, dtype=np.int32)
    return state.with_facts(Groups(np.array(groups, dtype=np.int32), pinned, ("by hand",) * count))


def place(placer: str, state: State) -> list[int]:
    return run_pass(make_pass(placer), state)[Placement].device.tolist()


def chains(count: int, length: int) -> OpGraph:
    """Return independent chains a0 -> a1 -> ..., b0 -> b1 -> ..."""
    letters = "abcdef"[:count]
    return graph_of({f"{c}{i}": [f"{c}{i - 1}"] if i else [] for c in letters for i in range(length)})


# Contracts


@pytest.mark.parametrize("name", [*PLACERS, "coplace", "fuse"])
def test_the_pass_keeps_the_contract_of_passes_on_random_states(name):
    check_pass(lambda: make_pass(name))


@pytest.mark.parametrize("join", ["worth", "always", "never"])
def test_coplace_keeps_the_contract_of_passes_with_any_join(join):
    check_pass(lambda: make_pass("coplace", {"join": join}))


def answer(name: str, state: State) -> State | InfeasibleError:
    try:
        return run_pass(make_pass(name), state)
    except InfeasibleError as refusal:
        return refusal


@pytest.mark.parametrize("name", ALL_PLACERS)
@pytest.mark.parametrize("facts", [(Profile,), (Profile, Groups), (Profile, Groups, Clusters)])
@thorough
@given(data=st.data())
def test_a_placement_covers_the_nodes_and_keeps_groups_pins_and_memory_or_is_refused_by_name(name, facts, data):
    state = data.draw(states(facts, pinned=data.draw(st.booleans())))
    after, devices = answer(name, state), state.target.devices
    if isinstance(after, InfeasibleError):
        assert (after.exit_code, after.where) == (3, name)
        assert any(device.id in str(after) for device in devices)
        return
    placement, schedule = after[Placement], after[Schedule]
    assert placement.placer == name
    assert len(placement.device) == len(state[Profile].graph)
    assert set(placement.device.tolist()) <= set(range(len(devices)))
    assert sorted(schedule.order.tolist()) == list(range(len(placement.device)))
    assert all(peak <= device.memory_bytes for peak, device in zip(schedule.simulation.peak_bytes, devices))
    if Groups in state:
        for group, pin in enumerate(state[Groups].pinned.tolist()):
            homes = set(placement.device[state[Groups].group == group].tolist())
            assert len(homes) == 1
            assert pin in (-1, *homes)


@pytest.mark.parametrize("name", PLACERS)
@thorough
@given(state=states((Profile, Groups, Clusters)))
def test_clusters_run_without_interruption_on_their_device(name, state):
    after = answer(name, state)
    if isinstance(after, InfeasibleError):
        return
    order, device = after[Schedule].order, after[Placement].device
    cluster = state[Clusters].cluster
    for index in range(len(state.target.devices)):
        mine = cluster[order[device[order] == index]]
        assert np.count_nonzero(np.diff(mine)) == max(len(set(mine.tolist())) - 1, 0)


@pytest.mark.parametrize("name", ALL_PLACERS)
def test_a_graph_without_nodes_is_placed(name):
    state = state_of(graph_of({}, fed=["x"]), [], even_target())
    after, _ = Pipeline.parse(f"coplace,fuse,{name}").run(state)
    assert after[Placement].device.tolist() == []
    assert after[Schedule].simulation.makespan_seconds == 0


@pytest.mark.parametrize("name", ALL_PLACERS)
def test_a_placer_works_with_groups_that_were_not_fused(name):
    graph = graph_of({"a": [], "b": ["a"], "c": ["b"]})
    homes = place(name, state_of(graph, [1, 1, 1], even_target(), groups=[0, 1, 0]))
    assert homes[0] == homes[2]


# What check_pass finds: passes that break one promise each


@dataclass(frozen=True)
class OnOne(Pass):
    """Keeps every promise of a placer; the dummies below break one each."""

    name: ClassVar[str] = "on-one"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    def run(self, state):
        asked = placement_problem(state)
        pins = sorted(set(asked.pinned.tolist()) - {-1}) or [0]
        if len(pins) > 1:
            raise InfeasibleError("X", "pinned apart")
        device = np.full(len(asked.graph), pins[0], dtype=np.int32)
        return commit_placement(
            state, asked, device, asked.simulate(device, asked.graph.order).start_seconds, self.name
        )


@dataclass(frozen=True)
class AltersItsInput(OnOne):
    def run(self, state):
        for seconds in state[Profile].seconds.values():
            seconds[:] = 1.0
        return super().run(state)


@dataclass(frozen=True)
class ThrowsDice(OnOne):
    calls: ClassVar[list[int]] = []

    def run(self, state):
        self.calls.append(0)
        after = super().run(state)
        return after.with_facts(replace(after[Schedule], lower_bound_seconds=float(len(self.calls))))


@dataclass(frozen=True)
class ProvidesMoreThanItSays(OnOne):
    provides: ClassVar[tuple[type, ...]] = (Placement,)


@dataclass(frozen=True)
class GivesUpEasily(OnOne):
    def run(self, state):
        raise InfeasibleError("X", "too hard")


@dataclass(frozen=True)
class ChangesTheTarget(OnOne):
    def run(self, state):
        after = super().run(state)
        return replace(after, target=replace(after.target, link_model="parallel"))


@dataclass(frozen=True)
class ReturnsNothing(OnOne):
    def run(self, state):
        super().run(state)


@dataclass(frozen=True)
class PutsItWhereThereIsNoDevice(OnOne):
    def run(self, state):
        after = super().run(state)
        return after.with_facts(replace(after[Placement], device=after[Placement].device + 9))


class NotFrozen(OnOne):
    pass


@dataclass(frozen=True)
class HasAnOption(OnOne):
    words: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (AltersItsInput, "altered its input"),
        (ThrowsDice, r"equal inputs gave results that differ in .*lower_bound_seconds"),
        (ProvidesMoreThanItSays, "changed Schedule, which it does not list in `provides`"),
        (GivesUpEasily, "room for everything"),
        (ChangesTheTarget, "changed the target"),
        (ReturnsNothing, "on-one"),
        (PutsItWhereThereIsNoDevice, "a node is on no device"),
        (NotFrozen, "not a frozen dataclass"),
        (lambda: HasAnOption("none"), "is read as another pass"),
    ],
)
def test_check_pass_finds_the_broken_rule(kind, message):
    with pytest.raises(AssertionError, match=message):
        check_pass(kind)


@pytest.mark.parametrize("make", [OnOne, lambda: HasAnOption(("a", "b c"))])
def test_check_pass_accepts_a_correct_pass(make):
    check_pass(make)


def test_check_pass_takes_states_and_says_which_one_it_failed_on():
    fitting, pinned = random_state(1, 4, 2), random_state(1, 4, 2)
    check_pass(OnOne, [fitting])
    with pytest.raises(AssertionError, match="state 1: it altered"):
        check_pass(AltersItsInput, [pinned.without(Profile).with_facts(_ones(pinned[Profile])), fitting])


def _ones(profile: Profile) -> Profile:
    """Return a profile that AltersItsInput cannot alter."""
    return replace(profile, seconds={name: np.ones(len(profile.graph)) for name in profile.seconds})


def test_check_pass_needs_states_where_random_ones_lack_a_fact():
    with pytest.raises(ValueError, match="Model"):
        check_pass(lambda: make_pass("profile"))


# single


def test_single_takes_the_device_that_runs_everything_fastest():
    target = Target((even_target(1).devices[0], Device("cuda:0", 1 << 40)))
    graph = chains(1, 3)
    assert place("single", state_of(graph, [[2, 2, 2], [1, 1, 1]], target)) == [1, 1, 1]
    assert place("single", state_of(graph, [[1, 1, 1], [2, 2, 2]], target)) == [0, 0, 0]


def test_single_takes_the_first_of_equal_devices():
    assert place("single", state_of(chains(1, 3), [1, 1, 1], even_target(3))) == [0, 0, 0]


def test_single_takes_a_slower_device_where_the_faster_has_too_little_memory():
    target = Target((Device("cpu:0", 100), Device("cuda:0", 50)))
    graph = graph_of({"a": []}, weights={"a": ["w"]}, sizes={"w": 80})
    assert place("single", state_of(graph, [[2], [1]], target)) == [0]


def test_single_goes_where_the_pins_are():
    state = state_of(chains(1, 2), [1, 1], even_target(), groups=[0, 1], pins=[-1, 1])
    assert place("single", state) == [1, 1]


def test_single_refuses_pins_on_two_devices_by_their_names():
    state = state_of(chains(1, 2), [1, 1], even_target(), groups=[0, 1], pins=[0, 1])
    with pytest.raises(InfeasibleError, match="cpu:0 and cpu:1") as refusal:
        place("single", state)
    assert refusal.value.exit_code == 3


# m-topo


def test_m_topo_fills_one_device_after_the_other_in_topological_order():
    graph = graph_of({name: [] for name in "abcdef"}, sizes=dict.fromkeys("abcdef", 10))
    # The cap is an equal share of 60 bytes and the largest node: 20 + 10.
    assert place("m-topo", state_of(graph, [1] * 6, even_target(3))) == [0, 0, 0, 1, 1, 1]


def test_m_topo_never_goes_back_to_a_device_it_has_left():
    homes = place("m-topo", random_state(3, 60, 4))
    order = random_state(3, 60, 4)[Profile].graph.order
    assert np.diff(np.array(homes)[order]).min() >= 0


def test_m_topo_leaves_a_device_when_its_weights_would_exceed_its_limit():
    graph = graph_of({name: [] for name in "abc"}, weights={n: [f"w{n}"] for n in "abc"}, sizes={"wa": 10, "wb": 10})
    assert place("m-topo", state_of(graph, [1] * 3, even_target(memory_bytes=[12, 40]))) == [0, 1, 1]


def test_m_topo_counts_a_weight_that_a_group_shares_once():
    graph = graph_of({"a": [], "b": []}, weights={"a": ["w"], "b": ["w"]}, sizes={"w": 100})
    target = even_target(memory_bytes=150)
    assert place("m-topo", state_of(graph, [1, 1], target, groups=[0, 0])) == [0, 0]


def test_m_topo_counts_what_is_pinned_before_it_fills_a_device():
    graph = graph_of({"a": [], "b": []}, weights={"a": ["v"], "b": ["w"]}, sizes={"v": 100, "w": 100})
    state = state_of(graph, [1, 1], even_target(memory_bytes=150), groups=[0, 1], pins=[-1, 0])
    assert place("m-topo", state) == [1, 0]


# m-etf


def test_m_etf_puts_two_heavy_chains_on_two_devices():
    homes = place("m-etf", state_of(chains(2, 3), [10] * 6, even_target()))
    assert homes[:3] in ([0] * 3, [1] * 3)
    assert homes[3:] == [1 - homes[0]] * 3


def test_m_etf_keeps_a_chain_together_where_sending_costs_more_than_waiting():
    graph = graph_of({"a": [], "b": ["a"], "c": ["a"]}, sizes={"a": 100})
    assert place("m-etf", state_of(graph, [1, 1, 1], even_target())) == [0, 0, 0]


def test_m_etf_uses_the_other_device_where_sending_is_cheap():
    graph = graph_of({"a": [], "b": ["a"], "c": ["a"]}, sizes={"a": 1})
    assert sorted(place("m-etf", state_of(graph, [1, 9, 9], even_target()))[1:]) == [0, 1]


def test_m_etf_reserves_the_weights_of_a_whole_group():
    """The first group would fit on the first device by its first node alone, together with the second group."""
    weights = {"a": ["wa"], "b": ["wb"], "c": ["wc"]}
    graph = graph_of({"a": [], "b": [], "c": []}, weights=weights, sizes={"wa": 10, "wb": 60, "wc": 60})
    state = state_of(graph, [1, 1, 1], even_target(memory_bytes=100), groups=[0, 1, 0])
    homes = place("m-etf", state)
    assert homes[0] == homes[2] != homes[1]


def test_m_etf_moves_on_when_a_device_is_full():
    graph = graph_of({n: [] for n in "abcd"}, weights={n: [f"w{n}"] for n in "abcd"}, sizes=dict.fromkeys(
        ["wa", "wb", "wc", "wd"], 40))  # fmt: skip
    homes = place("m-etf", state_of(graph, [1, 1, 1, 1], even_target(memory_bytes=100)))
    assert sorted(homes) == [0, 0, 1, 1]


def test_m_etf_frees_values_without_readers():
    names = [f"n{i}" for i in range(20)]
    reads = {name: [names[i - 1]] if i else [] for i, name in enumerate(names)}
    reads |= {f"unread{i}": [names[i]] for i in range(20)}
    graph = graph_of(reads, sizes={f"unread{i}": 10 for i in range(20)})
    assert place("m-etf", state_of(graph, [1] * 40, even_target(1, memory_bytes=40))) == [0] * 40


def test_m_etf_takes_the_memory_of_a_view_once():
    names = [f"n{i}" for i in range(8)]
    graph = graph_of({name: names[:i][-1:] for i, name in enumerate(names)}, sizes=dict.fromkeys(names, 10),
                     views={name: names[i] for i, name in enumerate(names[1:])})  # fmt: skip
    assert place("m-etf", state_of(graph, [1] * 8, even_target(1, memory_bytes=15))) == [0] * 8


# Refusals


@pytest.mark.parametrize("name", PLACERS)
def test_a_refusal_names_the_devices_and_the_bytes_that_are_missing(name):
    graph = graph_of({"a": [], "b": ["a"]}, weights={"a": ["v"], "b": ["w"]}, sizes={"v": 1000, "w": 1000})
    with pytest.raises(InfeasibleError) as refusal:
        place(name, state_of(graph, [1, 1], even_target(memory_bytes=[300, 400])))
    text = str(refusal.value)
    assert refusal.value.exit_code == 3
    assert refusal.value.where == name
    assert "cpu:0" in text
    assert "cpu:1" in text
    # All devices together lack 1300 bytes for the weights; one device alone 1702 or 1602, with two values of a byte.
    expected = ("1702", "1602") if name == "single" else ("1300",)
    assert all(number in text for number in expected)
    assert refusal.value.hint


@pytest.mark.parametrize("name", ["m-topo", "m-etf"])
def test_a_refusal_says_what_the_largest_group_lacks_where_all_devices_together_would_do(name):
    graph = graph_of({"a": []}, weights={"a": ["w"]}, sizes={"w": 100})
    with pytest.raises(InfeasibleError, match=r"cpu:1.*'a'.* lacks 30 bytes"):
        place(name, state_of(graph, [1], even_target(memory_bytes=[60, 70])))


@pytest.mark.parametrize("name", PLACERS)
def test_a_pin_that_does_not_fit_is_refused(name):
    graph = graph_of({"a": []}, weights={"a": ["w"]}, sizes={"w": 100})
    state = state_of(graph, [1], even_target(memory_bytes=[200, 50]), groups=[0], pins=[1])
    with pytest.raises(InfeasibleError, match="cpu:1"):
        place(name, state)


# coplace


def group(state: State, text: str = "coplace") -> list[int]:
    after, _ = Pipeline.parse(text).run(state)
    return after[Groups].group.tolist()


def test_coplace_joins_a_node_with_its_only_reader_if_sending_takes_longer_than_computing():
    graph = graph_of({"cheap": [], "dear": [], "c": ["cheap", "dear"]}, sizes={"cheap": 10, "dear": 10})
    state = state_of(graph, [1, 100, 1], even_target())
    assert group(state) == [0, 1, 0]
    assert group(state, "coplace{join=always}") == [0, 0, 0]
    assert group(state, "coplace{join=never}") == [0, 1, 2]


def test_coplace_keeps_the_nodes_of_one_kernel_together():
    state = state_of(chains(1, 3), [9, 9, 9], even_target(), unit=[0, 1, 0])
    assert group(state, "coplace{join=never}") == [0, 1, 0]


def test_coplace_joins_what_the_user_names():
    state = state_of(chains(2, 2), [9] * 4, even_target())
    assert group(state, "coplace{join=never,colocate=a0;b.}")[2:] == [2, 2]
    assert group(state, 'coplace{join=never,colocate="a0|b1"}') == [0, 1, 2, 0]


def test_coplace_pins_what_the_device_map_names_and_never_joins_across_it(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"a0": "cpu:1", "a.*": "cpu:0"}))
    state = state_of(chains(1, 3), [0, 0, 0], even_target())
    after = run_pass(make_pass("coplace", {"join": "always", "device_map": str(path)}), state)
    assert after[Groups].group.tolist() == [0, 1, 1]
    assert after[Groups].pinned.tolist() == [1, 0]
    for placer in ("m-topo", "m-etf"):
        assert place(placer, after) == [1, 0, 0]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [({"nothing": "cpu:0"}, "nothing"), ({"a.*": "cpu:7"}, "cpu:7"), ({"(": "cpu:0"}, "not a regular expression")],
)
def test_coplace_refuses_a_map_that_names_nothing_or_no_device(tmp_path, mapping, message):
    path = tmp_path / "map.json"
    path.write_text(json.dumps(mapping))
    with pytest.raises(Exception, match=message) as refusal:
        run_pass(make_pass("coplace", {"device_map": str(path)}), state_of(chains(1, 2), [1, 1], even_target()))
    assert refusal.value.exit_code == 2


def test_coplace_refuses_to_join_what_the_map_keeps_apart(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"a0": "cpu:0", "a1": "cpu:1"}))
    step = make_pass("coplace", {"device_map": str(path), "colocate": "a."})
    with pytest.raises(UsageError, match="a1"):
        run_pass(step, state_of(chains(1, 2), [1, 1], even_target()))


@thorough
@given(states())
def test_coplace_joins_all_or_nothing_of_a_unit_and_leaves_no_gap_in_its_numbers(state):
    after = run_pass(make_pass("coplace"), state)
    result, unit = after[Groups].group, state[Profile].unit
    assert sorted(set(result.tolist())) == list(range(len(after[Groups].reasons)))
    assert all(len(set(result[unit == u].tolist())) == 1 for u in range(int(unit.max()) + 1))


# fuse


def fuse(graph: OpGraph, groups: list[int]) -> list[int]:
    state = state_of(graph, [1] * len(graph), even_target(), groups=groups)
    return run_pass(make_pass("fuse"), state)[Clusters].cluster.tolist()


@thorough
@given(states((Profile, Groups)))
def test_fused_clusters_lie_in_groups_and_form_no_cycle(state):
    graph, groups = state[Profile].graph, state[Groups].group
    cluster = run_pass(make_pass("fuse"), state)[Clusters].cluster
    coarse = graph.contract(cluster)
    assert sorted(coarse.order.tolist()) == list(range(len(coarse)))
    assert all(len(set(groups[cluster == c].tolist())) == 1 for c in range(len(coarse)))


@thorough
@given(states((Profile, Groups)))
def test_fusing_leaves_no_edge_within_a_group_that_is_an_only_way_in_or_out(state):
    graph, groups = state[Profile].graph, state[Groups].group
    cluster = run_pass(make_pass("fuse"), state)[Clusters].cluster
    coarse = graph.contract(cluster)
    color = np.zeros(len(coarse), dtype=int)
    color[cluster] = groups
    for node in range(len(coarse)):
        for after in coarse.successors[node].tolist():
            joinable = len(coarse.successors[node]) == 1 or len(coarse.predecessors[after]) == 1
            assert not (joinable and color[node] == color[after])


@thorough
@given(states((Profile, Groups)))
def test_fusing_keeps_time_and_weights(state):
    after = run_pass(make_pass("fuse"), state)
    fine, coarse = placement_problem(state), placement_problem(after)
    assert coarse.seconds.sum(axis=1).tolist() == fine.seconds.sum(axis=1).tolist()
    assert coarse.graph.total_weight_bytes == fine.graph.total_weight_bytes
    assert sorted(set(coarse.members.tolist())) == list(range(len(coarse.graph)))


def test_a_chain_in_one_group_fuses_to_one_node():
    assert fuse(chains(1, 5), [0] * 5) == [0] * 5


def test_a_chain_through_two_groups_fuses_to_a_node_for_each():
    assert fuse(chains(1, 4), [0, 0, 1, 1]) == [0, 0, 1, 1]


def test_a_diamond_in_one_group_fuses_to_one_node():
    assert fuse(graph_of({"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}), [0] * 4) == [0] * 4


def test_nodes_of_one_group_around_a_node_of_another_do_not_fuse():
    """Fusing a and d would make a cycle with b."""
    assert fuse(graph_of({"a": [], "b": ["a"], "d": ["a", "b"]}), [0, 1, 0]) == [0, 1, 2]


def test_unconnected_chains_of_one_group_stay_two_nodes():
    assert fuse(chains(2, 2), [0] * 4) == [0, 0, 1, 1]
