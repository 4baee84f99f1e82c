"""The protocol over HTTP: JSON, with tensors as raw bytes behind it (the binary tensor extension).

The body of a request with raw tensors is JSON, whose length a header gives, and then their bytes in order. Arrays share
the memory of the body, and answers are sent from the memory of the outputs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from onnxplace.errors import format_value
from onnxplace.utils.files import parse_json
from onnxplace_serving.metrics import format_metrics
from onnxplace_serving.served_models import VERSION, Limits, RequestError, ServedModel, ServedModels
from onnxplace_serving.tensors import (
    describe_output,
    read_inputs,
    read_optional,
    read_parameters,
    require_kind,
    write_list,
    write_raw,
)

LENGTH_HEADER = "inference-header-content-length"
# A body begins so that the bytes behind its JSON begin at a multiple of this: no array has to be copied.
ALIGNMENT_BYTES = 64
# Time for the headers of a request, and for the rest of one that is refused.
PATIENCE_SECONDS = 10.0
# Time that a connection is kept without requests.
KEEP_ALIVE_SECONDS = 60
MAX_CONNECTIONS = 1024
# Size of all headers; also of what a connection keeps of further requests while one is answered.
MAX_HEADER_BYTES = 1 << 16


class TensorResponse(Response):
    """JSON, and raw tensors behind it, which are not copied."""

    def __init__(self, header: Mapping[str, Any], tensors: list[bytes | memoryview]) -> None:
        self._parts = [json.dumps(header).encode(), *tensors]
        length = {LENGTH_HEADER: str(len(self._parts[0]))} if tensors else {}
        kind = "octet-stream" if tensors else "json"
        size = {"content-length": str(sum(map(len, self._parts))), "content-type": f"application/{kind}"}
        super().__init__(None, headers={**size, **length})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all parts."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for number, part in enumerate(self._parts, 1):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(self._parts)})


class RequestReader:
    """Reads the body of a request, and its tensors one after the other."""

    def __init__(self, request: Request, limits: Limits) -> None:
        self._request, self._limits, self._rest = request, limits, memoryview(b"")
        self._too_large = RequestError(413, f"the request is larger than {limits.max_request_bytes} bytes")

    async def read(self, deadline: float) -> dict[str, Any]:
        """Return the JSON of the request; raises RequestError or FeedError."""
        length = self._request.headers.get(LENGTH_HEADER)
        if length and not (length.isascii() and length.isdigit() and len(length) < 16):
            raise RequestError(400, f"expected {LENGTH_HEADER} as a number of bytes, got {format_value(length)}")
        body = await self._read_body(int(length or 0), deadline)
        size = int(length) if length else len(body)
        if size > len(body):
            raise RequestError(400, f"{LENGTH_HEADER} is {size}, and the body has {len(body)} bytes")
        self._rest = body[size:]
        header = parse_json(bytes(body[:size]), "F003", "a request of the protocol", "body")
        return require_kind(header, dict, "body")  # type: ignore[no-any-return]

    async def _read_body(self, header_bytes: int, deadline: float) -> memoryview:
        # The digits of this header were checked before.
        if int(self._request.headers.get("content-length", 0)) > self._limits.max_request_bytes:
            raise self._too_large
        body = bytearray(padding := -header_bytes % ALIGNMENT_BYTES)
        try:
            async with asyncio.timeout_at(deadline):
                async for chunk in self._request.stream():
                    body += chunk
                    if len(body) - padding > self._limits.max_request_bytes:
                        raise self._too_large
        except TimeoutError:
            raise RequestError(408, f"it was not complete within {self._limits.timeout_seconds:g} s") from None
        except ClientDisconnect:
            raise RequestError(499, "the client has left before its request was complete") from None
        return self._decode(memoryview(body)[padding:])

    def _decode(self, data: memoryview) -> memoryview:
        """Return a body without its encoding; raises RequestError."""
        if self._request.headers.get("content-encoding", "").strip().lower() in ("", "identity"):
            return data
        try:
            expander = zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: zlib finds out which of both it is
            body = expander.decompress(data, self._limits.max_request_bytes + 1)
        except zlib.error as problem:
            raise RequestError(400, f"expected a body in gzip or deflate: {problem}") from None
        if len(body) > self._limits.max_request_bytes:
            raise self._too_large
        if not expander.eof or expander.unused_data:
            raise RequestError(400, "the compressed body ends too early, or has bytes behind its end")
        return memoryview(body)

    def take_raw(self, parameters: Mapping[str, Any]) -> memoryview | None:
        """Return the raw bytes of the next tensor, None if it has none; raises RequestError or FeedError."""
        if "binary_data_size" not in parameters:
            return None
        size = require_kind(parameters["binary_data_size"], int, "binary_data_size")
        if not 0 <= size <= len(self._rest):
            raise RequestError(400, f"binary_data_size is {size}, and {len(self._rest)} bytes are left")
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    def require_end(self) -> None:
        """Raise RequestError if there are bytes behind the last tensor."""
        if self._rest:
            raise RequestError(400, f"the body has {len(self._rest)} bytes more than its inputs")

    async def cancel_at_end(self, task: asyncio.Task[Any] | None) -> None:
        """Cancel a task when the connection ends; the request has been read."""
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        task and task.cancel()

    async def discard_rest(self) -> None:
        """Read what is left of a refused request: a client that still sends sees no answer."""
        with suppress(TimeoutError, ClientDisconnect, RuntimeError):  # RuntimeError: nothing is left
            async with asyncio.timeout(PATIENCE_SECONDS):
                async for _ in self._request.stream():
                    pass


async def infer(model: ServedModel, reader: RequestReader) -> Response:
    """Return the answer to a request, each output as raw bytes or in JSON; raises RequestError."""
    with model.admit() as deadline:
        header = await reader.read(deadline)
        feeds = read_inputs(header, model.inputs, reader.take_raw)
        reader.require_end()
        parameters, request_id = read_parameters(header), read_optional(header, "id", "")
        is_binary, are_binary = read_optional(parameters, "binary_data_output", False), dict[str, bool]()
        for entry in read_optional(header, "outputs", []):
            name = require_kind(require_kind(entry, dict, "an output").get("name"), str, "the name of an output")
            are_binary[name] = read_optional(read_parameters(entry), "binary_data", is_binary)
        watcher = asyncio.create_task(reader.cancel_at_end(asyncio.current_task()))
        try:
            outputs = await model.infer(feeds, [*are_binary], parameters, deadline)
        finally:
            watcher.cancel()
        entries, tensors = [], list[bytes | memoryview]()
        for name, array in outputs.items():
            entries.append(describe_output(model.outputs[name], array))
            if are_binary.get(name, is_binary):
                tensors.append(write_raw(array))
                entries[-1]["parameters"] = {"binary_data_size": len(tensors[-1])}
            else:
                entries[-1]["data"] = write_list(array)
        described = {"model_name": model.name, "model_version": VERSION, "id": request_id, "outputs": entries}
        return TensorResponse(described, tensors)


def make_app(models: ServedModels, limits: Limits) -> Starlette:
    """Return the application that answers all paths of the protocol, and `/metrics`."""

    def find(request: Request) -> ServedModel:
        return models.find(request.path_params["model"], request.path_params.get("version", ""))

    async def start_inference(request: Request) -> Response:
        reader = RequestReader(request, limits)
        try:
            return await infer(find(request), reader)
        except RequestError as failure:
            if failure.status != 408:
                await reader.discard_rest()
            raise
        except asyncio.CancelledError:  # by uvicorn, or the end of the event loop
            raise RequestError(503, "the server was ended before there was a result") from None

    async def refuse(request: Request, problem: Exception) -> Response:
        status, message = getattr(problem, "status", 500), str(problem)
        if isinstance(problem, HTTPException):
            status = problem.status_code
            message = f"{request.method} {format_value(request.url.path)}: {problem.detail}"
        return JSONResponse({"error": message}, status, {"retry-after": "1"} if status in (429, 503) else {})

    def route(path: str, describe: Callable[[Request], Any], method: str = "GET") -> Route:
        async def respond(request: Request) -> Response:
            described = describe(request)
            return described if isinstance(described, Response) else JSONResponse(described)

        return Route(path, respond, methods=[method])

    routes = [
        route("/v2", lambda _: models.describe()),
        route("/v2/health/live", lambda _: {"live": True}),
        route("/v2/health/ready", lambda _: Response(status_code=200 if models.is_ready else 503)),
        route("/v2/models/stats", lambda _: models.describe_statistics()),
        route("/v2/repository/index", lambda _: models.describe_index(), "POST"),
        route("/metrics", lambda _: PlainTextResponse(format_metrics(list(models.models.values())))),
    ]
    for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        routes += [
            route(path, lambda request: find(request).describe()),
            route(f"{path}/ready", lambda request: Response(why := find(request).reason, 503 if why else 200)),
            route(f"{path}/config", lambda request: find(request).describe_config()),
            route(f"{path}/stats", lambda request: models.describe_statistics(find(request).name)),
            Route(f"{path}/infer", start_inference, methods=["POST"]),
        ]
    return Starlette(routes=routes, exception_handlers={RequestError: refuse, HTTPException: refuse})


class ImpatientProtocol(H11Protocol):
    """uvicorn's protocol, which also closes connections whose headers do not come, and notices clients that leave.

    Its other one, over httptools, reads headers of any length, and no body behind `Upgrade: h2c`, which Java's client
    sends (uvicorn's issue 2722).
    """

    _ignores_data = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._limit_headers()

    def data_received(self, data: bytes) -> None:
        """Wait on, or no longer once the headers are there."""
        if self._ignores_data or self.conn.their_state in (h11.MUST_CLOSE, h11.CLOSED):
            return  # that was the last request of this connection
        # h11 refuses longer headers only if it does not get them at once.
        room = len(data)
        if self.conn.their_state is h11.IDLE:
            room = MAX_HEADER_BYTES + 1 - len(self.conn.trailing_data[0])
        super().data_received(data[:room])
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY, h11.ERROR):  # a request is complete
            # uvicorn reads no further request while it answers this one. But only who reads sees that a client leaves.
            self.flow.resume_reading()
            if len(self.conn.trailing_data[0]) > MAX_HEADER_BYTES:
                self._ignores_data, self.cycle.keep_alive = True, False
        if {b"transfer-encoding", b"content-length"} <= dict(self.headers or ()).keys():
            self._refuse(400, "a body has a content-length or a transfer-encoding: proxies may differ about its end")
        self._limit_headers()
        if data[room:]:
            self.data_received(data[room:])

    def _limit_headers(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(PATIENCE_SECONDS, self._give_up, self.cycle)

    def _give_up(self, cycle: object) -> None:
        if self.cycle is cycle and not self._ignores_data and not self.transport.is_closing():
            self._refuse(408, f"the headers were not complete within {PATIENCE_SECONDS:g} s")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; called where h11's error is handled."""
        problem = sys.exception()
        status, reason = getattr(problem, "error_status_hint", 400), str(problem).partition(":")[0]  # then bytes follow
        too_large = f"headers have more than {MAX_HEADER_BYTES} bytes"
        self._refuse(status, too_large if status == 431 else f"{msg.rstrip('.')}: {reason}")

    def _refuse(self, status: int, text: str) -> None:
        """Answer, unless an answer has begun, and read on for a while: who still sends sees no answer after a reset."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nconnection: close\r\ncontent-length: {len(text)}"
            self.transport.write(f"{head}\r\n\r\n{text}".encode())
        self._ignores_data = True
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        with suppress(OSError):  # the client has ended the connection
            self.transport.write_eof()
        self.loop.call_later(PATIENCE_SECONDS, self.transport.close)


class HttpServer(uvicorn.Server):
    """uvicorn's server, which leaves signals to its caller."""

    def __init__(self, app: Starlette, limits: Limits) -> None:
        options: dict[str, Any] = {"http": ImpatientProtocol, "ws": "none", "lifespan": "off", "access_log": False}
        options |= {"timeout_keep_alive": KEEP_ALIVE_SECONDS, "limit_concurrency": MAX_CONNECTIONS}
        options |= {"h11_max_incomplete_event_size": MAX_HEADER_BYTES}
        options |= {"timeout_graceful_shutdown": round(limits.timeout_seconds) or 1, "log_level": "error"}
        super().__init__(uvicorn.Config(app, **options))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield
