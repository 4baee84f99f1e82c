"""Dimensions that exporters name by expressions, `past + seq`: their sizes follow from the symbols."""

import json
import math
import re
from contextlib import suppress

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto, helper, parser

import onnxplace
from onnxplace.cli.shared_options import parse_shape
from onnxplace.errors import FeedError, ModelError, UsageError
from onnxplace.feeds.dimensions import (
    MAX_LENGTH,
    NoSizeError,
    complete_sizes,
    dimensions_of_feeds,
    drop_derived_sizes,
    evaluate,
    parse_size,
    symbols_of,
)
from onnxplace.feeds.feeds import Declared
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind

pytestmark = pytest.mark.usefixtures("no_gpus")


# ---------------------------------------------------------------------------------------------- parsing


@pytest.mark.parametrize(
    ("text", "sizes", "expected"),
    [
        ("past_sequence_length + sequence_length", {"past_sequence_length": 5, "sequence_length": 3}, 8),
        ("2*batch", {"batch": 4}, 8),
        ("batch*heads", {"batch": 4, "heads": 3}, 12),
        ("floor(seq/2)", {"seq": 7}, 3),
        ("floor(seq/2 - 1/2) + 1", {"seq": 8}, 4),
        ("ceiling(s0/2)", {"s0": 7}, 4),
        ("Max(1, s0)", {"s0": 0}, 1),
        ("Min(s0, s1, 9)", {"s0": 12, "s1": 10}, 9),
        ("s0//2 + 1", {"s0": 9}, 5),
        ("(s0//2)", {"s0": 9}, 4),
        ("Mod(s0, 4)", {"s0": 9}, 1),
        ("s0 % 4", {"s0": 9}, 1),
        ("s0**2 - 1", {"s0": 9}, 80),
        ("-s0 + 10", {"s0": 4}, 6),
        ("s0 - -1", {"s0": 4}, 5),
        ("2 * (a + b) // 3", {"a": 4, "b": 4}, 5),
        ("10 - 3 - a", {"a": 2}, 5),
        ("16 / 4 / a", {"a": 2}, 2),
        ("seq-len + 1", {"seq-len": 4}, 5),
        ("FloorDiv(s0, 2)", {"s0": 5}, 2),
        ("größe.x+1", {"größe.x": 4}, 5),
    ],
)
def test_expressions_of_exporters_are_evaluated(text, sizes, expected):
    assert evaluate(parse_size(text), sizes) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(
            "batch",
            "seq-len",
            "seq-1",
            "x.0",
            "batch size",
            "?",
            "",
            " ",
            "128",
            "1 + 2",
            "N, C",
            "a +",
            "+ a + ",
            "(a",
        ),
        *("a)", "a + )", "f(a)", "exp(a) + 1", "floor(a, b)", "Mod(a)", "floor()", "__import__('os')", "a.b()", "a[0]"),
        *("a ** -1", "a = 1", "lambda: a", "a + 1.5", "a\0 + 1", "unk__12"),
        "a" + " + a" * MAX_LENGTH,
        "(" * 100_000,
        "-" * 200 + "(" * 50,
    ],
)
def test_other_names_are_only_names(text):
    assert parse_size(text) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a - 9", "-8"),
        ("a/2", "0.5"),
        ("4 // (a - 1)", "divides by zero"),
        ("4 % (a - 1)", "divides by zero"),
        ("(a + 1)**64", "too large"),
        ("2**(a + 64)", "exponent from 0 to 64, got 65"),
        ("2**(a/2)", "exponent"),
        ("9223372036854775807 * (a + 1)", "too large"),
    ],
)
def test_an_expression_that_gives_no_size_is_refused_with_a_reason(text, message):
    with pytest.raises(NoSizeError, match=re.escape(message)):
        evaluate(parse_size(text), {"a": 1})


@given(st.text("ab012 +-*/%(),floormaxinMd.\0", max_size=60))
def test_any_text_is_parsed_as_a_name_or_an_expression(text):
    term = parse_size(text)
    if term is not None:
        with suppress(NoSizeError):
            assert evaluate(term, dict.fromkeys(symbols_of(term), 3)) >= 0


