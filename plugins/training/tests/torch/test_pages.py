"""The blocks of pages that need PyTorch; tests/site runs the others."""

import pytest

from tests.support.page_setups import run_with_setup, setup

pytest.importorskip("torch")

RUNNER = "plugins/training/tests/torch/test_pages.py"
MODULE = """
import numpy as np
import onnx
import onnxplace
import torch

module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4))
images, labels = torch.ones(32, 4, 4), torch.zeros(32, dtype=torch.int64)
x, y, loss = images, labels, torch.nn.CrossEntropyLoss()
"""
LOADER = """
names = ("input", "target")
loader = [dict(zip(names, (images.numpy(), labels.numpy())))] * 3
"""
DATA = """
import numpy as np

np.savez("data.npz", input=np.ones((96, 4, 4), np.float32), target=np.zeros(96, np.int64))
"""
SETUPS = {
    "docs/models.md": setup(),
    "docs/training.md": setup(
        before=f"python -c '{DATA}'",
        prelude=MODULE + LOADER,
        replaced={"steps=1000": "steps=3", "--steps 1000": "--steps 3", "--steps 2000": "--steps 6"},
    ),
}


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_the_blocks_of_a_page_run(name, store, tmp_path):
    run_with_setup(name, SETUPS[name], store, tmp_path, RUNNER)
