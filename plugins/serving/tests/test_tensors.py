"""Tensors in requests and answers of the protocol."""

import json
import math
from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from onnxplace.errors import FeedError
from onnxplace.feeds.feeds import Declared, numpy_type
from onnxplace_serving.tensors import read_inputs, read_list, read_raw, write_list, write_raw

NUMBERS = ("bool", "int8", "uint16", "int32", "int64", "uint64", "float16", "float", "double", "complex64")
SMALL = ("bfloat16", "float8e4m3fn", "float8e5m2", "int4", "uint4")


@pytest.mark.parametrize("name", NUMBERS)
@given(data=st.data())
def test_raw_bytes_are_read_as_they_are_written(name, data):
    item = Declared("x", f"tensor({name})", None)
    array = data.draw(arrays.arrays(numpy_type(item.dtype), arrays.array_shapes(min_dims=0, min_side=0)))
    assert write_raw(read_raw(item, bytes(write_raw(array)))) == write_raw(array)


@pytest.mark.parametrize("name", SMALL)
def test_types_of_few_bits_have_a_byte_for_each_element_or_two(name):
    item = Declared("x", f"tensor({name})", None)
    array = np.array([0, 1, 2], numpy_type(item.dtype))
    assert read_raw(item, bytes(write_raw(array))).tolist() == array.tolist()
    assert json.loads(json.dumps(write_list(read_list(item, [0, 1, 2])))) == [0, 1, 2]


@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_texts_are_read_as_they_are_written(texts):
    item = Declared("x", "tensor(string)", None)
    assert [text.decode() for text in read_raw(item, write_raw(np.array(texts, object)))] == texts
    assert write_list(read_list(item, texts)) == texts


@given(st.binary(max_size=40))
def test_any_bytes_are_texts_or_refused(data):
    item = Declared("x", "tensor(string)", None)
    with suppress(FeedError):
        assert write_raw(read_raw(item, data)) == data


def test_numbers_share_the_memory_of_the_body_where_they_are_aligned():
    body = np.arange(9, dtype="u1")
    item = Declared("x", "tensor(float)", None)
    assert np.shares_memory(read_raw(item, body[:8].data), body)
    assert not np.shares_memory(read_raw(item, body[1:].data), body)
    outputs = np.arange(4, dtype="f4")
    assert np.shares_memory(np.frombuffer(write_raw(outputs), "f4"), outputs)


def test_numbers_that_are_not_finite_are_null_in_json():
    assert write_list(np.array([math.nan, 1.5, -math.inf], "f4")) == [None, 1.5, None]
    assert write_list(np.array([[math.nan], [2]], ml_dtypes.bfloat16)) == [None, 2.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": [300]}, "do not all fit into uint8"),
        ({"data": [1.5]}, "its type is float64, the model takes uint8"),
        ({"data": ["a"]}, "model takes uint8"),
        ({"data": [1], "datatype": "BYTES"}, "its datatype is 'BYTES'"),
        ({"data": 1}, "input 'x', data: expected a list, got 1"),
        ({"datatype": "INT8"}, "its datatype is 'INT8', the model takes UINT8"),
        ({"shape": [2]}, "expected 2 elements for the shape [2], got 1"),
        ({"shape": [-1]}, "expected at most"),
        ({"shape": [1.0]}, "expected a whole number, got 1.0"),
        ({"shape": [True]}, "expected a whole number, got True"),
        ({"shape": None}, "expected a list, got None"),
        ({"parameters": []}, "parameters: expected an object, got []"),
        ({"parameters": {"classification": 3}}, "classification: this server does not have this extension"),
        ({"name": "y"}, "the model has no input 'y'"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_with_the_reason(change, words):
    entry = {"name": "x", "datatype": "UINT8", "shape": [1], "data": [1], **change}
    with pytest.raises(FeedError) as caught:
        read_inputs({"inputs": [entry]}, {"x": Declared("x", "tensor(uint8)", (1,))}, lambda _: None)
    assert words in str(caught.value)


def test_numbers_that_few_bits_cannot_hold_are_refused():
    with pytest.raises(FeedError, match="its numbers from 100 to 100 do not all fit into int4"):
        read_list(Declared("x", "tensor(int4)", None), [100])
    with pytest.raises(FeedError, match="3 bytes hold no whole number of float32"):
        read_raw(Declared("x", "tensor(float)", None), b"abc")
    with pytest.raises(FeedError, match="JSON has no complex64 numbers"):
        write_list(np.ones(1, "c8"))
