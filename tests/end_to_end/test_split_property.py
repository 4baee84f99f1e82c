"""A split model computes the same as the model: random models, random placements."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, assume, given, note, settings, strategies as st
from onnx import printer

from onnxplace.bundle.bundle import WHOLE_MODEL_FILE
from onnxplace.machine.ort_sessions import Level
from tests.support.random_models import RandomModel, random_models, reference, run_plain
from tests.support.random_placements import RandomPlacement, assert_same, compiled_with, placements, run_together

EXAMPLES = int(os.environ.get("ONNXPLACE_EXAMPLES", "0"))
"""Number of models; unless it is set, they are always the same."""


# Segments run as users run them, at level "all", or at "none"; the model is never optimised. Either way the bits must
# be equal, because tests/support/random_models.py draws no operation that rounds: no fusion can change a result.
@settings(
    max_examples=EXAMPLES or 400,
    deadline=None,
    derandomize=not EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(random_models(), placements(), st.booleans(), st.booleans(), st.sampled_from(("all", "none")))
def test_a_bundle_computes_the_same_as_its_model_in_every_split(
    model: RandomModel, placement: RandomPlacement, optimized: bool, fused: bool, level: Level
) -> None:
    try:
        expected = reference(model.proto, model.feeds)
        reference(model.proto, (), level)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        assume(False)
    note(printer.to_text(model.proto))
    with tempfile.TemporaryDirectory() as name:
        bundle = compiled_with(
            model.proto,
            placement,
            Path(name),
            optimized=optimized,
            fused=fused,
            dimensions=model.dimensions,
        )
        assert_same(run_plain(bundle.file(WHOLE_MODEL_FILE), model.feeds), expected)
        assert_same(run_together(bundle, model.feeds, level), expected)
