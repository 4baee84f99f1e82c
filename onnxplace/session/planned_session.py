"""A session over the plans of a bundle: each request takes the plan that is the fastest at its sizes.

Every plan has a session of its own, which is opened when a request wants it, in the background while an open plan takes
the requests. Their devices share one queue, so that a processor computes for one of them at a time. Requests of
different plans overlap if the memory of the devices holds the values of all plans; else they wait in the order in which
they came.

The states of a conversation are at one plan. A request of another plan takes them along as inputs. They also stay
where they were until that request has succeeded: if it fails, the conversation goes on from there. States move as
skis are bought, by the rule for what one may rent or buy: when the time that was lost by staying reaches that of a
move. Up to one move, that takes at most twice as long as with knowledge of the requests to come (Karlin et al.,
"Competitive snoopy caching", Algorithmica 3, 1988); requests that go to and fro may cost more.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.split_states import COPIED_BYTES_PER_SECOND, SplitStates
from onnxplace.errors import Diagnostic, ExecutionError, FeedError, NoteWarning, OnnxplaceError, RunTimeoutError
from onnxplace.feeds.dimensions import dimensions_of_feeds, drop_derived_sizes
from onnxplace.runtime import interface
from onnxplace.runtime.interface import CopyStatus, Result, Runtime, RuntimeSession, SessionStates
from onnxplace.runtimes.execution.futures import ResultFuture, WaitList
from onnxplace.runtimes.execution.turns import TurnQueue, shared_turns
from onnxplace.runtimes.execution.workers import WorkerThread
from onnxplace.session.plan_choice import SizeSteps, StepTable
from onnxplace.utils.threads import call_guarded, start_thread

Feeds = Mapping[str, Any]
Names = Collection[str]

# More sizes, such as one for each length of a mask, are forgotten.
MAX_KNOWN_SIZES = 4096
# Time at the end of a session for a plan that is being opened.
OPENING_GRACE_SECONDS = 2.0


@dataclass(eq=False, slots=True)
class Ticket:
    """A request on its way to a plan, and through it."""

    timeout: float | None = None
    deadline: float | None = None
    plan: int = -1
    """The plan that it takes; -1 until it is chosen."""
    size: SizeSteps | None = None
    is_alone: bool = True
    """Whether no other request was in flight at any time."""
    moved: Feeds | None = None
    """The states that it takes to another plan, whole; None if it stays at theirs, and after its end."""
    source: int = 0
    """The plan that they are at until it has succeeded."""

    def count_seconds(self) -> float | None:
        """Return the time before the deadline; None without one."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)


class Line:
    """Requests in the order in which they came, each until its end."""

    def __init__(self) -> None:
        self._lock, self._changes = threading.Lock(), WaitList()
        self._tickets: dict[Ticket, None] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def note(self, ticket: Ticket) -> None:
        """Give a request its place, the last one; `leave` has to follow whatever happens."""
        self._tickets[ticket] = None
        if len(self._tickets) > 1:
            for item in list(self._tickets):
                item.is_alone = False

    def join(self, ticket: Ticket, may_begin: Callable[[Sequence[Ticket]], bool]) -> None:
        """Wait until a request may begin, given those before it; `leave` has to follow whatever happens."""
        while True:
            with self._lock:
                self.note(ticket)  # it keeps its place
                if may_begin(list(itertools.takewhile(lambda item: item is not ticket, list(self._tickets)))):
                    return
                wakeup = self._changes.enter()
            if isinstance(threading.current_thread(), WorkerThread):  # which others may need to end
                hint = "start it from another thread, or use run_async, whose callbacks may run the session"
                message = "a callback on a device's worker thread would wait for requests of another plan"
                raise ExecutionError("X006", message, where=threading.current_thread().name, hint=hint)
            seconds = ticket.count_seconds()
            if not wakeup.acquire(timeout=-1 if seconds is None else seconds):
                raise interface.run_timeout_error(ticket.timeout, "it waits for requests of another plan")

    def leave(self, ticket: Ticket) -> None:
        """Note the end of a request, once or more often."""
        self._tickets.pop(ticket, None)
        if self._tickets:
            with self._lock:  # so that none is between its check and its wait
                self._changes.wake()


