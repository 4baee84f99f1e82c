"""`export --to ort-genai`: ONNX Runtime GenAI generates the same tokens with the stages as with the whole model."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import SizeRecord
from onnxplace.driver.compile import compile_model
from onnxplace.driver.join_plans import join_plans
from onnxplace.export.exporting import ExportOptions, export_bundle
from onnxplace.export.segment_models import BundleModels
from onnxplace.target.plugin_providers import LoadedProvider
from onnxplace.target.target import Device, Target
from onnxplace_formats import ort_genai
from onnxplace_formats.ort_genai import Phase, choose_phase_plans, describe_providers, require_open_sizes
from tests.support.chains import mlp

TOKENS = [3, 1, 4, 1, 5]
CONFIG = {
    "model": {
        "bos_token_id": 0,
        "eos_token_id": 39,
        "pad_token_id": 39,
        "vocab_size": 40,
        "context_length": 64,
        "type": "gpt2",
        "decoder": {
            "filename": "model.onnx",
            "session_options": {"provider_options": []},
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "num_attention_heads": 2,
            "head_size": 16,
            "hidden_size": 32,
            "inputs": {"input_ids": "tokens", "past_key_names": "past.%d.key", "past_value_names": "past.%d.value"},
            "outputs": {"logits": "logits"},
        },
    },
    "search": {"max_length": 16, "past_present_share_buffer": False},
}


def write_config(folder: Path, **changes: object) -> Path:
    config = json.loads(json.dumps(CONFIG))
    config["model"]["decoder"].update(changes)
    (folder / "genai_config.json").write_text(json.dumps(config))
    return folder / "genai_config.json"


def generate(folder: Path) -> tuple[list[int], list[np.ndarray]]:
    """Return the tokens that follow, and the logits of each step."""
    onnxruntime_genai = pytest.importorskip("onnxruntime_genai")
    model = onnxruntime_genai.Model(str(folder))
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=12, do_sample=False)
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(np.array([TOKENS], np.int32))
    logits = []
    while not generator.is_done():
        generator.generate_next_token()
        logits.append(np.array(generator.get_output("logits")))
    return generator.get_sequence(0).tolist(), logits


def greedy_tokens(bundle: Bundle, count: int) -> list[int]:
    """Return what onnxplace generates, the largest logit at a time."""
    tokens = list(TOKENS)
    with onnxplace.InferenceSession(bundle) as session:
        feeds = {"tokens": np.array([tokens]), **bundle.zero_states(batch=1, past=0)}
        while len(tokens) < count and tokens[-1] != 39:
            (logits,) = session.run(["logits"], feeds)
            tokens.append(int(logits[0, -1].argmax()))
            feeds = {"tokens": np.array([tokens[-1:]])}
    return tokens


def test_genai_generates_what_onnxplace_generates(decoder_bundle, tmp_path, run_cli):
    config = write_config(tmp_path)
    options = ("--to", "ort-genai", "--config", config, "-o", tmp_path / "out")
    assert run_cli("export", decoder_bundle.path, *options).code == 0
    written = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert written["model"]["type"] == "decoder-pipeline"
    assert written["model"]["eos_token_id"] == 39
    assert "filename" not in written["model"]["decoder"]
    stages = [name for entry in written["model"]["decoder"]["pipeline"] for name in entry]
    assert {name[:4] for name in stages} == {"cpu0", "cpu1"}
    tokens, _ = generate(tmp_path / "out")
    assert len(tokens) > len(TOKENS)
    assert tokens == greedy_tokens(decoder_bundle, len(tokens))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": {"input_ids": "ids"}}, ("does not feed the inputs 'tokens', 'past.0.key'", "%d for the layer")),
        ({"outputs": {"logits": "scores"}}, ("reads the outputs 'scores'",)),
        ({"num_hidden_layers": 0}, ("num_hidden_layers is 0, expected 1 to 10000",)),
        ({"num_hidden_layers": 10**11}, ("num_hidden_layers is 100000000000, expected 1 to 10000",)),
        ({"num_hidden_layers": 1}, ("does not feed the inputs 'past.1.key', 'past.1.value'",)),
        ({"inputs": None}, ("expected names of tensors in model.decoder.inputs, got None", "write it like")),
        ({"outputs": ["logits"]}, ("expected names of tensors in model.decoder.outputs, got ['logits']",)),
    ],
)
def test_names_that_do_not_fit_are_listed(changes, words, decoder_bundle, tmp_path):
    options = ExportOptions(config=write_config(tmp_path, **changes))
    with pytest.raises(onnxplace.InputError, match="I018") as refused:
        export_bundle(decoder_bundle, "ort-genai", tmp_path / "out", options=options)
    assert [word for word in words if word not in str(refused.value)] == []


def test_outputs_that_are_no_cache_need_no_input(decoder_bundle, tmp_path):
    """As the model builder writes them for models with further outputs, or with an encoder."""
    outputs = {"logits": "logits", "hidden_states": "h", "cross_present_key_names": "cross.%d.key"}
    options = ExportOptions(config=write_config(tmp_path, outputs=outputs))
    assert "genai_config.json" in export_bundle(decoder_bundle, "ort-genai", tmp_path / "out", options=options).files


def test_other_bundles_and_files_are_refused(decoder_bundle, tmp_path, run_cli):
    missing = run_cli("export", decoder_bundle.path, "--to", "ort-genai", "-o", tmp_path / "out")
    assert missing.code == 2
    assert "error[I018] --config: expected the configuration of the whole model" in missing.err
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(onnxplace.InputError, match=r"I018.*not a genai_config\.json"):
        export_bundle(
            decoder_bundle, "ort-genai", tmp_path / "out", options=ExportOptions(config=tmp_path / "list.json")
        )
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    bundle = compile_model(
        tmp_path / "mlp.onnx", tmp_path / "mlp", devices="cpu:0",
        pipeline="profile{estimate=true},coplace,single,split,emit",
    ).bundle  # fmt: skip
    with pytest.raises(onnxplace.InputError, match=r"I018.*does not feed the inputs 'x'"):
        export_bundle(bundle, "ort-genai", tmp_path / "out", options=ExportOptions(config=write_config(tmp_path)))


def test_layers_on_two_gpus_are_refused(tmp_path):
    from decoder import decoder

    target = Target(tuple(Device(name, 1 << 30) for name in ("cuda:0", "cuda:1")))
    device_map = json.dumps(json.dumps({"decoder/block_1/.*|decoder/final.*|logits": "cuda:1", ".*": "cuda:0"}))
    bundle = compile_model(
        decoder(layers=2, hidden=32, heads=2, vocab=40, positions=64), tmp_path / "bundle", target=target,
        shape={"batch": 1, "seq": 3, "past": 5},
        pipeline=f"optimize,profile{{estimate=true}},coplace{{device_map={device_map}}},m-etf,split,emit",
    ).bundle  # fmt: skip
    with pytest.raises(onnxplace.InputError, match=r"I018.*cache on one GPU, or in.*'cuda:0', 'cuda:1'"):
        export_bundle(bundle, "ort-genai", tmp_path / "out", options=ExportOptions(config=write_config(tmp_path)))


# ------------------------------------------------------------------------------------------------ prompts and tokens


TOKEN = SizeRecord(dimensions={"batch": 1, "seq": 1, "past": 8}, seconds=(1.0, 2.0), weight=100)
PROMPT = SizeRecord(dimensions={"batch": 1, "seq": 8, "past": 0}, seconds=(8.0, 5.0), weight=1)
BETWEEN = SizeRecord(dimensions={"batch": 1, "seq": 2, "past": 3}, seconds=(0.1, 9.0))
TWO_STAGES = {"decoder/block_0/.*|embedding/.*|mask/.*": 0, "decoder/block_1/.*|decoder/final.*|logits": 1}


def compile_decoder(path: Path, *devices: str) -> Bundle:
    """Return a decoder whose first layer is on the first device, and whose second one is on the last."""
    from decoder import decoder

    device_map = json.dumps(json.dumps({pattern: devices[-place] for pattern, place in TWO_STAGES.items()}))
    return compile_model(
        decoder(layers=2, hidden=32, heads=2, vocab=40, positions=64), path,
        target=Target(tuple(Device(name, 1 << 30, cores=1) for name in dict.fromkeys(devices))),
        shape={"batch": 1, "seq": 3, "past": 5}, state={"present.*": "past.*"},
        pipeline=f"optimize,profile{{estimate=true}},coplace{{device_map={device_map}}},m-etf,split,emit", trial=False,
    ).bundle  # fmt: skip


def compile_phases(folder: Path, tokens: tuple[str, ...], prompts: tuple[str, ...]) -> Bundle:
    """Return a bundle whose main plan is for tokens, and whose further one is for prompts."""
    bundles = [compile_decoder(folder / "bundle", *tokens), compile_decoder(folder / "other", *prompts)]
    return join_plans(bundles, {}, [TOKEN, PROMPT, BETWEEN])


def export_phases(bundle: Bundle, folder: Path) -> dict[str, dict[str, object]]:
    """Return the stages by name."""
    options = ExportOptions(config=write_config(folder))
    export_bundle(bundle, "ort-genai", folder / "out", options=options)
    decoder = json.loads((folder / "out" / "genai_config.json").read_text())["model"]["decoder"]
    return {"": decoder, **{name: stage for entry in decoder["pipeline"] for name, stage in entry.items()}}


def test_prompts_and_tokens_run_the_stages_of_their_plans(tmp_path):
    bundle = compile_phases(tmp_path, ("cpu:0",), ("cpu:0", "cpu:1"))
    stages = export_phases(bundle, tmp_path)
    del stages[""]
    assert {(name[:-4], stage["run_on_prompt"], stage["run_on_token_gen"]) for name, stage in stages.items()} == {
        ("prompt-cpu0", True, False),
        ("prompt-cpu1", True, False),
        ("token-cpu0", False, True),
    }
    weights = (tmp_path / "out" / "weights.bin").stat().st_size
    assert weights <= (bundle.path / "segments" / "weights.bin").stat().st_size, "each weight is there once"
    tokens, _ = generate(tmp_path / "out")
    assert len(tokens) > len(TOKENS)
    assert tokens == greedy_tokens(bundle, len(tokens))


def test_prompts_on_another_device_share_the_cache_in_the_memory_of_the_host(tmp_path):
    stages = export_phases(compile_phases(tmp_path, ("cpu:0",), ("cuda:0",)), tmp_path)
    assert stages[""]["session_options"] == {"provider_options": []}, "where GenAI keeps the cache"
    cuda = {"device_id": "0", "use_tf32": "0"}
    assert stages["prompt-cuda0-000"]["session_options"] == {"provider_options": [{"cuda": cuda}]}
    assert stages["token-cpu0-000"]["session_options"] == {"provider_options": [], "intra_op_num_threads": 1}


def test_a_cache_on_a_gpu_needs_both_phases_there(tmp_path):
    bundle = compile_phases(tmp_path, ("cuda:0",), ("cpu:0",))
    with pytest.raises(onnxplace.InputError, match=r"I018.*cache on cuda:0, where tokens run.*prompts use 'cpu:0'"):
        export_phases(bundle, tmp_path)
    stages = export_phases(Bundle.open(bundle.path / "plan1"), tmp_path)
    assert [name for name in stages if name] == ["cpu0-000"], "a plan is a bundle of its own"


def list_prompt_options(bundle: Bundle, folder: Path) -> dict[str, object]:
    """Return the session options of the one stage for prompts."""
    stages = export_phases(bundle, folder)
    (prompt,) = [stage for name, stage in stages.items() if name.startswith("prompt-")]
    return prompt["session_options"]


GPU_ENTRIES = '{"GPU": {"INFERENCE_PRECISION_HINT": "f32"}}'


@pytest.mark.parametrize(
    ("device", "provider"),
    [
        ("openvino/npu:0", {"OpenVINO": {"device_type": "NPU"}}),
        ("openvino/gpu:1", {"OpenVINO": {"device_type": "GPU.1", "load_config": GPU_ENTRIES}}),
        ("vitisai/npu:0", {"VitisAI": {"device_filtering_options": {"hardware_device_type": "NPU"}}}),
        ("webgpu:0", {"WebGPU": {}}),
        ("webgpu/gpu:0", {"WebGPU": {"device_filtering_options": {"hardware_device_type": "GPU"}}}),
        ("directml/gpu:0", {"DML": {"device_index": "0"}}),
    ],
)
def test_providers_have_the_names_and_options_of_genai(device, provider, tmp_path, monkeypatch):
    monkeypatch.setattr(ort_genai, "has_library", lambda _: False)
    assert list_prompt_options(compile_phases(tmp_path, ("cpu:0",), (device,)), tmp_path) == {
        "provider_options": [provider]
    }


def test_options_that_the_user_gives_a_device_are_those_of_its_stage():
    device = Device("openvino/npu:0", 1 << 30, options={"option.cache_dir": "blobs"})
    assert describe_providers(device) == [{"OpenVINO": {"device_type": "NPU", "cache_dir": "blobs"}}]


class Listed(SimpleNamespace):
    """What ONNX Runtime lists of a provider: a device with its PCI numbers, and OpenVINO's name of it."""

    @classmethod
    def of(cls, number: int, name: str = "", kind: str = "NPU") -> "Listed":
        hardware = SimpleNamespace(device_id=number, vendor_id=7, type=SimpleNamespace(name=kind))
        return cls(device=hardware, ep_metadata={"ov_device": name} if name else {})


