"""Results of a stream of requests, in order, with a bounded number of them in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import TypeVar

from onnxplace.runtime.interface import Result

Item = TypeVar("Item")
Output = TypeVar("Output")


def stream_results(
    items: Iterable[Item],
    in_flight: int,
    submit: Callable[[Item], Future[Result]],
    cancel: Callable[[Future[Result]], None],
    read: Callable[[Result], Output],
) -> Generator[Output, None, None]:
    """Yield what `read` returns of each item's result, in the order of the items.

    An item is taken when the consumer asks for a result and fewer than `in_flight` requests are in flight. An error,
    of a request or of `items`, is raised after the results before it; then no further item is taken. Requests in flight
    are cancelled when the generator ends, for whatever reason.
    """
    source = iter(items)
    pending: deque[Future[Result]] = deque()
    has_more = True
    try:
        while True:
            while has_more and len(pending) < in_flight:
                try:
                    pending.append(submit(next(source)))
                except StopIteration:
                    has_more = False
                except Exception as problem:  # noqa: BLE001 - raised when its turn comes
                    failed: Future[Result] = Future()
                    failed.set_exception(problem)
                    pending.append(failed)
                    has_more = False
            if not pending:
                return
            result = pending[0].result()
            pending.popleft()
            yield read(result)
            del result  # and its outputs, which only the consumer keeps alive
    finally:
        for future in pending:
            cancel(future)
