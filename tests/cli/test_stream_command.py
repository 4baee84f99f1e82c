"""`onnxplace compile --stream` and `plan --stream`, as a user types them."""

import json

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.driver.compile import compile_model
from onnxplace.errors import InfeasibleError, UsageError

LAYERS, WIDTH = 6, 512


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A chain of products with weights of 1 MiB each in a file of their own."""
    lines = " ".join(f"[mm{i}] v{i + 1} = MatMul(v{i}, w{i})" for i in range(LAYERS))
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[1, {WIDTH}] v0) => (float[1, {WIDTH}] v{LAYERS}) {{ {lines} }}"""
    model = parser.parse_model(text)
    for i in range(LAYERS):
        array = np.random.default_rng(i).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 22
        model.graph.initializer.append(numpy_helper.from_array(array, f"w{i}"))
    path = tmp_path_factory.mktemp("chain") / "chain.onnx"
    onnx.save(model, path, save_as_external_data=True, location="chain.onnx.data")
    return path


@pytest.fixture(scope="module")
def costs(chain, tmp_path_factory):
    """A cost file of the chain: 100 us a product."""
    from onnxplace.cli.app import main

    path = tmp_path_factory.mktemp("costs") / "costs.json"
    command = ["compile", chain, "-o", path.with_name("c.bundle"), "--devices", "cpu:0", "--save-costs", path]
    assert main([*map(str, command), "--no-trial"]) == 0
    return path


def find_note(compiled, code):
    return next((note for note in compiled.diagnostics if note.code == code), None)


def test_a_model_larger_than_its_device_streams_and_computes_the_same(chain, costs, tmp_path, run_cli):
    command = [
        "compile",
        chain,
        "-o",
        tmp_path / "b",
        "--devices",
        "cpu:0",
        "--costs",
        costs,
        "--max-memory",
        "4500KiB",
    ]
    ran = run_cli(*command, "--json")
    assert ran.code == 0, ran.err
    answer = json.loads(ran.out)
    assert answer["placer"] == "stream"
    notes = {note["code"]: note["message"] for note in answer["diagnostics"]}
    assert "waits for weights" in notes["P068"]
    assert "more:" in notes["P068"]
    manifest = Bundle.open(tmp_path / "b").manifest
    assert 0 < len(manifest.streamed) < LAYERS
    assert all(device.peak_bytes <= 4500 * 1024 for device in manifest.devices)
    ran = run_cli("verify", tmp_path / "b", "--json")
    assert ran.code == 0, ran.err


def test_enough_memory_changes_nothing(chain, costs, tmp_path):
    pipelines = []
    for number, stream in enumerate(("auto", "off")):
        options = {"devices": "cpu:0", "costs": costs, "stream": stream}
        compiled = compile_model(chain, tmp_path / f"{number}.bundle", **options)
        assert not compiled.bundle.manifest.streams
        pipelines.append(compiled.pipeline)
    assert pipelines[0] == pipelines[1]


def test_off_refuses_as_without_streaming(chain, costs, tmp_path):
    with pytest.raises(InfeasibleError) as caught:
        compile_model(chain, tmp_path / "b", devices="cpu:0", costs=costs, max_memory="3MiB", stream="off")
    assert caught.value.code.startswith("P00")


def test_always_streams_all_weights_through_the_pool(chain, costs, tmp_path, run_cli):
    options = ["--stream", "always", "--pool", "3MiB"]
    ran = run_cli("compile", chain, "-o", tmp_path / "b", "--devices", "cpu:0", "--costs", costs, *options)
    assert ran.code == 0, ran.err
    manifest = Bundle.open(tmp_path / "b").manifest
    assert len(manifest.streamed) == LAYERS
    assert [stream.pool_bytes for stream in manifest.streams] == [3 << 20]


def test_weights_stream_to_fit(chain, costs, tmp_path):
    options = {"devices": "cpu:0", "costs": costs, "max_memory": "4MiB", "objective": "fit"}
    assert compile_model(chain, tmp_path / "b", **options).bundle.manifest.streams


@pytest.mark.slow
def test_fit_streams_only_where_nothing_else_fits(chain, tmp_path):
    options = {"devices": "cpu:0,cpu:1", "trial": False, "max_memory": "4MiB", "objective": "fit"}
    assert not compile_model(chain, tmp_path / "b", **options).bundle.manifest.streams


