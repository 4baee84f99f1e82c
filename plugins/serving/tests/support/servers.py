"""Servers of bundles: on a thread of this process, and as the command that a user starts."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxplace
from onnxplace_serving.served_models import Limits, ServedModel, ServedModels
from onnxplace_serving.server import listen, run_server

WAIT_SECONDS = 60.0


@dataclass
class RunningServer:
    """A server that answers requests."""

    http_port: int
    grpc_port: int
    models: Mapping[str, ServedModel]

    @property
    def http(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"


@contextmanager
def serve_in_thread(
    paths: Mapping[str, Path],
    limits: Limits | None = None,
    batching: onnxplace.Batching | None = None,
    *,
    isolate: bool = False,
) -> Iterator[RunningServer]:
    """Serve bundles from a thread until the block ends."""
    limits = limits or Limits(timeout_seconds=WAIT_SECONDS)
    ready, servers, failures = threading.Event(), list[Any](), list[BaseException]()

    async def run() -> None:
        options: Any = {"trace": True, "max_in_flight": limits.max_in_flight, "batching": batching}
        options["isolate"] = isolate
        rows = batching.max_batch if batching else 1
        models = [
            ServedModel(name, bundle, onnxplace.InferenceSession(bundle, **options), limits, rows)
            for name, bundle in ((name, onnxplace.load(path)) for name, path in paths.items())
        ]
        with listen("127.0.0.1", 0) as listener, listen("127.0.0.1", 0) as probe:
            ports = listener.getsockname()[1], probe.getsockname()[1]
            probe.close()
            stop, address = asyncio.Event(), f"127.0.0.1:{ports[1]}"
            running = RunningServer(*ports, {model.name: model for model in models})
            servers.extend((running, asyncio.get_running_loop(), stop))
            await run_server(ServedModels(models), limits, listener, address, stop, ready.set)

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as failure:  # noqa: BLE001 - raised below
            failures.append(failure)
            ready.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(WAIT_SECONDS)
    try:
        if not failures:
            yield servers[0]
    finally:
        if len(servers) == 3:
            servers[1].call_soon_threadsafe(servers[2].set)
        thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


@dataclass
class ServerProcess:
    """The command `onnxplace serve`, which answers requests."""

    process: subprocess.Popen[str]
    http: str
    grpc: str

    @property
    def http_port(self) -> int:
        return int(self.http.rpartition(":")[2])


@contextmanager
def serve_in_process(*arguments: object) -> Iterator[ServerProcess]:
    """Start `onnxplace serve` on free ports, wait until it answers, and kill it at the end if it still runs."""
    command = [sys.executable, "-m", "onnxplace", "serve", "--port", "0", "--grpc-port", "0", "--json"]
    command += map(str, arguments)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "ORT_DISABLE_TELEMETRY": "1"}, **pipes) as process:
        try:
            lines = []
            while (line := process.stdout.readline()) not in ("}\n", ""):
                lines.append(line)
            assert line, process.stderr.read()
            described = json.loads("".join([*lines, line]))
            yield ServerProcess(process, described["http"].removeprefix("http://"), described["grpc"])
        finally:
            process.kill()
