"""Run a session whose inputs and outputs are tensors with ONNX Runtime's I/O binding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxplace.ort import import_onnxruntime


def run_bound(
    session: Any, inputs: Mapping[str, Any], outputs: Mapping[str, tuple[str, int]], options: Any
) -> list[Any]:
    """Run a session and return its outputs as OrtValues, each of which keeps nothing else alive.

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
    return [detach_value(value) for value in binding.get_outputs()]


def detach_value(value: Any) -> Any:
    """Return an output of a binding without the binding, which holds all inputs and outputs of its run."""
    runtime = import_onnxruntime()
    vector = runtime.capi._pybind_state.OrtValueVector()
    vector.push_back(value._ortvalue)
    return runtime.OrtValue(vector[0])
