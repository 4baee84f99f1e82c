"""Plugins are listed without being imported; broken plugins do not affect others.

A distribution is installed by hand: its modules and a `.dist-info` folder in a folder of their own, which a process of
its own has on its path. The one that works is made of the files in examples/plugin.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from onnxplace.cli import app
from onnxplace.pipeline.registry import find_plugin
from onnxplace.plugins import list_entries
from onnxplace.testing.pass_contract import check_pass
from onnxplace.testing.runtime_contract import check_runtime
from tests.conftest import FAST_PIPELINE, Ran

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plugin"
MODULE = "onnxplace_round_robin"
DISTRIBUTION = "onnxplace-round-robin"

# Several commands in one process, because each process takes a second.
DRIVER = """
import contextlib, io, json, sys
from onnxplace.cli.app import main
results = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    results.append({"code": code, "out": out.getvalue(), "err": err.getvalue()})
print(json.dumps({"results": results, "modules": sorted(sys.modules)}))
"""


Entries = Mapping[str, Mapping[str, str]]


def install(site: Path, name: str, entries: Entries, modules: Mapping[str, str]) -> None:
    """Install a distribution by hand: entry points by group, modules by name."""
    information = site / f"{name.replace('-', '_')}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {path}\n" for key, path in named.items()) for group, named in entries.items()
    ]
    (information / "entry_points.txt").write_text("\n".join(lines))
    for module, text in modules.items():
        (site / f"{module}.py").write_text(text)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder with the installed example plugin."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    folder = tmp_path / "site"
    install(folder, project["name"], project["entry-points"], {})
    shutil.copy(EXAMPLE / f"{MODULE}.py", folder)
    return folder


@dataclass(frozen=True)
class Session:
    """The results of commands in one process, and the modules loaded at its end."""

    results: tuple[Ran, ...]
    modules: frozenset[str]


@pytest.fixture
def commands(tmp_path: Path) -> Callable[..., Session]:
    """Run commands with plugins on the path; a traceback fails the test."""

    def run(site: Path, *lines: list[str]) -> Session:
        process = subprocess.run(
            [sys.executable, "-c", DRIVER],
            input=json.dumps(lines),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert process.returncode == 0, process.stderr
        session = json.loads(process.stdout)
        return Session(tuple(Ran(**item) for item in session["results"]), frozenset(session["modules"]))

    return run


# ---------------------------------------------------------------------------------------------- one that works


def test_a_plugin_is_listed_with_its_distribution_and_not_imported(site, commands):
    session = commands(site, ["passes", "--json"], ["runtimes", "--json"], ["passes"], ["runtimes"])
    assert [result.code for result in session.results] == [0, 0, 0, 0]
    for result, kind, name in zip(session.results, ("passes", "runtimes"), ("round-robin", "one-thread")):
        (entry,) = [entry for entry in json.loads(result.out)[kind] if entry["name"] == name]
        assert entry["distribution"] == DISTRIBUTION
        assert DISTRIBUTION in entry["summary"]
    assert re.search(rf"^round-robin +plugin from {DISTRIBUTION}$", session.results[2].out, re.MULTILINE)
    assert "one-thread" in session.results[3].out
    assert MODULE not in session.modules


def test_a_plugin_compiles_and_runs_like_built_in_passes(site, commands, model_file):
    pipeline = FAST_PIPELINE.replace("m-etf", "round-robin{first=1}")
    shape = ["--shape", "batch=4"]
    placer, other, verified, runtime, shown, misspelt = commands(
        site,
        ["compile", "model.onnx", *shape, "--placer", "round-robin", "--effort", "low", "--json"],
        ["compile", "model.onnx", *shape, "--pipeline", pipeline, "-o", "other.bundle", "--json", "--strict"],
        ["verify", "other.bundle", "--runtime", "one-thread", "--json"],
        ["run", "other.bundle", "--runtime", "one-thread", "--json", "--trace", "trace.json"],
        ["passes", "round-robin"],
        ["passes", "round-robbin"],
    ).results
    assert [placer.code, other.code, verified.code, runtime.code, shown.code] == [0] * 5
    assert "round-robin" in json.loads(placer.out)["pipeline"].split(",")
    assert json.loads(other.out)["placer"] == "round-robin"
    assert [device["nodes"] for device in json.loads(other.out)["devices"]] == [2, 3]
    assert json.loads(verified.out)["equal"] is True
    assert json.loads(runtime.out)["runtime"] == "one-thread"
    assert "Assign groups" in shown.out
    assert "first" in shown.out
    assert misspelt.code == 2
    assert "did you mean 'round-robin'?" in misspelt.err


def test_a_kind_of_devices_from_a_plugin_is_found_compiled_for_and_run(site, commands, model_file):
    # Two logical devices of one, with an option that is part of the costs' class.
    devices = "emulated:0/0{mood=excited},emulated:0/1,cpu:0"
    device_map = {"left": "emulated:0/0", "right": "emulated:0/1", ".*": "cpu:0"}
    model_file.with_name("map.json").write_text(json.dumps(device_map))
    shape = ["--shape", "batch=4"]
    listed, compiled, verified, ran, target, missing, option, part = commands(
        site,
        ["devices", "--json"],
        [
            "compile",
            "model.onnx",
            *shape,
            "--devices",
            devices,
            "--device-map",
            "map.json",
            "--effort",
            "low",
            "--json",
        ],
        ["verify", "model.bundle", "--json"],
        ["run", "model.bundle", "--json", "--trace", "trace.json"],
        ["devices", "--devices", devices, "-o", "target.toml"],
        ["compile", "model.onnx", "-o", "b", *shape, "--devices", "emulated:1,cpu:0"],
        ["compile", "model.onnx", "-o", "b", *shape, "--devices", "emulated:0{mood=angry}"],
        ["compile", "model.onnx", "-o", "b", *shape, "--devices", "cpu:0/1"],
    ).results
    assert [listed.code, compiled.code, verified.code, ran.code, target.code] == [0] * 5, compiled.err
    assert ("emulated:0", "Emulated 1000") in [
        (gpu["id"], gpu["name"]) for gpu in json.loads(listed.out)["accelerators"]
    ]
    assert [device["id"] for device in json.loads(compiled.out)["devices"]] == ["emulated:0/0", "emulated:0/1", "cpu:0"]
    assert json.loads(verified.out)["equal"] is True
    text = model_file.with_name("target.toml").read_text()
    assert 'options = {mood = "excited"}' in text
    assert 'model = "Emulated 1000"' in text
    assert (missing.code, option.code, part.code) == (2, 2, 2)
    assert "error[T011] emulated:1: this machine emulates one device only" in missing.err
    assert "install" not in missing.err, "emulated:0 works, so nothing has to be installed"
    assert "expected one of calm, excited for mood, got 'angry'" in option.err
    assert "device 'cpu:0/1' cannot be one of several on cpu:0" in part.err


def test_a_command_of_a_plugin_is_listed_without_its_module_and_runs_like_built_in_ones(site, commands, compiled):
    help_, misspelt = ["--help"], ["share", str(compiled)]
    listed = commands(site, help_, misspelt)
    assert re.search(rf"^  shares +Of the plugin from {DISTRIBUTION}\.$", listed.results[0].out, re.MULTILINE)
    assert listed.results[1].code == 2
    assert "did you mean 'shares'?" in listed.results[1].err
    assert MODULE not in listed.modules
    text, data, own_help, wrong = commands(
        site, ["shares", str(compiled)], ["shares", str(compiled), "--json"], ["shares", "-h"], ["shares", "nowhere"]
    ).results
    assert [result.code for result in (text, data, own_help, wrong)] == [0, 0, 0, 2]
    assert set(json.loads(data.out)) == {"cpu:0", "cpu:1"}
    assert text.out.startswith("cpu:0  ")
    assert "--quiet" in own_help.out
    assert "error[" in wrong.err


def test_a_format_of_exports_from_a_plugin_is_listed_and_written_with_its_option(site, commands, compiled):
    to_table = ["export", str(compiled), "--to", "table"]
    listed, written, plain, foreign, unknown = commands(
        site,
        ["export", "--help"],
        [*to_table, "--separator", ";", "-o", "table", "--json"],
        [*to_table, "-o", "plain"],
        ["export", str(compiled), "--to", "stages", "--separator", ";", "-o", "stages"],
        [*to_table, "--layout", "python", "-o", "other"],
    ).results
    assert [result.code for result in (listed, written, plain, foreign, unknown)] == [0, 0, 0, 2, 2]
    assert re.search(r"--to \[.*\|table\]", listed.out)
    assert "--separator TEXT" in listed.out
    assert json.loads(written.out)["files"] == ["segments.csv"]
    folder = site.parent
    rows = [line.split(";") for line in (folder / "table" / "segments.csv").read_text().splitlines()]
    assert {device for _, device, _ in rows} == {"cpu:0", "cpu:1"}
    assert [line.split(",") for line in (folder / "plain" / "segments.csv").read_text().splitlines()] == rows
    assert "the format stages has no option --separator" in foreign.err
    assert "export --to table" in foreign.err
    assert "the format table has no option --layout" in unknown.err


def test_a_format_of_cost_graphs_from_a_plugin_is_read_and_written(site, commands, tmp_path):
    for name in ("g.edges", "g.txt"):
        (tmp_path / name).write_text("a b 5\na c 5\n")
    placed, forced, listed, unknown = commands(
        site,
        ["place", "g.edges", "--devices", "2", "--placer", "single", "-o", "placed.edges", "--json"],
        ["place", "g.txt", "--graph-format", "edges", "--placer", "single"],
        ["place", "--help"],
        ["place", "g.edges", "-o", "placed.txt"],
    ).results
    assert [result.code for result in (placed, forced, listed, unknown)] == [0, 0, 0, 2], placed.err
    assert set(json.loads(placed.out)["placement"]) == {"a", "b", "c"}
    assert sorted(line[0] for line in (tmp_path / "placed.edges").read_text().splitlines()) == ["a", "b", "c"]
    assert "--graph-format [json|graphml|edges]" in listed.out
    assert "end it in .graphml (networkx, yEd, Gephi) or .edges; .gz after it compresses" in unknown.err


FORMATS = """
def write_ashes(models, folder):
    raise ValueError("the paper burns")


