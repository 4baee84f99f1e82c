"""The map of the architecture: which wings a wing may import, and by which names.

A wing is a package, or a single module of the first level. It may import wings above it in MAY_IMPORT, and only the
names that their `__init__` lists.
"""

import ast
import inspect
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MAY_IMPORT = {
    # helpers for everything
    "errors": "",
    "utils": "errors",
    "plugins": "errors",
    # plain data: inputs, graphs, devices
    "feeds": "errors utils",
    "graph": "utils",
    "ort": "errors",
    "devices": "errors ort utils",
    "target": "devices errors utils",
    "state": "errors target",
    "training_step": "errors",
    "model_metadata": "",
    # this machine, the model, simulated time, the result on disk
    "machine": "devices errors graph ort target utils",
    "simulation": "graph target utils",
    "model": "errors feeds graph machine model_metadata ort state training_step utils",
    "bundle": "errors feeds graph model_metadata simulation target training_step utils",
    # the results of passes, and the problem that placers solve
    "training_roles": "graph training_step",
    "facts": "bundle errors graph model simulation state training_roles",
    "problem": "errors facts graph simulation state target",
    # the helpers of passes, then the passes: neither imports the pipeline, commands, or anything that runs a bundle
    "passes.profiling": "devices errors facts feeds graph machine model ort target utils",
    "passes.cost_files": "errors facts model passes.profiling target utils",
    "passes.placement.grouping": "errors facts graph model problem state target training_roles utils",
    "passes.placement.list_scheduling": "errors facts graph problem simulation state target utils",
    "passes.placement.search": (
        "errors facts graph passes.placement.grouping passes.placement.list_scheduling problem simulation state "
        "target utils"
    ),
    "passes.placement.pipelining": "facts graph state training_roles",
    "passes.placement.exact": "graph passes.placement.search problem simulation utils",
    "passes.placement.stages": "graph problem simulation utils",
    "passes.segments": (
        "bundle devices errors facts graph machine model problem simulation state target training_roles utils"
    ),
    "passes.sharding": (
        "bundle errors facts feeds graph machine model passes.placement.grouping passes.profiling problem state "
        "target training_step utils"
    ),
    "passes.batching": "bundle errors feeds model passes.sharding",
    "passes.streaming": (
        "bundle errors facts graph model passes.profiling passes.segments problem simulation state utils"
    ),
    "passes.recomputation": "errors facts graph model problem state training_step utils",
    "passes": (
        "bundle errors facts graph machine model passes.batching passes.cost_files passes.placement.exact "
        "passes.placement.grouping passes.placement.list_scheduling passes.placement.pipelining "
        "passes.placement.search passes.placement.stages passes.profiling passes.recomputation passes.segments "
        "passes.sharding passes.streaming plugins problem simulation state target training_roles utils"
    ),
    # running bundles
    "runtime": "bundle errors feeds",
    "traces": "bundle runtime",
    "runtimes.execution": "bundle devices errors feeds machine ort runtime simulation target utils",
    "serving": "bundle errors feeds runtime runtimes.execution utils",
    "drop_in": "bundle devices errors feeds machine ort runtime utils",
    # pipelines of passes; cost graphs without ONNX; trials and calibration, which run bundles; reports
    "pipeline": "errors facts plugins runtime state utils",
    "cost_graph": "errors facts graph pipeline plugins state target utils",
    "calibration": "bundle devices errors feeds graph machine pipeline runtime target utils",
    "runtimes": "bundle errors feeds machine runtime runtimes.execution target traces",
    "evaluation": "bundle devices errors feeds machine model ort passes.profiling pipeline runtime target traces utils",
    "reports": "bundle cost_graph errors facts graph model pipeline simulation target utils",
    # from a model to a bundle, and the interfaces to it
    "driver": (
        "bundle cost_graph errors evaluation facts feeds graph machine model passes.profiling pipeline plugins problem "
        "reports simulation state target utils"
    ),
    "export": "bundle errors model pipeline plugins target training_step utils",
    "session": "bundle drop_in errors feeds machine model_metadata ort pipeline runtime serving traces utils",
    "api": "bundle driver reports utils",
    "verification": "bundle errors evaluation feeds machine pipeline runtime session utils",
    "benchmark": "bundle errors evaluation feeds machine pipeline runtime serving session traces utils",
    "testing": "bundle driver errors facts feeds graph pipeline runtime simulation state target utils",
    "doctor": (
        "calibration devices driver errors evaluation feeds machine ort pipeline reports runtime session target "
        "testing utils"
    ),
    "cli": (
        "benchmark bundle calibration cost_graph doctor driver errors evaluation export feeds machine "
        "pipeline plugins reports runtime session target traces utils verification"
    ),
    "__main__": "cli",
}
# Modules that every wing may import.
EVERYWHERE = {"_lazy", "_startup", "_version"}
WINGS = tuple(MAY_IMPORT)


