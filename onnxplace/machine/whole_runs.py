"""Run a whole model in one session, on arrays of any type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onnxplace.errors import ModelError, format_names, format_one_line
from onnxplace.machine.interrupts import run_interruptibly
from onnxplace.machine.ort_values import needs_ort_value, to_ort_value, to_python
from onnxplace.machine.sessions import is_foreign_error


def make_runner(session: Any, where: str) -> Callable[[Mapping[str, Any]], list[Any]]:
    """Return a function from feeds to all outputs of a whole model.

    It raises ModelError with ONNX Runtime's message if the model cannot run with these inputs.
    """
    inputs = {item.name: item.type for item in (*session.get_inputs(), *session.get_overridable_initializers())}
    outputs = {item.name: item.type for item in session.get_outputs()}
    needs_values = any(map(needs_ort_value, (*inputs.values(), *outputs.values())))

    def run(feeds: Mapping[str, Any]) -> list[Any]:
        try:
            if not needs_values:
                return list(run_interruptibly(session.run, None, dict(feeds)))
            values = {name: to_ort_value(value, inputs.get(name, "")) for name, value in feeds.items()}
            return [to_python(item) for item in run_interruptibly(session.run_with_ort_values, list(outputs), values)]
        except Exception as problem:
            if is_foreign_error(problem):
                raise
            text = format_one_line(problem)
            message = f"the model cannot be run with these inputs: {text}"
            scalars = [f"{name}={np.ravel(value)[0]}" for name, value in feeds.items() if np.shape(value) in ((), (1,))]
            drawn = f", such as {format_names(scalars, quoted=False)}," if scalars else ""
            hint = f"random inputs{drawn} may not fit this model: give real ones with --inputs, or sizes with --shape"
            raise ModelError("M017", message, where=where, hint=hint) from None

    return run