class Ashes:
    pass
"""


def test_a_defect_of_a_format_names_its_distribution_and_leaves_others_alone(tmp_path, commands, compiled):
    entries = {
        "onnxplace.export_formats": {
            "ashes": "formats:write_ashes",
            "gone": "failing:Anything",
            "triton": "failing:Evil",
        },
        "onnxplace.export_options": {"gone": "failing:Anything"},
        "onnxplace.graph_formats": {"ashes": "formats:Ashes", "graphml": "failing:Evil"},
    }
    install(tmp_path / "site", "acme-paper", entries, {"formats": FORMATS, **MODULES})
    (tmp_path / "g.ashes").write_text("")
    ashes, gone, graph, stages = commands(
        tmp_path / "site",
        ["export", str(compiled), "--to", "ashes", "-o", "ashes"],
        ["export", str(compiled), "--to", "gone", "-o", "gone"],
        ["place", "g.ashes"],
        ["export", str(compiled), "--to", "stages", "-o", "stages"],
    ).results
    assert [result.code for result in (ashes, gone, graph, stages)] == [4, 4, 4, 0]
    assert "error[G001] format 'ashes' from acme-paper: ValueError: the paper burns" in ashes.err
    assert "error[G001] format 'gone' from acme-paper: cannot be loaded" in gone.err
    assert "error[G001] format 'ashes' from acme-paper: AttributeError" in graph.err
    assert not (tmp_path / "ashes").exists()


def test_built_in_runtimes_are_found_without_a_look_at_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("onnxplace.plugins.metadata.entry_points")
    assert find_plugin("runtimes", "onnxruntime").__name__ == "OnnxRuntime"


@pytest.fixture
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("onnxplace.plugins.metadata.entry_points", lambda group: ())
    # Other tests may have loaded commands, which are kept.
    monkeypatch.setattr(app, "load_plugin_command", app.load_plugin_command.__wrapped__)
    list_entries.cache_clear()
    yield
    list_entries.cache_clear()


LEARNED_HINT = "pip install -e plugins/onnxplace-learned"


@pytest.mark.usefixtures("no_plugins")
@pytest.mark.parametrize(
    ("arguments", "missing", "hint"),
    [
        (["learn", "placeto"], "command 'learn' is part of the plugin onnxplace-learned", LEARNED_HINT),
        (["study"], "command 'study' is part of the plugin onnxplace-learned", LEARNED_HINT),
        (
            ["place", "g.json", "--placer", "guided"],
            "placer 'guided' is part of the plugin onnxplace-learned",
            LEARNED_HINT,
        ),
        (["devices"], "command 'devices' is part of the plugin onnxplace-doctor", "install onnxplace again"),
        (["machines"], "command 'machines' is part of the plugin onnxplace-doctor", "install onnxplace again"),
        (["doctor"], "command 'doctor' is part of the plugin onnxplace-doctor", "install onnxplace again"),
    ],
)
def test_a_plugin_of_this_repository_that_is_not_installed_is_named_with_how_to_install_it(
    run_cli, tmp_path, monkeypatch, arguments, missing, hint
):
    monkeypatch.chdir(tmp_path)
    Path("g.json").write_text('{"devices": [{}, {}], "nodes": [{"id": 0}]}')
    result = run_cli(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err.count("error[") == 1
    assert f"{missing}, which is not installed" in result.err
    assert hint in result.err


def test_a_plugin_cannot_take_the_name_of_a_part_of_this_distribution(tmp_path, commands):
    install(tmp_path / "site", "acme-plugins", {"onnxplace.commands": {"serve": "failing:Evil"}}, MODULES)
    session = commands(tmp_path / "site", ["serve", "--help"], ["--help"])
    assert [result.code for result in session.results] == [0, 0]
    assert re.search(r"^  serve +Answer requests", session.results[1].out, re.MULTILINE)
    assert "failing" not in session.modules


SOURCES = """
from pathlib import Path
import onnx


