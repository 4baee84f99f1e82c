"""Requests that no honest client sends, each with the statuses that a server may answer.

They are for `HOSTILE_MODEL`, or another model with such inputs and outputs, which a server has under the name `m`. Its
requests may have `MAX_REQUEST_BYTES`.
"""

from __future__ import annotations

import gzip
import json
import random
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import grpc

MAX_REQUEST_BYTES = 1 << 20
SECONDS = 30.0
HOSTILE_MODEL = """<ir_version: 8, opset_import: ["": 17]>
m (float[batch, 64] x) => (float[batch, 64] y) { a = Tanh(x)  y = Abs(a) }"""


@dataclass(frozen=True)
class HostileRequest:
    """Bytes to send over a connection of their own, and what may come back."""

    kind: str
    data: bytes
    statuses: tuple[int, ...]


def make_post(body: bytes, path: str = "/v2/models/m/infer", **headers: object) -> bytes:
    """Return the bytes of a POST; a header of None is left out."""
    given = {"host": "localhost", "content-length": len(body)}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in given.items() if value is not None]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


def make_input(**changes: object) -> bytes:
    """Return the JSON of a good request with some fields of its input replaced."""
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [0.5] * 64, **changes}
    return json.dumps({"inputs": [{name: value for name, value in entry.items() if value is not None}]}).encode()


def change_raw(size: object, actual: int, rng: random.Random, shape: object = (1, 64)) -> bytes:
    """Return a request with raw bytes whose size is not what its JSON says."""
    body = make_input(data=None, shape=shape, parameters={"binary_data_size": size})
    return make_post(body + rng.randbytes(actual), inference_header_content_length=len(body))


def list_kinds() -> dict[str, tuple[Callable[[random.Random], bytes], tuple[int, ...]]]:
    """Return a maker for each kind, and its statuses."""
    good = make_input()
    huge = [1 << 62, -(1 << 70), -1, 1 << 31, 1.5, "2", None, True, [1], {"a": 1}]
    odd_names = ["..%2f..%2fetc", "%00", "m%0d%0aset-cookie", "x" * 3000, "M", "m%20", "%ff%fe", "'\"<>"]
    values: list[object] = [None, 1, "x", [], {}, [[]], [{}], [1], [None], True, 1e400]
    encode, types = json.dumps, ["FP64", "fp32", 3, "BYTES", []]
    outputs, lengths = [values[1], values[2], *values[5:10]], ["-1", "x", 1 << 60, "1e3", len(good) + 1]
    bomb = zlib.compress(bytes(64 << 20))
    return {
        "truncated JSON": (lambda r: make_post(good[: r.randrange(len(good))]), (400,)),
        "changed byte": (lambda r: make_post(replace_byte(good, r)), (200, 400)),
        "random bytes as body": (lambda r: make_post(r.randbytes(r.randrange(1, 400))), (400,)),
        "other JSON": (lambda r: make_post(encode(r.choice(values)).encode()), (400,)),
        "other inputs": (lambda r: make_post(encode({"inputs": r.choice(values)}).encode()), (400,)),
        "other outputs": (
            lambda r: make_post(good[:-1] + b', "outputs": ' + encode(r.choice(outputs)).encode() + b"}"),
            (400,),
        ),
        "deep JSON": (lambda r: make_post(b'{"inputs": ' + b"[" * r.randrange(2000, 200_000)), (400,)),
        "repeated key": (lambda r: make_post(b'{"inputs": [], "inputs": []}'), (400,)),
        "unknown input": (lambda r: make_post(make_input(name=r.choice(["y", "", 3, None, "x" * 9999]))), (400,)),
        "other datatype": (lambda r: make_post(make_input(datatype=r.choice(types))), (400,)),
        "odd shape": (lambda r: make_post(make_input(shape=r.choice([[1, value] for value in huge] + huge))), (400,)),
        "long shape": (lambda r: make_post(make_input(shape=[1] * r.randrange(3, 5000))), (400,)),
        "other data": (lambda r: make_post(make_input(data=r.choice([*values, ["a"] * 64, [10**400] * 64]))), (400,)),
        "too few data": (lambda r: make_post(make_input(data=[0.5] * r.randrange(64))), (400,)),
        "uneven data": (lambda r: make_post(make_input(data=[[1, 2], [3]])), (400,)),
        "shared memory": (lambda r: make_post(make_input(parameters={"shared_memory_region": "r"})), (400,)),
        "odd parameters": (lambda r: make_post(make_input(parameters=r.choice([1, [], "a"]))), (400,)),
        "odd timeout": (lambda r: make_post(good[:-1] + b', "parameters": {"timeout": "soon"}}'), (400,)),
        "odd raw size": (lambda r: change_raw(r.choice(huge), 256, r), (400,)),
        "raw size beyond the body": (lambda r: change_raw(256 + r.randrange(1, 999), 256, r), (400,)),
        "raw bytes left over": (lambda r: change_raw(256, 256 + r.randrange(1, 999), r), (400,)),
        "raw bytes of another shape": (lambda r: change_raw(256, 256, r, (r.randrange(2, 99), 64)), (400,)),
        "odd JSON length": (
            lambda r: make_post(good, inference_header_content_length=r.choice(lengths)),
            (400,),
        ),
        "too large": (lambda r: make_post(bytes(MAX_REQUEST_BYTES + r.randrange(1, 999))), (413,)),
        "too large in chunks": (
            lambda r: make_post(b"", content_length=None, transfer_encoding="chunked")
            + b"20000\r\n%b\r\n" % bytes(0x20000) * 9
            + b"0\r\n\r\n",
            (413,),
        ),
        "compressed without end": (lambda r: make_post(bomb, content_encoding="deflate"), (413,)),
        "junk behind gzip": (
            lambda r: make_post(gzip.compress(good) + r.randbytes(r.randrange(1, 99)), content_encoding="gzip"),
            (400,),
        ),
        "gzip that ends early": (
            lambda r: make_post(gzip.compress(good)[: -r.randrange(1, 9)], content_encoding="gzip"),
            (400,),
        ),
        "two lengths": (lambda r: make_post(good, transfer_encoding="chunked"), (400,)),
        "odd id": (lambda r: make_post(good[:-1] + b', "id": ' + encode(r.choice(values[5:])).encode() + b"}"), (400,)),
        "not compressed": (lambda r: make_post(good, content_encoding=r.choice(["gzip", "br", "x"])), (400,)),
        "odd content-length": (lambda r: make_post(good, content_length=r.choice(["-5", "x", "9" * 40])), (400,)),
        "two content-lengths": (lambda r: make_post(good, Content_Length=len(good) - 1), (400,)),
        "short content-length": (lambda r: make_post(good, content_length=r.randrange(1, len(good))), (400,)),
        "huge header": (lambda r: make_post(good, x_long="a" * r.randrange(65_536, 300_000)), (431,)),
        "many headers": (lambda r: make_post(good, **{f"x_{n}": "a" * 20 for n in range(9000)}), (431,)),
        "bad header": (lambda r: make_post(good, **{r.choice(["a b", "(", "x\0"]): 1}), (400,)),
        "not HTTP": (lambda r: b"\x16\x03\x01" + r.randbytes(64) + b"\r\n\r\n", (400,)),
        "odd model": (lambda r: make_post(good, f"/v2/models/{r.choice(odd_names)}/infer"), (404,)),
        "odd version": (lambda r: make_post(good, f"/v2/models/m/versions/{r.choice(['2', '-1', 'x'])}/infer"), (404,)),
        "odd path": (lambda r: make_post(good, r.choice(["/", "/v3", "/v2/models", "/v2//infer", "/../x"])), (404,)),
        "odd method": (lambda r: make_post(good).replace(b"POST", r.choice([b"PUT", b"DELETE", b"GET"]), 1), (405,)),
    }  # fmt: skip


