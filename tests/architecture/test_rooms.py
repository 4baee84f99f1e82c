"""The map of the architecture: which room may import which, drawn from plain imports.

A room is a package or a module of the first level, or a package below `passes/` and `runtimes/`. It may import
the rooms above it in MAY_IMPORT, always the module that defines a name, so that every reader of the text finds it. Only
strangers import from packages: an `__init__` lists what documentation and examples name, by plain imports.
"""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The house as a whole: the rooms of `onnxplace/`, and the longest chain of imports between them.
MAX_ROOMS, MAX_FLOORS = 30, 13

MAY_IMPORT = {
    "errors": "",
    "plugins": "errors",
    "utils": "errors",
    "feeds": "errors utils",
    "graph": "utils",
    "target": "errors plugins utils",
    "devices": "target",
    "machine": "errors graph target utils",
    "model_metadata": "errors graph",
    "simulation": "graph target utils",
    "state": "errors target",
    "bundle": "errors feeds graph model_metadata simulation target utils",
    "model": "errors feeds graph machine model_metadata state utils",
    "facts": "bundle errors graph model model_metadata simulation state",
    "runtime": "bundle errors feeds",
    "cost_graph": "errors facts graph plugins state target utils",
    "passes.profiling": "errors facts feeds graph machine model target utils",
    "pipeline": "errors facts plugins runtime state utils",
    "problem": "errors facts graph simulation state target",
    "runtimes.execution": "bundle errors feeds machine runtime simulation target utils",
    "export": "bundle errors model model_metadata pipeline plugins target utils",
    "measure": "bundle errors feeds machine model passes.profiling pipeline runtime target utils",
    "passes.cost_files": "errors facts model passes.profiling target utils",
    "passes.placement.grouping": "errors facts graph model model_metadata plugins problem state target utils",
    "passes.placement.list_scheduling": "errors facts graph problem simulation state target utils",
    "passes.placement.stages": "graph problem simulation utils",
    "passes.recomputation": "errors facts graph model model_metadata problem state utils",
    "passes.segments": "bundle errors facts graph machine model model_metadata problem simulation state target utils",
    "reports": "bundle cost_graph errors facts graph model pipeline simulation target utils",
    "runtimes": "bundle errors feeds machine runtime runtimes.execution target",
    "driver": (
        "bundle cost_graph errors facts feeds graph machine measure model passes.profiling pipeline plugins "
        "problem reports simulation state target utils"
    ),
    "passes.placement.search": (
        "errors facts graph passes.placement.grouping passes.placement.list_scheduling problem simulation "
        "state target utils"
    ),
    "passes.sharding": (
        "bundle errors facts feeds graph machine model passes.placement.grouping passes.profiling problem "
        "state target utils"
    ),
    "passes.streaming": (
        "bundle errors facts graph model passes.profiling passes.segments problem simulation state utils"
    ),
    "session": "bundle errors feeds machine measure model_metadata pipeline runtime runtimes.execution target utils",
    "cli": (
        "bundle cost_graph driver errors export feeds machine measure pipeline plugins reports runtime "
        "session target utils"
    ),
    "passes.batching": "bundle errors feeds model passes.sharding",
    "passes.placement.exact": "graph passes.placement.search problem simulation utils",
    "testing": "bundle driver errors facts feeds graph pipeline runtime simulation state target utils",
    "__main__": "cli",
    "passes": (
        "bundle errors facts graph machine model model_metadata passes.batching passes.cost_files "
        "passes.placement.exact passes.placement.grouping passes.placement.list_scheduling "
        "passes.placement.search passes.placement.stages passes.profiling passes.recomputation "
        "passes.segments passes.sharding passes.streaming plugins problem simulation state target utils"
    ),
}
# Modules that every room may import.
EVERYWHERE = {"_lazy", "_startup", "_version"}
ROOMS = tuple(MAY_IMPORT)


