"""The case of docs/cases.md whose copies are counted with ONNX Runtime's WebGPU provider."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_loop_stays_whole_and_its_result_crosses_once():
    command = [sys.executable, str(ROOT / "examples/cases/host_control.py"), "--quick", "--json"]
    tables = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)["tables"]
    page = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
    assert all(f"<!-- host_control: {table['caption']} -->" in page for table in tables)
    copies = [[row["measured"] for row in table["rows"]] for table in tables]
    assert copies == [[17, 1], [3, 1]]  # two for each text and one for the ids, next to the ids alone
