"""Arguments of ONNX Runtime's constructor: what has no effect on a bundle is said."""

import os
import re
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import onnxplace
from onnxplace.session.session_arguments import accept_arguments, list_providers


def open_with(compiled, **arguments):
    with onnxplace.InferenceSession(compiled, **arguments) as session:
        return session.ignored_options


def make_options(**values):
    options = onnxruntime.SessionOptions()
    for name, value in values.items():
        setattr(options, name, value)
    return options


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"providers": ["CPUExecutionProvider"], "provider_options": [{}], "enable_fallback": 0},
        {"providers": [("CPUExecutionProvider", {})], "sess_options": make_options(log_severity_level=3, logid="me")},
        {"providers": ["CPUExecutionProvider", "CUDAExecutionProvider"]},
        {"disabled_optimizers": None, "read_config_from_model": 0},
    ],
)
def test_arguments_that_agree_with_the_bundle_bring_no_warning(compiled, arguments):
    assert open_with(compiled, **arguments) == ()  # and warnings are errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sess_options": make_options(intra_op_num_threads=3)}, "sess_options.intra_op_num_threads"),
        (
            {"sess_options": make_options(graph_optimization_level=onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)},
            "sess_options.graph_optimization_level",
        ),
        (
            {"providers": ["CUDAExecutionProvider", "CPUExecutionProvider"]},
            "providers=['CUDAExecutionProvider', 'CPUExecutionProvider'] (this bundle runs on CPUExecutionProvider)",
        ),
        (
            {"providers": [("CPUExecutionProvider", {"use_arena": "0"})]},
            "provider_options of CPUExecutionProvider",
        ),
        ({"provider_options": [{"use_arena": "0"}]}, "provider_options without providers"),
        ({"disabled_optimizers": ["ConstantFolding"]}, "disabled_optimizers=['ConstantFolding']"),
    ],
)
def test_arguments_without_an_effect_are_said_in_one_warning_and_listed(compiled, arguments, words):
    with pytest.warns(UserWarning, match=r"note\[U087\]: no effect on a bundle") as caught:
        ignored = open_with(compiled, **arguments)
    assert ignored == (words,)
    (warning,) = caught
    assert words in str(warning.message)
    assert warning.filename == __file__, "it points at the call"


@pytest.mark.parametrize("method", ["add_initializer", "add_external_initializers"])
def test_weights_in_session_options_are_said_to_have_no_effect(compiled, method, tmp_path, monkeypatch, capfd):
    """ONNX Runtime does not let anybody read them."""
    monkeypatch.chdir(tmp_path)
    weight = onnx.load(compiled / "segments/whole.onnx", load_external_data=False).graph.initializer[0]
    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(weight.dims, helper.tensor_dtype_to_np_dtype(1)))
    options = make_options(enable_profiling=True, log_severity_level=0)
    if method == "add_initializer":
        options.add_initializer(weight.name, value)
    else:
        options.add_external_initializers([weight.name], [value])
    with pytest.warns(UserWarning, match=r"U087.*the initializers of sess_options"):
        assert open_with(compiled, sess_options=options) == ("the initializers of sess_options",)
    assert (options.enable_profiling, options.log_severity_level) == (True, 0)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err == ""


def test_a_variable_that_replaces_session_options_has_no_effect(model_file, tmp_path, monkeypatch):
    """ONNX Runtime would drop the threads, and the profiler that measures the costs."""
    monkeypatch.setenv("ORT_LOAD_CONFIG_FROM_MODEL", "1")
    onnxplace.compile(model_file, tmp_path / "b", shape={"batch": 4}, devices="cpu:0", cache=False, trial=False)
    assert os.environ["ORT_LOAD_CONFIG_FROM_MODEL"] == "1"


def test_a_global_pool_of_threads_is_named(compiled, model_file):
    """Nothing undoes the call, so that it has a process of its own."""
    script = f"""
import onnxplace, onnxruntime
onnxruntime.set_global_thread_pool_sizes(1, 1)
for use in (
    lambda: onnxplace.InferenceSession({str(compiled)!r}),
    lambda: onnxplace.compile({str(model_file)!r}, "b", shape=dict(batch=4)),
):
    try:
        use()
    except onnxplace.UsageError as error:
        print(error.code, error.message)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (
        done.stdout.splitlines()
        == ["U088 onnxruntime.set_global_thread_pool_sizes was called, so that no session may have threads of its own"]
        * 2
    ), done.stderr


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"sess_options": 5}, TypeError, "expected onnxruntime.SessionOptions, got 5"),
        ({"providers": "CPUExecutionProvider"}, ValueError, "expected a list such as ['CPUExecutionProvider']"),
        ({"providers": [5]}, ValueError, "expected names of providers"),
        ({"providers": ["A"], "provider_options": []}, ValueError, "expected as many provider_options as providers"),
        ({"provider": ["A"]}, TypeError, "did you mean 'providers'?"),
        ({"bacthing": None}, TypeError, "did you mean 'batching'?"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused(compiled, arguments, kind, words):
    with pytest.raises(onnxplace.UsageError, match="U054") as refused:
        onnxplace.InferenceSession(compiled, **arguments)
    assert isinstance(refused.value, kind)
    assert words in str(refused.value)


def test_the_file_of_a_model_is_refused_with_the_command_that_compiles_it(model_file, compiled, run_cli):
    with pytest.raises(onnxplace.BundleError, match=r"onnxplace compile .*model\.onnx -o .*model\.bundle"):
        onnxplace.InferenceSession(model_file)
    assert "onnxplace compile" in run_cli("run", model_file).err
    model_file.with_suffix(".bundle").symlink_to(compiled)
    with pytest.raises(onnxplace.BundleError, match=r"model\.bundle is one"):
        onnxplace.InferenceSession(str(model_file))
    assert re.search(r"model\.bundle is one", run_cli("run", model_file).err)


def test_the_bytes_of_a_model_are_refused_with_the_call_that_compiles_it(branches_bytes):
    with pytest.raises(onnxplace.BundleError, match=r"onnx\.load_from_string"):
        onnxplace.InferenceSession(branches_bytes)


def test_the_first_argument_has_the_name_that_onnx_runtime_gives_it(compiled):
    with onnxplace.InferenceSession(path_or_bytes=str(compiled), sess_options=None) as session:
        assert session.bundle.path == compiled
        assert isinstance(session.get_session_options(), onnxruntime.SessionOptions)


def test_metadata_of_the_model_survives_the_compile(compiled, model_file):
    with onnxplace.InferenceSession(compiled) as session:
        assert session.get_modelmeta().graph_name == onnx.load(model_file).graph.name


def test_a_bundle_for_gpus_has_their_provider_and_lists_their_numbers(bundle_copy):
    manifest = bundle_copy / "manifest.json"
    manifest.write_text(re.sub(r"\bcpu(:[01]\b)", r"cuda\1", manifest.read_text()))
    bundle = onnxplace.load(bundle_copy)
    providers = list_providers(bundle)
    assert list(providers) == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert providers["CUDAExecutionProvider"]["device_id"] == "0,1"
    preferred = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    arguments = accept_arguments(bundle, None, preferred, None, {}, onnxplace.InferenceSession)
    assert arguments.ignored == ()
    for others in (["CPUExecutionProvider"], preferred[::-1]):
        with pytest.warns(UserWarning, match="this bundle runs on CUDAExecutionProvider, CPUExecutionProvider"):
            accept_arguments(bundle, None, others, None, {}, onnxplace.InferenceSession)
