"""What tests of the core share; without the plugin, none of its tests is collected."""

from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec

import pytest

from tests.conftest import (  # noqa: F401 - fixtures
    branches_bytes,
    good_enough,
    model_file,
    no_progress_lines,
    own_cost_cache,
    own_temporary_folder,
    pytest_configure,
    run_cli,
)

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
