"""What a model file may hold and where its bytes may be: read right, or refused in one line with exit code 2."""

import io
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, helper, numpy_helper, parser

from onnxplace import FeedError, OnnxplaceError
from onnxplace.feeds import Declared, check_feeds
from onnxplace.model import load, op_graph
from onnxplace.passes.segments import write_segments
from tests.end_to_end.test_split_property import RandomPlacement, assert_same, compiled_with, run_together
from tests.support.random_models import reference

pytestmark = pytest.mark.usefixtures("no_gpus")

X = np.arange(1, 5, dtype=np.float32)


def parsed(text: str) -> ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')


@pytest.fixture
def refused(run_cli, tmp_path: Path, fast_pipeline: str) -> Callable[..., str]:
    """Compile a model that must be refused: exit code 2, one line and perhaps a hint, nothing left behind."""

    def check(model: ModelProto | Path, *said: str, pipeline: str = fast_pipeline) -> str:
        path = model if isinstance(model, Path) else tmp_path / "m.onnx"
        if isinstance(model, ModelProto):
            path.write_bytes(model.SerializeToString())
        before = sorted(tmp_path.rglob("*"))
        ran = run_cli("compile", path, "--pipeline", pipeline)
        assert ran.code == 2, ran
        assert ran.err.startswith("error["), ran.err
        assert [line[:8] for line in ran.err.splitlines()[1:]] in ([], ["  hint: "])
        for words in said:
            assert words in ran.err
        assert len(ran.err) < 2000
        assert sorted(tmp_path.rglob("*")) == before
        return ran.err

    return check


# ---------------------------------------------------------------------------------------------- external data


def externally(tensor: TensorProto, folder: Path, file: str = "w.data") -> TensorProto:
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


def sparse(folder: Path | None, kind: str = "both") -> SparseTensorProto:
    """Return the vector [0, 7, 0, 9], with values or indices or both in a file of `folder`."""
    values = numpy_helper.from_array(np.array([7, 9], np.float32), "thin")
    indices = numpy_helper.from_array(np.array([1, 3], np.int64), "thin_indices")
    if folder is not None and kind in ("both", "values"):
        values = externally(values, folder)
    if folder is not None and kind in ("both", "indices"):
        indices = externally(indices, folder)
    return helper.make_sparse_tensor(values, indices, [4])


THIN = np.array([0, 7, 0, 9], np.float32)
IF = """(float[4] x, bool c) => (float[4] y) {
    b = If(c) <
        then_branch = t () => (float[4] u) { u = Add(x, thin) }, else_branch = e () => (float[4] v) { v = Neg(x) }
    >
    y = Neg(b)
}"""


def branch(model: ModelProto) -> onnx.GraphProto:
    return next(a.g for n in model.graph.node if n.op_type == "If" for a in n.attribute if a.name == "then_branch")


def as_initializer(folder: Path | None, kind: str) -> ModelProto:
    model = parsed("(float[4] x) => (float[4] y) { z = Neg(x) y = Add(z, thin) }")
    model.graph.sparse_initializer.append(sparse(folder, kind))
    return model


def as_constant(folder: Path | None, kind: str) -> ModelProto:
    model = parsed("(float[4] x) => (float[4] y) { z = Neg(x) y = Add(z, thin) }")
    model.graph.node.insert(0, constant(sparse(folder, kind)))
    return model


def as_constant_of_a_body(folder: Path | None, kind: str) -> ModelProto:
    model = parsed(IF)
    branch(model).node.insert(0, constant(sparse(folder, kind)))
    return model


def constant(value: SparseTensorProto) -> NodeProto:
    node = helper.make_node("Constant", [], ["thin"])
    node.attribute.append(AttributeProto(name="sparse_value", type=AttributeProto.SPARSE_TENSOR, sparse_tensor=value))
    return node


PLACES = pytest.mark.parametrize("place", [as_initializer, as_constant, as_constant_of_a_body])