class OpenPlans:
    """The sessions of the plans of a bundle, those that are open, and what is known of their steps."""

    def __init__(self, bundle: Bundle, open_plan: Callable[[Bundle], RuntimeSession], max_in_flight: int) -> None:
        self._bundles, self._open_plan, self._process = bundle.plans, open_plan, os.getpid()
        manifest, self._where, self._inputs = bundle.manifest, str(bundle.path), bundle.inputs
        self.splits = [SplitStates(item.manifest) for item in self._bundles]
        self.is_split, self.max_in_flight = any(self.splits), max_in_flight
        self.state_names = {item.input for item in manifest.states}
        self.line, self.conversation_numbers = Line(), itertools.count(1)
        self.is_roomy = manifest.plans_overlap
        """Whether requests of all plans may be in flight at once."""
        self._table, self._sizes = StepTable(manifest.sizes), dict[tuple[Any, ...], SizeSteps]()
        values = {item.value for item in manifest.outputs if item.name in {state.output for state in manifest.states}}
        stored = sum(item.bytes for name, item in manifest.values.items() if name in values)
        self.move_seconds = 2 * stored / COPIED_BYTES_PER_SECOND
        """What a move is taken to cost, until one was measured."""
        # Plans that are opened later have the libraries of operators that are in use now.
        self._context, self._lock = copy_context(), threading.Lock()
        self._context.run(shared_turns.set, TurnQueue())
        self.openings: dict[int, threading.Thread] = {}
        self._failures: dict[int, BaseException] = {}
        self.sessions: dict[int, RuntimeSession] = {}
        self.is_ended = False
        """Whether the session is closed, so that plans that are being opened end as soon as they are open."""

    def admit(self, timeout: float | None = None) -> Ticket:
        """Return the ticket of a new request; raises ExecutionError in a forked process."""
        if os.getpid() != self._process:  # before any use of locks, which may be held
            raise interface.forked_session_error(self._process, self._where)
        return Ticket(timeout, None if timeout is None else time.monotonic() + timeout)

    # -- sizes --------------------------------------------------------------------------------------

    def find_size(self, feeds: Feeds) -> SizeSteps:
        """Return what is known of the size of some inputs; raises FeedError if no plan takes it."""
        key = tuple([(name, getattr(value, "shape", None)) for name, value in feeds.items()])
        if (size := self._sizes.get(key)) is not None:
            return size
        sizes: Mapping[str, int] = {}
        with suppress(FeedError):  # inputs that contradict each other are refused by the plan
            sizes = dimensions_of_feeds(feeds, self._inputs)
        steps = self._table.predict(sizes)
        size = SizeSteps([step if self.takes(plan, feeds) else math.inf for plan, step in enumerate(steps)])
        if math.isinf(size.seconds[size.choice]):
            known = [drop_derived_sizes(item.dimensions).items() for item in self._bundles[0].manifest.sizes]
            listed = "; ".join(", ".join(f"{name}={size}" for name, size in items) for items in known)
            shapes = ", ".join(f"{name} {list(shape)}" for name, shape in key if shape is not None)
            message = f"no plan takes the shapes {shapes}; the bundle was compiled for {listed}"
            hint = "feed one of these sizes, or compile for this one too: --shape"
            raise FeedError("F003", message, where=self._where, hint=hint)
        if len(self._sizes) >= MAX_KNOWN_SIZES:
            self._sizes.clear()
        return self._sizes.setdefault(key, size)

    def takes(self, plan: int, feeds: Feeds, moved: Feeds | None = None) -> bool:
        """Return whether the fixed sizes of a plan's inputs are those of feeds and moved states."""
        return self._bundles[plan].takes_sizes(self.convert_feeds(plan, feeds, moved or {}))

    def convert_feeds(self, plan: int, feeds: Feeds, moved: Feeds) -> Feeds:
        """Return feeds of the first plan, and whole states that are not fed, in the parts of a plan."""
        if not self.is_split and not moved:
            return feeds
        return self.splits[plan].cut_feeds({**moved, **self.splits[0].join_feeds(feeds)})

    def list_usable(self, size: SizeSteps, ticket: Ticket) -> list[int]:
        """Return the open plans that take a size; opens its best one, and waits for a plan if there is none."""
        plans = [plan for plan, seconds in enumerate(size.seconds) if seconds < math.inf]
        for plan in (size.choice, *plans):
            if plan not in self.sessions and not self.is_ended:
                self._open_in_background(plan)
            usable = [item for item in plans if item in self.sessions and self.sessions[item].failure is None]
            if usable:
                return usable
            if plan in self.openings:
                self.openings[plan].join(ticket.count_seconds())
                if self.openings[plan].is_alive():
                    raise interface.run_timeout_error(ticket.timeout, f"plan {plan} is being opened")
        opened = [plan for plan in plans if plan in self.sessions]
        if opened or self.is_ended:
            return opened or [0]
        raise self._failures[size.choice]

    # -- opening and closing ------------------------------------------------------------------------

    def open(self, plan: int) -> None:
        """Open a plan."""
        self.sessions[plan] = self._context.copy().run(self._open_plan, self._bundles[plan])
        if self.is_ended:
            self.sessions[plan].abandon()

    def _open_in_background(self, plan: int) -> None:
        with self._lock:
            if plan not in self.openings:
                name = f"onnxplace plan {plan}"
                thread = threading.Thread(target=self._open_later, args=(plan,), name=name, daemon=True)
                start_thread(thread)
                self.openings[plan] = thread

    def _open_later(self, plan: int) -> None:
        try:
            self.open(plan)
        except BaseException as failure:  # noqa: BLE001 - other plans run the requests, or their callers get it
            self._failures[plan] = failure
            if not self.is_ended and getattr(failure, "code", "") != "X006":
                message = f"plan {plan} cannot be opened, and others run its requests: {failure}"
                call_guarded(warnings.warn, NoteWarning(Diagnostic("X018", message, where=self._where)))


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
        self._plans, self._number, self._line = plans, number, Line()
        self._sessions: dict[int, RuntimeSession] = {} if number else plans.sessions
        """Its requests at each plan; those of the session itself are not conversations of the plans."""
        self._plan = 0
        """The plan that has the states."""
        self._is_empty, self._is_protected, self._is_closed = True, False, False
        self._lost_seconds: dict[int, float] = {}
        """What the requests since the last move would have saved at each plan."""
        self._find_session(0)

    def _find_session(self, plan: int) -> RuntimeSession:
        if plan not in self._sessions:
            self._sessions[plan] = self._plans.sessions[plan].open_conversation()
        return self._sessions[plan]

    # -- requests -----------------------------------------------------------------------------------

    def run(self, feeds: Feeds, states: Names = (), timeout: float | None = None) -> Result:
        """Return the result of a request, of the plan that is the fastest at its sizes."""
        ticket = self._plans.admit(timeout)
        try:
            session, feeds, states = self._begin(ticket, feeds, states)
            return self._deliver(ticket, session.run(feeds, states, ticket.count_seconds()))
        except BaseException as problem:
            self._end(ticket, None)
            if isinstance(problem, RunTimeoutError):  # of the plan, which had what was left of the time
                raise interface.run_timeout_error(timeout, problem.message.partition(": ")[2], problem.where) from None
            raise

    def submit(self, feeds: Feeds, states: Names = ()) -> Future[Result]:
        """Start a request; blocks while its states are on their way to another plan."""
        ticket, future = self._plans.admit(), PlannedFuture()
        try:
            session, feeds, states = self._begin(ticket, feeds, states)
            inner = session.submit(feeds, states)
            future.cancel_request = partial(session.cancel, inner)
            inner.add_done_callback(partial(self._finish, ticket, future))
        except BaseException:
            self._end(ticket, None)
            raise
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

    def _begin(self, ticket: Ticket, feeds: Feeds, states: Names) -> tuple[RuntimeSession, Feeds, Names]:
        """Choose the plan of a request; return its session there, and the feeds and states as this one has them."""
        plans = self._plans
        size = ticket.size = plans.find_size(feeds)
        if plans.state_names:
            usable = plans.list_usable(size, ticket)
            self._line.join(ticket, lambda others: self._may_begin(ticket, feeds, usable, others))
            if ticket.plan != self._plan:
                self._take_along(ticket, feeds)
            self._is_empty = False
        else:
            ticket.plan = size.choose()
            if ticket.plan not in plans.sessions or plans.sessions[ticket.plan].failure is not None:
                ticket.plan = min(plans.list_usable(size, ticket), key=size.seconds.__getitem__)
        plans.line.note(ticket)
        # A callback on a worker does not wait for a place: its own worker may have to free one.
        limit = math.inf if isinstance(threading.current_thread(), WorkerThread) else plans.max_in_flight
        if not plans.is_roomy or len(plans.line) > limit:
            plans.line.join(
                ticket,
                lambda others: (
                    len(others) < limit and (plans.is_roomy or all(item.plan == ticket.plan for item in others))
                ),
            )
        names = plans.splits[ticket.plan].expand_names(plans.splits[0].join_names(states)) if states else ()
        return self._find_session(ticket.plan), plans.convert_feeds(ticket.plan, feeds, ticket.moved or {}), names

    def _deliver(self, ticket: Ticket, result: Result) -> Result:
        """End a request; return the result of its plan as the first plan would return it."""
        self._end(ticket, result.seconds)
        outputs, split = result.outputs, self._plans.splits[ticket.plan]
        if not (self._plans.is_split or result.events or ticket.plan):
            return result
        if self._plans.is_split:
            whole = {name: split.find_output(outputs, name) for name in split.join_names(outputs)}
            outputs = self._plans.splits[0].cut_outputs(whole)
        events = tuple([replace(event, conversation=self._number) for event in result.events])
        return Result(outputs, events, result.seconds, ticket.plan)

    def _end(self, ticket: Ticket, seconds: float | None) -> None:
        """Note the end of a request, after `seconds` or by a failure; may be repeated."""
        self._plans.line.leave(ticket)
        if ticket.is_alone and seconds is not None and ticket.size is not None and ticket.moved is None:
            ticket.size.add(ticket.plan, seconds)
        if ticket.moved is not None:
            if self._is_empty and ticket.plan in self._sessions:  # they were reset meanwhile
                self._sessions[ticket.plan].states.reset()
            if seconds is not None:
                self._plan = ticket.plan  # the one step that moves them
            for plan in (ticket.source, ticket.plan):
                if plan != self._plan and plan in self._sessions:
                    self._sessions[plan].states.reset()
            ticket.moved = None
        if self._plans.state_names:
            self._line.leave(ticket)

    # -- the plan of the states -------------------------------------------------------------------------

    def _may_begin(self, ticket: Ticket, feeds: Feeds, usable: Sequence[int], others: Sequence[Ticket]) -> bool:
        """Choose the plan of a request if none before it moves the states; return whether it may begin there."""
        if any(item.plan != self._plan for item in others):
            return False
        if ticket.plan < 0:
            ticket.plan = self._weigh(ticket.size or self._plans.find_size(feeds), feeds, usable)
        return ticket.plan == self._plan or not others

    def _weigh(self, size: SizeSteps, feeds: Feeds, usable: Collection[int]) -> int:
        """Return the plan of the next request: another one if that has saved, or saves now, what a move costs."""
        # A move waits, which a callback on a worker must not do. Protected states also remain as they were before.
        if self._is_closed or self._is_protected or isinstance(threading.current_thread(), WorkerThread):
            return self._plan
        seconds = {plan: size.seconds[plan] for plan in usable if plan != self._plan}
        own = size.seconds[self._plan] if self._plan in usable else math.inf
        lost = {plan: max(self._lost_seconds.get(plan, 0.0) + own - other, 0.0) for plan, other in seconds.items()}
        self._lost_seconds, cost = lost, 0.0 if self._needs_none(feeds) else self._plans.move_seconds
        worth = [plan for plan, other in seconds.items() if other < own and lost[plan] > cost]
        return min(worth, key=seconds.__getitem__, default=self._plan)

    def _needs_none(self, feeds: Feeds) -> bool:
        """Return whether a request with these inputs takes no stored states."""
        return self._is_empty or self._plans.state_names <= feeds.keys()

    def _take_along(self, ticket: Ticket, feeds: Feeds) -> None:
        """Read the states for another plan; the request stays at theirs if it cannot take them along."""
        moved: dict[str, Any] = {}
        if not self._needs_none(feeds):
            start, self._is_empty = time.perf_counter(), False
            try:
                moved = self._plans.splits[self._plan].join_feeds(self._sessions[self._plan].states.read())
            except OnnxplaceError:  # they are lost, or not to be read: the request fails there, or goes on
                ticket.plan = self._plan
                return
            # They are written as long as they are read.
            self._plans.move_seconds = (self._plans.move_seconds + 2 * (time.perf_counter() - start)) / 2
        self._lost_seconds = {}
        if self._plans.takes(ticket.plan, feeds, moved):
            ticket.source, ticket.moved = self._plan, moved
        else:
            ticket.plan = self._plan

    # -- states ---------------------------------------------------------------------------------------

    @property
    def states(self) -> SessionStates:
        """Return the states of this conversation."""
        return self

    def _settle(self) -> RuntimeSession:
        """Return the session that has the states, once no request moves them."""
        ticket = self._plans.admit()
        try:
            self._line.join(ticket, lambda others: all(item.plan == self._plan for item in others))
            self._line.leave(ticket)
        except BaseException:  # also an interrupt at any of these steps
            self._line.leave(ticket)
            raise
        return self._sessions[self._plan]

    def reset(self) -> None:
        """Forget the states before the next request, at all plans."""
        self._is_empty = True
        for session in list(self._sessions.values()):
            session.states.reset()

    def read(self) -> Feeds:
        """Return copies of the stored states, as the first plan has them, after the requests in flight."""
        session, split = self._settle(), self._plans.splits[self._plan]
        return self._plans.splits[0].cut_feeds(split.join_feeds(session.states.read()))

    def protect(self) -> None:
        """Keep the states before each run; from now on they stay at their plan."""
        self._settle().states.protect()
        self._is_protected = True

    def restore(self) -> None:
        """Bring back the protected states before the last run that succeeded."""
        self._settle().states.restore()

    def count_changes(self) -> int:
        """Return how many runs at any plan have changed the states, after those in flight."""
        self._settle()
        return sum(session.states.count_changes() for session in list(self._sessions.values()))

    # -- conversations and the end ----------------------------------------------------------------------

    def open_conversation(self) -> RuntimeSession:
        """Return another conversation over the same plans."""
        return PlannedConversation(self._plans, next(self._plans.conversation_numbers))

    def close(self, timeout: float | None = None) -> None:
        """Wait for this conversation's requests, then free its states; the plans stay open."""
        self._is_closed, ticket = True, Ticket(deadline=None if timeout is None else time.monotonic() + timeout)
        for session in list(self._sessions.values()):
            session.close(ticket.count_seconds())

    def abandon(self) -> None:
        """Let its requests end, whose states are then freed, without waiting for them."""
        self._is_closed = True
        for session in list(self._sessions.values()):
            session.abandon()


