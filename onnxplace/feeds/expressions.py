"""Sizes that follow from other sizes: dimensions that exporters name `past + seq`, `2*batch` or `floor(s0/2)`.

Such a name is an integer expression of symbols. It is parsed here, never executed: a recursive descent with limits on
length and depth, and exact arithmetic with a limit on magnitude.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

# No tensor of numpy has more axes, and no dimension of a model that runs is larger.
MAX_RANK, MAX_DIMENSION = 64, (1 << 31) - 1
# Longer names than exporters write, and more parentheses, are names and nothing else.
MAX_LENGTH = 256
MAX_DEPTH = 32
# Sizes are counted with 64 bits; beyond that there is nothing to compute.
_MAX_MAGNITUDE = 1 << 63
_MAX_EXPONENT = 64

# A hyphen without spaces belongs to the name, as in `seq-len`: exporters put spaces around a minus.
_TOKEN = re.compile(r"\s*(?:(?P<number>\d+)|(?P<name>[^\W\d][\w.]*(?:-[\w.]+)*)|(?P<sign>//|\*\*|[-+*/%(),]))")


class NoSizeError(ValueError):
    """Sizes that contradict each other, or an expression that is no size for them; says which, without a place."""


@dataclass(frozen=True)
class Number:
    """A whole number."""

    value: int


@dataclass(frozen=True)
class Symbol:
    """A name whose size is given from outside."""

    name: str


@dataclass(frozen=True)
class Operation:
    """An operator or function and its operands."""

    name: str
    operands: tuple[Number | Symbol | Operation, ...]


Term = Number | Symbol | Operation


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or not 0 <= exponent <= _MAX_EXPONENT:
        raise NoSizeError(f"an exponent of {exponent}")
    return base ** int(exponent)


_OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: Fraction(a // b),
    "%": lambda a, b: a % b,
    "**": _power,
}
# Lower-case name -> (function, operands it takes; 0 for one or more). As sympy, torch and ONNX Runtime write them.
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
_LINEAR = frozenset("+-*/")


@lru_cache(maxsize=4096)
def parse_size(text: str) -> Operation | None:
    """Return the expression that the name of a dimension is; None for a name that is only a name.

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
    """Yield the symbols of an expression from left to right; may repeat."""
    if isinstance(term, Symbol):
        yield term.name
    elif isinstance(term, Operation):
        for operand in term.operands:
            yield from symbols_of(operand)


def evaluate(term: Term, sizes: Mapping[str, int]) -> int:
    """Return the size that an expression has where all its symbols have one; raises NoSizeError if it is none."""
    value = _exact(term, sizes)
    if value.denominator != 1 or value < 0:
        raise NoSizeError(f"it would be {float(value):g}")
    return int(value)


def _exact(term: Term, sizes: Mapping[str, int]) -> Fraction:
    if isinstance(term, Number):
        return Fraction(term.value)
    if isinstance(term, Symbol):
        return Fraction(int(sizes[term.name]))
    operands = [_exact(operand, sizes) for operand in term.operands]
    try:
        value = _OPERATORS[term.name](*operands) if term.name in _OPERATORS else _FUNCTIONS[term.name][0](*operands)
    except ZeroDivisionError:
        raise NoSizeError("it divides by zero") from None
    if abs(value) > _MAX_MAGNITUDE:
        raise NoSizeError("it is too large")
    return value


