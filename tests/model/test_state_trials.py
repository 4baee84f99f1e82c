"""A recognised state holds if two calls with it equal one call of both tokens; what does not is refused by its name."""

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxplace.driver.sources import ModelSource, bind_source
from onnxplace.errors import ModelError
from onnxplace.model.loading import load
from tests.support.decoders import optimum_decoder, rename

HEAD = '<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]> g '


def draw(seed: int, *shape: int) -> str:
    """Return weights in ONNX's text form."""
    values = np.random.default_rng(seed).standard_normal(shape).ravel()
    return f"float[{','.join(map(str, shape))}] w{seed} = {{{','.join(f'{value:.3f}' for value in values)}}}"


EMBEDDING, KEYS, VALUES = draw(0, 20, 4), draw(1, 4, 4), draw(2, 4, 4)
CONSTANTS = "int64[1] axis0 = {0}, int64[1] axis1 = {1}, int64[1] end = {9999}, int64 zero = {0}, int64 one = {1}"
WEIGHTS = f"<{EMBEDDING}, {KEYS}, {VALUES}, {CONSTANTS}, float hidden = {{-10000}}>"
# Causal attention over the keys `k` and values `v`.
ATTENTION = """
rows = Shape<start = 1, end = 2>(input_ids) columns = Shape<start = 1, end = 2>(k) past = Sub(columns, rows)
sizes = Concat<axis = 0>(rows, columns) ones = ConstantOfShape<value = float[1] {1}>(sizes) diagonal0 = Add(past, axis1)
diagonal = Squeeze(diagonal0) later = Trilu<upper = 1>(ones, diagonal) mask = Mul(later, hidden)
kt = Transpose<perm = [0, 2, 1]>(k) scores0 = MatMul(x, kt) scores = Add(scores0, mask)
shares = Softmax<axis = -1>(scores)
"""
CACHE = "float[b, p, 4] past_key_0, float[b, p, 4] past_value_0"
INPUTS, OUTPUTS = (
    f"int64[b, s] input_ids, {CACHE}",
    "float[b, s, 4] y, float[b, t, 4] present_key_0, float[b, t, 4] present_value_0",
)
APPEND = "k = Concat<axis = 1>(past_key_0, kn) v = Concat<axis = 1>(past_value_0, vn)"
RETURN = "present_key_0 = Identity(k) present_value_0 = Identity(v)"
MIX = "y = MatMul(shares, v)"


def attend(body: str, inputs: str = INPUTS, outputs: str = OUTPUTS) -> str:
    new = "x = Gather(w0, input_ids) kn = MatMul(x, w1) vn = MatMul(x, w2)"
    return f"{HEAD}({inputs}) => ({outputs}) {WEIGHTS} {{ {new} {body} }}"


def with_context(present: str, more: str = "") -> onnx.ModelProto:
    """Return a decoder with a cache of its encoder, from which each call returns another value."""
    mixed = "mixed = MatMul(shares, v) mean = ReduceMean(context, axis1) y = Add(mixed, mean)"
    body = f"{APPEND} {ATTENTION} {mixed} {RETURN}"
    inputs = f"{INPUTS}, float[b, e, 4] context{more}"
    proto = parser.parse_model(attend(f"{body} {present}", inputs, f"{OUTPUTS}, float[d, f, 4] kept"))
    names = {"context": "past_key_values.0.encoder.key", "kept": "present.0.encoder.key"}
    for node in proto.graph.node:
        for branch in node.attribute:
            for inner in branch.g.node:
                inner.input[:] = [names.get(name, name) for name in inner.input]
    return rename(proto, lambda name: names.get(name, name), {})


