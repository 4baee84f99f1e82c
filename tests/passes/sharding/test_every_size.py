"""Every strategy computes the same at every size of the symbols, whichever size the model is compiled for."""

import re
from collections.abc import Iterator

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

from tests.passes.sharding.test_rules import CASES, draw_feeds, parse
from tests.support.batches import make_symbolic
from tests.support.forced_sharding import Feeds, PlainSession, fed_names, try_strategies, with_weights
from tests.support.sharding_cases.rule_case import RuleCase

SIZES = (0, 1, 2, 3, 5, 7, 12)

FRAGILE = re.compile("Scan|LSTM|GRU|RNN|Conv|Pool|Integer|QLinear|Attention|Roi|Grid|Resize|Upsample|Depth|Rotary")

# For these, ONNX Runtime ends the process at sizes that do not fit together, or takes sizes that ONNX does not allow.
UNCHECKED = (
    "MatMulNBits, zero points and bias",
    "InstanceNormalization",
    "EmbedLayerNormalization",
    "EmbedLayerNormalization, position ids",
    "QEmbedLayerNormalization",
    "no elements",
    "GroupQueryAttention",
    "GatherND",
)

# Name -> inputs, nodes, weights without values, and compiled sizes. Each was once wrong at other sizes.
MIXED = {
    "columns that become rows": (
        "float[48, N] x",
        "a = MatMul(A, x) b = Relu(a) c = Reshape(b, s) y = MatMul(c, W)",
        {"A": (96, 48), "W": (96, 4)},
        {"s": [-1, 96]},
        {"N": 1},
    ),
    "positions behind channels": (
        "float[B, 8, L] x",
        "c = Conv(x, K) y = Reshape(c, s)",
        {"K": (8, 8, 1)},
        {"s": [-1, 8]},
        {"B": 2, "L": 1},
    ),
    "an axis that is there at some sizes alone": ("float[4, N, 6] x", "a = Relu(x) y = Squeeze(a)", {}, {}, {"N": 1}),
    "keys of a merged batch": (
        "float[B, 4, S, 6] x",
        """h = Shape(x) b, s, d = Split(h, parts) m = Concat<axis=0>(one, s, d) r = Reshape(x, m)
            t = Transpose<perm=[0, 2, 1]>(r) n = Concat<axis=0>(b, d, s) y = Reshape(t, n)""",
        {},
        {"parts": [2, 1, 1], "one": [-1]},
        {"B": 2, "S": 4},
    ),
    "heads before positions": (
        "float[B, S, 64] x",
        "a = Relu(x) y = Reshape(a, s)",
        {},
        {"s": [0, 4, -1, 16]},
        {"B": 2, "S": 1},
    ),
    "channels before columns": (
        "float[N, 6, M] x",
        "a = Relu(x) y = Reshape(a, s)",
        {},
        {"s": [-1, 6]},
        {"N": 2, "M": 1},
    ),
    "rows that are missing only at size 0": (
        "float[8, N] x",
        "r = Reshape(x, s) a = Slice(r, zero, four) c = MatMul(a, W) y = Reshape(c, h)",
        {"W": (2, 6)},
        {"s": [-1, 1, 2], "zero": [0], "four": [4], "h": [0, 0, 3, 2]},
        {"N": 1},
    ),
    "a batch between": ("float[N, 9, 9, 3] x", "a = Relu(x) y = Reshape(a, s)", {}, {"s": [9, -1, 0]}, {"N": 3}),
    "the padding of columns": (
        "float[1, 2, 8, M] x",
        'y = MaxPool<auto_pad = "SAME_UPPER", kernel_shape = [3, 3], strides = [2, 2]>(x)',
        {},
        {},
        {"M": 8},
    ),
    "a sum of what may be broadcast": ("float[N, 6] x, float[8, 6] z", "y = Add(x, z)", {}, {}, {"N": 1}),
    "a product that may be broadcast": ("float[N, 6, 4] x, float[8, 4, 6] z", "y = MatMul(x, z)", {}, {}, {"N": 1}),
    "a target that may be broadcast": ("float[N, 6] x", "y = Expand(x, s)", {}, {"s": [8, 6]}, {"N": 1}),
    "a comparison that may be broadcast, next to another symbol": (
        "float[N, 12, M] x",
        "y = Greater(x, z)",
        {"z": (8, 1, 1)},
        {},
        {"N": 1, "M": 4},
    ),
    "an empty constant of some rows, next to two symbols": (
        "float[N, 16] x, float[M, 16] z, float[K, 16] v",
        "c = Concat<axis = 1>(x, E) a = Relu(c) y = Sum(a, a) m = Relu(z) k = Relu(v)",
        {"E": (4, 0)},
        {},
        {"N": 4, "M": 4, "K": 6},
    ),
    "rows that follow from the ratio of two symbols": (
        "float[N, 5] x, float[M, 2] z",
        """h = Shape(z) m, w = Split(h, parts) t = Concat<axis = 0>(m, last) r = Reshape(x, t) y = Relu(r)""",
        {},
        {"parts": [1, 1], "last": [-1]},
        {"N": 4, "M": 4},
    ),
    "a choice that may be broadcast": (
        "float[N, 6] x, float[8, 6] z",
        "c = Greater(x, z) y = Where(c, x, z)",
        {},
        {},
        {"N": 1},
    ),
}


