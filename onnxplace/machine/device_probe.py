"""What a device really computes, which its record only claims: small graphs are run on it, and compared with numpy.

A device may compute float32 in a shorter type, whole numbers of 64 bits in 32, or lose special values. Only nodes that
its provider takes count; the CPU computes the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from onnxplace.machine import measurement_cache
from onnxplace.machine.isolated_sessions import list_taken_nodes, open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.machine.ort_values import make_runner
from onnxplace.target.device_kinds import ISOLATE, THREADS, DeviceAddress, Hardware
from onnxplace.target.kind_table import find_kind
from onnxplace.target.target import PRECISIONS, Device
from onnxplace.utils.control_groups import list_cores
from onnxplace.utils.differences import relative_error
from onnxplace.utils.ort import import_onnxruntime

# Largest error over the largest value, up to which results are of a type: about the geometric mean between what was
# measured with that type and with the next. float32: up to 2e-6, float16 and TF32: 5e-4, bfloat16: 4e-3.
_SHORTER = ((2e-5, "float32"), (1e-3, "tf32"), (2e-2, "bfloat16"), (np.inf, "int8"))
# One over the least whole number that a type does not hold, or not exactly.
_NARROWER = ((0.0, ""), (2**-53, "float64"), (2**-31, "int32"), (2**-24, "float32"), (1.0, "few bits"))
# The same for results that a type keeps, which are rounded once.
_KEPT = {"double": (1e-12, ""), "float16": (1e-3, ""), "bfloat16": (6e-3, "")}
# Sessions that are tried at most.
MAX_SESSIONS = 24
# Values that an operator should pass as they are, in the order of the input `special`.
_SPECIAL = {"NaN": np.nan, "infinities": np.inf, "negative zero": -0.0, "subnormal numbers": 2**-130}


@dataclass(frozen=True)
class DeviceTraits:
    """What a device was found to compute; what its provider leaves to the CPU is missing."""

    precision: Mapping[str, str] = field(default_factory=dict)
    """Sort of operators, such as `products` -> the type in which it computes float32, one of `PRECISIONS`."""
    keeps: tuple[str, ...] = ()
    """Other types that it computes in, such as `float16` and `int64`."""
    changes: Mapping[str, str] = field(default_factory=dict)
    """Types that it does not keep, such as `int64` -> the type that explains its errors, such as `int32`."""
    loses: tuple[str, ...] = ()
    """Special values of float32 that it does not keep, such as `subnormal numbers`."""

    @property
    def least_precise(self) -> str:
        """Return the least precise type in which it computes float32; empty where it computes none."""
        return max(self.precision.values(), key=PRECISIONS.index, default="")

    def describe(self) -> list[str]:
        """Return what is not as it should be, in words."""
        sorts = {kind: ", ".join(x for x in self.precision if self.precision[x] == kind) for kind in PRECISIONS[1:]}
        lines = [f"float32 is computed in {kind} ({names})" for kind, names in sorts.items() if names]
        lines += [f"{name} is computed as {found}" for name, found in self.changes.items()]
        return lines + [f"{', '.join(self.loses)} are not kept"] * bool(self.loses)


_known: dict[str, DeviceTraits] = {}


def find_traits(
    device: Device, hardware: Hardware, find_problem: Callable[[Device], str | None]
) -> DeviceTraits | None:
    """Return what a device computes; None if it has a problem.

    It is asked once for each device, its options, and the versions of its software; the cache keeps the answers.
    """
    kind, address = find_kind(device.kind), device.address
    options = sorted(item for item in device.options.items() if item[0] not in (ISOLATE, THREADS))
    names = "traits", kind.name, hardware.name, measurement_cache.processor(), repr(options)
    software = hardware.version, import_onnxruntime().__version__, os.environ.get("NVIDIA_TF32_OVERRIDE", "")
    key = measurement_cache.key((*names, *software, *map(measurement_cache.file_described, kind.libraries)))
    with suppress(ValueError, KeyError):  # a damaged entry
        if key not in _known and (entry := measurement_cache.read(key)):
            _known[key] = TypeAdapter(DeviceTraits).validate_python(entry["traits"])
    if key not in _known and find_problem(device) is None:
        # Compilers may crash on nodes that they claim.
        isolation = {ISOLATE: "true"} if kind.compiles else {}
        _known[key] = traits = _examine(replace(address, options={**address.options, **isolation}))
        if traits != DeviceTraits():
            with suppress(ValueError):  # it cannot be written
                measurement_cache.write(key, {"traits": asdict(traits)})
    return _known.get(key)


class _Case(NamedTuple):
    """A node that is run."""

    type: str
    sort: str
    text: str
    """The node in ONNX's text form, without its output."""


_TABLE = (
    # With a constant, which a provider may convert beforehand, and of two inputs.
    ("float", "products", "MatMul(x, weights)", "MatMul(x, z)"),
    ("float", "convolutions", "Conv(images, kernels)"),
    ("float", "normalisation", "LayerNormalization(x, scale)"),
    ("float", "softmax", "Softmax(x)"),
    ("float double float16", "elementwise", "Add(x, y)", "Mul(x, y)"),
    # Numbers that float16 does not have.
    ("float", "large", "MatMul(large, one)", "Mul(large, one)"),
    ("float", "special", "Mul(special, one)"),
    ("int64 uint64 int32 uint32 uint8", "whole", "Max(whole, whole)", "Mul(whole, one)", "Transpose(whole)"),
    ("bool", "whole", "And(whole, one)", "Not(whole)"),
    # Last, since many have no such operators, and neither has the CPU.
    ("bfloat16", "elementwise", "Add(x, y)", "Mul(x, y)"),
)
_CASES = tuple(_Case(kind, sort, text) for kinds, sort, *texts in _TABLE for text in texts for kind in kinds.split())
# The shapes of random inputs and weights: sums have 512 and 576 terms, so that shorter types show.
_SHAPES = {"x": (32, 512), "y": (32, 512), "z": (512, 64), "images": (1, 64, 8, 8)}
_CONSTANTS = {"weights": (512, 64), "scale": (512,), "kernels": (32, 64, 3, 3)}
_NUMBERS = {
    "large": [[7e4], [-7e4], [3.0]],
    "special": [[*_SPECIAL.values()]],
    "whole": [[-6696874842932477345, ~(1 << 53), (1 << 31) + 5, (1 << 24) + 1], [~(1 << 11), 129, 1, 0]],
    "one": [[1.0]],
}
# A name of a value in the text of a node.
_NAME = re.compile(r"\b[a-z]\w*")
_TYPES = {"float32": "float", "float64": "double"}


