"""The models of benchmarks/sizes.py take sizes, and its rows say what is within the limits."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # for what benchmarks share with each other

from benchmarks import sizes


@pytest.mark.parametrize("frames", [1, 2, 101])
def test_the_encoder_of_speech_halves_the_frames(frames):
    model = sizes.build_encoder(layers=1, width=12)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (encoded,) = session.run(None, {"spectrogram": np.ones((2, 80, frames), np.float32)})
    assert encoded.shape == (2, (frames - 1) // 2 + 1, 12)


def test_the_image_network_takes_batches():
    model = sizes.build_resnet()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (classes,) = session.run(None, {"data_0": np.zeros((2, 3, 224, 224), np.float32)})
    assert classes.shape == (2, 1000)


@pytest.mark.parametrize(
    ("overhead", "is_compiled", "within"), [(1.05, True, "yes"), (1.06, True, "no"), (1.06, False, "yes")]
)
def test_sizes_that_were_compiled_for_have_the_stricter_limit(overhead, is_compiled, within):
    row = sizes.make_row("m", "batch=1", "between", {"overhead_alone": overhead}, is_compiled=is_compiled)
    assert row["within"] == within
