"""Hypothesis strategies for small ONNX models with everything that makes a cut difficult.

Every tensor has a bound: its elements are whole numbers of at most that magnitude. No operation is drawn whose result
would not be exact in its type. Every correct way to compute a model therefore gives the same bits, whatever ONNX
Runtime fuses, folds or casts (it computes float16 in float32 on a CPU, and drops the rounding between two such nodes
of one session). An exception are `wild` floats, with NaN and infinity, which no operation reads that leaves them open.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnxruntime
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import (
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    helper,
    numpy_helper,
    parser,
)

from onnxplace.machine.ort_sessions import Level, make_session_options

Array = NDArray[Any]
Feeds = dict[str, Any]
Dimension = int | str
Draw = Callable[[st.SearchStrategy[Any]], Any]

FLOAT, DOUBLE, FLOAT16 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16
INT32, INT64, BOOL, STRING = TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING

MAX_EXACT = {FLOAT: 2**24, DOUBLE: 2**53, FLOAT16: 2**11, INT32: 2**31 - 1, INT64: 2**53, BOOL: 1}
"""The largest magnitude up to which a type holds every whole number."""
TOP_K_ACCEPTS_EMPTY_INPUTS = tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 31)
"""Before 1.31, ONNX Runtime crashes at a TopK of no rows: it divides by their number."""
NUMBERS = (FLOAT, INT64, FLOAT16, INT32, DOUBLE)
SHAPES: tuple[tuple[Dimension, ...], ...] = (
    ("N", 3),
    (2, 3),
    (3,),
    (),
    (1,),
    (2, 1),
    ("N", 1),
    ("N",),
    (1, 2, 3),
    (0, 3),
)
MAX_N = 3
MAX_FED_MAGNITUDE = 4
MAX_UNKNOWN_SIZE = 64
"""More than any dimension that depends on the data."""


@dataclass(frozen=True)
class Value:
    """A tensor, or a sequence of tensors, that nodes can read."""

    name: str
    dtype: int
    shape: tuple[Dimension, ...]
    """Sizes, `N`, or unique symbols for sizes that depend on the data."""
    bound: int = MAX_FED_MAGNITUDE
    wild: bool = False
    """Whether its elements may be NaN or infinite."""
    elements: tuple[Value, ...] | None = None
    """The elements of a sequence, whose type is `dtype`; None for a tensor."""

    @property
    def is_number(self) -> bool:
        return self.elements is None and self.dtype in NUMBERS

    @property
    def type(self) -> TypeProto:
        if self.elements is not None:
            return helper.make_sequence_type_proto(helper.make_tensor_type_proto(self.dtype, None))
        known = [size if isinstance(size, int) or size == "N" else None for size in self.shape]
        return helper.make_tensor_type_proto(self.dtype, known)


@dataclass(frozen=True)
class RandomModel:
    """A model, with dimensions and feeds to test it with."""

    proto: ModelProto
    dimensions: Mapping[str, int]
    """Sizes to compile with."""
    feeds: tuple[Feeds, ...]
    """Inputs of several requests; N may differ between them."""

    def __repr__(self) -> str:
        from onnx import printer

        return f"{printer.to_text(self.proto)}\ndimensions {dict(self.dimensions)}\nfeeds {self.feeds}"


@dataclass
class Builder:
    """A graph under construction.

    Each `add_*` draws suitable operands and adds nodes. It does nothing if there are none.
    """

    draw: Draw
    opset: int = 18
    prefix: str = ""
    nodes: list[NodeProto] = field(default_factory=list)
    initializers: list[TensorProto] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    overridable: list[Value] = field(default_factory=list)
    functions: dict[str, FunctionProto] = field(default_factory=dict)
    count: int = 0

    # --- drawing ---------------------------------------------------------------------------------------------------

    def one_of(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(options))

    def chance(self, parts: int) -> bool:
        """Return True once in `parts`; False is the simpler case."""
        return self.draw(st.integers(0, parts - 1)) == parts - 1

    def pick(self, is_suitable: Callable[[Value], bool] = lambda _: True) -> Value | None:
        """Draw a suitable value, often one of the latest, so that chains arise."""
        suitable = [value for value in reversed(self.values) if is_suitable(value)]
        if not suitable:
            return None
        return self.one_of(suitable if self.chance(2) else suitable[:3])

    def number(self, *dtypes: int, tame: bool = False) -> Value | None:
        return self.pick(lambda v: v.is_number and (not dtypes or v.dtype in dtypes) and not (tame and v.wild))

    def fresh(self) -> str:
        self.count += 1
        return f"{self.prefix}v{self.count}"

    # --- building --------------------------------------------------------------------------------------------------

    def node(
        self, op: str, inputs: Iterable[Value | str], outputs: Sequence[str], domain: str = "", **attributes: Any
    ) -> None:
        names = [value if isinstance(value, str) else value.name for value in inputs]
        # Empty and equal names are allowed, and nothing may depend on them.
        numbered = f"{self.prefix}n{len(self.nodes)}"
        name = self.one_of(("", numbered, numbered if self.prefix else "same"))  # in subgraphs they must differ
        self.nodes.append(helper.make_node(op, names, list(outputs), name=name, domain=domain, **attributes))

    def result(
        self,
        op: str,
        inputs: Sequence[Value | str],
        dtype: int,
        shape: tuple[Dimension, ...],
        bound: int,
        domain: str = "",
        **attributes: Any,
    ) -> Value:
        """Add a node with one output."""
        wild = any(isinstance(v, Value) and v.wild for v in inputs) and dtype in (FLOAT, DOUBLE, FLOAT16)
        output = Value(self.fresh(), dtype, shape, bound, wild)
        self.node(op, inputs, [output.name], domain, **attributes)
        self.values.append(output)
        return output

    def like(self, op: str, source: Value, inputs: Sequence[Value | str] | None = None, **attributes: Any) -> Value:
        """Add a node whose output has the type, shape and bound of `source`."""
        return self.result(op, inputs or [source], source.dtype, source.shape, source.bound, **attributes)

    def weight(self, array: Array, dtype: int, keep: bool = True) -> Value:
        """Add an initializer; `keep` offers it to other nodes too."""
        tensor = (
            helper.make_tensor(self.fresh(), STRING, array.shape, [s.encode() for s in array.ravel()])
            if dtype == STRING
            else numpy_helper.from_array(array, self.fresh())
        )
        self.initializers.append(tensor)
        bound = int(np.abs(array.astype(np.float64)).max(initial=0)) if dtype != STRING else 0
        value = Value(tensor.name, dtype, tuple(array.shape), bound)
        if keep:
            self.values.append(value)
        return value

    def whole_numbers(self, *numbers: int) -> Value:
        """Add an int64 vector as a parameter of one node: axes, starts, sizes."""
        return self.weight(np.array(numbers, dtype=np.int64), INT64, keep=False)

    def draw_array(self, dtype: int, shape: Sequence[int]) -> Array:
        return draw_array(np.random.default_rng(self.draw(st.integers(0, 7))), dtype, tuple(shape))

    # --- constants -------------------------------------------------------------------------------------------------

    def add_weight(self) -> None:
        dtype = self.one_of((*NUMBERS, BOOL))
        shape = self.one_of([s for s in SHAPES if all(isinstance(d, int) for d in s)])
        value = self.weight(self.draw_array(dtype, shape), dtype)
        if not self.prefix and self.chance(3):
            self.overridable.append(value)
            self.like("Identity", value)  # this node depends on no other input, and must not be folded

    def add_constant(self) -> None:
        kind = self.one_of(("Constant", "ConstantOfShape", "Add", "Shape", "Range"))
        dtype = self.one_of(NUMBERS)
        array = self.draw_array(dtype, self.one_of(((3,), (), (2, 3), (0, 3))))
        if kind == "Range":
            limits = [self.weight(np.array(n, dtype=np.int64), INT64, keep=False) for n in (0, 3, 1)]
            self.result("Range", limits, INT64, (3,), 3)
            return
        if kind == "ConstantOfShape":
            tensor = helper.make_tensor("value", FLOAT, [1], [2.0])
            self.result("ConstantOfShape", [self.whole_numbers(2, 3)], FLOAT, (2, 3), 2, value=tensor)
            return
        tensor = numpy_helper.from_array(array, "value")
        output = self.result("Constant", [], dtype, tuple(array.shape), MAX_FED_MAGNITUDE, value=tensor)
        if kind == "Add":
            self.result("Add", [output, output], dtype, output.shape, 2 * MAX_FED_MAGNITUDE)
        elif kind == "Shape":
            self.result("Shape", [output], INT64, (len(output.shape),), 3)

    # --- element by element ----------------------------------------------------------------------------------------

    def add_binary(self) -> None:
        first = self.number()
        second = first and self.pick(
            lambda v: v.is_number and v.dtype == first.dtype and broadcast_shapes(first.shape, v.shape) is not None
        )
        if first is None or second is None:
            return
        bounds = {
            "Add": first.bound + second.bound,
            "Sub": first.bound + second.bound,
            "Mul": first.bound * second.bound,
            "Max": max(first.bound, second.bound),
            "Min": max(first.bound, second.bound),
        }
        op = self.one_of([op for op, bound in bounds.items() if bound <= MAX_EXACT[first.dtype]])
        self.result(op, [first, second], first.dtype, broadcast_shapes(first.shape, second.shape) or (), bounds[op])

    def add_compare(self) -> None:
        first = self.number(FLOAT, DOUBLE, INT32, INT64)
        second = first and self.pick(
            lambda v: v.is_number and v.dtype == first.dtype and broadcast_shapes(first.shape, v.shape) is not None
        )
        if first is not None and second is not None:
            op = self.one_of(("Less", "Greater", "Equal"))
            self.result(op, [first, second], BOOL, broadcast_shapes(first.shape, second.shape) or (), 1)

    def add_logic(self) -> None:
        first = self.pick(lambda v: v.elements is None and v.dtype == BOOL)
        second = first and self.pick(
            lambda v: v.elements is None and v.dtype == BOOL and broadcast_shapes(first.shape, v.shape) is not None
        )
        if first is None or second is None:
            return
        op = self.one_of(("Not", "And", "Or", "Xor"))
        if op == "Not":
            self.like("Not", first)
        else:
            self.result(op, [first, second], BOOL, broadcast_shapes(first.shape, second.shape) or (), 1)

    def add_where(self) -> None:
        condition = self.pick(lambda v: v.elements is None and v.dtype == BOOL)
        first = condition and self.pick(
            lambda v: (
                v.is_number
                and v.dtype in (FLOAT, INT32, INT64, DOUBLE)
                and broadcast_shapes(condition.shape, v.shape) is not None
            )
        )
        if condition is None or first is None:
            return
        shape = broadcast_shapes(condition.shape, first.shape) or ()
        self.result(
            "Where",
            [condition, first, first if self.chance(2) else self._zero(first.dtype)],
            first.dtype,
            shape,
            first.bound,
        )

    def _zero(self, dtype: int) -> Value:
        return self.weight(np.zeros((), dtype=to_numpy_type(dtype)), dtype)

    def add_unary(self) -> None:
        value = self.number()
        if value is not None:
            ops = ["Neg", "Abs", "Sign"] + (
                ["Relu"] if value.dtype in (FLOAT, INT32, DOUBLE) and not value.wild else []
            )
            self.like(self.one_of(ops), value)

    def add_identity(self) -> None:
        value = self.pick()
        if value is not None:
            output = replace(value, name=self.fresh())
            self.node("Identity", [value], [output.name])
            self.values.append(output)

    def add_cast(self) -> None:
        value = self.pick(lambda v: v.elements is None and v.dtype in MAX_EXACT)
        if value is None:
            return
        floats = (FLOAT, DOUBLE, FLOAT16)
        kinds = [
            dtype
            for dtype in (*NUMBERS, BOOL)
            if dtype != value.dtype
            and (dtype == BOOL or value.bound <= MAX_EXACT[dtype])
            and (not value.wild or dtype in floats)
        ]
        dtype = self.one_of(kinds)
        self.result("Cast", [value], dtype, value.shape, min(value.bound, MAX_EXACT[dtype]), to=dtype)

    def add_clip(self) -> None:
        value = self.number(FLOAT, DOUBLE, INT32, INT64)
        if value is None:
            return
        limit = self.weight(np.array(self.draw(st.integers(-2, 2)), dtype=to_numpy_type(value.dtype)), value.dtype)
        inputs = self.one_of(([value, "", limit], [value, limit], [value]))
        self.like("Clip", replace(value, bound=max(value.bound, 2)), inputs)

    def add_dropout(self) -> None:
        value = self.number(FLOAT, DOUBLE)
        if value is None:
            return
        output, mask = replace(value, name=self.fresh()), Value(self.fresh(), BOOL, value.shape, 1)
        outputs = self.one_of(([output], [output, mask], [output, ""]))
        ratio = self.weight(np.array(0.5, dtype=np.float32), FLOAT, keep=False)
        self.node("Dropout", self.one_of(([value], [value, ratio])), [v and v.name for v in outputs])
        self.values += [v for v in outputs if v]

    # --- other shapes ----------------------------------------------------------------------------------------------

    def add_reshape(self) -> None:
        value = self.pick(lambda v: v.elements is None)
        if value is None:
            return
        other = self.pick(lambda v: v.elements is None and v.shape == value.shape)
        kind = self.one_of(("Unsqueeze", "Squeeze", "Shape", "Flat", "Transpose", "Flatten"))
        if kind == "Unsqueeze" and len(value.shape) < 4:
            self._view("Unsqueeze", [value, self.whole_numbers(0)], value, (1, *value.shape))
        elif kind == "Squeeze" and 1 in value.shape:
            axis = value.shape.index(1)
            self._view(
                "Squeeze", [value, self.whole_numbers(axis)], value, value.shape[:axis] + value.shape[axis + 1 :]
            )
        elif kind == "Shape" and other is not None:
            shape = self.result("Shape", [other], INT64, (len(other.shape),), MAX_UNKNOWN_SIZE)
            self._view("Reshape", [value, shape], value, value.shape)
        elif kind == "Flat" and all(isinstance(d, int) for d in value.shape):
            self._view("Reshape", [value, self.whole_numbers(-1)], value, (int(np.prod(value.shape)),))
        elif kind == "Transpose":
            self._view("Transpose", [value], value, value.shape[::-1])
        elif kind == "Flatten" and len(value.shape) == 2 and value.dtype != BOOL:
            self._view("Flatten", [value], value, value.shape)

    def _view(self, op: str, inputs: Sequence[Value | str], source: Value, shape: tuple[Dimension, ...]) -> None:
        output = replace(source, name=self.fresh(), shape=shape)
        self.node(op, inputs, [output.name])
        self.values.append(output)

    def add_expand(self) -> None:
        value = self.number(FLOAT, INT32, INT64, DOUBLE)
        other = value and self.pick(lambda v: v.elements is None and broadcast_shapes(value.shape, v.shape) == v.shape)
        if value is not None and other is not None:
            shape = self.result("Shape", [other], INT64, (len(other.shape),), MAX_UNKNOWN_SIZE)
            self.result("Expand", [value, shape], value.dtype, other.shape, value.bound)

    def add_concat(self) -> None:
        value = self.pick(lambda v: v.elements is None and len(v.shape) > 0)
        if value is None:
            return
        axis = len(value.shape) - 1
        other = self.pick(
            lambda v: (
                v.elements is None and v.dtype == value.dtype and len(v.shape) > 0 and v.shape[:-1] == value.shape[:-1]
            )
        )
        assert other is not None
        ends = (value.shape[-1], other.shape[-1])
        last = sum(ends) if all(isinstance(end, int) for end in ends) else f"u{self.fresh()}"
        output = replace(
            value,
            name=self.fresh(),
            shape=(*value.shape[:-1], last),
            bound=max(value.bound, other.bound),
            wild=value.wild or other.wild,
        )
        self.node("Concat", [value, other], [output.name], axis=self.one_of((axis, -1)))
        self.values.append(output)

    def add_slice(self) -> None:
        value = self.pick(lambda v: v.elements is None and len(v.shape) > 0 and v.dtype != BOOL)
        if value is None:
            return
        starts, ends, steps = self.whole_numbers(0), self.whole_numbers(1), self.whole_numbers(1)
        first = min(value.shape[0], 1) if isinstance(value.shape[0], int) else f"u{self.fresh()}"
        inputs = self.one_of(([value, starts, ends], [value, starts, ends, "", steps]))
        self._view("Slice", inputs, value, (first, *value.shape[1:]))

    def add_split(self) -> None:
        value = self.number()
        axes = [] if value is None else [i for i, d in enumerate(value.shape) if isinstance(d, int) and d >= 2]
        if value is None or not axes:
            return
        axis = self.one_of(axes)
        size = value.shape[axis]
        assert isinstance(size, int)
        sizes = [1, size - 1]
        results = [
            replace(value, name=self.fresh(), shape=(*value.shape[:axis], part, *value.shape[axis + 1 :]))
            for part in sizes
        ]
        self.node("Split", [value, self.whole_numbers(*sizes)], [v.name for v in results], axis=axis)
        self.values += results if self.chance(2) else results[:1]  # otherwise the second one never has a reader

    def add_top_k(self) -> None:
        value = self.number(FLOAT, INT64, DOUBLE, tame=True)
        if value is None or not value.shape or not isinstance(value.shape[-1], int) or value.shape[-1] < 2:
            return
        if not TOP_K_ACCEPTS_EMPTY_INPUTS and not all(isinstance(size, int) and size > 0 for size in value.shape[:-1]):
            return
        shape = (*value.shape[:-1], 2)
        top, where = replace(value, name=self.fresh(), shape=shape), Value(self.fresh(), INT64, shape, MAX_UNKNOWN_SIZE)
        self.node("TopK", [value, self.whole_numbers(2)], [top.name, where.name])
        self.values += self.one_of(([top], [where], [top, where]))

    def add_gather(self) -> None:
        value = self.pick(
            lambda v: v.elements is None and len(v.shape) > 0 and isinstance(v.shape[0], int) and v.shape[0] > 0
        )
        if value is not None:
            shape = self.one_of(((), (2,)))
            index = self.weight(np.zeros(shape, dtype=np.int64), INT64)
            output = replace(value, name=self.fresh(), shape=(*shape, *value.shape[1:]))
            self.node("Gather", [value, index], [output.name])
            self.values.append(output)

    def add_shape(self) -> None:
        value = self.pick(lambda v: v.elements is None)
        if value is None:
            return
        op, shape = self.one_of((("Shape", (len(value.shape),)), ("Size", ())))
        self.result(op, [value], INT64, shape, MAX_UNKNOWN_SIZE**2)

    def add_reduce(self) -> None:
        value = self.number(FLOAT, INT32, INT64, DOUBLE, tame=True)
        if value is None or 0 in value.shape:
            return
        total = value.bound * int(np.prod([find_max_size(d) for d in value.shape], dtype=object))
        if total > MAX_EXACT[value.dtype]:
            return
        if self.chance(2):
            self.result("ReduceSum", [value], value.dtype, (), total, keepdims=0)
        else:
            self.result("ReduceSum", [value, ""], value.dtype, (1,) * len(value.shape), total)

    def add_non_zero(self) -> None:
        value = self.pick(lambda v: v.elements is None and v.dtype in (FLOAT, INT32, INT64, BOOL) and len(v.shape) > 0)
        if value is not None:
            self.result("NonZero", [value], INT64, (len(value.shape), f"u{self.fresh()}"), MAX_UNKNOWN_SIZE)

    def add_mat_mul(self) -> None:
        value = self.pick(
            lambda v: (
                v.is_number and not v.wild and v.dtype in (FLOAT, DOUBLE) and len(v.shape) >= 2 and v.shape[-1] == 3
            )
        )
        if value is None or value.bound * 3 * MAX_FED_MAGNITUDE > MAX_EXACT[value.dtype]:
            return
        # 3 x 128 numbers are more than 1 KiB, so that this weight is stored outside of the segments.
        columns = self.one_of((3, 128))
        weight = self.weight(self.draw_array(value.dtype, (3, columns)), value.dtype)
        shape = (*value.shape[:-1], columns)
        self.result("MatMul", [value, weight], value.dtype, shape, value.bound * 3 * weight.bound)

    # --- strings and sequences -------------------------------------------------------------------------------------

    def add_string(self) -> None:
        value = self.pick(lambda v: v.elements is None and v.dtype == STRING)
        if value is None:
            self.weight(self.draw_array(STRING, (2,)), STRING)
        elif self.opset >= 19 and self.chance(2):
            self.result("Equal", [value, value], BOOL, value.shape, 1)
        else:
            self._view("Identity", [value], value, value.shape)

    def add_sequence(self) -> None:
        value = self.pick(lambda v: v.elements is None and v.dtype != BOOL and v.dtype != FLOAT16)
        if value is None:
            return
        other = self.pick(lambda v: v.elements is None and v.dtype == value.dtype)
        assert other is not None
        elements = self.one_of(((value,), (value, value), (value, other, value)))
        output = Value(self.fresh(), value.dtype, (), elements=tuple(elements))
        self.node("SequenceConstruct", elements, [output.name])
        self.values.append(output)

    def add_from_sequence(self) -> None:
        sequence = self.pick(lambda v: v.elements is not None)
        if sequence is None or sequence.elements is None:
            return self.add_sequence()
        first = sequence.elements[0]
        kind = self.one_of(("SequenceAt", "SequenceLength", "SequenceInsert", "ConcatFromSequence"))
        zero = self.weight(np.array(0, dtype=np.int64), INT64, keep=False)
        if kind == "SequenceAt":
            output = replace(first, name=self.fresh())
            self.node("SequenceAt", [sequence, zero], [output.name])
        elif kind == "SequenceLength":
            output = Value(self.fresh(), INT64, (), MAX_UNKNOWN_SIZE)
            self.node("SequenceLength", [sequence], [output.name])
        elif kind == "SequenceInsert" and len(sequence.elements) < 5:
            output = replace(sequence, name=self.fresh(), elements=(*sequence.elements, first))
            self.node("SequenceInsert", self.one_of(([sequence, first], [sequence, first, ""])), [output.name])
        elif all(element.shape == first.shape for element in sequence.elements) and first.dtype != STRING:
            bound, wild = max(e.bound for e in sequence.elements), any(e.wild for e in sequence.elements)
            output = Value(self.fresh(), first.dtype, (len(sequence.elements), *first.shape), bound, wild)
            self.node("ConcatFromSequence", [sequence], [output.name], axis=0, new_axis=1)
        else:
            return None
        self.values.append(output)
        return None

    # --- graphs inside graphs --------------------------------------------------------------------------------------

    def inner(self) -> Builder:
        """Return a builder for a subgraph, which may read all values of this graph, and has unique names."""
        self.count += 1
        return Builder(
            self.draw, self.opset, f"{self.prefix}s{self.count}_", values=list(self.values), functions=self.functions
        )

    def _branch(self, templates: Sequence[Value]) -> GraphProto:
        """Draw a subgraph with outputs like `templates`, computed from values of the outer graph."""
        inner = self.inner()
        for _ in range(self.draw(st.integers(0, 2))):
            self.one_of(INNER)(inner)
        outputs = []
        for value in templates:
            source = inner.pick(
                lambda v, value=value: (
                    v.elements is None
                    and (v.dtype, v.shape) == (value.dtype, value.shape)
                    and v.bound <= value.bound
                    and v.wild <= value.wild
                )
            )
            outputs.append(inner.like("Identity", source or value))
        return inner.graph(outputs, ())

    def graph(self, outputs: Sequence[Value], inputs: Sequence[Value]) -> GraphProto:
        return helper.make_graph(
            self.nodes,
            f"{self.prefix}graph",
            [ValueInfoProto(name=value.name, type=value.type) for value in inputs],
            [ValueInfoProto(name=value.name, type=value.type) for value in outputs],
            self.initializers,
        )

    def _condition(self) -> Value:
        condition = self.pick(lambda v: v.elements is None and v.dtype == BOOL and v.shape == ())
        return condition or self.weight(np.array(self.draw(st.booleans())), BOOL)

    def add_if(self) -> None:
        """Add an If with one or two outputs; the shape of the first may depend on the branch."""
        first, second = self.pick(lambda v: v.elements is None), self.pick(lambda v: v.elements is None)
        other = first and self.pick(
            lambda v: v.elements is None and v.dtype == first.dtype and len(v.shape) == len(first.shape)
        )
        if first is None or second is None or other is None:
            return
        condition, both = self._condition(), self.chance(2)
        merged = replace(
            first,
            shape=tuple(a if a == b else f"u{self.fresh()}" for a, b in zip(first.shape, other.shape)),
            bound=max(first.bound, other.bound),
            wild=first.wild or other.wild,
        )
        results = [replace(value, name=self.fresh()) for value in ([merged, second] if both else [merged])]
        branches = {
            name: self._branch([value, second] if both else [value])
            for name, value in (("then_branch", first), ("else_branch", other))
        }
        self.node("If", [condition], [v.name for v in results], **branches)
        self.values += results

    def add_loop(self) -> None:
        """Add a loop that adds a captured value to the carried one, and collects the sums."""
        carried = self.number(FLOAT, INT32, INT64)
        step = carried and self.pick(
            lambda v: (
                v.is_number
                and v.dtype == carried.dtype
                and broadcast_shapes(carried.shape, v.shape) == carried.shape
                and carried.bound + MAX_N * v.bound <= MAX_EXACT[v.dtype]
            )
        )
        if carried is None or step is None:
            return
        trips = self.draw(st.integers(0, MAX_N))
        inner = self.inner()
        parameters = [
            Value(inner.fresh(), INT64, (), MAX_N),
            Value(inner.fresh(), BOOL, (), 1),
            replace(carried, name=inner.fresh(), wild=carried.wild or step.wild),
        ]
        go_on = inner.like("Identity", parameters[1])
        total = inner.like("Add", parameters[2], [parameters[2], step])
        scanned = inner.like("Identity", total)
        body = inner.graph([go_on, total, scanned], parameters)
        bound, wild = carried.bound + trips * step.bound, carried.wild or step.wild
        last = replace(carried, name=self.fresh(), bound=bound, wild=wild)
        every = replace(last, name=self.fresh(), shape=(trips, *carried.shape))
        limit = self.weight(np.array(trips, dtype=np.int64), INT64)
        condition = self.one_of(("", self.weight(np.array(True), BOOL)))
        self.node("Loop", [limit, condition, carried], [last.name, every.name], body=body)
        self.values += self.one_of(([last, every], [last], [every]))

    def add_growing_loop(self) -> None:
        """Add a loop whose carried value gets longer in each iteration."""
        carried = self.number(FLOAT, INT32, INT64)
        step = carried and self.pick(
            lambda v: v.is_number and v.dtype == carried.dtype and len(v.shape) > 0 and v.shape[1:] == carried.shape[1:]
        )
        if carried is None or step is None or not carried.shape:
            return
        inner = self.inner()
        longer = replace(
            carried,
            shape=(f"u{self.fresh()}", *carried.shape[1:]),
            bound=max(carried.bound, step.bound),
            wild=carried.wild or step.wild,
        )
        parameters = [
            Value(inner.fresh(), INT64, (), MAX_N),
            Value(inner.fresh(), BOOL, (), 1),
            replace(longer, name=inner.fresh()),
        ]
        go_on = inner.like("Identity", parameters[1])
        body = inner.graph([go_on, inner.like("Concat", longer, [parameters[2], step], axis=0)], parameters)
        limit = self.weight(np.array(self.draw(st.integers(0, MAX_N)), dtype=np.int64), INT64)
        last = replace(longer, name=self.fresh())
        self.node("Loop", [limit, "", carried], [last.name], body=body)
        self.values.append(last)

    def add_call(self) -> None:
        """Add a call of a model-local function, which calls another one."""
        first = self.number(FLOAT, INT32, INT64, DOUBLE)
        second = first and self.pick(
            lambda v: (
                v.is_number
                and v.dtype == first.dtype
                and broadcast_shapes(first.shape, v.shape) is not None
                and 2 * (first.bound + v.bound) <= MAX_EXACT[v.dtype]
            )
        )
        if first is None or second is None:
            return
        if not self.functions:
            self.functions |= {text.split("(")[0].split()[-1]: parse_function(text, self.opset) for text in _FUNCTIONS}
        bound, shape = first.bound + second.bound, broadcast_shapes(first.shape, second.shape) or ()
        results = [Value(self.fresh(), first.dtype, shape, b, first.wild or second.wild) for b in (bound, 2 * bound)]
        outputs = self.one_of((results, [results[0], ""], ["", results[1]]))
        self.node("outer", [first, second], [v and v.name for v in outputs], domain="local")
        self.values += [v for v in outputs if v]


_FUNCTIONS = (
    "inner (a, b) => (c) { t = Add(a, b) c = Identity(t) }",
    "outer (a, b) => (c, d) { c = local.inner(a, b) d = local.inner(c, c) }",
)


def parse_function(text: str, opset: int) -> FunctionProto:
    return parser.parse_function(f'<opset_import: ["": {opset}, "local": 1], domain: "local"> {text}')


SIMPLE: tuple[Callable[[Builder], None], ...] = (
    Builder.add_binary,
    Builder.add_unary,
    Builder.add_identity,
    Builder.add_cast,
    Builder.add_weight,
    Builder.add_clip,
    Builder.add_compare,
    Builder.add_where,
    Builder.add_logic,
    Builder.add_dropout,
    Builder.add_reshape,
    Builder.add_expand,
    Builder.add_concat,
    Builder.add_slice,
    Builder.add_split,
    Builder.add_top_k,
    Builder.add_gather,
    Builder.add_shape,
    Builder.add_reduce,
    Builder.add_non_zero,
    Builder.add_mat_mul,
    Builder.add_constant,
)
INNER = (
    Builder.add_binary,
    Builder.add_weight,
    Builder.add_constant,
    Builder.add_cast,
    Builder.add_call,
    Builder.add_if,
)
ALL = (
    *SIMPLE,
    *SIMPLE,
    Builder.add_if,
    Builder.add_loop,
    Builder.add_growing_loop,
    Builder.add_call,
    Builder.add_string,
    Builder.add_from_sequence,
    Builder.add_from_sequence,
)


def broadcast_shapes(first: tuple[Dimension, ...], second: tuple[Dimension, ...]) -> tuple[Dimension, ...] | None:
    """Return the shape that two shapes broadcast to for all sizes of their symbols; None if there is none."""
    rank = max(len(first), len(second))
    pairs = zip((1,) * (rank - len(first)) + first, (1,) * (rank - len(second)) + second)
    shape: list[Dimension] = []
    for left, right in pairs:
        if left != right and 1 not in (left, right):
            return None
        shape.append(right if left == 1 else left)
    return tuple(shape)


def find_max_size(dimension: Dimension) -> int:
    """Return the largest size of a dimension."""
    return dimension if isinstance(dimension, int) else MAX_N if dimension == "N" else MAX_UNKNOWN_SIZE


def to_numpy_type(dtype: int) -> np.dtype[Any]:
    return np.dtype(helper.tensor_dtype_to_np_dtype(dtype))


def draw_array(random: np.random.Generator, dtype: int, shape: tuple[int, ...], wild: bool = False) -> Array:
    """Return whole numbers from -4 to 4 of a type, or words, or booleans; with `wild`, also NaN and infinity."""
    if dtype == STRING:
        return random.choice(np.array(["", "a", "bc"], dtype=object), shape)
    if dtype == BOOL:
        return np.asarray(random.integers(0, 2, shape), dtype=bool)
    array = np.asarray(random.integers(-MAX_FED_MAGNITUDE, MAX_FED_MAGNITUDE + 1, shape), dtype=to_numpy_type(dtype))
    if wild:
        array = np.where(random.integers(0, 2, shape) > 0, array, random.choice([np.nan, np.inf, -np.inf, -0.0], shape))
    return np.asarray(array, dtype=to_numpy_type(dtype))


def draw_feeds(draw: Draw, inputs: Sequence[Value], optional: Sequence[Value], n: int) -> Feeds:
    """Draw a value for each input, and for some of the optional ones."""
    random = np.random.default_rng(draw(st.integers(0, 7)))
    fed = [*inputs, *(value for value in optional if draw(st.booleans()))]
    return {v.name: draw_array(random, v.dtype, tuple(n if d == "N" else int(d) for d in v.shape), v.wild) for v in fed}


@st.composite
def random_models(draw: Draw, max_nodes: int = 16) -> RandomModel:
    """Draw a model of up to about `max_nodes` nodes, and feeds for it. ONNX Runtime may still refuse some."""
    builder = Builder(draw, opset=draw(st.sampled_from((18, 21))))
    dtypes = (FLOAT, FLOAT, INT64, BOOL, INT32, FLOAT16, DOUBLE, STRING)
    kinds = draw(st.lists(st.sampled_from(dtypes), min_size=1, max_size=3))
    inputs = []
    for index, dtype in enumerate(kinds):
        shape = builder.one_of(SHAPES if dtype != BOOL else ((), *SHAPES))
        wild = dtype in (FLOAT, DOUBLE) and builder.chance(4)
        inputs.append(Value(f"x{index}", dtype, shape, 1 if dtype == BOOL else MAX_FED_MAGNITUDE, wild))
    builder.values += inputs
    for add_nodes in [] if builder.chance(30) else draw(st.lists(st.sampled_from(ALL), min_size=4, max_size=max_nodes)):
        add_nodes(builder)
    outputs = draw(st.lists(st.sampled_from(builder.values[::-1]), min_size=1, max_size=4, unique_by=lambda v: v.name))
    nodes = builder.nodes[::-1] if builder.chance(6) else builder.nodes  # ONNX Runtime sorts them
    nested = any(attribute.HasField("g") for node in nodes for attribute in node.attribute)
    ir_version = builder.one_of((8, 10) if nested else (8, 3, 10))  # 3 has no weights in subgraphs
    optional = builder.overridable if ir_version > 3 else []
    listed = optional if ir_version > 3 else list_initializers_as_values(builder)
    graph = replace(builder, nodes=nodes).graph(outputs, [*inputs, *listed])
    graph.name = builder.one_of(("graph", ""))  # nothing may depend on its name
    opsets = [helper.make_opsetid("", builder.opset), *([helper.make_opsetid("local", 1)] if builder.functions else [])]
    proto = helper.make_model(
        graph, opset_imports=opsets, functions=list(builder.functions.values()), ir_version=ir_version
    )
    sizes = draw(st.lists(st.integers(0, MAX_N), min_size=1, max_size=2))
    feeds = tuple(draw_feeds(draw, inputs, optional, n) for n in sizes)
    return RandomModel(proto, {"N": sizes[0]} if depends_on_n(inputs) else {}, feeds)


def list_initializers_as_values(builder: Builder) -> list[Value]:
    """Return the initializers as inputs, which IR versions before 4 require; they are constants all the same."""
    return [Value(tensor.name, tensor.data_type, tuple(tensor.dims)) for tensor in builder.initializers]


def depends_on_n(inputs: Iterable[Value]) -> bool:
    return any("N" in value.shape for value in inputs)


def reference(proto: ModelProto, feeds: Iterable[Feeds], level: Level = "none") -> list[list[Any]]:
    """Return the outputs of ONNX Runtime for the whole model."""
    nameless = ModelProto()
    nameless.CopyFrom(proto)
    clear_names(nameless.graph)  # ONNX Runtime refuses equal names, which ONNX allows
    return run_plain(nameless.SerializeToString(), feeds, level)


def run_plain(model: bytes | Path, feeds: Iterable[Feeds], level: Level = "none") -> list[list[Any]]:
    """Return the outputs of a model in one session, without optimisations by default."""
    options = make_session_options([0], level)
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return [session.run(None, fed) for fed in feeds]


def clear_names(graph: GraphProto) -> None:
    """Remove the names of all nodes in a graph and its subgraphs."""
    for node in graph.node:
        node.name = ""
        for attribute in node.attribute:
            if attribute.HasField("g"):
                clear_names(attribute.g)


__all__ = ["Builder", "Feeds", "RandomModel", "Value", "random_models", "reference", "run_plain"]
