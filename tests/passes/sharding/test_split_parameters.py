"""Parameters and moments of a training step that lie in parts on the devices."""

import numpy as np
import pytest

import onnxplace
from tests.support.training_models import MOMENTS, ReferenceTrainer, draw_batch, make_mlp

# Updates are split, all else is computed on every device from whole parameters.
SPLIT_UPDATES = {".*/update/.*": "split", ".*new": "split", ".*": "whole"}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.slow
def test_a_state_that_another_device_reads_is_sent_by_its_own(tmp_path, devices):
    """A gathered parameter has readers everywhere, but a state stays on one device."""
    model = make_mlp("adamw", widths=(12, 24, 24, 12))
    names = ",".join(f"cpu:{index}" for index in range(devices))
    bundle = onnxplace.compile(
        model, tmp_path / "mlp.bundle", devices=names, shard=devices, shard_map=SPLIT_UPDATES, trial=False
    )
    assert bundle.manifest.sharding is not None
    assert bundle.manifest.sharding.exchanges["all-gather"] == 6  # parameters
    assert {state.input for state in bundle.manifest.sharding.states} >= {
        f"layers.0.weight.{moment}" for moment in MOMENTS["adamw"]
    }
    reference = ReferenceTrainer(model)
    with onnxplace.InferenceSession(bundle) as session:
        for step in range(1, 4):
            feeds = draw_batch(model, step)
            (loss,) = session.run(["loss"], {**feeds, "step": np.array(step), "learning_rate": np.float32(1e-2)})
            assert loss == pytest.approx(reference.step(feeds), rel=1e-5)