TERMS = st.recursive(
    st.one_of(st.integers(0, 9).map(str), st.sampled_from(["a", "b", "c"])),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.integers(1, 9)).map(lambda t: f"({t[0]})//{t[1]}"),
        st.tuples(st.sampled_from(["max", "min"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
    ),
    max_leaves=8,
)


@given(TERMS, st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_expressions_have_the_same_value_as_in_python(text, a, b, c):
    term = parse_size(text)
    if term is None:
        assert not re.search("[abc](?![xin])", text) or text in ("a", "b", "c")
        return
    expected = eval(text, {"__builtins__": {"max": max, "min": min}}, {"a": a, "b": b, "c": c})
    if expected < 0:
        with pytest.raises(NoSizeError):
            evaluate(term, {"a": a, "b": b, "c": c})
    else:
        assert evaluate(term, {"a": a, "b": b, "c": c}) == expected


# ---------------------------------------------------------------------------------------------- solving


@pytest.mark.parametrize(
    ("names", "sizes", "expected"),
    [
        (["past + seq"], {"past": 5, "seq": 1}, {"past + seq": 6}),
        (["past + seq"], {"past + seq": 6, "seq": 1}, {"past": 5}),
        (["2*batch"], {"2*batch": 8}, {"batch": 4}),
        (["2*batch", "batch + seq"], {"2*batch": 8, "batch + seq": 5}, {"batch": 4, "seq": 1}),
        (["a + b", "b + c", "c + 1"], {"a": 1, "a + b": 3, "b + c": 6}, {"b": 2, "c": 4, "c + 1": 5}),
        (["past + seq"], {"past": 5}, {}),
        (["floor(seq/2)"], {"floor(seq/2)": 5}, {}),
        (["s0*s0 + 0"], {"s0*s0 + 0": 9}, {}),
        (["s0/2"], {"s0/2": 9}, {"s0": 18}),
        (["s0 - s0 + s1"], {"s0 - s0 + s1": 3, "s1": 3}, {}),
    ],
)
def test_sizes_follow_from_each_other(names, sizes, expected):
    assert complete_sizes(names, sizes) == {**sizes, **expected}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"past": 5, "seq": 1, "past + seq": 7}, "dimension 'past + seq' is 7, and 6 by past=5, seq=1"),
        ({"past": 5, "past + seq": 4}, "dimension 'past + seq' cannot be 4 with past=5"),
        ({"2*batch": 7}, "cannot be 7"),
        ({"past - 6": 0, "past": 5}, "it would be -1"),
        ({"past - 6": 0, "past + 1": 9}, "'past"),
    ],
)
def test_sizes_that_contradict_each_other_are_named(sizes, message):
    with pytest.raises(NoSizeError, match=re.escape(message)):
        complete_sizes((), sizes)


def test_a_long_chain_of_expressions_is_solved_quickly():
    count = 4_000  # deeper than Python's stack
    names = [f"s{i + 1} - s{i}" for i in reversed(range(count))]
    sizes = complete_sizes(names, {"s0": 1, **dict.fromkeys(names, 1)})
    assert sizes[f"s{count}"] == count + 1


def test_derived_sizes_are_dropped():
    assert drop_derived_sizes({"a": 1, "b": 2, "a + b": 3, "a + c": 4}) == {"a": 1, "b": 2, "a + c": 4}


# ---------------------------------------------------------------------------------------------- feeds

INPUTS = [
    Declared("tokens", "tensor(int64)", ("batch", "seq")),
    Declared("past", "tensor(float)", ("batch", "past", 4)),
    Declared("mask", "tensor(float)", ("batch", "past + seq")),
]


def test_random_feeds_have_derived_sizes():
    feeds = random_feeds(INPUTS, {"batch": 2, "past": 5, "seq": 1})
    assert feeds["mask"].shape == (2, 6)
    feeds = random_feeds(INPUTS, {"batch": 2, "past + seq": 9, "seq": 1})
    assert feeds["past"].shape == (2, 8, 4)


def test_errors_ask_for_symbols_instead_of_expressions():
    with pytest.raises(FeedError) as caught:
        random_feeds(INPUTS, {"batch": 2})
    assert caught.value.message == "symbolic dimensions without a value: seq, past"
    assert "--shape seq=1,past=1," in caught.value.hint


