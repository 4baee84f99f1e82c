"""Batches: drawn from arrays in an order that the seed determines, and drawn ahead while a step runs."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import FeedError, UsageError, suggest_nearest
from onnxplace.feeds.feeds import Array, Declared, describe_input
from onnxplace.feeds.npz import read_npz
from onnxplace.utils.files import format_path
from onnxplace.utils.threads import start_thread


class BatchSampler:
    """Draws the batch of any step from the arrays of a file, whose rows are their first axis.

    Each epoch goes through all rows in another order; rows that do not fill a batch are left out of it. The order
    depends on the seed only, so that a resumed run continues with the batches that would have followed.

    Args:
        bundle: The bundle of a training step.
        path: An .npz file with an array for each input of a batch.
        batch: Rows of a batch; 0 for the number that the bundle was compiled for.
        seed: Seed of the order.

    Raises:
        FeedError: the file lacks an input, its arrays have different numbers of rows, or fewer than a batch.
        UsageError: the model takes another number of rows.
    """

    def __init__(self, bundle: Bundle, path: Path, batch: int = 0, seed: int = 0) -> None:
        self._arrays = _read_rows(bundle, path)
        inputs = {item.name: item for item in bundle.inputs}
        rowed = [inputs[name] for name, array in self._arrays.items() if array.ndim]
        self.rows = _count_rows(self._arrays, path)
        self.batch = _choose_batch(bundle, rowed, batch)
        self._seed = seed
        if self.batch > self.rows:
            message = f"expected at least the {self.batch} rows of a batch, its arrays have {self.rows}"
            raise FeedError("F011", message, where=format_path(path), hint="use a smaller --batch, or more data")
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches of an epoch."""
        return self.rows // self.batch

    def draw(self, step: int) -> dict[str, Array]:
        """Return the batch of a step, 1 for the first one."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(self.rows)
        rows = np.sort(self._order[position * self.batch : (position + 1) * self.batch])
        return {name: array[rows] if array.ndim else array for name, array in self._arrays.items()}

    def iterate(self, first: int) -> Iterator[dict[str, Array]]:
        """Return the batches from a step on, without end."""
        return map(self.draw, itertools.count(first))


def list_batch_inputs(bundle: Bundle) -> list[Declared]:
    """Return the inputs of a batch: all but states, learning rate, number of the step and seed."""
    training = bundle.manifest.training
    own = {training.learning_rate, training.step, training.seed} if training else set()
    own |= {item.name for item in bundle.state_inputs}
    return [item for item in bundle.inputs if item.name not in own]


def _read_rows(bundle: Bundle, path: Path) -> dict[str, Array]:
    """Return the arrays of a batch's inputs."""
    arrays, inputs = read_npz(path), list_batch_inputs(bundle)
    for item in inputs:
        if item.name not in arrays and not item.optional:
            hint = f"{suggest_nearest(item.name, arrays)}; write it with numpy.savez(path, {item.name}=array)"
            message = f"it has no array {item.name!r}, which the step takes: {describe_input(item)}"
            raise FeedError("F002", message, where=format_path(path), hint=hint)
    rows = {item.name: np.asarray(arrays[item.name]) for item in inputs if item.name in arrays}
    for labels in bundle.manifest.training.labels if bundle.manifest.training else ():
        labels.check(rows, format_path(path))
    return rows


def _count_rows(arrays: Mapping[str, Array], path: Path) -> int:
    """Return the number of rows, which all arrays share."""
    rows = {name: len(array) for name, array in arrays.items() if array.ndim}
    if not rows:
        raise FeedError("F002", "it has no array with rows", where=format_path(path), hint="give a row per example")
    first = next(iter(rows))
    for name, count in rows.items():
        if count != rows[first]:
            message = f"{name!r} has {count} rows, {first!r} has {rows[first]}"
            raise FeedError("F011", message, where=format_path(path), hint="the first axis of each array is its rows")
    return rows[first]


def _choose_batch(bundle: Bundle, inputs: list[Declared], batch: int) -> int:
    """Return the rows of a batch: the given number, or that of the model; raises UsageError if it does not fit."""
    for item in inputs:
        size = item.shape[0] if item.shape else None
        if isinstance(size, int) and batch and size != batch:
            message = f"expected {size} rows, as the model takes of {item.name!r}, got {batch}"
            hint = "leave it out, or export the step with dynamic rows"
            raise UsageError("F011", message, where="--batch", hint=hint)
        compiled = size if isinstance(size, int) else bundle.manifest.dimensions.get(str(size), 0)
        batch = batch or compiled
    if batch < 1:
        raise UsageError("F011", "the model does not say the rows of a batch", where="--batch", hint="give --batch")
    return batch


# A thread that draws the next batches while a step runs.

# How long `close` waits for a loader that is busy with a batch.
_END_SECONDS = 2.0


@contextmanager
def prefetch_batches(loader: Iterable[Any], depth: int, *, repeats: bool) -> Iterator[Iterator[Any]]:
    """Draw the batches of a loader in a thread, at most `depth` ahead; with a depth of 0 there is no thread.

    A loader that can be iterated again, such as a list or a DataLoader, begins again at its end if `repeats`. Errors of
    the loader are raised when their turn comes.
    """
    batches = iterate_batches(loader, repeats)
    if not depth:
        yield batches
        return
    # An interrupt can break a Queue, but not a SimpleQueue.
    ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    tokens: queue.SimpleQueue[None] = queue.SimpleQueue()  # each lets the thread draw one more batch
    is_closed = False
    for _ in range(depth):
        tokens.put(None)

    def draw() -> None:
        while True:
            tokens.get()
            if is_closed:
                return
            try:
                ready.put((next(batches), None))
            except BaseException as problem:  # noqa: BLE001 - raised in the thread that wants the batch
                ready.put((None, problem))
                return

    def take() -> Iterator[Any]:
        while True:
            batch, problem = ready.get()
            tokens.put(None)
            if isinstance(problem, StopIteration):
                return
            if problem is not None:
                raise problem
            yield batch

    thread = threading.Thread(target=draw, name="onnxplace batches", daemon=True)
    start_thread(thread)
    try:
        yield take()
    finally:
        is_closed = True
        tokens.put(None)
        thread.join(_END_SECONDS)


def iterate_batches(loader: Iterable[Any], repeats: bool) -> Iterator[Any]:
    """Yield the batches of a loader, again and again if it can be iterated again.

    Raises FeedError for a loader without batches, and for one that is not iterable.
    """
    if not isinstance(loader, Iterable) or isinstance(loader, (dict, str, bytes)):
        message = f"expected an iterable of batches, got {type(loader).__name__}"
        raise FeedError("U054", message, where="train", hint="give a list or a generator of mappings, name -> array")
    while True:
        count = 0
        for batch in loader:
            count += 1
            yield batch
        # `iter(loader)` would start the processes of a DataLoader once more.
        if not repeats or isinstance(loader, Iterator):
            return
        if not count:
            raise FeedError("U054", "the loader has no batches", where="train", hint="check its data and batch size")
