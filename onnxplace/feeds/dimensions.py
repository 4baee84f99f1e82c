"""Sizes of symbolic dimensions: given, read off arrays, or computed from others, as in `past + seq` or `floor(s0/2)`.

An expression is parsed by recursive descent, with limits on length and depth. It is evaluated by exact arithmetic with
a limit on magnitude, and never executed.
"""

from __future__ import annotations

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

# ---------------------------------------------------------------------------------------------------------- expressions


# No array of numpy has more axes, and no dimension of a model that runs is larger.
MAX_RANK, MAX_DIMENSION = 64, (1 << 31) - 1
# Exporters write shorter expressions with fewer nested parentheses; anything else is only a name.
MAX_LENGTH = 256
MAX_DEPTH = 32
# Sizes have 64 bits; larger results are refused, and so are exponents that surely lead to them.
_MAX_MAGNITUDE = 1 << 63
_MAX_EXPONENT = 64

# A hyphen without spaces belongs to the name, as in `seq-len`: exporters put spaces around a minus.
_TOKEN = re.compile(r"\s*(?:(?P<number>\d+)|(?P<name>[^\W\d][\w.]*(?:-[\w.]+)*)|(?P<sign>//|\*\*|[-+*/%(),]))")


class NoSizeError(ValueError):
    """Contradictory sizes, or an expression that gives no size; the message does not name a place."""


@dataclass(frozen=True)
class Number:
    """A whole number."""

    value: int


@dataclass(frozen=True)
class Symbol:
    """A name whose size the user gives."""

    name: str


@dataclass(frozen=True)
class Operation:
    """An operator or function and its operands."""

    name: str
    operands: tuple[Number | Symbol | Operation, ...]


