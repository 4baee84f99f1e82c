"""What a device really computes, which its record only claims: small graphs are run on it, and compared with numpy.

A device may compute float32 in a shorter type, 64-bit whole numbers in 32 bits, or replace numbers that are too small.
Only nodes that its provider takes count; the CPU computes the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from onnxplace.errors import OnnxplaceError
from onnxplace.machine import measurement_cache
from onnxplace.machine.hardware import available_cores, find_device_problem, find_hardware
from onnxplace.machine.isolated_sessions import list_taken_nodes, open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.machine.ort_values import make_runner
from onnxplace.target.device_kinds import ISOLATE, THREADS, DeviceAddress
from onnxplace.target.kind_table import find_kind
from onnxplace.target.target import PRECISIONS, Device
from onnxplace.utils.differences import relative_error
from onnxplace.utils.ort import import_onnxruntime

# Largest error over the largest value, up to which results are of a type: about the geometric mean between what was
# measured with that type and with the next. float32: up to 2e-6, float16 and TF32: 5e-4, bfloat16: 4e-3.
_ERRORS = ((2e-5, "float32"), (1e-3, "tf32"), (2e-2, "bfloat16"), (np.inf, "int8"))
# The same for elementwise results of other types, which are rounded once; products may sum in the type itself.
_TYPE_ERRORS = {"double": 1e-12, "float16": 1e-3, "bfloat16": 6e-3}
_PRODUCT_FACTOR = 16
# The least whole number that a type does not hold, or not exactly.
_WHOLE_LIMITS = ((1 << 53, "float64"), (1 << 31, "int32"), (1 << 24, "float32"), (1 << 11, "float16"), (0, "few bits"))
# Values that should pass an operator as they are, in the order of the input `special`.
_SPECIAL = {"NaN": np.nan, "infinities": np.inf, "negative zero": -0.0, "subnormal numbers": 1e-40}


@dataclass(frozen=True)
class DeviceTraits:
    """What a device was found to compute; what its provider leaves to the CPU is missing."""

    precision: Mapping[str, str] = field(default_factory=dict)
    """Sort of operators, such as `products` -> the type in which it computes float32, of `PRECISIONS`."""
    keeps: tuple[str, ...] = ()
    """Types whose values it computes as they are, such as `float16` and `int64`."""
    changes: Mapping[str, str] = field(default_factory=dict)
    """Other types, such as `int64` -> the type that has the same errors, such as `int32`."""
    loses: tuple[str, ...] = ()
    """Special values of float32 that it does not keep, such as `subnormal numbers`."""

    @property
    def least_precise(self) -> str:
        """Return the least precise type in which it computes float32; empty where it computes none."""
        return max(self.precision.values(), key=PRECISIONS.index, default="")


def find_precision(device: Device) -> str:
    """Return the least precise type in which a device computes float32: as found on this machine, else as declared."""
    traits = None if device.is_host else probe_device(device)
    return (traits and traits.least_precise) or device.precision


_known: dict[str, DeviceTraits] = {}


def probe_device(device: Device) -> DeviceTraits | None:
    """Return what a device of this machine computes; None for one that is not here, or cannot be used.

    It is asked once for each device, its options, and the versions of its software; the cache keeps the answers.
    """
    hardware = None if device.host or device.is_host else find_hardware(device)
    if hardware is None or device.model not in ("", hardware.name):
        return None
    kind, address = find_kind(device.kind), device.address
    options = {name: value for name, value in device.options.items() if name not in (ISOLATE, THREADS)}
    processor = measurement_cache.processor() if device.has_cores else ""
    names = kind.name, kind.provider(options), hardware.name, hardware.version, processor, repr(sorted(options.items()))
    files = map(measurement_cache.file_described, kind.libraries)
    key = measurement_cache.key(("traits", *names, import_onnxruntime().__version__, *files))
    if key not in _known:
        with suppress(ValueError, KeyError):  # it is damaged
            if entry := measurement_cache.read(key):
                _known[key] = TypeAdapter(DeviceTraits).validate_python(entry["traits"])
    if key not in _known and find_device_problem(device) is None:
        # Compilers may crash on nodes that they claim.
        options = {**address.options, **({ISOLATE: "true"} if kind.compiles else {})}
        _known[key] = _examine(replace(address, options=options))
        with suppress(ValueError):
            if _known[key] != DeviceTraits():
                measurement_cache.write(key, {"traits": asdict(_known[key])})
    return _known.get(key)


class _Case(NamedTuple):
    """A node that is run, and what it should compute."""

    sort: str
    operator: str
    inputs: str
    compute: Callable[..., Any]
    type: str = "float"

    @property
    def name(self) -> str:
        return f"{self.operator} {self.inputs} {self.type}"


def _convolve(images: Any, kernels: Any) -> Any:
    windows = np.lib.stride_tricks.sliding_window_view(images, kernels.shape[2:], (2, 3))
    return np.einsum("bchwij,ocij->bohw", windows, kernels)


def _normalise(rows: Any, scale: Any) -> Any:
    return (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5) * scale


def _take_softmax(rows: Any) -> Any:
    return np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)


# With a constant, which a provider may convert beforehand, and of two inputs.
_PRODUCTS = (_Case("products", "MatMul", "x weights", np.matmul), _Case("products", "MatMul", "x z", np.matmul))
_ELEMENTWISE = (_Case("elementwise", "Add", "x y", np.add), _Case("elementwise", "Mul", "x y", np.multiply))
_FLOAT32 = (
    *_PRODUCTS,
    _Case("convolutions", "Conv", "images kernels", _convolve),
    _Case("normalisation", "LayerNormalization", "x scale", _normalise),
    _Case("softmax", "Softmax", "small", _take_softmax),
    *_ELEMENTWISE,
)
# Whether numbers pass that are too large for float16.
_PASSING = (_Case("products", "MatMul", "large one", np.matmul), _Case("elementwise", "Mul", "large one", np.multiply))
_KEEPING = _Case("special", "Mul", "special ones", np.multiply)
_WHOLE = (
    _Case("whole", "Add", "whole zeros", np.add),
    _Case("whole", "Mul", "whole ones", np.multiply),
    _Case("whole", "Transpose", "whole", np.transpose),
)
_TRUTH = (_Case("truth", "And", "whole ones", np.logical_and), _Case("truth", "Not", "whole", np.logical_not))
_CASES = (
    *(*_FLOAT32, *_PASSING, _KEEPING),
    *(case._replace(type=name) for name in ("int64", "int32", "uint8") for case in _WHOLE),
    *(case._replace(type="bool") for case in _TRUTH),
    *(case._replace(type=name) for name in _TYPE_ERRORS for case in (*_ELEMENTWISE, *_PRODUCTS)),
)
_CONSTANTS = ("weights", "kernels", "scale")
_WHOLE_TYPES = ("int64", "int32", "uint8", "bool")


def _make_values() -> dict[str, Any]:
    """Return the inputs of all cases: whole numbers, and floats in double precision.

    Sums have 512 and 576 terms, so that shorter types show. Softmax has small inputs, with which its errors grow.
    """
    random = np.random.default_rng(0)
    shapes = {"x": (32, 512), "y": (32, 512), "z": (512, 64), "weights": (512, 64), "scale": (512,)}
    shapes |= {"images": (1, 64, 8, 8), "kernels": (32, 64, 3, 3)}
    whole = [[-6696874842932477345, (1 << 53) + 1, (1 << 31) + 5, (1 << 24) + 1], [-(1 << 11) - 1, 129, 1, 0]]
    return {
        **{name: random.standard_normal(shape) for name, shape in shapes.items()},
        "small": random.uniform(-1, 1, (32, 64)),
        "large": np.array([[70000.0], [-70000.0], [3.0]]),
        "one": np.ones((1, 1)),
        "special": np.array(list(_SPECIAL.values())),
        "ones": np.ones(1),
        "zeros": np.zeros(1),
        "whole": np.array(whole),
    }


def _cast(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return numbers in another type, with zeros for those that it does not have."""
    if dtype.kind in "iub":
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        value = np.where((low <= value) & (value <= high), value, 0)
    return value.astype(dtype)


