"""Run all cases and write their tables: python examples/cases/all.py [--quick] [--write] [--only NAME].

Each case runs in a process of its own, one after the other. With `--write`, each table replaces the one between its
marks in docs/cases.md, `<!-- NAME: CAPTION -->` and `<!-- end -->`. Nothing else should run meanwhile. Tables that a
case did not make stay as they are: those of WebGPU come from an environment with that provider.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from _case import Table, format_table, parse_tables, report_progress

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "cases.md"


def list_cases(only: str = "") -> list[str]:
    """Return the names of the cases, or of those that begin so."""
    names = [path.stem for path in sorted(FOLDER.glob("*.py")) if path.stem != "all" and not path.stem.startswith("_")]
    return [name for name in names if name.startswith(only)]


def run(name: str, quick: bool) -> tuple[str, list[Table]]:
    """Run a case; return the machine that it ran on, and its tables."""
    report_progress(f"== {name}")
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", *(["--quick"] if quick else [])]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return str(json.loads(text)["machine"]), parse_tables(text)


def replace_table(page: str, name: str, table: Table) -> str:
    """Return the page with a table in place of the one between its marks."""
    start, end = f"<!-- {name}: {table.caption} -->", "<!-- end -->"
    pattern = re.compile(f"{re.escape(start)}.*?{end}", re.DOTALL)
    text = f"{start}\n{format_table(table)}\n\n{end}"
    replaced, count = pattern.subn(lambda _: text, page)
    if not count:
        raise SystemExit(f"{PAGE.name} has no place for a table: expected the lines {start} and {end}")
    return replaced


def main() -> None:
    """Print the tables, and write them into the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models and few rounds")
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/cases.md")
    parser.add_argument("--only", default="", metavar="NAME", help="cases whose name begins so")
    options = parser.parse_args()
    for name in list_cases(options.only):
        machine, tables = run(name, options.quick)
        print(f"\n## {name}\n\nMeasured on {machine}.")
        for table in tables:
            print(f"\n{format_table(table)}")
            if options.write:
                PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8"), name, table), encoding="utf-8")


if __name__ == "__main__":
    main()
