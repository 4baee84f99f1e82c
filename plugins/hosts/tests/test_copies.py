"""Copies of a bundle behind one session, with sessions that a test lets answer and die."""

import gc
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import onnxplace
from onnxplace.runtime.interface import Result, Runtime, RuntimeSession, SessionStates
from onnxplace.runtimes.execution.futures import ResultFuture
from onnxplace.runtimes.onnxruntime import OnnxRuntime
from onnxplace.testing.runtime_contract import check_runtime
from onnxplace_hosts.replicas import copies
from onnxplace_hosts.replicas.replicated_session import ReplicatedSession
from tests.support.fault_checks import wait_until

WAIT_SECONDS = 60.0
DIED = onnxplace.ExecutionError("K011", "it died", where="cpu:0")
pytestmark = pytest.mark.filterwarnings("ignore:.* is left out:RuntimeWarning")


class FakeSession(RuntimeSession):
    """Answers when the test says so."""

    def __init__(self):
        self.requests, self.cancelled, self.is_closed, self.end = {}, [], False, None
        self.dying = threading.RLock()  # the thread that closes a dead copy must not be in the middle of its requests

    @property
    def failure(self):
        return self.end

    def submit(self, feeds, states=()):
        if self.end is not None:
            raise self.end
        future = ResultFuture()
        self.requests[future] = feeds
        return future

    def answer(self):
        for future, feeds in list(self.requests.items()):
            del self.requests[future]
            future.finish(Result(feeds, (), 0.0), None)

    def die(self):
        with self.dying:
            self.end = DIED
            for future in list(self.requests):
                del self.requests[future]
                future.finish(None, DIED)

    def cancel(self, future):
        self.cancelled.append(future)

    def open_conversation(self):
        return FakeConversation(self)

    def close(self, timeout=None):
        self.is_closed = True
        self.die()


class FakeStates(SessionStates):
    def count_changes(self):
        return 0


class FakeConversation(FakeSession):
    def __init__(self, session):
        super().__init__()
        self.session = session

    @property
    def states(self):
        return FakeStates()

    @property
    def failure(self):
        return self.session.failure


