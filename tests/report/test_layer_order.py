"""The order of layers in reports: whichever are folded, no edge between boxes has to run backwards."""

from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import example, given, settings, strategies as st

from onnxplace.reports.layer_tree import LayerNode, build_layer_tree, divide_forward, sort_forward
from onnxplace.reports.page_records import LayerTree

Edges = set[tuple[int, int]]
PATHS = st.sampled_from(["", "a", "a.b", "a.b", "c.0", "c.0.d", "c.1", "c.1.d", "c.2"])


@st.composite
def draw_edges(draw: Callable[..., int], count: int) -> Edges:
    """Return edges without a circle between items, whose numbers do not tell their order."""
    order = draw(st.permutations(range(count)))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    chosen = draw(st.lists(pairs, max_size=3 * count))
    return {(order[min(pair)], order[max(pair)]) for pair in chosen if pair[0] != pair[1]}


def has_circle(pairs: set[tuple[object, object]]) -> bool:
    sorter: TopologicalSorter[object] = TopologicalSorter()
    for source, reader in pairs:
        sorter.add(reader, source)
    try:
        sorter.prepare()
    except CycleError:
        return True
    return False


def fold(tree: LayerTree, is_open: list[bool]) -> dict[int, int]:
    """Return the box of each node: the outermost layer around it that is not open."""
    box: dict[int, int] = {}
    for row, parent in enumerate(tree.parent):
        is_inside = parent >= 0 and (box[parent] != parent or not is_open[parent % len(is_open)])
        box[row] = box[parent] if is_inside else row
    return {node: box[row] for row, node in enumerate(tree.node) if node >= 0}


@settings(max_examples=100)
@given(data=st.data(), paths=st.lists(PATHS, min_size=1, max_size=40))
def test_no_edge_runs_backwards_whichever_layers_are_folded(data, paths):
    edges = data.draw(draw_edges(len(paths)))
    nodes = [LayerNode(f"{path}.n_{i}".strip("."), f"Op{i % 2}", 0, 0.0, i) for i, path in enumerate(paths)]
    tree = build_layer_tree(nodes, edges)
    row = {node: row for row, node in enumerate(tree.node) if node >= 0}
    assert sorted(row) == list(range(len(nodes)))
    # The rows of a layer follow each other, so this holds for all ways of folding.
    assert all(row[source] < row[reader] for source, reader in edges)
    box = fold(tree, data.draw(st.lists(st.booleans(), min_size=1, max_size=20)))
    assert not has_circle({(box[source], box[reader]) for source, reader in edges if box[source] != box[reader]})


@settings(max_examples=100)
@given(data=st.data(), keys=st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_keys_are_whole_where_they_are_not_between_circles(data, keys):
    edges = data.draw(draw_edges(len(keys)))
    items = sort_forward(len(keys), edges)
    assert sorted(items) == list(range(len(keys)))
    runs = divide_forward(items, [keys[item] for item in items], edges)
    home = {item: index for index, run in enumerate(runs) for item in run}
    assert sorted(home) == sorted(items)
    assert all(len({keys[item] for item in run}) == 1 for run in runs)
    assert all(home[source] <= home[reader] for source, reader in edges)
    if not has_circle({(keys[a], keys[b]) for a, b in edges if keys[a] != keys[b]}):
        assert len(runs) == len(set(keys))


def test_a_layer_that_values_come_back_to_is_divided_there():
    names = ["norm.a", "norm.b", "mlp.a", "mlp.b", "norm.c", "norm.d", "head"]
    nodes = [LayerNode(name, "Add", 0, 0.0, index) for index, name in enumerate(names)]
    tree = build_layer_tree(nodes, {(index, index + 1) for index in range(len(names) - 1)})
    assert tree.label == ("norm", "a", "b", "mlp", "a", "b", "norm (part 2)", "c", "d", "head")


def test_residual_edges_divide_nothing():
    names = ["embed", *(f"layers.{layer}.{node}" for layer in range(3) for node in ("norm.a", "norm.b", "add"))]
    ops = {"a": "Mul", "b": "Sqrt", "d": "Add"}
    nodes = [LayerNode(name, ops[name[-1]], 0, 0.0, index) for index, name in enumerate(names)]
    edges = {(index, index + 1) for index in range(9)} | {(index, index + 3) for index in (0, 3, 6)}
    tree = build_layer_tree(nodes, edges)
    assert tree.label[:4] == ("embed", "layers.0 … layers.2: 3 equal layers", "layers.0", "norm")


@pytest.mark.parametrize("edges", [{(0, 1), (1, 0)}, {(0, 0)}])
def test_nodes_that_read_each_other_are_all_shown(edges):
    """No bundle that runs has them, but a manifest may be damaged."""
    nodes = [LayerNode(name, "Add", 0, 0.0, index) for index, name in enumerate(("a.x", "b.x", "a.y"))]
    assert sorted(node for node in build_layer_tree(nodes, edges).node if node >= 0) == [0, 1, 2]


@example(count=0)
@given(count=st.integers(0, 5))
def test_items_without_edges_keep_their_order(count):
    assert sort_forward(count, set()) == list(range(count))
