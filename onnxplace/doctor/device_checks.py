"""Checks of what devices compute and hold, and of what arrives on other devices and on the host."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from onnxplace.doctor.check_context import (
    WAIT_SECONDS,
    CheckContext,
    CheckFailedError,
    Finding,
    require,
    require_same,
)
from onnxplace.errors import ExecutionError, InfeasibleError, ModelError, format_names
from onnxplace.feeds import Array
from onnxplace.runtime import Result
from onnxplace.target import Target
from onnxplace.testing import compile_placed, parse_model
from onnxplace.utils import format_bytes

if TYPE_CHECKING:
    from onnx import ModelProto

# ------------------------------------------------------------------------------------------------------------ operators


# Relative to the largest element. GPUs may multiply float32 with 10 bits of mantissa (TF32).
TOLERANCES = {"float": 2e-3, "double": 1e-6, "float16": 1e-2}
# Types that a GPU need not have.
OPTIONAL_TYPES = ("float16", "bfloat16", "double")


@dataclass(frozen=True)
class Operator:
    """One node with its inputs."""

    text: str
    """In ONNX's text form; its output is `y`."""
    types: tuple[str, str]
    """The types of the inputs, and of the output."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of the inputs, in order."""
    rank: int
    """The rank of the output."""

    def build_model(self, source: str, result: str) -> ModelProto:
        """Return the node as a model, with these types of the inputs and of the output."""
        inputs = ", ".join(f"{source}[{', '.join(map(str, shape))}] {name}" for name, shape in self.shapes.items())
        dimensions = ", ".join(f"d{axis}" for axis in range(self.rank))
        return parse_model(f"operator ({inputs}) => ({result}[{dimensions}] y) {{ {self.text} }}")


def _make_operators(kind: str) -> list[Operator]:
    """Return operators over one type."""
    same, vector = (kind, kind), {"a": (6, 40)}
    pair, floating = {"a": (6, 40), "b": (6, 40)}, kind in ("float", "double", "float16")
    operators = [
        Operator("y = Add(a, b)", same, pair, 2),
        Operator("y = Mul(a, b)", same, pair, 2),
        Operator("y = Transpose<perm=[1, 0]>(a)", same, vector, 2),
        Operator("y = Concat<axis=1>(a, b)", same, pair, 2),
    ]
    if not floating:
        return [*operators, Operator("y = Equal(a, b)", (kind, "bool"), pair, 2)]
    return [
        *operators,
        *(Operator(f"y = {op}(a)", same, vector, 2) for op in ("Relu", "Sigmoid", "Tanh", "Softmax<axis=-1>")),
        Operator("y = ReduceMean<axes=[1], keepdims=1>(a)", same, vector, 2),
        Operator("y = MatMul(a, b)", same, {"a": (3, 6, 40), "b": (40, 17)}, 3),
        Operator("y = Gemm<transB=1>(a, b, c)", same, {"a": (6, 40), "b": (9, 40), "c": (9,)}, 2),
    ]


OPERATORS = (
    *_make_operators("float"),
    Operator("y = Conv(a, b)", ("float", "float"), {"a": (2, 3, 12, 12), "b": (5, 3, 3, 3)}, 4),
    Operator("y = LayerNormalization<axis=-1>(a, b, c)", ("float", "float"), {"a": (6, 40), "b": (40,), "c": (40,)}, 2),
    Operator("y = Cast<to=7>(a)", ("float", "int64"), {"a": (6, 40)}, 2),
    Operator("y = Greater(a, b)", ("float", "bool"), {"a": (6, 40), "b": (6, 40)}, 2),
    *_make_operators("int64"),
    *_make_operators("int32"),
    Operator("y = Not(a)", ("bool", "bool"), {"a": (6, 40)}, 2),
    Operator("y = And(a, b)", ("bool", "bool"), {"a": (6, 40), "b": (6, 40)}, 2),
    *_make_operators("float16"),
    *_make_operators("double"),
)
_NUMPY_TYPES = {"float": "float32", "double": "float64", "string": "object"}


def check_operators(context: CheckContext) -> Finding:
    """Run each operator on the device, in its own bundle, and compare it with ONNX's reference in numpy."""
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
    from onnx.reference import ReferenceEvaluator

    from onnxplace.session import InferenceSession

    model, result = operator.build_model(*operator.types), operator.types[1]
    bundle = compile_placed(model, context.folder / f"operator-{number}", context.make_target(), {".*": context.ids[0]})
    feeds = _make_feeds(operator, number)
    # The reference computes floats in double precision.
    wide = operator.build_model(*("double" if kind in TOLERANCES else kind for kind in operator.types))
    wide_feeds = {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in feeds.items()}
    (expected,) = cast("list[Array]", ReferenceEvaluator(wide).run(None, wide_feeds))
    with InferenceSession(bundle) as session:
        (actual,) = session.run(None, feeds)
    kind = _find_type(result)
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
    kind = _find_type(source)
    if kind.kind == "f":
        return {name: random.standard_normal(shape).astype(kind) for name, shape in operator.shapes.items()}
    low, high = (0, 2) if kind.kind == "b" else (-50, 50)
    return {name: random.integers(low, high, shape).astype(kind) for name, shape in operator.shapes.items()}


