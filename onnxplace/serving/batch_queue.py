"""Requests that wait to be joined: which of them make a batch, and when."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onnxplace.runtimes.execution import ResultFuture


@dataclass(frozen=True, eq=False)
class WaitingRequest:
    """A request that may be joined with others."""

    feeds: Mapping[str, Any]
    size: int
    """Size of its own batch."""
    group: Hashable | None
    """Requests of one group can be joined; None for a request that runs alone."""
    arrival: float
    """By the clock of the batcher, in seconds."""
    future: ResultFuture = field(default_factory=ResultFuture)
    start_time: float = field(default_factory=time.perf_counter)


class BatchQueue:
    """The waiting requests by group, each group in the order of arrival. It knows no threads and no clock."""

    def __init__(self, max_batch: int, max_delay_seconds: float) -> None:
        self._max_batch = max_batch
        self._max_delay_seconds = max_delay_seconds
        self._groups: dict[Hashable, deque[WaitingRequest]] = {}

    def add(self, request: WaitingRequest) -> None:
        """Let a request wait."""
        group = request if request.group is None else request.group
        self._groups.setdefault(group, deque()).append(request)

    def remove(self, request: WaitingRequest) -> bool:
        """Forget a request; return whether it was still waiting."""
        group = request if request.group is None else request.group
        waiting = self._groups.get(group, deque())
        if request not in waiting:
            return False
        waiting.remove(request)
        if not waiting:
            del self._groups[group]
        return True

    def take(self, now: float, *, at_once: bool) -> list[WaitingRequest]:
        """Remove and return the next batch; empty if none is due.

        A batch is due if it is full, or its first request has waited long enough, or `at_once` is set because nothing
        else is in flight. Of several, that with the oldest request comes first.
        """
        due = [
            group
            for group, waiting in self._groups.items()
            if at_once or now >= waiting[0].arrival + self._max_delay_seconds or self._is_full(waiting)
        ]
        if not due:
            return []
        group = min(due, key=lambda item: self._groups[item][0].arrival)
        waiting = self._groups[group]
        batch = [waiting.popleft() for _ in range(self._count_joined(waiting))]
        if not waiting:
            del self._groups[group]
        return batch

    def find_deadline(self) -> float | None:
        """Return when the next batch is due if no other request arrives; None without requests."""
        if not self._groups:
            return None
        return min(waiting[0].arrival for waiting in self._groups.values()) + self._max_delay_seconds

    def clear(self) -> list[WaitingRequest]:
        """Remove and return all requests."""
        requests = [request for waiting in self._groups.values() for request in waiting]
        self._groups.clear()
        return requests

    def _count_joined(self, waiting: deque[WaitingRequest]) -> int:
        """Return how many requests of a group fit into one batch, without skipping one; at least one."""
        total = 0
        for count, request in enumerate(waiting):
            total += request.size
            if total > self._max_batch:
                return max(count, 1)
        return len(waiting)

    def _is_full(self, waiting: deque[WaitingRequest]) -> bool:
        """Return whether no later request can join the first batch of a group."""
        count = self._count_joined(waiting)
        size = sum(waiting[index].size for index in range(count))
        return count < len(waiting) or size >= self._max_batch or waiting[0].group is None