class _NotAnExpressionError(Exception):
    """The text is a name that means nothing to us."""


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
        term = self._sum()
        if self._tokens:
            raise _NotAnExpressionError
        return term

    def _next_sign(self, signs: Sequence[str]) -> str:
        """Return the next token and go on if it is one of these signs, else the empty string."""
        if self._tokens and self._tokens[-1][0] == "sign" and self._tokens[-1][1] in signs:
            return self._tokens.pop()[1]
        return ""

    def _sum(self) -> Term:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _NotAnExpressionError
        term = self._product()
        while sign := self._next_sign(("+", "-")):
            term = Operation(sign, (term, self._product()))
        self._depth -= 1
        return term

    def _product(self) -> Term:
        term = self._signed()
        while sign := self._next_sign(("*", "/", "//", "%")):
            term = Operation(sign, (term, self._signed()))
        return term

    def _signed(self) -> Term:
        signs = 0
        while sign := self._next_sign(("+", "-")):
            signs += sign == "-"
        term = self._atom()
        if self._next_sign(("**",)):
            term = Operation("**", (term, self._atom()))
        return Operation("-", (Number(0), term)) if signs % 2 else term

    def _atom(self) -> Term:
        if self._next_sign(("(",)):
            return self._closed(self._sum())
        if not self._tokens:
            raise _NotAnExpressionError
        kind, text = self._tokens.pop()
        if kind == "number":
            return Number(int(text))
        if kind != "name":
            raise _NotAnExpressionError
        return self._call(text.lower()) if self._next_sign(("(",)) else Symbol(text)

    def _closed(self, term: Term) -> Term:
        if not self._next_sign((")",)):
            raise _NotAnExpressionError
        return term

    def _call(self, name: str) -> Term:
        operands = [self._sum()]
        while self._next_sign((",",)):
            operands.append(self._sum())
        if name not in _FUNCTIONS or _FUNCTIONS[name][1] not in (0, len(operands)):
            raise _NotAnExpressionError
        return self._closed(Operation(name, tuple(operands)))


def complete_sizes(names: Iterable[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return `sizes` with all that follow from them for dimensions of these names.

    `past + seq` follows from `past` and `seq`; `past` follows from the other two. Raises NoSizeError naming a
    dimension whose sizes contradict each other. Takes time in proportion to the length of all names.
    """
    terms = {name: term for name in dict.fromkeys((*names, *sizes)) if (term := parse_size(name)) is not None}
    readers: dict[str, list[str]] = {}
    for name, term in terms.items():
        for symbol in dict.fromkeys(symbols_of(term)):
            readers.setdefault(symbol, []).append(name)
    result, waiting = dict(sizes), deque(terms)
    while waiting:
        name = waiting.popleft()
        unknown = [symbol for symbol in dict.fromkeys(symbols_of(terms[name])) if symbol not in result]
        if not unknown:
            _require_equal(name, _evaluated(name, terms[name], result), result)
        elif len(unknown) == 1 and name in result:
            size = _solved(name, terms[name], unknown[0], result)
            if size is not None:
                result[unknown[0]] = size
                waiting.extend(readers[unknown[0]])
    return result


def without_derived(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes that do not follow from others among them: `past` and `seq`, but not `past + seq`."""
    terms = {name: parse_size(name) for name in sizes}
    return {
        name: size
        for name, size in sizes.items()
        if (term := terms[name]) is None or any(symbol not in sizes for symbol in symbols_of(term))
    }


def _evaluated(name: str, term: Term, sizes: Mapping[str, int]) -> int:
    try:
        return evaluate(term, sizes)
    except NoSizeError as problem:
        raise NoSizeError(f"dimension {name!r} cannot be computed from {_listed(term, sizes)}: {problem}") from None


def _require_equal(name: str, size: int, sizes: dict[str, int]) -> None:
    if sizes.setdefault(name, size) != size:
        symbols = _listed(parse_size(name) or Symbol(name), sizes)
        raise NoSizeError(f"dimension {name!r} is {sizes[name]}, and {size} by {symbols}")


def _listed(term: Term, sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{symbol}={sizes[symbol]}" for symbol in dict.fromkeys(symbols_of(term)))


def _solved(name: str, term: Term, symbol: str, sizes: Mapping[str, int]) -> int | None:
    """Return the size of the one unknown symbol with which an expression has its value, if it is linear in it."""
    if not _is_linear(term):
        return None
    try:
        zero, one, two = (_exact(term, {**sizes, symbol: size}) for size in (0, 1, 2))
    except NoSizeError:
        return None
    if one == zero or two - one != one - zero:
        return None
    size = (sizes[name] - zero) / (one - zero)
    if size.denominator != 1 or not 0 <= size <= _MAX_MAGNITUDE:
        known = ", ".join(f"{key}={sizes[key]}" for key in dict.fromkeys(symbols_of(term)) if key in sizes)
        raise NoSizeError(f"dimension {name!r} cannot be {sizes[name]}" + (f" with {known}" if known else ""))
    return int(size)


def _is_linear(term: Term) -> bool:
    """Return whether an expression has only operators with which it may be linear; `evaluate` tells the rest."""
    return not isinstance(term, Operation) or (term.name in _LINEAR and all(map(_is_linear, term.operands)))
