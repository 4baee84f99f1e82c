"""The placers `hierarchical` and `go`: they learn, keep the contract of placers, and refuse what they cannot do."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed; .ci/training has it")

from learned_support.learned_placers import check_fits_wherever_a_published_placer_does
from onnxplace.driver.place import place_cost_graph, replace_devices
from onnxplace.errors import InputError, UsageError
from onnxplace.facts import Groups, Profile
from onnxplace.problem import PlacementProblem, placement_problem, sort_by_start
from onnxplace.testing.pass_contract import check_pass, random_state
from onnxplace_learned.go import Go
from onnxplace_learned.graphs.architectures import ARCHITECTURES
from onnxplace_learned.hierarchical import Hierarchical
from onnxplace_learned.policies import sequence_networks as go_net
from onnxplace_learned.policies.sequence_graph import SequenceGraph
from onnxplace_learned.policies.sequence_learning import (
    SequenceLearner,
    SequenceSettings,
    read_sequence_learner,
    read_sequence_policy,
    sample_policy,
    update_sequence_policy,
    write_sequence_policy,
)
from onnxplace_learned.policies.sequence_networks import SequenceInputs
from onnxplace_learned.policies.sequence_policy import VARIANTS, SequencePolicy, SequenceShape

SHAPES = [
    SequenceShape(kind, variant, devices=4, groups=4, width=8) for kind, names in VARIANTS.items() for variant in names
]
PASSES = {"hierarchical": Hierarchical, "go": Go}
# How much the mean cost falls in 40 updates; the grouper of HDP learns slowly.
LEAST_GAIN = {"learned": 0.0, "given": 0.02, "each": 0.02}
by_variant = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.kind}-{shape.variant}")


def draw_policy(shape, seed=0):
    return SequencePolicy(shape, shape.draw_parameters(seed), seed=seed)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the file of an untrained policy of each variant."""
    folder, paths = tmp_path_factory.mktemp("policies"), {}
    for shape in SHAPES:
        paths[shape] = folder / f"{shape.kind}-{shape.variant}.safetensors"
        write_sequence_policy(paths[shape], draw_policy(shape))
    return paths


def two_chains(length=6):
    """Return a problem whose best placement is known: two chains, each faster on a device of its own."""
    from tests.support.reference_simulator import even_target, graph_of

    names = [f"{chain}{index}" for index in range(length) for chain in "ab"]
    graph = graph_of({name: [f"{name[0]}{int(name[1:]) - 1}"] if int(name[1:]) else [] for name in names})
    graph = replace(graph, ops=tuple("MatMul" if name[0] == "a" else "Conv" for name in graph.names))
    nodes, limits = np.arange(len(names), dtype=np.int32), np.full(2, 1 << 40)
    pinned = np.full(len(names), -1, dtype=np.int32)
    is_first = np.array([name[0] == "a" for name in graph.names])
    seconds = np.array([np.where(is_first, 1.0, 2.0), np.where(is_first, 2.0, 1.0)])
    return PlacementProblem(graph, seconds, even_target(2), limits, nodes, pinned, nodes)


def train(problem, shape, updates, seed=0, placements=16):
    inputs = SequenceInputs(SequenceGraph.of(problem, 1000, shape.max_items), shape)
    learner = SequenceLearner.of(draw_policy(shape, seed), 1)
    chosen, costs = SequenceSettings.of(shape.kind, seed, placements), []
    for index in range(updates):
        update = update_sequence_policy(learner, inputs, 0, chosen, index / updates)
        learner = update.learner
        costs.append(update.cost)
    return learner, costs, inputs


# ---------------------------------------------------------------------------------------------- learning


@by_variant
def test_training_finds_the_device_on_which_each_of_two_chains_is_faster(shape):
    shape = replace(shape, devices=2, width=16, groups=4 if shape.variant == "learned" else 12)
    learner, costs, inputs = train(two_chains(), shape, 40 if shape.kind == "go" else 70)
    assert np.mean(costs[-5:]) < np.mean(costs[:5]) - 0.1
    # 6 seconds, relative to 18 on one device.
    assert sample_policy(learner.policy, inputs, 16, 0).scores.cost.min() == pytest.approx(1 / 3)


@by_variant
def test_equal_seeds_give_equal_policies(shape):
    problem = placement_problem(random_state(1, nodes=20, devices=3))
    first, second, other = (train(problem, shape, 3, seed, 4)[0] for seed in (0, 0, 1))
    assert first.policy.theta.tolist() == second.policy.theta.tolist()
    assert first.policy.theta.tolist() != other.policy.theta.tolist()


