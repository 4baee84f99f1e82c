"""Carried states: kept on their device, passed on in order, and lost with a failed run."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import numpy_helper, parser

import onnxplace
from onnxplace.driver.compile import compile_model
from onnxplace.errors import FeedError, UsageError
from onnxplace.facts import Groups, Placement, Profile, Schedule
from onnxplace.model.loading import load as load_model
from onnxplace.model.lowering import bind
from onnxplace.model.state_binding import bind_states
from onnxplace.pipeline.pipeline import Pipeline, make_pass
from onnxplace.problem import commit_placement, placement_problem
from onnxplace.runtimes.execution.host_memory import HostMemory
from onnxplace.runtimes.execution.requests import CarriedStates, StateTable
from onnxplace.state import Pass, State
from onnxplace.target.target import Device, Target
from tests.support.state_checks import APART, ON_ONE, START, STATES, compile_sums, feeds, new_reference, pipeline, sums

# Tests that tests/streams and tests/webgpu collect too, with bundles for other devices.
FOR_ANY_DEVICE = (
    "test_a_fed_state_replaces_the_stored_one_and_the_others_stay",
    "test_a_reset_applies_to_the_next_run_and_not_to_those_in_flight",
    "test_a_run_returns_states_only_on_request",
    "test_after_a_reset_the_next_run_must_be_fed_all_states",
    "test_closing_waits_for_runs_that_wait_for_their_turn",
    "test_feeds_and_outputs_may_be_altered_after_a_run",
    "test_run_async_carries_states_too",
    "test_runs_in_flight_take_turns",
    "test_states_are_carried_from_run_to_run",
    "test_states_equal_those_of_one_session_after_any_runs_and_resets",
    "test_threads_that_share_a_session_share_its_states",
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> onnxplace.Bundle:
    return compile_sums(tmp_path_factory.mktemp("sums"))


@pytest.fixture
def session(bundle):
    with onnxplace.InferenceSession(bundle, trace=True) as opened:
        yield opened


# ----------------------------------------------------------------------------------------------------------- carried on


def test_states_are_on_the_devices_of_their_nodes(bundle):
    assert {state.output: state.device for state in bundle.manifest.states} == {
        "total_next": "cpu:0",
        "log_next": "cpu:1",
    }


def test_states_are_carried_from_run_to_run(session):
    reference = new_reference()
    for number in range(5):
        y, picked = session.run(None, feeds(number, **(START if number == 0 else {})))
        np.testing.assert_allclose(y, reference.step(feeds(number)["x"]), rtol=1e-6)
        assert picked == [number]


def test_a_run_returns_states_only_on_request(session):
    assert [item.name for item in session.get_outputs()] == ["y", "picked"]
    assert [item.name for item in session.get_inputs()] == ["x", "pick", "total", "log"]
    assert len(session.run(None, feeds(1, **START))) == 2
    log, y = session.run(["log_next", "y"], feeds(3))
    assert log.tolist() == [2, 4, 3, 4]
    assert y.shape == (2,)
    assert set(session.submit(feeds(0)).result().outputs) == {"y", "picked"}
    assert set(session.submit(feeds(0), ["total_next"]).result().outputs) == {"y", "picked", "total_next"}


def test_a_fed_state_replaces_the_stored_one_and_the_others_stay(session):
    session.run(None, feeds(1, **START))
    total, log = session.run(["total_next", "log_next"], feeds(1, total=np.array([100, 200], "f4")))
    assert total.tolist() == [101, 202]
    assert log.tolist() == [2, 4, 1, 2]
    (total,) = session.run(["total_next"], feeds(1))
    assert total.tolist() == [102, 204]


def test_after_a_reset_the_next_run_must_be_fed_all_states(session):
    session.run(None, feeds(1, **START))
    session.reset_state()
    with pytest.raises(FeedError, match="no value for state input 'total' and 1 more, and none is stored") as caught:
        session.run(None, feeds(1))
    assert "zero_states" in caught.value.hint
    (log,) = session.run(["log_next"], feeds(1, **START))
    assert log.tolist() == [1, 2]


def test_the_first_run_must_be_fed_all_states(session):
    with pytest.raises(FeedError, match="no value for state input 'log', and none is stored"):
        session.run(None, feeds(1, total=START["total"]))


def test_zero_states_are_zeros_of_the_requested_sizes(bundle):
    zeros = bundle.zero_states(n=3, m=0)
    assert {name: array.tolist() for name, array in zeros.items()} == {"total": [0, 0, 0], "log": []}
    assert {array.dtype for array in zeros.values()} == {np.dtype("f4")}
    with pytest.raises(FeedError, match="without a value: m"):
        bundle.zero_states(n=3)


def test_feeds_and_outputs_may_be_altered_after_a_run(session):
    start = {name: array.copy() for name, array in START.items()}
    (total,) = session.run(["total_next"], feeds(1, **start))
    total[:] = 77
    start["total"][:] = 78
    (total,) = session.run(["total_next"], feeds(1))
    assert total.tolist() == [2, 4]


def test_an_input_with_a_default_starts_from_it(tmp_path):
    model = sums()
    model.graph.initializer.append(numpy_helper.from_array(np.array([10, 20], "f4"), "total"))
    bundle = onnxplace.compile(
        model,
        tmp_path / "out",
        devices="cpu:0,cpu:1",
        shape={"n": 2, "m": 1},
        state=STATES,
        pipeline=pipeline(tmp_path, APART),
    )
    with onnxplace.InferenceSession(bundle) as session:
        for expected in ([11, 22], [12, 24]):
            states = {"log": START["log"]} if expected[0] == 11 else {}
            (total,) = session.run(["total_next"], feeds(1, **states))
            assert total.tolist() == expected
        session.reset_state()
        assert session.run(["total_next"], feeds(1, log=START["log"]))[0].tolist() == [11, 22]


# ------------------------------------------------------------------------------------------------------ where they stay


def test_states_never_leave_their_device(bundle, session, monkeypatch):
    sent = {step.value for program in bundle.manifest.programs.values() for step in program if step.op == "send"}
    assert sent
    assert not sent & {"total", "log", "total_next", "log_next"}
    session.run(None, feeds(0, **START))
    moved = []
    for name in ("receive", "read"):
        actual = getattr(HostMemory, name)
        monkeypatch.setattr(HostMemory, name, lambda *given, actual=actual: moved.append(given) or actual(*given))
    session.run(None, feeds(1))
    assert len(moved) == len(sent) + len(session.get_outputs()), "only what is sent or returned goes through the host"
    copied = {event.name for event in session.list_timelines()[-1].events if event.kind == "copy"}
    assert not any(name in text for text in copied for name in ("total", "log_next"))


def test_the_producer_and_the_readers_of_a_state_form_a_group():
    target = Target((Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30)))
    model = bind_states(bind(load_model(sums()), {"n": 2, "m": 2}, {}), STATES)
    state, _ = Pipeline.parse("profile{estimate=true},coplace{join=never}").run(State(target).with_facts(model))
    groups, names = state[Groups], state[Profile].graph.names
    group = dict(zip(names, groups.group.tolist()))
    assert group["double"] == group["append"] != group["add"]
    assert groups.reasons[group["append"]] == "state"
    assert groups.reasons[group["add"]] == ""


def test_a_state_that_another_device_reads_is_sent_there_with_a_note(tmp_path):
    result = compile_model(
        sums(),
        tmp_path / "out",
        devices="cpu:0,cpu:1",
        shape={"n": 2, "m": 6},
        state=STATES,
        pipeline=pipeline(tmp_path, {"add|double|append|pick": "cpu:0", ".*": "cpu:1"}),
    )
    notes = {note.message for note in result.diagnostics if note.code == "S010"}
    assert len(notes) == 2
    assert "state 'log_next' stays on its device, but is read on cpu:1 too: a copy crosses" in notes
    with onnxplace.InferenceSession(result.bundle) as session:
        reference = new_reference()
        for number in range(3):
            y, _ = session.run(None, feeds(number, **(START if number == 0 else {})))
            np.testing.assert_allclose(y, reference.step(feeds(number)["x"]), rtol=1e-6)


@dataclass(frozen=True)
class Scatter(Pass):
    """Put the nodes on the devices in turn, ignoring groups."""

    name: ClassVar[str] = "scatter"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    def run(self, state: State) -> State:
        problem = placement_problem(state)
        device = (np.arange(len(problem.graph)) % 2).astype(np.int32)
        order = problem.graph.order
        return commit_placement(state, problem, device, problem.simulate(device, order).start_seconds, self.name)


def test_a_placement_that_splits_a_state_is_refused(tmp_path):
    steps = (make_pass("profile", {"estimate": "true"}), Scatter(), make_pass("split"), make_pass("emit"))
    with pytest.raises(UsageError, match=r"state 'log_next' = 'log' is made on cpu:0 and read on cpu:1 by 'double'"):
        compile_model(
            sums(),
            tmp_path / "out",
            devices="cpu:0,cpu:1",
            shape={"n": 2, "m": 6},
            state=STATES,
            pipeline=Pipeline(steps),
        )


# ------------------------------------------------------------------------------------------------------ several at once


def test_runs_in_flight_take_turns(session):
    reference = new_reference()
    futures = [session.submit(feeds(n, **(START if n == 0 else {})), ["total_next"]) for n in range(20)]
    for number, future in enumerate(futures):
        y = reference.step(feeds(number)["x"])
        outputs = future.result(60).outputs
        np.testing.assert_allclose(outputs["y"], y, rtol=1e-6)
        np.testing.assert_array_equal(outputs["total_next"], reference.total)


def test_run_async_carries_states_too(session):
    results, finished = [], threading.Event()

    def callback(outputs, error):
        results.append(error or outputs[0].tolist())
        if len(results) == 6:
            finished.set()

    for number in range(6):
        session.run_async(["total_next"], feeds(1, **(START if number == 0 else {})), callback)
    assert finished.wait(60)
    assert sorted(results) == [[n, 2 * n] for n in range(1, 7)]


def test_threads_that_share_a_session_share_its_states(session):
    session.run(None, feeds(0, **START))
    with ThreadPoolExecutor(4) as pool:
        totals = list(pool.map(lambda _: session.run(["total_next"], feeds(1))[0][0], range(40)))
    assert sorted(totals) == list(range(1, 41)), "each run adds to what exactly one other left"


def test_a_reset_applies_to_the_next_run_and_not_to_those_in_flight(session):
    before = [session.submit(feeds(1, **(START if n == 0 else {})), ["total_next"]) for n in range(5)]
    session.reset_state()
    refused, begun = session.submit(feeds(1)), session.submit(feeds(1, **START), ["total_next"])
    assert [future.result(60).outputs["total_next"][0] for future in before] == [1, 2, 3, 4, 5]
    assert isinstance(refused.exception(60), FeedError)
    assert begun.result(60).outputs["total_next"].tolist() == [1, 2]


def test_closing_waits_for_runs_that_wait_for_their_turn(bundle):
    session = onnxplace.InferenceSession(bundle)
    futures = [session.submit(feeds(1, **(START if n == 0 else {})), ["total_next"]) for n in range(6)]
    session.close()
    assert [future.result(0).outputs["total_next"][0] for future in futures] == [1, 2, 3, 4, 5, 6]
    session.reset_state()


def test_a_failed_run_loses_the_states_until_they_are_fed_again(session):
    session.run(None, feeds(1, **START))
    failing = session.submit({**feeds(1), "pick": np.array([9], "i8")})
    after = session.submit(feeds(1))
    assert isinstance(failing.exception(60), onnxplace.ExecutionError)
    assert "the previous request failed and lost it" in str(after.exception(60))
    (total,) = session.run(["total_next"], feeds(1, **START))
    assert total.tolist() == [1, 2]


def test_a_state_that_only_passes_through_does_not_share_the_callers_memory(tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[2] x, float[n] kept, float[1, n] flat) => (float[n] kept_next, float[1, n] flat_next, float[n] y) {
        kept_next = Identity(kept)
        row = Constant<value_ints = [1, -1]>()
        flat_next = Reshape(flat, row)
        y = Add(kept, x)
    }"""
    bundle = onnxplace.compile(
        parser.parse_model(text), tmp_path / "out", target=ON_ONE, shape={"n": 2}, state=["*_next=*"]
    )
    start = {"kept": np.array([5, 6], "f4"), "flat": np.array([[7, 8]], "f4")}
    with onnxplace.InferenceSession(bundle) as session:
        session.run(None, {"x": np.zeros(2, "f4"), **start})
        start["kept"][:], start["flat"][:] = 0, 0
        for _ in range(3):
            y, flat = session.run(["y", "flat_next"], {"x": np.ones(2, "f4")})
            assert (y.tolist(), flat.tolist()) == ([6, 7], [[7, 8]])


