"""Requests of random sizes from several threads: python benchmarks/requests_soak.py [--requests 10000] [--seed 0].

Each thread has one to eight requests in flight at a time, over one session with states, its conversations, and one
session without. Every answer is compared with numpy. The exit code is 1 if one is wrong, if anything hangs or if
threads are left, or if memory grows by more than 64 MiB after the first tenth.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.request_soak import soak_requests

MAX_GROWTH_BYTES = 64 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requests, print a table, and return 1 after any problem."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="onnxplace-requests-") as folder:
        try:
            report = soak_requests(Path(folder), options.requests, options.threads, options.seed)
        except AssertionError as problem:
            print(problem)
            return 1
    print("| in flight from each thread | without states | with states |\n|---|---|---|")
    for in_flight in sorted({in_flight for _, in_flight in report.counts}):
        print(f"| {in_flight} | {report.counts['stateless', in_flight]} | {report.counts['states', in_flight]} |")
    print(
        f"\nseed {options.seed}: {report.requests} requests from {options.threads} threads, all right, no thread left,"
    )
    print(f"memory grew by {report.growth_bytes / (1 << 20):.1f} MiB after the first tenth; {report.seconds:.0f} s")
    return 1 if report.growth_bytes > MAX_GROWTH_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
