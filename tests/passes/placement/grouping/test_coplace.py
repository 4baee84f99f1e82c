"""coplace: who joins whom and why, against a plain account of its rules; backward nodes follow their forward node."""

import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from networkx import connected_components

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Clusters, Groups, Placement, Profile, Schedule, Source
from onnxplace.graph.op_graph import Csr, OpGraph
from onnxplace.pipeline.pipeline import Pipeline, make_pass, run_pass
from onnxplace.problem import device_seconds, placement_problem
from onnxplace.state import State
from onnxplace.testing.pass_contract import check_pass, random_state
from tests.support.reference_simulator import connect_nodes, even_target, graph_of

thorough = settings(deadline=None, derandomize=True, max_examples=150)
seeds = st.integers(0, 2**32 - 1)


def state_of(graph: OpGraph, *, backward: str = "", given=None, unit=None, seconds=None, devices: int = 2) -> State:
    """Return a state by hand; `backward` names nodes, by default each node takes one second."""
    target = even_target(devices)
    cost_class = target.devices[0].cost_class
    profile = Profile(
        graph,
        {cost_class: np.array(seconds or [1.0] * len(graph))},
        {cost_class: np.full(len(graph), Source.GIVEN, dtype=np.uint8)},
        np.arange(len(graph), dtype=np.int32) if unit is None else np.array(unit, dtype=np.int32),
        user_groups=None if given is None else np.array(given, dtype=np.int32),
        backward=np.array([name in backward.split() for name in graph.names], dtype=bool),
    )
    return State(target).with_facts(profile)


def grouped(state: State, text: str) -> Groups:
    after, _ = Pipeline.parse(text).run(state)
    return after[Groups]


def together(state: State, text: str) -> list[str]:
    """Return the groups of several nodes, as the names of their nodes."""
    groups, names = grouped(state, text), state[Profile].graph.names
    result = defaultdict(list)
    for node, group in enumerate(groups.group.tolist()):
        result[group].append(names[node])
    return [" ".join(row) for row in result.values() if len(row) > 1]


