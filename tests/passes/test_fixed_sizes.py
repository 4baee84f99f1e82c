"""`--fixed-sizes`: what follows from the sizes becomes constant, and other sizes are refused."""

import numpy as np
import onnx
import pytest
from onnx import parser

import onnxplace
from onnxplace.errors import FeedError
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model
from onnxplace.passes.optimize import Optimize
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


def test_several_sizes_are_refused_as_a_bundle_would_take_the_first_alone(model_path, run_cli):
    result = run_cli("compile", model_path, "--shape", "batch=1,4,8", "--devices", "cpu:0", "--fixed-sizes")
    assert result.code == 2
    assert "error[U042] model: --fixed-sizes takes one size, and --shape gives 3" in result.err
    assert "hint: give one size; or omit --fixed-sizes, and devices that need fixed sizes get a session" in result.err
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
