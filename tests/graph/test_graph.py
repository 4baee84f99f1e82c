"""The operator graph: packed lists, order, contraction and what it does to memory, views."""

from dataclasses import fields, replace

import networkx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.graph.lifetimes import sum_alive
from onnxplace.graph.op_graph import Csr, OpGraph, sum_by
from onnxplace.simulation.simulator import simulate
from onnxplace.testing.pass_contract import random_graph
from tests.support.reference_simulator import even_target, graph_of

thorough = settings(deadline=None, derandomize=True, max_examples=300)
seeds = st.integers(0, 2**32 - 1)
lists = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=8)


@st.composite
def graphs(draw):
    return random_graph(draw(seeds), draw(st.integers(0, 25)), views=0.4, shuffled=draw(st.booleans()))


@st.composite
def clustered(draw, convex: bool = True):
    """Draw a graph and a dense cluster id per node; stretches of the topological order, if they must be convex."""
    graph = draw(graphs().filter(len))
    random = np.random.default_rng(draw(seeds))
    if convex:
        cluster = np.empty(len(graph), dtype=np.int64)
        cluster[graph.order] = np.cumsum(random.random(len(graph)) < draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])))
    else:
        cluster = random.integers(0, len(graph), len(graph))
    _, dense = np.unique(random.permutation(cluster.max() + 1)[cluster], return_inverse=True)
    return graph, dense.astype(np.int32)


def plain(csr: Csr) -> list[list[int]]:
    return [csr[row].tolist() for row in range(len(csr))]


def value(graph: OpGraph, name: str) -> int:
    return graph.value_names.index(name)


# Packed lists


@given(lists)
def test_packed_lists_unpack_to_themselves(rows):
    packed = Csr.of(rows)
    assert len(packed) == len(rows)
    assert plain(packed) == rows
    assert packed.rows.tolist() == [index for index, row in enumerate(rows) for _ in row]
    assert (packed.starts.dtype, packed.items.dtype) == (np.int64, np.int32)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_grouped_lists_keep_the_order_and_the_first_of_equal_items(pairs):
    expected = [list(dict.fromkeys(item for k, item in pairs if k == key)) for key in range(7)]
    keys, items = (np.array([pair[i] for pair in pairs], dtype=np.int32) for i in range(2))
    assert plain(Csr.grouped(keys, items, 7)) == expected


@pytest.mark.parametrize("key", [-1, 3])
def test_a_key_without_a_list_is_refused(key):
    with pytest.raises(ValueError, match=f"expected keys from 0 to 2, got {key} to {key}"):
        Csr.grouped(np.array([key], dtype=np.int32), np.array([0], dtype=np.int32), 3)


def test_sums_by_key_have_an_entry_for_each_key():
    sums = sum_by(np.array([2, 0, 2]), np.array([1.0, 5.0, 2.5]), 4)
    assert sums.tolist() == [5.0, 0.0, 3.5, 0.0]


# Neighbours and order


@thorough
@given(graphs())
def test_neighbours_are_those_that_the_values_connect_each_once(graph):
    edges = {(int(graph.producer[v]), n) for n in range(len(graph)) for v in graph.inputs[n] if graph.producer[v] >= 0}
    assert sorted((p, n) for n in range(len(graph)) for p in plain(graph.predecessors)[n]) == sorted(edges)
    assert sorted((n, s) for n in range(len(graph)) for s in plain(graph.successors)[n]) == sorted(edges)
    assert sorted(v for row in plain(graph.outputs) for v in row) == np.flatnonzero(graph.producer >= 0).tolist()
    for v in range(len(graph.value_names)):
        assert sorted(graph.readers[v]) == [n for n in range(len(graph)) if v in graph.inputs[n]]


@thorough
@given(graphs())
def test_the_topological_order_always_takes_the_lowest_node_that_is_ready(graph):
    done: list[int] = []
    for _ in range(len(graph)):
        ready = [n for n in range(len(graph)) if n not in done and set(plain(graph.predecessors)[n]) <= set(done)]
        done.append(min(ready))
    assert graph.order.tolist() == done


def test_the_topological_order_of_nodes_that_are_in_order_is_their_own():
    assert random_graph(5, 200).order.tolist() == list(range(200))


def cyclic() -> OpGraph:
    """`first` leads into the loop b -> c -> d -> b, which leads to `last`."""
    reads = {"first": [], "last": ["d"], "b": ["first", "d"], "c": ["b"], "d": ["c"]}
    return graph_of(reads)


def test_a_cycle_is_an_error_that_names_its_nodes_in_order():
    with pytest.raises(ValueError, match="the graph has a cycle through ") as refusal:
        _ = cyclic().order
    names = str(refusal.value).rpartition("through ")[2].split(", ")
    assert sorted(names) == ["b", "c", "d"]
    assert "".join(names * 2).find("bcd") >= 0


