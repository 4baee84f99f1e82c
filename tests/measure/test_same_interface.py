"""Whether a model has the inputs of a bundle, as far as both are known."""

from types import SimpleNamespace

import pytest

from onnxplace.feeds.feeds import Declared
from onnxplace.measure.compare import _is_same_input


@pytest.mark.parametrize(
    ("shape", "declared", "is_same"),
    [
        (["n", 2, 3], None, True),  # the rank is not known: there is nothing to compare
        (["n", 2, 3], (4, 2, 3), True),
        (["n", 2, 3], ("n", 2, 4), False),
        (["n", 2], (4, 2, 3), False),
        ([], (4, 2), True),
    ],
)
def test_ranks_and_fixed_sizes_are_compared_as_far_as_both_are_known(shape, declared, is_same):
    item = SimpleNamespace(name="x", type="tensor(float)", shape=shape)
    assert _is_same_input(item, Declared("x", "tensor(float)", declared)) == is_same
