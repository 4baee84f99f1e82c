"""A sample of ONNX's conformance suite through merge and exports; all of it: `benchmarks.conformance --exports`."""

import pytest

from tests.support.conformance import sample_cases
from tests.support.export_cases import export_case

PARTS = 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_exported_computes_what_the_suite_expects(part: int):
    check(sample_cases(hard=12, other=96)[part::PARTS])


def test_a_few_of_these_cases_are_exported():
    check(sample_cases(hard=12, other=96, quick=True)[::PARTS])


def check(cases: list[tuple[str, str]]) -> None:
    outcomes = [export_case(kind, name) for kind, name in cases]
    assert [item for item in outcomes if item.status == "failed"] == []
    assert sum(item.status == "passed" for item in outcomes) > len(outcomes) / 4