def read_text(model, path, example_inputs):
    if Path(str(model)).suffix != ".onnxtxt":
        return None
    onnx.save(onnx.parser.parse_model(Path(model).read_text()), path)
    return {"N": 3}


def crash(model, path, example_inputs):
    raise ValueError("the ink is gone")
"""
TEXT = '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 2] y) { y = Relu(x) }'


def test_a_plugin_adds_what_is_taken_as_a_model(tmp_path, commands, model_file):
    install(tmp_path / "site", "acme-text", {"onnxplace.sources": {"text": "sources:read_text"}}, {"sources": SOURCES})
    (tmp_path / "m.onnxtxt").write_text(TEXT)
    (tmp_path / "m.txt").write_text(TEXT)
    options = ["--devices", "cpu:0", "--pipeline", "optimize,profile{estimate=true},single,split,emit"]
    taken, other, onnx_ = commands(
        tmp_path / "site",
        *[["compile", str(tmp_path / name), *options] for name in ("m.onnxtxt", "m.txt")],
        ["compile", str(model_file), *options, "--shape", "batch=4"],
    ).results
    assert (taken.code, other.code, onnx_.code) == (0, 2, 0), taken.err
    assert "sizes of its example inputs hold: N=3" in taken.err
    assert "error[M" in other.err
    assert (tmp_path / "m.bundle" / "manifest.json").exists()


def test_a_defect_of_a_source_names_its_distribution_and_leaves_onnx_files_alone(tmp_path, commands, model_file):
    install(tmp_path / "site", "acme-text", {"onnxplace.sources": {"text": "sources:crash"}}, {"sources": SOURCES})
    options = ["--devices", "cpu:0", "--pipeline", "optimize,profile{estimate=true},single,split,emit"]
    failed, onnx_ = commands(
        tmp_path / "site",
        ["compile", str(tmp_path / "m.onnxtxt")],
        ["compile", str(model_file), *options, "--shape", "batch=4"],
    ).results
    assert (failed.code, onnx_.code) == (4, 0)
    assert "error[G001] source 'text' from acme-text: ValueError: the ink is gone" in failed.err


OBJECTIVES = """
def crash(name, profiled):
    raise ValueError("the ink is gone")
