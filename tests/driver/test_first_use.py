"""Loops that the first command on a machine compiles, and how processes share them."""

import ast
import gc
import subprocess
import sys
import weakref
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from onnxplace.cost_graph.generators import layered
from onnxplace.driver import first_use, place_cost_graph
from onnxplace.passes.learning import Policy, Shape, write_policy
from onnxplace.passes.placement.search.first_use import WARM_UPS, run_warm_ups
from onnxplace.simulation.kernels import device_peaks

ROOT = Path(__file__).parents[2]
ALLOCATING_CALLS = {
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "copy",
    "concatenate",
    "sort",
    "argsort",
    "astype",
    "repeat",
}
MODEL = """<ir_version: 10, opset_import: ["": 21]>
tower (float[8, 8] x) => (float[8, 8] y) {
  a = MatMul(x, x)
  b = Relu(a)
  c = MatMul(x, b)
  d = Tanh(x)
  y = Add(c, d)
}"""
# Run the warm-ups, then place and compile; print loops that got another signature, and those with several.
PRINT_COMPILED_SIGNATURES = """
import sys
from numba.core.registry import CPUDispatcher
from onnx import parser
from onnxplace import compile
from onnxplace.cost_graph.generators import layered
from onnxplace.driver import place_cost_graph
from onnxplace.passes.placement.search.first_use import WARM_UPS, run_warm_ups

def signatures():
    loops = {(loop.__module__, loop.__name__): loop for name, module in list(sys.modules.items())
             if name.startswith("onnxplace.") for loop in vars(module).values() if isinstance(loop, CPUDispatcher)}
    return {name: len(loop.overloads) for name, loop in loops.items() if loop._cache.cache_path}

run_warm_ups(list(WARM_UPS))
before = signatures()
place_cost_graph(layered(80, 1), budget_seconds=0.1)
place_cost_graph(layered(80, 1), "m-sct")
compile(parser.parse_model(sys.argv[1]), sys.argv[2], devices="cpu:0,cpu:1", cache=False, trial=False)
after = signatures()
print(sum(before.values()), [name for name, count in after.items() if count != before.get(name, 0)],
      [name for name, count in before.items() if count > 1])
"""


def list_loops_without_arrays() -> list[tuple[str, ast.FunctionDef]]:
    """Return the functions of this package that are declared to make no arrays, with the name of their file."""
    files = {path.resolve() for top in ("onnxplace", "passes") for path in (ROOT / top).rglob("*.py")}
    functions = ((path.name, node) for path in files for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    return [
        (name, node)
        for name, node in functions
        if isinstance(node, ast.FunctionDef)
        and {"in_place", "compiled_part"} & {ast.unparse(d) for d in node.decorator_list}
    ]


def test_warm_ups_compile_every_loop_of_place_and_compile_for_one_type(tmp_path):
    completed = subprocess.run(
        [sys.executable, "-c", PRINT_COMPILED_SIGNATURES, MODEL, tmp_path / "b"],
        capture_output=True,
        text=True,
        check=True,
    )
    count, more, several = completed.stdout.split(maxsplit=2)
    assert (more, several.strip()) == ("[]", "[]")
    assert int(count) <= 25


def test_loops_that_do_not_count_references_make_no_arrays():
    """Numba would never free the arrays."""
    loops = list_loops_without_arrays()
    assert len(loops) > 40
    for file, loop in loops:
        calls = [node.func for node in ast.walk(loop) if isinstance(node, ast.Call)]
        allocations = {call.attr for call in calls if isinstance(call, ast.Attribute)} & ALLOCATING_CALLS
        lists = [node for node in ast.walk(loop) if isinstance(node, (ast.List, ast.ListComp))]
        assert not allocations, f"{file}: {loop.name}"
        assert not lists, f"{file}: {loop.name}"


def test_loops_release_their_arguments():
    live, peak = np.zeros((2, 1), dtype=np.int64)
    events, where, change = np.zeros((3, 1), dtype=np.int64)
    before = sys.getrefcount(events)
    reference = weakref.ref(live)
    device_peaks(events, where, change, live, peak)
    del live
    gc.collect()
    assert reference() is None
    assert sys.getrefcount(events) == before


def test_each_warm_up_is_run_by_one_process_for_any_number_of_processes():
    for number, shares in enumerate(first_use.PROCESS_SHARES):
        assert len(shares) == number + 2
        assert sorted(chain(*shares)) == sorted(WARM_UPS)


def test_a_helper_runs_its_warm_ups_and_fails_for_an_unknown_name():
    with first_use._start_helpers([["simulation"], ["bounds", "nothing"]]) as helpers:
        assert [helper.wait(600) for helper in helpers] == [0, 1]


def test_helpers_end_with_their_block():
    with pytest.raises(KeyboardInterrupt), first_use._start_helpers([list(WARM_UPS)]) as helpers:
        raise KeyboardInterrupt
    assert helpers[0].returncode is not None


@pytest.fixture
def warm_ups_of_this_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Simulate four cores without compiled loops; return the warm-ups that this process runs."""
    executed: list[str] = []
    monkeypatch.setattr(first_use, "_warmed_up", False)
    monkeypatch.setattr(first_use, "_has_compiled_first_loop", lambda: True)
    monkeypatch.setattr(first_use, "available_cores", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(
        "onnxplace.passes.placement.search.first_use.run_warm_ups",
        lambda names: (executed.extend(names), run_warm_ups(names)),
    )
    return executed


def test_a_process_compiles_alone_where_no_helper_can_start(warm_ups_of_this_process, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert place_cost_graph(layered(40, 1), budget_seconds=0.05).feasible
    assert warm_ups_of_this_process == ["groups", "simulation"]


def test_a_placer_without_search_skips_the_loops_of_the_search(warm_ups_of_this_process, monkeypatch):
    shares: list[list[str]] = []
    monkeypatch.setattr(first_use, "_start_helpers", lambda others: nullcontext(shares.extend(others) or []))
    place_cost_graph(layered(40, 1), "m-etf")
    assert warm_ups_of_this_process == ["groups", "simulation"]
    assert shares == [["lists"], ["levels", "bounds", "readers"]]


@pytest.mark.slow
def test_a_learned_policy_compiles_the_loops_of_the_placement_it_starts_from(warm_ups_of_this_process, tmp_path):
    shape = Shape(4, 4, 1)
    write_policy(tmp_path / "p.safetensors", Policy(shape, shape.draw_parameters(0)))
    place_cost_graph(layered(40, 1), f"placeto{{policy={tmp_path / 'p.safetensors'}}}")
    assert "simulation" in warm_ups_of_this_process


@pytest.mark.parametrize("placer", ["m-topo", "single"])
def test_simple_placers_compile_nothing_ahead(warm_ups_of_this_process, placer):
    place_cost_graph(layered(40, 1), placer)
    assert warm_ups_of_this_process == []


def test_loops_are_compiled_ahead_once(warm_ups_of_this_process, monkeypatch):
    monkeypatch.setattr(first_use, "PROCESS_SHARES", ((("simulation",), ("bounds",)),))
    for _ in range(2):
        first_use.compile_loops(["auto"])
    assert warm_ups_of_this_process == ["simulation"]


def test_nothing_is_compiled_ahead_where_the_first_loop_is_read_from_disk(warm_ups_of_this_process, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(first_use, "_warmed_up", False)
    monkeypatch.setattr(first_use, "compiled_loops", lambda: 0)
    monkeypatch.setattr(first_use, "_start_helpers", lambda shares: pytest.fail("a process was started"))
    first_use.compile_loops(["auto"])