def feeds(model: ModelProto) -> list[dict[str, Any]]:
    return [{"x": X, "c": np.array(True)} if len(model.graph.input) > 1 else {"x": X}]


@PLACES
@pytest.mark.parametrize("kind", ["values", "indices", "both"])
def test_external_sparse_weights_are_read_from_the_models_folder(tmp_path, monkeypatch, place, kind):
    (tmp_path / "model").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "w.data").write_bytes(bytes(range(64)))  # of the same name, where the user stands
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = place(tmp_path / "model", kind)
    path = tmp_path / "model" / "m.onnx"
    path.write_bytes(model.SerializeToString())
    bundle = compiled_with(path, RandomPlacement((0, 1)), tmp_path, optimized=False)
    (got,) = run_together(bundle, feeds(model))
    assert_same(got, [-(X + THIN) if "body" in place.__name__ else THIN - X])


@PLACES
@pytest.mark.parametrize("kind", ["values", "indices"])
def test_external_sparse_weights_that_are_missing_or_short_are_named(refused, tmp_path, monkeypatch, place, kind):
    monkeypatch.chdir("/")
    model = place(tmp_path, kind)
    (tmp_path / "w.data").write_bytes(bytes(3))
    refused(model, "M007", "thin", "too short", "w.data")
    (tmp_path / "w.data").unlink()
    refused(model, "M005", "thin", "missing", "w.data")


@PLACES
def test_external_sparse_weights_never_leave_the_folder(refused, tmp_path, tmp_path_factory, place):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "w.data").write_bytes(bytes(64))
    (tmp_path / "w.data").symlink_to(outside / "w.data")
    with mock.patch(f"{__name__}.externally", lambda tensor, folder: pointing(tensor, "w.data")):
        refused(place(tmp_path, "values"), "M006", "outside the model's folder")


def pointing(tensor: TensorProto, location: str) -> TensorProto:
    result = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    result.data_location = TensorProto.EXTERNAL
    result.external_data.add(key="location", value=location)
    return result


@pytest.mark.parametrize(
    ("location", "said"), [("w" * 5000, "M005"), ("circle", "M00"), ("a\0b", "M006"), ("", "M006")]
)
def test_external_data_of_an_odd_name_is_refused(refused, tmp_path, location, said):
    (tmp_path / "circle").symlink_to("circle")
    model = parsed("(float[4] x) => (float[4] y) { y = Add(x, w) }")
    model.graph.initializer.append(pointing(numpy_helper.from_array(X, "w"), location))
    refused(model, "'w'", said)


def test_external_data_in_several_attributes_of_a_body_is_taken_in(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    model = parsed(IF.replace("u = Add(x, thin)", "s = Shape(x) f = ConstantOfShape(s) u = Add(x, f)"))
    filled = next(node for node in branch(model).node if node.op_type == "ConstantOfShape")
    value = externally(numpy_helper.from_array(np.array([5], np.float32), "v"), tmp_path)
    filled.attribute.append(helper.make_attribute("value", value))
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    bundle = compiled_with(path, RandomPlacement((0, 1)), tmp_path, optimized=False)
    (got,) = run_together(bundle, feeds(model))
    assert_same(got, [-(X + 5)])


def test_sparse_strings_become_dense_with_empty_texts(tmp_path):
    model = parsed("(int64[1] i) => (string[1] y) { y = Gather(thin, i) }")
    values = helper.make_tensor("thin", TensorProto.STRING, [1], ["word"])
    indices = helper.make_tensor("thin_indices", TensorProto.INT64, [1], [2])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    bundle = compiled_with(model, RandomPlacement((0,)), tmp_path, optimized=False)
    got = run_together(bundle, [{"i": np.array([2])}, {"i": np.array([0])}])
    assert [one[0].tolist() for one in got] == [["word"], [""]]


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
def test_sparse_weights_that_contradict_themselves_are_refused(refused, values, indices, dims):
    model = parsed("(float[4] x) => (float[4] y) { y = Add(x, thin) }")
    value = SparseTensorProto(
        values=numpy_helper.from_array(np.array(values, np.float32), "thin"),
        indices=numpy_helper.from_array(np.array(indices), "i"),
        dims=dims,
    )
    model.graph.sparse_initializer.append(value)
    refused(model, "'thin'")


def test_sparse_strings_cannot_fill_the_memory(refused):
    model = parsed("(int64[1] i) => (string[1] y) { y = Gather(thin, i) }")
    values = helper.make_tensor("thin", TensorProto.STRING, [1], ["word"])
    indices = helper.make_tensor("i", TensorProto.INT64, [1], [2])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [1 << 40]))
    refused(model, "M008", "'thin'", "dense")