DUMMY = "sizes2 = Constant<value_ints = [0, 1, 4]>() {0} = ConstantOfShape(sizes2)"
BRANCHES = """kept = If(use_cache_branch) <
then_branch = with () => (float[d, f, 4] a) {{ {0} }},
else_branch = without () => (float[d, f, 4] c) {{ c = MatMul(encoder_hidden_states, w1) }}>"""
BRANCH_INPUTS = ", float[b, e, 4] encoder_hidden_states, bool[1] use_cache_branch"
FUSED = (
    f"{HEAD}(float[b, s, 8] inputs_embeds, float[b, 2, p, 4] past_k, float[b, 2, p, 4] past_v) => "
    "(float[b, s, 8] att, float[b, 2, t, 4] kout, float[b, 2, t, 4] vout) { att, kout, vout = "
    "Attention<q_num_heads = 2, kv_num_heads = 2, is_causal = 1>"
    "(inputs_embeds, inputs_embeds, inputs_embeds, , past_k, past_v) }"
)
RECURRENT = f"""{HEAD}(int64[b, s] input_ids, float[b, 4] past_h) => (float[b, s, 4] y, float[b, 4] present_h)
{WEIGHTS} {{
x = Gather(w0, input_ids) xs = Transpose<perm = [1, 0, 2]>(x)
present_h, ys = Scan<num_scan_inputs = 1, body = step
(float[b, 4] hi, float[b, 4] xi) => (float[b, 4] ho, float[b, 4] yo) {{
half = Constant<value_float = 0.5>() hh = Mul(hi, half) ho = Add(hh, xi) yo = Tanh(ho) }}>(past_h, xs)
y = Transpose<perm = [1, 0, 2]>(ys) }}"""
CONVOLUTION = f"""{HEAD}(int64[b, s] input_ids, float[b, 3, 4] past_conv) =>
(float[b, s, 4] y, float[b, 3, 4] present_conv)
<{EMBEDDING}, {CONSTANTS}, int64[1] last = {{-3}}, int64[3] shape = {{4, 1, 4}}> {{
x = Gather(w0, input_ids) joined = Concat<axis = 1>(past_conv, x) present_conv = Slice(joined, last, end, axis1)
channels = Transpose<perm = [0, 2, 1]>(joined) kernel = ConstantOfShape<value = float[1] {{0.25}}>(shape)
o = Conv<group = 4>(channels, kernel) y = Transpose<perm = [0, 2, 1]>(o) }}"""
STATIC = f"""{HEAD}(int64[1, s] input_ids, int64[s] cache_position, float[1, 16, 4] past_key,
float[1, 16, 4] past_value) =>
(float[1, s, 4] y, float[1, 16, 4] present_key, float[1, 16, 4] present_value)
<{EMBEDDING}, {KEYS}, {VALUES}, {CONSTANTS}, float hidden = {{-10000}}, int64 length = {{16}}> {{
x0 = Gather(w0, input_ids) x = Squeeze(x0, axis0) kn = MatMul(x, w1) vn = MatMul(x, w2)
kp = Squeeze(past_key, axis0) vp = Squeeze(past_value, axis0) rows = Unsqueeze(cache_position, axis1)
k = ScatterND(kp, rows, kn) v = ScatterND(vp, rows, vn) kt = Transpose<perm = [1, 0]>(k) scores0 = MatMul(x, kt)
columns = Range(zero, length, one) later = Greater(columns, rows) laterf = Cast<to = 1>(later)
mask = Mul(laterf, hidden)
scores = Add(scores0, mask) shares = Softmax<axis = -1>(scores) y0 = MatMul(shares, v) y = Unsqueeze(y0, axis0)
present_key = Unsqueeze(k, axis0) present_value = Unsqueeze(v, axis0) }}"""
GROUPED = f"""{HEAD}(int64[b, s] input_ids, int64[b, t] attention_mask, float[b, 1, p, 8] past_key,
float[b, 1, p, 8] past_value) => (float[b, s, 16] y, float[b, 1, t, 8] present_key, float[b, 1, t, 8] present_value)
<{draw(0, 20, 16)}, {draw(1, 16, 8)}, {CONSTANTS}> {{ x = Gather(w0, input_ids) kn = MatMul(x, w1) vn = Neg(kn)
count = ReduceSum<keepdims = 0>(attention_mask, axis1) last = Sub(count, one) lengths = Cast<to = 6>(last)
sizes = Shape(attention_mask) total0 = Gather(sizes, one) total = Cast<to = 6>(total0)
y, present_key, present_value = com.microsoft.GroupQueryAttention<num_heads = 2, kv_num_heads = 1>
(x, kn, vn, past_key, past_value, lengths, total) }}"""
FEW_BITS = attend(
    f"""kq = QuantizeLinear(kn, scale, middle) vq = QuantizeLinear(vn, scale, middle)
    present_key_0 = Concat<axis = 1>(past_key_0, kq) present_value_0 = Concat<axis = 1>(past_value_0, vq)
    k = DequantizeLinear(present_key_0, scale, middle) v = DequantizeLinear(present_value_0, scale, middle)
    {ATTENTION} {MIX}""",
    INPUTS.replace("float[", "uint8["),
    OUTPUTS.replace("float[b, t", "uint8[b, t"),
).replace("float hidden", "float scale = {0.05}, uint8 middle = {128}, float hidden")
COUNTED = attend(
    "present_0 = Concat<axis = 1>(past_0, kn) rows = Shape<start = 1, end = 2>(input_ids) "
    "present_len = Add(past_len, rows) sums = CumSum(present_0, one) y = Slice(sums, past_len, end, axis1)",
    "int64[b, s] input_ids, int64[1] past_len, float[b, p, 4] past_0",
    "float[b, s, 4] y, float[b, t, 4] present_0, int64[1] present_len",
)
ONLY_NEW = attend(f"{APPEND} present_key_0 = Identity(kn) present_value_0 = Identity(vn) {ATTENTION} {MIX}")
SWAPPED = attend(f"{APPEND} present_key_0 = Identity(v) present_value_0 = Identity(k) {ATTENTION} {MIX}")


