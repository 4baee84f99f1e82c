"""How requests are served, and whether a bundle allows it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from onnxplace.bundle import BatchingRecord, Bundle
from onnxplace.errors import UsageError
from onnxplace.feeds import MAX_DIMENSION

# More requests in flight only take memory.
MAX_REQUESTS = 1024
# Longer waits than a minute are mistakes, such as a delay in microseconds.
MAX_DELAY_MS = 60_000.0
# Locks accept no longer timeout.
MAX_TIMEOUT_SECONDS = 1e6


@dataclass(frozen=True)
class Batching:
    """How concurrent requests are joined into one.

    Raises UsageError for impossible values.

    >>> Batching(max_batch=16).max_delay_ms
    2.0
    """

    max_batch: int = 8
    """The largest batch that requests are joined to; a request that is larger itself runs alone."""
    max_delay_ms: float = 2.0
    """Milliseconds that a request waits for others at most, while other requests are in flight."""

    def __post_init__(self) -> None:
        is_whole = isinstance(self.max_batch, Integral) and not isinstance(self.max_batch, bool)
        if not is_whole or not 1 <= self.max_batch <= MAX_DIMENSION:
            message = f"expected max_batch to be an integer from 1 to {MAX_DIMENSION}, got {self.max_batch!r}"
            raise UsageError("U005", message, where="Batching", hint="such as Batching(max_batch=8)")
        is_number = isinstance(self.max_delay_ms, Real) and not isinstance(self.max_delay_ms, bool)
        if not is_number or math.isnan(self.max_delay_ms) or not 0 <= self.max_delay_ms <= MAX_DELAY_MS:
            message = f"expected max_delay_ms to be a number from 0 to {MAX_DELAY_MS:.0f}, got {self.max_delay_ms!r}"
            raise UsageError("U005", message, where="Batching", hint="such as Batching(max_delay_ms=2.0)")


def check_in_flight(count: int, name: str, maximum: int = MAX_REQUESTS) -> int:
    """Return a number of requests, such as those in flight; raises UsageError unless it is from 1 to `maximum`."""
    if not isinstance(count, Integral) or isinstance(count, bool) or not 1 <= count <= maximum:
        message = f"expected {name} to be an integer from 1 to {maximum}, got {count!r}"
        raise UsageError("U005", message, hint=f"such as {name}=8")
    return int(count)


def require_batching(bundle: Bundle) -> BatchingRecord:
    """Return the axes along which a bundle's requests can be joined; raises UsageError if they cannot be."""
    manifest, where = bundle.manifest, str(bundle.path)
    if manifest.states:
        message = (
            f"requests cannot be joined: each takes the states of the one before, such as {manifest.states[0].input!r}"
        )
        raise UsageError("U083", message, where=where, hint="leave batching out, or compile without --state")
    record = manifest.batching
    if record is None:
        message = f"format {manifest.schema_version} of this bundle does not say whether requests can be joined"
        raise UsageError("U083", message, where=where, hint="compile the model again")
    if not record.dimension:
        place = f"{where}, node {record.node!r}" if record.node else where
        hint = "leave batching out; requests still overlap across devices"
        raise UsageError("U083", f"requests cannot be joined: {record.reason}", where=place, hint=hint)
    return record


def check_timeout(timeout: float | None, minimum: float = 1e-9) -> float | None:
    """Return a timeout in seconds; raises UsageError unless it is valid."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not minimum <= timeout < MAX_TIMEOUT_SECONDS:
        least = "more than 0" if minimum else "0 or more"
        message = f"expected a timeout in seconds, {least} and less than {MAX_TIMEOUT_SECONDS:.0f}, got {timeout!r}"
        raise UsageError("U005", message, hint="omit it to wait without a limit")
    return float(timeout)
