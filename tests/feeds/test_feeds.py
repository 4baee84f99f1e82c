"""Feeds are checked against the declared inputs, and generated where there are none."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace.errors import FeedError
from onnxplace.feeds.dimensions import dimension_keys
from onnxplace.feeds.feeds import Declared, check_feeds, describe_input, numpy_type
from onnxplace.feeds.npz import read_npz
from onnxplace.feeds.synthetic import random_feeds

NUMERIC = {
    "tensor(float)": "f4",
    "tensor(double)": "f8",
    "tensor(float16)": "f2",
    "tensor(int8)": "i1",
    "tensor(int32)": "i4",
    "tensor(int64)": "i8",
    "tensor(uint8)": "u1",
    "tensor(bool)": "?",
    "tensor(complex64)": "c8",
}
dimensions = st.one_of(st.integers(0, 4), st.sampled_from(["batch", "seq", "width"]), st.none())
shapes = st.lists(dimensions, max_size=3).map(tuple)
declarations = st.lists(
    st.builds(Declared, st.sampled_from("abcdef"), st.sampled_from(list(NUMERIC)), shapes, st.booleans()),
    max_size=4,
    unique_by=lambda item: item.name,
)


def choose_sizes(inputs: list[Declared], sizes: dict[str, int]) -> dict[str, int]:
    """Return a size for each symbolic dimension: from `sizes`, else 2."""
    return {key: sizes.get(key, 2) for item in inputs for key, size in dimension_keys(item) if size is None}


# ---------------------------------------------------------------------------------------------- generated


@given(declarations, st.integers(0, 5), st.integers(0, 2**32))
def test_random_feeds_fit_the_declared_inputs(inputs, batch, seed):
    feeds = random_feeds(inputs, choose_sizes(inputs, {"batch": batch}), seed)
    assert set(check_feeds(feeds, inputs)) == {item.name for item in inputs if not item.optional}
    for item in inputs:
        if not item.optional:
            assert feeds[item.name].dtype == np.dtype(NUMERIC[item.dtype])
            for size, entry in zip(feeds[item.name].shape, item.shape):
                assert size == (batch if entry == "batch" else entry if isinstance(entry, int) else 2)


@given(declarations, st.integers(0, 2**32))
def test_random_feeds_are_deterministic_under_a_seed(inputs, seed):
    first, second = (random_feeds(inputs, choose_sizes(inputs, {}), seed) for _ in range(2))
    assert list(first) == list(second)
    for name in first:
        assert first[name].tobytes() == second[name].tobytes()


def test_another_seed_gives_other_feeds():
    inputs = [Declared("x", "tensor(float)", (64,))]
    assert not np.array_equal(random_feeds(inputs, {}, 1)["x"], random_feeds(inputs, {}, 2)["x"])


def test_random_integers_are_valid_indices():
    array = random_feeds([Declared("i", "tensor(int64)", (1000,))], {})["i"]
    assert set(array.tolist()) == {0, 1}


def test_generated_strings_are_objects():
    array = random_feeds([Declared("s", "tensor(string)", (2,))], {})["s"]
    assert array.tolist() == ["a", "a"]
    check_feeds({"s": array}, [Declared("s", "tensor(string)", (2,))])


def test_all_unbound_dimensions_are_listed_once_with_an_example():
    inputs = [
        Declared("x", "tensor(float)", ("batch", "seq", 4)),
        Declared("m", "tensor(bool)", ("batch", None)),
        Declared("late", "tensor(float)", ("other",), optional=True),
    ]
    with pytest.raises(FeedError) as caught:
        random_feeds(inputs, {"seq": 3})
    assert caught.value.message == "symbolic dimensions without a value: batch, m.1"
    assert "--shape batch=1,m.1=1" in caught.value.hint
    assert random_feeds(inputs, {"seq": 3, "batch": 1, "m.1": 1})["m"].shape == (1, 1)


@pytest.mark.parametrize("dtype", ["seq(tensor(float))", "tensor(float8e8m0)", "optional(tensor(float))"])
def test_an_input_that_cannot_be_generated_is_named(dtype):
    with pytest.raises(FeedError) as caught:
        random_feeds([Declared("x", dtype, ())], {})
    for words in ("'x'", dtype, "`inputs`"):
        assert words in str(caught.value)


# ---------------------------------------------------------------------------------------------- checked

PAIR = [Declared("left", "tensor(float)", ("n", 2)), Declared("right", "tensor(float)", ("n",))]
GOOD = {"left": np.zeros((3, 2), "f4"), "right": np.zeros(3, "f4")}


def assert_refused(feeds: dict[str, object], *expected: str) -> None:
    """Check that feeds for PAIR are refused with a message that has these words."""
    with pytest.raises(FeedError) as caught:
        check_feeds(feeds, PAIR)
    for words in expected:
        assert words in str(caught.value)


def test_feeds_that_fit_are_returned_as_arrays():
    assert {name: array.shape for name, array in check_feeds(GOOD, PAIR).items()} == {"left": (3, 2), "right": (3,)}


def test_a_feed_is_not_copied():
    assert np.shares_memory(check_feeds(GOOD, PAIR)["left"], GOOD["left"])


def test_an_unknown_name_is_refused_with_the_nearest():
    assert_refused({**GOOD, "rigth": GOOD["right"]}, "'rigth'", "did you mean 'right'?")


def test_all_missing_inputs_are_named_with_the_declared_ones():
    assert_refused({}, "'left', 'right'", "left tensor(float) [n, 2]", "right tensor(float) [n]")


def test_an_optional_input_may_be_missing():
    optional = [PAIR[0], Declared("right", "tensor(float)", ("n",), optional=True)]
    assert list(check_feeds({"left": GOOD["left"]}, optional)) == ["left"]


@pytest.mark.parametrize("dtype", ["f8", "f2", "i4", "?", ">f4"])
def test_a_wrong_type_is_refused_with_its_conversion(dtype):
    assert_refused({**GOOD, "left": GOOD["left"].astype(dtype)}, "'left'", str(np.dtype(dtype)), ".astype('float32')")


def test_numbers_for_strings_are_refused():
    with pytest.raises(FeedError, match="strings"):
        check_feeds({"s": np.zeros(2)}, [Declared("s", "tensor(string)", (2,))])
    check_feeds({"s": ["a", "b"]}, [Declared("s", "tensor(string)", (2,))])


@pytest.mark.parametrize("shape", [(), (3,), (3, 2, 1)])
def test_a_wrong_rank_is_refused_with_both_shapes(shape):
    assert_refused({**GOOD, "left": np.zeros(shape, "f4")}, "'left'", str(list(shape)), "[n, 2]")


def test_a_wrong_size_is_refused_with_its_axis():
    assert_refused({**GOOD, "left": np.zeros((3, 5), "f4")}, "'left'", "[3, 5]", "[n, 2]", "axis 1 must be 2")


def test_a_symbol_has_one_size_in_all_inputs():
    assert_refused({**GOOD, "right": np.zeros(4, "f4")}, "'n'", "'right'", "4", "3 in left[0]")


@pytest.mark.parametrize("size", [0, 1])
def test_an_empty_array_or_one_that_is_broadcast_agrees_with_any_size(size):
    feeds = {**GOOD, "right": np.zeros(size, "f4")}
    assert check_feeds(feeds, PAIR)["right"].shape == (size,)


def test_an_input_without_a_declared_shape_may_have_any():
    inputs = [Declared("x", "tensor(float)", None), Declared("y", "tensor(float)", (None,))]
    for shape in ((), (1, 2, 3)):
        check_feeds({"x": np.zeros(shape, "f4"), "y": np.zeros(7, "f4")}, inputs)


def test_a_ragged_list_is_refused_by_name():
    assert_refused({**GOOD, "right": [[1.0], [2.0, 3.0]]}, "'right'")


def test_an_input_is_described_with_type_and_shape():
    assert describe_input(Declared("x", "tensor(int64)", ("batch", None, 3))) == "x tensor(int64) [batch, ?, 3]"
    assert describe_input(Declared("x", "tensor(int64)", None)) == "x tensor(int64) ?"


# ---------------------------------------------------------------------------------------------- files


@given(
    st.dictionaries(st.sampled_from(["x", "y/z", "a b", "file"]), st.sampled_from(list(NUMERIC.values())), max_size=3)
)
def test_arrays_that_numpy_saved_are_read_back(tmp_path_factory, kinds):
    path = tmp_path_factory.getbasetemp() / "feeds.npz"
    arrays = {name: np.ones((2, 3), kind) for name, kind in kinds.items()}
    with path.open("wb") as stream:
        np.savez(stream, **{name: array for name, array in arrays.items() if name != "file"})
    feeds = read_npz(path)
    assert list(feeds) == [name for name in arrays if name != "file"]
    for name, array in feeds.items():
        assert array.dtype == arrays[name].dtype
        assert np.array_equal(array, arrays[name])


def test_pickled_objects_are_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return pytest.fail, ("it was executed",)

    np.savez(tmp_path / "bomb.npz", x=np.array([Bomb()], dtype=object))
    with pytest.raises(FeedError, match=r"bomb\.npz"):
        read_npz(tmp_path / "bomb.npz")


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [
        ("tensor(float)", [[1, 2.5]], np.array([[1, 2.5]], np.float32)),
        ("tensor(int8)", (1, -2), np.array([1, -2], np.int8)),
        ("tensor(uint8)", [255, True], np.array([255, 1], np.uint8)),
        ("tensor(float16)", [True, 0], np.array([1, 0], np.float16)),
        ("tensor(int64)", [], np.array([], np.int64)),
        ("seq(tensor(float))", [[1], [2.0]], [np.array([1], np.float32), np.array([2], np.float32)]),
    ],
)
def test_numbers_in_lists_take_the_type_of_the_input(dtype, given, expected):
    fed = check_feeds({"x": given}, [Declared("x", dtype, None)])["x"]
    assert [item.dtype for item in fed] == [item.dtype for item in expected]
    np.testing.assert_array_equal(fed, expected)


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        ("tensor(uint64)", [2**64 - 1, 0]),
        ("tensor(uint64)", [[2**63], [1]]),
        ("tensor(uint64)", (2**53 + 1, 2**63 + 1, True)),
        ("tensor(uint64)", [np.uint64(2**64 - 1), 0]),
        ("tensor(uint64)", [np.array([2**64 - 1], "u8"), [0]]),
        ("tensor(float)", [2**63, -1]),
        ("tensor(float16)", [65504, -1.5, float("inf")]),
        ("tensor(bfloat16)", [1.5, 2]),
        ("tensor(int4)", [-8, 7]),
        ("tensor(uint64)", []),
    ],
)
def test_lists_of_numbers_are_read_by_the_type_of_the_input(dtype, given):
    array = check_feeds({"x": given}, [Declared("x", dtype, None)])["x"]
    assert array.dtype == numpy_type(dtype)
    assert array.tolist() == np.array(given, dtype=object).tolist()


@pytest.mark.parametrize(
    ("dtype", "given", "words"),
    [
        ("tensor(int64)", [1.5], "its type is float64, the model takes int64"),
        ("tensor(uint8)", [1, 300], "its numbers from 1 to 300 do not all fit into uint8"),
        ("tensor(bool)", [2], "its type is int64, the model takes bool"),
        ("tensor(float)", ["1"], "the model takes float32"),
        ("tensor(float)", None, "expected an array, got None"),
        ("tensor(float)", {"a": 1}, "expected an array, got {'a': 1}"),
        ("tensor(float)", [[1], [2, 3]], "inhomogeneous"),
        ("tensor(int64)", [2**70], "Python int too large"),
        ("tensor(int64)", [2**63, 0], "too large to convert"),
        ("tensor(uint64)", [2**63, -1], "-1 out of bounds for uint64"),
        ("tensor(uint64)", [2**64, 0], "too large to convert"),
        ("tensor(uint64)", [2**64 - 1, 0.5], "its type is float64, the model takes uint64"),
        ("tensor(uint64)", [-1], "its numbers from -1 to -1 do not all fit into uint64"),
        ("tensor(int8)", [[1], [-129]], "its numbers from -129 to 1 do not all fit into int8"),
        ("tensor(int8)", [2**64 - 1, 0], "F003"),
        ("tensor(int8)", [np.uint64(2**64 - 1), 0], "F003"),
        ("tensor(int4)", [2**64 - 1, 0], "F003"),
        ("tensor(bool)", [2**64 - 1, 0], "the model takes bool"),
        ("tensor(float16)", [70000.0, 1], "its numbers from 1.0 to 70000.0 do not all fit into float16"),
        ("tensor(float16)", [70000], "its numbers from 70000 to 70000 do not all fit into float16"),
        ("tensor(float)", [1e39], "do not all fit into float32"),
        ("tensor(bfloat16)", [1e39], "do not all fit into bfloat16"),
        ("tensor(int4)", [8], "do not all fit into int4"),
        ("tensor(int4)", [1.5], "its type is float64, the model takes int4"),
        ("tensor(double)", [10**400], "expected an array"),
        ("seq(tensor(uint64))", [[2**64, 0]], "too large to convert"),
        ("seq(tensor(float))", [None], "expected an array, got None"),
        ("seq(tensor(float))", [np.zeros(2, "f4"), np.zeros(2)], "its type is float64, the model takes float32"),
        ("seq(tensor(int64))", ["a"], "the model takes int64"),
        ("optional(seq(tensor(string)))", [[1]], "the model takes strings"),
        ("tensor(string)", ["a", "\ud800"], r"expected text in UTF-8, got '\ud800' at position 1"),
        ("seq(tensor(string))", [[b"\xff"]], r"expected text in UTF-8, got b'\xff' at position 0"),
    ],
)
def test_lists_that_would_lose_something_are_refused(dtype, given, words):
    with pytest.raises(FeedError, match="F003") as refused:
        check_feeds({"x": given}, [Declared("x", dtype, None)])
    assert words in str(refused.value)
