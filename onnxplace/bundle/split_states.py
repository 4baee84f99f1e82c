"""Carried states that lie in parts on several devices: cut what callers feed, and join what they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from onnxplace.bundle.manifest import Manifest, SplitStateRecord
from onnxplace.errors import FeedError
from onnxplace.feeds.feeds import Array

# States that move between plans are read and written in the host's memory, each at this rate.
COPIED_BYTES_PER_SECOND = 4e9


class SplitStates:
    """The split states of a bundle, by the names that they have in the original model."""

    def __init__(self, manifest: Manifest) -> None:
        states = manifest.sharding.states if manifest.sharding else ()
        self._by_input = {state.input: state for state in states}
        self._by_output = {state.output: state for state in states}

    def __bool__(self) -> bool:
        return bool(self._by_input)

    def cut_feeds(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return feeds with parts in place of whole states.

        Raises FeedError for a state whose size along the split axis is not that of its parts.
        """
        result: dict[str, Any] = {}
        for name, value in feeds.items():
            state = self._by_input.get(name)
            result.update({name: value} if state is None else zip(state.inputs, _cut(state, np.asarray(value))))
        return result

    def join_feeds(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return feeds with whole states in place of their parts, where all parts are fed."""
        result = dict(feeds)
        for name, state in self._by_input.items():
            if all(part in feeds for part in state.inputs):
                parts = [result.pop(part) for part in state.inputs]
                # A whole state is fed again, parts may be left from the call before.
                result.setdefault(name, _join(state, parts))
        return result

    def align_copies(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return feeds whose parts were drawn one by one, with equal copies of each state that devices hold whole."""
        return self.cut_feeds(self.join_feeds(feeds))

    def expand_names(self, names: Iterable[str]) -> list[str]:
        """Return output names with those of parts in place of whole states."""
        if not (states := self._by_output):
            return list(names)
        return [part for name in names for part in (states[name].outputs if name in states else [name])]

    def join_names(self, names: Iterable[str]) -> list[str]:
        """Return output names with those of whole states in place of their parts."""
        whole = {part: name for name, state in self._by_output.items() for part in state.outputs}
        return list(dict.fromkeys(whole.get(name, name) for name in names))

    def find_outputs(self, outputs: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
        """Return outputs by their names in the original model."""
        return [self.find_output(outputs, name) for name in names] if self._by_output else [*map(outputs.get, names)]

    def find_output(self, outputs: Mapping[str, Any], name: str) -> Any:
        """Return an output by its name in the original model."""
        if name not in self._by_output:
            return outputs.get(name)
        state = self._by_output[name]
        parts = [outputs.get(part) for part in state.outputs]
        return None if any(part is None for part in parts) else _join(state, parts)

    def cut_outputs(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the original model's outputs with parts in place of whole states."""
        result: dict[str, Any] = {}
        for name, value in outputs.items():
            state = self._by_output.get(name)
            result.update({name: value} if state is None else zip(state.outputs, _cut(state, value)))
        return result

    @property
    def whole_names(self) -> Mapping[str, tuple[str, ...]]:
        """Return the inputs of parts by whole state."""
        return {name: state.inputs for name, state in self._by_input.items()}


def _cut(state: SplitStateRecord, array: Array) -> list[Array]:
    """Return the parts of a whole state."""
    if state.axis < 0:
        return [array] * len(state.inputs)
    sizes = state.sizes[:: state.copies]
    size = sum(sizes)
    if array.ndim <= state.axis or array.shape[state.axis] != size:
        message = f"expected {size} elements along axis {state.axis}, got the shape {list(array.shape)}"
        raise FeedError("F003", message, where=f"state {state.input!r}", hint="its axis is split over devices")
    parts = np.split(array, np.cumsum(sizes)[:-1], axis=state.axis)
    return [part for part in parts for _ in range(state.copies)]


def _join(state: SplitStateRecord, parts: Iterable[Any]) -> Any:
    arrays = [np.asarray(part) for part in parts][:: state.copies]
    return arrays[0] if state.axis < 0 else np.concatenate(arrays, axis=state.axis)
