"""Checks of what devices compute and hold, and of what arrives on other devices and on the host."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from onnxplace.errors import InfeasibleError, format_names
from onnxplace.feeds.feeds import Array, numpy_type
from onnxplace.runtime.interface import Result
from onnxplace.session.inference_session import InferenceSession
from onnxplace.target.kind_table import find_kind
from onnxplace.target.target import Target
from onnxplace.testing.runtime_contract import compile_placed, parse_model
from onnxplace.utils.quantities import format_bytes
from onnxplace_doctor.check_context import (
    WAIT_SECONDS,
    CheckContext,
    CheckFailedError,
    Finding,
    find_error,
    require,
    require_same,
    run_cases,
)

if TYPE_CHECKING:
    from onnx import ModelProto

# ------------------------------------------------------------------------------------------------------------ operators


# Relative to the largest element. GPUs may multiply float32 with 10 bits of mantissa (TF32).
TOLERANCES = {"float": 2e-3, "float16": 1e-2, "double": 1e-6}

# Of float on devices that were found to compute it in a shorter type.
FLOAT_TOLERANCES = {"bfloat16": 2e-2, "int8": 5e-2}


class Operator(NamedTuple):
    """One node with its inputs."""

    text: str
    """In ONNX's text form, without its output."""
    source: str
    """The type of the inputs."""
    result: str
    """The type of the output."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of the inputs, in order."""

    @property
    def name(self) -> str:
        """Return operator and type, as in `Softmax of float`."""
        return f"{re.split('[<(]', self.text)[0]} of {self.source}"

    def build_model(self, source: str, result: str) -> ModelProto:
        """Return the node as a model, with these types of the inputs and of the output."""
        inputs = ", ".join(f"{source}[{', '.join(map(str, shape))}] {name}" for name, shape in self.shapes.items())
        return parse_model(f"operator ({inputs}) => ({result} y) {{ y = {self.text} }}")


_FLOATS = tuple(TOLERANCES)
_ONE: Mapping[str, tuple[int, ...]] = {"a": (6, 40)}
_TWO: Mapping[str, tuple[int, ...]] = {"a": (6, 40), "b": (6, 40)}
# Nodes, the types of their inputs, the type of the output if it is another one, and the shapes of the inputs.
_TABLE: tuple[tuple[tuple[str, ...], tuple[str, ...], str, Mapping[str, tuple[int, ...]]], ...] = (
    (("Add(a, b)", "Mul(a, b)", "Concat<axis=1>(a, b)"), (*_FLOATS, "int64", "int32"), "", _TWO),
    (("Transpose<perm=[1, 0]>(a)",), (*_FLOATS, "int64", "int32"), "", _ONE),
    (("Relu(a)", "Sigmoid(a)", "Tanh(a)", "Softmax<axis=-1>(a)"), _FLOATS, "", _ONE),
    (("ReduceMean<axes=[1], keepdims=1>(a)",), _FLOATS, "", _ONE),
    (("MatMul(a, b)",), _FLOATS, "", {"a": (3, 6, 40), "b": (40, 17)}),
    (("Gemm<transB=1>(a, b, c)",), _FLOATS, "", {"a": (6, 40), "b": (9, 40), "c": (9,)}),
    (("Conv(a, b)",), ("float",), "", {"a": (2, 3, 12, 12), "b": (5, 3, 3, 3)}),
    (("LayerNormalization<axis=-1>(a, b, c)",), ("float",), "", {"a": (6, 40), "b": (40,), "c": (40,)}),
    (("Cast<to=7>(a)",), ("float",), "int64", _ONE),
    (("Greater(a, b)",), ("float",), "bool", _TWO),
    (("Equal(a, b)",), ("int64", "int32"), "bool", _TWO),
    (("Not(a)",), ("bool",), "", _ONE),
    (("And(a, b)",), ("bool",), "", _TWO),
)
OPERATORS = [
    Operator(text, source, result or source, shapes)
    for texts, sources, result, shapes in _TABLE
    for source in sources
    for text in texts
]


def check_operators(context: CheckContext) -> Finding:
    """Run each operator on the device, in its own bundle, and compare it with ONNX's reference in numpy."""
    changed = context.list_changed_types()
    cases = {
        operator.name: (operator.source, partial(_check_operator, context, operator, number))
        for number, operator in enumerate(OPERATORS)
        if changed.keys().isdisjoint((operator.source, operator.result))
    }
    errors, refused = run_cases(cases, _are_all_hosts(context))
    largest = max(errors, default=0.0)
    detail = f"{len(cases) - len(refused)} operators, largest error {largest:.1e} of the largest value"
    return _report_refused(detail, refused, changed, largest_relative_error=largest)


def _are_all_hosts(context: CheckContext) -> bool:
    return all(find_kind(device.partition(":")[0]).is_host for device in context.ids)


def _report_refused(detail: str, refused: list[str], changed: Mapping[str, str], **figures: float) -> Finding:
    if changed:
        detail += f"; left out: {', '.join(f'{name}, computed as {found}' for name, found in changed.items())}"
    if refused:
        detail += f"; refused: {format_names(refused, quoted=False)}"
    return Finding(detail, {**figures, "refused": refused})


