"""Without the plugin, none of its tests is collected; with it, each has the same seed."""

from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec

import pytest

try:
    distribution("onnxplace-learned")
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def fixed_seed():
    if find_spec("torch") is not None:
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(1)
