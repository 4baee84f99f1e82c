"""bfloat16, float8 and types of four and two bits: fed, passed between devices, returned and compared."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, parser

import onnxplace
from onnxplace.driver.compile import compile_model
from onnxplace.errors import FeedError
from onnxplace.feeds.feeds import Declared, check_feeds, numpy_type
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.measure.compare import compare_output
from onnxplace.model.loading import load
from onnxplace.model.lowering import infer_static_shapes, value_bytes
from onnxplace.passes.profiling.chunks import measure_chunks
from onnxplace.passes.profiling.node_measurement import MeasurementOptions
from onnxplace.passes.profiling.profile_model import ModelStructure
from onnxplace.target.device_kinds import DeviceAddress
from tests.conftest import Ran
from tests.support.random_placements import RandomPlacement, compiled_with, run_together

FLOATS = ("bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz")
INTEGERS = ("int4", "uint4", "int2", "uint2")


def carried(element: str) -> ModelProto:
    """Return a model of float `y`, the values of `x`, and of `x` itself as computed on the other device."""
    return parser.parse_model(
        f"""<ir_version: 13, opset_import: ["": 25]>
        graph ({element}[3, 3] x) => (float[3, 3] y, {element}[3, 3] z) {{
            a = Cast<to = 1>(x)
            b = Neg(a)
            c = Neg(b)
            z = CastLike(c, x)
            y = Cast<to = 1>(z)
        }}"""
    )


def sample(element: str) -> np.ndarray:
    """Return nine values, an odd number, that each of the types can hold."""
    dtype = numpy_type(f"tensor({element})")
    assert dtype is not None
    low, high = {"int4": (-8, 8), "uint4": (0, 16), "int2": (-2, 2), "uint2": (0, 4)}.get(element, (-4, 5))
    return np.resize(np.arange(low, high), (3, 3)).astype(dtype)


@pytest.mark.parametrize("element", FLOATS + INTEGERS)
def test_values_of_few_bits_may_be_fed_and_returned(tmp_path: Path, element: str):
    x = sample(element)
    bundle = compiled_with(carried(element), RandomPlacement((0, 1)), tmp_path)
    ((y, z),) = run_together(bundle, [{"x": x}])
    np.testing.assert_array_equal(y, x.astype(np.float32))
    assert z.dtype == x.dtype
    np.testing.assert_array_equal(z, x)


@pytest.mark.parametrize("element", FLOATS + INTEGERS)
@pytest.mark.sampled(3)
def test_models_of_few_bits_are_measured_run_verified_and_timed(tmp_path: Path, run_cli: Callable[..., Ran], element):
    path, bundle = tmp_path / "m.onnx", tmp_path / "bundle"
    path.write_bytes(carried(element).SerializeToString())
    steps = "optimize,profile{repeat=3,seconds=0},m-etf,split,emit"
    compiled = compile_model(path, bundle, devices="cpu:0,cpu:1", pipeline=steps)
    assert "C001" not in {note.code for note in compiled.diagnostics}  # costs were measured, not estimated
    for command in (("run",), ("verify",), ("verify", "--against", path), ("bench", "--repeat", "1", "--no-memory")):
        result = run_cli(command[0], bundle, *command[1:])
        assert result.code == 0, result.err


@pytest.mark.slow
def test_models_of_few_bits_are_tried_with_several_in_flight(tmp_path: Path):
    options = {"objective": "throughput", "devices": "cpu:0,cpu:1", "budget_seconds": 0.1}
    compiled = compile_model(carried("bfloat16"), tmp_path / "bundle", **options)
    assert not {"C001", "C021"} & {note.code for note in compiled.diagnostics}


def test_models_of_few_bits_are_measured_in_pieces(tmp_path: Path):
    model = load(carried("bfloat16"))
    chunks = [range(node, node + 1) for node in range(len(model.nodes))]
    shapes = infer_static_shapes(model)
    structure = ModelStructure.of(model, shapes, value_bytes(model, shapes))
    options = MeasurementOptions(DeviceAddress("cpu", 0), (0,), 1, 0.0)
    measurement = measure_chunks(model, structure.graph, structure.kinds, chunks, {"x": sample("bfloat16")}, options)
    assert measurement.measured.all()


@pytest.mark.parametrize("element", FLOATS + INTEGERS)
def test_values_of_few_bits_may_be_drawn(element: str):
    drawn = random_feeds([Declared("x", f"tensor({element})", (64,))], {})["x"]
    assert drawn.dtype == numpy_type(f"tensor({element})")
    assert len({float(item) for item in drawn}) > 1


def test_values_of_few_bits_may_come_from_files(tmp_path: Path, run_cli: Callable[..., Ran]):
    (tmp_path / "m.onnx").write_bytes(carried("bfloat16").SerializeToString())
    np.savez(tmp_path / "x.npz", x=sample("bfloat16"))
    steps = "optimize,profile{estimate=true},m-etf,split,emit"
    bundle = tmp_path / "bundle"
    onnxplace.compile(tmp_path / "m.onnx", bundle, devices="cpu:0,cpu:1", pipeline=steps)
    result = run_cli("run", bundle, "--inputs", tmp_path / "x.npz", "--outputs", tmp_path / "y.npz")
    assert result.code == 0, result.err
    with np.load(tmp_path / "y.npz") as outputs:
        np.testing.assert_array_equal(outputs["y"], sample("bfloat16").astype(np.float32))


@pytest.mark.parametrize(
    ("element", "array"), [("int4", np.int8), ("bfloat16", np.float32), ("bfloat16", np.float16), ("int2", np.uint8)]
)
def test_another_type_is_refused_with_the_right_one(element: str, array: type):
    with pytest.raises(FeedError, match=element):
        check_feeds({"x": np.zeros((3, 3), array)}, [Declared("x", f"tensor({element})", (3, 3))])


def test_floats_of_few_bits_are_compared_with_their_tolerance():
    exact = np.array([1.0, np.nan, np.inf, 64.0])
    for dtype, near, far in (
        (ml_dtypes.bfloat16, 1.5, 16),
        (ml_dtypes.float8_e5m2, 10, 32),
        (ml_dtypes.bfloat16, 0, 8),
    ):
        reference = exact.astype(dtype)
        assert compare_output("y", np.add(exact, [0, 0, 0, near]).astype(dtype), reference).equal
        assert not compare_output("y", np.add(exact, [0, 0, 0, far]).astype(dtype), reference).equal
        assert not compare_output("y", (exact * [1, 0, 1, 1]).astype(np.float32), reference).equal
        assert not compare_output("y", np.nan_to_num(exact, posinf=np.inf).astype(dtype), reference).equal


def test_integers_of_few_bits_are_compared_exactly():
    reference = np.array([1, -2, 3], ml_dtypes.int4)
    assert compare_output("y", reference.copy(), reference).equal
    assert not compare_output("y", np.array([1, -2, 2], ml_dtypes.int4), reference).equal
