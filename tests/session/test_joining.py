"""Which requests can be joined, and how results are cut apart."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace.bundle.manifest import BatchingRecord
from onnxplace.session.batcher import MAX_COMPARED_BYTES, Joiner

JOINER = Joiner(BatchingRecord(dimension="N", inputs={"x": 0, "z": 1}, outputs={"y": 0}))


def feeds(size: int, width: int = 3, shared: object = 1.0, **others: object) -> dict:
    values = {"x": np.ones((size, width), "f4"), "z": np.ones((2, size), "f4"), "shared": np.array(shared), **others}
    return {name: value for name, value in values.items() if value is not None}


def group_of(values: dict) -> object:
    return JOINER.describe_feeds(values)[1]


def test_requests_of_one_width_and_any_size_are_joined():
    assert [JOINER.describe_feeds(feeds(size))[0] for size in (1, 7)] == [1, 7]
    assert group_of(feeds(1)) == group_of(feeds(7)) is not None


@pytest.mark.parametrize(
    "other",
    [feeds(1, width=4), feeds(1, shared=2.0), feeds(1, shared=np.float32(1)), feeds(1, shared=None)],
    ids=["another width", "another shared value", "another type", "without an optional input"],
)
def test_requests_that_differ_otherwise_are_not_joined(other):
    assert group_of(other) != group_of(feeds(1))


@pytest.mark.parametrize(
    "alone",
    [
        feeds(0),
        feeds(1, x=np.ones((5, 3), "f4")),
        feeds(1, x=[[1.0] * 3]),
        feeds(1, x=None),
        feeds(1, x=np.array(1, "f4")),
        feeds(1, z=np.ones(2, "f4")),
        feeds(1, shared=np.ones(MAX_COMPARED_BYTES)),
        feeds(1, shared=np.array(["a"], object)),
    ],
    ids=[
        "no rows",
        "broadcast",
        "not an array",
        "missing",
        "a scalar",
        "no axis of the batch",
        "too large to compare",
        "texts",
    ],
)
def test_these_requests_run_alone(alone):
    assert JOINER.describe_feeds(alone) == (0, None)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 3))
def test_results_are_cut_where_requests_were_joined(sizes, rows):
    numbers = np.cumsum([0, *sizes])
    requests = [
        feeds(size, x=np.arange(first, first + size, dtype="f4")[:, None], z=np.arange(first, first + size)[None])
        for first, size in zip(numbers, sizes)
    ]
    joined = JOINER.join_feeds(requests)
    assert joined["x"][:, 0].tolist() == joined["z"][0].tolist() == list(range(sum(sizes)))
    parts = JOINER.cut_outputs({"y": np.repeat(joined["x"], rows, axis=0), "same": np.ones(2)}, sizes)
    for request, part in zip(requests, parts, strict=True):
        np.testing.assert_array_equal(part["y"], np.repeat(request["x"], rows, axis=0))
        np.testing.assert_array_equal(part["same"], np.ones(2))


def test_the_results_of_requests_share_no_memory():
    outputs = {"y": np.zeros((2, 3)), "same": np.zeros(2)}
    first, second = JOINER.cut_outputs(outputs, [1, 1])
    for name in outputs:
        first[name][:] = 1
        assert not second[name].any()
        assert not outputs[name].any()


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 3)])
def test_an_output_without_the_batch_is_not_cut(shape):
    with pytest.raises(ValueError, match=r"output 'y' of shape .* holds no batch of 4"):
        JOINER.cut_outputs({"y": np.zeros(shape)}, [1, 3])
