"""Weights that stream to devices of several kinds, on several routes, to ranks, and after a device was lost."""

import random

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st
from onnx import parser

import onnxplace
from onnxplace.errors import FallbackWarning, NoteWarning
from tests.runtimes.test_weight_streams import PAGE, ask, ask_often, converse
from tests.support.bound_device import bound_kind
from tests.support.fake_streams import FakeDriver, FakeGpu, FakeMemory, register_fake_kind, use_fake_driver
from tests.support.fault_checks import HUNG_SECONDS, list_worker_threads
from tests.support.isolated import crash_at_next_run
from tests.support.small_programs import Talker
from tests.support.static_device import static_kind
from tests.support.streamed_chains import StreamedChain
from tests.support.weight_faults import MEANINGS, draw_fault, inject

HOMES = ("disk", "host", "disk", "disk")


def make_chain(device, **options):
    return StreamedChain((device,) * len(HOMES), HOMES, 2 * PAGE, **options)


def test_a_device_that_only_sessions_reach_reads_the_pool_in_the_hosts_memory(tmp_path):
    with bound_kind():
        chain = StreamedChain(("bound:0", "cpu:0", "bound:0", "bound:0"), HOMES, 2 * PAGE)
        with onnxplace.InferenceSession(chain.compile(tmp_path)) as session:
            converse(session, chain, 10, random.Random(0))
    assert not list_worker_threads()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_device_that_only_sessions_reach_takes_all_types(tmp_path, dtype):
    with bound_kind():
        chain = make_chain("bound:0", dtype=dtype)
        with onnxplace.InferenceSession(chain.compile(tmp_path)) as session:
            ask_often(Talker(session, chain), 3)


def test_sessions_for_each_size_and_that_on_the_host_take_weights_that_stream(tmp_path):
    with static_kind():
        chain = make_chain("static:0", states=0)
        with onnxplace.InferenceSession(chain.compile(tmp_path)) as session:
            ask_often(Talker(session, chain), 3)
            with pytest.warns(NoteWarning, match="the host computes it"):
                ask(Talker(session, chain), 4, 5)
            ask(Talker(session, chain), 5, 2)


def test_an_isolated_device_gets_weights_that_stream_and_another_one_takes_over(tmp_path, monkeypatch):
    chain = make_chain("cpu:0")
    bundle = chain.compile(tmp_path, devices="cpu:0{isolate=true}")
    with onnxplace.InferenceSession(bundle, fallback="cpu:1") as session:
        talker = Talker(session, chain)
        ask_often(talker, 3)
        crash_at_next_run(monkeypatch)
        with pytest.warns(FallbackWarning):
            ask(talker, 4)
        ask_often(talker, 3)


def test_routes_have_streams_of_their_own(tmp_path):
    chain = make_chain("cpu:0", states=0)
    bundle = chain.compile(tmp_path, "single,split,replicate{routes=cpu:1},emit", devices="cpu:0,cpu:1")
    with onnxplace.InferenceSession(bundle) as session:
        assert set(session._session.engine._weight_loaders) == {("cpu:0", "cpu:0"), ("cpu:1", "cpu:0")}
        converse(session, chain, 20, random.Random(1))
    assert not list_worker_threads()


def test_after_a_device_with_memory_of_its_own_is_lost_weights_stream_to_the_fallback(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("the driver lost the device")

    chain = make_chain("fake:0", states=0)
    with register_fake_kind(), use_fake_driver(FakeDriver(1)):
        bundle = chain.compile(tmp_path)
        with onnxplace.InferenceSession(bundle, fallback="cpu:0") as session:
            ask(Talker(session, chain), 0)
            with monkeypatch.context() as patch:
                patch.setattr(FakeMemory, "enqueue", fail)
                patch.setattr(FakeGpu, "list_providers", fail)
                with pytest.warns(FallbackWarning):
                    ask(Talker(session, chain), 1)
                for number in range(3):
                    ask(Talker(session, chain), number)
    assert not list_worker_threads()


SEQUENCE = """
<ir_version: 8, opset_import: ["" : 17]>
keep (float[32, 32] h0) => (seq(float[32, 32]) both) { [pair] both = SequenceConstruct(h0, w0) }
"""


def test_a_sequence_keeps_its_numbers_after_its_run(tmp_path):
    """What is not a plain tensor may refer to memory of inputs, which the pool gives to other weights."""
    chain = StreamedChain(("cpu:0",), ("disk",), PAGE, states=0)
    model = parser.parse_model(SEQUENCE)
    model.graph.initializer.append(onnx.numpy_helper.from_array(chain.weights[0], "w0"))
    with chain.streaming():
        bundle = onnxplace.compile(
            model, tmp_path / "b", devices="cpu:0", pipeline="profile{estimate=true},single,split,emit", trial=False
        )
    with onnxplace.InferenceSession(bundle) as session:
        (both,) = session.run(None, {"h0": np.ones((32, 32), np.float32)})
        (pool,) = [stream._pool._bytes for stream in session._session.engine._weight_loaders.values()]
        pool[:] = 0
        np.testing.assert_array_equal(both[1], chain.weights[0])


def test_ranks_read_weights_that_stream(tmp_path):
    pytest.importorskip("mpi4py")
    chain = StreamedChain(("cpu:0", "cpu:1", "cpu:0", "cpu:1"), HOMES, 2 * PAGE)
    options = {"runtime": "mpi", "hosts": "localhost:2", "timeout": HUNG_SECONDS}
    with onnxplace.InferenceSession(chain.compile(tmp_path), **options, trace=True) as session:
        converse(session, chain, 10, random.Random(2))
        # A load that ended before a request began is in none of its events.
        events = [event for timeline in session.list_timelines() for event in timeline.events]
    assert {event.device for event in events if event.kind == "load"} == {"cpu:0", "cpu:1"}


@settings(max_examples=20)
@given(st.sampled_from(sorted(MEANINGS)), st.integers(0, 1 << 30))
def test_faults_of_reads_and_copies_give_no_wrong_answer_and_leave_nothing(tmp_path_factory, kind, seed):
    with register_fake_kind():
        inject(tmp_path_factory.mktemp("faults"), draw_fault(random.Random(seed), kind), seed)
