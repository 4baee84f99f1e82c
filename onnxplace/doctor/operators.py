"""Check that a device computes common operators as numpy does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from onnxplace.doctor.context import CheckContext, CheckFailedError, Finding, compile_placed, parse_model, require
from onnxplace.errors import ExecutionError, ModelError, format_names
from onnxplace.feeds import Array

# Relative to the largest element. GPUs may multiply float32 with 10 bits of mantissa (TF32).
TOLERANCES = {"float": 2e-3, "double": 1e-6, "float16": 1e-2}
# Types that a GPU need not have.
OPTIONAL_TYPES = ("float16", "bfloat16", "double")


@dataclass(frozen=True)
class Operator:
    """One node with its inputs, and its result by numpy."""

    text: str
    """In ONNX's text form; its output is `y`."""
    types: tuple[str, str]
    """Of the inputs, and of the output."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the inputs, in order."""
    rank: int
    """Of the output."""
    reference: Callable[..., Array]
    """Takes the inputs in this order."""


def _make_operators(kind: str) -> list[Operator]:
    """Return operators over one type."""
    same, vector = (kind, kind), {"a": (6, 40)}
    pair, floating = {"a": (6, 40), "b": (6, 40)}, kind in ("float", "double", "float16")
    operators = [
        Operator("y = Add(a, b)", same, pair, 2, lambda a, b: a + b),
        Operator("y = Mul(a, b)", same, pair, 2, lambda a, b: a * b),
        Operator("y = Transpose<perm=[1, 0]>(a)", same, vector, 2, lambda a: a.T),
        Operator("y = Concat<axis=1>(a, b)", same, pair, 2, lambda a, b: np.concatenate([a, b], axis=1)),
    ]
    if not floating:
        return [*operators, Operator("y = Equal(a, b)", (kind, "bool"), pair, 2, np.equal)]
    return [
        *operators,
        Operator("y = Relu(a)", same, vector, 2, lambda a: np.maximum(a, 0)),
        Operator("y = Sigmoid(a)", same, vector, 2, lambda a: 1 / (1 + np.exp(-a))),
        Operator("y = Tanh(a)", same, vector, 2, np.tanh),
        Operator("y = Softmax<axis=-1>(a)", same, vector, 2, _softmax),
        Operator("y = ReduceMean<axes=[1], keepdims=1>(a)", same, vector, 2, lambda a: a.mean(axis=1, keepdims=True)),
        Operator("y = MatMul(a, b)", same, {"a": (3, 6, 40), "b": (40, 17)}, 3, np.matmul),
        Operator("y = Gemm<transB=1>(a, b, c)", same, {"a": (6, 40), "b": (9, 40), "c": (9,)}, 2, _gemm),
    ]


def _softmax(a: Array) -> Array:
    exponents = np.exp(a - a.max(axis=-1, keepdims=True))
    return np.asarray(exponents / exponents.sum(axis=-1, keepdims=True))


def _gemm(a: Array, b: Array, c: Array) -> Array:
    return np.asarray(a @ b.T + c)


def _conv(a: Array, b: Array) -> Array:
    windows = np.lib.stride_tricks.sliding_window_view(a, (3, 3), axis=(2, 3))
    return np.asarray(np.einsum("nchwij,ocij->nohw", windows, b))


def _normalize(a: Array, b: Array, c: Array) -> Array:
    centered = a - a.mean(axis=-1, keepdims=True)
    return np.asarray(centered / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-5) * b + c)