def list_here(monkeypatch, kind: str, *devices: Listed) -> None:
    """Let the provider of every family list devices of one type."""
    monkeypatch.setattr(ort_genai, "has_library", lambda _: True)
    monkeypatch.setattr(ort_genai, "load_provider", lambda _: LoadedProvider({kind: devices}))


def describe(device: str) -> dict[str, object]:
    """Return the options of the provider of a device."""
    ((options,),) = [list(item.values()) for item in describe_providers(Device(device, 1 << 30))]
    return options


def test_openvino_is_told_its_own_name_of_a_device_that_is_here(monkeypatch):
    list_here(monkeypatch, "gpu", Listed.of(1, "GPU.1"), Listed.of(2, "GPU.2"))
    assert [describe(f"openvino/gpu:{index}")["device_type"] for index in (0, 1, 2)] == ["GPU.1", "GPU.2", "GPU.2"]
    list_here(monkeypatch, "igpu", Listed.of(3, "GPU.0"))
    assert describe("openvino/igpu:0")["device_type"] == "GPU.0"


def test_one_device_is_found_by_its_type_and_one_of_several_by_its_numbers(monkeypatch):
    list_here(monkeypatch, "npu", Listed.of(5))
    assert describe("qnn/npu:0")["device_filtering_options"] == {"hardware_device_type": "NPU"}
    list_here(monkeypatch, "npu", Listed.of(5), Listed.of(6))
    assert describe("qnn/npu:1")["device_filtering_options"] == {
        "hardware_device_type": "NPU",
        "hardware_device_id": 6,
        "hardware_vendor_id": 7,
    }


