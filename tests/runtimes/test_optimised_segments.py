"""Bundles keep segments as ONNX Runtime optimises them for this processor; answers are the same bits without."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import ModelProto, helper, numpy_helper, parser

import onnxplace
from onnxplace.bundle import bundle as bundle_module
from onnxplace.machine.hardware import describe_optimiser
from onnxplace.runtimes.execution import segments as segments_module

pytestmark = pytest.mark.skipif(not describe_optimiser(), reason="nothing is kept where the processor is unknown")
ESTIMATED = "profile{estimate=true},single,split,emit"


def build(body: str, constants: str, ending: str = "") -> ModelProto:
    """Return a model of an image x, with outputs y, in three channels."""
    text = f"g (float[N, 3, 9, 8] x{ending}) => (float[A, B, C, D] y) <{constants}> {{ {body} }}"
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')


def convert(model: ModelProto, kind: type) -> ModelProto:
    """Return a model of float32 with all its values in another type."""
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(kind), tensor.name))
    for item in (*model.graph.input, *model.graph.output):
        item.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    return model


def numbers(count: int) -> str:
    """Return so many different numbers as ONNX's text form has them."""
    return ", ".join(f"{(7 * index % 23 - 11) / 8}" for index in range(count))


WEIGHTS = f"float[16, 3, 3, 3] w = {{{numbers(432)}}}, float[16] b = {{{numbers(16)}}}"


def convolution() -> ModelProto:
    body = "c = Conv <pads = [1, 1, 1, 1]> (x, w, b) d = Relu(c) y = MaxPool <kernel_shape = [2, 2]> (d)"
    return build(body, WEIGHTS)


def compile_model(model: ModelProto, folder: Path, **options: Any) -> onnxplace.Bundle:
    options = {"pipeline": ESTIMATED, "devices": "cpu:0", "shape": {"N": 2}} | options
    return onnxplace.compile(model, folder / "bundle", **options)


