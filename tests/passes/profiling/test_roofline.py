"""Estimates: operations by definition, bytes read and written, times by a roofline."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnx import helper, parser

from onnxplace.facts import Profile, Source
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind, infer_static_shapes
from onnxplace.passes.profiling.roofline import (
    PeakRates,
    count_moved_bytes,
    count_operations,
    device_peaks,
    estimate_seconds,
    measure_peaks,
    typical_peaks,
)
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.machines import parse_machine
from onnxplace.target.product_times import ProductTimes
from onnxplace.target.target import Device, Target

SHAPES = {
    "x": (2, 3, 8, 8), "w": (6, 3, 5, 5), "y": (2, 6, 4, 4), "t": (3, 4, 5, 5), "up": (2, 4, 17, 17),
    "a": (2, 5, 7), "b": (2, 7, 11), "ab": (2, 5, 11), "m": (5, 7), "n": (7, 11), "mn": (5, 11), "mt": (7, 5),
    "v": (7,), "s": (), "seq": (9, 2, 5), "W": (1, 16, 5), "R": (1, 16, 4), "out": (9, 1, 2, 4),
    "q": (2, 6, 8), "k": (2, 10, 8), "qkv": (8, 24), "p": (2, 3, 4, 4), "r": (2, 1),
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "inputs", "output", "attributes", "count"),
    [
        ("MatMul", "a b", "ab", {}, 2 * 2 * 5 * 11 * 7),
        ("MatMul", "m v", "v", {}, 2 * 7 * 7),
        ("MatMul", "v v", "s", {}, 2 * 7),
        ("FusedMatMul", "mt n", "mn", {"transA": 1}, 2 * 5 * 11 * 7),
        ("Gemm", "m n", "mn", {}, 2 * 5 * 11 * 7),
        ("Gemm", "mt n", "mn", {"transA": 1}, 2 * 5 * 11 * 7),
        ("Conv", "x w", "y", {}, 2 * (2 * 6 * 4 * 4) * 3 * 5 * 5),
        ("QLinearConv", "x s s w s s s s", "y", {}, 2 * (2 * 6 * 4 * 4) * 3 * 5 * 5),
        ("ConvTranspose", "x t", "up", {}, 2 * (2 * 3 * 8 * 8) * 4 * 5 * 5),
        ("LSTM", "seq W R", "out", {}, 2 * 9 * 2 * (16 * 5 + 16 * 4)),
        ("Einsum", "a b", "ab", {"equation": "bij,bjk->bik"}, 2 * 2 * 5 * 7 * 11),
        ("Einsum", "a b", "ab", {"equation": "...ij,...jk->...ik"}, 2 * 5 * 11),
        ("MultiHeadAttention", "q k k", "q", {}, 4 * 2 * 6 * 8 * 10),
        ("MaxPool", "x", "p", {"kernel_shape": [2, 2]}, 2 * 3 * 4 * 4 * 4),
        ("ReduceMean", "x", "r", {}, 2 * 3 * 8 * 8),
        ("GlobalAveragePool", "x", "r", {}, 2 * 3 * 8 * 8),
        ("Relu", "x", "x", {}, 2 * 3 * 8 * 8),
        ("Softmax", "m", "m", {}, 20 * 35),
        ("LayerNormalization", "m v", "m", {}, 10 * 35),
        ("Mystery", "x", "m", {}, 35),
        ("TopK", "v", "v", {}, 7 * math.log2(7)),
    ],
)
def test_operations_are_those_of_the_definition(op, inputs, output, attributes, count):
    assert count_operations(helper.make_node(op, inputs.split(), [output], **attributes), SHAPES) == pytest.approx(
        count
    )


def test_attention_with_projections_counts_them():
    node = helper.make_node("Attention", ["q", "qkv"], ["q"], domain="com.microsoft", num_heads=2)
    assert count_operations(node, SHAPES) == 2 * 2 * 6 * 8 * 24 + 4 * 2 * 6 * 8 * 6


@pytest.mark.parametrize(
    "op", ["MatMul", "Conv", "ConvTranspose", "LSTM", "Einsum", "Gemm", "Attention", "MaxPool", "Add"]
)
@given(known=st.sets(st.sampled_from(["i0", "i1", "i2", "o"])), rank=st.integers(0, 5))
def test_unknown_or_odd_shapes_are_never_an_error(op, known, rank):
    node = helper.make_node(op, ["i0", "i1", "i2"], ["o"])
    shapes = {name: (2,) * max(rank, 2 if op == "Gemm" else 0) for name in known}
    assert count_operations(node, shapes) >= 0


def test_views_move_no_bytes_and_a_lookup_moves_the_selected_rows():
    sizes = {"table": 1000_000, "ids": 80, "found": 400, "x": 64, "y": 64}
    assert count_moved_bytes(helper.make_node("Reshape", ["x", "ids"], ["y"]), ("x", "ids"), sizes) == 0
    assert count_moved_bytes(helper.make_node("Gather", ["table", "ids"], ["found"]), ("table", "ids"), sizes) == 880
    assert count_moved_bytes(helper.make_node("Add", ["x", "x"], ["y"]), ("x",), sizes) == 128


TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[256, 256] x, float[256, 256] w) => (float[256, 256] y) { [mul] a = MatMul(x, w)  [relu] y = Relu(a) }"""