def test_a_device_that_genai_cannot_tell_from_another_is_refused(monkeypatch):
    list_here(monkeypatch, "npu", Listed.of(5), Listed.of(5))
    with pytest.raises(onnxplace.InputError, match=r"I018.*qnn/npu:1 by its PCI number alone.*another device"):
        describe("qnn/npu:1")
    list_here(monkeypatch, "npu")
    with pytest.raises(onnxplace.InputError, match=r"I018.*unknown where its provider does not list it"):
        describe("qnn/npu:1")


def test_providers_without_a_name_in_genai_are_refused(tmp_path):
    bundle = compile_phases(tmp_path, ("cpu:0",), ("migraphx/gpu:0",))
    with pytest.raises(onnxplace.InputError, match=r"I018.*provider of migraphx/gpu:0"):
        export_phases(bundle, tmp_path)


def test_two_adapters_of_directml_are_refused(tmp_path):
    bundle = compile_phases(tmp_path, ("cpu:0",), ("directml/gpu:0", "directml/gpu:1"))
    with pytest.raises(
        onnxplace.InputError, match=r"I018.*one adapter by DirectML.*'directml/gpu:0', 'directml/gpu:1'"
    ):
        export_phases(bundle, tmp_path)


def test_a_cache_in_the_memory_of_the_host_goes_to_any_device_at_each_token_with_a_note(tmp_path):
    bundle = compile_decoder(tmp_path / "bundle", "openvino/npu:0", "cpu:0")
    options = ExportOptions(config=write_config(tmp_path))
    (note,) = export_bundle(bundle, "ort-genai", tmp_path / "out", options=options).diagnostics
    assert (note.code, note.where) == ("I001", "openvino/npu:0")
    assert "each token copies it" in note.message
    decoder = json.loads((tmp_path / "out" / "genai_config.json").read_text())["model"]["decoder"]
    assert decoder["session_options"] == {"provider_options": []}


