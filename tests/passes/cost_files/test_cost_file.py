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
from onnxplace.facts import Profile, Quality, Source
from onnxplace.machine import local_target
from onnxplace.model import Model, bind, load, static_shapes
from onnxplace.passes.cost_files import format_costs, format_costs_csv, read_costs
from onnxplace.passes.profiling import fingerprints
from onnxplace.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target import Device, Target

TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[batch, 8] x, float[8, 8] w) => (float[batch, 8] y, int64[2] s) {
    [mul] a = MatMul(x, w)
    ["add, with \\"quotes\\""] b = Add(a, x)
    [relu] y = Relu(b)
    [shape] s = Shape(y)
}"""
GPU = Target((Device("cuda:0", 1 << 30, model="NVIDIA H100"), Device("cpu:0", 1 << 30)))
CORE = Target((Device("cpu:0", 1 << 30),))


def small(batch: int = 4, text: str = TEXT) -> Model:
    return bind(load(parser.parse_model(text)), {"batch": batch}, {})


def profiled(model: Model, options: str = "estimate=true", target: Target = GPU) -> Profile:
    return Pipeline.parse(f"profile{{{options}}}").run(State(target).having(model))[0][Profile]


def written(folder: Path, ending: str, model: Model, profile: Profile) -> Path:
    path = folder / f"costs{ending}"
    path.write_text(format_costs_csv(profile, model) if ending == ".csv" else format_costs(profile))
    return path


@pytest.mark.parametrize("ending", [".json", ".csv"])
def test_what_is_written_is_read_back(tmp_path, ending):
    model = small()
    profile = profiled(model)
    found, notes = read_costs(written(tmp_path, ending, model, profile), model, GPU)
    assert notes == []
    for kind in ("cuda/NVIDIA H100", "cpu/1"):
        assert (found.seconds[kind] == profile.seconds[kind]).all()
        assert set(found.sources[kind].tolist()) == {Source.ESTIMATED}
    assert (found.unit == profile.unit).all()
    assert (found.graph.value_bytes == profile.graph.value_bytes).all()
    assert found.whole_seconds == profile.whole_seconds
    assert found.prints == profile.prints != ()


@pytest.mark.parametrize("ending", [".json", ".csv"])
def test_what_is_known_of_a_measurement_is_kept(tmp_path, ending):
    """A file cannot vouch for having been measured here; estimates and constants stay what they are."""
    model, kind = small(), "cpu/1"
    sources = [Source.MEASURED, Source.GIVEN, Source.ESTIMATED, Source.KNOWN]
    plain = profiled(model, target=CORE)
    profile = replace(
        plain,
        sources={kind: np.array(sources, dtype=np.uint8)},
        spread={kind: np.array([0.5, 0.0, 1e-7, 0.25])},
        quality={kind: Quality(17, 0.004, 0.002, 0.0, 4, 0.007, 8e-7)},
        graph=replace(plain.graph, workspace_bytes=np.array([0, 64, 0, 1 << 40])),
    )
    found, _ = read_costs(written(tmp_path, ending, model, profile), model, CORE)
    assert found.sources[kind].tolist() == [Source.GIVEN, Source.GIVEN, Source.ESTIMATED, Source.KNOWN]
    assert found.spread[kind].tolist() == profile.spread[kind].tolist()
    assert dict(found.quality) == profile.quality
    assert found.graph.workspace_bytes.tolist() == profile.graph.workspace_bytes.tolist()


@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=4), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_any_times_survive_both_forms(tmp_path_factory, seconds, units):
    model = small()
    unit = np.unique(units, return_inverse=True)[1].astype(np.int32)
    profile = replace(
        profiled(model), seconds={"cuda/NVIDIA H100": np.array(seconds), "cpu/1": np.array(seconds[::-1])},
        unit=unit, whole_seconds={"cpu/1": sum(seconds)},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("any")
    for ending in (".json", ".csv"):
        found, _ = read_costs(written(folder, ending, model, profile), model, GPU)
        assert found.seconds["cpu/1"].tolist() == seconds[::-1]
        assert found.seconds["cuda/NVIDIA H100"].tolist() == seconds
        assert found.unit.tolist() == unit.tolist()
        assert found.whole_seconds == profile.whole_seconds


def test_the_profile_of_a_gpu_machine_is_used_here_by_copying_a_file(run_cli, tmp_path, model_file):
    """Nothing is measured: no GPU is here, and what the file says of the CPU is not what this one needs."""
    (tmp_path / "target.toml").write_text(
        '[[devices]]\nid = "cuda:0"\nmemory_bytes = 1000000\nmodel = "NVIDIA H100"\n'
        '[[devices]]\nid = "cpu:0"\nmemory_bytes = 1000000\ncores = 64\n'
    )
    options = ("--shape", "batch=4", "--target", tmp_path / "target.toml", "--placer", "single", "--force", "--json")
    there = run_cli("compile", model_file, *options, "--save-costs", tmp_path / "there.csv")
    assert there.code == 0, there.err
    text = (tmp_path / "there.csv").read_text()
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


def test_renamed_nodes_are_found_by_what_they_do(tmp_path):
    model = small()
    profile = profiled(model)
    path = written(tmp_path, ".json", model, profile)
    renamed = small(text=TEXT.replace("[mul]", "[product]").replace("[relu]", "[other]"))
    found, notes = read_costs(path, renamed, GPU)
    assert notes == []
    assert (found.seconds["cpu/1"] == profile.seconds["cpu/1"]).all()
    assert len(set(found.unit.tolist())) == 4


def test_nodes_that_do_something_else_are_missing_and_named(tmp_path):
    model = small()
    path = written(tmp_path, ".json", model, profiled(model))
    other = small(text=TEXT.replace("[relu] y = Relu(b)", "[tanh] y = Tanh(b)"))
    with pytest.raises(ModelError, match="1 of 4 nodes, such as tanh"):
        read_costs(path, other, GPU)


def test_costs_for_other_shapes_are_used_and_said(tmp_path):
    model = small()
    path = written(tmp_path, ".csv", model, profiled(model))
    _, notes = read_costs(path, small(batch=8), GPU)
    assert [note.code for note in notes] == ["C005"]
    assert "nodes are not as they were measured" in notes[0].message


def test_a_file_written_by_hand_needs_times_only(tmp_path):
    model = small()
    path = tmp_path / "mine.csv"
    path.write_text('# onnxplace-costs 1\nnode,seconds cpu/1\nmul,1\n"add, with ""quotes""",2e-3\nrelu,3\nshape,0\n')
    found, _ = read_costs(path, model, Target((Device("cpu:0", 1),)))
    assert found.seconds["cpu/1"].tolist() == [1, 2e-3, 3, 0]
    assert found.unit.tolist() in ([3, 2, 1, 0], [0, 1, 2, 3])
    sizes = dict(zip(found.graph.value_names, found.graph.value_bytes.tolist()))
    assert (sizes["a"], sizes["s"]) == (4 * 8 * 4, 16)