def test_the_slower_of_computing_and_moving_decides_the_time():
    model = load(parser.parse_model(TEXT))
    shapes = infer_static_shapes(model)
    seconds = estimate_seconds(model, shapes, "cpu/1", PeakRates(1e9, 1e30, 1.0))
    assert seconds.tolist() == pytest.approx([2 * 256**3 / 1e9 + 1, 256**2 / 1e9 + 1])
    seconds = estimate_seconds(model, shapes, "cpu/4", PeakRates(1e30, 1e6, 0.0))
    assert seconds.tolist() == pytest.approx([3 * 256**2 * 4 / 1e6, 2 * 256**2 * 4 / 1e6])
    four, one = (estimate_seconds(model, shapes, f"cpu/{count}", PeakRates(1e9, 1e30, 0.0)) for count in (4, 1))
    assert (4 * four).tolist() == pytest.approx(one.tolist())


def test_peaks_of_this_processor_are_plausible():
    peaks = measure_peaks(0)
    assert 1e8 < peaks.operations_per_second < 1e13
    assert 1e8 < peaks.bytes_per_second < 1e13


def test_requested_estimates_are_deterministic_and_marked(monkeypatch):
    monkeypatch.setattr(
        "onnxplace.passes.profile.measure_peaks", lambda core: pytest.fail("an estimate must not run anything")
    )
    model = load(parser.parse_model(TEXT))
    state = State(Target((Device("cpu:0", 1 << 30),))).with_facts(model)
    profiles = [Pipeline.parse("profile{estimate=true}").run(state)[0][Profile] for _ in range(2)]
    assert (profiles[0].seconds["cpu/1"] == profiles[1].seconds["cpu/1"]).all()
    assert set(profiles[0].sources["cpu/1"].tolist()) == {Source.ESTIMATED}


def test_a_cpu_that_cannot_be_measured_is_estimated_from_local_peaks(monkeypatch):
    monkeypatch.setattr("onnxplace.passes.profile.measure_peaks", lambda core: PeakRates(1e9, 1e30, 0.0))
    model = load(parser.parse_model(TEXT))
    state = State(Target((Device("cpu:0", 1 << 30, cores=1000), Device("cuda:0", 1 << 30, model="none")))).with_facts(
        model
    )
    state, _ = Pipeline.parse("profile").run(state)
    assert state[Profile].seconds["cpu/1000"].tolist() == pytest.approx([2 * 256**3 / 1e12, 256**2 / 1e12])
    typical = typical_peaks("cuda")
    expected = max(256**3 * 2 / typical.operations_per_second, 3 * 256**2 * 4 / typical.bytes_per_second)
    assert state[Profile].seconds["cuda/none"][0] == pytest.approx(expected + typical.kernel_seconds)
    assert [note.code for note in state.diagnostics] == ["C001", "C001"]
    assert "measured here" in state.diagnostics[0].message
    assert "assumed" in state.diagnostics[1].message


