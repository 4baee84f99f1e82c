"""Bundles with several plans on a server: warm-up of each size, metrics of each plan, metadata of joined inputs."""

import asyncio
import json
import urllib.request
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

import onnxplace
from decoder import decoder
from onnxplace.bundle.manifest import HeldRecord, SizeRecord
from onnxplace.driver.join_plans import join_plans
from onnxplace.feeds.dimensions import dimensions_of_feeds
from onnxplace.runtime.interface import Result
from onnxplace_serving.metrics import format_metrics
from onnxplace_serving.served_models import Limits, ServedModel
from plugins.serving.tests.support.servers import WAIT_SECONDS, serve_in_thread
from tests.conftest import FAST_PIPELINE


@pytest.fixture
def planned(tmp_path, branches_bytes):
    """A bundle with a plan for a batch of 1, and one for a batch of 8."""
    (tmp_path / "model.onnx").write_bytes(branches_bytes)
    options = {"pipeline": FAST_PIPELINE, "shape": {"batch": 1}}
    bundles = [
        onnxplace.compile(tmp_path / "model.onnx", tmp_path / name, devices=devices, **options)
        for name, devices in (("bundle", "cpu:0"), ("other", "cpu:0,cpu:1"))
    ]
    sizes = [
        SizeRecord(dimensions={"batch": 1}, seconds=(1e-3, 2e-3), weight=100),
        SizeRecord(dimensions={"batch": 8}, seconds=(8e-3, 5e-3), weight=1),
        SizeRecord(dimensions={"batch": 3}, seconds=(3e-3, 3e-3)),
    ]
    return join_plans(bundles, {}, sizes)


class PlanSession:
    """A session whose plan is 1 for batches, and which keeps their sizes."""

    def __init__(self, bundle):
        self.bundle, self.batches = bundle, []

    def submit(self, feeds):
        batch = dimensions_of_feeds(feeds, self.bundle.inputs)["batch"]
        self.batches.append(batch)
        future = Future()
        future.set_result(Result({"y": np.zeros(1)}, (), 0.0, plan=int(batch > 1)))
        return future

    def list_copies(self):
        return ()


def test_warm_up_runs_each_size_that_the_bundle_was_compiled_for(planned):
    session = PlanSession(planned)
    ServedModel("m", planned, session, Limits()).warm_up()
    assert session.batches == [1, 1, 1, 8, 8, 8], "and none between them"


def test_an_axis_whose_size_the_plans_do_not_share_is_open(planned):
    """As those of inputs with fixed sizes are, which differ from plan to plan."""
    (item,) = planned.manifest.inputs
    manifest = planned.manifest.model_copy(update={"inputs": (item.model_copy(update={"shape": (None, 64)}),)})
    model = ServedModel("m", replace(planned, manifest=manifest), PlanSession(planned), Limits())
    (described,) = model.describe()["inputs"]
    assert described["shape"] == [-1, 64]


def test_metrics_count_the_runs_of_each_plan(planned, compiled):
    def list_executions(bundle):
        bundle = onnxplace.load(bundle)
        session = PlanSession(bundle)
        model = ServedModel("m", bundle, session, Limits())

        async def infer():
            for batch in (1, 8, 1):
                feeds = {"x": np.zeros((batch, 64), "f4")}
                await model.infer(feeds, ["y"], {}, asyncio.get_running_loop().time() + WAIT_SECONDS)

        asyncio.run(infer())
        assert model.describe_statistics()["execution_count"] == 3
        lines = format_metrics([model]).splitlines()
        return [line.removeprefix("onnxplace_executions_total") for line in lines if "executions_total{" in line]

    assert list_executions(planned.path) == ['{model="m",plan="0"} 2', '{model="m",plan="1"} 1']
    assert list_executions(compiled)[0].startswith('{model="m"} '), "a bundle of one plan has no label"


def test_metrics_have_the_memory_of_all_plans(planned):
    held = {
        "cpu:0": HeldRecord(weights_bytes=1, shared_bytes=0, peak_bytes=30),
        "host": HeldRecord(weights_bytes=2, shared_bytes=0, peak_bytes=50),
    }
    planned = replace(planned, manifest=planned.manifest.model_copy(update={"held": held}))
    lines = format_metrics([ServedModel("m", planned, PlanSession(planned), Limits())]).splitlines()
    planned_bytes = [line for line in lines if line.startswith("onnxplace_device_planned_bytes")]
    assert planned_bytes == ['onnxplace_device_planned_bytes{model="m",device="cpu:0"} 30'], "the host is no device"


def test_a_server_answers_requests_of_all_sizes(planned):
    whole = onnxplace.InferenceSession(planned.plans[1])
    with serve_in_thread({"m": planned.path}) as server:
        for batch in (1, 8, 3):
            x = np.random.default_rng(batch).standard_normal((batch, 64)).astype("f4")
            np.testing.assert_allclose(infer(server, {"x": x})["y"], whole.run(None, {"x": x})[0], 1e-4)
    whole.close()


def test_a_sequence_is_one_conversation_over_all_plans(tmp_path):
    """A prompt, tokens, and a prompt again: each call continues the cache, wherever it is."""
    bundles = [
        onnxplace.compile(
            decoder(layers=1, hidden=32, heads=2, vocab=40, positions=64), tmp_path / name, devices=devices,
            pipeline=FAST_PIPELINE, shape={"batch": 1, "seq": 1, "past": 8}, state={"present.*": "past.*"},
        )
        for name, devices in (("bundle", "cpu:0"), ("other", "cpu:0,cpu:1"))
    ]  # fmt: skip
    sizes = [
        SizeRecord(dimensions={"batch": 1, "seq": 1, "past": 8}, seconds=(1e-9, 1.0), weight=100),
        SizeRecord(dimensions={"batch": 1, "seq": 8, "past": 0}, seconds=(1.0, 1e-9), weight=1),
    ]
    planned = join_plans(bundles, {}, sizes)
    with serve_in_thread({"m": planned.path}) as server, onnxplace.InferenceSession(planned.plans[1]) as whole:
        states = planned.zero_states(batch=1, past=0)
        for number, count in enumerate((8, 1, 1, 8, 1)):
            feeds = {"tokens": np.arange(count)[None] + number, **states}
            answer = infer(server, feeds, sequence_id=5, sequence_start=number == 0, sequence_end=number == 4)
            np.testing.assert_allclose(answer["logits"], whole.run(["logits"], feeds)[0], 1e-4, 1e-5)
            states = {}


def infer(server, feeds, **parameters):
    """Return the outputs of a request in JSON."""
    inputs = [
        {"name": name, "shape": value.shape, "datatype": {"f": "FP32", "i": "INT64"}[value.dtype.kind]}
        | {"data": value.ravel().tolist()}
        for name, value in feeds.items()
    ]
    data = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    with urllib.request.urlopen(f"http://{server.http}/v2/models/m/infer", data, WAIT_SECONDS) as answer:
        return {item["name"]: np.reshape(item["data"], item["shape"]) for item in json.load(answer)["outputs"]}
