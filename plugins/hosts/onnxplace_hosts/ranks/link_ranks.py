"""Time values between each two hosts: `mpiexec ... python -m mpi4py -m onnxplace_hosts.ranks.link_ranks SECONDS
HOSTS INTERFACE`, with a rank on each host.

They travel as those of bundles do. Rank 0 prints, as one line of JSON, the samples of each pair:
`[[first, second, bytes, seconds], ...]`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import Any

import numpy as np

from onnxplace.errors import OnnxplaceError
from onnxplace_hosts.ranks.data_planes import wait_idly
from onnxplace_hosts.ranks.links import Links

# Bytes of values, ascending; the time of one size tells whether the next one can be afforded.
SIZES_BYTES = tuple(4**power for power in range(14))
# Round trips before sizes of a pair take turns again: fewer for large values.
MAX_TRIPS, TRIP_SECONDS = 20, 0.02


class LinkEnd:
    """The way of values to and from another rank."""

    def __init__(self, links: Links, peer: int) -> None:
        self._links, self._peer = links, peer
        self._arrived = deque[Any]()
        links.on_value = lambda serial, name, array: self._arrived.append(array)

    def send(self, array: Any) -> None:
        """Begin to send an array."""
        self._links.send_value(self._peer, 0, "", array)

    def receive(self) -> Any:
        """Wait, without pause, for an array."""
        while not self._arrived:
            self._links.look(0.0)
        return self._arrived.popleft()


def main() -> None:
    """Measure all pairs, one after the other."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    seconds, hosts, interface = sys.argv[1:]
    pairs = [(first, second) for first in range(world.size) for second in range(first + 1, world.size)]
    try:
        links = Links(world, hosts.split(",")[world.rank], None, interface, lambda *_: None, lambda *_: None)
    except OnnxplaceError as problem:
        sys.exit(f"onnxplace: {problem}")
    samples: list[tuple[int, int, int, float]] = []
    for first, second in pairs:
        wait_idly(world.Ibarrier())  # so that one pair at a time uses the network
        if world.rank == first:
            timed = lead(LinkEnd(links, second), float(seconds) / len(pairs))
            samples += [(first, second, *sample) for sample in timed]
        elif world.rank == second:
            follow(LinkEnd(links, first))
    wait_idly(world.Ibarrier())
    gathered = world.gather(samples)
    links.close()
    if gathered is not None:
        sys.stdout.write(f"{json.dumps([sample for part in gathered for sample in part])}\n")


def lead(end: LinkEnd, seconds: float) -> list[tuple[int, float]]:
    """Send values to a peer, which sends them back; return the time of one way, of each, by its size.

    Sizes take turns until the time is over. Each is measured at least once, except where a value alone would take more
    than the whole time.
    """
    buffer = np.ones(SIZES_BYTES[-1], dtype=np.uint8)
    over = time.perf_counter() + seconds
    samples: list[tuple[int, float]] = []
    latest: dict[int, float] = {}
    is_first_turn = True
    while is_first_turn or time.perf_counter() < over:
        for size in SIZES_BYTES:
            expected = latest.get(size) or 4 * latest.get(size // 4, 0.0)
            if samples and (expected > seconds / 4 or (not is_first_turn and time.perf_counter() > over)):
                break
            trips = int(min(MAX_TRIPS, max(1, TRIP_SECONDS // max(2 * expected, 1e-6))))
            times = _time_trips(end, buffer[:size], trips)
            latest[size] = min(times)
            samples += [(size, item) for item in times]
        is_first_turn = False
    end.send(buffer[:0])
    return samples


def _time_trips(end: LinkEnd, array: Any, trips: int) -> list[float]:
    """Return the time of one way of each round trip; the first one, which allocates memory, does not count."""
    times = []
    for _ in range(trips + 1):
        start = time.perf_counter()
        end.send(array)
        end.receive()
        times.append((time.perf_counter() - start) / 2)
    return times[1:]


def follow(end: LinkEnd) -> None:
    """Send back what a peer sends, until it sends nothing."""
    while (array := end.receive()).size:
        end.send(array)


if __name__ == "__main__":
    main()
