"""A sample of ONNX's conformance suite, cut between OpenVINO and ONNX Runtime's own kernels, and on OpenVINO alone."""

import zlib

import pytest

from tests.openvino.devices import OPENVINO
from tests.support.conformance import case, names, outcome, placements_on

CASES = 80
PARTS = 4
# A case of one node is cut where it is surrounded.
PLACEMENTS = [placements_on(OPENVINO, "cpu:0")[1], placements_on("cpu:0", OPENVINO)[1], placements_on(OPENVINO)[0]]
STRING = 8
# Such texts say that a kernel is missing on one side of a cut. With measured costs no node is placed there.
REFUSED = ("error[M012]", "error[M013]")


def sample() -> list[str]:
    """Return the same cases every time, of the kind `node`.

    Functions that are written out are left out: OpenVINO takes a value without a known rank between two of their nodes
    for a number. So are texts, with which it ends the process.
    """
    listed = sorted(names("node"), key=lambda name: zlib.crc32(name.encode()))
    return [name for name in listed if "_expanded" not in name and not has_text(name)][:CASES]


def has_text(name: str) -> bool:
    graph = case("node", name).model.graph
    return any(value.type.tensor_type.elem_type == STRING for value in (*graph.input, *graph.output))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_cases_that_pass_on_openvino_pass_in_every_split_or_are_refused(part):
    outcomes = [outcome("node", name, PLACEMENTS, OPENVINO) for name in sample()[part::PARTS]]
    failed = [item for item in outcomes if item.status == "failed"]
    assert [item for item in failed if not all(map(is_refusal, item.detail.split("; ")))] == []
    assert sum(item.status == "passed" for item in outcomes) > len(outcomes) / 2


def is_refusal(problem: str) -> bool:
    return any(code in problem for code in REFUSED)
