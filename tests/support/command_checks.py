"""Tests of commands that providers share: a file collects them by importing them, with a `bundle_path` of its own."""

import numpy as np

from tests.support.commands import only_json


def test_run_writes_the_outputs(run_cli, bundle_path, tmp_path):
    result = run_cli("run", bundle_path, "--outputs", tmp_path / "outputs.npz")
    assert result.code == 0, result.err
    assert np.load(tmp_path / "outputs.npz")["y"].shape == (4, 64)


def test_bench_measures_both(run_cli, bundle_path):
    result = run_cli("bench", bundle_path, "--no-memory", "--repeat", "2", "--json")
    assert result.code == 0, result.err
    assert only_json(result)["bundle"]["median_seconds"] > 0
