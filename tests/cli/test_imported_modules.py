"""Packages that commands do not import where they need none of them: each takes a command longer to start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import FAST

# Runs a command; then prints the modules of this process.
RUN = """
import json, sys
from onnxplace.cli.app import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]), file=sys.__stderr__)
"""
# Compiled loops, other formats of graphs, pages of reports, linear programs, servers, live terminals.
HEAVY = {"numba", "llvmlite", "networkx", "jinja2", "highspy", "scipy", "fastapi", "rich", "torch", "matplotlib"}
UNUSED = {"onnxplace.reports.page_records", "onnxplace.target.catalogue", "onnxplace.driver.plan_sets"}


def list_imported(folder: Path, *arguments: object) -> set[str]:
    """Run a command in a process; return the modules that it imported."""
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    code, modules = json.loads(process.stderr.splitlines()[-1])
    assert code == 0, process.stderr
    return set(modules)


def find_packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    nodes = [{"id": str(index), "compute_time_us": 10.0, "output_bytes": 8} for index in range(30)]
    edges = [{"src": str(index // 2), "dst": str(index), "bytes": 1000} for index in range(1, 30)]
    data = {"devices": [{"id": name, "memory_bytes": 1 << 30} for name in "ab"], "nodes": nodes, "edges": edges}
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(data))
    return path


def test_compiling_a_small_model_imports_only_what_it_needs(model_file, tmp_path):
    modules = list_imported(tmp_path, "compile", model_file, *FAST, "-o", "out")
    assert find_packages(modules) & HEAVY == set()
    assert modules & UNUSED == set()


def test_placing_a_small_graph_imports_no_runtime_and_no_compiler_of_loops(graph_file, tmp_path):
    modules = list_imported(tmp_path, "place", graph_file, "--placer", "m-etf")
    assert find_packages(modules) & (HEAVY | {"onnxruntime", "psutil"}) == set()
    assert modules & UNUSED == set()


@pytest.mark.parametrize("arguments", [("--help",), ("compile", "--help"), ("passes",), ("explain", "P010")])
def test_commands_that_compute_nothing_import_no_libraries_of_numbers(arguments, tmp_path):
    modules = list_imported(tmp_path, *arguments)
    assert find_packages(modules) & (HEAVY | {"numpy", "onnx", "onnxruntime", "pydantic", "psutil"}) == set()


def test_running_a_bundle_imports_nothing_that_compiles(model_file, tmp_path, run_cli):
    assert run_cli("compile", model_file, *FAST, "-o", tmp_path / "out").code == 0
    modules = list_imported(tmp_path, "run", "out", "--shape", "batch=4")
    assert find_packages(modules) & (HEAVY | {"onnx"}) == set()
    assert not any(name.startswith("onnxplace.measure.trial") for name in modules)


def test_a_command_ends_without_a_search_for_cycles(tmp_path):
    """All objects are frozen by then: to search those of a compiled model takes longer than to start Python."""
    script = (
        "import atexit, gc, runpy, sys; atexit.register(lambda: print(gc.get_freeze_count(), gc.get_count()[0]));"
        "sys.argv = ['onnxplace', 'explain', 'P010']; runpy.run_module('onnxplace', run_name='__main__')"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    frozen, rest = map(int, process.stdout.splitlines()[-1].split())
    assert frozen > 10_000 > rest
