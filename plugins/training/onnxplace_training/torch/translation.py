"""What the translations of ATen operators are made of: values of the graph, and the table of translations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from onnx import numpy_helper

from onnxplace_training.torch.builder import GraphBuilder

# --------------------------------------------------------------------------------------------------------------- values


# Element types of torch by their number in ONNX.
ONNX_TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}
# Tensors of equal elements up to this number are constants; larger ones are filled in each step.
MAX_FOLDED_ELEMENTS = 1024

Dimension = Any
"""A number, or torch's symbolic number for one that depends on the batch."""


@dataclass(frozen=True)
class Operand:
    """A tensor in the graph: a value, or a constant that becomes one when a node reads it."""

    name: str
    dtype: torch.dtype
    shape: tuple[Dimension, ...]
    constant: torch.Tensor | None = None
    """The value, if it is the same in every step; `name` is empty then."""
    permuted: tuple[Operand, tuple[int, ...]] | None = None
    """What this is a permutation of, and the permutation."""
    expanded: Operand | None = None
    """What this repeats along some axes; operators that broadcast may read it in its place."""

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class SymbolicNumber:
    """A number that depends on the sizes of the inputs; it becomes a value where a node reads it."""

    expression: Any
    """In sympy's form."""
    is_float: bool = False


Argument = Any
"""An `Operand`, a number, a text, None, or a list of these."""


class UntranslatableError(Exception):
    """An operator that cannot be written in ONNX, with the reason; the translator adds where it is."""


