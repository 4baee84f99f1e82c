"""How operators are taken apart, while a step is traced, that ONNX lacks or does less exactly: functions of torch.

Most rules are torch's own. Those here are better in ONNX Runtime: gradients of convolutions are convolutions, sums at
positions are sums at flat positions, small numbers are multiplied before large tensors, and nothing cancels. A rule
that returns `NotImplemented` leaves its operator as it is, for `operators` to translate or to refuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions, register_decomposition
from torch.nn import functional

from onnxplace_training.torch.translation import is_static, same_shape, spread

aten = torch.ops.aten

# Rules of torch's that are not among those for its core operators.
MORE = (
    aten.native_group_norm_backward, aten.native_batch_norm_backward, aten._native_batch_norm_legit, aten.addcdiv,
    aten.addcmul, aten.addmv, aten.mv, aten.dot, aten.elu, aten.elu_backward, aten.leaky_relu, aten.leaky_relu_backward,
    aten.hardtanh, aten.hardtanh_backward, aten.glu_backward, aten.reflection_pad1d_backward, aten.reflection_pad1d,
    aten.reflection_pad2d, aten.replication_pad1d, aten.replication_pad2d, aten.linalg_vector_norm,
    aten.upsample_nearest2d, aten.upsample_nearest2d_backward, aten.pixel_shuffle, aten._prelu_kernel,
    aten._prelu_kernel_backward,
)  # fmt: skip
# Operators with a translation that is better than torch's rule.
NATIVE = (aten.native_dropout_backward.default, aten.native_layer_norm.default)
RULES: dict[Any, Callable[..., Any]] = {}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the rule for each operator that is taken apart."""
    table = {**core_aten_decompositions(), **get_decompositions(MORE), **RULES}
    return {operator: rule for operator, rule in table.items() if operator not in NATIVE}