def test_estimates_are_finite_with_and_without_shapes():
    text = TEXT.replace("256, 256] x", "n, 256] x").replace("float[256, 256] y", "float[n, 256] y")
    model = bind(load(parser.parse_model(text)), {"n": 3}, {})
    assert np.isfinite(estimate_seconds(model, infer_static_shapes(model), "cpu/1")).all()
    assert np.isfinite(estimate_seconds(model, {}, "cpu/1")).all()


TYPES = """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
g ({kind}[256, 256] x, {kind}[256, 256] w) => ({result}[256, 256] y) {{ [mul] y = {product}(x, w) }}"""


@pytest.mark.parametrize(
    ("kind", "product", "result", "rate"),
    [
        ("float", "MatMul", "float", 1e9),
        ("float16", "MatMul", "float16", 4e9),
        ("bfloat16", "MatMul", "bfloat16", 5e9),
        ("int8", "MatMulInteger", "int32", 8e9),
        ("uint8", "MatMulInteger", "int32", 8e9),
        ("double", "MatMul", "double", 1e9),
    ],
)
def test_a_node_is_estimated_at_the_rate_of_its_own_type(kind, product, result, rate):
    model = load(parser.parse_model(TYPES.format(kind=kind, product=product, result=result)))
    rates = {"tf32": 2e9, "float16": 4e9, "bfloat16": 5e9, "int8": 8e9}
    device = Device("cuda:0", 1, operations_per_second=1e9, type_operations_per_second=rates, kernel_seconds=1e-9)
    seconds = estimate_seconds(model, infer_static_shapes(model), "cuda/unknown", device_peaks(device))
    assert seconds.tolist() == pytest.approx([2 * 256**3 / rate], rel=1e-3)


@pytest.mark.parametrize(("precision", "rate"), [("float32", 1e9), ("tf32", 2e9)])
def test_float32_is_estimated_at_the_rate_of_the_type_that_it_is_computed_in(precision, rate):
    rates, options = {"tf32": 2e9, "float16": 4e9}, {"precision": precision}
    device = Device("cuda:0", 1, operations_per_second=1e9, type_operations_per_second=rates, options=options)
    assert device_peaks(device).type_operations_per_second == {**rates, "tf32": rate}
    device = Device("cuda:0", 1, operations_per_second=1e9, type_operations_per_second=rates, computes_in="float16")
    assert device_peaks(device).type_operations_per_second["tf32"] == 4e9


MEASURED = ProductTimes(2e-6, 4e-6, 1000.0, 0.8, 0.9, 2.0)
PRODUCTS = """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
g ({kind}[4, 32, 64] x, {kind}[32, 64] m, {kind}[64, 96] w, {kind}[96, 64] t, {kind}[4, 64, 32] b) =>
  ({kind}[4, 32, 96] y0, {kind}[32, 96] y1, {kind}[4, 32, 32] y2, {kind}[64, 64] y3, {kind}[4, 32, 64] y4) {{
    [folded] y0 = MatMul(x, w)
    [plain] y1 = Gemm<transB = 1>(m, t)
    [batched] y2 = MatMul(x, b)
    [turned] y3 = Gemm<transA = 1>(m, m)
    [other] y4 = Relu(x)
}}"""
# Name -> batch, m, n, k and how many elements are read and written.
PRODUCT_SIZES = {
    "folded": (1, 128, 96, 64, 4 * 32 * 64 + 64 * 96 + 4 * 32 * 96),
    "plain": (1, 32, 96, 64, 32 * 64 + 64 * 96 + 32 * 96),
    "batched": (4, 32, 32, 64, 2 * 4 * 32 * 64 + 4 * 32 * 32),
    "turned": (1, 64, 64, 32, 32 * 64 + 64 * 64),
}