def test_the_likelihood_of_decisions_is_that_with_which_they_are_drawn():
    shape = SHAPES[-1]
    inputs = SequenceInputs(SequenceGraph.of(two_chains(2), 1000), replace(shape, devices=2))
    tensors = inputs.shape.split(torch.from_numpy(inputs.shape.draw_parameters(3) * 3))
    decisions = go_net.sample_decisions(tensors, inputs, 4000, torch.Generator().manual_seed(0))
    likelihood = go_net.score_decisions(tensors, inputs, decisions)
    # The second pass depends on the first, the priorities on both.
    for chosen, log_shares in zip((decisions.device[1], decisions.priority), likelihood.log_shares):
        shares = (log_shares[1] if log_shares.dim() == 3 else log_shares).exp()
        for value in range(2):
            drawn, expected = (chosen == value).double(), torch.where(chosen == value, shares, torch.nan)
            own = decisions.device[0, :, 0] == 0
            mean = expected[own].nanmean(dim=0)
            np.testing.assert_allclose(drawn[own].mean(dim=0), mean, atol=0.06)


def test_segments_of_attention_do_not_depend_on_later_ones(monkeypatch):
    monkeypatch.setattr(go_net, "SEGMENT", 4)
    rows = torch.randn(1, 10, 8, generator=torch.Generator().manual_seed(0))
    shape = SequenceShape("go", "placement", devices=2, width=8)
    tensors = shape.split(torch.from_numpy(shape.draw_parameters(0)))
    modulation = torch.zeros(1, 1, 8)
    attended = go_net._attend(tensors, "attention0", rows, modulation)
    changed = rows.clone()
    changed[:, 8:] += 1
    again = go_net._attend(tensors, "attention0", changed, modulation)
    torch.testing.assert_close(attended[:, :8], again[:, :8])
    changed = rows.clone()
    changed[:, 5] += 1
    # The third segment remembers the second one.
    assert not torch.allclose(attended[:, 8:], go_net._attend(tensors, "attention0", changed, modulation)[:, 8:])


# ---------------------------------------------------------------------------------------------- sequences


@settings(max_examples=40, derandomize=True, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), nodes=st.integers(1, 25), devices=st.integers(1, 4), pinned=st.booleans())
def test_scores_are_those_of_the_simulator(seed, nodes, devices, pinned):
    state = random_state(seed, nodes, devices, facts=(Profile, Groups), tight=True, pinned=pinned, shuffled=True)
    problem = placement_problem(state)
    graph, rng = SequenceGraph.of(problem, 1000), np.random.default_rng(seed)
    device, priority = rng.integers(devices, size=(3, len(graph))), rng.integers(4, size=(3, len(graph)))
    for list_order in ("criticality", "topological"):
        scores = graph.score(device, priority, list_order)
        for index, placed in enumerate(graph.expand(device)):
            pins = problem.pinned[problem.group]
            assert (placed[pins >= 0] == pins[pins >= 0]).all()
            assert all(len(set(placed[problem.group == group])) == 1 for group in range(len(graph)))
            simulation = problem.simulate(placed, scores.order[index].astype(np.int32))
            assert scores.fits[index] == (simulation.peak_bytes <= problem.limit_bytes).all()
            assert sort_by_start(problem.graph, simulation.start_seconds) is not None
            if scores.fits[index]:
                calls = any(item.segment_seconds for item in problem.target.devices)
                expected = min(simulation.makespan_seconds / graph.environment.rules.scale_seconds, 10)
                assert calls or scores.cost[index] <= expected * (1 + 1e-9)
            else:
                assert scores.cost[index] == 10


def test_a_device_runs_nodes_of_higher_priority_first():
    problem = two_chains(3)
    graph = SequenceGraph.of(problem, 1000)
    is_second = np.array([name[0] == "b" for name in problem.graph.names])[graph.groups]
    for level, first in ((is_second, "b"), (~is_second, "a")):
        scores = graph.score(np.zeros((1, 6), dtype=np.int64), level[None].astype(np.int64))
        assert [problem.graph.names[node][0] for node in scores.order[0][:3]] == [first] * 3


def test_given_groups_are_at_most_so_many_and_respect_pins():
    problem = placement_problem(replace_devices(ARCHITECTURES["transformer"](150, 0), 3, None).state())
    pinned = problem.pinned.copy()
    pinned[problem.group[0]] = 2
    graph = SequenceGraph.of(replace(problem, pinned=pinned), 1000, 40)
    assert len(graph) <= 40
    assert len(graph.problem.graph) == len(problem.graph)
    # What a training compares with does not depend on the groups.
    assert graph.fallback_cost == SequenceGraph.of(replace(problem, pinned=pinned), 1000).fallback_cost
    assert graph.expand(np.zeros(len(graph), dtype=np.int64))[0] == 2


