"""Decoders are recognised by the names of exporters, or by their graphs; what is missing is named."""

import random

import numpy as np
import onnx
import pytest
from onnx import parser

import onnxplace
from decoder import decoder
from onnxplace.errors import ModelError, UsageError
from onnxplace.feeds.feeds import Declared
from onnxplace.model.decoders import recognise_decoder
from onnxplace.model.loading import load
from onnxplace.model.model import declaration_of
from tests.support.decoders import LAYERS, SIZES, optimum_decoder, rename

CACHES = [f"{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")]
TOTAL = "past_sequence_length + sequence_length"


def recognise(model, states=(), sizes=None):
    return recognise_decoder(load(model), states, sizes or {})


def declare(decoder) -> dict[str, Declared]:
    return {value.name: declaration_of(value, decoder.model) for value in decoder.model.inputs}


def test_names_of_optimum_give_states_sizes_and_a_note_in_one_line():
    found = recognise(optimum_decoder())
    assert found.states == {f"present.{name}": f"past_key_values.{name}" for name in CACHES}
    assert found.sizes == {"batch_size": 1, "sequence_length": 1, "past_sequence_length": 128}
    assert found.note.message == (
        "a decoder with 4 states (present.0.key=past_key_values.0.key, ...), new tokens in 'input_ids', "
        "sizes batch_size=1, sequence_length=1, past_sequence_length=128"
    )
    assert declare(found)["attention_mask"].shape == ("batch_size", TOTAL)


@pytest.mark.parametrize("total", ["total_sequence_length", "past_sequence_length + 1", "s53", TOTAL])
def test_an_axis_for_all_tokens_follows_from_past_and_new_ones_whatever_its_name(total):
    found = recognise(optimum_decoder(total), sizes={"past_sequence_length": 7})
    assert declare(found)["attention_mask"].shape == ("batch_size", TOTAL)
    assert found.sizes == {"batch_size": 1, "sequence_length": 1, "past_sequence_length": 7}


SPELLINGS = {
    "optimum": ("past_key_values.{}", "present.{}"),
    "examples": ("past.{}", "present.{}"),
    "long": ("past_key_values_{}", "present_key_values_{}"),
    "converters of ONNX Runtime": ("past_{}", "present_{}"),
    "Qualcomm": ("past_{}_in", "past_{}_out"),
    "transformers": ("input.cache.layers.{}", "output.cache.layers.{}"),
    "by the graph": ("past_key_values_{}", "cat_{}"),
    "by the graph alone": ("args_{}", "cat_{}"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("seed", range(3))
def test_every_spelling_is_recognised_in_any_order(spelling, seed):
    past, present = SPELLINGS[spelling]
    names = {"tokens": "input_ids"} | {f"past.{n}": past.format(n) for n in CACHES}
    names |= {f"present.{n}": present.format(n) for n in CACHES}
    model = rename(decoder(**SIZES), lambda name: names.get(name, name), {})
    for values in (model.graph.input, model.graph.output):
        shuffled = random.Random(seed).sample(list(values), len(values))
        del values[:]
        values.extend(shuffled)
    found = recognise(model)
    assert dict(found.states) == {present.format(n): past.format(n) for n in CACHES}
    assert found.sizes == {"batch": 1, "seq": 1, "past": 128}


def test_sizes_that_torch_numbered_get_names_that_tell_what_they_are():
    """Without names, torch numbers the sizes of each input for itself."""
    model = optimum_decoder("s53")
    for index, value in enumerate(model.graph.input):
        for size in value.type.tensor_type.shape.dim:
            numbered = {"batch_size": f"s{index}", "sequence_length": "s70", "past_sequence_length": f"s9{index}"}
            if size.dim_param:
                size.dim_param = numbered.get(size.dim_param, size.dim_param)
    inputs = declare(recognise(model))
    assert inputs["input_ids"].shape == ("batch", "sequence")
    assert inputs["attention_mask"].shape == ("batch", "past + sequence")
    assert inputs["position_ids"].shape == ("batch", "sequence")
    assert inputs["past_key_values.1.value"].shape[0::2] == ("batch", "past")


def test_fixed_sizes_stay():
    model = optimum_decoder("total_sequence_length")
    for value in model.graph.input:
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in ("batch_size", "sequence_length"):
                size.dim_value = 1
    found = recognise(model)
    assert found.sizes == {"past_sequence_length": 128}
    assert declare(found)["attention_mask"].shape == (1, "past_sequence_length + 1")


def test_a_size_written_as_a_symbol_of_digits_is_a_size():
    """The exporters in transformers write the number of heads so."""
    model = optimum_decoder()
    for value in model.graph.input:
        shape = value.type.tensor_type.shape
        if len(shape.dim) == 4:
            shape.dim[1].dim_param = str(shape.dim[1].dim_value)
    assert declare(recognise(model))["past_key_values.0.key"].shape[1] == SIZES["heads"]


TEXT = '<ir_version: 8, opset_import: ["": 18]> g ({inputs}) => ({outputs}) {{ {nodes} }}'
ESTIMATE = ("--pipeline", "profile{estimate=true},coplace,m-etf,split,emit", "--no-trial", "--devices")
NO_DECODER = TEXT.format(inputs="float[n, 3] x", outputs="float[n, 3] y", nodes="y = Neg(x)")
HALF = TEXT.format(
    inputs="int64[b, s] input_ids, float[b, 2, p, 4] past_key_0, float[b, 2, p, 4] past_value_0",
    outputs="float[b, 2, p, 4] present_key_0, float[b, 2, p, 4] other, int64[b, s] logits",
    nodes="present_key_0 = Neg(past_key_0) other = Neg(past_value_0) logits = Neg(input_ids)",
)
NO_TOKENS = TEXT.format(
    inputs="float[b, 2, p, 4] past, float[b] x, int64[b, p] attention_mask",
    outputs="float[b, 2, p, 4] present, float[b] y, int64[b, p] z",
    nodes="present = Neg(past) y = Neg(x) z = Neg(attention_mask)",
)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (NO_DECODER, "not a decoder: no output returns an input with new tokens", "--task text-generation-with-past"),
        (
            HALF,
            "no output is recognised for 'past_value_0'",
            "--state OUT=past_value_0 (other outputs: 'other', 'logits'",
        ),
        (
            NO_TOKENS,
            "no input takes new tokens, as input_ids [batch, sequence]; others than states: 'x'",
            "--state OUT=IN",
        ),
    ],
)
def test_what_is_not_recognised_is_named_with_the_options_to_give(text, message, hint):
    with pytest.raises(ModelError) as caught:
        recognise(parser.parse_model(text))
    assert (caught.value.code, caught.value.where) == ("S002", "--llm")
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_part_given_by_hand_completes_the_others():
    found = recognise(parser.parse_model(HALF), ["other=past_value_0"])
    assert found.states == {"present_key_0": "past_key_0", "other": "past_value_0"}


