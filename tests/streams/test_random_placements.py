"""Random models on random devices compute the same bits as one session, whatever the order of enqueued work."""

import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, assume, given, note, settings, strategies as st
from onnx import printer

from onnxplace.runtimes.execution import stream_memory
from tests.support.fake_streams import FakeDriver, use_fake_driver
from tests.support.random_models import random_models, reference
from tests.support.random_placements import assert_same, compiled_with, placements, run_together

NAMES = [
    ("fake:0", "fake:1", "cpu:0", "fake:2"),
    ("fake:0/0", "fake:0/1", "fake:1", "cpu:0"),
    ("cpu:0", "fake:0/0", "cpu:1", "fake:0/1"),
]
drivers = st.builds(FakeDriver, st.integers(0, 1 << 32), st.booleans(), st.sampled_from((0.0, 0.2, 0.6)))


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(random_models(), placements(), st.sampled_from(NAMES), drivers, st.sampled_from((8, 64, 4 << 20)))
def test_random_models_on_random_devices_compute_the_same(model, placement, names, driver, piece_bytes):
    try:
        expected = reference(model.proto, model.feeds)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        assume(False)
    note(printer.to_text(model.proto))
    with tempfile.TemporaryDirectory() as name, use_fake_driver(driver):
        bundle = compiled_with(model.proto, placement, Path(name), dimensions=model.dimensions, names=names)
        with mock.patch.object(stream_memory, "PIECE_BYTES", piece_bytes):
            assert_same(run_together(bundle, model.feeds * 2), expected * 2)