"""


def test_a_defect_of_an_objective_names_its_distribution_and_pipelines_do_without(tmp_path, commands, model_file):
    entries = {"onnxplace.objectives": {"text": "objectives:crash"}}
    install(tmp_path / "site", "acme-text", entries, {"objectives": OBJECTIVES})
    options = ["--devices", "cpu:0", "--shape", "batch=4"]
    failed, piped = commands(
        tmp_path / "site",
        ["compile", str(model_file), *options, "--effort", "low"],
        ["compile", str(model_file), *options, "--pipeline", "optimize,profile{estimate=true},single,split,emit"],
    ).results
    assert (failed.code, piped.code) == (4, 0)
    assert "error[G001] objective 'text' from acme-text: ValueError: the ink is gone" in failed.err


@pytest.mark.slow
def test_the_command_itself_finds_a_plugin(site, model_file, tmp_path):
    process = subprocess.run(
        [sys.executable, "-m", "onnxplace", "compile", "model.onnx", "--shape", "batch=4", "--placer", "round-robin"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    assert "placer round-robin" in process.stdout


@pytest.fixture
def example(site: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(site)
    yield import_module(MODULE)
    del sys.modules[MODULE]


def test_the_example_keeps_the_contract_of_passes(example):
    check_pass(example.RoundRobin)


def test_the_example_keeps_the_contract_of_runtimes(example):
    check_runtime(example.OneThread)


# ---------------------------------------------------------------------------------------------- broken ones

BROKEN = {
    "onnxplace.commands": {
        "fall": "failing:Anything",
        "odd": "harmless:function",
        "crash": "harmless:crash",
        "run": "failing:Evil",
    },
    "onnxplace.device_kinds": {"flawed": "failing:Anything", "odd": "harmless:Stranger", "raw": "harmless:RawKind"},
    "onnxplace.passes": {
        "fails": "failing:Anything",
        "gone": "not_there:Anything",
        "lacks": "harmless:Missing",
        "function": "harmless:function",
        "stranger": "harmless:Stranger",
        "half": "harmless:Half",
        "m-etf": "failing:Evil",
    },
    "onnxplace.runtimes": {"fails": "failing:Anything", "stranger": "harmless:Stranger", "simulated": "failing:Evil"},
    "onnxplace.runtime_options": {"fails": "failing:Anything", "odd": "harmless:function"},
}
MODULES = {
    "failing": "raise RuntimeError('the moon is in the wrong phase')",
    "exiting": "raise SystemExit(3)",
    "harmless": """