def test_a_name_with_spaces_is_quoted_in_the_hint():
    with pytest.raises(FeedError) as caught:
        random_feeds([Declared("x", "tensor(float)", ("batch size",))], {})
    assert "--shape 'batch size=1'" in caught.value.hint
    assert '`shape={"batch size": 1}`' in str(caught.value)


def test_sizes_of_real_inputs_are_completed_and_checked():
    feeds = {"tokens": np.zeros((2, 3)), "past": np.zeros((2, 5, 4)), "mask": np.zeros((2, 8))}
    assert dimensions_of_feeds(feeds, INPUTS) == {"batch": 2, "seq": 3, "past": 5, "past + seq": 8}
    assert dimensions_of_feeds({**feeds, "mask": np.zeros((2, 1))}, INPUTS)["past + seq"] == 8  # ones may be broadcast
    del feeds["past"]
    assert dimensions_of_feeds(feeds, INPUTS)["past"] == 5
    with pytest.raises(FeedError, match=r"F003.*'past \+ seq' is 9, and 8 by past=5, seq=3"):
        dimensions_of_feeds({**feeds, "past": np.zeros((2, 5, 4)), "mask": np.zeros((2, 9))}, INPUTS)


def test_a_comma_in_parentheses_belongs_to_the_name():
    assert parse_shape("Max(1, s0)=3,batch=2") == {"Max(1, s0)": 3, "batch": 2}
    with pytest.raises(UsageError):
        parse_shape("batch=" + "9" * 5000)


# ---------------------------------------------------------------------------------------------- end to end

CACHED = """
<ir_version: 8, opset_import: ["": 17]>
g (float[batch, seq, 4] x, float[batch, past, 4] past_x, float[batch, 1] mask)
    => (float[batch, 1, 4] y, float[batch, 1, 4] present)
{
    [join] present = Concat <axis = 1> (past_x, x)
    [axes] last = Constant <value = int64[1] {2}> ()
    [wide] wide = Unsqueeze(mask, last)
    [times] z = Mul(present, wide)
    [relu] y = Relu(z)
}
"""


@pytest.fixture
def decoder(tmp_path) -> onnx.ModelProto:
    model = parser.parse_model(CACHED)
    for value, dims in (
        (model.graph.input[2], ("batch", "past + seq")),
        (model.graph.output[0], ("batch", "past + seq", 4)),
        (model.graph.output[1], ("batch", "past + seq", 4)),
    ):
        value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, dims))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    return model


@pytest.fixture
def arguments(decoder, tmp_path, fast_pipeline) -> tuple[object, ...]:
    return ("compile", tmp_path / "m.onnx", "--pipeline", fast_pipeline)


def read_dimensions(folder) -> dict[str, int]:
    """Return the dimensions in the manifest of the compiled bundle."""
    return json.loads((folder / "m.bundle" / "manifest.json").read_text())["dimensions"]


ALL_SIZES = {"batch": 2, "seq": 3, "past": 5, "past + seq": 8}


@pytest.mark.parametrize(
    "shape", ["batch=2,seq=3,past=5", "batch=2,seq=3,past + seq=8", "batch=2,seq=3,past=5,past + seq=8"]
)
def test_a_model_is_compiled_for_derived_sizes(run_cli, arguments, tmp_path, shape):
    assert run_cli(*arguments, "--shape", shape).code == 0
    assert read_dimensions(tmp_path) == ALL_SIZES
    for command in ("run", "verify"):
        assert run_cli(command, tmp_path / "m.bundle").code == 0
        assert run_cli(command, tmp_path / "m.bundle", "--shape", "past=7").code == 0
        assert run_cli(command, tmp_path / "m.bundle", "--shape", "past + seq=9,seq=2").code == 0
    assert run_cli("bench", tmp_path / "m.bundle", "--repeat", 3, "--shape", "seq=2", "--no-memory").code == 0


def test_compile_asks_only_for_symbols(run_cli, arguments):
    result = run_cli(*arguments, "--shape", "batch=2")
    assert result.code == 2
    assert "without a value: seq, past\n" in result.err
    assert "--shape seq=1,past=1," in result.err


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("batch=2,seq=3,past=5,past + seq=9", "'past + seq' is 9, and 8 by past=5, seq=3"),
        ("batch=2,seq=3,past + seq=2", "'past + seq' cannot be 2 with seq=3"),
        ("past + sek=2", "did you mean 'past + seq'?"),
        ("pasd=2", "did you mean 'past'?"),
    ],
)
def test_contradictions_and_typing_errors_are_refused(run_cli, arguments, tmp_path, shape, message):
    result = run_cli(*arguments, "--shape", shape)
    assert (result.code, "M022" in result.err, message in result.err) == (2, True, True), result.err
    assert not (tmp_path / "m.bundle").exists()


