"""A bundle compiled for representative sizes runs with other sizes: in turn, concurrently, one, and zero."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings, strategies as st
from onnx import parser

import models
import onnxplace
from onnxplace.measure.compare import compare_output

COMPILED = {"batch": 3, "seq": 11}
SIZES = [(2, 16), (1, 1), (5, 7), (1, 33), (3, 2), (2, 16), (0, 4), (4, 1)]

# Shapes that depend on sizes (a reshape to a Shape) and on data (NonZero), and a value that may have no rows.
ODD = """
<ir_version: 8, opset_import: ["" : 17]>
odd (float[rows, columns] x, float[rows, columns] y, int64[take] which)
    => (float[rows, columns] z, int64[2, found] places, float[take, columns] taken, float[both, columns] stacked) {
    [sum] sum = Add(x, y)
    [shape] shape = Shape(y)
    [flat_shape] flat_shape = Constant<value_ints = [-1]>()
    [flat] flat = Reshape(sum, flat_shape)
    [exp] exp = Tanh(flat)
    [back] z = Reshape<allowzero = 1>(exp, shape)
    [zero] zero = Sub(x, x)
    [positive] positive = Greater(x, zero)
    [places] places = NonZero(positive)
    [taken] taken = Gather(sum, which)
    [stacked] stacked = Concat<axis = 0>(taken, z)
}
"""


def pipeline(folder: Path, device_map: dict[str, str]) -> str:
    file = folder / "map.json"
    file.write_text(json.dumps(device_map))
    coplace = f"coplace{{join=never,device_map={json.dumps(str(file))}}}"
    return f"optimize,profile{{estimate=true}},{coplace},m-etf,split,emit"


def whole(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def tokens(batch: int, seq: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([batch, seq])
    mask = (random.random((batch, seq)) < 0.8).astype("i8")
    mask[:, :1] = 1
    return {"input_ids": random.integers(0, 50, (batch, seq)), "attention_mask": mask}


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, onnxplace.Bundle]:
    """A text encoder whose attention and perceptrons are on different devices."""
    folder = tmp_path_factory.mktemp("transformer")
    path = folder / "transformer.onnx"
    models.save(models.build("transformer", layers=2, hidden=32, heads=2, vocab=50, positions=64), path)
    device_map = {".*/mlp.*|pool.*": "cpu:1", ".*": "cpu:0"}
    bundle = onnxplace.compile(
        path,
        folder / "bundle",
        devices="cpu:0,cpu:1",
        shape=COMPILED,
        pipeline=pipeline(folder, device_map),
        strict=True,
    )
    return path, bundle


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, onnxplace.Bundle]:
    """Values of sizes known only at run time, each read on the other device."""
    folder = tmp_path_factory.mktemp("odd")
    path = folder / "odd.onnx"
    onnx.save(parser.parse_model(ODD), path)
    device_map = {"sum|exp|zero|places|stacked": "cpu:0", ".*": "cpu:1"}
    bundle = onnxplace.compile(
        path,
        folder / "bundle",
        devices="cpu:0,cpu:1",
        shape={"rows": 3, "columns": 4, "take": 5},
        pipeline=pipeline(folder, device_map),
        strict=True,
    )
    return path, bundle


def assert_equal(bundle: onnxplace.Bundle, actual: list, expected: list) -> None:
    for item, first, second in zip(bundle.outputs, actual, expected, strict=True):
        assert first.shape == second.shape
        difference = compare_output(item.name, first, second)
        assert difference.equal, difference


def test_sizes_change_from_run_to_run_in_one_session(transformer):
    path, bundle = transformer
    reference = whole(path)
    with onnxplace.InferenceSession(bundle) as session:
        for batch, seq in SIZES:
            feeds = tokens(batch, seq)
            assert_equal(bundle, session.run(None, feeds), reference.run(None, feeds))


def test_runs_of_different_sizes_may_be_in_flight_together(transformer):
    path, bundle = transformer
    reference = whole(path)
    with onnxplace.InferenceSession(bundle) as session:
        futures = [session.submit(tokens(batch, seq)) for batch, seq in SIZES * 3]
        for (batch, seq), future in zip(SIZES * 3, futures):
            outputs = [future.result(60).outputs[item.name] for item in bundle.outputs]
            assert_equal(bundle, outputs, reference.run(None, tokens(batch, seq)))


@pytest.mark.parametrize("name", ["transformer", "odd"])
def test_the_manifest_and_the_segments_keep_dimensions_symbolic(name, request):
    _, bundle = request.getfixturevalue(name)
    inputs = {item.name: item.shape for item in bundle.inputs}
    expected = {
        "transformer": {"input_ids": ("batch", "seq"), "attention_mask": ("batch", "seq")},
        "odd": {"x": ("rows", "columns"), "y": ("rows", "columns"), "which": ("take",)},
    }
    assert inputs == expected[name]
    sent = {step.value for program in bundle.manifest.programs.values() for step in program if step.op == "send"}
    assert sent
    for segment in bundle.manifest.segments:
        graph = onnx.load(bundle.path / segment.file).graph
        for value in (*graph.input, *graph.output):
            shape = value.type.tensor_type.shape.dim
            record = bundle.manifest.values[value.name]
            assert len(record.shape) == len(shape)
            # Sizes that were bound only for the costs must not appear: 3 and 11, or 3, 4 and 5.
            fixed = [d.dim_value for d in shape if d.HasField("dim_value")]
            heads_and_width = {1, 2, 32, 16, 128} if name == "transformer" else {2}
            assert set(fixed) <= heads_and_width
            if len(shape) and value.name in ("input_ids", "x", "y"):
                assert not fixed


def test_segments_do_not_depend_on_the_sizes_of_the_compile(transformer, tmp_path):
    path, bundle = transformer
    second_bundle = onnxplace.compile(
        path,
        tmp_path / "other",
        devices="cpu:0,cpu:1",
        shape={"batch": 7, "seq": 23},
        pipeline=pipeline(tmp_path, {".*/mlp.*|pool.*": "cpu:1", ".*": "cpu:0"}),
    )
    segments = [item.file for item in bundle.manifest.segments]
    assert segments == [item.file for item in second_bundle.manifest.segments]
    for file in segments:
        assert bundle.file(file).read_bytes() == second_bundle.file(file).read_bytes()
    shapes = {name: item.shape for name, item in bundle.manifest.values.items()}
    assert shapes == {name: item.shape for name, item in second_bundle.manifest.values.items()}


sizes = st.integers(0, 5)


@settings(max_examples=40)
@given(st.lists(st.tuples(sizes, sizes, sizes), min_size=1, max_size=4), st.integers(0, 2**32))
def test_sizes_known_only_at_run_time_may_have_any_value(odd, drawn, seed):
    path, bundle = odd
    reference, random = whole(path), np.random.default_rng(seed)
    with onnxplace.InferenceSession(bundle) as session:
        for rows, columns, take in drawn:
            x, y = (random.standard_normal((rows, columns)).astype("f4") for _ in range(2))
            feeds = {"x": x, "y": y, "which": random.integers(0, max(rows, 1), take if rows else 0)}
            assert_equal(bundle, session.run(None, feeds), reference.run(None, feeds))


def test_the_simulated_step_is_for_the_sizes_of_the_compile(transformer):
    _, bundle = transformer
    with onnxplace.InferenceSession(bundle, runtime="simulated") as session:
        seconds = {session.submit(tokens(batch, seq)).result().seconds for batch, seq in SIZES}
    assert len(seconds) == 1


def test_commands_accept_other_sizes(transformer, run_cli, tmp_path):
    path, bundle = transformer
    for shape in ("batch=1,seq=1", "batch=3", "seq=40", "batch=0,seq=2"):
        assert run_cli("verify", bundle.path, "--against", path, "--shape", shape).code == 0, shape
    result = run_cli("run", bundle.path, "--shape", "batch=3,seq=5", "--json")
    assert json.loads(result.out)["outputs"]["last_hidden_state"]["shape"] == [3, 5, 32]
    np.savez(tmp_path / "in.npz", **tokens(4, 9))
    assert run_cli("verify", bundle.path, "--inputs", tmp_path / "in.npz").code == 0


def test_contradicting_sizes_are_refused_by_the_node_that_cannot_take_them_as_in_a_plain_session(transformer):
    path, bundle = transformer
    mixed = {**tokens(3, 5), "attention_mask": tokens(3, 6)["attention_mask"]}
    with pytest.raises(Exception, match="attention/add_mask"):
        whole(path).run(None, mixed)
    with onnxplace.InferenceSession(bundle) as session:
        with pytest.raises(onnxplace.ExecutionError, match="attention/add_mask"):
            session.run(None, mixed)
        assert_equal(bundle, session.run(None, tokens(3, 5)), whole(path).run(None, tokens(3, 5)))


def test_sizes_that_the_model_cannot_run_leave_the_session_usable(transformer):
    path, bundle = transformer
    with onnxplace.InferenceSession(bundle) as session:
        with pytest.raises(onnxplace.ExecutionError):  # it has positions for 64 tokens
            session.run(None, tokens(1, 65))
        feeds = tokens(2, 3)
        assert_equal(bundle, session.run(None, feeds), whole(path).run(None, feeds))
