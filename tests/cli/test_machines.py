"""`--machine` and the choice between machines, as a user types them."""

import json
import tomllib
from pathlib import Path

import onnx
import pytest
from onnx import parser

from onnxplace.driver.plan import plan_model
from onnxplace.target.machines import parse_machine
from onnxplace.target.target_file import read_target
from onnxplace.utils.quantities import format_milliseconds

# At 4096 rows, a machine's speed is longer than the start of a kernel.
TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float16[batch, 1024] x, float16[1024, 1024] w) => (float16[batch, 1024] y) {
    [mul] a = MatMul(x, w)
    [relu] y = Relu(a)
}"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(parser.parse_model(TEXT), "model.onnx")
    return "model.onnx"


@pytest.fixture
def prices(tmp_path):
    (tmp_path / "prices.toml").write_text('[per_hour]\nH100 = 3.6\n"2xL4" = 1.0\n"L4-24" = 0.9\n')
    return tmp_path / "prices.toml"


MACHINES = ("--shape", "batch=4096", "--machine", "H100", "--machine", "2xL4")


def test_the_catalogue_is_listed_with_sources(run_cli):
    listed = run_cli("machines")
    assert listed.code == 0
    assert "H100-SXM" in listed.out
    assert "NVLink4" in listed.out
    data = json.loads(run_cli("machines", "--json").out)
    assert data["devices"]["T4"]["rates"]["int8"] == 130e12
    assert all(item["source"] for table in (data["devices"], data["fabrics"]) for item in table.values())


def test_a_plan_names_its_machine_and_says_that_it_is_an_estimate(run_cli, model):
    result = run_cli("plan", model, "--shape", "batch=64", "--machine", "2xh100-nvlink")
    assert result.code == 0, result.err
    assert result.out.startswith("g on 2xH100-SXM-NVLink4: costs are estimates")
    assert "docs/machines.md says how far off they are" in result.out
    assert "2 copies of the model: Python hands on requests more slowly than one device answers them\n" in result.out
    assert "estimated from the target's peaks" in result.err
    data = json.loads(run_cli("plan", model, "--shape", "batch=64", "--machine", "H100", "--json").out)
    assert (data["machine"], data["is_measured"]) == ("H100-SXM", False)


QUANTISED = """<ir_version: 8, opset_import: ["": 17]>
g (int8[batch, 1024] x, int8[1024, 1024] w) => (int8[batch, 1024] y)
<float s = {0.1}, int8 z = {0}> {
    [dx] fx = DequantizeLinear(x, s, z)  [dw] fw = DequantizeLinear(w, s, z)
    [mul] fy = MatMul(fx, fw)  [q] y = QuantizeLinear(fy, s, z)
}"""


def test_a_quantised_model_is_estimated_by_its_machines_rate_of_integers(run_cli, model):
    onnx.save(parser.parse_model(QUANTISED), "quantised.onnx")
    steps = {}
    for name in (model, "quantised.onnx"):
        result = run_cli("plan", name, "--shape", "batch=4096", "--machine", "T4", "--json")
        assert result.code == 0, result.err
        steps[name] = json.loads(result.out)["strategies"][0]["step_seconds"]
    # 65 and 130 * 10^12 operations/s; the float model has a Relu behind the product
    assert steps["quantised.onnx"] < steps[model] / 2
    assert steps["quantised.onnx"] > 2 * 4096 * 1024**2 / 130e12


def test_several_machines_are_one_table_the_lowest_price_per_hour_first(run_cli, model, prices):
    result = run_cli("plan", model, *MACHINES, "--price", prices)
    assert result.code == 0, result.err
    request, header, *rows = result.out.splitlines()
    assert request == "a request is a batch of 4096"
    assert header.split()[:2] == ["machine", "strategy"]
    assert "per million at full load" in header
    assert {"H100-SXM", "2xL4-PCIe4"} <= {row.split()[0] for row in rows}
    data = json.loads(run_cli("plan", model, *MACHINES, "--price", prices, "--json").out)
    best, costs = data["rows"][0], [row["price_per_hour"] for row in data["rows"]]
    assert costs == sorted(costs)
    cheapest = "cheapest, by the price of an hour: 2xL4-PCIe4, "
    assert rows[-1].startswith(f"{cheapest}{best['strategy']['name']}, ")
    assert rows[-1].endswith(f" requests/s, 1 an hour, {best['requests_price']:.4g} per million requests")
    for row in data["rows"]:
        expected = row["price_per_hour"] / 3600 * row["strategy"]["interval_seconds"] * 1e6
        assert row["requests_price"] == pytest.approx(expected)
    # A price of the machine counts more than that of its devices.
    assert {row["machine"]: row["price_per_hour"] for row in data["rows"]} == {"H100-SXM": 3.6, "2xL4-PCIe4": 1.0}


