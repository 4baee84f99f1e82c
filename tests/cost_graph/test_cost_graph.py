"""Cost graphs without ONNX: read, checked, placed, scored."""

import gzip
import json

import networkx
import numpy as np
import pytest

from onnxplace import InfeasibleError, InputError
from onnxplace.cost_graph.cost_graphs import parse_cost_graph, read_cost_graph
from onnxplace.cost_graph.part_functions import from_networkx, to_networkx
from onnxplace.driver.place import evaluate_placement, place_cost_graph, replace_devices
from onnxplace.facts import Placement
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.target.target import Device, Target


def fork(**changes):
    """A source, two heavy branches of 100 us, a join; 10 us and 1 ns per byte between two devices."""
    data = {
        "name": "fork",
        "devices": [{"id": "a", "memory_bytes": 1000}, {"id": "b", "memory_bytes": 1000}],
        "comm": {"coef_us_per_byte": 0.001, "intercept_us": 10},
        "nodes": [
            {"id": i, "name": f"n{i}", "compute_time_us": time, "memory_bytes": 100, "output_bytes": 10}
            for i, time in enumerate((1, 100, 100, 1))
        ],
        "edges": [
            {"src": 0, "dst": 1, "bytes": 10, "tensor": "t"},
            {"src": 0, "dst": 2, "bytes": 10, "tensor": "t"},
            {"src": 1, "dst": 3, "bytes": 10, "tensor": "u"},
            {"src": 2, "dst": 3, "bytes": 10, "tensor": "v"},
        ],
    }
    return {**data, **changes}


def test_edges_with_one_source_and_one_tensor_are_one_value():
    graph = parse_cost_graph(fork()).profile.graph
    assert graph.value_names == ("t", "u", "v", "n3:unread")
    assert graph.readers[0].tolist() == [1, 2]


def test_several_tensors_may_share_an_edge_and_unread_output_counts_with_its_node():
    edges = [{"src": 0, "dst": 1, "bytes": 9, "tensors": [{"name": "x", "bytes": 4}, {"name": "y", "bytes": 5}]}]
    graph = parse_cost_graph(fork(edges=edges)).profile.graph
    sizes = dict(zip(graph.value_names, graph.value_bytes.tolist()))
    assert sizes == {"x": 4, "y": 5, "n0:unread": 1, "n1:unread": 10, "n2:unread": 10, "n3:unread": 10}


@pytest.mark.parametrize("placer", ["m-etf", "m-sct"])
def test_two_heavy_branches_go_to_two_devices(placer):
    result = place_cost_graph(parse_cost_graph(fork()), placer, groups="none")
    assert result.placement["1"] != result.placement["2"]
    # 1, a transfer of 10.01, 100, and the join beside the later branch, where the other result has long arrived
    assert result.makespan_seconds == pytest.approx(112.01e-6)
    assert result.lower_bound_seconds == pytest.approx(112.01e-6)
    assert result.feasible


def test_groups_of_the_graph_stay_together_and_can_be_ignored():
    data = fork()
    for node in data["nodes"]:
        node["group"] = "all" if node["id"] in (1, 2) else None
    together = place_cost_graph(parse_cost_graph(data), groups="given").placement
    assert together["1"] == together["2"]
    apart = place_cost_graph(parse_cost_graph(data), groups="none").placement
    assert apart["1"] != apart["2"]


def test_a_placement_is_scored_as_it_is_whether_it_fits_or_not():
    graph = replace_devices(parse_cost_graph(fork()), None, 250)
    result = evaluate_placement(graph, dict.fromkeys("0123", "a"))
    assert result.makespan_seconds == pytest.approx(202e-6)
    assert not result.feasible
    assert result.peak_bytes.tolist() == [430, 0]


def test_scoring_what_was_placed_gives_the_same_step():
    graph = parse_cost_graph(fork())
    result = place_cost_graph(graph, groups="none")
    assert evaluate_placement(graph, result.placement).makespan_seconds == pytest.approx(result.makespan_seconds)


