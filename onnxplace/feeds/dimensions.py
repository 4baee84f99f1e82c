"""Sizes of symbolic dimensions: given, read off arrays, or computed from others, as in `past + seq` or `floor(s0/2)`.

An expression of limited length is parsed by Python's grammar, with its names replaced. It is evaluated by exact
arithmetic with a limit on magnitude, and never executed.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from onnxplace.errors import MAX_LISTED, FeedError, format_names
from onnxplace.feeds.feeds import Declared
from onnxplace.utils.groups import group_pairs

# ---------------------------------------------------------------------------------------------------------- expressions


# No array of numpy has more axes, and no dimension of a model that runs is larger.
MAX_RANK, MAX_DIMENSION = 64, (1 << 31) - 1
# Exporters write shorter expressions; anything else is only a name.
MAX_LENGTH = 256
# Sizes have 64 bits; larger results are refused, and so are exponents that surely lead to them.
_MAX_MAGNITUDE = 1 << 63
_MAX_EXPONENT = 64

# A hyphen without spaces belongs to the name, as in `seq-len`: exporters put spaces around a minus.
_NAME = re.compile(r"[^\W\d][\w.]*(?:-[\w.]+)*")
# What may stand between names: whole numbers, signs and parentheses.
_OTHER = re.compile(r"[\d\s+*/%(),-]*")


class NoSizeError(ValueError):
    """Contradictory sizes, or an expression that gives no size; the message does not name a place."""


@dataclass(frozen=True)
class Operation:
    """An operator or function and its operands."""

    name: str
    operands: tuple[int | str | Operation, ...]


# A whole number, a name whose size the user gives, or what is computed from others.
Term = int | str | Operation


def _raise_to_power(base: Fraction, exponent: Fraction) -> Fraction:
    """Return a power; raises NoSizeError unless the exponent is a small whole number."""
    if exponent.denominator != 1 or not 0 <= exponent <= _MAX_EXPONENT:
        raise NoSizeError(f"expected an exponent from 0 to {_MAX_EXPONENT}, got {exponent}")
    return base ** int(exponent)


_OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: Fraction(a // b),
    "%": lambda a, b: a % b,
    "**": _raise_to_power,
}
_SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
}  # fmt: skip
# Lower-case name -> (function, number of operands; 0 for one or more), as sympy, torch and ONNX Runtime write them.
_FUNCTIONS: dict[str, tuple[Callable[..., Fraction], int]] = {
    **dict.fromkeys(("floor", "floortoint"), (lambda a: Fraction(math.floor(a)), 1)),
    **dict.fromkeys(("ceil", "ceiling", "ceiltoint"), (lambda a: Fraction(math.ceil(a)), 1)),
    "max": (max, 0),
    "min": (min, 0),
    **dict.fromkeys(("mod", "pythonmod"), (_OPERATORS["%"], 2)),
    **dict.fromkeys(("floordiv", "cleandiv"), (_OPERATORS["//"], 2)),
    "inttruediv": (_OPERATORS["/"], 2),
}
# Operators that an expression may have and still be linear in one symbol.
_LINEAR_OPERATORS = frozenset("+-*/")


@lru_cache(maxsize=4096)
def parse_size(text: str) -> Operation | None:
    """Return the name of a dimension as an expression; None if it is only a name.

    >>> parse_size("batch"), sorted(symbols_of(parse_size("past + 2*seq")))
    (None, ['past', 'seq'])
    """
    if len(text) > MAX_LENGTH:
        return None
    others, names = _NAME.split(text.strip()), {f"v{i}": name for i, name in enumerate(_NAME.findall(text))}
    if not all(map(_OTHER.fullmatch, others)):
        return None
    code = "".join(map("".join, zip(others, [*names, ""])))
    try:
        term = _convert(ast.parse(code, mode="eval").body, names)
    except (SyntaxError, RecursionError, MemoryError):
        return None
    return term if isinstance(term, Operation) and any(True for _ in symbols_of(term)) else None


def symbols_of(term: Term) -> Iterator[str]:
    """Yield the symbols of an expression from left to right, with repetitions."""
    if isinstance(term, str):
        yield term
    elif isinstance(term, Operation):
        for operand in term.operands:
            yield from symbols_of(operand)


def evaluate(term: Term, sizes: Mapping[str, int]) -> int:
    """Return the size that an expression gives; raises NoSizeError for a negative or fractional one.

    >>> evaluate(parse_size("floor(seq/2) + 1"), {"seq": 7})
    4
    """
    value = _evaluate_exactly(term, sizes)
    if value.denominator != 1 or value < 0:
        raise NoSizeError(f"it would be {float(value):g}")
    return int(value)


def _evaluate_exactly(term: Term, sizes: Mapping[str, int]) -> Fraction:
    """Return the value of an expression; raises NoSizeError for a division by zero and a value that is too large."""
    if not isinstance(term, Operation):
        return Fraction(int(sizes[term]) if isinstance(term, str) else term)
    operands = [_evaluate_exactly(operand, sizes) for operand in term.operands]
    try:
        function = _OPERATORS[term.name] if term.name in _OPERATORS else _FUNCTIONS[term.name][0]
        value = function(*operands)
    except ZeroDivisionError:
        raise NoSizeError("it divides by zero") from None
    if abs(value) > _MAX_MAGNITUDE:
        raise NoSizeError("it is too large")
    return value


def _convert(node: ast.AST, names: Mapping[str, str]) -> Term | None:
    """Return the term of a node of Python's grammar; None if expressions of sizes do not have it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.UnaryOp):
        operand = _convert(node.operand, names)
        return operand if operand is None or isinstance(node.op, ast.UAdd) else Operation("-", (0, operand))
    if isinstance(node, ast.BinOp) and not (isinstance(node.op, ast.Pow) and isinstance(node.right, ast.UnaryOp)):
        name, parts = _SIGNS[type(node.op)], [node.left, node.right]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        name, parts = names[node.func.id].lower(), node.args
        if name not in _FUNCTIONS or _FUNCTIONS[name][1] not in (0, len(parts)) or not parts:
            return None
    else:
        return None
    operands = tuple(operand for part in parts if (operand := _convert(part, names)) is not None)
    return Operation(name, operands) if len(operands) == len(parts) else None