def run(bundle: onnxplace.Bundle, kind: type = np.float32) -> list[bytes]:
    """Return the outputs for two sizes, as bytes."""
    random = np.random.default_rng(3)
    with onnxplace.InferenceSession(bundle) as session:
        return [
            session.run(None, {"x": random.standard_normal((n, 3, 9, 8)).astype(kind)})[0].tobytes() for n in (2, 5)
        ]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files of the sessions that runtimes open."""
    names: list[str] = []
    open_session = segments_module.open_session

    def record(model: Path, *arguments: Any) -> Any:
        names.append(model.name)
        return open_session(model, *arguments)

    monkeypatch.setattr(segments_module, "open_session", record)
    return names


def test_a_segment_with_convolutions_opens_as_it_was_optimised(tmp_path: Path, opened: list[str]) -> None:
    bundle = compile_model(convolution(), tmp_path)
    (segment,) = bundle.manifest.segments
    assert segment.optimised == "segments/cpu0-000.optimised.onnx"
    assert bundle.manifest.optimised_for == describe_optimiser()
    assert bundle.compiled_files == {segment.optimised}
    outputs = run(bundle)
    bundle.file(segment.optimised).unlink()
    assert run(onnxplace.load(bundle.path)) == outputs
    assert opened == ["cpu0-000.optimised.onnx", "cpu0-000.onnx"]


@pytest.mark.parametrize("where", ["elsewhere", "damaged", "without optimisations"])
def test_elsewhere_a_segment_opens_as_it_is(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    bundle = compile_model(convolution(), tmp_path)
    file = bundle.file(bundle.manifest.segments[0].optimised)
    if where == "damaged":
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        with pytest.raises(onnxplace.BundleError, match="changed since the compile"):
            onnxplace.load(bundle.path, check="all")
    elif where == "elsewhere":
        monkeypatch.setattr(segments_module, "describe_optimiser", lambda: "another processor")
    else:
        monkeypatch.setattr(segments_module, "uses_optimisations", lambda: False)
    run(onnxplace.load(bundle.path))
    assert opened == ["cpu0-000.onnx"]


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_large_optimised_model_may_be_damaged_or_missing(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    bundle = compile_model(convolution(), tmp_path)
    file = bundle.file(bundle.manifest.segments[0].optimised)
    monkeypatch.setattr(bundle_module, "MAX_TINY_FILE_BYTES", 0)  # hashed while sessions open, if at all
    if is_damaged:
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    else:
        file.unlink()
    with onnxplace.InferenceSession(bundle.path):
        assert opened == ["cpu0-000.onnx"]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (build("y = Add(x, one)", "float[1] one = {1}"), {}),
        (build("y = Conv(x, w)", "", ending=", float[2, 3, 3, 3] w"), {}),
        (convolution(), {"link_weights": True}),
    ],
    ids=["no convolution", "weights of the caller", "linked weights"],
)
def test_other_segments_are_kept_once(tmp_path: Path, model: ModelProto, options: dict[str, Any]) -> None:
    bundle = compile_model(model, tmp_path, **options)
    assert (bundle.manifest.segments[0].optimised, bundle.manifest.optimised_for) == ("", "")
    assert bundle.compiled_files == frozenset()


def test_weights_that_stay_as_they_are_are_stored_once(tmp_path: Path) -> None:
    constants = f"{WEIGHTS}, float[8, 40] m = {{{numbers(320)}}}"
    bundle = compile_model(build("c = Conv <pads = [1, 1, 1, 1]> (x, w, b) y = MatMul(c, m)", constants), tmp_path)
    assert bundle.manifest.segments[0].optimised
    once, twice = 4 * 320, 4 * 2 * 432
    assert once + twice <= bundle.manifest.files["segments/weights.bin"].bytes < 2 * once + twice


def test_a_segment_that_cannot_be_opened_here_is_left_as_it_is(tmp_path: Path) -> None:
    bundle = compile_model(convert(convolution(), np.float64), tmp_path)  # for which CPUs have no kernel
    assert bundle.compiled_files == frozenset()


@settings(max_examples=15)
@given(
    kind=st.sampled_from([np.float32, np.float32, np.float16]),
    group=st.sampled_from([1, 3]),
    filters=st.sampled_from([3, 6, 24, 48]),
    size=st.sampled_from([1, 3]),
    names=st.lists(st.sampled_from(["BatchNormalization", "Relu", "Sigmoid", "Add", "Conv", "MaxPool"]), max_size=6),
)
def test_answers_are_the_same_bits(kind: type, group: int, filters: int, size: int, names: list[str]) -> None:
    count = filters * 3 // group * size * size
    constants = [f"float[{filters}, {3 // group}, {size}, {size}] w = {{{numbers(count)}}}"]
    constants += [f"float[{filters}] {name} = {{{numbers(filters)}}}" for name in ("b", "mean")]
    constants += [f"float[{filters}] variance = {{{', '.join(['2.5'] * filters)}}}"]
    constants += [f"float[{filters}, 1, 3, 3] depthwise = {{{numbers(9 * filters)}}}"]
    steps = {
        "BatchNormalization": "BatchNormalization({}, b, b, mean, variance)",
        "Relu": "Relu({})",
        "Sigmoid": "Sigmoid({})",
        "Add": "Add({}, v0)",
        "Conv": f"Conv <pads = [1, 1, 1, 1], group = {filters}> ({{}}, depthwise)",
        "MaxPool": "MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> ({})",
    }
    pads = ", ".join([str(size // 2)] * 4)
    body = [f"v0 = Conv <group = {group}, pads = [{pads}]> (x, w, b)"]
    body += [f"v{i + 1} = {steps[name].format(f'v{i}')}" for i, name in enumerate(names)]
    model = convert(build(" ".join([*body, f"y = Identity(v{len(names)})"]), ", ".join(constants)), kind)
    with tempfile.TemporaryDirectory() as folder:
        bundle = compile_model(model, Path(folder))
        outputs = run(bundle, kind)
        bundle.file(bundle.manifest.segments[0].optimised).unlink()
        assert run(bundle, kind) == outputs


def test_commands_use_a_bundle_with_optimised_segments(tmp_path: Path, run_cli: Any) -> None:
    bundle = compile_model(convolution(), tmp_path)
    moved = tmp_path / "moved"
    shutil.copytree(bundle.path, moved)
    for command in (("verify", str(moved)), ("run", str(moved)), ("bench", str(moved), "--no-memory", "--repeat", "2")):
        result = run_cli(*command)
        assert (result.code, "N012" in result.err) == (0, False), result.err
