"""Connections of a server: small answers, clients that leave, and requests that are none."""

import asyncio
import gzip
import json
import socket
import time
import zlib
from contextlib import suppress

import numpy as np
import pytest

pytest.importorskip("google.protobuf.runtime_version", reason="tritonclient needs protobuf 5.26 or later")

import tritonclient.grpc
from onnx import parser

import onnxplace
from onnxplace.feeds.feeds import Declared
from onnxplace_serving.served_models import Limits
from onnxplace_serving.server import listen
from onnxplace_serving.tensors import read_raw
from plugins.serving.tests.support.hostile_requests import HOSTILE_MODEL, MAX_REQUEST_BYTES, make_input, make_post, send
from plugins.serving.tests.support.servers import WAIT_SECONDS, serve_in_thread
from tests.conftest import FAST_PIPELINE
from tests.support import endless
from tests.support.fault_checks import wait_until

TCP_NODELAY = socket.IPPROTO_TCP, socket.TCP_NODELAY


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_parts_of_an_answer_do_not_wait_for_acknowledgements(host):
    async def read_option():
        options = asyncio.Queue()

        async def answer(_, writer):
            await options.put(writer.get_extra_info("socket").getsockopt(*TCP_NODELAY))
            writer.close()

        with listen(host, 0) as listener:
            async with await asyncio.start_server(answer, sock=listener):
                with socket.create_connection((host, listener.getsockname()[1])):
                    return await options.get()

    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    assert asyncio.run(read_option())


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


# -------------------------------------------------------------------------------------------------- clients that leave


@pytest.fixture(scope="module")
def endless_server(tmp_path_factory):
    """A server of a model that runs as long as its request says, one request at a time, and others in the queue."""
    bundle = endless.endless_bundle(tmp_path_factory.mktemp("endless"))
    with serve_in_thread({"e": bundle.path}, Limits(max_in_flight=1, timeout_seconds=WAIT_SECONDS)) as running:
        yield running


def make_request(rounds):
    entries = [("limit", "INT64", [], [rounds]), ("x", "FP32", [4], endless.X.tolist())]
    inputs = [dict(zip(("name", "datatype", "shape", "data"), entry, strict=True)) for entry in entries]
    return make_post(json.dumps({"inputs": inputs}).encode(), "/v2/models/e/infer")


def count_cancelled(server):
    return server.models["e"].statistics.failures["cancelled"]


