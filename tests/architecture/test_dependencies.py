"""pyproject.toml requires the packages that are imported, with the bounds that `.ci/lowest` tests."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))
EXTRAS = PROJECT["optional-dependencies"]

# Modules whose package has another name.
PACKAGES = {"cuda": "cuda-bindings", "google": "protobuf", "pynvml": "nvidia-ml-py", "yaml": "pyyaml"}
PACKAGES |= {"grpc": "grpcio", "optimum": "optimum-onnx"}
# The extras that each folder may import from, besides the dependencies of the project.
FOLDERS = {
    "onnxplace": ("cpu", "gpu", "report"),
    "passes": ("cpu", "gpu"),
    "runtimes": ("cpu", "gpu"),
    "plugins/formats/onnxplace_formats": ("cpu",),
    "plugins/formats/tests": ("cpu", "dev", "genai"),
    "plugins/hosts/onnxplace_hosts": ("mpi",),
    "plugins/hosts/tests": ("cpu", "dev"),
    "plugins/serving/onnxplace_serving": ("serve",),
    "plugins/serving/tests": ("cpu", "dev"),
    "plugins/training/onnxplace_training": ("torch", "train"),
    "plugins/training/tests": ("cpu", "dev", "torch", "zoo"),
    "examples": ("cpu", "gpu", "dev", "generate", "torch", "train", "zoo"),
    "benchmarks": ("cpu", "gpu", "dev", "optimum", "zoo"),
    "tests": ("cpu", "gpu", "dev", "generate", "torch", "zoo"),
    ".ci": ("cpu", "dev"),
    "docs": ("docs",),
}


def required_packages(extras: tuple[str, ...], project: dict = PROJECT) -> set[str]:
    """Return the packages that a project and some of its extras require."""
    optional = project.get("optional-dependencies", {})
    texts = [*project["dependencies"], *(text for extra in extras for text in optional[extra])]
    return {canonicalize_name(Requirement(text).name) for text in texts}


def list_python_files(folder: str | Path) -> list[Path]:
    """Return the Python files of a folder; `onnxplace` holds links to the folders of passes and runtimes."""
    linked = {path for path in (ROOT / folder).iterdir() if path.is_symlink()}
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if linked.isdisjoint(path.parents)]


def walk_statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a tree and all statements in it; most of its nodes are in their expressions."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from walk_statements(child)


def read_imported_packages(source: str) -> set[str]:
    """Return the top-level packages that a source imports, also in functions and for type checking."""
    modules = set()
    walk = ast.walk if "importorskip" in source or "import_module" in source else walk_statements
    for node in walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.add(node.module or "")
        elif isinstance(node, ast.Call) and any(isinstance(item, ast.Constant) for item in node.args[:1]):
            name = ast.unparse(node.func)
            modules |= {node.args[0].value} if name in ("pytest.importorskip", "import_module") else set()
    return {module.partition(".")[0] for module in modules}


def list_packages(path: Path) -> set[str]:
    """Return the third-party packages that a file imports, by their names in pip."""
    own = {"onnxplace", "passes", "runtimes", "tests", "benchmarks", *(file.stem for file in path.parent.glob("*.py"))}
    # Cases among the examples have benchmarks on their path, pytest and mypy have the examples.
    own |= {
        file.stem for folder in ("examples", "examples/cases", "benchmarks") for file in (ROOT / folder).glob("*.py")
    }
    own |= {package.name for package in (ROOT / "plugins").glob("*/onnxplace_*")} | {
        "plugins"
    }  # of what the tools need, the environment has them
    modules = read_imported_packages(path.read_text(encoding="utf-8")) - own - sys.stdlib_module_names
    return {canonicalize_name(PACKAGES.get(module, module)) for module in modules}


@pytest.fixture(scope="module")
def lowest() -> ModuleType:
    """`.ci/lowest.py` as a module."""
    spec = spec_from_file_location("lowest", ROOT / ".ci" / "lowest.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------- declared dependencies


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_imported_package_is_declared(folder):
    declared = required_packages(FOLDERS[folder])
    files = list_python_files(folder)
    assert files
    missing = {(path.relative_to(ROOT).as_posix(), name) for path in files for name in list_packages(path) - declared}
    assert missing == set()


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_a_plugin_declares_what_it_imports(plugin):
    project = tomllib.loads((plugin / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = required_packages(tuple(project["optional-dependencies"]), project)
    imported = {
        name for path in list_python_files(plugin / plugin.name.replace("-", "_")) for name in list_packages(path)
    }
    assert imported | {"onnxplace"} == declared


@pytest.mark.slow
def test_every_dependency_is_imported():
    paths = [path for folder in ("onnxplace", "passes", "runtimes") for path in list_python_files(folder)]
    assert required_packages(()) <= {name for path in paths for name in list_packages(path)}


def test_every_kind_of_import_is_found():
    source = (
        "import a, b.c as d\nfrom e.f import g\nfrom . import h\n"
        "if TYPE_CHECKING:\n    import i\n"
        "def f():\n    try:\n        from j import k\n    except ImportError:\n        pass\n"
        "l = pytest.importorskip('m.n')\no = import_module(name)\np = import_module('q')\n"
    )
    assert read_imported_packages(source) == {"a", "b", "e", "i", "j", "m", "q"}


@pytest.mark.parametrize("extra", [None, "cpu", "gpu", "webgpu", "torch", "zoo", "docs", "optimum", "serve"])
def test_every_dependency_has_a_lower_bound(lowest, extra):
    for text in PROJECT["dependencies"] if extra is None else EXTRAS[extra]:
        assert Version(lowest.lower_bound(Requirement(text))) > Version("0")


def test_both_onnx_runtimes_have_the_same_lower_bound(lowest):
    requirements = [Requirement(text) for extra in ("cpu", "gpu") for text in EXTRAS[extra]]
    bounds = {lowest.lower_bound(item) for item in requirements if item.name.startswith("onnxruntime")}
    assert len(bounds) == 1


# ---------------------------------------------------------------------------------------------- lowest versions

PYPROJECT = """
[project]
dependencies = [
    "one>=1.2",
    "two[extra]>=2,<4,!=2.5",
    "old-windows>=3; sys_platform == 'os2'",
    "here>=4; python_version >= '3.11'",
]
[project.optional-dependencies]
cpu = ["five>=5.0.1"]
dev = ["six>=6"]
"""


def test_constraints_are_the_lower_bounds_for_this_machine(lowest, tmp_path):
    path = tmp_path / "pyproject.toml"
    path.write_text(PYPROJECT)
    requirements = lowest.read_requirements(path)
    assert list(lowest.constraints(requirements)) == ["one==1.2", "two==2", "here==4", "five==5.0.1"]
    assert list(lowest.constraints(lowest.read_requirements(path, ["dev"])))[-1] == "six==6"


@pytest.mark.parametrize("text", ["one", "one<2", "one>1", "one>=1,>=2"])
def test_a_dependency_without_one_lower_bound_is_named(lowest, text):
    with pytest.raises(ValueError, match=r"one.*expected one lower bound"):
        lowest.lower_bound(Requirement(text))


def test_the_script_prints_a_line_for_each_dependency():
    command = [sys.executable, ROOT / ".ci" / "lowest.py"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {canonicalize_name(line.partition("==")[0]) for line in lines} == required_packages(("cpu",))
    assert all(re.fullmatch(r"[A-Za-z_-]+==\d+(\.\d+)*", line) for line in lines)


def test_the_documented_bounds_are_those_of_the_project(lowest):
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Za-z_-]+) \| ([\d.]+) \|", text, re.MULTILINE)
    requirements = lowest.read_requirements(ROOT / "pyproject.toml")
    assert sorted(rows) == sorted((item.name, lowest.lower_bound(item)) for item in requirements)
