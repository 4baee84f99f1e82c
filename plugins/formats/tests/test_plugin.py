"""Formats are a part of this distribution that is found like a plugin: by its entry points."""

import subprocess
import sys
from importlib.metadata import distribution

import pytest

import onnxplace_formats
from onnxplace import cost_graph
from onnxplace_formats.generators import GENERATORS

# What the help of the commands must not wait for.
HEAVY = ("networkx", "numpy", "onnx", "onnxplace_formats.graphml_format", "onnxplace_formats.triton")


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("export_formats", {"stages", "triton", "ort-genai", "ort-layers", "onnx-metadata"}),
        ("export_options", {"triton", "ort-genai"}),
        ("device_maps", {"ort-layers"}),
        ("passes", {"one-session"}),
        ("commands", {"infer-specs", "memory-stats"}),
        ("graph_formats", {"graphml"}),
        ("graph_functions", {"from_networkx", "to_networkx", "GENERATORS"}),
    ],
)
def test_what_it_adds_are_entry_points_of_onnxplace(group, names):
    points = distribution("onnxplace").entry_points.select(group=f"onnxplace.{group}")
    assert {point.name for point in points if point.module.startswith(onnxplace_formats.__name__)} == names


def test_the_core_has_its_generators_under_the_public_name():
    assert cost_graph.GENERATORS is GENERATORS


def test_help_loads_none_of_its_formats():
    script = f"""
import sys
from onnxplace.cli.app import main
codes = [main(["--help"]), main(["export", "--help"]), main(["place", "--help"])]
print(codes, [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stderr.strip() == "[0, 0, 0] []"