def test_states_may_be_strings_and_half_floats_and_booleans(tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (string[1] word, string[n] said, float16[2] half, bool[m] flags, float[1] x)
        => (string[k] said_next, float16[2] half_next, bool[j] flags_next, float[1] y) {
        said_next = Concat<axis = 0>(said, word)
        half_next = Add(half, half)
        some = Cast<to = 9>(x)
        flags_next = Concat<axis = 0>(flags, some)
        y = Neg(x)
    }"""
    bundle = onnxplace.compile(
        parser.parse_model(text), tmp_path / "out", target=ON_ONE, shape={"n": 1, "m": 1}, state=["*_next=*"]
    )
    with onnxplace.InferenceSession(bundle) as session:
        new = {"word": np.array(["a"], object), "x": np.ones(1, "f4")}
        session.run(None, {**new, **bundle.zero_states(n=0, m=0), "half": np.ones(2, "f2")})
        session.run(None, {**new, "word": np.array(["b"], object), "x": np.zeros(1, "f4")})
        strings, half, flags = session.run(["said_next", "half_next", "flags_next"], new)
    assert (strings.tolist(), half.tolist(), flags.tolist()) == (["a", "b", "a"], [8, 8], [True, False, True])
    assert half.dtype == np.float16


@pytest.mark.slow
def test_states_of_the_previous_run_are_freed(session):
    session.run(None, feeds(1, **START))
    for number in range(3):
        before = [weakref.ref(value) for value in session._session.engine.own_states._stored.values()]
        assert len(before) == 2
        session.run(None, feeds(number))
        session.submit(feeds(number)).result()
        gc.collect()
        assert not any(reference() is not None for reference in before)


def test_states_are_removed_when_a_run_takes_them(bundle):
    states = CarriedStates(StateTable(bundle))
    states.store({"total": np.ones(2, "f4"), "log": np.ones(3, "f4")})
    states_taken = states.take(feeds(1, log=np.zeros(1, "f4")))
    assert list(states_taken) == ["total"], "so that it can be freed as soon as its last reader has run"
    with pytest.raises(FeedError, match="no value for state input 'total' and 1 more"):
        states.take(feeds(1))


def test_an_output_that_equals_a_state_may_be_altered(tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[2] x, float[2] total) => (float[2] now, float[2] same) {
        now = Add(total, x)
        same = Identity(now)
    }"""
    bundle = onnxplace.compile(parser.parse_model(text), tmp_path / "out", target=ON_ONE, state=["now=total"])
    with onnxplace.InferenceSession(bundle) as session:
        (same,) = session.run(None, {"x": np.ones(2, "f4"), "total": np.zeros(2, "f4")})
        same[:] = 50
        assert session.run(None, {"x": np.ones(2, "f4")})[0].tolist() == [2, 2]


operations = st.lists(st.sampled_from(["run", "run", "run", "feed", "reset", "several"]), max_size=8)


@settings(max_examples=30)
@given(operations)
def test_states_equal_those_of_one_session_after_any_runs_and_resets(bundle, states):
    with onnxplace.InferenceSession(bundle) as session:
        reference, stored = new_reference(), False
        for operation in states:
            if operation == "reset":
                session.reset_state()
                stored = False
                continue
            if operation == "feed" or not stored:
                reference = new_reference()
            first = START if operation == "feed" or not stored else {}
            stored = True
            futures = [
                session.submit(feeds(n, **(first if n == 0 else {}))) for n in range(3 if operation == "several" else 1)
            ]
            for number, future in enumerate(futures):
                expected = reference.step(feeds(number)["x"])
                np.testing.assert_allclose(future.result(60).outputs["y"], expected, rtol=1e-6)
