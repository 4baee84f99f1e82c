"""Cost files: written as JSON and CSV, read back the same, edited, carried to other machines and other models."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import parser

from onnxplace.errors import InputError, ModelError
from onnxplace.facts import Profile, Source
from onnxplace.machine import local_target
from onnxplace.model import Model, bind, load, static_shapes
from onnxplace.passes._cost_file import Details, costs_table, costs_text, read_costs
from onnxplace.passes._repeats import fingerprints
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


def small(batch: int = 4, text: str = TEXT) -> Model:
    return bind(load(parser.parse_model(text)), {"batch": batch}, {})


def profiled(model: Model, options: str = "estimate=true", target: Target = GPU) -> Profile:
    return Pipeline.parse(f"profile{{{options}}}").run(State(target).having(model))[0][Profile]


def details(model: Model, profile: Profile) -> Details:
    spread = {kind: array / 10 for kind, array in profile.seconds.items()}
    return Details(fingerprints(model, static_shapes(model)), spread)


def written(folder: Path, ending: str, model: Model, profile: Profile) -> Path:
    path, more = folder / f"costs{ending}", details(model, profile)
    path.write_text(costs_table(profile, model, more) if ending == ".csv" else costs_text(profile, more))
    return path


@pytest.mark.parametrize("ending", [".json", ".csv"])
def test_what_is_written_is_read_back(tmp_path, ending):
    model = small()
    profile = profiled(model)
    found, notes = read_costs(written(tmp_path, ending, model, profile), model, GPU)
    assert notes == []
    for kind in ("cuda/NVIDIA H100", "cpu/1"):
        assert (found.seconds[kind] == profile.seconds[kind]).all()
        assert set(found.sources[kind].tolist()) == {Source.GIVEN}
    assert (found.unit == profile.unit).all()
    assert (found.graph.value_bytes == profile.graph.value_bytes).all()
    assert found.whole_seconds == profile.whole_seconds


@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=4), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_any_times_survive_both_forms(tmp_path_factory, seconds, units):
    from dataclasses import replace

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
        (ROWS.format(unit=0, size=128, seconds="-1"), "C014", "'mul' on 'cpu/1' is -1, not a time"),
        (ROWS.format(unit=0, size=128, seconds="nan"), "C014", "'mul' on 'cpu/1' is nan, not a time"),
        (ROWS.format(unit=0, size=128, seconds="inf"), "C014", "'mul' on 'cpu/1' is inf, not a time"),
        (ROWS.format(unit=0, size=128, seconds="fast"), "C014", "'mul' on 'cpu/1' is fast, not a time"),
        (ROWS.format(unit="x", size=128, seconds="1"), "C014", "'mul' makes no sense"),
        (ROWS.format(unit=0, size="-128", seconds="1"), "C014", "value_bytes of 'y' is -128"),
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
