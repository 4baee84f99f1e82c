"""ATen operators of layers: matrix products, convolutions, pooling, softmax and normalisation, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from onnxplace.torch.translation import (
    Argument,
    Context,
    Operand,
    UntranslatableError,
    count_elements,
    is_static,
    normalize_axis,
    translates,
    translates_each,
)

# ------------------------------------------------------------------------------------- matrix products and convolutions


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


# -------------------------------------------------------------------------------------------------------------- pooling


def require_fixed_axes(value: Operand, count: int) -> list[int]:
    """Return the sizes of the pooled axes; raises `UntranslatableError` if they are not known."""
    sizes = value.shape[value.rank - count :]
    if not is_static(sizes):
        raise UntranslatableError("pooling over an axis of unknown size; try fixed shapes")
    return [int(size) for size in sizes]


def with_batch(context: Context, value: Operand, count: int) -> Operand:
    """Return a value with a batch axis; pooling in torch also takes a single sample."""
    if value.rank == count + 2:
        return value
    shape = (1, *value.shape)
    return Operand(context.emit("Unsqueeze", value, context.integers([0])), value.dtype, shape)


def without_batch(context: Context, name: str, original: Operand, count: int) -> str:
    """Undo `with_batch`."""
    return name if original.rank == count + 2 else context.emit("Squeeze", name, context.integers([0]))


@translates("max_pool2d_with_indices.default", "max_pool3d_with_indices.default")
def _max_pool(
    context: Context,
    value: Operand,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> list[str]:
    count = context.result[0].dim() - 2 if len(kernel) == 1 else len(kernel)
    sizes = require_fixed_axes(value, count)
    window = spread(kernel, count)
    batched = with_batch(context, value, count)
    pooled, positions = context.add(
        "MaxPool",
        [batched],
        2,
        kernel_shape=window,
        strides=spread(stride, count) if stride else window,
        pads=spread(padding, count) * 2,
        dilations=spread(dilation, count),
        ceil_mode=int(ceil_mode),
    )
    # ONNX counts positions in the whole tensor, torch in each plane.
    in_plane = context.emit("Mod", positions, context.number(count_elements(sizes), torch.int64))
    results = [without_batch(context, name, value, count) for name in (pooled, in_plane)]
    context.positions[results[1]] = positions
    return results


@translates("max_pool2d_with_indices_backward.default", "max_pool3d_with_indices_backward.default")
def _max_pool_backward(
    context: Context,
    gradient: Operand,
    value: Operand,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Operand,
) -> str:
    positions = context.positions[indices.name]
    step = stride or kernel
    # Windows without overlap write each element at most once.
    overlap = any(a < b for a, b in zip(step, kernel)) or any(d != 1 for d in dilation)
    flat = context.integers([-1])
    zeros = context.fill(value.shape, 0, value.dtype)
    updates = [context.emit("Reshape", name, flat) for name in (zeros, positions, context.read(gradient))]
    written = context.emit("ScatterElements", *updates, axis=0, reduction="add" if overlap else None)
    return context.reshape(written, value.shape)


@translates("avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default")
def _avg_pool(
    context: Context,
    value: Operand,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> str:
    if divisor_override is not None:
        raise UntranslatableError("average pooling with divisor_override")
    count = len(kernel)
    require_fixed_axes(value, count)
    options = {"strides": spread(stride or kernel, count), "pads": spread(padding, count) * 2}
    pooled = context.emit(
        "AveragePool",
        with_batch(context, value, count),
        kernel_shape=spread(kernel, count),
        ceil_mode=int(ceil_mode),
        count_include_pad=int(count_include_pad),
        **options,
    )
    return without_batch(context, pooled, value, count)


@translates("avg_pool2d_backward.default", "avg_pool3d_backward.default")
def _avg_pool_backward(
    context: Context,
    gradient: Operand,
    value: Operand,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> str:
    count = len(kernel)
    sizes = require_fixed_axes(value, count)
    steps, pads = spread(stride or kernel, count), spread(padding, count)
    geometry = (steps, pads, [1] * count)
    shares = count_covered(sizes, kernel, geometry, ceil_mode, count_include_pad)
    scaled = context.emit("Div", with_batch(context, gradient, count), context.read(shares))
    outputs = gradient.shape[gradient.rank - count :]
    if list(kernel) == steps and not any(pads) and [o * k for o, k in zip(outputs, kernel)] == sizes:
        return without_batch(context, spread_blocks(context, scaled, value, outputs, kernel), value, count)
    channels = value.shape[value.rank - count - 1]
    weight = torch.ones((int(channels), 1, *kernel))
    operand = Operand(scaled, gradient.dtype, (1, channels, *outputs))
    window = Operand("", gradient.dtype, tuple(weight.shape), constant=weight.to(gradient.dtype))
    result = unconvolve(context, operand, window, sizes, geometry, int(channels))
    return without_batch(context, result, value, count)


def count_covered(
    sizes: Sequence[int],
    kernel: Sequence[int],
    geometry: tuple[Sequence[int], Sequence[int], Sequence[int]],
    ceil_mode: bool,
    count_include_pad: bool,
) -> np.ndarray:
    """Return by how much each window's sum is divided, in a shape that broadcasts: [1, 1, *outputs]."""
    steps, pads, _ = geometry
    pool = {1: torch.nn.functional.avg_pool1d, 2: torch.nn.functional.avg_pool2d, 3: torch.nn.functional.avg_pool3d}
    ones = torch.ones((1, 1, *sizes), dtype=torch.float64)
    options = (list(kernel), list(steps), list(pads), ceil_mode)
    mean = pool[len(sizes)](ones, *options, count_include_pad)
    # The mean of ones over a window is covered elements by divisor; without padding in the count it is one.
    covered = count_inside(sizes, kernel, steps, pads, list(mean.shape[2:]))
    divisors: np.ndarray = (covered / mean).to(torch.float32).numpy()
    return divisors


