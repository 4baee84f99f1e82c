"""Conversations: states of their own over one copy of the weights, which never mix and do not wait for each other."""

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import onnxplace
from onnxplace.runtime.interface import Runtime, RuntimeSession
from onnxplace.runtimes.execution.sessions import EngineSession
from onnxplace.runtimes.onnxruntime import OnnxRuntime
from onnxplace.testing.runtime_contract import check_runtime
from tests.support.chains import cached_decoder
from tests.support.fault_checks import HUNG_SECONDS, list_worker_threads, wait_until
from tests.support.ping_pong import PingPong, compile_ping_pong, make_feeds, make_start

NAMES = ["y", "total_next", "log_next"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> onnxplace.Bundle:
    return compile_ping_pong(tmp_path_factory.mktemp("ping_pong"))


@pytest.fixture
def session(bundle):
    with onnxplace.InferenceSession(bundle) as opened:
        yield opened
        opened.close(timeout=0)


def assert_step(outputs, reference: PingPong, feeds) -> None:
    expected = reference.step(feeds)
    for name in outputs:
        np.testing.assert_array_equal(outputs[name], expected[name])


# ------------------------------------------------------------------------------------------------------- own states


def test_each_conversation_has_its_own_states_and_the_session_has_others(session):
    first, second = session.conversation(), session.conversation()
    users = {first: PingPong(), second: PingPong(), session: PingPong()}
    for number in range(4):
        for index, (user, reference) in enumerate(users.items()):
            feeds = make_feeds(number + 10 * index, **(make_start(index) if number == 0 else {}))
            assert_step(dict(zip(NAMES, user.run(NAMES, feeds))), reference, feeds)


def test_a_conversation_is_a_session(session):
    results, finished = [], threading.Event()
    with session.conversation() as conversation:
        assert isinstance(conversation, onnxplace.Conversation)
        assert [item.name for item in conversation.get_outputs()] == ["y", "picked"]
        reference = PingPong()
        feeds = make_feeds(0, **make_start())
        assert_step(conversation.run_timed(feeds, timeout=HUNG_SECONDS).outputs, reference, feeds)
        assert_step(conversation.submit(make_feeds(1), NAMES).result(HUNG_SECONDS).outputs, reference, make_feeds(1))
        conversation.run_async(NAMES, make_feeds(2), lambda *arguments: (results.append(arguments), finished.set()))
        assert finished.wait(HUNG_SECONDS)
        assert_step(dict(zip(NAMES, results[0][0])), reference, make_feeds(2))
        conversation.reset_state()
        with pytest.raises(onnxplace.FeedError, match="S007"):
            conversation.run(None, make_feeds(3))
        another = conversation.conversation()
        assert_step(another.run_timed(feeds).outputs, PingPong(), feeds)


def test_a_reset_and_a_failure_lose_the_states_of_one_conversation_only(session):
    first, second = session.conversation(), session.conversation()
    for user in (first, second, session):
        user.run(None, make_feeds(1, **make_start()))
    first.reset_state()
    failing = second.submit(make_feeds(2, fails=True))
    assert isinstance(failing.exception(HUNG_SECONDS), onnxplace.ExecutionError)
    with pytest.raises(onnxplace.FeedError, match="none is stored"):
        first.run(None, make_feeds(2))
    with pytest.raises(onnxplace.FeedError, match="the previous request failed and lost it"):
        second.run(None, make_feeds(2))
    (total,) = session.run(["total_next"], make_feeds(2))
    np.testing.assert_array_equal(total, make_feeds(1)["x"] + make_feeds(2)["x"])


def test_states_that_are_split_over_devices_are_kept_by_conversation(tmp_path):
    bundle = onnxplace.compile(
        cached_decoder(),
        tmp_path / "out",
        devices="cpu:0,cpu:1",
        shape={"seq": 1, "past": 8},
        state={"present": "past"},
        pipeline="optimize,profile{estimate=true},shard{ways=2,weights=least},coplace,fuse,m-etf,split,emit",
    )
    assert bundle.manifest.sharding.states
    random = np.random.default_rng(0)
    tokens = {name: [random.standard_normal((1, 1, 64)).astype("f4") for _ in range(4)] for name in "ab"}
    start = {"past": np.zeros((1, 4, 0, 16), "f4")}

    def run_alone(name):
        with onnxplace.InferenceSession(bundle) as session:
            return [
                session.run(["y", "present"], {"x": x, **(start if index == 0 else {})})
                for index, x in enumerate(tokens[name])
            ]

    expected = {name: run_alone(name) for name in tokens}
    with onnxplace.InferenceSession(bundle) as session:
        conversations = {name: session.conversation() for name in tokens}
        for index in range(4):
            for name, conversation in conversations.items():
                feeds = {"x": tokens[name][index], **(start if index == 0 else {})}
                for output, reference in zip(conversation.run(["y", "present"], feeds), expected[name][index]):
                    assert output.shape == reference.shape
                    np.testing.assert_allclose(output, reference, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- overlap


@dataclass
class Gate:
    """Holds requests of one conversation inside a segment until it is opened."""

    engine: object
    held: object
    """The states of the conversation."""
    entered: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    started: list[tuple[object, str]] = field(default_factory=list)
    """Conversation and segment of all calls."""

    def run_segment(self, device, segment, values, request):
        self.started.append((request.conversation, segment.record.id))
        if request.conversation is self.held and segment.record.id == "cpu1-000":
            self.entered.set()
            assert self.opened.wait(HUNG_SECONDS)
        type(self.engine).run_segment(self.engine, device, segment, values, request)


def test_a_conversation_begins_while_another_has_a_long_queue(session, monkeypatch):
    """Today's queue would give its devices to `first` until all three of its requests have ended."""
    first, second = session.conversation(), session.conversation()
    engine = session._session.engine
    gate = Gate(engine, first._session._carried)
    monkeypatch.setattr(engine, "run_segment", gate.run_segment)
    futures = [first.submit(make_feeds(number, **(make_start() if number == 0 else {})), NAMES) for number in range(3)]
    assert gate.entered.wait(HUNG_SECONDS)
    other = second.submit(make_feeds(7, **make_start(1)), NAMES)
    begun = (second._session._carried, "cpu0-000")
    gate.opened.set()
    feeds = make_feeds(7, **make_start(1))
    assert_step(other.result(HUNG_SECONDS).outputs, PingPong(), feeds)
    reference = PingPong(make_start())
    for number, future in enumerate(futures):
        assert_step(future.result(HUNG_SECONDS).outputs, reference, make_feeds(number))
    first_calls = [
        index for index, (states, name) in enumerate(gate.started) if states is gate.held and name == "cpu0-000"
    ]
    assert gate.started.index(begun) < first_calls[1], "the second conversation is not behind the queue of the first"


def test_a_stateless_bundle_has_conversations_too(tmp_path):
    bundle = compile_ping_pong(tmp_path, stateless=True)
    with onnxplace.InferenceSession(bundle) as session, session.conversation() as conversation:
        feeds = make_feeds(3, **make_start(2))
        for _ in range(3):
            assert_step(conversation.run_timed(feeds, NAMES).outputs, PingPong(), feeds)


def test_threads_with_a_conversation_each_share_one_session(session):
    def talk(number):
        reference, outputs = PingPong(), []
        with session.conversation() as conversation:
            for index in range(20):
                feeds = make_feeds(number + index, **(make_start(number) if index == 0 else {}))
                outputs.append((conversation.run_timed(feeds, NAMES).outputs, reference, feeds))
                assert_step(*outputs[-1])
        return len(outputs)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(talk, range(12))) == [20] * 12


operations = st.lists(
    st.tuples(
        st.integers(0, 3),  # the conversation; 0 is the session
        st.sampled_from(["submit", "submit", "submit", "run", "feed", "reset", "fail", "await", "reopen"]),
    ),
    max_size=40,
)


@dataclass
class Talk:
    """One conversation, its reference, and its requests that were not checked yet."""

    user: onnxplace.InferenceSession
    reference: PingPong = field(default_factory=PingPong)
    pending: list[tuple[object, dict[str, np.ndarray] | None]] = field(default_factory=list)
    lost: bool = True

    def submit(self, number: int, *, feeds_states: bool = False, fails: bool = False) -> None:
        """Submit a request; its reference is None if it fails."""
        feeds = make_feeds(number, fails=fails, **(make_start(number) if feeds_states else {}))
        future = self.user.submit(feeds, NAMES)
        begins = feeds_states or not self.lost
        works = begins and not fails
        self.lost = not works if begins else self.lost
        self.pending.append((future, self.reference.step(feeds) if works else None))

    def check(self) -> None:
        for future, expected in self.pending:
            if expected is None:
                assert isinstance(future.exception(HUNG_SECONDS), (onnxplace.ExecutionError, onnxplace.FeedError))
                continue
            outputs = future.result(HUNG_SECONDS).outputs
            assert set(outputs) == set(expected)
            for name, value in outputs.items():
                np.testing.assert_array_equal(value, expected[name])
        self.pending.clear()


@settings(max_examples=60)
@given(operations, st.sampled_from([2, 3]))
def test_any_interleaving_of_conversations_equals_each_of_them_alone(bundles, steps, devices):
    with onnxplace.InferenceSession(bundles[devices]) as session:
        talks = [Talk(session), *(Talk(session.conversation()) for _ in range(3))]
        for number, (index, operation) in enumerate(steps):
            talk = talks[index]
            if operation == "reset":
                talk.user.reset_state()
                talk.lost = True
            elif operation == "await":
                talk.check()
            elif operation == "reopen" and index:
                talk.user.close()
                talk.check()
                talks[index] = Talk(session.conversation())
            else:
                talk.submit(number, feeds_states=operation == "feed", fails=operation == "fail")
                if operation == "run":
                    talk.check()
        for talk in talks:
            talk.check()


@pytest.fixture(scope="module")
def bundles(tmp_path_factory, bundle):
    return {2: bundle, 3: compile_ping_pong(tmp_path_factory.mktemp("three"), 3)}


# ---------------------------------------------------------------------------------------------------------- the end


def test_closing_a_conversation_waits_for_its_runs_and_frees_its_states(session):
    conversation = session.conversation()
    futures = [conversation.submit(make_feeds(n, **(make_start() if n == 0 else {})), NAMES) for n in range(5)]
    conversation.close()
    reference = PingPong(make_start())
    for number, future in enumerate(futures):  # the last may be on its way
        assert_step(future.result(HUNG_SECONDS).outputs, reference, make_feeds(number))
    assert not conversation._session._carried._stored
    for call in (
        lambda: conversation.run(None, make_feeds(1, **make_start())),
        lambda: conversation.submit(make_feeds(1)),
    ):
        with pytest.raises(onnxplace.ExecutionError, match=r"X002.*the conversation is closed") as raised:
            call()
        assert "session.conversation()" in raised.value.hint
    conversation.close()
    conversation.reset_state()
    session.run(None, make_feeds(1, **make_start()))


def test_closing_with_a_timeout_ends_the_runs_of_this_conversation_only(session, monkeypatch):
    monkeypatch.setattr(onnxplace.runtimes.execution.engine, "END_GRACE_SECONDS", 0.1)
    first, second = session.conversation(), session.conversation()
    engine = session._session.engine
    gate = Gate(engine, first._session._carried)
    monkeypatch.setattr(engine, "run_segment", gate.run_segment)
    held = first.submit(make_feeds(0, **make_start()))
    assert gate.entered.wait(HUNG_SECONDS)
    other = second.submit(make_feeds(1, **make_start()), NAMES)
    first.close(timeout=0)
    gate.opened.set()
    with pytest.raises(onnxplace.ExecutionError, match="the conversation was closed"):
        held.result(HUNG_SECONDS)
    assert_step(other.result(HUNG_SECONDS).outputs, PingPong(), make_feeds(1, **make_start()))
    assert not first._session._carried._stored


def test_a_callback_may_close_the_conversation_that_calls_it(session):
    conversation, finished = session.conversation(), threading.Event()
    states = conversation._session._carried
    future = conversation.submit(make_feeds(0, **make_start()))
    future.add_done_callback(lambda _: (conversation.close(), finished.set()))
    assert finished.wait(HUNG_SECONDS)
    assert not states._stored


def test_a_dropped_conversation_frees_its_states_and_leaves_the_session_open(session):
    conversation = session.conversation()
    conversation.run(None, make_feeds(0, **make_start()))
    stored = [weakref.ref(value) for value in conversation._session._carried._stored.values()]
    assert len(stored) == 2
    del conversation
    gc.collect()
    assert not any(reference() is not None for reference in stored)
    session.run(None, make_feeds(1, **make_start()))


def test_a_conversation_dropped_with_a_run_in_flight_completes_it(session):
    conversation = session.conversation()
    states = weakref.ref(conversation._session._carried)
    future = conversation.submit(make_feeds(0, **make_start()), NAMES)
    del conversation
    assert_step(future.result(HUNG_SECONDS).outputs, PingPong(make_start()), make_feeds(0))
    session.run(None, make_feeds(1, **make_start()))  # the workers have forgotten the request before
    gc.collect()
    assert states() is None


def test_a_conversation_keeps_its_session_alive(bundle):
    conversation = onnxplace.InferenceSession(bundle).conversation()
    gc.collect()
    conversation.run(None, make_feeds(0, **make_start()))
    conversation.run(None, make_feeds(1))
    del conversation
    gc.collect()
    wait_until(lambda: not list_worker_threads())


def test_closing_the_session_closes_its_conversations(bundle):
    session = onnxplace.InferenceSession(bundle)
    conversation = session.conversation()
    conversation.run(None, make_feeds(0, **make_start()))
    future = conversation.submit(make_feeds(1), NAMES)
    session.close()
    assert future.result(0).outputs
    assert not conversation._session._carried._stored
    for call in (lambda: conversation.run(None, make_feeds(1, **make_start())), session.conversation):
        with pytest.raises(onnxplace.ExecutionError, match=r"X002.*the session is closed"):
            call()
    conversation.close()
    assert not list_worker_threads()


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_conversation_cannot_be_copied(session, duplicate):
    conversation = session.conversation()
    for original in (conversation, conversation._session):
        with pytest.raises(onnxplace.UsageError, match=r"X006.*cannot be copied or pickled"):
            duplicate(original)
    with pytest.raises(onnxplace.UsageError, match="a Conversation cannot"):
        pickle.dumps(conversation)


# ----------------------------------------------------------------------------------------------------- other runtimes


class PlainSession(RuntimeSession):
    """A session of a plugin that was written before conversations."""

    def __init__(self, session: EngineSession) -> None:
        self.session = session

    def submit(self, feeds, states=()):
        return self.session.submit(feeds, states)

    @property
    def states(self):
        return self.session.states

    def close(self, timeout=None):
        self.session.close(timeout)


class PlainRuntime(Runtime):
    """Its runtime."""

    name = "plain"
    keeps_state = True

    def open(self, bundle, *, trace=False):
        return PlainSession(OnnxRuntime().open(bundle, trace=trace))


def test_a_runtime_without_conversations_runs_and_refuses_them(bundle, monkeypatch):
    monkeypatch.setattr("onnxplace.pipeline.registry.find_plugin", lambda kind, name: PlainRuntime)
    with onnxplace.InferenceSession(bundle, runtime="plain") as session:
        session.run(None, make_feeds(0, **make_start()))
        session.run(None, make_feeds(1))
        with pytest.raises(onnxplace.UsageError, match=r"U045.*PlainSession has one set of states") as raised:
            session.conversation()
        assert "onnxruntime" in raised.value.hint


def test_conversations_of_the_simulated_runtime_end_with_their_session(bundle):
    session = onnxplace.InferenceSession(bundle, runtime="simulated")
    first, second = session.conversation(), session.conversation()
    assert first.run_timed(make_feeds(0, **make_start())).seconds > 0
    first.close()
    with pytest.raises(onnxplace.ExecutionError, match="the conversation is closed"):
        first.run(None, make_feeds(0))
    second.run(None, make_feeds(0))
    session.close()
    for call in (lambda: second.run(None, make_feeds(0)), session.conversation):
        with pytest.raises(onnxplace.ExecutionError, match="the session is closed"):
            call()


class SharingSession(PlainSession):
    """A session whose conversations wrongly share one set of states."""

    def open_conversation(self):
        return PlainSession(self.session)


class SharingRuntime(PlainRuntime):
    """Its runtime."""

    def open(self, bundle, *, trace=False):
        return SharingSession(OnnxRuntime().open(bundle, trace=trace))


def test_the_contract_finds_conversations_that_share_states():
    with pytest.raises(AssertionError, match="expected"):
        check_runtime(SharingRuntime)


def test_a_runtime_without_conversations_satisfies_the_contract():
    check_runtime(PlainRuntime)
