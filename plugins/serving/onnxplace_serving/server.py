"""A server's life: it listens, answers over HTTP and gRPC, and ends after the requests in flight."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from importlib.util import find_spec

from onnxplace.errors import UsageError
from onnxplace_serving.served_models import Limits, ServedModels


def require_server_packages() -> None:
    """Raise UsageError unless the packages of the extra `[serve]` are there; nothing is imported."""
    missing = [name for name in ("starlette", "uvicorn", "grpc") if find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        message = f"a server needs {' and '.join(missing)}, which {are} not installed"
        raise UsageError("U110", message, where="serve", hint="pip install 'onnxplace[serve]'")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 stands for any free one. Raises UsageError."""
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        # Its protocol is unknown. asyncio sets TCP_NODELAY only where it is TCP; without that, the second part of an
        # answer waits for an acknowledgement of the first, which clients delay by 40 ms.
        return socket.socket(listener.family, listener.type, socket.IPPROTO_TCP, listener.detach())
    except (OSError, OverflowError) as problem:
        hint = "choose another --port, --grpc-port or --host, or end what listens there"
        raise UsageError("U090", f"cannot listen: {problem}", where=format_address(host, port), hint=hint) from None


def format_address(host: str, port: int) -> str:
    """Return an address as URLs have it.

    >>> format_address("::1", 8000)
    '[::1]:8000'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def run_server(
    models: ServedModels,
    limits: Limits,
    listener: socket.socket,
    grpc_address: str,
    stop: asyncio.Event,
    announce: Callable[[], None],
) -> None:
    """Answer requests until `stop` is set; then refuse new ones, and end after those in flight.

    Args:
        models: The models, whose sessions are closed at the end.
        limits: How much it takes on.
        listener: The socket for HTTP.
        grpc_address: Host and port for gRPC.
        stop: Set by the caller.
        announce: Called when requests are answered.

    Raises UsageError if the address for gRPC cannot be listened on.
    """
    from onnxplace_serving.grpc_server import make_grpc_server
    from onnxplace_serving.http_server import HttpServer, make_app

    grpc_server = make_grpc_server(models, limits)
    try:
        grpc_server.add_insecure_port(grpc_address)
    except RuntimeError:
        raise UsageError("U090", "cannot listen", where=grpc_address, hint="choose another --grpc-port") from None
    http_server = HttpServer(make_app(models, limits), limits)
    await grpc_server.start()
    answering = asyncio.create_task(http_server.serve([listener]))
    while not http_server.started:
        await asyncio.sleep(0.01)
    announce()
    await stop.wait()
    models.stop()
    http_server.should_exit = True
    await asyncio.gather(answering, grpc_server.stop(limits.timeout_seconds))
    for model in models.models.values():
        await asyncio.to_thread(model.session.close, limits.timeout_seconds)
