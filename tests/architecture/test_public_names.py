"""Public names and registered plugins: listed, documented, and loaded only on use."""

import ast
import inspect
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path

import pytest

import onnxplace
from onnxplace.pipeline.registry import find_plugin
from onnxplace.plugins import BUILTIN
from onnxplace.runtime.interface import Runtime
from onnxplace.state import Pass

ROOT = Path(__file__).parents[2]
PASSES = {path.stem for path in (ROOT / "passes").glob("*.py") if path.stem != "__init__"}
RUNTIMES = {path.stem for path in (ROOT / "runtimes").glob("*.py") if path.stem != "__init__"}
HEAVY = (
    "numpy",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "numba",
    "pydantic",
    "rich",
    "networkx",
    "sympy",
    "psutil",
    "pynvml",
    "torch",
)


def test_only_rooms_that_make_models_import_onnx_at_module_level():
    """In other rooms of `onnxplace/`, functions that need onnx import it."""
    linked = {ROOT / "onnxplace" / "passes", ROOT / "onnxplace" / "runtimes"}
    paths = [path for path in (ROOT / "onnxplace").rglob("*.py") if linked.isdisjoint(path.parents)]
    pattern = re.compile(r"^(import onnx\b|from onnx\b)", re.MULTILINE)
    importers = [path.relative_to(ROOT / "onnxplace") for path in paths if pattern.search(path.read_text())]
    assert {path.parts[0] for path in importers} == {"export", "model"}


# ---------------------------------------------------------------------------------------------- lazy imports


def test_importing_the_package_and_printing_help_load_no_heavy_modules():
    script = f"""
import sys
import onnxplace
after_import = [name for name in {HEAVY!r} if name in sys.modules]
from onnxplace.cli.app import main
codes = [main(["--help"]), main(["compile", "--help"])]
print(codes, after_import, [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stderr.strip() == "[0, 0] [] []"


def test_listing_and_printing_commands_load_no_heavy_modules():
    script = f"""
import sys
import onnxplace.cli.shared_options, onnxplace.reports.text
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


# ---------------------------------------------------------------------------------------------- public names


def test_public_names_are_sorted():
    assert onnxplace.__all__ == sorted(onnxplace.__all__)


def test_public_names_resolve_and_are_documented():
    assert len(set(onnxplace.__all__)) == len(onnxplace.__all__)
    for name in onnxplace.__all__:
        assert getattr(onnxplace, name).__module__.startswith("onnxplace.")
        assert inspect.getdoc(getattr(onnxplace, name))


def test_type_checkers_see_the_same_public_names():
    tree = ast.parse((ROOT / "onnxplace" / "__init__.py").read_text(encoding="utf-8"))
    imports = next(node for node in tree.body if isinstance(node, ast.If)).body
    modules = {alias.name: node.module for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(modules) == sorted(onnxplace.__all__)
    for name, module in modules.items():
        assert getattr(onnxplace, name) is getattr(import_module(module), name)


def test_dir_lists_the_public_names_and_other_names_do_not_exist():
    assert dir(onnxplace) == sorted(onnxplace.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = onnxplace.nothing


@pytest.mark.parametrize("folder", ["passes", "runtimes"])
def test_plugin_folders_cannot_be_imported_as_top_level_packages(folder, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delitem(sys.modules, folder, raising=False)
    with pytest.raises(ImportError, match=f"onnxplace.{folder}"):
        import_module(folder)


# ---------------------------------------------------------------------------------------------- the registry


def test_every_file_of_passes_and_runtimes_is_in_the_registry():
    for kind, files in (("passes", PASSES), ("runtimes", RUNTIMES)):
        registered = {path.partition(":")[0].rpartition(".")[2] for path, _ in BUILTIN[kind].values()}
        assert registered == files


@pytest.mark.parametrize("name", BUILTIN["passes"])
def test_a_pass_is_a_frozen_dataclass_with_the_name_of_its_file_and_entry(name):
    kind = find_plugin("passes", name)
    module, _, attribute = BUILTIN["passes"][name][0].partition(":")
    assert issubclass(kind, Pass)
    assert is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert kind.name == name
    assert module == f"onnxplace.passes.{name.replace('-', '_')}"
    assert kind.__module__ == module
    assert kind.__name__ == attribute


@pytest.mark.parametrize("name", BUILTIN["passes"])
def test_a_pass_is_the_one_public_class_of_its_file(name):
    kind = find_plugin("passes", name)
    module = inspect.getmodule(kind)
    classes = [item for item in vars(module).values() if inspect.isclass(item) and item.__module__ == module.__name__]
    assert [item.__name__ for item in classes if not item.__name__.startswith("_")] == [kind.__name__]


@pytest.mark.parametrize("name", BUILTIN["passes"])
def test_a_pass_and_each_of_its_options_are_documented_and_optional(name):
    kind = find_plugin("passes", name)
    assert kind.__doc__
    assert not kind.__doc__.startswith(f"{kind.__name__}(")  # the default of dataclasses
    step = kind()
    documented = read_field_docs(inspect.getsource(kind))
    assert set(documented) == {item.name for item in fields(step)}
    for option, text in documented.items():
        assert text, f"{name}: option {option!r} has no line of documentation"


def read_field_docs(source: str) -> dict[str, str]:
    """Return the annotated fields of a class (not its class variables) with the string that follows each."""
    body = ast.parse(source).body[0].body
    docs = {}
    for node, following in zip(body, [*body[1:], None]):
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            docs[node.target.id] = following.value.value if text else ""
    return docs


@pytest.mark.parametrize("name", BUILTIN["passes"])
def test_a_pass_declares_facts(name):
    kind = find_plugin("passes", name)
    assert kind.provides
    for fact in (*kind.requires, *kind.provides, *kind.preserves):
        assert isinstance(fact.derived_from, tuple)
        assert callable(fact.check)


@pytest.mark.parametrize("name", BUILTIN["runtimes"])
def test_a_runtime_has_the_name_of_its_file_and_entry(name):
    kind = find_plugin("runtimes", name)
    assert issubclass(kind, Runtime)
    assert kind.name == name
    assert kind.summary
    assert kind.__doc__
    assert kind.__module__ == f"onnxplace.runtimes.{name.replace('-', '_')}"


@pytest.mark.parametrize("kind", BUILTIN)
def test_every_entry_has_a_one_line_summary(kind):
    for _, summary in BUILTIN[kind].values():
        assert summary
        assert "\n" not in summary
        assert not summary.endswith(".")
