"""`onnxplace report`, and --report of `compile` and `place`, as users run them."""

import json

import onnx
import pytest

from onnxplace.cost_graph.cost_graphs import write_cost_graph
from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.driver.place import place_cost_graph


def test_a_report_is_written_and_named(run_cli, compiled, tmp_path):
    page = tmp_path / "page.html"
    result = run_cli("report", compiled, "-o", page)
    assert result.code == 0, result.err
    assert f"written to {page}" in result.out
    assert "branches" in page.read_text(encoding="utf-8")


def test_the_verdict_is_printed_first(run_cli, compiled, tmp_path):
    result = run_cli("report", compiled, "-o", tmp_path / "page.html")
    first, second = result.out.splitlines()
    assert "times as fast as one device; " in first
    assert "; limited by " in first
    assert second.startswith("written to ")


def test_of_two_reports_the_one_to_take_is_named(run_cli, compiled, tmp_path):
    page = tmp_path / "page.html"
    result = run_cli("report", compiled, compiled, "-o", page)
    assert result.out.startswith("Take either: their steps and their memory are equal")
    assert "Take either: their steps and their memory are equal" in page.read_text(encoding="utf-8")
    data = json.loads(run_cli("report", compiled, compiled, "--json").out)
    assert {row["difference"] for row in data["comparison"]["rows"]} == {"equal"}
    assert "comparison" not in json.loads(run_cli("report", compiled, "--json").out)


def test_nodes_have_shapes_costs_and_edges(run_cli, compiled):
    (page,) = json.loads(run_cli("report", compiled, "--json").out)["pages"]
    tree, edges = page["layers"], page["edges"]
    name = {node: label for label, node in zip(tree["label"], tree["node"]) if node >= 0}
    assert {(name[a], name[b]) for a, b in zip(edges["source"], edges["reader"])} == {
        ("left", "relu"), ("right", "tanh"), ("relu", "sum"), ("tanh", "sum"),
    }  # fmt: skip
    rows = {label: row for row, label in enumerate(tree["label"])}
    assert tree["source"][rows["left"]] == "estimated"
    assert tree["seconds"][rows["left"]] > 0
    assert tree["shape"][rows["relu"]] == tree["shape"][rows["sum"]] != ""
    (timeline,) = page["timelines"]
    computed = [
        label for label, row in zip(timeline["label"], timeline["row"]) if timeline["rows"][row]["kind"] == "compute"
    ]
    assert computed == [segment["id"] for segment in page["segments"]]
    assert {index for index in tree["segment"] if index >= 0} == set(range(len(computed)))