def test_a_state_that_contradicts_the_recognised_ones_is_refused_and_an_equal_one_is_not():
    with pytest.raises(UsageError) as caught:
        recognise(parser.parse_model(HALF), ["other=past_key_0"])
    assert caught.value.message == "--llm recognises output 'present_key_0' for input 'past_key_0', not 'other'"
    assert caught.value.where == "--state other=past_key_0"
    assert caught.value.hint == "omit one of the two options"
    assert recognise(optimum_decoder(), ["present.*=past_key_values.*"]).states == recognise(optimum_decoder()).states


# ------------------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def model_path(tmp_path):
    onnx.save(optimum_decoder("total_sequence_length"), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_a_decoder_compiles_with_llm_alone_and_is_verified_as_its_cache_grows(run_cli, model_path):
    result = run_cli("compile", model_path, "--llm", *ESTIMATE, "cpu:0,cpu:1")
    assert result.code == 0, result.err
    assert "note[S002] decoder: a decoder with 4 states (present.0.key=past_key_values.0.key, ...)" in result.err
    bundle = onnxplace.load(model_path.with_suffix(".bundle"))
    assert {state.output: state.input for state in bundle.manifest.states} == {
        f"present.{name}": f"past_key_values.{name}" for name in CACHES
    }
    result = run_cli("verify", bundle.path, "--against", model_path)
    assert result.code == 0, result.out
    assert "3 steps, each with the states of the one before" in result.out
    assert "past_sequence_length=256" in result.out


def test_sizes_given_next_to_llm_count(run_cli, model_path):
    options = (
        "--llm",
        "--shape",
        "batch_size=2,past_sequence_length=9",
        "--pipeline",
        "profile{estimate=true},coplace,m-etf,split,emit",
    )
    assert run_cli("compile", model_path, *options, *ESTIMATE, "cpu:0").code == 0
    manifest = onnxplace.load(model_path.with_suffix(".bundle")).manifest
    assert manifest.dimensions == {"batch_size": 2, "sequence_length": 1, "past_sequence_length": 9, TOTAL: 10}


def test_real_inputs_determine_the_sizes_next_to_llm(run_cli, model_path, tmp_path):
    cache = np.zeros((1, 2, 5, 16), np.float32)
    feeds = {"input_ids": np.ones((1, 2), "i8"), "attention_mask": np.ones((1, 7), "i8")}
    feeds |= {"position_ids": np.array([[5, 6]]), **{f"past_key_values.{name}": cache for name in CACHES}}
    np.savez(tmp_path / "in.npz", **feeds)
    result = run_cli("compile", model_path, "--llm", "--inputs", tmp_path / "in.npz", *ESTIMATE, "cpu:0")
    assert result.code == 0, result.err
    manifest = onnxplace.load(model_path.with_suffix(".bundle")).manifest
    assert manifest.dimensions["past_sequence_length"] == 5


def test_plan_takes_llm_and_notes_what_it_recognised(run_cli, model_path):
    result = run_cli("plan", model_path, "--llm", "--devices", "cpu:0", "--estimate")
    assert result.code == 0, result.err
    assert "note[S002] decoder: a decoder with 4 states" in result.err


def test_a_model_without_a_cache_is_refused_before_anything_is_written(run_cli, tmp_path):
    onnx.save(parser.parse_model(NO_DECODER), tmp_path / "plain.onnx")
    result = run_cli("compile", tmp_path / "plain.onnx", "--llm")
    assert result.code == 2
    assert result.err.startswith("error[S002] --llm: not a decoder")
    assert [path.name for path in tmp_path.iterdir()] == ["plain.onnx"]