OPERATORS = (
    *_make_operators("float"),
    Operator("y = Conv(a, b)", ("float", "float"), {"a": (2, 3, 12, 12), "b": (5, 3, 3, 3)}, 4, _conv),
    Operator(
        "y = LayerNormalization<axis=-1>(a, b, c)",
        ("float", "float"),
        {"a": (6, 40), "b": (40,), "c": (40,)},
        2,
        _normalize,
    ),
    Operator("y = Cast<to=7>(a)", ("float", "int64"), {"a": (6, 40)}, 2, lambda a: a.astype(np.int64)),
    Operator("y = Greater(a, b)", ("float", "bool"), {"a": (6, 40), "b": (6, 40)}, 2, np.greater),
    *_make_operators("int64"),
    *_make_operators("int32"),
    Operator("y = Not(a)", ("bool", "bool"), {"a": (6, 40)}, 2, np.logical_not),
    Operator("y = And(a, b)", ("bool", "bool"), {"a": (6, 40), "b": (6, 40)}, 2, np.logical_and),
    *_make_operators("float16"),
    *_make_operators("double"),
)
_NUMPY_TYPES = {"float": np.float32, "double": np.float64, "float16": np.float16, "bool": np.bool_}


def check_operators(context: CheckContext) -> Finding:
    """Run each operator on the device, in a bundle of its own, and compare it with numpy."""
    from onnxplace.devices import find_kind

    is_host = find_kind(context.ids[0].partition(":")[0]).is_host
    refused, wrong, largest_error = [], [], 0.0
    for number, operator in enumerate(OPERATORS):
        name = f"{operator.text.partition(' = ')[2].partition('(')[0].partition('<')[0]} of {operator.types[0]}"
        try:
            largest_error = max(largest_error, _check_operator(context, operator, number))
        except CheckFailedError as problem:
            wrong.append(f"{name}: {problem}")
        except (ExecutionError, ModelError) as problem:
            if is_host or operator.types[0] not in OPTIONAL_TYPES:
                wrong.append(f"{name}: {problem.message}")
            refused.append(name)
    require(not wrong, "; ".join(wrong))
    detail = f"{len(OPERATORS) - len(refused)} operators, largest error {largest_error:.1e} of the largest value"
    if refused:
        detail += f"; refused: {format_names(refused, quoted=False)}"
    return Finding(detail, {"largest_relative_error": largest_error, "refused": refused})


def _check_operator(context: CheckContext, operator: Operator, number: int) -> float:
    """Return the largest error of an operator, relative to the largest value."""
    from onnxplace.api import InferenceSession

    source, result = operator.types
    inputs = ", ".join(f"{source}[{', '.join(map(str, shape))}] {name}" for name, shape in operator.shapes.items())
    dimensions = ", ".join(f"d{axis}" for axis in range(operator.rank))
    model = parse_model(f"operator ({inputs}) => ({result}[{dimensions}] y) {{ {operator.text} }}")
    bundle = compile_placed(model, context.folder / f"operator-{number}", context.make_target(), {".*": context.ids[0]})
    feeds = _make_feeds(operator, number)
    wide = [array.astype(np.float64) if array.dtype.kind == "f" else array for array in feeds.values()]
    expected = operator.reference(*wide)
    with InferenceSession(bundle) as session:
        (actual,) = session.run(None, feeds)
    kind = np.dtype(_NUMPY_TYPES.get(result, result))
    require(
        actual.dtype == kind and actual.shape == expected.shape,
        f"expected {kind}{list(expected.shape)}, got {actual.dtype}{list(actual.shape)}",
    )
    if kind.kind != "f":
        require(
            bool((actual == expected).all()), f"{int((actual != expected).sum())} of {expected.size} elements differ"
        )
        return 0.0
    error = float(np.abs(actual.astype(np.float64) - expected).max() / np.abs(expected).max())
    require(error <= TOLERANCES[result], f"its error is {error:.2g} of the largest value, allowed {TOLERANCES[result]}")
    return error


def _make_feeds(operator: Operator, seed: int) -> dict[str, Array]:
    """Return random inputs: normal floats, small whole numbers, and truth values."""
    random, source = np.random.default_rng(seed), operator.types[0]
    kind = np.dtype(_NUMPY_TYPES.get(source, source))
    if kind.kind == "f":
        return {name: random.standard_normal(shape).astype(kind) for name, shape in operator.shapes.items()}
    low, high = (0, 2) if kind.kind == "b" else (-50, 50)
    return {name: random.integers(low, high, shape).astype(kind) for name, shape in operator.shapes.items()}
