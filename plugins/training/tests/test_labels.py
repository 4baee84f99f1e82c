"""Labels of a training step: those that are no class are refused before a step, as torch refuses them."""

import json

import numpy as np
import onnx
import pytest
from onnx import parser

import onnxplace
from onnxplace.errors import FeedError
from onnxplace.model_metadata import TRAINING_KEY
from onnxplace_training import Trainer

CLASSIFIER = """
<ir_version: 8, opset_import: ["": 17]>
step (float[batch, 2] x, int64[batch] target, float[2, 3] w) => (float loss, float[2, 3] w_new)
<float[2, 3] w = {1, 0, 0, 0, 1, 0}, int64 ignored = {-100}, int64 zero = {0}, int64[1] last = {1}, float one = {1},
 float rate = {0.1}, float nothing = {0}>
{
    logits = MatMul(x, w)
    log = LogSoftmax(logits)
    is_ignored = Equal(target, ignored)
    is_used = Not(is_ignored)
    safe = Where(is_used, target, zero)
    indices = Unsqueeze(safe, last)
    picked = GatherElements<axis = 1>(log, indices)
    used = Unsqueeze(is_used, last)
    kept = Where(used, picked, nothing)
    mean = ReduceMean<keepdims = 0>(kept)
    loss = Neg(mean)
    soft = Exp(log)
    whole = Sub(soft, soft)
    ones = Cast<to = 1>(used)
    hot = ScatterElements<axis = 1>(whole, indices, ones)
    difference = Sub(soft, hot)
    error = Mul(difference, ones)
    turned = Transpose(x)
    gradient = MatMul(turned, error)
    change = Mul(gradient, rate)
    w_new = Sub(w, change)
}
"""
BY_OPERATOR = """
<ir_version: 8, opset_import: ["": 17]>
step (float[batch, 2] x, int64[batch] target, float[2, 3] w) => (float loss, float[2, 3] w_new)
<float[2, 3] w = {1, 0, 0, 0, 1, 0}, float rate = {0.1}>
{
    logits = MatMul(x, w)
    loss = SoftmaxCrossEntropyLoss<ignore_index = -100>(logits, target)
    change = Mul(w, rate)
    w_new = Sub(w, change)
}
"""
GOOD = [2, 0, 1, 2, -100, 1]


def make_feeds(*labels: int) -> dict[str, np.ndarray]:
    return {"x": np.eye(6, 2, dtype=np.float32), "target": np.array(labels, dtype=np.int64)}


@pytest.fixture(scope="module", params=[CLASSIFIER, BY_OPERATOR], ids=["gather", "operator"])
def bundle(request, tmp_path_factory) -> onnxplace.Bundle:
    model = parser.parse_model(request.param)
    described = {"loss": "loss", "parameters": [{"name": "w", "input": "w", "output": "w_new"}]}
    model.metadata_props.append(onnx.StringStringEntryProto(key=TRAINING_KEY, value=json.dumps(described)))
    pipeline = "optimize,profile{estimate=true},coplace{join=never},m-topo,split,emit"
    path = tmp_path_factory.mktemp("labels") / "step.bundle"
    options = {"devices": "cpu:0,cpu:1", "shape": {"batch": 6}, "trial": False, "pipeline": pipeline}
    return onnxplace.compile(model, path, **options)


@pytest.mark.parametrize(("row", "label"), [(3, -1), (0, -3), (5, 3), (2, -99)])
def test_a_label_that_is_no_class_changes_nothing_and_is_named(bundle, row, label):
    labels = [*GOOD[:row], label, *GOOD[row + 1 :]]
    with Trainer(bundle) as trainer:
        trainer.step(make_feeds(*GOOD))
        before = trainer.state_dict()
        message = rf"'target' has the label {label} in row {row}(?s:.)*from 0 to 2, or -100 to ignore it"
        with pytest.raises(FeedError, match=message) as refused:
            trainer.step(make_feeds(*labels))
        assert refused.value.code == "F011"
        assert trainer.step_count == 1
        np.testing.assert_array_equal(trainer.state_dict()["w"], before["w"])


def test_classes_and_ignored_labels_train(bundle):
    with Trainer(bundle) as trainer:
        assert np.isfinite([trainer.step(make_feeds(*GOOD)).loss for _ in range(3)]).all()


def test_plain_sessions_refuse_them_too_in_each_request(bundle):
    with onnxplace.InferenceSession(bundle) as session:
        feeds = make_feeds(*GOOD)
        session.run(None, feeds)
        with pytest.raises(FeedError, match="F011"):
            session.run(None, {**feeds, "target": make_feeds(*GOOD[:5], -1)["target"]})


def test_train_names_the_row_of_the_file_before_the_first_step(bundle, tmp_path, run_cli):
    feeds = {name: np.concatenate([array] * 3) for name, array in make_feeds(*GOOD).items()}
    feeds["target"][13] = -1
    np.savez(tmp_path / "data.npz", **feeds)
    result = run_cli("train", bundle.path, "--data", tmp_path / "data.npz", "--steps", 5, "--save", tmp_path / "c")
    assert result.code == 2
    assert "error[F011]" in result.err
    assert "data.npz: 'target' has the label -1 in row 13" in result.err
    assert not (tmp_path / "c").exists()
