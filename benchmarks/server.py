"""A server next to a stream of one session: python benchmarks/server.py [--requests 10000] [--turns 3].

A network of convolutions, by default with most of the work of ResNet-50, takes and returns images of 602 112 bytes. A
copy of it is on each of two CPU devices of one core. These take turns: `session.stream` in this process; tritonclient
over HTTP, and over gRPC, to `onnxplace serve` in a process of its own, with many requests in flight. The table has
requests per second as ratios to the stream, taken in one run, the time of cores that a request takes from this process,
its client, and from the server, and counts answers that are wrong and requests without one. A second table has the
milliseconds of a small request over each protocol, one after the other over one connection that stays open. Then the
server gets `--hostile` requests over each protocol, and those without a clear status are counted. The exit code is 1 if
anything is wrong, lost or unclear. Nothing else should run meanwhile: client and server share the cores. Needs
`pip install -e '.[cpu,dev,serve]'`.

Over HTTP, the client is `tritonclient.http.aio`: `async_infer` of `tritonclient.http` waits for 10 ms in each call, so
that one client sends fewer than 100 requests per second to any server. Its connections stay open, and have TCP_NODELAY,
which is checked: without it, a request may wait 40 ms for an acknowledgement.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import onnx
import psutil
import tritonclient.grpc
import tritonclient.http
import tritonclient.http.aio
from _tables import report_progress
from numpy.typing import NDArray
from onnx import helper, numpy_helper, parser

import onnxplace
from plugins.serving.tests.support.hostile_requests import (
    HOSTILE_MODEL,
    MAX_REQUEST_BYTES,
    list_unclear_answers,
    list_unclear_calls,
)
from plugins.serving.tests.support.servers import ServerProcess, serve_in_process

IMAGE = (1, 3, 224, 224)
LAYERS = 5
# A copy of the model on each of two devices of one core.
COPIES = "optimize,profile{estimate=true},coplace{join=never},fuse,single,split,replicate{routes=cpu:1},emit"
IMAGES = 8
SMALL_REQUESTS = 500
TCP_NODELAY = socket.IPPROTO_TCP, socket.TCP_NODELAY
HEADER = ("what", "requests/s", "rate / stream", "client ms", "server ms", "wrong", "lost")
Image = NDArray[np.float32]


def make_model(channels: int) -> onnx.ModelProto:
    """Return a network of convolutions from images to images of the same size."""
    random, nodes, weights = np.random.default_rng(0), [], []
    for layer in range(LAYERS):
        sizes = 3 if layer == LAYERS - 1 else channels, 3 if layer == 0 else channels, 3, 3
        weight = random.standard_normal(sizes).astype("f4") / np.sqrt(np.prod(sizes[1:]), dtype="f4")
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        names = "x" if layer == 0 else f"r{layer - 1}", "y" if layer == LAYERS - 1 else f"c{layer}"
        nodes.append(helper.make_node("Conv", [names[0], f"w{layer}"], [names[1]], f"conv{layer}", pads=[1, 1, 1, 1]))
        if layer < LAYERS - 1:
            nodes.append(helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"], f"relu{layer}"))
    declared = [helper.make_tensor_value_info(name, 1, ["n", *IMAGE[1:]]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "images", declared[:1], declared[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def stream_session(session: onnxplace.InferenceSession, images: Sequence[Image], in_flight: int) -> Iterator[Image]:
    """Yield the answers of a session."""
    yield from (outputs[0] for outputs in session.stream(({"x": image} for image in images), in_flight=in_flight))


def stream_http(url: str, images: Sequence[Image], in_flight: int, model: str = "model") -> Iterator[Image]:
    """Yield the answers over HTTP."""
    pending: deque[asyncio.Task[Image]] = deque()

    async def open_client() -> Any:
        return tritonclient.http.aio.InferenceServerClient(url, conn_limit=in_flight, conn_timeout=600)

    async def ask(client: Any, image: Image) -> Image:
        tensor = tritonclient.http.InferInput("x", list(image.shape), "FP32")
        tensor.set_data_from_numpy(image)
        return (await client.infer(model, [tensor])).as_numpy("y")  # type: ignore[no-any-return]

    with asyncio.Runner() as runner:
        loop, client = runner.get_loop(), runner.run(open_client())
        for image in images:
            if len(pending) == in_flight:
                yield loop.run_until_complete(pending.popleft())
            pending.append(loop.create_task(ask(client, image)))
        while pending:
            yield loop.run_until_complete(pending.popleft())
        check_connections(client, in_flight)
        runner.run(client.close())


def check_connections(client: Any, count: int) -> None:
    """Raise SystemExit unless an HTTP client has kept its connections, at most so many, with TCP_NODELAY."""
    kept = [handler for handlers in client._stub.connector._conns.values() for handler, _ in handlers]
    options = [item.transport.get_extra_info("socket").getsockopt(*TCP_NODELAY) for item in kept]
    if not 0 < len(kept) <= count or not all(options):
        raise SystemExit(f"expected 1 to {count} open connections with TCP_NODELAY, got these options: {options}")


def stream_grpc(url: str, images: Sequence[Image], in_flight: int, model: str = "model") -> Iterator[Image]:
    """Yield the answers over gRPC."""
    pending: deque[queue.SimpleQueue[Any]] = deque()

    def take() -> Image:
        result, error = pending.popleft().get(timeout=600)
        if error is not None:
            raise error
        return result.as_numpy("y")  # type: ignore[no-any-return]

    with tritonclient.grpc.InferenceServerClient(url) as client:
        for image in images:
            if len(pending) == in_flight:
                yield take()
            tensor = tritonclient.grpc.InferInput("x", list(image.shape), "FP32")
            tensor.set_data_from_numpy(image)
            pending.append(queue.SimpleQueue())
            put = pending[-1].put
            client.async_infer(model, [tensor], lambda result, error, put=put: put((result, error)))
        while pending:
            yield take()


def measure(
    stream: Callable[[Sequence[Image]], Iterator[Image]], images: Sequence[Image], expected: Sequence[Image], count: int
) -> tuple[float, int, int]:
    """Return seconds, wrong answers, and requests without one."""
    began, wrong, answered = time.perf_counter(), 0, 0
    for answer in stream([images[number % len(images)] for number in range(count)]):
        wrong += not np.allclose(answer, expected[answered % len(images)], rtol=1e-4, atol=1e-5)
        answered += 1
    return time.perf_counter() - began, wrong, count - answered


def compare(bundle: onnxplace.Bundle, server: ServerProcess, options: argparse.Namespace) -> bool:
    """Print the table; return whether all answers were right."""
    random, figures, problems = np.random.default_rng(1), dict[str, list[NDArray[Any]]](), dict[str, list[int]]()
    images = [random.standard_normal(IMAGE).astype("f4") for _ in range(IMAGES)]
    processes = [psutil.Process(), psutil.Process(server.process.pid)]

    def read_clocks() -> NDArray[Any]:
        times = [process.cpu_times() for process in processes]
        return np.array([item.user + item.system for item in times])

    with onnxplace.InferenceSession(bundle) as session:
        expected = [session.run(None, {"x": image})[0] for image in images]
        streams: dict[str, Callable[[Sequence[Image]], Iterator[Image]]] = {
            "session.stream": lambda items: stream_session(session, items, options.in_flight),
            "HTTP": lambda items: stream_http(server.http, items, options.in_flight),
            "gRPC": lambda items: stream_grpc(server.grpc, items, options.in_flight),
        }
        for turn in range(options.turns + 1):  # the first one warms up
            count = options.requests // options.turns if turn else 2 * options.in_flight
            for what, stream in streams.items():
                report_progress(f"turn {turn}: {what}")
                clocks = read_clocks()
                seconds, wrong, lost = measure(stream, images, expected, count)
                if turn:
                    figures.setdefault(what, []).append(np.array([seconds, *(read_clocks() - clocks)]) / count)
                sums = problems.setdefault(what, [0, 0])
                problems[what] = [sums[0] + wrong, sums[1] + lost]
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for what, values in figures.items():
        ratio = median(base[0] / value[0] for value, base in zip(values, figures["session.stream"], strict=True))
        seconds, client, server_seconds = np.median(values, 0)
        cells = f"{1 / seconds:.1f}", f"{ratio:.2f}", f"{client * 1e3:.2f}", f"{server_seconds * 1e3:.2f}"
        print(f"| {what} | {' | '.join(cells)} | {problems[what][0]} | {problems[what][1]} |")
    return not any(map(sum, problems.values()))


def print_latencies(server: ServerProcess, count: int) -> None:
    """Print the median milliseconds of a small request, one at a time over one connection."""
    images = [np.zeros((1, 64), np.float32)] * count
    print("\n| small requests | ms |\n|---|---|")
    for what, stream in (("HTTP", stream_http), ("gRPC", stream_grpc)):
        times = [time.perf_counter() for _ in stream(getattr(server, what.lower()), images, 1, "m")]
        print(f"| {what} | {1e3 * median(np.diff(times)):.2f} |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the hostile requests without a clear status."""
    arguments_parser = argparse.ArgumentParser(description=__doc__)
    arguments_parser.add_argument("--requests", type=int, default=10_000, help="of each protocol")
    arguments_parser.add_argument("--channels", type=int, default=48, help="of the convolutions; 12 for light work")
    arguments_parser.add_argument("--in-flight", type=int, default=32)
    arguments_parser.add_argument("--turns", type=int, default=3)
    arguments_parser.add_argument("--hostile", type=int, default=1000)
    options = arguments_parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report_progress("compiling")
        onnx.save(make_model(options.channels), Path(folder, "model.onnx"))
        path = Path(folder, "model.bundle")
        settings: dict[str, Any] = {"devices": "cpu:0,cpu:1", "shape": {"n": 1}, "pipeline": COPIES}
        bundle = onnxplace.compile(Path(folder, "model.onnx"), output=path, **settings)
        with serve_in_process(path, "--warmup") as server:
            is_right = compare(bundle, server, options)
        settings = {"devices": "cpu:0,cpu:1", "shape": {"batch": 1}}
        small = onnxplace.compile(parser.parse_model(HOSTILE_MODEL), output=Path(folder, "m"), **settings)
        with serve_in_process(small.path, "--max-request", MAX_REQUEST_BYTES) as server:
            print_latencies(server, SMALL_REQUESTS)
            report_progress("hostile requests")
            unclear = list_unclear_answers(server.http_port, options.hostile)
            unclear += list_unclear_calls(int(server.grpc.rpartition(":")[2]), options.hostile)
            is_alive = tritonclient.http.InferenceServerClient(server.http).is_server_ready()
    print(f"\n{options.hostile} hostile requests over each protocol: {len(unclear)} without a clear status")
    print("\n".join(unclear))
    return 0 if is_right and is_alive and not unclear else 1


if __name__ == "__main__":
    sys.exit(main())
