"""`onnxplace learn` without torch: families, generated graphs, and what it refuses."""

import json
import sys

import click
import numpy as np
import pytest
from click.testing import CliRunner

from onnxplace.cost_graph.cost_graphs import read_cost_graph
from onnxplace.errors import InputError
from onnxplace.target.machines import parse_machine
from onnxplace.target.target_file import read_target
from onnxplace_learned.commands.learning_options import learning_options
from onnxplace_learned.graphs.graph_sets import FAMILIES, GraphSet, graph_fingerprint
from onnxplace_learned.policy_training.learning_graphs import draw_mixture, draw_problems, read_problems
from onnxplace_learned.policy_training.training_loop import CurvePoint, plot_curve, read_curve, write_curve
from tests.conftest import branches

POINTS = [CurvePoint(8, 1.5, 64, 1.25, 0.9, 0.69, 0.875, 0.95), CurvePoint(16, 3.0, 128, 1.0, 0.8, 0.5, 0.75, 0.95)]


def test_families_are_listed_with_summaries(run_cli):
    result = run_cli("learn", "families")
    assert result.code == 0
    assert all(name in result.out for name in FAMILIES)
    data = json.loads(run_cli("learn", "families", "--json").out)
    assert [entry["name"] for entry in data["families"]] == list(FAMILIES)


def test_generated_graphs_are_written_and_can_be_placed(run_cli, tmp_path):
    command = ("learn", "graphs", "--family", "two_towers", "--nodes", 40, "--devices", 3)
    for side, count in (("train", 3), ("test", 2)):
        result = run_cli(*command, "--count", count, "--side", side, "-o", tmp_path / side)
        assert result.code == 0, result.err
        assert len(list((tmp_path / side).iterdir())) == count
    prints = [graph_fingerprint(read_cost_graph(path).profile.graph) for path in tmp_path.rglob("*.graphml")]
    assert len(set(prints)) == 5
    path = next((tmp_path / "train").iterdir())
    assert len(json.loads(run_cli("place", path, "--placer", "m-etf", "--json").out)["peak_bytes"]) == 3