def complete_sizes(names: Iterable[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return `sizes` and all sizes of dimensions with these names that follow from them.

    `past + seq` follows from `past` and `seq`; `past` follows from the other two. Raises NoSizeError naming a
    dimension whose sizes contradict each other. Linear in the length of all names.

    >>> complete_sizes(["past + seq"], {"past": 5, "seq": 1})["past + seq"]
    6
    """
    terms = {name: term for name in dict.fromkeys((*names, *sizes)) if (term := parse_size(name)) is not None}
    symbols = ((name, dict.fromkeys(symbols_of(term))) for name, term in terms.items())
    names_by_symbol = group_pairs((symbol, name) for name, own in symbols for symbol in own)
    result, waiting = dict(sizes), deque(terms)
    while waiting:
        name = waiting.popleft()
        unknown = [symbol for symbol in dict.fromkeys(symbols_of(terms[name])) if symbol not in result]
        if not unknown:
            _derive_size(name, terms[name], result)
        elif len(unknown) == 1 and name in result:
            size = _solve(name, terms[name], unknown[0], result)
            if size is not None:
                result[unknown[0]] = size
                waiting.extend(names_by_symbol[unknown[0]])
    return result


def drop_derived_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes that do not follow from the others.

    >>> drop_derived_sizes({"past": 5, "seq": 1, "past + seq": 6})
    {'past': 5, 'seq': 1}
    """
    return {
        name: size
        for name, size in sizes.items()
        if (term := parse_size(name)) is None or any(symbol not in sizes for symbol in symbols_of(term))
    }


def _derive_size(name: str, term: Term, sizes: dict[str, int]) -> None:
    """Store the size that an expression gives; raises NoSizeError if it gives none, or the dimension has another."""
    try:
        size = evaluate(term, sizes)
    except NoSizeError as problem:
        symbols = _format_sizes(term, sizes)
        raise NoSizeError(f"dimension {name!r} cannot be computed from {symbols}: {problem}") from None
    if sizes.setdefault(name, size) != size:
        raise NoSizeError(f"dimension {name!r} is {sizes[name]}, and {size} by {_format_sizes(term, sizes)}")


def _format_sizes(term: Term, sizes: Mapping[str, int]) -> str:
    """Return the known sizes of an expression's symbols as a text: `past=5, seq=1`."""
    return ", ".join(f"{symbol}={sizes[symbol]}" for symbol in dict.fromkeys(symbols_of(term)) if symbol in sizes)


def _solve(name: str, term: Term, symbol: str, sizes: Mapping[str, int]) -> int | None:
    """Return the size of the one unknown symbol of an expression; None if it is not linear in it."""
    if not _is_linear(term):
        return None
    try:
        zero, one, two = (_evaluate_exactly(term, {**sizes, symbol: size}) for size in (0, 1, 2))
    except NoSizeError:
        return None
    if one == zero or two - one != one - zero:  # constant, or not linear
        return None
    size = (sizes[name] - zero) / (one - zero)
    if size.denominator != 1 or not 0 <= size <= _MAX_MAGNITUDE:
        known = _format_sizes(term, sizes)
        raise NoSizeError(f"dimension {name!r} cannot be {sizes[name]}" + (f" with {known}" if known else ""))
    return int(size)


def _is_linear(term: Term) -> bool:
    """Return whether an expression has only operators that linear ones have: a necessary condition."""
    return not isinstance(term, Operation) or (term.name in _LINEAR_OPERATORS and all(map(_is_linear, term.operands)))


# ------------------------------------------------------------------------------------------------- dimensions of inputs


def resolve_shapes(inputs: Sequence[Declared], dimensions: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each required input.

    Dimensions named by an expression, `past + seq`, follow from their symbols. Raises FeedError listing the dimensions
    without a size.

    >>> resolve_shapes([Declared("x", "tensor(float)", ("batch", 4))], {"batch": 2})
    {'x': (2, 4)}
    """
    shapes = {item.name: dimension_keys(item) for item in inputs if not item.optional}
    unsized = dict.fromkeys(key for keys in shapes.values() for key, size in keys if size is None)
    sizes = complete_dimensions(unsized, dimensions)
    symbols = (symbol for key in unsized if key not in sizes for symbol in symbols_of_dimension(key))
    if unbound := list(dict.fromkeys(symbol for symbol in symbols if symbol not in sizes)):
        raise _unbound_error(unbound)
    return {name: tuple(sizes[key] if size is None else size for key, size in keys) for name, keys in shapes.items()}


def complete_dimensions(keys: Iterable[str], dimensions: Mapping[str, int]) -> dict[str, int]:
    """Return `dimensions` and all sizes that follow from them; raises FeedError for contradictions.

    >>> complete_dimensions(["past + seq"], {"past": 5, "seq": 1})
    {'past': 5, 'seq': 1, 'past + seq': 6}
    """
    try:
        return complete_sizes(keys, dimensions)
    except NoSizeError as problem:
        hint = "give only the sizes of symbols: those of expressions follow from them"
        raise FeedError("M022", str(problem), where="--shape", hint=hint) from None


def symbols_of_dimension(key: str) -> list[str]:
    """Return the names that determine a dimension's size: its own, or the symbols of its expression.

    >>> symbols_of_dimension("batch"), symbols_of_dimension("past + seq")
    (['batch'], ['past', 'seq'])
    """
    term = parse_size(key)
    return [key] if term is None else list(dict.fromkeys(symbols_of(term)))


def _unbound_error(names: Sequence[str]) -> FeedError:
    """Return the error for dimensions without a size, with an example of how to give them."""
    example = shlex.quote(",".join(f"{name}=1" for name in names[:MAX_LISTED]) + ",..." * (len(names) > MAX_LISTED))
    hint = f"give them, such as --shape {example}, or real inputs with --inputs F.npz"
    return FeedError("M020", f"symbolic dimensions without a value: {format_names(names, quoted=False)}", hint=hint)


def dimensions_of_feeds(feeds: Mapping[str, Any], inputs: Sequence[Declared]) -> dict[str, int]:
    """Return the sizes that arrays give to symbolic dimensions, and those that follow.

    Where a symbol has several sizes, 1 gives way to the other size, as it may be broadcast. Raises FeedError if the
    sizes contradict a dimension that is an expression.

    >>> import numpy as np
    >>> dimensions_of_feeds({"x": np.zeros((2, 4))}, [Declared("x", "tensor(double)", ("batch", 4))])
    {'batch': 2}
    """
    sizes: dict[str, int] = {}
    for item in inputs:
        if item.name in feeds and item.dtype.startswith("tensor(") and item.shape is not None:
            for (key, fixed), size in zip(dimension_keys(item), feeds[item.name].shape):
                if fixed is None and sizes.get(key, 1) == 1:
                    sizes[key] = size
    # A 1 may be broadcast, so that it does not determine the symbols of an expression.
    certain = {key: size for key, size in sizes.items() if size != 1 or parse_size(key) is None}
    try:
        return {**sizes, **complete_sizes(sizes, certain)}
    except NoSizeError as problem:
        raise FeedError("F003", f"the inputs contradict each other: {problem}") from None


def dimension_keys(item: Declared) -> list[tuple[str, int | None]]:
    """Return each dimension as (key by which users give its size, size if known).

    >>> dimension_keys(Declared("x", "tensor(float)", ("batch", None, 4)))
    [('batch', None), ('x.1', None), ('x.2', 4)]
    """
    if not item.dtype.startswith("tensor("):
        return []
    if item.shape is None:
        return [(f"{item.name}.shape", None)]
    return [
        (entry, None) if isinstance(entry, str) else (f"{item.name}.{axis}", entry)
        for axis, entry in enumerate(item.shape)
    ]
