"""A session over the plans of a bundle: each request takes the plan that is the fastest at its sizes.

Every plan has a session of its own, which is opened when a request wants it, in the background while an open plan takes
the requests. Their devices share one queue, so that a processor computes for one of them at a time. Requests of
different plans overlap where the memory of the devices holds the values of both; else they wait in the order in which
they came.

The states of a conversation are at one plan. A request of another plan takes them along as inputs. They also stay
where they were until that request has succeeded: if it fails, the conversation goes on from there. States move as
skis are bought, by the rule for problems that one may rent or buy: when what was lost by staying reaches what moving
costs. That takes at most twice as long as knowing in advance whether it pays (Karlin et al., "Competitive snoopy
caching", Algorithmica 3, 1988).
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.split_states import SplitStates
from onnxplace.errors import Diagnostic, ExecutionError, FeedError, NoteWarning, OnnxplaceError
from onnxplace.feeds.dimensions import dimensions_of_feeds, drop_derived_sizes
from onnxplace.feeds.feeds import Array
from onnxplace.runtime.interface import (
    CopyStatus,
    Result,
    Runtime,
    RuntimeSession,
    SessionStates,
    open_session,
    run_timeout_error,
)
from onnxplace.runtimes.execution.futures import ResultFuture, WaitList
from onnxplace.runtimes.execution.turns import TurnQueue, shared_turns
from onnxplace.runtimes.execution.workers import WorkerThread
from onnxplace.session.plan_choice import SizeSteps, StepTable
from onnxplace.utils.threads import call_guarded, start_thread

# Until a move was measured, states are taken to be read and written at this rate.
MOVED_BYTES_PER_SECOND = 2e9
# More sizes, such as one for each length of a mask, are forgotten.
MAX_KNOWN_SIZES = 4096
# Time at the end of a session for a plan that is being opened.
OPENING_GRACE_SECONDS = 2.0


@dataclass(eq=False)
class Ticket:
    """A request on its way to a plan, and through it."""

    timeout: float | None = None
    deadline: float | None = None
    plan: int = 0
    size: SizeSteps | None = None
    number: int = 0
    """How many requests had entered before it; -1 if others were in flight."""
    moved: Mapping[str, Any] | None = None
    """The states that it takes to another plan, whole; None if it stays."""

    def count_seconds(self) -> float | None:
        """Return the time before the deadline; None without one."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)

    def wait(self, wakeup: threading.Lock) -> None:
        """Wait for a lock; raises RunTimeoutError at the deadline."""
        if not wakeup.acquire(timeout=-1 if (seconds := self.count_seconds()) is None else seconds):
            raise run_timeout_error(self.timeout, "it waits for requests of another plan")