def test_a_rate_is_what_a_machine_is_paid_for(run_cli, model, prices):
    data = json.loads(run_cli("plan", model, *MACHINES, "--price", prices, "--rate", "36/s", "--json").out)
    assert {row["machine"]: row["requests_price"] for row in data["rows"]} == pytest.approx(
        {"H100-SXM": 3.6 / 3600 / 36 * 1e6, "2xL4-PCIe4": 1 / 3600 / 36 * 1e6}
    )
    text = run_cli("plan", model, *MACHINES, "--price", prices, "--rate", "36/s").out
    assert "\ncheapest that meets 36 requests/s: 2xL4-PCIe4, " in text


def test_goals_keep_the_machines_that_meet_them_and_say_why_others_do_not(run_cli, model):
    plans = {name: plan_model(model, machine=name, shape={"batch": 4096}) for name in ("H100", "2xL4")}
    least = {
        name: min(item.step_seconds for item in plan.strategies if item.step_seconds) for name, plan in plans.items()
    }
    assert least["H100"] < least["2xL4"]
    goal = (least["H100"] + least["2xL4"]) / 2
    between = f"{goal * 1e6:.3f}us"
    result = run_cli("plan", model, *MACHINES, "--latency", between)
    assert result.code == 0, result.err
    assert "\nH100-SXM" in result.out
    assert "\n2xL4-PCIe4 does not meet the goals: at least" in result.out
    last = result.out.splitlines()[-1]
    assert last.startswith(f"least latency that meets {format_milliseconds(goal)}: H100-SXM, one device, ")
    alone = run_cli("plan", model, *MACHINES, "--latency", between, "--fit")
    assert "2xL4" not in alone.out
    missed = run_cli("plan", model, *MACHINES, "--rate", "1000000000/s")
    assert missed.code == 3
    assert missed.out.count("does not meet the goals") == 2


TIED = ("--shape", "batch=4096", "--machine", "2xT4", "--machine", "T4")


@pytest.mark.parametrize("machines", [TIED, (*TIED[:2], *TIED[4:], *TIED[2:4])])
@pytest.mark.parametrize("goal", [(), ("--rate", "10/s")])
def test_of_equal_machines_the_smaller_one_is_recommended_in_any_order(run_cli, model, tmp_path, machines, goal):
    (tmp_path / "p.toml").write_text("[per_hour]\nT4 = 0.35\n")
    for price in ((), ("--price", "p.toml")):
        result = run_cli("plan", model, *machines, *goal, *price)
        assert result.code == 0, result.err
        last = result.out.rstrip().splitlines()[-1]
        assert ": T4, one device" in last, last


def test_of_equal_prices_of_requests_the_lower_price_per_hour_is_the_cheapest(run_cli, model, tmp_path):
    (tmp_path / "p.toml").write_text("[per_hour]\nT4 = 0.35\n")
    rows = [
        row["machine"] for row in json.loads(run_cli("plan", model, *TIED, "--price", "p.toml", "--json").out)["rows"]
    ]
    assert rows[0] == "T4"


def test_what_is_printed_as_json_is_strict_json(run_cli, model):
    for goals in ((), ("--fit",), ("--latency", "1s"), ("--rate", "1/s")):
        result = run_cli("plan", model, *MACHINES, *goals, "--json")
        data = json.loads(result.out, parse_constant=pytest.fail)
        assert data["goals"]["latency_seconds"] == (1.0 if "--latency" in goals else None)


def test_no_copies_are_listed_that_answer_fewer_requests_than_one_device(run_cli, model):
    for machine in ("2xT4", "4xT4", "8xH100-NVLink"):
        result = run_cli("plan", model, "--shape", "batch=1", "--machine", machine, "--json")
        strategies = json.loads(result.out)["strategies"]
        assert strategies[0]["name"] == "one device"
        slow = [item for item in strategies if (item["interval_seconds"] or 0) > strategies[0]["interval_seconds"]]
        assert not [item["name"] for item in slow if item["step_seconds"] >= strategies[0]["step_seconds"]]
        assert next(item for item in strategies if "copies of the model" in item["name"])["problem"]


def test_a_machine_that_is_too_small_says_so(run_cli, model):
    options = ("--shape", "batch=4096", "--machine", "T4", "--machine", "L4", "--max-memory", "1MiB")
    result = run_cli("plan", model, *options)
    assert result.code == 3
    assert "T4 does not fit: " in result.out
    assert "L4 does not fit: " in result.out


def test_compile_takes_a_machine_and_saves_its_target(run_cli, model):
    options = ("--shape", "batch=2", "--machine", "8xH100-NVLink", "--save-target", "h100.toml", "-o", "out")
    result = run_cli("compile", model, *options)
    assert result.code == 0, result.err
    text = Path("h100.toml").read_text()
    assert len([line for line in text.splitlines() if line and line[0] != "#"]) < 15
    assert text.startswith("# 8xH100-SXM-NVLink4: published figures, none measured here\n# https://")
    assert len(tomllib.loads(text)["links"]) == 1
    assert read_target("h100.toml") == parse_machine("8xH100-NVLink").to_target()
    again = run_cli("compile", model, "--shape", "batch=2", "--target", "h100.toml", "-o", "again")
    assert again.code == 0, again.err
    manifests = [json.loads(Path(folder, "manifest.json").read_text()) for folder in ("out", "again")]
    assert manifests[0]["target"] == manifests[1]["target"]