def test_providers_of_fixed_sizes_get_a_note(tmp_path):
    options = ExportOptions(config=write_config(tmp_path))
    bundle = compile_phases(tmp_path, ("cpu:0",), ("qnn/npu:0",))
    (note,) = export_bundle(bundle, "ort-genai", tmp_path / "out", options=options).diagnostics
    assert (note.code, note.where) == ("I001", "qnn/npu:0")
    assert "nodes of fixed sizes only" in note.message


@pytest.mark.parametrize(("shares", "past", "is_refused"), [(False, 5, True), (True, 5, False), (True, None, True)])
def test_fixed_sizes_are_refused_unless_the_cache_is_allocated_once(shares, past, is_refused, tmp_path):
    """A plan for tokens alone may have them; prompts have any length."""
    tokens, prompts = compile_decoder(tmp_path / "bundle", "cpu:0"), compile_decoder(tmp_path / "other", "cpu:0")
    fixed = {
        "tokens": [1, 1],
        **{f"past.{layer}.{kind}": [1, 2, 5, 16] for layer in (0, 1) for kind in ("key", "value")},
    }
    if past is None:
        fixed["tokens"] = [1, 3]
    inputs = [
        item.model_copy(update={"shape": tuple(fixed.get(item.name, item.shape))}) for item in tokens.manifest.inputs
    ]
    replaced = tokens.manifest.model_copy(update={"inputs": tuple(inputs)})
    phases = [
        Phase(BundleModels(prompts), 1, runs_tokens=False),
        Phase(BundleModels(Bundle(tokens.path, replaced)), 0, runs_prompts=False),
    ]
    config = json.loads(json.dumps(CONFIG)) | {"search": {"past_present_share_buffer": shares}}
    if not is_refused:
        require_open_sizes(phases, config)
        return
    with pytest.raises(onnxplace.InputError, match=r"I018.*fixed sizes.*GenAI feeds others"):
        require_open_sizes(phases, config)


