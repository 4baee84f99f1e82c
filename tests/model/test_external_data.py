"""External data and sparse weights: read from the folder of the model, or refused in one line with exit code 2."""

import csv
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, helper, numpy_helper

from onnxplace import OnnxplaceError
from onnxplace.model.loading import load
from onnxplace.passes.segments import write_segments
from plugins.training.tests.test_trainer import compile_model as compile_training
from tests.conftest import Ran, branches
from tests.support.model_texts import IF, X, find_then_branch, parse_graph
from tests.support.random_models import reference
from tests.support.random_placements import RandomPlacement, assert_same, compiled_with, run_together
from tests.support.snapshots import make_snapshot
from tests.support.training_models import make_mlp

pytestmark = pytest.mark.usefixtures("no_gpus")


def store_externally(tensor: TensorProto, folder: Path, file: str = "w.data") -> TensorProto:
    """Return a tensor whose bytes are appended to a file in `folder`."""
    path = folder / file
    data = numpy_helper.to_array(tensor).tobytes()
    offset = path.stat().st_size if path.exists() else 0
    with path.open("ab") as stream:
        stream.write(data)
    result = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    result.data_location = TensorProto.EXTERNAL
    for key, value in (("location", file), ("offset", str(offset)), ("length", str(len(data)))):
        result.external_data.add(key=key, value=value)
    return result


def make_sparse_weight(folder: Path | None, kind: str = "both") -> SparseTensorProto:
    """Return the vector [0, 7, 0, 9], with values or indices or both in a file of `folder`."""
    values = numpy_helper.from_array(np.array([7, 9], np.float32), "thin")
    indices = numpy_helper.from_array(np.array([1, 3], np.int64), "thin_indices")
    if folder is not None and kind in ("both", "values"):
        values = store_externally(values, folder)
    if folder is not None and kind in ("both", "indices"):
        indices = store_externally(indices, folder)
    return helper.make_sparse_tensor(values, indices, [4])


THIN = np.array([0, 7, 0, 9], np.float32)


def build_with_initializer(folder: Path | None, kind: str) -> ModelProto:
    model = parse_graph("(float[4] x) => (float[4] y) { z = Neg(x) y = Add(z, thin) }")
    model.graph.sparse_initializer.append(make_sparse_weight(folder, kind))
    return model


def build_with_constant(folder: Path | None, kind: str) -> ModelProto:
    model = parse_graph("(float[4] x) => (float[4] y) { z = Neg(x) y = Add(z, thin) }")
    model.graph.node.insert(0, make_constant(make_sparse_weight(folder, kind)))
    return model


def build_with_constant_of_a_subgraph(folder: Path | None, kind: str) -> ModelProto:
    model = parse_graph(IF)
    find_then_branch(model).node.insert(0, make_constant(make_sparse_weight(folder, kind)))
    return model


def make_constant(value: SparseTensorProto) -> NodeProto:
    node = helper.make_node("Constant", [], ["thin"])
    node.attribute.append(AttributeProto(name="sparse_value", type=AttributeProto.SPARSE_TENSOR, sparse_tensor=value))
    return node


BUILDERS = pytest.mark.parametrize(
    "build_model", [build_with_initializer, build_with_constant, build_with_constant_of_a_subgraph]
)


def build_feeds(model: ModelProto) -> list[dict[str, Any]]:
    return [{"x": X, "c": np.array(True)} if len(model.graph.input) > 1 else {"x": X}]


@BUILDERS
@pytest.mark.parametrize("kind", ["values", "indices", "both"])
def test_external_sparse_weights_are_read_from_the_models_folder(tmp_path, monkeypatch, build_model, kind):
    (tmp_path / "model").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "w.data").write_bytes(bytes(range(64)))  # of the same name, in the current folder
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = build_model(tmp_path / "model", kind)
    path = tmp_path / "model" / "m.onnx"
    path.write_bytes(model.SerializeToString())
    bundle = compiled_with(path, RandomPlacement((0, 1)), tmp_path, optimized=False)
    (outputs,) = run_together(bundle, build_feeds(model))
    assert_same(outputs, [-(X + THIN) if "subgraph" in build_model.__name__ else THIN - X])


@BUILDERS
@pytest.mark.parametrize("kind", ["values", "indices"])
def test_external_sparse_weights_that_are_missing_or_short_are_named(
    require_refusal, tmp_path, monkeypatch, build_model, kind
):
    monkeypatch.chdir("/")
    model = build_model(tmp_path, kind)
    (tmp_path / "w.data").write_bytes(bytes(3))
    require_refusal(model, "M005", "thin", "too short", "w.data")
    (tmp_path / "w.data").unlink()
    require_refusal(model, "M005", "thin", "missing", "w.data")


