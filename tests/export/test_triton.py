"""`export --to triton`: model repositories, checked against Triton's message types and run by a small Triton."""

import json
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from onnx import parser

import onnxplace
from onnxplace.bundle import Bundle
from onnxplace.driver import compile_model
from onnxplace.export import ExportOptions, export_bundle
from onnxplace.target import Device, Target
from tests.bundle.test_routes import copied
from tests.export.fake_triton import FLAG_END, FLAG_START, Ensemble, PythonModel, load_protobufs, read_config
from tests.export.samples import draw_feeds, run_file
from tests.support.commands import only_json
from tests.support.random_models import RandomModel, random_models, reference
from tests.support.random_placements import RandomPlacement, assert_same, compiled_with, placements

TWO_STAGES = RandomPlacement((0, 0, 1, 1), (0,))
CHAIN = '<ir_version: 9, opset_import: ["": 18]> g (float[n, 4] x) => (float[n, 4] y, float s) '
CHAIN += "{ a = Neg(x) s = ReduceSum<keepdims=0>(a) b = Abs(a) y = Add(b, s) }"


def export(bundle: Bundle, folder: Path, **options: object) -> Path:
    export_bundle(bundle, "triton", folder / "repository", options=ExportOptions(name="m", **options))
    return folder / "repository"


def list_groups(config) -> list[tuple[str, int, list[int]]]:
    kinds = load_protobufs().ModelInstanceGroup.Kind
    return [(kinds.Name(group.kind), group.count, list(group.gpus)) for group in config.instance_group]


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Bundle:
    """A model with a batch and a scalar, in two stages on two devices."""
    return compiled_with(parser.parse_model(CHAIN), TWO_STAGES, tmp_path_factory.mktemp("chain"), dimensions={"n": 3})


def test_a_pipeline_becomes_an_ensemble_with_the_bits_of_the_bundle(chain, tmp_path):
    repository = export(chain, tmp_path)
    ensemble = Ensemble(repository, "m")
    assert {step.model_name[:6] for step in ensemble.steps} == {"m_cpu0", "m_cpu1"}
    assert list_groups(ensemble.models["m_cpu1_000"]) == [("KIND_CPU", 1, [])]
    assert ensemble.models["m_cpu1_000"].parameters["intra_op_thread_count"].string_value == "1"
    feeds = draw_feeds(chain)
    with onnxplace.InferenceSession(chain) as session:
        expected = session.run(None, feeds)
    outputs = ensemble.run(feeds)
    assert_same([outputs["y"], outputs["s"].reshape(())], expected)


@settings(
    max_examples=30, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)  # fmt: skip
@given(random_models(), placements(), st.booleans())
def test_every_ensemble_computes_the_same_as_the_model(model: RandomModel, placement: RandomPlacement, optimized: bool):
    try:
        expected = reference(model.proto, model.feeds)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        assume(False)
    with tempfile.TemporaryDirectory() as name:
        bundle = compiled_with(model.proto, placement, Path(name), optimized=optimized, dimensions=model.dimensions)
        assume(not any(item.optional for item in bundle.manifest.inputs))
        try:
            repository = export(bundle, Path(name), layout="ensemble")
        except onnxplace.InputError:
            assume(False)
        ensemble = Ensemble(repository, "m")
        for feeds, outputs in zip(model.feeds, expected):
            actual = ensemble.run(feeds)
            for item, output in zip(bundle.manifest.outputs, outputs, strict=True):
                assert_same(actual[item.name].reshape(np.shape(output)), output)


def test_work_that_goes_back_and_forth_runs_as_one_python_model(chain, tmp_path, monkeypatch):
    back = compiled_with(
        parser.parse_model(CHAIN), RandomPlacement((0, 1, 1, 0), (0,)), tmp_path, optimized=False, dimensions={"n": 3}
    )
    model = PythonModel(export(back, tmp_path) / "m", monkeypatch)
    assert list_groups(model.config) == [("KIND_MODEL", 1, [])]
    feeds = draw_feeds(back)
    outputs = model.run(feeds)
    with onnxplace.InferenceSession(back) as session:
        expected = session.run(None, feeds)
    assert_same([outputs["y"], outputs["s"].reshape(())], expected)
    assert set(model.run(feeds, outputs=["s"])) == {"s"}
    bad, good = model.execute(model.request({}), model.request(feeds))
    assert "FeedError" in bad.error
    assert "'x'" in bad.error
    assert_same(good.outputs["y"], expected[0])
    model.model.finalize()


