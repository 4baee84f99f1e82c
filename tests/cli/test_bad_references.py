"""`verify` and `bench` refuse models that they cannot compare with."""

import pytest

from tests.support.bad_input import parse_graph, store

pytestmark = pytest.mark.usefixtures("no_gpus")


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_model_to_compare_with_must_be_one(refused, bundle_copy, tmp_path, command):
    (tmp_path / "junk.onnx").write_text("junk")
    refused(2, ("nowhere.onnx", "no such file"), command, bundle_copy, "--against", "nowhere.onnx")
    refused(2, ("junk.onnx",), command, bundle_copy, "--against", "junk.onnx")


@pytest.mark.parametrize("command", ["verify", "bench"])
@pytest.mark.parametrize(
    ("text", "expected_words"),
    [
        ("(float[batch, 64] x) => (float[batch, 64] z) { z = Relu(x) }", ("no output y", "another model")),
        pytest.param(
            "(float[batch, 64] q) => (float[batch, 64] y) { y = Relu(q) }",
            ("q", "another model"),
        ),
        pytest.param(
            "(float[batch] x) => (float[batch] y) { y = Relu(x) }",
            ("x", "another model"),
        ),
    ],
    ids=["output", "input", "shape"],
)
def test_another_model_to_compare_with_is_refused(refused, bundle_copy, tmp_path, command, text, expected_words):
    store(parse_graph(text), tmp_path / "other.onnx")
    refused(2, ("other.onnx", *expected_words), command, bundle_copy, "--against", "other.onnx")


def test_verify_refuses_a_runtime_without_outputs(refused, bundle_copy):
    refused(2, ("simulated",), "verify", bundle_copy, "--runtime", "simulated")