def replace_byte(text: bytes, rng: random.Random) -> bytes:
    """Return a text with one byte changed."""
    position = rng.randrange(len(text))
    return text[:position] + rng.randbytes(1) + text[position + 1 :]


def make_hostile_requests(count: int, seed: int = 0) -> Iterator[HostileRequest]:
    """Yield requests of all kinds in turn, different for each seed."""
    rng, kinds = random.Random(seed), list(list_kinds().items())
    for number in range(count):
        kind, (make, statuses) = kinds[number % len(kinds)]
        yield HostileRequest(kind, make(rng), statuses)


def send(port: int, data: bytes) -> tuple[int, bytes]:
    """Send bytes over a connection of their own; return the status of the first answer, and its text."""
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        received = b""
        with suppress(ConnectionError):  # it was refused before its end
            connection.sendall(data)
        with suppress(ConnectionError):
            while b"\r\n\r\n" not in received and (chunk := connection.recv(1 << 16)):
                received += chunk
        head, _, text = received.partition(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        with suppress(ConnectionError):
            # Without a length, an answer ends with its connection.
            while (not lengths or len(text) < int(lengths[0])) and (chunk := connection.recv(1 << 16)):
                text += chunk
    return int(head.split(b" ")[1]) if head.startswith(b"HTTP/1.1 ") else 0, text


def list_unclear_answers(port: int, count: int, seed: int = 0) -> list[str]:
    """Send hostile requests and return those whose answer has another status, or an error without a text."""
    unclear = []
    for request in make_hostile_requests(count, seed):
        status, text = send(port, request.data)
        if status not in request.statuses or (status != 200 and not text):
            unclear.append(f"{request.kind}: {status} {text[:200]!r}")
    return unclear


def list_unclear_calls(port: int, count: int, seed: int = 0) -> list[str]:
    """Call ModelInfer of gRPC with changed messages and return those that end without a clear code."""
    from tritonclient.grpc import service_pb2

    rng, unclear = random.Random(seed), []
    clear = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INTERNAL)
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 64])
    good = service_pb2.ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[bytes(256)])
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for _ in range(count):
            data = replace_byte(good.SerializeToString()[: rng.choice((-1, 30, 300))], rng)
            try:
                call(data, timeout=SECONDS)
            except grpc.RpcError as problem:
                if problem.code() not in clear or not problem.details():
                    unclear.append(f"{problem.code()}: {problem.details()}")
    return unclear