@BUILDERS
def test_external_sparse_weights_never_leave_the_folder(require_refusal, tmp_path, tmp_path_factory, build_model):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "w.data").write_bytes(bytes(64))
    (tmp_path / "w.data").symlink_to(outside / "w.data")
    with mock.patch(f"{__name__}.store_externally", lambda tensor, folder: refer_to(tensor, "w.data")):
        require_refusal(build_model(tmp_path, "values"), "M005", "outside the model's folder")


def refer_to(tensor: TensorProto, location: str) -> TensorProto:
    result = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    result.data_location = TensorProto.EXTERNAL
    result.external_data.add(key="location", value=location)
    return result


@pytest.mark.parametrize(
    ("location", "expected_words"), [("w" * 5000, "M005"), ("circle", "M00"), ("a\0b", "M005"), ("", "M005")]
)
def test_external_data_with_an_odd_name_is_refused(require_refusal, tmp_path, location, expected_words):
    (tmp_path / "circle").symlink_to("circle")
    model = parse_graph("(float[4] x) => (float[4] y) { y = Add(x, w) }")
    model.graph.initializer.append(refer_to(numpy_helper.from_array(X, "w"), location))
    require_refusal(model, "'w'", expected_words)


def test_external_data_in_several_attributes_of_a_subgraph_is_embedded(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    model = parse_graph(IF.replace("u = Add(x, thin)", "s = Shape(x) f = ConstantOfShape(s) u = Add(x, f)"))
    fill_node = next(node for node in find_then_branch(model).node if node.op_type == "ConstantOfShape")
    value = store_externally(numpy_helper.from_array(np.array([5], np.float32), "v"), tmp_path)
    fill_node.attribute.append(helper.make_attribute("value", value))
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    bundle = compiled_with(path, RandomPlacement((0, 1)), tmp_path, optimized=False)
    (outputs,) = run_together(bundle, build_feeds(model))
    assert_same(outputs, [-(X + 5)])


def test_sparse_strings_become_dense_strings(tmp_path):
    model = parse_graph("(int64[1] i) => (string[1] y) { y = Gather(thin, i) }")
    values = helper.make_tensor("thin", TensorProto.STRING, [1], ["word"])
    indices = helper.make_tensor("thin_indices", TensorProto.INT64, [1], [2])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    bundle = compiled_with(model, RandomPlacement((0,)), tmp_path, optimized=False)
    outputs = run_together(bundle, [{"i": np.array([2])}, {"i": np.array([0])}])
    assert [one[0].tolist() for one in outputs] == [["word"], [""]]


@pytest.mark.parametrize(
    ("values", "indices", "dims"),
    [
        ([7.0, 9.0], [0, -1], [4]),
        ([7.0, 9.0], [0, 4], [4]),
        ([7.0], [0, 1, 2], [4]),
        ([7.0, 9.0], [[0, 0, 0], [1, 1, 1]], [2, 2]),
        ([7.0, 9.0], [[0, 0], [1, -1]], [2, 2]),
        ([7.0, 9.0], [0.0, 1.0], [4]),
        ([7.0], [0], [-4]),
        ([7.0], [0], [1 << 62, 1 << 62]),
        ([7.0], [0], [1] * 100),
    ],
    ids=str,
)
def test_inconsistent_sparse_weights_are_refused(require_refusal, values, indices, dims):
    model = parse_graph("(float[4] x) => (float[4] y) { y = Add(x, thin) }")
    value = SparseTensorProto(
        values=numpy_helper.from_array(np.array(values, np.float32), "thin"),
        indices=numpy_helper.from_array(np.array(indices), "i"),
        dims=dims,
    )
    model.graph.sparse_initializer.append(value)
    require_refusal(model, "'thin'")


def test_sparse_strings_cannot_fill_the_memory(require_refusal):
    model = parse_graph("(int64[1] i) => (string[1] y) { y = Gather(thin, i) }")
    values = helper.make_tensor("thin", TensorProto.STRING, [1], ["word"])
    indices = helper.make_tensor("i", TensorProto.INT64, [1], [2])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [1 << 40]))
    require_refusal(model, "M008", "'thin'", "dense")


# ---------------------------------------------------------------------------------------------- files that change


@pytest.fixture
def model_with_external_data(tmp_path: Path, branches_bytes: bytes) -> Path:
    model = onnx.ModelProto.FromString(branches_bytes)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights.data", size_threshold=0)
    return tmp_path / "model.onnx"


@contextmanager
def run_before_emitting(change: Callable[[], None]) -> Iterator[None]:
    """Call `change` before the segments are written."""

    def infer_types(*arguments: Any) -> Any:
        change()
        return before(*arguments)

    before = write_segments.infer_boundary_types
    with mock.patch.object(write_segments, "infer_boundary_types", infer_types):
        yield


