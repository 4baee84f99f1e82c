"""Tests on an NPU: that of `onnxruntime-qnn`, whose library for x86-64 simulates one; `.ci/npu` installs it."""

import importlib.util
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("onnxruntime_qnn") else ["*"]


def pytest_collection_modifyitems(items):
    """Let the host compute sizes and segments that the simulator refuses: tests that care ask for the note."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore::onnxplace.errors.NoteWarning"))
