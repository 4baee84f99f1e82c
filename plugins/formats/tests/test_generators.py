"""Generated cost graphs: each family has its shape, its size, and costs that are the same for the same seed."""

from dataclasses import fields

import networkx
import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.driver.place import place_cost_graph
from onnxplace.facts import Source
from onnxplace.graph.op_graph import Csr, OpGraph
from onnxplace_formats.generators import MACHINE, MAX_TOTAL_BYTES, chains, layered, recurrent, wide
from tests.support.reference_simulator import connect_nodes

FAMILIES = sorted(GENERATORS)
PLACERS = ("single", "m-topo", "m-etf", "m-sct", "auto{seconds=0,proposals=200}", "multilevel{seconds=0,proposals=200}")


def depth(graph):
    """Return, per node, the number of nodes on the longest path that ends there."""
    result = np.ones(len(graph), dtype=int)
    for node in graph.order:
        result[node] = 1 + max((result[p] for p in graph.predecessors[node]), default=0)
    return result


def seconds(built):
    (only,) = built.profile.seconds.values()
    return only


def described(built):
    """Return everything a cost graph holds, in a form that compares."""
    graph = built.profile.graph
    parts = [getattr(graph, item.name) for item in fields(OpGraph)]
    parts = [(part.starts.tolist(), part.items.tolist()) if isinstance(part, Csr) else part for part in parts]
    parts = [part.tolist() if isinstance(part, np.ndarray) else part for part in parts]
    return [
        built.name,
        built.ids,
        *parts,
        seconds(built).tolist(),
        built.profile.user_groups.tolist(),
        built.target,
        built.link,
    ]


# ---------------------------------------------------------------------------------------------- all families


@given(st.sampled_from(FAMILIES), st.integers(1, 120), st.integers(0, 1000))
def test_a_graph_has_the_given_size_and_topological_numbers(family, nodes, seed):
    built = GENERATORS[family](nodes, seed)
    graph = built.profile.graph
    assert len(graph) == len(built.ids) == nodes
    assert (graph.producer[graph.inputs.items] < graph.inputs.rows).all()
    assert graph.order.tolist() == list(range(nodes))
    built.profile.check(built.state())