@pytest.mark.parametrize("placer", ["single", "m-topo", "m-etf", "m-sct"])
def test_a_graph_that_fits_nowhere_is_infeasible_and_the_message_says_what_is_missing(placer):
    with pytest.raises(InfeasibleError, match=r"cuda:0 lacks \d+ bytes"):
        place_cost_graph(replace_devices(parse_cost_graph(fork()), 1, 250), placer, groups="none")


def test_topo_order_breaks_ties_whatever_the_order_in_the_file():
    data = fork()
    for node in data["nodes"]:
        node["topo_order"] = node["id"]
    shuffled = {**data, "nodes": [data["nodes"][i] for i in (2, 0, 3, 1)]}
    assert place_cost_graph(parse_cost_graph(data)).placement == place_cost_graph(parse_cost_graph(shuffled)).placement


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": [{"id": 0}, {"id": 0}], "edges": []}, "two nodes have the id 0"),
        ({"edges": [{"src": 0, "dst": 9, "bytes": 1}]}, "names node 9, expected the id of a node"),
        ({"edges": [{"src": 0, "dst": 1, "bytes": -1}]}, r"bytes of '0->1' is -1"),
        ({"nodes": [{"id": 0, "compute_time_us": float("nan")}], "edges": []}, "compute_time_us of 0 is nan"),
        ({"edges": [{"src": 0, "dst": 1}, {"src": 1, "dst": 0}]}, "a cycle through n[01], n[01]"),
        ({"devices": []}, "the list of devices is empty"),
        ({"nodes": 3}, "no list of nodes"),
        ({"nodes": [{"name": "x"}], "edges": []}, "one of the nodes has no id"),
        ({"nodes": [{"id": [1]}], "edges": []}, r"expected an id that is a number or a text, got \[1\]"),
        ({"nodes": [{"id": 0, "group": {}}], "edges": []}, "expected a group that is a number or a text, got {}"),
        ({"nodes": [{"id": 0, "topo_order": "x"}], "edges": []}, "topo_order of 0 is 'x'"),
        (
            {"nodes": [{"id": 0, "memory_bytes": 10**400}], "edges": []},
            r"memory_bytes of 0 is 10*\.\.\., expected a number from 0 to 1e\+18",
        ),
        ({"devices": [{"id": 0}, {"id": 0}]}, "two devices have the id 0"),
        ({"edges": [{"src": {}, "dst": 1}]}, "names node {}, expected the id of a node"),
        ({"edges": [{"src": 0, "dst": 1, "tensors": 5}]}, "edge 0 -> 1 does not say what it carries"),
        ({"edges": [{"src": 0, "dst": 1, "tensors": [5]}]}, "edge 0 -> 1 does not say what it carries"),
        ({"edges": [{"src": 0, "dst": 1, "tensor": [5]}]}, "edge 0 -> 1 does not say what it carries"),
        ({"comm": 3}, "expected comm to be an object, got 3"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused_by_name(changes, words):
    with pytest.raises(InputError, match=words) as refused:
        parse_cost_graph(fork(**changes))
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gzip.compress(json.dumps(fork()).encode(), mtime=0)[:60], "cut off or damaged"),
        (gzip.compress(json.dumps(fork()).encode(), mtime=0)[:30] + bytes(60), "cut off or damaged"),
        (json.dumps(fork()).encode()[:60], "invalid JSON at line 1"),
        (b'{"nodes": [{"id": 7, "temp_bytes": 1, "temp_bytes": 2}]}', "'temp_bytes' is given twice.*whose id is 7"),
        (b"\xff\xfe\xff", "binary"),
        (b"", "empty"),
        (b"[" * 100_000, "nested too deeply"),
    ],
    ids=["cut gzip", "damaged gzip", "cut", "twice", "binary", "empty", "nested"],
)
def test_a_missing_file_is_an_error(tmp_path, data, words):
    (tmp_path / "graph.json").write_bytes(data)
    with pytest.raises(InputError, match=words) as refused:
        read_cost_graph(tmp_path / "graph.json")
    assert refused.value.code == "D001"