# ---------------------------------------------------------------------------------------------- weights


def weight(dims: list[int], kind: int = TensorProto.FLOAT, **fields: Any) -> TensorProto:
    return TensorProto(name="odd_weight", data_type=kind, dims=dims, **fields)


ODD_WEIGHTS = pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(weight([4], float_data=[1, 2]), id="few-floats"),
        pytest.param(weight([4], float_data=[1] * 5), id="many-floats"),
        pytest.param(weight([4]), id="no-data"),
        pytest.param(weight([4], float_data=[1] * 4, raw_data=bytes(16)), id="both"),
        pytest.param(weight([4], int64_data=[1] * 4), id="other-field"),
        pytest.param(weight([4], float_data=[1] * 4, int32_data=[1]), id="two-fields"),
        pytest.param(weight([4], TensorProto.INT64, int64_data=[1]), id="few-int64"),
        pytest.param(weight([4], TensorProto.INT32, int32_data=[1]), id="few-int32"),
        pytest.param(weight([4], TensorProto.BOOL, int32_data=[1]), id="few-bools"),
        pytest.param(weight([4], TensorProto.FLOAT16, int32_data=[1]), id="few-halves"),
        pytest.param(weight([4], TensorProto.DOUBLE, double_data=[1]), id="few-doubles"),
        pytest.param(weight([4], TensorProto.UINT64, uint64_data=[1]), id="few-uint64"),
        pytest.param(weight([4], TensorProto.STRING, string_data=[b"a"]), id="few-strings"),
        pytest.param(weight([4], TensorProto.STRING, raw_data=b"abcd"), id="raw-strings"),
        pytest.param(weight([4], TensorProto.COMPLEX64, float_data=[1] * 4), id="few-complex"),
        pytest.param(weight([5], TensorProto.INT4, int32_data=[1] * 2), id="few-int4"),
        pytest.param(weight([1 << 62, 1 << 62], float_data=[1]), id="overflow"),
        pytest.param(weight([1 << 62, 1 << 62, 0]), id="overflow-and-empty"),
        pytest.param(weight([1] * 100_000, float_data=[1]), id="rank"),
    ],
)


@ODD_WEIGHTS
def test_a_weight_whose_data_does_not_fit_is_named(refused, tensor):
    model = parsed("(float[4] x) => (float[4] y) { z = Relu(x) y = Add(z, odd_weight) }")
    model.graph.initializer.append(tensor)
    refused(model, "M019", "'odd_weight'", "export it again")


@ODD_WEIGHTS
@pytest.mark.parametrize("inside", [False, True])
def test_a_constant_whose_data_does_not_fit_is_named(refused, tensor, inside):
    model = parsed(IF.replace("thin", "k")) if inside else parsed("(float[4] x) => (float[4] y) { y = Add(x, k) }")
    node = helper.make_node("Constant", [], ["k"])
    node.attribute.append(helper.make_attribute("value", tensor))
    (branch(model) if inside else model.graph).node.insert(0, node)
    refused(model, "M019", "'odd_weight'")


@pytest.mark.parametrize("kind", [TensorProto.COMPLEX64, TensorProto.INT4, TensorProto.FLOAT16, TensorProto.BOOL])
def test_weights_in_typed_fields_are_taken(kind):
    model = parsed("(float[3] x) => (float[3] y) { y = Relu(x) }")
    model.graph.initializer.append(helper.make_tensor("w", kind, [3], [1, 0, 1]))
    assert "w" in load(model).initializers