def _examine(device: DeviceAddress) -> DeviceTraits:
    """Return what a device computes."""
    errors, lost = dict[tuple[str, str], float](), list[str]()
    for (kind, sort, _), (actual, expected) in _run(_CASES, device, []).items():
        error = relative_error(actual, expected)
        if sort == "whole":
            error = (1 / np.maximum(abs(expected[actual != expected].astype(float)), 1)).max(initial=0)
        elif sort == "special":
            pairs = zip(_SPECIAL, actual[0], expected[0])
            lost = [name for name, value, right in pairs if f"{value:g}" != f"{right:g}"]
        errors[kind, sort] = max(error, errors.get((kind, sort), 0.0))
    precision, changes = dict[str, str](), dict[str, str]()
    overflows = any(error > 0.1 for (_, sort), error in errors.items() if sort == "large")
    for (kind, sort), error in errors.items():
        scale = _NARROWER if sort == "whole" else (_KEPT[kind], *_SHORTER) if kind in _KEPT else _SHORTER
        found = next(name for limit, name in scale if error <= limit)
        if kind != "float":
            changes[kind] = found
        elif sort not in ("large", "special"):
            precision[sort] = "float16" if overflows and found in ("tf32", "bfloat16") else found
    keeps = tuple(name for name, found in changes.items() if not found)
    return DeviceTraits(precision, keeps, {name: found for name, found in changes.items() if found}, tuple(lost))


def _run(cases: Sequence[_Case], device: DeviceAddress, opened: list[Any]) -> dict[_Case, tuple[Any, Any]]:
    """Return what a device computes for those cases that it takes, and what it should.

    A provider may fail with a graph, or refuse it, for one of its nodes: then its halves are tried. `opened` has the
    sessions so far, which keep the process of an isolated device.
    """
    from onnx.reference import ReferenceEvaluator

    options = make_session_options(list_cores()[:1], "none", {"session.record_ep_graph_assignment_info": "1"})
    values = _list_values(cases)
    # Floats are compared with what double precision gives.
    wide = {name: item if item.dtype.kind in "iub" else item.astype(np.float64) for name, item in values.items()}
    if len(opened) == MAX_SESSIONS:
        return {}
    opened.append(None)
    with suppress(Exception):  # a provider may fail in any way
        model = _build(cases, values)
        opened[-1] = session = open_session(model.SerializeToString(), options, device, device.id)
        feeds = {item.name: values[item.name] for item in model.graph.input}
        taken, results = list_taken_nodes(session, device), make_runner(session, device.id)(feeds)
        if taken:
            pairs = zip(results, ReferenceEvaluator(_build(cases, wide)).run(None, wide))
            return {case: pair for index, (case, pair) in enumerate(zip(cases, pairs)) if f"node{index}" in taken}
    halves = (cases[: len(cases) // 2], cases[len(cases) // 2 :]) if len(cases) > 1 else ()
    return {case: pair for half in halves for case, pair in _run(half, device, opened).items()}


def _list_values(cases: Sequence[_Case]) -> dict[str, Any]:
    """Return the values that cases read, under names that end with their types; 0 for numbers that a type lacks."""
    from onnx import TensorProto, helper

    values, random = dict[str, Any](), np.random.default_rng(0)
    numbers = {name: random.uniform(-1, 1, shape) for name, shape in (_SHAPES | _CONSTANTS).items()}
    numbers |= {name: np.array(items) for name, items in _NUMBERS.items()}
    for case in cases:
        dtype = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(case.type.upper()))
        for name in _NAME.findall(case.text):
            value = numbers[name].astype(dtype)
            values[f"{name}_{case.type}"] = value * (value == numbers[name]) if dtype.kind in "iub" else value
    return values


def _build(cases: Sequence[_Case], values: Mapping[str, Any]) -> Any:
    """Return a model that computes cases in the types of the values, which are its inputs and weights."""
    from onnx import numpy_helper, parser

    types = {name: _TYPES.get(str(value.dtype), str(value.dtype)) for name, value in values.items()}
    texts = [_NAME.sub(rf"\g<0>_{case.type}", case.text) for case in cases]
    nodes = " ".join(f"[node{index}] y{index} = {text}" for index, text in enumerate(texts))
    weights = {name: value for name, value in values.items() if name.partition("_")[0] in _CONSTANTS}
    inputs = ", ".join(f"{types[name]}{[*values[name].shape]} {name}" for name in values if name not in weights)
    outputs = ", ".join(f"{types[_NAME.findall(text)[0]]}[] y{index}" for index, text in enumerate(texts))
    text = f'<ir_version: 8, opset_import: ["": 17]> probe ({inputs}) => ({outputs}) {{ {nodes} }}'
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return model
