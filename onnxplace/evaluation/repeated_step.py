"""One step of a bundle, run again and again for timing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxplace.bundle import Bundle
from onnxplace.runtime import RuntimeSession


class RepeatedStep:
    """The inputs of a step that is repeated.

    States that keep their shapes, such as parameters, are fed to the first step only: feeding copies them, which takes
    as long as much of a training step. States that may grow, such as caches of past tokens, are fed to each step, so
    that all steps take the same time.
    """

    def __init__(self, bundle: Bundle, feeds: Mapping[str, Any]) -> None:
        states = {item.input for item in bundle.manifest.states}
        self._first = feeds
        self._later = {name: value for name, value in feeds.items() if name not in states}
        self._carries = bool(states) and keeps_state_shapes(bundle)
        self._has_run = False

    def prepare(self, session: RuntimeSession) -> Mapping[str, Any]:
        """Return the feeds of the next step of a session, which has run all steps before."""
        if self._carries and self._has_run:
            return self._later
        session.states.reset()  # states that are not fed would go on growing
        self._has_run = True
        return self._first


def keeps_state_shapes(bundle: Bundle) -> bool:
    """Return whether all states have fixed shapes; one symbol on both sides may stand for different sizes."""
    inputs = {item.name: item.shape for item in bundle.inputs}
    outputs = {item.name: item.shape for item in bundle.outputs}
    pairs = [(inputs[item.input], outputs[item.output]) for item in bundle.manifest.states]
    return all(before == after and _is_fixed(before) for before, after in pairs)


def _is_fixed(shape: Sequence[int | str | None] | None) -> bool:
    """Return whether all sizes of a shape are known; a scalar has none to know, an unknown rank is not fixed."""
    return shape is not None and all(isinstance(size, int) for size in shape)
