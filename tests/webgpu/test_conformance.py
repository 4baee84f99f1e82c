"""A sample of ONNX's conformance suite, cut between a GPU and a CPU, and on the GPU alone."""

import zlib

import pytest

from tests.support.conformance import names, outcome, placements_on

CASES = 160
PARTS = 8
# Runs on the GPU alone are not cut, but values are uploaded, bound and read back.
PLACEMENTS = [*placements_on("webgpu:0", "cpu:0"), *placements_on("cpu:0", "webgpu:0"), *placements_on("webgpu:0")[:1]]


def sample() -> list[str]:
    """Return the same cases every time, of the kind `node`."""
    return sorted(names("node"), key=lambda name: zlib.crc32(name.encode()))[:CASES]


@pytest.mark.parametrize("part", range(PARTS))
def test_cases_that_pass_on_the_gpu_pass_in_every_split(part):
    outcomes = [outcome("node", name, PLACEMENTS, "webgpu:0") for name in sample()[part::PARTS]]
    assert [item for item in outcomes if item.status == "failed"] == []
    assert sum(item.status == "passed" for item in outcomes) > len(outcomes) / 3
