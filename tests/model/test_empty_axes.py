"""Kernels that end the process for an empty axis are guarded: such requests are refused, with the node."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, helper, parser

import onnxplace
from onnxplace.bundle.bundle import WHOLE_MODEL_FILE
from onnxplace.errors import ExecutionError
from onnxplace.model.empty_axes import ENDS_PROCESS
from onnxplace.reports.bundle_nodes import read_nodes
from tests.conftest import FAST_PIPELINE

pytestmark = pytest.mark.usefixtures("no_gpus")

SCAN = """Scan<num_scan_inputs = 1, {axes}, body = b (float[B, 8] p, float[B, 8] c) => (float[B, 8] q, float[B, 8] o)
    {{ q = Add(p, c) o = Tanh(q) }}>(h, x)"""
# Name -> graph, node, and shapes of inputs that end ONNX Runtime's process, and others that it takes.
CASES: dict[str, tuple[str, str, list[dict[str, tuple[int, ...]]], list[dict[str, tuple[int, ...]]]]] = {
    "GRU": (
        "(float[S, B, 4] x, float[1, 15, 4] w, float[1, 15, 5] r) => (float[S, 1, B, 5] y) "
        "{ y = GRU<hidden_size = 5>(x, w, r) }",
        "GRU",
        [{"x": (0, 2, 4)}, {"x": (3, 0, 4)}, {"x": (0, 0, 4)}],
        [{"x": (3, 2, 4)}, {"x": (1, 1, 4)}],
    ),
    "two GRUs that return their last states only": (
        "(float[S, B, 4] x, float[1, 15, 4] w, float[1, 15, 5] r) => (float[1, B, 5] y, float[1, B, 5] z) "
        "{ unread1, y = GRU<hidden_size = 5>(x, w, r) unread2, z = GRU<hidden_size = 5>(x, w, r) }",
        "GRU",
        [{"x": (0, 2, 4)}, {"x": (3, 0, 4)}],
        [{"x": (3, 2, 4)}],
    ),
    "LSTM": (
        "(float[S, B, 4] x, float[1, 20, 4] w, float[1, 20, 5] r) => (float[S, 1, B, 5] y) "
        "{ y = LSTM<hidden_size = 5>(x, w, r) }",
        "LSTM",
        [{"x": (3, 0, 4)}, {"x": (0, 0, 4)}],
        [{"x": (3, 2, 4)}, {"x": (0, 2, 4)}],
    ),
    "Scan over another axis": (
        f"(float[B, 8] h, float[B, N, 8] x) => (float[B, 8] l, float[N, B, 8] y) "
        f"{{ l, y = {SCAN.format(axes='scan_input_axes = [1]')} }}",
        "Scan",
        [{"h": (2, 8), "x": (2, 0, 8)}, {"h": (0, 8), "x": (0, 3, 8)}],
        [{"h": (2, 8), "x": (2, 3, 8)}],
    ),
    "Scan along another axis": (
        f"(float[B, 8] h, float[N, B, 8] x) => (float[B, 8] l, float[B, N, 8] y) "
        f"{{ l, y = {SCAN.format(axes='scan_output_axes = [1]')} }}",
        "Scan",
        [{"h": (0, 8), "x": (3, 0, 8)}],
        [{"h": (2, 8), "x": (3, 2, 8)}],
    ),
    "Scan of scalars, last axis": (
        "(float[1] h, float[N] x) => (float[1] l, float[N] y) { l, y = Scan<num_scan_inputs = 1, "
        "scan_output_axes = [-1], body = b (float[1] p, float c) => (float[1] q, float o) "
        "{ q = Identity(p) o = Tanh(c) }>(h, x) }",
        "Scan",
        [],
        [{"h": (1,), "x": (3,)}],
    ),
    "InstanceNormalization in float16": (
        "(float16[N, 4, L] x, float16[4] s, float16[4] b) => (float16[N, 4, L] y) "
        "{ y = InstanceNormalization(x, s, b) }",
        "InstanceNormalization",
        [{"x": (2, 4, 0)}],
        [{"x": (2, 4, 3)}, {"x": (0, 4, 3)}],
    ),
    "InstanceNormalization in float": (
        "(float[N, 4, L] x, float[4] s, float[4] b) => (float[N, 4, L] y) { y = InstanceNormalization(x, s, b) }",
        "InstanceNormalization",
        [],
        [{"x": (2, 4, 0)}, {"x": (0, 4, 3)}],
    ),
    "ConvTranspose": (
        "(float[N, 1, D, H, W] x, float[1, 2, 3, 3, 3] w) => (float[N, 2, E, I, X] y) { y = ConvTranspose(x, w) }",
        "ConvTranspose",
        [{"x": (1, 1, 0, 4, 5)}, {"x": (1, 1, 3, 0, 5)}],
        [{"x": (1, 1, 3, 4, 5)}, {"x": (0, 1, 3, 4, 5)}],
    ),
    "Unique": (
        "(float[N, M] x) => (float[K, M] y) { y = Unique<axis = 0>(x) }",
        "Unique",
        [{"x": (3, 0)}],
        [{"x": (3, 2)}],
    ),
    "SkipLayerNormalization": (
        "(float[N, 3, 4] x, float[N, 3, 4] s, float[4] g) => (float[N, 3, 4] y) "
        "{ y = com.microsoft.SkipLayerNormalization(x, s, g) }",
        "SkipLayerNormalization",
        [{"x": (2, 3, 4), "s": (0, 3, 4)}],
        [{"x": (2, 3, 4), "s": (2, 3, 4)}, {"x": (0, 3, 4), "s": (0, 3, 4)}],
    ),
    "SkipSimplifiedLayerNormalization": (
        "(float[N, 3, 4] x, float[M, 3, 4] s, float[4] g) => (float[N, 3, 4] y) "
        "{ y = com.microsoft.SkipSimplifiedLayerNormalization(x, s, g) }",
        "SkipSimplifiedLayerNormalization",
        [{"x": (2, 3, 4), "s": (0, 3, 4)}],
        [{"x": (2, 3, 4), "s": (2, 3, 4)}, {"x": (0, 3, 4), "s": (0, 3, 4)}],
    ),
    "a GRU inside": (
        """(float[S, B, 4] x, bool c, float[1, 15, 4] w, float[1, 15, 5] r) => (float[T, 1, B, 5] y) { y = If<
        then_branch = t () => (float[T, 1, B, 5] u) { u = GRU<hidden_size = 5>(x, w, r) },
        else_branch = e () => (float[T, 1, B, 5] v) { f = GRU<hidden_size = 5>(x, w, r) v = Neg(f) }>(c) }""",
        "GRU",
        [{"x": (0, 2, 4)}, {"x": (3, 0, 4)}],
        [{"x": (3, 2, 4)}],
    ),
    "rows that values choose": (
        "(float[N, 2, 4] x, float[1, 15, 4] w, float[1, 15, 5] r) => (float[K, 1, 2, 5] y) "
        "{ m = ReduceMax<axes = [1, 2], keepdims = 0>(x) z = Cast<to = 9>(m) k = Compress<axis = 0>(x, z) "
        "y = GRU<hidden_size = 5>(k, w, r) }",
        "GRU",
        [{"x": (3, 2, 4)}],
        [],
    ),
}


def make_model(text: str) -> ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g {text}')


def make_feeds(model: ModelProto, shapes: dict[str, tuple[int, ...]], value: float) -> dict[str, np.ndarray]:
    feeds = {}
    for item in model.graph.input:
        kind = item.type.tensor_type
        shape = shapes.get(item.name, tuple(dim.dim_value for dim in kind.shape.dim))
        feeds[item.name] = np.full(shape, value, helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return feeds


def compile_fast(model: ModelProto, folder) -> onnxplace.Bundle:
    symbols = {
        dim.dim_param: 2 for item in model.graph.input for dim in item.type.tensor_type.shape.dim if dim.dim_param
    }
    return onnxplace.compile(model, folder / "out", devices="cpu:0", shape=symbols, pipeline=FAST_PIPELINE)


def drop_unread(model: ModelProto) -> ModelProto:
    """Return a model without the outputs of nodes that are named `unread`."""
    for node in model.graph.node:
        node.output[:] = ["" if name.startswith("unread") else name for name in node.output]
    return model


@pytest.mark.parametrize("name", CASES)
def test_what_ends_the_process_is_refused_and_all_else_computed(name: str, tmp_path):
    text, operator, fatal, taken = CASES[name]
    model = drop_unread(make_model(text))
    bundle = compile_fast(model, tmp_path)
    plain = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    whole = onnxruntime.InferenceSession(bundle.file(WHOLE_MODEL_FILE), providers=["CPUExecutionProvider"])
    with onnxplace.InferenceSession(bundle) as session:
        for shapes in taken:
            feeds = make_feeds(model, shapes, 0.5)
            for expected, *others in zip(*(item.run(None, feeds) for item in (plain, session, whole))):
                for actual in others:
                    np.testing.assert_array_equal(actual, expected)
        for shapes in fatal:
            feeds = make_feeds(model, shapes, 0)
            with pytest.raises(ExecutionError, match=rf"INVALID_ARGUMENT .*{ENDS_PROCESS} in node .*\({operator}\)"):
                session.run(None, feeds)
            with pytest.raises(Exception, match=rf"INVALID_ARGUMENT .*{ENDS_PROCESS} in node .*\({operator}\)"):
                whole.run(None, feeds)


@pytest.mark.parametrize(
    "text",
    [
        "(float[3, 2, 4] x, float[1, 15, 4] w, float[1, 15, 5] r) => (float[3, 1, 2, 5] y) "
        "{ y = GRU<hidden_size = 5>(x, w, r) }",
        "(float[S, 2, 4] x, float[1, 20, 4] w, float[1, 20, 5] r) => (float[S, 1, 2, 5] y) "
        "{ y = LSTM<hidden_size = 5>(x, w, r) }",
        "(float[N, 3, H, 8] x, float[4, 3, 3, 3] w) => (float[N, 4, I, 6] y) { y = Conv(x, w) }",
        "(float[N, M] x) => (float[K] y) { y = Unique(x) }",
    ],
)
def test_axes_that_are_known_have_no_guards(text, tmp_path):
    bundle = compile_fast(make_model(text), tmp_path)
    for file in (WHOLE_MODEL_FILE, *(segment.file for segment in bundle.manifest.segments)):
        assert len(onnx.load(bundle.file(file)).graph.node) == 1


def test_reports_leave_guards_out(tmp_path):
    bundle = compile_fast(make_model(CASES["rows that values choose"][0]), tmp_path)
    nodes = read_nodes(bundle)
    assert [node.op for node in nodes.nodes] == ["ReduceMax", "Cast", "Compress", "GRU"]
