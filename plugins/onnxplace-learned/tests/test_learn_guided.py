"""`onnxplace learn guided`: torch computes what the compiled policy computes, files, repeatability, refusals."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; .ci/training has it")

from learned_support.plain_guided import choose_devices
from onnxplace.errors import InputError, UsageError
from onnxplace.facts import Groups, Profile
from onnxplace.problem import placement_problem
from onnxplace.testing.pass_contract import random_state
from onnxplace_learned.graphs.graph_sets import GraphSet
from onnxplace_learned.policies.guided_gradients import imitation_loss, make_example, score_examples
from onnxplace_learned.policies.guided_policy import (
    GuidedGraph,
    GuidedPolicy,
    GuidedShape,
    read_guided_policy,
    run_schedule,
)
from onnxplace_learned.policy_training.guided_training import GuidedOptions, GuidedPoint, GuidedTraining, learn_guided
from onnxplace_learned.policy_training.learning_graphs import draw_mixture, draw_problems, vary_problem
from onnxplace_learned.policy_training.training_loop import checkpoint_path, read_curve

SHAPE = GuidedShape(width=6, message_width=4, hidden=5, rounds=2)
QUICK = ("--family", "two_towers", "--nodes", 30, "--count", 1, "--devices", 3, "--proposals", 50)


def make_examples(seeds, devices=(2, 4, 3)):
    policy = GuidedPolicy(SHAPE, SHAPE.draw_tensors(1))
    examples, traces = [], []
    for seed, count in zip(seeds, devices):
        state = random_state(seed, nodes=20, devices=count, facts=(Profile, Groups), pinned=bool(seed % 2))
        graph = GuidedGraph(placement_problem(state))
        groups = len(graph.problem.pinned)
        device, trace = run_schedule(graph, policy.prepare(graph), np.random.default_rng(seed).random(groups))
        examples.append(make_example(graph, device, trace))
        traces.append(trace)
    return policy, examples, traces


def test_torch_scores_batches_as_the_plain_policy():
    policy, examples, traces = make_examples((1, 2, 3))
    tensors = {name: torch.from_numpy(tensor) for name, tensor in policy.tensors.items()}
    log_shares, right = score_examples(tensors, SHAPE.rounds, examples)
    assert bool(right.any(dim=1).all())
    row = 0
    for example, trace in zip(examples, traces):
        _, scores = choose_devices(policy, example.graph, trace)
        for group in example.decided:
            shares = np.exp(scores[group] - scores[group].max())
            expected = shares / shares.sum()
            shown = np.exp(log_shares[row].numpy())
            np.testing.assert_allclose(shown[: len(expected)], expected, rtol=1e-3, atol=1e-5)
            assert shown[len(expected) :].sum() == 0
            row += 1
    assert row == len(log_shares)


def test_any_empty_interchangeable_device_is_right():
    policy = GuidedPolicy(SHAPE, SHAPE.draw_tensors(0))
    (learning,) = draw_problems(GraphSet("two_towers", 1, nodes=30), 3)
    graph = GuidedGraph(learning.problem)
    groups = len(graph.problem.pinned)
    forced = np.full(groups, 2, dtype=np.int32)
    device, trace = run_schedule(graph, policy.prepare(graph), forced=forced)
    example = make_example(graph, device, trace)
    order = np.argsort(trace.rank[example.decided])
    assert example.right[order[0]].tolist() == [True, True, True]
    assert example.right[order[1:]].tolist() == [[False, False, True]] * (groups - 1)


def test_a_step_against_the_gradient_makes_right_devices_likelier():
    policy, examples, _ = make_examples((1, 2, 3))
    tensors = {name: torch.from_numpy(tensor.copy()).requires_grad_() for name, tensor in policy.tensors.items()}
    loss, _ = imitation_loss(tensors, SHAPE.rounds, examples)
    torch.autograd.backward(loss)
    with torch.no_grad():
        moved = {name: tensor - 0.01 * tensor.grad for name, tensor in tensors.items()}
        after, _ = imitation_loss(moved, SHAPE.rounds, examples)
    assert float(after) < float(loss.detach())


def test_training_learns_to_imitate(tmp_path):
    graphs = draw_mixture(["two_towers"], 1, 40, 3)
    options = GuidedOptions(steps=120, proposals=100)
    result = learn_guided(graphs, options, tmp_path / "p.safetensors")
    first, last = result.points[0], result.points[-1]
    assert (last.updates, len(graphs)) == (120, 6)
    assert last.loss < first.loss
    assert read_guided_policy(tmp_path / "p.safetensors").steps in {point.updates for point in result.points}


def test_equal_options_give_equal_files(tmp_path):
    graphs = draw_mixture(["chains"], 1, 30, 2)
    for name in "ab":
        learn_guided(graphs, GuidedOptions(steps=10, proposals=50), tmp_path / f"{name}.safetensors")
    learn_guided(graphs, GuidedOptions(steps=10, proposals=50, seed=1), tmp_path / "c.safetensors")
    first, again, other = ((tmp_path / f"{name}.safetensors").read_bytes() for name in "abc")
    assert first == again != other


def test_an_interruption_leaves_the_best_policy_so_far(tmp_path):
    graphs = draw_mixture(["chains"], 1, 20, 2)

    def interrupt(progress, point):
        raise KeyboardInterrupt

    options = GuidedOptions(steps=200, proposals=20)
    with pytest.raises(KeyboardInterrupt):
        learn_guided(graphs, options, tmp_path / "p.safetensors", observer=interrupt)
    assert read_guided_policy(tmp_path / "p.safetensors").steps == 50


def test_a_trained_policy_places_graphs(run_cli, tmp_path):
    output = tmp_path / "p.safetensors"
    result = run_cli("learn", "guided", *QUICK, "--steps", 12, "-o", output, "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert data["graphs"] == 6
    assert data["files"][:3] == [str(output), str(checkpoint_path(output)), str(output.with_suffix(".csv"))]
    assert output.with_suffix(".csv").read_text().startswith("updates,seconds,loss,right,validation_cost,teacher_cost")
    run_cli("learn", "graphs", "--family", "two_towers", "--nodes", 30, "--count", 1, "--side", "test", "-o", tmp_path)
    graph = next(tmp_path.glob("*.graphml"))
    placed = run_cli("place", graph, "--placer", f"guided{{policy={output}}}", "--json")
    assert placed.code == 0, placed.err
    shown = run_cli("learn", "guided", *QUICK, "--steps", 1, "-o", output)
    assert "two_towers: 6 graphs, 1 steps" in shown.out


def test_an_interrupted_training_continues_as_if_it_had_not_been(run_cli, tmp_path, monkeypatch):
    """The interruption is between two points of the curve, and after the end of imitation alone."""
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    command = ("learn", "guided", *QUICK, "--steps", 56)
    assert run_cli(*command, "-o", whole).code == 0
    step, calls = GuidedTraining.step, iter(range(100))

    def interrupt(*arguments):
        if next(calls) == 53:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(GuidedTraining, "step", interrupt)
    assert run_cli(*command, "-o", parts).code == 130
    monkeypatch.setattr(GuidedTraining, "step", step)
    assert read_guided_policy(checkpoint_path(parts)).steps == 53
    result = run_cli(*command, "-o", parts, "--resume")
    assert result.code == 0, result.err
    assert checkpoint_path(whole).read_bytes() == checkpoint_path(parts).read_bytes()
    assert whole.read_bytes() == parts.read_bytes()
    losses = [
        [(point.updates, point.loss, point.validation_cost) for point in read_curve(path, GuidedPoint)]
        for path in (whole.with_suffix(".csv"), parts.with_suffix(".csv"))
    ]
    assert losses[0] == losses[1]
    assert [point[0] for point in losses[0]] == [50, 56]


def test_another_training_is_not_resumed(run_cli, tmp_path):
    output = tmp_path / "p.safetensors"
    command = ("learn", "guided", *QUICK, "--steps", 1, "-o", output)
    missing = run_cli(*command, "--resume")
    assert (missing.code, "error[H003]" in missing.err) == (2, True)
    assert run_cli(*command).code == 0
    other = run_cli(*command, "--resume", "--seed", 1)
    assert other.err.startswith("error[H012]")
    assert "families, graphs, devices and seed must be equal" in other.err
    checkpoint_path(output).write_bytes(output.read_bytes())
    alone = run_cli(*command, "--resume")
    assert alone.err.startswith("error[H012]")
    assert "found a policy alone" in alone.err


def test_variants_change_links_and_speeds_only():
    (learning,) = draw_problems(GraphSet("two_towers", 1, nodes=30), 3)
    same, linked, unlike = (vary_problem(learning.problem, seed) for seed in (3, 4, 5))
    assert same is learning.problem
    assert linked.seconds.tolist() == same.seconds.tolist()
    assert linked.target.links[0].bytes_per_second != same.target.links[0].bytes_per_second
    assert unlike.seconds[0].tolist() == same.seconds[0].tolist()
    assert len({device.cost_class for device in unlike.target.devices}) == 3


def test_graphs_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(InputError, match="H011"):
        learn_guided([], GuidedOptions(steps=1), tmp_path / "p.safetensors")


def test_a_training_without_a_limit_is_refused():
    with pytest.raises(UsageError, match=r"U042(.|\n)*`steps"):
        GuidedOptions()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--steps", 1, "--family", "chains", "--graphs", "."), "U042"),
        (("--family", "chains"), "U042"),
        (("--family", "chain", "--steps", 1), "U001"),
    ],
)
def test_wrong_options_are_refused(run_cli, tmp_path, arguments, code):
    result = run_cli("learn", "guided", *arguments, "-o", tmp_path / "p.safetensors")
    assert result.code == 2
    assert f"error[{code}]" in result.err
    assert list(tmp_path.iterdir()) == []
