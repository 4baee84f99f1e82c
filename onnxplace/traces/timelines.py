"""Record what requests did: the events of each, on one clock."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from onnxplace.runtime import Event, Result

# Requests that a session keeps for its trace: the last ones.
MAX_TRACED_REQUESTS = 1000


@dataclass(frozen=True)
class RequestTimeline:
    """The events of one request, measured or predicted."""

    number: int
    """Position in the order of submission, from 0."""
    submitted_seconds: float
    """On the clock that all requests share."""
    finish_seconds: float
    """On the same clock: when its result was there."""
    events: tuple[Event, ...]
    """With times since the submission."""
    route: int = 0
    conversation: int = 0
    joined: int = 1
    """Number of callers' requests that ran as this one (`Batching`)."""
    copy: int = 0
    """Index of the copy of the bundle that ran it."""
    tag: str = ""
    """`logid` of the RunOptions of its callers; empty if they gave none."""


@dataclass(frozen=True)
class _Entry:
    """A result, and when its request was submitted by the clock of the caller."""

    called_seconds: float
    result: Result
    tag: str = ""


class TraceRecorder:
    """Keeps the results of the last requests, without their outputs; threads may add to it at the same time."""

    def __init__(self, capacity: int = MAX_TRACED_REQUESTS) -> None:
        self._entries: deque[_Entry] = deque(maxlen=capacity)

    def add(self, called_seconds: float, result: Result, tag: str = "") -> None:
        """Keep the events of a result; `called_seconds` counts if its runtime does not say when it was submitted."""
        self._entries.append(_Entry(called_seconds, Result({}, result.events, result.seconds), tag))

    def add_future(self, called_seconds: float, future: Future[Result], *, tag: str = "") -> None:
        """Keep the events of a future's result, unless the request failed; a callback of the future."""
        if not future.cancelled() and future.exception() is None:
            self.add(called_seconds, future.result(), tag)

    def list_timelines(self) -> tuple[RequestTimeline, ...]:
        """Return the requests in the order of submission.

        Requests that were joined to run as one are one timeline.
        """
        groups: dict[int, list[_Entry]] = {}
        unique = itertools.count(-1, -1)
        for entry in list(self._entries):
            # The parts of a joined request share its events. All empty tuples are one object.
            groups.setdefault(id(entry.result.events) if entry.result.events else next(unique), []).append(entry)
        timelines = sorted(map(_make_timeline, groups.values()), key=lambda item: item.submitted_seconds)
        return tuple(_renumber(timelines))


def _make_timeline(entries: list[_Entry]) -> RequestTimeline:
    first, events = entries[0], entries[0].result.events
    submitted = first.called_seconds
    if events and events[0].submitted_seconds is not None:
        submitted = events[0].submitted_seconds
    finish = submitted + max((event.finish_seconds for event in events), default=0.0)
    if len(entries) == 1:  # the times of joined requests include those before they were joined
        finish = max(finish, submitted + first.result.seconds)
    route, conversation, copy = (events[0].route, events[0].conversation, events[0].copy) if events else (0, 0, 0)
    return RequestTimeline(
        number=0,
        submitted_seconds=submitted,
        finish_seconds=finish,
        events=events,
        route=route,
        conversation=conversation,
        joined=len(entries),
        copy=copy,
        tag=", ".join(dict.fromkeys(entry.tag for entry in entries if entry.tag)),
    )


def _renumber(timelines: Iterable[RequestTimeline]) -> Iterable[RequestTimeline]:
    return (replace(item, number=number) for number, item in enumerate(timelines))
