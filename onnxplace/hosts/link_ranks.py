"""Time messages between each two ranks of MPI: `mpiexec ... python -m mpi4py -m onnxplace.hosts.link_ranks SECONDS`.

Rank 0 prints, as one line of JSON, the samples of each pair: `[[first, second, bytes, seconds], ...]`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

# Bytes of messages, ascending; the time of one size tells whether the next one can be afforded.
SIZES_BYTES = tuple(4**power for power in range(14))
# Round trips before sizes of a pair take turns again: fewer for large messages.
MAX_TRIPS, TRIP_SECONDS = 20, 0.02
# How often a rank that waits for others looks up.
LOOK_SECONDS = 0.001


def main() -> None:
    """Measure all pairs, one after the other."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    pairs = [(first, second) for first in range(world.size) for second in range(first + 1, world.size)]
    seconds = float(sys.argv[1]) / len(pairs)
    samples: list[tuple[int, int, int, float]] = []
    for first, second in pairs:
        _wait(world.Ibarrier())  # so that one pair at a time uses the network
        if world.rank == first:
            samples += [(first, second, *sample) for sample in lead(world, second, seconds)]
        elif world.rank == second:
            follow(world, first)
    _wait(world.Ibarrier())
    gathered = world.gather(samples)
    if gathered is not None:
        sys.stdout.write(f"{json.dumps([sample for part in gathered for sample in part])}\n")


def _wait(request: Any) -> None:
    """Wait without taking a core from the ranks that measure."""
    while not request.Test():
        time.sleep(LOOK_SECONDS)


def lead(world: Any, peer: int, seconds: float) -> list[tuple[int, float]]:
    """Send messages to a peer, which sends them back; return the time of one way, of each, by its size.

    Sizes take turns until the time is over. Each is measured at least once, except where a message alone would take
    more than the whole time.
    """
    buffer = np.ones(SIZES_BYTES[-1], dtype=np.uint8)
    end = time.perf_counter() + seconds
    samples: list[tuple[int, float]] = []
    latest: dict[int, float] = {}
    is_first_turn = True
    while is_first_turn or time.perf_counter() < end:
        for size in SIZES_BYTES:
            expected = latest.get(size) or 4 * latest.get(size // 4, 0.0)
            if samples and (expected > seconds / 4 or (not is_first_turn and time.perf_counter() > end)):
                break
            trips = int(min(MAX_TRIPS, max(1, TRIP_SECONDS // max(2 * expected, 1e-6))))
            times = _time_trips(world, peer, buffer[:size], trips)
            latest[size] = min(times)
            samples += [(size, item) for item in times]
        is_first_turn = False
    world.Send(np.zeros(2, dtype=np.int64), peer)
    return samples


def _time_trips(world: Any, peer: int, message: Any, trips: int) -> list[float]:
    """Return the time of one way of each round trip; the first one, which allocates memory, does not count."""
    world.Send(np.array([len(message), trips + 1], dtype=np.int64), peer)
    times = []
    for _ in range(trips + 1):
        start = time.perf_counter()
        world.Send(message, peer)
        world.Recv(message, peer)
        times.append((time.perf_counter() - start) / 2)
    return times[1:]


def follow(world: Any, peer: int) -> None:
    """Send back what a peer sends, until it announces a size of zero."""
    buffer = np.ones(SIZES_BYTES[-1], dtype=np.uint8)
    announced = np.zeros(2, dtype=np.int64)
    while True:
        world.Recv(announced, peer)
        size, trips = announced.tolist()
        if not size:
            return
        for _ in range(trips):
            world.Recv(buffer[:size], peer)
            world.Send(buffer[:size], peer)


if __name__ == "__main__":
    main()
