"""`export --to stages`: plain ONNX files and a script that runs them with nothing but ONNX Runtime and numpy."""

import json
import os
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from onnx import parser

import onnxplace
from onnxplace.driver.compile import compile_model
from onnxplace.export.exporting import export_bundle
from onnxplace.feeds.feeds import numpy_type
from onnxplace.feeds.npz import write_npz
from onnxplace.target.target import Device
from onnxplace.utils.progress import observe_progress
from onnxplace_formats import plain_stages
from tests.end_to_end.split_checks import ALTERNATING
from tests.export.samples import draw_feeds, run_file
from tests.support.commands import only_json
from tests.support.random_models import RandomModel, random_models
from tests.support.random_placements import RandomPlacement, assert_same, compiled_with, exported_with, placements

# Runs the script with feeds from a file, on one core, where `import onnxplace` fails.
ISOLATED = """
import sys
sys.modules["onnxplace"] = None
import runpy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_script(folder: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outputs of an exported script, in a process of its own."""
    np.savez(folder.parent / "inputs.npz", **feeds)
    outputs = folder.parent / "outputs.npz"
    command = [sys.executable, "-c", ISOLATED, folder / "run.py", folder.parent / "inputs.npz", outputs]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder.parent)
    assert ended.returncode == 0, ended.stderr
    with np.load(outputs) as arrays:
        return dict(arrays)


