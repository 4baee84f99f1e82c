"""Commands with a device that does not take every node, by a cost file: plan, compile, inspect and reports."""

import json
from pathlib import Path

import onnx
import pytest

from onnxplace.bundle.bundle import Bundle
from tests.passes.placement.test_refused import model
from tests.support.commands import only_json

TARGET = """
[[devices]]
id = "cpu:0"
memory_bytes = 8000000000
[[devices]]
id = "cuda:0"
memory_bytes = 8000000000
model = "Tiny"
"""


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a model, a target of a CPU and a fast GPU, and costs by which the GPU does not take `erf`."""
    monkeypatch.chdir(tmp_path)
    onnx.save(model(), "model.onnx")
    Path("target.toml").write_text(TARGET)
    seconds = {
        name: {"cpu/1": 0.1, "cuda/Tiny": "refused" if name == "erf" else 0.001} for name in ("product", "relu", "last")
    } | {"erf": {"cpu/1": 0.01, "cuda/Tiny": "refused"}}
    nodes = {name: {"seconds": times} for name, times in seconds.items()}
    Path("costs.json").write_text(json.dumps({"format": "onnxplace-costs", "version": 1, "nodes": nodes}))
    return tmp_path


GIVEN = ("--target", "target.toml", "--costs", "costs.json")


def test_a_bundle_is_cut_around_what_a_device_refuses(run_cli, setup):
    data = only_json(run_cli("compile", "model.onnx", *GIVEN, "--json"))
    manifest = Bundle.open(data["bundle"]).manifest
    assert [(segment.device, segment.nodes) for segment in manifest.segments] == [
        ("cuda:0", 1),
        ("cpu:0", 1),
        ("cuda:0", 2),
    ]
    assert manifest.predicted.single_device_seconds == pytest.approx(0.31, rel=0.01)
    assert '"refused"' in Path(data["bundle"], "costs.json").read_text()
    report = run_cli("report", data["bundle"], "-o", "report.html")
    assert report.code == 0
    assert "1000000000" not in Path("report.html").read_text() + str(data)


def test_a_device_that_refuses_a_node_alone_is_a_strategy_with_a_reason(run_cli, setup):
    Path("target.toml").write_text(TARGET[TARGET.index("[[devices]]", 20) :])
    result = run_cli("plan", "model.onnx", *GIVEN)
    assert result.code == 3
    assert "one device: cuda:0 does not take Erf 'erf'" in result.out


def test_a_device_without_another_one_for_a_node_is_infeasible(run_cli, setup):
    Path("target.toml").write_text(TARGET[TARGET.index("[[devices]]", 20) :])
    result = run_cli("compile", "model.onnx", *GIVEN)
    assert result.code == 3
    message, hint = result.err.splitlines()
    assert message.startswith("error[P004]")
    assert message.endswith("cuda:0 does not take Erf 'erf'")
    assert hint == (
        "  hint: add cpu:0 to the devices, or let sessions of the device run it on the host: cuda:0{fallback=true}"
    )


def test_without_a_device_that_takes_every_node_no_time_of_one_is_shown(run_cli, setup):
    data = json.loads(Path("costs.json").read_text())
    data["nodes"]["last"]["seconds"]["cpu/1"] = "refused"
    Path("costs.json").write_text(json.dumps(data))
    result = run_cli("compile", "model.onnx", *GIVEN, "-o", "out")
    assert result.code == 0
    assert "no single device takes all nodes" in result.out
    run_cli("report", "out", "-o", "report.html")
    assert "refused" in Path("report.html").read_text()
