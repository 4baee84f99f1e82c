"""The pass that keeps nodes off devices on which they are too inexact."""

import numpy as np
import pytest

from onnxplace.errors import InfeasibleError, TargetError, UsageError
from onnxplace.facts import Profile, is_refused
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.passes import limit_errors
from onnxplace.pipeline.pipeline import Pipeline, make_pass
from onnxplace.state import State
from onnxplace.target.target import Device, Target
from tests.conftest import branches
from tests.support.half_device import half_kind as half_kind

PROFILE = "optimize,profile{estimate=true}"


def limit(maximum, devices="half:0,cpu:0", target=None):
    state = State(target or local_target(devices)).with_facts(bind(load(branches()), {"batch": 4}, {}))
    return Pipeline.parse(f"{PROFILE},limit-errors{{maximum={maximum!r}}}").run(state)[0]


def list_refused(state):
    return [name for name, seconds in state[Profile].seconds.items() if is_refused(seconds).any()]


def test_a_large_maximum_changes_no_cost_and_needs_no_note():
    state, before = limit(0.1), limit_errors.LimitErrors
    assert before.name == "limit-errors"
    assert list_refused(state) == []
    assert all(note.code != "C008" for note in state.diagnostics)


def test_a_small_maximum_lets_the_device_refuse_all_nodes_and_says_so():
    state = limit(1e-6)
    profile = state[Profile]
    refused = {name: is_refused(seconds) for name, seconds in profile.seconds.items()}
    assert refused["half/Half 1"].all()
    assert not refused["cpu/2"].any()
    (note,) = [note for note in state.diagnostics if note.code == "C008"]
    assert note.where == "half/Half 1"
    assert "5 of 5 nodes" in note.message
    assert (profile.errors["half/Half 1"] > 0).all()


def test_what_a_device_keeps_is_within_the_maximum_together():
    state = limit(4.5e-4)
    profile = state[Profile]
    kept = ~is_refused(profile.seconds["half/Half 1"])
    assert 0 < kept.sum() < len(kept)
    assert np.sqrt((profile.errors["half/Half 1"][kept] ** 2).sum()) <= 4.5e-4


def test_errors_are_measured_once_for_several_maxima(monkeypatch):
    state = limit(0.1)
    monkeypatch.setattr(limit_errors, "measure_errors", None)
    again, _ = Pipeline((make_pass("limit-errors", {"maximum": "1e-6"}),)).run(state)
    assert list_refused(again) == ["half/Half 1"]


def test_cpus_are_exact():
    assert limit(1e-9, "cpu:0,cpu:1")[Profile].errors == {}


def test_a_node_that_is_too_inexact_everywhere_is_named():
    with pytest.raises(InfeasibleError, match="error of node 'left' is too large on every device") as caught:
        limit(1e-6, "half:0")
    assert caught.value.code == "P065"
    assert "cpu:0" in caught.value.hint


def test_errors_of_a_device_that_is_not_here_cannot_be_measured():
    with pytest.raises(TargetError) as caught:
        limit(1e-3, target=Target((Device("cuda:0", 1 << 30, model="H100"), Device("cpu:0", 1 << 30))))
    assert (caught.value.code, caught.value.where) == ("T011", "cuda:0")


@pytest.mark.parametrize("maximum", ["0", "-1", "nan", "much"])
def test_a_maximum_is_a_positive_number(maximum):
    with pytest.raises(UsageError, match="maximum"):
        make_pass("limit-errors", {"maximum": maximum})
