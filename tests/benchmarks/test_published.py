"""Rules of published benchmarks score by hand-computed examples; readers and the command accept what they are given."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # for what benchmarks share with each other

from benchmarks._published_models import CallLatency, Costs, FirstInFirstOut, MaxLoad, improve  # noqa: E402
from benchmarks.published import find_longest_path, fold_backward, read_doppler, read_moirai, schedule_critical_path  # noqa: E402


def costs_of(seconds, transfer, edges, sizes=None, limit=np.inf):
    nodes = len(seconds[0])
    return Costs(
        np.array(seconds, dtype=float), np.array(transfer, dtype=float), np.array(edges).reshape(-1, 2),
        np.zeros(nodes) if sizes is None else np.array(sizes, dtype=float), limit,
    )  # fmt: skip


# Two accelerators and a host that is ten times as slow: 0 -> 1, 0 -> 2, 1 -> 3, 2 -> 3.
DIAMOND = costs_of(
    [[1, 2, 3, 4], [1, 2, 3, 4], [10, 20, 30, 40]], [0.5, 0.25, 0.125, 0], [(0, 1), (0, 2), (1, 3), (2, 3)]
)


def place(*device):
    return np.array(device, dtype=np.int32)


def test_the_largest_load_counts_a_value_once_per_device_and_nothing_on_the_host():
    score = MaxLoad(DIAMOND)
    assert score(place(0, 0, 0, 0)) == 10
    assert score(place(0, 1, 1, 1)) == 9.5
    assert score(place(0, 0, 1, 1)) == 0.5 + 3 + 4 + 0.25
    assert score(place(2, 0, 0, 0)) == 10
    assert score(place(0, 0, 0, 2)) == 40


def test_a_call_waits_for_all_inputs_and_transfers_add_to_it():
    score = CallLatency(DIAMOND)
    assert score(place(0, 0, 0, 0)) == 10
    assert score(place(0, 1, 1, 1)) == 1 + 0.5 + 0.5 + 9
    # The host runs 1 and 2 at the same time.
    assert score(place(0, 2, 2, 1)) == (1 + 0.5) + 30 + (4 + 0.25 + 0.125)


def test_calls_that_wait_for_each_other_and_parts_that_do_not_fit_are_not_allowed():
    assert CallLatency(DIAMOND)(place(0, 1, 1, 0)) == np.inf
    small = costs_of(DIAMOND.seconds, DIAMOND.transfer_seconds, DIAMOND.edges, [1, 1, 1, 1], 2)
    for rule in (MaxLoad(small), CallLatency(small)):
        assert rule(place(0, 0, 0, 1)) == np.inf
        assert np.isfinite(rule(place(0, 0, 1, 1)))


def test_devices_run_nodes_in_the_order_in_which_they_become_ready():
    # Node 3 becomes ready at 3.5 on the second device, behind node 2 (long), though it is short.
    costs = costs_of([[1, 1, 5, 1], [1, 1, 5, 1]], [0.5, 0.5, 0, 0], [(0, 2), (1, 3)])
    assert FirstInFirstOut(costs)(place(0, 0, 1, 1)) == 1.5 + 5 + 1
    assert FirstInFirstOut(costs)(place(0, 1, 0, 1)) == 6


@st.composite
def problems(draw):
    nodes = draw(st.integers(2, 7))
    numbers = st.lists(st.integers(1, 9), min_size=nodes, max_size=nodes)
    edges = [(a, b) for b in range(nodes) for a in range(b) if draw(st.booleans())] or [(0, 1)]
    seconds = draw(numbers)
    return costs_of([seconds, seconds, seconds], draw(numbers), edges)


@given(problems(), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_searches_never_get_worse_and_no_run_beats_the_longest_path(costs, seed):
    groups, start = np.arange(costs.seconds.shape[1], dtype=np.int32), schedule_critical_path(costs)
    for rule in (MaxLoad(costs), FirstInFirstOut(costs), CallLatency(costs)):
        best, value = improve(rule, start, costs, groups, 60, seed)
        assert value <= rule(start)
        assert rule(best) == value
        if not isinstance(rule, MaxLoad):
            assert value >= find_longest_path(costs) - 1e-9


def test_backward_nodes_follow_their_colour_class_or_a_neighbour():
    # 0 -> 1 forward, 2 and 3 their backward nodes, 4 a backward node of no class.
    costs = costs_of([[1, 2, 10, 20, 5], [1, 2, 10, 20, 5]], [1, 1, 1, 1, 1], [(0, 1), (1, 3), (3, 2), (3, 4)])
    groups, backward = np.array([0, 1, 0, 1, 2], dtype=np.int32), np.array([False, False, True, True, True])
    folded, own, unfold = fold_backward(costs, groups, backward)
    assert folded.seconds[0].tolist() == [11, 22]
    assert folded.transfer_seconds.tolist() == [2, 2]
    assert folded.edges.tolist() == [[0, 1]]
    assert own.tolist() == [0, 1]
    assert unfold(place(0, 1)).tolist() == [0, 1, 0, 1, 1]


DOPPLER = "6\n0, 1\n0, 1, 2\n2, 2, 3\n1000,10\n2000,10\n3000,10\n4000,10\n"


def test_a_graph_of_doppler_is_read_without_its_input_nodes(tmp_path):
    (tmp_path / "g.txt").write_text(DOPPLER)
    costs = read_doppler(tmp_path / "g.txt", 2)
    assert costs.edges.tolist() == [[0, 2], [1, 2], [2, 3]]
    assert costs.seconds.shape == (2, 4)
    np.testing.assert_allclose(costs.seconds[0] / costs.seconds[0, 0], [1, 2, 3, 4])


def test_a_sheet_of_moirai_has_times_per_device_and_pair_of_devices():
    head = ["task", "c_task", "dir_succ", "dir_succ_add", "p0", "p1", "pc00", "pc01", "pc10", "pc11", "mi", "m0", "m1"]
    rows = [
        head,
        [0.0, "", 1.0, 1.0, 0.0, 0.0, "", "", "", "", 0.0, "1e9", "2e9"],
        [1.0, "2,4", "3,5", "2,3,4,5", 1.0, 2.0, "0,0", "0.5,1.5", "1,3", "0,0", 8.0, "", ""],
        [3.0, 6.0, 5.0, "5,6", 1.0, 2.0, 0.0, 1.0, 2.0, 0.0, 8.0, "", ""],
        [5.0, "", "", "", 1.0, 2.0, "", "", "", "", 8.0, "", ""],
    ]
    graph = read_moirai("small", rows).graph
    assert [device.memory_bytes for device in graph.target.devices] == [10**9, 2 * 10**9]
    rate = {(link.source, link.destination): link.bytes_per_second for link in graph.target.links}
    # From the second device to the first, transfers take twice as long.
    assert rate["cuda:0", "cuda:1"] == pytest.approx(2 * rate["cuda:1", "cuda:0"])
    assert sorted(graph.profile.graph.value_bytes.tolist()) == [0, 500_000, 1_000_000, 1_500_000]


def msr_graph():
    nodes = [
        {"id": i, "supportedOnFpga": 1, "cpuLatency": 10.0, "fpgaLatency": 1.0, "isBackwardNode": i > 2,
         "colorClass": min(i, 5 - i), "size": 100.0}
        for i in range(6)
    ]  # fmt: skip
    edges = [{"sourceId": i, "destId": i + 1, "cost": 0.1} for i in range(5)]
    return {"maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 1000.0, "nodes": nodes, "edges": edges}


@pytest.mark.slow
def test_the_command_prints_a_row_per_graph_and_names_what_it_expects(tmp_path):
    def run(*arguments):
        command = [sys.executable, BENCHMARKS / "published.py", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert "expected the folders msr, doppler or moirai" in run(tmp_path).stderr
    assert "no benchmark 'msr'" in run(tmp_path, "--only", "msr").stderr
    for kind, graph in (("throughput", msr_graph()), ("latency", msr_graph())):
        (tmp_path / "msr" / f"{kind}-inputs" / "Small").mkdir(parents=True)
        (tmp_path / "msr" / f"{kind}-inputs" / "Small" / "step.json").write_text(json.dumps(graph))
    (tmp_path / "doppler" / "compute_graph").mkdir(parents=True)
    (tmp_path / "doppler" / "compute_graph" / "small.txt").write_text(DOPPLER)
    done = run(tmp_path, "--moves", 50, "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["benchmark"] for row in rows] == ["MSR max-load", "MSR latency", "Doppler"]
    assert all(row["bound"] <= row["ours"] * (1 + 1e-9) and row["ours"] <= row["placed"] for row in rows)
    assert "1 of 1 at or below the published figure" in done.stdout