def list_modules() -> dict[str, Path]:
    """Return all modules below `onnxplace` by name, with those of passes and runtimes, without packages."""
    paths = [path for top in ("onnxplace", "passes", "runtimes") for path in (ROOT / top).rglob("*.py")]
    linked = {ROOT / "onnxplace" / "passes", ROOT / "onnxplace" / "runtimes"}
    own = [path for path in paths if linked.isdisjoint(path.parents) and path.name != "__init__.py"]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("onnxplace."): path for path in own}


MODULES = list_modules()
FACES = sorted(
    path
    for top in ("onnxplace", "passes", "runtimes")
    for path in (ROOT / top).rglob("__init__.py")
    if path.parent.parent != ROOT and not any(parent.is_symlink() for parent in path.parents)
)


def find_room(name: str) -> str:
    """Return the room of a module, a room, or a name in one."""
    parts = name.split(".")
    return next((room for n in range(len(parts), 0, -1) if (room := ".".join(parts[:n])) in MAY_IMPORT), parts[0])


@cache
def read_all_imports(path: Path) -> list[tuple[str, str]]:
    """Return all imports in a file as (module, name), also in functions and for type checking."""
    pairs = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            pairs += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            pairs += [(alias.name, "") for alias in node.names]
    return pairs


def read_imports(path: Path) -> list[tuple[str, str]]:
    """Return the imports from `onnxplace` in a file as (module, name), relative to it; a module has no name."""
    pairs = [(module, name) for module, name in read_all_imports(path) if module.split(".")[0] == "onnxplace"]
    inside = [(module.removeprefix("onnxplace").removeprefix("."), name) for module, name in pairs]
    whole = [(".".join(filter(None, pair)), pair) for pair in inside]
    return [(joined, "") if joined in MODULES else pair for joined, pair in whole]


def find_violation(importer: str, module: str, name: str) -> str:
    """Return why a module may not import a name from another module; empty if it may."""
    own, imported = find_room(importer), find_room(module)
    if module in EVERYWHERE:
        return ""
    if module not in MODULES:
        return f"import {name!r} from the module that defines it"
    if name.startswith("_"):
        return f"{name!r} is private"
    if own == imported:
        return "a plugin does not import another one" if own in ("passes", "runtimes") else ""
    return "" if imported in MAY_IMPORT[own].split() else f"{own} may not import {imported}"


def test_every_module_belongs_to_a_room_of_the_map():
    assert {find_room(name) for name in MODULES} - EVERYWHERE == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_above_it_so_that_there_is_no_cycle(room):
    assert set(MAY_IMPORT[room].split()) <= set(ROOMS[: ROOMS.index(room)])


@pytest.mark.parametrize("name", sorted(set(MODULES) - EVERYWHERE))
def test_a_module_imports_what_it_may_from_where_it_is_defined(name):
    problems = {f"{module} {item}": find_violation(name, module, item) for module, item in read_imports(MODULES[name])}
    assert {imported: reason for imported, reason in problems.items() if reason} == {}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_every_room_that_the_map_allows(room):
    """The map stays minimal."""
    paths = [path for name, path in MODULES.items() if find_room(name) == room]
    used = {find_room(module) for path in paths for module, _ in read_imports(path)}
    assert set(MAY_IMPORT[room].split()) <= used


def test_the_house_keeps_its_rooms_and_floors():
    """Whoever needs one more room or floor raises the number here, and says why in the commit."""
    above: dict[str, set[str]] = {}
    for room, imported in MAY_IMPORT.items():
        top = room.partition(".")[0]
        above.setdefault(top, set()).update({name.partition(".")[0] for name in imported.split()} - {top})
    floors: dict[str, int] = {}
    while rest := above.keys() - floors.keys():
        ready = {room for room in rest if above[room] <= floors.keys()}
        assert ready, f"rooms import each other in a circle: {sorted(rest)}"
        floors.update({room: 1 + max((floors[name] for name in above[room]), default=0) for room in ready})
    assert len(floors) <= MAX_ROOMS
    assert max(floors.values()) <= MAX_FLOORS