@st.composite
def training_states(draw) -> State:
    """Random graphs with colors, some far apart, and a backward part that any node may be in."""
    state = random_state(draw(seeds), draw(st.integers(1, 30)), draw(st.integers(2, 3)), shuffled=draw(st.booleans()))
    random = np.random.default_rng(draw(seeds))
    count = len(state[Profile].graph)
    colors = random.integers(-1, 1 + count // 2, count) * int(random.choice([1, 1000]))
    given = None if draw(st.booleans()) else np.maximum(colors, -1).astype(np.int32)
    return state.with_facts(
        replace(state[Profile], user_groups=given, backward=random.random(count) < random.choice([0.2, 0.6]))
    )


# The same rules, one node at a time.


def partition(count: int, joins: list[tuple[int, int]]) -> list[int]:
    """Return the lowest node of each node's set."""
    home = list(range(count))
    for a, b in joins:
        low, high = sorted((home[a], home[b]))
        home = [low if item == high else item for item in home]
    return home


def alike(keys: list[int]) -> list[tuple[int, int]]:
    return [(keys.index(key), node) for node, key in enumerate(keys) if key >= 0]


def plain_owners(profile: Profile) -> list[int]:
    """Return the forward node of each backward node, -1 for none, as the docstring of coplace has it."""
    graph, backward = profile.graph, profile.backward.tolist()
    color = [-1] * len(graph) if profile.user_groups is None else profile.user_groups.tolist()
    rank = graph.positions.tolist()
    owner = [-1] * len(graph)
    for node in range(len(graph)):
        alike = [n for n in range(len(graph)) if not backward[n] and color[n] == color[node] >= 0]
        read = [n for n in graph.predecessors[node].tolist() if not backward[n]]
        if backward[node]:
            choices = [n for n in read if n in alike] or alike or read
            owner[node] = max(choices, key=rank.__getitem__, default=-1)
    queue = [n for n in graph.order.tolist() if owner[n] >= 0]
    for node in queue:
        built = [r for value in graph.outputs[node] for r in graph.readers[value].tolist()]
        read = [int(p) for p in graph.producer[graph.inputs[node]] if p >= 0]
        for other in [*built, *read]:
            if backward[other] and owner[other] < 0:
                owner[other] = owner[node]
                queue.append(other)
    return owner


def plain_readers(state: State, counts: list[bool], always: bool) -> list[tuple[int, int]]:
    profile = state[Profile]
    graph, own = profile.graph, device_seconds(profile, state.target).min(axis=0)
    latency, per_byte = state.target.link_arrays()
    apart = ~np.eye(len(latency), dtype=bool)
    joins = []
    for node in range(len(graph)):
        readers = [r for r in graph.successors[node].tolist() if counts[r]]
        sent = [v for v in graph.outputs[node].tolist() if any(counts[r] for r in graph.readers[v].tolist())]
        transfer = len(sent) * latency[apart].min() + graph.value_bytes[sent].sum() * per_byte[apart].min()
        constant = own[node] == 0 and not len(graph.predecessors[node])
        worth = always or own[node] <= transfer
        if counts[node] and ((len(readers) == 1 and worth) or (len(readers) > 1 and constant)):
            joins.append((node, min(readers)))
    return joins


@pytest.mark.parametrize("follow", ["free", "follow"])
@pytest.mark.parametrize("join", ["worth", "always", "never"])
@thorough
@given(state=training_states(), colors=st.booleans())
def test_groups_are_those_of_a_plain_account_of_the_rules(join, follow, state, colors):
    profile = state[Profile]
    count = len(profile.graph)
    owner = plain_owners(profile) if follow == "follow" else [-1] * count
    joins = alike(profile.unit.tolist())
    joins += alike(profile.user_groups.tolist()) if colors and profile.user_groups is not None else []
    joins += [(forward, node) for node, forward in enumerate(owner) if forward >= 0]
    if join != "never":
        joins += plain_readers(state, [forward < 0 for forward in owner], join == "always")
    expected = partition(count, joins)
    result = grouped(state, f"coplace{{join={join},given={str(colors).lower()},backward={follow}}}").group
    lowest = [int(np.argmax(result == group)) for group in result]
    assert lowest == expected
    assert list(dict.fromkeys(result.tolist())) == list(range(len(set(expected))))


# Reasons and pins


def test_a_group_says_why_the_strongest_reason_first():
    graph = graph_of({"a": [], "b": ["a"], "c": ["b"], "d": [], "e": [], "f": []})
    state = state_of(graph, given=[-1, -1, -1, 0, 0, -1], unit=[0, 1, 1, 3, 4, 5])
    groups = grouped(state, "coplace{join=always,colocate=a|d}")
    assert groups.group.tolist() == [0, 0, 0, 0, 0, 1]
    assert groups.reasons == ("--colocate a|d", "")
    assert grouped(state, "coplace{join=always}").reasons == ("one kernel", "the graph's own group", "")
    assert grouped(state, "coplace{join=never,given=false}").reasons == ("", "one kernel", "", "", "")


def test_nodes_pinned_to_different_devices_are_not_joined(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"a": "cpu:1", "c": "cpu:0"}))
    state = state_of(graph_of({"a": [], "b": ["a"], "c": ["b"]}), given=[7, 7, 7])
    groups = grouped(state, f'coplace{{join=always,device_map="{path}"}}')
    assert groups.group.tolist() == [0, 0, 1]
    assert groups.pinned.tolist() == [1, 0]


def test_a_kernel_that_the_map_splits_is_named(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"a": "cpu:1", "c": "cpu:0"}))
    state = state_of(graph_of({"a": [], "b": ["a"], "c": ["b"]}), unit=[0, 0, 0])
    after = run_pass(make_pass("coplace", {"join": "never", "device_map": str(path)}), state)
    assert [(note.code, note.where) for note in after.diagnostics] == [("G010", "c")]


def test_a_constant_that_costs_nothing_joins_its_first_reader():
    graph = graph_of({"w": [], "x": [], "b": ["x", "w"], "a": ["x", "w"]})
    assert together(state_of(graph, seconds=[0.0, 1.0, 1.0, 1.0]), "coplace{join=always}") == ["w b"]


# Backward nodes