class Opener:
    """Opens fake sessions, or fails as the test says."""

    def __init__(self, problems=()):
        self.name, self.sessions, self.problems, self.is_cancelled = "node", [], list(problems), False

    def open(self):
        if self.problems:
            raise self.problems.pop(0)
        self.sessions.append(FakeSession())
        return self.sessions[-1]

    def cancel(self):
        self.is_cancelled = True

    @property
    def session(self):
        return self.sessions[-1]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(copies, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(copies, "WATCH_SECONDS", 0.01)


def open_copies(*openers, states=(), max_in_flight=8):
    bundle = SimpleNamespace(path="model.bundle", state_inputs=[SimpleNamespace(name=name) for name in states])
    return ReplicatedSession(bundle, openers, max_in_flight)


@pytest.fixture
def pair():
    openers = Opener(), Opener()
    with open_copies(*openers) as session:
        yield session, *openers


def test_each_request_goes_to_the_copy_with_the_fewest_in_flight_and_then_in_turn(pair):
    session, first, second = pair
    futures = [session.submit({"number": number}) for number in range(4)]
    assert [list(item.session.requests.values()) for item in (first, second)] == [
        [{"number": 0}, {"number": 2}],
        [{"number": 1}, {"number": 3}],
    ]
    second.session.answer()
    futures += [session.submit({"number": 4}), session.submit({"number": 5})]
    assert len(second.session.requests) == 2
    first.session.answer(), second.session.answer()
    assert [future.result(0).outputs["number"] for future in futures] == list(range(6))
    assert [item.requests_in_flight for item in session.list_copies()] == [0, 0]


def die_and_come_back(session, opener):
    opener.session.die()
    wait_until(lambda: len(opener.sessions) == 2 and all(item.is_open for item in session.list_copies()))


def test_requests_of_a_dead_copy_are_repeated_once_and_it_comes_back(pair):
    session, first, second = pair
    futures = [session.submit({"number": number}) for number in range(4)]
    with pytest.warns(RuntimeWarning, match=r"model.bundle: copy 0 on node is left out: error\[K011\] cpu:0: it died"):
        die_and_come_back(session, first)
    assert len(second.session.requests) == 4
    second.session.die()  # two of the requests have met two deaths
    assert [future.exception(0) for future in (futures[0], futures[2])] == [DIED, DIED]
    first.session.answer()
    assert [futures[number].result(0).outputs["number"] for number in (1, 3)] == [1, 3]
    assert [item.failures for item in session.list_copies()] == [1, 1]


def test_a_request_that_was_cancelled_is_not_repeated(pair):
    session, first, second = pair
    future = session.submit({})
    session.cancel(future)
    assert len(first.session.cancelled) == 1
    first.session.die()
    assert future.exception(0) is DIED
    assert not second.session.requests


def test_a_copy_that_dies_idle_is_noticed(pair):
    session, first, _ = pair
    first.session.end = DIED
    wait_until(lambda: session.list_copies()[0].failures == 1)


def test_without_a_copy_requests_fail_until_one_is_back(monkeypatch):
    monkeypatch.setattr(copies, "MAX_PAUSE_SECONDS", 0.01)
    down = [onnxplace.ExecutionError("K012", "too late")] * 1_000_000  # more than there are attempts in this test
    first, second = Opener(), Opener()
    with open_copies(first, second) as session:
        first.problems = second.problems = down
        future = session.submit({})
        first.session.end = second.session.end = DIED
        with pytest.raises(onnxplace.ExecutionError, match=r"K014.*no copy is left: copy 0 on node: .*copy 1 on node"):
            session.submit({})
        first.sessions[0].die()
        assert future.exception(0) is DIED  # there is no other copy
        down.clear()
        wait_until(lambda: all(item.is_open for item in session.list_copies()))
        session.submit({})
        assert len(first.session.requests) + len(second.session.requests) == 1


def test_pauses_between_attempts_grow_up_to_a_limit(monkeypatch):
    pauses = []

    def sleep(self, seconds):
        pauses.append(seconds)
        return not self.closed

    monkeypatch.setattr(copies.CopySet, "_sleep", sleep)
    monkeypatch.setattr(copies, "MAX_PAUSE_SECONDS", 0.04)
    opener = Opener()
    with open_copies(opener, Opener()) as session:
        opener.problems = [onnxplace.ExecutionError("K012", "too late")] * 4
        opener.session.die()
        wait_until(lambda: len(opener.sessions) == 2)
        assert session.list_copies()[0].last_failure == "error[K012] too late"
    assert pauses == [0.01, 0.02, 0.04, 0.04, 0.04]


def open_and_wait(*openers):
    session = open_copies(*openers)
    wait_until(lambda: all(item.is_open for item in session.list_copies()))
    return session


def test_a_copy_that_cannot_be_opened_is_left_out_and_the_others_work():
    late = Opener([onnxplace.ExecutionError("K012", "too late")])
    with pytest.warns(RuntimeWarning, match="copy 1 on node is left out.*too late"):
        session = open_and_wait(Opener(), late)
    session.close()


@pytest.mark.parametrize(
    ("problems", "expected"),
    [
        ([[onnxplace.TargetError("K005", "other versions")], []], "K005"),
        ([[onnxplace.ExecutionError("K011", "one")], [onnxplace.ExecutionError("K012", "two")]], "K011"),
    ],
)
def test_mistakes_and_the_failure_of_all_copies_are_raised_and_leave_none_open(problems, expected):
    openers = [Opener(items) for items in problems]
    with pytest.raises(onnxplace.OnnxplaceError) as caught:
        open_copies(*openers)
    assert caught.value.code == expected
    assert all(session.is_closed for opener in openers for session in opener.sessions)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("onnxplace cop")]


def test_requests_wait_while_all_copies_are_full_at_most_for_their_timeout():
    first, second = Opener(), Opener()
    with open_copies(first, second, max_in_flight=1) as session:
        futures = [session.submit({}), session.submit({})]
        with pytest.raises(onnxplace.RunTimeoutError, match=r"X007.*all copies have as many requests in flight"):
            session.run({}, timeout=0.05)
        waiting = threading.Thread(target=lambda: futures.append(session.submit({"waited": True})))
        waiting.start()
        time.sleep(0.05)
        assert len(futures) == 2
        second.session.answer()
        waiting.join(WAIT_SECONDS)
        assert list(second.session.requests.values()) == [{"waited": True}]


def test_a_run_is_repeated_on_another_copy_and_a_failure_of_its_own_is_not(pair):
    session, first, second = pair
    results = []
    runner = threading.Thread(target=lambda: results.append(session.run({"number": 1}).outputs))
    runner.start()
    wait_until(lambda: first.session.requests)
    first.sessions[0].die()
    wait_until(lambda: second.session.requests)
    second.session.answer()
    runner.join(WAIT_SECONDS)
    assert results == [{"number": 1}]
    refused = onnxplace.ExecutionError("X001", "a segment failed")
    future = session.submit({})
    target = first if first.session.requests else second
    (inner,) = target.session.requests
    inner.finish(None, refused)
    assert future.exception(0) is refused


