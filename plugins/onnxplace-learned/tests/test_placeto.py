"""The placer: it keeps the contract of placers, respects limits, and says what it cannot do."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from learned_support.learned_placers import check_fits_wherever_a_published_placer_does
from onnxplace.driver.place import place_cost_graph, replace_devices
from onnxplace.errors import InfeasibleError, InputError, UsageError
from onnxplace.facts import Groups, Profile
from onnxplace.passes.placement.search.placement_search import decode_candidate
from onnxplace.problem import placement_problem
from onnxplace.testing.pass_contract import check_pass, random_state
from onnxplace_learned.graphs.architectures import ARCHITECTURES
from onnxplace_learned.placeto import Placeto
from onnxplace_learned.policies.environment import ORDERS, Environment, visit_nodes
from onnxplace_learned.policies.placeto_learning import write_policy
from onnxplace_learned.policies.placeto_network import Policy, Shape
from onnxplace_learned.policies.placing import coarsen_to

SHAPE = Shape(devices=4, width=4, rounds=2)


@pytest.fixture(scope="module", params=["several", "m-etf", "first-device"])
def policy_file(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "random.safetensors"
    # Scores are as far from each other as those of a trained policy, so that it moves groups.
    write_policy(path, Policy(SHAPE, 3 * SHAPE.draw_parameters(1), start=request.param))
    return path


def test_the_pass_keeps_the_contract_of_passes_on_random_states(policy_file):
    check_pass(lambda: Placeto(policy=str(policy_file)))


@settings(max_examples=80, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), nodes=st.integers(1, 30), devices=st.integers(1, 4), pinned=st.booleans())
def test_there_is_a_placement_wherever_a_published_placer_has_one(policy_file, seed, nodes, devices, pinned):
    state = random_state(seed, nodes, devices, facts=(Profile, Groups), tight=True, pinned=pinned)
    check_fits_wherever_a_published_placer_does(Placeto(policy=str(policy_file)), state)


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_a_policy_that_starts_from_m_etf_is_not_worse_than_its_devices(family, tmp_path):
    path = tmp_path / "p.safetensors"
    write_policy(path, Policy(SHAPE, SHAPE.draw_parameters(0)))
    graph = replace_devices(ARCHITECTURES[family](80, 0), 3, None)
    result = place_cost_graph(graph, f"placeto{{policy={path}}}")
    environment = Environment(placement_problem(graph.state()))
    start = decode_candidate(environment.space, "", environment.start, np.zeros(len(graph.ids)), 1.0)
    assert result.feasible
    assert result.makespan_seconds <= start.seconds * (1 + 1e-9)
    assert [note.code for note in result.diagnostics if note.code == "P021"] == ["P021"]


@pytest.mark.parametrize("start", ["several", "m-etf"])
@pytest.mark.parametrize("seed", range(4))
def test_a_policy_that_starts_from_m_etf_is_not_worse_than_it(start, seed, tmp_path):
    path = tmp_path / "p.safetensors"
    write_policy(path, Policy(SHAPE, SHAPE.draw_parameters(seed), start=start))
    for family in ("encoder_decoder", "recurrent_cells"):
        graph = ARCHITECTURES[family](60, seed)
        published = place_cost_graph(graph, "m-etf", groups="given")
        result = place_cost_graph(graph, f"placeto{{policy={path}}}", groups="given")
        assert result.makespan_seconds <= published.makespan_seconds * (1 + 1e-9)


def test_several_starts_are_not_worse_than_each_of_them():
    theta = 3 * SHAPE.draw_parameters(2)
    for seed in range(5):
        problem = placement_problem(random_state(seed, 25, 3))
        costs = {}
        for start in ("several", "m-etf", "first-device"):
            episodes = Environment(problem, start_from=start).run_best(SHAPE.network(theta))
            costs[start] = min(episode.best()[0] for episode in episodes)
            first = episodes[0].trajectory.cost[0]
            assert first == min(
                episode.trajectory.cost[0] for episode in episodes[: len(episodes) - (start == "several")]
            )
        assert costs["several"] <= min(costs.values())


def test_a_graph_that_fits_on_no_single_device_is_placed(policy_file):
    graph = ARCHITECTURES["transformer"](100, 1)
    problem = placement_problem(graph.state())
    alone = int(problem.alone_bytes().min())
    tight = replace_devices(graph, 4, int(0.6 * alone))
    result = place_cost_graph(tight, f"placeto{{policy={policy_file}}}")
    assert result.feasible


def test_nothing_fits_says_which_device_lacks_memory(policy_file):
    graph = replace_devices(ARCHITECTURES["transformer"](60, 1), 2, 1000)
    with pytest.raises(InfeasibleError, match=r"error\[P002\] placeto: .*cuda:0 lacks"):
        place_cost_graph(graph, f"placeto{{policy={policy_file}}}")


def test_a_large_graph_is_coarsened(policy_file):
    graph = ARCHITECTURES["recurrent_cells"](700, 0)
    problem = placement_problem(graph.state())
    coarse, cluster = coarsen_to(problem, 300)
    assert len(coarse.graph) <= 300
    assert cluster.max() + 1 == len(coarse.graph)
    assert coarse.seconds.sum() == pytest.approx(problem.seconds.sum())
    assert place_cost_graph(graph, f"placeto{{policy={policy_file},max_nodes=300}}").feasible


def test_a_policy_for_fewer_devices_is_refused(policy_file):
    graph = replace_devices(ARCHITECTURES["two_towers"](60, 0), 5, None)
    with pytest.raises(UsageError, match=r"H003.*knows at most 4 devices, expected 5"):
        place_cost_graph(graph, f"placeto{{policy={policy_file}}}")


def test_neither_policy_nor_episodes_is_refused():
    with pytest.raises(UsageError, match=r"error\[U042\] placeto"):
        place_cost_graph(ARCHITECTURES["two_towers"](60, 0), "placeto")


def test_a_missing_policy_is_named():
    with pytest.raises(InputError, match=r"H003.*nowhere\.safetensors"):
        place_cost_graph(ARCHITECTURES["two_towers"](60, 0), "placeto{policy=nowhere.safetensors}")


def test_training_without_torch_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(UsageError, match=r"U110.*torch(.|\n)*pip install 'onnxplace-learned\[learn\]'"):
        place_cost_graph(ARCHITECTURES["two_towers"](60, 0), "placeto{episodes=8}")


# ---------------------------------------------------------------------------------------------- orders of visiting


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_an_order_visits_each_node_once(order):
    for nodes in (1, 2, 30):
        problem = placement_problem(random_state(nodes, nodes=nodes, shuffled=True))
        assert sorted(visit_nodes(problem, order, 0).tolist()) == list(range(len(problem.graph)))


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_each_order_can_be_chosen(order, policy_file):
    graph = ARCHITECTURES["encoder_decoder"](60, 0)
    assert place_cost_graph(graph, f"placeto{{policy={policy_file},order={order}}}").feasible


def diamond():
    """Return a problem: b reads a; c reads a; d reads b and c; e is alone."""
    from onnxplace.problem import PlacementProblem
    from tests.support.reference_simulator import even_target, graph_of

    graph = graph_of({"b": ["a"], "a": [], "d": ["b", "c"], "c": ["a"], "e": []})
    nodes = np.arange(5, dtype=np.int32)
    seconds = np.tile([2.0, 1, 1, 1, 1], (2, 1))
    limits, pinned = np.full(2, 1 << 40), np.full(5, -1, dtype=np.int32)
    return PlacementProblem(graph, seconds, even_target(2), limits, nodes, pinned, nodes)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("alpha", "abcde"),
        ("topological", "abcde"),
        ("lexicographic", "abcde"),
        ("reversed", "edcba"),
        ("dfs-preorder", "abdce"),
        ("dfs-postorder", "dbcae"),
        ("bfs", "abcde"),
        ("by-criticality", "abdce"),
    ],
)
def test_orders_of_a_diamond(order, expected):
    problem = diamond()
    assert "".join(problem.graph.names[node] for node in visit_nodes(problem, order)) == expected


def test_a_random_order_depends_on_its_seed():
    problem = placement_problem(random_state(0, nodes=30))
    assert visit_nodes(problem, "random", 1).tolist() == visit_nodes(problem, "random", 1).tolist()
    assert visit_nodes(problem, "random", 1).tolist() != visit_nodes(problem, "random", 2).tolist()
