"""Serve a bundle over HTTP with FastAPI: joined requests, checks of health and inputs, an orderly end.

    pip install 'onnxplace[cpu]' fastapi uvicorn
    python examples/fastapi_server.py model.bundle --port 8000 --max-batch 16
    curl localhost:8000/run -H 'content-type: application/json' -d '{"inputs": {"x": [[1.0, 2.0]]}}'

- `GET /health`: whether the process lives; 500 if the bundle could not be opened. For liveness probes.
- `GET /ready`: 200 while requests are answered, 503 before and after. For readiness probes and load balancers.
- `GET /model`: inputs and outputs. `GET /docs`: the documentation that FastAPI makes of the bundle's inputs.
- `POST /run`: inputs and outputs as nested lists. 422 says which input does not fit, 503 to come back later, 504 that
  there was no result in time.

The bundle is opened while the server already answers probes. SIGTERM lets requests in flight finish. There is no
authentication and no limit on the size of a request: put a proxy that has both in front of it.
"""

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, create_model

import onnxplace

LOGGER = logging.getLogger("uvicorn.error")
# The types that numbers in JSON become; texts, and types of a few bits, are taken as numpy reads them.
NUMPY_TYPES = {"float": "float32", "double": "float64", "float16": "float16", "bool": "bool"} | {
    f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


@dataclass(frozen=True)
class Options:
    """How requests are served."""

    max_batch: int = 8
    """The largest batch that requests are joined to; 1 joins none."""
    max_delay_ms: float = 2.0
    timeout_seconds: float = 30.0
    """Of a request, and of the requests in flight when the server ends."""


class Server:
    """The session of a bundle, which is opened after the server has started."""

    def __init__(self, bundle: onnxplace.Bundle, options: Options) -> None:
        self._bundle, self._options = bundle, options
        self._types = {item.name: item.dtype for item in bundle.inputs}
        self.session: onnxplace.InferenceSession | None = None
        self.failure: onnxplace.OnnxplaceError | None = None

    def open(self) -> None:
        """Open the bundle; a failure is kept for probes."""
        batching = None
        if self._options.max_batch > 1:
            batching = onnxplace.Batching(self._options.max_batch, self._options.max_delay_ms)
        try:
            self.session = onnxplace.InferenceSession(self._bundle, batching=batching)
        except onnxplace.OnnxplaceError as failure:
            self.failure = failure
            LOGGER.error("%s", failure)

    def close(self) -> None:
        """Take no further requests, and let those in flight finish."""
        session, self.session = self.session, None
        if session is not None:
            session.close(self._options.timeout_seconds)

    def run(self, inputs: dict[str, Any], outputs: list[str] | None) -> dict[str, Any]:
        """Return the outputs of a request as nested lists."""
        if self.session is None:
            raise onnxplace.ExecutionError("X002", "the server is starting or ending", hint="try again")
        session = self.session
        feeds = {name: self._read_array(name, value) for name, value in inputs.items() if value is not None}
        arrays = session.run(outputs, feeds, timeout=self._options.timeout_seconds)
        names = outputs or [item.name for item in session.get_outputs()]
        return {name: make_plain(array) for name, array in zip(names, arrays, strict=True)}

    def _read_array(self, name: str, value: Any) -> NDArray[Any]:
        element = self._types[name].removeprefix("tensor(").removesuffix(")")
        try:
            return np.asarray(value) if element == "string" else convert(value, np.dtype(NUMPY_TYPES[element]))
        except (ValueError, TypeError, OverflowError, KeyError) as problem:
            message = f"expected {self._types[name]} as nested lists: {problem}"
            raise onnxplace.FeedError("F003", message, where=f"input {name!r}") from None


def convert(value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return numbers as the bundle takes them; raises ValueError for 1.5 as a whole number, or 300 as a byte."""
    array = np.array(value, dtype=object)  # numbers of Python: numpy would round those of 64 bits
    if not all(isinstance(number, int | float) for number in array.ravel()):
        raise ValueError("not all elements are numbers")
    converted = array.astype(dtype)
    if dtype.kind != "f" and not np.array_equal(converted, array):
        raise ValueError(f"not all elements are {dtype} numbers")
    return converted


def make_plain(value: Any) -> Any:
    """Return an output as JSON can hold it; numbers that are not finite become null."""
    if isinstance(value, list):
        return [make_plain(item) for item in value]
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        objects = value.astype(object)
        objects[~np.isfinite(value)] = None
        return objects.tolist()
    return value.tolist()


def make_request_type(bundle: onnxplace.Bundle) -> type[BaseModel]:
    """Return the type of a request, which has a field for each input of the bundle."""
    strict = ConfigDict(extra="forbid")
    fields: Any = {
        item.name: (list[Any] | float | bool | str, None if item.optional else ...) for item in bundle.inputs
    }
    inputs = create_model("Inputs", __config__=strict, **fields)
    return create_model("RunRequest", __config__=strict, inputs=(inputs, ...), outputs=(list[str] | None, None))


def create_app(path: str | Path, options: Options | None = None) -> FastAPI:
    """Return the application; raises BundleError if there is no bundle."""
    bundle = onnxplace.load(path)
    server = Server(bundle, options or Options())
    request_type = make_request_type(bundle)

    @asynccontextmanager
    async def live(_: FastAPI) -> AsyncIterator[None]:
        opening = asyncio.create_task(asyncio.to_thread(server.open))
        yield
        await opening
        await asyncio.to_thread(server.close)

    app = FastAPI(title=bundle.manifest.model, lifespan=live)

    # Probes are coroutines: they are answered while all threads are busy with requests.
    @app.get("/health")
    async def health() -> JSONResponse:
        """Tell whether the process works."""
        failure = server.failure
        return JSONResponse(
            {"status": "alive"} if failure is None else describe(failure), 200 if failure is None else 500
        )

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Tell whether requests are answered."""
        is_ready = server.session is not None
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    @app.get("/model")
    async def model() -> dict[str, Any]:
        """Describe the inputs and outputs."""
        items = {"inputs": bundle.inputs, "outputs": bundle.returned_outputs}
        return {
            key: [{"name": v.name, "type": v.type, "shape": v.shape} for v in values] for key, values in items.items()
        }

    # FastAPI calls functions in threads of its own: the requests that wait there are joined to batches.
    @app.post("/run")
    def run(request: request_type) -> dict[str, Any]:  # type: ignore[valid-type]
        """Run the model."""
        data: Any = request
        return {"outputs": server.run(data.inputs.model_dump(), data.outputs)}

    @app.exception_handler(onnxplace.OnnxplaceError)
    async def report(_: Request, error: onnxplace.OnnxplaceError) -> JSONResponse:
        status, headers = 500, {}
        if isinstance(error, onnxplace.InputError):
            status = 422
        elif isinstance(error, onnxplace.RunTimeoutError):
            status = 504
        elif error.code == "X002":
            status, headers = 503, {"retry-after": "1"}
        return JSONResponse(describe(error), status, headers)

    return app


def describe(error: onnxplace.OnnxplaceError) -> dict[str, Any]:
    """Return an error as the commands print it with `--json`."""
    return {"error": {"code": error.code, "where": error.where, "message": error.message, "hint": error.hint}}


def main() -> None:
    """Serve the bundle that the command line names, until SIGTERM or Ctrl-C."""
    import uvicorn

    parser = argparse.ArgumentParser(description="Serve a bundle over HTTP.")
    parser.add_argument("bundle")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-batch", type=int, default=Options.max_batch, help="1: do not join requests")
    parser.add_argument("--max-delay-ms", type=float, default=Options.max_delay_ms)
    parser.add_argument("--timeout", type=float, default=Options.timeout_seconds, help="seconds")
    arguments = parser.parse_args()
    options = Options(arguments.max_batch, arguments.max_delay_ms, arguments.timeout)
    try:
        app = create_app(arguments.bundle, options)
    except onnxplace.OnnxplaceError as error:
        raise SystemExit(str(error)) from None
    uvicorn.run(app, host=arguments.host, port=arguments.port, timeout_graceful_shutdown=int(arguments.timeout))


if __name__ == "__main__":
    main()