def swap(text: str, one: str, other: str) -> str:
    return text.replace(one, "swapped").replace(other, one).replace("swapped", other)


def one_token(text: str) -> str:
    return text.replace("[b, s", "[1, 1").replace("[b,", "[1,")


def recognise(text: str | onnx.ModelProto, states=(), context: int | None = 5):
    """Return the states and notes of a model, as `compile --llm` finds them."""
    proto = parser.parse_model(text) if isinstance(text, str) else text
    symbols = {size.dim_param for value in proto.graph.input for size in value.type.tensor_type.shape.dim}
    sizes = {"e": context} if context and "e" in symbols else {}
    sized, notes = bind_source(ModelSource(proto, proto), load(proto), shape=sizes, inputs=None, state=states, llm=True)
    return sized[0].model.states, [note.message for note in notes[1:]]


HOLD = {
    "optimum": (optimum_decoder(), 4),
    "appended": (attend(f"{APPEND} {RETURN} {ATTENTION} {MIX}"), 2),
    "passed on": (with_context("kept = Identity(context)"), 3),
    "passed on by a branch": (with_context(BRANCHES.format("a = Identity(context)"), BRANCH_INPUTS), 3),
    "Attention whose result is an output": (FUSED, 2),
    "the same without names": (FUSED.replace("past_", "in_"), 2),
    "recurrent": (RECURRENT, 1),
    "convolution": (CONVOLUTION, 1),
    "a cache of fixed length": (STATIC, 2),
    "GroupQueryAttention": (GROUPED, 2),
    "few bits": (FEW_BITS, 2),
    "a number of tokens": (COUNTED, 2),
}


@pytest.mark.parametrize("name", HOLD)
def test_states_that_hold_are_taken_without_a_word(name):
    model, count = HOLD[name]
    states, notes = recognise(model)
    assert (len(states), notes) == (count, [])