def test_a_node_that_reads_its_own_value_is_a_cycle():
    with pytest.raises(ValueError, match=r"a cycle through a$"):
        _ = graph_of({"a": ["a"]}).order


@thorough
@given(clustered(convex=False))
def test_clusters_that_are_not_convex_make_a_graph_without_an_order(case):
    graph, cluster = case
    coarse = graph.contract(cluster)
    edges = networkx.DiGraph()
    edges.add_edges_from(
        (int(cluster[p]), int(cluster[n]))
        for n in range(len(graph))
        for p in graph.predecessors[n]
        if cluster[p] != cluster[n]
    )
    if networkx.is_directed_acyclic_graph(edges):
        assert sorted(coarse.order.tolist()) == list(range(len(coarse)))
    else:
        with pytest.raises(ValueError, match="cycle") as refusal:
            _ = coarse.order
        loop = [coarse.names.index(name) for name in str(refusal.value).rpartition("through ")[2].split(", ")]
        assert all(edges.has_edge(a, b) for a, b in zip(loop, [*loop[1:], loop[0]]))


# Views


def test_the_owner_of_a_views_memory_is_found_through_other_views():
    graph = graph_of({"a": [], "v": ["a"], "w": ["v"], "b": []}, views={"v": "a", "w": "v"})
    assert graph.alias_roots.tolist() == [0, 0, 0, 3]


@thorough
@given(graphs())
def test_owners_of_memory_own_themselves(graph):
    roots = graph.alias_roots
    assert (roots[roots] == roots).all()
    assert (graph.alias[roots] == -1).all()
    assert ((roots == np.arange(len(roots))) == (graph.alias < 0)).all()


# Contraction


def equal(one: OpGraph, other: OpGraph) -> bool:
    def flat(graph: OpGraph) -> list[object]:
        items = [getattr(graph, item.name) for item in fields(graph)]
        return [plain(i) if isinstance(i, Csr) else i.tolist() if isinstance(i, np.ndarray) else i for i in items]

    return flat(one) == flat(other)


@thorough
@given(graphs())
def test_a_cluster_for_each_node_changes_at_most_unread_values(graph):
    coarse = graph.contract(np.arange(len(graph), dtype=np.int32))
    assert coarse.names == graph.names
    assert coarse.ops == graph.ops
    assert [[coarse.value_names[v] for v in coarse.inputs[n]] for n in range(len(graph))] == [
        [graph.value_names[v] for v in graph.inputs[n]] for n in range(len(graph))
    ]
    assert plain(coarse.weights) == plain(graph.weights)


@thorough
@given(clustered())
def test_contracting_keeps_weights_outputs_and_whatever_crosses(case):
    graph, cluster = case
    coarse = graph.contract(cluster)
    assert coarse.total_weight_bytes == graph.total_weight_bytes
    assert len(coarse) == cluster.max() + 1
    for c in range(len(coarse)):
        nodes = np.flatnonzero(cluster == c)
        assert set(coarse.weights[c]) == {w for n in nodes for w in graph.weights[n]}
        read = {graph.value_names[v] for n in nodes for v in graph.inputs[n]
                if graph.producer[v] < 0 or cluster[graph.producer[v]] != c}  # fmt: skip
        assert {coarse.value_names[v] for v in coarse.inputs[c]} == read
        assert {coarse.value_names[v] for v in coarse.outputs[c]} == {
            graph.value_names[v]
            for n in nodes
            for v in graph.outputs[n]
            if graph.is_output[v] or (cluster[graph.readers[v]] != c).any()
        }
    assert sorted(np.array(coarse.value_names)[coarse.is_output]) == sorted(
        np.array(graph.value_names)[graph.is_output]
    )
    assert (coarse.value_bytes == [graph.value_bytes[value(graph, name)] for name in coarse.value_names]).all()


@thorough
@given(clustered())
def test_contracting_is_deterministic_and_leaves_its_input_unchanged(case):
    graph, cluster = case
    remaining = replace(graph, value_bytes=graph.value_bytes.copy(), workspace_bytes=graph.workspace_bytes.copy())
    assert equal(graph.contract(cluster), graph.contract(cluster))
    assert equal(graph, remaining)


def brute_force_peak(graph: OpGraph, cluster: np.ndarray, own: int) -> int:
    """Run one cluster node by node and add up what is held: workspace, and buffers that no view carries outside."""
    order = [n for n in graph.order.tolist() if cluster[n] == own]

    def leaves(v: int) -> bool:
        return bool(graph.is_output[v] or (cluster[graph.readers[v]] != own).any())

    peak = 0
    for now, node in enumerate(order):
        stored = int(graph.workspace_bytes[node])
        for root in np.flatnonzero(graph.alias < 0).tolist():
            built = int(graph.producer[root])
            family = [v for v in range(len(graph.value_names)) if graph.alias_roots[v] == root]
            # Values that leave are counted with the contracted node's outputs, and so is a buffer they look into.
            if built < 0 or cluster[built] != own or any(leaves(v) for v in family):
                continue
            uses = [built, *(int(n) for v in family for n in graph.readers[v])]
            if order.index(built) <= now <= max(order.index(n) for n in uses):
                stored += int(graph.value_bytes[root])
        peak = max(peak, stored)
    return peak