# ---------------------------------------------------------------------------------------------- declared shapes


def with_input(*dims: int | str) -> ModelProto:
    model = parsed("(float[4] x) => (float[4] y) { y = Relu(x) }")
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, dims))
    return model


@pytest.mark.parametrize("dims", [(-5,), (4, -2), (1 << 62,), (1,) * 65, (1,) * 100_000], ids=lambda d: str(d[:3]))
@pytest.mark.parametrize("pipeline", ["", "optimize,profile{repeat=1},m-etf,split,emit"])
def test_an_input_that_cannot_be_is_refused(refused, fast_pipeline, dims, pipeline):
    refused(with_input(*dims), "M024", "'x'", "export it again", pipeline=pipeline or fast_pipeline)


def test_a_size_of_minus_one_is_an_unknown_one(refused, run_cli, tmp_path, fast_pipeline):
    model = with_input(-1, 4)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    refused(model, "M020", "--shape x.0=1")
    assert run_cli("compile", tmp_path / "m.onnx", "--shape", "x.0=2", "--pipeline", fast_pipeline).code == 0
    assert run_cli("verify", tmp_path / "m.bundle", "--shape", "x.0=3").code == 0


@pytest.mark.parametrize("pipeline", ["", "optimize,profile{repeat=1},m-etf,split,emit"])
def test_sizes_beyond_all_memory_are_refused_instead_of_drawn_or_counted(refused, fast_pipeline, pipeline):
    size = (1 << 31) - 1
    refused(with_input(size, size), "M024", "--shape", pipeline=pipeline or fast_pipeline)


def test_inputs_beyond_this_machines_memory_are_refused_instead_of_drawn(refused):
    pipeline = "optimize,profile{repeat=1},m-etf,split,emit"
    refused(with_input(1 << 24, 1 << 24), "F009", "'x'", "--shape", pipeline=pipeline)


def test_a_long_list_of_dimensions_is_cut_short(refused):
    model = parsed("(float[4] x) => (float[4] y) { y = Relu(x) }")
    names = [f"dimension_{number}" for number in range(10_000)]
    model.graph.input.append(helper.make_tensor_value_info("wide", TensorProto.FLOAT, names[:60]))
    for start in range(60, len(names), 60):
        model.graph.input.append(
            helper.make_tensor_value_info(f"x{start}", TensorProto.FLOAT, names[start : start + 60])
        )
    refused(model, "M020", "dimension_0, ", "and 9990 more", "--shape dimension_0=1,")


# ---------------------------------------------------------------------------------------------- files that change


@pytest.fixture
def external_model(tmp_path: Path, branches_bytes: bytes) -> Path:
    model = onnx.ModelProto.FromString(branches_bytes)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights.data", size_threshold=0)
    return tmp_path / "model.onnx"


@contextmanager
def while_emitting(change: Callable[[], None]) -> Iterator[None]:
    """Do something to the files before the segments are written."""

    def segment_ids(*arguments: Any) -> Any:
        change()
        return before(*arguments)

    before = write_segments.name_segments
    with mock.patch.object(write_segments, "name_segments", segment_ids):
        yield


@pytest.mark.parametrize("how", ["written", "replaced", "removed", "cut"])
@pytest.mark.parametrize("link", [(), ("--link-weights",)])
def test_weights_that_change_during_a_compile_are_an_error(run_cli, external_model, fast_pipeline, how, link):
    file = external_model.parent / "weights.data"
    size = file.stat().st_size

    def change() -> None:
        if how == "replaced":
            kept = file.stat()
            (file.parent / "new").write_bytes(bytes(size))
            os.utime(file.parent / "new", ns=(kept.st_atime_ns, kept.st_mtime_ns))
            (file.parent / "new").replace(file)
        elif how == "removed":
            file.unlink()
        else:
            file.write_bytes(bytes(size if how == "written" else 100))

    with while_emitting(change):
        ran = run_cli("compile", external_model, "--shape", "batch=4", "--pipeline", fast_pipeline, *link)
    assert ran.code == 2, ran
    assert "weights.data" in ran.err
    if how in ("written", "replaced"):
        assert "M025" in ran.err
        assert "changed" in ran.err
    assert {path.name for path in external_model.parent.iterdir()} <= {"model.onnx", "weights.data"}


