"""The benchmark of placers prints and writes tables, on small graphs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from onnxplace_formats.generators import MACHINE

pytestmark = pytest.mark.slow

BENCH = Path(__file__).parents[2] / "benchmarks" / "placers.py"


def bench(*arguments):
    return subprocess.run([sys.executable, BENCH, *map(str, arguments)], capture_output=True, text=True, check=False)


def cost_graph_file(folder, name, weights_bytes):
    nodes = [{"id": i, "name": f"n{i}", "compute_time_us": 100, "memory_bytes": weights_bytes} for i in range(8)]
    edges = [{"src": i, "dst": i + 1, "bytes": 10} for i in range(7)]
    graph = {"name": name, "nodes": nodes, "edges": edges, **MACHINE}
    (folder / f"{name}.json").write_text(json.dumps(graph))


def test_the_tables_hold_a_row_per_graph_placer_and_grouping(tmp_path):
    written = tmp_path / "rows.json"
    done = bench("--generated", "60,80", "--families", "chains,recurrent", "--placers", "m-topo,m-etf{reserve=peak}",
                 "--groups", "none,given", "--scaling", "40,80", "--json", written)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(written.read_text())
    # Chains have no groups, so `given` would repeat `none`.
    assert [(row["graph"], row["placer"], row["groups"]) for row in rows["generated"]] == [
        (graph, placer, groups)
        for graph, grouped in (("chains_60_0", 0), ("chains_80_0", 0), ("recurrent_60_0", 1), ("recurrent_80_0", 1))
        for placer in ("m-topo", "m-etf{reserve=peak}")
        for groups in (("none", "given") if grouped else ("none",))
    ]
    assert all(row["step_seconds"] >= row["bound_seconds"] > 0 for row in rows["generated"])
    assert all(row["to_bound"] >= 1 and row["peak_bytes"] > 0 for row in rows["generated"])
    for row in rows["generated"]:
        assert row["speedup_one_device"] == row["one_device_seconds"] / row["step_seconds"]
    assert [set(row) >= {"family", "placer", "40", "80", "exponent"} for row in rows["scaling"]] == [True] * 4
    lines = done.stdout.splitlines()
    assert sum(line.startswith("| chains_60_0 | 60 | m-topo | none |") for line in lines) == 1
    assert "| family | placer | 40 ms | 80 ms | exponent | of the last two |" in lines
    assert all(line.startswith(("|", "#")) or not line for line in lines)


def test_a_folder_is_compared_with_published_figures_and_misfits_are_reported(tmp_path):
    cost_graph_file(tmp_path, "small", 10)
    cost_graph_file(tmp_path, "large", 20 << 30)
    steps = (("m_etf", 1600), ("expert", 800))
    published = [{"method": method, "groups": "none", "makespan_us": step} for method, step in steps]
    (tmp_path / "figures.json").write_text(json.dumps({"graphs": {"small": {"baechi": published}}}))
    done = bench(tmp_path, "--placers", "m-etf", "--groups", "none")
    assert done.returncode == 0, done.stderr
    large, small, best = (line for line in done.stdout.splitlines() if line.startswith(("| large", "| small")))
    assert "infeasible (P0" in large
    assert small.startswith("| small | 8 | m-etf | none | 0.8 | 0.8 | 1.00x | 0.8 | 1.00x | 1.6 | 2.00x |")
    assert best == "| small | 8 | 0.8 | 0.8 | 1.00x | 0.8 | 1.00x | 0.8 | 1.6 | 2.00x | m-etf, none |"


def test_unknown_names_are_refused_before_any_work():
    for arguments, text in (
        (("--families", "towers"), "no family 'towers'"),
        (("--groups", "all"), "no grouping 'all'"),
        (("--models", "gpt"), "no model 'gpt'"),
        (("--placers", "m-eft"), "m-etf"),
    ):
        done = bench(*arguments)
        assert done.returncode != 0
        assert text in done.stderr
        assert "Traceback" not in done.stderr
        assert not done.stdout