def estimate_products(kind, device):
    model = load(parser.parse_model(PRODUCTS.format(kind=kind)))
    seconds = estimate_seconds(model, infer_static_shapes(model), device.cost_class, device_peaks(device))
    return dict(zip((node.name for node in model.nodes), seconds.tolist()))


def test_products_of_a_measured_type_take_what_the_coefficients_say():
    device = replace(parse_machine("A100").to_target().devices[0], kernel_seconds=1e-7)
    seconds = estimate_products("float16", device)
    for name, (batch, m, n, k, elements) in PRODUCT_SIZES.items():
        computing, moving = 2 * batch * m * n * k / 312e12, 2 * elements / 2.039e12
        assert seconds[name] == pytest.approx(device.products["float16"].seconds(computing, moving, k)), name
    assert seconds["other"] == pytest.approx(1e-7 + 2 * 2 * 4 * 32 * 64 / 2.039e12)


def test_products_of_other_types_and_devices_are_estimated_by_peak_rates():
    device = parse_machine("A100").to_target().devices[0]
    plain = replace(device, products={})
    assert estimate_products("float", device) == estimate_products("float", plain)
    assert estimate_products("float16", device) != estimate_products("float16", plain)
    assert all(
        slow >= fast
        for slow, fast in zip(
            estimate_products("float16", device).values(), estimate_products("float16", plain).values()
        )
    )


def test_a_small_product_takes_no_less_than_any_kernel_of_the_device():
    device = replace(parse_machine("H100").to_target().devices[0], kernel_seconds=1e-3)
    assert estimate_products("bfloat16", device)["plain"] == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(("precision", "is_used"), [("float32", False), ("tf32", True), ("float16", False)])
def test_coefficients_of_tf32_hold_where_the_device_computes_float32_in_it(precision, is_used):
    device = Device("cuda:0", 1, products={"tf32": MEASURED}, computes_in=precision)
    assert ("tf32" in device_peaks(device).products) == is_used


QUANTISED = """<ir_version: 10, opset_import: ["": 21]>
g (int8[64, 64] x, int8[64, 64] w, float scale, int8 zero) => (int8[64, 64] y, {more}) {{
    [dx] fx = DequantizeLinear(x, scale, zero)  [dw] fw = DequantizeLinear(w, scale, zero)  {product}
}}"""
OPERATOR = """<ir_version: 10, opset_import: ["": 21]>
g (int8[64, 64] x, int8[64, 64] w, float scale, int8 zero) => (int8[64, 64] y) {
    y = QLinearMatMul(x, scale, zero, w, scale, zero, scale, zero)
}"""
INTEGER_PEAKS = PeakRates(1e9, 1e6, 1e-3, {"tf32": 2e9, "int8": 8e9})


def estimate(text, peaks=INTEGER_PEAKS):
    model = load(parser.parse_model(text.replace(", )", ")")))
    seconds = estimate_seconds(model, infer_static_shapes(model), "cuda/unknown", peaks)
    return dict(zip((node.name for node in model.nodes), seconds.tolist()))


