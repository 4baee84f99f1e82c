"""benchmarks/layouts.py reads instances of the contest and adds up costs and memory as its checker does."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # for what benchmarks share with each other

from benchmarks import layouts

SCRIPT = Path(__file__).parents[2] / "benchmarks/layouts.py"
FORBIDDEN = 10**18


def instance(limit: int) -> dict[str, Any]:
    """Three nodes in a row; the cheapest strategies hold 10 bytes each, the others 4; two of three overlap."""
    return {
        "problem": {
            "name": "row",
            "nodes": {
                "intervals": [[0, 4], [2, 6], []],
                "costs": [[0, 3], [0, 5], [7, 7]],
                "usages": [[10, 4], [10, 4], [10, 10]],
            },
            "edges": {"nodes": [[0, 1], [1, 2], [0, 1]], "costs": [[0, 1, 1, 0], [0, FORBIDDEN] * 2, [0, 0, 0, 1]]},
            "usage_limit": limit,
        }
    }


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=SCRIPT.parents[1])


def test_rows_have_costs_bounds_and_whether_the_limit_is_kept(tmp_path: Path) -> None:
    (tmp_path / "ample.json").write_text(json.dumps(instance(20)))
    (tmp_path / "scarce.json.gz").write_bytes(gzip.compress(json.dumps(instance(14)).encode()))
    (tmp_path / "none.json").write_text(json.dumps(instance(7)))
    (tmp_path / "best.json").write_text(json.dumps({"scarce": {"best": 11}}))
    result = run(tmp_path, "--json", "--seconds", 5)
    assert result.returncode == 0, result.stderr
    ample, none, scarce = json.loads(result.stdout)
    assert (ample["instance"], ample["cost"], ample["bound"], ample["fits"]) == ("ample", 7, 7, True)
    assert (scarce["cost"], scarce["fits"], scarce["to_best"]) == (11, True, 1.0)
    assert scarce["bound"] <= 11
    assert not none["fits"]


@pytest.mark.parametrize("content", [b"", b"{}", b"\x1f\x8bdamaged"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cut.json.gz").write_bytes(content)
    with pytest.raises(SystemExit, match=r"cut.json.gz: expected an instance"):
        layouts.read_instance(tmp_path / "cut.json.gz")


def test_a_folder_without_instances_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected instances"):
        layouts.main([str(tmp_path)])


def test_costs_beyond_32_bits_are_whole_numbers() -> None:
    problem = instance(20)["problem"]
    problem["nodes"]["costs"][2] = [2**60 + 1, 7]
    read = layouts.Instance("row", problem["nodes"], problem["edges"], problem["usage_limit"])
    assert read.cost([0, 0, 0]) == 2**60 + 1
    assert read.fits([0, 0, 0])
    assert not layouts.Instance("row", problem["nodes"], problem["edges"], 19).fits([0, 0, 0])
