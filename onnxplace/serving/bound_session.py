"""The states of one conversation, which are on one of several copies of a bundle as long as that lives."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from onnxplace.errors import ExecutionError, FeedError
from onnxplace.feeds import Array
from onnxplace.runtime import Result, RuntimeSession
from onnxplace.serving.copies import Copy, CopySet

_LOST_HINT = "feed saved values, or start from the initial ones: session.reset_state()"


class _Counter:
    """Counts requests; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add_one(self) -> None:
        """Count one more."""
        with self._lock:
            self.count += 1


@dataclass(frozen=True)
class _Binding:
    """The copy of a conversation, its session, and the conversation there, which may be the session itself."""

    copy: Copy
    session: RuntimeSession
    own: RuntimeSession
    changes: _Counter = field(default_factory=_Counter)
    """Requests that have succeeded there, which a copy that has died cannot tell."""


class BoundSession(RuntimeSession):
    """A conversation over several copies: its first request chooses one, and so does the next one after that died.

    States on a copy that dies are lost: a later request has to feed all of them, or follow `reset_state`.

    Args:
        copies: All copies.
        state_names: All state inputs.
        opens_conversation: Whether it has states of its own on its copy; or else those of the copy's session.
        owner: Kept alive.
    """

    def __init__(
        self, copies: CopySet, state_names: Sequence[str], *, opens_conversation: bool, owner: object = None
    ) -> None:
        self._copies, self._state_names = copies, state_names
        self._opens_conversation, self._owner = opens_conversation, owner
        self._lock = threading.RLock()
        self._binding: _Binding | None = None
        self._is_lost = self._protects = self._is_closed = False
        self._earlier_changes = 0
        """Requests that had succeeded on copies that died."""

    # -- requests -----------------------------------------------------------------------------------

    def submit(self, feeds: Mapping[str, Array], states: Collection[str] = ()) -> Future[Result]:
        """Start a request on the copy that has the states; blocks while that has as many in flight as allowed."""
        self._copies.require_own_process()
        token = object()
        binding = self._bind(feeds)
        try:
            self._copies.count(token, binding.copy)
            future = binding.own.submit(feeds, states)
        except BaseException:
            self._copies.release(token)
            raise
        copies = self._copies  # a reference to this session would keep it alive

        def finish(ended: Future[Result]) -> None:
            copies.release(token)
            if ended.exception() is None:
                binding.changes.add_one()
            copies.report(binding.copy, binding.session)

        future.add_done_callback(finish)
        return future

    def run(self, feeds: Mapping[str, Array], states: Collection[str] = (), timeout: float | None = None) -> Result:
        """Return the result of a request on the copy that has the states."""
        self._copies.require_own_process()
        token = object()
        binding = self._bind(feeds)
        try:
            self._copies.count(token, binding.copy)
            result = binding.own.run(feeds, states, timeout)
            binding.changes.add_one()
            return result
        finally:
            self._copies.release(token)
            self._copies.report(binding.copy, binding.session)

    def _bind(self, feeds: Mapping[str, Array] | None = None) -> _Binding:
        """Return the copy that has the states, or choose one for the next request, which has these feeds.

        Raises FeedError if states were lost and are not fed.
        """
        with self._lock:
            if self._is_closed:
                hint = "open another one: session.conversation()"
                raise ExecutionError("X002", "the conversation is closed", where=self._copies.where, hint=hint)
            if (binding := self._find_binding()) is not None:
                return binding
            missing = [name for name in self._state_names if feeds is None or name not in feeds]
            if self._is_lost and missing:
                message = f"no value for state input {missing[0]!r}: the copy of the bundle that had it has died"
                raise FeedError("S007", message, hint=_LOST_HINT)
            copy, session = self._copies.bind(self)
            own = session.open_conversation() if self._opens_conversation else session
            if self._protects:
                own.protect_states()
            self._binding, self._is_lost = _Binding(copy, session, own), False
            return self._binding

    def _find_binding(self) -> _Binding | None:
        """Return the copy that has the states, if it lives; otherwise, they are lost."""
        binding = self._binding
        if binding is None or (binding.session.failure is None and binding.copy.session is binding.session):
            return binding
        if self._copies.closed:
            return binding  # which says so
        self._binding, self._is_lost = None, True
        self._earlier_changes += binding.changes.count
        binding.copy.users.discard(self)
        return None

    def cancel(self, future: Future[Result]) -> None:
        """End a request in flight."""
        if (binding := self._binding) is not None:
            binding.own.cancel(future)

    # -- states -------------------------------------------------------------------------------------

    def reset_state(self) -> None:
        """Forget the states, also those that were lost, before the next request."""
        with self._lock:
            binding, self._is_lost = self._find_binding(), False
        if binding is not None:
            binding.own.reset_state()

    def _require_states(self) -> _Binding | None:
        """Return the copy that has the states, None if there are none; raises FeedError if they are lost."""
        with self._lock:
            binding = self._find_binding()
            if self._is_lost:
                message = "the states are lost: the copy of the bundle that had them has died"
                raise FeedError("S007", message, hint=_LOST_HINT)
            return binding

    def read_states(self) -> Mapping[str, Array]:
        """Return copies of the stored states, by state input, after the requests in flight."""
        binding = self._require_states()
        return {} if binding is None else binding.own.read_states()

    def protect_states(self) -> None:
        """Keep the states before each run, for a failure of it; not for the death of their copy."""
        with self._lock:
            self._protects = True
            if (binding := self._find_binding()) is not None:
                binding.own.protect_states()

    def restore_states(self) -> None:
        """Bring back the protected states before the last run that succeeded."""
        if (binding := self._require_states()) is not None:
            binding.own.restore_states()

    def count_state_changes(self) -> int:
        """Return how many runs have changed the states, after the requests in flight."""
        with self._lock:
            binding = self._find_binding()
        return self._earlier_changes + (0 if binding is None else binding.own.count_state_changes())

    def open_conversation(self) -> RuntimeSession:
        """Return another conversation of the same copies."""
        return BoundSession(self._copies, self._state_names, opens_conversation=True, owner=self._owner)

    # -- the end ------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Wait for the requests of this conversation, then free its states; the copies stay open."""
        self._is_closed = True
        if (binding := self._binding) is not None and self._opens_conversation:
            binding.own.close(timeout)

    def abandon(self) -> None:
        """Let its requests end, whose states are then freed, without waiting for them."""
        self._is_closed = True
        if (binding := self._binding) is not None and self._opens_conversation:
            binding.own.abandon()