def test_every_gpu_of_a_segment_has_an_instance(tmp_path):
    target = Target(tuple(Device(name, 1 << 30) for name in ("cuda:0", "cuda:2", "cpu:0", "cpu:1")))
    device_map = json.dumps(json.dumps({".*": "cuda:0"}))
    placed = f"profile{{estimate=true}},coplace{{device_map={device_map}}},single,split"
    pipeline = f"{placed},replicate{{routes=cuda:2;cpu:1}},emit"
    bundle = compile_model(
        parser.parse_model(CHAIN), tmp_path / "b", target=target, shape={"n": 3}, pipeline=pipeline
    ).bundle
    (segment,) = bundle.manifest.segments
    config = read_config(export(bundle, tmp_path, layout="ensemble") / f"m_{segment.id.replace('-', '_')}")
    assert list_groups(config) == [("KIND_GPU", 1, [0]), ("KIND_GPU", 1, [2]), ("KIND_CPU", 1, [])]
    assert "intra_op_thread_count" not in config.parameters


def test_requests_of_a_batched_model_are_joined(chain, tmp_path, monkeypatch):
    proto = CHAIN.replace(", float s", "").replace("<keepdims=0>(a)", "<axes=[1]>(a)").replace(": 18]", ": 11]")
    bundle = compiled_with(parser.parse_model(proto), TWO_STAGES, tmp_path, dimensions={"n": 3})
    model = PythonModel(export(bundle, tmp_path, max_batch=8) / "m", monkeypatch)
    assert model.config.max_batch_size == 8
    assert model.config.HasField("dynamic_batching")
    assert [list(item.dims) for item in (*model.config.input, *model.config.output)] == [[4], [4]]
    feeds = [np.float32(np.arange(4 * rows).reshape(rows, 4)) for rows in (1, 2, 3)]
    responses = model.execute(*(model.request({"x": x}) for x in feeds))
    for x, response in zip(feeds, responses):
        assert_same(response.outputs["y"], run_file(bundle.file("segments/whole.onnx"), {"x": x})["y"])
    model.model.finalize()
    with pytest.raises(onnxplace.InputError, match=r"I015.*requests cannot be joined"):
        export(chain, tmp_path / "other", max_batch=8)


def test_each_sequence_has_states_of_its_own(tmp_path, monkeypatch):
    text = '<ir_version: 9, opset_import: ["": 18]> g (float[3] x, float[3] total) => (float[3] sum, float[3] y) '
    proto = parser.parse_model(text + "<float[3] total = {1, 2, 3}> { sum = Add(x, total) y = Identity(sum) }")
    bundle = compile_model(
        proto, tmp_path / "bundle", devices="cpu:0,cpu:1", state={"sum": "total"},
        pipeline="profile{estimate=true},coplace,single,split,emit",
    ).bundle  # fmt: skip
    model = PythonModel(export(bundle, tmp_path) / "m", monkeypatch)
    assert model.config.WhichOneof("scheduling_choice") == "sequence_batching"
    assert [(item.name, item.optional) for item in model.config.input] == [("x", False), ("total", True)]
    assert [item.name for item in model.config.output] == ["y"]
    x = {"x": np.ones(3, np.float32)}
    first = model.run(x, sequence=7, flags=FLAG_START)["y"]
    other = model.run({**x, "total": np.zeros(3, np.float32)}, sequence=8, flags=FLAG_START)["y"]
    assert (first.tolist(), other.tolist()) == ([2, 3, 4], [1, 1, 1])
    assert model.run(x, sequence=7)["y"].tolist() == [3, 4, 5]
    assert model.run(x, sequence=8, flags=FLAG_END)["y"].tolist() == [2, 2, 2]
    (late,) = model.execute(model.request(x, sequence=8))
    assert "sequence 8 has not started" in late.error
    model.model.max_sequences = 1
    model.run(x, sequence=9, flags=FLAG_START)
    (idle,) = model.execute(model.request(x, sequence=7))
    assert "was idle for too long" in idle.error
    model.model.finalize()


def test_text_is_bytes_in_triton(tmp_path, monkeypatch):
    text = '<ir_version: 9, opset_import: ["": 18]> g (string[n] x) => (string[n] y) { y = Identity(x) }'
    bundle = compiled_with(parser.parse_model(text), TWO_STAGES, tmp_path, optimized=False, dimensions={"n": 2})
    model = PythonModel(export(bundle, tmp_path, layout="python") / "m", monkeypatch)
    outputs = model.run({"x": np.array([b"a", "ü".encode()], dtype=object)})
    assert outputs["y"].tolist() == ["a", "ü"]
    model.model.finalize()


