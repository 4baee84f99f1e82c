"""ATen operators of layers: matrix products, convolutions, pooling, softmax and layer normalisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onnxplace_training.torch.translation import (
    Context,
    Operand,
    UntranslatableError,
    count_elements,
    is_static,
    normalize_axis,
    spread,
    translates,
    translates_each,
)

# ------------------------------------------------------------------------------------- matrix products and convolutions


def untranspose(operand: Operand) -> tuple[Operand, int]:
    """Return what a transposed matrix was, and whether it is transposed, as `Gemm` reads it."""
    if operand.permuted is not None and operand.permuted[1] == (1, 0):
        return operand.permuted[0], 1
    return operand, 0


@translates("mm.default", "bmm.default")
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


# ------------------------------------------------------------------------------------------------------- convolutions


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


@translates("avg_pool2d.default", "avg_pool3d.default")
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


# -------------------------------------------------------------------------------------------- softmax and normalisation


@translates_each({"_softmax.default": "Softmax", "_log_softmax.default": "LogSoftmax"})
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
