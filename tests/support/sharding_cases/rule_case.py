"""The record of a model of one operator, as text, with the splits that its rule gives."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RuleCase:
    """A model and its splits."""

    text: str
    """Inputs, outputs and nodes, without the header."""
    splits: str = ""
    """Of two devices: axes of inputs and outputs, `.` for whole, `+` for summands, `-` for omitted; by commas."""
    opset: int = 21
    feeds: dict[str, Any] = field(default_factory=dict)
    """Inputs that may not be random."""
    returns_all: bool = False
    """All values are returned: ONNX Runtime's kernel adds to the memory of its result, which is zero only if new."""


def i64(*values: int) -> Any:
    return np.array(values, np.int64)


def i32(values: Any) -> Any:
    return np.array(values, np.int32)