@thorough
@given(clustered())
def test_the_inner_peak_of_a_cluster_is_what_adding_up_its_live_buffers_gives(case):
    graph, cluster = case
    expected = [brute_force_peak(graph, cluster, c) for c in range(int(cluster.max()) + 1)]
    assert graph.contract(cluster).workspace_bytes.tolist() == expected


@thorough
@given(clustered())
def test_contracting_hides_no_memory_of_a_graph_that_runs_cluster_by_cluster(case):
    graph, cluster = case
    coarse, target = graph.contract(cluster), even_target(1)
    rank, position = np.empty(len(coarse)), np.empty(len(graph))
    rank[coarse.order], position[graph.order] = np.arange(len(coarse)), np.arange(len(graph))
    order = np.lexsort((position, rank[cluster])).astype(np.int32)
    home = np.zeros(len(graph), dtype=np.int32)
    fine = simulate(graph, np.ones((1, len(graph))), target, home, order)
    whole = simulate(coarse, np.ones((1, len(coarse))), target, home[: len(coarse)], coarse.order)
    assert fine.peak_bytes[0] <= whole.peak_bytes[0]


def test_the_inner_peak_of_a_chain_holds_two_neighbours_and_the_workspace_of_the_later():
    graph = graph_of({"a": [], "b": ["a"], "c": ["b"]}, sizes={"a": 10, "b": 20, "c": 40}, workspace={"b": 5})
    inner = graph.contract(np.zeros(3, dtype=np.int32))
    assert inner.workspace_bytes.tolist() == [20 + 40]
    assert len(inner.value_names) == 0
    remaining = replace(graph, is_output=np.array([False, False, True])).contract(np.zeros(3, dtype=np.int32))
    assert remaining.workspace_bytes.tolist() == [10 + 20 + 5]
    assert remaining.value_names == ("c",)


def test_memory_that_leaves_its_cluster_as_a_view_is_counted_and_freed_once():
    """`a` is read inside the first cluster only, but its memory leaves it as the view `v`."""
    reads = {"a": [], "v": ["a"], "b": [], "c": ["b", "v"], "d": ["b", "c"], "e": ["d"]}
    graph = graph_of(reads, sizes=dict.fromkeys(reads, 10), views={"v": "a"}, outputs=["e"])
    coarse = graph.contract(np.array([0, 0, 1, 1, 1, 1], dtype=np.int32))
    assert coarse.value_names == ("v", "e")
    assert coarse.workspace_bytes.tolist() == [0, 30]


def test_a_view_of_a_view_that_vanished_still_shares_the_memory_that_entered_the_cluster():
    reads = {"a": [], "v": ["a"], "w": ["v"], "b": ["w"]}
    graph = graph_of(reads, views={"v": "a", "w": "v"})
    coarse = graph.contract(np.array([0, 1, 1, 2], dtype=np.int32))
    assert coarse.value_names == ("a", "w")
    assert coarse.alias.tolist() == [-1, 0]


def test_views_of_one_value_that_vanished_share_one_memory():
    reads = {"a": [], "v": ["a"], "w": ["a"], "b": ["v", "w"]}
    graph = graph_of(reads, views={"v": "a", "w": "a"})
    coarse = graph.contract(np.array([0, 0, 0, 1], dtype=np.int32))
    assert coarse.value_names == ("v", "w")
    assert coarse.alias.tolist() == [-1, 0]


def test_a_contracted_node_is_named_after_its_first_node_and_how_many_more_there_are():
    coarse = graph_of({"a": [], "b": ["a"], "c": ["b"]}).contract(np.array([0, 0, 1], dtype=np.int32))
    assert coarse.names == ("a(+1)", "c")
    assert coarse.ops == ("fused", "Op")


def test_a_graph_of_inputs_only_contracts_to_itself():
    coarse = graph_of({}, fed=["x"]).contract(np.zeros(0, dtype=np.int32))
    assert (len(coarse), coarse.value_names) == (0, ("x",))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 9)), max_size=8))
def test_sums_of_what_is_alive_are_those_of_each_position(items):
    begin, length, size = np.array(items, dtype=np.int64).reshape(-1, 3).T
    end = np.minimum(begin + length, 7)
    expected = [int(size[(begin <= position) & (position < end)].sum()) for position in range(7)]
    assert sum_alive(begin, end, size, 7).tolist() == expected
