"""A thread that draws the next batches while a step runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from onnxplace.errors import FeedError
from onnxplace.utils import start_thread

# How long `close` waits for a loader that is busy with a batch.
_END_SECONDS = 2.0


class Prefetcher:
    """Iterates over a loader in a thread, at most `depth` batches ahead; a context manager.

    A loader that can be iterated again, such as a list or a DataLoader, begins anew at its end if `repeats`. Errors of
    the loader are raised when their turn comes. With a depth of 0 there is no thread.
    """

    def __init__(self, loader: Iterable[Any], depth: int, repeats: bool) -> None:
        self._batches = iterate_batches(loader, repeats)
        # An interrupt can break a Queue, but not a SimpleQueue.
        self._ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        """A token lets the thread draw one more batch."""
        for _ in range(depth):
            self._tokens.put(None)
        self._is_closed = False
        self._thread = threading.Thread(target=self._draw, name="onnxplace batches", daemon=True) if depth else None

    def __enter__(self) -> Prefetcher:
        if self._thread is not None:
            start_thread(self._thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._tokens.put(None)
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._thread is None:
            return next(self._batches)
        batch, problem = self._ready.get()
        self._tokens.put(None)
        if problem is not None:
            self._ready.put((None, problem))  # for a caller that asks once more
            raise problem
        return batch

    def _draw(self) -> None:
        """Draw a batch for each token until there are no more, or nothing needs them."""
        while True:
            self._tokens.get()
            if self._is_closed:
                return
            try:
                self._ready.put((next(self._batches), None))
            except BaseException as problem:  # noqa: BLE001 - raised in the thread that wants the batch
                self._ready.put((None, problem))
                return


def iterate_batches(loader: Iterable[Any], repeats: bool) -> Iterator[Any]:
    """Yield the batches of a loader, again and again if it can be iterated again.

    Raises FeedError for a loader without batches, and for one that is not iterable.
    """
    if not isinstance(loader, Iterable) or isinstance(loader, (dict, str, bytes)):
        message = f"expected an iterable of batches, got {type(loader).__name__}"
        raise FeedError("L046", message, where="train", hint="give a list or a generator of mappings, name -> array")
    while True:
        count = 0
        for batch in loader:
            count += 1
            yield batch
        # `iter(loader)` would start the processes of a DataLoader once more.
        if not repeats or isinstance(loader, Iterator):
            return
        if not count:
            raise FeedError("L046", "the loader has no batches", where="train", hint="check its data and batch size")
