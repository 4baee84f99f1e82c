"""Matrix products and convolutions, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from onnxplace.torch.operators.table import translates
from onnxplace.torch.values import Argument, Context, Operand, UntranslatableError, is_static


def untranspose(operand: Operand) -> tuple[Operand, int]:
    """Return what a transposed matrix was, and whether it is transposed, as `Gemm` reads it."""
    if operand.permuted is not None and operand.permuted[1] == (1, 0):
        return operand.permuted[0], 1
    return operand, 0


@translates("mm.default")
def _mm(context: Context, left: Operand, right: Operand) -> str:
    (a, transposes_a), (b, transposes_b) = untranspose(left), untranspose(right)
    if not (transposes_a or transposes_b):
        return context.emit("MatMul", left, right)
    return context.emit("Gemm", a, b, transA=transposes_a or None, transB=transposes_b or None)


@translates("addmm.default")
def _addmm(context: Context, bias: Operand, left: Operand, right: Operand, *, beta: float = 1, alpha: float = 1) -> str:
    (a, transposes_a), (b, transposes_b) = untranspose(left), untranspose(right)
    options = {"transA": transposes_a or None, "transB": transposes_b or None}
    factors = {"beta": None if beta == 1 else float(beta), "alpha": None if alpha == 1 else float(alpha)}
    return context.emit("Gemm", a, b, bias, **options, **factors)


@translates("bmm.default", "matmul.default", "mv.default", "dot.default")
def _matmul(context: Context, left: Operand, right: Operand) -> str:
    return context.emit("MatMul", left, right)


@translates("baddbmm.default")
def _baddbmm(
    context: Context, added: Operand, left: Operand, right: Operand, *, beta: float = 1, alpha: float = 1
) -> str:
    product = context.emit("MatMul", left, right)
    if alpha != 1:
        product = context.emit("Mul", product, context.number(alpha, left.dtype))
    if beta == 0:
        return product
    scaled = context.read(added) if beta == 1 else context.emit("Mul", added, context.number(beta, left.dtype))
    return context.emit("Add", product, scaled)


# ------------------------------------------------------------------------------------------------------- convolutions


def spread(numbers: Sequence[int], count: int) -> list[int]:
    """Return one number for each spatial axis; torch allows one for all."""
    return [int(number) for number in (numbers if len(numbers) == count else list(numbers) * count)]


@translates("convolution.default")
def _convolution(
    context: Context,
    value: Operand,
    weight: Operand,
    bias: Operand | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> str:
    count = weight.rank - 2
    pads = spread(padding, count) * 2
    options = {"strides": spread(stride, count), "pads": pads, "dilations": spread(dilation, count), "group": groups}
    inputs = [value, weight] if bias is None else [value, weight, bias]
    if transposed:
        return context.emit("ConvTranspose", *inputs, output_padding=spread(output_padding, count), **options)
    return context.emit("Conv", *inputs, **options)


@translates("convolution_backward.default")
def _convolution_backward(
    context: Context,
    gradient: Operand,
    value: Operand,
    weight: Operand,
    bias_sizes: Argument,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> list[str]:
    count = weight.rank - 2
    steps, pads, spacing = (spread(numbers, count) for numbers in (stride, padding, dilation))
    if not is_static(weight.shape) or not is_static(value.shape[2:]) or not is_static(gradient.shape[2:]):
        raise UntranslatableError("a convolution over an axis of unknown size; try fixed shapes")
    value_gradient = weight_gradient = bias_gradient = ""
    if wanted[0] and transposed:
        value_gradient = context.emit(
            "Conv", gradient, weight, strides=steps, pads=pads * 2, dilations=spacing, group=groups
        )
    elif wanted[0]:
        value_gradient = unconvolve(context, gradient, weight, value.shape[2:], (steps, pads, spacing), groups)
    if wanted[1]:
        pair = (gradient, value) if transposed else (value, gradient)
        weight_gradient = correlate(context, *pair, weight.shape, (steps, pads, spacing), groups)
    if wanted[2]:
        axes = context.integers([0, *range(2, gradient.rank)])
        bias_gradient = context.emit("ReduceSum", gradient, axes, keepdims=0)
    return [value_gradient, weight_gradient, bias_gradient]


Geometry = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Strides, paddings and dilations of the spatial axes."""


def unconvolve(
    context: Context, gradient: Argument, weight: Argument, sizes: Sequence[int], geometry: Geometry, groups: int
) -> str:
    """Return the gradient of a convolution's input, whose spatial sizes are `sizes`: a transposed convolution."""
    steps, pads, spacing = geometry
    ends, extra = [], []
    for axis, size in enumerate(sizes):
        kernel = spacing[axis] * (int(weight.shape[2 + axis]) - 1) + 1
        covered = (int(gradient.shape[2 + axis]) - 1) * steps[axis] + kernel
        # What the last windows did not cover gets no gradient; what they covered beyond the input is cut off.
        surplus = covered - pads[axis] - int(size)
        ends.append(max(surplus, 0))
        extra.append(max(-surplus, 0))
    options = {"strides": list(steps), "dilations": list(spacing), "group": groups, "pads": [*pads, *ends]}
    shortfall = [min(number, step - 1) for number, step in zip(extra, steps)]
    result = context.emit("ConvTranspose", gradient, weight, output_padding=shortfall, **options)
    if shortfall == extra:
        return result
    missing = [a - b for a, b in zip(extra, shortfall)]
    zero = context.number(0.0, gradient.dtype)
    return context.emit("Pad", result, context.integers([0, 0, *[0] * len(missing), 0, 0, *missing]), zero)


def correlate(
    context: Context,
    value: Operand,
    gradient: Operand,
    weight_shape: Sequence[int],
    geometry: Geometry,
    groups: int,
) -> str:
    """Return the gradient of a convolution's weight: the input convolved with the gradient as kernel.

    Batch and channels change places: the sum over the batch becomes the sum over channels.
    """
    steps, pads, spacing = geometry
    spatial = list(range(2, value.rank))
    swap = [1, 0, *spatial]
    kernel = context.emit("Transpose", gradient, perm=swap)
    channels = int(weight_shape[1])
    if groups == 1:
        source = context.emit("Transpose", value, perm=swap)
    else:
        split = context.reshape(value, [value.shape[0], groups, channels, *value.shape[2:]])
        moved = context.emit("Transpose", split, perm=[2, 1, 0, *(axis + 1 for axis in spatial)])
        source = context.emit("Reshape", moved, context.integers([channels, -1, *map(int, value.shape[2:])]))
    options = {"strides": list(spacing), "dilations": list(steps), "group": groups, "pads": list(pads) * 2}
    result = context.emit("Conv", source, kernel, **options)
    sizes = [int(size) for size in weight_shape[2:]]
    if any(result_size(value, gradient, axis, geometry) != size for axis, size in enumerate(sizes)):
        zeros, ends = context.integers([0] * len(sizes)), context.integers(sizes)
        result = context.emit("Slice", result, zeros, ends, context.integers(spatial))
    return context.emit("Transpose", result, perm=swap)


def result_size(value: Operand, gradient: Operand, axis: int, geometry: Geometry) -> int:
    """Return the size of an axis of the convolution in `correlate`."""
    steps, pads, spacing = geometry
    kernel = steps[axis] * (int(gradient.shape[2 + axis]) - 1) + 1
    return (int(value.shape[2 + axis]) + 2 * pads[axis] - kernel) // spacing[axis] + 1
