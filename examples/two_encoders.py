"""The `two-encoders` example: two stacks of LSTM layers, such as of audio and video, and a classifier of both."""

from __future__ import annotations

import onnx

from _builder import GraphBuilder, float_value

GATES = 4  # of an LSTM: input, output, forget, cell


def two_encoders(
    seed: int = 0, *, layers: int = 4, hidden: int = 64, steps: int = 1000, features: int = 80, classes: int = 10
) -> onnx.ModelProto:
    """Build two recurrent encoders that meet in one classifier.

    A step in time needs the one before it, so that more cores do not help one encoder; but the encoders can run at the
    same time. Inputs: `audio` and `video` float32 [steps, 1, features]; output: `scores` float32 [1, classes].
    """
    builder = GraphBuilder("two_encoders", seed)
    ends = [_add_encoder(builder, name, layers, hidden, features) for name in ("audio", "video")]
    both = builder.node("Concat", ends, "classifier/both", axis=-1)
    logits = builder.linear(both, 2 * hidden, classes, "classifier/logits")
    builder.node("Softmax", [logits], "scores", axis=-1)
    shape = (steps, 1, features)
    return builder.model(
        [float_value("audio", *shape), float_value("video", *shape)], [float_value("scores", 1, classes)]
    )


def _add_encoder(builder: GraphBuilder, name: str, layers: int, hidden: int, features: int) -> str:
    """Append LSTM layers; return the last hidden state, [1, hidden]."""
    value, width, last = name, features, ""
    for layer in range(layers):
        path = f"{name}/layer_{layer}"
        weights = [
            builder.random(f"{path}/weight", (1, GATES * hidden, width), width**-0.5),
            builder.random(f"{path}/recurrence", (1, GATES * hidden, hidden), hidden**-0.5),
        ]
        outputs = (f"{path}/sequence", f"{path}/last")
        sequence, last = builder.node_with_outputs("LSTM", [value, *weights], outputs, path, hidden_size=hidden)
        value, width = builder.node("Squeeze", [sequence, builder.integers(1)], f"{path}/squeeze"), hidden
    return builder.node("Squeeze", [last, builder.integers(0)], f"{name}/end")