def test_backward_passes_are_written(run_cli, tmp_path):
    result = run_cli(
        "learn",
        "graphs",
        "--family",
        "transformer",
        "--count",
        1,
        "--nodes",
        60,
        "--backward",
        "-o",
        tmp_path,
        "--json",
    )
    (path,) = json.loads(result.out)["files"]
    assert read_cost_graph(path).profile.backward.any()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("graphs", "--family", "convolutional", "-o", "out"), "U001"),
        (("graphs", "--family", "chains", "--backward", "-o", "out"), "U001"),
    ],
)
def test_wrong_families_are_refused(run_cli, arguments, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run_cli("learn", *arguments)
    assert result.code == 2
    assert result.err.startswith(f"error[{code}]")


@pytest.mark.parametrize("policy", ["placeto", "hierarchical", "go"])
def test_without_torch_one_line_says_what_to_install(run_cli, monkeypatch, tmp_path, policy):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run_cli("learn", policy, "--family", "chains", "--seconds", 1, "-o", tmp_path / "p.safetensors")
    assert result.code == 2
    assert result.err.startswith("error[U110]")
    assert "pip install 'onnxplace-learned[learn]'" in result.err
    assert list(tmp_path.iterdir()) == []


def fixed_branches():
    """Return a small model with a fixed batch."""
    model = branches()
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    return model.SerializeToString()


def test_a_folder_of_cost_graphs_and_models_becomes_problems(run_cli, tmp_path):
    run_cli("learn", "graphs", "--family", "chains", "--nodes", 20, "--count", 2, "-o", tmp_path)
    first, second = sorted(tmp_path.iterdir())
    (tmp_path / "z_copy.graphml").write_bytes(first.read_bytes())
    (tmp_path / "model.onnx").write_bytes(fixed_branches())
    (tmp_path / "notes.txt").write_text("ignored")
    graphs = read_problems(tmp_path, 3)
    # The copy has the fingerprint of its original.
    assert [graph.name for graph in graphs] == [first.name, second.name, "model.onnx"]
    assert [len(graph.problem.target.devices) for graph in graphs] == [3, 3, 3]


def test_drawn_problems_have_the_groups_of_their_graphs():
    (graph,) = draw_problems(GraphSet("transformer", 1, nodes=60, backward=True), 3)
    assert len(graph.problem.target.devices) == 3
    assert len(graph.problem.pinned) < len(graph.problem.graph)


TARGET = """
link_model = "sequential"
[[devices]]
id = "cpu:0"
memory_bytes = 4000000000
operations_per_second = 3e9
[[devices]]
id = "cpu:1"
memory_bytes = 5000000000
operations_per_second = 1e9
[[devices]]
id = "cuda:0"
memory_bytes = 6000000000
[[links]]
source = "cpu:0"
destination = "cuda:0"
latency_seconds = 0.25
bytes_per_second = 1e6
"""


@pytest.fixture
def target_file(tmp_path):
    (tmp_path / "target.toml").write_text(TARGET)
    return tmp_path / "target.toml"


def test_a_target_sets_number_memory_links_and_relative_speeds(target_file):
    target = read_target(target_file)
    graphs = GraphSet("two_towers", 1, nodes=30)
    (alone,), (learning,) = draw_problems(graphs, 1), draw_problems(graphs, 3, target)
    problem = learning.problem
    assert problem.limit_bytes.tolist() == [4_000_000_000, 5_000_000_000, 6_000_000_000]
    # Without a rate of its own, a device is as fast as the fastest.
    np.testing.assert_allclose(problem.seconds, alone.problem.seconds * np.array([[1.0], [3.0], [1.0]]))
    assert len({device.cost_class for device in problem.target.devices}) == 2
    assert problem.target.link_model == "sequential"
    for given, applied in zip(target.link_arrays(), problem.target.link_arrays()):
        assert given.tolist() == applied.tolist()


def test_a_mixture_has_the_first_devices_of_a_target(target_file):
    graphs = draw_mixture(["two_towers"], 1, 30, 3, read_target(target_file))
    sizes = [graph.problem.limit_bytes.tolist() for graph in graphs]
    pair = [4_000_000_000, 5_000_000_000]
    assert sizes == [pair] * 3 + [[*pair, 6_000_000_000]] * 3


def test_models_have_the_devices_of_a_target(tmp_path, target_file):
    (tmp_path / "model.onnx").write_bytes(fixed_branches())
    two = "".join(TARGET.partition('[[devices]]\nid = "cuda:0"')[0])
    target_file.write_text(two)
    (graph,) = read_problems(tmp_path / "model.onnx", 2, read_target(target_file))
    assert [device.id for device in graph.problem.target.devices] == ["cpu:0", "cpu:1"]
    assert graph.problem.limit_bytes.tolist() == [4_000_000_000, 5_000_000_000]
    assert graph.state is not None


def test_a_machine_by_name_gives_the_devices_to_learn_for(tmp_path):
    requests, saved = [], tmp_path / "machine.toml"
    command = click.command()(learning_options()(requests.append))
    options = ("--machine", "3xL4", "--save-target", saved, "-o", tmp_path / "p.safetensors")
    result = CliRunner().invoke(command, ["--family", "chains", *map(str, options)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    expected = parse_machine("3xL4").to_target()
    assert (requests[0].devices, requests[0].target, read_target(saved)) == (3, expected, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", "2", "--target", "target.toml"), "--devices and --target exclude each other"),
        (("--devices", "2", "--machine", "2xL4"), "--devices and --machine exclude each other"),
        (("--target", "target.toml", "--machine", "2xL4"), "--target and --machine exclude each other"),
        (("--target", "absent.toml"), "error[T007] absent.toml"),
        (("--machine", "2xL44"), "error[T014] --machine: unknown machine '2xL44'"),
        (("--devices", "cpu:0,gpx:1"), "unknown device 'gpx:1'"),
        (("--devices", "٢"), "unknown device"),
        (("--devices", "0"), "0 is not in the range 1<=x<=256"),
        (("--devices", "257"), "257 is not in the range 1<=x<=256"),
    ],
)
def test_wrong_devices_are_refused(run_cli, target_file, monkeypatch, arguments, message):
    monkeypatch.chdir(target_file.parent)
    for policy in ("placeto", "guided"):
        result = run_cli("learn", policy, "--family", "chains", "--seconds", 1, *arguments, "-o", "p.safetensors")
        assert result.code == 2
        assert message in result.err
    assert list(target_file.parent.iterdir()) == [target_file]


def test_a_folder_without_graphs_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"H011.*no graphs"):
        read_problems(tmp_path, 2)
    with pytest.raises(InputError, match=r"H011.*expected a folder"):
        read_problems(tmp_path / "missing", 2)


@pytest.mark.parametrize("placer", ["hierarchical{policy=p.safetensors}", "hierarchical{episodes=8}", "go{episodes=8}"])
def test_without_torch_the_placers_that_need_it_say_so(run_cli, monkeypatch, tmp_path, placer):
    monkeypatch.setitem(sys.modules, "torch", None)
    run_cli("learn", "graphs", "--family", "chains", "--nodes", 20, "--count", 1, "-o", tmp_path)
    (graph,) = tmp_path.iterdir()
    result = run_cli("place", graph, "--placer", placer)
    assert result.code == 2
    assert result.err.startswith("error[U110]")
    assert "pip install 'onnxplace-learned[learn]'" in result.err


# ---------------------------------------------------------------------------------------------- learning curves


def test_a_curve_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "curve.csv"
    write_curve(path, POINTS)
    assert read_curve(path) == POINTS
    assert path.read_text().splitlines()[0].startswith("updates,seconds,episodes,train_cost")


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "HEADER\n1,2\n", "HEADER\n1,2,3,4,5,six,7,8\n"])
def test_another_file_is_not_a_curve(tmp_path, text):
    write_curve(tmp_path / "curve.csv", [])
    header = (tmp_path / "curve.csv").read_text().strip()
    (tmp_path / "curve.csv").write_text(text.replace("HEADER", header))
    with pytest.raises(InputError, match="H012"):
        read_curve(tmp_path / "curve.csv")


def test_a_plot_needs_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert not plot_curve(tmp_path / "curve.png", POINTS, "placeto")
    assert not (tmp_path / "curve.png").exists()
