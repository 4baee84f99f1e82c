"""Devices with memory of their own that are lost while a bundle runs, and the device that takes over."""

import numpy as np
import pytest

import onnxplace
from onnxplace.errors import FallbackWarning
from tests.support.endless import endless_bundle, feeds
from tests.support.fake_streams import FakeGpu, FakeMemory
from tests.support.fault_checks import assert_expected, run_at_once
from tests.support.state_checks import START, compile_sums


@pytest.fixture
def lose_devices(monkeypatch):
    """Return a function after which the devices of this kind do nothing any more."""

    def fail(*_):
        raise RuntimeError("the driver lost the device")

    def lose():
        monkeypatch.setattr(FakeMemory, "enqueue", fail)
        monkeypatch.setattr(FakeGpu, "list_providers", fail)

    return lose


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    places = {"spin": "fake:0", "last": "cpu:0", "other": "cpu:0"}
    return endless_bundle(tmp_path_factory.mktemp("endless"), **places, devices="fake:0,cpu:0")


def test_requests_begin_again_on_the_fallback(bundle, lose_devices):
    with onnxplace.InferenceSession(bundle, fallback="cpu:0") as session:
        assert_expected(session.run(None, feeds(3)), 3)
        lose_devices()
        with pytest.warns(FallbackWarning) as told:
            run_at_once(session, 4, 5, 6)
        assert_expected(session.run(None, feeds(6)), 6)
        assert [str(item.message).startswith("fake:0: segment fake0-000 failed: the driver lost") for item in told] == [
            True
        ]


def test_a_run_in_the_thread_of_its_caller_begins_again_too(tmp_path, lose_devices):
    bundle = endless_bundle(tmp_path, "fake:0", "fake:0", "fake:0", devices="fake:0")
    with onnxplace.InferenceSession(bundle, fallback="cpu:0") as session:
        lose_devices()
        with pytest.warns(FallbackWarning):
            assert_expected(session.run(None, feeds(3)), 3)
        assert_expected(session.run(None, feeds(4)), 4)


def test_without_a_fallback_requests_fail_and_name_the_device(bundle, lose_devices):
    with onnxplace.InferenceSession(bundle) as session:
        lose_devices()
        for _ in range(2):
            with pytest.raises(
                onnxplace.ExecutionError, match=r"X001.*fake:0: segment fake0-000 failed: the driver lost"
            ):
                session.run(None, feeds(3))


def test_states_that_are_lost_with_the_device_are_not_replaced_silently(tmp_path, lose_devices):
    given = {"x": np.ones(2, np.float32), "pick": np.zeros(1, np.int64)}
    with onnxplace.InferenceSession(compile_sums(tmp_path, ("fake:0", "cpu:0")), fallback="cpu:0") as session:
        session.protect_states()
        session.run(None, {**given, **START})
        lose_devices()
        for _ in range(2):
            with pytest.raises(
                onnxplace.ExecutionError, match=r"X016.*fake:0: .*the carried states are lost with this"
            ):
                session.run(None, given)
