"""Sessions of bundles with several plans: the plan of each request, moves of states, and what may go wrong in them."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import onnxruntime
import pytest
from onnx import parser

import onnxplace
from onnxplace import Batching
from onnxplace.errors import ExecutionError, FeedError, NoteWarning, RunTimeoutError
from onnxplace.machine.isolated_sessions import find_processes
from onnxplace.machine.ort_sessions import _custom_libraries
from onnxplace.pipeline.registry import create_runtime
from onnxplace.runtime.interface import Result
from onnxplace.runtimes.execution.segments import OpenSegment
from onnxplace.session.plan_choice import SizeSteps
from onnxplace.session.planned_session import Line, PlannedSession, Ticket
from tests.support.fault_checks import HUNG_SECONDS, list_worker_threads, wait_until
from tests.support.interrupts import Interrupts
from tests.support.planned import (
    APART,
    ENDLESS,
    LARGE,
    PLAIN,
    ROWS,
    SMALL,
    START,
    TURNED,
    Totals,
    feed,
    feed_rows,
    join_maps,
    join_rows,
    join_totals,
    records,
)


@pytest.fixture(scope="module")
def totals(tmp_path_factory):
    return join_totals(tmp_path_factory.mktemp("totals"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return join_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture
def session(totals):
    with onnxplace.InferenceSession(totals, warmup=True) as session:
        yield session


def step(session, reference, size, number=1, **more):
    """Run one step, compare it with the reference, and return its plan."""
    result = session.run_timed(feed(size, number, **more))
    reference.require(list(result.outputs.values()), feed(size, number)["x"])
    return result.plan


def begin(session):
    """Start at the plan for small sizes."""
    reference = Totals()
    assert step(session, reference, SMALL, **START) == 0
    return reference


# -- the plan of a request ----------------------------------------------------------------------------


def test_each_request_takes_the_plan_of_its_size(rows):
    with onnxplace.InferenceSession(rows, warmup=True) as session:
        results = [session.run_timed(feed_rows(batch)) for batch in (SMALL, LARGE, LARGE, SMALL, 100)]
        futures = [session.submit(feed_rows(batch)) for batch in (LARGE, SMALL)]
        assert [result.plan for result in results] == [0, 1, 1, 0, 1]
        assert [future.result().plan for future in futures] == [1, 0]


def test_a_bundle_for_one_size_is_opened_as_before(rows):
    with onnxplace.InferenceSession(rows.plans[1], warmup=True) as session:
        assert not isinstance(session._session, PlannedSession)
        assert session.run_timed(feed_rows(LARGE)).plan == 0


def test_all_ways_to_run_take_the_plan_of_the_size(rows):
    outcomes = []
    with onnxplace.InferenceSession(rows, warmup=True) as session:
        binding = session.io_binding()
        binding.bind_cpu_input("x", feed_rows(LARGE)["x"])
        for name in ("pick", "limit"):
            binding.bind_cpu_input(name, feed_rows(LARGE)[name])
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        outcomes.append(binding.copy_outputs_to_cpu()[0])
        outcomes.append(session.run(["y"], feed_rows(LARGE), onnxruntime.RunOptions())[0])
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(item) for name, item in feed_rows(LARGE).items()}
        outcomes.append(session.run_with_ort_values(["y"], values)[0].numpy())
        ended = threading.Event()
        session.run_async(["y"], feed_rows(LARGE), lambda outputs, _: (outcomes.append(outputs[0]), ended.set()))
        assert ended.wait(HUNG_SECONDS)
        outcomes += [outputs[0] for outputs in session.stream([feed_rows(LARGE)] * 3, output_names=["y"])]
    for outcome in outcomes:
        np.testing.assert_array_equal(outcome, np.full((LARGE, 4), 2, "f4"))


def test_streams_return_results_in_their_order_whatever_plan_computes_them(rows):
    sizes = [int(size) for size in np.random.default_rng(0).integers(1, 12, 40)]
    with onnxplace.InferenceSession(rows, warmup=True) as session:
        results = list(session.stream((feed_rows(size) for size in sizes), in_flight=5))
    assert [len(y) for y, _ in results] == sizes


def test_the_size_of_a_batch_chooses_the_plan(tmp_path):
    bundle, feeds = join_rows(tmp_path, PLAIN), {"x": np.ones((1, 4), "f4")}
    batching = Batching(max_batch=LARGE, max_delay_ms=60_000)
    with onnxplace.InferenceSession(bundle, warmup=True, batching=batching) as session:
        assert session.run_timed(feeds).plan == 0
        batcher, token = session._session.batcher, object()
        assert batcher.enter_directly(token)  # so that the others wait to be joined
        futures = [session.submit(feeds) for _ in range(LARGE)]
        assert [future.result(HUNG_SECONDS).plan for future in futures] == [1] * LARGE
        batcher.leave_directly(token)


def test_the_simulated_runtime_takes_plans_too(totals, rows):
    for bundle, feeds in ((totals, feed), (rows, feed_rows)):
        with onnxplace.InferenceSession(bundle, runtime="simulated") as session:
            session.run_timed(feeds(LARGE))
            wait_until(lambda session=session: 1 in session._session._plans.sessions)
            assert [session.run_timed(feeds(size)).plan for size in (LARGE, SMALL, LARGE)] == [1, 0, 1]


def test_a_trace_has_the_requests_of_all_plans_and_their_conversations(totals):
    with onnxplace.InferenceSession(totals, trace=True, warmup=True) as session:
        with session.conversation(), session.conversation() as conversation:
            reference = begin(conversation)
            step(conversation, reference, LARGE)
        assert [item.conversation for item in session.list_timelines()] == [2, 2]


def test_a_size_that_no_plan_takes_is_refused_with_the_sizes_that_there_are(rows, monkeypatch):
    with onnxplace.InferenceSession(rows, warmup=True) as session:
        for number in (0, 1):  # as if each took its own size only
            manifest = session._session._plans._bundles[number].manifest
            values = {"x": manifest.values["x"].model_copy(update={"shape": ((SMALL, LARGE)[number], 4)})}
            monkeypatch.setitem(manifest.values, "x", values["x"])
        assert [session.run_timed(feed_rows(size)).plan for size in (SMALL, LARGE)] == [0, 1]
        with pytest.raises(FeedError, match=r"F003.*no plan takes .*\[3, 4\].*batch=1; batch=8"):
            session.run(None, feed_rows(3))


# -- moves of states ----------------------------------------------------------------------------------


def test_states_follow_the_requests_to_other_plans(session):
    reference, plans = begin(session), []
    for number in range(100):
        plans.append(step(session, reference, (LARGE, SMALL)[number % 2], number))
    assert plans == [1, 0] * 50
    assert session.count_state_changes() == 101
    states = session.read_states()
    np.testing.assert_allclose(states["total"], reference.total, rtol=1e-5)
    np.testing.assert_array_equal(states["log"], reference.log)


@pytest.mark.parametrize("maps", [(APART, TURNED), (TURNED, APART)])
def test_states_move_between_devices(tmp_path, maps):
    bundle = join_totals(tmp_path, *maps)
    with onnxplace.InferenceSession(bundle, warmup=True) as session, session.conversation() as conversation:
        for item in (session, conversation):
            reference = begin(item)
            assert [step(item, reference, size) for size in (LARGE, LARGE, SMALL, 5)] == [1, 1, 0, 1]


def test_states_of_a_plan_that_was_left_are_freed(session):
    step(session, begin(session), LARGE)
    assert not session._session._sessions[0].states.read()
    assert len(session._session._sessions[1].states.read()) == 2


def test_states_can_be_returned_and_fed_at_any_plan(session):
    reference = begin(session)
    reference.step(feed(LARGE)["x"])
    outputs = session.run(["log_next", "total_next"], feed(LARGE))
    np.testing.assert_array_equal(outputs[0], reference.log)
    fresh = Totals()
    assert step(session, fresh, LARGE, **START) == 1
    assert step(session, fresh, SMALL) == 0


def test_fed_states_win_over_those_that_move(session):
    begin(session)
    session.run(None, feed(LARGE, total=np.array([100], "f4")))
    assert session.read_states()["total"] == 100 + feed(LARGE)["x"].sum()
    assert len(session.read_states()["log"]) == SMALL + LARGE


def test_states_move_when_staying_has_cost_as_much_as_a_move(tmp_path, monkeypatch):
    monkeypatch.setattr(
        SizeSteps, "add", lambda *_: None
    )  # steps stay those of the bundle, however busy the machine is
    bundle = join_totals(tmp_path, factor=2.0)
    with onnxplace.InferenceSession(bundle, warmup=True) as session:
        reference = begin(session)
        session._session._plans.move_seconds = 3.5e-3  # each large request loses 1 ms here
        assert [step(session, reference, LARGE) for _ in range(3)] == [0, 0, 0]
        assert session._session._lost_seconds[1] == pytest.approx(3e-3)
        assert step(session, reference, LARGE) == 1
        assert session._session._lost_seconds == {}


def test_a_move_that_does_not_pay_is_not_made(session):
    reference = begin(session)
    session._session._plans.move_seconds = 1e9
    assert [step(session, reference, size) for size in (LARGE, LARGE, SMALL)] == [0, 0, 0]
    session.reset_state()
    assert step(session, Totals(), LARGE, **START) == 1  # nothing moves


def test_reset_states_do_not_move(session):
    reference = begin(session)
    session.reset_state()
    with pytest.raises(FeedError, match="S007"):
        session.run(None, feed(LARGE))
    reference = Totals()
    assert step(session, reference, LARGE, **START) == 1


def test_protected_states_stay_at_their_plan(session):
    reference = begin(session)
    step(session, reference, LARGE)
    session.protect_states()
    step(session, reference, SMALL)
    before = session.read_states()
    assert session.run_timed(feed(SMALL)).plan == 1
    session.restore_states()
    np.testing.assert_array_equal(session.read_states()["log"], before["log"])
    assert session.count_state_changes() == 3
    with pytest.raises(ExecutionError, match="X001"):
        session.run(None, feed(SMALL, pick=50))
    np.testing.assert_array_equal(session.read_states()["log"], before["log"])


def talk(session, seed, count):
    """Run a random sequence of sizes in a conversation, by `run` and by `submit`."""
    generator = np.random.default_rng(seed)
    with session.conversation() as conversation:
        reference, sizes = Totals(), generator.choice([SMALL, 2, 3, LARGE], count)
        futures = []
        for number, size in enumerate(map(int, sizes)):
            feeds = feed(size, number, **(START if number == 0 else {}))
            if generator.integers(2):
                futures.append((conversation.submit(feeds), feeds["x"]))
            else:
                result = conversation.run_timed(feeds)
                futures.append((result, feeds["x"]))
        for item, x in futures:
            result = item if isinstance(item, Result) else item.result(HUNG_SECONDS)
            reference.require(list(result.outputs.values()), x)


@pytest.mark.parametrize(
    ("sequences", "count"), [(12, 15), pytest.param(1000, 12, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_random_sequences_of_sizes_from_four_threads_give_equal_outputs(session, sequences, count):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(partial(talk, session, count=count), range(sequences)))


def test_threads_that_share_a_conversation_lose_no_request(session):
    begin(session)
    with ThreadPoolExecutor(4) as pool:
        sizes = [int(size) for size in np.random.default_rng(1).choice([SMALL, LARGE], 60)]
        list(pool.map(lambda size: session.run(None, feed(size)), sizes))
    states = session.read_states()
    assert len(states["log"]) == SMALL + sum(sizes)
    assert states["total"] == states["log"].sum()
    assert session.count_state_changes() == 61


# -- what goes wrong in a move ------------------------------------------------------------------------


def require_unchanged(session, reference):
    """Require that a conversation goes on from where it was, at its plan and at the other one."""
    np.testing.assert_array_equal(session.read_states()["log"], reference.log)
    assert step(session, reference, SMALL) == 0
    assert step(session, reference, LARGE) == 1
    assert step(session, reference, SMALL) == 0


@pytest.fixture(params=["session", "conversation"])
def talking(request, session):
    """Return a session or a conversation."""
    if request.param == "session":
        yield session
    else:
        with session.conversation() as conversation:
            yield conversation


def test_a_failure_of_the_request_that_moves_states_loses_nothing(talking):
    reference = begin(talking)
    for _ in range(2):
        with pytest.raises(ExecutionError, match="X001"):
            talking.run(None, feed(LARGE, pick=50))
    future = talking.submit(feed(LARGE, pick=50))
    with pytest.raises(ExecutionError, match="X001"):
        future.result(HUNG_SECONDS)
    require_unchanged(talking, reference)


def test_a_timeout_of_the_request_that_moves_states_loses_nothing(talking):
    reference = begin(talking)
    with pytest.raises(RunTimeoutError, match=r"no result within 0\.05 s: cpu:") as caught:
        talking.run(None, feed(LARGE, limit=ENDLESS), timeout=0.05)
    assert caught.value.where.endswith("plan1")
    require_unchanged(talking, reference)


def test_a_cancellation_of_the_request_that_moves_states_loses_nothing(talking):
    reference = begin(talking)
    future = talking.submit(feed(LARGE, limit=ENDLESS))
    talking.cancel(future)
    with pytest.raises(ExecutionError, match="X011"):
        future.result(HUNG_SECONDS)
    require_unchanged(talking, reference)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to threads here")
def test_an_interrupt_of_the_request_that_moves_states_loses_nothing(talking):
    reference, main = begin(talking), threading.main_thread().ident
    engine = talking._session._plans.sessions[1].engine

    def interrupt():
        wait_until(lambda: any(item.current_steps for item in engine.list_in_flight()))
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        talking.run(None, feed(LARGE, limit=ENDLESS))
    thread.join(HUNG_SECONDS)
    require_unchanged(talking, reference)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.slow)], ids=["few", "many"])
def test_interrupts_at_any_moment_leave_the_states_before_or_after_a_request(session, count):
    begin(session)
    generator, size = np.random.default_rng(0), SMALL
    for _ in range(count):
        size, before = SMALL + LARGE - size, session.read_states()["log"]
        try:
            with Interrupts(generator.uniform(1e-6, 1e-3)):
                if generator.integers(2):
                    session.run(None, feed(size))
                else:
                    session.submit(feed(size)).result(HUNG_SECONDS)
        except KeyboardInterrupt:
            pass
        try:
            after = session.read_states()["log"]
        except FeedError:  # a request at the plan of the states had taken them
            after = None
        assert after is None or len(after) in (len(before), len(before) + size)
        if after is None or len(after) > 50:
            session.reset_state()
            begin(session)
            size = SMALL
    assert not session._session._line._tickets
    assert not session._session._plans.line._tickets


def test_a_request_waits_for_the_one_that_moves_states(talking):
    reference = begin(talking)
    first = talking.submit(feed(LARGE, limit=ENDLESS))
    with pytest.raises(RunTimeoutError, match="requests of another plan"):
        talking.run(None, feed(SMALL), timeout=0.05)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(talking.submit, feed(LARGE))
        talking.cancel(first)
        result = later.result(HUNG_SECONDS).result(HUNG_SECONDS)
    assert result.plan == 1
    reference.require(list(result.outputs.values()), feed(LARGE)["x"])
    assert step(talking, reference, SMALL) == 0


def fail(talking, size, kind):
    """Let a request fail: in a segment, by a timeout, or since it is cancelled."""
    if kind == "segment":
        with pytest.raises(ExecutionError, match="X001"):
            talking.run(None, feed(size, pick=50))
    elif kind == "timeout":
        with pytest.raises(RunTimeoutError):
            talking.run(None, feed(size, limit=ENDLESS), timeout=0.02)
    else:
        future = talking.submit(feed(size, limit=ENDLESS))
        talking.cancel(future)
        with pytest.raises(ExecutionError, match="X011"):
            future.result(HUNG_SECONDS)


def stumble(session, seed, count):
    """Run a conversation in which requests fail, some of which would have moved the states."""
    generator = np.random.default_rng(seed)
    with session.conversation() as talking:
        reference, plan = begin(talking), 0
        for number in range(count):
            size = int(generator.choice([SMALL, LARGE]))
            if generator.integers(2):
                plan = step(talking, reference, size, number)
                assert plan == (size == LARGE)
                continue
            fail(talking, size, generator.choice(["segment", "timeout", "cancellation"]))
            try:
                talking.read_states()
            except FeedError:
                assert plan == (size == LARGE)  # the request had taken the states at their plan
                talking.reset_state()
                reference = Totals()
                plan = step(talking, reference, size, number, **START)
            np.testing.assert_array_equal(talking.read_states()["log"], reference.log)


@pytest.mark.parametrize(
    ("conversations", "count"), [(4, 12), pytest.param(100, 30, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_conversations_go_on_whatever_fails_in_their_moves(session, conversations, count):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(partial(stumble, session, count=count), range(conversations)))


def test_states_that_are_lost_at_their_plan_are_not_replaced(session):
    begin(session)
    with pytest.raises(ExecutionError, match="X001"):
        session.run(None, feed(SMALL, pick=50))
    with pytest.raises(FeedError, match="S007"):
        session.run(None, feed(LARGE))
    assert step(session, Totals(), LARGE, **START) == 1


def test_a_reset_during_a_move_forgets_the_states(session):
    begin(session)
    future = session.submit(feed(LARGE, limit=ENDLESS))
    session.reset_state()
    session.cancel(future)
    with pytest.raises(ExecutionError, match="X011"):
        future.result(HUNG_SECONDS)
    with pytest.raises(FeedError, match="S007"):
        session.run(None, feed(SMALL))
    reference = begin(session)
    future = session.submit(feed(LARGE, limit=20_000))
    session.reset_state()
    future.result(HUNG_SECONDS)
    with pytest.raises(FeedError, match="S007"):
        session.run(None, feed(SMALL))
    assert reference.total == 1


def test_the_death_of_the_process_that_states_move_to_loses_nothing(totals):
    with onnxplace.InferenceSession(totals, isolate=True, warmup=True) as session:
        reference = begin(session)
        engine = session._session._plans.sessions[1].engine
        future = session.submit(feed(LARGE, limit=ENDLESS))
        wait_until(lambda: any(item.current_steps for item in engine.list_in_flight()))
        (process,) = [
            item for item in find_processes(engine._devices["cpu:0"].memory.address.owner) if item.device.id == "cpu:0"
        ]
        process._child.kill()
        with pytest.raises(ExecutionError, match="X016"):
            future.result(HUNG_SECONDS)
        wait_until(lambda: all(copy.is_open for copy in session.list_copies()))
        assert [copy.failures for copy in session.list_copies()] == [0, 1]
        require_unchanged(session, reference)


def test_a_plan_whose_worker_died_is_left_to_others(rows):
    from tests.support.fault_checks import raise_in

    with onnxplace.InferenceSession(rows, warmup=True) as session:
        engine = session._session._plans.sessions[1].engine
        assert raise_in(engine._workers[0].ident, SystemExit)
        with pytest.raises(ExecutionError, match="X005"):
            session.submit(feed_rows(LARGE)).result(HUNG_SECONDS)
        assert session._session.failure is None
        assert session.run_timed(feed_rows(LARGE)).plan == 0


# -- memory -------------------------------------------------------------------------------------------


def limit_memory(bundle):
    """Return a bundle whose devices hold the values of one plan only."""
    return replace(bundle, manifest=bundle.manifest.model_copy(update={"plans_overlap": False}))


def test_requests_of_different_plans_wait_where_memory_holds_the_values_of_one(rows):
    with onnxplace.InferenceSession(limit_memory(rows), warmup=True) as session:
        first = session.submit(feed_rows(SMALL, limit=ENDLESS))
        second = session.submit(feed_rows(SMALL))  # of the same plan
        with pytest.raises(RunTimeoutError, match="requests of another plan"):
            session.run(None, feed_rows(LARGE), timeout=0.05)
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(session.run_timed, feed_rows(LARGE))
            wait_until(lambda: len(session._session._plans.line._tickets) == 3)
            late = pool.submit(session.run_timed, feed_rows(SMALL))  # which does not overtake it
            wait_until(lambda: len(session._session._plans.line._tickets) == 4)
            assert not other.done()
            assert not late.done()
            session.cancel(first)
            results = [item.result(HUNG_SECONDS) for item in (second, other, late)]
            assert [result.plan for result in results] == [0, 1, 0]


def test_requests_of_different_plans_overlap_where_memory_holds_both(rows):
    with onnxplace.InferenceSession(rows, warmup=True) as session:
        first = session.submit(feed_rows(SMALL, limit=ENDLESS))
        # The endless segment has the processor of `cpu:0`, and this request a segment on `cpu:1` that waits for it.
        other = session.submit(feed_rows(LARGE))
        wait_until(lambda: len(session._session._plans.line._tickets) == 2)
        session.cancel(first)
        assert other.result(HUNG_SECONDS).plan == 1


def compile_spanning(folder, memory=None):
    """Return a bundle with a plan on `cpu:0`, and one on `cpu:0-1`, whose memory is also that of `cpu:0`."""
    limits = memory and {"max_memory": f"cpu:0={memory},cpu:0-1={memory}"}
    maps = [{".*": name} for name in ("cpu:0", "cpu:0-1")]
    devices = {"devices": ("cpu:0", "cpu:0-1")}
    return join_maps(folder, parser.parse_model(ROWS), "batch", records("batch"), *maps, **devices, **(limits or {}))


def test_plans_that_share_a_processor_do_not_overlap_where_its_memory_holds_the_values_of_one(tmp_path):
    roomy = compile_spanning(tmp_path / "roomy")
    peaks = [sum(item.peak_bytes for item in plan.manifest.devices) for plan in roomy.plans]
    # One of the two processors has these bytes, and the other one half of them.
    bundle = compile_spanning(tmp_path / "full", memory=round(1.1 * max(peaks)))
    assert (roomy.manifest.plans_overlap, bundle.manifest.plans_overlap) == (True, False)
    assert [item.id for plan in bundle.plans for item in plan.manifest.devices if item.nodes] == ["cpu:0", "cpu:0-1"]
    with onnxplace.InferenceSession(bundle, warmup=True) as session:
        first = session.submit(feed_rows(SMALL, limit=ENDLESS))
        with pytest.raises(RunTimeoutError, match="requests of another plan"):
            session.run(None, feed_rows(LARGE), timeout=0.05)
        session.cancel(first)
        assert session.run_timed(feed_rows(LARGE)).plan == 1


def test_requests_in_flight_are_bounded_over_all_plans(rows):
    with onnxplace.InferenceSession(rows, warmup=True, max_in_flight=1) as session:
        first, second = session.submit(feed_rows(SMALL, limit=ENDLESS)), []
        thread = threading.Thread(target=lambda: second.append(session.submit(feed_rows(LARGE))))
        thread.start()
        thread.join(0.3)
        is_bounded = not second
        session.cancel(first)
        thread.join(HUNG_SECONDS)
        assert second[0].result(HUNG_SECONDS).plan == 1
        assert is_bounded


def test_a_line_lets_requests_in_as_they_came():
    line, order, first = Line(), [], Ticket(plan=0)
    may_begin = {ticket: lambda others: not others for ticket in range(3)}
    line.join(first, may_begin[0])
    tickets = [Ticket(plan=number) for number in (1, 2)]

    def enter(ticket):
        line.join(ticket, may_begin[ticket.plan])
        order.append(ticket.plan)
        line.leave(ticket)

    threads = []
    for ticket in tickets:
        threads.append(threading.Thread(target=enter, args=(ticket,)))
        threads[-1].start()
        wait_until(lambda ticket=ticket: ticket in line._tickets)
    assert order == []
    line.leave(first)
    line.leave(first)
    for thread in threads:
        thread.join(HUNG_SECONDS)
    assert order == [1, 2]
    assert not first.is_alone


def test_a_callback_on_a_worker_that_would_wait_is_refused(rows):
    outcome = []
    with onnxplace.InferenceSession(limit_memory(rows), warmup=True) as session:
        first = session.submit(feed_rows(SMALL, limit=300_000))
        second = session.submit(feed_rows(SMALL, limit=ENDLESS))

        def submit_other(_):
            try:
                session.submit(feed_rows(LARGE))
            except ExecutionError as error:
                outcome.append(error.code)

        first.add_done_callback(submit_other)
        first.result(HUNG_SECONDS)
        wait_until(lambda: outcome)
        session.cancel(second)
    assert outcome == ["X006"]


# -- opening and closing ------------------------------------------------------------------------------


@pytest.fixture
def slow_opening(monkeypatch):
    """Let all openings but those of the first plan wait for an event."""
    event, runtime = threading.Event(), create_runtime("onnxruntime")
    opened = type(runtime).open

    def open_slowly(self, bundle, **options):
        if not bundle.manifest.plans:
            assert event.wait(HUNG_SECONDS)
        return opened(self, bundle, **options)

    monkeypatch.setattr(type(runtime), "open", open_slowly)
    yield event
    event.set()


def test_requests_go_on_with_an_open_plan_while_another_one_is_opened(totals, slow_opening):
    with onnxplace.InferenceSession(totals) as session:
        reference = Totals()
        assert [step(session, reference, LARGE, **START)] + [step(session, reference, LARGE) for _ in range(2)] == [
            0
        ] * 3
        slow_opening.set()
        wait_until(lambda: 1 in session._session._plans.sessions)
        assert step(session, reference, LARGE) == 1


def test_a_request_that_no_open_plan_takes_waits_for_its_plan(rows, slow_opening, monkeypatch):
    with onnxplace.InferenceSession(rows) as session:
        manifest = session._session._plans._bundles[0].manifest
        fixed = manifest.values["x"].model_copy(update={"shape": (SMALL, 4)})
        monkeypatch.setitem(manifest.values, "x", fixed)
        with pytest.raises(RunTimeoutError, match="plan 1 is being opened"):
            session.run(None, feed_rows(LARGE), timeout=0.05)
        slow_opening.set()
        assert session.run_timed(feed_rows(LARGE)).plan == 1


def test_a_plan_that_cannot_be_opened_is_reported_once_and_replaced(rows, monkeypatch):
    runtime = type(create_runtime("onnxruntime"))
    opened = runtime.open

    def refuse(self, bundle, **options):
        if not bundle.manifest.plans:
            raise ExecutionError("X010", "out of memory")
        return opened(self, bundle, **options)

    monkeypatch.setattr(runtime, "open", refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with onnxplace.InferenceSession(rows) as session:
            for _ in range(3):
                assert session.run_timed(feed_rows(LARGE)).plan == 0
                session._session._plans.openings[1].join(HUNG_SECONDS)
    notes = [item.message for item in caught if isinstance(item.message, NoteWarning)]
    assert [note.note.code for note in notes] == ["X018"]
    assert "out of memory" in str(notes[0])
    with pytest.raises(ExecutionError, match="X010"):
        onnxplace.InferenceSession(rows, warmup=True)
    wait_until(lambda: not list_worker_threads())


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_session_may_end_while_a_plan_is_opened(rows, slow_opening, is_closed):
    session = onnxplace.InferenceSession(rows)
    session.run(None, feed_rows(LARGE))
    if is_closed:
        session.close(0.01)
        with pytest.raises(ExecutionError, match="X002"):
            session.run(None, feed_rows(LARGE))
        with pytest.raises(ExecutionError, match="X002"):
            session.conversation()
    del session
    gc.collect()
    slow_opening.set()
    wait_until(lambda: not list_worker_threads())
    wait_until(lambda: not any(item.name == "onnxplace plan 1" for item in threading.enumerate()))


def test_a_closed_conversation_refuses_requests_of_any_plan(session):
    with session.conversation() as conversation:
        step(conversation, begin(conversation), LARGE)
    for size in (SMALL, LARGE):
        with pytest.raises(ExecutionError, match=r"X002.*conversation"):
            conversation.run(None, feed(size, **START))


def test_closing_ends_requests_that_wait(rows):
    session = onnxplace.InferenceSession(limit_memory(rows), warmup=True)
    first = session.submit(feed_rows(SMALL, limit=ENDLESS))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(session.run, None, feed_rows(LARGE))
        wait_until(lambda: len(session._session._plans.line._tickets) == 2)
        session.close(0.05)
        with pytest.raises(ExecutionError, match="X002"):
            other.result(HUNG_SECONDS)
    with pytest.raises(ExecutionError):
        first.result(HUNG_SECONDS)


def test_the_interpreter_may_end_while_a_plan_is_opened(rows):
    script = f"""
