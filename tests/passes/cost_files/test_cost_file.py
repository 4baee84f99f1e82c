"""Cost files: written as JSON and CSV, read back the same, edited, carried to other machines and other models."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnx import parser

from onnxplace.errors import InputError, ModelError
from onnxplace.facts import Profile, Quality, Source, is_refused
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind, infer_static_shapes
from onnxplace.model.model import Model
from onnxplace.passes.cost_files.cost_file import format_costs, format_costs_csv, read_costs
from onnxplace.passes.profiling.repeated_layers import fingerprints
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.target import Device, Target

TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[batch, 8] x, float[8, 8] w) => (float[batch, 8] y, int64[2] s) {
    [mul] a = MatMul(x, w)
    ["add, with \\"quotes\\""] b = Add(a, x)
    [relu] y = Relu(b)
    [shape] s = Shape(y)
}"""
GPU = Target((Device("cuda:0", 1 << 30, model="NVIDIA H100"), Device("cpu:0", 1 << 30)))
CORE = Target((Device("cpu:0", 1 << 30),))


def small_model(batch: int = 4, text: str = TEXT) -> Model:
    return bind(load(parser.parse_model(text)), {"batch": batch}, {})


def profile_model(model: Model, options: str = "estimate=true", target: Target = GPU) -> Profile:
    return Pipeline.parse(f"profile{{{options}}}").run(State(target).with_facts(model))[0][Profile]


def write_costs(folder: Path, ending: str, model: Model, profile: Profile) -> Path:
    path = folder / f"costs{ending}"
    path.write_text(format_costs_csv(profile, model) if ending == ".csv" else format_costs(profile))
    return path


@pytest.mark.parametrize("ending", [".json", ".csv"])
def test_written_costs_are_read_back(tmp_path, ending):
    model = small_model()
    profile = profile_model(model)
    restored, notes = read_costs(write_costs(tmp_path, ending, model, profile), model, GPU)
    assert notes == []
    for cost_class in ("cuda/NVIDIA H100", "cpu/1"):
        assert (restored.seconds[cost_class] == profile.seconds[cost_class]).all()
        assert set(restored.sources[cost_class].tolist()) == {Source.ESTIMATED}
    assert (restored.unit == profile.unit).all()
    assert (restored.graph.value_bytes == profile.graph.value_bytes).all()
    assert restored.whole_seconds == profile.whole_seconds
    assert restored.prints == profile.prints != ()


@pytest.mark.parametrize("ending", [".json", ".csv"])
def test_sources_spread_and_quality_survive_a_file(tmp_path, ending):
    """Measured times become given ones, since a file may be from anywhere; estimated and known ones stay so."""
    model, cost_class = small_model(), "cpu/1"
    sources = [Source.MEASURED, Source.GIVEN, Source.ESTIMATED, Source.KNOWN]
    plain = profile_model(model, target=CORE)
    profile = replace(
        plain,
        sources={cost_class: np.array(sources, dtype=np.uint8)},
        spread={cost_class: np.array([0.5, 0.0, 1e-7, 0.25])},
        quality={cost_class: Quality(17, 0.004, 0.002, 0.0, 4, 0.007, 8e-7)},
        graph=replace(plain.graph, workspace_bytes=np.array([0, 64, 0, 1 << 40])),
    )
    restored, _ = read_costs(write_costs(tmp_path, ending, model, profile), model, CORE)
    assert restored.sources[cost_class].tolist() == [Source.GIVEN, Source.GIVEN, Source.ESTIMATED, Source.KNOWN]
    assert restored.spread[cost_class].tolist() == profile.spread[cost_class].tolist()
    assert dict(restored.quality) == profile.quality
    assert restored.graph.workspace_bytes.tolist() == profile.graph.workspace_bytes.tolist()


