import json
import subprocess
import sys

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

import onnxplace
from tests.test_memory import BENCH, MIB


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps it")
def test_what_rewriting_convolutions_took_is_given_back(tmp_path):
    """Four convolutions of 9 MiB each, normalised: three of these 36 MiB stayed with the C library."""
    nodes, weights = [], []
    for i in range(4):
        sizes = {f"w{i}": (512, 512, 3, 3), **{f"{name}{i}": (512,) for name in ("scale", "bias", "mean", "variance")}}
        weights += [numpy_helper.from_array(np.full(size, 0.01, np.float32), name) for name, size in sizes.items()]
        nodes.append(helper.make_node("Conv", [f"x{i}", f"w{i}"], [f"c{i}"], name=f"conv{i}", pads=[1] * 4))
        nodes.append(
            helper.make_node("BatchNormalization", [f"c{i}", *list(sizes)[1:]], [f"x{i + 1}"], name=f"norm{i}")
        )
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 512, 4, 4])] for name in ("x0", "x4")]
    graph = helper.make_graph(nodes, "convolutions", *ends, weights)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    bundle = onnxplace.compile(tmp_path / "m.onnx", tmp_path / "bundle", devices="cpu:0", placer="single")
    command = [sys.executable, BENCH, "--child", str(bundle.path), "--runs", "3"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(found, bundle.manifest.predicted)
    assert found["running_bytes"] < found["opening_bytes"] - 18 * MIB