# ---------------------------------------------------------------------------------------------- placing


@by_variant
def test_the_pass_keeps_the_contract_of_passes_on_random_states(shape, files):
    check_pass(lambda: PASSES[shape.kind](policy=str(files[shape])))


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**32 - 1), nodes=st.integers(1, 25),
    devices=st.integers(1, 4), pinned=st.booleans(),
)  # fmt: skip
def test_there_is_a_placement_wherever_a_published_placer_has_one(files, shape, seed, nodes, devices, pinned):
    state = random_state(seed, nodes, devices, facts=(Profile, Groups), tight=True, pinned=pinned)
    check_fits_wherever_a_published_placer_does(PASSES[shape.kind](policy=str(files[shape]), episodes=seed % 3), state)


@pytest.mark.parametrize("placer", ["hierarchical{groups=given,max_groups=20,", "hierarchical{max_groups=8,", "go{"])
def test_a_placer_trains_on_a_coarsened_graph_and_reports_it(placer):
    graph = replace_devices(ARCHITECTURES["recurrent_cells"](80, 0), 3, None)
    result = place_cost_graph(graph, f"{placer}episodes=20,max_nodes=60}}")
    assert result.feasible
    (note,) = [note.message for note in result.diagnostics if note.code == "P021"]
    assert note.endswith("; 20 episodes to learn")
    assert ", one device " in note


@by_variant
def test_more_devices_than_trained_for_are_refused(shape, files):
    graph = replace_devices(ARCHITECTURES["two_towers"](60, 0), 5, None)
    with pytest.raises(UsageError, match=rf"H003.*knows at most 4 devices, expected 5(.|\n)*learn {shape.kind}"):
        place_cost_graph(graph, f"{shape.kind}{{policy={files[shape]}}}")


@pytest.mark.parametrize("kind", ["hierarchical", "go"])
def test_neither_policy_nor_episodes_is_refused(kind):
    with pytest.raises(UsageError, match=rf"error\[U042\] {kind}"):
        place_cost_graph(ARCHITECTURES["two_towers"](60, 0), kind)


def test_a_policy_of_another_variant_is_refused(files):
    for shape, option in ((SHAPES[1], "groups=learned"), (SHAPES[3], "heads=placement+schedule")):
        with pytest.raises(InputError, match=r"H003.*was trained with (groups=given|heads=placement), expected"):
            place_cost_graph(ARCHITECTURES["two_towers"](60, 0), f"{shape.kind}{{policy={files[shape]},{option}}}")


# ---------------------------------------------------------------------------------------------- files


@by_variant
def test_a_policy_is_read_as_it_was_written(shape, tmp_path):
    policy = replace(draw_policy(shape, 3), family="chains", graphs=2, updates=7)
    learner = SequenceLearner(policy, policy.theta + 1, policy.theta**2, np.array([-0.5, 0], dtype=np.float32))
    path = tmp_path / "c.safetensors"
    write_sequence_policy(path, policy, learner)
    again, restored = read_sequence_learner(path, shape.kind)
    assert again.theta.tolist() == policy.theta.tolist()
    assert replace(again, theta=None) == replace(policy, theta=None)
    assert [array.tolist() for array in (restored.first, restored.second, restored.baseline)] == [
        array.tolist() for array in (learner.first, learner.second, learner.baseline)
    ]
    write_sequence_policy(path, policy)
    assert read_sequence_learner(path, shape.kind)[1] is None


def test_files_of_another_kind_or_version_and_damaged_ones_are_refused(files, tmp_path):
    from onnxplace_training import map_arrays, write_arrays

    path = files[SHAPES[0]]
    with pytest.raises(InputError, match=r"H003.*'go' of version 1 or earlier, found 'hierarchical' of version '1'"):
        read_sequence_policy(path, "go")
    file = map_arrays(path, "H003", "")
    damaged = tmp_path / "d.safetensors"
    for change, code in (
        ({"version": "2"}, "H003"),
        ({"format": "pt"}, "H003"),
        ({"variant": "placement"}, "H003.*its variant is 'placement'"),
        ({"order": "sideways"}, "H003.*its order is 'sideways'"),
        ({"width": "6"}, "H003.*its sizes are"),
        ({"devices": "three"}, "H003.*metadata"),
        ({"devices": "3"}, "H003.*expected"),
    ):
        write_arrays(damaged, file.arrays, {**file.metadata, **change})
        with pytest.raises(InputError, match=rf"error\[{code}"):
            read_sequence_policy(damaged, "hierarchical")
    damaged.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"error\[H003\].*d\.safetensors"):
        read_sequence_policy(damaged, "hierarchical")
