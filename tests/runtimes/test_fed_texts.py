"""Texts: a request feeds them as arrays, so that no session is opened for them, and nothing of them changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto, helper, parser

from onnxplace.bundle.bundle import Bundle
from onnxplace.machine import ort_values
from onnxplace.machine.ort_values import to_fed_value, to_ort_value, to_python
from tests.end_to_end.split_checks import ALTERNATING
from tests.support.random_placements import assert_same, compiled_with, run_together

MODEL = """<ir_version: 9, opset_import: ["": 20]>
g (string[n] a, string[n] b, float[n, 3] x) => (string[n] c, string[n] d, float[n, 3] y) {
    c = StringConcat (a, b)
    d = StringConcat (c, b)
    y = Neg (x)
}"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Compile the model with its nodes alternating between two devices."""
    return compiled_with(parser.parse_model(MODEL), ALTERNATING, tmp_path_factory.mktemp("texts"), dimensions={"n": 2})


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(np.array(["é", "日本", "a\0b", ""], dtype=object), id="objects"),
        pytest.param(np.array(["é", "日本", "abc", ""]), id="numpy"),
        pytest.param(np.array(["é".encode(), b"abc", b"", b"\n"], dtype=object), id="objects of bytes"),
        pytest.param(np.array([b"a", b"abc", b"", b"\n"]), id="bytes"),
        pytest.param(np.array([3, 1.5, None, True], dtype=object), id="other objects"),
        pytest.param(np.array([], dtype=object), id="empty"),
        pytest.param(np.array(["a", "b", "c", "d"], dtype=object)[::-2], id="strided"),
    ],
)
def test_texts_of_each_kind_arrive_as_they_are_and_no_session_is_opened_for_them(bundle, monkeypatch, texts):
    expected = [str(item.decode() if isinstance(item, bytes) else item) for item in texts.tolist()]
    monkeypatch.setattr(ort_values, "_open_graph", lambda graph: pytest.fail("a session was opened for texts"))
    feeds = {"a": texts, "b": np.array(["!"] * len(texts), dtype=object), "x": np.ones((len(texts), 3), np.float32)}
    outputs = run_together(bundle, [feeds] * 4)
    for first, second, y in outputs:
        assert first.tolist() == [f"{text}!" for text in expected]
        assert second.tolist() == [f"{text}!!" for text in expected]
        assert_same(y, -feeds["x"])


def test_what_was_fed_may_change_after_the_request(bundle):
    texts = np.array(["a", "b"], dtype=object)
    (first,) = run_together(bundle, [{"a": texts, "b": texts, "x": np.ones((2, 3), np.float32)}])
    texts[:] = "other"
    assert first[0].tolist() == ["aa", "bb"]


@given(st.lists(st.one_of(st.text(), st.text().map(str.encode), st.integers()), max_size=6), st.booleans())
def test_a_fed_text_is_the_one_that_an_ortvalue_would_hold(items: list[Any], is_column: bool):
    array = np.array([*items, ""], dtype=object)[:-1].reshape((-1, 1) if is_column else (-1,))
    try:
        expected = to_python(to_ort_value(array))
    except UnicodeEncodeError:  # a half of a surrogate pair, which feeds are checked for
        return
    fed = to_fed_value(array, "tensor(string)")
    assert fed.shape == expected.shape
    assert fed.tolist() == expected.tolist()


def test_bytes_that_are_no_text_still_pass_between_segments(tmp_path: Path):
    # A tokenizer's pieces may be parts of characters.
    pieces = [
        helper.make_tensor(name, TensorProto.STRING, [1], [data]) for name, data in (("p", b"\xc3"), ("q", b"\xa9"))
    ]
    value_infos = [
        helper.make_tensor_value_info(name, TensorProto.STRING, shape) for name, shape in (("a", ["n"]), ("c", ["n"]))
    ]
    nodes = [
        helper.make_node("StringConcat", ["a", "p"], ["b"], "half"),
        helper.make_node("StringConcat", ["b", "q"], ["c"], "whole"),
    ]
    graph = helper.make_graph(nodes, "g", value_infos[:1], value_infos[1:], pieces)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    bundle = compiled_with(model, ALTERNATING, tmp_path, dimensions={"n": 1})
    assert len(bundle.manifest.segments) == 2
    (outputs,) = run_together(bundle, [{"a": np.array(["x"], dtype=object)}])
    assert outputs[0].tolist() == ["xé"]