def load_script(folder: Path):
    """Import an exported script, as a user's program might."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("run", folder / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plan = module.read_plan()
    sessions = [module.open_stage(stage) for stage in plan["stages"]]
    return lambda feeds: module.run(plan, sessions, feeds)


def test_the_script_computes_the_bits_of_the_bundle_without_onnxplace(compiled, tmp_path):
    exported = export_bundle(compiled, "stages", tmp_path / "out")
    assert set(exported.files) == {
        "cpu0-000.onnx", "cpu0-001.onnx", "cpu1-000.onnx", "run.py", "stages.json", "weights.bin"
    }  # fmt: skip
    feeds = draw_feeds(onnxplace.load(compiled))
    with onnxplace.InferenceSession(compiled) as session:
        expected = session.run(None, feeds)
    assert_same(list(run_script(tmp_path / "out", feeds).values()), expected)
    lines = (tmp_path / "out" / "run.py").read_text().splitlines()
    assert sum(bool(line) for line in lines) <= 110
    usage = subprocess.run([sys.executable, tmp_path / "out" / "run.py"], capture_output=True, text=True, check=False)
    assert (usage.returncode, usage.stderr.strip()) == (1, lines[0].strip('"'))


@settings(
    max_examples=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)  # fmt: skip
@given(random_models(), placements(), st.booleans())
def test_stages_compute_the_same_as_the_model_in_every_split(
    model: RandomModel, placement: RandomPlacement, optimized: bool
):
    with exported_with(model, placement, "stages", optimized=optimized) as (_, out, expected):
        run = load_script(out)
        assert_same([list(run(feeds).values()) for feeds in model.feeds], expected)


def test_states_are_inputs_and_outputs_with_their_initial_values(sums_bundle, tmp_path):
    export_bundle(sums_bundle, "stages", tmp_path / "out")
    run, x = load_script(tmp_path / "out"), np.ones(3, np.float32)
    first = run({"x": x})
    assert first["sum"].tolist() == [2, 3, 4]
    assert run({"x": x, "total": first["sum"]})["sum"].tolist() == [3, 4, 5]


def test_values_of_types_that_numpy_lacks_pass_between_stages(tmp_path):
    proto = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[3] x) => (float[3] z) '
        "{ h = Cast<to=16>(x) d = Identity(h) z = Cast<to=1>(d) }"
    )
    bundle = compiled_with(proto, ALTERNATING, tmp_path, optimized=False)
    assert len(bundle.manifest.segments) == 3
    export_bundle(bundle, "stages", tmp_path / "out")
    assert load_script(tmp_path / "out")({"x": np.float32([1, 2, 3])})["z"].tolist() == [1, 2, 3]


HEAD = '<ir_version: 10, opset_import: ["": 21]> g '
JOINED = "(float[a] x, float[b] y) => (seq(float[c]) z, float[a] k) { k = Neg(x) z = SequenceConstruct(x, y) }"
SHORTENED = "(seq(float[c]) z) => (seq(float[c]) w, int64 k) { k = SequenceLength(z) w = SequenceErase(z) }"
TEXTS = "(string[n] x) => (string[n] y, seq(string[n]) z) { y = StringConcat(x, x) z = SequenceConstruct(x, y) }"
CAST = "({0}[n] x, float[n] y) => (float[n] z, {0}[n] k) {{ z = Cast<to = 1>(x) k = Cast<to = {1}>(y) }}"
NAMES = "(float[n] file) => (float[n] allow_pickle, float[n] arr_0) { allow_pickle = Neg(file) arr_0 = Abs(file) }"
X = np.float32([1.5, 2, 3])
FOREIGN = {"bfloat16": 16, "float8_e4m3fn": 17, "float8_e5m2": 19, "uint4": 21, "int4": 22}
WHAT_FILES_HOLD = {
    "ragged sequences": (JOINED, {"x": X, "y": X[:1]}),
    "sequences of equal arrays": (JOINED, {"x": X, "y": X}),
    "sequences as inputs": (SHORTENED, {"z": [X, X[:1], X[:2]]}),
    "sequences that become empty": (SHORTENED, {"z": [X]}),
    "texts": (TEXTS, {"x": np.array(["a", "b\u00fcc", ""])}),
    "texts in bytes": (TEXTS, {"x": np.array([b"a", "b\u00fc".encode()])}),
    "names that numpy.savez takes for itself": (NAMES, {"file": X}),
    **{
        f"{name} of {count}": (
            CAST.format(name.replace("_", ""), number),
            {"x": X[:count].astype(numpy_type(f"tensor({name.replace('_', '')})")), "y": X[:count]},
        )
        for name, number in FOREIGN.items()
        for count in (0, 2, 3)
    },
}


@pytest.mark.parametrize("case", WHAT_FILES_HOLD)
def test_the_script_writes_the_file_that_run_writes(case, tmp_path, run_cli):
    text, feeds = WHAT_FILES_HOLD[case]
    pipeline = "profile{estimate=true},coplace,single,split,emit"
    bundle = compile_model(
        parser.parse_model(HEAD + text), tmp_path / "bundle", devices="cpu:0", inputs=feeds, pipeline=pipeline
    ).bundle
    export_bundle(bundle, "stages", tmp_path / "out")
    with onnxplace.InferenceSession(bundle) as session:
        outputs = dict(zip((item.name for item in bundle.outputs), session.run(None, feeds)))
    write_npz(tmp_path / "expected.npz", outputs)
    write_npz(tmp_path / "inputs.npz", feeds)
    script = run_path(str(tmp_path / "out" / "run.py"))
    plan = script["read_plan"]()
    sessions = [script["open_stage"](stage) for stage in plan["stages"]]
    given = script["read_inputs"](plan, str(tmp_path / "inputs.npz"))
    script["write_outputs"](str(tmp_path / "outputs.npz"), script["run"](plan, sessions, given))
    with np.load(tmp_path / "expected.npz") as expected, np.load(tmp_path / "outputs.npz") as actual:
        assert actual.files == expected.files
        for name in expected:
            assert actual[name].dtype == expected[name].dtype
            assert_same(actual[name], expected[name])


def test_a_stage_that_cannot_take_a_text_says_so(tmp_path):
    text = "(string[n] x) => (string[n] y, bfloat16[1] h) <float[1] f = {1}> { y = Identity(x) h = Cast<to = 16>(f) }"
    feeds = {"x": np.array(["a"])}
    pipeline = "profile{estimate=true},coplace,single,split,emit"
    bundle = compile_model(
        parser.parse_model(HEAD + text), tmp_path / "bundle", devices="cpu:0", inputs=feeds, pipeline=pipeline
    ).bundle
    export_bundle(bundle, "stages", tmp_path / "out")
    with pytest.raises(SystemExit, match=r"cpu0-000.onnx returns types that numpy lacks: it cannot take 'x', a text"):
        load_script(tmp_path / "out")(feeds)


def test_every_stage_names_its_execution_provider():
    gpu = plain_stages.list_providers(Device("cuda:1", 1 << 30))
    assert [name for name, _ in gpu] == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert gpu[0][1]["device_id"] == "1"
    assert plain_stages.list_providers(Device("cpu:3", 1 << 30)) == [("CPUExecutionProvider", {})]


def test_files_are_valid_and_refer_to_weights_next_to_them(decoder_bundle, tmp_path, run_cli):
    data = only_json(run_cli("export", decoder_bundle.path, "--to", "stages", "-o", tmp_path / "out", "--json"))
    assert data["to"] == "stages"
    stages = json.loads((tmp_path / "out" / "stages.json").read_text())
    assert [stage["device"] for stage in stages["stages"]] == ["cpu:0", "cpu:0", "cpu:1"]
    for stage in stages["stages"]:
        onnx.checker.check_model(tmp_path / "out" / stage["file"], full_check=True)
    feeds = draw_feeds(decoder_bundle)
    expected = run_file(decoder_bundle.file("segments/whole.onnx"), feeds)
    actual = load_script(tmp_path / "out")(feeds)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(actual[name], value)


# ------------------------------------------------------------------------------------------- what holds for all formats


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_force_replaces_exports_and_nothing_else(run_cli, compiled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ("export", compiled, "--to", "stages", "-o", "out")
    assert run_cli(*command).code == 0
    assert "error[U030] out: it already exists" in run_cli(*command).err
    assert run_cli(*command, "--force").code == 0
    Path("out/notes.txt").write_text("mine")
    before = contents(tmp_path)
    refused = run_cli(*command, "--force")
    assert refused.code == 2
    assert "error[U031] out: it contains files that are not the export's: notes.txt" in refused.err
    assert contents(tmp_path) == before


def test_an_export_never_replaces_a_bundle_nor_a_bundle_an_export(
    run_cli, bundle_copy, model_file, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    other = ("export", bundle_copy, "--to", "stages", "-o")
    before = contents(tmp_path)
    for output, code in (("bundle", "U032"), ("bundle/inner", "U032"), (".", "U031")):
        refused = run_cli(*other, output, "--force")
        assert (refused.code, f"error[{code}]" in refused.err) == (2, True), refused
    assert contents(tmp_path) == before
    assert run_cli(*other, "out").code == 0
    refused = run_cli("compile", model_file, "-o", "out", "--force", "--shape", "batch=4")
    assert "error[U031] out: it is not a bundle" in refused.err


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_a_failure_leaves_nothing_behind(failure, compiled, tmp_path, monkeypatch):
    def fail(*_):
        raise failure

    monkeypatch.setattr(plain_stages, "build_plan", fail)
    with pytest.raises(failure):
        export_bundle(compiled, "stages", tmp_path / "a" / "out")
    assert list(tmp_path.iterdir()) == []


def test_unknown_formats_and_options_of_other_formats_are_refused(compiled, tmp_path, run_cli):
    with pytest.raises(onnxplace.UsageError, match=r"U001.*there is no format 'stagse'\n  hint: .*'stages'"):
        export_bundle(compiled, "stagse", tmp_path / "out")
    assert run_cli("export", compiled, "--to", "tensorrt", "-o", tmp_path / "out").code == 2
    assert not os.path.lexists(tmp_path / "out")


@pytest.mark.parametrize("to", ["stages", "triton"])
def test_an_export_reports_its_progress(to, decoder_bundle, tmp_path):
    shares: list[float] = []
    observer = SimpleNamespace(advance=shares.append, limit=shares.append)
    with observe_progress(observer):
        export_bundle(decoder_bundle, to, tmp_path / "out")
    assert len(shares) > 3
    assert shares == sorted(shares)
    assert shares[-1] > 0.8
