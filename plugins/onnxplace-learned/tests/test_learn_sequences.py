"""`onnxplace learn hierarchical|go`: files, repeatability, resuming, and what they refuse."""

import json

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed; .ci/training has it")

from onnxplace.errors import InputError, UsageError
from onnxplace_learned.graphs.graph_sets import GraphSet
from onnxplace_learned.policies.sequence_learning import SequenceSettings, read_sequence_learner, read_sequence_policy
from onnxplace_learned.policies.sequence_policy import SequenceShape
from onnxplace_learned.policy_training import sequence_training
from onnxplace_learned.policy_training.learning_graphs import draw_problems
from onnxplace_learned.policy_training.sequence_training import SequenceLearnOptions, SequenceTraining
from onnxplace_learned.policy_training.training_loop import checkpoint_path, learn_policy

QUICK = ("--family", "two_towers", "--count", "7", "--nodes", "30", "--placements", "2")
HIERARCHICAL = SequenceShape("hierarchical", "learned", devices=2, groups=4, width=8)
GO = SequenceShape("go", "placement+schedule", devices=2, width=8)
both = pytest.mark.parametrize("shape", [HIERARCHICAL, GO], ids=lambda shape: shape.kind)


@pytest.fixture(scope="module")
def graphs():
    return draw_problems(GraphSet("two_towers", 7, nodes=30), 2)


def learn(graphs, output, shape, updates, seed=0, **options):
    chosen = SequenceLearnOptions(shape=shape, settings=SequenceSettings.of(shape.kind, seed, 2), updates=updates)
    return learn_policy(SequenceTraining, graphs, chosen, output, **options)


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (("hierarchical", "--groups", "given", "--max-groups", "9"), "hierarchical"),
        (("go", "--heads", "placement", "--order", "topological"), "go"),
    ],
)
def test_the_command_writes_a_policy_that_places(run_cli, tmp_path, command, kind):
    output = tmp_path / "p.safetensors"
    result = run_cli("learn", *command, *QUICK, "--updates", 9, "-o", output, "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert data["graphs"] == 7
    assert (tmp_path / "p.csv").read_text().count("\n") == 1 + data["points"] == 3
    policy = read_sequence_policy(output, kind)
    assert (policy.family, policy.graphs) == ("two_towers", 5)
    assert policy.shape.variant == command[2]
    run_cli("learn", "graphs", "--family", "two_towers", "--nodes", 30, "--count", 1, "--side", "test", "-o", tmp_path)
    (graph,) = tmp_path.glob("*.graphml")
    placed = run_cli("place", graph, "--placer", f"{kind}{{policy={output}}}", "--json")
    assert json.loads(placed.out)["feasible"]


def test_the_command_says_how_well_unseen_graphs_are_placed(run_cli, tmp_path):
    result = run_cli("learn", "go", *QUICK, "--updates", 1, "-o", tmp_path / "p.safetensors")
    assert result.code == 0, result.err
    assert "unseen graphs: step " in result.out
    assert "better of m-etf and one device" in result.out


@both
def test_an_interrupted_training_continues_as_if_it_had_not_been(graphs, tmp_path, monkeypatch, shape):
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    learn(graphs, whole, shape, 6)
    update, calls = sequence_training.update_sequence_policy, iter(range(100))

    def interrupt(*arguments):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return update(*arguments)

    monkeypatch.setattr(sequence_training, "update_sequence_policy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        learn(graphs, parts, shape, 6)
    monkeypatch.setattr(sequence_training, "update_sequence_policy", update)
    assert read_sequence_policy(checkpoint_path(parts), shape.kind).updates == 3
    learn(graphs, parts, shape, 6, resume=True)
    _, expected = read_sequence_learner(checkpoint_path(whole), shape.kind)
    _, resumed = read_sequence_learner(checkpoint_path(parts), shape.kind)
    assert resumed.policy.theta.tolist() == expected.policy.theta.tolist()
    assert resumed.second.tolist() == expected.second.tolist()
    assert resumed.baseline.tolist() == expected.baseline.tolist()


@pytest.mark.parametrize("other", [{"seed": 1}, {"shape": SequenceShape("hierarchical", "each", 2, 4, 8)}])
def test_a_checkpoint_of_another_training_is_refused(graphs, tmp_path, other):
    learn(graphs, tmp_path / "p.safetensors", HIERARCHICAL, 1)
    with pytest.raises(InputError, match="H012"):
        learn(graphs, tmp_path / "p.safetensors", **{"shape": HIERARCHICAL, "updates": 2, **other}, resume=True)


def test_a_training_without_a_limit_or_without_graphs_is_refused(graphs, tmp_path):
    with pytest.raises(UsageError, match="U042"):
        SequenceLearnOptions(shape=GO, settings=SequenceSettings.of("go"))
    with pytest.raises(InputError, match="H011"):
        learn([], tmp_path / "p.safetensors", GO, 1)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("hierarchical", "--updates", 1), "U042"),
        (("go", "--family", "chains"), "U042"),
        (("hierarchical", "--family", "chains", "--updates", 1, "--groups", "some"), "U005"),
        (("go", "--family", "chains", "--updates", 1, "--heads", "fusion"), "U005"),
        (("go", "--family", "chains", "--updates", 1, "--order", "sideways"), "U005"),
    ],
)
def test_wrong_options_are_refused(run_cli, tmp_path, arguments, code):
    result = run_cli("learn", *arguments, "-o", tmp_path / "p.safetensors")
    assert result.code == 2
    assert f"error[{code}]" in result.err
    assert list(tmp_path.iterdir()) == []