def _check_operator(context: CheckContext, operator: Operator, seed: int) -> float:
    """Return the largest error of an operator, relative to the largest value."""
    from onnx.reference import ReferenceEvaluator

    feeds, kind = _make_feeds(operator, seed), _find_type(operator.result)
    # The reference computes floats in double precision.
    wide = operator.build_model(*("double" if name in TOLERANCES else name for name in operator[1:3]))
    wide_feeds = {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in feeds.items()}
    (expected,) = cast("list[Array]", ReferenceEvaluator(wide).run(None, wide_feeds))
    model = operator.build_model(operator.source, f"{operator.result}[{', '.join(map(str, expected.shape))}]")
    with context.open_session(model, {".*": context.ids[0]}) as session:
        (actual,) = session.run(None, feeds)
    require(
        actual.dtype == kind and actual.shape == expected.shape,
        f"expected {kind}{list(expected.shape)}, got {actual.dtype}{list(actual.shape)}",
    )
    if kind.kind == "f":
        precisions = [item.precision for item in context.make_target().devices]
        least = max((FLOAT_TOLERANCES.get(name, 0.0) for name in precisions), default=0.0)
        limit = max(TOLERANCES[operator.result], least if operator.result == "float" else 0.0)
        return find_error(actual, expected, limit, "its error")
    different = int((actual != expected).sum())
    require(not different, f"{different} of {expected.size} elements differ")
    return 0.0


def _make_feeds(operator: Operator, seed: int) -> dict[str, Array]:
    """Return random inputs: normal floats, small whole numbers, and truth values."""
    random, kind = np.random.default_rng(seed), _find_type(operator.source)
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
    all_hosts = _are_all_hosts(context)
    changed = context.list_changed_types()
    types = [kind for kind in TYPES if (all_hosts or kind != "string") and kind not in changed]
    counts, refused = run_cases({kind: (kind, partial(_check_type, context, kind)) for kind in types}, all_hosts)
    detail = f"{sum(counts)} values of {len(types) - len(refused)} types, all exact"
    return _report_refused(detail, refused, changed, values=sum(counts))


def _check_type(context: CheckContext, kind: str) -> int:
    """Return how many values of a type were compared."""
    first, last = context.ids[0], context.ids[-1]
    count = 0
    for shape in ("", "[n]", "[n, 2]"):  # scalars, vectors and matrices
        # Each value crosses to the other device, and the host reads all three that have crossed.
        nodes = "sent = Identity(x) arrived = Identity(sent) returned = Identity(arrived) resent = Identity(returned)"
        outputs = ", ".join(f"{kind}{shape} {name}" for name in OUTPUTS)
        model = parse_model(f"copies ({kind}{shape} x) => ({outputs}) {{ {nodes} }}")
        sizes = {"n": 4} if shape else {}
        with context.open_session(model, {"sent|returned": first, "arrived|resent": last}, **sizes) as session:
            for value in _list_values(kind, shape):
                for name, result in zip(OUTPUTS, session.run(None, {"x": value})):
                    require_same(result, value, f"{value.size} elements, {name} ({first}, {last})")
                    count += 1
    return count


def _list_values(kind: str, shape: str) -> list[Array]:
    """Return random values of a type: every bit pattern may occur, except in truth values."""
    if not shape:
        return [_make_value(kind, 1, seed).reshape(()) for seed in range(3)]
    if shape == "[n, 2]":
        return [_make_value(kind, 2 * size, size).reshape(size, 2) for size in ELEMENTS]
    sizes = list(ELEMENTS)
    if kind != "string":
        large = (MEDIUM_BYTES, *(LARGE_BYTES if kind == "float" else ()))
        sizes += [size // _find_type(kind).itemsize for size in large]
    return [_make_value(kind, size, size) for size in sizes]


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


def _find_type(kind: str) -> np.dtype[Any]:
    """Return numpy's type of an ONNX type."""
    return np.dtype(numpy_type(f"tensor({kind})") or object)


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
    random = np.random.default_rng(1)
    permutations = [random.permutation(COLUMNS) for _ in range(CHAIN_NODES)]
    weights = {f"p{step}": np.eye(COLUMNS, dtype=np.float32)[:, order] for step, order in enumerate(permutations)}
    middle, last = CHAIN_NODES // 2, CHAIN_NODES
    nodes = " ".join(f"v{step + 1} = MatMul(v{step}, p{step})" for step in range(CHAIN_NODES))
    shape = f"float[{ROWS}, {COLUMNS}]"
    model = parse_model(f"order ({shape} v0) => ({shape} v{middle}, {shape} v{last}) {{ {nodes} }}", **weights)
    places = {f"v{step + 1}": context.ids[0] if step % 2 == 0 else context.ids[-1] for step in range(CHAIN_NODES)}
    bundle = compile_placed(model, context.folder / "order", context.make_target(), places)
    number, in_flight = 0, 1

    def compare(number: int, value: Array, future: Future[Result]) -> None:
        outputs = future.result(WAIT_SECONDS).outputs
        for step, order in enumerate(permutations, 1):
            value = value[:, order]
            if step in (middle, last):
                what = f"request {number} of {in_flight} in flight, after {step} steps"
                require_same(outputs[f"v{step}"], np.ascontiguousarray(value), what)

    pending: deque[tuple[int, Array, Future[Result]]] = deque()
    began = time.perf_counter()
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
