"""`export --to ort-layers`: one model for one session of ONNX Runtime, and its settings as a device map."""

import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from onnx import parser

from models import MODELS
from onnxplace.bundle.bundle import Bundle
from onnxplace.driver.compile import compile_model
from onnxplace.errors import InputError, TargetError, UsageError
from onnxplace.export.exporting import export_bundle
from onnxplace.export.segment_models import BundleModels
from onnxplace.machine.ort_sessions import use_custom_operators
from onnxplace.model.nested_graphs import walk_nodes
from onnxplace.target.target import Device, Target
from onnxplace.utils.quantities import format_milliseconds
from onnxplace_formats.layer_maps import match_layer, match_name, parse_rules
from onnxplace_formats.ort_providers import describe_providers, designate, explain_conflict, find_designated
from onnxplace_formats.session_prediction import predict_session
from tests.export.conftest import DECODER_SHAPE
from tests.export.samples import assert_same_outputs, draw_feeds, run_file
from tests.support.commands import node_names, only_json
from tests.support.random_models import RandomModel, random_models, run_plain
from tests.support.random_placements import RandomPlacement, assert_same, exported_with, placements

LAYER, NAME = "session.layer_assignment_settings", "session.name_based_layer_assignment"
GIB = 1 << 30
WITH_GPU = Target((Device("cpu:0", 8 * GIB), Device("cuda:0", 8 * GIB, kernel_seconds=1e-6)))
NESTED = """
<ir_version: 10, opset_import: ["": 17]>
g (float[4] x, bool c) => (float[4] y) {
    [before] a = Relu(x)
    [choice] b = If(c) <then_branch = t () => (float[4] o) { [one] p = Abs(a) [two] o = Neg(p) },
                        else_branch = e () => (float[4] o) { [three] o = Exp(a) }>
    [after] y = Neg(b)
}
"""
CHAIN = """
<ir_version: 10, opset_import: ["": 17]>
g (float[4] x) => (float[4] y) { [enc_a] a = Exp(x) [enc_b] b = Sin(a) [dec_a] c = Exp(b) [dec_b] y = Sin(c) }
"""
CUSTOM_CHAIN = """
<ir_version: 9, opset_import: ["": 18, "ai.onnx.contrib": 1]>
g (float[4] x) => (float[4] y) { [first] n, p = ai.onnx.contrib.NegPos(x) [second] y = Add(n, p) }
"""


def list_layers(nodes) -> dict[str, str | None]:
    metadata = {node.name: {entry.key: entry.value for entry in node.metadata_props} for node in nodes}
    return {name: entries.get("layer_ann") for name, entries in metadata.items()}


def compile_with_map(model, folder: Path, device_map, target=WITH_GPU, **options):
    text = json.dumps(device_map if isinstance(device_map, str) else json.dumps(device_map))
    pipeline = f"optimize,profile{{estimate=true}},coplace{{join=never,device_map={text}}},m-etf,split,emit"
    return compile_model(model, folder, target=target, pipeline=pipeline, **options)


