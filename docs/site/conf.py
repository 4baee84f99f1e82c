"""The configuration of the documentation site; `.ci/site` builds it.

The source is the whole checkout, so that relative links mean the same on the site as in the files themselves.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))

project = "onnxplace"
copyright = "the authors of onnxplace, Apache-2.0"  # noqa: A001 - Sphinx reads this name
version = release = re.findall(r'"(\d.+)"', (ROOT / "onnxplace/_version.py").read_text(encoding="utf-8"))[0]

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "examples/**.md", "plugins/*/*.md", "*.md"]
exclude_patterns = [".git", ".venv*", "build", "dist", "onnxplace", "passes", "runtimes", "tests", "benchmarks"]
myst_heading_anchors = 4  # the anchors that code hosting sites give to headings
nitpicky = True
highlight_language = "text"

html_theme = "pydata_sphinx_theme"
html_title = "onnxplace"
html_copy_source = html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system
html_theme_options: dict[str, Any] = {
    "header_links_before_dropdown": 8,
    "show_toc_level": 2,
    "navbar_align": "left",
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}

# The navigation is what these pages list: each link of theirs that begins the text of a list's item.
INDEXES = {
    *("docs/index", "docs/tutorials/README", "docs/guides", "docs/reference", "docs/results", "docs/inside"),
    *("docs/decisions/README", "docs/reference/passes"),
}
ITEM = re.compile(r"^- \[[^\]]+\]\(([^)#]+\.md)\)", re.MULTILINE)


def list_pages(name: str, text: str) -> list[str]:
    """Return the pages that an index lists, by their names from the root of the repository."""
    folder = (ROOT / name).parent
    return [(folder / link).resolve().relative_to(ROOT).as_posix().removesuffix(".md") for link in ITEM.findall(text)]


def complete_page(_: Sphinx, name: str, source: list[str]) -> None:
    """Complete a page: generated parts, links to folders, and the navigation of an index."""
    from generated import replace_marks

    source[0] = replace_marks(source[0])
    folder = (ROOT / name).parent
    for link in sorted(set(re.findall(r"\]\(([^)#:]+)\)", source[0]))):
        if (folder / link / "README.md").is_file():
            source[0] = source[0].replace(f"]({link})", f"]({link}/README.md)")
    if name in INDEXES:
        pages = "\n".join(f"/{page}" for page in list_pages(name, source[0]))
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    """Connect the hook."""
    app.connect("source-read", complete_page)