def _examine(device: DeviceAddress) -> DeviceTraits:
    """Return what a device computes."""
    results = _run(_CASES, device)
    passes = {case.sort: relative_error(*results[case]) < 1e-2 for case in _PASSING if case in results}
    precision: dict[str, str] = {}
    for case in filter(results.__contains__, _FLOAT32):
        sort = "products" if case.sort in ("products", "convolutions") else "elementwise"
        found = _name_precision(relative_error(*results[case]), passes.get(sort, True))
        precision[case.sort] = max(found, precision.get(case.sort, found), key=PRECISIONS.index)
    changes: dict[str, str] = {}
    for name in dict.fromkeys(case.type for case in results if case.type != "float"):
        of_type = {case: pair for case, pair in results.items() if case.type == name}
        changes[name] = _find_shorter(of_type) if name in _TYPE_ERRORS else _find_narrower(of_type.values())
    keeps = tuple(name for name, found in changes.items() if not found)
    lost = _find_lost(*results[_KEEPING]) if _KEEPING in results else ()
    return DeviceTraits(precision, keeps, {name: found for name, found in changes.items() if found}, lost)


def _run(cases: Sequence[_Case], device: DeviceAddress) -> dict[_Case, tuple[Any, Any]]:
    """Return what a device computes for those cases that it takes, and what it should.

    A provider may fail with a graph, or refuse it, for one of its nodes: then its halves are tried.
    """
    options = make_session_options(available_cores()[:1], "none", {"session.record_ep_graph_assignment_info": "1"})
    model, feeds, expected = _build(cases)
    with suppress(OnnxplaceError):
        session = open_session(model, options, device, device.id)
        taken, results = list_taken_nodes(session, device), make_runner(session, device.id)(feeds)
        if found := {x: (r, e) for x, r, e in zip(cases, results, expected) if x.name in taken}:
            return found
    halves = (cases[: len(cases) // 2], cases[len(cases) // 2 :]) if len(cases) > 1 else ()
    return {case: pair for half in halves for case, pair in _run(half, device).items()}


def _build(cases: Sequence[_Case]) -> tuple[bytes, dict[str, Any], list[Any]]:
    """Return the cases as one model, with its inputs and what it should compute."""
    from onnx import TensorProto, helper, numpy_helper

    inputs, nodes, outputs, feeds, weights, expected = [], [], [], dict[str, Any](), dict[str, Any](), list[Any]()
    values = _make_values()
    for case in cases:
        number, arrays = TensorProto.DataType.Value(case.type.upper()), []
        for name in case.inputs.split():
            array, full = _cast(values[name], helper.tensor_dtype_to_np_dtype(number)), f"{name} {case.type}"
            # Floats are computed in double precision.
            arrays.append(array if case.type in _WHOLE_TYPES else array.astype(np.float64))
            if name in _CONSTANTS:
                weights[full] = numpy_helper.from_array(array, full)
            elif full not in feeds:
                feeds[full] = array
                inputs.append(helper.make_tensor_value_info(full, number, array.shape))
        sources = [f"{name} {case.type}" for name in case.inputs.split()]
        nodes.append(helper.make_node(case.operator, sources, [case.name], case.name))
        outputs.append(helper.make_tensor_value_info(case.name, number, None))
        expected.append(case.compute(*arrays))
    graph = helper.make_graph(nodes, "probe", inputs, outputs, list(weights.values()))
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    return model.SerializeToString(), feeds, expected


def _find_shorter(results: Mapping[_Case, tuple[Any, Any]]) -> str:
    """Return the type that explains the errors of a type of floats; empty if it is kept."""
    wrong = []
    for case, pair in results.items():
        limit = _TYPE_ERRORS[case.type] * (_PRODUCT_FACTOR if case.sort == "products" else 1)
        error = relative_error(*pair)
        wrong += [_name_precision(error)] if error > limit else []
    return max(wrong, key=PRECISIONS.index, default="")


def _find_narrower(pairs: Iterable[tuple[Any, Any]]) -> str:
    """Return the type that explains the errors of a type of whole numbers; empty if it is kept."""
    wrong = [abs(int(number)) for actual, expected in pairs for number in expected[actual != expected]]
    return next((name for limit, name in _WHOLE_LIMITS if min(wrong) >= limit), "") if wrong else ""


def _name_precision(error: float, passes: bool = True) -> str:
    """Return the type whose rounding explains an error; `passes` if numbers do that are too large for float16."""
    name = next(name for limit, name in _ERRORS if error <= limit)
    return "float16" if name != "float32" and not passes else name


def _find_lost(actual: Any, expected: Any) -> tuple[str, ...]:
    """Return the names of the special values that are not kept."""
    same = np.isclose(actual, expected, rtol=0.5, atol=0, equal_nan=True)
    same &= np.isnan(expected) | (np.signbit(actual) == np.signbit(expected))
    return tuple(name for name, is_same in zip(_SPECIAL, same) if not is_same)
