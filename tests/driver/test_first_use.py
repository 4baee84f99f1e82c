"""Loops that the first command on a machine compiles, and those that it runs in plain Python."""

import ast
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.driver.place import place_cost_graph
from onnxplace.simulation.step_kernels import device_peaks
from onnxplace.utils import jit

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
# Place and compile; print the loops of which there is machine code, and those with several signatures.
PRINT_COMPILED_LOOPS = """
import sys
from numba.core.registry import CPUDispatcher
from onnx import parser
from onnxplace import compile
from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.driver.place import place_cost_graph
from onnxplace.utils import jit

jit.MAX_INTERPRETED_ELEMENTS = int(sys.argv[3])
jit.MAX_ELEMENTS_BEFORE_READING = jit.MAX_INTERPRETED_ELEMENTS
place_cost_graph(GENERATORS["layered"](80, 1), budget_seconds=0.1)
place_cost_graph(GENERATORS["layered"](80, 1), "m-sct")
compile(parser.parse_model(sys.argv[1]), sys.argv[2], devices="cpu:0,cpu:1", cache=False, trial=False)
values = [value for name, module in list(sys.modules.items()) if name.startswith("onnxplace.")
          for value in vars(module).values()]
loops = {loop.__name__: loop for value in values for loop in [getattr(value, "_compiled", value)]
         if isinstance(loop, CPUDispatcher) and loop._cache.cache_path and loop.overloads}
print(",".join(sorted(loops)), [name for name, loop in loops.items() if len(loop.overloads) > 1])
"""


def list_loops_without_arrays() -> list[tuple[str, ast.FunctionDef]]:
    """Return the functions of this package that are declared to make no arrays, with the name of their file."""
    files = {path.resolve() for top in ("onnxplace", "passes", "plugins") for path in (ROOT / top).rglob("*.py")}
    declarations = ("in_place", "linear_in_place", "compiled_part")
    sources = {path.name: text for path in files if "@" in (text := path.read_text("utf-8"))}
    return [
        (name, node)
        for name, text in sources.items()
        if any(f"@{declaration}" in text for declaration in declarations)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and {ast.unparse(d) for d in node.decorator_list}.intersection(declarations)
    ]


def list_compiled_loops(folder: Path, max_elements: int) -> tuple[set[str], str]:
    """Return the loops that `place` and `compile` compile, and those of them that are compiled for several types."""
    completed = subprocess.run(
        [sys.executable, "-c", PRINT_COMPILED_LOOPS, MODEL, folder / "b", str(max_elements)],
        capture_output=True,
        text=True,
        check=True,
    )
    loops, several = completed.stdout.split(maxsplit=1)
    return set(loops.split(",")), several.strip()


def test_only_loops_of_the_search_are_compiled_for_small_graphs(tmp_path):
    loops, _ = list_compiled_loops(tmp_path, jit.MAX_INTERPRETED_ELEMENTS)
    assert loops <= {"accept", "anneal", "decode", "propose", "undo"}


def test_place_and_compile_compile_each_loop_for_one_type(tmp_path):
    loops, several = list_compiled_loops(tmp_path, 0)
    assert several == "[]"
    assert len(loops) <= 27


@pytest.mark.parametrize("placer", ["m-sct", "auto{proposals=200}"])
@pytest.mark.parametrize("links", ["duplex", "sequential", "parallel"])
def test_loops_give_equal_results_in_plain_python_and_compiled(placer, links, monkeypatch):
    results = []
    for max_elements in (1 << 40, 0):
        monkeypatch.setattr(jit, "MAX_INTERPRETED_ELEMENTS", max_elements)
        monkeypatch.setattr(jit, "MAX_ELEMENTS_BEFORE_READING", max_elements)
        results.append(place_cost_graph(GENERATORS["layered"](60, 3), placer, links=links))
    plain, compiled = results
    assert plain.device.tolist() == compiled.device.tolist()
    assert plain.start_seconds.tobytes() == compiled.start_seconds.tobytes()
    assert plain.peak_bytes.tolist() == compiled.peak_bytes.tolist()
    assert plain.lower_bound_seconds == compiled.lower_bound_seconds


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


@pytest.mark.parametrize("max_elements", [0, 1 << 40])
def test_loops_release_their_arguments(max_elements, monkeypatch):
    monkeypatch.setattr(jit, "MAX_INTERPRETED_ELEMENTS", max_elements)
    live, peak = np.zeros((2, 1), dtype=np.int64)
    events, where, change = np.zeros((3, 1), dtype=np.int64)
    before = sys.getrefcount(events)
    reference = weakref.ref(live)
    device_peaks(events, where, change, live, peak)
    del live
    gc.collect()
    assert reference() is None
    assert sys.getrefcount(events) == before
