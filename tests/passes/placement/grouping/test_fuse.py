"""fuse: its contractions, on small graphs by hand, on random ones by a plain account, and on large ones."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from networkx import is_connected, number_connected_components

from onnxplace.facts import Clusters, Groups, Profile
from onnxplace.graph.op_graph import Csr, OpGraph
from onnxplace.passes.fuse import contract_groups
from onnxplace.pipeline.pipeline import make_pass, run_pass
from onnxplace.problem import placement_problem
from onnxplace.testing.pass_contract import check_pass, random_state
from tests.support.reference_simulator import connect_nodes, graph_of

thorough = settings(deadline=None, derandomize=True, max_examples=200)


def fused(graph: OpGraph, groups: list[int], runs: bool = False) -> list[int]:
    result = contract_groups(graph, np.array(groups, dtype=np.int32), runs).tolist()
    assert list(dict.fromkeys(result)) == list(range(len(set(result)))), "ids are dense, in order of first nodes"
    return result


def edges_only(count: int, edges: list[tuple[int, int]]) -> OpGraph:
    """Return a graph of nodes that make one value each, by its edges; values are numbered as their nodes."""
    pairs = np.array(sorted(edges, key=lambda edge: edge[1]), dtype=np.int32).reshape(-1, 2)
    starts = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(pairs[:, 1], minlength=count), out=starts[1:])
    return OpGraph(
        names=tuple(map(str, range(count))),
        ops=("Op",) * count,
        value_names=tuple(map(str, range(count))),
        value_bytes=np.ones(count, dtype=np.int64),
        producer=np.arange(count, dtype=np.int32),
        is_output=np.zeros(count, dtype=bool),
        alias=np.full(count, -1, dtype=np.int32),
        inputs=Csr(starts, pairs[:, 0].copy()),
        weight_names=(),
        weight_bytes=np.zeros(0, dtype=np.int64),
        weights=Csr(np.zeros(count + 1, dtype=np.int64), np.zeros(0, dtype=np.int32)),
        workspace_bytes=np.zeros(count, dtype=np.int64),
    )


def plainly(graph: OpGraph, group: list[int]) -> int:
    """Return how many nodes are left when edges are contracted one by one while the rule allows any."""
    edges = {(int(p), n) for n in range(len(graph)) for p in graph.predecessors[n]}
    left = len(graph)
    while True:
        after = [a for a, _ in sorted(edges)]
        before = [b for _, b in sorted(edges)]
        ready = [(a, b) for a, b in sorted(edges) if group[a] == group[b] and 1 in (after.count(a), before.count(b))]
        if not ready:
            return left
        u, v = ready[0]
        edges = {(u if a == v else a, u if b == v else b) for a, b in edges} - {(u, u)}
        left -= 1


@thorough
@given(st.integers(0, 2**32 - 1), st.integers(0, 30), st.booleans(), st.integers(1, 3))
def test_as_much_is_contracted_as_one_edge_at_a_time_and_no_cycle_is_made(seed, nodes, shuffled, groups):
    state = random_state(seed, nodes, shuffled=shuffled)
    graph = state[Profile].graph
    group = np.random.default_rng(seed).integers(0, groups, nodes).astype(np.int32)
    result = np.array(fused(graph, group.tolist()), dtype=np.int32)
    assert len(set(result.tolist())) <= plainly(graph, group.tolist())
    assert len(graph.contract(result).order) == len(set(result.tolist()))
    assert all(len(set(group[result == cluster].tolist())) == 1 for cluster in range(len(set(result.tolist()))))


@thorough
@given(st.integers(0, 2**32 - 1), st.integers(0, 40))
def test_memory_and_time_of_what_is_contracted_are_kept(seed, nodes):
    state = random_state(seed, nodes, facts=(Profile, Groups))
    after = run_pass(make_pass("fuse"), state)
    fine, coarse = placement_problem(state), placement_problem(after)
    assert coarse.seconds.sum(axis=1).tolist() == fine.seconds.sum(axis=1).tolist()
    assert int(coarse.graph.workspace_bytes.max(initial=0)) >= int(fine.graph.workspace_bytes.max(initial=0))
    assert coarse.graph.total_weight_bytes == fine.graph.total_weight_bytes
    assert coarse.members.tolist() == after[Clusters].cluster.tolist()


def test_a_node_joins_its_only_reader_of_the_same_group():
    assert fused(graph_of({"a": [], "b": [], "c": ["a", "b"]}), [0, 1, 0]) == [0, 1, 0]


def test_several_values_between_two_nodes_are_one_edge():
    graph = graph_of({"a": [], "b": ["a"]})
    doubled = OpGraph(
        **{
            **vars(graph),
            "value_names": ("a", "a2", "b"),
            "value_bytes": np.ones(3, dtype=np.int64),
            "producer": np.array([0, 0, 1], dtype=np.int32),
            "is_output": np.zeros(3, dtype=bool),
            "alias": np.full(3, -1, dtype=np.int32),
            "inputs": Csr.of([[], [0, 1]]),
        }
    )
    assert fused(doubled, [0, 0]) == [0, 0]


def test_inputs_of_the_graph_are_no_predecessors():
    assert fused(graph_of({"a": ["x"], "b": ["a", "x"]}, fed=["x"]), [0, 0]) == [0, 0]


def test_a_merge_that_leaves_a_neighbour_a_single_neighbour_is_followed_up():
    """Nodes b and c become one; only then is it all that follows a, and a all that precedes it."""
    graph = graph_of({"a": [], "b": ["a"], "c": ["a", "b"], "end": ["c", "a"]})
    assert fused(graph, [0, 1, 1, 0]) == [0, 1, 1, 2]
    assert fused(graph, [0, 0, 0, 0]) == [0, 0, 0, 0]


def test_an_edge_parallel_to_a_path_through_another_group_stays():
    graph = graph_of({"a": [], "x": ["a"], "b": ["a", "x"], "c": ["b"]})
    assert fused(graph, [0, 1, 0, 0]) == [0, 1, 2, 2]


def test_groups_that_cross_each_other_stay_acyclic():
    """Edges a -> y and x -> b: one of the two pairs may be one node, not both, and neither edge is an only one."""
    graph = graph_of({"a": [], "x": [], "b": ["a", "x"], "y": ["x", "a"]})
    assert fused(graph, [0, 1, 0, 1]) == [0, 1, 2, 3]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_long_strip_of_triangles_becomes_one_node(reverse):
    """Each merge allows but the next one: rounds over all edges would take as many rounds as there are nodes."""
    count = 60_000
    number = np.arange(count)[::-1] if reverse else np.arange(count)
    edges = [(int(number[i]), int(number[i + step])) for step in (1, 2) for i in range(count - step)]
    assert set(fused(edges_only(count, edges), [0] * count)) == {0}


def test_a_star_of_many_rays_between_two_hubs_becomes_one_node():
    """Each ray has one neighbour on either side; merging them one by one must not go over the hub's edges each time."""
    rays = 60_000
    edges = [(0, ray) for ray in range(1, rays + 1)] + [(ray, rays + 1) for ray in range(1, rays + 1)]
    assert set(fused(edges_only(rays + 2, edges), [0] * (rays + 2))) == {0}
    others = [0, *[1] * rays, 0]
    assert fused(edges_only(rays + 2, edges), others) == list(range(rays + 2))


