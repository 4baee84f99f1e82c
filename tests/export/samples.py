"""Feeds of bundles, and their outputs in plain ONNX Runtime."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.measure.step_inputs import choose_step_inputs
from tests.support.random_placements import assert_same


def draw_feeds(bundle: Bundle, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random inputs of a bundle, of the sizes that it was compiled for."""
    return dict(choose_step_inputs(bundle, None, bundle.manifest.dimensions, seed).feeds(0))


def run_file(path: Path, feeds: Mapping[str, Any], keeps_order: bool = False) -> dict[str, Any]:
    """Return the outputs of a model on one core, with all of ONNX Runtime's optimisations."""
    session = open_session(path, make_session_options([0], keeps_order=keeps_order))
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds))))


def assert_same_outputs(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise AssertionError unless all outputs are bitwise equal."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(actual[name], value)


__all__ = ["assert_same_outputs", "draw_feeds", "run_file"]
