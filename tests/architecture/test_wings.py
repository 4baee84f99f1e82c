"""The architecture as a test: who may import whom, what stays unloaded, what the registry and the package promise."""

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
from onnxplace.pipeline import find
from onnxplace.pipeline.registry import BUILTIN
from onnxplace.runtime import Runtime
from onnxplace.state import Pass

ROOT = Path(__file__).parents[2]
CORE = {path.stem: path for path in (ROOT / "onnxplace").glob("*.py") if path.stem != "__init__"}
PASSES = {path.stem: path for path in (ROOT / "passes").glob("*.py") if path.stem != "__init__"}
RUNTIMES = {path.stem: path for path in (ROOT / "runtimes").glob("*.py") if path.stem != "__init__"}

# From the bottom up: a module imports only from layers before its own, so that each can be read without what follows.
LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("what everybody needs and what needs nobody", ("errors", "jit", "state", "waiting", "callbacks", "_docstrings")),
    ("loops over plain arrays", ("kernels",)),
    ("names of what is unfinished, and renames at one stroke", ("_leases", "_renames")),
    ("files; work in other processes", ("files", "_children", "_matching")),
    (
        "dimensions that follow from others; what is no ONNX",
        ("_expressions", "_formats", "_schemas"),
    ),
    ("tensors as models hold them", ("_tensors",)),
    (
        "plain data about graphs, machines, inputs and weights",
        ("graph", "target", "feeds", "_weights", "_bound_kernels"),
    ),
    (
        "what this machine has, what was measured on it, and how often to measure; graphs inside nodes; constants",
        ("machine", "cost_cache", "_bodies", "_constants", "patience"),
    ),
    (
        "ONNX models in one shape; what an output comes from; Ctrl-C while ONNX Runtime computes; its refusals",
        ("_canonical", "_lineage", "interrupts", "_refusals"),
    ),
    (
        "the one way to open ONNX Runtime sessions; simulated time and loads on plain data",
        ("sessions", "simulate", "bounds", "_opgraph"),
    ),
    ("what a pipelined step comes to; devices that slow each other down", ("loads", "contention")),
    ("the one door to ONNX", ("model",)),
    (
        "what passes find out about a model; what a runtime is asked whether it knows; what a model hands to itself",
        ("facts", "operators", "_stateful"),
    ),
    ("what a placer has to decide, and the same without ONNX", ("costs", "cost_graph")),
    ("cost graphs drawn from a seed", ("generators",)),
    ("programs on paper", ("_programs",)),
    ("the result on disk", ("bundle",)),
    ("where it goes", ("_output",)),
    ("bundles made of parts of it", ("_parts",)),
    (
        "what runs it, step after step or on paper, and what it is compared with",
        ("runtime", "_steps", "replay", "compare", "_npz"),
    ),
    ("passes by name and by text, without knowing any", ("registry", "spec")),
    ("how to time what a runtime does, and what follows from times", ("_probes", "_timings", "_fits")),
    ("what calibration times", ("_measuring",)),
    ("what this machine's links and devices are like; how a bundle does here", ("calibration", "trial")),
    ("passes in a row", ("pipeline",)),
    ("which placer", ("placers",)),
    ("what people see", ("report",)),
    ("from model to bundle: what is done once it is on disk", ("_settling",)),
    ("from model to bundle: all of it", ("compiling",)),
    ("the Python face, which puts all of it together", ("api", "placing")),
    ("what the parts of a bundle hold on this machine", ("_memory",)),
    ("what devices and links do, and hold, beside predictions", ("_observed",)),
    ("the contract of runtimes, which uses the Python face", ("_runtime_contract",)),
    ("contract tests for plugins", ("testing",)),
    ("what several commands take and print", ("_cli_options",)),
    (
        "the commands, which parse and print",
        ("_cli_bench", "_cli_bundle", "_cli_compile", "_cli_devices", "_cli_place"),
    ),
    ("the command line as a whole", ("cli",)),
    ("`python -m onnxplace`", ("__main__",)),
)
HEIGHT = {name: height for height, (_, names) in enumerate(LAYERS) for name in names}

