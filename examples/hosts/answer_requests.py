"""Answer requests with a bundle that runs on several hosts, and print the rate.

    python examples/hosts/answer_requests.py model.bundle --hosts node1,node2,node3,node4 --replicas 2

`--hosts` takes a list, Slurm's `node[1-4]`, or `@hostfile`. The scripts for Slurm and Kubernetes next to this file run
it.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

import onnxplace

IN_FLIGHT = 8


def draw_inputs(bundle: onnxplace.Bundle, seed: int = 0) -> dict[str, Any]:
    """Return random inputs of the sizes that the bundle was compiled for; whole numbers are 0."""
    random = np.random.default_rng(seed)
    sizes, feeds = bundle.manifest.dimensions, {}
    for item in bundle.inputs:
        shape = [size if isinstance(size, int) else sizes.get(str(size), 1) for size in item.shape or ()]
        name = item.dtype.removeprefix("tensor(").removesuffix(")").replace("double", "float64")
        dtype = np.dtype("float32" if name == "float" else name)
        feeds[item.name] = random.standard_normal(shape).astype(dtype) if dtype.kind == "f" else np.zeros(shape, dtype)
    return feeds


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--hosts", help="default: the hosts that the bundle names")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--remote-shell", default="ssh")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--start-timeout", type=float, default=120.0)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Answer the requests of the command line."""
    options = parse_arguments(arguments)
    bundle = onnxplace.load(options.bundle)
    feeds = draw_inputs(bundle)
    with onnxplace.InferenceSession(
        bundle,
        runtime="mpi",
        hosts=options.hosts,
        replicas=options.replicas,
        remote_shell=options.remote_shell,
        timeout=options.start_timeout,
    ) as session:
        began = time.perf_counter()
        answers = sum(1 for _ in session.stream((feeds for _ in range(options.requests)), in_flight=IN_FLIGHT))
        seconds = time.perf_counter() - began
        for copy in session.list_copies():
            state = "open" if copy.is_open else "left out"
            print(f"copy on {copy.name}: {state}, {copy.requests} requests, {copy.failures} failures")
    print(f"{answers} answers, {answers / seconds:.1f} per second")


if __name__ == "__main__":
    main(sys.argv[1:])