def list_modules() -> dict[str, Path]:
    """Return all modules below `onnxplace` by name, with those of passes and runtimes, without packages."""
    paths = [path for top in ("onnxplace", "passes", "runtimes") for path in (ROOT / top).rglob("*.py")]
    linked = {ROOT / "onnxplace" / "passes", ROOT / "onnxplace" / "runtimes"}
    own = [path for path in paths if linked.isdisjoint(path.parents) and path.name != "__init__.py"]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("onnxplace."): path for path in own}


MODULES = list_modules()


def find_wing(name: str) -> str:
    """Return the wing of a module, a wing, or a name in one."""
    parts = name.split(".")
    return next((wing for n in range(len(parts), 0, -1) if (wing := ".".join(parts[:n])) in MAY_IMPORT), parts[0])


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
    """Return the imports from `onnxplace` in a file, relative to it."""
    pairs = read_all_imports(path)
    inside = [(module, name) for module, name in pairs if module.split(".")[0] == "onnxplace"]
    return [(module.removeprefix("onnxplace").removeprefix("."), name) for module, name in inside]


def find_violation(importer: str, module: str, name: str) -> str:
    """Return why a module may not import a name from another module; empty if it may."""
    own, imported = find_wing(importer), find_wing(module)
    if module == "":  # `from onnxplace import name`
        return "" if name in EVERYWHERE else f"import {name!r} from the wing that has it"
    if module in EVERYWHERE:
        return ""
    if own == imported:
        plugin = own in ("passes", "runtimes")
        return "a plugin does not import another one" if plugin else "" if module in MODULES else "import the module"
    if imported not in MAY_IMPORT[own].split():
        return f"{own} may not import {imported}"
    if module != imported:
        return f"import from {imported}, not from a file in it"
    listed = module in MODULES or name in import_module(f"onnxplace.{module}").__all__
    return "" if listed else f"{imported} does not list {name!r}"


def test_every_module_belongs_to_a_wing_of_the_map():
    assert {find_wing(name) for name in MODULES} - EVERYWHERE == set(WINGS)


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_imports_only_wings_above_it_so_that_there_is_no_cycle(wing):
    assert set(MAY_IMPORT[wing].split()) <= set(WINGS[: WINGS.index(wing)])


@pytest.mark.parametrize("name", sorted(set(MODULES) - EVERYWHERE))
def test_a_module_imports_only_listed_names_of_allowed_wings(name):
    problems = {f"{module} {item}": find_violation(name, module, item) for module, item in read_imports(MODULES[name])}
    assert {imported: reason for imported, reason in problems.items() if reason} == {}


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_imports_every_wing_that_the_map_allows(wing):
    """The map stays minimal."""
    paths = [path for name, path in MODULES.items() if find_wing(name) == wing]
    used = {find_wing(module) for path in paths for module, _ in read_imports(path)}
    assert set(MAY_IMPORT[wing].split()) <= used


PLUGIN_FILES = sorted((ROOT / "plugins").glob("*/*/**/*.py"))
PLUGIN_SOURCES = [path for path in PLUGIN_FILES if "tests" not in path.relative_to(ROOT / "plugins").parts]


