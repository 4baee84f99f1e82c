"""Carried states: values that one request leaves on its device for the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from onnxplace.bundle import Bundle
from onnxplace.errors import FeedError
from onnxplace.feeds import Array, check_shape

if TYPE_CHECKING:
    from onnxplace.runtimes.execution.routes import OpenRoute


class StateTable:
    """What a bundle says about its states; all conversations share it."""

    def __init__(self, bundle: Bundle) -> None:
        value_of = {item.name: item.value for item in bundle.manifest.outputs}
        self.inputs = {item.name: item for item in bundle.inputs}
        self._bundle = bundle
        self._initial = {item.input: item for item in bundle.manifest.states if item.initial}
        self.states = [item.name for item in bundle.state_inputs]
        self.required = [item.name for item in bundle.state_inputs if not item.optional]
        """State inputs without a default."""
        self.value_names: dict[str, dict[str, str]] = {}
        """Device -> state input -> name of the stored value."""
        for state in bundle.manifest.states:
            self.value_names.setdefault(state.device, {})[state.input] = value_of[state.output]

    def add_initial_values(
        self, names: Collection[str], values: dict[str, Any], feed: Callable[[Array, str], Any]
    ) -> None:
        """Add the initial values of states that are neither fed nor stored, as `feed` brings them to the device.

        They are mapped anew each time, so that no memory is taken for them later.
        """
        for name in names:
            if name in self._initial and name not in values:
                array = self._bundle.read_initial_state(self._initial[name])
                values[name] = feed(array, self.inputs[name].dtype)


class CarriedStates:
    """The states of one conversation, stored between its requests, by state input.

    Its requests take and store them in turn, under the lock of the engine.
    """

    def __init__(self, table: StateTable, number: int = 0) -> None:
        self._table = table
        self.number = number
        """Of the conversation; 0 for requests outside of conversations."""
        self._stored: dict[str, Any] = {}
        self._previous: dict[str, Any] = {}
        self._lost = False
        self.keeps_previous = False
        """Whether the states that the last request has taken are kept, for a failure, or for `restore`."""
        self.change_count = 0
        """Number of requests that have stored states, without those that were undone."""
        self.reset_pending = False
        """Whether the next request starts without states."""
        self.closed = False
        """Whether no further request may begin, and the last one frees the states."""
        self.route: OpenRoute | None = None
        """The route of its first request: the states are on the devices of that route."""

    def take(self, feeds: Mapping[str, Array]) -> dict[str, Any]:
        """Remove and return the stored states that are not fed, so that they can be freed after their last use.

        Raises FeedError, and keeps the stored states, if a state has no value or does not fit the feeds.
        """
        # After a failure, a default would start anew what the user believes to continue.
        needed = self._table.states if self._lost else self._table.required
        missing = [name for name in needed if name not in feeds and name not in self._stored]
        if missing:
            reason = ": the previous request failed and lost it" if self._lost else ", and none is stored"
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            hint = "feed initial values in the first call, such as bundle.zero_states(batch=1, past=0)"
            if len(self._table.required) < len(self._table.states) and self._lost:
                hint = "feed saved values, or start from the initial ones: session.reset_state()"
            raise FeedError("S007", f"no value for state input {missing[0]!r}{more}{reason}", hint=hint)
        taken = {name: value for name, value in self._stored.items() if name not in feeds}
        self._require_fit(taken, feeds)
        if self.keeps_previous:
            self._previous = self._stored
        self._stored = {}
        return taken

    def store(self, values: Mapping[str, Any]) -> None:
        """Store the states after a request."""
        self._stored, self._lost = dict(values), False
        self.change_count += 1

    def restore(self) -> None:
        """Bring back the states before the last request, which has stored its own."""
        self._stored, self._previous = self._previous, {}
        self.change_count -= 1

    def lose(self) -> None:
        """Note that a request failed that had taken the stored states; bring them back if they were kept."""
        self._stored, self._previous = self._previous, {}
        self._lost = not self.keeps_previous

    def clear(self) -> None:
        """Discard all states."""
        self._stored, self._previous, self._lost = {}, {}, False

    def peek(self) -> dict[str, Any]:
        """Return the stored states, which stay here.

        Raises FeedError if they are lost.
        """
        if self._lost:
            hint = "feed saved values, or start from the initial ones: session.reset_state()"
            raise FeedError("S007", "the states are lost: the previous request failed", hint=hint)
        return dict(self._stored)

    def _require_fit(self, taken: Mapping[str, Any], feeds: Mapping[str, Array]) -> None:
        """Raise FeedError if a stored state contradicts its input, or symbol sizes of the feeds."""
        symbols: dict[str, tuple[int, str]] = {}
        for name, array in feeds.items():
            if self._table.inputs[name].dtype.startswith("tensor("):
                check_shape(array.shape, self._table.inputs[name], symbols, f"input {name!r}")
        for name, value in taken.items():
            shape = value.shape() if callable(value.shape) else value.shape
            try:
                check_shape(tuple(shape), self._table.inputs[name], symbols, f"stored state {name!r}")
            except FeedError as problem:
                hint = "call session.reset_state(), then feed initial values"
                raise FeedError(problem.code, problem.message, where=problem.where, hint=hint) from None