FAIL = {
    "only the new tokens": (ONLY_NEW, ["present_key_0", "present_value_0"]),
    "only the new token, one at a time": (
        one_token(ONLY_NEW),
        ["present_key_0", "present_value_0"],
    ),
    "keys and values swapped": (SWAPPED, ["present_key_0", "present_value_0"]),
    "swapped, one at a time": (one_token(SWAPPED), ["present_key_0", "present_value_0"]),
    "a dummy without elements": (with_context(DUMMY.format("kept")), ["present.0.encoder.key"]),
    "zeros of the same shape": (
        with_context("sizes2 = Shape(context) kept = ConstantOfShape(sizes2)"),
        ["present.0.encoder.key"],
    ),
    "a dummy in one branch": (
        with_context(BRANCHES.format(DUMMY.format("a")), BRANCH_INPUTS),
        ["present.0.encoder.key"],
    ),
    "Attention with keys and values swapped": (
        FUSED.replace("kout", "present_v").replace("vout", "present_k"),
        ["present_k", "present_v"],
    ),
    "Attention of whose caches one is returned": (
        FUSED.replace(", float[b, 2, t, 4] kout", "").replace("past_", "in_"),
        ["vout"],
    ),
    "recurrent, but of another value": (
        RECURRENT.replace("present_h, ys", "h, ys").replace("y = Trans", "present_h = Tanh(h) y = Trans"),
        ["present_h"],
    ),
    "a window that stays": (
        CONVOLUTION.replace("last = {-3}", "last = {0}").replace("{9999}", "{3}"),
        ["present_conv"],
    ),
    "a cache of fixed length, negated": (
        STATIC.replace("present_key = Unsqueeze(k,", "kneg = Neg(k) present_key = Unsqueeze(kneg,"),
        ["present_key"],
    ),
    "GroupQueryAttention, swapped": (
        swap(GROUPED, "present_key", "present_value"),
        ["present_key", "present_value"],
    ),
}


@pytest.mark.parametrize("name", FAIL)
def test_states_that_do_not_hold_are_refused_by_name(name):
    model, names = FAIL[name]
    with pytest.raises(ModelError, match="two calls with them differ from one call of both tokens") as caught:
        recognise(model)
    assert (caught.value.code, caught.value.where) == ("S002", "--llm")
    assert any(repr(output) in caught.value.message for output in names)
    assert "by hand, which are not tried: --state OUT=IN" in caught.value.hint


def test_states_that_are_given_by_hand_are_not_judged():
    states, notes = recognise(ONLY_NEW, ["present_*=past_*"])
    assert states == {"past_key_0": "present_key_0", "past_value_0": "present_value_0"}
    assert notes == []


def test_inputs_whose_sizes_do_not_grow_with_the_tokens_are_a_note_and_no_crash():
    model = attend(f"{APPEND} {RETURN} {ATTENTION} {MIX}", f"{INPUTS}, int64[1, 1] position_ids")
    assert recognise(model)[1] != []


def test_other_outputs_may_be_sequences():
    model = attend(
        f"{APPEND} {RETURN} {ATTENTION} {MIX} z = SequenceConstruct(kn, k)", INPUTS, f"{OUTPUTS}, seq(float[b, u, 4]) z"
    )
    assert recognise(model)[1] == []


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (STATIC.replace("[1, s]", "[1, 1]").replace("int64[s]", "int64[1]"), "the number of new tokens is fixed"),
        (with_context("kept = Identity(context)"), "symbolic dimensions without a value: e"),
        (RECURRENT.replace("y = Trans", "z = NoSuchOperator(x) y = Trans"), "NoSuchOperator"),
    ],
)
def test_what_no_run_can_show_is_a_note(model, reason):
    _, (note,) = recognise(model, context=None)
    assert note.startswith("no run shows that its states hold: ")
    assert reason in note


def test_a_model_that_is_too_large_for_the_memory_is_not_tried(monkeypatch):
    monkeypatch.setattr("onnxplace.model.decoders.available_memory_bytes", lambda: 0)
    assert recognise(ONLY_NEW)[1] == [
        "no run shows that its states hold: the free memory is too small to open the model"
    ]


def test_an_input_whose_meaning_is_a_guess_makes_a_difference_a_note():
    model = RECURRENT.replace("float[b, 4] past_h)", "float[b, 4] past_h, int64[1] kind)").replace(
        "y = Trans", "kindf = Cast<to = 1>(kind) y = Trans"
    )
    assert recognise(model)[1] == []
    wrong = model.replace("present_h, ys", "h, ys").replace("y = Trans", "present_h = Tanh(h) y = Trans", 1)
    assert recognise(wrong)[1] == ["no run shows that its states hold: it depends on what they take for 'kind'"]
