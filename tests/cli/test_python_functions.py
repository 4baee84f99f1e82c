"""`onnxplace.plan`, `verify`, `bench` and `report` in Python are the commands, and objects show themselves."""

import html
import inspect
import json
from dataclasses import asdict, fields

import numpy as np
import onnx
import pytest

import onnxplace
from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.driver.place import place_cost_graph
from onnxplace.facts import Placement
from onnxplace.target.target import Device, Target

pytestmark = pytest.mark.usefixtures("no_gpus")
FUNCTIONS = [onnxplace.plan, onnxplace.verify, onnxplace.bench, onnxplace.report, onnxplace.compile]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_unknown_and_wrong_arguments_are_type_errors_that_name_the_nearest(function):
    signature = inspect.signature(function)
    name = "trace" if function is onnxplace.report else "shape"
    assert signature.parameters[name].default is None
    for options, words in (({name[:-1]: 1}, f"did you mean '{name}'?"), ({name: 5}, f"for {name}, got 5")):
        with pytest.raises(TypeError) as refused:
            function("nowhere", **options)
        assert isinstance(refused.value, onnxplace.UsageError)
        assert words in str(refused.value)


def test_plan_has_the_fields_of_the_command(run_cli, model_file):
    plan = onnxplace.plan(model_file, devices=["cpu:0"], shape={"batch": 4}, estimate=True)
    printed = json.loads(
        run_cli("plan", model_file, "--devices", "cpu:0", "--shape", "batch=4", "--estimate", "--json").out
    )
    assert set(printed) == {item.name for item in fields(plan)}
    for strategy, entry in zip(plan.strategies, printed["strategies"], strict=True):
        assert json.loads(json.dumps(asdict(strategy))) == entry


def test_verify_has_the_fields_of_the_command_and_takes_arrays(run_cli, compiled, model_file):
    printed = json.loads(run_cli("verify", compiled, "--json").out)
    bundle = onnxplace.load(compiled)
    for result in (onnxplace.verify(bundle), onnxplace.verify(str(compiled), against=model_file)):
        assert {key: getattr(result, key) for key in ("equal", "steps", "optimised", "explanation")} == {
            key: printed[key] for key in ("equal", "steps", "optimised", "explanation")
        }
        assert [vars(item) for item in result.outputs] == [
            {**item, "random_nodes": (), "index": ()} for item in printed["outputs"]
        ]
        assert [dict(item.sizes) for item in result.sizes] == [item["sizes"] for item in printed["sizes"]]
    assert set(printed) <= {item.name for item in fields(result)}
    arrays = {item.name: np.ones([2, *item.shape[1:]], np.float32) for item in bundle.inputs}
    (given,) = onnxplace.verify(bundle, inputs=arrays).sizes
    assert (given.sizes, given.result) == ({"batch": 2}, "equal")


def test_verify_finds_another_model(compiled, model_file, tmp_path):
    other = onnx.load(model_file)
    next(node for node in other.graph.node if node.op_type == "Tanh").op_type = "Sin"
    onnx.save(other, tmp_path / "other.onnx")
    result = onnxplace.verify(compiled, against=tmp_path / "other.onnx")
    assert not result.equal
    assert {item.result for item in result.sizes} == {"differs"}


def test_bench_has_the_fields_of_the_command(run_cli, compiled, tmp_path):
    options = ("--no-memory", "--repeat", "2", "--in-flight", "2")
    printed = json.loads(run_cli("bench", compiled, *options, "--json").out)
    result = onnxplace.bench(compiled, memory=False, repeat=2, in_flight=2, trace=tmp_path / "t.json")
    assert set(printed) == {item.name for item in fields(result)} - {
        "diagnostics",
        "copies",
        "streams",
        "opening",
        "sizes",
    }
    assert result.speedup.ratio == result.model.median_seconds / result.bundle.median_seconds
    assert result.requests_per_second.measured == 1 / result.in_flight.median_seconds
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert printed["predicted_seconds"] == result.predicted_seconds


@pytest.mark.parametrize(("function", "name"), [(onnxplace.verify, "steps"), (onnxplace.bench, "repeat")])
def test_no_rounds_are_refused(compiled, function, name):
    with pytest.raises(onnxplace.UsageError, match=r"U005.*1 (step|round) or more, got 0"):
        function(compiled, **{name: 0})