def test_a_bundle_of_fixed_sizes_is_refused(tmp_path):
    from decoder import decoder

    bundle = compile_model(
        decoder(layers=2, hidden=32, heads=2, vocab=40, positions=64), tmp_path / "bundle", devices="cpu:0",
        shape={"batch": 1, "seq": 3, "past": 5}, trial=False,
        pipeline="optimize{fixed_sizes=true},profile{estimate=true},coplace,single,split,emit",
    ).bundle  # fmt: skip
    with pytest.raises(onnxplace.InputError, match=r"I018.*'tokens' has the fixed sizes \[1, 3\]") as refused:
        export_phases(bundle, tmp_path)
    assert "without `fixed_sizes`" in str(refused.value)


# What an ordinary program does with an export: its provider's library is registered with GenAI, not with onnxplace.
GENERATE = """
import json, sys
import numpy as np, onnxruntime_genai
import {module}
onnxruntime_genai.register_execution_provider_library({module}.get_ep_name(), {module}.get_library_path())
model = onnxruntime_genai.Model(sys.argv[1])
parameters = onnxruntime_genai.GeneratorParams(model)
parameters.set_search_options(max_length=12, do_sample=False)
generator = onnxruntime_genai.Generator(model, parameters)
generator.append_tokens(np.array([json.loads(sys.argv[2])], np.int32))
while not generator.is_done():
    generator.generate_next_token()
print(json.dumps(generator.get_sequence(0).tolist()))
"""


