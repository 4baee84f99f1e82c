"""`onnxplace learn placeto`: files, repeatability, resuming, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed; .ci/training has it")

from onnxplace.errors import InputError, UsageError
from onnxplace.facts import Schedule
from onnxplace.passes.placement.search.portfolio import published_plans
from onnxplace.pipeline.pipeline import run_pass
from onnxplace.problem import placement_problem
from onnxplace.testing.pass_contract import random_state
from onnxplace_learned.graphs.graph_sets import GraphSet
from onnxplace_learned.placeto import Placeto
from onnxplace_learned.policies.environment import Environment
from onnxplace_learned.policies.placeto_learning import Settings, read_learner, read_policy
from onnxplace_learned.policy_training.learning_graphs import LearningGraph, draw_problems
from onnxplace_learned.policy_training.placeto_training import PlacetoOptions, PlacetoTraining
from onnxplace_learned.policy_training.training_loop import checkpoint_path, learn_policy

GRAPHS = GraphSet("two_towers", 7, nodes=30)
QUICK = ("--family", "two_towers", "--count", "7", "--nodes", "30", "--episodes", "2")


@pytest.fixture(scope="module")
def graphs():
    return draw_problems(GRAPHS, 2)


def learn(graphs, output, updates, **options):
    settings = Settings(episodes=2, steps=4, seed=options.pop("seed", 0))
    resume = options.pop("resume", False)
    return learn_policy(
        PlacetoTraining,
        graphs,
        PlacetoOptions(devices=2, updates=updates, settings=settings, **options),
        output,
        resume=resume,
    )


def test_the_command_writes_a_policy_that_places(run_cli, tmp_path):
    output = tmp_path / "p.safetensors"
    result = run_cli("learn", "placeto", *QUICK, "--updates", 33, "-o", output, "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert data["graphs"] == 7
    assert (tmp_path / "p.csv").read_text().count("\n") == 1 + data["points"] == 3
    policy = read_policy(output)
    assert (policy.family, policy.learned_from, policy.start, policy.shape.rounds) == (
        "two_towers", "completions", "several", 4,
    )  # fmt: skip
    run_cli("learn", "graphs", "--family", "two_towers", "--nodes", 30, "--count", 1, "--side", "test", "-o", tmp_path)
    (graph,) = tmp_path.glob("*.graphml")
    placed = run_cli("place", graph, "--placer", f"placeto{{policy={output}}}", "--json")
    assert json.loads(placed.out)["feasible"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
def test_the_policy_is_written_even_if_nothing_else_can_be(graphs, tmp_path):
    output = tmp_path / "p.safetensors"
    for other in (checkpoint_path(output), output.with_suffix(".csv")):
        other.symlink_to("/dev/full")
    with pytest.raises(UsageError, match="No space left on device") as caught:
        learn(graphs, output, 2)
    assert len(caught.value.__notes__) == 1
    assert read_policy(output).updates == 2


def test_equal_options_give_equal_files(graphs, tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        learn(graphs, tmp_path / name, 5)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    policy = read_policy(tmp_path / "a.safetensors")
    assert (policy.learned_from, policy.start, policy.shape.rounds) == ("rewards", "m-etf", 8)
    learn(graphs, tmp_path / "c.safetensors", 5, seed=1)
    assert (tmp_path / "a.safetensors").read_bytes() != (tmp_path / "c.safetensors").read_bytes()


REWARDS = Settings(episodes=2, steps=4)
COMPLETIONS = replace(Settings.for_completions(), proposals=100, searches=2, steps=8)


@pytest.mark.parametrize(
    ("settings", "name"), [(REWARDS, "update_policy"), (COMPLETIONS, "update_from_completions")], ids=lambda item: ""
)
def test_an_interrupted_training_continues_as_if_it_had_not_been(graphs, tmp_path, monkeypatch, settings, name):
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    options = PlacetoOptions(devices=2, updates=6, settings=settings)
    learn_policy(PlacetoTraining, graphs, options, whole)
    calls = iter(range(100))

    def interrupt(*arguments):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return update(*arguments)

    from onnxplace_learned.policy_training import placeto_training as learning

    update = getattr(learning, name)
    monkeypatch.setattr(learning, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        learn_policy(PlacetoTraining, graphs, options, parts)
    monkeypatch.setattr(learning, name, update)
    assert read_policy(checkpoint_path(parts)).updates == 3
    learn_policy(PlacetoTraining, graphs, options, parts, resume=True)
    _, expected = read_learner(checkpoint_path(whole))
    _, resumed = read_learner(checkpoint_path(parts))
    assert resumed.policy.theta.tolist() == expected.policy.theta.tolist()
    assert resumed.second.tolist() == expected.second.tolist()
    assert resumed.average.tolist() == expected.average.tolist()


def test_learning_from_completions_places_unseen_graphs_better(tmp_path):
    graphs = draw_problems(GraphSet("encoder_decoder", 12, nodes=40), 2)
    settings = replace(Settings.for_completions(), proposals=500, searches=1, steps=16, learning_rate=3e-3, warm_up=20)
    options = PlacetoOptions(devices=2, updates=160, start="first-device", settings=settings)
    points = learn_policy(PlacetoTraining, graphs, options, tmp_path / "p.safetensors").points
    assert min(point.validation_cost for point in points[1:]) < 0.9 * points[0].start_cost
    assert np.mean([point.train_cost for point in points[-2:]]) < 0.95 * points[0].train_cost


def test_a_policy_that_learned_under_tight_limits_fits_wherever_a_published_placement_does(tmp_path):
    states = [random_state(seed, 16, 3, tight=True) for seed in range(40)]
    graphs = [LearningGraph(str(seed), str(seed), placement_problem(state)) for seed, state in enumerate(states)]
    settings = replace(Settings.for_completions(), proposals=50, searches=1, steps=8)
    learn_policy(
        PlacetoTraining,
        graphs[:8],
        PlacetoOptions(devices=3, updates=40, start="several", settings=settings),
        tmp_path / "p.safetensors",
    )
    fitting = 0
    for state, graph in zip(states, graphs):
        if any(Environment(graph.problem).evaluate(plan.device) for plan in published_plans(graph.problem)):
            after = run_pass(Placeto(policy=str(tmp_path / "p.safetensors")), state)
            peaks = after[Schedule].simulation.peak_bytes
            assert all(peak <= device.memory_bytes for peak, device in zip(peaks, state.target.devices))
            fitting += 1
    assert fitting > 10


@pytest.mark.parametrize("options", [{"seed": 1}, {"order": "bfs"}, {"start": "first-device"}])
def test_a_checkpoint_of_another_training_is_refused(graphs, tmp_path, options):
    learn(graphs, tmp_path / "p.safetensors", 1)
    with pytest.raises(InputError, match="H012"):
        learn(graphs, tmp_path / "p.safetensors", 2, resume=True, **options)


def test_a_plot_is_written_with_matplotlib(graphs, tmp_path):
    pytest.importorskip("matplotlib")
    result = learn(graphs, tmp_path / "p.safetensors", 1)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert tmp_path / "p.png" in result.files


def test_a_training_without_a_limit_is_refused():
    with pytest.raises(UsageError, match="U042"):
        PlacetoOptions(devices=2)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--updates", 1), "U042"),
        (("--updates", 1, "--family", "chains", "--graphs", "."), "U042"),
        (("--family", "chains"), "U042"),
        (("--family", "chain", "--updates", 1), "U001"),
        (("--family", "chains", "--updates", 1, "--order", "sideways"), "U005"),
        (("--family", "chains", "--updates", 1, "--start", "sideways"), "U005"),
        (("--family", "chains", "--updates", 1, "--learn-from", "books"), "U005"),
    ],
)
def test_wrong_options_are_refused(run_cli, tmp_path, arguments, code):
    result = run_cli("learn", "placeto", *arguments, "-o", tmp_path / "p.safetensors")
    assert result.code == 2
    assert f"error[{code}]" in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_policy_has_the_ending_of_its_format(run_cli, tmp_path):
    result = run_cli("learn", "placeto", *QUICK, "--updates", 1, "-o", tmp_path / "p.pt")
    assert (result.code, "error[U032]" in result.err) == (2, True)