def test_report_has_the_fields_of_the_command_and_shows_itself(run_cli, compiled, tmp_path):
    printed = json.loads(run_cli("report", compiled, "--json").out)
    report = onnxplace.report(compiled, output=tmp_path / "page.html")
    assert json.loads(json.dumps({"output": None, "pages": [asdict(page) for page in report.pages]})) == printed
    page = (tmp_path / "page.html").read_text()
    assert html.unescape(report._repr_html_()).count(page) == 1
    assert len(onnxplace.report(compiled, onnxplace.load(compiled)).pages) == 2
    assert repr(report).count("\n") == 0


# ------------------------------------------------------------------------------------------------ objects


def test_objects_show_themselves_in_five_lines(compiled):
    bundle, graph = onnxplace.load(compiled), GENERATORS["layered"](30, seed=0)
    many = Target(tuple(Device(f"cpu:{index}", 1 << 20, index + 1) for index in range(40)))
    with onnxplace.InferenceSession(bundle) as session:
        objects = [
            (bundle, ("branches", "cpu:0: ", " ms a step, ", " -> ")),
            (session, ("InferenceSession of Bundle", "cpu:1: ")),
            (bundle.target, ("Target of 2 devices", "cpu:0, cpu:1: cpu/1, ")),
            (graph, ("30 nodes", "Target of 4 devices")),
            (place_cost_graph(graph, "m-etf"), ("by m-etf", "and 1 more", "lower bound")),
            (Placement(np.array([0, 1, 1], np.int32), "auto"), ("Placement of 3 nodes on 2 devices, by auto",)),
            (many, ("Target of 40 devices", "and 37 more")),
        ]
        for item, words in objects:
            text = repr(item)
            assert text.count("\n") < 5
            assert [word for word in words if word not in text] == []


def test_results_show_themselves_in_five_lines(compiled, model_file):
    plan = onnxplace.plan(model_file, devices=["cpu:0", "cpu:1"], shape={"batch": 4}, estimate=True)
    tight = onnxplace.plan(model_file, devices=["cpu:0"], shape={"batch": 4}, estimate=True, max_memory=10)
    objects = [
        (plan, ("Plan of 'branches': ", "costs are estimates", "least latency: ", "most requests: ", " requests/s")),
        (tight, ("nothing fits: ",)),
        (onnxplace.verify(compiled), ("Verification: equal", "max abs error 0", "batch=4: equal; ")),
        (
            onnxplace.bench(compiled, memory=False, repeat=1, in_flight=2),
            ("Benchmark: step ", "predicted ", " with all cores, ", "in flight: "),
        ),
    ]
    for item, words in objects:
        text = repr(item)
        assert text.count("\n") < 5
        assert [word for word in words if word not in text] == []


def test_a_closed_session_says_so(compiled):
    session = onnxplace.InferenceSession(compiled)
    assert repr(session).startswith("InferenceSession of Bundle")
    session.close()
    assert repr(session).startswith("closed InferenceSession of Bundle")
    for call in (lambda: session.run(None, {}), lambda: session.submit({}), lambda: session.run_timed({"no": 1})):
        with pytest.raises(onnxplace.ExecutionError, match=r"X002.*the session is closed"):
            call()


def test_notebooks_show_the_timeline_and_the_tables(compiled):
    bundle = onnxplace.load(compiled)
    placed = place_cost_graph(GENERATORS["layered"](30, seed=0), "m-etf")
    with onnxplace.InferenceSession(bundle) as session:
        for item in (bundle, session, placed):
            frame = item._repr_html_()
            assert frame.startswith("<iframe ")
            assert 'sandbox="allow-scripts"' in frame
            page = html.unescape(frame.partition('srcdoc="')[2])
            assert 'data-chart="timeline"' in page
            assert "<caption>Devices</caption>" in page


def test_without_the_extra_notebooks_show_the_text(compiled, monkeypatch):
    monkeypatch.setattr("onnxplace.reports.page_rendering.find_spec", lambda name: None)
    assert onnxplace.load(compiled)._repr_html_() is None
