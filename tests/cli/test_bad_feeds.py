"""Inputs that do not fit the model are refused."""

from pathlib import Path

import numpy as np
import pytest

from onnxplace.cli.app import main
from tests.support.bad_input import parse_graph, store

pytestmark = pytest.mark.usefixtures("no_gpus")


FEEDS = pytest.mark.parametrize(
    ("arrays", "expected_words"),
    [
        ({"xx": np.zeros((4, 64), "f4")}, ("'xx'", "did you mean 'x'?")),
        ({"x": np.zeros((4, 65), "f4")}, ("'x'", "[4, 65]", "[batch, 64]", "64")),
        ({"x": np.zeros(64, "f4")}, ("'x'", "[64]", "[batch, 64]")),
        ({"x": np.zeros((4, 64), "f8")}, ("'x'", "float64", "float32", "astype")),
    ],
    ids=["name", "shape", "rank", "dtype"],
)


@FEEDS
@pytest.mark.parametrize("command", ["compile", "run", "verify", "bench"])
def test_feeds_that_do_not_fit_are_refused(refused, model_file, bundle_copy, command, arrays, expected_words):
    np.savez(model_file.parent / "feeds.npz", **arrays)
    refused(2, expected_words, command, model_file if command == "compile" else bundle_copy, "--inputs", "feeds.npz")


def test_a_feed_that_is_missing_is_named_with_its_type_and_shape(refused, bundle_copy, tmp_path):
    np.savez(tmp_path / "feeds.npz")
    refused(2, ("'x'", "tensor(float)", "[batch, 64]"), "run", bundle_copy, "--inputs", "feeds.npz")


def test_compiling_with_some_inputs_names_those_that_are_missing(refused, tmp_path):
    store(parse_graph("(float[4] x, float[4] z) => (float[4] y) { y = Add(x, z) }"), tmp_path / "m.onnx")
    np.savez(tmp_path / "feeds.npz", x=np.zeros(4, "f4"))
    refused(2, ("'z'", "tensor(float)", "[4]"), "compile", "m.onnx", "--inputs", "feeds.npz")


def test_inputs_that_disagree_about_a_dimension_are_refused(refused, tmp_path):
    store(parse_graph("(float[n] x, float[n] z) => (float[n] y) { y = Add(x, z) }"), tmp_path / "m.onnx")
    np.savez(tmp_path / "feeds.npz", x=np.zeros(4, "f4"), z=np.zeros(5, "f4"))
    refused(2, ("'n'", "'z'", "x[0]", "5", "4"), "compile", "m.onnx", "--inputs", "feeds.npz")


def not_an_npz(kind: str, path: Path) -> None:
    if kind == "array":
        np.save(path.with_suffix(".npy"), np.zeros(3))
        path.with_suffix(".npy").rename(path)
    elif kind == "objects":
        np.savez(path, x=np.array([{}], dtype=object))
    elif kind == "folder":
        path.mkdir()
    elif kind in ("truncated", "altered"):
        np.savez(path, x=np.zeros((4, 64), "f4"))
        data = bytearray(path.read_bytes())
        data[300] ^= 255
        path.write_bytes(bytes(data) if kind == "altered" else bytes(data[:-40]))
    else:
        path.write_bytes(b"x" if kind == "text" else b"")


@pytest.mark.parametrize(
    "kind",
    [
        "text",
        "array",
        "objects",
        "folder",
        pytest.param(
            "truncated",
        ),
        "altered",
        pytest.param(
            "empty",
        ),
    ],
)
def test_inputs_that_are_not_an_npz_file_are_refused(refused, bundle_copy, tmp_path, kind):
    not_an_npz(kind, tmp_path / "feeds.npz")
    refused(2, ("feeds.npz", ".npz", "numpy.savez"), "run", bundle_copy, "--inputs", "feeds.npz")


def test_inputs_that_are_missing_are_named(refused, model_file, bundle_copy):
    refused(2, ("nowhere.npz", "no such file"), "run", bundle_copy, "--inputs", "nowhere.npz")
    refused(2, ("nowhere.npz", "no such file"), "compile", model_file, "--inputs", "nowhere.npz")


def test_inputs_that_a_kernel_refuses_are_the_users_fault(refused, tmp_path):
    store(
        parse_graph("(int64[2] rows, float[2, 2] x) => (float[2, 2] y) { [pick] y = Gather(x, rows) }"),
        tmp_path / "m.onnx",
    )
    np.savez(tmp_path / "feeds.npz", rows=np.array([0, 5]), x=np.zeros((2, 2), "f4"))
    expected_words = refused(2, ("pick", "out of data bounds"), "compile", "m.onnx", "--inputs", "feeds.npz")
    assert "defect of the pass" not in expected_words


def test_a_kernel_that_fails_is_reported_in_one_line_and_a_hint(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    store(parse_graph("(int64[2] rows, float[2, 2] x) => (float[2, 2] y) { y = Gather(x, rows) }"), tmp_path / "m.onnx")
    np.savez(tmp_path / "feeds.npz", rows=np.array([0, 5]), x=np.zeros((2, 2), "f4"))
    assert main(["compile", "m.onnx", "--inputs", "feeds.npz"]) == 2
    message, hint = capfd.readouterr().err.splitlines()
    assert message.startswith("error[")
    assert hint.startswith("  hint: ")