def rule(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function as the rule for operators, with all their overloads."""
    enter: Callable[[Callable[..., Any]], Callable[..., Any]] = register_decomposition(operators, RULES)
    return enter


# --------------------------------------------------------------------------------------------------- element by element


def is_fraction(*values: Any) -> bool:
    """Return whether a result of tensors and numbers has fractions."""
    return any(
        item.is_floating_point() if isinstance(item, Tensor) else isinstance(item, (float, torch.SymFloat))
        for item in values
    )


def as_float(x: Tensor) -> Tensor:
    """Return a tensor in the type of functions that give fractions."""
    return x.to(torch.result_type(x, 0.5))


@rule(aten.log1p)
def _log1p(x: Tensor) -> Tensor:
    """Compute log(1 + x) as x * log(u) / (u - 1) with u = 1 + x, exact for small x (Kahan)."""
    x = as_float(x)
    shifted = x + 1
    difference = shifted - 1
    is_tiny = difference == 0
    scaled = x * (shifted.log() / torch.where(is_tiny, 1.0, difference))
    # Infinity over infinity would be no number.
    return torch.where(is_tiny | (x == math.inf), x, scaled)


@rule(aten.expm1)
def _expm1(x: Tensor) -> Tensor:
    """Compute e^x - 1 as tanh(x / 2) * (e^x + 1), exact for small x; e^x - 1 for large x."""
    x = as_float(x)
    power = x.exp()
    return torch.where(x < 1, (x * 0.5).tanh() * (power + 1), power - 1)


@rule(aten.atan2)
def _atan2(y: Tensor, x: Tensor) -> Tensor:
    """Compute the angle from the quotient; to the left of the vertical axis, half a turn is added or removed."""
    angle = (y / x).atan()
    turned = torch.where(x < 0, torch.where(y < 0, angle - math.pi, angle + math.pi), angle)
    # At the origin, where the quotient is no number, torch gives zero.
    return torch.where((x == 0) & (y == 0), 0.0, turned)


RULES |= {
    aten.erfc.default: lambda x: 1 - x.erf(),
    aten.max.dim: lambda x, axis, keepdim=False: (x.amax(axis, keepdim), x.argmax(axis, keepdim)),
    aten.min.dim: lambda x, axis, keepdim=False: (x.amin(axis, keepdim), x.argmin(axis, keepdim)),
    aten.ne.Tensor: lambda x, y: (x == y).logical_not(),
    aten.ne.Scalar: lambda x, y: (x == y).logical_not(),
    aten.log2.default: lambda x: x.log() * (1 / math.log(2)),
    aten.log10.default: lambda x: x.log() * (1 / math.log(10)),
    aten.rsqrt.default: lambda x: x.sqrt().reciprocal(),
    aten.trunc.default: lambda x: x.sign() * x.abs().floor(),
}
POWERS: dict[float, Callable[[Tensor], Tensor]] = {
    -1: lambda x: x.reciprocal(),
    -0.5: lambda x: x.sqrt().reciprocal(),
    0.5: lambda x: x.sqrt(),
    1: lambda x: x.clone(),
    2: lambda x: x * x,
    3: lambda x: x * x * x,
}


@rule(aten.pow.Tensor_Scalar)
def _power(x: Tensor, exponent: Any) -> Tensor:
    if not isinstance(exponent, (int, float)) or exponent not in POWERS:
        return NotImplemented
    return POWERS[exponent](x.to(torch.result_type(x, exponent)))


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _divide(x: Tensor, y: Any, *, rounding_mode: str | None) -> Tensor:
    if rounding_mode is None:
        return x / y
    if is_fraction(x, y):
        return (x / y).floor() if rounding_mode == "floor" else (x / y).trunc()
    if rounding_mode == "trunc":
        return NotImplemented
    # ONNX rounds to zero; where the remainder is not zero and signs differ, the floor is one less.
    quotient = torch.div(x, y, rounding_mode="trunc")
    return quotient - ((x - quotient * y) * y < 0).to(quotient.dtype)


@rule(aten.remainder)
def _remainder(x: Any, y: Any) -> Tensor:
    # Whole numbers have an operator.
    return x - y * (x / y).floor() if is_fraction(x, y) else NotImplemented


@rule(aten.sort.default, aten.sort.stable)
def _sort(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> tuple[Tensor, Tensor]:
    return tuple(torch.topk(x, x.shape[dim], dim, descending))


# -------------------------------------------------------------------------------------------- statistics, normalisation


@rule(aten.any)
def _any(x: Tensor, axes: Any = (), keepdim: bool = False) -> Tensor:
    return x.to(torch.bool).to(torch.int32).amax(axes if axes is not None else (), keepdim).to(torch.bool)


@rule(aten.var_mean.correction)
def _var_mean(
    x: Tensor, axes: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the variance, in the two passes that do not cancel, and the mean."""
    axes = list(axes or range(x.dim()))
    mean = x.mean(axes, keepdim=True)
    centered = x - mean
    variance = (centered * centered).mean(axes, keepdim)
    if correction is None or correction:
        count = torch.scalar_tensor(math.prod(x.shape[axis] for axis in axes), dtype=x.dtype)
        variance = variance * (count / (count - (1 if correction is None else correction)))
    return variance, mean if keepdim else x.mean(axes)


@rule(aten.var.correction)
def _var(x: Tensor, axes: Sequence[int] | None = None, **options: Any) -> Tensor:
    return torch.var_mean(x, axes, **options)[0]


def apply_affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x * weight + bias along the channels, axis 1."""
    column = [1, -1, *[1] * (x.dim() - 2)]
    x = x if weight is None else x * weight.view(column)
    return x if bias is None else x + bias.view(column)


def normalize(x: Tensor, mean: Tensor, variance: Tensor, affine: tuple[Any, Any], epsilon: float) -> Any:
    """Return x normalised along the channels, and the inverse of the deviation."""
    inverse = (variance + epsilon).sqrt().reciprocal()
    weight, bias = affine
    # Small numbers first: the whole tensor is multiplied once.
    return apply_affine((x - mean) * apply_affine(inverse, weight, None), None, bias), inverse


@rule(aten._native_batch_norm_legit_functional)
def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, training: bool, momentum: float, epsilon: float
) -> tuple[Tensor, ...]:
    if not training:
        return (*_normalize_by_statistics(x, weight, bias, mean, variance, momentum, epsilon), mean, variance)
    axes = [0, *range(2, x.dim())]
    new_variance, new_mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    result, inverse = normalize(x, new_mean, new_variance, (weight, bias), epsilon)
    # Running variances are unbiased: n / (n - 1) times the variance that normalises.
    count = torch.scalar_tensor(math.prod(x.shape[axis] for axis in axes), dtype=torch.float32)
    unbiased = new_variance.view(-1) * (count / (count - 1))
    running = (old * (1 - momentum) + new * momentum for old, new in ((mean, new_mean.view(-1)), (variance, unbiased)))
    return (result, new_mean.view(-1), inverse.view(-1), *running)


@rule(aten._native_batch_norm_legit_no_training)
def _normalize_by_statistics(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, momentum: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    column = [1, -1, *[1] * (x.dim() - 2)]
    result, _ = normalize(x, mean.view(column), variance.view(column), (weight, bias), epsilon)
    return result, x.new_zeros(0), x.new_zeros(0)


@rule(aten.native_group_norm)
def _group_norm(
    x: Tensor, weight: Any, bias: Any, samples: Any, channels: int, size: Any, groups: int, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    grouped = x.reshape(samples, groups, -1)
    variance, mean = torch.var_mean(grouped, [2], correction=0, keepdim=True)
    inverse = (variance + epsilon).sqrt().reciprocal()
    result = apply_affine(((grouped - mean) * inverse).view(x.shape), weight, bias)
    return result, mean.squeeze(2), inverse.squeeze(2)


# -------------------------------------------------------------------------------------------- gradients of convolutions


@rule(aten.convolution_backward)
def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, _: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    __: Any, groups: int, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """Return the gradients of input, weight and bias: convolutions of the gradient with the weight, and the input."""
    count = weight.dim() - 2
    stride, padding, dilation = (spread(numbers, count) for numbers in (stride, padding, dilation))
    if not is_static((*weight.shape, *x.shape[2:], *gradient.shape[2:])):
        return NotImplemented
    x_gradient = weight_gradient = bias_gradient = None
    if wanted[0]:
        # The last windows of a stride may leave elements of the input out, which get no gradient.
        rest = [
            0 if transposed else (size + 2 * pad - space * (kernel - 1) - 1) % step
            for size, kernel, step, pad, space in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation)
        ]
        options = (stride, padding, dilation, not transposed, rest, groups)
        x_gradient = aten.convolution(gradient, weight, None, *options)
    if wanted[1]:
        source, kernel = (gradient, x) if transposed else (x, gradient)
        # Batch and channels change places: the sum over the batch becomes the sum over channels.
        swapped = source.transpose(0, 1)
        if groups > 1:
            split = source.reshape(source.shape[0], groups, weight.shape[1], *source.shape[2:])
            swapped = split.transpose(0, 2).flatten(1, 2)
        options = (dilation, padding, stride, False, [0] * count, groups)
        weight_gradient = aten.convolution(swapped, kernel.transpose(0, 1), None, *options)
        for axis, size in enumerate(weight.shape[2:], 2):
            weight_gradient = weight_gradient.narrow(axis, 0, size)
        weight_gradient = weight_gradient.transpose(0, 1)
    if wanted[2]:
        bias_gradient = gradient.sum([0, *range(2, gradient.dim())])
    return x_gradient, weight_gradient, bias_gradient


# -------------------------------------------------------------------------------------------------------------- pooling


def multiply_axes(x: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Multiply the last axes of a tensor, one after the other, with matrices [size, outputs]."""
    for axis, matrix in zip(range(-len(matrices), 0), matrices):
        moved = x.movedim(axis, -1)
        product = moved.reshape(-1, matrix.shape[0]) @ matrix.to(x.dtype)
        x = product.view(*moved.shape[:-1], matrix.shape[1]).movedim(-1, axis)
    return x


@rule(aten.avg_pool2d_backward, aten.avg_pool3d_backward)
def _avg_pool_backward(
    gradient: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], *options: Any
) -> Tensor:
    count = len(kernel)
    outputs, sizes = gradient.shape[-count:], x.shape[-count:]
    steps, pads = spread(stride or kernel, count), spread(padding, count)
    if not any(pads) and all(n * k == size and k == step for n, k, size, step in zip(outputs, kernel, sizes, steps)):
        # The windows tile the input: each element is repeated over its window.
        narrow = [n for output in outputs for n in (output, 1)]
        wide = [n for pair in zip(outputs, kernel) for n in pair]
        blocks = (gradient * (1 / math.prod(kernel))).reshape(*x.shape[:-count], *narrow)
        return blocks.expand(*x.shape[:-count], *wide).reshape(x.shape)
    # `options` are whether a part of a window is one, and whether padding counts.
    windows = zip(sizes, kernel, steps, pads)
    units = ((torch.eye(size).unsqueeze(1), window) for size, *window in windows)
    matrices = [functional.avg_pool1d(unit, *window, *options[:2]).squeeze(1) for unit, window in units]
    return multiply_axes(gradient, [matrix.t() for matrix in matrices])