@pytest.mark.parametrize("phase", ["prompts", "tokens", "both"])
@pytest.mark.parametrize(
    ("device", "module"), [("openvino/cpu:0", "onnxruntime_ep_openvino"), ("qnn/npu:0", "onnxruntime_qnn")]
)
def test_genai_generates_the_same_with_stages_of_provider_packages(device, module, phase, tmp_path):
    """OpenVINO's kernels on this processor, and QNN's simulator; `.ci/genai` installs both."""
    pytest.importorskip("onnxruntime_genai")
    pytest.importorskip(module)
    places = {"prompts": [("cpu:0",), (device,)], "tokens": [(device,), ("cpu:0",)], "both": [(device,), (device,)]}
    stages = export_phases(compile_phases(tmp_path, *places[phase]), tmp_path)
    assert [True for stage in stages.values() if stage["session_options"]["provider_options"]]
    command = [sys.executable, "-c", GENERATE.format(module=module), str(tmp_path / "out"), json.dumps(TOKENS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    tokens = json.loads(ended.stdout.splitlines()[-1])
    assert len(tokens) > len(TOKENS)
    assert tokens == greedy_tokens(compile_decoder(tmp_path / "plain", "cpu:0"), len(tokens))


def test_plans_for_neither_prompts_nor_tokens_are_left_out_with_a_note(tmp_path):
    """A bundle that was compiled for prompts of several sequences, too."""
    batch = SizeRecord(dimensions={"batch": 8, "seq": 8, "past": 0}, seconds=(9.0, 9.0, 8.9), weight=0.01)
    sizes = [item.model_copy(update={"seconds": (*item.seconds, 50.0)}) for item in (TOKEN, PROMPT)]
    bundles = [compile_decoder(tmp_path / name, "cpu:0") for name in ("bundle", "1", "2")]
    bundle = join_plans(bundles, {}, [*sizes, batch])
    options = ExportOptions(config=write_config(tmp_path))
    (note,) = export_bundle(bundle, "ort-genai", tmp_path / "out", options=options).diagnostics
    assert (note.code, note.where) == ("I001", "plan2")
    assert "1 plan for other sizes left out" in note.message


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([TOKEN, PROMPT], (1, 0)),
        ([TOKEN, PROMPT, BETWEEN], (1, 0)),
        ([TOKEN], (0, 0)),
        ([PROMPT], (1, 1)),
        ([TOKEN.model_copy(update={"seconds": (None, 2.0)}), PROMPT], (1, 1)),
        ([], (0, 0)),
    ],
)
def test_each_phase_takes_the_plan_that_is_fastest_at_its_sizes(sizes, expected, decoder_bundle):
    plans = ("plan1",) if sizes else ()
    manifest = decoder_bundle.manifest.model_copy(update={"sizes": tuple(sizes), "plans": plans})
    assert choose_phase_plans(manifest, "tokens") == expected
