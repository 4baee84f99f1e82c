"""Requests that would end the server's process, for an empty axis, are refused."""

import json
import urllib.error
import urllib.request

import numpy as np
import pytest

from onnxplace.model.empty_axes import ENDS_PROCESS
from plugins.serving.tests.support.servers import serve_in_thread
from tests.model.test_empty_axes import CASES, compile_fast, make_feeds, make_model

pytestmark = pytest.mark.usefixtures("no_gpus")


def test_a_server_answers_400_and_goes_on(tmp_path):
    model = make_model(CASES["GRU"][0])
    bundle = compile_fast(model, tmp_path)

    def post(url: str, feeds: dict[str, np.ndarray]) -> dict:
        inputs = [
            {"name": name, "shape": list(value.shape), "datatype": "FP32", "data": value.ravel().tolist()}
            for name, value in feeds.items()
        ]
        data = json.dumps({"inputs": inputs}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
            return json.load(answer)

    with serve_in_thread({"m": bundle.path}) as server:
        url = f"http://{server.http}/v2/models/m/infer"
        for shape in ((0, 2, 4), (3, 0, 4)):
            with pytest.raises(urllib.error.HTTPError) as caught:
                post(url, make_feeds(model, {"x": shape}, 0.5))
            assert caught.value.code == 400
            assert f"{ENDS_PROCESS} in node" in caught.value.read().decode()
        assert post(url, make_feeds(model, {"x": (3, 2, 4)}, 0.5))["outputs"][0]["shape"] == [3, 1, 2, 5]