class PlannedSession(PlannedConversation):
    """A session over all plans of a bundle, which it opens and closes."""

    def __init__(self, runtime: Runtime, bundle: Bundle, *, trace: bool, max_in_flight: int, warmup: bool) -> None:
        open_plan = partial(interface.open_session, runtime, trace=trace, max_in_flight=max_in_flight)
        plans = OpenPlans(bundle, open_plan, max_in_flight)
        for plan in range(len(bundle.plans) if warmup else 1):
            plans.open(plan)
        super().__init__(plans)

    @property
    def failure(self) -> BaseException | None:
        """Return the error that has ended all open plans; None while one works."""
        failures = [session.failure for session in list(self._sessions.values())]
        return None if None in failures else failures[0]

    def list_copies(self) -> tuple[CopyStatus, ...]:
        """Return each open plan as a copy, if processes of their own run it, which are opened again."""
        return tuple(copy for session in list(self._sessions.values()) for copy in session.list_copies())

    def close(self, timeout: float | None = None) -> None:
        """Wait for running requests, at most `timeout` seconds, then end them and all plans."""
        self._plans.is_ended = True
        super().close(timeout)
        for thread in self._plans.openings.values():
            thread.join(OPENING_GRACE_SECONDS if timeout is None else min(timeout, OPENING_GRACE_SECONDS))

    def abandon(self) -> None:
        """Let all plans end without waiting for them."""
        self._plans.is_ended = True
        super().abandon()
