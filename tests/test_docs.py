"""What docs/ says is what the code does."""

import json
import re
from pathlib import Path

from onnxplace.bundle import json_schema

ROOT = Path(__file__).parents[1]
SOURCES = [path for folder in ("onnxplace", "passes", "runtimes") for path in (ROOT / folder).glob("*.py")]


def test_every_code_in_the_source_is_in_the_list_of_errors_and_the_other_way_round():
    used = {code for path in SOURCES for code in re.findall(r'"([A-Z]\d{3})"', path.read_text(encoding="utf-8"))}
    used |= set(re.findall(r"error\[([A-Z]\d{3})\]", (ROOT / "onnxplace/cli.py").read_text(encoding="utf-8")))
    listed = re.findall(r"^\| ([A-Z]\d{3}) \|", (ROOT / "docs/errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == used


def test_the_published_schema_is_that_of_the_manifest():
    published = json.loads((ROOT / "docs/manifest.schema.json").read_text(encoding="utf-8"))
    assert published == json.loads(json.dumps(json_schema()))


def test_links_in_the_documentation_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_example_pass_in_the_documentation_keeps_its_word():
    from onnxplace.testing import check_pass

    text = (ROOT / "docs/passes.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    space: dict[str, object] = {"__name__": "documented"}
    exec(compile(code, "docs/passes.md", "exec"), space)
    check_pass(space["Cheapest"])