def test_weights_that_stay_as_they_are_are_no_error(run_cli, external_model, fast_pipeline):
    with while_emitting(lambda: None):
        assert run_cli("compile", external_model, "--shape", "batch=4", "--pipeline", fast_pipeline).code == 0


def test_a_model_object_has_no_folder_and_external_sparse_data_is_refused():
    model = as_initializer(None, "both")
    model.graph.sparse_initializer[0].values.CopyFrom(pointing(model.graph.sparse_initializer[0].values, "w.data"))
    with pytest.raises(OnnxplaceError, match="M005"):
        load(model)


def test_dense_and_sparse_forms_compute_the_same(tmp_path):
    model = as_initializer(None, "both")
    thick = parsed("(float[4] x) => (float[4] y) { z = Neg(x) y = Add(z, thin) }")
    thick.graph.initializer.append(numpy_helper.from_array(THIN, "thin"))
    bundle = compiled_with(model, RandomPlacement((0, 1)), tmp_path, optimized=False)
    assert_same(run_together(bundle, [{"x": X}]), reference(thick, [{"x": X}]))


# ---------------------------------------------------------------------------------------------- other formats


def zipped(*names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, b"x" * 100)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        # By content, whatever the ending.
        ("m.onnx", zipped("archive/data.pkl", "archive/data/0"), "torch.onnx.export"),
        ("m.pt", zipped("archive/data.pkl", "archive/code/x.py"), "torch.onnx.export"),
        ("m.onnx", zipped("config.json", "model.weights.h5"), "Keras"),
        ("m.zip", zipped("model.onnx"), "unpack it"),
        ("m.onnx", b"\x10\0\0\0ORTM" + bytes(40), "give the .onnx file that it was made from"),
        ("m.onnx", b"\x1c\0\0\0TFL3" + bytes(40), "tf2onnx.convert --tflite"),
        ("m.onnx", b"\x89HDF\r\n\x1a\n" + bytes(40), "Keras"),
        ("m.onnx", b"\x08\0\0\0\0\0\0\0" + b'{"a": 1}', "weights and no graph"),
        ("m.onnx", b"GGUF" + bytes(40), "weights and no graph"),
        ("m.onnx", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n", "git lfs pull"),
        ("m.onnx", b"\n<!DOCTYPE html><html></html>", "web page"),
        ("m.onnx", b"\x1f\x8b\x08" + bytes(40), "gunzip"),
        # By the ending.
        ("m.pth", b"\x80\x02}q\x00.", "torch.onnx.export"),
        ("m.PT", b"\x80\x02}q\x00.", "torch.onnx.export"),
        ("m.onnxtxt", b'<ir_version: 8, opset_import: ["": 17]> g () => () {}', 'format="onnxtxt"'),
        ("m.textproto", b"ir_version: 8", 'format="textproto"'),
        ("m.pb", b"\x0a\x05hello", "tf2onnx.convert --graphdef"),
        ("m.mlmodel", b"\x08\x01", "Core ML"),
        ("m.pkl", b"\x80\x04.", "skl2onnx"),
        ("m.xml", b"<?xml version='1.0'?><net/>", "OpenVINO"),
        ("m.engine", b"ftrt", "TensorRT"),
        ("m.safetensors", b"", "weights and no graph"),
        ("m.ort", b"", "that it was made from"),
        ("m.tflite", b"", "tf2onnx"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_in_another_format_gets_a_way_to_make_onnx_of_it(refused, tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    refused(tmp_path / name, "M002", "not an ONNX file", said)


def test_the_folder_of_a_tensorflow_model_gets_a_way_to_make_onnx_of_it(refused, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "saved_model.pb").write_bytes(b"x")
    refused(tmp_path / "saved", "M001", "--saved-model")


@pytest.mark.parametrize("name", ["m.pb", "m.pt", "model", "m.bin"])
def test_an_onnx_model_is_read_whatever_its_ending(tmp_path, branches_bytes, name):
    (tmp_path / name).write_bytes(branches_bytes)
    assert len(load(tmp_path / name).nodes) == 5


# ---------------------------------------------------------------------------------------------- nodes


NODES = {
    "(float[4] x) => (float[4] y) { [odd] y = Reshape() }": "has 0 inputs, expected 2",
    "(float[4] x) => (float[4] y) { [odd] y = Add(x, x, x) }": "has 3 inputs, expected 2",
    "(float[4] x) => (float[4] y) { [odd] y, z = Relu(x) }": "has 2 outputs, expected 1",
    "(float[4] x) => (float[4] y) { [odd] y = Sum() }": "has 0 inputs, expected 1 or more",
    "(float[4] x) => (float[4] y) { [odd] y = Cast(x) }": "lacks the attribute 'to'",
    '(float[4] x) => (float[4] y) { [odd] y = Softmax <axis = "one"> (x) }': "has 'axis' of type STRING, expected INT",
    "(float[4] x, bool c) => (float[4] y) { [odd] y = If(c) }": "lacks the attribute 'else_branch'",
}


@pytest.mark.parametrize(("text", "said"), NODES.items(), ids=NODES.values())
def test_a_node_that_does_not_fit_its_operator_is_named(refused, text, said):
    refused(parsed(text), "M026", "'odd'", "of opset 17", said)


def test_a_node_of_a_body_that_does_not_fit_its_operator_is_named(refused):
    refused(parsed(IF.replace("u = Add(x, thin)", "[odd] u = Add(x)")), "M026", "'odd'", "has 1 inputs, expected 2")


def test_inputs_that_are_left_out_may_be_listed_at_the_end(tmp_path):
    model = parsed("(float[4] x) => (float[4] y) { y = Clip(x) }")
    model.graph.node[0].input.extend(["", ""])
    assert_same(run_together(compiled_with(model, RandomPlacement(), tmp_path), [{"x": X}]), [[X]])


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("value_ints", AttributeProto.INT, {"i": 3}),
        ("value_floats", AttributeProto.TENSOR, {"t": numpy_helper.from_array(X)}),
        ("value", AttributeProto.INT, {"i": 3}),
        ("sparse_value", AttributeProto.TENSOR, {"t": numpy_helper.from_array(X)}),
        ("value_other", AttributeProto.INT, {"i": 3}),
    ],
)
def test_a_constant_of_another_type_than_its_name_says_is_refused(refused, name, kind, value):
    model = parsed("(float[4] x) => (float[4] y) { y = Add(x, k) }")
    node = helper.make_node("Constant", [], ["k"], "odd")
    node.attribute.append(AttributeProto(name=name, type=kind, **value))
    model.graph.node.insert(0, node)
    refused(model, "M008", "'odd'", name)


@pytest.mark.parametrize("output", ["", None])
def test_a_constant_that_nobody_can_read_is_dropped(run_cli, tmp_path, fast_pipeline, output):
    model = parsed("(float[4] x) => (float[4] y) { y = Relu(x) }")
    model.graph.node.insert(0, helper.make_node("Constant", [], [] if output is None else [output], value_int=3))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    ran = run_cli("compile", tmp_path / "m.onnx", "--pipeline", fast_pipeline)
    assert ran.code == (0 if output == "" else 2), ran.err


@pytest.mark.parametrize("old", [b"left_one", b"Relu", b"number_n", b"w_1"])
def test_names_that_are_no_text_are_refused(refused, tmp_path, old):
    model = parsed("(float[number_n] x) => (float[number_n] y) { [left_one] z = Relu(x) y = Add(z, w_1) }")
    model.graph.initializer.append(numpy_helper.from_array(X[:1], "w_1"))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString().replace(old, old[:-1] + b"\xff"))
    refused(tmp_path / "m.onnx", "M003", "not text")