def test_weights_that_a_bundle_links_to_come_along(tmp_path, monkeypatch):
    weight = np.arange(4096, dtype=np.float32)
    text = '<ir_version: 9, opset_import: ["": 18]> g (float[4096] x) => (float[4096] y) { y = Add(x, w) }'
    proto = parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    bundle = compile_model(
        tmp_path / "m.onnx", tmp_path / "m.bundle", devices="cpu:0", link_weights=True, pipeline=None
    ).bundle
    (tmp_path / "away").mkdir()
    repository = export(bundle, tmp_path / "away", layout="python")
    (tmp_path / "m.data").unlink()
    model = PythonModel(repository / "m", monkeypatch)
    assert_same(model.run({"x": weight})["y"], weight + weight)
    model.model.finalize()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layout", "ensembel"), ("I014", "'ensembel'", "did you mean 'ensemble'?")),
        (("--name", "///"), ("I014", "'///' cannot be the name of a model")),
        (("--max-batch", "1"), ("I014", "at least 2")),
        (("--max-batch", "4", "--layout", "ensemble"), ("I014", "only the layout python joins requests")),
        (("--to", "stages", "--name", "x"), ("I011", "the format stages has no option --name", "export --to triton")),
    ],
    ids=lambda value: " ".join(value),
)
def test_wrong_options_are_refused(run_cli, chain, tmp_path, arguments, words):
    refused = run_cli("export", chain.path, "--to", "triton", "-o", tmp_path / "out", *arguments)
    assert refused.code == 2
    assert [word for word in words if word not in refused.err] == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("signature", "layout", "words"),
    [
        ("(float[3] x) => (seq(float[3]) y) { y = SequenceConstruct(x) }", "auto", "'y' has the type seq"),
        ("(float[3] x) => (bfloat16[3] y) { y = Cast<to=16>(x) }", "python", "tensor(bfloat16), which numpy lacks"),
        ("(float[3] x) => (float[3] y, float[3] x) { y = Neg(x) }", "ensemble", "it returns the input 'x'"),
        ("(float[3] x) => (float[] y) { z = Shape(x) y = ConstantOfShape(z) }", "python", "'y' has no known rank"),
    ],
)
def test_what_triton_cannot_express_is_named(signature, layout, words, tmp_path):
    proto = parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g {signature}')
    bundle = compiled_with(proto, TWO_STAGES, tmp_path, optimized=False)
    with pytest.raises(onnxplace.InputError, match="I015") as refused:
        export(bundle, tmp_path, layout=layout)
    assert words in str(refused.value)


def test_the_command_names_the_model_after_the_file(run_cli, chain, tmp_path):
    data = only_json(run_cli("export", chain.path, "--to", "triton", "-o", tmp_path / "out", "--json"))
    assert read_config(tmp_path / "out" / "bundle").name == "bundle"
    assert "bundle_cpu1_000/1/model.onnx" in data["files"]


def test_tensor_names_of_an_ensemble_never_clash(tmp_path):
    text = '<ir_version: 9, opset_import: ["": 18]> g (float[3] x) => (float[3] y) { y_ = Neg(x) y = Abs(y_) }'
    bundle = compiled_with(parser.parse_model(text), RandomPlacement((0, 1), (0,)), tmp_path, optimized=False)
    x = np.float32([1, -2, 3])
    assert Ensemble(export(bundle, tmp_path), "m").run({"x": x})["y"].tolist() == [1, 2, 3]


def test_copies_of_a_pipeline_are_instances_of_its_steps(tmp_path):
    bundle = copied(tmp_path, "cpu:2+cpu:3")
    repository = export(bundle, tmp_path, layout="ensemble")
    configs = [read_config(folder) for folder in repository.iterdir() if folder.is_dir() and folder.name != "m"]
    assert all(list_groups(config) == [("KIND_CPU", 2, [])] for config in configs)


def test_inputs_with_defaults_need_the_python_model(tmp_path, monkeypatch):
    text = '<ir_version: 9, opset_import: ["": 18]> g (float[3] x, float[3] w) => (float[3] y) <float[3] w = {1, 2, 3}>'
    bundle = compiled_with(parser.parse_model(text + " { a = Neg(x) y = Add(a, w) }"), TWO_STAGES, tmp_path)
    model = PythonModel(export(bundle, tmp_path) / "m", monkeypatch)
    x = np.ones(3, np.float32)
    assert model.run({"x": x})["y"].tolist() == [0, 1, 2]
    assert model.run({"x": x, "w": x})["y"].tolist() == [0, 0, 0]
    model.model.finalize()
    options = ExportOptions(name="m", layout="ensemble")
    exported = export_bundle(bundle, "triton", tmp_path / "ensemble", options=options)
    assert [note.code for note in exported.diagnostics] == ["I017"]
    assert Ensemble(tmp_path / "ensemble", "m").run({"x": x})["y"].tolist() == [0, 1, 2]