TRAINING = graph_of(
    {
        "x": [],
        "first": ["x"],
        "second": ["first"],
        "loss": ["second"],
        "ones": [],
        "loss_grad": ["ones", "second", "loss"],
        "second_grad": ["loss_grad", "first", "second"],
        "scaled": ["second_grad"],
        "first_grad": ["scaled", "x", "first"],
        "update": ["first_grad"],
    },
    sizes={"first": 8, "second": 8},
    weights={"first": ["w"], "update": ["slot"]},
)
BACKWARD = "ones loss_grad second_grad scaled first_grad update"


def test_a_gradient_follows_the_last_forward_node_it_reads_and_the_rest_follow_their_nearest_gradient():
    state = state_of(TRAINING, backward=BACKWARD)
    assert together(state, "coplace{join=never,backward=follow}") == [
        "first first_grad update",
        "second second_grad scaled",
        "loss ones loss_grad",
    ]
    reasons = grouped(state, "coplace{join=never,backward=follow}").reasons
    assert reasons == ("", "its forward node", "its forward node", "its forward node")


def test_without_following_backward_nodes_are_like_any_other():
    state = state_of(TRAINING, backward=BACKWARD)
    assert together(state, "coplace{join=never}") == []
    assert (
        grouped(state, "coplace{join=always}").group.tolist()
        == grouped(state_of(TRAINING), "coplace{join=always}").group.tolist()
    )


def test_the_graphs_own_group_says_which_forward_node_it_is():
    """`second_grad` is of the color of x, `scaled` of that of both `first` and `second`, of which it reads neither."""
    state = state_of(TRAINING, backward=BACKWARD, given=[5, 6, 6, -1, 8, -1, 5, 6, -1, -1])
    assert together(state, "coplace{join=never,given=false,backward=follow}") == [
        "x second_grad",
        "first first_grad update",
        "second scaled",
        "loss ones loss_grad",
    ]
    assert together(state, "coplace{join=never,backward=follow}")[:2] == [
        "x second_grad",
        "first second scaled first_grad update",
    ]


def test_only_the_forward_part_decides_who_has_a_single_reader():
    """Each gradient has one reader, so that all would be one group; each activation has two, one of them forward."""
    state = state_of(TRAINING, backward=BACKWARD)
    assert together(state, "coplace{join=always,backward=follow}") == [" ".join(TRAINING.names)]
    worth = state_of(TRAINING, backward=BACKWARD, seconds=[9, 9, 9, 1, 1, 9, 9, 9, 9, 9])
    assert together(worth, "coplace{join=worth,backward=follow}") == [
        "first first_grad update",
        "second second_grad scaled",
        "loss ones loss_grad",
    ]


def test_backward_nodes_that_nothing_connects_to_the_forward_part_stay_free():
    state = state_of(graph_of({"a": [], "grad": [], "other": ["grad"]}), backward="grad other")
    after = run_pass(make_pass("coplace", {"join": "never", "backward": "follow"}), state)
    assert after[Groups].group.tolist() == [0, 1, 2]
    assert [note.code for note in after.diagnostics] == ["G011"]


def test_a_graph_without_backward_nodes_says_that_none_follows():
    state = random_state(3)
    free, follow = (run_pass(make_pass("coplace", {"backward": text}), state) for text in ("free", "follow"))
    assert free[Groups].group.tolist() == follow[Groups].group.tolist()
    assert [note.code for note in (*free.diagnostics, *follow.diagnostics)] == ["G011"]


def test_the_device_map_wins_over_following(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"first": "cpu:0", "first_grad": "cpu:1"}))
    state = state_of(TRAINING, backward=BACKWARD)
    groups = grouped(state, f'coplace{{join=never,backward=follow,device_map="{path}"}}')
    names = TRAINING.names
    assert groups.group[names.index("first")] == groups.group[names.index("update")]
    assert groups.group[names.index("first")] != groups.group[names.index("first_grad")]


