"""A sample of ONNX's conformance suite, cut between OpenVINO and ONNX Runtime's own kernels, and on OpenVINO alone."""

import zlib

import pytest

from onnxplace.errors import OnnxplaceError
from onnxplace.model.cut_constraints import list_uncompilable
from onnxplace.model.loading import load
from tests.openvino.devices import OPENVINO
from tests.support.conformance import case, names, outcome, placements_on, surrounded

CASES = 40
PARTS = 4
# A case of one node is cut where it is surrounded.
PLACEMENTS = [placements_on(OPENVINO, "cpu:0")[1], placements_on("cpu:0", OPENVINO)[1], placements_on(OPENVINO)[0]]
# ONNX Runtime has no kernel of its own for a node, or OpenVINO refuses it when it is opened.
REFUSED = "error[M012]"


def sample() -> list[str]:
    """Return the same cases every time, of the kind `node`."""
    listed = sorted(names("node"), key=lambda name: zlib.crc32(name.encode()))
    return [name for name in listed if is_compilable(name)][:CASES]


def is_compilable(name: str) -> bool:
    """Return whether compile, which asks OpenVINO what it takes, would leave it all nodes of a case."""
    try:
        model = surrounded(case("node", name).model)
        return model is not None and not any(list_uncompilable(load(model)))
    except OnnxplaceError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_cases_that_pass_on_openvino_pass_in_every_split_or_are_refused(part):
    outcomes = [outcome("node", name, PLACEMENTS, OPENVINO) for name in sample()[part::PARTS]]
    wrong = [problem for item in outcomes if item.status == "failed" for problem in item.detail.split("; ")]
    assert [problem for problem in wrong if REFUSED not in problem] == []
    assert sum(item.status == "passed" for item in outcomes) > len(outcomes) / 2
