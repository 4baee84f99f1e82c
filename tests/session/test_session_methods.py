"""Methods of ONNX Runtime's session that mean something else for a bundle, or nothing."""

import copy
import inspect
import json
import pickle
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import onnxplace
from onnxplace.session.io_binding import IOBinding
from tests.support import endless

PAGE = (Path(__file__).parents[2] / "docs/drop-in.md").read_text(encoding="utf-8")
X = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
FEEDS = {"x": X}


def list_public(kind):
    return {name: item for name, item in inspect.getmembers(kind, callable) if not name.startswith("_")}


def read_section(title):
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def session(compiled):
    with onnxplace.InferenceSession(compiled) as opened:
        yield opened


def test_the_documentation_lists_every_method_of_the_session_of_onnx_runtime():
    listed = re.findall(r"^\| `(\w+)` \| (?:same|note|error) \|", read_section("Methods"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(list_public(onnxruntime.InferenceSession)) <= set(listed) <= set(list_public(onnxplace.InferenceSession))
    methods = set(list_public(onnxruntime.IOBinding))
    assert methods <= set(re.findall(r"`(\w+)`", read_section("Bound inputs and outputs")))
    assert methods <= set(list_public(IOBinding))


@pytest.mark.parametrize(
    ("own", "other"),
    [(onnxplace.InferenceSession, onnxruntime.InferenceSession), (IOBinding, onnxruntime.IOBinding)],
)
def test_methods_take_the_arguments_of_onnx_runtime_by_position_and_by_name(own, other):
    pairs = {name: (getattr(own, name), method) for name, method in list_public(other).items()}
    if own is not IOBinding:  # only sessions make those
        pairs["__init__"] = (own.__init__, other.__init__)
    for name, (method, original) in pairs.items():
        parameters = inspect.signature(original).parameters.values()
        expected = [item for item in parameters if item.kind is not item.VAR_KEYWORD]
        actual = list(inspect.signature(method).parameters.values())
        assert [item.name for item in actual[: len(expected)]] == [item.name for item in expected], name
        for one, two in zip(actual, expected):
            assert one.kind == two.kind, (name, one)
            assert two.default is two.empty or one.default is not one.empty, (name, one)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda session: session.set_providers(["CPUExecutionProvider"]), "onnxplace compile MODEL --devices"),
        (lambda session: session.set_ep_dynamic_options({"a": "b"}), "when compiling"),
        (lambda session: session.get_provider_graph_assignment_info(), "manifest.segments"),
        (lambda session: session.set_tuning_results([{}], error_on_invalid=True), "results of tuning"),
        (lambda session: session.run_with_iobinding(onnxruntime.IOBinding(session)), "session.io_binding()"),
        (lambda session: session.io_binding().bind_input("x", "cuda", 0, np.float32, (4, 64), 1), "memory of the host"),
        (
            lambda session: session.io_binding().bind_output("y", "cuda", 0, np.float32, (4, 64), 1),
            "memory of the host",
        ),
    ],
)
def test_what_a_bundle_cannot_do_is_refused_with_what_to_do_instead(session, call, words):
    with pytest.raises(onnxplace.UsageError, match="U088") as refused:
        call(session)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.enable_fallback(),
        lambda session: session.set_tuning_results([{}]),
        lambda session: session.io_binding().bind_output("y", "cuda"),
    ],
)
def test_calls_without_an_effect_bring_a_warning(session, call):
    with pytest.warns(UserWarning, match=r"note\[U087\]") as caught:
        call(session)
    assert caught[0].filename == __file__, "it points at the call"


def test_calls_that_agree_with_what_a_bundle_does_bring_none(session):
    session.disable_fallback()
    session.release_captured_graph()
    session.set_tuning_results([])
    value = session.create_ortvalue_from_shape_and_type([2, 3], np.float32, "cpu")
    assert value.shape() == [2, 3]


def test_bound_values_that_do_not_fit_are_refused(session):
    binding = session.io_binding()
    binding.bind_cpu_input("x", X)
    for dtype, shape in ((np.float64, (4, 64)), (np.float32, (3, 64))):
        bound = np.zeros(shape, dtype)
        binding.bind_output("y", "cpu", 0, dtype, shape, bound.ctypes.data)
        with pytest.raises(onnxplace.UsageError, match=r"the result is float32 \[4, 64\]") as refused:
            session.run_with_iobinding(binding)
        assert isinstance(refused.value, RuntimeError)
        assert not bound.any()
        assert binding.get_outputs() == binding.copy_outputs_to_cpu() == []
    with pytest.raises(ValueError, match="memory needs element_type and shape"):
        binding.bind_output("y", buffer_ptr=bound.ctypes.data)
    with onnxplace.InferenceSession(session.bundle) as other, pytest.raises(ValueError, match="another session"):
        other.run_with_iobinding(binding)


@pytest.mark.parametrize(
    ("element_type", "shape", "address", "words"),
    [
        ("nonsense", (4, 64), 4096, "'nonsense'"),
        (999, (4, 64), 4096, "got 999"),
        (object, (4, 64), 4096, "elements are numbers, and sizes are at least 0"),
        (np.float32, (-4, 64), 4096, "elements are numbers, and sizes are at least 0"),
        (np.float32, 4, 4096, "got <class 'numpy.float32'>, 4"),
        (np.float32, (4, 64), 0, "addresses are above 0"),
        (np.float32, (4, 64), "here", "'here'"),
    ],
)
def test_memory_that_cannot_be_is_refused(session, element_type, shape, address, words):
    binding = session.io_binding()
    for bind, name in ((binding.bind_input, "x"), (binding.bind_output, "y")):
        with pytest.raises(RuntimeError, match=f"U054.*put '{name}'") as refused:
            bind(name, "cpu", 0, element_type, shape, address)
        assert words in str(refused.value)