HEAD = "# onnxplace-costs 1\nnode,seconds cpu/1"
ROWS = "# onnxplace-costs 1\nnode,unit,output_bytes,seconds cpu/1\nmul,{unit},{size},{seconds}\n"


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", "C011", "not a cost file"),
        ("node,seconds cpu/1\nmul,1\n", "C011", "not a cost file"),
        ("# onnxplace-costs 2\nnode,seconds cpu/1\nmul,1\n", "C012", "version is 2, this onnxplace reads 1"),
        ("# onnxplace-costs\nnode,seconds cpu/1\nmul,1\n", "C012", "version is None"),
        ("# onnxplace-costs 1\nname,seconds cpu/1\nmul,1\n", "C011", "no column 'node'"),
        ("# onnxplace-costs 1\nnode,seconds cpu/1\n", "C010", "1 of 1 nodes, such as mul"),
        (ROWS.format(unit=0, size=128, seconds=""), "C013", "no seconds on 'cpu/1' for node 'mul'"),
        (ROWS.format(unit=0, size=128, seconds=""), "C013", "its row is empty, or too short, in the column 'seconds"),
        (ROWS.format(unit=0, size=128, seconds="-1"), "C014", "'mul' on 'cpu/1' is -1, not a time"),
        (ROWS.format(unit=0, size=128, seconds="nan"), "C014", "'mul' on 'cpu/1' is nan, not a time"),
        (ROWS.format(unit=0, size=128, seconds="inf"), "C014", "'mul' on 'cpu/1' is inf, not a time"),
        (ROWS.format(unit=0, size=128, seconds="fast"), "C014", "'mul' on 'cpu/1' is 'fast', not a time"),
        (ROWS.format(unit=0, size=128, seconds="1e300"), "C014", "'mul' on 'cpu/1' is 1e+300, not a time"),
        (ROWS.format(unit=0, size=128, seconds="1000001"), "C014", "is 1000001, not a time"),
        (ROWS.format(unit="x", size=128, seconds="1"), "C014", "the unit of node 'mul' is 'x'"),
        (ROWS.format(unit="0.5", size=128, seconds="1"), "C014", "the unit of node 'mul' is 0.5"),
        (ROWS.format(unit=0, size="1.5", seconds="1"), "C014", "value_bytes of 'y' is 1.5"),
        (ROWS.format(unit=0, size="1e16", seconds="1"), "C014", "value_bytes of 'y' is 1e+16"),
        (HEAD + "\nmul,1\nother,2\nmul,3\n", "C014", "node 'mul' is there twice"),
        (HEAD + "\nmul\n", "C013", "its row is empty, or too short, in the column 'seconds cpu/1'"),
        (ROWS.format(unit=0, size="-128", seconds="1"), "C014", "value_bytes of 'y' is -128"),
        (HEAD + ",source cpu/1\nmul,1,guessed\n", "C014", "the source of node 'mul' on 'cpu/1' is 'guessed'"),
        (HEAD + ",spread cpu/1\nmul,1,nan\n", "C014", "the spread of node 'mul' on 'cpu/1' is nan"),
        (HEAD + ",workspace_bytes\nmul,1,-8\n", "C014", "workspace_bytes of 'mul' is -8"),
        ("# onnxplace-costs 1\n# measured.runs cpu/1=3\nnode,seconds cpu/1\nmul,1\n", "C014", "'measured' makes"),
        ("# onnxplace-costs 1\n# whole_seconds cpu/1=x\n" + ROWS.format(unit=0, size=1, seconds="1"), "C014", "'x'"),
    ],
)  # fmt: skip
def test_a_table_that_makes_no_sense_is_refused(tmp_path, text, code, said):
    model = load(
        parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    g (float[4, 8] x, float[8, 8] w) => (float[4, 8] y) { [mul] y = MatMul(x, w) }""")
    )
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises((InputError, ModelError), match=re.escape(said)) as raised:
        read_costs(path, model, Target((Device("cpu:0", 1),)))
    assert (raised.value.code, raised.value.where) == (code, str(path))


@pytest.mark.parametrize("ending", [".json", ".csv"])
def test_bytes_and_units_may_be_written_as_whole_floats_and_rows_left_empty_as_spreadsheets_do(tmp_path, ending):
    model, profile = small(), profiled(small(), target=CORE)
    path = written(tmp_path, ending, model, profile)
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
    found, _ = read_costs(path, model, CORE)
    assert found.unit.tolist() == profile.unit.tolist()
    assert set(found.graph.workspace_bytes.tolist()) == {10**12}
    assert found.graph.value_bytes.dtype == np.int64
    made = found.graph.value_bytes[found.graph.producer >= 0]
    assert set(made.tolist()) == {10**12}


@pytest.mark.parametrize("key", ["value_bytes", "workspace_bytes"])
def test_a_part_of_a_byte_is_refused_as_such(tmp_path, key):
    model = small()
    path = written(tmp_path, ".json", model, profiled(model))
    data = json.loads(path.read_text())
    if key == "value_bytes":
        data[key]["a"] = 0.5
    else:
        data["nodes"]["mul"][key] = 0.5
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"is 0\.5") as raised:
        read_costs(path, model, GPU)
    assert "a whole number of bytes" in raised.value.hint


def test_a_node_without_any_seconds_is_told_how_they_are_written(tmp_path):
    model = small()
    path = written(tmp_path, ".json", model, profiled(model))
    data = json.loads(path.read_text())
    data["nodes"]["mul"]["seconds"] = {}
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match="no seconds on 'cuda/NVIDIA H100' for node 'mul'") as raised:
        read_costs(path, model, GPU)
    assert '"seconds": {"cpu/1": 1e-5}' in raised.value.hint


def carried(run_cli, model_file: Path, edit) -> tuple[int, str]:
    """Save the costs of a model, edit them, and compile it with them; returns the exit code and what is said."""
    options = ("compile", model_file, "--shape", "batch=4", "--devices", "cpu:0", "--placer", "single", "--force")
    path = model_file.parent / "carried.json"
    assert run_cli(*options, "--save-costs", path).code == 0
    data = json.loads(path.read_text())
    edit(data["nodes"])
    path.write_text(json.dumps(data))
    ran = run_cli(*options, "--costs", path)
    return ran.code, ran.err


def test_a_cost_file_for_another_model_says_which_nodes_are_missing(run_cli, model_file):
    def other(nodes):
        names = list(nodes)
        for name in names[:2]:
            nodes[f"other/{name}"] = {**nodes.pop(name), "fingerprint": "0" * 16}
        gone.extend(names[:2])

    gone: list[str] = []
    code, said = carried(run_cli, model_file, other)
    assert code == 2
    assert f"error[C010] {model_file.parent / 'carried.json'}: no costs for 2 of" in said
    assert f"such as {gone[0]}, {gone[1]}" in said
    assert "hint: it was made for another model; profile this one" in said


@pytest.mark.parametrize("value", [float("nan"), -1e-6, float("inf"), 10**400, True, "1"], ids=str)
def test_a_cost_that_is_no_time_is_said_with_its_node(run_cli, model_file, value):
    def spoil(nodes):
        name, entry = next(iter(nodes.items()))
        (kind,) = entry["seconds"]
        entry["seconds"][kind] = value
        shown = repr(value) if value != 10**400 else f"1{'0' * 59}..."
        spoilt.append(f"the cost of node {name!r} on {kind!r} is {shown}, not a time")

    spoilt: list[str] = []
    code, said = carried(run_cli, model_file, spoil)
    assert code == 2
    assert f"error[C014] {model_file.parent / 'carried.json'}: {spoilt[0]}" in " ".join(said.split("\n"))
    assert "hint: it must be a number of seconds, not negative" in said


def test_the_costs_in_a_bundle_are_those_that_are_saved(run_cli, model_file, tmp_path):
    options = ("--shape", "batch=4", "--devices", "cpu:0", "--placer", "single", "-o", tmp_path / "bundle")
    ran = run_cli("compile", model_file, *options, "--save-costs", tmp_path / "saved.json")
    assert ran.code == 0, ran.err
    costs = json.loads((tmp_path / "bundle" / "costs.json").read_text())
    assert costs == json.loads((tmp_path / "saved.json").read_text())
    assert all(quality["runs"] > 0 for quality in costs["measured"].values())
    assert all(entry["spread"] and entry["fingerprint"] for entry in costs["nodes"].values())


def test_the_file_to_which_costs_are_saved_is_named(run_cli, model_file, tmp_path):
    options = ("compile", model_file, "--shape", "batch=4", "--devices", "cpu:0", "--placer", "single", "--no-trial")
    assert run_cli(*options, "--save-costs", tmp_path / "saved.csv").out.endswith(f"costs: {tmp_path / 'saved.csv'}\n")
    assert "costs: " not in run_cli(*options, "--force").out


def test_a_table_that_is_not_there_or_no_text_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_costs(tmp_path / "none.csv", small(), GPU)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a cost file"):
        read_costs(tmp_path / "bytes.csv", small(), GPU)


def test_measured_costs_say_how_sure_they_are(tmp_path):
    path = tmp_path / "costs.json"
    profiled(small(), f"repeat=3,seconds=0,save={path}", local_target("cpu:0"))
    data = json.loads(path.read_text())
    (kind,) = data["measured"]
    quality = data["measured"][kind]
    assert quality["runs"] >= 3
    assert quality["kernels"] >= 1
    assert quality["kernel_seconds"] > 0
    assert 0 <= quality["waiting"] <= 1
    total = sum(entry["seconds"][kind] for entry in data["nodes"].values())
    assert total == pytest.approx(data["whole_seconds"][kind])
    assert all(entry["spread"][kind] >= 0 for entry in data["nodes"].values())
    assert all(re.fullmatch("[0-9a-f]{16}", entry["fingerprint"]) for entry in data["nodes"].values())


def test_fingerprints_tell_what_nodes_do_and_not_what_they_are_called():
    base = fingerprints(small(), static_shapes(small()))
    renamed = small(text=TEXT.replace("[mul] a", "[product] v").replace("Add(a", "Add(v"))
    assert fingerprints(renamed, static_shapes(renamed)) == base
    newer = small(text=TEXT.replace(": 17", ": 18"))
    assert not set(fingerprints(newer, static_shapes(newer))) & set(base)
    larger = fingerprints(small(8), static_shapes(small(8)))
    assert [a == b for a, b in zip(larger, base)] == [False] * 4


def test_saving_where_nothing_can_be_written_is_refused(run_cli, model_file, tmp_path):
    ran = run_cli("compile", model_file, "--shape", "batch=4", "--save-costs", tmp_path / "none" / "costs.json")
    assert ran.code == 2
    assert "cannot write there" in ran.err