PLUGIN_FILES = sorted((ROOT / "plugins").glob("*/*/**/*.py"))
PLUGIN_SOURCES = [path for path in PLUGIN_FILES if "tests" not in path.relative_to(ROOT / "plugins").parts]


@pytest.mark.parametrize("path", PLUGIN_SOURCES, ids=lambda path: path.relative_to(ROOT / "plugins").as_posix())
def test_a_plugin_uses_only_public_names(path):
    """So what our own plugins use is there for everybody's."""
    used = [pair for pair in read_imports(path) if pair != ("", "__version__") and pair[0] not in EVERYWHERE]
    assert [pair for pair in used if pair[0] not in MODULES or pair[1].startswith("_")] == []


def test_nothing_imports_a_plugin():
    packages = {path.relative_to(ROOT / "plugins").parts[1] for path in PLUGIN_SOURCES}
    imported = {module.partition(".")[0] for path in MODULES.values() for module, _ in read_all_imports(path)}
    assert {
        "onnxplace_doctor",
        "onnxplace_hosts",
        "onnxplace_learned",
        "onnxplace_serving",
        "onnxplace_training",
    } <= packages
    assert not packages & imported


def test_modules_do_not_import_each_other_in_a_cycle():
    imported = {
        name: {module for module, _ in read_imports(path)} & set(MODULES) - {name} for name, path in MODULES.items()
    }
    while leaves := [name for name, others in imported.items() if not others & set(imported)]:
        for name in leaves:
            del imported[name]
    assert imported == {}


@pytest.mark.parametrize("path", FACES, ids=lambda path: path.parent.relative_to(ROOT).as_posix())
def test_a_package_only_hands_on_names_of_its_modules(path):
    """Plain imports, for strangers: nothing is defined there, and nothing is found by its text."""
    package = ".".join(path.parent.relative_to(ROOT).parts).removeprefix("onnxplace.")
    listed = read_imports(path)
    for module, _ in listed:
        assert module in EVERYWHERE or find_room(module) == find_room(package)
    names = [name for module, name in listed if module not in EVERYWHERE]
    handed_on = {name: getattr(import_module(f"onnxplace.{package}"), name) for name in names}
    origins = {name: module for module, name in listed if name in names}
    assert handed_on == {name: getattr(import_module(f"onnxplace.{origins[name]}"), name) for name in names}
    assert not {f"{package}.{name}" for name in names} & set(MODULES), "a module would hide a name"


@pytest.mark.parametrize(
    ("importer", "module", "name", "reason"),
    [
        ("graph.op_graph", "model.model", "Model", "graph may not import model"),
        ("model.model", "driver.compile", "compile_model", "model may not import driver"),
        ("passes.m_etf", "pipeline.pipeline", "find", "passes may not import pipeline"),
        ("passes.m_etf", "passes.m_sct", "MSct", "a plugin does not import another one"),
        ("cli.app", "driver", "compile_model", "import 'compile_model' from the module that defines it"),
        ("cli.compile", "driver.compile", "_compile", "'_compile' is private"),
        ("cli.app", "", "compile", "import 'compile' from the module that defines it"),
        ("driver.compile", "model.model", "Model", ""),
    ],
)
def test_imports_against_the_map_are_found(importer, module, name, reason):
    assert find_violation(importer, module, name) == reason


def test_read_imports_finds_every_kind_of_import(tmp_path):
    (tmp_path / "m.py").write_text(
        "from typing import TYPE_CHECKING\nimport onnxplace.one\nfrom onnxplace import two\n"
        "from onnxplace.three import x\nfrom onnxplace.graph import op_graph\n"
        "if TYPE_CHECKING:\n    from onnxplace.four import y\n"
        "def f():\n    from onnxplace.passes.five import z\n    class C:\n        import onnxplace.six as six\n"
        "try:\n    import numpy\nexcept ImportError:\n    pass\n"
    )
    assert sorted(read_imports(tmp_path / "m.py")) == [
        ("", "two"),
        ("four", "y"),
        ("graph.op_graph", ""),
        ("one", ""),
        ("passes.five", "z"),
        ("six", ""),
        ("three", "x"),
    ]
