"""The blocks of the page on learned placers, which need PyTorch."""

import pytest

from tests.support.page_setups import run_with_setup, setup

pytest.importorskip("torch")

RUNNER = "plugins/onnxplace-learned/tests/test_pages.py"
STUDY = "--family encoder_decoder --count 1 --seeds 1 --episodes 1 --nodes 12 --workers 1"
SETUPS = {
    "docs/learned.md": setup(
        *("graph.json", "fixed/model.onnx"),
        replaced={
            "seconds=2": "seconds=0.1",
            "--steps 1600": "--steps 2",
            "episodes=1600": "episodes=2",
            "episodes=800": "episodes=2",
            "episodes=64": "episodes=2",
            "--seconds 600": "--seconds 1",
            "--seconds 300": "--seconds 5",
            "study traversal": f"study traversal {STUDY}",
        },
    ),
}


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_the_blocks_of_a_page_run(name, store, tmp_path):
    run_with_setup(name, SETUPS[name], store, tmp_path, RUNNER)
