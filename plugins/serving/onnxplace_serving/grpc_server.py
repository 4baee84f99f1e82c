"""The protocol over gRPC; its messages are built from their published definitions in `inference.textproto`.

Answers about servers and models are those over HTTP, in messages of the same fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message, message_factory, text_format

from onnxplace_serving.served_models import (
    STATUSES,
    VERSION,
    Limits,
    RequestError,
    ServedModel,
    ServedModels,
    describe_failure,
)
from onnxplace_serving.tensors import describe_output, read_inputs, read_parameters, write_raw

SERVICE = "inference.GRPCInferenceService"
# Calls at a time, besides those that have places as requests.
MAX_OTHER_CALLS = 64
# Requests of one stream that are worked on at a time.
MAX_STREAMED = 64


@cache
def load_messages() -> dict[str, Any]:
    """Return the classes of all messages by name, in a pool of their own: others may define the same names."""
    text = Path(__file__).with_name("inference.textproto").read_text(encoding="utf-8")
    file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name.removeprefix("inference."): kind for name, kind in classes.items()}


def to_json(entry: Any) -> dict[str, Any]:
    """Return a request, or a tensor of one, as JSON has it; raw contents stay in the message."""
    chosen = {key: (value, value.WhichOneof("parameter_choice")) for key, value in entry.parameters.items()}
    plain: dict[str, Any] = {"parameters": {key: getattr(value, name) for key, (value, name) in chosen.items() if name}}
    if hasattr(entry, "inputs"):
        return {**plain, "inputs": [to_json(item) for item in entry.inputs]}
    if hasattr(entry, "contents"):
        plain |= {"datatype": entry.datatype, "shape": list(entry.shape)}
        plain["data"] = [element for _, elements in entry.contents.ListFields() for element in elements]
    return {**plain, "name": entry.name}


def parse(name: str, data: bytes) -> Any:
    """Return a message; raises RequestError if the bytes are none."""
    try:
        return load_messages()[name].FromString(data)
    except message.DecodeError as problem:
        raise RequestError(400, str(problem)) from None


async def infer(models: ServedModels, data: bytes) -> Any:
    """Return the answer to a request; raises RequestError."""
    request = parse("ModelInferRequest", data)
    model = models.find(request.model_name, request.model_version)
    with model.admit() as deadline:
        raw, header = iter(request.raw_input_contents), to_json(request)
        if request.raw_input_contents and len(request.raw_input_contents) != len(request.inputs):
            raise RequestError(400, f"expected raw contents for all {len(request.inputs)} inputs, or for none")
        feeds = read_inputs(header, model.inputs, lambda _: next(raw, None))
        for entry in request.outputs:
            read_parameters(to_json(entry))
        names = [entry.name for entry in request.outputs]
        outputs = await model.infer(feeds, names, read_parameters(header), deadline)
        return load_messages()["ModelInferResponse"](
            model_name=model.name,
            model_version=VERSION,
            id=request.id,
            outputs=[describe_output(model.outputs[name], array) for name, array in outputs.items()],
            raw_output_contents=[bytes(write_raw(array)) for array in outputs.values()],
        )


async def stream_inferences(models: ServedModels, requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[Any]:
    """Yield the answers to the requests of a stream in their order; they run at the same time."""
    response = load_messages()["ModelStreamInferResponse"]
    pending: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(MAX_STREAMED)
    tasks = set[asyncio.Task[Any]]()

    async def start_all() -> None:
        async for request in requests:
            tasks.add(task := asyncio.create_task(infer(models, request)))
            await pending.put(task)
        await pending.put(None)

    starter = asyncio.create_task(start_all())
    try:
        while (task := await pending.get()) is not None:
            try:
                yield response(infer_response=await task)
            except RequestError as failure:
                yield response(error_message=str(failure))
            tasks.discard(task)
    finally:  # some are left if the client has left
        for task in (starter, *tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_handlers(models: ServedModels) -> dict[str, Any]:
    """Return the handler of each method."""
    messages = load_messages()

    def find(request: Any) -> ServedModel:
        return models.find(request.name, request.version)

    answers: dict[str, Callable[[Any], dict[str, Any]]] = {
        "ServerLive": lambda _: {"live": True},
        "ServerReady": lambda _: {"ready": models.is_ready},
        "ServerMetadata": lambda _: models.describe(),
        "ModelReady": lambda request: {"ready": not find(request).reason},
        "ModelMetadata": lambda request: find(request).describe(),
        "ModelConfig": lambda request: {"config": find(request).describe_config()},
        "ModelStatistics": lambda request: models.describe_statistics(request.name, request.version),
        "RepositoryIndex": lambda _: {"models": models.describe_index()},
    }

    def make_handler(name: str, respond: Callable[[bytes], Awaitable[Any]]) -> Any:
        async def call(data: bytes, context: Any) -> Any:
            try:
                return await respond(data)
            except Exception as problem:  # noqa: BLE001 - its sender gets it
                failure = describe_failure(problem)
                await context.abort(grpc.StatusCode[STATUSES[failure.status][1]], str(failure))

        return grpc.unary_unary_rpc_method_handler(call, None, messages[f"{name}Response"].SerializeToString)

    async def answer(name: str, data: bytes) -> Any:
        described, response = answers[name](parse(f"{name}Request", data)), messages[f"{name}Response"]()
        return json_format.ParseDict(described, response, ignore_unknown_fields=True)

    handlers = {name: make_handler(name, partial(answer, name)) for name in answers}
    handlers["ModelInfer"] = make_handler("ModelInfer", partial(infer, models))
    stream, write = partial(stream_inferences, models), messages["ModelStreamInferResponse"].SerializeToString
    return {**handlers, "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(stream, None, write)}


def make_grpc_server(models: ServedModels, limits: Limits) -> Any:
    """Return a server without addresses; it runs on the event loop of the thread that calls this."""
    sizes = {"max_receive_message_length": limits.max_request_bytes, "max_send_message_length": -1, "so_reuseport": 0}
    places = sum(model.places + limits.max_queue for model in models.models.values()) + MAX_OTHER_CALLS
    options = [(f"grpc.{name}", value) for name, value in sizes.items()]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=places)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, make_handlers(models)),))
    return server