def test_a_gzipped_file_is_known_by_its_content(tmp_path):
    (tmp_path / "graph.json").write_bytes(gzip.compress(json.dumps(fork()).encode()))
    (tmp_path / "plain.json.gz").write_text(json.dumps(fork()))
    result = [read_cost_graph(tmp_path / name) for name in ("graph.json", "plain.json.gz")]
    assert [graph.ids for graph in result] == [(0, 1, 2, 3)] * 2


def test_nodes_without_a_compute_time_are_counted_and_one_is_named():
    assert parse_cost_graph(fork()).notes == ()
    data = fork()
    data["nodes"][2]["compute_us"] = data["nodes"][2].pop("compute_time_us")
    del data["nodes"][3]["compute_time_us"]
    (note,) = parse_cost_graph(data).notes
    assert (note.code, note.where) == ("C002", "fork")
    assert "2 of 4 nodes" in note.message
    assert "'n2'" in note.message
    assert "'compute_us'" in note.hint
    assert note in place_cost_graph(parse_cost_graph(data), "m-etf").diagnostics
    assert (
        note
        in evaluate_placement(replace_devices(parse_cost_graph(data), 2, None), dict.fromkeys("0123", "a")).diagnostics
    )


def test_the_command_places_and_scores_and_prints_one_object(run_cli, tmp_path):
    (tmp_path / "graph.json.gz").write_bytes(gzip.compress(json.dumps(fork()).encode()))
    ran = run_cli("place", tmp_path / "graph.json.gz", "--placer", "m-sct", "--groups", "none", "--json")
    said = json.loads(ran.out)
    assert ran.code == 0
    assert said.keys() == {
        *("placer", "makespan_seconds", "lower_bound_seconds", "feasible"),
        *("peak_bytes", "seconds", "placement", "passes", "diagnostics"),
    }
    (tmp_path / "placed.json").write_text(ran.out)
    again = run_cli("place", tmp_path / "graph.json.gz", "--placement", tmp_path / "placed.json", "--json")
    assert json.loads(again.out)["makespan_seconds"] == pytest.approx(said["makespan_seconds"])
    assert run_cli("place", tmp_path / "graph.json.gz", "--links", "sequential", "--devices", 3).code == 0
    assert run_cli("place", tmp_path / "graph.json.gz", "--max-memory", "50").code == 3
    assert run_cli("place", tmp_path / "none.json").code == 2
    (tmp_path / "placed.json").write_text('{"0": "a"}')
    missing = run_cli("place", tmp_path / "graph.json.gz", "--placement", tmp_path / "placed.json")
    assert missing.code == 2
    assert "no device for 3 nodes" in missing.err


def test_a_networkx_graph_goes_in_and_comes_out():
    given = networkx.DiGraph()
    for name, seconds in (("x", 1.0), ("y", 5.0), ("z", 5.0)):
        given.add_node(name, seconds=seconds, weights_bytes=8)
    given.add_edge("x", "y", bytes=4, tensor="t")
    given.add_edge("x", "z", bytes=4, tensor="t")
    graph = from_networkx(given, Target((Device("cpu:0", 100), Device("cpu:1", 100))))
    state, _ = Pipeline.parse("m-etf").run(graph.state())
    assert sorted(np.bincount(state[Placement].device).tolist()) == [1, 2]
    assert networkx.is_isomorphic(to_networkx(graph), given)


def test_a_file_that_is_no_cost_graph_is_refused(tmp_path):
    (tmp_path / "graph.json.gz").write_bytes(b"no gzip")
    with pytest.raises(InputError, match="not a cost graph"):
        read_cost_graph(tmp_path / "graph.json.gz")


def training_step(layers: int) -> dict[str, object]:
    """Layers of 100 bytes whose outputs stay until the backward pass, which is to run where the forward pass ran."""
    nodes, edges = [], []
    for layer in range(2 * layers):
        group = f"layer{min(layer, 2 * layers - 1 - layer)}"
        nodes.append({"id": layer, "compute_time_us": 10, "output_bytes": 100, "temp_bytes": 50, "group": group})
        if layer:
            edges.append({"src": layer - 1, "dst": layer, "bytes": 100, "tensor": f"t{layer - 1}"})
        if layer >= layers:
            forward = 2 * layers - 1 - layer
            edges.append({"src": forward, "dst": layer, "bytes": 100, "tensor": f"t{forward}"})
    comm = {"coef_us_per_byte": 0.01, "intercept_us": 1}
    return {"nodes": nodes, "edges": edges, "comm": comm, "devices": [{"id": i, "memory_bytes": 900} for i in range(3)]}


