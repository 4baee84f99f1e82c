"""A sample of ONNX's conformance suite with forced splits; all of it: `python -m benchmarks.conformance`."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest

from tests.support.conformance import Case, Forced, case, failures, outcome, placements, sample_cases, surrounded

PARTS = 24


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_cases_that_onnxruntime_passes_pass_in_every_split(part: int):
    check([*sample_cases(hard=3, other=24), ("light", "test_shufflenet")][part::PARTS])


def test_a_few_of_these_cases_pass():
    check(sample_cases(hard=3, other=24, quick=True)[::PARTS])


def check(cases: list[tuple[str, str]]) -> None:
    outcomes = [outcome(kind, name, choose_placements(name)) for kind, name in cases]
    assert [item for item in outcomes if item.status == "failed"] == []
    assert sum(item.status == "passed" for item in outcomes) > len(outcomes) / 4


def choose_placements(name: str) -> list[Forced]:
    """Return half of the placements of a case: those on two devices, or those on three."""
    seed = crc32(name.encode())
    return [item for item in placements(seed) if item.devices == 2 + seed % 2]


def small() -> Case:
    small_case = case("node", "test_add")
    assert small_case is not None
    return small_case


def test_a_wrong_result_fails_in_every_placement():
    inputs, outputs = small().data_sets[0]
    wrong = replace(small(), data_sets=[(inputs, [np.asarray(item) + 1 for item in outputs])])
    assert len(list(failures(wrong))) == len([item for item in placements(0) if not item.surrounded])
    assert list(failures(small())) == []


def test_every_input_and_output_passes_through_an_identity():
    model = surrounded(small().model)
    assert model is not None
    assert [node.op_type for node in model.graph.node] == ["Identity", "Identity", "Add", "Identity"]
    assert [value.name for value in model.graph.input] == [value.name for value in small().model.graph.input]
    assert [value.name for value in model.graph.output] == [value.name for value in small().model.graph.output]
    middle = model.graph.node[2]
    assert not {*middle.input, *middle.output} & {value.name for value in (*model.graph.input, *model.graph.output)}


def test_placements_are_the_same_for_the_same_seed():
    assert placements(7) == placements(7) != placements(8)
    assert {item.devices for item in placements(7)} == {2, 3}
