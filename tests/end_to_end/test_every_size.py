"""Bundles of random models with symbols compute the same at every size, whichever they are compiled for."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from pathlib import Path
from random import Random

import pytest

import onnxplace
from tests.passes.sharding.test_random_sharding import EXAMPLES, assert_close, run_sizes
from tests.support.random_placements import RandomPlacement, compiled_with
from tests.support.shardable_models import make_model


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, EXAMPLES or 200, 50))
def test_segments_of_a_model_compute_the_same_at_every_size(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 50):
        random = Random(seed)
        model = make_model(random)
        results = run_sizes(model.proto, model.feeds)
        if not results:
            continue
        placement = RandomPlacement(tuple(random.choices((0, 1, 2), k=7)), tuple(random.choices(range(9), k=5)))
        try:
            bundle = compiled_with(model.proto, placement, tmp_path / str(seed), dimensions=model.dimensions[0])
            with onnxplace.InferenceSession(bundle) as session:
                for feeds, expected in results:
                    assert_close(session.run(None, feeds), expected, model.tolerance)
        except Exception as problem:
            problem.add_note(f"seed {seed}, model {model!r}")
            raise
