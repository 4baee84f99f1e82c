"""What is kept of compiled kernels, and when it no longer holds."""

import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from onnxplace.utils import jit
from onnxplace.utils.jit import budget_clock, linear_in_place, linear_loop, on_compiling

CALLER = """
from onnxplace.utils.jit import compiled_loop
from kept_parts import one_more

@compiled_loop
def run(x):
    return one_more(x)
"""
PART = """
from onnxplace.utils.jit import compiled_part

@compiled_part
def one_more(x):
    return x + {step}
"""


@linear_loop
def count(items):
    return np.full(len(items), items.sum(), np.int64)


@linear_loop
def count_twice(items):
    return 2 * count(items)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "kept_caller.py").write_text(CALLER)
    (tmp_path / "kept_parts.py").write_text(PART.format(step=1))
    return tmp_path


def fresh(folder: Path) -> ModuleType:
    """Import the modules anew, as another process would."""
    modules = []
    for name in ("kept_parts", "kept_caller"):
        path = folder / f"{name}.py"
        modules.append(ModuleType(name))
        sys.modules[name] = modules[-1]
        exec(compile(path.read_text(), path, "exec"), modules[-1].__dict__)
    for module in modules:
        del sys.modules[module.__name__]
    return modules[-1]


def compilations(folder: Path) -> tuple[int, bool]:
    """Return what the kernel returns for 1, and whether it had to be compiled."""
    seen: list[bool] = []
    on_compiling(lambda: seen.append(True))
    return fresh(folder).run(1), bool(seen)


def test_a_loop_is_compiled_again_only_when_a_loop_that_it_calls_has_changed(folder):
    assert compilations(folder) == (2, True)
    assert compilations(folder) == (2, False)
    (folder / "kept_parts.py").write_text(PART.format(step=41))
    assert compilations(folder) == (42, True)


def test_an_unreadable_cache_file_is_replaced(folder):
    assert compilations(folder) == (2, True)
    remaining = list(Path(fresh(folder).run._compiled.stats.cache_path).glob("kept_caller.run*.nbi"))
    assert len(remaining) == 1
    begin = remaining[0].read_bytes()
    remaining[0].write_bytes(begin[: len(begin) // 2])
    assert compilations(folder) == (2, True)
    assert compilations(folder) == (2, False)


def test_the_clock_of_searches_stops_while_loops_are_compiled(folder):
    began, clock_began = time.perf_counter(), budget_clock()
    assert compilations(folder) == (2, True)
    assert budget_clock() - clock_began < time.perf_counter() - began


def test_a_loop_that_cannot_be_cached_still_runs(folder, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    assert compilations(folder) == (2, True)
    assert compilations(folder) == (2, True)


def test_numba_is_imported_on_an_empty_stack_however_deep_its_importer_is():
    """Frames are counted where numba is slow if a chunk of Python's stack ends there."""
    script = """
import subprocess
import sys
class Depth:
    def find_spec(self, name, path=None, target=None):
        if name == "numba.core.typeconv.rules":
            frame, count = sys._getframe(), 0
            while frame := frame.f_back:
                count += 1
            print(count)
sys.meta_path.insert(0, Depth())
def descend(depth):
    if depth:
        return descend(depth - 1)
    from onnxplace.utils import jit
    jit.compiled_loop(descend)._compiled
descend(500)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(process.stdout) < 100


@pytest.fixture(params=[0, 1 << 40], ids=["compiled", "plain"])
def max_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "MAX_INTERPRETED_ELEMENTS", request.param)


@pytest.mark.usefixtures("max_elements")
def test_a_linear_loop_changes_arrays_and_records_in_place():
    @linear_in_place
    def add(items, table, grid):
        for k in range(len(items)):
            items[k] += 1
            table[k].total += items[k]
            grid[k, 1] = table[k].total

    items, grid = np.arange(3, dtype=np.int32), np.zeros((3, 2))
    table = np.zeros(3, np.dtype([("total", np.float64), ("unused", np.int64)], align=True))
    table["unused"] = 7
    add(items, table, grid)
    assert items.tolist() == table["total"].tolist() == grid[:, 1].tolist() == [1, 2, 3]
    assert table["unused"].tolist() == [7, 7, 7]


@pytest.mark.usefixtures("max_elements")
def test_linear_loops_may_call_each_other():
    assert count_twice(np.arange(3)).tolist() == [6, 6, 6]


def test_a_linear_loop_is_compiled_once_it_has_enough_to_do(monkeypatch):
    @linear_in_place
    def first(items):
        return items[0]

    monkeypatch.setattr(jit, "MAX_INTERPRETED_ELEMENTS", 10)
    for is_compiled in (False, False, True):
        assert first(np.arange(4)) == 0
        assert first._is_compiled == is_compiled


def test_a_linear_loop_whose_machine_code_is_on_disk_is_read_sooner(monkeypatch, folder):
    (folder / "kept_caller.py").write_text(CALLER.replace("compiled_loop", "linear_loop").replace("(x)\n", "(x[0])\n"))
    items = np.ones(4, dtype=np.int64)
    monkeypatch.setattr(jit, "MAX_ELEMENTS_BEFORE_READING", 3)
    assert jit._load_numba().is_on_disk(fresh(folder).run._compiled) is False
    monkeypatch.setattr(jit, "MAX_INTERPRETED_ELEMENTS", 3)
    fresh(folder).run(items)
    monkeypatch.setattr(jit, "MAX_INTERPRETED_ELEMENTS", 1 << 40)
    module = fresh(folder)
    module.run(items)
    assert module.run._is_compiled
