"""Carried states in parts: cut, joined, and named."""

from types import SimpleNamespace

import numpy as np
import pytest

from onnxplace.bundle.manifest import ShardingRecord, SplitStateRecord
from onnxplace.bundle.manifest_checks import list_split_faults
from onnxplace.bundle.split_states import SplitStates
from onnxplace.errors import FeedError


class Manifest:
    """Only what split states read of a manifest."""

    def __init__(self, *states: SplitStateRecord) -> None:
        self.sharding = ShardingRecord(ways=2, exchanges={}, kinds=(), states=states)


CACHE = SplitStateRecord(
    input="past", output="present", axis=1, inputs=("past/0", "past/1"), outputs=("new/0", "new/1"), sizes=(2, 1)
)
COPY = SplitStateRecord(input="h", output="k", axis=-1, inputs=("h/0", "h/1"), outputs=("k/0", "k/1"))


@pytest.fixture
def states() -> SplitStates:
    return SplitStates(Manifest(CACHE, COPY))  # type: ignore[arg-type]


def test_whole_states_are_cut_and_parts_joined(states):
    past, other = np.arange(12.0).reshape(2, 3, 2), np.ones(2)
    parts = states.cut_feeds({"past": past, "h": other, "x": other})
    assert [parts[name].shape for name in CACHE.inputs] == [(2, 2, 2), (2, 1, 2)]
    assert set(parts) == {*CACHE.inputs, *COPY.inputs, "x"}
    joined = states.join_feeds(parts)
    assert set(joined) == {"past", "h", "x"}
    np.testing.assert_array_equal(joined["past"], past)


def test_parts_that_several_devices_have_are_copied_and_joined_once():
    shared = SplitStateRecord(
        input="past", output="present", axis=1, inputs=tuple("abcd"), outputs=tuple("efgh"), sizes=(2,) * 4, copies=2
    )
    states = SplitStates(Manifest(shared))  # type: ignore[arg-type]
    past = np.arange(8.0).reshape(1, 4, 2)
    parts = states.cut_feeds({"past": past})
    for name, expected in zip("abcd", (past[:, :2], past[:, :2], past[:, 2:], past[:, 2:]), strict=True):
        np.testing.assert_array_equal(parts[name], expected)
    np.testing.assert_array_equal(states.join_feeds(parts)["past"], past)
    with pytest.raises(FeedError, match="expected 4 elements along axis 1"):
        states.cut_feeds({"past": np.zeros((1, 8, 2))})


def test_a_whole_state_that_is_fed_anew_replaces_parts_of_the_call_before(states):
    past = np.zeros((2, 3, 2))
    feeds = {"past/0": np.ones((2, 2, 2)), "past/1": np.ones((2, 1, 2)), "past": past}
    joined = states.join_feeds(feeds)
    assert set(joined) == {"past"}
    assert joined["past"] is past


def test_outputs_are_found_whole_and_named_in_parts(states):
    present = np.arange(6.0).reshape(1, 3, 2)
    outputs = states.cut_outputs({"present": present, "y": present})
    np.testing.assert_array_equal(states.find_output(outputs, "present"), present)
    assert states.find_output(outputs, "k") is None
    assert states.expand_names(["y", "present", "k"]) == ["y", "new/0", "new/1", "k/0", "k/1"]


def test_a_state_of_another_size_is_refused_by_name(states):
    with pytest.raises(FeedError, match="expected 3 elements along axis 1") as caught:
        states.cut_feeds({"past": np.zeros((2, 4, 2))})
    assert "past" in caught.value.where


def test_bundles_without_split_states_have_none():
    assert not SplitStates(type("M", (), {"sharding": None})())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": ("past/0",)},
        {"inputs": ("past/0", "other")},
        {"outputs": ("new/1", "new/0")},
        {"sizes": (3,)},
        {"inputs": (), "outputs": ()},
    ],
)
def test_parts_that_are_not_states_of_the_bundle_are_refused(change):
    manifest = Manifest(CACHE.model_copy(update=change))
    manifest.states = [SimpleNamespace(input=part, output=new) for part, new in zip(CACHE.inputs, CACHE.outputs)]
    assert any("the parts of state 'past'" in fault for fault in list_split_faults(manifest))


def test_parts_that_are_states_of_the_bundle_pass():
    manifest = Manifest(CACHE)
    manifest.states = [SimpleNamespace(input=part, output=new) for part, new in zip(CACHE.inputs, CACHE.outputs)]
    assert not list(list_split_faults(manifest))
