"""A sample of ONNX's conformance suite with forced splits; all of it: `python -m benchmarks.conformance`."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import zlib
from dataclasses import replace

import numpy as np
import pytest

from tests.support.conformance import Case, case, failures, names, outcome, placements, surrounded

HARD = ("loop", "_if", "scan", "sequence", "optional", "string", "strnorm", "int4", "float8", "bfloat16", "quantize")
"""Parts of names of cases that each can fail at a split in their own way; every third is tested."""
EVERY = 24
"""Of the other cases, one in this many is tested."""
PARTS = 12


def sample() -> list[tuple[str, str]]:
    """Return the same cases every time: kind and name."""
    chosen = []
    for kind in ("node", "simple", "pytorch-converted", "pytorch-operator"):
        for name in names(kind):
            hard = any(part in name.lower() for part in HARD)
            if zlib.crc32(name.encode()) % (3 if hard else EVERY) == 0:
                chosen.append((kind, name))
    return [*chosen, ("light", "test_shufflenet")]


@pytest.mark.parametrize("part", range(PARTS))
def test_cases_that_onnxruntime_passes_pass_in_every_split(part: int):
    outcomes = [outcome(kind, name) for kind, name in sample()[part::PARTS]]
    assert [item for item in outcomes if item.status == "failed"] == []
    assert sum(item.status == "passed" for item in outcomes) > len(outcomes) / 4


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
