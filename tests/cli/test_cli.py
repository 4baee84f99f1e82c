"""The command as a user runs it: what it prints, what it writes, how it exits."""

import io
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxplace
from onnxplace.cli import app, main
from onnxplace.machine import import_onnxruntime
from onnxplace.report import format_bytes
from tests.conftest import FAST_PIPELINE, Ran, branches

pytestmark = pytest.mark.usefixtures("no_gpus")

SHAPE = ("--shape", "batch=4")
FAST = (*SHAPE, "--pipeline", FAST_PIPELINE)


@pytest.fixture(autouse=True)
def in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def only_json(ran: Ran) -> dict:
    """Return the one JSON object on stdout, and hold it to the standard: no NaN, no Infinity."""
    assert ran.out.startswith("{")
    return json.loads(ran.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def node_names(bundle: onnxplace.Bundle) -> dict[str, set[str]]:
    """Return which nodes each device runs, read from the ONNX files."""
    found: dict[str, set[str]] = {device.id: set() for device in bundle.target.devices}
    for segment in bundle.manifest.segments:
        graph = onnx.load(bundle.file(segment.file), load_external_data=False).graph
        found[segment.device] |= {node.name for node in graph.node}
    return found


def whole(feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = import_onnxruntime().InferenceSession(branches().SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


# ---------------------------------------------------------------------------------------------- compile


def test_compile_writes_a_bundle_beside_the_model_and_prints_what_was_decided(run_cli, model_file):
    ran = run_cli("compile", model_file, *SHAPE)
    assert ran.code == 0
    bundle = onnxplace.load(model_file.with_suffix(".bundle"), "all")
    for words in ("branches: 5 nodes", "placer auto", "cpu:0", "cpu:1", "segments", "predicted step", str(bundle.path)):
        assert words in ran.out


def test_compile_json_has_the_keys_that_scripts_depend_on(run_cli, model_file):
    ran = run_cli("compile", model_file, *FAST, "--json", "-o", "out")
    found = only_json(ran)
    assert ran.code == 0
    keys = (
        "bundle, model, placer, pipeline, predicted, devices, segments, transfers, transfer_bytes, passes, diagnostics"
    )
    assert set(found) >= set(keys.split(", "))
    assert set(found["predicted"]) >= {"step_seconds", "single_device_seconds", "lower_bound_seconds"}
    for device in found["devices"]:
        assert set(device) >= {"id", "nodes", "compute_seconds", "weights_bytes", "peak_bytes", "limit_bytes"}
    for step in found["passes"]:
        assert set(step) == {"name", "seconds"}
    for note in found["diagnostics"]:
        assert set(note) == {"code", "message", "where", "hint"}


def test_compile_json_is_what_the_bundle_says(run_cli, model_file):
    found = only_json(run_cli("compile", model_file, *FAST, "--json", "-o", "out"))
    manifest = onnxplace.load("out").manifest
    assert found["bundle"] == "out"
    assert found["model"] == "branches"
    assert found["placer"] == "m-etf"
    assert found["pipeline"] == manifest.pipeline == FAST_PIPELINE
    assert found["segments"] == len(manifest.segments)
    assert [device["id"] for device in found["devices"]] == ["cpu:0", "cpu:1"]
    assert sum(device["nodes"] for device in found["devices"]) == 5
    assert [step["name"] for step in found["passes"]] == [part.partition("{")[0] for part in FAST_PIPELINE.split(",")]
    assert 0 < found["predicted"]["lower_bound_seconds"] <= found["predicted"]["step_seconds"]


def test_the_pipeline_in_the_output_compiles_the_same_again(run_cli, model_file):
    first = only_json(run_cli("compile", model_file, *SHAPE, "--placer", "m-topo", "--json", "-o", "first"))
    ran = run_cli("compile", model_file, *SHAPE, "--pipeline", first["pipeline"], "--json", "-o", "second")
    assert only_json(ran)["pipeline"] == first["pipeline"]
    assert "m-topo" in first["pipeline"]


@pytest.mark.parametrize("placer", ["single", "m-topo", "m-etf"])
def test_placer_puts_its_pass_into_the_default_pipeline(run_cli, model_file, placer):
    found = only_json(run_cli("compile", model_file, *SHAPE, "--placer", placer, "--json"))
    assert found["placer"] == placer
    assert placer in found["pipeline"].split(",")


def test_real_inputs_bind_the_dimensions(run_cli, model_file):
    np.savez("feeds.npz", x=np.zeros((3, 64), "f4"))
    ran = run_cli("compile", model_file, "--inputs", "feeds.npz", "--pipeline", FAST_PIPELINE, "-o", "out")
    assert ran.code == 0
    crossing = [value for value in onnxplace.load("out").manifest.values.values() if value.producer]
    assert {value.bytes for value in crossing} == {3 * 64 * 4}


def test_max_memory_is_the_limit_in_the_output(run_cli, model_file):
    found = only_json(run_cli("compile", model_file, *FAST, "--max-memory", "cpu:0=1GiB,cpu:1=500MB", "--json"))
    assert [device["limit_bytes"] for device in found["devices"]] == [2**30, 500_000_000]


def test_a_device_that_cannot_hold_anything_gets_nothing(run_cli, model_file):
    found = only_json(run_cli("compile", model_file, *FAST, "--max-memory", "cpu:0=1,cpu:1=1GiB", "--json"))
    assert [device["nodes"] for device in found["devices"]] == [0, 5]


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
    ran = run_cli("compile", model_file, *SHAPE, "--device-map", "map.json", "-o", "out", "--strict")
    assert ran.code == 0
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


def test_a_seed_is_not_silently_dropped_beside_a_pipeline(run_cli, model_file):
    ran = run_cli("compile", model_file, *FAST, "--seed", "7", "--json")
    assert ran.code == 2 or "seed=7" in only_json(ran)["pipeline"]


# ---------------------------------------------------------------------------------------------- run


def test_run_writes_what_the_model_computes(run_cli, compiled):
    feeds = {"x": np.random.default_rng(7).standard_normal((5, 64)).astype("f4")}
    np.savez("feeds.npz", **feeds)
    ran = run_cli("run", compiled, "--inputs", "feeds.npz", "--outputs", "out.npz")
    assert ran.code == 0
    assert "y  float32 [5, 64]" in ran.out
    with np.load("out.npz") as outputs:
        assert outputs.files == ["y"]
        np.testing.assert_allclose(outputs["y"], whole(feeds), rtol=1e-4, atol=1e-4)


def test_run_without_inputs_draws_the_same_ones_for_the_same_seed(run_cli, compiled):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run_cli("run", compiled, "--seed", seed, "--outputs", f"{name}.npz").code == 0
    a, b, c = (np.load(f"{name}.npz") for name in "abc")
    with a, b, c:
        assert np.array_equal(a["y"], b["y"])
        assert not np.array_equal(a["y"], c["y"])


def test_run_takes_another_size_than_it_was_compiled_for(run_cli, compiled):
    assert "y  float32 [9, 64]" in run_cli("run", compiled, "--shape", "batch=9").out


def test_run_json_says_how_long_and_what_came_out(run_cli, compiled):
    ran = run_cli("run", compiled, "--repeat", "3", "--json")
    found = only_json(ran)
    assert (ran.code, found["runs"], found["runtime"]) == (0, 3, "onnxruntime")
    assert found["seconds"] > 0
    assert found["outputs"] == {"y": {"dtype": "float32", "shape": [4, 64]}}


@pytest.mark.parametrize("runtime", ["onnxruntime", "simulated"])
def test_a_trace_has_a_row_for_each_device_and_an_event_for_each_segment(run_cli, compiled, runtime):
    assert run_cli("run", compiled, "--runtime", runtime, "--trace", "trace.json").code == 0
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert rows == {"cpu:0", "cpu:1"}
    ran = {event["name"] for event in events if event["ph"] == "X" and event["cat"] == "run"}
    assert ran == {segment.id for segment in onnxplace.load(compiled).manifest.segments}
    assert any(event["ph"] == "X" and event["cat"] == "copy" for event in events)


def test_simulated_runs_take_what_the_compiler_predicted(run_cli, compiled):
    ran = run_cli("run", compiled, "--runtime", "simulated", "--json")
    assert ran.code == 0
    predicted = onnxplace.load(compiled).manifest.predicted.step_seconds
    assert only_json(ran)["seconds"] == pytest.approx(predicted)
    assert "predicted" in run_cli("run", compiled, "--runtime", "simulated").out


def test_simulated_runs_take_the_same_however_often(run_cli, compiled):
    ran = run_cli("run", compiled, "--runtime", "simulated", "--repeat", "3", "--json")
    assert only_json(ran)["seconds"] == pytest.approx(onnxplace.load(compiled).manifest.predicted.step_seconds)


def test_outputs_of_what_computes_nothing_are_refused(run_cli, compiled):
    assert run_cli("run", compiled, "--runtime", "simulated", "--outputs", "out.npz").code == 2
    assert not Path("out.npz").exists()


def compiled_from(run_cli, text: str) -> str:
    """Compile a model for one device and return the path of its bundle."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    Path("other.onnx").write_bytes(model.SerializeToString())
    pipeline = "optimize,profile{estimate=true},m-etf,split,emit"
    assert run_cli("compile", "other.onnx", "--devices", "cpu:0", "--pipeline", pipeline, "-o", "other").code == 0
    return "other"


def test_a_model_that_only_hands_its_input_back_runs(run_cli):
    assert run_cli("verify", compiled_from(run_cli, "(float[2] x) => (float[2] x) { }")).code == 0


def test_outputs_may_have_any_name(run_cli):
    bundle = compiled_from(run_cli, "(float[2] x) => (float[2] file) { file = Relu(x) }")
    assert run_cli("run", bundle, "--outputs", "out.npz").code == 0
    with np.load("out.npz") as outputs:
        assert outputs.files == ["file"]


@pytest.mark.parametrize("command", ["run", "verify"])
def test_sequences_come_out_as_lists(run_cli, command):
    bundle = compiled_from(run_cli, "(float[2] x, float[3] z) => (seq(float) y) { y = SequenceConstruct(x, z) }")
    ran = run_cli(command, bundle, "--json")
    assert (ran.code, only_json(ran).get("equal", True)) == (0, True)


def test_strings_go_in_and_come_out(run_cli):
    bundle = compiled_from(run_cli, "(string[2] x) => (string[2] y) { y = Identity(x) }")
    assert run_cli("verify", bundle).code == 0


# ---------------------------------------------------------------------------------------------- verify and bench


def test_verify_says_equal_and_exits_with_zero(run_cli, compiled):
    ran = run_cli("verify", compiled)
    assert ran.code == 0
    assert ran.out.startswith("equal  y")


def test_verify_json_has_the_keys_that_scripts_depend_on(run_cli, compiled):
    found = only_json(run_cli("verify", compiled, "--json"))
    assert found["equal"] is True
    assert [set(output) >= {"name", "max_abs_error", "max_rel_error"} for output in found["outputs"]] == [True]


def test_verify_compares_with_the_model_it_is_given(run_cli, compiled, model_file):
    assert run_cli("verify", compiled, "--against", model_file).code == 0
    Path("altered.onnx").write_bytes(branches(seed=1).SerializeToString())
    ran = run_cli("verify", compiled, "--against", "altered.onnx")
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.startswith("DIFFERS y")
    ran = run_cli("verify", compiled, "--against", "altered.onnx", "--json")
    assert (ran.code, only_json(ran)["equal"]) == (1, False)


def test_verify_notices_one_altered_weight(run_cli, compiled):
    model = branches()
    weight = bytearray(model.graph.initializer[0].raw_data)
    weight[:4] = np.float32(9).tobytes()
    model.graph.initializer[0].raw_data = bytes(weight)
    Path("altered.onnx").write_bytes(model.SerializeToString())
    assert run_cli("verify", compiled, "--against", "altered.onnx").code == 1


def test_verify_json_is_json_when_shapes_differ(run_cli, compiled):
    text = "(float[batch, 64] x) => (float[64, batch] y) { y = Transpose(x) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    Path("other.onnx").write_bytes(model.SerializeToString())
    ran = run_cli("verify", compiled, "--against", "other.onnx", "--json")
    assert (ran.code, only_json(ran)["equal"]) == (1, False)


def test_bench_json_has_the_keys_that_scripts_depend_on(run_cli, compiled):
    ran = run_cli("bench", compiled, "--no-memory", "--repeat", "2", "--json")
    found = only_json(ran)
    assert ran.code == 0
    for name in ("bundle", "model"):
        assert set(found[name]) == {"median_seconds", "p90_seconds", "runs"}
        assert found[name]["runs"] == 2
    assert found["ratio"] == pytest.approx(found["bundle"]["median_seconds"] / found["model"]["median_seconds"])
    assert found["predicted_seconds"] == onnxplace.load(compiled).manifest.predicted.step_seconds


def test_bench_shows_the_honest_row(run_cli, compiled):
    ran = run_cli("bench", compiled, "--no-memory", "--repeat", "1")
    assert ran.code == 0
    assert "bundle on 2 devices" in ran.out
    assert "one session, all cores" in ran.out


def test_bench_with_requests_in_flight_times_each_result_beside_the_largest_load(run_cli, compiled):
    ran = run_cli("bench", compiled, "--no-memory", "--repeat", "2", "--in-flight", "4", "--json")
    found, manifest = only_json(ran), onnxplace.load(compiled).manifest
    assert found["in_flight"]["runs"] == 2
    assert found["in_flight"]["median_seconds"] > 0
    assert found["predicted_interval_seconds"] == manifest.predicted.interval_seconds
    busiest = max(device.compute_seconds for device in manifest.devices)
    assert busiest <= manifest.predicted.interval_seconds <= manifest.predicted.step_seconds * (1 + 1e-9)
    assert "several in flight" in run_cli("bench", compiled, "--no-memory", "--repeat", "1", "--in-flight", "2").out


def test_bench_over_a_limit_exits_with_one(run_cli, compiled):
    ran = run_cli("bench", compiled, "--no-memory", "--repeat", "1", "--max-ratio", "1e-9", "--json")
    assert ran.code == 1
    assert only_json(ran)["ratio"] > 1e-9
    assert "more than 1e-09" in ran.err


# ---------------------------------------------------------------------------------------------- what there is


def test_devices_shows_what_is_here(run_cli):
    ran = run_cli("devices")
    assert ran.code == 0
    assert "onnxruntime" in ran.out
    found = only_json(run_cli("devices", "--json"))
    assert set(found) >= {"host", "gpus", "onnxruntime", "default"}
    assert found["default"]


def test_a_target_that_devices_wrote_compiles(run_cli, model_file):
    assert run_cli("devices", "-o", "target.toml").code == 0
    written = [device["id"] for device in tomllib.loads(Path("target.toml").read_text())["devices"]]
    found = only_json(run_cli("compile", model_file, *FAST, "--target", "target.toml", "--json"))
    assert [device["id"] for device in found["devices"]] == written


def test_a_target_elsewhere_compiles_here_with_estimates(run_cli, model_file, monkeypatch):
    monkeypatch.setattr("onnxplace.passes.profiling.profile_model.cuda_problem", lambda index: "there is none here")
    device = '[[devices]]\nid = "cuda:{}"\nmemory_bytes = 80000000000\nmodel = "Imaginary 9000"\n'
    Path("target.toml").write_text(device.format(0) + device.format(1))
    ran = run_cli("compile", model_file, *SHAPE, "--target", "target.toml", "--json")
    found = only_json(ran)
    assert ran.code == 0
    assert [item["id"] for item in found["devices"]] == ["cuda:0", "cuda:1"]
    assert "C001" in {note["code"] for note in found["diagnostics"]}
    assert run_cli("run", "model.bundle", "--runtime", "simulated").code == 0


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("passes", ["optimize", "profile", "coplace", "fuse", "single", "m-topo", "m-etf", "split", "emit"]),
        ("runtimes", ["onnxruntime", "simulated"]),
    ],
)
def test_passes_and_runtimes_are_listed_with_a_line_each(run_cli, command, names):
    found = only_json(run_cli(command, "--json"))[command]
    assert set(names) <= {entry["name"] for entry in found}
    assert all(entry["summary"] for entry in found)
    lines = {line.split()[0]: line for line in run_cli(command).out.splitlines()}
    assert set(names) <= set(lines)


def test_summaries_stand_in_one_column(run_cli):
    lines = run_cli("passes").out.splitlines()[1:]
    assert len({len(line) - len(line.split(maxsplit=1)[1]) for line in lines}) == 1


def test_a_pass_is_shown_with_its_options_and_defaults(run_cli):
    ran = run_cli("passes", "profile")
    assert ran.code == 0
    for words in ("Measure", "repeat", "int", "estimate", "False"):
        assert words in ran.out
    found = only_json(run_cli("passes", "profile", "--json"))
    assert found["name"] == "profile"
    assert {"name", "type", "default"} <= set(found["options"][0])
    assert next(option for option in found["options"] if option["name"] == "estimate")["default"] is False


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("auto", "seconds=2.0  (float, at least 0)"),
        ("m-sct", "threshold=0.1  (float, at least 0, at most 1)"),
        ("profile", "repeat=100  (int, at least 1)"),
        ("profile", "estimate=False  (bool)"),
    ],
)
def test_the_type_of_an_option_is_in_words(run_cli, name, shown):
    assert shown in run_cli("passes", name).out


def test_a_runtime_is_shown_with_what_it_does(run_cli):
    assert "ONNX Runtime" in run_cli("runtimes", "onnxruntime").out


# ---------------------------------------------------------------------------------------------- manners


def test_the_module_runs_as_the_command_does():
    done = subprocess.run([sys.executable, "-m", "onnxplace", "--help"], capture_output=True, text=True, check=True)
    for command in ("compile", "run", "verify", "bench", "devices", "passes", "runtimes"):
        assert command in done.stdout
    assert "Exit codes" in done.stdout


@pytest.mark.parametrize("command", ["compile", "run", "verify", "bench", "devices", "passes", "runtimes"])
def test_every_command_explains_itself_and_takes_json(run_cli, command):
    ran = run_cli(command, "--help")
    assert ran.code == 0
    assert "--json" in ran.out


def test_version_is_that_of_the_package(run_cli):
    assert onnxplace.__version__ in run_cli("--version").out


ESCAPE = "\x1b["


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_goes_to_a_terminal_on_stderr_and_nowhere_else(run_cli, model_file, monkeypatch, capsys):
    quiet = run_cli("compile", model_file, *FAST, "-o", "quiet")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["compile", str(model_file), *FAST, "-o", "quietly"]) == 0
    assert ESCAPE in terminal.getvalue()
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == len(quiet.out.splitlines())
    assert ESCAPE not in shown + quiet.out + quiet.err


def test_json_keeps_a_terminal_free_of_progress(model_file, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["compile", str(model_file), *FAST, "--json"]) == 0
    assert ESCAPE not in terminal.getvalue()
    json.loads(capsys.readouterr().out)


def test_notes_go_to_stderr(run_cli, model_file):
    ran = run_cli("compile", model_file, *FAST, "--json")
    assert ran.err.startswith("note[C001] ")
    assert "note[" not in ran.out


def test_a_reader_that_goes_away_is_no_failure(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    assert main(["passes", "--json"]) in (0, 141)


def test_that_kernels_are_compiled_is_said_once_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import numba

    from onnxplace.cli.options import tell_of_compiling
    from onnxplace.utils import on_compiling

    on_compiling(lambda: None)
    tell_of_compiling()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert numba.njit(lambda x: x + 3)(1) == 4
    assert capsys.readouterr().err == ""
    tell_of_compiling()
    assert capsys.readouterr().err == ""
    for add in (1, 2):
        assert numba.njit(lambda x, add=add: x + add)(1) == 1 + add
    assert capsys.readouterr().err.count("compiling kernels") == 1


def test_a_reader_that_goes_away_ends_the_examples_without_a_traceback():
    script = Path(__file__).parents[2] / "examples" / "models.py"
    command = [sys.executable, script, "--list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 0


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 19, "1.5 MiB"),
        (1 << 30, "1.00 GiB"),
    ],
)
def test_small_amounts_of_memory_are_not_rounded_to_nothing(size, text):
    assert format_bytes(size) == text


# ---------------------------------------------------------------------------------------------- any version of click


@pytest.mark.parametrize("name", sorted(app.cli.commands))
def test_flags_are_declared_so_that_every_click_understands_them_alike(name):
    """In click 8.3.0 to 8.3.2, `flag_value=False, default=True` is False whether the flag is given or not."""
    for parameter in app.cli.commands[name].params:
        if getattr(parameter, "is_flag", False):
            assert parameter.flag_value is not False, f"{name} {parameter.opts[0]}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compil",), "No such command 'compil': did you mean 'compile'?"),
        (("RUN", "x"), "No such command 'RUN': did you mean 'run'?"),
        (("frobnicate",), "No such command 'frobnicate': known: compile, run,"),
        (("--frobnicate",), "--frobnicate"),
        (("--", "--frobnicate"), "--frobnicate"),
    ],
)
def test_an_unknown_command_gets_the_nearest_one_whatever_click_does(run_cli, arguments, said):
    ran = run_cli(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_completing_an_unknown_command_in_a_shell_is_no_error():
    with app.cli.make_context("onnxplace", ["compil"], resilient_parsing=True) as context:
        assert app.cli.resolve_command(context, ["compil"]) == (None, None, [])


# ---------------------------------------------------------------------------------------------- errors for scripts


@pytest.mark.parametrize(
    ("arguments", "code", "exit_code"),
    [
        (("compile", "none.onnx"), "M001", 2),
        (("compile", "none.onnx", "--shape", "n=1,n=2"), "U011", 2),
        (("compile", "none.onnx", "--seed", "-1"), "U012", 2),
        (("run", "none"), "N001", 2),
        (("verify", "none"), "N001", 2),
        (("bench", "none"), "N001", 2),
        (("place", "none"), "D001", 2),
        (("devices", "--devices", "gpu:0"), "T005", 2),
        (("passes", "none"), "U001", 2),
        (("runtimes", "none"), "U001", 2),
        (("place", "none", "--devices", "0"), "U000", 2),
        (("compile",), "U000", 2),
        (("frobnicate",), "U000", 2),
    ],
)
def test_with_json_an_error_is_the_one_object_on_stdout_and_text_on_stderr(run_cli, arguments, code, exit_code):
    ran, without = run_cli(*arguments, "--json"), run_cli(*arguments)
    assert (ran.code, without.code) == (exit_code, exit_code)
    (error,) = only_json(ran).values()
    assert set(error) == {"code", "message", "where", "hint"}
    assert error["code"] == code
    assert error["message"] in ran.err
    assert without.out == ""
    assert without.err == ran.err


@pytest.mark.parametrize(
    ("raised", "code", "exit_code"),
    [
        (KeyboardInterrupt(), "X011", 130),
        (SystemExit(app.TERMINATED), "X011", 143),
        (MemoryError(), "X010", 4),
        (OSError(28, "full", "disk"), "E001", 4),
    ],
)
def test_what_stops_a_command_from_outside_is_json_too(run_cli, monkeypatch, raised, code, exit_code):
    def stop(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(app.cli, "main", stop)
    ran = run_cli("passes", "--json")
    assert (ran.code, only_json(ran)["error"]["code"]) == (exit_code, code)


def test_a_defect_of_ours_does_not_exit_as_if_the_answer_were_no(monkeypatch, capsys):
    def break_down() -> int:
        raise ZeroDivisionError("something of ours")

    monkeypatch.setattr(app, "main", break_down)
    monkeypatch.setattr(app.signal, "signal", lambda *_: None)
    monkeypatch.setattr(app.sys, "argv", ["onnxplace", "passes", "--json"])
    with pytest.raises(SystemExit) as left:
        app.entry()
    assert left.value.code == 4
    said = capsys.readouterr()
    assert "ZeroDivisionError: something of ours" in said.err
    assert "please report it" in said.err
    assert json.loads(said.out)["error"]["code"] == "X012"
