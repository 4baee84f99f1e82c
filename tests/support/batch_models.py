"""Small models whose requests can be joined, and models that mix them."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, helper, parser

IDS = "int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] last = {-1}, int64 first = {0}"


ROWS = "s = Shape(x) n = Gather(s, first) r = Range(first, n, step)"
"""The number of each row of `x`; wants IDS and STEP."""
STEP = "int64 step = {1}"


def make(text: str, opset: int = 18) -> ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]> g {text}')


# Per model: the expected axes of its inputs and outputs, and sizes to compile for.
JOINABLE = {
    "a computed target of a Reshape": (
        f"""(float[N, T, 6] x) => (float[N, T, 2, 3] y) <{IDS}, int64[2] heads = {{2, 3}}> {{
            s = Shape(x) n = Gather(s, first) nn = Unsqueeze(n, zero) t = Slice(s, one, two)
            target = Concat<axis=0>(nn, t, heads)
            y = Reshape(x, target) }}""",
        {"x": 0},
        {"y": 0},
    ),
    "rows of all requests in one axis": (
        f"""(float[N, T, 6] x) => (y) <{IDS}, int64[2] rows = {{-1, 6}}> {{
            r = Reshape(x, rows) a = Relu(r) s = Shape(x) y = Reshape(a, s) }}""",
        {"x": 0},
        {"y": 0},
    ),
    "an output of all rows": (
        "(float[N, T, 6] x) => (y) <int64[2] rows = {-1, 6}> { y = Reshape(x, rows) }",
        {"x": 0},
        {"y": 0},
    ),
    "the batch behind time": (
        """(float[4, N, 6] x) => (y) <int64[2] rows = {-1, 6}, int64[3] back = {4, -1, 6}> {
            r = Reshape(x, rows) a = Tanh(r) y = Reshape(a, back) }""",
        {"x": 1},
        {"y": 1},
    ),
    "a class token for each request": (
        f"""(float[N, 3, 4] x) => (y) <{IDS}, float[1, 1, 4] token = {{1, 2, 3, 4}}> {{
            s = Shape<start=0, end=1>(x) sizes = Concat<axis=0>(s, last, last)
            minus = Constant<value_ints = [-1, -1, -1]>()
            ones = Constant<value_ints = [1, 1, 1]>() is_free = Equal(sizes, minus) target = Where(is_free, ones, sizes)
            t = Expand(token, target) y = Concat<axis=1>(t, x) }}""",
        {"x": 0},
        {"y": 0},
    ),
    "an initial state of the size of the batch": (
        f"""(float[N, 5] x) => (y) <{IDS}, int64[1] width = {{5}}> {{
            s = Shape<end=1>(x) shape = Concat<axis=0>(s, width) z = ConstantOfShape<value = float[1] {{2}}>(shape)
            y = Add(x, z) }}""",
        {"x": 0},
        {"y": 0},
    ),
    "a doubled batch, split again": (
        """(float[N, 4] x) => (y) {
            n = Neg(x) d = Concat<axis=0>(x, n) r = Exp(d) a, b = Split<axis=0, num_outputs=2>(r) y = Sub(a, b) }""",
        {"x": 0},
        {"y": 0},
    ),
    "an input that all requests share": (
        "(float[N, 4] x, float[4] shared) => (y, z) { y = Mul(x, shared) z = Neg(shared) }",
        {"x": 0},
        {"y": 0},
    ),
    "two inputs": (
        "(float[N, 4] x, float[3, N] z) => (y) { t = Transpose(z) y = Concat<axis=1>(x, t) }",
        {"x": 0, "z": 1},
        {"y": 0},
    ),
    "a slice that keeps the batch": (
        """(float[N, 6] x) => (y) <int64[2] s = {0, 1}, int64[2] e = {9223372036854775807, 4}, int64[2] a = {0, 1}> {
            y = Slice(x, s, e, a) }""",
        {"x": 0},
        {"y": 0},
    ),
    "the last token of each text, as an index pair": (
        f"""(float[N, T, 6] x, int64[N, T] ids) => (y) <{IDS}, {STEP}> {{
            {ROWS} am = ArgMax<axis=-1, keepdims=0>(ids) a = Unsqueeze(r, last) b = Unsqueeze(am, last)
            i = Concat<axis=-1>(a, b) y = GatherND(x, i) }}""",
        {"x": 0, "ids": 0},
        {"y": 0},
    ),
    "a mask that is read at rows and columns": (
        f"""(float[N, T] x, float[N, 2, T, T] scores) => (y) <{IDS}, {STEP}, int64[3] a = {{1, 2, 3}},
            int64[3] b = {{0, 1, 2}}, int64 second = {{1}}, float low = {{-100}}, float nothing = {{0}}> {{
            {ROWS} t = Gather(s, second) c = Range(first, t, step) rows = Unsqueeze(r, a) columns = Unsqueeze(c, b)
            or_rows = Cast<to=9>(rows) or_columns = Cast<to=9>(columns) both = Or(or_rows, or_columns)
            shape = Shape(both) re = Expand(rows, shape) ce = Expand(columns, shape)
            ru = Unsqueeze(re, last) cu = Unsqueeze(ce, last) i = Concat<axis=-1>(ru, cu) mask = Cast<to=9>(x)
            m = GatherND(mask, i) w = Where(m, nothing, low) y = Add(scores, w) }}""",
        {"x": 0, "scores": 0},
        {"y": 0},
    ),
    "indices whose common shape is a maximum": (
        f"""(float[N, T] x) => (y) <{IDS}, {STEP}, int64 second = {{1}}> {{
            {ROWS} t = Gather(s, second) c = Range(first, t, step) rows = Unsqueeze(r, one) columns = Unsqueeze(c, zero)
            rs = Shape(rows) cs = Shape(columns) shape = Max(rs, cs)
            re = Expand(rows, shape) ce = Expand(columns, shape)
            ru = Unsqueeze(re, last) cu = Unsqueeze(ce, last) i = Concat<axis=-1>(ru, cu) y = GatherND(x, i) }}""",
        {"x": 0},
        {"y": 0},
    ),
    "a dropout whose mask is not read": (
        "(float[N, 4] x) => (y) { a = Relu(x) d, mask = Dropout(a) y = Neg(d) }",
        {"x": 0},
        {"y": 0},
    ),
    "each row, by its number": (
        f"""(float[N, 4] x) => (y, z) <{IDS}, {STEP}> {{
            {ROWS} y = Gather<axis=0>(x, r) u = Unsqueeze(r, one) e = Expand(u, s) t = Transpose(e)
            z = Gather<axis=0>(x, t) }}""",
        {"x": 0},
        {"y": 0, "z": 1},
    ),
    "a mask that is read in a flattened batch": (
        f"""(float[N, T] x, float[N, 2, T, T] scores) => (y) <{IDS}, {STEP}, int64[3] a = {{1, 2, 3}},
            int64[3] b = {{0, 1, 2}}, int64[1] flat = {{-1}}, float low = {{-100}}, float nothing = {{0}}> {{
            {ROWS} rows = Unsqueeze(r, a) inside = GreaterOrEqual(rows, first)
            width = Gather(s, one) t = Squeeze(width) c = Range(first, t, step) columns = Unsqueeze(c, b)
            scaled = Mul(rows, width) i = Add(columns, scaled) mask = Cast<to=9>(x) f = Flatten<axis=2>(mask)
            p = Gather(f, i) shape = Shape(i) all = Reshape(p, flat) m = Reshape(all, shape) both = And(inside, m)
            w = Where(both, nothing, low) y = Add(scores, w) }}""",
        {"x": 0, "scores": 0},
        {"y": 0},
    ),
    "the last token of each text, in a flattened batch": (
        f"""(float[N, T, 6] x, int64[N, T] ids) => (y) <{IDS}, {STEP}, int64[2] flat = {{-1, 6}}> {{
            {ROWS} am = ArgMax<axis=-1, keepdims=0>(ids) width = Gather(s, one) scaled = Mul(width, r)
            i = Add(am, scaled) f = Flatten<axis=2>(x) p = Gather(f, i) y = Reshape(p, flat) }}""",
        {"x": 0, "ids": 0},
        {"y": 0},
    ),
    "an entry of a matrix for each request": (
        f"""(float[N, 3, 4] x) => (y) <{IDS}, {STEP}, int64 twelve = {{12}}, int64 four = {{4}},
            int64[3] column = {{0, 3, 1}}, int64 second = {{1}}, int64[1] flat = {{-1}}> {{
            {ROWS} rows = Unsqueeze(r, one) a = Mul(rows, twelve) line = Mul(four, second) b = Add(a, line)
            i = Add(column, b) f = Reshape(x, flat) y = Gather(f, i) }}""",
        {"x": 0},
        {"y": 0},
    ),
    "a slice that ends at the size of the batch": (
        f"""(float[N, T] x, float[N, T, 3] z) => (y, w) <{IDS}, int64[2] axes = {{0, 1}}, int64[2] begin = {{0, 0}}> {{
            n = Shape<end=1>(z) y = Slice(x, zero, n, zero) e = Shape<end=2>(z) w = Slice(x, begin, e, axes) }}""",
        {"x": 0, "z": 0},
        {"y": 0, "w": 0},
    ),
    "a slice whose bounds are computed from other sizes": (
        f"""(float[N, T, 6] x, float[U] v) => (y) <{IDS}> {{
            s = Shape(x) t = Gather(s, one) start = Sub(t, one) y = Slice(x, start, t, one) }}""",
        {"x": 0},
        {"y": 0},
    ),
    "paddings that are computed": (
        f"""(float[N, 4] x) => (y) <{IDS}, int64[2] before = {{0, 1}}, int64[1] rank = {{2}}> {{
            z = ConstantOfShape<value = int64[1] {{0}}>(rank) p = Concat<axis=0>(before, z) y = Pad(x, p) }}""",
        {"x": 0},
        {"y": 0},
    ),
    "repeats that a one-hot vector holds": (
        f"""(float[N, 4] x) => (y) <{IDS}, int64[2] values = {{1, 3}}> {{
            h = OneHot(one, two, values) f = Reshape(h, last) y = Tile(x, f) }}""",
        {"x": 0},
        {"y": 0},
    ),
    "the second of two dimensions": (
        "(float[M, 2] a, float[N, 4] x) => (y, z) { s = ReduceSum(a) y = Add(x, s) z = Softmax(x) }",
        {"x": 0},
        {"y": 0, "z": 0},
    ),
}
# Per model: what the reason says, and the node.
COUPLED = {
    "softmax over the batch": ("(float[N, 4] x) => (y) { [soft] y = Softmax<axis=0>(x) }", "combines", "soft"),
    "mean over the batch": (
        "(float[N, 4] x) => (y) <int64[1] a = {0}> { [mean] m = ReduceMean(x, a) y = Sub(x, m) }",
        "combines",
        "mean",
    ),
    "sum of everything": ("(float[N, 4] x) => (y) { [sum] s = ReduceSum(x) y = Div(x, s) }", "combines", "sum"),
    "running sum": (
        "(float[N, 4] x) => (y) <int64 a = {0}> { [sums] y = CumSum(x, a) }",
        "combines",
        "sums",
    ),
    "products of requests": (
        "(float[N, 4] x) => (y) { t = Transpose(x) [gram] y = MatMul(x, t) }",
        "combines",
        "gram",
    ),
    "pairs by broadcasting": (
        "(float[N, 1] x) => (y) { t = Transpose(x) [pairs] y = Add(x, t) }",
        "combines",
        "pairs",
    ),
    "a fixed batch in a Reshape": (
        "(float[N, 4] x) => (y) <int64[2] s = {2, -1}> { [fixed] y = Reshape(x, s) }",
        "combines",
        "fixed",
    ),
    "the batch mixed into rows": (
        "(float[N, 4] x) => (y) <int64[2] s = {4, -1}> { [mixed] y = Reshape(x, s) }",
        "combines",
        "mixed",
    ),
    "training statistics": (
        """(float[N, 2] x) => (y) <float[2] one = {1, 1}, float[2] zero = {0, 0}> {
            [norm] y, m, v = BatchNormalization<training_mode=1>(x, one, zero, zero, one) }""",
        "combines",
        "norm",
    ),
    "random numbers": (
        "(float[N, 4] x) => (y) { [noise] r = RandomNormalLike(x) y = Add(x, r) }",
        "RandomNormalLike is random",
        "noise",
    ),
    "a dropout in training": (
        "(float[N, 4] x) => (y) <float half = {0.5}, bool yes = {1}> { [drop] y, mask = Dropout(x, half, yes) }",
        "Dropout is random",
        "drop",
    ),
    "the number of requests": (
        "(float[N, 4] x) => (y) { s = Shape<end=1>(x) [size] f = Cast<to=1>(s) [scaled] y = Div(x, f) }",
        "computes with the size",
        "scaled",
    ),
    "positions in the batch": (
        f"""(float[N, 4] x) => (y) <{IDS}, int64 step = {{1}}> {{
            s = Shape(x) n = Gather(s, first) [count] r = Range(first, n, step) f = Cast<to=1>(r) u = Unsqueeze(f, one)
            y = Add(x, u) }}""",
        "positions in the batch",
        None,
    ),
    "a bound that some sizes reach": (
        f"""(float[N, 4] x) => (y) <{IDS}, int64 many = {{4000}}> {{
            s = Shape(x) n = Gather(s, first) [less] l = Less(n, many) f = Cast<to=1>(l) y = Mul(x, f) }}""",
        "computes with the size",
        "less",
    ),
    "half of the batch": (
        f"""(float[N, 4] x) => (y) <{IDS}> {{
            s = Shape<end=1>(x) [half] h = Div(s, two) e = Mul(h, two)
            t = Concat<axis=0>(e, last) y = Reshape(x, t) }}""",
        "computes with the size",
        "half",
    ),
    "a square of the batch": (
        f"""(float[N, 1] x) => (y) <{IDS}> {{
            s = Shape<end=1>(x) t = Concat<axis=0>(s, s) [square] e = Expand(x, t)
            y = ReduceSum<keepdims=0>(e, one) }}""",
        "gives other axes the size of the batch",
        "square",
    ),
    "an image as wide as the batch": (
        f"""(float[N, 1, 4] x) => (y) <{IDS}> {{
            s = Shape<end=1>(x) t = Concat<axis=0>(s, one, s) [wide] y = Resize<mode="nearest">(x, , , t) }}""",
        "gives other axes the size of the batch",
        "wide",
    ),
    "at least five rows": (
        """(float[N, 1, 6] x) => (y) <int64[3] least = {5, 1, 1}> {
            s = Shape(x) [most] m = Max(s, least) y = Expand(x, m) }""",
        "computes with the size",
        "most",
    ),
    "row numbers as results": (
        f"(float[N, 4] x) => (y) <{IDS}, {STEP}> {{ s = Shape(x) n = Gather(s, first) [r] y = Range(first, n, step) }}",
        "do not follow one another",
        "r",
    ),
    "row numbers as columns": (
        f"(float[N, 9] x) => (y) <{IDS}, {STEP}> {{ {ROWS} [pick] y = Gather<axis=1>(x, r) }}",
        "positions in the batch",
        "pick",
    ),
    "rows of a table": (
        f"(float[N, 4] x, float[9, 4] w) => (y) <{IDS}, {STEP}> {{ {ROWS} [pick] t = Gather(w, r) y = Add(x, t) }}",
        "positions in the batch",
        "pick",
    ),
    "the row after each": (
        f"(float[N, 4] x) => (y) <{IDS}, {STEP}> {{ {ROWS} a = Add(r, step) [next] m = Mod(a, n) y = Gather(x, m) }}",
        "positions in the batch",
        "next",
    ),
    "row numbers of a flattened batch": (
        f"""(float[N, 4] x) => (y) <{IDS}, {STEP}> {{
            {ROWS} u = Unsqueeze(r, one) e = Expand(u, s) [flat] f = Reshape(e, last) y = Gather(x, f) }}""",
        "positions in the batch",
        "flat",
    ),
    "row numbers as the second index": (
        f"""(float[N, 9] x, int64[N] i) => (y) <{IDS}, {STEP}> {{
            {ROWS} a = Unsqueeze(r, last) b = Unsqueeze(i, last)
            [pairs] t = Concat<axis=-1>(b, a) y = GatherND(x, t) }}""",
        "positions in the batch",
        "pairs",
    ),
    "entries of a flattened batch that reach the next row": (
        f"""(float[N, 4] x) => (y) <{IDS}, {STEP}, int64 four = {{4}}, int64[5] column = {{0, 1, 2, 3, 4}},
            int64[1] flat = {{-1}}> {{
            {ROWS} rows = Unsqueeze(r, one) a = Mul(rows, four) i = Add(column, a) f = Reshape(x, flat)
            [pick] y = Gather(f, i) }}""",
        "positions in the batch",
        "pick",
    ),
    "entries of a flattened batch that begin in the row before": (
        f"""(float[N, 4] x) => (y) <{IDS}, {STEP}, int64 four = {{4}}, int64[2] column = {{-1, 2}},
            int64[1] flat = {{-1}}> {{
            {ROWS} rows = Unsqueeze(r, one) a = Mul(rows, four) i = Add(column, a) f = Reshape(x, flat)
            [pick] y = Gather(f, i) }}""",
        "positions in the batch",
        "pick",
    ),
    "entries of a flattened batch with a stride of two rows": (
        f"""(float[N, 4] x) => (y) <{IDS}, {STEP}, int64 eight = {{8}}, int64[2] column = {{0, 2}},
            int64[1] flat = {{-1}}> {{
            {ROWS} rows = Unsqueeze(r, one) a = Mul(rows, eight) i = Add(column, a) f = Reshape(x, flat)
            [pick] y = Gather(f, i) }}""",
        "positions in the batch",
        "pick",
    ),
    "entries of a flattened batch that each request names": (
        f"""(float[N, 4] x, int64[N] column) => (y) <{IDS}, {STEP}, int64 four = {{4}}, int64[1] flat = {{-1}}> {{
            {ROWS} a = Mul(r, four) [named] i = Add(column, a) f = Reshape(x, flat) y = Gather(f, i) }}""",
        "positions in the batch",
        "named",
    ),
    "entries of a flattened batch, by a stride of other sizes": (
        f"""(float[N, T] x, float[N, U] z) => (y) <{IDS}, {STEP}, int64[1] flat = {{-1}}> {{
            {ROWS} width = Shape<start=1>(z) i = Mul(r, width) f = Reshape(x, flat) [pick] y = Gather(f, i) }}""",
        "positions in the batch",
        "pick",
    ),
    "the largest entry of all requests, in a flattened batch": (
        f"""(float[N, 4] x) => (y) <{IDS}, {STEP}, int64 four = {{4}}, int64[1] flat = {{-1}}> {{
            {ROWS} f = Reshape(x, flat) am = ArgMax<axis=0>(f) a = Mul(r, four) i = Add(am, a) y = Gather(f, i) }}""",
        "combines",
        None,
    ),
    "whether a request is not the first": (
        f"""(float[N, 4] x) => (y) <{IDS}, {STEP}> {{
            {ROWS} [later] g = GreaterOrEqual(r, step) f = Cast<to=1>(g) u = Unsqueeze(f, one) y = Mul(x, u) }}""",
        "positions in the batch",
        "later",
    ),
    "places in a flattened batch as results": (
        f"""(float[N, 4] x) => (y) <{IDS}, {STEP}, int64 four = {{4}}> {{
            {ROWS} [places] y = Mul(r, four) }}""",
        "do not follow one another",
        "places",
    ),
    "the first columns, as many as requests": (
        f"""(float[N, 5] x) => (y) <{IDS}> {{
            n = Shape<end=1>(x) [cut] c = Slice(x, zero, n, one) y = ReduceSum<keepdims=0>(c, one) }}""",
        "Slice ends at the size of the batch",
        "cut",
    ),
    "all requests but the last": (
        f"""(float[N, 5] x) => (y) <{IDS}> {{
            n = Shape<end=1>(x) [less] m = Sub(n, one) y = Slice(x, zero, m, zero) }}""",
        "computes with the size",
        "less",
    ),
    "every other row": (
        f"""(float[N, 4] x) => (y) <{IDS}, {STEP}, int64 two_steps = {{2}}> {{
            s = Shape(x) n = Gather(s, first) [evens] r = Range(first, n, two_steps) y = Gather(x, r) }}""",
        "computes with the size",
        "evens",
    ),
    "the first request for all": (
        "(float[N, 4] x) => (y) <int64[1] i = {0}> { [pick] f = Gather<axis=0>(x, i) y = Add(x, f) }",
        "combines",
        "pick",
    ),
    "a row per request, chosen in another": (
        "(float[N, 4] x, int64[N] i) => (y) { [pick] y = Gather<axis=0>(x, i) }",
        "combines",
        "pick",
    ),
    "the requests of all rows": (
        "(float[3, N] x) => (y) <int64[1] s = {-1}> { [flat] y = Reshape(x, s) }",
        "output 'y' do not follow one another",
        "flat",
    ),
    "a sequence of each request that is resized": (
        '(float[N, 3, 5] x) => (y) <float[3] s = {1, 1, 2}> { [widen] y = Resize<mode="linear">(x, , s) }',
        "combines",
        "widen",
    ),
    "a scale of all requests": (
        "(float[N, 4] x) => (y, s, z) { [quantise] y, s, z = DynamicQuantizeLinear(x) }",
        "combines",
        "quantise",
    ),
    "a squeeze of whatever is one": (
        "(float[N, 1, 4] x) => (y) { [squeeze] y = Squeeze(x) }",
        "combines",
        "squeeze",
    ),
    "a branch on the batch": (
        """(float[N, 4] x, bool c) => (y) { [branch] y = If(c) <
            then_branch = t () => (float[N, 4] u) { u = Neg(x) },
            else_branch = e () => (float[N, 4] v) { v = Abs(x) }> }""",
        "has subgraphs",
        "branch",
    ),
    "only fixed sizes": ("(float[2, 4] x) => (y) { y = Neg(x) }", "no input has a symbolic dimension", ""),
    "a square of requests": ("(float[N, N] x) => (y) { y = Neg(x) }", "several axes", ""),
    "no output of the batch": (
        "(float[N, 4] x, float[4] b) => (y) { y = Neg(b) }",
        "no output has this dimension",
        "",
    ),
    "the size of the batch": (
        "(float[N, 4] x) => (y) { [size] y = Shape<end=1>(x) }",
        "output 'y' do not follow one another",
        "size",
    ),
}


def sizes_of(proto: ModelProto) -> dict[str, int]:
    symbols = {dim.dim_param for value in proto.graph.input for dim in value.type.tensor_type.shape.dim}
    return dict.fromkeys(sorted(symbols - {""}), 3)


def draw_inputs(proto: ModelProto, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    feeds = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in kind.shape.dim]
        feeds[value.name] = random.integers(-4, 5, shape).astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return feeds
