"""Helpers of the tests that write bundles."""

import sys
from pathlib import Path

SHAPE = {"batch": 4}
DEVICES = "cpu:0,cpu:1"
LINUX = sys.platform.startswith("linux")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
