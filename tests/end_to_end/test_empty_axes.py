"""A sample of ONNX's suite with empty axes: no process ends; all of it: `benchmarks.conformance --empty`."""

import pytest

from tests.support.conformance import sample_cases
from tests.support.empty_cases import empty_case

PARTS = 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_verify_takes_empty_axes(part: int):
    check(sample_cases(hard=12, other=48)[part::PARTS])


def test_verify_takes_empty_axes_of_operators_that_end_the_process():
    check([("node", name) for name in ("test_gru_defaults", "test_lstm_defaults", "test_scan9_sum")])


def check(cases: list[tuple[str, str]]) -> None:
    outcomes = [empty_case(kind, name) for kind, name in cases]
    assert [item for item in outcomes if item.failures] == []
    assert sum(item.compared + item.refused for item in outcomes) > len(outcomes)
