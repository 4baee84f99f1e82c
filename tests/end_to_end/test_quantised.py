"""Quantised models: nodes that ONNX Runtime fuses into one integer kernel stay together in every placement."""

import json
import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxplace.bundle.bundle import WHOLE_MODEL_FILE, Bundle
from onnxplace.driver.compile import compile_model
from onnxplace.machine import ort_sessions
from onnxplace.measure import size_comparison
from onnxplace.measure.compare import ModelComparison, rounds_to_few_values
from onnxplace.model.cut_constraints import join_quantised_units
from onnxplace.model.loading import load
from onnxplace.passes.coplace import Coplace
from onnxplace.passes.emit import Emit
from onnxplace.passes.fuse import Fuse
from onnxplace.passes.optimize import Optimize
from onnxplace.passes.profile import ProfileCosts
from onnxplace.passes.split import Split
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.target.target import Device, Link, Target
from tests.support.random_models import run_plain
from tests.support.random_placements import RandomPlacement, run_together

SCALE = 0.05
FREE_LINKS = tuple(Link(a, b, 0.0, 1e15) for a, b in (("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")))
TWO = Target((Device("cpu:0", 1 << 30, segment_seconds=0.0), Device("cpu:1", 1 << 30, segment_seconds=0.0)), FREE_LINKS)


def quantised(blocks: int = 3) -> ModelProto:
    """Return residual blocks of two quantised convolutions and an addition each, float in and out."""
    random = np.random.default_rng(0)
    nodes, weights = [], []

    def scalar(name: str, array: np.ndarray) -> str:
        weights.append(numpy_helper.from_array(array, name))
        return name

    scale, zero = scalar("scale", np.float32(SCALE)), scalar("zero", np.uint8(128))
    weight_scale, weight_zero = scalar("weight_scale", np.float32(SCALE)), scalar("weight_zero", np.int8(0))

    def quantise(value: str) -> str:
        nodes.append(helper.make_node("QuantizeLinear", [value, scale, zero], [f"{value}_q"], f"{value}_Q"))
        nodes.append(helper.make_node("DequantizeLinear", [f"{value}_q", scale, zero], [f"{value}_d"], f"{value}_DQ"))
        return f"{value}_d"

    def convolution(value: str, name: str) -> str:
        weights.append(numpy_helper.from_array(random.integers(-20, 20, (4, 4, 3, 3)).astype(np.int8), f"{name}_w"))
        inputs = [f"{name}_w", weight_scale, weight_zero]
        nodes.append(helper.make_node("DequantizeLinear", inputs, [f"{name}_wd"], f"{name}_WDQ"))
        nodes.append(helper.make_node("Conv", [value, f"{name}_wd"], [name], name, pads=[1, 1, 1, 1]))
        return quantise(name)

    value = quantise("x")
    for block in range(blocks):
        residual = convolution(convolution(value, f"a{block}"), f"b{block}")
        right = convolution(value, f"c{block}")
        nodes.append(helper.make_node("Add", [residual, right], [f"sum{block}"], f"sum{block}"))
        value = quantise(f"sum{block}")
    nodes.append(helper.make_node("Identity", [value], ["y"], "last"))
    shape = [1, 4, 8, 8]
    graph = helper.make_graph(
        nodes,
        "quantised",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def feeds() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((1, 4, 8, 8)).astype(np.float32)}


def nodes_of(file: Path) -> list[onnx.NodeProto]:
    return list(onnx.load(file, load_external_data=False).graph.node)


def list_split_pairs(bundle: Bundle) -> list[str]:
    """Return the operators whose quantised inputs or outputs are in another segment."""
    pairs = []
    for segment in bundle.manifest.segments:
        nodes = nodes_of(bundle.file(segment.file))
        producers = {name: node.op_type for node in nodes for name in node.output}
        read = {name: node.op_type for node in nodes for name in node.input}
        for node in nodes:
            if node.op_type in ("Conv", "Add") and (
                [producers.get(name) for name in node.input] != ["DequantizeLinear"] * 2
                or read.get(node.output[0]) != "QuantizeLinear"
            ):
                pairs.append(node.name)
    return pairs


