"""What a training step is fed in its first run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxplace.feeds import Array
from onnxplace.training_step import TrainingStep


def list_training_feeds(
    step: TrainingStep | None, initializers: Mapping[str, TensorProto], folder: Path | None
) -> dict[str, Array]:
    """Return initial states and learning rate, as far as the model has them, and 1 for the number of the step.

    Random numbers would make moments that no optimiser has, such as negative squares, and diverge.
    """
    if step is None:
        return {}
    names = [*(state.input for state in step.list_states()), step.learning_rate]
    base = "" if folder is None else str(folder)
    feeds = {name: numpy_helper.to_array(initializers[name], base) for name in names if name in initializers}
    return {**feeds, step.step: np.array(1, dtype=np.int64)} if step.step else feeds
