"""Segments whose outputs are computed where another process reads them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.machine.ort_sessions import is_foreign_error
from onnxplace.runtimes.execution.host_memory import HostMemory
from onnxplace.runtimes.execution.segments import OpenRoute, OpenSegment
from onnxplace.utils.ort import import_onnxruntime
from onnxplace_hosts.ranks.shared_blocks import MIN_PLACED_BYTES

Allocate = Callable[[Any, Any], Any]
"""Makes arrays as `np.empty` does."""


class PlacedSegment(OpenSegment):
    """A segment of which some outputs are computed in arrays of the caller, where ONNX Runtime knows their shapes."""

    def __init__(self, segment: OpenSegment, placed: Collection[str], allocate: Allocate) -> None:
        vars(self).update(vars(segment))
        self._placed, self._allocate = placed, allocate
        self._makers: tuple[list[Any], dict[str, Callable[[], Any]]] | None = None
        """Shapes of the inputs of the last run, and what makes arrays for its outputs."""

    def run_native(self, inputs: Mapping[str, Any], options: Any) -> Sequence[Any]:
        """Run with arrays; outputs are placed if the inputs have the shapes of the last run."""
        shapes, arrays = [value.shape for value in inputs.values()] if self._placed else [], dict[str, Any]()
        if self._makers is not None and self._makers[0] == shapes:
            arrays = {name: make() for name, make in self._makers[1].items()}
            try:
                run_into(self.session, inputs, arrays, options)
                return list(arrays.values())
            except Exception as problem:  # the run below fails as well, unless an output has another shape
                if is_foreign_error(problem):
                    raise
        outputs = super().run_native(inputs, options)
        if arrays:  # the shapes of outputs depend on more than those of inputs
            self._placed, self._makers = (), None
        elif self._placed:
            self._makers = (
                shapes,
                {
                    name: partial(self._allocate if name in self._placed else np.empty, item.shape, item.dtype)
                    for name, item in zip(self.record.outputs, outputs)
                },
            )
        return outputs


def run_into(session: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any], options: Any) -> None:
    """Run a session on arrays of types that numpy has, and let it compute its outputs in such arrays.

    A binding would do the same in 40 us more. Raises an error of ONNX Runtime if an output has another shape.
    """
    state = import_onnxruntime().capi._pybind_state
    host = state.OrtDevice(state.OrtDevice.cpu(), state.OrtDevice.default_memory(), 0)
    vectors = state.OrtValueVector(), state.OrtValueVector()
    for vector, arrays in zip(vectors, (inputs, outputs)):
        for array in arrays.values():
            vector.push_back(state.OrtValue.ortvalue_from_numpy(array, host))
    session.run_with_ortvaluevector(options, list(inputs), vectors[0], list(outputs), vectors[1], [host] * len(outputs))


def place_segment(segment: OpenSegment, names: Collection[str], allocate: Allocate) -> OpenSegment:
    """Return a segment that computes the outputs of these names in arrays of the caller, as far as it can."""
    # ONNX Runtime leaves an array alone whose output is an input of the model.
    is_computed = set(segment.record.outputs).isdisjoint((*segment.record.inputs, *segment.record.streamed))
    placed = set(names).intersection(segment.record.outputs)
    if placed and segment.is_native and is_computed and type(segment.device.memory) is HostMemory:
        return PlacedSegment(segment, placed, allocate)
    return segment


def place_outputs(bundle: Bundle, routes: Sequence[OpenRoute], allocate: Allocate) -> None:
    """Let large values that other processes read be computed in arrays in memory that these share."""
    manifest, returned = bundle.manifest, {item.name for item in bundle.returned_outputs}
    read = {step.value for program in manifest.programs.values() for step in program if step.op == "send"}
    read |= {item.value for item in manifest.outputs if item.name in returned}
    large = {name for name, item in manifest.values.items() if name in read and item.bytes >= MIN_PLACED_BYTES}
    for route in routes:
        placed = {name: place_segment(segment, large, allocate) for name, segment in route.segments.items()}
        route.segments.update(placed)
