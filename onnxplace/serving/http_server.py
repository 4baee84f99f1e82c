"""The protocol over HTTP: JSON, with tensors as raw bytes behind it (the binary tensor extension).

The body of a request with raw tensors is JSON, whose length a header gives, and then their bytes in order. Arrays share
the memory of the body, and answers are sent from the memory of the outputs.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from onnxplace.errors import format_value
from onnxplace.feeds import Array
from onnxplace.serving.metrics import format_metrics
from onnxplace.serving.served_models import (
    VERSION,
    InferenceRequest,
    Limits,
    RequestError,
    ServedModel,
    ServedModels,
    describe_failure,
    refuse_extensions,
)
from onnxplace.serving.tensors import check_tensor, name_datatype, read_list, read_raw, write_list, write_raw
from onnxplace.utils import parse_json

LENGTH_HEADER = "inference-header-content-length"
# A body begins so that the bytes behind its JSON begin at a multiple of this: no array has to be copied.
ALIGNMENT_BYTES = 64
# Time for the headers of a request, and to keep a connection without requests.
HEADER_SECONDS, KEEP_ALIVE_SECONDS = 10.0, 60
# Time for the rest of a request that is refused.
DISCARD_SECONDS = 10.0
MAX_CONNECTIONS = 1024


class TensorResponse(Response):
    """JSON, and raw tensors behind it, which are not copied."""

    def __init__(self, parts: Sequence[bytes | memoryview], headers: Mapping[str, str]) -> None:
        super().__init__(None, headers={**headers, "content-length": str(sum(map(len, parts)))})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all parts."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for number, part in enumerate(self._parts, 1):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(self._parts)})


def make_error_response(failure: RequestError) -> JSONResponse:
    """Return an error as the protocol has it."""
    headers = {"retry-after": "1"} if failure.status in (429, 503) else {}
    return JSONResponse({"error": str(failure)}, failure.status, headers)


async def read_body(request: Request, limits: Limits, header_bytes: int, deadline: float) -> memoryview:
    """Return the body of a request; raises RequestError if it is too large or too slow."""
    too_large = RequestError(413, f"the request is larger than {limits.max_request_bytes} bytes: raise --max-request")
    if int(request.headers.get("content-length", 0)) > limits.max_request_bytes:  # its digits are checked before
        raise too_large
    body = bytearray(padding := -header_bytes % ALIGNMENT_BYTES)
    try:
        async with asyncio.timeout_at(deadline):
            async for chunk in request.stream():
                body += chunk
                if len(body) - padding > limits.max_request_bytes:
                    raise too_large
    except TimeoutError:
        raise RequestError(408, f"the request was not complete within {limits.timeout_seconds:g} s") from None
    except ClientDisconnect:
        raise RequestError(499, "the client has left before its request was complete") from None
    data = memoryview(body)[padding:]
    return data if "content-encoding" not in request.headers else decompress(request, data, too_large)


async def discard_rest(request: Request) -> None:
    """Read what is left of a refused request: clients that still send do not see an answer."""
    with suppress(TimeoutError, ClientDisconnect, RuntimeError):  # RuntimeError: there is nothing left
        async with asyncio.timeout(DISCARD_SECONDS):
            async for _ in request.stream():
                pass


def decompress(request: Request, data: memoryview, too_large: RequestError) -> memoryview:
    """Return a body that was sent with gzip or deflate; raises RequestError."""
    encoding, limit = request.headers["content-encoding"], request.app.state.limits.max_request_bytes
    if encoding not in ("gzip", "deflate"):
        raise RequestError(415, f"content-encoding {format_value(encoding)}: expected gzip or deflate")
    try:
        expander = zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: zlib finds out which of both it is
        body = expander.decompress(data, limit)
    except zlib.error as problem:
        raise RequestError(400, f"the body is not in {encoding}: {problem}") from None
    if expander.unconsumed_tail:
        raise too_large
    return memoryview(body)


def read_request(model: ServedModel, body: memoryview, header_bytes: int) -> tuple[InferenceRequest, dict[str, Any]]:
    """Return what a request asks for, and its JSON; raises RequestError or FeedError."""
    header = parse_json(bytes(body[:header_bytes]), "F003", "a request of the protocol", "request")
    entries = header.get("inputs") if isinstance(header, dict) else None
    if not isinstance(entries, list):
        raise RequestError(400, "expected a JSON object with a list of inputs")
    rest, feeds = body[header_bytes:], dict[str, Array]()
    for entry in map(require_object, entries):
        if (name := str(entry.get("name"))) not in model.inputs or name in feeds:
            raise RequestError(400, f"input {format_value(name)} is given twice, or the model does not have it")
        item = model.inputs[name]
        shape = check_tensor(item, entry.get("datatype"), entry.get("shape"))
        parameters = require_parameters(entry)
        if "binary_data_size" not in parameters:
            feeds[name] = read_list(item, shape, entry.get("data"))
            continue
        size = parameters["binary_data_size"]
        if type(size) is not int or not 0 <= size <= len(rest):
            message = f"input {name!r}: binary_data_size is {format_value(size)}, and {len(rest)} bytes are left"
            raise RequestError(400, message)
        feeds[name], rest = read_raw(item, shape, rest[:size]), rest[size:]
    if rest:
        raise RequestError(400, f"the body has {len(rest)} bytes more than its inputs")
    outputs = header.get("outputs", [])
    if not isinstance(outputs, list):
        raise RequestError(400, "expected a list of outputs")
    for entry in map(require_object, outputs):
        require_parameters(entry)
    names = [str(entry.get("name")) for entry in outputs]
    return InferenceRequest(feeds, names, str(header.get("id", "")), require_parameters(header)), header


def require_object(entry: Any) -> dict[str, Any]:
    """Return an entry of a list of inputs or outputs; raises RequestError unless it is an object."""
    if not isinstance(entry, dict):
        raise RequestError(400, f"expected inputs and outputs as JSON objects, got {format_value(entry)}")
    return entry


def require_parameters(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a request or tensor; raises RequestError for those that ask for an extension."""
    parameters = entry.get("parameters", {})
    if not isinstance(parameters, dict):
        raise RequestError(400, f"expected parameters as a JSON object, got {format_value(parameters)}")
    refuse_extensions(parameters)
    return parameters