import numpy as np, onnxplace
session = onnxplace.InferenceSession({str(rows.path)!r})
feeds = {{"x": np.ones(({LARGE}, 4), "f4"), "pick": np.array([0]), "limit": np.array(1)}}
print(session.run_timed(feeds).plan)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HUNG_SECONDS, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "0\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_gets_an_error_and_ends(session):
    begin(session)

    def child():
        codes = []
        for call in (session.run_timed, session.submit):
            try:
                call(feed(LARGE))
            except ExecutionError as error:
                codes.append(error.code)
        session.close()
        os._exit(codes != ["X006", "X006"])

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(HUNG_SECONDS)
    assert process.exitcode == 0
    step(session, Totals(), LARGE, **START)


def test_the_engines_of_plans_share_the_turns_of_processors(rows):
    with onnxplace.InferenceSession(rows, warmup=True) as session:
        first, second = (item.engine._turns for item in session._session._plans.sessions.values())
        assert first is second is not None
    with onnxplace.InferenceSession(rows.plans[1]) as session:
        assert session._session.engine._turns is None


def test_plans_that_are_opened_later_load_the_operators_of_the_session(totals, monkeypatch):
    seen, runtime = [], type(create_runtime("simulated"))
    opened = runtime.open

    def note(self, bundle, **options):
        seen.append(_custom_libraries.get())
        return opened(self, bundle, **options)

    monkeypatch.setattr(runtime, "open", note)
    token = _custom_libraries.set(("operators.so",))
    try:
        session = onnxplace.InferenceSession(totals, runtime="simulated")
    finally:
        _custom_libraries.reset(token)
    with session:
        session.run_timed(feed(LARGE))
        wait_until(lambda: 1 in session._session._plans.sessions)
    assert seen == [("operators.so",)] * 2


def test_a_processor_computes_for_one_plan_at_a_time(rows, monkeypatch):
    active, overlaps, run = [], [], OpenSegment.run

    def note_overlaps(self, *arguments):
        device = self.record.device
        overlaps.extend([device] * active.count(device))
        active.append(device)
        try:
            return run(self, *arguments)
        finally:
            active.remove(device)

    monkeypatch.setattr(OpenSegment, "run", note_overlaps)
    with onnxplace.InferenceSession(rows, warmup=True) as session:
        futures = [session.submit(feed_rows(size, limit=50)) for size in [SMALL, LARGE] * 20]
        assert {future.result(HUNG_SECONDS).plan for future in futures} == {0, 1}
    assert overlaps == []


def test_no_thread_is_left_after_a_session(rows, totals):
    for bundle, feeds in ((rows, feed_rows(LARGE)), (totals, feed(LARGE, **START))):
        with onnxplace.InferenceSession(bundle, warmup=True) as session:
            session.submit(feeds).result(HUNG_SECONDS)
        assert not list_worker_threads()
        onnxplace.InferenceSession(bundle, warmup=True).run(None, feeds)  # and is forgotten
        gc.collect()
        wait_until(lambda: not list_worker_threads())