def open_export(folder: Path, **entries: str) -> onnxruntime.InferenceSession:
    """Open an export with its settings on this machine, which has the CPU alone."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for key, value in {**json.loads((folder / "session_options.json").read_text()), **entries}.items():
        if key.startswith("session."):
            options.add_session_config_entry(key, value)
    return onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])


def test_every_node_has_its_device_as_its_layer(decoder_bundle, tmp_path):
    exported = export_bundle(decoder_bundle, "ort-layers", tmp_path / "out")
    assert exported.files == ("model.onnx", "session.py", "session_options.json")
    model = onnx.load(tmp_path / "out" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    expected = {name: device for device, names in node_names(decoder_bundle).items() for name in names}
    assert list_layers(model.graph.node) == expected
    written = json.loads((tmp_path / "out" / "session_options.json").read_text())
    assert written == {
        LAYER: "CPUExecutionProvider(=cpu:0,=cpu:1)",
        "providers": [{"name": "CPUExecutionProvider", "options": {}}],
        "intra_op_num_threads": 2,
    }
    (first, second) = exported.diagnostics
    assert first.message == "cpu:0, cpu:1 are one device in a session: its nodes run one after the other"
    assert "--placer one-session" in second.hint


def test_onnx_runtime_computes_the_same_with_it_and_reports_the_assignment(decoder_bundle, tmp_path):
    export_bundle(decoder_bundle, "ort-layers", tmp_path / "out")
    feeds = draw_feeds(decoder_bundle)
    expected = run_file(decoder_bundle.file("segments/whole.onnx"), feeds)
    assert_same_outputs(run_file(tmp_path / "out" / "model.onnx", feeds), expected)
    groups = open_export(tmp_path / "out").get_provider_graph_assignment_info()
    assert {group.ep_name for group in groups} == {"CPUExecutionProvider"}


def test_the_settings_name_the_provider_of_each_device(tmp_path):
    bundle = compile_with_map(parser.parse_model(CHAIN), tmp_path / "b", {"enc.*": "cuda:0", "dec.*": "cpu:0"}).bundle
    exported = export_bundle(bundle, "ort-layers", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "session_options.json").read_text())
    assert written[LAYER] == "cuda(=cuda:0);CPUExecutionProvider(=cpu:0)"
    names = [provider["name"] for provider in written["providers"]]
    assert names == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert written["providers"][0]["options"]["device_id"] == "0"
    (note,) = exported.diagnostics
    assert re.fullmatch(
        r"placer 'm-etf' lets .*: it takes .* ms for this placement .*, and .* ms for the best one", note.message
    )
    assert "--placer one-session" in note.hint
    open_export(tmp_path / "out").run(None, {"x": np.ones(4, np.float32)})


@pytest.mark.parametrize("name", ["two-encoders", "squeezenet"])
def test_the_time_that_the_export_states_is_that_of_the_placer(name, tmp_path):
    """For its own placement, the best one takes as long, and another one is not faster."""
    stated = []
    for placer in ("one-session", "m-topo", "m-etf"):
        pipeline = f"optimize,profile{{estimate=true}},coplace{{join=never}},{placer},split,emit"
        bundle = compile_model(MODELS[name].build(), tmp_path / placer, target=WITH_GPU, pipeline=pipeline).bundle
        stated.append(predict_session(BundleModels(bundle)))
        messages = [item.message for item in bundle.manifest.diagnostics if item.where == "one-session"]
        for message in messages:
            assert f"takes {format_milliseconds(stated[0].step_seconds)} by these costs" in message
    assert stated[0].step_seconds == pytest.approx(stated[0].best_seconds)
    assert all(item.best_seconds == pytest.approx(stated[0].best_seconds) for item in stated)
    assert all(item.step_seconds >= stated[0].step_seconds * 0.999 for item in stated)


@pytest.mark.parametrize("room", [8 << 20, 10 << 20])
def test_a_small_gpu_is_used_within_its_memory_by_nodes_that_are_contracted(room, tmp_path):
    slow = replace(WITH_GPU.devices[0], operations_per_second=1e9)
    fast = replace(WITH_GPU.devices[1], memory_bytes=room, operations_per_second=1e13, memory_bytes_per_second=1e12)
    target = Target((slow, fast))
    pipeline = "optimize,profile{estimate=true},coplace,fuse,one-session{seconds=2},split,emit"
    bundle = compile_model(MODELS["squeezenet"].build(), tmp_path / "b", target=target, pipeline=pipeline).bundle
    host, gpu = sorted(bundle.manifest.devices, key=lambda device: device.id)
    assert 0 < gpu.peak_bytes <= room
    assert host.peak_bytes > 0
    (note,) = (item for item in bundle.manifest.diagnostics if item.where == "one-session")
    assert "none in these limits takes less than" in note.message


def test_onnx_runtime_reads_the_settings_and_refuses_others(tmp_path):
    bundle = compile_with_map(parser.parse_model(CHAIN), tmp_path / "b", {".*": "cpu:0"}).bundle
    export_bundle(bundle, "ort-layers", tmp_path / "out")
    with pytest.raises(Exception, match="Missing '\\('"):
        open_export(tmp_path / "out", **{LAYER: "cpu=cpu:0"})


def test_the_script_opens_the_model_and_counts_the_nodes_of_providers(decoder_bundle, tmp_path):
    export_bundle(decoder_bundle, "ort-layers", tmp_path / "out")
    command = [sys.executable, "-c", "import sys; sys.modules['onnxplace'] = None; import runpy; "
               "runpy.run_path(sys.argv[1], run_name='__main__')", tmp_path / "out" / "session.py"]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    count, provider = ended.stdout.split()
    assert int(count) > 10
    assert provider == "CPUExecutionProvider"


def load_script(folder: Path) -> dict:
    return runpy.run_path(str(folder / "session.py"))


def test_the_script_says_what_is_missing_in_one_line(tmp_path, monkeypatch, capsys):
    bundle = compile_for(tmp_path / "b", "cpu:0", "qnn/npu:0")
    export_bundle(bundle, "ort-layers", tmp_path / "out")
    script = load_script(tmp_path / "out")
    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", None)
    with pytest.raises(RuntimeError, match="QNNExecutionProvider is not installed: pip install onnxruntime-qnn"):
        script["open_session"]()
    cpu = {"name": "CPUExecutionProvider", "options": {}}
    with pytest.raises(RuntimeError, match="CPUExecutionProvider has no device 3 here: it lists 1"):
        script["find_devices"](cpu | {"index": 3})
    assert len(script["find_devices"](cpu | {"type": "NPU"})) == 1
    assert capsys.readouterr().err == "CPUExecutionProvider has no NPU here: its CPU computes instead\n"
    monkeypatch.setattr(onnxruntime, "__version__", "1.25.1")
    with pytest.raises(RuntimeError, match=r"1\.25\.1 knows no layers"):
        script["open_session"]()


def test_operators_of_a_library_are_named_and_the_script_loads_it(tmp_path):
    library = pytest.importorskip("onnxruntime_extensions").get_library_path()
    with use_custom_operators([library]):
        bundle = compile_with_map(parser.parse_model(CUSTOM_CHAIN), tmp_path / "b", {".*": "cpu:0"}).bundle
    (note,) = export_bundle(bundle, "ort-layers", tmp_path / "out").diagnostics
    assert note.message == "the session needs the library of the operators 'ai.onnx.contrib.NegPos'"
    path = tmp_path / "out" / "session_options.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"custom_op_libraries": [library]}))
    script = load_script(tmp_path / "out")
    assert script["count_nodes"](script["open_session"]()) == {"CPUExecutionProvider": 2}


def test_cores_that_several_devices_share_are_threads_once(tmp_path):
    target = Target(
        (
            Device("cpu:0", GIB, 1, processors=("a",)),
            Device("cpu:1", GIB, 1, processors=("b",)),
            Device("cpu:0-1", GIB, 2, processors=("a", "b")),
        )
    )
    bundle = compile_with_map(
        parser.parse_model(CHAIN), tmp_path / "b", {"enc_a": "cpu:0", "enc_b": "cpu:1", ".*": "cpu:0-1"}, target
    ).bundle
    export_bundle(bundle, "ort-layers", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "session_options.json").read_text())["intra_op_num_threads"] == 2


def test_nodes_of_subgraphs_follow_the_node_around_them_and_old_layers_are_gone(tmp_path):
    model = parser.parse_model(NESTED)
    for node in walk_nodes(model.graph.node):
        node.metadata_props.add(key="layer_ann", value="old")
    bundle = compile_with_map(model, tmp_path / "b", {"choice": "cuda:0", ".*": "cpu:0"}).bundle
    export_bundle(bundle, "ort-layers", tmp_path / "out")
    exported = onnx.load(tmp_path / "out" / "model.onnx").graph.node
    assert {name: layer for name, layer in list_layers(walk_nodes(exported)).items() if layer} == list_layers(exported)
    assert list_layers(exported) == {"before": "cpu:0", "choice": "cuda:0", "after": "cpu:0"}
    open_export(tmp_path / "out").run(None, {"x": np.ones(4, np.float32), "c": np.array(True)})


def test_two_devices_of_one_provider_are_refused_by_name(tmp_path):
    target = Target((Device("cuda:0", GIB), Device("cuda:1", GIB)))
    bundle = compile_with_map(
        parser.parse_model(CHAIN), tmp_path / "b", {"enc.*": "cuda:0", "dec.*": "cuda:1"}, target
    ).bundle
    with pytest.raises(InputError, match="cuda:0 and cuda:1 are devices of CUDAExecutionProvider") as caught:
        export_bundle(bundle, "ort-layers", tmp_path / "out")
    assert "--placer one-session" in caught.value.hint


def compile_for(folder: Path, first: str, second: str):
    target = Target(tuple(Device(name, GIB) for name in sorted({"cpu:0", first, second})))
    return compile_with_map(parser.parse_model(CHAIN), folder, {"enc.*": first, "dec.*": second}, target).bundle


def test_a_provider_that_compiles_is_asked_after_the_cpu_whose_nodes_no_rule_names(tmp_path):
    bundle = compile_for(tmp_path / "b", "cpu:0", "qnn/npu:0")
    export_bundle(bundle, "ort-layers", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "session_options.json").read_text())
    assert written[LAYER] == "npu(=qnn/npu:0)"
    assert written["providers"] == [
        {"name": "CPUExecutionProvider", "options": {}},
        {
            "name": "QNNExecutionProvider",
            "options": {"backend_type": "htp"},
            "library": "qnn",
            "module": "onnxruntime_qnn",
            "type": "NPU",
        },
    ]
    device_map = str(tmp_path / "out" / "model.onnx")
    again = compile_with_map(parser.parse_model(CHAIN), tmp_path / "again", device_map, bundle.target)
    assert node_names(again.bundle) == node_names(bundle)


def test_tensorrt_brings_cuda_for_the_nodes_that_it_refuses(tmp_path):
    fast = Device("cuda:0", GIB, options={"provider": "tensorrt"})
    assert explain_conflict([fast, Device("cpu:0", GIB)]) == ""
    assert "of CUDAExecutionProvider" in explain_conflict([fast, Device("cuda:1", GIB)])
    names = [provider.name for provider in describe_providers([fast, Device("cpu:0", GIB)])]
    assert names == ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    assert (designate(fast), designate(Device("webgpu:0", GIB))) == (
        "TensorrtExecutionProvider",
        "WebGpuExecutionProvider",
    )


@pytest.mark.parametrize(
    ("word", "ids"),
    [
        ("cpu", "cpu:0"), ("CPU", "cpu:0"), ("gpu", "cuda:0 webgpu:0 openvino/igpu:0"), ("gpu:1", ""),
        ("gpu:nvidia", "cuda:0"), ("gpu:intel", "openvino/igpu:0"), ("gpu:amd", ""), ("gpu:other", ""),
        ("cuda", "cuda:0"), ("dml", ""), ("npu", "qnn/npu:0"), ("fpga", ""),
        ("accelerator", "cuda:0 webgpu:0 openvino/igpu:0 qnn/npu:0"),
        ("CPUExecutionProvider", "cpu:0"), ("cpuexecutionprovider", ""),
        ("OpenVINOExecutionProvider", "openvino/igpu:0"),
    ],
)  # fmt: skip
def test_words_mean_the_devices_that_onnx_runtime_gives_them_to(word, ids):
    names = ("cpu:0", "cuda:0", "webgpu:0", "openvino/igpu:0", "qnn/npu:0")
    assert [device.id for device in find_designated(word, [Device(name, GIB) for name in names])] == ids.split()


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("cpu:0", "openvino/npu:0", "openvino/npu:0 shares no session with cpu:0"),
        ("cuda:0", "qnn/npu:0", "qnn/npu:0 shares a session with the CPU only, not with cuda:0"),
    ],
)
def test_devices_that_share_no_session_are_refused_with_the_reason(first, second, reason, tmp_path):
    bundle = compile_for(tmp_path / "b", first, second)
    with pytest.raises(InputError, match=reason):
        export_bundle(bundle, "ort-layers", tmp_path / "out")


@settings(
    max_examples=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)  # fmt: skip
@given(random_models(), placements(), st.booleans())
def test_an_export_computes_the_same_as_the_model_in_every_split(
    model: RandomModel, placement: RandomPlacement, optimized: bool
):
    with exported_with(model, placement, "ort-layers", optimized=optimized) as (bundle, out, expected):
        assert_same(run_plain(out / "model.onnx", model.feeds), expected)
        layers = list_layers(onnx.load(out / "model.onnx").graph.node).values()
        assert set(layers) <= {segment.device for segment in bundle.manifest.segments} | {None}


LARGE = {"vgg19", "alexnet", "zfnet512", "gnmt"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in MODELS]
)
def test_onnx_runtime_opens_the_example_models_as_they_were_placed(name, tmp_path):
    """On the CPU alone; tests/webgpu and tests/openvino see the assignments to others."""
    model = MODELS[name].build()
    sizes = dict.fromkeys((dim.dim_param for item in model.graph.input for dim in item.type.tensor_type.shape.dim), 2)
    shape = DECODER_SHAPE if name == "decoder" else {key: size for key, size in sizes.items() if key}
    pipeline = "optimize,profile{estimate=true},coplace,one-session,split,emit"
    bundle = compile_model(model, tmp_path / "b", target=WITH_GPU, shape=shape, pipeline=pipeline).bundle
    exported = export_bundle(bundle, "ort-layers", tmp_path / "out")
    assert exported.diagnostics == ()
    feeds = draw_feeds(bundle)
    session = open_export(tmp_path / "out")
    groups = session.get_provider_graph_assignment_info()
    assert {group.ep_name for group in groups} == {"CPUExecutionProvider"}
    names = [item.name for item in session.get_outputs()]
    expected = run_file(bundle.file("segments/whole.onnx"), feeds)
    for value, result in zip(names, session.run(names, feeds)):
        np.testing.assert_allclose(result, expected[value], rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------- device maps


@pytest.mark.parametrize("source", ["model.onnx", "session_options.json"])
def test_an_export_is_a_device_map_for_its_origin(source, decoder_bundle, tmp_path):
    export_bundle(decoder_bundle, "ort-layers", tmp_path / "out")
    again = compile_with_map(
        onnx.load(decoder_bundle.path.parent / "model.onnx"), tmp_path / "again", str(tmp_path / "out" / source),
        decoder_bundle.target, shape=DECODER_SHAPE, state={"present.*": "past.*"},
    )  # fmt: skip
    assert node_names(again.bundle) == node_names(decoder_bundle)
    assert [note.code for note in again.diagnostics if note.code == "U025"] == ["U025"]


def annotate(model: onnx.ModelProto, layers: dict[str, str]) -> onnx.ModelProto:
    for node in model.graph.node:
        if node.name in layers:
            node.metadata_props.add(key="layer_ann", value=layers[node.name])
    return model


LAYERS = {"enc_a": "encoder.0", "enc_b": "encoder.1", "dec_a": "decoder"}


@pytest.mark.parametrize(
    ("given_settings", "expected"),
    [
        ({LAYER: "gpu(encoder);cpu(=decoder)"}, {"enc_a": "cuda:0", "enc_b": "cuda:0", "dec_a": "cpu:0"}),
        ({LAYER: "accelerator(=encoder.1); CPUExecutionProvider(encoder.0)"}, {"enc_b": "cuda:0", "enc_a": "cpu:0"}),
        ({LAYER: "cpu(=encoder.1);cuda(encoder)"}, {"enc_a": "cuda:0", "enc_b": "cuda:0"}),
        ({NAME: "CUDAExecutionProvider(enc,dec);cpu(dec_b)"}, {"enc_a": "cuda:0", "dec_a": "cuda:0", "dec_b": "cpu:0"}),
        ({NAME: "gpu:0(_a);gpu:nvidia(_b)"}, dict.fromkeys(("enc_a", "enc_b", "dec_a", "dec_b"), "cuda:0")),
    ],
)
def test_settings_of_onnx_runtime_pin_the_nodes_that_they_match(given_settings, expected, tmp_path):
    compiled = compile_with_map(annotate(parser.parse_model(CHAIN), LAYERS), tmp_path / "b", given_settings)
    placed = {name: device for device, names in node_names(compiled.bundle).items() for name in names}
    assert expected.items() <= placed.items()
    (note,) = [note for note in compiled.diagnostics if note.code == "U025"]
    count = 4 if NAME in given_settings else len(expected)
    assert f"pin {count} node" in note.message


def test_layers_without_settings_are_an_error_that_shows_them(tmp_path):
    onnx.save(annotate(parser.parse_model(CHAIN), LAYERS), tmp_path / "annotated.onnx")
    with pytest.raises(InputError, match="no settings next to it say on which devices") as caught:
        compile_with_map(parser.parse_model(CHAIN), tmp_path / "b", str(tmp_path / "annotated.onnx"))
    assert caught.value.code == "U023"
    (tmp_path / "session_options.json").write_text(json.dumps({LAYER: "gpu(encoder)"}))
    compiled = compile_with_map(parser.parse_model(CHAIN), tmp_path / "b", str(tmp_path / "annotated.onnx"))
    assert node_names(compiled.bundle)["cuda:0"] >= {"enc_a", "enc_b"}


@pytest.mark.parametrize(
    ("given_settings", "error", "message"),
    [
        ({LAYER: "npu(encoder)"}, TargetError, "no device 'npu' in this target, for 'encoder'"),
        ({LAYER: "gpu(encoder)"}, TargetError, "'gpu' is one of 'cuda:0', 'webgpu:0', for 'encoder'"),
        ({LAYER: "gpu(vision)"}, UsageError, "no node has a layer of these settings"),
        ({NAME: "gpu(vision)"}, UsageError, "no node has a name of these settings"),
        ({LAYER: "gpu(a)", NAME: "gpu(a)"}, InputError, "got both"),
        ({LAYER: ""}, InputError, "got neither"),
        ({NAME: "gpu(=enc_a)"}, InputError, "'=' is not allowed"),
    ],
)
def test_settings_that_do_not_fit_are_errors_that_say_why(given_settings, error, message, tmp_path):
    target = Target((Device("cpu:0", GIB), Device("cuda:0", GIB), Device("webgpu:0", GIB)))
    with pytest.raises(error, match=message):
        compile_with_map(annotate(parser.parse_model(CHAIN), LAYERS), tmp_path / "b", given_settings, target)


def test_the_command_reads_a_setting_and_says_what_it_pinned(run_cli, tmp_path):
    onnx.save(parser.parse_model(CHAIN), tmp_path / "model.onnx")
    (tmp_path / "map.json").write_text(json.dumps({NAME: "cpu(enc,dec)"}))
    result = run_cli(
        "compile", tmp_path / "model.onnx", "-o", tmp_path / "b", "--devices", "cpu:0", "--no-trial",
        "--device-map", tmp_path / "map.json", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    messages = [note["message"] for note in only_json(result)["diagnostics"]]
    assert "names pin 4 nodes of 4; the others are free" in messages


def test_the_commands_place_export_and_place_again(run_cli, tmp_path):
    onnx.save(parser.parse_model(CHAIN), tmp_path / "model.onnx")
    arguments = ("compile", tmp_path / "model.onnx", "--devices", "cpu:0,cpu:1", "--no-trial", "--json")
    placed = run_cli(*arguments, "-o", tmp_path / "b", "--placer", "one-session")
    assert placed.code == 0, placed.err
    messages = [note["message"] for note in only_json(placed)["diagnostics"] if note["code"] == "P021"]
    assert [message.endswith("no other placement is faster") for message in messages] == [True]
    exported = run_cli("export", tmp_path / "b", "--to", "ort-layers", "-o", tmp_path / "layers")
    assert (exported.code, exported.out) == (
        0,
        f"{tmp_path / 'layers'}: model.onnx, session.py, session_options.json\n",
    )
    again = run_cli(*arguments, "-o", tmp_path / "c", "--device-map", tmp_path / "layers" / "model.onnx")
    assert again.code == 0, again.err
    assert node_names(Bundle.open(tmp_path / "b")) == node_names(Bundle.open(tmp_path / "c"))


@settings(max_examples=300)
@given(st.text("ab(),;= ", max_size=14), st.booleans())
def test_settings_are_read_where_onnx_runtime_reads_them(text, by_name):
    model = parser.parse_model(CHAIN).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(NAME if by_name else LAYER, text)

    def refuses(function) -> bool:
        try:
            function()
        except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
            return True
        return False

    expected = refuses(lambda: onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]))
    assert refuses(lambda: parse_rules(text, by_name=by_name)) == expected


def test_prefixes_come_before_whole_layers_and_long_parts_of_names_before_short_ones():
    rules = parse_rules("cpu(=ab, a); gpu(ab)")
    assert [match_layer(rules, layer) and match_layer(rules, layer).pattern for layer in ("ab", "abc", "b")] == [
        "a", "a", None
    ]  # fmt: skip
    rules = parse_rules("cpu(b, a); gpu(ab)", by_name=True)
    found = [match_name(rules, name) for name in ("ab", "ba", "c")]
    assert [rule and rule.pattern for rule in found] == ["ab", "b", None]