def write_response(model: ServedModel, header: Mapping[str, Any], outputs: Mapping[str, Array]) -> TensorResponse:
    """Return the answer to a request, each output as raw bytes or in JSON as the request wants it."""
    wishes = {entry["name"]: entry.get("parameters", {}) for entry in header.get("outputs", [])}
    default = header.get("parameters", {}).get("binary_data_output", False)
    entries, parts = [], list[bytes | memoryview]()
    for name, array in outputs.items():
        item = model.outputs[name]
        entry: dict[str, Any] = {"name": name, "datatype": name_datatype(item.dtype), "shape": list(array.shape)}
        if wishes.get(name, {}).get("binary_data", default):
            parts.append(write_raw(array))
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            entry["data"] = write_list(array, item)
        entries.append(entry)
    described = {
        "model_name": model.name,
        "model_version": VERSION,
        "id": str(header.get("id", "")),
        "outputs": entries,
    }
    text = json.dumps(described).encode()
    if not parts:
        return TensorResponse([text], {"content-type": "application/json"})
    headers = {"content-type": "application/octet-stream", LENGTH_HEADER: str(len(text))}
    return TensorResponse([text, *parts], headers)


def make_app(models: ServedModels, limits: Limits) -> Starlette:
    """Return the application that answers all paths of the protocol, and `/metrics`."""

    def find(request: Request) -> ServedModel:
        return models.find(request.path_params["model"], request.path_params.get("version", ""))

    def answer(describe: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            return JSONResponse(describe(request))

        return respond

    async def infer(request: Request) -> Response:
        try:
            return await infer_admitted(request)
        except RequestError:
            await discard_rest(request)
            raise

    async def infer_admitted(request: Request) -> Response:
        model = find(request)
        with model.admit() as ticket:
            length = request.headers.get(LENGTH_HEADER, "")
            if length and not (length.isascii() and length.isdigit() and len(length) < 16):
                raise RequestError(400, f"expected {LENGTH_HEADER} as a number of bytes, got {format_value(length)}")
            body = await read_body(request, limits, int(length or 0), ticket.deadline)
            header_bytes = int(length) if length else len(body)
            if header_bytes > len(body):
                raise RequestError(400, f"{LENGTH_HEADER} is {header_bytes}, and the body has {len(body)} bytes")
            inference, header = read_request(model, body, header_bytes)
            return write_response(model, header, await model.infer(inference, ticket))

    async def check_ready(_: Request) -> Response:
        return Response(status_code=200 if models.is_ready else 503)

    async def check_model(request: Request) -> Response:
        return Response(status_code=503 if find(request).is_stopping else 200)

    async def list_index(_: Request) -> Response:
        return JSONResponse(models.describe_index())

    async def show_metrics(_: Request) -> Response:
        return PlainTextResponse(format_metrics(list(models.models.values())))

    async def fail(_: Request, problem: Exception) -> Response:
        return make_error_response(describe_failure(problem))

    async def refuse(request: Request, problem: Exception) -> Response:
        assert isinstance(problem, HTTPException)
        message = f"{request.method} {format_value(request.url.path)} is not answered here: {problem.detail}"
        return make_error_response(RequestError(problem.status_code, message))

    routes = [
        Route("/v2", answer(lambda _: models.describe())),
        Route("/v2/health/live", answer(lambda _: {"live": True})),
        Route("/v2/health/ready", check_ready),
        Route("/v2/models/stats", answer(lambda _: models.describe_statistics())),
        Route("/v2/repository/index", list_index, methods=["POST"]),
        Route("/metrics", show_metrics),
    ]
    for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        routes += [
            Route(path, answer(lambda request: find(request).describe())),
            Route(f"{path}/ready", check_model),
            Route(f"{path}/config", answer(lambda request: find(request).describe_config())),
            Route(f"{path}/stats", answer(lambda request: models.describe_statistics(find(request).name))),
            Route(f"{path}/infer", infer, methods=["POST"]),
        ]
    handlers: Any = {RequestError: fail, HTTPException: refuse}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.limits = limits
    return app


class ImpatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type] # uvicorn chooses it when it is imported
    """uvicorn's protocol, which also closes connections whose headers do not come."""

    _alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Wait on, or no longer once the headers are there."""
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self._alarm is None:
            self._alarm = self.loop.call_later(HEADER_SECONDS, self._give_up)
        elif not is_waiting and self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _give_up(self) -> None:
        self._alarm = None
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            text = f"the headers were not complete within {HEADER_SECONDS:g} s\n"
            head = f"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: {len(text)}\r\n\r\n"
            self.transport.write((head + text).encode())
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        super().connection_lost(exc)
        if self._alarm is not None:
            self._alarm.cancel()


class HttpServer(uvicorn.Server):
    """uvicorn's server, which leaves signals to its caller."""

    def __init__(self, app: Starlette, limits: Limits) -> None:
        config = uvicorn.Config(
            app,
            http=ImpatientProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, round(limits.timeout_seconds)),
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield
