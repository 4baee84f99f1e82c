"""Run a session whose inputs and outputs are tensors with ONNX Runtime's I/O binding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def run_bound(
    session: Any, inputs: Mapping[str, Any], outputs: Mapping[str, tuple[str, int]], options: Any
) -> list[Any]:
    """Run a session and return its outputs as OrtValues.

    Args:
        session: of ONNX Runtime.
        inputs: OrtValues by name.
        outputs: type and number of the device of each output, by name.
        options: ONNX Runtime's RunOptions.
    """
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for name, (kind, index) in outputs.items():
        binding.bind_output(name, kind, index)
    session.run_with_iobinding(binding, options)
    return list(binding.get_outputs())
