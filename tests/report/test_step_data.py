"""The data of reports about steps: timelines, memory, crossings, the chain, and layers."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from onnxplace.reports.charts import MAX_LINKS, MAX_POINTS, draw_memory, draw_step
from onnxplace.reports.layer_tree import MAX_CHILDREN, LayerNode, build_layer_tree, name_layer, name_segment
from onnxplace.reports.step_analysis import explain_step, list_crossings
from onnxplace.simulation.simulator import simulate
from tests.report.placed_graphs import draw_graph, place_at_random

KINDS = st.sampled_from(["layered", "wide", "chains", "two_tower"])


@settings(max_examples=25)
@given(
    nodes=st.integers(2, 60), seed=st.integers(0, 10_000), kind=KINDS, devices=st.integers(1, 4), shared=st.booleans()
)
@example(nodes=31, seed=0, kind="wide", devices=4, shared=False)  # transfers that fill gaps
def test_a_report_agrees_with_the_simulated_step(nodes, seed, kind, devices, shared):
    step = place_at_random(draw_graph(nodes, seed, devices, kind), seed, shared=shared)
    simulation, graph = step.simulation, step.graph
    timeline = draw_step(step, "from node costs", "")
    assert len(timeline.row) == len(graph) + len(simulation.transfers)
    assert timeline.end_seconds == pytest.approx(simulation.makespan_seconds)
    for span, reader in enumerate(timeline.reader):
        assert (reader >= 0) == (timeline.rows[timeline.row[span]].kind == "link")
        if reader >= 0:
            assert timeline.start_seconds[reader] >= timeline.finish_seconds[span] - 1e-12
            inputs = graph.inputs[graph.names.index(timeline.label[reader])].tolist()
            assert timeline.label[span] in [graph.value_names[value] for value in inputs]
    curves = draw_memory(step, simulation.weights_bytes.tolist())
    assert [curve.peak_bytes for curve in curves] == simulation.peak_bytes.tolist()
    for curve in curves:
        assert sum(item.bytes for item in curve.contents) + curve.other_bytes == curve.peak_bytes
    crossings = list_crossings(step)
    assert Counter(item.value for item in crossings for _ in range(item.times)) == Counter(
        graph.value_names[value] for value in simulation.transfers.value.tolist()
    )
    bound = explain_step(step, simulation.makespan_seconds, 0.0, 0.0)
    assert sum(part.seconds for part in bound.chain) == pytest.approx(simulation.makespan_seconds)
    assert not any(part.kind == "wait" for part in bound.chain)


def test_the_gain_of_a_crossing_is_the_difference_to_the_step_with_its_readers_moved():
    step = place_at_random(draw_graph(40, 5), 5)
    for crossing in list_crossings(step)[:5]:
        value = step.graph.value_names.index(crossing.value)
        readers, device = step.graph.readers[value], step.device.copy()
        source = step.device_names.index(crossing.source)
        device[readers] = source
        moved = simulate(step.graph, step.seconds, step.target, device, step.order)
        expected = moved.makespan_seconds - step.simulation.makespan_seconds
        assert crossing.gain_seconds == pytest.approx(expected, abs=1e-4 * moved.makespan_seconds)
        assert crossing.source in crossing.reason


def test_a_gain_is_unknown_where_the_times_on_the_other_device_are():
    step = place_at_random(draw_graph(20, 1), 1)
    step.seconds[:] = np.nan
    assert all(item.gain_seconds is None for item in list_crossings(step))


def test_devices_with_many_links_have_one_row_for_what_they_send():
    timeline = draw_step(place_at_random(draw_graph(400, 2, devices=8), 2), "predicted", "")
    links = [row for row in timeline.rows if row.kind == "link"]
    assert len({row.device for row in links}) == len(links) <= MAX_LINKS
    assert all(row.name.endswith("sends") for row in links)


def test_a_long_curve_keeps_its_peak():
    step = place_at_random(draw_graph(4000, 3, devices=1, kind="chains"), 3)
    (curve,) = draw_memory(step, step.simulation.weights_bytes.tolist())
    assert len(curve.bytes) <= MAX_POINTS + 2
    assert max(curve.bytes) == curve.peak_bytes == step.simulation.peak_bytes[0]


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (["m/block.0/q", "m/block.0/k"], "m/block.0: Add ×2"),
        (["m/block.0/q", "m/block.1/q"], "m/block.0, m/block.1: Add ×2"),
        (["m/block.0/q", "m/block.1/q", "m/block.2/q", "out"], "m/block.0 … m/block.2: Add ×4"),
        (["Add_0"], "Add"),
    ],
)
def test_a_segment_is_named_by_its_layers_and_operators(names, title):
    assert name_segment(name_nodes(*names)) == title


def test_operators_of_a_segment_are_named_by_their_cost():
    nodes = [LayerNode("a/x", "Add", 0, 1.0), LayerNode("a/y", "MatMul", 0, 9.0), *name_nodes("a/z")]
    nodes += [LayerNode("a/r", "Relu", 0, 0.1), LayerNode("a/t", "Tanh", 0, 0.1)]
    assert name_segment(nodes) == "a: MatMul, Add ×2, 2 more"


def name_nodes(*names: str) -> list[LayerNode]:
    return [LayerNode(name, "Add", 0, 1.0) for name in names]


def test_equal_layers_get_a_common_parent_and_single_children_are_joined():
    names = [f"/model/block.{layer}/{node}" for layer in range(3) for node in ("norm", "mlp")]
    nodes = [LayerNode(name, "Mul" if name.endswith("mlp") else "Add", 0, 1.0) for name in names]
    tree = build_layer_tree([*nodes, *name_nodes("/head/out")])
    assert tree.label[:3] == ("model", "block.0 … block.2: 3 equal layers", "block.0")
    assert tree.label[-1] == "head/out"
    assert [label for label, parent in zip(tree.label, tree.parent) if parent == 1] == ["block.0", "block.1", "block.2"]


def test_parts_of_split_operators_are_no_equal_layers():
    nodes = name_nodes(*(f"mlp/node_{number}/shard{part}" for number in range(2) for part in range(2)))
    assert build_layer_tree(nodes).label[:2] == ("mlp", "node_0")
    assert name_layer("head/node_1/shard0") == "head"


@settings(max_examples=50)
@given(st.lists(st.text("a/.1", min_size=1, max_size=8), min_size=1, max_size=300, unique=True))
def test_the_tree_has_each_node_once_and_parents_first(names):
    nodes = [LayerNode(name, f"op{index}", index % 3, 0.0) for index, name in enumerate(names)]
    tree = build_layer_tree(nodes)
    assert sorted(op for op in tree.op if op) == sorted(node.op for node in nodes)
    assert all(parent < index for index, parent in enumerate(tree.parent))
    assert max(Counter(tree.parent).values()) <= MAX_CHILDREN