@dataclass
class Context:
    """What the translation of an operator uses: the builder, the expected results, sizes and random numbers."""

    builder: GraphBuilder
    symbols: dict[str, tuple[str, int]] = field(default_factory=dict)
    """The input and axis that each symbolic size is."""
    size_divisor: int = 1
    """The number of micro-batches in the batch."""
    result: Any = None
    """The results of the operator as torch computed them: tensors without data."""
    seed: Callable[[], str] = lambda: ""
    """Makes the value of the seed of a micro-batch, when it is first needed."""
    site: Callable[[], int] = lambda: 0
    """Returns another number for each operator that draws random numbers."""
    sizes: dict[tuple[object, ...], str] = field(default_factory=dict)
    positions: dict[str, str] = field(default_factory=dict)
    """The positions in the whole tensor, for the indices of each max pooling."""

    def read(self, value: Argument) -> str:
        """Return the name of an operand; a constant becomes an initializer."""
        if isinstance(value, Operand):
            return value.name if value.constant is None else self.builder.constant(to_numpy(value.constant))
        if isinstance(value, np.ndarray):
            return self.builder.constant(value)
        if value is None or isinstance(value, str):
            return value or ""
        raise UntranslatableError(f"expected a tensor, got {type(value).__name__}")

    def emit(self, operator: str, *inputs: Argument, **attributes: Any) -> str:
        """Add a node with one output and return the output's name."""
        return self.builder.emit(operator, *map(self.read, inputs), **attributes)

    def add(self, operator: str, inputs: Sequence[Argument], count: int, **attributes: Any) -> list[str]:
        """Add a node with several outputs and return their names."""
        return self.builder.add(operator, [self.read(value) for value in inputs], count, **attributes)

    def integers(self, values: Sequence[int]) -> str:
        """Return a one-dimensional int64 constant."""
        return self.builder.integers(values)

    def number(self, value: Argument, dtype: torch.dtype) -> str:
        """Return a scalar of an element type: a constant, or computed from sizes."""
        if isinstance(value, SymbolicNumber):
            name = self.compute_float(value.expression) if value.is_float else self.size(value.expression)
            return name if dtype == (torch.float32 if value.is_float else torch.int64) else self.cast(name, dtype)
        if isinstance(value, complex):
            raise UntranslatableError("complex numbers do not exist in ONNX Runtime")
        return self.builder.constant(to_numpy(torch.tensor(value, dtype=dtype)))

    def cast(self, value: Argument, dtype: torch.dtype) -> str:
        """Return a value in another element type."""
        if isinstance(value, Operand):
            if value.constant is not None:
                return self.builder.constant(to_numpy(value.constant.to(dtype)))
            if value.dtype == dtype:
                return value.name
        if dtype not in ONNX_TYPES:
            raise UntranslatableError(f"ONNX Runtime has no tensors of {dtype}")
        return self.emit("Cast", value, to=ONNX_TYPES[dtype])

    def as_type(self, value: Argument, dtype: torch.dtype) -> str:
        """Return an operand or number as a value of an element type."""
        return self.cast(value, dtype) if isinstance(value, Operand) else self.number(value, dtype)

    def shape(self, dimensions: Sequence[Argument]) -> str:
        """Return a shape as one-dimensional int64 value."""
        plain = [as_dimension(dimension) for dimension in dimensions]
        if all(isinstance(dimension, int) for dimension in plain):
            return self.integers(plain)
        parts = [self.integers([d]) if isinstance(d, int) else self.size(d, as_vector=True) for d in plain]
        return parts[0] if len(parts) == 1 else self.emit("Concat", *parts, axis=0)

    def reshape(self, value: Argument, dimensions: Sequence[Argument]) -> str:
        """Reshape a value; one unknown dimension is left to ONNX."""
        plain = [as_dimension(dimension) for dimension in dimensions]
        unknown = [index for index, dimension in enumerate(plain) if not isinstance(dimension, int)]
        if len(unknown) == 1 and 0 not in plain:
            plain[unknown[0]] = -1
        # Without `allowzero`, a dimension of 0 would mean the input's dimension.
        return self.emit("Reshape", value, self.shape(plain), allowzero=1 if 0 in plain else None)

    def fill(self, shape: Sequence[Argument], number: Argument, dtype: torch.dtype) -> str:
        """Return a tensor of equal elements."""
        if is_static(shape) and count_elements(shape) <= MAX_FOLDED_ELEMENTS and not isinstance(number, SymbolicNumber):
            return self.builder.constant(to_numpy(torch.full([int(size) for size in shape], number, dtype=dtype)))
        if isinstance(number, SymbolicNumber):
            return self.emit("Expand", self.number(number, dtype), self.shape(shape))
        value = numpy_helper.from_array(to_numpy(torch.full((1,), number, dtype=dtype)))
        return self.emit("ConstantOfShape", self.shape(shape), value=value)

    def size(self, expression: Argument, *, as_vector: bool = False) -> str:
        """Return a size that depends on the inputs, as a scalar or a vector of one element."""
        # Computed again in each module and phase, so that no device waits for another one's sizes.
        origin = self.builder.origin
        key = (str(expression), as_vector, origin.module, origin.phase, origin.micro_batch)
        if key not in self.sizes:
            self.sizes[key] = self.compute_size(expression, as_vector)
        return self.sizes[key]

    def compute_size(self, expression: Any, as_vector: bool) -> str:
        """Add the nodes that compute a size."""
        if as_vector:
            return self.emit("Unsqueeze", self.size(expression), self.integers([0]))
        if expression.is_Integer:
            return self.number(int(expression), torch.int64)
        if expression.is_Symbol:
            return self.compute_symbol(str(expression))
        name = type(expression).__name__
        operators = {"Add": "Add", "Mul": "Mul", "FloorDiv": "Div", "CleanDiv": "Div", "Mod": "Mod", "PythonMod": "Mod"}
        operators |= {"Max": "Max", "Min": "Min"}
        if name == "Pow" and expression.args[1].is_Integer and expression.args[1] > 0:
            return self.combine("Mul", [self.size(expression.args[0])] * int(expression.args[1]))
        if name not in operators:
            raise UntranslatableError(f"the size {expression} cannot be computed in ONNX; try dynamic_batch=False")
        return self.combine(operators[name], [self.size(argument) for argument in expression.args])

    def compute_float(self, expression: Any) -> str:
        """Add the nodes that compute a fraction of sizes, in float32."""
        name = type(expression).__name__
        if expression.is_number:
            return self.number(float(expression), torch.float32)
        if expression.is_integer or name == "ToFloat":
            return self.cast(self.size(expression.args[0] if name == "ToFloat" else expression), torch.float32)
        operators = {"FloatTrueDiv": "Div", "IntTrueDiv": "Div", "Add": "Add", "Mul": "Mul"}
        operators |= {"FloatPow": "Pow", "Pow": "Pow"}
        if name in operators:
            return self.combine(operators[name], [self.compute_float(argument) for argument in expression.args])
        if name.endswith("sqrt"):
            return self.emit("Sqrt", self.compute_float(expression.args[0]))
        raise UntranslatableError(f"the number {expression} cannot be computed in ONNX; try dynamic_batch=False")

    def product(self, dimensions: Sequence[Argument]) -> str:
        """Return the product of dimensions as a scalar of int64."""
        plain = [as_dimension(dimension) for dimension in dimensions]
        known = self.number(math.prod(size for size in plain if isinstance(size, int)), torch.int64)
        return self.combine("Mul", [known, *(self.size(size) for size in plain if not isinstance(size, int))])

    def combine(self, operator: str, names: Sequence[str]) -> str:
        """Join values pairwise, from the left."""
        result = names[0]
        for name in names[1:]:
            result = self.emit(operator, result, name)
        return result

    def compute_symbol(self, symbol: str) -> str:
        """Add the nodes that read a dimension of an input."""
        if symbol not in self.symbols:
            raise UntranslatableError(f"the size {symbol} depends on data; try fixed shapes, or dynamic_batch=False")
        source, axis = self.symbols[symbol]
        vector = self.emit("Shape", source, start=axis, end=axis + 1)
        size = self.emit("Squeeze", vector, self.integers([0]))
        return self.emit("Div", size, self.number(self.size_divisor, torch.int64)) if self.size_divisor > 1 else size