def count_inside(
    sizes: Sequence[int], kernel: Sequence[int], steps: Sequence[int], pads: Sequence[int], outputs: Sequence[int]
) -> torch.Tensor:
    """Return how many elements of the input each window covers."""
    total = torch.ones((), dtype=torch.float64)
    for axis, size in enumerate(sizes):
        starts = torch.arange(outputs[axis]) * steps[axis] - pads[axis]
        covered = (starts + kernel[axis]).clamp(max=size) - starts.clamp(min=0)
        shape = [1] * (len(sizes) + 2)
        shape[2 + axis] = -1
        total = total * covered.to(torch.float64).reshape(shape)
    return total


def spread_blocks(
    context: Context, gradient: str, value: Operand, outputs: Sequence[Argument], kernel: Sequence[int]
) -> str:
    """Repeat each element over its window; the windows tile the input."""
    lead = value.shape[: value.rank - len(kernel)]
    narrow = [size for output in outputs for size in (output, 1)]
    wide = [size for length in kernel for size in (1, length)]
    batched = [1, *lead] if len(lead) == 1 else list(lead)
    blocks = context.emit(
        "Expand", context.reshape(gradient, [*batched, *narrow]), context.integers([*[1] * len(batched), *wide])
    )
    sizes = [output * length for output, length in zip(outputs, kernel)]
    return context.reshape(blocks, [*batched, *sizes])


def averaging_matrix(size: int, outputs: int) -> torch.Tensor:
    """Return the matrix [outputs, size] of adaptive average pooling along one axis."""
    matrix = torch.zeros(outputs, size)
    for row in range(outputs):
        start, end = row * size // outputs, -(-(row + 1) * size // outputs)
        matrix[row, start:end] = 1 / (end - start)
    return matrix


def multiply_axes(context: Context, value: Argument, matrices: Sequence[torch.Tensor]) -> str:
    """Multiply the last two axes with a matrix each: rows @ value @ columns^T."""
    rows, columns = matrices
    right = context.emit("MatMul", value, columns.T.contiguous().numpy())
    return context.emit("MatMul", rows.contiguous().numpy(), right)


