"""Families of architectures: graphs of about the requested size, with plausible costs, and disjoint sets of them."""

import networkx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.cost_graph.cost_graphs import read_cost_graph, write_cost_graph
from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.driver.place import place_cost_graph
from onnxplace.errors import UsageError
from onnxplace.graph.op_graph import Csr, OpGraph
from onnxplace_learned.graphs.architectures import ARCHITECTURES, LayerGraph
from onnxplace_learned.graphs.graph_sets import FAMILIES, GraphSet, choose_side, draw_graphs, graph_fingerprint
from plugins.formats.tests.test_generators import described, seconds
from tests.support.reference_simulator import connect_nodes

NAMES = sorted(ARCHITECTURES)
families = st.sampled_from(NAMES)


@settings(max_examples=60)
@given(families, st.integers(60, 400), st.integers(0, 1000), st.booleans())
def test_a_graph_has_about_the_given_size_and_topological_numbers(family, nodes, seed, backward):
    built = ARCHITECTURES[family](nodes, seed, backward)
    graph = built.profile.graph
    # The smallest graph of a family has one cell and its ends; larger ones grow by whole cells.
    assert len(graph) < nodes + 100
    assert len(graph) > 0.6 * nodes - 20
    assert (graph.producer[graph.inputs.items] < graph.inputs.rows).all()
    assert graph.order.tolist() == list(range(len(graph)))
    assert len(set(graph.names)) == len(graph)
    assert len(set(graph.value_names)) == len(graph.value_bytes)
    built.profile.check(built.state())


@pytest.mark.parametrize("family", NAMES)
def test_graphs_of_200_nodes_have_between_140_and_240(family):
    sizes = [len(ARCHITECTURES[family](200, seed).ids) for seed in range(20)]
    assert min(sizes) >= 140
    assert max(sizes) <= 240


@given(families, st.integers(0, 100), st.booleans())
def test_one_seed_is_one_graph(family, seed, backward):
    first, second = (ARCHITECTURES[family](100, seed, backward) for _ in range(2))
    assert described(first) == described(second)


@pytest.mark.parametrize("family", NAMES)
def test_a_graph_is_connected_and_costs_are_plausible(family):
    for seed in range(5):
        built = ARCHITECTURES[family](200, seed)
        graph, time = built.profile.graph, seconds(built)
        assert networkx.is_connected(connect_nodes(graph))
        assert time.min() >= 5e-6
        assert 10e-6 < time.mean() < 2e-3
        assert time.max() < 20e-3
        assert graph.value_bytes.min() > 0
        assert 1 << 10 < np.median(graph.value_bytes) < 256 << 20
        assert graph.total_weight_bytes < 2 << 30


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.slow
def test_half_of_the_graphs_of_a_family_are_shorter_on_two_devices(family):
    gains = []
    for graph in draw_graphs(GraphSet(family, 4)):
        one, two = (place_cost_graph(graph, placer) for placer in ("single", "auto{seconds=0,proposals=300}"))
        gains.append(two.makespan_seconds < 0.995 * one.makespan_seconds)
    assert sum(gains) >= 2


# ---------------------------------------------------------------------------------------------- backward passes


@pytest.mark.parametrize("family", NAMES)
def test_a_backward_pass_has_a_node_for_each_node_and_shares_its_weights(family):
    built = ARCHITECTURES[family](200, 3, True)
    graph, backward = built.profile.graph, built.profile.backward
    half = len(graph) // 2
    assert backward.tolist() == [False] * half + [True] * half
    assert [op.removesuffix("Gradient") for op in graph.ops[half:]] == list(reversed(graph.ops[:half]))
    for node in range(half):
        mirror = 2 * half - 1 - node
        assert graph.weights[node].tolist() == graph.weights[mirror].tolist()
        assert built.profile.user_groups[node] == built.profile.user_groups[mirror]
        assert (built.profile.user_groups[node] >= 0) == (len(graph.weights[node]) > 0)
        # The gradient of each input goes back to the node that computes the input's gradient.
        assert set(graph.predecessors[node].tolist()) == {
            2 * half - 1 - reader for reader in graph.successors[mirror].tolist() if reader >= half
        }


def test_the_backward_pass_of_a_chain_reads_gradients_and_activations():
    chain = LayerGraph()
    chain.product(chain.add("Input", (), 8), 2, 4, 3)
    graph = chain.build("chain", backward=True).profile.graph
    assert graph.names == ("Input_0", "MatMul_1", "MatMulGradient_2", "InputGradient_3")
    assert [graph.predecessors[node].tolist() for node in range(4)] == [[], [0], [0], [2]]
    assert graph.value_bytes.tolist() == [32, 24, 32]
    assert graph.weight_bytes.tolist() == [48]