@pytest.mark.parametrize(
    ("product", "parts"),
    [
        ("[mul] f = MatMul(fx, fw)", "dx dw q"),
        ("[mul] f = Gemm<transB = 1>(fx, fw)", "dx dw q"),
        ("[mul] m = MatMul(fx, fw)  [relu] f = Relu(m)", "dx dw q relu"),
        ("[mul] m = MatMul(fx, fw)  [clip] f = Clip(m, scale)", "dx dw q clip"),
    ],
)
@pytest.mark.parametrize("peaks", [INTEGER_PEAKS, PeakRates(1e9, 1e30, 0.0, {"tf32": 2e9, "int8": 8e9})])
def test_a_product_between_quantisers_is_estimated_as_the_kernel_of_integers_that_runs(product, parts, peaks):
    seconds = estimate(QUANTISED.format(more="", product=f"{product}  [q] y = QuantizeLinear(f, scale, zero)"), peaks)
    (kernel,) = estimate(OPERATOR, peaks).values()  # also reads the scales
    assert seconds.pop("mul") == pytest.approx(kernel, rel=1e-3)
    assert seconds == dict.fromkeys(parts.split(), 0.0)


@pytest.mark.parametrize(
    ("product", "more"),
    [
        ("[mul] f = MatMul(fx, fw)", "float[64, 64] f"),
        ("[mul] f = MatMul(fx, fw)  [other] g = Sqrt(f)", "float[64, 64] g"),
        ("[root] r = Sqrt(fx)  [mul] f = MatMul(r, fw)", ""),
        ("[mul] m = MatMul(fx, fw)  [root] f = Sqrt(m)", ""),
        ("[mul] f = Sub(fx, fw)", ""),
    ],
)
def test_a_product_whose_values_something_else_reads_or_writes_runs_in_float(product, more):
    text = QUANTISED.format(more=more, product=f"{product}  [q] y = QuantizeLinear(f, scale, zero)")
    seconds = estimate(text)
    assert min(seconds.values()) > 0
    assert seconds == estimate(text, PeakRates(1e9, 1e6, 1e-3, {"tf32": 2e9}))  # a device without the rate


def test_a_dequantiser_that_something_else_reads_too_runs_as_it_stands():
    product = "[mul] f = MatMul(fx, fw)  [q] y = QuantizeLinear(f, scale, zero)  [root] r = Sqrt(fx)"
    seconds = estimate(QUANTISED.format(more="float[64, 64] r", product=product))
    assert seconds["dx"] == pytest.approx(1e-3 + 64 * 64 * (1 + 4) / 1e6, rel=1e-3)
    assert seconds["dw"] == seconds["q"] == 0
    assert seconds["mul"] == pytest.approx(1e-3 + 64 * 64 * 3 / 1e6)


def test_rates_of_types_hold_for_all_cores_of_a_processor():
    device = Device("cpu:0", 1, cores=4, operations_per_second=4e9, type_operations_per_second={"float16": 8e9})
    peaks = device_peaks(device)
    assert (peaks.operations_per_second, peaks.type_operations_per_second) == (1e9, {"float16": 2e9})


def test_values_that_only_the_runtime_can_infer_have_sizes_in_estimates():
    text = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
    g (float[64, 64] x) => (float[64, 64] y) { a = com.microsoft.Gelu(x)  y = Relu(a) }"""
    state = State(Target((Device("cpu:0", 1 << 30),))).with_facts(load(parser.parse_model(text)))
    state, _ = Pipeline.parse("profile{estimate=true}").run(state)
    moved = 2 * 64 * 64 * 4 / typical_peaks("cpu").bytes_per_second
    assert state[Profile].seconds["cpu/1"] == pytest.approx([moved + 2e-6, moved + 2e-6], rel=1e-2)
    assert "C002" not in [note.code for note in state.diagnostics]


def test_a_processor_of_another_name_is_not_measured(monkeypatch):
    model = load(parser.parse_model(TEXT))
    device = Device("cpu:0", 1 << 30, model="a processor of another machine", operations_per_second=1e9)
    state, _ = Pipeline.parse("profile").run(State(Target((device,))).with_facts(model))
    assert set(state[Profile].sources["cpu/1"].tolist()) == {Source.ESTIMATED}
    assert "a processor of another machine" in state.diagnostics[0].message