Term = Number | Symbol | Operation


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
# Lower-case name -> (function, number of operands; 0 for one or more), as sympy, torch and ONNX Runtime write them.
_FUNCTIONS: dict[str, tuple[Callable[..., Fraction], int]] = {
    "floor": (lambda a: Fraction(math.floor(a)), 1),
    "ceil": (lambda a: Fraction(math.ceil(a)), 1),
    "ceiling": (lambda a: Fraction(math.ceil(a)), 1),
    "max": (max, 0),
    "min": (min, 0),
    "mod": (_OPERATORS["%"], 2),
    "pythonmod": (_OPERATORS["%"], 2),
    "floordiv": (_OPERATORS["//"], 2),
    "cleandiv": (_OPERATORS["//"], 2),
    "inttruediv": (_OPERATORS["/"], 2),
    "floortoint": (lambda a: Fraction(math.floor(a)), 1),
    "ceiltoint": (lambda a: Fraction(math.ceil(a)), 1),
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
    try:
        term = _Parser(text).parse()
    except _NotAnExpressionError:
        return None
    return term if isinstance(term, Operation) and any(True for _ in symbols_of(term)) else None


def symbols_of(term: Term) -> Iterator[str]:
    """Yield the symbols of an expression from left to right, with repetitions."""
    if isinstance(term, Symbol):
        yield term.name
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
    if isinstance(term, Number):
        return Fraction(term.value)
    if isinstance(term, Symbol):
        return Fraction(int(sizes[term.name]))
    operands = [_evaluate_exactly(operand, sizes) for operand in term.operands]
    try:
        function = _OPERATORS[term.name] if term.name in _OPERATORS else _FUNCTIONS[term.name][0]
        value = function(*operands)
    except ZeroDivisionError:
        raise NoSizeError("it divides by zero") from None
    if abs(value) > _MAX_MAGNITUDE:
        raise NoSizeError("it is too large")
    return value


class _NotAnExpressionError(Exception):
    """The text is only a name."""


class _Parser:
    """Recursive descent: sums of products of powers of numbers, symbols, calls and parentheses."""

    def __init__(self, text: str) -> None:
        self._tokens = list(self._split(text.rstrip()))
        self._depth = 0

    @staticmethod
    def _split(text: str) -> Iterator[tuple[str, str]]:
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise _NotAnExpressionError
            yield match.lastgroup or "", match[match.lastgroup or 0]
            position = match.end()

    def parse(self) -> Term:
        self._tokens.reverse()
        term = self._parse_sum()
        if self._tokens:
            raise _NotAnExpressionError
        return term

    def _take_sign(self, signs: Sequence[str]) -> str:
        """Consume and return the next token if it is one of these signs; else return an empty text."""
        if self._tokens and self._tokens[-1][0] == "sign" and self._tokens[-1][1] in signs:
            return self._tokens.pop()[1]
        return ""

    def _parse_sum(self) -> Term:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _NotAnExpressionError
        term = self._parse_product()
        while sign := self._take_sign(("+", "-")):
            term = Operation(sign, (term, self._parse_product()))
        self._depth -= 1
        return term

    def _parse_product(self) -> Term:
        term = self._parse_signed()
        while sign := self._take_sign(("*", "/", "//", "%")):
            term = Operation(sign, (term, self._parse_signed()))
        return term

    def _parse_signed(self) -> Term:
        signs = 0
        while sign := self._take_sign(("+", "-")):
            signs += sign == "-"
        term = self._parse_atom()
        if self._take_sign(("**",)):
            term = Operation("**", (term, self._parse_atom()))
        return Operation("-", (Number(0), term)) if signs % 2 else term

    def _parse_atom(self) -> Term:
        if self._take_sign(("(",)):
            return self._close(self._parse_sum())
        if not self._tokens:
            raise _NotAnExpressionError
        kind, text = self._tokens.pop()
        if kind == "number":
            return Number(int(text))
        if kind != "name":
            raise _NotAnExpressionError
        return self._parse_call(text.lower()) if self._take_sign(("(",)) else Symbol(text)

    def _close(self, term: Term) -> Term:
        """Consume a closing parenthesis, and return the term before it."""
        if not self._take_sign((")",)):
            raise _NotAnExpressionError
        return term

    def _parse_call(self, name: str) -> Term:
        operands = [self._parse_sum()]
        while self._take_sign((",",)):
            operands.append(self._parse_sum())
        if name not in _FUNCTIONS or _FUNCTIONS[name][1] not in (0, len(operands)):
            raise _NotAnExpressionError
        return self._close(Operation(name, tuple(operands)))


def complete_sizes(names: Iterable[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return `sizes` and all sizes of dimensions with these names that follow from them.

    `past + seq` follows from `past` and `seq`; `past` follows from the other two. Raises NoSizeError naming a
    dimension whose sizes contradict each other. Linear in the length of all names.

    >>> complete_sizes(["past + seq"], {"past": 5, "seq": 1})["past + seq"]
    6
    """
    terms = {name: term for name in dict.fromkeys((*names, *sizes)) if (term := parse_size(name)) is not None}
    names_by_symbol: dict[str, list[str]] = {}
    for name, term in terms.items():
        for symbol in dict.fromkeys(symbols_of(term)):
            names_by_symbol.setdefault(symbol, []).append(name)
    result, waiting = dict(sizes), deque(terms)
    while waiting:
        name = waiting.popleft()
        unknown = [symbol for symbol in dict.fromkeys(symbols_of(terms[name])) if symbol not in result]
        if not unknown:
            _store_size(name, _evaluate_named(name, terms[name], result), result)
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
    terms = {name: parse_size(name) for name in sizes}
    return {
        name: size
        for name, size in sizes.items()
        if (term := terms[name]) is None or any(symbol not in sizes for symbol in symbols_of(term))
    }


def _evaluate_named(name: str, term: Term, sizes: Mapping[str, int]) -> int:
    """Return the size that an expression gives; raises NoSizeError naming the dimension."""
    try:
        return evaluate(term, sizes)
    except NoSizeError as problem:
        raise NoSizeError(
            f"dimension {name!r} cannot be computed from {_format_sizes(term, sizes)}: {problem}"
        ) from None


def _store_size(name: str, size: int, sizes: dict[str, int]) -> None:
    """Store a computed size; raises NoSizeError if the dimension has another one."""
    if sizes.setdefault(name, size) != size:
        symbols = _format_sizes(parse_size(name) or Symbol(name), sizes)
        raise NoSizeError(f"dimension {name!r} is {sizes[name]}, and {size} by {symbols}")


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
        raise FeedError("F005", f"the inputs contradict each other: {problem}") from None


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