@thorough
@given(state=training_states(), join=st.sampled_from(["worth", "always", "never"]))
def test_backward_nodes_share_a_group_with_a_forward_node_wherever_one_can_be_reached(state, join):
    graph, backward = state[Profile].graph, state[Profile].backward
    text = f"coplace{{join={join},backward=follow}},fuse"
    after, _ = Pipeline.parse(text).run(state)  # which checks that the clusters form no cycle
    near = connect_nodes(graph).subgraph(np.flatnonzero(backward).tolist())
    reads = {int(node): set(graph.predecessors[node].tolist()) for node in range(len(graph))}
    colors = state[Profile].user_groups
    forward_colors = set() if colors is None else set(colors[~backward & (colors >= 0)].tolist())
    reached = {
        node
        for node in near
        if any(not backward[p] for p in reads[node]) or (colors is not None and int(colors[node]) in forward_colors)
    }
    for component in connected_components(near):
        if component & reached:
            for node in component:
                mates = after[Groups].group == after[Groups].group[node]
                assert (mates & ~backward).any()


@thorough
@given(state=training_states())
def test_following_nodes_count_in_time_memory_and_schedule(state):
    text = "coplace{join=always,backward=follow},fuse"
    after, _ = Pipeline.parse(text).run(state)
    fine, coarse = placement_problem(state), placement_problem(after)
    assert coarse.seconds.sum(axis=1).tolist() == fine.seconds.sum(axis=1).tolist()
    assert coarse.graph.total_weight_bytes == fine.graph.total_weight_bytes
    placed = run_pass(make_pass("m-etf"), after)
    assert sorted(placed[Schedule].order.tolist()) == list(range(len(state[Profile].graph)))
    busy = placed[Schedule].simulation.compute_seconds.sum()
    own = fine.seconds[placed[Placement].device, np.arange(len(fine.graph))]
    assert busy == pytest.approx(own.sum())


def test_activations_that_a_gradient_reads_stay_in_memory_until_it_has_run():
    """Baechi's forward-only mode frees them after the forward pass: 8 + 8 bytes would not be there together."""
    state = state_of(TRAINING, backward=BACKWARD, devices=2)
    tight = replace(state, target=state.target.limiting(dict.fromkeys(("cpu:0", "cpu:1"), 20)))
    text = "coplace{join=always,backward=follow},fuse,single"
    placed, _ = Pipeline.parse(text).run(state)
    assert max(placed[Schedule].simulation.peak_bytes) > 20
    with pytest.raises(InfeasibleError):
        Pipeline.parse(text).run(tight)


def test_coplace_keeps_the_contract_of_passes_when_backward_nodes_follow():
    check_pass(lambda: make_pass("coplace", {"join": "always", "backward": "follow"}))


def test_a_deep_training_graph_is_grouped_along_its_backward_path():
    """A forward chain, and a tail of gradients on its end: looking at all nodes for each node would not end."""
    forward, count = 10_000, 30_000
    chain = np.arange(count, dtype=np.int32)
    state = state_of(
        OpGraph(
            names=tuple(f"n{i}" for i in range(count)),
            ops=("Op",) * count,
            value_names=tuple(f"v{i}" for i in range(count)),
            value_bytes=np.ones(count, dtype=np.int64),
            producer=chain,
            is_output=np.zeros(count, dtype=bool),
            alias=np.full(count, -1, dtype=np.int32),
            inputs=Csr(np.maximum(np.arange(-1, count), 0), chain[:-1]),
            weight_names=(),
            weight_bytes=np.zeros(0, dtype=np.int64),
            weights=Csr(np.zeros(count + 1, dtype=np.int64), np.zeros(0, dtype=np.int32)),
            workspace_bytes=np.zeros(count, dtype=np.int64),
        )
    )
    state = state.with_facts(replace(state[Profile], backward=chain >= forward))
    after, _ = Pipeline.parse("coplace{join=never,backward=follow},fuse").run(state)
    assert after[Groups].group.tolist() == np.minimum(chain, forward - 1).tolist()
    assert after[Clusters].cluster.tolist() == after[Groups].group.tolist()


# The command


def test_the_options_are_listed(run_cli):
    ran = run_cli("passes", "coplace")
    assert ran.code == 0
    assert "backward" in ran.out
    assert "follow" in ran.out


def test_backward_takes_two_words_only(run_cli, model_file):
    ran = run_cli("compile", model_file, "--shape", "batch=2", "--pipeline", "profile,coplace{backward=back}")
    assert ran.code == 2
    assert "backward" in ran.err
