"""A sample of ONNX's conformance suite that the NPU takes, cut between it and a CPU, and on the NPU alone."""

import zlib

import pytest

from onnxplace.machine.isolated_sessions import list_taken_nodes, open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.target.device_kinds import DeviceAddress
from tests.support.conformance import Case, PlainSession, case, names, outcome, placements_on
from tests.support.npu_models import NPU

CANDIDATES = 96
PARTS = 4
# A case of one node is cut where it is surrounded.
PLACEMENTS = [placements_on(NPU, "cpu:0")[1], placements_on("cpu:0", NPU)[1], placements_on(NPU)[0]]


def sample() -> list[str]:
    """Return the same cases every time, of the kind `node`."""
    return sorted(names("node"), key=lambda name: zlib.crc32(name.encode()))[:CANDIDATES]


def is_taken(found: Case) -> bool:
    """Return whether the NPU takes all nodes of a case of float32 that a CPU can compute, too."""
    values = [*found.model.graph.input, *found.model.graph.output]
    if any(value.type.tensor_type.elem_type != 1 for value in values):
        return False
    for index, node in enumerate(found.model.graph.node):
        node.name = str(index)
    entries = {"session.record_ep_graph_assignment_info": "1"}
    options = make_session_options([0], "none", entries)
    try:
        PlainSession(found.model)
        session = open_session(found.model.SerializeToString(), options, DeviceAddress.of(NPU))
    except Exception:  # noqa: BLE001 - a case that does not open is not taken
        return False
    return len(list_taken_nodes(session, DeviceAddress.of(NPU))) == len(found.model.graph.node)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_cases_that_the_npu_takes_pass_in_every_split(part):
    taken = [name for name in sample()[part::PARTS] if is_taken(case("node", name))]
    outcomes = [outcome("node", name, PLACEMENTS, NPU) for name in taken]
    assert [item for item in outcomes if item.status == "failed"] == []
    assert sum(item.status == "passed" for item in outcomes) > len(outcomes) / 2 > 0
