"""One script runs with ONNX Runtime's InferenceSession and with onnxplace's: results, types and errors are the same."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import onnxplace
from tests.conftest import FAST_PIPELINE
from tests.support.session_script import run_async, use_session

HEADER = """<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3], producer_name: "maker", domain: "org.example",
model_version: 7, doc_string: "a model", metadata_props: ["author": "me", "empty": ""]>"""
X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
INDICES = np.array([0, 2, 1])
# Text, feeds, sizes of symbolic dimensions.
MODELS = {
    "floats, shapes of outputs not declared": (
        """g (float[batch, 4] x, float[?, 4] w) => (y, z)
        { a = Relu(x)  b = Tanh(w)  c = Add(a, b)  y = Sigmoid(c)  z = Neg(b) }""",
        {"x": X, "w": X + 1},
        {"batch": 3, "w.0": 3},
    ),
    "integers and strings": (
        """g (float[n, 4] x, int64[n] i, string[m] t, bool[n] b) => (float[n, 4] y, int64[n] j, string[m] u, bool[n] d)
        { a = Neg(x)  y = Relu(a)  k = Add(i, i)  j = Abs(k)  u = Identity(t)  d = Not(b) }""",
        {"x": X, "i": INDICES, "t": np.array(["a", "\u00fc", ""], object), "b": np.array([True, False, True])},
        {"n": 3, "m": 3},
    ),
    "half precision and a default": (
        """g (float[n, 4] x, float16[n] h, float[4] bias) => (float[n, 4] y, float16[n] k)
        <float[4] bias = {1, 2, 3, 4}> { a = Relu(x)  y = Add(a, bias)  b = Abs(h)  k = Neg(b) }""",
        {"x": X, "h": np.ones(3, np.float16)},
        {"n": 3},
    ),
    "a sequence and an optional": (
        """g (float[n, 4] x) => (seq(float[?, 4]) parts, optional(float[n, 4]) o, float[n, 4] y)
        { a = Relu(x)  b = Tanh(x)  parts = SequenceConstruct(a, b)  c = Add(a, b)  o = Optional(c)  y = Neg(c) }""",
        {"x": X},
        {"n": 3},
    ),
    "maps": (
        """g (float[n, 4] x) => (seq(map(int64, float)) scores, float[n, 4] y)
        { a = Softmax(x)  scores = ai.onnx.ml.ZipMap <classlabels_int64s = [1, 2, 3, 4]> (a)
        b = Tanh(x)  y = Neg(b) }""",
        {"x": X},
        {"n": 3},
    ),
    "a segment that fails": (
        """g (float[n, 4] x, int64[k] i, int64[2] shape) => (float[k, 4] y, float[a, b] z)
        { a = Relu(x)  y = Gather(a, i)  b = Tanh(x)  z = Reshape(b, shape) }""",
        {"x": X, "i": INDICES, "shape": np.array([4, 3])},
        {"n": 3, "k": 3},
    ),
}
NAMES = ["floats, shapes of outputs not declared", "a segment that fails"]


@pytest.fixture(scope="module")
def open_both(tmp_path_factory):
    """Return a function that opens both sessions of a model, on two devices; each model is compiled once."""
    folder, pairs = tmp_path_factory.mktemp("both"), {}

    def open_pair(name):
        if name not in pairs:
            text, _, sizes = MODELS[name]
            model = parser.parse_model(HEADER + text)
            model.graph.doc_string = "a graph"
            path = folder / f"{len(pairs)}.onnx"
            onnx.save(model, path)
            options = {"shape": sizes, "devices": "cpu:0,cpu:1", "pipeline": FAST_PIPELINE, "strict": True}
            bundle = onnxplace.compile(path, path.with_suffix(".bundle"), **options)
            plain = onnxruntime.InferenceSession(path, log_options(), providers=["CPUExecutionProvider"])
            own = onnxplace.InferenceSession(bundle.path, log_options(), providers=["CPUExecutionProvider"])
            pairs[name] = (plain, own)
        return *pairs[name], MODELS[name][1]

    yield open_pair
    for _, own in pairs.values():
        own.close()


def log_options():
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


def assert_equal(actual, expected, label):
    """Compare outputs: arrays, lists of arrays, maps, or None."""
    assert type(actual) is type(expected), label
    if isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype, label
        np.testing.assert_array_equal(actual, expected, label)
    elif isinstance(expected, list):
        assert len(actual) == len(expected), label
        for one, other in zip(actual, expected):
            assert_equal(one, other, label)
    else:
        assert actual == (pytest.approx(expected) if isinstance(expected, dict) else expected), label


@pytest.mark.parametrize("name", MODELS)
def test_a_script_gets_the_same_results_types_and_errors_from_both_sessions(open_both, name):
    plain, own, feeds = open_both(name)
    expected, actual = use_session(plain, feeds), use_session(own, feeds)
    assert actual.facts == expected.facts
    assert actual.outputs.keys() == expected.outputs.keys()
    for label, outputs in expected.outputs.items():
        assert_equal(actual.outputs[label], outputs, label)
    assert actual.errors.keys() == expected.errors.keys()
    for label, error in expected.errors.items():
        assert isinstance(actual.errors[label], type(error)), f"{label}: {type(error)}, {actual.errors[label]!r}"
        assert isinstance(actual.errors[label], onnxplace.OnnxplaceError)


def test_errors_of_segments_are_the_exceptions_of_onnx_runtime(open_both):
    plain, own, feeds = open_both("a segment that fails")
    for wrong in ({"i": INDICES + 7}, {"shape": np.array([5, 5])}):
        with pytest.raises(Exception) as expected:
            plain.run(None, {**feeds, **wrong})
        with pytest.raises(onnxplace.ExecutionError, match="X001") as actual:
            own.run(None, {**feeds, **wrong})
        assert isinstance(actual.value, expected.type)


def test_each_text_of_each_request_is_checked(open_both):
    _, session, feeds = open_both("integers and strings")
    for text in ("b", "\ud800", "c", "\ud800"):
        given = {**feeds, "t": np.array(["a", text, ""], object)}
        if text.isprintable():
            assert session.run(["u"], given)[0].tolist() == ["a", text, ""]
        else:
            with pytest.raises(onnxplace.FeedError, match=r"F003.*expected text in UTF-8"):
                session.run(None, given)


def test_texts_may_be_arrays_of_bytes(open_both):
    _, own, feeds = open_both("integers and strings")  # ONNX Runtime reads beyond the end of some of these
    for dtype in ("S3", "V3"):
        given = {**feeds, "t": np.array([b"a\0b", b"bcd", b"\xc3\xbc."], dtype)}
        assert own.run(["u"], given)[0].tolist() == ["a\0b", "bcd", "\u00fc."]
    with pytest.raises(onnxplace.FeedError, match=r"F003.*the model takes strings"):
        own.run(["u"], {**feeds, "t": np.zeros(3, [("a", "i4")])})


def test_a_sparse_ort_value_is_refused_by_name(open_both):
    _, own, feeds = open_both("floats, shapes of outputs not declared")
    cpu = onnxruntime.OrtDevice.make("cpu", 0)
    sparse = onnxruntime.SparseTensor.sparse_coo_from_numpy(
        np.array([3, 4]), np.ones(2, np.float32), np.array([0, 5]), cpu
    )
    with pytest.raises(onnxplace.FeedError, match=r"F003.*input 'x': expected a dense tensor, got a sparse one"):
        own.run(None, {**feeds, "x": onnxruntime.OrtValue.ort_value_from_sparse_tensor(sparse)})


def test_run_async_reports_feeds_that_do_not_fit_to_its_callback(open_both):
    plain, own, feeds = open_both("floats, shapes of outputs not declared")
    wrong = {**feeds, "x": X[0]}
    for session in (plain, own):
        outputs, text = run_async(session, wrong)
        assert outputs == []
        assert "x" in text
    options = onnxruntime.RunOptions()
    options.terminate = True
    assert [run_async(session, feeds, options)[0] for session in (plain, own)] == [[], []]
    assert "X014" in run_async(own, feeds, options)[1]


def test_paths_that_are_no_model_raise_the_exceptions_of_onnx_runtime(tmp_path):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{")
    (tmp_path / "text.onnx").write_text("this is no model")
    pairs = {tmp_path / "missing": tmp_path / "missing", tmp_path / "text.onnx": damaged, 5: 5}
    for plain, own in pairs.items():
        with pytest.raises(Exception) as expected:
            onnxruntime.InferenceSession(plain, log_options(), providers=["CPUExecutionProvider"])
        with pytest.raises(expected.type) as actual:
            onnxplace.InferenceSession(own)
        assert isinstance(actual.value, onnxplace.InputError)
