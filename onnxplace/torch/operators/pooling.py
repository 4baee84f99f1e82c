"""Pooling, with its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from onnxplace.torch.operators.products import spread, unconvolve
from onnxplace.torch.operators.table import translates
from onnxplace.torch.values import Argument, Context, Operand, UntranslatableError, count_elements, is_static


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
