"""The documentation agrees with the code."""

import ast
import doctest
import importlib
import json
import re
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from onnxplace.cost_graph.cost_graphs import read_cost_graph
from onnxplace_formats.graph_attributes import KNOWN

ROOT = Path(__file__).parents[2]
build_manifest_schema = run_path(str(ROOT / "docs/site/generated.py"))["build_manifest_schema"]
SOURCES = [path for folder in ("onnxplace", "passes", "runtimes") for path in (ROOT / folder).rglob("*.py")]


def test_the_list_of_errors_has_exactly_the_codes_in_the_source():
    plugins = (ROOT / "plugins").glob("*/*/**/*.py")
    used = {
        code
        for path in (*SOURCES, *plugins)
        for code in re.findall(r'"([A-Z]\d{3})"', path.read_text(encoding="utf-8"))
    }
    used |= set(re.findall(r"error\[([A-Z]\d{3})\]", (ROOT / "onnxplace/cli/app.py").read_text(encoding="utf-8")))
    listed = re.findall(r"^\| ([A-Z]\d{3}) \|", (ROOT / "docs/errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == used


def test_every_error_has_a_usual_cause_and_says_what_to_do():
    """Add `- **CODE** usual cause. **Do:** what to do.` to "Causes and fixes" of docs/errors.md."""
    from onnxplace.cli.explain import read_error_pages

    assert [page.code for page in read_error_pages().values() if not (page.cause and page.fix)] == []


def name_module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "onnxplace" else ("onnxplace", *parts)
    return ".".join(part for part in parts if part != "__init__")


EXAMPLES = [name_module(path) for path in SOURCES if ">>>" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_docstrings_show_what_they_do(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return build_manifest_schema()


def test_the_published_schema_matches_the_manifest(schema):
    published = json.loads((ROOT / "docs/manifest.schema.json").read_text(encoding="utf-8"))
    assert published == json.loads(json.dumps(schema))


def test_the_schema_describes_the_fields_of_predictions_and_trial(schema):
    parts = schema["$defs"]
    for name in ("Predicted", "TrialRecord"):
        descriptions = [field.get("description") for field in parts[name]["properties"].values()]
        assert sum(map(bool, descriptions)) > len(descriptions) // 2
    assert parts["TrialRecord"]["properties"]["step_seconds"]["description"] == "Median time of a request."
    assert parts["LinkRecord"]["description"].startswith("A weights file")


def test_links_in_the_documentation_lead_to_files():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "plugins").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_in_the_navigation_of_the_site():
    """An index lists it, such as docs/guides.md, docs/reference.md or docs/results.md."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    listed = {ROOT / "docs" / "index.md"}
    for page in pages:
        links = re.findall(r"^- \[[^\]]+\]\(([^)#]+\.md)\)", page.read_text(encoding="utf-8"), re.MULTILINE)
        listed |= {(page.parent / link).resolve() for link in links}
    missing = [page.relative_to(ROOT).as_posix() for page in pages if page not in listed]
    assert not missing, f"list these pages in an index of the site, such as docs/guides.md: {missing}"


def test_every_benchmark_is_in_the_list():
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `python benchmarks/(\w+)\.py` \|", page, re.MULTILINE))
    assert listed == {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")}


def read_examples(page: str, language: str) -> list[str]:
    """Return the code blocks in one language on a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_cost_graph_in_the_documentation_can_be_placed(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "g.json").write_text(read_examples("cost-graphs.md", "json")[0])
    result = run_cli("place", "g.json", "--placer", "m-etf", "--json")
    assert result.code == 0, result.err
    assert set(json.loads(result.out)["placement"]) == {"0", "1"}


def test_the_digraph_in_the_documentation_is_placed_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(
        compile(read_examples("cost-graphs.md", "python")[0], "docs/cost-graphs.md", "exec"), {"__name__": "documented"}
    )
    assert set(ast.literal_eval(capsys.readouterr().out)) == {"encode", "text", "image"}
    assert read_cost_graph("placed.graphml").device_ids == ("left", "right")


def test_the_attributes_in_the_documentation_are_those_that_are_read():
    page = (ROOT / "docs/cost-graphs.md").read_text(encoding="utf-8").partition("## networkx")[2]
    rows = re.findall(r"^\| (?:a node|an edge|the graph)? ?\| (`.*?) \|", page, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented | {"id_type"} == KNOWN


def test_the_documented_way_to_costs_in_python_works(tmp_path, monkeypatch, model_file, capsys):
    monkeypatch.chdir(model_file.parent)
    code = next(block for block in read_examples("passes.md", "python") if "state, timings" in block)
    namespace: dict[str, object] = {"__name__": "documented"}
    exec(compile(code, "docs/passes.md", "exec"), namespace)
    assert [timing.name for timing in namespace["timings"]] == ["optimize", "profile"]
    assert capsys.readouterr().out.startswith("[")


def test_facts_are_where_the_documentation_says():
    section = (ROOT / "docs/passes.md").read_text(encoding="utf-8").partition("## Facts")[2]
    names = re.findall(r"[A-Z]\w+", section.split("```")[1])
    assert "`onnxplace.facts`, and `Model` from\n`onnxplace.model`" in section
    assert len(names) == len(set(names)) == 9
    for name in names:
        assert hasattr(importlib.import_module("onnxplace.model" if name == "Model" else "onnxplace.facts"), name)


def test_the_example_pass_in_the_documentation_keeps_its_declaration():
    from onnxplace.testing.pass_contract import check_pass

    code = next(block for block in read_examples("passes.md", "python") if "class Cheapest" in block)
    namespace: dict[str, object] = {"__name__": "documented"}
    exec(compile(code, "docs/passes.md", "exec"), namespace)
    check_pass(namespace["Cheapest"])