# --------------------------------------------------------------------------------------------------------------- copies


TYPES = (
    *("float", "float16", "bfloat16", "double", "bool", "string"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
# Elements; most types also with a tensor of 1 MiB.
ELEMENTS = (0, 1, 2, 7, 1000, 4099)
MEDIUM_BYTES = 1 << 20
# For one type only: how bytes are copied does not depend on the type.
LARGE_BYTES = (4 << 20, 32 << 20)
OUTPUTS = ("arrived", "returned", "resent")


def check_copies(context: CheckContext) -> Finding:
    """Send values of each type to and fro between the devices, and compare what arrives at each with what was sent."""
    from onnxplace.devices import find_kind

    all_hosts = all(find_kind(device.partition(":")[0]).is_host for device in context.ids)
    refused, wrong, values = [], [], 0
    for kind in TYPES if all_hosts else [kind for kind in TYPES if kind != "string"]:
        try:
            values += _check_type(context, kind)
        except CheckFailedError as problem:
            wrong.append(f"{kind}: {problem}")
        except (ExecutionError, ModelError) as problem:
            if all_hosts or kind not in OPTIONAL_TYPES:
                wrong.append(f"{kind}: {problem.message}")
            refused.append(kind)
    require(not wrong, "; ".join(wrong))
    detail = f"{values} values of {len(TYPES) - len(refused) - (not all_hosts)} types, all exact"
    if refused:
        detail += f"; refused: {format_names(refused, quoted=False)}"
    return Finding(detail, {"values": values, "refused": refused})


def _check_type(context: CheckContext, kind: str) -> int:
    """Return how many values of a type were compared."""
    from onnxplace.session import InferenceSession

    first, last = context.ids[0], context.ids[-1]
    count = 0
    for shape in ("", "[n]", "[n, 2]"):  # scalars, vectors and matrices
        # Each value crosses to the other device, and the host reads all three that have crossed.
        nodes = "sent = Identity(x) arrived = Identity(sent) returned = Identity(arrived) resent = Identity(returned)"
        outputs = ", ".join(f"{kind}{shape} {name}" for name in OUTPUTS)
        model = parse_model(f"copies ({kind}{shape} x) => ({outputs}) {{ {nodes} }}")
        folder = context.folder / f"copies-{kind}-{len(shape)}"
        sizes: dict[str, Any] = {"n": 4} if shape else {}
        places = {"sent|returned": first, "arrived|resent": last}
        bundle = compile_placed(model, folder, context.make_target(), places, **sizes)
        with InferenceSession(bundle) as session:
            for value in _list_values(kind, shape):
                for name, result in zip(OUTPUTS, session.run(None, {"x": value})):
                    require_same(result, value, f"{value.size} elements, {name} ({first}, {last})")
                    count += 1
    return count


def _list_values(kind: str, shape: str) -> list[Array]:
    """Return random values of a type: every bit pattern may occur, except in truth values."""
    if not shape:
        return [_make_value(kind, 1, seed).reshape(()) for seed in range(3)]
    width = 1 if kind == "string" else _find_type(kind).itemsize
    sizes = list(ELEMENTS)
    if kind != "string" and shape == "[n]":
        sizes += [size // width for size in (MEDIUM_BYTES, *(LARGE_BYTES if kind == "float" else ()))]
    if shape == "[n]":
        return [_make_value(kind, size, size) for size in sizes]
    return [_make_value(kind, 2 * size, size).reshape(size, 2) for size in sizes]


def _make_value(kind: str, size: int, seed: int) -> Array:
    random = np.random.default_rng(seed)
    if kind == "string":
        return np.array([f"text {number}" * (number % 3) for number in random.integers(0, 99, size)], object)
    if kind == "bool":
        return random.integers(0, 2, size).astype(np.bool_)
    width = _find_type(kind).itemsize
    value: Array = np.frombuffer(random.bytes(size * width), _find_type(kind)).copy()
    if kind in ("float", "float16", "bfloat16", "double"):
        # Devices may change the bits of NaN, and which number stands for it.
        with np.errstate(invalid="ignore"):
            value[~np.isfinite(value)] = 1
    return value


def _find_type(kind: str) -> Any:
    """Return numpy's type of an ONNX type."""
    if kind == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(_NUMPY_TYPES.get(kind, kind))


# ----------------------------------------------------------------------------------------------- order of enqueued work


ROWS, COLUMNS = 64, 256
CHAIN_NODES = 24
MAX_IN_FLIGHT = 16
MIN_REQUESTS = 4 * MAX_IN_FLIGHT
MAX_SECONDS = 10.0
# A simulated NPU takes a second for each request: then fewer are in flight, and no more are sent after this time.
SLOW_SECONDS = 2.0
# Products with a permutation matrix are exact, also with 10 bits of mantissa, if values are whole and this small.
MAX_VALUE = 1000


def check_order(context: CheckContext) -> Finding:
    """Run chains of permutations that alternate between the devices; each request has its own inputs and answers.

    A value that is read before it is complete, or after its memory is used again, has elements of another request or of
    another step, since no two steps and no two requests have equal values.
    """
    from onnxplace.session import InferenceSession

    random = np.random.default_rng(1)
    permutations = [random.permutation(COLUMNS) for _ in range(CHAIN_NODES)]
    weights = {f"p{step}": np.eye(COLUMNS, dtype=np.float32)[:, order] for step, order in enumerate(permutations)}
    middle, last = CHAIN_NODES // 2, CHAIN_NODES
    nodes = " ".join(f"v{step + 1} = MatMul(v{step}, p{step})" for step in range(CHAIN_NODES))
    shape = f"float[{ROWS}, {COLUMNS}]"
    model = parse_model(f"order ({shape} v0) => ({shape} v{middle}, {shape} v{last}) {{ {nodes} }}", **weights)
    places = {f"v{step + 1}": context.ids[0] if step % 2 == 0 else context.ids[-1] for step in range(CHAIN_NODES)}
    bundle = compile_placed(model, context.folder / "order", context.make_target(), places)

    def compute(value: Array, steps: int) -> Array:
        for order in permutations[:steps]:
            value = value[:, order]
        return value

    def compare(number: int, value: Array, future: Future[Result]) -> None:
        outputs = future.result(WAIT_SECONDS).outputs
        for steps in (middle, last):
            what = f"request {number} of {in_flight} in flight, after {steps} steps"
            require_same(outputs[f"v{steps}"], np.ascontiguousarray(compute(value, steps)), what)

    pending: deque[tuple[int, Array, Future[Result]]] = deque()
    number, in_flight, began = 0, 1, time.perf_counter()
    with InferenceSession(bundle, max_in_flight=MAX_IN_FLIGHT) as session:
        while number < in_flight or time.perf_counter() - began < (
            SLOW_SECONDS if number < MIN_REQUESTS else min(context.seconds, MAX_SECONDS)
        ):
            value = random.integers(-MAX_VALUE, MAX_VALUE, (ROWS, COLUMNS)).astype(np.float32)
            # Zeros have two signs, and products do not keep them.
            value[value == 0] = 1
            pending.append((number, value, session.submit({"v0": value})))
            number += 1
            if len(pending) == in_flight:
                compare(*pending.popleft())
                rate = (number - len(pending)) / (time.perf_counter() - began)
                in_flight = min(MAX_IN_FLIGHT, max(2, int(SLOW_SECONDS * rate)))
        for entry in pending:
            compare(*entry)
    rate = number / (time.perf_counter() - began)
    detail = f"{number} requests of {CHAIN_NODES} steps, {in_flight} in flight, all exact; {rate:.0f} requests/s"
    return Finding(detail, {"requests": number, "requests_per_second": rate})


# ----------------------------------------------------------------------------------------------------- limits of memory


# The two weights are permutation matrices of this size, so that products are exact.
SIZE = 2048
WEIGHT_BYTES = 4 * SIZE**2
LIMIT_BYTES = WEIGHT_BYTES * 3 // 2


def check_memory(context: CheckContext) -> Finding:
    """Compile a model whose two weights exceed the limit of each device alone, and run it on both."""
    from onnxplace.session import InferenceSession

    first, last = context.ids[0], context.ids[-1]
    target = context.make_target(LIMIT_BYTES)
    orders = [np.random.default_rng(seed).permutation(SIZE) for seed in range(2)]
    weights = {f"p{step}": np.eye(SIZE, dtype=np.float32)[:, order] for step, order in enumerate(orders)}
    text = f"memory (float[4, {SIZE}] x) => (float[4, {SIZE}] y) {{ h = MatMul(x, p0) y = MatMul(h, p1) }}"
    model = parse_model(text, **weights)
    for number, device in enumerate(target.devices):
        try:
            compile_placed(model, context.folder / f"one-{number}", Target((device,)), {".*": device.id})
        except InfeasibleError as problem:
            require(device.id in str(problem), f"the refusal does not name {device.id}: {problem}")
        else:
            raise CheckFailedError(
                f"{device.id} with {format_bytes(LIMIT_BYTES)} accepted {format_bytes(2 * WEIGHT_BYTES)} of weights"
            )
    bundle = compile_placed(model, context.folder / "two", target, {"h": first, "y": last})
    x = np.arange(1, 4 * SIZE + 1, dtype=np.float32).reshape(4, SIZE) % 1000 + 1
    with InferenceSession(bundle) as session:
        for _ in range(3):
            (y,) = session.run(None, {"x": x})
            require_same(y, np.ascontiguousarray(x[:, orders[0]][:, orders[1]]), "the model on both devices")
    detail = (
        f"{format_bytes(2 * WEIGHT_BYTES)} of weights: refused by one device with {format_bytes(LIMIT_BYTES)}, "
        "exact on two"
    )
    return Finding(detail)
