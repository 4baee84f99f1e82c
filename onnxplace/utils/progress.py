"""Progress of long work: the work reports it, and whoever started the work shows it.

Work never knows who listens. An observer listens inside `observe_progress`; without one, reports cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol


class ProgressObserver(Protocol):
    """Hears how far the current step is."""

    def advance(self, share: float) -> None:
        """Take the finished share of the current step, from 0 to 1."""

    def limit(self, seconds: float) -> None:
        """Take the time after which the current step ends at the latest."""


@dataclass(frozen=True)
class _Scope:
    """The part of a step to which reports refer."""

    observer: ProgressObserver
    start: float = 0.0
    width: float = 1.0


_scope: ContextVar[_Scope | None] = ContextVar("progress", default=None)


@contextmanager
def observe_progress(observer: ProgressObserver) -> Iterator[None]:
    """Let an observer hear all reports of this thread in the block."""
    token = _scope.set(_Scope(observer))
    try:
        yield
    finally:
        _scope.reset(token)


def report_progress(done: float, total: float = 1.0) -> None:
    """Report how much of the current step, or of its current part, is done.

    >>> class Printer:
    ...     def advance(self, share: float) -> None:
    ...         print(f"{share:.0%}")
    ...
    ...     def limit(self, seconds: float) -> None:
    ...         print(f"at most {seconds} s")
    >>> with observe_progress(Printer()):
    ...     report_progress(1, 4)
    ...     with progress_part(1, 2):
    ...         report_progress(1, 2)
    25%
    75%
    100%
    """
    if scope := _scope.get():
        share = min(max(done / total, 0.0), 1.0) if total > 0 else 1.0
        scope.observer.advance(scope.start + scope.width * share)


@contextmanager
def progress_part(index: int, count: int) -> Iterator[None]:
    """Let reports in the block refer to one of several equal parts, the first of which is 0; report its end."""
    scope = _scope.get()
    if scope is None:
        yield
        return
    width = scope.width / max(count, 1)
    token = _scope.set(replace(scope, start=scope.start + width * index, width=width))
    try:
        yield
        report_progress(1)
    finally:
        _scope.reset(token)


def report_time_limit(seconds: float) -> None:
    """Report that the current step ends after this time at the latest."""
    scope = _scope.get()
    if scope is not None and scope.width == 1.0:
        scope.observer.limit(seconds)