def average_adaptively(size: int, outputs: int) -> Tensor:
    """Return the matrix [size, outputs] of adaptive average pooling along one axis."""
    column, positions = torch.arange(outputs), torch.arange(size).unsqueeze(1)
    start, end = column * size // outputs, ((column + 1) * size + outputs - 1) // outputs
    return ((positions >= start) & (positions < end)) / (end - start)


@rule(aten._adaptive_avg_pool2d)
def _adaptive_avg_pool(x: Tensor, outputs: Sequence[int]) -> Tensor:
    pairs = list(zip(x.shape[-2:], outputs))
    if all(size % output == 0 for size, output in pairs):
        return functional.avg_pool2d(x, [size // output for size, output in pairs])
    return multiply_axes(x, [average_adaptively(*pair) for pair in pairs])


@rule(aten._adaptive_avg_pool2d_backward)
def _adaptive_avg_pool_backward(gradient: Tensor, x: Tensor) -> Tensor:
    return multiply_axes(gradient, [average_adaptively(*pair).t() for pair in zip(x.shape[-2:], gradient.shape[-2:])])


# ------------------------------------------------------------------------------------------------- parts and diagonals


@rule(aten.slice_scatter)
def _slice_scatter(
    x: Tensor, source: Tensor, axis: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Tensor:
    source, size = source.to(x.dtype), x.shape[axis]
    if same_shape(source.shape, x.shape):
        return source.clone()
    if not is_static((size, start or 0, source.shape[axis])):
        return NotImplemented
    begin = slice(start, None).indices(size)[0]
    last = begin + step * source.shape[axis]
    if step > 1:
        shape = [1] * x.dim()
        shape[axis] = -1
        return x.scatter(axis, torch.arange(begin, last, step).view(shape).expand(source.shape), source)
    before, after = x.narrow(axis, 0, begin), x.narrow(axis, last, size - last)
    return torch.cat([part for part in (before, source, after) if part.shape[axis]], axis)


@rule(aten.diagonal)
def _diagonal(x: Tensor, offset: int = 0, first: int = 0, second: int = 1) -> Tensor:
    moved, below, above = x.movedim((first, second), (0, 1)), max(-offset, 0), max(offset, 0)
    steps = torch.arange(torch.sym_min(moved.shape[0] - below, moved.shape[1] - above))
    return moved[steps + below, steps + above].movedim(0, -1)


@rule(aten.diagonal_scatter)
def _diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, first: int = 0, second: int = 1) -> Tensor:
    """Write a diagonal: its positions, chosen by a mask, take the source repeated along the second axis."""
    moved, below = x.movedim((first, second), (-2, -1)), max(-offset, 0)
    rows, columns = moved.shape[-2:]
    mask = torch.arange(columns) - torch.arange(rows).unsqueeze(1) == offset
    # The k-th element of the diagonal is in row k, or k - offset: the source, padded, as a column.
    column = torch.constant_pad_nd(source.to(x.dtype), [below, rows - below - source.shape[-1]]).unsqueeze(-1)
    return torch.where(mask, column, moved).movedim((-2, -1), (first, second))


@rule(aten.unfold)
def _unfold(x: Tensor, axis: int, size: int, step: int) -> Tensor:
    """Return windows along an axis, whose elements become the last axis."""
    axis %= x.dim()
    indices = torch.arange(0, x.shape[axis] - size + 1, step).unsqueeze(1) + torch.arange(size)
    return aten.index(x, [*[None] * axis, indices]).movedim(axis + 1, -1)


# ---------------------------------------------------------------------------------------------- positions that are data


def write_rows(target: Tensor, rows: Tensor, updates: Tensor, *, add: bool = True) -> Tensor:
    """Add updates, one for each of `rows`, to these rows of a target [rows, width], or write them there.

    In flat positions: `ScatterND` with a sum, which would be shorter, loses updates of equal rows in ONNX Runtime on
    several threads (measured with 1.32). `ScatterElements` does not, and is twice as fast in one dimension as in two.
    """
    width = target.shape[1]
    positions = (rows.reshape(-1, 1) * width + torch.arange(width)).view(-1)
    write = torch.scatter_add if add else torch.scatter
    return write(target.reshape(-1), 0, positions, updates.reshape(-1)).view(target.shape)


@rule(aten.embedding_dense_backward)
def _embedding_backward(gradient: Tensor, indices: Tensor, count: int, padding: int, scale: bool) -> Tensor:
    if scale:
        return NotImplemented
    if padding >= 0:
        # The row of the padding index gets no gradient.
        gradient = torch.where((indices == padding).unsqueeze(-1), 0.0, gradient)
    width = gradient.shape[-1]
    zeros = torch.zeros((count, width), dtype=gradient.dtype)
    return write_rows(zeros, indices.to(torch.int64), gradient)


def find_rows(x: Tensor, indices: Sequence[Any]) -> tuple[Tensor, list[int], int] | None:
    """Return the indices as one for the indexed axes in one, these axes, and where they go in the result, as in numpy.

    None for a mask, whose result has a size that depends on data.
    """
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    if any(index is not None and index.dtype == torch.bool for index in indices):
        return None
    # Whole numbers modulo the size are not negative.
    parts: list[Any] = [(indices[axis].to(torch.int64) % x.shape[axis], x.shape[axis]) for axis in axes]
    rows, _ = reduce(lambda left, right: (left[0] * right[1] + right[0], right[1]), parts)
    is_adjacent = axes == list(range(axes[0], axes[-1] + 1))
    return rows, axes, axes[0] if is_adjacent else 0


@rule(aten.index)
def _index(x: Tensor, indices: Sequence[Any]) -> Tensor:
    found = find_rows(x, indices)
    if found is None or len(found[1]) == 1:
        return NotImplemented
    rows, axes, place = found
    table = x.movedim(axes, list(range(len(axes)))).flatten(0, len(axes) - 1)
    kept = list(range(rows.dim()))
    return aten.index(table, [rows]).movedim(kept, [axis + place for axis in kept])


@rule(aten.index_put)
def _index_put(x: Tensor, indices: Sequence[Any], source: Tensor, accumulate: bool = False) -> Tensor:
    found = find_rows(x, indices)
    if found is None:
        return NotImplemented
    rows, axes, place = found
    front, kept = list(range(len(axes))), list(range(rows.dim()))
    moved = x.movedim(axes, front)
    rest = moved.shape[len(axes) :]
    updates = source.to(x.dtype).expand(*rest[:place], *rows.shape, *rest[place:])
    updates = updates.movedim([axis + place for axis in kept], kept)
    table = moved.reshape(-1, math.prod(rest))
    written = write_rows(table, rows, updates, add=accumulate)
    return written.view(moved.shape).movedim(front, axes)