# A pass works on facts. It does not know in which pipeline it is, who called it, or what runs the result.
CLOSED_TO_PASSES = {
    "registry",
    "spec",
    "pipeline",
    "placers",
    "report",
    "api",
    *("compiling", "_settling"),
    *("_steps", "_runtime_contract", "testing"),
    *("_probes", "_timings", "_fits", "_measuring", "calibration", "trial"),
    *("_memory", "_observed"),
    *("_cli_options", "_cli_bench", "_cli_bundle", "_cli_compile", "_cli_devices", "_cli_place", "cli"),
    "__main__",
    "runtime",
    "runtimes",
}
# A runtime knows the bundle and the machine, and nothing of how the bundle came about.
OPEN_TO_RUNTIMES = {
    *("errors", "feeds", "target", "bundle", "runtime"),
    *("callbacks", "interrupts"),  # what users' functions and Ctrl-C may do to threads
    *("machine", "sessions"),  # to open ONNX Runtime the one way everything does
    *("replay", "simulate"),  # the simulated runtime runs the compiler's own simulator
}
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
)


def imports(path: Path) -> set[str]:
    """Return the modules below `onnxplace` that a file imports, in functions too, unless for type checking only."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            children: list[ast.AST] = list(node.orelse)
        else:
            children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(
                whole if node.module in ("onnxplace", "onnxplace.passes", "onnxplace.runtimes") else [node.module]
            )
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        for child in children:
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return {name.removeprefix("onnxplace.") for name in found if name.startswith("onnxplace.")}


# ---------------------------------------------------------------------------------------------- imports


def test_every_module_of_the_core_has_its_layer():
    assert sorted(set(CORE) - set(HEIGHT)) == []
    assert len(HEIGHT) == sum(len(names) for _, names in LAYERS)


@pytest.mark.parametrize("name", sorted(CORE))
def test_the_core_imports_only_from_layers_below(name):
    for imported in imports(CORE[name]) - {"__version__"}:
        assert imported in HEIGHT, f"{name} imports {imported}, which is no module of the core"
        assert HEIGHT[imported] < HEIGHT[name], f"{name} imports {imported}, which is not below it"


@pytest.mark.parametrize("name", sorted(CORE))
def test_the_core_knows_no_pass_and_no_runtime_but_by_name(name):
    assert not {imported for imported in imports(CORE[name]) if re.match(r"(passes|runtimes)\b", imported)}


@pytest.mark.parametrize("name", sorted(PASSES))
def test_passes_know_facts_and_helpers_but_no_other_pass(name):
    for imported in imports(PASSES[name]):
        top, _, rest = imported.partition(".")
        assert top not in CLOSED_TO_PASSES, f"passes/{name}.py imports {imported}"
        assert top in HEIGHT or (top == "passes" and rest.startswith("_")), f"passes/{name}.py imports {imported}"


@pytest.mark.parametrize("name", sorted(RUNTIMES))
def test_runtimes_know_the_bundle_and_the_machine_only(name):
    for imported in imports(RUNTIMES[name]):
        helper = imported.startswith("runtimes._")
        assert helper or imported in OPEN_TO_RUNTIMES, f"runtimes/{name}.py imports {imported}"


def test_the_walk_through_a_file_sees_every_kind_of_import(tmp_path):
    (tmp_path / "m.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "import onnxplace.one\n"
        "from onnxplace import two\n"
        "from onnxplace.three import x\n"
        "if TYPE_CHECKING:\n    from onnxplace.never import y\n"
        "def f():\n    from onnxplace.passes._four import z\n    class C:\n        import onnxplace.five as five\n"
        "try:\n    from onnxplace.passes import six\nexcept ImportError:\n    pass\n"
    )
    assert imports(tmp_path / "m.py") == {"one", "two", "three", "passes._four", "five", "passes.six"}


def test_only_the_door_to_onnx_and_what_works_on_its_protos_import_onnx():
    """`runtimes`, `cli`, `api`, `pipeline` and the like get by without."""
    users = {
        name
        for name, path in CORE.items()
        if re.search(r"^(import onnx\b|from onnx\b)", path.read_text(), re.MULTILINE)
    }
    allowed = {"model", "_canonical", "_bodies", "_constants", "_schemas", "_tensors", "_weights", "_opgraph"}
    assert users <= allowed | {"_lineage", "operators", "testing"}


# ---------------------------------------------------------------------------------------------- what stays unloaded


def test_importing_the_package_and_asking_for_help_load_nothing_heavy():
    script = f"""
