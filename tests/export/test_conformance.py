"""A sample of ONNX's conformance suite through merge and exports; all of it: `benchmarks.conformance --exports`."""

import pytest

from tests.support.conformance import sample_cases
from tests.support.export_cases import export_case

PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sampled(8)
def test_what_is_exported_computes_what_the_suite_expects(part: int):
    outcomes = [export_case(kind, name) for kind, name in sample_cases(hard=12, other=96)[part::PARTS]]
    assert [item for item in outcomes if item.status == "failed"] == []
    assert sum(item.status == "passed" for item in outcomes) > len(outcomes) / 4