import click
from onnxplace import Pass
from onnxplace.target.device_kinds import DeviceKind


def function():
    pass


@click.command()
def crash():
    raise ValueError("the tide is out")


class Stranger:
    pass


class Half(Pass):
    name = "half"


class RawKind(DeviceKind):
    name = "raw"
""",
}


BAD_PASS = """
from dataclasses import dataclass
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.state import Pass

@dataclass(frozen=True)
class Bad(Pass):
    name = "bad"
    requires = (Profile,)
    provides = (Placement, Schedule)

    def run(self, state):
        raise KeyError("lost")
"""
OUT_OF_RANGE = """
        import numpy as np
        from onnxplace.problem import commit_placement, placement_problem
        problem = placement_problem(state)
        device = np.full(len(problem.graph), len(state.target.devices), dtype=np.int32)
        return commit_placement(state, problem, device, np.zeros(len(device)), self.name)
"""


PACED = """
import time
import click
from onnxplace import Runtime
from onnxplace.pipeline.registry import create_runtime


class Paced(Runtime):
    name = "paced"

    def __init__(self, pace=0.0, repeat=1):
        self._seconds = pace

    def open(self, bundle, *, trace=False):
        time.sleep(self._seconds)
        print("opened after", self._seconds)
        return create_runtime("onnxruntime").open(bundle, trace=trace)