@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=4), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_arbitrary_times_survive_both_formats(tmp_path_factory, seconds, units):
    model = small_model()
    unit = np.unique(units, return_inverse=True)[1].astype(np.int32)
    profile = replace(
        profile_model(model), seconds={"cuda/NVIDIA H100": np.array(seconds), "cpu/1": np.array(seconds[::-1])},
        unit=unit, whole_seconds={"cpu/1": sum(seconds)},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("any")
    for ending in (".json", ".csv"):
        restored, _ = read_costs(write_costs(folder, ending, model, profile), model, GPU)
        assert restored.seconds["cpu/1"].tolist() == seconds[::-1]
        assert restored.seconds["cuda/NVIDIA H100"].tolist() == seconds
        assert restored.unit.tolist() == unit.tolist()
        assert restored.whole_seconds == profile.whole_seconds


def test_a_profile_of_a_gpu_machine_is_used_on_another_machine(run_cli, tmp_path, model_file):
    """Nothing is measured: this machine has no GPU, and the file holds other times for the CPU."""
    (tmp_path / "target.toml").write_text(
        '[[devices]]\nid = "cuda:0"\nmemory_bytes = 1000000\nmodel = "NVIDIA H100"\n'
        '[[devices]]\nid = "cpu:0"\nmemory_bytes = 1000000\ncores = 64\n'
    )
    options = ("--shape", "batch=4", "--target", tmp_path / "target.toml", "--placer", "single", "--force", "--json")
    saved = run_cli("compile", model_file, *options, "--save-costs", tmp_path / "saved.csv")
    assert saved.code == 0, saved.err
    text = (tmp_path / "saved.csv").read_text()
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    for row in rows:
        row["seconds cuda/NVIDIA H100"], row["seconds cpu/64"] = "0.5", "2"
    with (tmp_path / "carried.csv").open("w", newline="") as stream:
        stream.write("# onnxplace-costs 1\n")
        table = csv.DictWriter(stream, rows[0])
        table.writeheader()
        table.writerows(rows)
    ran = run_cli("compile", model_file, *options, "--costs", tmp_path / "carried.csv")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["predicted"]["single_device_seconds"] == pytest.approx(0.5 * len(rows), rel=1e-4)
    assert not [note for note in json.loads(ran.out)["diagnostics"] if note["code"] == "C001"]


def test_renamed_nodes_are_found_by_fingerprint(tmp_path):
    model = small_model()
    profile = profile_model(model)
    path = write_costs(tmp_path, ".json", model, profile)
    renamed = small_model(text=TEXT.replace("[mul]", "[product]").replace("[relu]", "[other]"))
    restored, notes = read_costs(path, renamed, GPU)
    assert notes == []
    assert (restored.seconds["cpu/1"] == profile.seconds["cpu/1"]).all()
    assert len(set(restored.unit.tolist())) == 4


def test_changed_nodes_without_costs_are_named(tmp_path):
    model = small_model()
    path = write_costs(tmp_path, ".json", model, profile_model(model))
    other = small_model(text=TEXT.replace("[relu] y = Relu(b)", "[tanh] y = Tanh(b)"))
    with pytest.raises(ModelError, match="1 of 4 nodes, such as tanh"):
        read_costs(path, other, GPU)


def test_costs_for_other_shapes_are_used_with_a_note(tmp_path):
    model = small_model()
    path = write_costs(tmp_path, ".csv", model, profile_model(model))
    _, notes = read_costs(path, small_model(batch=8), GPU)
    assert [note.code for note in notes] == ["C005"]
    assert "nodes were measured with other shapes or attributes" in notes[0].message


def test_a_file_written_by_hand_needs_times_only(tmp_path):
    model = small_model()
    path = tmp_path / "mine.csv"
    path.write_text('# onnxplace-costs 1\nnode,seconds cpu/1\nmul,1\n"add, with ""quotes""",2e-3\nrelu,3\nshape,0\n')
    restored, _ = read_costs(path, model, Target((Device("cpu:0", 1),)))
    assert restored.seconds["cpu/1"].tolist() == [1, 2e-3, 3, 0]
    assert restored.unit.tolist() in ([3, 2, 1, 0], [0, 1, 2, 3])
    sizes = dict(zip(restored.graph.value_names, restored.graph.value_bytes.tolist()))
    assert (sizes["a"], sizes["s"]) == (4 * 8 * 4, 16)


HEAD = "# onnxplace-costs 1\nnode,seconds cpu/1"
ROWS = "# onnxplace-costs 1\nnode,unit,output_bytes,seconds cpu/1\nmul,{unit},{size},{seconds}\n"


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("", "C011", "not a cost file"),
        ("node,seconds cpu/1\nmul,1\n", "C011", "not a cost file"),
        ("# onnxplace-costs 2\nnode,seconds cpu/1\nmul,1\n", "C010", "version is 2, this onnxplace reads 1"),
        ("# onnxplace-costs\nnode,seconds cpu/1\nmul,1\n", "C010", "version is None"),
        ("# onnxplace-costs 1\nname,seconds cpu/1\nmul,1\n", "C011", "no column 'node'"),
        ("# onnxplace-costs 1\nnode,seconds cpu/1\n", "C010", "1 of 1 nodes, such as mul"),
        (ROWS.format(unit=0, size=128, seconds=""), "C010", "no seconds on 'cpu/1' for node 'mul'"),
        (ROWS.format(unit=0, size=128, seconds=""), "C010", "its row is empty, or too short, in the column 'seconds"),
        (ROWS.format(unit=0, size=128, seconds="-1"), "C011", "'mul' on 'cpu/1' is -1, expected a time"),
        (ROWS.format(unit=0, size=128, seconds="nan"), "C011", "'mul' on 'cpu/1' is nan, expected a time"),
        (ROWS.format(unit=0, size=128, seconds="inf"), "C011", "'mul' on 'cpu/1' is inf, expected a time"),
        (ROWS.format(unit=0, size=128, seconds="fast"), "C011", "'mul' on 'cpu/1' is 'fast', expected a time"),
        (ROWS.format(unit=0, size=128, seconds="1e300"), "C011", "'mul' on 'cpu/1' is 1e+300, expected a time"),
        (ROWS.format(unit=0, size=128, seconds="1000001"), "C011", "is 1000001, expected a time"),
        (ROWS.format(unit="x", size=128, seconds="1"), "C011", "the unit of node 'mul' is 'x'"),
        (ROWS.format(unit="0.5", size=128, seconds="1"), "C011", "the unit of node 'mul' is 0.5"),
        (ROWS.format(unit=0, size="1.5", seconds="1"), "C011", "value_bytes of 'y' is 1.5"),
        (ROWS.format(unit=0, size="1e16", seconds="1"), "C011", "value_bytes of 'y' is 1e+16"),
        (HEAD + "\nmul,1\nother,2\nmul,3\n", "C011", "node 'mul' has two rows"),
        (HEAD + "\nmul\n", "C010", "its row is empty, or too short, in the column 'seconds cpu/1'"),
        (ROWS.format(unit=0, size="-128", seconds="1"), "C011", "value_bytes of 'y' is -128"),
        (HEAD + ",source cpu/1\nmul,1,guessed\n", "C011", "the source of node 'mul' on 'cpu/1' is 'guessed'"),
        (HEAD + ",spread cpu/1\nmul,1,nan\n", "C011", "the spread of node 'mul' on 'cpu/1' is nan"),
        (HEAD + ",workspace_bytes\nmul,1,-8\n", "C011", "workspace_bytes of 'mul' is -8"),
        ("# onnxplace-costs 1\n# measured.runs cpu/1=3\nnode,seconds cpu/1\nmul,1\n", "C011", "waiting of 'cpu/1' are"),
        ("# onnxplace-costs 1\n# whole_seconds cpu/1=x\n" + ROWS.format(unit=0, size=1, seconds="1"), "C011", "'x'"),
    ],
)  # fmt: skip
def test_an_invalid_table_is_refused(tmp_path, text, code, message):
    model = load(
        parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    g (float[4, 8] x, float[8, 8] w) => (float[4, 8] y) { [mul] y = MatMul(x, w) }""")
    )
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises((InputError, ModelError), match=re.escape(message)) as raised:
        read_costs(path, model, Target((Device("cpu:0", 1),)))
    assert (raised.value.code, raised.value.where) == (code, str(path))


@pytest.mark.parametrize("ending", [".json", ".csv"])
def test_whole_floats_and_empty_rows_of_spreadsheets_are_read(tmp_path, ending):
    model, profile = small_model(), profile_model(small_model(), target=CORE)
    path = write_costs(tmp_path, ending, model, profile)
    if ending == ".csv":
        rows = list(csv.reader(path.read_text().splitlines()))
        head = rows.index(next(row for row in rows if row[0] == "node"))
        columns = {name: rows[head].index(name) for name in ("unit", "output_bytes", "workspace_bytes")}
        for row in rows[head + 1 :]:
            row[columns["unit"]] += ".0"
            row[columns["output_bytes"]] = row[columns["workspace_bytes"]] = "1e12"
        rows += [[""] * len(rows[head])] * 2
        with path.open("w", newline="") as stream:
            csv.writer(stream).writerows(rows)
    else:
        data = json.loads(path.read_text())
        for entry in data["nodes"].values():
            entry |= {"unit": float(entry["unit"]), "workspace_bytes": 1e12}
        data["value_bytes"] = dict.fromkeys(data["value_bytes"], 1e12)
        path.write_text(json.dumps(data))
    restored, _ = read_costs(path, model, CORE)
    assert restored.unit.tolist() == profile.unit.tolist()
    assert set(restored.graph.workspace_bytes.tolist()) == {10**12}
    assert restored.graph.value_bytes.dtype == np.int64
    node_outputs = restored.graph.value_bytes[restored.graph.producer >= 0]
    assert set(node_outputs.tolist()) == {10**12}


@pytest.mark.parametrize("key", ["value_bytes", "workspace_bytes"])
def test_a_fraction_of_a_byte_is_refused(tmp_path, key):
    model = small_model()
    path = write_costs(tmp_path, ".json", model, profile_model(model))
    data = json.loads(path.read_text())
    if key == "value_bytes":
        data[key]["a"] = 0.5
    else:
        data["nodes"]["mul"][key] = 0.5
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"is 0\.5") as raised:
        read_costs(path, model, GPU)
    assert "a whole number of bytes" in raised.value.hint


def test_a_node_without_seconds_is_refused_with_an_example(tmp_path):
    model = small_model()
    path = write_costs(tmp_path, ".json", model, profile_model(model))
    data = json.loads(path.read_text())
    data["nodes"]["mul"]["seconds"] = {}
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match="no seconds on 'cuda/NVIDIA H100' for node 'mul'") as raised:
        read_costs(path, model, GPU)
    assert '"seconds": {"cpu/1": 1e-5}' in raised.value.hint


def compile_with_edited_costs(run_cli, model_file: Path, edit) -> tuple[int, str]:
    """Save the costs of a model, edit them, and compile with them; return exit code and error text."""
    options = ("compile", model_file, "--shape", "batch=4", "--devices", "cpu:0", "--placer", "single", "--force")
    path = model_file.parent / "carried.json"
    assert run_cli(*options, "--save-costs", path).code == 0
    data = json.loads(path.read_text())
    edit(data["nodes"])
    path.write_text(json.dumps(data))
    ran = run_cli(*options, "--costs", path)
    return ran.code, ran.err


def test_a_cost_file_for_another_model_is_refused_with_missing_nodes(run_cli, model_file):
    def rename(nodes):
        names = list(nodes)
        for name in names[:2]:
            nodes[f"other/{name}"] = {**nodes.pop(name), "fingerprint": "0" * 16}
        missing.extend(names[:2])

    missing: list[str] = []
    code, message = compile_with_edited_costs(run_cli, model_file, rename)
    assert code == 2
    assert f"error[C010] {model_file.parent / 'carried.json'}: no costs for 2 of" in message
    assert f"such as {missing[0]}, {missing[1]}" in message
    assert "hint: it was made for another model; profile this one" in message


@pytest.mark.parametrize("value", [float("nan"), -1e-6, float("inf"), 10**400, True, "1"], ids=str)
def test_an_invalid_time_is_refused_with_its_node(run_cli, model_file, value):
    def damage(nodes):
        name, entry = next(iter(nodes.items()))
        (cost_class,) = entry["seconds"]
        entry["seconds"][cost_class] = value
        shown = repr(value) if value != 10**400 else f"1{'0' * 59}..."
        expected.append(f"the cost of node {name!r} on {cost_class!r} is {shown}, expected a time")

    expected: list[str] = []
    code, message = compile_with_edited_costs(run_cli, model_file, damage)
    assert code == 2
    assert f"error[C011] {model_file.parent / 'carried.json'}: {expected[0]}" in " ".join(message.split("\n"))
    assert "hint: write a number of seconds, from 0 to 1e+06" in message


def test_costs_in_a_bundle_equal_saved_costs(run_cli, model_file, tmp_path):
    options = ("--shape", "batch=4", "--devices", "cpu:0", "--placer", "single", "-o", tmp_path / "bundle")
    ran = run_cli("compile", model_file, *options, "--save-costs", tmp_path / "saved.json")
    assert ran.code == 0, ran.err
    costs = json.loads((tmp_path / "bundle" / "costs.json").read_text())
    assert costs == json.loads((tmp_path / "saved.json").read_text())
    assert all(quality["runs"] > 0 for quality in costs["measured"].values())
    assert all(entry["spread"] and entry["fingerprint"] for entry in costs["nodes"].values())


def test_the_summary_names_the_file_of_saved_costs(run_cli, model_file, tmp_path):
    options = ("compile", model_file, "--shape", "batch=4", "--devices", "cpu:0", "--placer", "single", "--no-trial")
    assert run_cli(*options, "--save-costs", tmp_path / "saved.csv").out.endswith(f"costs: {tmp_path / 'saved.csv'}\n")
    assert "costs: " not in run_cli(*options, "--force").out


def test_a_missing_or_binary_table_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_costs(tmp_path / "none.csv", small_model(), GPU)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a cost file"):
        read_costs(tmp_path / "bytes.csv", small_model(), GPU)


def test_measured_costs_hold_their_quality(tmp_path):
    path = tmp_path / "costs.json"
    profile_model(small_model(), f"repeat=3,seconds=0,save={path}", local_target("cpu:0"))
    data = json.loads(path.read_text())
    (cost_class,) = data["measured"]
    quality = data["measured"][cost_class]
    assert quality["runs"] >= 3
    assert quality["kernels"] >= 1
    assert quality["kernel_seconds"] > 0
    assert 0 <= quality["waiting"] <= 1
    total = sum(entry["seconds"][cost_class] for entry in data["nodes"].values())
    assert total == pytest.approx(data["whole_seconds"][cost_class])
    assert all(entry["spread"][cost_class] >= 0 for entry in data["nodes"].values())
    assert all(re.fullmatch("[0-9a-f]{16}", entry["fingerprint"]) for entry in data["nodes"].values())


def test_fingerprints_depend_on_operators_and_shapes_not_on_names():
    base = fingerprints(small_model(), infer_static_shapes(small_model()))
    renamed = small_model(text=TEXT.replace("[mul] a", "[product] v").replace("Add(a", "Add(v"))
    assert fingerprints(renamed, infer_static_shapes(renamed)) == base
    newer = small_model(text=TEXT.replace(": 17", ": 18"))
    assert not set(fingerprints(newer, infer_static_shapes(newer))) & set(base)
    larger = fingerprints(small_model(8), infer_static_shapes(small_model(8)))
    assert [a == b for a, b in zip(larger, base)] == [False] * 4


def test_saving_to_a_missing_folder_is_refused(run_cli, model_file, tmp_path):
    ran = run_cli("compile", model_file, "--shape", "batch=4", "--save-costs", tmp_path / "none" / "costs.json")
    assert ran.code == 2
    assert "cannot write there" in ran.err


@pytest.mark.parametrize("ending", [".json", ".csv"])
def test_refused_nodes_are_written_as_a_word_and_read_back(tmp_path, ending):
    model = small_model()
    profile = profile_model(model)
    gpu = profile.seconds["cuda/NVIDIA H100"]
    profile = replace(profile, seconds={**profile.seconds, "cuda/NVIDIA H100": np.where(gpu == gpu[0], 1e9, gpu)})
    path = write_costs(tmp_path, ending, model, profile)
    assert "refused" in path.read_text()
    assert "1000000000" not in path.read_text()
    restored, _ = read_costs(path, model, GPU)
    assert is_refused(restored.seconds["cuda/NVIDIA H100"]).tolist() == (gpu == gpu[0]).tolist()
    assert (restored.seconds["cpu/1"] == profile.seconds["cpu/1"]).all()


def test_another_word_in_the_place_of_a_time_names_the_one_that_is_known(tmp_path):
    model = small_model()
    path = write_costs(tmp_path, ".json", model, profile_model(model))
    path.write_text(re.sub(r'"cuda/NVIDIA H100": [0-9.e-]+', '"cuda/NVIDIA H100": "never"', path.read_text(), count=1))
    with pytest.raises(InputError, match=r"the cost of node 'mul' on 'cuda/NVIDIA H100' is 'never'") as error:
        read_costs(path, model, GPU)
    assert "or 'refused' if devices do not take the node" in error.value.hint
