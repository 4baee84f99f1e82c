"""Choosing a placer, its options, and its errors."""

import json
from types import SimpleNamespace

import pytest

from onnxplace.cost_graph.cost_graphs import parse_cost_graph
from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.driver.place import evaluate_placement, place_cost_graph, replace_devices
from onnxplace.driver.settings import CompileSettings
from onnxplace.errors import InfeasibleError, UsageError
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.pipeline.select_placer import choose_placer
from onnxplace.utils import jit
from tests.support.commands import only_json

GIB = 1 << 30


@pytest.mark.parametrize(("objective", "name"), [("latency", "auto"), ("throughput", "stages"), ("fit", "fit")])
def test_an_objective_stands_for_a_placer(objective, name):
    assert choose_placer(None, objective).name == name


def test_options_come_from_the_text_the_budget_and_the_seed():
    assert str(choose_placer("auto{proposals=9}", seconds=0.5, seed=3)) == "auto{proposals=9,seconds=0.5,seed=3}"
    assert str(choose_placer("m-sct{threshold=0.5}", seed=3)) == "m-sct{threshold=0.5}"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("m-etf", "fit"), "U042", ["`placer` and `objective`", "'fit'"]),
        (("m-etf", "latency", 3.0), "U042", ["'m-etf' does not search", "`budget_seconds`", "auto"]),
        (
            (None, "latency", 0.0),
            "U005",
            ["`budget_seconds`", "0 seconds", "more than 0", "auto{seconds=0,proposals=N}"],
        ),
        ((None, "throughput", -1.0), "U005", ["-1 seconds"]),
        ((None, "fit", float("nan")), "U005", ["nan seconds"]),
        (("split",), "U001", ["'split' is not a placer"]),
        (("refine",), "U001", ["'refine' is not a placer"]),
        (("atuo",), "U001", ["atuo", "auto"]),
        (("auto{sconds=1}",), "U004", ["sconds", "seconds"]),
    ],
)
def test_contradicting_options_are_refused(arguments, code, words):
    with pytest.raises(UsageError) as raised:
        choose_placer(*arguments)
    assert raised.value.code == code
    assert all(word in str(raised.value) for word in words)


def cramped(weight=6 * GIB):
    """Return two chains of two nodes whose heavy ends only fit on different devices."""
    nodes = [
        {"id": i, "name": f"n{i}", "compute_time_us": 10, "memory_bytes": weight if i in (1, 3) else 0}
        for i in range(4)
    ]
    edges = [{"src": 0, "dst": 1, "bytes": 8}, {"src": 2, "dst": 3, "bytes": 8}]
    devices = [{"id": d, "memory_bytes": 8 * GIB} for d in range(2)]
    return parse_cost_graph({"nodes": nodes, "edges": edges, "devices": devices})


def test_a_placer_without_a_solution_names_one_that_fits():
    with pytest.raises(InfeasibleError) as raised:
        place_cost_graph(cramped(), "single")
    assert raised.value.code == "P001"
    assert "placer m-etf fits, with a step of" in raised.value.hint


def test_a_placer_without_a_solution_does_not_claim_that_none_exists():
    nodes = [{"id": i, "compute_time_us": 10, "memory_bytes": 5 * GIB} for i in range(3)]
    devices = [{"id": d, "memory_bytes": 8 * GIB} for d in range(2)]
    with pytest.raises(InfeasibleError, match="this placer found no split that fits") as raised:
        place_cost_graph(parse_cost_graph({"nodes": nodes, "devices": devices}), "m-etf")
    assert raised.value.code == "P002"


def test_if_nothing_fits_no_other_placer_is_named():
    with pytest.raises(InfeasibleError) as raised:
        place_cost_graph(cramped(9 * GIB), "auto{seconds=0,proposals=50}")
    assert "fits, with" not in str(raised.value)
    assert "lacks" in str(raised.value)