OPTIONS = {
    "pace": click.Option(["--opening-pace"], type=float, metavar="SECONDS", help="Wait before it opens."),
    "repeat": click.Option(["--repeat"], type=int),
    "seconds": click.Option(["--other", "shape"]),
}
FLAGS = {"loud": click.Option(["--loud"], is_flag=True), "tone": click.Option(["--tone"], default="high")}
"""


@pytest.mark.slow
def test_a_plugin_adds_options_of_its_runtime_to_the_commands_that_run_bundles(tmp_path, commands, compiled):
    entries = {
        "onnxplace.runtimes": {"paced": "paced:Paced"},
        "onnxplace.runtime_options": {
            "paced": "paced:OPTIONS",
            "sung": "paced:FLAGS",
            "fails": "failing:Anything",
            "odd": "harmless:function",
        },
    }
    install(tmp_path / "site", "acme-pace", entries, {"paced": PACED, **MODULES})
    run, option = ["run", str(compiled)], ["--opening-pace", "0.25"]
    ran, plain, without, listed, short, other, python = commands(
        tmp_path / "site",
        [*run, "--runtime", "paced", *option, "--repeat", "2", "--json", "--shape", "batch=3"],
        [*run, "--runtime", "paced"],
        [*run, *option],
        ["run", "--help"],
        ["verify", "--help"],
        ["compile", "model.onnx", *option],
        ["bench", str(compiled), "--runtime", "paced", "--opening-pace=0.5", "--repeat", "1", "--no-memory"],
    ).results
    assert ran.out.startswith("opened after 0.25\n")
    printed = json.loads(ran.out.partition("\n")[2])
    assert (printed["runs"], printed["outputs"]["y"]["shape"]) == (2, [3, 64])  # the command keeps its own options
    assert plain.out.startswith("opened after 0.0\n")
    assert (without.code, "use the runtime paced, which has pace" in without.err) == (2, True)
    described = re.sub(r"\s+", " ", listed.out)
    assert "With --runtime paced: --opening-pace SECONDS Wait before it opens." in described
    assert described.count("--repeat") == 1
    assert "--opening-pace `onnxplace run --help` describes them." in re.sub(r"\s+", " ", short.out)
    assert (other.code, "no such option '--opening-pace'" in other.err) == (2, True)
    assert python.out.startswith("opened after 0.5\n")


@pytest.fixture
def broken_site(tmp_path: Path) -> Path:
    folder = tmp_path / "broken"
    install(folder, "acme-plugins", BROKEN, MODULES)
    return folder


@pytest.mark.slow
def test_broken_plugins_do_not_affect_other_commands(broken_site, commands, model_file):
    session = commands(
        broken_site,
        ["passes"],
        ["runtimes"],
        ["compile", "model.onnx", "--shape", "batch=4", "--pipeline", FAST_PIPELINE],
        ["run", "model.bundle"],
        ["--help"],
    )
    assert [result.code for result in session.results] == [0, 0, 0, 0, 0]
    for name in BROKEN["onnxplace.passes"]:
        assert name in session.results[0].out
    assert not {"failing", "harmless"} & session.modules


def test_a_broken_kind_of_devices_is_listed_with_its_problem_and_fails_on_use(broken_site, commands, model_file):
    kinds = ("flawed", "odd", "raw")
    listed, *used = commands(
        broken_site,
        ["devices", "--json"],
        *[["compile", "model.onnx", "--shape", "batch=4", "--devices", f"{kind}:0"] for kind in kinds],
    ).results
    assert listed.code == 0
    problems = {gpu["id"]: gpu["problem"] for gpu in json.loads(listed.out)["accelerators"]}
    for kind, words, result in zip(kinds, ("wrong phase", "not a DeviceKind", "does not define find_problem"), used):
        assert words in problems[kind]
        assert result.code == 4
        assert words in result.err
        assert f"device kind '{kind}' from acme-plugins" in result.err


def test_a_broken_plugin_fails_on_use_and_is_named_with_its_distribution(broken_site, commands, model_file, compiled):
    placers = ("fails", "gone", "lacks", "function", "stranger")
    session = commands(
        broken_site,
        *[["compile", "model.onnx", "--shape", "batch=4", "--placer", name] for name in placers],
        ["passes", "fails"],
        ["run", str(compiled), "--runtime", "fails"],
        ["fall"],
        ["odd"],
        ["crash"],
    ).results
    assert [result.code for result in session] == [4] * 10
    expected_words = ("wrong phase", "not_there", "Missing", "not a class", "not a Pass", "wrong phase", "wrong phase")
    expected_words += ("wrong phase", "not a click.Command", "ValueError: the tide is out")
    for result, name, words in zip(session, (*placers, "fails", "fails", "fall", "odd", "crash"), expected_words):
        assert result.out == ""
        assert words in result.err
        assert repr(name) in result.err
        if name != "stranger":
            assert "acme-plugins" in result.err
    assert {path.name for path in model_file.parent.iterdir()} == {"model.onnx", "broken"}


def test_defects_and_names_that_are_taken_name_the_distribution(tmp_path, commands, model_file):
    raising = BAD_PASS.replace('"bad"', '"raising"').replace("Bad(", "Raising(").partition("import Pass")[2]
    modules = {"bad_pass": BAD_PASS.replace('raise KeyError("lost")', OUT_OF_RANGE) + raising}
    names = {"auto": "bad_pass:Bad", "bad": "bad_pass:Bad", "raising": "bad_pass:Raising"}
    install(tmp_path / "site", "acme-bad", {"onnxplace.passes": names}, modules)
    compiling = ["compile", "model.onnx", "--shape", "batch=4", "--placer"]
    listed, bad, raising = commands(tmp_path / "site", ["passes"], [*compiling, "bad"], [*compiling, "raising"]).results
    assert re.search("^auto  +placer: .*; that of acme-bad is ignored$", listed.out, re.MULTILINE)
    place, hint = "pass 'bad' from acme-bad", "hint: this is a defect of the pass, please report it"
    assert bad.err == f"error[B002] {place}: its Placement is wrong: a node is on no device\n  {hint}\n"
    assert raising.err.startswith("error[B001] pass 'raising' from acme-bad: KeyError: 'lost'\n")


@pytest.mark.slow
def test_verbose_shows_the_author_of_a_plugin_where_it_fails(site, broken_site, commands, model_file):
    install(site, "bad-pass", {"onnxplace.passes": {"bad": "bad_pass:Bad"}}, {"bad_pass": BAD_PASS})
    compiling = ["compile", "model.onnx", "--shape", "batch=4", "--placer"]
    for folder, name, line in ((broken_site, "fails", "in <module>"), (site, "bad", "in run")):
        quiet, verbose = commands(folder, [*compiling, name], [*compiling, name, "-v"]).results
        assert "--verbose" in quiet.err
        assert "Traceback" not in quiet.err
        assert line in verbose.err[verbose.err.index("Traceback") :]
        assert verbose.err.count("error[") == 1


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            ["passes", "stranger"],
        ),
        pytest.param(
            ["compile", "model.onnx", "--placer", "stranger"],
        ),
        pytest.param(
            ["compile", "model.onnx", "--placer", "half"],
        ),
        pytest.param(
            ["run", "BUNDLE", "--runtime", "stranger"],
        ),
    ],
    ids=" ".join,
)
@pytest.mark.sampled(4)
def test_an_incomplete_plugin_is_refused_with_its_distribution(broken_site, commands, model_file, compiled, line):
    (result,) = commands(broken_site, [str(compiled) if part == "BUNDLE" else part for part in line]).results
    assert result.code == 4
    assert "acme-plugins" in result.err


def test_a_plugin_that_exits_when_it_is_imported_is_named(tmp_path, commands, model_file):
    install(tmp_path / "site", "acme-plugins", {"onnxplace.passes": {"exits": "exiting:Anything"}}, MODULES)
    (result,) = commands(
        tmp_path / "site", ["compile", "model.onnx", "--shape", "batch=4", "--placer", "exits"]
    ).results
    assert result.code == 4
    assert "acme-plugins" in result.err


@pytest.mark.slow
def test_a_plugin_cannot_replace_a_built_in_name(broken_site, commands, model_file):
    session = commands(
        broken_site,
        ["passes", "--json"],
        ["compile", "model.onnx", "--shape", "batch=4", "--placer", "m-etf"],
        ["run", "model.bundle", "--runtime", "simulated"],
    )
    assert [result.code for result in session.results] == [0, 0, 0]
    (entry,) = [entry for entry in json.loads(session.results[0].out)["passes"] if entry["name"] == "m-etf"]
    assert (entry["path"], entry["distribution"]) == ("onnxplace.passes.m_etf:MEtf", "")
    assert "failing" not in session.modules