def resize(feeds: Feeds, axes: dict[str, dict[int, int]]) -> Feeds:
    """Return inputs with other sizes, by input and axis: rows are repeated, so that indices stay valid."""
    resized = dict(feeds)
    for name, sizes in axes.items():
        for axis, size in sizes.items():
            array = resized[name]
            resized[name] = array.take(np.arange(size) % max(array.shape[axis], 1), axis)
    return resized


def accepted(model: ModelProto, candidates: Iterator[Feeds]) -> list[Feeds]:
    """Return the inputs that ONNX Runtime takes; nothing unless the first ones are among them."""
    session, results = PlainSession(model, optimized=False), []
    for index, feeds in enumerate(candidates):
        try:
            session.run([feeds[name] for name in fed_names(model)])
        except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
            if index == 0:
                return []
            continue
        results.append(feeds)
    return results


def problems_at(model: ModelProto, feeds: Feeds, axes: dict[str, list[int]], compiled: int) -> tuple[int, list[str]]:
    """Return how many other sizes the model takes, and what went wrong, compiled for one size of a symbol."""
    sizes = [compiled, *(size for size in SIZES if size != compiled and (size or not is_fragile(model)))]
    resized = (resize(feeds, {name: dict.fromkeys(found, size) for name, found in axes.items()}) for size in sizes)
    taken = accepted(model, resized)
    if len(taken) < 2:
        return 0, []
    return len(taken) - 1, [trial.problem for trial in try_strategies(model, taken) if trial.problem]


def is_fragile(model: ModelProto) -> bool:
    """Return whether ONNX Runtime may hang, end the process or return any memory for sizes that make no sense.

    Its own operators do not check that sizes fit together, and some kernels do not expect empty inputs.
    """
    return any(node.domain == "com.microsoft" or FRAGILE.search(node.op_type) for node in model.graph.node)


def symbolic_forms(model: ModelProto, feeds: Feeds) -> Iterator[tuple[ModelProto, dict[str, list[int]], int]]:
    """Yield a model with a symbol in place of each size of its inputs: in all axes of this size, and in one."""
    places = [(name, axis, size) for name, array in feeds.items() for axis, size in enumerate(array.shape)]
    for size in sorted({size for *_, size in places}):
        equal = [(name, axis) for name, axis, other in places if other == size]
        for chosen in [equal, *([place] for place in equal if len(equal) > 1 and not is_fragile(model))]:
            symbolic = model
            axes: dict[str, list[int]] = {}
            for name, axis in chosen:
                symbolic = make_symbolic(symbolic, {name: axis})
                axes.setdefault(name, []).append(axis)
            yield symbolic, axes, size


def check_rule(case: RuleCase) -> int:
    """Return how many sizes were tried besides the compiled ones; raises AssertionError if a strategy is wrong."""
    whole, tried = parse(case), 0
    feeds = draw_feeds(whole, case)
    forms = [(whole, feeds)]
    if (fixed := with_weights(whole, feeds)) is not None:
        forms.append((fixed, {name: feeds[name] for name in fed_names(fixed)}))
    for form, fed in forms:
        for symbolic, axes, size in symbolic_forms(form, fed):
            for compiled in dict.fromkeys((size, 1)):
                count, problems = problems_at(symbolic, fed, axes, compiled)
                tried += count
                assert not problems, (axes, compiled, problems[:3])
    return tried


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in UNCHECKED])
def test_every_split_of_a_rule_is_right_at_every_size(name: str) -> None:
    check_rule(CASES[name])


@pytest.mark.parametrize("name", MIXED)
def test_a_cut_is_right_at_every_size_where_symbols_and_fixed_sizes_meet(name: str) -> None:
    inputs, body, shapes, targets, dimensions = MIXED[name]
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g ({inputs}) => (y) {{ {body} }}')
    random = np.random.default_rng(0)
    for weight, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(random.normal(size=shape).astype(np.float32), weight))
    for target, values in targets.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), target))
    entries = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}

    def draw(sizes: dict[str, int]) -> Feeds:
        shapes = {
            name: [sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in dims]
            for name, dims in entries.items()
        }
        return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    together = (dict.fromkeys(dimensions, size) for size in (*SIZES, 8))
    alone = ({**dimensions, name: 2 * size} for name, size in dimensions.items())
    feeds = accepted(model, (draw(sizes) for sizes in (dimensions, *together, *alone)))
    assert len(feeds) > 1
    assert [trial for trial in try_strategies(model, feeds) if trial.problem] == []
