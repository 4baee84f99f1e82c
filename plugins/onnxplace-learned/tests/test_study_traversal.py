"""`onnxplace study traversal`: rows, resuming, several processes, and what it refuses."""

import json

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed; .ci/training has it")

from onnxplace_learned.policy_training import order_study as traversal
from onnxplace_learned.policy_training.order_study import StudyOptions, list_runs, read_rows, run_study

QUICK = ("--count", 1, "--seeds", 2, "--nodes", 12, "--episodes", 4, "--devices", 2)
SMALL = StudyOptions(("two_towers",), ("alpha", "bfs"), seeds=2, graphs=2, nodes=12, devices=2, episodes=4)


def test_the_command_compares_orders_of_each_family(run_cli, tmp_path):
    output = tmp_path / "rows.csv"
    command = ("study", "traversal", "--family", "two_towers", "--family", "recurrent_cells", *QUICK)
    chosen = ("--order", "bfs", "--order", "random", "--workers", 1, "-o", output)
    shown = run_cli(*command, *chosen)
    assert shown.code == 0, shown.err
    assert shown.out.startswith("steps relative to one device, geometric means of 8 trainings")
    assert shown.out.count("recommended: ") == 2
    assert len(read_rows(output)) == 8
    data = json.loads(run_cli(*command, *chosen, "--resume", "--json").out)
    assert data["rows"] == 8
    assert [family["family"] for family in data["families"]] == ["two_towers", "recurrent_cells"]
    for family in data["families"]:
        assert {quality["order"] for quality in family["qualities"]} == {"bfs", "random"}
        assert all(0 < quality["low"] <= quality["high"] < 1.0001 for quality in family["qualities"])


@pytest.mark.slow  # each process imports torch
def test_rows_do_not_depend_on_the_number_of_processes(tmp_path):
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    few = StudyOptions(("two_towers",), ("alpha", "random"), seeds=1, graphs=2, nodes=12, devices=2, episodes=2)
    rows = run_study(few, one)
    assert [row.run for row in rows] == list_runs(few)
    run_study(StudyOptions(**{**vars(few), "workers": 2}), two)
    assert one.read_bytes() == two.read_bytes()


def test_an_interrupted_study_keeps_its_rows_and_continues(tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole.csv", tmp_path / "parts.csv"
    run_study(SMALL, whole)

    def interrupt(done, total):
        assert total == 8
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(SMALL, parts, observer=interrupt)
    assert len(read_rows(parts)) == 3
    run_once, calls = traversal.run_once, []
    monkeypatch.setattr(traversal, "run_once", lambda *arguments: calls.append(1) or run_once(*arguments))
    run_study(SMALL, parts, resume=True)
    assert len(calls) == 5
    assert whole.read_bytes() == parts.read_bytes()
    # Rows of another study do not count.
    run_study(StudyOptions(**{**vars(SMALL), "episodes": 2}), parts, resume=True)
    assert len(calls) == 5 + 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--family", "tower"), "error[U001]"),
        (("--order", "sideways"), "error[U005] --order: expected one of alpha, topological"),
        (("--resume",), "error[U005] --resume: --resume needs the file of the rows"),
        (("--resume", "-o", "other.csv"), "error[U031] other.csv: not the rows of a study (it has other columns)"),
        (("--resume", "-o", "cut.csv"), "error[U031] cut.csv: not the rows of a study (zip() argument"),
        (("--resume", "-o", "absent.csv"), "error[U031] absent.csv"),
        (("-o", "absent/rows.csv"), "error[U032]"),
    ],
)
def test_wrong_options_are_refused(run_cli, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.csv").write_text("a,b\n")
    (tmp_path / "cut.csv").write_text("family,graph,order,seed,nodes,devices,episodes,cost\nchains,1,bfs\n")
    result = run_cli("study", "traversal", *QUICK, *arguments)
    assert result.code == 2
    assert message in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.csv", "other.csv"]
