"""The cases of `examples/cases`: each runs as a user runs it, and docs/cases.md has its command and tables."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cases"
PAGE = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "all" and not path.stem.startswith("_"))
PLUS_ONE = '<ir_version: 8, opset_import: ["": 17]> plus (float[2] x) => (float[2] y) { y = Add(x, x) }'


@pytest.fixture(scope="module")
def case():
    """Return the module that cases share, as they import it."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    import _case

    yield _case
    sys.path[:] = before


@pytest.fixture(scope="module")
def everything(case):
    """Return the script that runs all cases."""
    sys.path.insert(0, str(FOLDER))
    import all as module

    return module


@pytest.fixture(scope="module")
def encode(case, tmp_path_factory):
    """Return a function from texts to the features of the model of `host_control`."""
    import host_control
    import onnxruntime

    path = tmp_path_factory.mktemp("texts") / "model.onnx"
    onnx.save(host_control.encoder_of_texts(layers=1, hidden=8, heads=2), path)
    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda texts: session.run(None, {"texts": np.array(texts, dtype=object)})[0]


def run(name, *arguments):
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


# ------------------------------------------------------------------------------------------------------- the page


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_command_of_each_case_and_a_table_that_ran(name):
    assert f"python examples/cases/{name}.py" in PAGE
    marks = re.findall(rf"<!-- {name}: .*? -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert marks
    assert all("|---|" in text for text in marks)


def test_the_page_has_no_table_of_a_case_that_is_gone():
    assert set(re.findall(r"<!-- (\w+): .*? -->\n.*?<!-- end -->", PAGE, re.DOTALL)) <= {*NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_case_runs_and_its_tables_and_threads_are_on_the_page(name, case):
    text = run(name, "--quick", "--json")
    record, tables = json.loads(text), case.parse_tables(text)
    assert tables
    for table in tables:
        assert f"<!-- {name}: {table.caption} -->" in PAGE
        assert any((row.measured, row.predicted) != (None, None) for row in table.rows)
        assert not table.baseline or table.baseline in {row.what for row in table.rows}
    for address in record["threads"].values():
        assert address in PAGE


@pytest.mark.slow
def test_a_case_prints_its_thread_and_markdown():
    text = run("host_control", "--quick")
    assert text.startswith("# Shape and control nodes next to heavy compute (onnxruntime #23154)\n")
    assert "| onnxplace, all cores |" in text


# -------------------------------------------------------------------------------------------------------- the harness


def test_a_table_has_errors_and_comparisons_and_leaves_empty_columns_out(case):
    rows = [case.Row("base", measured=0.02, low=0.01, high=0.03), case.Row("ours", 0.011, 0.01)]
    text = case.format_table(case.Table("Times", rows, "base", remarks=["A remark."]))
    assert text.splitlines() == [
        "Times:",
        "",
        "|  | predicted | measured | error | compared |",
        "|---|---|---|---|---|",
        "| base | - | 20.0 ms (10 to 30) | - | 1.00x |",
        "| ours | 11.0 ms | 10.0 ms | +10% | 2.00x |",
        "",
        "A remark.",
    ]


@pytest.mark.parametrize(
    ("unit", "base", "other", "compared"),
    [("s", 2.0, 4.0, "0.50x"), ("requests/s", 2.0, 4.0, "2.00x"), ("bytes", 2e6, 1e6, "50%"), ("count", 8, 2, "25%")],
)
def test_more_is_better_for_rates_only_and_sizes_are_shares(case, unit, base, other, compared):
    rows = [case.Row("base", measured=base, unit=unit), case.Row("other", measured=other, unit=unit)]
    assert compared in case.format_table(case.Table("Figures", rows, "base")).splitlines()[-1]


def test_figures_of_another_unit_than_the_baseline_are_not_compared(case):
    rows = [case.Row("base", measured=0.02), case.Row("memory", 1e6, unit="bytes")]
    assert case.format_table(case.Table("Both", rows, "base")).splitlines()[-1].endswith("| 1.0 MB | - | - |")


def test_a_prediction_is_compared_with_a_prediction_and_a_measurement_with_a_measurement(case):
    rows = [case.Row("base", measured=0.02), case.Row("ours", 0.001, 0.01), case.Row("simulated", 0.001)]
    lines = case.format_table(case.Table("Times", rows, "base")).splitlines()
    assert [line.split(" | ")[-1] for line in lines[-3:]] == ["1.00x |", "2.00x |", "- |"]
    rows = [case.Row("base", 0.02), case.Row("simulated", 0.01)]
    assert case.format_table(case.Table("Times", rows, "base")).splitlines()[-1].endswith("| 2.00x |")


def test_a_bound_is_marked_and_not_compared(case):
    rows = [case.Row("base", 0.02, 0.02), case.Row("slow disk", 0.01, is_bound=True)]
    line = case.format_table(case.Table("Times", rows, "base")).splitlines()[-1]
    assert line == "| slow disk | at least 10.0 ms | - | - | - |"


def test_a_caption_says_what_a_measured_figure_is(case, tmp_path):
    how = case.Settings(False, tmp_path).how
    table = case.Table("Times", [case.Row("base", measured=0.02)], how=how)
    assert case.format_table(table).splitlines()[0] == "Times (medians of 60 calls, in turns):"


@pytest.mark.parametrize(
    ("measured", "text"), [(None, "limit 2.0 MB"), (2e6, "limit 2.0 MB"), (3e6, "limit 2.0 MB, exceeded")]
)
def test_memory_above_its_limit_is_named(case, measured, text):
    assert case.describe_limit(2_000_000, measured) == text


def test_tables_survive_json(case):
    table = case.Table("Times", [case.Row("base", measured=0.02)], "base", remarks=["A remark."])
    assert case.parse_tables(json.dumps({"tables": [case.asdict(table)]})) == [table]


def test_a_bound_session_returns_what_a_plain_one_does(case, tmp_path):
    onnx.save(onnx.parser.parse_model(PLUS_ONE), tmp_path / "plus.onnx")
    session = case.BoundSession(tmp_path / "plus.onnx", {"x": np.float32([1, 2])}, threads=1)
    session.run()
    case.check_outputs("plus", session.fetch(), {"y": np.float32([2, 4])})


def test_a_bound_session_takes_texts(case, tmp_path):
    text = '<ir_version: 8, opset_import: ["": 17]> same (string[1] x) => (string[1] y) { y = Identity(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "same.onnx")
    session = case.BoundSession(tmp_path / "same.onnx", {"x": np.array(["a text"], dtype=object)}, threads=1)
    session.run()
    assert session.fetch()["y"].tolist() == ["a text"]


def test_outputs_that_differ_end_a_case(case):
    with pytest.raises(SystemExit, match="ours: output y differs"):
        case.check_outputs("ours", {"y": np.float32([2, 5])}, {"y": np.float32([2, 4])})


def test_a_table_replaces_the_one_between_its_marks(case, everything):
    page = "before\n\n<!-- one: Times -->\nold\n<!-- end -->\n\nafter <!-- end -->\n"
    table = case.Table("Times", [case.Row("base", measured=0.02)])
    expected = "before\n\n<!-- one: Times -->\nTimes:\n\n|  | measured |\n|---|---|\n| base | 20.0 ms |\n\n<!-- end -->"
    assert everything.replace_table(page, "one", table) == f"{expected}\n\nafter <!-- end -->\n"
    with pytest.raises(SystemExit, match="no place for a table"):
        everything.replace_table(page, "two", table)


def test_all_lists_each_case_once(everything):
    assert everything.list_cases() == NAMES
    assert everything.list_cases("host_") == ["host_cache", "host_control"]


# --------------------------------------------------------------------------------------------------------- the models


def test_each_text_is_encoded_by_itself(encode, case):
    import host_control

    texts = host_control.make_texts(5, seed=3).tolist()
    one_by_one = np.concatenate([encode([text]) for text in texts])
    np.testing.assert_allclose(encode(texts), one_by_one, rtol=1e-5, atol=1e-6)


def test_a_text_is_cut_to_its_first_words(encode, case):
    import host_control

    words = host_control.WORDS * 4
    cut = words[: host_control.LENGTH]
    assert len(words) > len(cut)
    np.testing.assert_allclose(encode([" ".join(words)]), encode([" ".join(cut)]), rtol=1e-5, atol=1e-6)
    assert not np.allclose(encode([" ".join(cut)]), encode([" ".join(cut[:-1])]))


def test_half_of_the_layers_goes_to_each_device(case, tmp_path):
    import unequal_devices

    import models

    pins = json.loads(unequal_devices.halve_layers(("cpu:0", "cpu:1"), tmp_path).read_text())
    nodes = [node.name for node in models.build("transformer", layers=unequal_devices.LAYERS, hidden=8).graph.node]
    placed = {name: next(device for text, device in pins.items() if re.match(text, name)) for name in nodes}
    blocks = {int(found[1]): device for name, device in placed.items() if (found := re.search(r"block_(\d+)/", name))}
    assert blocks == {layer: "cpu:0" if layer < 6 else "cpu:1" for layer in range(12)}
    assert placed["embedding/tokens"] == "cpu:0"
    assert placed["pooled"] == "cpu:1"


def test_each_device_keeps_the_cache_of_its_own_layers(case, tmp_path):
    import host_cache

    model = host_cache.decoder(layers=2, hidden=32, heads=2, vocab=16, positions=32)
    host_cache.models.save(model, tmp_path / "decoder.onnx")
    bundle = host_cache.compile_case(
        tmp_path / "decoder.onnx",
        "two",
        case.Settings(True, tmp_path),
        devices="cpu:0,cpu:1",
        shape={"batch": 1, "seq": 1, "past": 8},
        state=host_cache.STATE,
        device_map={r"(decoder/block_1/|present\.1\.).*": "cpu:1", ".*": "cpu:0"},
    )
    places = {state.input: state.device for state in bundle.manifest.states}
    assert places == {f"past.{layer}.{kind}": f"cpu:{layer}" for layer in (0, 1) for kind in ("key", "value")}


@pytest.mark.slow
def test_a_published_step_without_copies_is_shorter(case, tmp_path):
    import host_cache

    table = host_cache.simulate_published(case.Settings(True, tmp_path))
    rows = {row.what: row for row in table.rows}
    assert rows["cache kept on the GPU"].predicted < rows["cache through the host"].predicted
    assert rows["the difference"].measured == pytest.approx(0.022)
