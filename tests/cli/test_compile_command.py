"""`onnxplace compile`: its summary, its JSON and its bundle."""

from pathlib import Path

import numpy as np
import pytest

import onnxplace
from onnxplace.errors import UsageError
from tests.conftest import FAST_PIPELINE
from tests.support.commands import FAST, SHAPE, node_names, only_json

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")


def test_compile_writes_a_bundle_next_to_the_model_and_prints_a_summary(run_cli, model_file):
    result = run_cli("compile", model_file, *SHAPE)
    assert result.code == 0
    bundle = onnxplace.load(model_file.with_suffix(".bundle"), "all")
    for words in ("branches: 5 nodes", "placer auto", "cpu:0", "cpu:1", "segments", " ms a step, ", str(bundle.path)):
        assert words in result.out


def test_compile_json_has_the_keys_that_scripts_depend_on(run_cli, model_file):
    result = run_cli("compile", model_file, *FAST, "--json", "-o", "out")
    data = only_json(result)
    assert result.code == 0
    keys = (
        "bundle, model, placer, pipeline, predicted, devices, segments, transfers, transfer_bytes, passes, diagnostics"
    )
    assert set(data) >= set(keys.split(", "))
    assert set(data["predicted"]) >= {"step_seconds", "single_device_seconds", "lower_bound_seconds"}
    for device in data["devices"]:
        assert set(device) >= {"id", "nodes", "compute_seconds", "weights_bytes", "peak_bytes", "limit_bytes"}
    for step in data["passes"]:
        assert set(step) == {"name", "seconds"}
    for note in data["diagnostics"]:
        assert set(note) == {"code", "message", "where", "hint"}


def test_compile_json_agrees_with_the_bundle(run_cli, model_file):
    data = only_json(run_cli("compile", model_file, *FAST, "--json", "-o", "out"))
    manifest = onnxplace.load("out").manifest
    assert data["bundle"] == "out"
    assert data["model"] == "branches"
    assert data["placer"] == "m-etf"
    assert data["pipeline"] == manifest.pipeline == FAST_PIPELINE
    assert data["segments"] == len(manifest.segments)
    assert [device["id"] for device in data["devices"]] == ["cpu:0", "cpu:1"]
    assert sum(device["nodes"] for device in data["devices"]) == 5
    assert [step["name"] for step in data["passes"]] == [part.partition("{")[0] for part in FAST_PIPELINE.split(",")]
    assert 0 < data["predicted"]["lower_bound_seconds"] <= data["predicted"]["step_seconds"]


@pytest.mark.parametrize(
    ("effort", "profile", "auto", "limited"),
    [
        ("low", "profile{estimate=true}", "auto{seconds=0.2}", "auto{seconds=0.1}"),
        ("default", "profile", "auto{eager=true}", "auto{seconds=0.1,eager=true}"),
        ("high", "profile{seconds=5.0,thorough=true}", "auto", "auto{seconds=0.1}"),
    ],
)
def test_an_effort_decides_what_is_measured_and_how_long_is_searched(
    run_cli, model_file, effort, profile, auto, limited
):
    options = (*SHAPE, "--shard", "off", "--effort", effort, "--no-trial", "--json", "-o", "out", "--force")
    data = only_json(run_cli("compile", model_file, *options))
    assert data["pipeline"] == f"optimize,{profile},coplace{{join=never}},fuse,{auto},split,emit"
    assert (effort == "low") == any("estimates were requested" in note["message"] for note in data["diagnostics"])
    assert f"fuse,{limited},split" in only_json(run_cli("compile", model_file, *options, "--budget", "0.1"))["pipeline"]


@pytest.mark.parametrize("effort", ["low", "default"])
def test_an_effort_decides_what_plan_measures(run_cli, model_file, effort):
    result = run_cli("plan", model_file, *SHAPE, "--devices", "cpu:0,cpu:1", "--effort", effort)
    assert result.code == 0
    assert ("costs are estimates" in result.out) == (effort == "low")


def test_an_effort_belongs_to_passes_that_onnxplace_chooses(run_cli, model_file):
    result = run_cli("compile", model_file, *SHAPE, "--effort", "high", "--pipeline", FAST_PIPELINE, "-o", "out")
    assert result.code == 2
    assert "error[U042]" in result.err


def test_an_unknown_effort_is_refused_before_any_work(model_file):
    for command in (onnxplace.compile, onnxplace.plan):
        with pytest.raises(UsageError, match="expected low, default or high"):
            command(model_file, effort="much")