class Gate:
    """Lets requests in, first come, first served, while the devices hold the values of all plans in flight."""

    def __init__(self, bundles: Iterable[Bundle], max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._values: list[dict[str, int]] = []
        """Bytes of the values of each plan, by device."""
        self._room: dict[str, int] = {}
        """Bytes of each device besides the weights of all plans."""
        for bundle in bundles:
            devices = bundle.manifest.devices
            self._values.append({item.id: item.peak_bytes - item.weights_bytes for item in devices})
            for item in devices:
                self._room[item.id] = self._room.get(item.id, item.limit_bytes) - item.weights_bytes
        self._is_roomy = self._holds(set(range(len(self._values))))
        self._lock, self._changes = threading.Lock(), WaitList()
        self._in_flight: dict[Ticket, None] = {}
        self._waiting: dict[Ticket, None] = {}
        self._entered = 0
        self.is_ended = False
        """Whether nothing waits any more, since the session is closed."""

    def enter(self, ticket: Ticket) -> None:
        """Wait until a request may begin; `leave` has to follow whatever happens."""
        while (wakeup := self._try_enter(ticket)) is not None:
            ticket.wait(wakeup)

    def _try_enter(self, ticket: Ticket) -> threading.Lock | None:
        with self._lock:
            is_first = not self._waiting or next(iter(self._waiting)) is ticket
            has_place = len(self._in_flight) < self._max_in_flight
            plans = {ticket.plan, *(item.plan for item in self._in_flight)}
            # A callback on a worker does not wait: those in flight may need that worker.
            is_urgent = self.is_ended or isinstance(threading.current_thread(), WorkerThread)
            if is_urgent or (is_first and has_place and (self._is_roomy or len(plans) == 1 or self._holds(plans))):
                self._waiting.pop(ticket, None)
                self._entered += 1
                ticket.number = -1 if self._in_flight else self._entered
                self._in_flight[ticket] = None
                self._changes.wake()  # the next one may be first now
                return None
            self._waiting[ticket] = None
            return self._changes.enter()

    def leave(self, ticket: Ticket) -> bool:
        """Note the end of a request, once or more often; return whether it was alone all the time."""
        self._waiting.pop(ticket, None)
        self._in_flight.pop(ticket, None)
        with self._lock:
            self._changes.wake()
        return ticket.number == self._entered

    def _holds(self, plans: Collection[int]) -> bool:
        return all(sum(self._values[plan].get(name, 0) for plan in plans) <= room for name, room in self._room.items())


class OpenPlans:
    """The sessions of the plans of a bundle, those that are open, and what is known of their steps."""

    def __init__(self, runtime: Runtime, bundle: Bundle, trace: bool, max_in_flight: int, warmup: bool) -> None:
        self.bundles, self.process = bundle.plans, os.getpid()
        self.where, self.splits = str(bundle.path), [SplitStates(item.manifest) for item in self.bundles]
        self.state_names = {item.input for item in bundle.manifest.states}
        self.gate = Gate(self.bundles, max_in_flight)
        self.move_seconds = self._predict_move()
        self._table, self._sizes = StepTable(bundle.manifest.sizes), dict[tuple[Any, ...], SizeSteps]()
        self._open_session = partial(open_session, runtime, trace=trace, max_in_flight=max_in_flight)
        self._turns, self._context, self._lock = TurnQueue(), copy_context(), threading.Lock()
        self.conversation_numbers = itertools.count(1)
        self._openings: dict[int, threading.Thread] = {}
        self._failures: dict[int, BaseException] = {}
        self.sessions: dict[int, RuntimeSession] = {}
        try:
            for plan in range(len(self.bundles) if warmup else 1):
                self.sessions[plan] = self._open(plan)
        except BaseException:
            self.abandon()
            raise

    def _predict_move(self) -> float:
        manifest = self.bundles[0].manifest
        values = {item.name: item.value for item in manifest.outputs}
        stored = [manifest.values.get(values[item.output]) for item in manifest.states]
        return sum(item.bytes for item in stored if item is not None) / MOVED_BYTES_PER_SECOND

    # -- sizes --------------------------------------------------------------------------------------

    def find_size(self, feeds: Mapping[str, Any]) -> SizeSteps:
        """Return what is known of the size of some inputs; raises FeedError if no plan takes it."""
        key = tuple([(name, getattr(value, "shape", None)) for name, value in feeds.items()])
        if (size := self._sizes.get(key)) is None:
            sizes: Mapping[str, int] = {}
            with suppress(FeedError):  # inputs that contradict each other are refused by the plan
                sizes = dimensions_of_feeds(feeds, self.bundles[0].inputs)
            steps = self._table.predict(sizes)
            taking = [self.takes(plan, self.convert(plan, feeds)) for plan in range(len(steps))]
            if not any(taking):
                known = [drop_derived_sizes(item.dimensions) for item in self.bundles[0].manifest.sizes]
                listed = "; ".join(", ".join(f"{name}={size}" for name, size in item.items()) for item in known)
                shapes = ", ".join(f"{name}: {list(shape)}" for name, shape in key if shape is not None)
                hint = "feed one of these sizes, or compile for this one too: --shape"
                message = f"no plan takes the shapes {shapes}; the bundle was compiled for {listed}"
                raise FeedError("F003", message, where=self.where, hint=hint)
            size = SizeSteps([step if takes else math.inf for step, takes in zip(steps, taking)])
            if len(self._sizes) >= MAX_KNOWN_SIZES:
                self._sizes.clear()
            self._sizes[key] = size
        return size

    def takes(self, plan: int, feeds: Mapping[str, Any]) -> bool:
        """Return whether the fixed sizes of a plan's inputs are those of the feeds."""
        values = self.bundles[plan].manifest.values
        shapes = [(values[name].shape, getattr(item, "shape", ())) for name, item in feeds.items() if name in values]
        return all(
            declared is None or all(size == entry for entry, size in zip(declared, shape) if isinstance(entry, int))
            for declared, shape in shapes
        )

    def converts(self, plan: int) -> bool:
        """Return whether a plan names states as the first one does not: it has them in other parts."""
        return plan > 0 and bool(self.splits[0] or self.splits[plan])

    def convert(self, plan: int, feeds: Mapping[str, Any], moved: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Return inputs, named as the first plan has them, and whole states, as a plan has them."""
        if not moved and not self.converts(plan):
            return feeds
        return self.splits[plan].cut_feeds({**(moved or {}), **self.splits[0].join_feeds(feeds)})

    def list_usable(self, size: SizeSteps, ticket: Ticket) -> list[int]:
        """Return the open plans that take a size; opens its best one, and waits for a plan if there is none."""
        if self.gate.is_ended:
            return list(self.sessions)
        taking = [plan for plan, seconds in enumerate(size.seconds) if seconds < math.inf]
        if size.choice not in self.sessions:
            self._open_in_background(size.choice)
        while True:
            usable = [plan for plan in taking if plan in self.sessions and self.sessions[plan].failure is None]
            others = [plan for plan in taking if plan not in self.sessions and plan not in self._failures]
            if usable or not others:
                break
            thread = self._open_in_background(others[0])
            thread.join(ticket.count_seconds())
            if thread.is_alive():
                raise run_timeout_error(ticket.timeout, f"plan {others[0] + 1} is being opened", self.where)
        if not usable and (failed := next((item for item in taking if item not in self.sessions), None)) is not None:
            raise self._failures[failed]
        return usable or [plan for plan in taking if plan in self.sessions]

    def add_move(self, seconds: float) -> None:
        """Learn what it takes to move the states of a conversation."""
        self.move_seconds = (self.move_seconds + seconds) / 2

    # -- opening and closing ------------------------------------------------------------------------

    def _open(self, plan: int) -> RuntimeSession:
        def open_plan() -> RuntimeSession:
            shared_turns.set(self._turns)
            return self._open_session(self.bundles[plan])

        # With libraries of operators that were in use when the session was opened.
        return self._context.copy().run(open_plan)

    def _open_in_background(self, plan: int) -> threading.Thread:
        with self._lock:
            is_new = plan not in self._openings
            if is_new:
                name = f"onnxplace plan {plan + 1}"
                self._openings[plan] = threading.Thread(target=self._open_later, args=(plan,), name=name, daemon=True)
        if is_new:
            start_thread(self._openings[plan])
        return self._openings[plan]

    def _open_later(self, plan: int) -> None:
        try:
            session = self._open(plan)
        except BaseException as failure:  # noqa: BLE001 - other plans run the requests, or their callers get it
            self._failures[plan] = failure
            if not self.gate.is_ended and getattr(failure, "code", "") != "X006":
                message = f"plan {plan + 1} cannot be opened, and others run its requests: {failure}"
                call_guarded(warnings.warn, NoteWarning(Diagnostic("X018", message, where=self.where)))
            return
        with self._lock:
            self.sessions[plan] = session
        if self.gate.is_ended:
            session.abandon()

    def close(self, timeout: float | None = None) -> None:
        """Close all plans, also those that are being opened."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self.end_waiting()
        for session in list(self.sessions.values()):
            session.close(None if deadline is None else max(deadline - time.monotonic(), 0))
        for thread in self._openings.values():
            thread.join(OPENING_GRACE_SECONDS if timeout is None else min(timeout, OPENING_GRACE_SECONDS))

    def end_waiting(self) -> None:
        """Let no request wait for another one."""
        self.gate.is_ended = True
        self.gate.leave(Ticket())

    def abandon(self) -> None:
        """Let all plans end without waiting, and those that are being opened at once after that."""
        self.gate.is_ended = True
        for session in list(self.sessions.values()):
            session.abandon()


class PlannedFuture(ResultFuture):
    """The result of a request at one of the plans."""

    cancel_request: Callable[[], object] | None = None
    """Ends the request there, until it has ended."""


class PlannedConversation(RuntimeSession, SessionStates):
    """Requests that share one set of states, which moves between the plans of a bundle; it is also these states.

    Args:
        plans: The plans, which the session closes.
        number: Number of the conversation; 0 for requests outside of conversations.
    """

    def __init__(self, plans: OpenPlans, number: int = 0) -> None:
        self._plans, self._number = plans, number
        self._sessions: dict[int, RuntimeSession] = {}
        """Its requests at each plan; those of the session itself are not conversations of the plans."""
        self._lock, self._changes = threading.Lock(), WaitList()
        self._plan = 0
        """The plan that has the states."""
        self._left: int | None = None
        """The plan that protected states have left with the last request that succeeded, and where they still are."""
        self._is_empty, self._is_protected, self._is_closed = True, False, False
        self._in_flight: dict[Ticket, None] = {}
        self._switch: Ticket | None = None
        """The request that takes the states to another plan, until its end."""
        self._lost_seconds: dict[int, float] = {}
        """What the requests since the last move would have saved at each plan."""
        self._resets, self._undone = 0, 0
        self._find_session(0)

    def _find_session(self, plan: int) -> RuntimeSession:
        if plan not in self._sessions:
            session = self._plans.sessions[plan]
            self._sessions[plan] = session.open_conversation() if self._number else session
            if self._is_protected:
                self._sessions[plan].states.protect()
        return self._sessions[plan]

    # -- requests -----------------------------------------------------------------------------------

    def run(self, feeds: Mapping[str, Array], states: Collection[str] = (), timeout: float | None = None) -> Result:
        """Return the result of a request, of the plan that is the fastest at its sizes."""
        if self._is_forked or isinstance(threading.current_thread(), WorkerThread):  # which is refused
            return self._sessions[self._plan].run(feeds, states, timeout)
        ticket = Ticket(timeout, None if timeout is None else time.monotonic() + timeout)
        try:
            session, feeds, states = self._begin(ticket, feeds, states)
            return self._deliver(ticket, session.run(feeds, states, ticket.count_seconds()))
        except BaseException:
            self._end(ticket, None)
            raise

    def submit(self, feeds: Mapping[str, Array], states: Collection[str] = ()) -> Future[Result]:
        """Start a request; blocks while its states are on their way to another plan."""
        if self._is_forked:
            return self._sessions[self._plan].submit(feeds, states)
        ticket, future = Ticket(), PlannedFuture()
        try:
            session, feeds, states = self._begin(ticket, feeds, states)
            inner = session.submit(feeds, states)
        except BaseException:
            self._end(ticket, None)
            raise
        future.cancel_request = partial(session.cancel, inner)
        inner.add_done_callback(partial(self._finish, ticket, future))
        return future

    def _finish(self, ticket: Ticket, future: PlannedFuture, inner: Future[Result]) -> None:
        """Complete the future of a request; a callback of its future at the plan."""
        result, failure, future.cancel_request = None, inner.exception(0), None
        try:
            if failure is None:
                result = self._deliver(ticket, inner.result(0))
        except Exception as problem:  # noqa: BLE001 - its caller gets it
            failure = problem
        finally:
            if result is None:
                self._end(ticket, None)
            future.finish(result, failure)

    def cancel(self, future: Future[Result]) -> None:
        """End a request whose result is no longer wanted; its states stay at the plan where they were."""
        if isinstance(future, PlannedFuture) and (cancel_request := future.cancel_request) is not None:
            cancel_request()

    def _begin(
        self, ticket: Ticket, feeds: Mapping[str, Array], states: Collection[str]
    ) -> tuple[RuntimeSession, Mapping[str, Any], Collection[str]]:
        """Choose the plan of a request; return its session there, and the feeds and states that this one knows."""
        plans = self._plans
        size = ticket.size = plans.find_size(feeds)
        usable = plans.list_usable(size, ticket)
        if plans.state_names:
            self._take_states(ticket, feeds, usable)
        else:
            plan = size.choose()
            ticket.plan = plan if plan in usable else min(usable, key=size.seconds.__getitem__)
        plans.gate.enter(ticket)
        if plans.converts(ticket.plan):
            states = plans.splits[ticket.plan].expand_names(plans.splits[0].join_names(states))
        return self._find_session(ticket.plan), plans.convert(ticket.plan, feeds, ticket.moved), states

    def _deliver(self, ticket: Ticket, result: Result) -> Result:
        """End a request; return the result of its plan as the first plan would return it."""
        self._end(ticket, result.seconds)
        plan, outputs, events = ticket.plan, result.outputs, result.events
        if self._plans.converts(plan):
            split = self._plans.splits[plan]
            whole = {name: split.find_output(outputs, name) for name in split.join_names(outputs)}
            outputs = self._plans.splits[0].cut_outputs(whole)
        if events:
            events = tuple(replace(event, conversation=self._number) for event in events)
        return Result(outputs, events, result.seconds, plan)

    def _end(self, ticket: Ticket, seconds: float | None) -> None:
        """Note the end of a request, after `seconds` or by a failure; may be repeated."""
        was_alone = self._plans.gate.leave(ticket)
        if was_alone and seconds is not None and ticket.size is not None and ticket.moved is None:
            ticket.size.add(ticket.plan, seconds)
        if not self._plans.state_names:
            return
        with self._lock:
            has_moved = self._switch is ticket
            if has_moved:
                self._switch = None
            if ticket in self._in_flight and seconds is not None:
                left, self._left = self._left, self._plan if has_moved else None
                self._is_empty, self._plan = False, ticket.plan
                if self._left is not None and not self._is_protected:
                    left, self._left = self._left, None
                if left not in (None, self._plan):
                    self._sessions[left].states.reset()
            elif ticket in self._in_flight and has_moved and ticket.plan in self._sessions:
                self._sessions[ticket.plan].states.reset()
            self._in_flight.pop(ticket, None)
            self._changes.wake()

    # -- the plan of the states -------------------------------------------------------------------------

    def _take_states(self, ticket: Ticket, feeds: Mapping[str, Array], usable: Collection[int]) -> None:
        """Choose the plan of a request with states, and read them where they leave another one."""
        # A callback on a worker waits for nothing: what it would wait for may need that worker.
        is_fixed = self._is_closed or isinstance(threading.current_thread(), WorkerThread)
        while True:
            with self._lock:
                if self._switch is None or (is_fixed and self._switch not in self._in_flight):
                    ticket.plan = self._plan if is_fixed else self._weigh(ticket, feeds, usable)
                    if ticket.plan == self._plan:
                        self._in_flight[ticket] = None
                        return
                    self._switch = ticket
                    break
                if is_fixed:
                    hint = "start it from another thread, or use run_async, whose callbacks may run the session"
                    message = "a callback on a device's worker thread started it while states move to another plan"
                    raise ExecutionError("X006", message, where=self._plans.where, hint=hint)
                wakeup = self._changes.enter()
            ticket.wait(wakeup)
        while not self._take_along(ticket, feeds):
            pass

    def _weigh(self, ticket: Ticket, feeds: Mapping[str, Array], usable: Collection[int]) -> int:
        """Return the plan of the next request: another one if that has saved, or saves now, what a move costs."""
        assert ticket.size is not None
        seconds = {plan: ticket.size.seconds[plan] for plan in usable}
        own = seconds.pop(self._plan, math.inf)
        lost = {plan: max(self._lost_seconds.get(plan, 0.0) + own - other, 0.0) for plan, other in seconds.items()}
        self._lost_seconds = lost
        cost = 0.0 if self._needs_none(feeds) else self._plans.move_seconds
        worth = [plan for plan, other in seconds.items() if other < own and lost[plan] > cost]
        return min(worth, key=seconds.__getitem__, default=self._plan)

    def _needs_none(self, feeds: Mapping[str, Array]) -> bool:
        """Return whether a request with these inputs takes no stored states."""
        return self._is_empty or self._plans.state_names <= set(feeds)

    def _take_along(self, ticket: Ticket, feeds: Mapping[str, Array]) -> bool:
        """Read the states for another plan once they are idle; return False if they have changed meanwhile.

        The request stays at their plan if it cannot take them along.
        """
        self._wait_until_idle(ticket)
        resets, moved = self._resets, dict[str, Any]()
        if not self._needs_none(feeds):
            start = time.perf_counter()
            try:
                moved = self._plans.splits[self._plan].join_feeds(self._sessions[self._plan].states.read())
            except OnnxplaceError:  # they are lost, or not to be read: the request goes on there, or hears it there
                ticket.plan = self._plan
            else:  # they are written as long as they are read
                self._plans.add_move(2 * (time.perf_counter() - start))
        if not self._plans.takes(ticket.plan, self._plans.convert(ticket.plan, feeds, moved)):
            ticket.plan = self._plan
        with self._lock:
            if self._in_flight or self._resets != resets:
                return False
            self._in_flight[ticket] = None
            self._lost_seconds = {}
            if ticket.plan != self._plan:
                ticket.moved = moved
            else:
                self._switch = None
                self._changes.wake()
            return True

    def _wait_until_idle(self, ticket: Ticket) -> None:
        """Wait until no request of this conversation is in flight, and none but this one moves its states."""
        while True:
            with self._lock:
                if not self._in_flight and self._switch in (None, ticket):
                    return
                wakeup = self._changes.enter()
            ticket.wait(wakeup)

    # -- states ---------------------------------------------------------------------------------------

    @property
    def states(self) -> SessionStates:
        """Return the states of this conversation."""
        return self

    def reset(self) -> None:
        """Forget the states before the next request, at all plans."""
        with self._lock:
            self._is_empty, self._left = True, None
            self._resets += 1
            for session in self._sessions.values():
                session.states.reset()

    def read(self) -> Mapping[str, Array]:
        """Return copies of the stored states, as the first plan has them, after the requests in flight."""
        self._wait_until_idle(Ticket())
        states = self._sessions[self._plan].states.read()
        return self._plans.splits[0].cut_feeds(self._plans.splits[self._plan].join_feeds(states))

    def protect(self) -> None:
        """Keep the states before each run, also at a plan that they leave."""
        self._is_protected = True
        for session in self._sessions.values():
            session.states.protect()

    def restore(self) -> None:
        """Bring back the states before the last run that succeeded, at the plan where they were."""
        self._wait_until_idle(Ticket())
        session = self._sessions[self._plan]
        if self._left is None:
            session.states.restore()
            return
        with self._lock:
            session.states.reset()
            self._plan, self._left, self._undone = self._left, None, self._undone + 1

    def count_changes(self) -> int:
        """Return how many runs at any plan have changed the states, after those in flight."""
        self._wait_until_idle(Ticket())
        return sum(session.states.count_changes() for session in self._sessions.values()) - self._undone

    # -- conversations and the end ----------------------------------------------------------------------

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._plans.process

    def open_conversation(self) -> RuntimeSession:
        """Return another conversation over the same plans."""
        return PlannedConversation(self._plans, next(self._plans.conversation_numbers))

    def close(self, timeout: float | None = None) -> None:
        """Wait for this conversation's requests, then free its states; the plans stay open."""
        self._is_closed = True
        deadline = None if timeout is None else time.monotonic() + timeout
        for session in list(self._sessions.values()):
            session.close(None if deadline is None else max(deadline - time.monotonic(), 0))

    def abandon(self) -> None:
        """Let its requests end, whose states are then freed, without waiting for them."""
        self._is_closed = True
        for session in list(self._sessions.values()):
            session.abandon()


class PlannedSession(PlannedConversation):
    """A session over all plans of a bundle, which it opens and closes."""

    def __init__(self, runtime: Runtime, bundle: Bundle, trace: bool, max_in_flight: int, warmup: bool) -> None:
        super().__init__(OpenPlans(runtime, bundle, trace, max_in_flight, warmup))

    @property
    def failure(self) -> BaseException | None:
        """Return the error that has ended all open plans; None while one works."""
        failures = [session.failure for session in list(self._plans.sessions.values())]
        return None if None in failures else failures[0]

    def list_copies(self) -> tuple[CopyStatus, ...]:
        """Return each open plan as a copy, if processes of their own run it, which are opened again."""
        return tuple(copy for session in list(self._plans.sessions.values()) for copy in session.list_copies())

    def read_remote_delays(self) -> Mapping[str, int]:
        """Return the nanoseconds for which threads of other processes waited for a core, of all open plans."""
        delays = Counter[str]()
        for session in list(self._plans.sessions.values()):
            delays.update(session.read_remote_delays())
        return delays

    def close(self, timeout: float | None = None) -> None:
        """Wait for running requests, at most `timeout` seconds, then end them and all plans."""
        self._is_closed = True
        self._plans.close(timeout)

    def abandon(self) -> None:
        """Let all plans end without waiting for them."""
        self._is_closed = True
        self._plans.abandon()