@translates("_adaptive_avg_pool2d.default")
def _adaptive_avg_pool(context: Context, value: Operand, outputs: Sequence[int]) -> str:
    sizes = require_fixed_axes(value, 2)
    if all(size % output == 0 for size, output in zip(sizes, outputs)):
        window = [size // output for size, output in zip(sizes, outputs)]
        return _avg_pool(context, value, window)
    return multiply_axes(context, value, [averaging_matrix(s, int(o)) for s, o in zip(sizes, outputs)])


@translates("_adaptive_avg_pool2d_backward.default")
def _adaptive_avg_pool_backward(context: Context, gradient: Operand, value: Operand) -> str:
    sizes = require_fixed_axes(value, 2)
    outputs = require_fixed_axes(gradient, 2)
    return multiply_axes(context, gradient, [averaging_matrix(s, o).T for s, o in zip(sizes, outputs)])


def interpolation_matrix(size: int, output: int, align_corners: bool, scale: float | None) -> torch.Tensor:
    """Return the matrix [output, size] of linear interpolation along one axis."""
    line = torch.eye(size)[:, None, :]
    options = {"mode": "linear", "align_corners": align_corners}
    if scale is None:
        return torch.nn.functional.interpolate(line, size=output, **options)[:, 0].T
    return torch.nn.functional.interpolate(line, scale_factor=scale, recompute_scale_factor=False, **options)[:, 0].T


@translates("upsample_bilinear2d.vec")
def _upsample_bilinear(
    context: Context,
    value: Operand,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scales: Sequence[float] | None = None,
) -> str:
    factors = scales or (None, None)
    outputs = context.result.shape[-2:]
    pairs = zip(require_fixed_axes(value, 2), outputs, factors)
    return multiply_axes(context, value, [interpolation_matrix(s, int(o), align_corners, f) for s, o, f in pairs])


@translates("upsample_bilinear2d_backward.default")
def _upsample_bilinear_backward(
    context: Context,
    gradient: Operand,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scale_height: float | None = None,
    scale_width: float | None = None,
) -> str:
    triples = zip(input_size[-2:], output_size, (scale_height, scale_width))
    matrices = [interpolation_matrix(int(s), int(o), align_corners, f).T for s, o, f in triples]
    return multiply_axes(context, gradient, matrices)


# -------------------------------------------------------------------------------------------- softmax and normalisation


@translates_each({
    "_softmax.default": "Softmax", "softmax.int": "Softmax",
    "_log_softmax.default": "LogSoftmax", "log_softmax.int": "LogSoftmax",
})  # fmt: skip
def _softmax(context: Context, operator: str, value: Operand, axis: int, *_: object) -> str:
    return context.emit(operator, context.cast(value, context.result.dtype), axis=normalize_axis(axis, value.rank))


@translates("native_layer_norm.default")
def _layer_norm(
    context: Context,
    value: Operand,
    normalized_shape: Sequence[int],
    weight: Operand | None,
    bias: Operand | None,
    epsilon: float,
) -> list[str]:
    scale = context.builder.constant(torch.ones(list(normalized_shape)).numpy()) if weight is None else weight
    inputs = [value, context.cast(scale, value.dtype) if weight is None else scale, *([] if bias is None else [bias])]
    return context.add("LayerNormalization", inputs, 3, axis=-len(normalized_shape), epsilon=float(epsilon))


def reduce_mean(context: Context, value: Argument, axes: Sequence[int]) -> str:
    """Return the mean over axes, which stay with size one."""
    return context.emit("ReduceMean", value, context.integers(axes), keepdims=1)


def normalize(
    context: Context, value: Operand, mean: str, inverse: str, weight: Operand | None, bias: Operand | None
) -> str:
    """Return (value - mean) * inverse * weight + bias along the channels, axis 1."""
    # Small numbers first: the whole value is multiplied once.
    scale = apply_affine(context, inverse, value.rank, weight, None)
    result = context.emit("Mul", context.emit("Sub", value, mean), scale)
    return apply_affine(context, result, value.rank, None, bias)


def apply_affine(context: Context, value: str, rank: int, weight: Operand | None, bias: Operand | None) -> str:
    """Return value * weight + bias along the channels, axis 1."""
    column = context.integers([1, -1, *[1] * (rank - 2)])
    for operator, factor in (("Mul", weight), ("Add", bias)):
        if factor is not None:
            value = context.emit(operator, value, context.emit("Reshape", factor, column))
    return value


def compute_statistics(context: Context, value: Operand, epsilon: float) -> tuple[str, str, str]:
    """Return mean, variance and the inverse of the deviation of each channel, in a shape that broadcasts."""
    axes = [0, *range(2, value.rank)]
    mean = reduce_mean(context, value, axes)
    centered = context.emit("Sub", value, mean)
    variance = reduce_mean(context, context.emit("Mul", centered, centered), axes)
    return mean, variance, invert_deviation(context, variance, epsilon)


def invert_deviation(context: Context, variance: str, epsilon: float) -> str:
    """Return 1 / sqrt(variance + epsilon)."""
    shifted = context.emit("Add", variance, context.number(epsilon, torch.float32))
    return context.emit("Reciprocal", context.emit("Sqrt", shifted))


@translates("_native_batch_norm_legit_functional.default")
def _batch_norm(
    context: Context,
    value: Operand,
    weight: Operand | None,
    bias: Operand | None,
    running_mean: Operand,
    running_variance: Operand,
    training: bool,
    momentum: float,
    epsilon: float,
) -> list[Argument]:
    flat = context.integers([-1])
    if not training:
        results = _normalize_with_running(context, value, weight, bias, running_mean, running_variance, epsilon)
        return [*results, running_mean, running_variance]
    mean, variance, inverse = compute_statistics(context, value, epsilon)
    result = normalize(context, value, mean, inverse, weight, bias)
    mean, variance, inverse = (context.emit("Reshape", name, flat) for name in (mean, variance, inverse))
    # Running variances are unbiased: n / (n - 1) times the variance that normalises.
    count = count_samples(context, value)
    one = context.number(1.0, torch.float32)
    unbiased = context.emit("Mul", variance, context.emit("Div", count, context.emit("Sub", count, one)))
    updated = [
        update_running(context, *pair, momentum) for pair in ((running_mean, mean), (running_variance, unbiased))
    ]
    return [result, mean, inverse, *updated]


def count_samples(context: Context, value: Operand) -> str:
    """Return over how many elements each channel's statistics are, as float32."""
    sizes = [size for index, size in enumerate(value.shape) if index != 1]
    if is_static(sizes):
        return context.number(float(count_elements(sizes)), torch.float32)
    return context.cast(context.product(sizes), torch.float32)


def update_running(context: Context, running: Operand, current: str, momentum: float) -> str:
    """Return the running statistic after one more batch."""
    old = context.emit("Mul", running, context.number(1 - momentum, torch.float32))
    return context.emit("Add", old, context.emit("Mul", current, context.number(momentum, torch.float32)))


def _normalize_with_running(
    context: Context,
    value: Operand,
    weight: Operand | None,
    bias: Operand | None,
    running_mean: Operand,
    running_variance: Operand,
    epsilon: float,
) -> list[str]:
    column = context.integers([1, -1, *[1] * (value.rank - 2)])
    mean = context.emit("Reshape", running_mean, column)
    inverse = context.emit("Reshape", invert_deviation(context, context.read(running_variance), epsilon), column)
    result = normalize(context, value, mean, inverse, weight, bias)
    empty = context.builder.constant(torch.zeros(0).numpy())
    return [result, empty, empty]


@translates("_native_batch_norm_legit_no_training.default")
def _batch_norm_evaluation(
    context: Context,
    value: Operand,
    weight: Operand | None,
    bias: Operand | None,
    running_mean: Operand,
    running_variance: Operand,
    momentum: float,
    epsilon: float,
) -> list[str]:
    return _normalize_with_running(context, value, weight, bias, running_mean, running_variance, epsilon)


@translates("_native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    context: Context,
    value: Operand,
    weight: Operand | None,
    bias: Operand | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> list[str]:
    mean, _, inverse = compute_statistics(context, value, epsilon)
    flat = context.integers([-1])
    result = normalize(context, value, mean, inverse, weight, bias)
    return [result, context.emit("Reshape", mean, flat), context.emit("Reshape", inverse, flat)]


@translates("native_group_norm.default")
def _group_norm(
    context: Context,
    value: Operand,
    weight: Operand | None,
    bias: Operand | None,
    samples: Argument,
    channels: int,
    size: Argument,
    groups: int,
    epsilon: float,
) -> list[str]:
    grouped = context.emit("Reshape", value, context.integers([0, groups, -1]))
    mean = reduce_mean(context, grouped, [2])
    centered = context.emit("Sub", grouped, mean)
    inverse = invert_deviation(context, reduce_mean(context, context.emit("Mul", centered, centered), [2]), epsilon)
    result = context.reshape(context.emit("Mul", centered, inverse), value.shape)
    result = apply_affine(context, result, value.rank, weight, bias)
    last = context.integers([2])
    return [result, context.emit("Squeeze", mean, last), context.emit("Squeeze", inverse, last)]