@pytest.mark.parametrize("behind", [b"", b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n", make_request(1), b"nonsense\r\n\r\n"])
def test_a_client_of_http_that_leaves_ends_its_requests(endless_server, behind):
    model, before = endless_server.models["e"], count_cancelled(endless_server)
    with socket.create_connection(("127.0.0.1", endless_server.http_port)) as running:
        running.sendall(make_request(1 << 40) + behind)
        wait_until(model._slots.locked)
        with socket.create_connection(("127.0.0.1", endless_server.http_port)) as waiting:
            waiting.sendall(make_request(1 << 40))
            wait_until(lambda: model.waiting_requests)
        wait_until(lambda: not model.waiting_requests)
        assert model._slots.locked()
    wait_until(lambda: not model._slots.locked())
    assert count_cancelled(endless_server) == before + 2
    status, text = send(endless_server.http_port, make_request(3))
    assert (status, json.loads(text)["outputs"][0]["data"]) == (200, endless.X.tolist())


def test_a_client_that_has_its_answer_may_ask_again_or_leave(endless_server):
    before = count_cancelled(endless_server)
    with socket.create_connection(("127.0.0.1", endless_server.http_port)) as connection:
        connection.sendall(make_request(3) + make_request(3) + make_request(1))
        text = b""
        while text.count(b'"outputs"') < 3:
            text += connection.recv(1 << 16)
    assert text.count(b"HTTP/1.1 200 OK") == 3
    assert count_cancelled(endless_server) == before


def test_a_stream_of_grpc_that_is_cancelled_ends_its_requests(endless_server):
    model, before = endless_server.models["e"], count_cancelled(endless_server)
    tensors = [tritonclient.grpc.InferInput("limit", [], "INT64"), tritonclient.grpc.InferInput("x", [4], "FP32")]
    for tensor, array in zip(tensors, endless.feeds(None).values(), strict=True):
        tensor.set_data_from_numpy(array)
    with tritonclient.grpc.InferenceServerClient(endless_server.grpc) as client:
        client.start_stream(lambda result, error: None)
        for _ in range(5):
            client.async_stream_infer("e", tensors)
        wait_until(lambda: model.open_requests == 5)
        client.stop_stream(cancel_requests=True)
        wait_until(lambda: model.open_requests == 0 and not model._slots.locked())
    assert count_cancelled(endless_server) == before + 5


# ------------------------------------------------------------------------------------------- requests that are not HTTP


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of the model that hostile requests are for."""
    folder = tmp_path_factory.mktemp("hostile")
    model = parser.parse_model(HOSTILE_MODEL)
    bundle = onnxplace.compile(model, folder / "m", devices="cpu:0", shape={"batch": 1}, pipeline=FAST_PIPELINE)
    with serve_in_thread({"m": bundle.path}, Limits(max_request_bytes=MAX_REQUEST_BYTES, timeout_seconds=2)) as running:
        yield running


def exchange(server, *pieces):
    """Send pieces over a connection, each after the server has read the one before; return all that comes back."""
    with socket.create_connection(("127.0.0.1", server.http_port), WAIT_SECONDS) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.05)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        with suppress(ConnectionError):
            while chunk := connection.recv(1 << 16):
                received += chunk
    return received


@pytest.mark.parametrize("size", [65_536, 70_000, 131_072, 400_000, 3_000_000])
def test_headers_of_64_kib_are_refused_by_their_status(server, size):
    assert send(server.http_port, make_post(make_input(), x="a" * (60_000)))[0] == 200
    for headers in ({"x": "a" * size}, {f"x-{number}": "a" * 1000 for number in range(size // 1000 + 1)}):
        status, text = send(server.http_port, make_post(make_input(), **headers))
        assert (status, text) == (431, b"headers have more than 65536 bytes")


GET = b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKS = b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("pieces", "status", "words"),
    [
        ((CHUNKS + b"\r\n3\r\nabc\r\n", b"zz\r\n"), 400, "Invalid HTTP request received: illegal chunk header"),
        ((CHUNKS + b"\r\n3\r\nabcXX0\r\n\r\n",), 400, "malformed chunk footer"),
        (
            (CHUNKS + b"content-length: 3\r\n\r\n0\r\n\r\nGET /v2 HTTP/1.1\r\nhost: x\r\n\r\n",),
            400,
            "proxies may differ about its end",
        ),
        ((CHUNKS + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",), 501, "multiple Transfer-Encoding headers"),
        ((CHUNKS.replace(b"chunked", b"gzip") + b"\r\n",), 501, "Only Transfer-Encoding"),
        ((b"GET /v2 HTTP/1.1\r\n\r\n",), 400, "Missing mandatory Host"),
    ],
)
def test_what_is_not_http_is_answered_once_and_says_why(server, caplog, pieces, status, words):
    answer = exchange(server, *pieces)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert words.encode() in answer
    wait_until(lambda: server.models["m"].open_requests == 0)
    assert not caplog.records


def test_what_follows_the_last_request_of_a_connection_is_ignored(server, caplog):
    good = make_post(make_input(), connection="close")
    with socket.create_connection(("127.0.0.1", server.http_port), WAIT_SECONDS) as connection:
        for piece in (good[:-5], good[-5:], b"more", b"and more"):
            with suppress(ConnectionError):
                connection.sendall(piece)
        received = connection.recv(1 << 16)
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert not caplog.records


# --------------------------------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP", "deflate", "identity", ""])
def test_a_body_is_taken_in_the_encoding_of_its_header(server, encoding):
    compress = gzip.compress if "gzip" in encoding.lower() else zlib.compress if encoding == "deflate" else bytes
    assert send(server.http_port, make_post(compress(make_input()), content_encoding=encoding))[0] == 200


BODY = gzip.compress(make_input(), mtime=0)  # workers must agree on the names of tests


@pytest.mark.parametrize(
    ("body", "encoding", "status", "words"),
    [
        (BODY + b"junk", "gzip", 400, "bytes behind its end"),
        (BODY + BODY, "gzip", 400, "bytes behind its end"),
        (zlib.compress(make_input()) + b"x", "deflate", 400, "bytes behind its end"),
        (BODY[:-1], "gzip", 400, "the compressed body ends too early"),
        (BODY[:-8], "gzip", 400, "ends too early"),
        (BODY[:-8] + bytes(8), "gzip", 400, "incorrect data check"),
        (b"", "deflate", 400, "ends too early"),
        (make_input(), "br", 400, "expected a body in gzip or deflate"),
        (gzip.compress(BODY, mtime=0), "gzip, gzip", 400, "it is a binary file"),
        (gzip.compress(bytes(MAX_REQUEST_BYTES), mtime=0), "gzip", 400, "invalid JSON"),
        (gzip.compress(bytes(MAX_REQUEST_BYTES + 1), mtime=0), "gzip", 413, "larger than"),
    ],
)
def test_a_compressed_body_is_taken_whole_and_alone(server, body, encoding, status, words):
    actual, text = send(server.http_port, make_post(body, content_encoding=encoding))
    assert (actual, words in text.decode()) == (status, True), text


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"id": None}, 200, '"id": ""'),
        ({"id": "None"}, 200, '"id": "None"'),
        ({"id": 5}, 400, "id: expected a text, got 5"),
        ({"id": ["a"]}, 400, "id: expected a text"),
        ({"outputs": None, "parameters": None}, 200, '"name": "y"'),
        ({"outputs": [{"name": None}]}, 400, "the name of an output: expected a text, got None"),
        ({"outputs": [{"name": "y", "parameters": {"binary_data": "no"}}]}, 400, "binary_data: expected true or false"),
        ({"parameters": {"binary_data_output": 0}}, 400, "binary_data_output: expected true or false, got 0"),
    ],
)
def test_fields_that_are_null_are_left_out_and_others_have_their_kind(server, changes, status, words):
    body = json.dumps({**json.loads(make_input()), **changes}).encode()
    actual, text = send(server.http_port, make_post(body))
    assert (actual, words in text.decode()) == (status, True), text


def test_elements_are_given_once(server):
    head = make_input(parameters={"binary_data_size": 256})
    status, text = send(server.http_port, make_post(head + bytes(256), inference_header_content_length=len(head)))
    assert (status, b"it has its elements twice: in raw bytes, and in a list" in text) == (400, True)


def test_every_byte_of_truth_but_zero_is_true():
    # ONNX Runtime's kernels answer Not(2) with true.
    array = read_raw(Declared("x", "tensor(bool)", None), b"\x00\x01\x02\xff")
    assert array.view(np.uint8).tolist() == [0, 1, 1, 1]
