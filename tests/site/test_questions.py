"""The answers to questions run, in order, with CPU devices in place of GPUs."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

import models
from tests.support.tutorials import run_page

PAGE = Path(__file__).parents[2] / "docs/questions.md"
# What the page leaves to the reader.
PREPARED = "import numpy as np\n\nsource = [np.ones((8, 16), np.float32)] * 6\nwrite = print\n"
HERE = (("cuda:0,cuda:1,cpu:0", "cpu:0,cpu:1,cpu:2"), ("cuda:0,cpu:0", "cpu:0,cpu:1"), ("cuda:", "cpu:"))
MODEL = """
<ir_version: 8, opset_import: ["": 17]>
chain (float[batch, 16] x) => (float[batch, 16] y)
<float[16, 16] w>
{
    a = MatMul(x, w)
    b = Relu(a)
    c = Tanh(a)
    y = Add(b, c)
}
"""


@pytest.mark.slow
def test_the_answers_run_with_cpu_devices(tmp_path):
    model = parser.parse_model(MODEL)
    for number, node in enumerate(model.graph.node):
        node.name = f"layers.{number}.{node.op_type}"
    del model.graph.initializer[:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(16, dtype=np.float32), "w"))
    onnx.save(model, tmp_path / "model.onnx")
    decoder = models.build("decoder", layers=1, hidden=32, heads=4, vocab=50, positions=2049)
    models.save(decoder, tmp_path / "decoder.onnx")
    text = PAGE.read_text(encoding="utf-8").replace("import onnxplace\n", PREPARED + "import onnxplace\n")
    for devices, local in HERE:
        text = text.replace(devices, local)
    page = tmp_path / "questions.md"
    page.write_text(text, encoding="utf-8")
    assert run_page(page, tmp_path) > 7
