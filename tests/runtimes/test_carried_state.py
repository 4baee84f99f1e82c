"""Carried states: bound by name, kept on their device, passed on in order, and refused with a reason."""

import gc
import json
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st
from onnx import numpy_helper, parser

import decoder as decoder_example
import onnxplace
import onnxplace.runtimes.execution.segments as segments_module
import onnxplace.runtimes.execution.workers as workers_module
from decoder import decoder, generate
from onnxplace.driver import compile_model
from onnxplace.errors import ExecutionError, FeedError, ModelError, UsageError
from onnxplace.evaluation import StepInputs
from onnxplace.facts import Groups, Placement, Profile, Schedule
from onnxplace.feeds import Declared
from onnxplace.model import bind, bind_states, load as load_model
from onnxplace.pipeline import Pipeline, make_pass
from onnxplace.problem import commit_placement, placement_problem
from onnxplace.runtimes.execution.carried_state import CarriedStates
from onnxplace.runtimes.onnxruntime import OnnxRuntime
from onnxplace.state import Pass, State
from onnxplace.target import Device, Target

# `total` adds up, `log` doubles and grows; the rows that `pick` takes may not be there, so that a run can fail.
SUMS = """
<ir_version: 8, opset_import: ["" : 17]>
sums (float[n] x, int64[1] pick, float[n] total, float[m] log)
    => (float[n] y, float[1] picked, float[n] total_next, float[k] log_next) {
    [add] total_next = Add(total, x)
    [double] doubled = Add(log, log)
    [append] log_next = Concat<axis = 0>(doubled, x)
    [mean] middle = ReduceMean<keepdims = 1>(log_next)
    [pick] picked = Gather(x, pick)
    [out] y = Add(total_next, middle)
}
"""
STATES = ("total_next=total", "log_next=log")
APART = {"double|append|mean": "cpu:1", ".*": "cpu:0"}
START = {"total": np.zeros(2, "f4"), "log": np.zeros(0, "f4")}


def sums() -> onnx.ModelProto:
    return parser.parse_model(SUMS)


def pipeline(folder: Path, device_map: dict[str, str]) -> str:
    file = folder / "map.json"
    file.write_text(json.dumps(device_map))
    coplace = f"coplace{{join=never,device_map={json.dumps(str(file))}}}"
    return f"optimize,profile{{estimate=true}},{coplace},m-etf,split,emit"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> onnxplace.Bundle:
    """The sums over two devices: `total` on cpu:0, `log` on cpu:1."""
    folder = tmp_path_factory.mktemp("sums")
    onnx.save(sums(), folder / "sums.onnx")
    return onnxplace.compile(
        folder / "sums.onnx",
        folder / "sums.bundle",
        devices="cpu:0,cpu:1",
        shape={"n": 2, "m": 6},
        state=STATES,
        pipeline=pipeline(folder, APART),
    )


@pytest.fixture
def session(bundle):
    with onnxplace.InferenceSession(bundle, trace=True) as opened:
        yield opened


@dataclass
class Reference:
    """The same sums in numpy."""

    total: np.ndarray
    log: np.ndarray

    def step(self, x: np.ndarray) -> np.ndarray:
        self.total = self.total + x
        self.log = np.concatenate([self.log + self.log, x])
        return self.total + self.log.mean(keepdims=True)


def new_reference() -> Reference:
    return Reference(np.zeros(2, "f4"), np.zeros(0, "f4"))


def feeds(number: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    return {"x": np.array([number, number + 1], "f4"), "pick": np.zeros(1, "i8"), **more}


# ---------------------------------------------------------------------------------------------- carried on


def test_states_are_carried_from_run_to_run_over_two_devices(bundle, session):
    reference = new_reference()
    assert {state.output: state.device for state in bundle.manifest.states} == {
        "total_next": "cpu:0",
        "log_next": "cpu:1",
    }
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


# ---------------------------------------------------------------------------------------------- where they stay


def test_states_never_leave_their_device(bundle, session, monkeypatch):
    sent = {step.value for program in bundle.manifest.programs.values() for step in program if step.op == "send"}
    assert sent
    assert not sent & {"total", "log", "total_next", "log_next"}
    session.run(None, feeds(0, **START))
    moved = []
    to_python = workers_module.to_python
    for module in (workers_module, segments_module):
        monkeypatch.setattr(module, "to_python", lambda value: moved.append(value) or to_python(value))
    session.run(None, feeds(1))
    assert len(moved) == len(sent) + len(session.get_outputs()), "only what is sent or returned goes through the host"
    copied = {event["name"] for event in session.trace()["traceEvents"] if event.get("cat") == "copy"}
    assert not any(name in text for text in copied for name in ("total", "log_next"))


def test_the_producer_and_the_readers_of_a_state_form_a_group():
    target = Target((Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30)))
    model = bind_states(bind(load_model(sums()), {"n": 2, "m": 2}, {}), STATES)
    state, _ = Pipeline.parse("profile{estimate=true},coplace{join=never}").run(State(target).having(model))
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


