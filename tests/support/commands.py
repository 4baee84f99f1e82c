"""Helpers of tests that run commands."""

import json
from pathlib import Path

import click
import numpy as np
import onnx
import pytest

import onnxplace
from onnxplace.cli.app import cli
from onnxplace.plugins import list_entries
from onnxplace.utils.ort import import_onnxruntime
from tests.conftest import FAST_PIPELINE, Ran, branches

SHAPE = ("--shape", "batch=4")
FAST = (*SHAPE, "--pipeline", FAST_PIPELINE)


def load_all_commands() -> dict[str, click.Command]:
    """Return the commands of onnxplace by name, with those of its parts; commands of other plugins are not loaded."""
    parts = [name for name, entry in list_entries("commands").items() if not entry.distribution]
    return cli.commands | {name: cli.get_command(click.Context(cli), name) for name in parts}


def only_json(result: Ran) -> dict:
    """Return the one JSON object on stdout; NaN and Infinity fail the test."""
    assert result.out.startswith("{")
    return json.loads(result.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def node_names(bundle: onnxplace.Bundle) -> dict[str, set[str]]:
    """Return the nodes of each device, from the ONNX files."""
    data: dict[str, set[str]] = {device.id: set() for device in bundle.target.devices}
    for segment in bundle.manifest.segments:
        graph = onnx.load(bundle.file(segment.file), load_external_data=False).graph
        data[segment.device] |= {node.name for node in graph.node}
    return data


def run_unsplit(feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = import_onnxruntime().InferenceSession(branches().SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def compiled_from(run_cli, text: str) -> str:
    """Compile a model for one device and return the path of its bundle."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    Path("other.onnx").write_bytes(model.SerializeToString())
    pipeline = "optimize,profile{estimate=true},m-etf,split,emit"
    assert run_cli("compile", "other.onnx", "--devices", "cpu:0", "--pipeline", pipeline, "-o", "other").code == 0
    return "other"
