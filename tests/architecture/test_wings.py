"""The map of the architecture, as a test: which wing may import which, and only by the names that it lists.

A wing is a package, or a single module of the first level. Read MAY_IMPORT from the top: a wing stands on those above.
"""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MAY_IMPORT = {
    # what everything may need
    "errors": "",
    "utils": "errors",
    # plain data: inputs, graphs, devices
    "feeds": "errors utils",
    "graph": "utils",
    "target": "errors utils",
    "state": "errors target",
    # this machine, the model, simulated time, the result on disk
    "machine": "errors graph target utils",
    "simulation": "graph target utils",
    "model": "errors feeds graph machine state utils",
    "bundle": "errors feeds graph simulation target utils",
    # what passes provide, and the problem that placers solve
    "facts": "graph model simulation state",
    "problem": "errors facts graph simulation state target",
    "cost_graph": "errors facts graph state target utils",
    # the helpers of passes, then the passes: they know no pipeline, no command, and nothing that runs a bundle
    "passes.profiling": "errors facts graph machine model target utils",
    "passes.cost_files": "errors facts graph model passes.profiling target utils",
    "passes.placement.grouping": "errors facts graph model problem state target utils",
    "passes.placement.list_scheduling": "errors graph problem simulation state target utils",
    "passes.placement.search": (
        "cost_graph errors facts graph passes.placement.grouping passes.placement.list_scheduling passes.profiling "
        "problem simulation state target utils"
    ),
    "passes.placement.exact": "graph passes.placement.search problem simulation utils",
    "passes.placement.stages": "graph problem simulation utils",
    "passes.segments": "bundle errors facts graph machine model problem simulation state target utils",
    "passes": (
        "bundle errors facts graph machine model passes.cost_files passes.placement.exact passes.placement.grouping "
        "passes.placement.list_scheduling passes.placement.search passes.placement.stages passes.profiling "
        "passes.segments problem simulation state target utils"
    ),
    # running bundles
    "runtime": "bundle errors feeds",
    "runtimes.execution": "bundle errors feeds machine runtime utils",
    "runtimes": "bundle errors feeds machine runtime runtimes.execution simulation",
    # passes in a row; trials and calibration, which run bundles; what people read
    "pipeline": "errors facts runtime state utils",
    "calibration": "bundle errors feeds graph machine pipeline runtime target utils",
    "evaluation": "bundle errors feeds machine model pipeline runtime simulation target utils",
    "report": "bundle errors pipeline runtime",
    # from a model to a bundle, and the faces of all of it
    "driver": (
        "bundle cost_graph errors evaluation facts feeds graph machine model pipeline problem report state target utils"
    ),
    "api": "bundle driver errors feeds machine pipeline report runtime utils",
    "testing": "bundle driver errors facts feeds graph pipeline runtime simulation state target utils",
    "cli": ("api bundle calibration cost_graph driver errors evaluation feeds machine pipeline report target utils"),
    "__main__": "cli",
}
EVERYWHERE = {"_lazy", "_version"}
WINGS = tuple(MAY_IMPORT)


def modules() -> dict[str, Path]:
    """Return all modules below `onnxplace` by name, those of passes and runtimes included, packages left out."""
    paths = [path for top in ("onnxplace", "passes", "runtimes") for path in (ROOT / top).rglob("*.py")]
    linked = {ROOT / "onnxplace" / "passes", ROOT / "onnxplace" / "runtimes"}
    own = [path for path in paths if linked.isdisjoint(path.parents) and path.name != "__init__.py"]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("onnxplace."): path for path in own}


MODULES = modules()


def wing_of(name: str) -> str:
    """Return the wing that a module, a wing, or a name in one of them belongs to."""
    parts = name.split(".")
    return next((wing for n in range(len(parts), 0, -1) if (wing := ".".join(parts[:n])) in MAY_IMPORT), parts[0])


def imports(path: Path) -> list[tuple[str, str]]:
    """Return all imports from `onnxplace` in a file as (module, name): in functions and for type checking, too."""
    pairs = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            pairs += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            pairs += [(alias.name, "") for alias in node.names]
    inside = [(module, name) for module, name in pairs if module.split(".")[0] == "onnxplace"]
    return [(module.removeprefix("onnxplace").removeprefix("."), name) for module, name in inside]


