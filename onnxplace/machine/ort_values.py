"""Values of ONNX Runtime, converted from and to numpy, and runs of a whole model on them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplace.errors import ModelError, format_names, format_one_line
from onnxplace.machine.interrupts import run_interruptibly
from onnxplace.machine.ort_sessions import is_foreign_error, make_session_options, open_session
from onnxplace.utils.ort import import_onnxruntime

Array = NDArray[Any]

# Types with several elements per byte.
_PACKED = ("tensor(int4", "tensor(uint4", "tensor(float4", "tensor(int2", "tensor(uint2")
_PACKED_DTYPES = ("int4", "uint4", "float4_e2m1fn", "int2", "uint2")
# Types that numpy lacks.
_FOREIGN = (*_PACKED, "tensor(bfloat", "tensor(float8")
# Types that ONNX Runtime accepts and returns as numpy arrays without a copy.
_NATIVE = frozenset(
    f"tensor({name})"
    for name in (
        *("float", "double", "float16", "bool"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
)
_NATIVE_KINDS = "fiub"


def needs_ort_value(declared: str) -> bool:
    """Return whether ONNX Runtime takes and returns values of this type as OrtValues only.

    >>> needs_ort_value("tensor(bfloat16)"), needs_ort_value("seq(tensor(float))")
    (True, False)
    """
    return declared[declared.find("tensor(") :].startswith(_FOREIGN)


def is_native_type(declared: str) -> bool:
    """Return whether numpy has this type, so that values on a CPU need no conversion."""
    return declared in _NATIVE


def is_native_array(value: Any) -> bool:
    """Return whether a value is an array of a type that numpy has."""
    return isinstance(value, np.ndarray) and _is_native(value.dtype)


@lru_cache(maxsize=64)
def _is_native(dtype: np.dtype[Any]) -> bool:
    # One that was unpickled may not be numpy's own object for its type.
    return dtype.kind in _NATIVE_KINDS and dtype.isbuiltin != 2 and bool(dtype == np.dtype(dtype.type))


def to_ort_value(array: Any, declared: str = "") -> Any:
    """Return an array, or a list of arrays, as an OrtValue on the CPU.

    It shares an array's memory where possible. `declared` is the type in the model; an empty list needs it. None stays
    None: an absent optional.
    """
    if array is None:
        return None
    if isinstance(array, list):
        return _make_sequence(array) if array else _make_empty_sequence(declared)
    if array.dtype.kind in "OUS":
        return _make_strings(array)
    if array.dtype.name in _PACKED_DTYPES:
        return _pack_array(array)
    contiguous = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat", "float8")):
        from onnx import helper

        bits = contiguous.view(np.uint16 if array.dtype.itemsize == 2 else np.uint8)
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        return import_onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type(bits, kind)
    return import_onnxruntime().OrtValue.ortvalue_from_numpy(contiguous)


def to_fed_value(array: Any, declared: str) -> Any:
    """Return an input as an OrtValue; strings, which are UTF-8, as an array of `str`.

    `session.run` takes that. An OrtValue of strings is an output of a session that is opened for it, which takes longer
    than a small model runs.
    """
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "OUS":
        return to_ort_value(array, declared)
    texts = [item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel().tolist()]
    return np.array(texts, dtype=object).reshape(array.shape)


def to_python(value: Any) -> Any:
    """Return an OrtValue as numpy; sequences as lists of arrays, an absent optional as None."""
    if is_absent(value):
        return None
    if isinstance(value, (np.ndarray, list, dict)):
        return value
    return _tensor_to_array(value) if value.is_tensor() else _sequence_to_list(value)


def to_ort_value_if_possible(value: Any) -> Any:
    """Return an array or a list of arrays as an OrtValue, and other values unchanged."""
    tensors = isinstance(value, list) and value and all(isinstance(item, np.ndarray) for item in value)
    return to_ort_value(value) if tensors or isinstance(value, np.ndarray) else value


def is_absent(value: Any) -> bool:
    """Return whether a value is an empty optional."""
    return value is None or (not isinstance(value, (np.ndarray, list, dict)) and not value.has_value())


def is_copyable_tensor(value: Any) -> bool:
    """Return whether a value is a tensor whose bytes can be copied."""
    return (
        not isinstance(value, (np.ndarray, list, dict))
        and not is_absent(value)
        and value.is_tensor()
        and not value.data_type().startswith(("tensor(string", *_PACKED))
    )


def count_bytes(value: Any) -> int | None:
    """Return the bytes of a tensor; None for other values, and strings."""
    if hasattr(value, "count_bytes"):  # a value of a device that has its own class
        size: int | None = value.count_bytes()
        return size
    if isinstance(value, np.ndarray):
        return None if value.dtype.kind in "OUS" else value.nbytes
    return value.tensor_size_in_bytes() if is_copyable_tensor(value) else None


def _tensor_to_array(value: Any) -> Array:
    if not needs_ort_value(value.data_type()):
        # An OrtValue made of an array keeps it, and `numpy()` a view of it that does not.
        given = getattr(value, "_numpy_obj", None)
        return np.asarray(value.numpy() if given is None else given)
    from onnx import TensorProto, numpy_helper

    size = value.tensor_size_in_bytes()
    data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return numpy_helper.to_array(TensorProto(data_type=value.element_type(), dims=value.shape(), raw_data=data))


def _pack_array(array: Array) -> Any:
    """Return an array of one element per byte as an OrtValue of several elements per byte."""
    from onnx import numpy_helper

    tensor = numpy_helper.from_array(array)
    value = import_onnxruntime().OrtValue.ortvalue_from_shape_and_type(list(array.shape), tensor.data_type)
    ctypes.memmove(value.data_ptr(), tensor.raw_data, len(tensor.raw_data))
    return value


def _make_sequence(arrays: list[Any]) -> Any:
    """Return arrays as a sequence; ONNX Runtime creates sequences only as outputs of a model."""
    from onnx import TensorProto, helper

    kind = helper.np_dtype_to_tensor_dtype(np.asarray(arrays[0]).dtype)
    names = [f"item{index}" for index in range(len(arrays))]
    inputs = [helper.make_tensor_value_info(name, kind, None) for name in names]
    output = helper.make_tensor_sequence_value_info("items", kind or TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("SequenceConstruct", names, ["items"])], "sequence", inputs, [output])
    feeds = {name: to_ort_value(np.asarray(array)) for name, array in zip(names, arrays)}
    return _open_graph(graph).run_with_ort_values(["items"], feeds)[0]


def _make_empty_sequence(declared: str) -> Any:
    """Return an empty sequence of the declared type, such as `seq(tensor(float))`."""
    from onnx import helper

    element = declared.rpartition("tensor(")[2].partition(")")[0]
    kind = _element_kind(element)
    output = helper.make_tensor_sequence_value_info("items", kind, None)
    graph = helper.make_graph([helper.make_node("SequenceEmpty", [], ["items"], dtype=kind)], "empty", [], [output])
    return _open_graph(graph).run_with_ort_values(["items"], {})[0]


def _element_kind(element: str) -> int:
    """Return ONNX's number of an element type in ONNX Runtime's spelling."""
    from onnx import TensorProto

    return TensorProto.STRING if element == "string" else TensorProto.DataType.Value(element.upper())


def _make_strings(array: Array) -> Any:
    """Return strings as an OrtValue; ONNX Runtime creates those only as outputs of a model."""
    from onnx import TensorProto, helper

    texts = [item if isinstance(item, bytes) else str(item).encode() for item in array.ravel().tolist()]
    tensor = TensorProto(name="text", data_type=TensorProto.STRING, dims=array.shape, string_data=texts)
    output = helper.make_tensor_value_info("out", TensorProto.STRING, array.shape)
    graph = helper.make_graph([helper.make_node("Identity", ["text"], ["out"])], "strings", [], [output], [tensor])
    return _open_graph(graph).run_with_ort_values(["out"], {})[0]


def _sequence_to_list(value: Any) -> list[Array]:
    """Return a sequence of tensors as a list; ONNX Runtime returns elements only through a model."""
    element = value.data_type().removeprefix("seq(tensor(").removesuffix("))")
    count = int(_open_reader(element, "SequenceLength").run_with_ort_values(["result"], {"items": value})[0].numpy())
    reader = _open_reader(element, "SequenceAt")
    feeds = ({"items": value, "index": to_ort_value(np.array(index))} for index in range(count))
    return [_tensor_to_array(reader.run_with_ort_values(["result"], item)[0]) for item in feeds]


@lru_cache(maxsize=128)
def _open_reader(element: str, operator: str) -> Any:
    """Return a session that counts a sequence of tensors, or takes the one at an index out of it."""
    from onnx import TensorProto, helper

    kind, counts = _element_kind(element), operator == "SequenceLength"
    inputs = [helper.make_tensor_sequence_value_info("items", kind, None)]
    inputs += [] if counts else [helper.make_tensor_value_info("index", TensorProto.INT64, [])]
    result = helper.make_tensor_value_info("result", TensorProto.INT64 if counts else kind, None)
    node = helper.make_node(operator, [item.name for item in inputs], ["result"])
    return _open_graph(helper.make_graph([node], "reader", inputs, [result]))


def _open_graph(graph: Any) -> Any:
    from onnx import helper

    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return open_session(model.SerializeToString(), make_session_options([0], "none"))


# --------------------------------------------------------------------------------------------------------- whole models


def make_array_runner(session: Any) -> Callable[..., Sequence[Any]]:
    """Return a function like `session.run` that also takes and returns arrays of types that numpy lacks."""
    inputs = {item.name: item.type for item in (*session.get_inputs(), *session.get_overridable_initializers())}
    outputs = {item.name: item.type for item in session.get_outputs()}

    def run(names: Sequence[str] | None, feeds: Mapping[str, Any], options: Any = None) -> list[Any]:
        values = {name: to_ort_value(value, inputs.get(name, "")) for name, value in feeds.items()}
        return [to_python(item) for item in session.run_with_ort_values(names or list(outputs), values, options)]

    needs_values = any(map(needs_ort_value, (*inputs.values(), *outputs.values())))
    return run if needs_values else session.run


def make_runner(session: Any, where: str) -> Callable[[Mapping[str, Any]], list[Any]]:
    """Return a function from feeds to all outputs of a whole model.

    It raises ModelError with ONNX Runtime's message if the model cannot run with these inputs.
    """
    run_arrays = make_array_runner(session)

    def run(feeds: Mapping[str, Any]) -> list[Any]:
        try:
            return list(run_interruptibly(run_arrays, None, dict(feeds)))
        except Exception as problem:
            if is_foreign_error(problem):
                raise
            text = format_one_line(problem)
            message = f"the model cannot be run with these inputs: {text}"
            arrays = {name: value for name, value in feeds.items() if isinstance(value, np.ndarray)}
            scalars = [f"{name}={value.ravel()[0]}" for name, value in arrays.items() if value.shape in ((), (1,))]
            drawn = f", such as {format_names(scalars, quoted=False)}," if scalars else ""
            hint = f"random inputs{drawn} may not fit this model: give real ones with --inputs, or sizes with --shape"
            raise ModelError("M017", message, where=where, hint=hint) from None

    return run