def test_the_pipeline_in_the_output_compiles_the_same_again(run_cli, model_file):
    first = only_json(run_cli("compile", model_file, *SHAPE, "--placer", "m-topo", "--json", "-o", "first"))
    result = run_cli("compile", model_file, *SHAPE, "--pipeline", first["pipeline"], "--json", "-o", "second")
    assert only_json(result)["pipeline"] == first["pipeline"]
    assert "m-topo" in first["pipeline"]


@pytest.mark.parametrize("placer", ["single", "m-topo", "m-etf"])
def test_placer_puts_its_pass_into_the_default_pipeline(run_cli, model_file, placer):
    data = only_json(run_cli("compile", model_file, *SHAPE, "--placer", placer, "--json"))
    assert data["placer"] == placer
    assert placer in data["pipeline"].split(",")


def test_real_inputs_bind_the_dimensions(run_cli, model_file):
    np.savez("feeds.npz", x=np.zeros((3, 64), "f4"))
    result = run_cli("compile", model_file, "--inputs", "feeds.npz", "--pipeline", FAST_PIPELINE, "-o", "out")
    assert result.code == 0
    crossing = [value for value in onnxplace.load("out").manifest.values.values() if value.producer]
    assert {value.bytes for value in crossing} == {3 * 64 * 4}


def test_max_memory_is_the_limit_in_the_output(run_cli, model_file):
    data = only_json(run_cli("compile", model_file, *FAST, "--max-memory", "cpu:0=1GiB,cpu:1=500MB", "--json"))
    assert [device["limit_bytes"] for device in data["devices"]] == [2**30, 500_000_000]


def test_a_device_that_cannot_hold_anything_gets_nothing(run_cli, model_file):
    data = only_json(run_cli("compile", model_file, *FAST, "--max-memory", "cpu:0=1,cpu:1=1GiB", "--json"))
    assert [device["nodes"] for device in data["devices"]] == [0, 5]


def test_compiling_twice_from_the_same_costs_gives_the_same_files(run_cli, model_file, compiled):
    options = (*SHAPE, "--costs", compiled / "costs.json", "--max-memory", "1GiB")
    for name in ("first", "second"):
        assert run_cli("compile", model_file, *options, "-o", name).code == 0
    first, second = (
        {str(path.relative_to(name)): path.read_bytes() for path in Path(name).rglob("*") if path.is_file()}
        for name in ("first", "second")
    )
    assert first == second
    assert len(first) > 3


def test_the_costs_of_a_bundle_give_its_programs_and_segments_again(run_cli, model_file, compiled):
    pipeline = FAST_PIPELINE.replace("estimate=true", f'costs="{compiled / "costs.json"}"')
    assert run_cli("compile", model_file, *SHAPE, "--pipeline", pipeline, "-o", "again").code == 0
    first, again = onnxplace.load(compiled), onnxplace.load("again")
    assert again.manifest.programs == first.manifest.programs
    assert again.manifest.segments == first.manifest.segments
    for segment in first.manifest.segments:
        assert again.manifest.files[segment.file] == first.manifest.files[segment.file]


def test_a_device_map_decides_where_each_node_goes(run_cli, model_file):
    Path("map.json").write_text('{"left|relu": "cpu:1", "right": "cpu:0", ".*": "cpu:1"}')
    result = run_cli("compile", model_file, *SHAPE, "--device-map", "map.json", "-o", "out", "--strict")
    assert result.code == 0
    assert node_names(onnxplace.load("out")) == {"cpu:0": {"right"}, "cpu:1": {"left", "relu", "tanh", "sum"}}
    assert run_cli("verify", "out").code == 0


def test_colocated_nodes_share_a_device(run_cli, model_file):
    pipeline = FAST_PIPELINE.replace("join=never", "join=never,colocate=left|right")
    assert run_cli("compile", model_file, *SHAPE, "--pipeline", pipeline, "-o", "together").code == 0
    homes = [names & {"left", "right"} for names in node_names(onnxplace.load("together")).values()]
    assert sorted(map(len, homes)) == [0, 2]


def test_colocate_is_written_into_the_pipeline_and_may_be_repeated(run_cli, model_file):
    options = ("--colocate", "left|right", "--colocate", "relu|tanh", "--json")
    assert 'colocate="left|right;relu|tanh"'.replace('"', "") in only_json(
        run_cli("compile", model_file, *SHAPE, *options)
    )["pipeline"].replace('"', "")


def test_a_seed_is_not_silently_ignored_with_a_pipeline(run_cli, model_file):
    result = run_cli("compile", model_file, *FAST, "--seed", "7", "--json")
    assert result.code == 2 or "seed=7" in only_json(result)["pipeline"]