# ---------------------------------------------------------------------------------------------- several at once


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


ON_ONE = Target((Device("cpu:0", 1 << 30),))


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


def test_states_of_the_previous_run_are_freed(session):
    session.run(None, feeds(1, **START))
    for number in range(3):
        before = [weakref.ref(value) for value in session._session.engine._states._stored.values()]
        assert len(before) == 2
        session.run(None, feeds(number))
        session.submit(feeds(number)).result()
        gc.collect()
        assert not any(reference() is not None for reference in before)


def test_states_are_removed_when_a_run_takes_them(bundle):
    states = CarriedStates(bundle)
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


# ---------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("fed", "message"),
    [
        (np.zeros(2, "f8"), "its type is float64, the model takes float32"),
        (np.zeros((2, 1), "f4"), r"its shape is \[2, 1\], the model takes total tensor\(float\) \[n\]"),
        (np.zeros(5, "f4"), r"dimension 'n' is 5 here and 2 in x\[0\]"),
    ],
)
def test_an_invalid_fed_state_is_refused_and_stored_states_stay(session, fed, message):
    session.run(None, feeds(1, **START))
    with pytest.raises(FeedError, match=message) as caught:
        session.run(None, feeds(1, total=fed))
    assert caught.value.where == "input 'total'"
    assert session.run(["total_next"], feeds(1))[0].tolist() == [2, 4]


def test_inputs_that_contradict_the_stored_state_are_refused_and_it_stays(session):
    session.run(None, feeds(1, **START))
    longer = {"x": np.ones(3, "f4"), "pick": np.zeros(1, "i8")}
    with pytest.raises(FeedError, match=r"stored state 'total': dimension 'n' is 2 here and 3 in x\[0\]") as caught:
        session.run(None, longer)
    assert "reset_state" in caught.value.hint
    assert session.run(["total_next"], feeds(1))[0].tolist() == [2, 4]


@pytest.mark.parametrize(
    ("states", "code", "message", "hint"),
    [
        (["total"], "S001", "expected OUTPUT=INPUT, got 'total'", "OUTPUT=INPUT"),
        (["=total"], "S001", "expected OUTPUT=INPUT, got '=total'", "OUTPUT=INPUT"),
        (["total_*=total"], "S001", "one side of 'total_*=total' has more *", "same text"),
        (["totel_next=total"], "S002", "no output 'totel_next'", "'total_next'"),
        (["total_next=totl"], "S002", "no input 'totl' for output 'total_next'", "'total'"),
        (["present.*=past.*"], "S002", "no output matches 'present.*'", "known: y, picked"),
        (["*_next=past_*"], "S002", "no input 'past_total' for output 'total_next'", "'total'"),
        (["total_next=total", "y=total"], "S004", "'total' is bound twice: to output 'total_next' and to 'y'", "out"),
        (["total_next=pick"], "S003", "total_next tensor(float) [n], the input takes pick tensor(int64) [1]", "type"),
    ],
)
def test_invalid_states_are_refused_with_similar_names(states, code, message, hint):
    with pytest.raises(onnxplace.InputError) as caught:
        bind_states(load_model(sums()), states)
    assert caught.value.code == code
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.where.startswith("--state")


@pytest.mark.parametrize("kind", ["float[4]", "float[n,1]", "double[n]"])
def test_another_size_rank_or_type_cannot_be_bound(kind):
    text = f'<ir_version: 8, opset_import: ["" : 17]> g ({kind} a, float[3] b) => (float[3] c) {{ c = Add(b, b) }}'
    with pytest.raises(ModelError, match="the output is c tensor"):
        bind_states(load_model(parser.parse_model(text)), {"c": "a"})


def test_an_output_whose_type_is_not_declared_is_inferred():
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (double[3] a, float[3] b) => (c) { c = Add(b, b) }'
    )
    model.graph.output[0].ClearField("type")
    with pytest.raises(ModelError, match=r"the output is c tensor\(float\)"):
        bind_states(load_model(model), {"c": "a"})