def test_the_default_file_is_report_html_here(run_cli, compiled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_cli("report", compiled, compiled).code == 0
    assert (tmp_path / "report.html").exists()


def test_json_prints_the_data_and_writes_no_page(run_cli, compiled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run_cli("report", compiled, "--json")
    (page,) = json.loads(result.out)["pages"]
    assert page["kind"] == "bundle"
    assert [timeline["name"] for timeline in page["timelines"]] == ["from node costs"]
    assert {item["value"] for item in page["crossings"]} <= set(page["timelines"][0]["label"])
    assert {path for path, op in zip(page["layers"]["label"], page["layers"]["op"]) if op} == {
        "left", "right", "relu", "tanh", "sum",
    }  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_a_trace_shows_measured_times_next_to_predicted_ones(run_cli, compiled, tmp_path):
    trace = tmp_path / "trace.json"
    assert run_cli("run", compiled, "--trace", trace).code == 0
    page = json.loads(run_cli("report", compiled, "--trace", trace, "--json").out)["pages"][0]
    measured, predicted = page["timelines"]
    assert (measured["name"], predicted["name"]) == ("measured", "predicted")
    for timeline in (measured, predicted):
        computed = {timeline["rows"][row]["name"] for row in timeline["row"]}
        assert {"cpu:0", "cpu:1"} <= computed
    assert max(measured["finish_seconds"]) == pytest.approx(measured["end_seconds"])


def test_compile_with_report_shows_trial_and_attempts(run_cli, model_file, tmp_path):
    page = tmp_path / "page.html"
    result = run_cli(
        "compile", model_file, "-o", tmp_path / "b", "--devices", "cpu:0,cpu:1", "--shape", "batch=4", "--report", page,
        "--budget", "0.1", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert json.loads(result.out)["report"] == str(page)
    data = json.loads(run_cli("report", tmp_path / "b", "--json").out)["pages"][0]
    (group,) = [group for group in data["attempts"] if group["code"] == "P040"]
    assert {"cpu:0", "m-etf"} <= {attempt["name"] for attempt in group["attempts"]}
    (kept,) = (attempt["seconds"] for attempt in group["attempts"] if attempt["is_kept"])
    text = page.read_text(encoding="utf-8")
    assert "onnxplace report" in text
    for attempt in group["attempts"]:  # slower attempts have a speed below 1
        assert f'<td class="number">{kept / attempt["seconds"]:.2f}x</td>' in text


def test_place_with_report_shows_each_node(run_cli, tmp_path):
    graph, page = GENERATORS["two_tower"](40, seed=1), tmp_path / "page.html"
    write_cost_graph(tmp_path / "graph.graphml", graph, place_cost_graph(graph, "m-etf"))
    result = run_cli(
        "place", tmp_path / "graph.graphml", "--budget", "0.1", "--seed", "0", "--no-fuse", "--report", page
    )  # fmt: skip
    assert result.code == 0, result.err
    assert f"written to {page}" in result.out
    data = page.read_text(encoding="utf-8").partition('id="data">')[2].partition("</script>")[0]
    (report,) = json.loads(data)
    assert report["kind"] == "placement"
    options = {entry["label"]: entry["text"] for entry in report["origin"] if entry["label"].startswith("--")}
    assert options == {"--budget": "0.1", "--seed": "0", "--fuse": "False"}
    assert len(report["timelines"][0]["row"]) >= 40


PIPELINES = {
    "stages": ("optimize,profile{estimate=true},stages,split,emit", {"Pipeline stages"}),
    "copies": ("optimize,profile{estimate=true},single,split,replicate{routes=cpu:1},emit", {"Routes of requests"}),
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_stages_and_copies_have_a_table(run_cli, model_file, tmp_path, kind):
    pipeline, captions = PIPELINES[kind]
    options = ("--devices", "cpu:0,cpu:1", "--shape", "batch=64", "--pipeline", pipeline, "--no-trial")
    result = run_cli("compile", model_file, "-o", tmp_path / "b", *options)
    assert result.code == 0, result.err
    (page,) = json.loads(run_cli("report", tmp_path / "b", "--json").out)["pages"]
    for caption in captions:
        assert any(table["caption"].startswith(caption) and table["rows"] for table in page["division"])


def test_a_model_without_nodes_has_a_report(run_cli, tmp_path):
    text = '<ir_version: 8, opset_import: ["": 17]> pass (float[2] x) => (float[2] x) {}'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "pass.onnx")
    options = ("--devices", "cpu:0,cpu:1", "--no-trial", "--report", tmp_path / "page.html")
    result = run_cli("compile", tmp_path / "pass.onnx", "-o", tmp_path / "b", *options)
    assert result.code == 0, result.err
    assert "Nothing crosses between devices." in (tmp_path / "page.html").read_text(encoding="utf-8")


PROCESS_NAME = '{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "measured"}}'


def assert_refused(result, code, *texts):
    assert result.code == 2
    assert f"error[{code}]" in result.err
    for text in texts:
        assert text in result.err


def test_three_bundles_are_refused(run_cli, compiled):
    assert_refused(run_cli("report", compiled, compiled, compiled), "U042", "expected one or two bundles, got 3")


def test_a_trace_with_two_bundles_is_refused(run_cli, compiled, tmp_path):
    result = run_cli("report", compiled, compiled, "--trace", tmp_path / "t.json")
    assert_refused(result, "U042", "expected one bundle with a trace, got 2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected a JSON object with traceEvents"),
        ('{"traceEvents": []}', "expected measured or predicted events, found none"),
        ('{"traceEvents": [7]}', "traceEvents is malformed at '0': "),
        ("{", "JSON"),
        *(
            (f'{{"traceEvents": [{PROCESS_NAME}, {{"ph": "X", "pid": 1, "cat": "copy", {entry}}}]}}', message)
            for entry, message in (
                ('"ts": "x"', "malformed at '1.ts': "),
                ('"ts": NaN', "malformed at '1.ts': "),
                ('"ts": 1', "malformed at '1': Value error, expected ts and dur"),
                ('"dur": -1', "malformed at '1.dur': "),
                ('"ts": 1, "dur": 1e300', "malformed at '1.dur': "),
                ('"args": {"bytes": 1E400}', "malformed at '1.args.bytes': "),
                (f'"args": {{"nodes": {10**400}}}', "malformed at '1.args.nodes': "),
                ('"name": [1]', "malformed at '1.name': "),
                ('"tid": [1]', "malformed at '1.tid': "),
                ('"args": []', "malformed at '1.args': "),
                ('"args": {"request": []}', "malformed at '1.args.request': "),
            )
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused(run_cli, compiled, tmp_path, content, message):
    trace = tmp_path / "trace.json"
    trace.write_text(content)
    assert_refused(run_cli("report", compiled, "--trace", trace, "--json"), "D020", message)


def test_events_of_other_kinds_in_a_trace_do_not_matter(run_cli, compiled, tmp_path):
    trace = tmp_path / "trace.json"
    run_cli("run", compiled, "--trace", trace)
    data = json.loads(trace.read_text())
    data["traceEvents"].insert(0, {"ph": "i", "pid": "other", "args": 5})
    trace.write_text(json.dumps(data))
    assert run_cli("report", compiled, "--trace", trace, "--json").code == 0


def test_a_trace_of_another_bundle_is_refused(run_cli, compiled, tmp_path):
    trace = tmp_path / "trace.json"
    run_cli("run", compiled, "--trace", trace)
    trace.write_text(trace.read_text().replace('"name": "cpu0-000"', '"name": "gpu7-000"'))
    assert_refused(run_cli("report", compiled, "--trace", trace, "--json"), "D020", "gpu7-000")


def test_a_model_and_a_page_that_cannot_be_written_are_refused(run_cli, compiled, model_file, tmp_path):
    assert_refused(run_cli("report", model_file), "N001", "not a bundle")
    assert_refused(run_cli("report", compiled, "-o", tmp_path / "no" / "page.html"), "U032")
    assert_refused(run_cli("report", compiled, "-o", compiled), "U032")


@pytest.mark.parametrize("option", ["--output", "--costs", "--save-costs", "--device-map", "--shard-map", "--target"])
def test_a_report_replaces_no_other_file_of_compile(run_cli, model_file, tmp_path, option):
    path = tmp_path / "file.json"
    if option not in ("--output", "--save-costs"):
        path.write_text("{}")
    result = run_cli("compile", model_file, option, path, "--report", path)
    assert_refused(result, "U032", str(path))
    assert not path.exists() or path.read_text() == "{}"


def test_a_report_replaces_no_file_of_the_default_bundle(run_cli, model_file):
    bundle = model_file.with_suffix(".bundle")
    assert_refused(run_cli("compile", model_file, "--report", bundle), "U032", "name the same file")
    bundle.mkdir()
    assert_refused(run_cli("compile", model_file, "--report", bundle / "page.html"), "U032", "which is read")


def test_a_report_does_not_replace_the_placed_graph(run_cli, tmp_path):
    graph, path = tmp_path / "g.json", tmp_path / "placed.graphml"
    graph.write_text("{}")
    result = run_cli("place", graph, "-o", path, "--report", path)
    assert_refused(result, "U032", "--output and --report name the same file")
