"""Judge a report of pip-audit: `python .ci/audit.py REPORT.json`; exit 1 if it names a vulnerability."""

import json
import sys
from pathlib import Path


def judge(text: str) -> tuple[int, str]:
    """Return the exit code for a report and what to print; a report without any answer is not a failure."""
    try:
        dependencies = json.loads(text)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return 0, "the database of vulnerabilities cannot be reached: packages were NOT audited"
    audited = [item for item in dependencies if "vulns" in item]
    if not audited:
        return 0, f"the database of vulnerabilities knows none of {len(dependencies)} packages: they were NOT audited"
    lines = [f"{len(audited)} of {len(dependencies)} packages audited"]
    for item in audited:
        for found in item["vulns"]:
            fixed = ", ".join(found.get("fix_versions", ())) or "no version yet"
            lines.append(f"{item['name']} {item['version']}: {found['id']}, fixed by {fixed}")
    return (1 if len(lines) > 1 else 0), "\n".join(lines)


if __name__ == "__main__":
    code, message = judge(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(message)
    sys.exit(code)