@pytest.mark.parametrize("placer", ["m-etf", "m-sct"])
def test_a_device_keeps_room_for_the_backward_nodes_of_the_groups_it_has_taken_on(placer: str):
    result = place_cost_graph(parse_cost_graph(training_step(12)), placer, groups="given")
    assert result.feasible
    assert len(set(result.placement.values())) > 1


def test_idle_devices_are_named_by_their_ids_and_strict_refuses_them(run_cli, tmp_path):
    (tmp_path / "graph.json").write_text(json.dumps(fork()))
    (tmp_path / "mine.json").write_text(json.dumps(dict.fromkeys("0123", "a")))
    given = ("--placement", tmp_path / "mine.json")
    for options, placer in ((("--placer", "single"), "single"), (given, "given")):
        ran = run_cli("place", tmp_path / "graph.json", *options)
        assert ran.code == 0
        said = f"this device, 'b' in the graph, gets no work from placer '{placer}'"
        assert f"note[P010] cuda:1: {said}" in ran.err
        strict = run_cli("place", tmp_path / "graph.json", *options, "--strict", "--json")
        error = json.loads(strict.out)["error"]
        assert (strict.code, error["code"], error["where"]) == (3, "P010", "cuda:1")
        assert "ask for fewer with --devices N" in error["hint"]
    both = run_cli("place", tmp_path / "graph.json", "--placer", "m-etf", "--groups", "none", "--strict")
    assert both.code == 0
    assert "P010" not in both.err


def test_options_that_say_how_to_place_do_not_go_with_a_placement(run_cli, tmp_path):
    (tmp_path / "graph.json").write_text(json.dumps(fork()))
    (tmp_path / "mine.json").write_text(json.dumps(dict.fromkeys("0123", "a")))
    ran = run_cli("place", tmp_path / "graph.json", "--placement", tmp_path / "mine.json", "--seed", 0, "--fuse")
    assert ran.code == 2
    assert "error[U042]" in ran.err
    assert all(option in ran.err for option in ("--seed", "--fuse"))


def test_a_placement_that_search_did_not_improve_is_not_called_improved():
    data = fork(edges=[{"src": i, "dst": i + 1, "bytes": 10**6} for i in range(3)])
    graph = replace_devices(parse_cost_graph(data), None, 10**9)
    (note,) = [note for note in place_cost_graph(graph, budget_seconds=0.1).diagnostics if note.code == "P040"]
    remaining = note.message.partition(";")[0]
    assert remaining.startswith("kept cuda:0:")
    assert "improved" not in remaining
    assert "cuda:0" not in note.message.removeprefix(remaining)


def test_joined_groups_are_judged_by_the_bound_of_the_graph_that_was_given(run_cli, tmp_path):
    # Both branches have one reader, so m-ETF joins them with it, and one device computes all.
    (tmp_path / "graph.json").write_text(json.dumps(fork()))
    joined = run_cli("place", tmp_path / "graph.json", "--placer", "m-etf")
    apart = place_cost_graph(parse_cost_graph(fork()), "m-etf", groups="given")
    result = place_cost_graph(parse_cost_graph(fork()), "m-etf")
    assert result.makespan_seconds > 1.1 * apart.makespan_seconds
    assert result.lower_bound_seconds <= apart.lower_bound_seconds <= apart.makespan_seconds
    assert "note[P021] m-etf: the groups of nodes that m-etf joined cost " in joined.err
    assert "0.0% above a bound" not in joined.out
    (note,) = [note for note in result.diagnostics if note.code == "P021"]
    assert note.hint == "--groups given"
    # What the user asked for is not compared.
    for options in ({"groups": "given+coplace"}, {"groups": "none"}):
        notes = place_cost_graph(parse_cost_graph(fork()), "m-etf", **options).diagnostics
        assert not [note for note in notes if note.code == "P021"]