def test_conversations_spread_over_copies_and_stay_there_until_their_copy_dies():
    first, second = Opener(), Opener()
    with open_copies(first, second, states=("past",)) as session:
        users = [session.open_conversation() for _ in range(4)]
        for user in users:
            user.submit({"past": 0})
        assert [user._states.binding.copy.index for user in users] == [0, 1, 0, 1]
        future = users[0].submit({})
        assert list(users[0]._states.binding.own.requests.values()) == [{"past": 0}, {}]
        own = users[0]._states.binding.own
        own.answer()
        assert future.result(0).outputs == {}
        first.session.end = DIED
        for call in (lambda: users[0].submit({}), users[0].states.read, users[0].states.restore):
            with pytest.raises(onnxplace.FeedError, match=r"S007.*the copy of the bundle that had"):
                call()
        users[0].submit({"past": 1})  # all states are fed
        users[2].states.reset()
        users[2].submit({})
        assert not own.requests
        users[1].close()
        with pytest.raises(onnxplace.ExecutionError, match=r"X002.*the conversation is closed"):
            users[1].submit({})


def test_changes_on_a_copy_that_died_still_count():
    with open_copies(opener := Opener(), states=("h",)) as session:
        user = session.open_conversation()
        future = user.submit({"h": 0})
        own = user._states.binding.own
        own.answer()
        assert future.result(0)
        user.submit({})
        die_and_come_back(session, opener)
        assert user.states.count_changes() == 1, "the request that it had not answered changed nothing"


def test_closing_ends_attempts_to_open_a_copy():
    opener, began = Opener(), threading.Event()

    def hang():
        began.set()
        wait_until(lambda: opener.is_cancelled)
        raise onnxplace.ExecutionError("K011", "ended")

    session = open_copies(opener, Opener())
    opener.session.die()
    opener.open = hang
    assert began.wait(WAIT_SECONDS)
    session.close()
    with pytest.raises(onnxplace.ExecutionError, match=r"X002"):
        session.submit({})
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("onnxplace cop")]


def test_a_forgotten_session_ends_its_threads():
    session = open_copies(Opener(), Opener())
    del session
    gc.collect()
    wait_until(lambda: not [item for item in threading.enumerate() if item.name.startswith("onnxplace cop")])


class Replicated(Runtime):
    """Two copies of a bundle on the threads of this process."""

    name, keeps_state = "replicated", True

    def open(self, bundle, *, trace=False, max_in_flight=8):
        def make_opener():
            return SimpleNamespace(
                name="here",
                open=lambda: OnnxRuntime().open(bundle, trace=trace, max_in_flight=max_in_flight),
                cancel=lambda: None,
            )

        return ReplicatedSession(bundle, [make_opener(), make_opener()], max_in_flight)


def test_copies_satisfy_the_contract_of_runtimes():
    check_runtime(Replicated)


class NoCopyError(Exception):
    pass


def submit(session, number):
    try:
        return session.submit({"number": number})
    except onnxplace.ExecutionError as problem:
        raise NoCopyError if problem.code == "K014" else problem from None


STEPS = st.lists(st.sampled_from(["submit", "answer 0", "answer 1", "die 0", "die 1"]), min_size=1, max_size=20)


@settings(max_examples=30)
@given(STEPS)
def test_every_request_gets_its_answer_or_an_error_whatever_dies(steps):
    openers = [Opener(), Opener()]
    futures = []
    with open_copies(*openers) as session:
        for step in steps:
            word, _, index = step.partition(" ")
            if word == "submit":
                with suppress(NoCopyError):
                    futures.append((len(futures), submit(session, len(futures))))
            else:
                getattr(openers[int(index)].session, word)()
        for opener in openers:
            for opened in list(opener.sessions):
                opened.answer()
        for number, future in futures:
            problem = future.exception(WAIT_SECONDS)
            assert problem is DIED or (problem is None and future.result(0).outputs == {"number": number})
        assert [item.requests_in_flight for item in session.list_copies()] == [0, 0]


def test_arrays_of_results_are_those_of_the_copy(pair):
    session, first, _ = pair
    array = np.arange(3)
    future = session.submit({"array": array})
    first.session.answer()
    assert future.result(0).outputs["array"] is array