@pytest.mark.parametrize("kind", [64, -1])
def test_element_types_that_onnx_does_not_have_are_refused(refused, kind):
    model = with_input(4)
    model.graph.input[0].type.tensor_type.elem_type = kind
    refused(model, "'x'")
    model = parsed("(float[4] x) => (seq(float[4]) y) { y = SequenceConstruct(x) }")
    model.graph.output[0].type.sequence_type.elem_type.tensor_type.elem_type = kind
    refused(model, "M024", "'y'", f"element type {kind}")


@pytest.mark.parametrize("kind", [64, -1, 1 << 40])
def test_a_cast_to_a_type_that_onnx_does_not_have_is_no_defect(run_cli, tmp_path, kind):
    model = parsed("(float[4] x) => (float[4] y) { z = Cast <to = 1> (x) y = Relu(z) }")
    model.graph.node[0].attribute[0].i = kind
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    pipeline = "optimize,profile{repeat=1},m-etf,split,emit"
    ran = run_cli("compile", tmp_path / "m.onnx", "--pipeline", pipeline)
    assert (ran.code, ran.err[:8]) == (2, "error[M0"), ran.err


ODD_RANKS = [
    "(float[4] x) => (float[4, 4] y) { y = Gemm(x, x) }",
    "(float x) => (float[4, 4] y) { y = Gemm(x, x) }",
    "(float x) => (float y) { y = MatMul(x, x) }",
    "(float[4] x) => (float[4] y) { y = ConvTranspose(x, x) }",
    "(float[4] x) => (float[4] y) { y, h = GRU <hidden_size = 4> (x, x, x) }",
    '(float[4] x) => (float[4] y) { y = Einsum <equation = "ij,jk->ik"> (x) }',
    "(float[4] x) => (float[4] y) { p = Constant <value = int64[2] {-3, -3}> () y = Pad(x, p) }",
]