def as_dimension(dimension: Argument) -> Dimension:
    """Return a dimension as a number, or as the symbolic expression that it is."""
    if isinstance(dimension, int):
        return int(dimension)
    node = getattr(dimension, "node", None)
    expression = node.expr if node is not None else dimension.expression
    return int(expression) if expression.is_Integer else expression


def is_static(shape: Sequence[Dimension]) -> bool:
    """Return whether all dimensions are numbers."""
    return all(isinstance(as_dimension(dimension), int) for dimension in shape)


def same_shape(left: Sequence[Dimension], right: Sequence[Dimension]) -> bool:
    """Return whether two shapes are equal for all batch sizes."""
    return len(left) == len(right) and all(as_dimension(a) == as_dimension(b) for a, b in zip(left, right))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as numpy array; raises `UntranslatableError` for types that numpy does not have."""
    try:
        array: np.ndarray = tensor.detach().cpu().contiguous().numpy()
    except TypeError:
        raise UntranslatableError(f"a constant of {tensor.dtype}; numpy has no such type") from None
    return array


def spread(numbers: Sequence[int], count: int) -> list[int]:
    """Return one number for each spatial axis; torch allows one for all."""
    return [int(number) for number in (numbers if len(numbers) == count else list(numbers) * count)]


def count_elements(shape: Sequence[Dimension]) -> int:
    """Return the number of elements of a static shape."""
    return int(np.prod([int(dimension) for dimension in shape], dtype=np.int64))


def normalize_axis(axis: int, rank: int) -> int:
    """Return an axis counted from the front; scalars count as vectors."""
    return axis % max(rank, 1)


# ------------------------------------------------------------------------------------------------------------ the table


Translation = Callable[..., Any]
"""Takes a `Context` and the arguments of the operator; returns a name, an `Operand`, or several of them."""

Function = TypeVar("Function", bound=Translation)

TRANSLATIONS: dict[str, Translation] = {}


def translates(*names: str) -> Callable[[Function], Function]:
    """Enter a function into the table, under one or more names of operators."""

    def enter(function: Function) -> Function:
        TRANSLATIONS.update(dict.fromkeys((f"aten.{name}" for name in names), function))
        return function

    return enter


def translates_each(table: Mapping[str, Any]) -> Callable[[Function], Function]:
    """Enter a function for several operators that differ in one thing, which it takes after the context."""

    def enter(function: Function) -> Function:
        for name, difference in table.items():
            TRANSLATIONS[f"aten.{name}"] = partial(_insert, function, difference)
        return function

    return enter


def _insert(function: Translation, difference: Any, context: Any, *arguments: Any, **options: Any) -> Any:
    return function(context, difference, *arguments, **options)