def test_place_takes_the_devices_and_links_of_a_machine(run_cli, tmp_path):
    graph = {"nodes": [{"id": i, "compute_time_us": 1e5} for i in range(4)], "edges": [], "devices": [{"id": "a"}]}
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    result = run_cli("place", tmp_path / "graph.json", "--machine", "2x(2xL4)-10GbE", "--json")
    assert result.code == 0, result.err
    assert set(json.loads(result.out)["placement"].values()) == {f"node{h}/cuda:{i}" for h in (1, 2) for i in (0, 1)}
    limited = run_cli("place", tmp_path / "graph.json", "--machine", "2xL4", "--devices", "2")
    assert limited.err.startswith("error[U042] --devices and --machine exclude each other")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--machine", "8xH1000"), ("error[T014] --machine: unknown machine '8xH1000'", "did you mean '8xH100'?")),
        (("--machine", "0xH100"), ("error[T014] --machine", "expected 1 to 256 devices")),
        (("--machine", "L4", "--devices", "cpu:0"), ("error[U042] --devices and --machine exclude each other",)),
        (("--machine", "L4", "--target", "t.toml"), ("error[U042] --target and --machine exclude each other",)),
        (("--latency", "20ms"), ("error[U042]", "choose between machines", "name machines: --machine")),
        (("--machine", "L4", "--latency", "20"), ("error[U005] --latency", "got '20'", "--latency 20ms")),
        (("--machine", "L4", "--latency", "-1ms"), ("error[U005] --latency", "expected a number above 0")),
        (("--machine", "L4", "--rate", "0/s"), ("error[U005] --rate", "expected a number above 0", "--rate 500/s")),
        (("--machine", "L4", "--save-target", "absent/t.toml"), ("error[U032] absent/t.toml",)),
        (
            ("--machine", "L4", "--save-target", "t.toml", "--devices", "cpu:0"),
            ("error[U042] --devices and --machine",),
        ),
        (("--save-target", "t.toml"), ("error[U042] --save-target writes one machine", "--machine 8xH100-NVLink")),
        (
            ("--machine", "L4", "--machine", "T4", "--save-target", "t.toml"),
            ("error[U042] --save-target writes one machine",),
        ),
        (("--machine", "L4", "--price", "absent.toml"), ("error[T015] absent.toml",)),
    ],
)
def test_wrong_options_are_refused_before_any_work(refused, arguments, words):
    refused(2, words, "plan", "absent.onnx", *arguments)


@pytest.mark.parametrize("command", ["compile", "place"])
def test_other_commands_than_plan_take_one_machine(refused, command):
    words = ("error[U042] H100 T4: expected one --machine", "`onnxplace plan` compares several")
    refused(2, words, command, "absent", "--machine", "H100", "--machine", "T4")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[per_hour]\nT4 = 0.5\n", ("there is no price for 2xL4-PCIe4", 'add "2xL4-PCIe4" or "L4" below [per_hour]')),
        ("[per_hour]\nA101 = 0.5\n", ("unknown machine 'A101'", "did you mean 'A10'?")),
        ("[per_hour]\nL4 = 1\nl4 = 2\n", ("'l4' is one more price for L4", "name each machine and device once")),
        ('[per_hour]\n"2xL4" = 1\n"2x l4 PCIe" = 1\n', ("'2x l4 PCIe' is one more price for 2xL4-PCIe4",)),
        ("[per_hour]\nL4 = -1\n", ("expected a price of 0 or more for 'L4', got -1",)),
        ("[per_hour]\nL4 = 'cheap'\n", ("expected a price of 0 or more for 'L4', got 'cheap'",)),
        ("L4 = 0.5\n", ("expected one table [per_hour]", '"8xH100-NVLink" = 20.0')),
        ("[per_hour]\nL4 = 1,8\n", ("not TOML", "line 2", '"H100-SXM" = 2.5')),
    ],
)
def test_a_wrong_price_file_is_refused(refused, tmp_path, text, words):
    (tmp_path / "prices.toml").write_text(text)
    refused(2, ("prices.toml", *words), "plan", "absent.onnx", "--machine", "2xL4", "--price", "prices.toml")


def test_a_device_that_is_absent_leads_to_machines(refused, unusable_gpu):
    refused(
        2, ("error[T011] cuda:0", "--machine H100 (`onnxplace machines`)"), "plan", "absent.onnx", "--devices", "cuda:0"
    )
