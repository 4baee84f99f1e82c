"""Wrong arguments of the Python interface are refused."""

import inspect
import json

import numpy as np
import pytest
from onnx import parser

import onnxplace
from onnxplace.cli.app import cli
from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.driver.place import place_cost_graph
from onnxplace.model.loading import load
from onnxplace.target.target import Device, Target
from onnxplace.target.target_file import format_target

pytestmark = pytest.mark.usefixtures("no_gpus")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "nope"}, ("U001", "nope")),
        ({"shape": {"batch": "8"}}, ("M022", "'batch'", "'8'")),
        ({"shape": {"batch": 8.5}}, ("M022", "8.5")),
        ({"shape": {"batch": 10**20}}, ("M022", "2147483647")),
        ({"device_map": {"nobody.*": "cpu:0"}}, ("U020", "nobody")),
        ({"device_map": {".*": 3}}, ("U023", "device map")),
        ({"max_memory": 10}, ("more than all devices have", "cpu:0")),
        ({"devices": 5}, ("U054", "5", "cuda:0,cuda:1")),
        ({"shape": "batch=8"}, ("U054", "'batch=8'", '{"batch": 8}')),
        ({"inputs": "f.npz"}, ("U054", "'f.npz'", "read_npz")),
        ({"target": 5, "devices": None}, ("U054", "expected Target | str | Path | None for target, got 5")),
        ({"target": "nowhere.toml", "devices": None}, ("T007", "nowhere.toml")),
        ({"device": "cpu:0"}, ("U054", "no option 'device'", "did you mean 'devices'?")),
        ({"state": {"y": 1}}, ("S001", "'1'")),
        *(
            ({name: wrong}, ("U054", f"for {name}, got "))
            for name, wrong in {
                "devices": [5],
                "state": 5,
                "placer": ["auto"],
                "objective": ["latency"],
                "budget_seconds": "2",
                "seed": "1",
                "cache": "no",
                "colocate": "left.*",
                "custom_op_libraries": None,
                "observer": "auto",
            }.items()
        ),
    ],
    ids=str,
)
def test_wrong_options_in_python_are_refused_by_name(model_file, tmp_path, options, words):
    all_options = {"shape": {"batch": 4}, "devices": "cpu:0,cpu:1", **options}
    with pytest.raises(onnxplace.OnnxplaceError) as refused:
        onnxplace.compile(model_file, tmp_path / "refused.bundle", **all_options)
    assert [word for word in words if word not in str(refused.value)] == []
    assert not (tmp_path / "refused.bundle").exists()


def test_errors_name_arguments_in_python_and_options_in_commands(run_cli, model_file, tmp_path, compiled):
    for function in (onnxplace.compile, onnxplace.plan):
        with pytest.raises(onnxplace.FeedError) as missing:
            function(model_file, devices="cpu:0")
        assert str(missing.value).endswith('such as `shape={"batch": 1}`, or real inputs with `inputs`')
    options = ("--shape batch=1", "--inputs F.npz")
    for command in ("compile", "plan"):
        assert [word for word in options if word not in run_cli(command, model_file, "--devices", "cpu:0").err] == []
        assert run_cli(command, "--help").out.count("--inputs F.npz") == 1
    with pytest.raises(onnxplace.UsageError, match="choose another `output`, or replace it with `force=True`"):
        onnxplace.compile(model_file, compiled, shape={"batch": 1})
    with pytest.raises(onnxplace.UsageError, match=r"U005. `recompute`: expected auto, off, always or a size"):
        onnxplace.compile(model_file, recompute="often", budget_seconds=1)
    with pytest.raises(onnxplace.UsageError, match="`pipeline` excludes `placer`, `objective` and `budget_seconds`"):
        onnxplace.compile(model_file, pipeline="emit", placer="auto")


def test_a_plan_takes_real_inputs(run_cli, model_file, tmp_path):
    arrays = {item.name: np.ones((3, 64), np.float32) for item in load(model_file).inputs}
    np.savez(tmp_path / "feeds.npz", **arrays)
    options = ("--devices", "cpu:0", "--estimate", "--json")
    given = run_cli("plan", model_file, "--inputs", tmp_path / "feeds.npz", *options)
    assert json.loads(given.out) == json.loads(run_cli("plan", model_file, "--shape", "batch=3", *options).out)
    assert onnxplace.plan(model_file, devices="cpu:0", inputs=arrays, estimate=True).strategies


def test_a_target_may_be_the_path_of_its_file(model_file, tmp_path):
    file = tmp_path / "t.toml"
    file.write_text(format_target(Target((Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30)))))
    options = {"shape": {"batch": 4}, "budget_seconds": 0.1, "trial": False}
    for target in (str(file), file):
        bundle = onnxplace.compile(model_file, tmp_path / "b", target=target, force=True, **options)
        assert [device.memory_bytes for device in bundle.target.devices] == [1 << 30] * 2


def test_unknown_options_of_placing_are_refused_by_name():
    graph = GENERATORS["layered"](5, seed=0)
    for options, words in (({"sed": 1}, "did you mean 'seed'?"), ({"groups": 1}, "for groups, got 1")):
        with pytest.raises(onnxplace.UsageError, match="U054") as refused:
            place_cost_graph(graph, **options)
        assert words in str(refused.value)


def test_arguments_of_wrong_types_are_refused(model_file, tmp_path):
    with pytest.raises(onnxplace.OnnxplaceError, match="U054"):
        onnxplace.compile(None, tmp_path / "none.bundle")
    device_map = {".*": "cpu:1"}
    bundle = onnxplace.compile(
        model_file, tmp_path / "b", devices="cpu:0,cpu:1", shape={"batch": 4}, device_map=device_map
    )
    assert {device.id: device.nodes > 0 for device in bundle.manifest.devices} == {"cpu:0": False, "cpu:1": True}
    with pytest.raises(onnxplace.OnnxplaceError, match="U001"):
        onnxplace.load(bundle.path, check="bogus")
    with onnxplace.InferenceSession(bundle) as session:
        assert session.get_inputs()[0].type == bundle.inputs[0].dtype
        with pytest.raises(onnxplace.OnnxplaceError, match="U054"):
            session.run(None, None)
        with pytest.raises(onnxplace.OnnxplaceError, match="expected a list of output names"):
            session.run(session.get_outputs()[0].name, {})


def test_functions_show_their_arguments_and_take_them_by_name_and_place(tmp_path):
    parameters = inspect.signature(onnxplace.compile).parameters
    assert list(parameters)[:2] == ["model", "output"]
    assert (parameters["shard"].default, parameters["shard"].kind) == ("auto", inspect.Parameter.KEYWORD_ONLY)
    renamed = {
        "budget": "budget_seconds",
        "no_cache": "cache",
        "no_trial": "trial",
        "custom_op_library": "custom_op_libraries",
    }
    options = {renamed.get(str(option.name), option.name) for option in cli.commands["compile"].params}
    only_commands = {"json_", "report", "save_target", "quiet", "verbose"}
    assert parameters.keys() - {"example_inputs", "observer"} == options - only_commands
    model = parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[1] x) => (float[1] y) { y = Abs(x) }')
    bundle = onnxplace.compile(model=model, output=tmp_path / "a", devices="cpu:0", trial=False)
    assert onnxplace.compile(model, tmp_path / "b", devices="cpu:0", trial=False).inputs == bundle.inputs
    with pytest.raises(TypeError, match="model"):
        onnxplace.compile()
