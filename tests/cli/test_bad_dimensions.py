"""Sizes that are missing or contradict the model are refused."""

import re

import pytest

from tests.support.bad_input import parse_graph, store

pytestmark = pytest.mark.usefixtures("no_gpus")


def test_unbound_dimensions_are_listed_with_an_example_that_works(refused, run_cli, tmp_path, fast_pipeline):
    store(
        parse_graph("(float[batch, seq, 4] x, float[seq] z) => (float[batch, seq, 4] y) { y = Relu(x) }"),
        tmp_path / "m.onnx",
    )
    expected_words = refused(2, ("batch, seq", "--inputs"), "compile", "m.onnx", "--pipeline", fast_pipeline)
    example = re.search(r"--shape (\S+?),? ", expected_words)[1]
    assert run_cli("compile", "m.onnx", "--shape", example, "--pipeline", fast_pipeline).code == 0


def test_an_unnamed_dimension_can_be_bound_by_the_name_the_message_gives(refused, run_cli, tmp_path, fast_pipeline):
    store(parse_graph("(float[?, 4] x) => (float[?, 4] y) { y = Relu(x) }"), tmp_path / "m.onnx")
    refused(2, ("x.0", "--shape x.0=1"), "compile", "m.onnx", "--pipeline", fast_pipeline)
    assert run_cli("compile", "m.onnx", "--shape", "x.0=1", "--pipeline", fast_pipeline).code == 0


@pytest.mark.parametrize(
    ("shape", "expected_words"),
    [
        ("batsh=4", ("batsh", "did you mean 'batch'?")),
        ("batch", ("'batch'", "batch=8")),
        ("batch=many", ("batch=many", "batch=8")),
        ("batch=-1", ("batch=-1", "batch=8")),
        ("=4", ("=4", "batch=8")),
    ],
)
def test_a_malformed_shape_is_refused(refused, model_file, shape, expected_words):
    refused(2, ("--shape", *expected_words), "compile", model_file, "--shape", shape)


def test_a_shape_for_a_model_without_symbols_is_refused(refused, tmp_path):
    store(parse_graph("(float[4] x) => (float[4] y) { y = Relu(x) }"), tmp_path / "m.onnx")
    refused(2, ("batch", "fixed"), "compile", "m.onnx", "--shape", "batch=4")


@pytest.mark.parametrize("command", ["run", "verify", "bench"])
def test_a_shape_with_an_unknown_symbol_is_refused_by_a_bundle_too(refused, bundle_copy, command):
    refused(2, ("batsh", "did you mean 'batch'?"), command, bundle_copy, "--shape", "batsh=4")
