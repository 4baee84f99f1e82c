"""`onnxplace serve`, called by Triton's own clients over HTTP and gRPC."""

import http.client
import json
import queue
import signal
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("google.protobuf.runtime_version", reason="tritonclient needs protobuf 5.26 or later")

import tritonclient.grpc
import tritonclient.http
from onnx import parser
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

import onnxplace
from onnxplace.errors import ExecutionError
from onnxplace_serving.grpc_server import load_messages
from onnxplace_serving.served_models import Limits, describe_failure, require_servable
from plugins.serving.tests.support.hostile_requests import (
    MAX_REQUEST_BYTES,
    list_unclear_answers,
    list_unclear_calls,
    make_post,
    send,
)
from plugins.serving.tests.support.servers import WAIT_SECONDS, serve_in_process, serve_in_thread
from tests.conftest import FAST_PIPELINE
from tests.support import endless

CLIENTS = {"http": tritonclient.http, "grpc": tritonclient.grpc}
TYPES = {
    "bool": (np.array([True, False]), "BOOL"),
    "int8": (np.array([-128, 127], "i1"), "INT8"),
    "uint8": (np.array([0, 255], "u1"), "UINT8"),
    "int16": (np.array([-5, 5], "i2"), "INT16"),
    "uint16": (np.array([5, 65535], "u2"), "UINT16"),
    "int32": (np.array([-5, 5], "i4"), "INT32"),
    "uint32": (np.array([5, 1 << 31], "u4"), "UINT32"),
    "int64": (np.array([-5, 1 << 62], "i8"), "INT64"),
    "uint64": (np.array([1 << 63, (1 << 63) + 5], "u8"), "UINT64"),
    "float16": (np.array([0.5, -2], "f2"), "FP16"),
    "float": (np.array([0.5, -2], "f4"), "FP32"),
    "double": (np.array([0.5, 1e300], "f8"), "FP64"),
    "bfloat16": (np.array([0.5, -2], ml_dtypes.bfloat16), "BF16"),
    "string": (np.array(["\u00fc", ""], object), "BYTES"),
}
SUM = """<ir_version: 8, opset_import: ["": 17]>
sum (float[1] x, float[1] old) => (float[1] y, float[1] new) { new = Add(x, old)  y = Neg(new) }"""


def make_types_model():
    """A model that returns an input of each type as it is, and a scalar."""
    inputs = ", ".join(f"{name}[n] {name}_in" for name in TYPES)
    outputs = ", ".join(f"{name}[n] {name}_out" for name in TYPES)
    nodes = "\n".join(f"{name}_out = Identity({name}_in)" for name in TYPES)
    text = f'<ir_version: 8, opset_import: ["": 17]> types ({inputs}, float scalar) => ({outputs}, float negative)'
    return parser.parse_model(f"{text} {{ {nodes} negative = Neg(scalar) }}")


@pytest.fixture(scope="module")
def server(tmp_path_factory, compiled):
    """A server of three models: m, types, and sum, which carries a state."""
    folder, options = tmp_path_factory.mktemp("served"), {"devices": "cpu:0,cpu:1", "pipeline": FAST_PIPELINE}
    types = onnxplace.compile(make_types_model(), folder / "t", shape={"n": 2}, **options)
    sums = onnxplace.compile(parser.parse_model(SUM), folder / "s", state={"new": "old"}, **options)
    limits = Limits(max_request_bytes=MAX_REQUEST_BYTES, timeout_seconds=WAIT_SECONDS, max_sequences=2)
    with serve_in_thread({"m": compiled, "types": types.path, "sum": sums.path}, limits) as running:
        yield running


@pytest.fixture(params=CLIENTS)
def client(request, server):
    """A client of each protocol."""
    with CLIENTS[request.param].InferenceServerClient(getattr(server, request.param)) as opened:
        yield opened


def make_input(module, name, array, datatype="FP32"):
    tensor = module.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def module_of(client):
    return tritonclient.http if isinstance(client, tritonclient.http.InferenceServerClient) else tritonclient.grpc


def infer(client, model, inputs, **options):
    tensors = [make_input(module_of(client), *item) for item in inputs]
    return client.infer(model, tensors, **options)


# ---------------------------------------------------------------------------------------------------- the protocol


