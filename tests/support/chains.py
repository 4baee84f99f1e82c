"""Chains of matrix products, which only gain from several devices if their operators are split."""

from functools import cache

import numpy as np
import onnx
from onnx import numpy_helper, parser


def mlp(layers: int = 3, rows: int = 128, width: int = 512, inner: int = 1024, seed: int = 0) -> onnx.ModelProto:
    """Return a chain of `layers` blocks: x + relu(x W) V, for x [rows, width]."""
    return onnx.ModelProto.FromString(_mlp_bytes(layers, rows, width, inner, seed))


@cache
def _mlp_bytes(layers: int, rows: int, width: int, inner: int, seed: int) -> bytes:
    lines, value = [], "x"
    random, weights = np.random.default_rng(seed), []
    for layer in range(layers):
        lines += [
            f"[layer{layer}_up] u{layer} = MatMul({value}, w{layer})",
            f"[layer{layer}_act] a{layer} = Relu(u{layer})",
            f"[layer{layer}_down] d{layer} = MatMul(a{layer}, v{layer})",
            f"[layer{layer}_add] x{layer} = Add({value}, d{layer})",
        ]
        value = f"x{layer}"
        for name, shape in ((f"w{layer}", (width, inner)), (f"v{layer}", (inner, width))):
            weights.append(numpy_helper.from_array(random.standard_normal(shape).astype(np.float32) / 30, name))
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    mlp (float[{rows}, {width}] x) => (float[{rows}, {width}] y) {{ {" ".join(lines)} [end] y = Identity({value}) }}"""
    model = parser.parse_model(text)
    model.graph.initializer.extend(weights)
    return model.SerializeToString()


def exported_decoder(heads: int = 4, kept: int = 2, size: int = 8) -> onnx.ModelProto:
    """Return an attention layer with a cache of `kept` heads, repeated for the queries, as PyTorch 2.15 exports it.

    Keys are turned in three dimensions: the first Reshape merges the symbolic batch with the heads.
    """
    width = heads * size
    text = f"""<ir_version: 10, opset_import: ["": 20]>
    decoder (float[batch, seq, {width}] x, float[batch, {kept}, past, {size}] past)
        => (float[batch, seq, {width}] y, float[batch, {kept}, total, {size}] present)
    <int64[1] m = {{-1}}, int64[1] two = {{2}}, int64[1] kept = {{{kept}}}, int64[1] heads = {{{heads}}},
     int64[1] each = {{{heads // kept}}}, int64[1] size = {{{size}}}, int64[1] width = {{{width}}},
     int64[1] first = {{0}}, int64[1] last = {{9223372036854775807}}, int64[1] minus_two = {{-2}}>
    {{
        batch = Shape<start=0, end=1>(x)
        seq = Shape<start=1, end=2>(x)
        own = Concat<axis=0>(batch, seq, m, size)
        [query] q = MatMul(x, wq)
        [key] k = MatMul(x, wk)
        q4 = Reshape<allowzero=1>(q, own)
        k4 = Reshape<allowzero=1>(k, own)
        qh = Transpose<perm=[0, 2, 1, 3]>(q4)
        kh = Transpose<perm=[0, 2, 1, 3]>(k4)
        [grow] present = Concat<axis=2>(past, kh)
        total = Shape<start=2, end=3>(present)
        once = Unsqueeze(present, two)
        wide = Concat<axis=0>(batch, kept, each, total, size)
        [repeat] every = Expand(once, wide)
        all = Concat<axis=0>(batch, heads, total, size)
        keys = Reshape<allowzero=1>(every, all)
        shape = Shape(keys)
        end = Slice(shape, m, last)
        middle = Slice(shape, minus_two, m)
        begin = Slice(shape, first, minus_two)
        merged = Concat<axis=0>(m, middle, end)
        [merge] flat = Reshape(keys, merged)
        [turn] turned = Transpose<perm=[0, 2, 1]>(flat)
        apart = Concat<axis=0>(begin, end, middle)
        kt = Reshape(turned, apart)
        [scores] s = MatMul(qh, kt)
        p = Softmax<axis=-1>(s)
        [mix] o = MatMul(p, keys)
        ot = Transpose<perm=[0, 2, 1, 3]>(o)
        back = Concat<axis=0>(batch, seq, m)
        of = Reshape<allowzero=1>(ot, back)
        [out] y = MatMul(of, wo)
    }}"""
    return _add_projections(text, width, kept * size)


def cached_decoder(heads: int = 4, width: int = 64, kept: int | None = None) -> onnx.ModelProto:
    """Return one attention layer with a cache: `past` [1, kept, past, width / heads] grows by the new tokens.

    The cache has as many heads as the queries, or one for all of them.
    """
    size, kept = width // heads, kept or heads
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    decoder (float[1, seq, {width}] x, float[1, {kept}, past, {size}] past)
        => (float[1, seq, {width}] y, float[1, {kept}, total, {size}] present)
    {{
        shape = Constant<value_ints: ints = [0, -1, {heads}, {size}]>()
        kept_shape = Constant<value_ints: ints = [0, -1, {kept}, {size}]>()
        flat = Constant<value_ints: ints = [0, -1, {width}]>()
        [query] q = MatMul(x, wq)
        [key] k = MatMul(x, wk)
        q4 = Reshape(q, shape)
        k4 = Reshape(k, kept_shape)
        qh = Transpose<perm=[0, 2, 1, 3]>(q4)
        kh = Transpose<perm=[0, 2, 1, 3]>(k4)
        [grow] present = Concat<axis=2>(past, kh)
        kt = Transpose<perm=[0, 1, 3, 2]>(present)
        [scores] s = MatMul(qh, kt)
        p = Softmax<axis=-1>(s)
        [mix] o = MatMul(p, present)
        ot = Transpose<perm=[0, 2, 1, 3]>(o)
        of = Reshape(ot, flat)
        [out] y = MatMul(of, wo)
    }}"""
    return _add_projections(text, width, kept * size)


def _add_projections(text: str, width: int, key_width: int) -> onnx.ModelProto:
    """Return a model with random projections of queries, keys and results."""
    model, random = parser.parse_model(text), np.random.default_rng(0)
    for name, columns in (("wq", width), ("wk", key_width), ("wo", width)):
        array = random.standard_normal((width, columns)).astype(np.float32) / 8
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model
