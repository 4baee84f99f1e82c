"""The tutorial on training runs as it stands; the others are in tests/site."""

from pathlib import Path

import pytest

from tests.support.tutorials import Surroundings, run_page

pytest.importorskip("torch")


@pytest.mark.slow
def test_the_training_tutorial_runs_as_it_stands(tmp_path):
    assert (
        run_page(
            Path(__file__).parents[4] / "docs/tutorials/training.md", tmp_path, Surroundings({"OMP_NUM_THREADS": "1"})
        )
        > 5
    )
