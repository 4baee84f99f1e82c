"""adjust: groups that a placer tore apart move as a whole, where most of them was, and where there is room."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.errors import InfeasibleError, UsageError
from onnxplace.facts import Clusters, Groups, Placement, Profile, Schedule, Source
from onnxplace.graph.op_graph import OpGraph
from onnxplace.pipeline.pipeline import Pipeline, make_pass, run_pass
from onnxplace.problem import device_seconds
from onnxplace.simulation.lower_bounds import lower_bound_seconds
from onnxplace.simulation.simulator import simulate
from onnxplace.state import State
from onnxplace.testing.pass_contract import check_pass, random_state
from tests.support.reference_simulator import even_target, graph_of

thorough = settings(deadline=None, derandomize=True, max_examples=150)
RULES = ("compute", "memory", "majority")


def torn(graph: OpGraph, device: str, given: str, seconds: list[float], *, memory_bytes=1 << 40, unit=None) -> State:
    """Return a state whose nodes are on devices, and in groups, by the digits of a text; `-` is no group."""
    homes = np.array([int(digit) for digit in device], dtype=np.int32)
    target = even_target(max(2, int(homes.max()) + 1), memory_bytes=memory_bytes)
    cost_class = target.devices[0].cost_class
    profile = Profile(
        graph,
        {cost_class: np.array(seconds)},
        {cost_class: np.full(len(graph), Source.GIVEN, dtype=np.uint8)},
        np.arange(len(graph), dtype=np.int32) if unit is None else np.array(unit, dtype=np.int32),
        user_groups=np.array([-1 if digit == "-" else int(digit) for digit in given], dtype=np.int32),
    )
    state = State(target).with_facts(profile)
    table = device_seconds(profile, target)
    step = simulate(graph, table, target, homes, graph.order)
    bound = lower_bound_seconds(graph, table)
    return state.with_facts(Placement(homes, "by hand"), Schedule(graph.order, step, bound))


def adjusted(state: State, text: str = "adjust") -> str:
    after, _ = Pipeline.parse(text).run(state)
    return "".join(map(str, after[Placement].device.tolist()))


FOUR = graph_of(
    {"a": [], "b": [], "c": [], "d": []},
    weights={"a": ["wa"], "b": ["wb"], "c": ["wc"]},
    sizes={"wa": 10, "wb": 10, "wc": 15},
)


@pytest.mark.parametrize(("by", "device"), [("compute", "2222"), ("memory", "1111"), ("majority", "0000")])
def test_a_group_goes_where_most_of_it_was(by, device):
    """Two nodes and one weight of 10 bytes on the first device, 15 bytes on the second, most seconds on the third."""
    graph = graph_of(
        {"a": [], "b": [], "c": [], "d": []}, weights={"a": ["w"], "b": ["w"], "c": ["v"]}, sizes={"w": 10, "v": 15}
    )
    assert adjusted(torn(graph, "0012", "0000", [1, 1, 2, 5]), f"adjust{{by={by}}}") == device


def test_the_seconds_of_several_nodes_add_up():
    assert adjusted(torn(FOUR, "1120", "0000", [2, 2, 3, 3])) == "1111"


def test_workspace_is_memory_that_draws_too():
    graph = graph_of({"a": [], "b": []}, weights={"a": ["w"]}, sizes={"w": 10}, workspace={"b": 11})
    assert adjusted(torn(graph, "01", "00", [5, 1]), "adjust{by=memory}") == "11"


@pytest.mark.parametrize("by", RULES)
def test_the_first_device_wins_where_nothing_decides(by):
    graph = graph_of({"a": [], "b": []})
    assert adjusted(torn(graph, "10", "00", [1, 1]), f"adjust{{by={by}}}") == "00"


def test_nodes_on_their_own_stay_and_kernels_move_together():
    state = torn(graph_of({"a": [], "b": [], "c": []}), "100", "---", [1, 1, 3], unit=[0, 1, 0])
    assert adjusted(state) == "000"
    assert adjusted(torn(graph_of({"a": [], "b": [], "c": []}), "101", "---", [1, 1, 3])) == "101"


def test_groups_are_made_by_the_options_of_coplace():
    state = torn(graph_of({"a": [], "b": ["a"], "c": ["b"]}), "010", "0-0", [1, 5, 1])
    assert adjusted(state) == "010"
    assert adjusted(state, "adjust{join=always}") == "111"
    assert adjusted(state, "adjust{given=false,colocate=b|c}") == "011"


def test_backward_nodes_can_follow_their_forward_node():
    state = torn(graph_of({"a": [], "b": ["a"], "grad": ["b"]}), "001", "---", [1, 1, 9])
    marked = replace(state[Profile], backward=np.array([False, False, True]))
    assert adjusted(state.with_facts(marked), "adjust{backward=follow}") == "011"


def test_a_pinned_group_goes_to_its_pin(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"a": "cpu:1"}))
    assert adjusted(torn(FOUR, "0000", "0011", [1, 1, 1, 1]), f'adjust{{device_map="{path}"}}') == "1100"


def test_groups_and_pins_that_are_there_already_hold(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"c": "cpu:1"}))
    state = torn(FOUR, "0000", "0011", [1, 1, 1, 1]).without(Placement, Schedule)
    text = f'coplace{{given=false,colocate=b|c,device_map="{path}"}},fuse,m-etf,adjust'
    after, _ = Pipeline.parse(text).run(state)
    assert after[Placement].device.tolist() == [1, 1, 1, 1]
    assert after[Groups].reasons == ("the graph's own group",) or set(after[Groups].group.tolist()) == {0}
    assert Clusters not in after


def test_a_device_without_room_is_passed_over_for_the_next_of_the_ranking():
    """Both groups are drawn to the first device; the heavier one gets it, the other one fits on the third."""
    graph = graph_of({"a": [], "b": [], "c": [], "d": []}, weights={"a": ["w"], "c": ["v"]}, sizes={"w": 10, "v": 15})
    state = torn(graph, "0102", "0011", [3, 1, 3, 2], memory_bytes=[20, 5, 20])
    assert adjusted(state) == "2200"


def test_weights_that_two_groups_share_count_once_per_device():
    graph = graph_of({"a": [], "b": [], "c": [], "d": []}, weights={"a": ["w"], "c": ["w"]}, sizes={"w": 10})
    state = torn(graph, "0101", "0011", [3, 1, 3, 1], memory_bytes=[16, 5])
    assert adjusted(state) == "0000"


def test_pinned_groups_get_their_room_first(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"a": "cpu:0"}))
    graph = graph_of({"a": [], "b": [], "c": [], "d": []}, weights={"a": ["w"], "c": ["v"]}, sizes={"w": 10, "v": 15})
    state = torn(graph, "1100", "0011", [1, 1, 1, 1], memory_bytes=[20, 20])
    assert adjusted(state, f'adjust{{device_map="{path}"}}') == "0011"


def test_a_group_that_fits_nowhere_is_named():
    graph = graph_of({"a": [], "b": []}, weights={"a": ["w"], "b": ["v"]}, sizes={"w": 10, "v": 15})
    state = torn(graph, "01", "00", [1, 1], memory_bytes=[20, 20])
    with pytest.raises(InfeasibleError) as refusal:
        adjusted(state)
    assert (refusal.value.code, refusal.value.where) == ("P001", "adjust")
    for note in ("'a'", "25 bytes of weights", "cpu:0 (20 bytes)", "cpu:1 (20 bytes)"):
        assert note in refusal.value.message


def test_a_group_that_does_not_fit_on_its_pin_is_named_with_it(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"b": "cpu:1"}))
    graph = graph_of({"a": [], "b": []}, weights={"b": ["v"]}, sizes={"v": 15})
    state = torn(graph, "00", "--", [1, 1], memory_bytes=[20, 10])
    with pytest.raises(InfeasibleError, match=r"'b' fits on none of cpu:1 \(10 bytes\)"):
        adjusted(state, f'adjust{{device_map="{path}"}}')


def test_values_that_pile_up_on_one_device_send_groups_elsewhere():
    """All four outputs wait for the end: four of 10 bytes are too many for either device, two are not."""
    names = "abcd"
    graph = graph_of(
        {**{name: [] for name in names}, **{f"{name}2": [name] for name in names}},
        sizes=dict.fromkeys(names, 10),
        outputs=names,
    )
    state = torn(graph, "00001111", "01230123", [2] * 4 + [1] * 4, memory_bytes=[32, 32])
    after, _ = Pipeline.parse("adjust").run(state)
    assert sorted(set(after[Placement].device.tolist())) == [0, 1]
    assert max(after[Schedule].simulation.peak_bytes) <= 32


def test_each_device_runs_its_nodes_in_the_order_in_which_they_had_started():
    """The placer had run d before c, against the order of the graph; so does the adjusted schedule."""
    graph = graph_of({"a": [], "b": [], "c": [], "d": []})
    state = torn(graph, "0101", "0000", [1, 1, 1, 1])
    table = device_seconds(state[Profile], state.target)
    order = np.array([3, 0, 2, 1], dtype=np.int32)
    step = simulate(graph, table, state.target, state[Placement].device, order)
    after = run_pass(make_pass("adjust"), state.with_facts(replace(state[Schedule], order=order, simulation=step)))
    assert after[Schedule].order.tolist() == [0, 3, 1, 2]


def test_the_result_is_signed_by_the_pass():
    assert run_pass(make_pass("adjust"), torn(FOUR, "0101", "0011", [1] * 4))[Placement].placer == "adjust"


def test_adjust_needs_a_placement():
    with pytest.raises(UsageError, match="Placement"):
        Pipeline.parse("adjust").run(random_state(1))


@st.composite
def placed_states(draw) -> State:
    """States with a placement that ignores the colors of the graph."""
    seed = draw(st.integers(0, 2**32 - 1))
    tight = draw(st.booleans())
    nodes, devices = draw(st.integers(1, 30)), draw(st.integers(1, 4))
    state = random_state(seed, nodes, devices, facts=(Profile, Placement, Schedule), tight=tight)
    colors = np.random.default_rng(seed).integers(-1, 1 + nodes // 3, nodes).astype(np.int32)
    return state.with_facts(replace(state[Profile], user_groups=colors))


@pytest.mark.parametrize("by", RULES)
@thorough
@given(state=placed_states())
def test_groups_end_up_whole_on_the_device_that_drew_them_most_unless_memory_forbids(by, state):
    try:
        after = run_pass(make_pass("adjust", {"by": by}), state)
    except InfeasibleError:
        return
    profile, before = state[Profile], state[Placement].device
    graph, device, group = profile.graph, after[Placement].device, after[Groups].group
    fitting = [item.memory_bytes for item in state.target.devices]
    assert all(peak <= limit for peak, limit in zip(after[Schedule].simulation.peak_bytes, fitting))
    for color in set(profile.user_groups[profile.user_groups >= 0].tolist()):
        assert len(set(device[profile.user_groups == color].tolist())) == 1
    if min(fitting) < int(graph.value_bytes.sum() + graph.workspace_bytes.sum()) + graph.total_weight_bytes:
        return  # some device may have been passed over
    own = device_seconds(profile, state.target)[before, np.arange(len(graph))]
    for index in range(int(group.max()) + 1):
        drawn = []
        for place in range(len(fitting)):
            members = np.flatnonzero((group == index) & (before == place))
            weights = {int(w) for node in members for w in graph.weights[node]}
            stored = sum(int(graph.weight_bytes[w]) for w in weights) + int(graph.workspace_bytes[members].sum())
            drawn.append({"compute": float(own[members].sum()), "memory": stored, "majority": len(members)}[by])
        assert set(device[group == index].tolist()) == {drawn.index(max(drawn))}


@pytest.mark.parametrize("by", RULES)
@pytest.mark.parametrize("join", ["worth", "always", "never"])
@pytest.mark.sampled(3)
def test_adjust_keeps_the_contract_of_passes(by, join):
    check_pass(lambda: make_pass("adjust", {"by": by, "join": join}))


def test_a_model_is_compiled_with_it(run_cli, model_file, tmp_path):
    text = "optimize,profile{estimate=true},m-etf,adjust{by=memory,colocate=left|right},split,emit"
    ran = run_cli(
        *("compile", model_file, "-o", tmp_path / "bundle", "--shape", "batch=2", "--devices", "cpu:0,cpu:1"),
        *("--pipeline", text, "--json"),
    )
    assert ran.code == 0, ran.err
    assert "adjust" in [step["name"] for step in json.loads(ran.out)["passes"]]


def test_its_options_are_listed(run_cli):
    ran = run_cli("passes", "adjust")
    assert ran.code == 0
    for option in ("by", *RULES, "backward", "colocate"):
        assert option in ran.out