def test_outputs_on_devices_that_do_not_exist_are_refused(session):
    with pytest.raises(RuntimeError, match=r"U054.*expected the type of a device, got 'nodev'"):
        session.io_binding().bind_output("y", "nodev")


def test_objects_in_place_of_ort_values_and_of_names_are_refused(session):
    binding = session.io_binding()
    for bind, name in ((binding.bind_ortvalue_input, "x"), (binding.bind_ortvalue_output, "y")):
        with pytest.raises(TypeError, match=r"U054.*expected onnxruntime\.OrtValue, got 3"):
            bind(name, 3)
    with pytest.raises(onnxplace.UsageError, match=r"F001.*expected a list of output names, got 3"):
        session.run(3, FEEDS)


def test_bound_buffers_are_read_and_written_by_each_run(session):
    fed, result = X.copy(), np.zeros_like(X)
    binding = session.io_binding()
    binding.bind_cpu_input("x", fed)
    binding.bind_output("y", "cpu", 0, 1, result.shape, result.ctypes.data)  # ONNX's number of float
    for factor in (1, 2):
        fed[:] = factor * X
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(result, session.run(None, {"x": factor * X})[0])


def test_results_and_feeds_that_are_ort_values_own_what_they_refer_to(session):
    (expected,) = session.run(None, FEEDS)
    values = [session.run_with_ort_values(None, FEEDS)[0] for _ in range(20)]
    arrays = [session.run_with_ort_values(None, FEEDS)[0].numpy() for _ in range(20)]
    for array in [*arrays, *(value.numpy() for value in values)]:
        np.testing.assert_array_equal(array, expected)
    for _ in range(20):
        feeds = {"x": onnxruntime.OrtValue.ortvalue_from_numpy(X.copy())}
        np.testing.assert_array_equal(session.run(None, feeds)[0], expected)


def test_a_run_in_flight_ends_when_its_options_say_so(tmp_path):
    failure = onnxruntime.capi.onnxruntime_pybind11_state.Fail
    with onnxplace.InferenceSession(endless.endless_bundle(tmp_path)) as session:
        options, finished, results = onnxruntime.RunOptions(), threading.Event(), []
        options.logid = "a long run"
        session.run_async(
            None, endless.feeds(None), lambda *result: (results.append(result), finished.set()), None, options
        )
        timer = threading.Timer(0.05, lambda: setattr(options, "terminate", True))
        timer.start()
        with pytest.raises(failure, match=r"X014.* run 'a long run'"):
            session.run(None, endless.feeds(None), options)
        assert finished.wait(120)
        ((outputs, _, text),) = results
        assert (outputs, "X014" in text) == ([], True)
        with pytest.raises(onnxplace.RunTimeoutError):
            session.run(None, endless.feeds(None), onnxruntime.RunOptions(), timeout=0.05)
        timer.join()


def test_profiling_writes_a_trace_with_the_tags_of_its_requests(compiled, tmp_path):
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    tag = onnxruntime.RunOptions()
    tag.logid = "tagged"
    with onnxplace.InferenceSession(compiled, options) as session:
        empty = json.loads(Path(session.end_profiling()).read_text())
        assert (empty["traceEvents"], session.get_profiling_start_time_ns()) == ([], 0)
        session.run(None, FEEDS)
        session.run(None, FEEDS, tag)
        path = session.end_profiling()
        assert session.get_profiling_start_time_ns() > 0
    assert path.startswith(str(tmp_path / "profile_"))
    requests = [event for event in json.loads(Path(path).read_text())["traceEvents"] if event.get("cat") == "request"]
    tags = [event["args"].get("tag") for event in requests if event["pid"] == 1]
    assert tags == [None, "tagged"]


def test_an_error_keeps_its_type_its_text_and_its_own_pickle(session):
    with pytest.raises(onnxplace.FeedError) as caught:
        session.run(None, {})
    error = caught.value
    assert isinstance(error, ValueError)
    assert (type(error).__name__, type(error).__module__) == ("FeedError", "onnxplace.errors")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is onnxplace.FeedError
        assert str(other) == str(error)


def test_a_session_has_what_optimum_reads_of_it(session, tmp_path):
    """It creates a binding that it may never use, and saves the files of the model."""
    onnxruntime.IOBinding(session)
    whole = Path(session._model_path)
    for file in (whole, whole.parent / "weights.bin"):
        shutil.copy(file, tmp_path)
    saved = onnxruntime.InferenceSession(tmp_path / whole.name, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, FEEDS)[0], saved.run(None, FEEDS)[0], rtol=1e-5, atol=1e-6)


def test_conversations_and_batched_sessions_have_the_methods_too(compiled):
    with onnxplace.InferenceSession(compiled) as session, session.conversation() as conversation:
        assert [str(item) for item in conversation.get_inputs()] == [str(item) for item in session.get_inputs()]
        assert conversation.get_providers() == ["CPUExecutionProvider"]
        assert conversation.ignored_options == ()
    with onnxplace.InferenceSession(compiled, batching=onnxplace.Batching()) as session:
        expected = session.run(None, FEEDS)
        np.testing.assert_array_equal(session.run(None, FEEDS, onnxruntime.RunOptions())[0], expected[0])