@pytest.mark.parametrize("text", ODD_RANKS)
def test_estimating_what_cannot_run_is_no_defect(run_cli, tmp_path, fast_pipeline, text):
    (tmp_path / "m.onnx").write_bytes(parsed(text).SerializeToString())
    assert run_cli("compile", tmp_path / "m.onnx", "--pipeline", fast_pipeline).code in (0, 2)


def test_an_operator_of_ones_own_that_is_named_like_a_view_is_none():
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "own": 1]> g (float[4] x) => (float[4] y) { y = own.Identity(x) }'
    )
    assert op_graph(load(model), {}).alias.tolist() == [-1, -1]


# ---------------------------------------------------------------------------------------------- much of something


def test_a_long_cycle_is_cut_short_and_takes_no_time(refused):
    count = 20_000
    nodes = [helper.make_node("Neg", [f"v{i}"], [f"v{(i + 1) % count}"], f"n{i}") for i in range(count)]
    model = parsed("(float[4] x) => (float[4] v0) { y = Relu(x) }")
    model.graph.node.extend(nodes)
    refused(model, "M015", "a cycle: n", "... (19990 more)")


def test_functions_that_call_each_other_too_deep_are_refused(refused):
    count = 3000
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "own": 1]> g (float[4] x) => (float[4] y) { y = own.f0(x) }'
    )
    for index in range(count):
        called = helper.make_node(f"f{index + 1}", ["a"], ["b"], domain="own")
        if index == count - 1:
            called = helper.make_node("Neg", ["a"], ["b"])
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
        model.functions.append(helper.make_function("own", f"f{index}", ["a"], ["b"], [called], opsets))
    refused(model, "M009", "100 deep")


def test_a_long_list_of_missing_inputs_is_cut_short():
    inputs = [Declared(f"input_{number}", "tensor(float)", (2,)) for number in range(1000)]
    with pytest.raises(FeedError) as caught:
        check_feeds({}, inputs)
    assert "'input_9', and 990 more" in str(caught.value)
    assert len(str(caught.value)) < 1000