import sys
import onnxplace
after_import = [name for name in {HEAVY!r} if name in sys.modules]
from onnxplace.cli import main
codes = [main(["--help"]), main(["compile", "--help"])]
print(codes, after_import, [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[0, 0] [] []"


def test_commands_that_only_list_and_print_load_nothing_heavy():
    script = f"""
import sys
import onnxplace._cli_options, onnxplace.report
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------------------------------------- what is public


def test_public_names_are_sorted():
    assert onnxplace.__all__ == sorted(onnxplace.__all__)


def test_public_names_resolve_and_are_documented():
    assert len(set(onnxplace.__all__)) == len(onnxplace.__all__)
    for name in onnxplace.__all__:
        assert getattr(onnxplace, name).__module__.startswith("onnxplace.")
        assert inspect.getdoc(getattr(onnxplace, name))


def test_public_names_are_those_a_type_checker_sees():
    tree = ast.parse((ROOT / "onnxplace" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert sorted(seen) == sorted(onnxplace.__all__)
    for name, module in seen.items():
        assert getattr(onnxplace, name) is getattr(import_module(module), name)


def test_dir_lists_the_public_names_and_others_do_not_exist():
    assert dir(onnxplace) == sorted(onnxplace.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = onnxplace.nothing


@pytest.mark.parametrize("folder", ["passes", "runtimes"])
def test_the_folders_refuse_to_be_imported_by_their_own_name(folder, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delitem(sys.modules, folder, raising=False)
    with pytest.raises(ImportError, match=f"onnxplace.{folder}"):
        import_module(folder)


# ---------------------------------------------------------------------------------------------- what the registry says


def test_every_file_of_passes_and_runtimes_is_in_the_registry():
    for kind, files in (("passes", PASSES), ("runtimes", RUNTIMES)):
        named = {path.partition(":")[0].rpartition(".")[2] for path, _ in BUILTIN[kind].values()}
        assert named == {name for name in files if not name.startswith("_")}


@pytest.mark.parametrize("name", BUILTIN["passes"])
def test_a_pass_is_a_frozen_dataclass_named_as_its_file_and_its_entry(name):
    kind = find("passes", name)
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
    kind = find("passes", name)
    module = inspect.getmodule(kind)
    own = [item for item in vars(module).values() if inspect.isclass(item) and item.__module__ == module.__name__]
    assert [item.__name__ for item in own if not item.__name__.startswith("_")] == [kind.__name__]


@pytest.mark.parametrize("name", BUILTIN["passes"])
def test_a_pass_and_each_of_its_options_are_documented_and_optional(name):
    kind = find("passes", name)
    assert kind.__doc__
    assert not kind.__doc__.startswith(f"{kind.__name__}(")  # what dataclass writes when there is none
    step = kind()
    documented = documented_fields(inspect.getsource(kind))
    assert set(documented) == {item.name for item in fields(step)}
    for option, text in documented.items():
        assert text, f"{name}: option {option!r} has no line of documentation"


def documented_fields(source: str) -> dict[str, str]:
    """Return the annotated fields of a class (not its class variables) with the string that follows each."""
    body = ast.parse(source).body[0].body
    found = {}
    for node, following in zip(body, [*body[1:], None]):
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            found[node.target.id] = following.value.value if text else ""
    return found


@pytest.mark.parametrize("name", BUILTIN["passes"])
def test_a_pass_declares_facts(name):
    kind = find("passes", name)
    assert kind.provides
    for fact in (*kind.requires, *kind.provides, *kind.preserves):
        assert isinstance(fact.derived_from, tuple)
        assert callable(fact.check)


@pytest.mark.parametrize("name", BUILTIN["runtimes"])
def test_a_runtime_is_named_as_its_file_and_its_entry(name):
    kind = find("runtimes", name)
    assert issubclass(kind, Runtime)
    assert kind.name == name
    assert kind.summary
    assert kind.__doc__
    assert kind.__module__ == f"onnxplace.runtimes.{name.replace('-', '_')}"


@pytest.mark.parametrize("kind", BUILTIN)
def test_every_entry_has_a_summary_of_one_line(kind):
    for _, summary in BUILTIN[kind].values():
        assert summary
        assert "\n" not in summary
        assert not summary.endswith(".")
