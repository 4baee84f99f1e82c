"""The protocol over gRPC; its messages are built from their published definitions in `inference.textproto`.

Answers about servers and models are those over HTTP, in messages of the same fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, text_format

from onnxplace.errors import format_value
from onnxplace.feeds import Array
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
from onnxplace.serving.tensors import check_tensor, name_datatype, read_list, read_raw, write_raw

SERVICE = "inference.GRPCInferenceService"
# Calls of all kinds at a time: those of requests have a place each.
MAX_OTHER_CALLS = 64
# Requests of one stream that are worked on at a time.
MAX_STREAMED = 64
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""By the status of HTTP; INTERNAL for others."""
# The field of a tensor's contents, for each type that has one.
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


@cache
def load_messages() -> dict[str, Any]:
    """Return the classes of all messages by name, in a pool of their own: others may define the same names."""
    text = Path(__file__).with_name("inference.textproto").read_text(encoding="utf-8")
    file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name.removeprefix("inference."): kind for name, kind in classes.items()}


def read_parameters(entry: Any) -> dict[str, Any]:
    """Return the parameters of a request or tensor; raises RequestError for those that ask for an extension."""
    chosen = {key: (value, value.WhichOneof("parameter_choice")) for key, value in entry.parameters.items()}
    parameters = {key: getattr(value, choice) for key, (value, choice) in chosen.items() if choice}
    refuse_extensions(parameters)
    return parameters


def read_request(model: ServedModel, request: Any) -> InferenceRequest:
    """Return what a message asks for; raises RequestError or FeedError."""
    raw, feeds = list(request.raw_input_contents), dict[str, Array]()
    if raw and len(raw) != len(request.inputs):
        raise RequestError(400, f"expected raw contents for all {len(request.inputs)} inputs, got {len(raw)}")
    for index, entry in enumerate(request.inputs):
        if entry.name not in model.inputs or entry.name in feeds:
            message = f"input {format_value(entry.name)} is given twice, or the model does not have it"
            raise RequestError(400, message)
        read_parameters(entry)
        item = model.inputs[entry.name]
        shape = check_tensor(item, entry.datatype, list(entry.shape))
        if raw:
            feeds[entry.name] = read_raw(item, shape, raw[index])
            continue
        contents = _CONTENTS.get(entry.datatype)
        if contents is None:
            raise RequestError(400, f"input {entry.name!r}: {entry.datatype} has to be given as raw contents")
        feeds[entry.name] = read_list(item, shape, list(getattr(entry.contents, contents)))
    for entry in request.outputs:
        read_parameters(entry)
    return InferenceRequest(feeds, [entry.name for entry in request.outputs], request.id, read_parameters(request))


def write_response(model: ServedModel, request_id: str, outputs: Mapping[str, Array]) -> Any:
    """Return the message with all outputs as raw contents."""
    tensors = [
        {"name": name, "datatype": name_datatype(model.outputs[name].dtype), "shape": list(array.shape)}
        for name, array in outputs.items()
    ]
    return load_messages()["ModelInferResponse"](
        model_name=model.name,
        model_version=VERSION,
        id=request_id,
        outputs=tensors,
        raw_output_contents=[bytes(write_raw(np.asarray(array))) for array in outputs.values()],
    )


async def infer(models: ServedModels, request: Any) -> Any:
    """Return the answer to a request; raises RequestError."""
    model = models.find(request.model_name, request.model_version)
    with model.admit() as ticket:
        inference = read_request(model, request)
        return write_response(model, request.id, await model.infer(inference, ticket))


async def stream_inferences(models: ServedModels, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yield the answers to the requests of a stream in their order; they run at the same time."""
    response = load_messages()["ModelStreamInferResponse"]
    pending: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(MAX_STREAMED)

    async def start_all() -> None:
        async for request in requests:
            await pending.put(asyncio.create_task(infer(models, request)))
        await pending.put(None)

    starter = asyncio.create_task(start_all())
    try:
        while (task := await pending.get()) is not None:
            try:
                yield response(infer_response=await task)
            except RequestError as failure:
                yield response(error_message=str(failure))
    finally:
        starter.cancel()
        while not pending.empty():
            if (task := pending.get_nowait()) is not None:
                task.cancel()


def make_handlers(models: ServedModels) -> dict[str, Any]:
    """Return the handler of each method."""
    messages = load_messages()

    def find(request: Any) -> ServedModel:
        return models.find(request.name, request.version)

    answers: dict[str, Callable[[Any], dict[str, Any]]] = {
        "ServerLive": lambda _: {"live": True},
        "ServerReady": lambda _: {"ready": models.is_ready},
        "ServerMetadata": lambda _: models.describe(),
        "ModelReady": lambda request: {"ready": not find(request).is_stopping},
        "ModelMetadata": lambda request: find(request).describe(),
        "ModelConfig": lambda request: {"config": find(request).describe_config()},
        "ModelStatistics": lambda request: models.describe_statistics(request.name, request.version),
        "RepositoryIndex": lambda _: {"models": models.describe_index()},
    }

    def answer(name: str) -> Callable[[Any], Awaitable[Any]]:
        async def respond(request: Any) -> Any:
            message = messages[f"{name}Response"]()
            return json_format.ParseDict(answers[name](request), message, ignore_unknown_fields=True)

        return respond

    def make_handler(name: str, respond: Callable[[Any], Awaitable[Any]], response: str = "") -> Any:
        async def call(request: Any, context: Any) -> Any:
            try:
                return await respond(request)
            except Exception as problem:  # noqa: BLE001 - its sender gets it
                failure = describe_failure(problem)
                await context.abort(CODES.get(failure.status, grpc.StatusCode.INTERNAL), str(failure))

        return grpc.unary_unary_rpc_method_handler(
            call,
            request_deserializer=messages[f"{name}Request"].FromString,
            response_serializer=messages[response or f"{name}Response"].SerializeToString,
        )

    async def stream(requests: AsyncIterator[Any], _: Any) -> AsyncIterator[Any]:
        async for message in stream_inferences(models, requests):
            yield message

    streaming = grpc.stream_stream_rpc_method_handler(
        stream,
        request_deserializer=messages["ModelInferRequest"].FromString,
        response_serializer=messages["ModelStreamInferResponse"].SerializeToString,
    )
    unary = {name: make_handler(name, answer(name)) for name in answers}
    return {
        **unary,
        "ModelInfer": make_handler("ModelInfer", lambda request: infer(models, request)),
        "ModelStreamInfer": streaming,
    }


def make_grpc_server(models: ServedModels, limits: Limits) -> Any:
    """Return a server without addresses; it runs on the event loop of the thread that calls this."""
    places = sum(model.places + limits.max_queue for model in models.models.values())
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", limits.max_request_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ],
        maximum_concurrent_rpcs=places + MAX_OTHER_CALLS,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, make_handlers(models)),))
    return server
