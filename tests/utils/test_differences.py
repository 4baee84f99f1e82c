"""The largest error of an array: its size, and where it is."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from onnxplace.measure.compare import compare_output, find_worst
from onnxplace.model.lineage import Lineage
from onnxplace.utils.differences import find_largest_error

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(st.data(), array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
def test_the_index_is_where_the_error_is(data, shape):
    actual, reference = (data.draw(arrays(np.float32, shape, elements=FLOATS)) for _ in range(2))
    error, relative, index = find_largest_error(actual, reference)
    if error == 0:
        assert (relative, index) == (0, ())
        np.testing.assert_array_equal(actual, reference)
        return
    assert len(index) == len(shape)
    at_index = find_largest_error(actual[index], reference[index])[0]
    assert at_index == error
    with np.errstate(all="ignore"):
        errors = np.abs(actual.astype(float) - reference)[np.isfinite(actual) & np.isfinite(reference)]
    assert error == np.inf or error == errors.max()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_special_values_that_differ_are_the_largest_error(value):
    reference = np.ones((2, 3), np.float32)
    actual = reference.copy()
    actual[1, 2], actual[0, 0] = value, 100
    assert find_largest_error(actual, reference) == (np.inf, np.inf, (1, 2))
    assert find_largest_error(reference, actual) == (np.inf, np.inf, (1, 2))
    assert find_largest_error(actual, actual) == (0, 0, ())


def test_complex_numbers_have_errors_too():
    assert find_largest_error(np.complex64([1, 1 + 3j]), np.complex64([1, 1])) == (3, 3, (1,))


def test_a_comparison_names_place_and_tolerance():
    reference = np.float32([[1, 2], [3, 4]])
    difference = compare_output("y", reference + np.float32([[0, 0], [1, 0]]), reference)
    assert (difference.equal, difference.index, difference.max_abs_error) == (False, (1, 0), 1)
    assert (difference.tolerance, difference.tolerance_type) == (1e-3, "float32")
    coarse = compare_output("y", reference, reference, Lineage(frozenset({"float16", "int8", "float32"})))
    assert (coarse.equal, coarse.index, coarse.tolerance, coarse.tolerance_type) == (True, (), 2e-2, "float16")
    exact = compare_output("n", np.int64([1, 3]), np.int64([1, 2]), Lineage(frozenset({"float16"})))
    assert (exact.equal, exact.index, exact.tolerance, exact.tolerance_type) == (False, (1,), 0, "")
    text = compare_output("s", np.array(["a"], object), np.array(["b"], object))
    assert (text.equal, text.index, text.max_abs_error) == (False, (), np.inf)


def test_the_worst_difference_is_one_that_is_not_within_tolerance():
    near = compare_output("y", np.float32([1.01]), np.float32([1]), Lineage(frozenset({"float16"})))
    far = compare_output("y", np.float32([1.002]), np.float32([1]))
    assert (near.equal, far.equal) == (True, False)
    assert find_worst([near, far]) is far
