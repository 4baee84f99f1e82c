"""Options of a device: threads, precision, and those of the provider as they are."""

import json

import pytest

import onnxplace
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.kind_table import find_kind
from tests.conftest import FAST_PIPELINE
from tests.openvino.devices import OPENVINO

CONFIGURATION = {"CPU": {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1", "NUM_STREAMS": "0"}}


def compile_for(run_cli, model_file, folder, device):
    arguments = ("--shape", "batch=4", "--pipeline", FAST_PIPELINE, "--devices", device)
    return run_cli("compile", model_file, "-o", folder / "bundle", *arguments)


@pytest.mark.parametrize(
    "options",
    [{"threads": "1"}, {"option.load_config": json.dumps(CONFIGURATION)}],
    ids=["threads", "load_config"],
)
def test_options_are_in_the_manifest_and_results_are_right(run_cli, model_file, tmp_path, options):
    text = ",".join(f"{name}={value}" for name, value in options.items())
    compiled = compile_for(run_cli, model_file, tmp_path, f"{OPENVINO}{{{text}}}")
    assert compiled.code == 0, compiled.err
    (device,) = onnxplace.load(tmp_path / "bundle").target.devices
    assert device.options == options
    verified = run_cli("verify", tmp_path / "bundle")
    assert verified.code == 0, verified.err


def test_a_target_file_has_options_as_a_table(run_cli, model_file, tmp_path):
    target = tmp_path / "target.toml"
    options = f'threads = "1"\n"option.load_config" = \'{json.dumps(CONFIGURATION)}\''
    target.write_text(f'[[devices]]\nid = "{OPENVINO}"\nmemory_bytes = 1e9\n[devices.options]\n{options}\n')
    arguments = ("--target", target, "--shape", "batch=4", "--pipeline", FAST_PIPELINE)
    compiled = run_cli("compile", model_file, "-o", tmp_path / "bundle", *arguments)
    assert compiled.code == 0, compiled.err
    (device,) = onnxplace.load(tmp_path / "bundle").target.devices
    assert json.loads(device.options["option.load_config"]) == CONFIGURATION


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("threads=0", "expected a number of 1 to 65536 threads, got '0'"),
        ("precision=float16", "expected one of float32, bfloat16 for precision, got 'float16'"),
        ("nonsense=1", "has no option 'nonsense'"),
        ("option.load_config=no JSON", "JSON parsing error"),
        ('option.load_config={"CPU": {"NONSENSE": "1"}}', "Unsupported property NONSENSE by CPU plugin"),
    ],
)
def test_a_wrong_option_is_refused_with_what_is_wrong(run_cli, model_file, tmp_path, options, words):
    refused = compile_for(run_cli, model_file, tmp_path, f"{OPENVINO}{{{options}}}")
    assert refused.code == 2
    (line,) = [line for line in refused.err.splitlines() if line.startswith("error[T")]
    assert OPENVINO in line
    assert words in line


def test_a_session_has_the_threads_of_its_device():
    kind, address = find_kind("openvino/cpu"), DeviceAddress("openvino/cpu", 0, cores=1)
    ((_, options),) = kind.list_providers(address)
    assert json.loads(options["load_config"]) == CONFIGURATION
