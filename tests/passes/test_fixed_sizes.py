"""`--fixed-sizes`: what follows from the sizes becomes constant, and other sizes are refused."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

import onnxplace
from onnxplace.errors import FeedError
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model
from onnxplace.passes.optimize import Optimize
from onnxplace.pipeline.registry import create_runtime
from onnxplace.state import State

# A Reshape whose target is computed from the size of the input, as exporters write `x.view(batch, -1)`.
TEXT = """<ir_version: 8, opset_import: ["": 17]> model (float[batch, 4, 6] x) => (float[batch, flat] y, int64[1] size)
    <int64[1] first = {0}, int64[1] rest = {-1}> {
    shape = Shape(x) size = Gather(shape, first) target = Concat<axis = 0>(size, rest) flat = Reshape(x, target)
    y = Relu(flat) }"""


@pytest.fixture
def model_path(tmp_path):
    onnx.save(parser.parse_model(TEXT), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def optimize(batch, **options):
    model = bind(load(parser.parse_model(TEXT)), {"batch": batch}, {})
    return Optimize(**options).run(State(local_target("cpu:0")).with_facts(model))[Model]


def test_values_that_follow_from_sizes_become_constants_and_outputs_stay_computed():
    before, after = optimize(3), optimize(3, fixed_sizes=True)
    assert [node.op_type for node in before.nodes] == ["Shape", "Gather", "Concat", "Reshape", "Relu"]
    assert [node.op_type for node in after.nodes if node.op_type in ("Concat", "Reshape", "Relu")] == [
        "Reshape",
        "Relu",
    ]
    assert "size" in {name for node in after.nodes for name in node.output}, "an output of the model is still computed"
    assert [dim.dim_value for dim in after.inputs[0].type.tensor_type.shape.dim] == [3, 4, 6]
    assert after.initializers["target"].raw_data == np.array([3, -1]).tobytes()


def compile_fixed(model_path, run_cli, *more, devices="cpu:0"):
    options = ("--shape", "batch=1", "--shape", "batch=3", "--devices", devices, "--fixed-sizes")
    return run_cli("compile", model_path, *options, "-o", model_path.parent / "bundle", *more)


@pytest.mark.parametrize("trial", [(), ("--no-trial",)], ids=["trial", "no-trial"])
@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1"])
def test_several_sizes_are_plans_of_which_each_takes_its_own(model_path, run_cli, trial, devices):
    result = compile_fixed(model_path, run_cli, *trial, devices=devices)
    assert result.code == 0, result.err
    bundle = onnxplace.load(model_path.parent / "bundle", check="all")
    assert [item.dimensions["batch"] for item in bundle.manifest.sizes] == [1, 3]
    assert [[step is None for step in item.seconds] for item in bundle.manifest.sizes] == [[False, True], [True, False]]
    for plan, batch in zip(bundle.plans, (1, 3), strict=True):
        assert plan.manifest.values["x"].shape == (batch, 4, 6)
        x = np.random.default_rng(0).standard_normal((batch, 4, 6)).astype(np.float32)
        with create_runtime("onnxruntime").open(plan) as session:
            outputs = session.run({"x": x}).outputs
            np.testing.assert_array_equal(outputs["y"], np.maximum(x.reshape(batch, 24), 0))
            assert outputs["size"].tolist() == [batch]


def test_a_bundle_of_fixed_sizes_declares_shapes_with_the_names_of_the_model_where_plans_differ(model_path, run_cli):
    compile_fixed(model_path, run_cli, "--no-trial")
    bundle = onnxplace.load(model_path.parent / "bundle")
    assert [item.shape for item in bundle.inputs] == [("batch", 4, 6)]
    assert [(item.name, item.shape) for item in bundle.outputs] == [("y", ("batch", "flat")), ("size", (1,))]
    assert [item.shape for item in bundle.plans[1].inputs] == [(3, 4, 6)]
    with onnxplace.InferenceSession(bundle.plans[1]) as session, pytest.raises(FeedError, match="axis 0 must be 3"):
        session.run(None, {"x": np.zeros((1, 4, 6), np.float32)})


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("n", "n"), [("n", 2), ("n", 2)]),
        (("2*n", "n"), [("2*n", 2), ("n", 2)]),
        ((None, 2), [(None, 2), (2, 2)]),
    ],
)
def test_axes_that_differ_are_declared_as_the_model_does(axes, expected, tmp_path):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [axis, 2]) for name, axis in zip("xw", axes)]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "yz"]
    nodes = [helper.make_node("Relu", [source], [target]) for source, target in ("xy", "wz")]
    proto = helper.make_model(helper.make_graph(nodes, "g", values, results), ir_version=10)
    proto.opset_import[0].version = 17
    name = "n" if "n" in axes else "x.0"
    options = {"devices": "cpu:0", "shape": {name: [3, 5]}, "fixed_sizes": True, "trial": False}
    bundle = onnxplace.compile(proto, tmp_path / "bundle", **options)
    assert [item.shape for item in bundle.inputs] == expected
    assert [plan.inputs[0].shape for plan in bundle.plans[1:]] == [(10 if axes[0] == "2*n" else 5, 2)]


def test_fewer_plans_than_fixed_sizes_are_refused(model_path, run_cli):
    result = compile_fixed(model_path, run_cli, "--plans", "1")
    assert result.code == 3
    assert "error[P001] --shape: no plans take all sizes together within the memory of the devices" in result.err
    assert "hint: raise --plans or --max-memory, or give fewer sizes" in result.err
    assert sorted(path.name for path in model_path.parent.iterdir()) == ["model.onnx"]


def test_the_bundle_computes_the_same_and_refuses_other_sizes(model_path, tmp_path, run_cli):
    bundle = tmp_path / "bundle"
    options = ("--shape", "batch=3", "--devices", "cpu:0,cpu:1", "--no-trial")
    result = run_cli("compile", model_path, "-o", bundle, *options, "--fixed-sizes")
    assert result.code == 0, result.err
    x = np.random.default_rng(0).standard_normal((3, 4, 6)).astype(np.float32)
    with onnxplace.InferenceSession(bundle) as session:
        y, size = session.run(None, {"x": x})
        np.testing.assert_array_equal(y, np.maximum(x.reshape(3, 24), 0))
        assert size.tolist() == [3]
        with pytest.raises(FeedError, match="3"):
            session.run(None, {"x": x[:2]})
    assert run_cli("verify", bundle, "--against", model_path).code == 0
    plan = run_cli("plan", model_path, *options[:-1], "--fixed-sizes", "--estimate", "--json")
    assert plan.code == 0, plan.err


GROWING = """<ir_version: 8, opset_import: ["": 18]> cache
    (float[1, p, 4] past, float[1, 1, 4] token) => (float[1, q, 4] present) {
   present = Concat<axis: int = 1>(past, token)
}"""


def test_a_cache_that_grows_from_call_to_call_has_no_fixed_size(run_cli, tmp_path):
    onnx.save(parser.parse_model(GROWING), tmp_path / "cache.onnx")
    options = ("--devices", "cpu:0", "--shape", "p=8", "--state", "present=past", "-o", tmp_path / "b")
    refused = run_cli("compile", tmp_path / "cache.onnx", *options, "--fixed-sizes")
    assert refused.code == 3
    assert "error[L060]" in refused.err
    assert "a call changes state 'past' from [1, 8, 4] to [1, 9, 4], but sizes are to be fixed" in refused.err
    assert "--fixed-sizes" in refused.err
    assert run_cli("compile", tmp_path / "cache.onnx", *options).code == 0
