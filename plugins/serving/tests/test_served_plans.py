"""Bundles with several plans on a server: warm-up of each size, metrics of each plan, metadata of joined inputs."""

import asyncio
import json
import urllib.request
from concurrent.futures import Future

import numpy as np
import pytest

import onnxplace
from onnxplace.bundle.manifest import SizeRecord
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


def test_a_server_answers_requests_of_all_sizes(planned):
    whole = onnxplace.InferenceSession(planned.plans[1])
    with serve_in_thread({"m": planned.path}) as server:
        for batch in (1, 8, 3):
            x = np.random.default_rng(batch).standard_normal((batch, 64)).astype("f4")
            header = {"name": "x", "datatype": "FP32", "shape": [batch, 64], "data": x.ravel().tolist()}
            answer = post(server, {"inputs": [header]})
            (output,) = answer["outputs"]
            np.testing.assert_allclose(np.reshape(output["data"], output["shape"]), whole.run(None, {"x": x})[0], 1e-4)
    whole.close()


def post(server, request):
    data = json.dumps(request).encode()
    with urllib.request.urlopen(f"http://{server.http}/v2/models/m/infer", data, WAIT_SECONDS) as answer:
        return json.load(answer)