@pytest.mark.parametrize("change_kind", ["written", "replaced", "removed", "cut"])
@pytest.mark.parametrize("link", [(), ("--link-weights",)])
def test_weights_that_change_during_a_compile_are_an_error(
    run_cli, model_with_external_data, fast_pipeline, change_kind, link
):
    file = model_with_external_data.parent / "weights.data"
    size = file.stat().st_size

    def change() -> None:
        if change_kind == "replaced":
            status = file.stat()
            (file.parent / "new").write_bytes(bytes(size))
            os.utime(file.parent / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
            (file.parent / "new").replace(file)
        elif change_kind == "removed":
            file.unlink()
        else:
            file.write_bytes(bytes(size if change_kind == "written" else 100))

    with run_before_emitting(change):
        result = run_cli("compile", model_with_external_data, "--shape", "batch=4", "--pipeline", fast_pipeline, *link)
    assert result.code == 2, result
    assert "weights.data" in result.err
    if change_kind in ("written", "replaced"):
        assert "M005" in result.err
        assert "changed" in result.err
    assert {path.name for path in model_with_external_data.parent.iterdir()} <= {"model.onnx", "weights.data"}


def test_unchanged_weights_are_no_error(run_cli, model_with_external_data, fast_pipeline):
    with run_before_emitting(lambda: None):
        assert run_cli("compile", model_with_external_data, "--shape", "batch=4", "--pipeline", fast_pipeline).code == 0


def test_external_data_of_a_model_object_without_a_folder_is_refused():
    model = build_with_initializer(None, "both")
    model.graph.sparse_initializer[0].values.CopyFrom(refer_to(model.graph.sparse_initializer[0].values, "w.data"))
    with pytest.raises(OnnxplaceError, match="M005"):
        load(model)


def test_dense_and_sparse_forms_compute_the_same(tmp_path):
    model = build_with_initializer(None, "both")
    thick = parse_graph("(float[4] x) => (float[4] y) { z = Neg(x) y = Add(z, thin) }")
    thick.graph.initializer.append(numpy_helper.from_array(THIN, "thin"))
    bundle = compiled_with(model, RandomPlacement((0, 1)), tmp_path, optimized=False)
    assert_same(run_together(bundle, [{"x": X}]), reference(thick, [{"x": X}]))


# ---------------------------------------------------------------------------------------------- Hugging Face's cache


def save_snapshot(model: ModelProto, folder: Path) -> Path:
    """Save a model with external weights in a snapshot of Hugging Face's cache; return the link to it."""
    (folder / "exported").mkdir(parents=True)
    saved = folder / "exported" / "model.onnx"
    onnx.save(model, saved, save_as_external_data=True, location="weights.data", size_threshold=64)
    return make_snapshot(saved, folder / "hub")[0]


@pytest.mark.parametrize("options", [(), ("--link-weights",)], ids=["copied", "linked"])
def test_a_model_of_links_into_a_hugging_face_cache_compiles_runs_and_merges(
    tmp_path, run_cli: Callable[..., Ran], options
):
    model, bundle = save_snapshot(branches(), tmp_path), tmp_path / "hub" / "bundle"
    measured = ("--pipeline", "optimize,profile{repeat=1,seconds=0},m-etf,split,emit", *options)
    for arguments in (
        ("compile", model, "--devices", "cpu:0,cpu:1", "--shape", "batch=2", *measured, "-o", bundle),
        ("run", bundle),
        ("verify", bundle),
        ("verify", bundle, "--against", model),
        ("merge", bundle, "-o", tmp_path / "merged.onnx"),
    ):
        result = run_cli(*arguments)
        assert result.code == 0, result.err
    weights = {tensor.name: tensor for tensor in onnx.load(tmp_path / "merged.onnx").graph.initializer}
    for tensor in branches().graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(weights[tensor.name]), numpy_helper.to_array(tensor))


def test_a_training_step_of_links_into_a_hugging_face_cache_is_trained(tmp_path, run_cli: Callable[..., Ran]):
    plain = compile_training(make_mlp("sgd"), tmp_path / "plain")
    linked = compile_training(save_snapshot(make_mlp("sgd"), tmp_path), tmp_path / "linked")
    np.savez(tmp_path / "data.npz", x=np.ones((8, 8), np.float32), target=np.ones((8, 4), np.float32))
    curves = []
    for number, item in enumerate((plain, linked)):
        log = tmp_path / f"{number}.csv"
        result = run_cli("train", item.path, "--data", tmp_path / "data.npz", "--steps", 3, "--log", log)
        assert result.code == 0, result.err
        curves.append([row["loss"] for row in csv.DictReader(log.read_text().splitlines())])
    assert curves[0] == curves[1]