@given(st.sampled_from(FAMILIES), st.integers(1, 120), st.integers(0, 1000))
def test_one_seed_is_one_graph(family, nodes, seed):
    assert described(GENERATORS[family](nodes, seed)) == described(GENERATORS[family](nodes, seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_another_seed_is_another_graph(family):
    assert described(GENERATORS[family](300, 0)) != described(GENERATORS[family](300, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_costs_are_realistic(family):
    built = GENERATORS[family](3000, 0)
    graph, time = built.profile.graph, seconds(built)
    assert 5e-6 < time.mean() < 200e-6
    assert time.min() >= 1e-7
    assert time.max() <= 2e-3
    assert graph.value_bytes.min() < 1 << 10
    assert graph.value_bytes.max() > 1 << 20
    assert (graph.workspace_bytes > 0).any()
    assert graph.total_weight_bytes > 1 << 20
    assert (next(iter(built.profile.sources.values())) == Source.GIVEN).all()
    assert len(set(graph.names)) == len(set(graph.value_names)) == 3000


@pytest.mark.parametrize("family", FAMILIES)
def test_some_tensors_have_several_readers_but_in_chains(family):
    most = np.diff(GENERATORS[family](600, 0).profile.graph.readers.starts).max()
    assert most == 1 if family == "chains" else most >= 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_large_graph_still_fits_one_device(family):
    graph = GENERATORS[family](30_000, 0).profile.graph
    assert graph.total_weight_bytes <= 1.01 * MAX_TOTAL_BYTES
    assert graph.value_bytes.sum() <= 2.01 * MAX_TOTAL_BYTES < MACHINE["devices"][0]["memory_bytes"]


def test_the_machine_is_four_devices_and_the_link_of_the_published_measurements():
    built = layered(20, 0)
    assert [device.memory_bytes for device in built.target.devices] == [16 << 30] * 4
    assert built.link.latency_seconds == pytest.approx(134e-6)
    assert 1 / built.link.bytes_per_second == pytest.approx(0.0001754e-6)


@pytest.mark.parametrize("placer", PLACERS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("groups", ["none", "given+coplace"])
@pytest.mark.sampled(4)
def test_every_placer_places_every_family(family, placer, groups):
    result = place_cost_graph(GENERATORS[family](300, 0), placer, groups=groups)
    assert result.feasible
    assert result.makespan_seconds >= result.lower_bound_seconds > 0


# ---------------------------------------------------------------------------------------------- each family


@pytest.mark.parametrize("width", [4, 32])
def test_layers_have_the_given_width(width):
    level = depth(layered(1600, 0, width=width).profile.graph)
    assert np.bincount(level)[1:].mean() == pytest.approx(width, rel=0.05)


def test_a_wide_graph_has_few_levels():
    level = depth(wide(2000, 0).profile.graph)
    assert level.max() == 4
    assert np.bincount(level)[1:].min() > 400


def test_a_tensorflow_like_graph_has_variables_that_feed_compute_and_chains_of_tiny_operators():
    built = GENERATORS["tf_like"](3000, 0)
    graph, time = built.profile.graph, seconds(built)
    op = np.array(graph.ops)
    variable, tiny, compute = op == "Variable", op == "Reshape", op == "MatMul"
    reads, read_by = np.diff(graph.inputs.starts), np.diff(graph.readers.starts)
    assert variable.sum() == tiny.sum() == compute.sum() == 1000
    assert (reads[variable] == 0).all()
    assert set(read_by[variable]) == {1, 2}
    assert compute[graph.readers.items[np.isin(graph.readers.rows, np.flatnonzero(variable))]].all()
    assert (np.diff(graph.weights.starts) == variable).all()
    assert (graph.value_bytes[variable] == graph.weight_bytes).all()
    assert (reads[tiny] == 1).all()
    behind = graph.inputs.items[np.isin(graph.inputs.rows, np.flatnonzero(tiny))]
    assert 300 < tiny[behind].sum() < 800  # the others are the first of their chain
    assert time[compute].mean() > 5 * time[tiny].mean() > 5 * time[variable].mean()
    assert time.max() <= 150e-6


def test_a_variable_is_in_the_group_of_its_first_reader():
    built = GENERATORS["tf_like"](300, 0)
    graph, group = built.profile.graph, built.profile.user_groups
    variables = [node for node, op in enumerate(graph.ops) if op == "Variable"]
    assert all(group[node] == group[graph.readers[node].min()] >= 0 for node in variables)
    assert sorted(set(group.tolist()) - {-1}) == list(range(group.max() + 1))


def test_chains_touch_only_in_their_last_node():
    graph = chains(400, 0, count=5).profile.graph
    parts = connect_nodes(graph)
    parts.remove_node(399)
    pieces = [len(piece) for piece in networkx.connected_components(parts)]
    assert len(pieces) == len(graph.inputs[399]) == 5
    assert np.diff(graph.inputs.starts)[:399].max() == 1
    assert len(set(pieces)) > 1


def test_two_towers_touch_only_in_their_last_node():
    graph = GENERATORS["two_tower"](400, 0).profile.graph
    parts = connect_nodes(graph)
    parts.remove_node(399)
    assert sorted(len(piece) for piece in networkx.connected_components(parts)) == [199, 200]
    assert len(graph.inputs[399]) == 2
    assert set(graph.ops[:200]) != set(graph.ops[200:399])


def test_all_steps_of_a_recurrent_layer_share_its_weight_and_its_group():
    built = recurrent(25 * 40, 0, layers=4)
    graph, group = built.profile.graph, built.profile.user_groups
    assert len(graph.weight_bytes) == 5
    assert np.bincount(graph.weights.items).tolist() == [40] * 5
    assert np.bincount(group + 1).tolist() == [40, 240, 240, 240, 240]
    for weight in range(4):
        assert len(set(group[graph.weights.rows[graph.weights.items == weight]].tolist())) == 1


def test_a_recurrent_grid_runs_along_its_diagonal():
    """The cell of layer l at step t waits for l + t others."""
    built = recurrent(25 * 10, 0, layers=4)
    level = depth(built.profile.graph)
    gates = [[25 * step + 6 * layer for step in range(10)] for layer in range(4)]
    cells = level[np.array(gates)]
    assert (np.diff(cells, axis=0) > 0).all()
    assert (np.diff(cells, axis=1) > 0).all()
    assert cells[3, 0] == cells[0, 3]
