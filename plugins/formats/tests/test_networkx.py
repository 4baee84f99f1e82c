"""Cost graphs, profiles and placements as networkx digraphs, and digraphs as cost graphs."""

import math
from dataclasses import fields, replace
from types import SimpleNamespace

import networkx
import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from onnxplace.cost_graph.cost_graphs import parse_cost_graph, read_cost_graph, write_cost_graph
from onnxplace.cost_graph.data import CostGraph
from onnxplace.cost_graph.part_functions import GENERATORS, from_networkx, to_networkx
from onnxplace.driver.place import evaluate_placement, place_cost_graph
from onnxplace.errors import InputError
from onnxplace.facts import Profile
from onnxplace.graph.op_graph import Csr, OpGraph
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.target import Device, Link, Target
from tests.conftest import branches
from tests.cost_graph.test_cost_graph import fork
from tests.support.fuzzing import read_or_refused

MACHINE = {"devices": [{"id": "a", "memory_bytes": 10**6}, {"id": "b", "memory_bytes": 10**6}]}


def two_nodes(**attributes) -> networkx.DiGraph:
    """Return a digraph of an edge between two nodes, with the machine and other attributes of the graph."""
    graph = networkx.DiGraph(**{**MACHINE, **attributes})
    graph.add_node("x", seconds=1.0, weights_bytes=8)
    graph.add_node("y", seconds=2.0)
    graph.add_edge("x", "y", bytes=4, tensor="t")
    return graph


