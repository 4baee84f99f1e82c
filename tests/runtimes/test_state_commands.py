"""Carried states that are refused, states in commands, and a decoder."""

import json
import shutil
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import onnx
import pytest
from onnx import parser

import decoder as decoder_example
import onnxplace
from decoder import decoder, generate
from onnxplace.errors import ExecutionError, FeedError, ModelError, UsageError
from onnxplace.feeds.feeds import Declared
from onnxplace.measure.step_inputs import StepInputs
from onnxplace.model.loading import load as load_model
from onnxplace.model.state_binding import bind_states
from onnxplace.runtimes.onnxruntime import OnnxRuntime
from tests.support.state_checks import START, compile_sums, feeds, pipeline, sums


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> onnxplace.Bundle:
    return compile_sums(tmp_path_factory.mktemp("sums"))


@pytest.fixture
def session(bundle):
    with onnxplace.InferenceSession(bundle, trace=True) as opened:
        yield opened


# -------------------------------------------------------------------------------------------------------------- refused


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
        (["totel_next=total"], "S001", "no output 'totel_next'", "'total_next'"),
        (["total_next=totl"], "S001", "no input 'totl' for output 'total_next'", "'total'"),
        (["present.*=past.*"], "S001", "no output matches 'present.*'", "known: y, picked"),
        (["*_next=past_*"], "S001", "no input 'past_total' for output 'total_next'", "'total'"),
        (["total_next=total", "y=total"], "S001", "'total' is bound twice: to output 'total_next' and to 'y'", "out"),
        (["total_next=pick"], "S001", "total_next tensor(float) [n], the input takes pick tensor(int64) [1]", "type"),
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
    with pytest.raises(ModelError, match="output 'a' returns an input, expected a computed value"):
        bind_states(load_model(model), {"a": "b"})
    with pytest.raises(ModelError, match="only tensors can be states"):
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
    assert "error[U021] --state: state 'log_next' = 'log' stays on one device" in result.err
    assert "node 'append' to cpu:1 and node 'double' to cpu:0" in result.err
    assert not (tmp_path / "out").exists()


def test_an_unknown_state_in_a_command_is_refused_with_similar_names(run_cli, tmp_path):
    onnx.save(sums(), tmp_path / "sums.onnx")
    result = run_cli("compile", tmp_path / "sums.onnx", "--shape", "n=2,m=2", "--state", "log_nxt=log")
    assert (result.code, result.out) == (2, "")
    assert result.err == "error[S001] --state: the model has no output 'log_nxt'\n  hint: did you mean 'log_next'?\n"
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


# ------------------------------------------------------------------------------------------------------------- commands


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
    manifest: ClassVar = SimpleNamespace(
        states=[SimpleNamespace(output="present.0", input="past.0")], sharding=None, has_equal_sizes=True
    )
    initial_states: ClassVar = dict


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


# ------------------------------------------------------------------------------------------------------------ a decoder


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
            copied = {event.name for event in session.list_timelines()[-1].events if event.kind == "copy"}
            assert copied
            assert not any(name in text for text in copied for name in cached)
            session.reset_state()


def test_a_decoder_is_verified_step_by_step(decoding, run_cli):
    result = run_cli("verify", decoding.path, "--steps", 4, "--shape", "past=0,seq=3", "--json")
    assert result.code == 0, result.out
    assert json.loads(result.out)["steps"] == 4


@pytest.mark.slow
def test_the_example_generates_the_same_tokens_on_two_devices(capsys):
    decoder_example.main()
    first, split, whole = capsys.readouterr().out.splitlines()
    assert first.startswith("8 states stay on cpu:")
    assert split.split(":")[1].strip() == whole.split(":")[1].strip()
    assert split.count(",") == 31, "16 tokens for each of two prompts"