# ---------------------------------------------------------------------------------------------- sets and fingerprints


def renumbered(graph: OpGraph, seed: int) -> OpGraph:
    """Return the graph with other names, and its nodes and values in another order."""
    random = np.random.default_rng(seed)
    nodes, values = random.permutation(len(graph)), random.permutation(len(graph.value_bytes))
    new_node, new_value = np.argsort(nodes), np.argsort(values)
    reads = [new_value[graph.inputs[node]] for node in nodes]
    return OpGraph(
        names=tuple(f"n{index}" for index in range(len(graph))),
        ops=tuple(graph.ops[node] for node in nodes),
        value_names=tuple(f"v{index}" for index in range(len(values))),
        value_bytes=graph.value_bytes[values],
        producer=new_node[graph.producer[values]].astype(np.int32),
        is_output=graph.is_output[values],
        alias=graph.alias[values],
        inputs=Csr.of([sorted(row.tolist()) for row in reads]),
        weight_names=graph.weight_names,
        weight_bytes=graph.weight_bytes,
        weights=Csr.of([graph.weights[node] for node in nodes]),
        workspace_bytes=graph.workspace_bytes[nodes],
    )


@given(families, st.integers(0, 50), st.integers(0, 2**32 - 1))
def test_a_fingerprint_depends_on_neither_names_nor_numbers(family, seed, shuffle):
    graph = ARCHITECTURES[family](60, seed).profile.graph
    assert graph_fingerprint(renumbered(graph, shuffle)) == graph_fingerprint(graph)


def test_a_fingerprint_depends_on_each_edge_operator_and_size():
    def build(op="Add", size=4, joined=True):
        graph = LayerGraph()
        first, second = graph.add("Input", (), 4), graph.add("Input", (), size)
        graph.add(op, (first, second) if joined else (first,), 4)
        return graph_fingerprint(graph.build("g").profile.graph)

    assert len({build(), build(op="Mul"), build(size=5), build(joined=False)}) == 4


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.slow
def test_train_and_test_sets_share_no_graph_whatever_their_seeds(family):
    train = draw_graphs(GraphSet(family, 12, nodes=80))
    test = draw_graphs(GraphSet(family, 4, nodes=80, side="test", first_seed=1))
    prints = [graph_fingerprint(graph.profile.graph) for graph in (*train, *test)]
    assert len(set(prints)) == 16
    assert [choose_side(item) for item in prints] == ["train"] * 12 + ["test"] * 4


@pytest.mark.slow
def test_each_architecture_has_a_hundred_graphs_to_train_on():
    for family in NAMES:
        assert len(draw_graphs(GraphSet(family, 100, nodes=60))) == 100


def test_a_family_that_is_exhausted_says_so(monkeypatch):
    monkeypatch.setattr("onnxplace_learned.graphs.graph_sets.graph_fingerprint", lambda graph: f"{len(graph) % 3:x}")
    monkeypatch.setattr("onnxplace_learned.graphs.graph_sets.MAX_REPEATED_SEEDS", 5)
    with pytest.raises(UsageError, match=r"H011.*only 2 different graphs"):
        draw_graphs(GraphSet("two_towers", 10, nodes=40))


@pytest.mark.parametrize(("family", "backward"), [("transfomer", False), ("chains", True)])
def test_unknown_families_and_backward_passes_that_do_not_exist_are_refused(family, backward):
    with pytest.raises(UsageError, match="U001"):
        GraphSet(family, 1, backward=backward)


def test_families_are_the_architectures_and_the_generators():
    assert list(FAMILIES) == [*ARCHITECTURES, *GENERATORS]
    assert all(FAMILIES.values())


@pytest.mark.parametrize("family", NAMES)
def test_a_written_graph_keeps_its_fingerprint_and_its_costs(family, tmp_path):
    built = ARCHITECTURES[family](100, 1, True)
    write_cost_graph(tmp_path / "g.graphml", built)
    read = read_cost_graph(tmp_path / "g.graphml")
    assert seconds(read).tolist() == seconds(built).tolist()
    assert read.profile.user_groups.tolist() == built.profile.user_groups.tolist()
    assert read.profile.graph.total_weight_bytes == built.profile.graph.total_weight_bytes