def test_inputs_returned_as_outputs_and_values_other_than_tensors_cannot_be_states():
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[3] a, float[3] b, seq(float[3]) s) => (float[3] a, float[3] c) { c = Add(b, b) }"""
    )
    with pytest.raises(ModelError, match="output 'a' returns an input"):
        bind_states(load_model(model), {"a": "b"})
    with pytest.raises(ModelError, match="expected a tensor"):
        bind_states(load_model(model), {"c": "s"})


def test_patterns_bind_name_by_name_and_may_overlap_themselves():
    names = ["a_0", "a_1"]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Neg", [f"past.{n}.k"], [f"now.{n}.k"]) for n in names],
            "g",
            [onnx.helper.make_tensor_value_info(f"past.{n}.k", 1, [2]) for n in names],
            [onnx.helper.make_tensor_value_info(f"now.{n}.k", 1, [2]) for n in names],
        )
    )
    expected = {"past.a_0.k": "now.a_0.k", "past.a_1.k": "now.a_1.k"}
    for states in (["now.*=past.*"], {"now.*.*": "past.*.*"}, ["now.a_*.k = past.a_*.k"], ["now.*=past.*"] * 2):
        assert bind_states(load_model(model), states).states == expected


def test_a_device_map_that_splits_a_state_is_refused_by_name(run_cli, tmp_path):
    onnx.save(sums(), tmp_path / "sums.onnx")
    (tmp_path / "map.json").write_text('{"double": "cpu:0", ".*": "cpu:1"}')
    result = run_cli(
        *("compile", tmp_path / "sums.onnx", "-o", tmp_path / "out", "--devices", "cpu:0,cpu:1", "--shape", "n=2,m=2"),
        *("--state", "log_next=log", "--device-map", tmp_path / "map.json"),
    )
    assert result.code == 2
    assert "error[S005] --state: state 'log_next' = 'log' stays on one device" in result.err
    assert "node 'append' to cpu:1 and node 'double' to cpu:0" in result.err
    assert not (tmp_path / "out").exists()


def test_an_unknown_state_in_a_command_is_refused_with_similar_names(run_cli, tmp_path):
    onnx.save(sums(), tmp_path / "sums.onnx")
    result = run_cli("compile", tmp_path / "sums.onnx", "--shape", "n=2,m=2", "--state", "log_nxt=log")
    assert (result.code, result.out) == (2, "")
    assert result.err == "error[S002] --state: the model has no output 'log_nxt'\n  hint: did you mean 'log_next'?\n"
    assert [path.name for path in tmp_path.iterdir()] == ["sums.onnx"]


def test_a_runtime_that_keeps_no_states_is_refused(bundle, monkeypatch):
    monkeypatch.setattr(OnnxRuntime, "keeps_state", False)
    with pytest.raises(UsageError, match="runtime 'onnxruntime' keeps no states"):
        onnxplace.InferenceSession(bundle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cpu:1"}, "state 'total_next' = 'total' is not computed on 'cpu:1'"),
        ({"output": "y"}, None),
        ({"input": "odd"}, "is not computed"),
    ],
)
def test_a_manifest_with_invalid_states_is_refused(bundle, tmp_path, change, message):
    copy = shutil.copytree(bundle.path, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["states"][0] |= change
    (copy / "manifest.json").write_text(json.dumps(manifest))
    if message is None:
        assert onnxplace.load(copy).manifest.states[0].output == "y"
        return
    with pytest.raises(onnxplace.BundleError, match=message):
        onnxplace.load(copy)


def test_a_manifest_of_format_1_0_has_no_states(compiled, tmp_path):
    copy = shutil.copytree(compiled, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    assert manifest.pop("states") == []
    (copy / "manifest.json").write_text(json.dumps({**manifest, "schema_version": "1.0"}))
    assert onnxplace.load(copy).manifest.states == ()


# ---------------------------------------------------------------------------------------------- commands


def test_run_verify_and_bench_carry_states(bundle, run_cli, tmp_path):
    result = run_cli(
        "run", bundle.path, "--repeat", 4, "--json", "--outputs", tmp_path / "o.npz", "--trace", tmp_path / "t"
    )
    assert result.code == 0, result.err
    assert list(json.loads(result.out)["outputs"]) == ["y", "picked"]
    with np.load(tmp_path / "o.npz") as answer:
        assert set(answer) == {"y", "picked"}
    result = run_cli("verify", bundle.path, "--json")
    answer = json.loads(result.out)
    assert (result.code, answer["equal"], answer["steps"]) == (0, True, 3)
    assert {item["name"] for item in answer["outputs"]} == {"y", "picked", "total_next", "log_next"}
    result = run_cli("verify", bundle.path, "--steps", 2)
    assert result.out.splitlines()[-1] == "2 steps, each with the states of the one before"
    result = run_cli("bench", bundle.path, "--no-memory", "--repeat", 3, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["bundle"]["runs"] == 3


def test_verify_finds_a_difference_in_a_later_step(bundle, run_cli, tmp_path):
    """The other model subtracts the total, which gives the same result only while the total is zero."""
    model = sums()
    model.graph.node[0].CopyFrom(onnx.helper.make_node("Sub", ["x", "total"], ["total_next"], name="add"))
    onnx.save(model, tmp_path / "other.onnx")
    np.savez(tmp_path / "in.npz", **feeds(1, **START))
    options = ("verify", bundle.path, "--against", tmp_path / "other.onnx", "--inputs", tmp_path / "in.npz")
    assert run_cli(*options, "--steps", 1).code == 0
    result = run_cli(*options, "--steps", 2)
    assert result.code == 1
    (line,) = [line for line in result.out.splitlines() if "total_next" in line]
    assert line.startswith("DIFFERS total_next")
    assert line.endswith(", first in step 2")


def test_real_inputs_without_the_states_are_refused_by_name(bundle, run_cli, tmp_path):
    np.savez(tmp_path / "in.npz", **feeds(1))
    result = run_cli("run", bundle.path, "--inputs", tmp_path / "in.npz")
    assert result.code == 2
    assert "no value for 'total', 'log'" in result.err


def test_the_simulated_runtime_accepts_a_bundle_with_states(bundle, run_cli):
    result = run_cli("run", bundle.path, "--runtime", "simulated", "--repeat", 3)
    assert result.code == 0, result.err
    with onnxplace.InferenceSession(bundle, runtime="simulated") as session:
        session.run(None, feeds(0))
        session.reset_state()


class Cached:
    """A bundle with a mask that is as long as past and new tokens together."""

    inputs: ClassVar = [
        Declared("tokens", "tensor(int64)", ("batch", "seq")),
        Declared("mask", "tensor(int64)", ("batch", "past + seq")),
        Declared("past.0", "tensor(float)", ("batch", "past", 4)),
    ]
    state_inputs: ClassVar = inputs[2:]
    outputs: ClassVar = [Declared("present.0", "tensor(float)", ("batch", "total", 4))]
    manifest: ClassVar = SimpleNamespace(states=[SimpleNamespace(output="present.0", input="past.0")])


def test_drawn_inputs_grow_with_the_state_that_they_name():
    steps = StepInputs(Cached, None, {"batch": 2, "seq": 3, "past": 5, "past + seq": 8}, seed=1)
    assert set(steps.first) == {"tokens", "mask", "past.0"}
    steps.learn({"past.0": np.zeros((2, 8, 4), "f4")})
    shapes = [{name: array.shape for name, array in steps.feeds(number).items()} for number in (1, 2)]
    assert shapes == [{"tokens": (2, 3), "mask": (2, 11)}, {"tokens": (2, 3), "mask": (2, 14)}]


class OwnName(Cached):
    """A bundle whose mask has the symbol of the state output, or a symbol of its own."""

    inputs: ClassVar = [
        *Cached.inputs,
        Declared("own", "tensor(int64)", ("total",)),
        Declared("odd", "tensor(int64)", ("odd",)),
    ]


SIZED = {"batch": 2, "seq": 3, "past": 5, "past + seq": 8, "total": 8, "odd": 8}


def test_drawn_inputs_grow_with_the_symbol_of_the_state_output():
    steps = StepInputs(OwnName, None, SIZED, seed=1)
    steps.learn({"past.0": np.zeros((2, 8, 4), "f4")})
    assert [steps.feeds(number)["own"].shape for number in (1, 2)] == [(11,), (14,)]
    assert steps.feeds(2)["odd"].shape == (8,)
    assert steps.feeds(2)["tokens"].shape == (2, 3)


@pytest.mark.parametrize("given_by_file", [False, True])
def test_a_failing_later_step_names_the_inputs_that_did_not_grow(given_by_file):
    drawn = StepInputs(OwnName, None, SIZED, seed=1)
    steps = StepInputs(OwnName, drawn.first, SIZED, seed=1) if given_by_file else drawn
    steps.learn({"past.0": np.zeros((2, 8, 4), "f4")})
    problem = ExecutionError("X001", "5 by 6", where="cpu:0", hint="verify")
    for number, text in ((0, "verify"), (1, "--steps 1")):
        with pytest.raises(ExecutionError, match="5 by 6") as raised, steps.explained(number):
            raise problem
        assert text in raised.value.hint
    assert "'past'" in raised.value.hint
    assert ("odd[0] ('odd')" in raised.value.hint) is not given_by_file
    assert "own[0]" not in raised.value.hint


def test_given_inputs_do_not_grow():
    given_feeds = {"tokens": np.ones((1, 1), "i8"), "mask": np.ones((1, 3), "i8"), "past.0": np.ones((1, 2, 4), "f4")}
    steps = StepInputs(Cached, given_feeds, {"batch": 9}, seed=0)
    steps.learn({"past.0": np.zeros((1, 3, 4), "f4")})
    assert set(steps.feeds(1)) == {"tokens", "mask"}
    assert steps.feeds(2)["mask"] is given_feeds["mask"]


# ---------------------------------------------------------------------------------------------- a decoder


SIZES = {"layers": 4, "hidden": 32, "heads": 2, "vocab": 60, "positions": 64}
HALVES = {"decoder/block_[23].*|present.[23].*|head.*|logits|decoder/final_norm": "cpu:1", ".*": "cpu:0"}


@pytest.fixture(scope="module")
def decoding(tmp_path_factory: pytest.TempPathFactory) -> onnxplace.Bundle:
    folder = tmp_path_factory.mktemp("decoder")
    return onnxplace.compile(
        decoder(seed=5, **SIZES),
        folder / "decoder.bundle",
        devices="cpu:0,cpu:1",
        shape={"batch": 1, "seq": 1, "past": 16},
        state={"present.*": "past.*"},
        pipeline=pipeline(folder, HALVES),
        strict=True,
    )


def decode_on_one_session(prompt: np.ndarray, count: int, cache: dict[str, np.ndarray]) -> np.ndarray:
    import onnxruntime

    model = decoder(seed=5, **SIZES).SerializeToString()
    session, cache = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]), dict(cache)

    def step(new: dict[str, np.ndarray]) -> np.ndarray:
        logits, *present = session.run(None, {**new, **cache})
        cache.update(zip(cache, present))
        return logits

    return generate(step, prompt, count)


def test_a_decoder_over_two_devices_generates_what_one_session_generates(decoding):
    homes = {state.input: state.device for state in decoding.manifest.states}
    assert len(homes) == 8
    assert {name: homes[name] for name in ("past.0.key", "past.1.value", "past.2.key", "past.3.value")} == {
        "past.0.key": "cpu:0",
        "past.1.value": "cpu:0",
        "past.2.key": "cpu:1",
        "past.3.value": "cpu:1",
    }
    cached = {name for state in decoding.manifest.states for name in (state.input, state.output)}
    sent = {step.value for program in decoding.manifest.programs.values() for step in program if step.op == "send"}
    assert sent
    assert not sent & cached, "the cache crosses a device border"
    random = np.random.default_rng(0)
    with onnxplace.InferenceSession(decoding, trace=True) as session:
        for batch, length in ((1, 5), (3, 1), (2, 9)):
            prompt = random.integers(0, SIZES["vocab"], (batch, length))
            empty = decoding.zero_states(batch=batch, past=0)
            first = dict(empty)

            def step(new: dict[str, np.ndarray], first: dict[str, np.ndarray] = first) -> np.ndarray:
                (logits,) = session.run(None, {**new, **first})
                first.clear()
                return logits

            tokens = generate(step, prompt, 12)
            assert tokens.tolist() == decode_on_one_session(prompt, 12, empty).tolist()
            assert len(np.unique(tokens)) > 3, "tokens that are all the same prove little"
            copied = {event["name"] for event in session.trace()["traceEvents"] if event.get("cat") == "copy"}
            assert copied
            assert not any(name in text for text in copied for name in cached)
            session.reset_state()


def test_a_decoder_is_verified_step_by_step(decoding, run_cli):
    result = run_cli("verify", decoding.path, "--steps", 4, "--shape", "past=0,seq=3", "--json")
    assert result.code == 0, result.out
    assert json.loads(result.out)["steps"] == 4


def test_the_example_generates_the_same_tokens_on_two_devices(capsys):
    decoder_example.main()
    first, split, whole = capsys.readouterr().out.splitlines()
    assert first.startswith("8 states stay on cpu:")
    assert split.split(":")[1].strip() == whole.split(":")[1].strip()
    assert split.count(",") == 31, "16 tokens for each of two prompts"