def plain(value: object) -> object:
    """Return a record as values that == compares: arrays as lists, with their types."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, (OpGraph, Csr, Profile)):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "items"):
        return {key: plain(entry) for key, entry in value.items()}
    return value


def everything(graph: CostGraph) -> dict[str, object]:
    """Return all that a cost graph holds but notes, which are about the text that it was read from."""
    return {field.name: plain(getattr(graph, field.name)) for field in fields(graph) if field.name != "notes"}


# ---------------------------------------------------------------------------------------------- round trips

# What XML can hold, with what is hard in it.
XML_TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"), max_size=5),
    st.sampled_from(["", " ", " a ", "\t", "\n", "\r", "\r\n", "<&>\"'", "]]>", "é", "\U0001f600", "None", "0", "nan"]),
)
# Beyond 2^53, a sum of two sizes may be no float.
SIZES = st.one_of(st.integers(0, 100), st.integers(0, 10**15), st.integers(2**53, 2**55), st.floats(0, 1e6))
IDS = st.one_of(XML_TEXTS, st.integers(-5, 5), st.booleans(), st.floats(allow_nan=False, allow_infinity=False))
GROUPS = st.one_of(st.none(), st.integers(0, 3), st.text(max_size=2))


@st.composite
def documents(draw: st.DrawFn, texts: st.SearchStrategy[str] = XML_TEXTS) -> dict[str, object]:
    """Return a JSON cost graph: nodes in any order of ids, edges between them that may be parallel and share values."""
    ids = draw(st.lists(IDS, min_size=1, max_size=6, unique=True))
    nodes = [
        {"id": node, "name": draw(texts), "op": draw(texts), "group": draw(GROUPS), "is_backward": draw(st.booleans()),
         **{key: draw(SIZES) for key in ("compute_time_us", "memory_bytes", "temp_bytes", "output_bytes")}}
        for node in ids
    ]  # fmt: skip
    count = len(ids)
    ends = [(a, b) for b in range(count) for a in range(b)]
    edges = [
        {"src": ids[a], "dst": ids[b], "bytes": draw(SIZES), "tensor": draw(st.one_of(st.none(), texts))}
        for a, b in (draw(st.lists(st.sampled_from(ends), max_size=10)) if ends else [])
    ]
    devices = [
        {"id": name, "memory_bytes": draw(SIZES)} for name in draw(st.lists(IDS, min_size=1, max_size=3, unique=True))
    ]
    comm = {"coef_us_per_byte": draw(st.floats(0, 10)), "intercept_us": draw(SIZES)}
    return {"name": draw(texts), "nodes": nodes, "edges": edges, "devices": devices, "comm": comm}


@given(documents(st.text(max_size=5)))
def test_a_cost_graph_goes_to_networkx_and_back_without_loss(document):
    graph = parse_cost_graph(document, "graph")
    assert everything(from_networkx(to_networkx(graph))) == everything(graph)


@given(documents(), st.sampled_from(["g.graphml", "g.graphml.gz"]))
@settings(max_examples=200)
def test_a_cost_graph_goes_to_a_file_and_back_without_loss(tmp_path_factory, document, name):
    graph = parse_cost_graph(document, "graph")
    path = tmp_path_factory.getbasetemp() / name
    if len({str(node) for node in graph.ids}) < len(graph.ids):
        with pytest.raises(InputError, match="expected ids that differ as texts"):
            write_cost_graph(path, graph)
    else:
        write_cost_graph(path, graph)
        assert everything(read_cost_graph(path)) == everything(graph)


@given(st.text(max_size=3), st.just("graphml"), st.sampled_from(["id", "name", "op", "tensor"]))
def test_any_text_is_held_by_a_file_or_refused_by_name(tmp_path_factory, text, kind, where):
    assume((where, text) != ("id", "end"))
    data = fork(nodes=[{"id": 0, "compute_time_us": 1}, {"id": "end"}], edges=[{"src": 0, "dst": "end", "bytes": 1}])
    if where == "tensor":
        data["edges"][0][where] = text
    else:
        data["nodes"][0][where] = text
    data["edges"][0]["src"] = data["nodes"][0]["id"]
    graph = parse_cost_graph(data)
    path = tmp_path_factory.getbasetemp() / f"text.{kind}"
    if any(is_no_xml(char) for char in text):
        with pytest.raises(InputError, match=r"U032.*has the character U\+[0-9A-F]{4}, which XML cannot hold"):
            write_cost_graph(path, graph)
    else:
        write_cost_graph(path, graph)
        assert everything(read_cost_graph(path)) == everything(graph)


def is_no_xml(char: str) -> bool:
    return (char < " " and char not in "\t\n\r") or char in "\ufffe\uffff" or "\ud800" <= char <= "\udfff"


@pytest.mark.parametrize("family", sorted(GENERATORS))
def test_graphs_with_shared_weights_and_unread_values_are_placed_as_before(family, tmp_path):
    graph = GENERATORS[family](150, 3)
    write_cost_graph(tmp_path / "g.graphml", graph)
    for back in (from_networkx(to_networkx(graph)), read_cost_graph(tmp_path / "g.graphml")):
        before, after = (
            place_cost_graph(graph, "m-etf", groups="given"),
            place_cost_graph(back, "m-etf", groups="given"),
        )
        assert after.placement == before.placement
        assert after.makespan_seconds == before.makespan_seconds
        assert after.peak_bytes.tolist() == before.peak_bytes.tolist()


def test_nodes_that_read_one_weight_share_it_after_a_round_trip():
    graph = two_nodes()
    graph.nodes["x"].update(weights={"w": 8})
    graph.nodes["y"].update(weights={"w": 8, "v": 2})
    for back in (from_networkx(graph), from_networkx(to_networkx(from_networkx(graph)))):
        assert back.profile.graph.total_weight_bytes == 10
        assert dict(zip(back.profile.graph.weight_names, back.profile.graph.weight_bytes.tolist())) == {"w": 8, "v": 2}
        assert back.profile.graph.weights[1].tolist() == [0, 1]


# ---------------------------------------------------------------------------------------------- out


def test_a_placed_graph_says_where_and_when_each_node_runs():
    graph = parse_cost_graph(fork())
    placed = place_cost_graph(graph, "m-etf", groups="none")
    digraph = to_networkx(graph, placed)
    assert {node: data["device"] for node, data in digraph.nodes(data=True)} == {
        int(node): device for node, device in placed.placement.items()
    }
    assert max(data["finish_seconds"] for _, data in digraph.nodes(data=True)) == placed.makespan_seconds
    for source, destination in digraph.edges():
        assert digraph.nodes[source]["finish_seconds"] <= digraph.nodes[destination]["start_seconds"]
    colors = {(data["device"], data["color"]) for _, data in digraph.nodes(data=True)}
    assert len(colors) == len({color for _, color in colors}) == 2
    assert (digraph.graph["placer"], digraph.graph["makespan_seconds"]) == ("m-etf", placed.makespan_seconds)
    assert {node: data.get("output_bytes") for node, data in digraph.nodes(data=True)} == {
        0: None,
        1: None,
        2: None,
        3: 10,
    }
    assert networkx.is_directed_acyclic_graph(digraph)


def test_a_scored_placement_goes_out_too():
    graph = parse_cost_graph(fork())
    digraph = to_networkx(graph, evaluate_placement(graph, dict.fromkeys("0123", "b")))
    assert {data["device"] for _, data in digraph.nodes(data=True)} == {"b"}
    assert digraph.graph["placer"] == "given"


def test_the_placement_of_another_graph_is_refused():
    placed = place_cost_graph(parse_cost_graph(fork()), "single")
    other = from_networkx(two_nodes())
    with pytest.raises(
        InputError, match=r"networkx graph: expected a placement of this graph, found none of 'x'"
    ) as no:
        to_networkx(other, placed)
    assert no.value.code == "D007"


def test_the_colours_of_many_devices_differ():
    nodes = [{"id": i, "compute_time_us": 1} for i in range(64)]
    graph = parse_cost_graph({"nodes": nodes, "devices": [{"id": i, "memory_bytes": 1} for i in range(64)]})
    digraph = to_networkx(graph, evaluate_placement(graph, {str(i): i for i in range(64)}))
    assert len({data["color"] for _, data in digraph.nodes(data=True)}) == 64


def test_a_compiled_model_goes_out_with_costs_groups_pins_and_times(tmp_path):
    devices = (Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30, cores=2))
    state = State(Target(devices)).with_facts(bind(load(branches()), {"batch": 4}, {}))
    state, _ = Pipeline.parse("optimize,profile{estimate=true}").run(state)
    halved = {**state[Profile].seconds, "cpu/2": state[Profile].seconds["cpu/1"] / 2}
    state = state.with_facts(replace(state[Profile], seconds=halved))
    (tmp_path / "map.json").write_text('{"left": "cpu:1"}')
    state, _ = Pipeline.parse(f'coplace{{device_map="{tmp_path / "map.json"}"}},m-etf').run(state)
    digraph = to_networkx(state)
    assert set(digraph) == {"left", "right", "relu", "tanh", "sum"}
    assert digraph.nodes["left"]["device"] == digraph.nodes["left"]["pinned"] == "cpu:1"
    assert digraph.nodes["left"]["weights_bytes"] == 64 * 64 * 4
    assert digraph.nodes["left"]["op"] == "MatMul"
    assert digraph["left"]["relu"][0]["bytes"] == 4 * 64 * 4
    for data in dict(digraph.nodes(data=True)).values():
        at = "seconds:cpu/2" if data["device"] == "cpu:1" else "seconds:cpu/1"
        assert data["seconds"] == data[at]
        assert data["finish_seconds"] - data["start_seconds"] == pytest.approx(data["seconds"])
    write_cost_graph(tmp_path / "model.graphml", state)
    assert set(networkx.read_graphml(tmp_path / "model.graphml")) == set(digraph)
    back = from_networkx(digraph, state.target).profile
    for kind, seconds in state[Profile].seconds.items():
        assert back.seconds[kind].tolist() == seconds.tolist()


def test_a_profile_without_a_placement_goes_out_too():
    state = State(Target((Device("cpu:0", 1 << 30),))).with_facts(bind(load(branches()), {"batch": 4}, {}))
    state, _ = Pipeline.parse("optimize,profile{estimate=true}").run(state)
    assert not any("device" in data for _, data in to_networkx(state).nodes(data=True))


# ---------------------------------------------------------------------------------------------- in


def test_a_digraph_is_placed_on_the_devices_that_it_names():
    graph = from_networkx(two_nodes(latency_seconds=0.5, bytes_per_second=8))
    assert graph.device_ids == ("a", "b")
    result = evaluate_placement(graph, {"x": "a", "y": "b"})
    assert result.makespan_seconds == 1.0 + 0.5 + 4 / 8 + 2.0


def test_a_digraph_is_placed_on_a_target_with_times_for_each_class():
    digraph = two_nodes()
    digraph.nodes["y"]["seconds:cpu/2"] = 0.25
    target = Target((Device("cpu:0", 100), Device("cpu:1", 100, cores=2)), (Link("cpu:0", "cpu:1", 0.125, 8.0),))
    graph = from_networkx(digraph, target)
    assert graph.device_ids == ("cpu:0", "cpu:1")
    assert {kind: seconds.tolist() for kind, seconds in graph.profile.seconds.items()} == {
        "cpu/1": [1.0, 2.0],
        "cpu/2": [1.0, 0.25],
    }
    assert evaluate_placement(graph, {"x": "cpu:0", "y": "cpu:1"}).makespan_seconds == 1.0 + 0.125 + 4 / 8 + 0.25


def test_a_class_that_refuses_a_node_takes_infinitely_long_in_and_out():
    digraph = two_nodes()
    digraph.nodes["y"]["seconds:cpu/1"] = math.inf
    target = Target((Device("cpu:0", 100), Device("cpu:1", 100, cores=2)), (Link("cpu:0", "cpu:1", 0.125, 8.0),))
    graph = from_networkx(digraph, target)
    assert place_cost_graph(graph, "m-etf").placement["y"] == "cpu:1"
    back = to_networkx(graph)
    assert [back.nodes["y"][key] for key in ("seconds", "seconds:cpu/1", "seconds:cpu/2")] == [2.0, math.inf, 2.0]
    assert from_networkx(back, target).profile.seconds["cpu/1"].tolist() == graph.profile.seconds["cpu/1"].tolist()


def test_nodes_may_be_any_object_and_edges_may_be_parallel():
    graph = networkx.MultiDiGraph(**MACHINE)
    graph.add_node((0, 1), seconds=np.float32(0.5), backward=np.True_, group=("g", 1))
    graph.add_node(frozenset("a"), seconds=np.int64(1), backward=0)
    graph.add_edge((0, 1), frozenset("a"), bytes=np.int16(3))
    graph.add_edge((0, 1), frozenset("a"), bytes=5, tensor="u")
    built = from_networkx(graph)
    assert built.ids == ((0, 1), frozenset("a"))
    assert built.profile.graph.value_bytes.tolist() == [3, 5]
    assert built.profile.backward.tolist() == [True, False]
    assert built.profile.user_groups.tolist() == [0, -1]


def test_topo_order_and_order_say_which_nodes_and_values_come_first():
    graph = two_nodes()
    graph.nodes["x"]["topo_order"] = 7
    graph.add_node("z", topo_order=1)
    graph.add_edge("x", "z", bytes=1, tensor="first", order=0)
    graph["x"]["y"]["order"] = 1
    built = from_networkx(graph)
    assert built.ids == ("y", "z", "x")
    assert built.profile.graph.value_names == ("first", "t")


def test_missing_costs_are_noted_with_a_similar_name():
    graph = two_nodes()
    del graph.nodes["y"]["seconds"]
    graph.nodes["y"]["second"] = 3
    del graph["x"]["y"]["bytes"]
    nodes, edges = from_networkx(graph).notes
    assert (nodes.code, nodes.message) == (
        "C002",
        "1 of 2 nodes have no seconds, such as node 'y': that counts as zero",
    )
    assert nodes.hint == "it has 'second'; call it seconds"
    assert edges.message == "1 of 1 edges have no bytes, such as edge 'x' -> 'y': that counts as zero"
    assert from_networkx(two_nodes()).notes == ()


def test_an_empty_group_or_tensor_is_none():
    graph = two_nodes()
    graph.add_edge("x", "z", bytes=9, tensor="")
    graph.add_edge("x", "w", bytes=9, tensor="")
    networkx.set_node_attributes(graph, "", "group")
    profile = from_networkx(graph).profile
    assert profile.user_groups.tolist() == [-1] * 4
    assert len(profile.graph.value_names) == 3


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"x": {"seconds": -1}}, "D002", "graph: seconds of node 'x' is -1, expected a number from 0 to 1e+12"),
        ({"x": {"seconds": "1.5"}}, "D002", "seconds of node 'x' is '1.5', expected a number"),
        ({"x": {"seconds": "1.5"}}, "D002", "declare seconds as a number (double or long), not as a text"),
        ({"x": {"seconds": 9e11}, "y": {"seconds": 9e11}}, "D002", "seconds add up to 1.8e+12, expected at most 1e+12"),
        ({"x": {"weights_bytes": True}}, "D002", "weights_bytes of node 'x' is True"),
        ({"x": {"output_bytes": float("nan")}}, "D002", "output_bytes of node 'x' is nan"),
        ({"x": {"topo_order": "first"}}, "D002", "topo_order of node 'x' is 'first'"),
        ({"x": {"seconds:cpu/1": []}}, "D002", "seconds:cpu/1 of node 'x' is []"),
        ({"x": {"backward": "false"}}, "D002", "backward of node 'x' is 'false', expected true or false"),
        ({"x": {"backward": 2}}, "D002", "backward of node 'x' is 2, expected true or false"),
        ({"x": {"group": []}}, "D002", "expected a group that is a number or a text, got []"),
        ({"x": {"weights": {"w": 9}}}, "D002", "weights_bytes of node 'x' is 8, expected 9, as its weights add up to"),
        ({"x": {"weights": {"w": -9}}}, "D002", "weights of node 'x' are {'w': -9}, expected bytes by name"),
        ({"x": {"weights": "{"}}, "D002", "not the weights of node 'x', by name: invalid JSON at line 1"),
        ({"x": {"weights": {"w": 8}}, "y": {"weights": {"w": 7}}}, "D002", "weight 'w' has 7 bytes at one node and 8"),
        ({"edge": {"bytes": -1}}, "D002", "bytes of edge 'x' -> 'y' is -1, expected a number"),
        ({"edge": {"order": None}}, "D002", "order of edge 'x' -> 'y' is None, expected a number"),
        ({"edge": {"tensor": []}}, "D002", "edge 'x' -> 'y' does not say what it carries"),
        ({"graph": {"latency_seconds": -1}}, "D002", "latency_seconds of the graph is -1, expected a number"),
        ({"graph": {"bytes_per_second": 0}}, "D002", "bytes_per_second of the graph is 0, expected a number above 0"),
        ({"graph": {"devices": None}}, "D002", "expected a graph that names devices, found none"),
        ({"graph": {"devices": []}}, "D002", "give `devices` and `max_memory`, or the graph"),
        ({"graph": {"devices": 3}}, "D002", 'the graph\'s devices are 3, expected a list such as [{"id": 0'),
        ({"graph": {"devices": "[{"}}, "D002", "not a list of devices such as"),
        ({"graph": {"devices": [{"id": 0}, {"id": 0}]}}, "D002", "two devices have the id 0"),
        ({"graph": {"devices": [{"id": 0, "memory_bytes": "big"}]}}, "D002", "memory_bytes of 0 is 'big'"),
    ],
)  # fmt: skip
def test_an_attribute_that_cannot_be_is_refused_by_name(change, code, words):
    graph = two_nodes()
    for place_of, data in change.items():
        {"edge": graph["x"]["y"], "graph": graph.graph}.get(place_of, graph.nodes.get(place_of)).update(data)
    with pytest.raises(InputError) as refused:
        from_networkx(graph)
    assert refused.value.code == code
    assert words in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_graph_with_a_cycle_or_without_directions_is_refused():
    graph = two_nodes()
    graph.add_edge("y", "x")
    with pytest.raises(InputError, match=r"D002.*a cycle through [xy], [xy]"):
        from_networkx(graph)
    graph = two_nodes()
    graph.add_edge("x", "x", bytes=1)
    with pytest.raises(InputError, match=r"D002.*a cycle through x"):
        from_networkx(graph)
    for odd in (networkx.Graph(graph), networkx.MultiGraph(graph)):
        with pytest.raises(InputError, match=r"D002.*expected directed edges, found an undirected graph"):
            from_networkx(odd)
    for odd in (5, None, {"x": {}}, SimpleNamespace()):
        with pytest.raises(InputError, match=rf"D002.*expected a networkx.DiGraph .*, got {type(odd).__name__}"):
            from_networkx(odd)


SIZED = ("weights_bytes", "workspace_bytes", "output_bytes")
ATTRIBUTES = ("seconds", "seconds:cpu/1", *SIZED, "topo_order", "weights", "group", "backward", "name", "label", "op")
SCALARS = st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=3))


@given(st.recursive(SCALARS, st.lists, max_leaves=3), st.sampled_from(ATTRIBUTES))
def test_any_attribute_of_a_node_is_read_or_refused(value, key):
    graph = two_nodes()
    graph.nodes["x"][key] = value
    built = read_or_refused(lambda: from_networkx(graph))
    assert built is None or np.isfinite(next(iter(built.profile.seconds.values()))).all()