def test_merges_from_above_and_from_below_may_wait_for_each_other():
    """Level by level: a side node becomes the only way in, then the level above it the only way out."""
    levels, edges = 10_000, []
    for level in range(levels - 1):
        top, side, below = 2 * level, 2 * level + 1, 2 * level + 2
        edges += [(top, below), (top, side), (below, side)]
    assert set(fused(edges_only(2 * levels - 1, edges), [0] * (2 * levels - 1))) == {0}


def test_a_graph_without_nodes_has_no_clusters():
    assert fused(graph_of({}), []) == []


# Runs


@thorough
@given(st.integers(0, 2**32 - 1), st.integers(0, 40), st.booleans(), st.integers(1, 4))
def test_runs_merge_what_edges_do_and_more_and_make_no_cycle(seed, nodes, shuffled, groups):
    graph = random_state(seed, nodes, shuffled=shuffled)[Profile].graph
    group = np.random.default_rng(seed).integers(0, groups, nodes).astype(np.int32)
    finer, coarser = (np.array(fused(graph, group.tolist(), runs), dtype=np.int32) for runs in (False, True))
    joint = set(zip(finer.tolist(), coarser.tolist()))
    assert len(joint) == len(set(finer.tolist())), "what edges make one is one"
    assert len(graph.contract(coarser).order) == len(set(coarser.tolist()))
    assert len(set(zip(coarser.tolist(), group.tolist()))) == len(set(coarser.tolist()))
    linked = connect_nodes(graph)
    assert all(is_connected(linked.subgraph(np.flatnonzero(coarser == c).tolist())) for c in set(coarser.tolist()))


@thorough
@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_runs_leave_of_a_single_group_its_connected_parts(seed, nodes):
    graph = random_state(seed, nodes)[Profile].graph
    parts = number_connected_components(connect_nodes(graph))
    assert max(fused(graph, [0] * nodes, runs=True)) + 1 == parts


def test_runs_cross_an_edge_with_parallel_edges():
    """Edge u -> v is neither the only one out of u nor the only one into v, and yet no other path joins them."""
    graph = graph_of({"u": [], "x": [], "v": ["u", "x"], "w": ["u"]})
    assert fused(graph, [0, 1, 0, 2]) == [0, 1, 2, 3]
    assert fused(graph, [0, 1, 0, 2], runs=True) == [0, 1, 2, 3], "u is before x, which is of another group"
    assert fused(graph_of({"x": [], "u": [], "v": ["u", "x"], "w": ["u"]}), [1, 0, 0, 2], runs=True) == [0, 1, 1, 2]


def test_runs_of_a_large_graph():
    """A strip of triangles in two groups by turns of a hundred: as many runs as turns."""
    count = 60_000
    edges = [(i, i + step) for step in (1, 2) for i in range(count - step)]
    turns = [i // 100 % 2 for i in range(count)]
    assert fused(edges_only(count, edges), turns, runs=True) == [i // 100 for i in range(count)]


@pytest.mark.parametrize("merge", ["edges", "runs"])
def test_fuse_keeps_the_contract_of_passes(merge):
    check_pass(lambda: make_pass("fuse", {"merge": merge}))
