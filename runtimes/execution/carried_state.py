"""Values that one request leaves on its device for the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxplace.bundle import Bundle
from onnxplace.errors import FeedError
from onnxplace.feeds import Array, check_shape


class CarriedStates:
    """What is stored between requests, by state input. Requests take and store in turn, so it needs no lock."""

    def __init__(self, bundle: Bundle) -> None:
        value_of = {item.name: item.value for item in bundle.manifest.outputs}
        self._inputs = {item.name: item for item in bundle.inputs}
        self._needed = [item.name for item in bundle.state_inputs if not item.optional]
        self._stored: dict[str, Any] = {}
        self._lost = False
        self.on: dict[str, dict[str, str]] = {}
        """Device -> state input -> name of the value that is stored for it."""
        for state in bundle.manifest.states:
            self.on.setdefault(state.device, {})[state.input] = value_of[state.output]

    def take(self, feeds: Mapping[str, Array]) -> dict[str, Any]:
        """Hand out what is stored and not fed; nothing is stored any more then, so that it can be freed once read.

        Raises FeedError, and keeps what is stored, if a state has no value or does not fit what is fed.
        """
        missing = [name for name in self._needed if name not in feeds and name not in self._stored]
        if missing:
            lost = ": the request before failed and took it along" if self._lost else ", and none is stored"
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            hint = "feed what to begin with in the first call, such as bundle.zero_states(batch=1, past=0)"
            raise FeedError("S007", f"no value for state input {missing[0]!r}{more}{lost}", hint=hint)
        taken = {name: value for name, value in self._stored.items() if name not in feeds}
        self._require_fit(taken, feeds)
        self._stored = {}
        return taken

    def store(self, values: Mapping[str, Any]) -> None:
        """Keep what a request left."""
        self._stored, self._lost = dict(values), False

    def lose(self) -> None:
        """Note that a request failed that had taken what was stored."""
        self._lost = True

    def clear(self) -> None:
        """Forget everything."""
        self._stored, self._lost = {}, False

    def _require_fit(self, taken: Mapping[str, Any], feeds: Mapping[str, Array]) -> None:
        """Raise FeedError if a stored state contradicts its input, or the size that a fed input gives to a symbol."""
        symbols: dict[str, tuple[int, str]] = {}
        for name, array in feeds.items():
            if self._inputs[name].dtype.startswith("tensor("):
                check_shape(array.shape, self._inputs[name], symbols, f"input {name!r}")
        for name, value in taken.items():
            shape = value.shape() if callable(value.shape) else value.shape
            try:
                check_shape(tuple(shape), self._inputs[name], symbols, f"stored state {name!r}")
            except FeedError as problem:
                hint = "session.reset_state(), then feed what to begin with"
                raise FeedError(problem.code, problem.message, where=problem.where, hint=hint) from None
