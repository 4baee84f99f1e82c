"""Small models as text, for tests of what models may hold."""

import numpy as np
import onnx
from onnx import ModelProto, parser

X = np.arange(1, 5, dtype=np.float32)
IF = """(float[4] x, bool c) => (float[4] y) {
    b = If(c) <
        then_branch = t () => (float[4] u) { u = Add(x, thin) }, else_branch = e () => (float[4] v) { v = Neg(x) }
    >
    y = Neg(b)
}"""


def parse_graph(text: str) -> ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')


def find_then_branch(model: ModelProto) -> onnx.GraphProto:
    return next(a.g for n in model.graph.node if n.op_type == "If" for a in n.attribute if a.name == "then_branch")
