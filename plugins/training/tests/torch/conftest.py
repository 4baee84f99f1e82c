"""These tests need PyTorch, which `.ci/training` installs: without it they are skipped."""

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def fixed_seed():
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(1)