@pytest.mark.parametrize("command", ["run", "verify", "bench"])
def test_a_bundle_refuses_contradictions(run_cli, arguments, tmp_path, command):
    assert run_cli(*arguments, "--shape", "batch=2,seq=3,past=5").code == 0
    result = run_cli(command, tmp_path / "m.bundle", "--shape", "past + seq=9")
    assert (result.code, "'past + seq' is 9, and 8 by past=5, seq=3" in result.err) == (2, True), result.err
    np.savez(
        tmp_path / "f.npz", x=np.ones((2, 3, 4), "f4"), past_x=np.ones((2, 5, 4), "f4"), mask=np.ones((2, 9), "f4")
    )
    result = run_cli(command, tmp_path / "m.bundle", "--inputs", tmp_path / "f.npz")
    assert (result.code, "F003" in result.err, "'past + seq' is 9" in result.err) == (2, True, True), result.err


def test_real_inputs_determine_all_sizes(run_cli, arguments, tmp_path):
    feeds = {"x": np.ones((2, 3, 4), "f4"), "past_x": np.ones((2, 5, 4), "f4"), "mask": np.ones((2, 8), "f4")}
    np.savez(tmp_path / "f.npz", **feeds)
    assert run_cli(*arguments, "--inputs", tmp_path / "f.npz").code == 0
    assert read_dimensions(tmp_path) == ALL_SIZES
    assert run_cli("verify", tmp_path / "m.bundle").code == 0
    result = run_cli(*arguments, "--inputs", tmp_path / "f.npz", "--shape", "past=6", "--force")
    assert (result.code, "'past' is 6 here and 5 in the inputs" in result.err) == (2, True), result.err
    np.savez(tmp_path / "f.npz", **{**feeds, "mask": np.ones((2, 9), "f4")})
    result = run_cli(*arguments, "--inputs", tmp_path / "f.npz", "--force")
    assert (result.code, "F003" in result.err) == (2, True), result.err


def test_carried_states_grow_and_so_does_the_mask(run_cli, arguments, tmp_path):
    assert run_cli(*arguments, "--shape", "batch=2,seq=1,past=5", "--state", "present=past_x").code == 0
    result = run_cli("verify", tmp_path / "m.bundle", "--steps", 4)
    assert result.code == 0, result.err
    bundle = onnxplace.load(tmp_path / "m.bundle")
    assert bundle.zero_states(batch=2, past=3)["past_x"].shape == (2, 3, 4)


def test_zero_states_take_sizes_of_expressions_from_their_symbols():
    from onnxplace.feeds.synthetic import zero_feeds

    cache = [Declared("cache", "tensor(float)", ("batch", "2*(past + seq)"))]
    assert zero_feeds(cache, {"batch": 1, "past": 3, "seq": 1})["cache"].shape == (1, 8)


def test_the_python_interface_takes_symbols_and_numpy_integers(decoder):
    sizes = bind(load(decoder), {"batch": np.int64(2), "seq": np.int32(3), "past": 5}, {}).dimensions
    assert sizes == ALL_SIZES
    assert all(type(size) is int for size in sizes.values())
    with pytest.raises(ModelError, match="M022"):
        bind(load(decoder), {"past": 2.5}, {})


@given(st.integers(1, 5), st.integers(0, 9), st.integers(0, 9))
def test_sizes_read_off_random_feeds_agree(batch, past, seq):
    known = {"batch": batch, "past": past, "seq": seq}
    sizes = dimensions_of_feeds(random_feeds(INPUTS, known), INPUTS)
    assert {**sizes, **known} == {**known, "past + seq": past + seq}


def test_floor_and_ceiling_round_as_integers():
    for size in range(20):
        assert evaluate(parse_size("floor(s/2)"), {"s": size}) == size // 2
        assert evaluate(parse_size("ceiling(s/2)"), {"s": size}) == math.ceil(size / 2)