def refused(importer: str, module: str, name: str) -> str:
    """Return why a module may not import a name from another; empty if it may."""
    own, target = wing_of(importer), wing_of(module)
    if module == "":  # `from onnxplace import name`
        return "" if name in EVERYWHERE else f"import {name!r} from the wing that has it"
    if module in EVERYWHERE:
        return ""
    if own == target:
        plugin = own in ("passes", "runtimes")
        return "a plugin does not import another one" if plugin else "" if module in MODULES else "import the module"
    if target not in MAY_IMPORT[own].split():
        return f"{own} may not import {target}"
    if module != target:
        return f"import from {target}, not from a file in it"
    listed = module in MODULES or name in import_module(f"onnxplace.{module}").__all__
    return "" if listed else f"{target} does not list {name!r}"


def test_every_module_belongs_to_a_wing_of_the_map():
    assert {wing_of(name) for name in MODULES} - EVERYWHERE == set(WINGS)


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_stands_on_those_above_it_so_that_there_is_no_circle(wing):
    assert set(MAY_IMPORT[wing].split()) <= set(WINGS[: WINGS.index(wing)])


@pytest.mark.parametrize("name", sorted(set(MODULES) - EVERYWHERE))
def test_a_module_imports_what_its_wing_may_and_only_listed_names(name):
    problems = {f"{module} {item}": refused(name, module, item) for module, item in imports(MODULES[name])}
    assert {what: why for what, why in problems.items() if why} == {}


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_imports_all_that_the_map_says(wing):
    """So that the map stays as small as it can be."""
    used = {wing_of(module) for name, path in MODULES.items() if wing_of(name) == wing for module, _ in imports(path)}
    assert set(MAY_IMPORT[wing].split()) <= used


def test_no_modules_of_a_wing_import_each_other_in_a_circle():
    left = {name: {module for module, _ in imports(path)} & set(MODULES) - {name} for name, path in MODULES.items()}
    while free := [name for name, needed in left.items() if not needed & set(left)]:
        for name in free:
            del left[name]
    assert left == {}


@pytest.mark.parametrize(
    ("importer", "module", "name", "why"),
    [
        ("graph.op_graph", "model", "Model", "graph may not import model"),
        ("model.model", "driver", "compile_model", "model may not import driver"),
        ("passes.m_etf", "pipeline", "find", "passes may not import pipeline"),
        ("passes.m_etf", "passes.m_sct", "MSct", "a plugin does not import another one"),
        ("cli.app", "driver.compiler", "compile_model", "import from driver, not from a file in it"),
        ("cli.app", "driver", "_plan", "driver does not list '_plan'"),
        ("cli.app", "", "compile", "import 'compile' from the wing that has it"),
        ("driver.compiler", "model", "Model", ""),
    ],
)
def test_the_map_refuses_what_it_does_not_allow(importer, module, name, why):
    assert refused(importer, module, name) == why


def test_the_walk_through_a_file_sees_every_kind_of_import(tmp_path):
    (tmp_path / "m.py").write_text(
        "from typing import TYPE_CHECKING\nimport onnxplace.one\nfrom onnxplace import two\n"
        "from onnxplace.three import x\n"
        "if TYPE_CHECKING:\n    from onnxplace.four import y\n"
        "def f():\n    from onnxplace.passes.five import z\n    class C:\n        import onnxplace.six as six\n"
        "try:\n    import numpy\nexcept ImportError:\n    pass\n"
    )
    found = imports(tmp_path / "m.py")
    assert sorted(found) == [("", "two"), ("four", "y"), ("one", ""), ("passes.five", "z"), ("six", ""), ("three", "x")]


PACKAGES = [wing for wing in WINGS if wing not in MODULES and wing not in ("passes", "runtimes")]


@pytest.mark.parametrize("wing", PACKAGES)
def test_a_wing_lists_for_type_checkers_what_it_offers(wing):
    """No module has the name of something that its wing offers: Python would set it in its place."""
    package = import_module(f"onnxplace.{wing}")
    (block,) = [node for node in ast.parse(Path(package.__file__).read_text()).body if isinstance(node, ast.If)]
    seen = {alias.asname: node.module for node in block.body for alias in node.names if alias.asname == alias.name}
    assert sorted(seen) == package.__all__
    for name in package.__all__:
        assert getattr(package, name) is getattr(import_module(seen[name]), name)
        assert inspect.ismodule(getattr(package, name)) == (f"{wing}.{name}" in MODULES)
