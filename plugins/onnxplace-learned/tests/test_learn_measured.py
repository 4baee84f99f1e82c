"""`onnxplace learn placeto --reward measured`: bundles as rewards, what is kept, and what it refuses."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed; .ci/training has it")

from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import Diagnostic, ExecutionError, InfeasibleError, InputError, UsageError
from onnxplace.facts import Placement, Profile
from onnxplace.pipeline.pipeline import make_pass, run_pass
from onnxplace_learned.graphs.graph_sets import GraphSet
from onnxplace_learned.policies.environment import Environment
from onnxplace_learned.policies.placeto_learning import Learner, Settings, read_policy, update_from_ends, write_policy
from onnxplace_learned.policies.placeto_network import Policy, Shape
from onnxplace_learned.policies.placing import coarsen_to, place_with_policy
from onnxplace_learned.policies.teacher import search_lesson
from onnxplace_learned.policy_training import measured_training as bundle_timer
from onnxplace_learned.policy_training.learning_graphs import draw_problems, read_problems
from onnxplace_learned.policy_training.measured_training import (
    FAILED_COST,
    BundleTimer,
    MeasuredModel,
    MeasuredTraining,
)
from onnxplace_learned.policy_training.placeto_training import PlacetoOptions
from onnxplace_learned.policy_training.training_loop import checkpoint_path, learn_policy
from onnxplace_training import map_arrays, write_arrays
from tests.conftest import branches

DEVICES = "cpu:0,cpu:1"


class FakeTrial:
    def __init__(self, seconds):
        self.step_seconds, self.waiting, self.uncertainty = seconds, 0.0, 0.0


@pytest.fixture
def model_path(tmp_path):
    model = branches()
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    return tmp_path / "model.onnx"


@pytest.fixture
def fake_trials(monkeypatch):
    """Let a bundle take 1 ms for each segment on cpu:0, and 0.2 ms for others; return how often bundles were run."""
    runs = []

    def run(bundles, feeds, cached):
        runs.append(len(bundles))
        assert not cached
        return [
            FakeTrial(sum(1e-3 if item.device == "cpu:0" else 2e-4 for item in bundle.manifest.segments))
            for bundle in bundles
        ]

    monkeypatch.setattr(bundle_timer, "run_trials", run)
    monkeypatch.setattr(bundle_timer, "find_trial_obstacle", lambda *bundles: None)
    return runs


@pytest.fixture
def graphs(model_path):
    # Estimated costs: profiling takes longer than the tests.
    (graph,) = read_problems(model_path, 2)
    return [graph]


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Return the folder of temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def learn(graphs, output, updates, **options):
    resume, observer = options.pop("resume", False), options.pop("observer", None)
    settings = Settings(episodes=2)
    given = PlacetoOptions(devices=2, updates=updates, settings=settings, start="first-device", **options)
    return learn_policy(MeasuredTraining, graphs, given, output, family="model", resume=resume, observer=observer)


def place_all_on(graph, device):
    return np.full(len(graph.problem.graph), device, dtype=np.int32)


# -------------------------------------------------------------------------------------------- the timer of bundles


def test_a_placement_is_run_once(graphs, fake_trials, tmp_path):
    timer = BundleTimer(graphs[0], tmp_path)
    before = list(tmp_path.iterdir())
    assert timer.require_time(place_all_on(graphs[0], 0)) == 1e-3
    assert timer.time(place_all_on(graphs[0], 1)) == 2e-4
    assert timer.time(place_all_on(graphs[0], 1)) == 2e-4
    assert (timer.bundles, fake_trials) == (2, [1, 1])
    assert list(tmp_path.iterdir()) == before


def test_what_does_not_fit_or_fails_has_no_time(graphs, fake_trials, tmp_path, monkeypatch):
    tight = replace(graphs[0], problem=replace(graphs[0].problem, limit_bytes=np.array([1 << 40, 1])))
    target = tight.problem.target.limiting({"cpu:1": 1})
    tight = replace(tight, problem=replace(tight.problem, target=target), state=replace(tight.state, target=target))
    timer = BundleTimer(tight, tmp_path)
    assert timer.time(place_all_on(tight, 1)) is None
    with pytest.raises(InfeasibleError, match="no placement to start from fits"):
        timer.require_time(place_all_on(tight, 1))

    def fail(bundles, feeds, cached):
        raise ExecutionError("X001", "a segment failed")

    monkeypatch.setattr(bundle_timer, "run_trials", fail)
    before = list(tmp_path.iterdir())
    assert timer.time(place_all_on(tight, 0)) is None
    assert timer.compare([place_all_on(tight, 0)] * 2) is None
    with pytest.raises(ExecutionError, match="a segment failed"):
        timer.require_time(place_all_on(tight, 0))
    assert list(tmp_path.iterdir()) == before
    model = MeasuredModel(Environment(tight.problem), np.arange(len(tight.problem.graph)), timer, ())
    assert model.measure(place_all_on(tight, 1)) == FAILED_COST


def test_several_placements_are_run_in_turns(graphs, fake_trials, tmp_path):
    timer = BundleTimer(graphs[0], tmp_path)
    before = list(tmp_path.iterdir())
    assert timer.compare([place_all_on(graphs[0], 1), place_all_on(graphs[0], 0)]) == [2e-4, 1e-3]
    assert fake_trials == [2]
    assert list(tmp_path.iterdir()) == before


# --------------------------------------------------------------------------------------------------- the training


def test_the_best_measured_placement_is_kept_next_to_the_policy(graphs, fake_trials, tmp_path, temporary):
    """The simulator has no reason to leave the first device; the fake times have."""
    points = []
    result = learn(graphs, tmp_path / "p.safetensors", 3, observer=lambda progress, point: points.append(point))
    policy = read_policy(tmp_path / "p.safetensors")
    assert (policy.reward, policy.max_nodes, policy.start) == ("measured", 40, "first-device")
    assert json.loads((tmp_path / "p.device-map.json").read_text()) == {".*": "cpu:1"}
    (device,) = policy.kept.values()
    assert set(device.tolist()) == {1}
    (graph,) = graphs
    placed = run_pass(make_pass("placeto", {"policy": str(tmp_path / "p.safetensors")}), graph.state)
    assert set(placed[Placement].device.tolist()) == {1}, "what was measured decides, not the policy or the simulator"
    assert result.measured_ratio == pytest.approx(0.2)
    assert [point.updates for point in points] == [1, 2, 3]
    assert points[-1].bundles == sum(fake_trials[:-1])
    assert list(temporary.iterdir()) == []
    assert set(result.files) >= {tmp_path / "p.safetensors", tmp_path / "p.csv", tmp_path / "p.device-map.json"}


def make_measured_model(graph, folder, times):
    """Return a model in which all on one device takes so many seconds; the search finds the first device."""
    cluster = np.arange(len(graph.problem.graph))
    model = MeasuredModel(Environment(graph.problem), cluster, BundleTimer(graph, folder), ())
    devices = [place_all_on(graph, index) for index in range(2)]
    model.tried = {device.tobytes(): (seconds, device) for seconds, device in zip(times, devices)}
    model.searched = devices[0]
    return model


@pytest.mark.parametrize(("other", "kept"), [(0.99, 1.0), (0.97, 0.97), (1.5, 1.0)])
def test_only_a_clearly_shorter_step_displaces_the_placement_of_the_search(graphs, tmp_path, other, kept):
    assert make_measured_model(graphs[0], tmp_path, [1.0, other]).best[0] == kept


def test_runs_in_turns_decide_unless_they_are_disturbed(graphs, fake_trials, tmp_path, monkeypatch):
    model = make_measured_model(graphs[0], tmp_path, [1.0, 0.5])
    model.confirm()
    # The fake times of all on cpu:0, and all on cpu:1.
    assert (model.reference[0], model.best[0]) == (1e-3, 2e-4)
    monkeypatch.setattr(bundle_timer, "is_doubtful", lambda trial: True)
    model = make_measured_model(graphs[0], tmp_path, [1.0, 0.5])
    model.confirm()
    assert model.best[1].tolist() == model.searched.tolist()
    assert model.timer.disturbed == 2


def test_each_model_has_its_device_map(graphs, fake_trials, tmp_path):
    both = [replace(graphs[0], name="first.onnx"), replace(graphs[0], name="second.onnx")]
    result = learn(both, tmp_path / "p.safetensors", 2)
    maps = [tmp_path / "p.first.device-map.json", tmp_path / "p.second.device-map.json"]
    assert set(maps) <= set(result.files)
    assert [json.loads(path.read_text()) for path in maps] == [{".*": "cpu:1"}] * 2
    assert read_policy(tmp_path / "p.safetensors").graphs == 2


def test_a_device_map_is_read_as_it_was_written(graphs, fake_trials, tmp_path):
    problem, cluster = coarsen_to(graphs[0].problem, 3)
    names = tuple(graphs[0].state[Profile].graph.names)
    model = MeasuredModel(Environment(problem), cluster, BundleTimer(graphs[0], tmp_path), names)
    device = np.arange(len(cluster), dtype=np.int32) % 2
    model.measure(device)
    model.searched = device
    (tmp_path / "map.json").write_text(json.dumps(model.device_map()))
    assert model.read_device_map(tmp_path / "map.json").tolist() == device.tolist()
    for text in ("[]", "{", '{".*": "cpu:7"}', '{"(": "cpu:0"}', '{"other": "cpu:0"}'):
        (tmp_path / "map.json").write_text(text)
        assert model.read_device_map(tmp_path / "map.json") is None
    assert model.read_device_map(tmp_path / "absent.json") is None


def test_an_interruption_leaves_what_was_found_and_no_bundles(graphs, fake_trials, tmp_path, temporary):
    def interrupt(progress, point):
        raise KeyboardInterrupt

    output = tmp_path / "p.safetensors"
    with pytest.raises(KeyboardInterrupt):
        learn(graphs, output, 5, observer=interrupt)
    assert read_policy(checkpoint_path(output)).updates == 1
    assert json.loads((tmp_path / "p.device-map.json").read_text()) == {".*": "cpu:1"}
    assert list(temporary.iterdir()) == []
    result = learn(graphs, output, 2, resume=True)
    assert [point.updates for point in result.points] == [1, 2]
    # The placement that was kept is measured anew.
    (tmp_path / "p.device-map.json").write_text('{".*": "cpu:1"}')
    assert learn(graphs, output, 2, resume=True).measured_ratio == pytest.approx(0.2)


def test_an_interruption_while_a_bundle_runs_leaves_no_bundles(graphs, fake_trials, tmp_path, temporary, monkeypatch):
    run, calls = bundle_timer.run_trials, iter(range(100))

    def interrupt(*arguments, **options):
        if next(calls) == 4:
            raise KeyboardInterrupt
        return run(*arguments, **options)

    monkeypatch.setattr(bundle_timer, "run_trials", interrupt)
    with pytest.raises(KeyboardInterrupt):
        learn(graphs, tmp_path / "p.safetensors", 50)
    assert list(temporary.iterdir()) == []
    assert (tmp_path / "p.device-map.json").exists()


def test_rewards_at_the_ends_of_episodes_teach_a_policy():
    """The cost is lower the more nodes are on the second device, which simulated steps have nothing to do with."""
    (graph,) = draw_problems(GraphSet("two_towers", 1, nodes=12), 2)
    environment = Environment(graph.problem, start_from="first-device")
    shape, settings = Shape(2), Settings(episodes=8, learning_rate=1e-2)
    learner = Learner.of(Policy(shape, shape.draw_parameters(0), start="first-device"))
    shares = []
    for _ in range(25):
        update = update_from_ends(learner, environment, settings, 0.5, lambda device: float(1.5 - (device == 1).mean()))
        learner = update.learner
        shares.append(1.5 - update.cost)
    assert np.mean(shares[:3]) < 0.7
    assert np.mean(shares[-3:]) > 0.9
    again = update_from_ends(Learner.of(learner.policy), environment, settings, 0.5, lambda device: 1.0)
    assert again.learner.policy.theta.tolist() == learner.policy.theta.tolist()
    assert again.learner.policy.updates == 26


def test_a_policy_with_measured_rewards_decides_against_the_simulator():
    """It places all on the second device, where the simulator prefers its start."""
    (graph,) = draw_problems(GraphSet("two_towers", 1, nodes=12), 2)
    shape = Shape(2)
    theta = np.zeros(shape.parameters, dtype=np.float32)
    theta[-1] = 100.0  # the bias of the second device
    for reward, expected in (("measured", {1}), ("simulated", {0, 1})):
        policy = Policy(shape, theta, start="auto", reward=reward, max_nodes=6)
        result = place_with_policy(graph.problem, policy, "topological", episodes=0, seed=0, max_nodes=500)
        assert set(result.visited[0].device.tolist()) == expected


def test_episodes_may_start_from_a_search():
    (graph,) = draw_problems(GraphSet("encoder_decoder", 1, nodes=40), 2)
    searched = Environment(graph.problem, start_from="auto")
    lesson = search_lesson(graph.problem, 2_000, 0)
    assert searched.start.tolist() == lesson.device.tolist()
    assert searched.evaluate(searched.start).seconds <= searched.evaluate(Environment(graph.problem).start).seconds


def test_policies_say_how_they_were_rewarded(tmp_path):
    shape, path = Shape(2), tmp_path / "p.safetensors"
    policy = Policy(shape, shape.draw_parameters(0), start="auto", reward="measured", max_nodes=7)
    write_policy(path, policy)
    read = read_policy(path)
    assert (read.reward, read.max_nodes, read.start) == ("measured", 7, "auto")
    file = map_arrays(path, "H003", "")
    arrays = {name: np.array(array) for name, array in file.arrays.items()}
    write_arrays(path, arrays, {**file.metadata, "reward": "guessed"})
    with pytest.raises(InputError, match=r"H003.*its reward is 'guessed'"):
        read_policy(path)


# ----------------------------------------------------------------------------------------------------- the command


def test_the_command_runs_bundles_and_leaves_what_compile_takes(run_cli, model_file, tmp_path):
    output = tmp_path / "own.safetensors"
    model = ("--devices", DEVICES, "--shape", "batch=4")
    limits = ("--reward", "measured", "--updates", 1, "--episodes", 2)
    result = run_cli("learn", "placeto", "--graphs", model_file, *model, *limits, "-o", output, "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert data["best"]["bundles"] >= 2
    assert str(tmp_path / "own.device-map.json") in data["files"]
    assert read_policy(output).start == "auto"
    command = ("compile", model_file, *model, "--no-trial")
    policy, mapped = tmp_path / "policy.bundle", tmp_path / "mapped.bundle"
    with_policy = run_cli(*command, "--placer", f"placeto{{policy={output}}}", "-o", policy)
    assert with_policy.code == 0, with_policy.err
    device_map = tmp_path / "own.device-map.json"
    with_map = run_cli(*command, "--placer", "m-etf", "--device-map", device_map, "-o", mapped)
    assert with_map.code == 0, with_map.err
    kept = set(json.loads(device_map.read_text()).values())
    for bundle in (mapped, policy):
        assert {segment.device for segment in Bundle.open(bundle).manifest.segments} == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--family", "chains"), "error[H011] --reward: a measured reward needs ONNX models"),
        (("--graphs", "graphs"), "is a cost graph\n  hint: --graphs model.onnx"),
        (("--graphs", "model.onnx", "--reward", "guessed"), "expected one of simulated, measured, got 'guessed'"),
        (("--family", "chains", "--shape", "batch=2"), "--shape is for ONNX models"),
    ],
)
def test_wrong_options_are_refused(run_cli, model_path, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    run_cli("learn", "graphs", "--family", "chains", "--nodes", 10, "--count", 1, "-o", "graphs")
    command = ("learn", "placeto", "--updates", 1, "--count", 1, "--nodes", 10, "-o", "p.safetensors")
    result = run_cli(*command, "--reward", "measured", *arguments)
    assert result.code == 2
    assert message in result.err
    assert not Path("p.safetensors").exists()


def test_models_that_cannot_be_run_here_are_refused(graphs, fake_trials, tmp_path, monkeypatch):
    obstacle = Diagnostic("C020", "no trial was run: its CPU devices have 64 cores, this machine 2")
    monkeypatch.setattr(bundle_timer, "find_trial_obstacle", lambda *bundles: obstacle)
    with pytest.raises(UsageError, match=r"H011.*measured reward is not possible.*64 cores, this machine 2"):
        learn(graphs, tmp_path / "p.safetensors", 1)
    assert list(tmp_path.glob("p.*")) == []


def test_generated_graphs_are_refused(tmp_path):
    with pytest.raises(UsageError, match="H011"):
        BundleTimer(draw_problems(GraphSet("chains", 1, nodes=10), 2)[0], tmp_path)
