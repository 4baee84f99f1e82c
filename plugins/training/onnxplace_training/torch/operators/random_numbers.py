"""Random numbers from counters: equal seeds, steps and sites give equal numbers, on any device and for any placement.

ONNX's own random operators keep a state inside of the session, so that a step could not be repeated. Numbers are
computed with operators on int64 that every provider has, modulo the prime p = 2^31 - 1: products stay below 2^62.

A counter is mixed by rounds of x -> (x + c)^5 mod p, a permutation of the field, as in the cipher MiMC (Albrecht et
al., ASIACRYPT 2016). Mixing each element with several rounds would cost more than the layers around it. So the rows
and the columns of a tensor get mixed numbers r < p and c < 2^29, and the elements get f(r + c), where
f(x) = x * (x^2 mod p + k) mod p: the third power hides the sum.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from onnxplace_training.torch.translation import (
    Argument,
    Context,
    Operand,
    as_dimension,
    count_elements,
    is_static,
    translates,
)

PRIME = 2**31 - 1
# Rounds with other constants: digits of pi, as numbers nobody chose for a purpose.
ROUND_CONSTANTS = (314159265, 1358979323, 846264338)
# Limits of a column's number and of the number added to squares: sums stay below 1.25 * 2^31, products below 2^63.
MAX_COLUMN = 2**29
ADDEND = 397448471
# The stream of a site that has the second numbers of pairs; the first is 0.
SECOND = 1
# Sites are this far apart, so that their streams have numbers in between.
STREAMS_PER_SITE = 8


def mix(context: Context, value: Argument) -> str:
    """Return whole numbers below `PRIME`, mixed by rounds of x -> (x + c)^5."""
    prime = context.number(PRIME, torch.int64)
    name = context.read(value)
    for constant in ROUND_CONSTANTS:
        shifted = context.emit("Mod", context.emit("Add", name, context.number(constant, torch.int64)), prime)
        square = context.emit("Mod", context.emit("Mul", shifted, shifted), prime)
        fourth = context.emit("Mod", context.emit("Mul", square, square), prime)
        name = context.emit("Mod", context.emit("Mul", fourth, shifted), prime)
    return name


def mix_seed(context: Context, seed: str, step: str, micro_batch: int) -> str:
    """Return the number from which all streams of a step begin: a scalar of int64."""
    prime = context.number(PRIME, torch.int64)
    name = mix(context, context.emit("Mod", seed, prime))
    name = mix(context, context.emit("Add", name, context.emit("Mod", step, prime)))
    return mix(context, context.emit("Add", name, context.number(micro_batch, torch.int64)))


def draw_integers(context: Context, shape: tuple[Argument, ...], site: int, stream: int = 0) -> str:
    """Return whole numbers, uniform in [0, PRIME), in a shape."""
    columns = as_dimension(shape[-1]) if shape else 1
    width = columns if isinstance(columns, int) else 1
    key = context.emit("Add", context.seed(), context.number(site * STREAMS_PER_SITE + stream, torch.int64))
    base = mix(context, key)
    rows = mix(context, context.emit("Add", base, count_rows(context, shape, width)))
    row = context.emit("Unsqueeze", rows, context.integers([1]))
    offsets = context.builder.constant(np.arange(width, dtype=np.int64) * 2 + 2**30)
    mixed_columns = mix(context, context.emit("Add", base, offsets))
    column = context.emit("Mod", mixed_columns, context.number(MAX_COLUMN, torch.int64))
    prime = context.number(PRIME, torch.int64)
    total = context.emit("Add", row, column)
    square = context.emit("Mod", context.emit("Mul", total, total), prime)
    shifted = context.emit("Add", square, context.number(ADDEND, torch.int64))
    mixed = context.emit("Mod", context.emit("Mul", total, shifted), prime)
    return context.reshape(mixed, shape)


def count_rows(context: Context, shape: tuple[Argument, ...], width: int) -> str:
    """Return the numbers 0, 1, ... for the rows of a tensor, whose last axis is its columns."""
    lead = shape[:-1] if width > 1 or shape[-1:] == (1,) else shape
    if is_static(lead) and (known := count_elements(lead)) <= 65536:
        return context.builder.constant(np.arange(known, dtype=np.int64))
    zero, one = context.number(0, torch.int64), context.number(1, torch.int64)
    return context.emit("Range", zero, context.product(lead), one)


def draw_mask(context: Context, shape: tuple[Argument, ...], probability: float) -> str:
    """Return truth values that are true with a probability."""
    threshold = round(probability * PRIME)
    numbers = draw_integers(context, shape, context.site())
    return context.emit("Less", numbers, context.number(threshold, torch.int64))


def draw_uniform(context: Context, shape: tuple[Argument, ...], site: int, stream: int = 0) -> str:
    """Return numbers in (0, 1), float32, of 24 bits."""
    numbers = draw_integers(context, shape, site, stream)
    coarse = context.emit("Div", numbers, context.number(128, torch.int64))
    middle = context.emit("Add", context.cast(coarse, torch.float32), context.number(0.5, torch.float32))
    return context.emit("Mul", middle, context.number(2.0**-24, torch.float32))


def draw_normal(context: Context, shape: tuple[Argument, ...]) -> str:
    """Return normally distributed numbers, float32 (Box and Muller, 1958)."""
    site = context.site()
    first, second = draw_uniform(context, shape, site), draw_uniform(context, shape, site, SECOND)
    radius = context.emit("Mul", context.emit("Log", first), context.number(-2.0, torch.float32))
    angle = context.emit("Mul", second, context.number(2 * math.pi, torch.float32))
    return context.emit("Mul", context.emit("Sqrt", radius), context.emit("Cos", angle))


@translates("native_dropout.default")
def _native_dropout(context: Context, value: Operand, probability: float, train: bool | None) -> list[Argument]:
    if train is False or probability == 0:
        return [value, context.fill(value.shape, True, torch.bool)]
    mask = draw_mask(context, value.shape, 1 - probability)
    scale = 1 / (1 - probability) if probability < 1 else 0.0
    zero = context.number(0, value.dtype)
    scaled = context.emit("Mul", value, context.number(scale, value.dtype))
    return [context.emit("Where", mask, scaled, zero), mask]


@translates("native_dropout_backward.default")
def _native_dropout_backward(context: Context, gradient: Operand, mask: Operand, scale: float) -> str:
    scaled = context.emit("Mul", gradient, context.number(scale, gradient.dtype))
    return context.emit("Where", mask, scaled, context.number(0, gradient.dtype))


@translates("bernoulli.p")
def _bernoulli(context: Context, value: Operand, probability: float = 0.5, **_: object) -> str:
    return context.cast(draw_mask(context, value.shape, probability), context.result.dtype)


@translates("rand.default", "rand_like.default")
def _rand(context: Context, *_: object, **__: object) -> str:
    return finish(context, draw_uniform(context, tuple(context.result.shape), context.site()))


@translates("uniform.default")
def _uniform(context: Context, value: Operand, low: float = 0.0, high: float = 1.0, **_: object) -> str:
    numbers = draw_uniform(context, value.shape, context.site())
    scaled = context.emit("Mul", numbers, context.number(high - low, torch.float32))
    return finish(context, context.emit("Add", scaled, context.number(low, torch.float32)))


@translates("randn.default", "randn_like.default")
def _randn(context: Context, *_: object, **__: object) -> str:
    return finish(context, draw_normal(context, tuple(context.result.shape)))


@translates("normal_functional.default")
def _normal(context: Context, value: Operand, mean: float = 0.0, deviation: float = 1.0, **_: object) -> str:
    scaled = context.emit("Mul", draw_normal(context, value.shape), context.number(deviation, torch.float32))
    return finish(context, context.emit("Add", scaled, context.number(mean, torch.float32)))


def finish(context: Context, name: str) -> str:
    """Return random floats in the type of the result."""
    return name if context.result.dtype == torch.float32 else context.cast(name, context.result.dtype)