@pytest.mark.parametrize("path", PLUGIN_SOURCES, ids=lambda path: path.relative_to(ROOT / "plugins").as_posix())
def test_a_plugin_uses_only_what_wings_list(path):
    """So what our own plugins use is there for everybody's."""
    for module, name in read_imports(path):
        if (module, name) == ("", "__version__"):
            continue
        assert module in MAY_IMPORT, f"{module} is not a wing"
        assert module in MODULES or name in import_module(f"onnxplace.{module}").__all__, f"{module}: {name}"


def test_nothing_imports_a_plugin():
    packages = {path.relative_to(ROOT / "plugins").parts[1] for path in PLUGIN_SOURCES}
    imported = {module.partition(".")[0] for path in MODULES.values() for module, _ in read_all_imports(path)}
    assert {
        "onnxplace_formats",
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


@pytest.mark.parametrize(
    ("importer", "module", "name", "reason"),
    [
        ("graph.op_graph", "model", "Model", "graph may not import model"),
        ("model.model", "driver", "compile_model", "model may not import driver"),
        ("passes.m_etf", "pipeline", "find", "passes may not import pipeline"),
        ("passes.m_etf", "passes.m_sct", "MSct", "a plugin does not import another one"),
        ("cli.app", "driver.compile", "compile_model", "import from driver, not from a file in it"),
        ("cli.app", "driver", "_plan", "driver does not list '_plan'"),
        ("cli.app", "", "compile", "import 'compile' from the wing that has it"),
        ("driver.compile", "model", "Model", ""),
    ],
)
def test_imports_against_the_map_are_found(importer, module, name, reason):
    assert find_violation(importer, module, name) == reason


def test_read_imports_finds_every_kind_of_import(tmp_path):
    (tmp_path / "m.py").write_text(
        "from typing import TYPE_CHECKING\nimport onnxplace.one\nfrom onnxplace import two\n"
        "from onnxplace.three import x\n"
        "if TYPE_CHECKING:\n    from onnxplace.four import y\n"
        "def f():\n    from onnxplace.passes.five import z\n    class C:\n        import onnxplace.six as six\n"
        "try:\n    import numpy\nexcept ImportError:\n    pass\n"
    )
    pairs = read_imports(tmp_path / "m.py")
    assert sorted(pairs) == [("", "two"), ("four", "y"), ("one", ""), ("passes.five", "z"), ("six", ""), ("three", "x")]


PACKAGES = [wing for wing in WINGS if wing not in MODULES and wing not in ("passes", "runtimes")]


def find_shadowed_names(wing: str, stub: str, modules: set[str]) -> set[str]:
    """Return the names that a stub lists from modules, and that a module of the wing has, too."""
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    listed = {alias.name for node in imports if node.module != f"onnxplace.{wing}" for alias in node.names}
    return {name for name in listed if f"{wing}.{name}" in modules}


@pytest.mark.parametrize("wing", PACKAGES)
def test_no_module_of_a_wing_has_the_name_of_what_the_wing_lists(wing):
    """Python sets a module as an attribute of its package on import: it would hide a function of that name."""
    assert find_shadowed_names(wing, (ROOT / _folder_of(wing) / "__init__.pyi").read_text(), set(MODULES)) == set()


def _folder_of(wing: str) -> str:
    path = wing.replace(".", "/")
    return path if wing.startswith(("passes.", "runtimes.")) else f"onnxplace/{path}"


def test_a_module_that_hides_a_function_of_its_wing_is_found():
    stub = "from onnxplace.a import own\nfrom onnxplace.a.split import split, cut\nfrom onnxplace.a.cut import join\n"
    assert find_shadowed_names("a", stub, {"a.own", "a.split", "a.cut", "b.join"}) == {"split", "cut"}


@pytest.mark.parametrize("wing", PACKAGES)
def test_a_wing_lists_its_public_names_for_type_checkers(wing):
    package = import_module(f"onnxplace.{wing}")
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    modules = {alias.asname: node.module for node in stub.body for alias in node.names if alias.asname == alias.name}
    assert sorted(modules) == package.__all__
    for name in package.__all__:
        assert getattr(package, name) is getattr(import_module(modules[name]), name)
        assert inspect.ismodule(getattr(package, name)) == (f"{wing}.{name}" in MODULES)
