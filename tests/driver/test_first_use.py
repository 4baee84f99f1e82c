"""What the first command on a machine compiles, and how the work is shared."""

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
from onnxplace.passes.placement.search.first_use import ERRANDS, run_errands
from onnxplace.simulation.kernels import device_peaks

ROOT = Path(__file__).parents[2]
MAKES = {"empty", "zeros", "ones", "full", "arange", "copy", "concatenate", "sort", "argsort", "astype", "repeat"}
MODEL = """<ir_version: 10, opset_import: ["": 21]>
tower (float[8, 8] x) => (float[8, 8] y) {
  a = MatMul(x, x)
  b = Relu(a)
  c = MatMul(x, b)
  d = Tanh(x)
  y = Add(c, d)
}"""
# Run the errands, then place and compile; print loops that got another signature, and those with several.
WATCH = """
import sys
from numba.core.registry import CPUDispatcher
from onnx import parser
from onnxplace import compile
from onnxplace.cost_graph.generators import layered
from onnxplace.driver import place_cost_graph
from onnxplace.passes.placement.search.first_use import ERRANDS, run_errands

def signatures():
    loops = {(loop.__module__, loop.__name__): loop for name, module in list(sys.modules.items())
             if name.startswith("onnxplace.") for loop in vars(module).values() if isinstance(loop, CPUDispatcher)}
    return {name: len(loop.overloads) for name, loop in loops.items() if loop._cache.cache_path}

run_errands(list(ERRANDS))
before = signatures()
place_cost_graph(layered(80, 1), budget_seconds=0.1)
place_cost_graph(layered(80, 1), "m-sct")
compile(parser.parse_model(sys.argv[1]), sys.argv[2], devices="cpu:0,cpu:1", cache=False, trial=False)
after = signatures()
print(sum(before.values()), [name for name, count in after.items() if count != before.get(name, 0)],
      [name for name, count in before.items() if count > 1])
"""


def loops_that_make_no_arrays() -> list[tuple[str, ast.FunctionDef]]:
    """Return the functions of this package that are declared to make no arrays, with the name of their file."""
    files = {path.resolve() for top in ("onnxplace", "passes") for path in (ROOT / top).rglob("*.py")}
    functions = ((path.name, node) for path in files for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    return [
        (name, node)
        for name, node in functions
        if isinstance(node, ast.FunctionDef)
        and {"in_place", "compiled_part"} & {ast.unparse(d) for d in node.decorator_list}
    ]


def test_place_and_compile_need_each_loop_for_one_type_and_the_errands_compile_them_all(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", WATCH, MODEL, tmp_path / "b"], capture_output=True, text=True, check=True
    )
    count, more, several = ran.stdout.split(maxsplit=2)
    assert (more, several.strip()) == ("[]", "[]")
    assert int(count) <= 25


def test_loops_that_do_not_count_references_make_no_arrays():
    """Numba would never free them."""
    loops = loops_that_make_no_arrays()
    assert len(loops) > 40
    for file, loop in loops:
        calls = [node.func for node in ast.walk(loop) if isinstance(node, ast.Call)]
        made = {call.attr for call in calls if isinstance(call, ast.Attribute)} & MAKES
        lists = [node for node in ast.walk(loop) if isinstance(node, (ast.List, ast.ListComp))]
        assert not made, f"{file}: {loop.name}"
        assert not lists, f"{file}: {loop.name}"


def test_loops_let_go_of_the_arrays_that_they_are_given():
    live, peak = np.zeros((2, 1), dtype=np.int64)
    events, where, change = np.zeros((3, 1), dtype=np.int64)
    before = sys.getrefcount(events)
    gone = weakref.ref(live)
    device_peaks(events, where, change, live, peak)
    del live
    gc.collect()
    assert gone() is None
    assert sys.getrefcount(events) == before


def test_every_errand_is_run_by_one_process_however_many_there_are():
    for number, shares in enumerate(first_use.SHARES):
        assert len(shares) == number + 2
        assert sorted(chain(*shares)) == sorted(ERRANDS)


def test_a_helper_runs_its_errands_and_a_name_that_is_none_fails():
    with first_use._helpers([["simulation"], ["bounds", "nothing"]]) as helpers:
        assert [helper.wait(60) for helper in helpers] == [0, 1]


def test_helpers_end_with_what_they_help():
    with pytest.raises(KeyboardInterrupt), first_use._helpers([list(ERRANDS)]) as helpers:
        raise KeyboardInterrupt
    assert helpers[0].returncode is not None


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that nothing was compiled yet, on four cores; returns the errands that this process runs."""
    ran: list[str] = []
    monkeypatch.setattr(first_use, "_shared", False)
    monkeypatch.setattr(first_use, "_is_first", lambda: True)
    monkeypatch.setattr(first_use, "available_cores", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(
        "onnxplace.passes.placement.search.first_use.run_errands", lambda names: (ran.extend(names), run_errands(names))
    )
    return ran


def test_a_machine_on_which_no_process_can_be_started_compiles_by_itself(first, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert place_cost_graph(layered(40, 1), budget_seconds=0.05).feasible
    assert first == ["groups", "simulation"]


def test_a_placer_that_does_not_search_leaves_the_search_to_others(first, monkeypatch):
    shares: list[list[str]] = []
    monkeypatch.setattr(first_use, "_helpers", lambda others: nullcontext(shares.extend(others) or []))
    place_cost_graph(layered(40, 1), "m-etf")
    assert first == ["groups", "simulation"]
    assert shares == [["lists"], ["levels", "bounds", "readers"]]


@pytest.mark.parametrize("placer", ["m-topo", "single"])
def test_other_placers_compile_nothing_ahead(first, placer):
    place_cost_graph(layered(40, 1), placer)
    assert first == []


def test_loops_are_compiled_ahead_once(first, monkeypatch):
    monkeypatch.setattr(first_use, "SHARES", ((("simulation",), ("bounds",)),))
    for _ in range(2):
        first_use.compile_loops(["auto"])
    assert first == ["simulation"]


def test_nothing_is_compiled_ahead_where_the_first_loop_is_read_from_disk(first, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(first_use, "_shared", False)
    monkeypatch.setattr(first_use, "compiled_loops", lambda: 0)
    monkeypatch.setattr(first_use, "_helpers", lambda shares: pytest.fail("a process was started"))
    first_use.compile_loops(["auto"])