def test_messages_have_the_fields_and_numbers_of_tritons():
    def compare(own, published):
        for item in own.fields:
            other = published.fields_by_name[item.name]
            assert (item.number, item.type, item.is_repeated) == (other.number, other.type, other.is_repeated), (
                item.name
            )
        for nested in own.nested_types:
            compare(nested, published.nested_types_by_name[nested.name])

    published = {**service_pb2.DESCRIPTOR.message_types_by_name, **model_config_pb2.DESCRIPTOR.message_types_by_name}
    messages = load_messages()
    assert len(messages) > 25
    for name, kind in messages.items():
        compare(kind.DESCRIPTOR, published[name])
    own = messages["ModelInput"].DESCRIPTOR.fields_by_name["data_type"].enum_type
    assert {(v.name, v.number) for v in own.values} == set(model_config_pb2.DataType.items())


def test_the_server_and_its_models_describe_themselves(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("m")
    assert client.is_model_ready("m", "1")
    options = {"as_json": True} if module_of(client) is tritonclient.grpc else {}
    assert client.get_server_metadata(**options)["name"] == "onnxplace"
    assert "binary_tensor_data" in client.get_server_metadata(**options)["extensions"]
    metadata = client.get_model_metadata("types", **options)
    assert {item["datatype"] for item in metadata["inputs"]} == {name for _, name in TYPES.values()}
    assert [int(size) for size in metadata["outputs"][0]["shape"]] == [-1]
    config = client.get_model_config("types", **options)
    config = config.get("config", config)
    assert {item["data_type"] for item in config["input"]} >= {"TYPE_STRING", "TYPE_BF16", "TYPE_FP32"}
    assert "sequence_batching" in json.dumps(client.get_model_config("sum", **options))
    index = client.get_model_repository_index(**options)
    assert [item["name"] for item in (index["models"] if options else index)] == ["m", "types", "sum"]


def test_all_types_are_taken_and_returned_as_they_are(client):
    module = module_of(client)
    tensors = [make_input(module, f"{name}_in", array, kind) for name, (array, kind) in TYPES.items()]
    tensors.append(make_input(module, "scalar", np.array(2.5, "f4")))
    result = client.infer("types", tensors, request_id="7")
    assert result.get_response()["id"] == "7" if module is tritonclient.http else result.get_response().id == "7"
    for name, (array, _) in TYPES.items():
        expected = [text.encode() for text in array] if name == "string" else array.tolist()
        assert result.as_numpy(f"{name}_out").tolist() == expected, name
    assert result.as_numpy("negative").shape == ()
    assert result.as_numpy("negative") == -2.5


def test_numbers_in_lists_are_taken_and_returned(server):
    lists = {
        name: (
            [None, -2.0] if name == "float" else array.astype(float).tolist() if name == "bfloat16" else array.tolist()
        )
        for name, (array, _) in TYPES.items()
    }
    given = lists | {"float": [float("inf"), -2.0]}
    inputs = [
        {"name": f"{name}_in", "datatype": datatype, "shape": [2], "data": given[name]}
        for name, (_, datatype) in TYPES.items()
    ]
    inputs.append({"name": "scalar", "datatype": "FP32", "shape": [], "data": [1]})
    outputs = [{"name": f"{name}_out", "parameters": {"binary_data": False}} for name in TYPES]
    answer = post(server, "types", json.dumps({"id": "a", "inputs": inputs, "outputs": outputs}).encode())
    assert {item["name"].removesuffix("_out"): item["data"] for item in answer["outputs"]} == lists
    assert answer["id"] == "a"
    # The same over gRPC, in typed contents.
    request = service_pb2.ModelInferRequest(model_name="types")
    for entry in inputs:
        tensor = request.inputs.add(name=entry["name"], datatype=entry["datatype"], shape=entry["shape"])
        kind = {"BOOL": "bool", "INT8": "int", "INT16": "int", "INT32": "int", "BYTES": "bytes"}.get(entry["datatype"])
        kind = kind or entry["datatype"].lower().replace("uint8", "uint").replace("uint16", "uint").replace(
            "uint32", "uint"
        )
        kind = "fp32" if kind in ("fp16", "bf16") else kind
        data = [text.encode() for text in entry["data"]] if kind == "bytes" else entry["data"]
        getattr(tensor.contents, f"{kind}_contents").extend(data)
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        answer = client._client_stub.ModelInfer(request)
    result = tritonclient.grpc.InferResult(answer)
    assert result.as_numpy("int8_out").tolist() == lists["int8"]
    assert result.as_numpy("string_out").tolist() == [b"\xc3\xbc", b""]
    assert result.as_numpy("float16_out").tolist() == lists["float16"]


def post(server, model, body, **headers):
    status, text = send(server.http_port, make_post(body, f"/v2/models/{model}/infer", connection="close", **headers))
    assert status == 200, text
    return json.loads(text)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_are_taken(server, algorithm):
    x = np.ones((2, 64), "f4")
    with tritonclient.http.InferenceServerClient(server.http) as client:
        result = client.infer("m", [make_input(tritonclient.http, "x", x)], request_compression_algorithm=algorithm)
    assert result.as_numpy("y").shape == (2, 64)


def test_only_the_outputs_that_are_named_are_returned(client):
    module = module_of(client)
    tensors = [make_input(module, f"{name}_in", array, kind) for name, (array, kind) in TYPES.items()]
    tensors.append(make_input(module, "scalar", np.array(1, "f4")))
    result = client.infer("types", tensors, outputs=[module.InferRequestedOutput("negative")])
    assert result.as_numpy("negative") == -1
    assert result.as_numpy("float_out") is None
    with pytest.raises(InferenceServerException, match=r"no output 'positive'"):
        client.infer("types", tensors, outputs=[module.InferRequestedOutput("positive")])


@pytest.mark.parametrize(
    ("model", "inputs", "options", "words"),
    [
        ("n", [("x", np.ones((1, 64), "f4"))], {}, "there is no model 'n'"),
        ("m", [("x", np.ones((1, 64), "f4"))], {"model_version": "2"}, "version 1 only, got '2'"),
        ("m", [("x", np.ones((1, 63), "f4"))], {}, "axis 1 must be 64"),
        ("m", [("x", np.ones((1, 64), "f8"), "FP64")], {}, "its datatype is 'FP64', the model takes FP32"),
        ("m", [("z", np.ones((1, 64), "f4"))], {}, "the model has no input 'z'"),
        ("m", [("x", np.ones((1, 64), "f4"))] * 2, {}, "given twice"),
        ("sum", [("x", np.ones(1, "f4"))], {}, "carries states: expected a sequence_id"),
        ("sum", [("x", np.ones(1, "f4"))], {"sequence_id": 9}, "sequence 9 has not started"),
    ],
)
def test_requests_that_do_not_fit_say_why(client, model, inputs, options, words):
    with pytest.raises(InferenceServerException) as caught:
        infer(client, model, inputs, **options)
    assert words in caught.value.message()
    assert caught.value.status() in ("400", "404", "StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND")


def test_values_that_onnx_runtime_refuses_are_the_senders_and_are_not_logged(caplog):
    refused = ExecutionError("X001", "segment cpu0-000 failed: INVALID_ARGUMENT: indices element out of data bounds")
    assert describe_failure(refused).status == 400
    assert not caplog.records
    assert describe_failure(ExecutionError("X001", "segment cpu0-000 failed: out of order")).status == 500
    assert [record.exc_info for record in caplog.records] == [None]


def test_extensions_that_are_not_there_say_so(client):
    tensor = module_of(client).InferInput("x", [1, 64], "FP32")
    tensor.set_shared_memory("region", 256)
    with pytest.raises(InferenceServerException, match=r"shared_memory_region.*does not have this extension"):
        client.infer("m", [tensor])
    with pytest.raises(InferenceServerException, match=r"Not Found|[Mm]ethod not found"):
        client.get_system_shared_memory_status()


# ------------------------------------------------------------------------------------------------- states, joining


def test_sequences_have_states_of_their_own(client):
    def add(sequence, value, **options):
        inputs = [("x", np.array([value], "f4"))]
        if options.get("sequence_start"):
            inputs.append(("old", np.zeros(1, "f4")))
        return float(infer(client, "sum", inputs, sequence_id=sequence, **options).as_numpy("y")[0])

    assert [add(1, 5, sequence_start=True), add("b", 7, sequence_start=True)] == [-5, -7]
    assert [add(1, 1), add("b", 2)] == [-6, -9]
    with pytest.raises(InferenceServerException, match="2 sequences of 'sum' are open: end one with sequence_end"):
        add(3, 0, sequence_start=True)
    assert add(1, 0, sequence_start=True) == 0, "a sequence may start again"
    assert [add(1, 4, sequence_end=True), add("b", 1, sequence_end=True)] == [-4, -10]
    with pytest.raises(InferenceServerException, match="sequence 1 has not started"):
        add(1, 1)


def test_a_stream_of_grpc_answers_in_order_and_reports_errors(server):
    answers = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(6):
            inputs = [make_input(tritonclient.grpc, "x", np.full(1, number, "f4"))]
            if number == 0:
                inputs.append(make_input(tritonclient.grpc, "old", np.zeros(1, "f4")))
            options = {"sequence_id": 77, "sequence_start": number == 0, "sequence_end": number == 5}
            client.async_stream_infer("sum", inputs, **options)
        client.async_stream_infer("none", [make_input(tritonclient.grpc, "x", np.ones(1, "f4"))])
        results = [answers.get(timeout=WAIT_SECONDS) for _ in range(7)]
        client.stop_stream()
    assert [result.as_numpy("y").tolist() for result, _ in results[:6]] == [[-n * (n + 1) / 2] for n in range(6)]
    assert "there is no model 'none'" in str(results[6][1])


@pytest.mark.parametrize("protocol", CLIENTS)
def test_joined_requests_are_answered_as_single_ones(compiled, protocol):
    module, random = CLIENTS[protocol], np.random.default_rng(0)
    arrays = [random.standard_normal((1 + number % 3, 64)).astype("f4") for number in range(24)]
    with onnxplace.InferenceSession(compiled) as session:
        expected = [session.run(None, {"x": x})[0] for x in arrays]
    limits = Limits(max_in_flight=1, timeout_seconds=WAIT_SECONDS)
    batching = onnxplace.Batching(max_batch=8, max_delay_ms=50)
    with serve_in_thread({"m": compiled}, limits, batching) as server, ThreadPoolExecutor(8) as callers:
        clients = threading.local()

        def call(x):
            if not hasattr(clients, "own"):
                clients.own = module.InferenceServerClient(getattr(server, protocol))
            return clients.own.infer("m", [make_input(module, "x", x)]).as_numpy("y")

        for actual, array in zip(callers.map(call, arrays), expected, strict=True):
            np.testing.assert_allclose(actual, array, rtol=1e-4, atol=1e-5)
        statistics = server.models["m"].describe_statistics()
        assert statistics["inference_count"] == len(arrays)
        assert statistics["execution_count"] < len(arrays)


# ---------------------------------------------------------------------------------------------------------- limits


def endless_inputs(module, rounds=None):
    feeds = endless.feeds(rounds)
    return [make_input(module, "limit", feeds["limit"], "INT64"), make_input(module, "x", feeds["x"])]


@pytest.mark.parametrize(
    ("protocol", "full", "late", "stopping"),
    [
        ("http", "429", "504", "503"),
        ("grpc", "StatusCode.RESOURCE_EXHAUSTED", "StatusCode.DEADLINE_EXCEEDED", "StatusCode.UNAVAILABLE"),
    ],
)
def test_a_full_queue_a_late_answer_and_the_end_have_their_statuses(tmp_path, protocol, full, late, stopping):
    module, bundle = CLIENTS[protocol], endless.endless_bundle(tmp_path)
    limits = Limits(max_in_flight=1, max_queue=0, timeout_seconds=0.8)
    with serve_in_thread({"e": bundle.path}, limits) as server, ThreadPoolExecutor(1) as callers:
        model = server.models["e"]
        with module.InferenceServerClient(getattr(server, protocol)) as first:
            waiting = callers.submit(first.infer, "e", endless_inputs(module))
            with module.InferenceServerClient(getattr(server, protocol)) as client:
                await_true(lambda: model.open_requests)
                with pytest.raises(
                    InferenceServerException, match="1 requests of 'e' run or wait: try again"
                ) as caught:
                    client.infer("e", endless_inputs(module))
                assert caught.value.status() == full
                with pytest.raises(
                    InferenceServerException, match="no result within the time limit: it runs"
                ) as caught:
                    waiting.result()
                assert caught.value.status() == late
                await_true(lambda: not model._slots.locked())
                assert client.infer("e", endless_inputs(module, 3)).as_numpy("z").tolist() == (-endless.X).tolist()
                with pytest.raises(InferenceServerException, match="no result within the time limit") as caught:
                    client.infer("e", endless_inputs(module), timeout=20_000)  # the request's own, in microseconds
                model.is_stopping = True
                with pytest.raises(InferenceServerException, match="the server is stopping") as caught:
                    client.infer("e", endless_inputs(module, 3))
                assert caught.value.status() == stopping
        assert model.statistics.failures == {"queue_full": 1, "timeout": 2, "unavailable": 1}


def await_true(condition):
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_request_that_is_too_large_is_refused(client):
    x = np.zeros((MAX_REQUEST_BYTES // 256 + 1, 64), "f4")
    with pytest.raises(InferenceServerException, match=r"larger than") as caught:
        infer(client, "m", [("x", x)])
    assert caught.value.status() in ("413", "StatusCode.RESOURCE_EXHAUSTED")


def test_a_call_that_its_client_gives_up_ends_its_run(tmp_path):
    with serve_in_thread({"e": endless.endless_bundle(tmp_path).path}, Limits(max_in_flight=1)) as server:
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            with pytest.raises(InferenceServerException, match=r"Deadline|DEADLINE"):
                client.infer("e", endless_inputs(tritonclient.grpc), client_timeout=0.3)
            answer = client.infer("e", endless_inputs(tritonclient.grpc, 3))
        assert answer.as_numpy("y").tolist() == endless.X.tolist()
        assert server.models["e"].statistics.failures == {"cancelled": 1}


def test_a_slow_body_is_refused_and_its_place_is_free_again(compiled):
    with serve_in_thread({"m": compiled}, Limits(timeout_seconds=0.3)) as server:
        status, text = send(server.http_port, make_post(b"{", content_length=50))
        assert (status, json.loads(text)) == (408, {"error": "it was not complete within 0.3 s"})
        assert server.models["m"].open_requests == 0


def test_headers_that_do_not_come_end_the_connection(server, monkeypatch):
    monkeypatch.setattr("onnxplace_serving.http_server.PATIENCE_SECONDS", 0.1)
    status, text = send(server.http_port, b"POST /v2 HTTP/1.1\r\nhost: x\r\n")
    assert status == 408
    assert b"the headers were not complete within 0.1 s" in text


CHUNKED = b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /v2 HTTP/1.1\r\nhost: x\r\nx: ", b"a" * 16),
        (b"GET /v2 HTTP/1.1\r\nhost: x\r\n", b"x: bcdefghijkl\r\n"),
        (CHUNKED + b"\r\n{\r\n0\r\n", b"x: bcdefghijkl\r\n"),
        (CHUNKED + b";a=", b"a" * 16),
    ],
    ids=["a header", "many headers", "headers behind the body", "an extension of a chunk"],
)
def test_headers_without_end_are_refused(server, begin, more):
    # Not kept in memory for PATIENCE_SECONDS, as httptools does, which uvicorn prefers where it is installed.
    status, text = send(server.http_port, begin + more * (1 << 16))
    assert status == 431
    assert b"headers have more than 65536 bytes" in text


def test_a_body_behind_an_offer_of_http2_is_read(server):
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQCAAAAAAIAAAAA"}
    with tritonclient.http.InferenceServerClient(server.http) as client:  # Java's client makes it with each request
        result = client.infer("m", [make_input(tritonclient.http, "x", np.ones((2, 64), "f4"))], headers=offer)
    assert result.as_numpy("y").shape == (2, 64)


def test_hostile_requests_are_answered_with_a_clear_status(server):
    assert list_unclear_answers(server.http_port, 80, seed=1) == []
    assert list_unclear_calls(server.grpc_port, 40, seed=1) == []


@pytest.mark.slow
def test_a_thousand_hostile_requests_leave_a_server_that_answers(server):
    assert list_unclear_answers(server.http_port, 1000) == []
    assert list_unclear_calls(server.grpc_port, 1000) == []
    with tritonclient.http.InferenceServerClient(server.http) as client:
        assert infer(client, "m", [("x", np.ones((2, 64), "f4"))]).as_numpy("y").shape == (2, 64)
    assert all(model.open_requests == 0 for model in server.models.values())


# --------------------------------------------------------------------------------------------------------- metrics


def test_metrics_count_what_happened(compiled):
    with serve_in_thread({"m": compiled}) as server:
        with tritonclient.http.InferenceServerClient(server.http) as client:
            for _ in range(3):
                infer(client, "m", [("x", np.ones((2, 64), "f4"))])
            with pytest.raises(InferenceServerException):
                infer(client, "m", [("x", np.ones((2, 63), "f4"))])
            statistics = client.get_inference_statistics("m")["model_stats"][0]
        with urllib.request.urlopen(f"http://{server.http}/metrics") as answer:
            lines = answer.read().decode().splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert samples['onnxplace_requests_total{model="m"}'] == "3"
    assert samples['onnxplace_failures_total{model="m",reason="invalid"}'] == "1"
    assert samples['onnxplace_request_seconds_bucket{model="m",le="+Inf"}'] == "3"
    assert samples['onnxplace_open_requests{model="m"}'] == "0"
    assert float(samples['onnxplace_device_busy_seconds_total{model="m",device="cpu:0"}']) > 0
    assert float(samples["onnxplace_process_resident_bytes{}"]) > 1e6
    counts = {key: item["count"] for key, item in statistics["inference_stats"].items()}
    assert counts == {"success": 3, "fail": 1, "queue": 3, "compute_infer": 3}
    assert statistics["execution_count"] == 3


# --------------------------------------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_sigterm_lets_requests_in_flight_finish_and_refuses_new_ones(compiled):
    x = np.ones((1, 64), "f4").tobytes()
    header = {"name": "x", "datatype": "FP32", "shape": [1, 64], "parameters": {"binary_data_size": len(x)}}
    head = json.dumps({"inputs": [header]}).encode()
    with serve_in_process(f"m={compiled}", "--warmup", "--quiet") as server:
        connection = http.client.HTTPConnection(server.http, timeout=WAIT_SECONDS)
        connection.putrequest("POST", "/v2/models/m/infer")
        connection.putheader("inference-header-content-length", str(len(head)))
        connection.putheader("content-length", str(len(head) + len(x)))
        connection.endheaders(head)  # the tensor comes after the signal
        await_true(lambda: 'open_requests{model="m"} 1' in read_metrics(server))
        server.process.send_signal(signal.SIGTERM)
        await_true(lambda: is_refused(server.http_port))
        assert server.process.poll() is None
        connection.send(x)
        answer = connection.getresponse()
        assert (answer.status, len(json.load(answer)["outputs"][0]["data"])) == (200, 64)
        connection.close()
        assert server.process.wait(WAIT_SECONDS) == 0
        assert server.process.stderr.read() == ""


def read_metrics(server):
    with urllib.request.urlopen(f"http://{server.http}/metrics") as answer:
        return answer.read().decode()


def is_refused(port):
    try:
        socket.create_connection(("127.0.0.1", port), WAIT_SECONDS).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_does_not_wait_for_requests_in_flight(tmp_path, number, code):
    bundle = endless.endless_bundle(tmp_path)
    with serve_in_process(f"e={bundle.path}") as server, ThreadPoolExecutor(1) as callers:
        with tritonclient.http.InferenceServerClient(server.http) as client:
            waiting = callers.submit(client.infer, "e", endless_inputs(tritonclient.http))
            await_true(lambda: 'open_requests{model="e"} 1' in read_metrics(server))
            server.process.send_signal(number)
            await_true(lambda: is_refused(server.http_port))
            server.process.send_signal(number)
            with pytest.raises(InferenceServerException, match="the server was ended before there was a result"):
                waiting.result()
        assert server.process.wait(WAIT_SECONDS) == code
        assert "Traceback" not in server.process.stderr.read()


@pytest.mark.slow
def test_a_server_that_was_killed_answers_again_after_a_restart(compiled):
    with serve_in_process(f"m={compiled}") as server:
        with tritonclient.http.InferenceServerClient(server.http) as client:
            assert client.is_model_ready("m")
            server.process.kill()
            server.process.wait()
            with pytest.raises(OSError, match=r"refused|reset"):
                client.is_server_live()
        port = server.http_port
    with serve_in_process(f"m={compiled}", "--port", port) as server:
        assert server.http_port == port
        with tritonclient.http.InferenceServerClient(server.http) as client:
            assert infer(client, "m", [("x", np.ones((1, 64), "f4"))]).as_numpy("y").shape == (1, 64)


def test_models_of_other_values_than_tensors_are_refused(tmp_path):
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (seq(float[2]) l) {'
    text += " y = Neg(x) l = SequenceConstruct(y) }"
    bundle = onnxplace.compile(parser.parse_model(text), tmp_path / "b", devices="cpu:0", pipeline=FAST_PIPELINE)
    with pytest.raises(
        onnxplace.InputError, match=r"I015.*'l' is seq\(tensor\(float\)\), and the protocol has tensors"
    ):
        require_servable(bundle)