def kernels(file: Path, folder: Path) -> list[str]:
    """Return the operators of a model after ONNX Runtime's optimisation."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in nodes_of(folder / "optimized.onnx")]


def compiled(folder: Path, placer: RandomPlacement | str, *, estimate: bool = True) -> Bundle:
    placed = Pipeline.parse(placer).passes if isinstance(placer, str) else (placer,)
    steps = (Optimize(), ProfileCosts(estimate=estimate), Coplace(join="never"), Fuse(), *placed, Split(), Emit())
    return compile_model(quantised(), folder / "bundle", target=TWO, pipeline=Pipeline(steps)).bundle


@pytest.mark.parametrize("estimate", [True, False], ids=["estimated", "measured"])
@pytest.mark.parametrize(
    "placer", ["m-etf", RandomPlacement((0, 1)), RandomPlacement((0, 1, 1, 0, 1), (3, 0, 7, 1))], ids=str
)
def test_every_quantised_unit_lies_in_one_segment(tmp_path: Path, placer: RandomPlacement | str, estimate: bool):
    bundle = compiled(tmp_path, placer, estimate=estimate)
    assert {segment.device for segment in bundle.manifest.segments} == {"cpu:0", "cpu:1"}
    assert list_split_pairs(bundle) == []
    operators = [op for s in bundle.manifest.segments for op in kernels(bundle.file(s.file), tmp_path)]
    assert operators.count("QLinearConv") == 9
    assert operators.count("QLinearAdd") == 3
    for file in (bundle.file(WHOLE_MODEL_FILE), quantised().SerializeToString()):
        expected = run_plain(file, [feeds()], "all")[0]
        np.testing.assert_array_equal(run_together(bundle, [feeds()])[0], expected)


def test_values_that_cross_between_devices_are_quantised(tmp_path: Path):
    bundle = compiled(tmp_path, RandomPlacement((0, 1)))
    sent = {step.value for program in bundle.manifest.programs.values() for step in program if step.op == "send"}
    inner = {name for name in sent if not name.startswith("x") and name != "sum2_d"}
    assert inner
    assert {bundle.manifest.values[name].dtype for name in inner} == {"tensor(uint8)"}


def test_each_reader_has_its_own_dequantizer_after_optimisation(tmp_path: Path):
    bundle = compiled(tmp_path, "m-etf")
    nodes = nodes_of(bundle.file(WHOLE_MODEL_FILE))
    for maker in (node for node in nodes if node.op_type == "DequantizeLinear"):
        assert sum(maker.output[0] in node.input for node in nodes) <= 1
    names = [node.name for node in nodes]
    assert len(set(names)) == len(names)


def test_the_model_may_be_split_between_quantiser_and_dequantiser():
    model = load(quantised(1))
    unit = join_quantised_units(model, np.arange(len(model.nodes), dtype=np.int32))
    of = {node.name: unit[index] for index, node in enumerate(model.nodes)}
    assert of["a0_Q"] == of["a0"] == of["a0_WDQ"]
    assert of["a0_DQ"] == of["b0"] != of["a0"]
    assert of["x_Q"] != of["x_DQ"]
    assert of["last"] == of["sum0_DQ"] != of["sum0_Q"]
    assert set(unit.tolist()) == set(range(int(unit.max()) + 1))


def test_a_dequantizer_that_a_subgraph_or_the_caller_reads_stays(tmp_path: Path):
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 18]>
        graph (uint8[4] x, bool c) => (float[4] d, float[4] y, float[4] z) <float s = {0.5}, uint8 o = {3}> {
            d = DequantizeLinear(x, s, o)
            e = DequantizeLinear(x, s, o)
            a = Neg(d)
            b = Neg(e)
            k = Abs(e)
            h = Add(b, k)
            y = Add(a, h)
            z = If(c) <
                then_branch = t () => (float[4] u) { u = Neg(e) },
                else_branch = f () => (float[4] v) { v = Abs(e) }
            >
        }"""
    )
    inputs = [{"x": np.arange(4, dtype=np.uint8), "c": np.array(c)} for c in (True, False)]
    steps = (Optimize(), ProfileCosts(estimate=True), RandomPlacement((0, 1)), Split(), Emit())
    bundle = compile_model(model, tmp_path / "bundle", target=TWO, pipeline=Pipeline(steps)).bundle
    for actual, expected in zip(run_together(bundle, inputs), run_plain(model.SerializeToString(), inputs)):
        for first, second in zip(actual, expected):
            np.testing.assert_array_equal(first, second)
    assert [node.op_type for node in nodes_of(bundle.file(WHOLE_MODEL_FILE))].count("DequantizeLinear") == 5


@pytest.mark.parametrize(("quantises", "code"), [(True, 0), (False, 1)])
def test_a_differing_quantised_model_is_compared_again_unoptimised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli, quantises: bool, code: int
):
    levels, honest = [], ModelComparison.compare

    def differing_if_optimised(*arguments):
        levels.append(ort_sessions.make_session_options([0]).graph_optimization_level)
        optimised = levels[-1] == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        steps = honest(*arguments)
        return [
            [replace(item, equal=item.equal and not optimised, max_abs_error=1.0) for item in step] for step in steps
        ]

    bundle = compiled(tmp_path, RandomPlacement((0, 1)))
    monkeypatch.setattr(ModelComparison, "compare", differing_if_optimised)
    monkeypatch.setattr(
        size_comparison, "rounds_to_few_values", lambda bundle: quantises and rounds_to_few_values(bundle)
    )
    result = run_cli("verify", bundle.path, "--json")
    answer = json.loads(result.out)
    assert (result.code, answer["equal"], answer["optimised"]) == (code, quantises, not quantises)
    assert len(levels) == (2 if quantises else 1)
    assert ("optimisations off" in run_cli("verify", bundle.path).out) == quantises
