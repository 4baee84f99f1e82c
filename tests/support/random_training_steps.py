"""Random training steps: layers in any order, values that several layers read, parameters that several layers share."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto

from tests.support.training_models import OPTIMIZERS, StepBuilder

BATCH, WIDTH = 3, 4


def make_random_step(seed: int, *, has_metadata: bool = True) -> ModelProto:
    """Return a training step of 1 to 12 random layers, with the inputs `x` and `target`.

    Every parameter has an effect on the loss.
    """
    random = np.random.default_rng(seed)
    builder = StepBuilder("random", has_metadata)
    x, target = builder.input("x", BATCH, WIDTH), builder.input("target", BATCH, WIDTH)
    values, unread = [x], {x}

    def pick() -> str:
        value = values[int(random.integers(max(0, len(values) - 4), len(values)))]
        unread.discard(value)
        return value

    def choose_parameter(kind: str, *shape: int) -> str:
        existing = [name for name in builder.parameters if name.endswith(kind)]
        if existing and random.random() < 0.3:
            return str(random.choice(existing))
        return builder.parameter(f"{builder.module}.{kind}", random.normal(size=shape) / 2)

    for index in range(int(random.integers(1, 13))):
        builder.module = f"layers.{index}"
        kind = (
            "linear" if index == 0 else random.choice(["linear", "linear", "add", "tanh", "relu", "softmax", "scale"])
        )
        if kind == "linear":
            result = builder.matmul(pick(), choose_parameter("weight", WIDTH, WIDTH))
            result = builder.add(result, choose_parameter("bias", WIDTH)) if random.random() < 0.5 else result
        elif kind == "add":
            result = builder.add(pick(), pick())
        elif kind == "scale":
            result = builder.scale(pick(), 0.5)
        else:
            result = getattr(builder, str(kind))(pick())
        values.append(result)
        unread.add(result)
    builder.module = "loss"
    ends = [value for value in values[1:] if value in unread]
    result = ends[0]
    for end in ends[1:]:
        result = builder.add(result, end)
    loss = builder.squared_error(result, target)
    return builder.finish(loss, OPTIMIZERS[int(random.integers(len(OPTIMIZERS)))], result, ["x"])