def test_the_time_to_place_excludes_the_compilation_of_loops(monkeypatch):
    now, run = [100.0], Pipeline.run

    def compile_and_run(self, state):
        jit.compilation_clock.notify(SimpleNamespace(is_start=True))
        now[0] += 17
        jit.compilation_clock.notify(SimpleNamespace(is_start=False))
        now[0] += 2
        return run(self, state)

    monkeypatch.setattr(jit, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(jit.compilation_clock, "seconds", jit.compilation_clock.seconds)
    monkeypatch.setattr(Pipeline, "run", compile_and_run)
    graph = replace_devices(cramped(), None, 16 * GIB)
    assert place_cost_graph(graph, "single").seconds == pytest.approx(2)
    assert evaluate_placement(graph, dict.fromkeys("0123", 0)).seconds == pytest.approx(2)


@pytest.mark.parametrize("rule", ["compute", "memory", "majority"])
def test_post_adjust_keeps_groups_together(rule):
    graph = GENERATORS["recurrent"](120, 0)
    placed = place_cost_graph(graph, "m-etf", groups="given", post_adjust=rule)
    home = {}
    for node, group in zip(graph.ids, graph.profile.user_groups.tolist()):
        if group >= 0:
            assert home.setdefault(group, placed.placement[str(node)]) == placed.placement[str(node)]


def test_forward_only_puts_backward_nodes_where_their_forward_node_is():
    nodes = [{"id": i, "compute_time_us": 100, "is_backward": i > 1} for i in range(4)]
    edges = [{"src": s, "dst": d, "bytes": 8} for s, d in ((0, 3), (1, 2))]
    devices = [{"id": d, "memory_bytes": GIB} for d in range(2)]
    graph = parse_cost_graph({"nodes": nodes, "edges": edges, "devices": devices})
    placed = place_cost_graph(graph, "m-etf", groups="none", forward_only=True)
    assert placed.placement["0"] == placed.placement["3"] != placed.placement["1"] == placed.placement["2"]


def test_the_command_searches_within_its_budget_and_reports_its_trials(run_cli, tmp_path):
    nodes = [{"id": i, "compute_time_us": 100} for i in range(4)]
    devices = [{"id": d, "memory_bytes": GIB} for d in range(2)]
    (tmp_path / "g.json").write_text(json.dumps({"nodes": nodes, "edges": [], "devices": devices}))
    result = run_cli("place", tmp_path / "g.json", "--budget", "0.1", "--seed", "1", "--json")
    answer = json.loads(result.out)
    assert result.code == 0
    assert answer["placer"] == "auto"
    assert answer["makespan_seconds"] == pytest.approx(200e-6)
    assert [note["code"] for note in answer["diagnostics"]] == ["P040"]
    assert "note[P040]" in result.err
    for command in ("place", "compile"):
        result = run_cli(command, tmp_path / "g.json", "--budget", "0")
        assert result.code == 2
        assert result.err.startswith("error[U005] --budget: expected more than 0 seconds, got 0")
    result = run_cli("place", tmp_path / "g.json", "--objective", "throughput", "--placer", "m-etf")
    assert result.code == 2
    assert "U042" in result.err
    result = run_cli("place", tmp_path / "g.json", "--objective", "worst-ratio")
    assert result.code == 2
    assert "error[U042] --objective: worst-ratio compares sizes of a model" in result.err


def test_the_objective_fit_uses_as_few_devices_as_needed():
    placed = place_cost_graph(replace_devices(cramped(), 4, 8 * GIB), objective="fit")
    assert len(set(placed.placement.values())) == 2


def test_the_bound_of_a_given_placement_holds_for_every_placement(run_cli, tmp_path):
    nodes = [{"id": i, "compute_time_us": 100, "output_bytes": 8} for i in range(2)]
    devices = [{"id": device, "memory_bytes": 1000} for device in ("a", "b")]
    graph = {"devices": devices, "comm": {"coef_us_per_byte": 1, "intercept_us": 50}, "nodes": nodes}
    graph["edges"] = [{"src": 0, "dst": 1, "bytes": 8}]
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    (tmp_path / "apart.json").write_text('{"0": "a", "1": "b"}')
    result = only_json(run_cli("place", tmp_path / "graph.json", "--placement", tmp_path / "apart.json", "--json"))
    assert result["makespan_seconds"] == pytest.approx(258e-6)
    assert result["lower_bound_seconds"] == pytest.approx(200e-6)
    (tmp_path / "names.json").write_text('{"layer.0": "a"}')
    wrong = run_cli("place", tmp_path / "graph.json", "--placement", tmp_path / "names.json")
    assert wrong.code == 2
    assert "error[D007] --placement: no device for 2 nodes, such as '0'" in wrong.err
    assert 'hint: write ids, not names: {"0": "a"} ...' in wrong.err


def test_the_default_placer_may_be_typed():
    assert CompileSettings(placer="auto").compares_sharding
    assert CompileSettings(placer="auto").may_stream
    assert not CompileSettings(placer="auto{seconds=1}").compares_sharding  # options ask for this placer
    assert not CompileSettings(placer="m-etf").compares_sharding
