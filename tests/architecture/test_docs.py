"""What docs/ says is what the code does."""

import json
import re
from pathlib import Path

from onnxplace.bundle import json_schema

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("onnxplace", "passes", "runtimes") for path in (ROOT / folder).rglob("*.py")]


def test_every_code_in_the_source_is_in_the_list_of_errors_and_the_other_way_round():
    used = {code for path in SOURCES for code in re.findall(r'"([A-Z]\d{3})"', path.read_text(encoding="utf-8"))}
    used |= set(re.findall(r"error\[([A-Z]\d{3})\]", (ROOT / "onnxplace/cli/app.py").read_text(encoding="utf-8")))
    listed = re.findall(r"^\| ([A-Z]\d{3}) \|", (ROOT / "docs/errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == used


def test_the_published_schema_is_that_of_the_manifest():
    published = json.loads((ROOT / "docs/manifest.schema.json").read_text(encoding="utf-8"))
    assert published == json.loads(json.dumps(json_schema()))


def test_the_schema_says_what_the_fields_of_the_predictions_and_the_trial_are():
    parts = json_schema()["$defs"]
    for name in ("Predicted", "TrialRecord"):
        told = [field.get("description") for field in parts[name]["properties"].values()]
        assert sum(map(bool, told)) > len(told) // 2
    assert parts["TrialRecord"]["properties"]["step_seconds"]["description"] == "Median time of a request."
    assert parts["LinkRecord"]["description"].startswith("A weights file")


def test_links_in_the_documentation_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def blocks(page: str, language: str) -> list[str]:
    """Return the examples in one language on a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_cost_graph_in_the_documentation_can_be_placed(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "g.json").write_text(blocks("cost-graphs.md", "json")[0])
    ran = run_cli("place", "g.json", "--placer", "m-etf", "--json")
    assert ran.code == 0, ran.err
    assert set(json.loads(ran.out)["placement"]) == {"0", "1"}


def test_the_way_to_costs_in_python_in_the_documentation_leads_there(tmp_path, monkeypatch, model_file, capsys):
    monkeypatch.chdir(model_file.parent)
    code = next(block for block in blocks("passes.md", "python") if "state, timings" in block)
    space: dict[str, object] = {"__name__": "documented"}
    exec(compile(code, "docs/passes.md", "exec"), space)
    assert [timing.name for timing in space["timings"]] == ["optimize", "profile"]
    assert capsys.readouterr().out.startswith("[")


def test_the_example_pass_in_the_documentation_keeps_its_word():
    from onnxplace.testing import check_pass

    code = next(block for block in blocks("passes.md", "python") if "class Cheapest" in block)
    space: dict[str, object] = {"__name__": "documented"}
    exec(compile(code, "docs/passes.md", "exec"), space)
    check_pass(space["Cheapest"])