@pytest.mark.slow
def test_two_devices_that_hold_the_model_together_are_compared_with_streaming(chain, tmp_path):
    compiled = compile_model(chain, tmp_path / "b", devices="cpu:0,cpu:1", trial=False, max_memory="4MiB")
    assert not compiled.bundle.manifest.streams  # from disk, weights come slower than they are computed


@pytest.mark.slow
def test_the_host_keeps_what_its_limit_allows(chain, costs, tmp_path):
    options = {"devices": "cpu:0", "costs": costs, "max_memory": "cpu:0=3MiB,host=5MiB"}
    manifest = compile_model(chain, tmp_path / "b", **options).bundle.manifest
    assert {weight.home for weight in manifest.streamed.values()} == {"host", "disk"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--stream", "sometimes"], "--stream: expected auto, off or always, got 'sometimes'"),
        (["--pool", "much"], "--pool: expected an amount of memory, got 'much'"),
        (["--pool", "0"], "--pool: a pool needs memory, got 0 bytes"),
        (["--max-memory", "host=1GiB,host=2GiB"], "--max-memory: host is limited twice"),
        (["--stream", "always", "--objective", "throughput"], "--stream always excludes"),
        (["--stream", "always", "--shard", "2"], "--stream always excludes"),
        (["--pool", "1GiB", "--stream", "off"], "--pool excludes"),
        (["--pool", "1GiB", "--placer", "single"], "--pool excludes"),
    ],
)
def test_bad_options_are_named(chain, tmp_path, run_cli, arguments, expected):
    ran = run_cli("compile", chain, "-o", tmp_path / "b", "--devices", "cpu:0", *arguments)
    assert ran.code == 2
    assert expected in ran.err
    assert not (tmp_path / "b").exists()


def test_a_target_of_several_hosts_has_no_host_to_limit(chain, tmp_path, run_cli):
    (tmp_path / "t.toml").write_text(
        '[[devices]]\nid = "a/cpu:0"\nmemory_bytes = 1000000\n[[devices]]\nid = "b/cpu:0"\nmemory_bytes = 1000000\n'
        '[[links]]\nsource = "a"\ndestination = "b"\nlatency_seconds = 1e-5\nbytes_per_second = 1e9\n'
        '[[links]]\nsource = "b"\ndestination = "a"\nlatency_seconds = 1e-5\nbytes_per_second = 1e9\n'
    )
    command = ["compile", chain, "-o", tmp_path / "b", "--target", tmp_path / "t.toml", "--max-memory", "host=1GiB"]
    ran = run_cli(*command)
    assert ran.code == 2
    assert "no device 'host' to limit" in ran.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--max-memory", "5MiB", "--pool", "1000KiB"], "have 1048576 bytes, more than the pool"),
        (["--max-memory", "1MiB"], "cpu:0 needs at least"),
    ],
)
def test_too_little_memory_says_what_is_needed(chain, costs, tmp_path, run_cli, arguments, expected):
    ran = run_cli("compile", chain, "-o", tmp_path / "b", "--devices", "cpu:0", "--costs", costs, *arguments)
    assert ran.code == 3
    assert "error[P066]" in ran.err
    assert expected in ran.err


def test_plan_lists_the_strategy_and_the_curve(chain, costs, run_cli):
    command = ["plan", chain, "--devices", "cpu:0", "--costs", costs, "--max-memory", "4MiB"]
    ran = run_cli(*command)
    assert ran.code == 0, ran.err
    assert "streamed weights" in ran.out
    assert "memory, with weights that stream" not in ran.out
    ran = run_cli(*command, "--stream", "--json")
    curve = json.loads(ran.out)["stream_curve"]
    assert len(curve) > 4
    assert curve[0]["step_seconds"] > 2 * curve[-1]["step_seconds"]
    assert curve[0]["waiting_seconds"] > curve[-1]["waiting_seconds"] == 0
    assert all(point["waiting_seconds"] < point["step_seconds"] for point in curve)
    assert "memory, with weights that stream" in run_cli(*command, "--stream").out


def test_plan_has_no_such_strategy_where_one_device_holds_the_model(chain, costs, run_cli):
    ran = run_cli("plan", chain, "--devices", "cpu:0", "--costs", costs, "--json")
    assert [item["name"] for item in json.loads(ran.out)["strategies"]] == ["one device"]


def test_python_arguments_are_named_as_in_python(chain):
    with pytest.raises(UsageError, match="`stream`: expected auto, off or always"):
        onnxplace.compile(chain, stream="sometimes")
