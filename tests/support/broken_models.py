"""Damaged models: valid ones, altered at random places of their protos or of their bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message
from onnx import AttributeProto, ModelProto, SparseTensorProto, TensorProto, helper, numpy_helper, parser

HEADER = '<ir_version: 9, opset_import: ["": 18, "ai.onnx.ml": 3, "own": 1]>'
PLAIN = """g (float[2, 4] x, int64[2] i) => (float[2, 4] y, int64[2] k) {
    a = MatMul(x, w)
    [b] b = Relu(a)
    c = Constant <value = float[4] {1, 2, 3, 4}> ()
    d = Add(b, c)
    e = Constant <value_ints = [2, 4]> ()
    f = Reshape(d, e)
    s = Split <axis = 1, num_outputs = 2> (f)
    y = Sum(f, d, thin)
    k = Add(i, big)
}"""
SUBGRAPHS = """g (float[3, 4] x, bool c, int64 n) => (float[3, 4] y, float[3, 4] z) {
    a = Neg(x)
    b = If(c) <
        then_branch = t () => (float[3, 4] u) { v = Mul(a, w2) u = Add(v, thin) },
        else_branch = e () => (float[3, 4] v) { one = Constant <value_float = 1.0> () v = Add(a, one) }
    >
    y = Neg(b)
    z = Loop(n, c, x) <body = l (int64 it, bool go, float[3, 4] s) => (bool go_on, float[3, 4] t) {
        go_on = Identity(go)
        t = Add(s, a)
    }>
}"""
FUNCTIONS = """g (float[N, 4] x, float[N, M] p, float[S] q) => (float[N, 4] y) {
    a = own.twice(x)
    b = own.twice(a)
    y = Relu(b)
}
<domain: "own", opset_import: ["": 18]>
twice (x) => (y) { t = Add(x, x) y = Neg(t) }
"""
OTHERS = """g (float[2, 4] x, string[2] t) => (seq(float[2, 4]) l, string[2] t2, float[2, 4] y) {
    l = SequenceConstruct(x, x)
    n = Constant <value = int64 {1}> ()
    m = SequenceAt(l, n)
    sh = Shape(m)
    f = ConstantOfShape <value = float[1] {2}> (sh)
    y = Mul(m, f)
    t2 = Identity(t)
    q = QuantizeLinear(x, s, zp)
    dq = DequantizeLinear(q, s, zp)
}"""
LAYERS = """g (float[1, 2, 6, 6] x, float[3, 1, 4] r) => (float[1, 3] y, float[3, 1, 1, 4] h, float[3, 4] s) {
    a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, k)
    b = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a)
    c = ConvTranspose (b, k)
    d = ReduceMean <keepdims = 1> (c)
    e = Softmax <axis = -1> (d)
    f = Flatten(e)
    y = Gemm <transB = 1> (f, v)
    h, last = GRU <hidden_size = 4> (r, w, w)
    q = Einsum <equation = "abc,dec->abe"> (r, w)
    t = Transpose <perm = [1, 0, 2]> (q)
    three = Constant <value_ints = [3, 4]> ()
    flat = Reshape(r, three)
    z = Scan <num_scan_inputs = 1, body = b (float[4] i) => (float[4] o) { o = Relu(i) }> (flat)
    u, at = TopK(z, one)
    s = Cast <to = 1> (u)
}"""


def build_originals() -> list[ModelProto]:
    """Return valid models that together have all kinds of content."""
    texts = (PLAIN, SUBGRAPHS, FUNCTIONS, OTHERS, LAYERS)
    plain, subgraphs, functions, others, layers = (parser.parse_model(HEADER + text) for text in texts)
    functions.graph.input[2].type.tensor_type.shape.dim[0].dim_param = "N + M"  # older parsers refuse it
    plain.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4), np.float32), "w"))
    plain.graph.initializer.append(helper.make_tensor("big", TensorProto.INT64, [2], [1, 2]))
    plain.graph.initializer.append(make_external_weight("far", [300]))
    plain.graph.node[0].input.append("")
    plain.graph.sparse_initializer.append(make_sparse_weight())
    plain.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [2, 4]))
    plain.graph.node[-1].attribute.append(helper.make_attribute("doc", "text"))
    del plain.graph.node[-1].attribute[:]
    branch = next(a.g for n in subgraphs.graph.node for a in n.attribute if a.name == "then_branch")
    branch.initializer.append(numpy_helper.from_array(np.ones((300, 4), np.float32)[:3], "w2"))
    value = AttributeProto(name="sparse_value", type=AttributeProto.SPARSE_TENSOR, sparse_tensor=make_sparse_weight())
    node = helper.make_node("Constant", [], ["thin"])
    node.attribute.append(value)
    branch.node.insert(0, node)
    others.graph.initializer.append(helper.make_tensor("s", TensorProto.FLOAT, [], [0.5]))
    others.graph.initializer.append(helper.make_tensor("zp", TensorProto.UINT8, [], [3]))
    others.graph.initializer.append(helper.make_tensor("words", TensorProto.STRING, [2], ["a", "b"]))
    for name, shape in (("k", (2, 2, 3, 3)), ("v", (3, 1)), ("w", (1, 12, 4))):
        layers.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    layers.graph.initializer.append(helper.make_tensor("one", TensorProto.INT64, [1], [4]))
    return [plain, subgraphs, functions, others, layers]


def make_external_weight(name: str, dims: Sequence[int]) -> TensorProto:
    """Return a weight whose bytes are in weights.data, next to the model."""
    result = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "weights.data"), ("offset", "0"), ("length", "1200")):
        result.external_data.add(key=key, value=value)
    return result


def make_sparse_weight() -> SparseTensorProto:
    values = numpy_helper.from_array(np.array([7, 9], np.float32), "thin")
    return helper.make_sparse_tensor(values, helper.make_tensor("at", TensorProto.INT64, [2], [1, 3]), [4])


NUMBERS = (0, 1, -1, 2, 3, -5, 7, 16, 64, 127, 1000, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 62, -(1 << 63))
TEXTS = (
    "",
    "x",
    "y",
    "a",
    "w",
    "thin",
    "b",
    "N",
    "N - 9",
    "N // 0",
    "\0",
    "é" * 3,
    "weights.data",
    "../w",
    "/etc/passwd",
)
TEXTS += ("-1", "99999999999", "ai.onnx", "ai.onnx.ml", "com.microsoft", "Relu", "If", "Constant", "Loop", "offset")
TEXTS += (
    "length",
    "location",
    "value",
    "sparse_value",
    "n" * 300,
    "(" * 99,
    "Scan",
    "Identity",
    "Cast",
    "Split",
    "/etc/passwd",
)


def alter_model(model: ModelProto, generator: random.Random) -> ModelProto:
    """Return a copy of a model with one to four changes."""
    result = ModelProto()
    result.CopyFrom(model)
    for _ in range(generator.choice((1, 1, 1, 2, 4))):
        generator.choice(CHANGES)(generator.choice(list(collect_messages(result, generator))), generator)
    return result


def collect_messages(message: Message, generator: random.Random) -> list[Message]:
    """Return a message and all messages in it."""
    result = [message]
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in value if is_repeated_field(field) else [value]:
                result.extend(collect_messages(inner, generator))
    return result


def is_repeated_field(field: Any) -> bool:
    return bool(
        getattr(field, "is_repeated", None) if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
    )


def set_field(message: Message, generator: random.Random) -> None:
    """Set a field, whether it was set or not, to a value that may be valid or not."""
    present = [field for field, _ in message.ListFields()]
    field = generator.choice(present if present and generator.random() < 0.7 else list(message.DESCRIPTOR.fields))
    if field.type == field.TYPE_MESSAGE:
        inner = getattr(message, field.name)
        (inner.add if is_repeated_field(field) else inner.SetInParent)()
        return
    value = draw_scalar(field, generator)
    if not is_repeated_field(field):
        setattr(message, field.name, value)
        return
    values = getattr(message, field.name)
    if len(values) and generator.random() < 0.7:
        values[generator.randrange(len(values))] = value
    else:
        values.extend([value] * generator.choice((1, 1, 2, 70)))


def draw_scalar(field: Any, generator: random.Random) -> Any:
    if field.type == field.TYPE_ENUM:
        return generator.choice([value.number for value in field.enum_type.values])
    if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64, field.CPPTYPE_UINT64, field.CPPTYPE_UINT32):
        number = generator.choice(NUMBERS)
        if field.cpp_type == field.CPPTYPE_INT32:
            return (number + (1 << 31)) % (1 << 32) - (1 << 31)
        return number if field.cpp_type == field.CPPTYPE_INT64 else abs(number) % (1 << 32)
    if field.cpp_type == field.CPPTYPE_STRING:
        text = generator.choice(TEXTS)
        return text if field.type == field.TYPE_STRING else text.encode()
    return generator.choice((0.0, -1.0, 1e30, float("nan")))


def clear_field(message: Message, generator: random.Random) -> None:
    if present := message.ListFields():
        message.ClearField(generator.choice(present)[0].name)


def drop_element(message: Message, generator: random.Random) -> None:
    if lists := [value for field, value in message.ListFields() if is_repeated_field(field)]:
        values = generator.choice(lists)
        del values[generator.randrange(len(values))]


def double_element(message: Message, generator: random.Random) -> None:
    if lists := [value for field, value in message.ListFields() if is_repeated_field(field)]:
        values = generator.choice(lists)
        values.append(values[generator.randrange(len(values))])


def swap_elements(message: Message, generator: random.Random) -> None:
    if lists := [value for field, value in message.ListFields() if is_repeated_field(field)]:
        values = generator.choice(lists)
        shuffled = list(values)
        generator.shuffle(shuffled)
        copies = [copy_item(item) for item in shuffled]
        del values[:]
        values.extend(copies)


def copy_item(item: Any) -> Any:
    if not isinstance(item, Message):
        return item
    result = type(item)()
    result.CopyFrom(item)
    return result


def copy_text(message: Message, generator: random.Random) -> None:
    """Copy a text within a message: values with two producers, nodes that read themselves."""
    texts = [
        (field, value) for field, value in message.ListFields() if field.cpp_type == field.CPPTYPE_STRING and value
    ]
    if len(texts) < 2:
        return
    (target, _), (source, value) = generator.sample(texts, 2)
    text = generator.choice(list(value)) if is_repeated_field(source) else value
    if source.type != target.type:
        return
    if is_repeated_field(target):
        getattr(message, target.name)[0] = text
    else:
        setattr(message, target.name, text)


CHANGES: tuple[Callable[[Any, random.Random], None], ...] = (
    set_field,
    set_field,
    set_field,
    clear_field,
    drop_element,
    double_element,
    swap_elements,
    copy_text,
)


def damage_bytes(data: bytes, generator: random.Random) -> bytes:
    """Return bytes of which some are changed, removed or doubled."""
    result = bytearray(data)
    for _ in range(generator.choice((1, 1, 2, 5))):
        position = generator.randrange(len(result))
        change = generator.randrange(4)
        if change == 0:
            result[position] ^= 1 << generator.randrange(8)
        elif change == 1:
            result[position] = generator.choice((0, 1, 8, 10, 0x7F, 0x80, 0xFF))
        elif change == 2:
            del result[position : position + generator.choice((1, 2, 8, len(result)))]
        else:
            result[position:position] = result[position : position + generator.choice((1, 4, 30))]
        if not result:
            break
    return bytes(result)
