"""Random models of the operators that can be split over devices: products, convolutions, reshapes, reductions.

Their values are small random numbers, so results may differ by rounding. No operation turns a rounding error into a
large one: there are no comparisons of floats, and no divisions by numbers near zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

Dimension = int | str
Shape = tuple[Dimension, ...]
FLOAT, FLOAT16, INT64, INT32, BOOL = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.INT64,
    TensorProto.INT32,
    TensorProto.BOOL,
)
SYMBOLS = ("N", "M", "K", "L")
"""The last two are in wide models alone."""
INPUT_SHAPES: tuple[Shape, ...] = (
    ("N", 6, 8),
    (2, "N", 12),
    (2, 6, 12),
    ("N", "M", 12),
    (6, 8),
    ("N", 12),
    (1, 6, 8, 6),
    ("N", 4, 9, 9),
    ("N", 12, "M"),
    (8, "N"),
    (2, 4, 8, 7),
    (3, 4, 5),
    (12,),
)
WIDTHS = (4, 6, 8, 12)
OTHER_SIZES = ((3, 5), (7, 2), (1, 1), (0, 3), (6, 0), (8, 4), (13, 11))
"""Of the symbols: zero, one, primes, sizes that meet fixed ones, larger and smaller than those to shard for."""
ACTIVATIONS = ("Sigmoid", "Tanh", "Softsign", "Relu")


@dataclass(frozen=True)
class Value:
    """A tensor that nodes can read."""

    name: str
    dtype: int
    shape: Shape
    """Sizes and symbols; names that begin with `?` are sizes that are not tracked."""
    is_weight: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class ShardableModel:
    """A model with inputs at several sizes of its symbols; the first are those to shard it for."""

    proto: ModelProto
    dimensions: tuple[dict[str, int], ...]
    feeds: tuple[dict[str, NDArray[Any]], ...]
    tolerance: float

    def __repr__(self) -> str:
        from onnx import printer

        return f"{printer.to_text(self.proto)}\ndimensions {self.dimensions}"


@dataclass
class Builder:
    """A graph under construction. Each `add_*` draws suitable operands and adds nodes, or does nothing."""

    random: Random
    opset: int
    prefix: str = ""
    nodes: list[NodeProto] = field(default_factory=list)
    initializers: list[TensorProto] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    overridable: list[Value] = field(default_factory=list)
    count: int = 0
    unknown: int = 0
    has_half: bool = False
    needs_elements: bool = False
    is_wide: bool = False
    """Whether layers have two directions with all that these can have, and empty constants are joined."""

    # --- drawing ---

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def one_of(self, options: Sequence[Any]) -> Any:
        return options[self.random.randrange(len(options))]

    def pick(self, is_suitable: Callable[[Value], bool] = lambda _: True, dtype: int = FLOAT) -> Value | None:
        """Return a suitable value, often one of the latest."""
        values = [value for value in self.values if value.dtype == dtype and is_suitable(value)]
        if not values:
            return None
        return self.one_of(values[-4:] if self.chance(0.7) else values)

    def fresh(self) -> str:
        self.count += 1
        return f"{self.prefix}v{self.count}"

    def unknown_size(self) -> str:
        self.unknown += 1
        return f"?{self.prefix}{self.unknown}"

    # --- building ---

    def add(self, op: str, inputs: Sequence[Value | str], shape: Shape, dtype: int = FLOAT, **attributes: Any) -> Value:
        """Add a node with one output."""
        value = Value(self.fresh(), dtype, shape)
        self.node(op, inputs, [value.name], **attributes)
        self.values.append(value)
        return value

    def node(self, op: str, inputs: Sequence[Value | str], outputs: Sequence[str], **attributes: Any) -> None:
        names = [item if isinstance(item, str) else item.name for item in inputs]
        name = f"{self.prefix}n{len(self.nodes)}_{op}"
        self.nodes.append(helper.make_node(op, names, list(outputs), name=name, **attributes))

    def initializer(self, array: NDArray[Any], keep: bool = False) -> Value:
        """Add a weight; `keep` offers it to other nodes too."""
        tensor = numpy_helper.from_array(np.asarray(array), self.fresh())
        self.initializers.append(tensor)
        value = Value(tensor.name, tensor.data_type, tuple(array.shape), is_weight=True)
        if keep:
            self.values.append(value)
        return value

    def weight(self, *shape: int, scale: float = 1.0, keep: bool = False) -> Value:
        """Return a weight, sometimes one that exists already."""
        tied = [value for value in self.values if value.is_weight and value.shape == shape and value.dtype == FLOAT]
        if tied and self.chance(0.4):
            return self.one_of(tied)
        numbers = np.random.default_rng(self.random.randrange(1000)).standard_normal(shape) * scale
        value = self.initializer(numbers.astype(np.float32), keep=keep or self.chance(0.3))
        if not self.prefix and self.chance(0.1):
            self.overridable.append(value)
        return value

    def ints(self, *numbers: int) -> Value:
        return self.initializer(np.array(numbers, np.int64))

    # --- products ---

    def add_matmul(self) -> None:
        value = self.pick(lambda v: v.rank >= 2 and isinstance(v.shape[-1], int))
        if value is None:
            return
        inner, width = int(value.shape[-1]), self.one_of(WIDTHS)
        left = self.chance(0.15) and isinstance(value.shape[-2], int)
        if left:
            rows = int(value.shape[-2])
            weight = self.weight(width, rows, scale=rows**-0.5)
            self.add("MatMul", [weight, value], (*value.shape[:-2], width, inner))
            return
        weight = self.weight(inner, width, scale=inner**-0.5)
        result = self.add("MatMul", [value, weight], (*value.shape[:-1], width))
        if self.chance(0.5):
            bias = self.weight(width)
            self.add("Add", [result, bias] if self.chance(0.5) else [bias, result], result.shape)

    def add_product(self) -> None:
        value = self.pick(lambda v: v.rank >= 2)
        if value is None:
            return
        order = [*range(value.rank - 2), value.rank - 1, value.rank - 2]
        turned = self.add("Transpose", [value], (*value.shape[:-2], value.shape[-1], value.shape[-2]), perm=order)
        squared = self.add("MatMul", [value, turned], (*value.shape[:-1], value.shape[-2]))
        weights = self.add("Softmax", [squared], squared.shape, axis=-1)
        self.add("MatMul", [weights, value], value.shape)

    def add_gemm(self) -> None:
        value = self.pick(lambda v: v.rank == 2 and isinstance(v.shape[1], int))
        if value is None:
            return
        inner, width = int(value.shape[1]), self.one_of(WIDTHS)
        attributes: dict[str, Any] = {}
        weight = self.weight(inner, width, scale=inner**-0.5)
        if self.chance(0.4):
            weight, attributes["transB"] = self.weight(width, inner, scale=inner**-0.5), 1
        if self.chance(0.3):
            attributes |= {"alpha": 0.5, "beta": 2.0}
        inputs: list[Value | str] = [value, weight]
        if self.chance(0.7):
            shapes: list[tuple[int, ...]] = [(width,), (1, width), (1,), ()]
            if isinstance(value.shape[0], int):
                shapes += [(value.shape[0], width), (value.shape[0], 1)]
            inputs.append(self.weight(*self.one_of(shapes)))
        elif self.chance(0.3):
            inputs.append("")
        if self.chance(0.2):
            value = self.add("Transpose", [value], value.shape[::-1], perm=[1, 0])
            inputs[0], attributes["transA"] = value, 1
            self.add("Gemm", inputs, (value.shape[1], width), **attributes)
            return
        self.add("Gemm", inputs, (value.shape[0], width), **attributes)

    def add_einsum(self) -> None:
        value = self.pick(lambda v: v.rank == 3 and isinstance(v.shape[2], int))
        if value is None:
            return
        inner, width = int(value.shape[2]), self.one_of(WIDTHS)
        if self.chance(0.5):
            weight = self.weight(inner, width, scale=inner**-0.5)
            self.add("Einsum", [value, weight], (width, *value.shape[:2]), equation="abc,cd->dab")
        else:
            self.add("Einsum", [value, value], (value.shape[0], inner), equation="abc,abc->ac")

    def add_fused_heads(self) -> None:
        """Add one product for queries, keys and values, whose heads attend; the parts lie one after the other."""
        value = self.pick(lambda v: v.rank == 3 and isinstance(v.shape[2], int))
        if value is None:
            return
        batch, length, width = value.shape
        heads, depth = self.one_of(((2, 2), (3, 2), (4, 3), (6, 1)))
        weight = self.weight(int(width), 3 * heads * depth, scale=int(width) ** -0.5)
        fused = self.add("MatMul", [value, weight], (batch, length, 3 * heads * depth))
        if self.chance(0.5):
            fused = self.add("Add", [fused, self.weight(3 * heads * depth)], fused.shape)
        shape = batch, heads, length, depth
        if self.chance(0.5):
            parted = self.add("Reshape", [fused, self.ints(0, 0, 3, heads, depth)], (batch, length, 3, heads, depth))
            turned = self.add("Transpose", [parted], (3, batch, heads, length, depth), perm=[2, 0, 3, 1, 4])
            q, k, v = (
                self.add("Gather", [turned, self.initializer(np.array(i, np.int64))], shape, axis=0) for i in range(3)
            )
        else:
            parts = [Value(self.fresh(), FLOAT, (batch, length, heads * depth)) for _ in range(3)]
            self.node("Split", [fused, self.ints(*[heads * depth] * 3)], [part.name for part in parts], axis=2)
            q, k, v = (
                self.add(
                    "Transpose",
                    [self.add("Reshape", [part, self.ints(0, 0, heads, depth)], (batch, length, heads, depth))],
                    shape,
                    perm=[0, 2, 1, 3],
                )
                for part in parts
            )
        flipped = self.add("Transpose", [k], (batch, heads, depth, length), perm=[0, 1, 3, 2])
        scores = self.add("MatMul", [q, flipped], (batch, heads, length, length))
        weights = self.add("Softmax", [scores], scores.shape, axis=-1)
        mixed = self.add("MatMul", [weights, v], shape)
        back = self.add("Transpose", [mixed], (batch, length, heads, depth), perm=[0, 2, 1, 3])
        self.add("Reshape", [back, self.ints(0, 0, heads * depth)], (batch, length, heads * depth))

    def add_attention(self) -> None:
        value = self.pick(lambda v: v.rank == 3 and v.shape[2] in (6, 8, 12))
        if value is None or self.opset < 23:
            return
        heads = self.one_of([h for h in (2, 3, 4) if int(value.shape[2]) % h == 0])
        attributes = {"q_num_heads": heads, "kv_num_heads": heads}
        self.add("Attention", [value, value, value], value.shape, is_causal=self.one_of((0, 1)), **attributes)

    def add_integer_product(self) -> None:
        """Quantise whole numbers: rounding errors could change quantised floats by a whole step."""
        value = self.pick(lambda v: v.rank >= 2 and isinstance(v.shape[-1], int), INT64)
        if value is None:
            return
        width = int(value.shape[-1])
        scale = self.initializer(np.array(0.05, np.float32))
        zero = self.initializer(np.array(128, np.uint8))
        clipped = self.add("Cast", [value], value.shape, FLOAT, to=FLOAT)
        quantised = self.add("QuantizeLinear", [clipped, scale, zero], value.shape, TensorProto.UINT8)
        if self.chance(0.4):
            quantised = Value(self.fresh(), TensorProto.UINT8, value.shape)
            scale, zero = Value(self.fresh(), FLOAT, ()), Value(self.fresh(), TensorProto.UINT8, ())
            self.node("DynamicQuantizeLinear", [clipped], [quantised.name, scale.name, zero.name])
        if self.chance(0.5):
            self.add("DequantizeLinear", [quantised, scale, zero], value.shape)
            return
        random = np.random.default_rng(self.random.randrange(99))
        weight = self.initializer(random.integers(0, 255, (width, 6)).astype(np.uint8))
        inputs = [quantised, weight, *self.one_of(([], [zero], [zero, zero]))]
        product = self.add("MatMulInteger", inputs, (*value.shape[:-1], 6), INT32)
        cast = self.add("Cast", [product], product.shape, FLOAT, to=FLOAT)
        self.add("Mul", [cast, self.initializer(np.array(1e-4, np.float32))], product.shape)

    def add_recurrent(self) -> None:
        value = self.pick(lambda v: v.rank == 3 and isinstance(v.shape[2], int) and "?" not in str(v.shape))
        if value is None:
            return
        self.needs_elements = True  # a size that is not known, "?", may be 0
        op, gates = self.one_of((("LSTM", 4), ("GRU", 3), ("RNN", 1)))
        ways, hidden, width = self.one_of((1, 2)), 4, int(value.shape[2])
        inputs: list[Value | str] = [value, self.weight(ways, gates * hidden, width, scale=0.3)]
        inputs.append(self.weight(ways, gates * hidden, hidden, scale=0.3))
        if self.chance(0.5):
            inputs.append(self.weight(ways, 2 * gates * hidden, scale=0.3))
        length, batch, _ = value.shape
        every = Value(self.fresh(), FLOAT, (length, ways, batch, hidden))
        last = Value(self.fresh(), FLOAT, (ways, batch, hidden))
        direction = "forward" if ways == 1 else "bidirectional"
        outputs = self.one_of(([every.name, last.name], [every.name], ["", last.name]))
        attributes = self._widen_recurrent(op, ways, hidden, batch, inputs) if self.is_wide else {}
        self.node(op, inputs, outputs, hidden_size=hidden, direction=direction, **attributes)
        self.values += [item for item in (every, last) if item.name in outputs]
        if self.is_wide and every.name in outputs and self.chance(0.6):
            turned = self.add("Transpose", [every], (length, batch, ways, hidden), perm=[0, 2, 1, 3])
            self.add("Reshape", [turned, self.ints(0, 0, -1)], (length, batch, ways * hidden))

    def _widen_recurrent(
        self, op: str, ways: int, hidden: int, batch: Dimension, inputs: list[Value | str]
    ) -> dict[str, Any]:
        """Add biases, states and peepholes to the inputs of a layer; return further attributes."""
        attributes: dict[str, Any] = {}
        if self.chance(0.5):
            count = {"LSTM": 3, "GRU": 2, "RNN": 1}[op]
            attributes["activations"] = [self.one_of(ACTIVATIONS[:3]) for _ in range(count * ways)]
        if self.chance(0.2):
            attributes["clip"] = 0.7
        if op == "GRU":
            attributes["linear_before_reset"] = self.one_of((0, 1))
        if isinstance(batch, int) and self.chance(0.6):
            inputs += [""] * (5 - len(inputs)) + [self.weight(ways, batch, hidden)]
            if op == "LSTM" and self.chance(0.7):
                inputs.append(self.weight(ways, batch, hidden))
                inputs += [self.weight(ways, 3 * hidden, scale=0.3)] if self.chance(0.5) else []
        return attributes

    def add_empty_part(self) -> None:
        """Join a constant without elements, whose other sizes ONNX Runtime ignores."""
        value = self.pick(lambda v: v.rank >= 2)
        if value is None or not self.is_wide:
            return
        axis = self.random.randrange(value.rank)
        sizes = [size if isinstance(size, int) else self.one_of((1, 2, 4, 6, 8, 12)) for size in value.shape]
        sizes[axis] = 0
        empty = self.initializer(np.zeros(sizes, np.float32))
        self.add("Concat", [value, empty] if self.chance(0.5) else [empty, value], value.shape, axis=axis)

    def add_step(self) -> None:
        """Add one step of a decoder, of one sample."""
        value = self.pick(lambda v: v.rank >= 2 and isinstance(v.shape[-1], int))
        if value is None:
            return
        self.needs_elements = True
        width, (op, gates), hidden = int(value.shape[-1]), self.one_of((("LSTM", 4), ("GRU", 3), ("RNN", 1))), 6
        largest = self.add("ReduceL2", [value], (1,) * value.rank)
        scaled = self.add("Div", [value, self.add("Add", [largest, self.weight(1)], (1,) * value.rank)], value.shape)
        rows = self.add("Reshape", [scaled, self.ints(-1, width)], (self.unknown_size(), width))
        first = self.add("Slice", [rows, self.ints(0), self.ints(1), self.ints(0)], (1, width))
        step = self.add("Reshape", [first, self.ints(1, 1, width)], (1, 1, width))
        inputs: list[Value | str] = [step, self.weight(1, gates * hidden, width, scale=0.3)]
        inputs += [self.weight(1, gates * hidden, hidden, scale=0.3)]
        inputs.append(self.weight(1, 2 * gates * hidden, scale=0.3) if self.chance(0.5) else "")
        inputs += ["", self.weight(1, 1, hidden)] if self.chance(0.8) else []
        last = Value(self.fresh(), FLOAT, (1, 1, hidden))
        attributes = {"linear_before_reset": self.one_of((0, 1, 1))} if op == "GRU" else {}
        self.node(op, inputs, ["", last.name], hidden_size=hidden, **attributes)
        self.values.append(last)

    def add_fourier(self) -> None:
        value = self.pick(lambda v: v.rank >= 2)
        if value is None:
            return
        self.needs_elements = True
        axis = self.random.randrange(value.rank)
        signal = self.add("Unsqueeze", [value, self.ints(-1)], (*value.shape, 1))
        if self.opset < 20:
            self.add("DFT", [signal], (*value.shape, 2), axis=axis)
        else:
            self.add("DFT", [signal, "", self.initializer(np.array(axis, np.int64))], (*value.shape, 2))

    # --- images ---

    def add_transposed_convolution(self) -> None:
        value = self.pick(lambda v: v.rank == 4 and all(isinstance(size, int) for size in v.shape[1:]))
        if value is None:
            return
        n, channels, height, width = value.shape
        groups = self.one_of([g for g in (1, 1, 2) if int(channels) % g == 0])
        weight = self.weight(int(channels), 4 // groups, 2, 2, scale=0.3)
        inputs = [value, weight, self.weight(4)] if self.chance(0.5) else [value, weight]
        shape = (n, 4, 2 * int(height), 2 * int(width))
        self.add("ConvTranspose", inputs, shape, strides=[2, 2], kernel_shape=[2, 2], group=groups)

    def add_convolution(self) -> None:
        value = self.pick(
            lambda v: v.rank in (3, 4) and all(isinstance(size, int) and size > 3 for size in v.shape[1:])
        )
        if value is None:
            return
        spatial, channels = value.rank - 2, int(value.shape[1])
        groups = self.one_of([g for g in (1, 1, 2, channels) if channels % g == 0])
        width = self.one_of((4, 6, 8)) if groups == 1 else groups * self.one_of((1, 2))
        kernel = [self.one_of((1, 2, 3)) for _ in range(spatial)]
        weight = self.weight(width, channels // groups, *kernel, scale=(channels // groups * 4) ** -0.5)
        attributes, sizes = self._geometry(value, kernel)
        inputs = [value, weight, self.weight(width)] if self.chance(0.6) else [value, weight]
        self.add("Conv", inputs, (value.shape[0], width, *sizes), group=groups, **attributes)

    def _geometry(self, value: Value, kernel: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
        spatial = len(kernel)
        strides = [self.one_of((1, 1, 2)) for _ in range(spatial)]
        sizes = [int(size) for size in value.shape[2:]]
        attributes: dict[str, Any] = {"kernel_shape": list(kernel), "strides": strides}
        mode = self.one_of(("NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"))
        if mode == "NOTSET":
            pads = [self.random.randrange(size) for size in (*kernel, *kernel)]
            attributes["pads"] = pads
            results = [
                (size + pads[i] + pads[i + spatial] - kernel[i]) // strides[i] + 1 for i, size in enumerate(sizes)
            ]
        else:
            attributes["auto_pad"] = mode
            if mode == "VALID":
                results = [(size - kernel[i]) // strides[i] + 1 for i, size in enumerate(sizes)]
            else:
                results = [-(-size // strides[i]) for i, size in enumerate(sizes)]
        return attributes, results

    def add_pool(self) -> None:
        value = self.pick(
            lambda v: v.rank in (3, 4) and all(isinstance(size, int) and size > 3 for size in v.shape[1:])
        )
        if value is None:
            return
        op = self.one_of(("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool"))
        if op.startswith("Global"):
            self.add(op, [value], (*value.shape[:2], *([1] * (value.rank - 2))))
            return
        kernel = [self.one_of((2, 3)) for _ in range(value.rank - 2)]
        attributes, sizes = self._geometry(value, kernel)
        if op == "AveragePool" and self.chance(0.3):
            attributes["count_include_pad"] = 1
        self.add(op, [value], (*value.shape[:2], *sizes), **attributes)

    def add_channel_norm(self) -> None:
        value = self.pick(lambda v: v.rank >= 3 and isinstance(v.shape[1], int))
        if value is None:
            return
        channels = int(value.shape[1])
        parameters = [self.weight(channels), self.weight(channels)]
        if self.chance(0.5) and "?" not in str(value.shape):
            self.needs_elements = True
            self.add("InstanceNormalization", [value, *parameters], value.shape, epsilon=0.1)
            return
        variance = self.initializer(np.linspace(0.5, 2, channels).astype(np.float32))
        self.add("BatchNormalization", [value, *parameters, self.weight(channels), variance], value.shape)

    def add_depth_to_space(self) -> None:
        value = self.pick(
            lambda v: v.rank == 4 and all(isinstance(s, int) for s in v.shape[1:]) and v.shape[1] % 4 == 0
        )  # type: ignore[operator]
        if value is not None:
            n, c, h, w = value.shape
            self.add("DepthToSpace", [value], (n, int(c) // 4, 2 * int(h), 2 * int(w)), blocksize=2)

    def add_resize(self) -> None:
        value = self.pick(lambda v: v.rank == 4 and all(isinstance(s, int) for s in v.shape[1:]))
        if value is None:
            return
        n, c, h, w = value.shape
        if self.chance(0.5) or not isinstance(n, int):
            scales = self.initializer(np.array([1, 1, 2, 2], np.float32))
            self.add("Resize", [value, "", scales], (n, c, 2 * int(h), 2 * int(w)), mode="nearest")
        else:
            sizes = self.ints(n, int(c), 5, 6)
            self.add("Resize", [value, "", "", sizes], (n, c, 5, 6), mode="linear")

    # --- normalisations and elements ---

    def add_softmax(self) -> None:
        value = self.pick(lambda v: v.rank >= 1)
        if value is not None:
            op = self.one_of(("Softmax", "Softmax", "LogSoftmax"))
            self.add(op, [value], value.shape, axis=self.random.randrange(-value.rank, value.rank))

    def add_layer_norm(self) -> None:
        value = self.pick(lambda v: v.rank >= 1 and isinstance(v.shape[-1], int))
        if value is None:
            return
        width = int(value.shape[-1])
        inputs: list[Value | str] = [value, self.weight(width)]
        if self.chance(0.6):
            inputs.append(self.weight(width))
        self.add("LayerNormalization", inputs, value.shape, axis=-1, epsilon=0.1)

    def add_unary(self) -> None:
        value = self.pick()
        if value is not None:
            self.add(self.one_of(("Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Erf", "Identity")), [value], value.shape)

    def add_clip(self) -> None:
        value = self.pick()
        if value is not None:
            limit = self.initializer(np.array(self.one_of((-0.5, 0.5)), np.float32))
            self.add("Clip", self.one_of(([value, "", limit], [value, limit], [value])), value.shape)

    def add_binary(self) -> None:
        first = self.pick()
        second = first and self.pick(lambda v: broadcast(first.shape, v.shape) is not None)
        if first is None or second is None:
            return
        if self.chance(0.2):
            second = first
        shape = broadcast(first.shape, second.shape)
        assert shape is not None
        op = self.one_of(("Add", "Add", "Sub", "Mul", "Max", "Min"))
        inputs = [first, second] if self.chance(0.5) else [second, first]
        if op in ("Max", "Min") and self.chance(0.3):
            inputs.append(first)
        self.add(op, inputs, shape)

    def add_scale(self) -> None:
        """Multiply or divide by a constant, a row or a column."""
        value = self.pick()
        if value is None:
            return
        last = value.shape[-1] if value.rank else 1
        shape: tuple[int, ...] = self.one_of([(), (1,), *([(last,)] if isinstance(last, int) else [])])
        array = np.linspace(1, 2, max(int(np.prod(shape)), 1)).astype(np.float32).reshape(shape)
        factor = self.initializer(array)
        op = self.one_of(("Mul", "Div", "Add", "Sub"))
        self.add(op, [value, factor], value.shape if value.rank else shape)

    def add_where(self) -> None:
        condition = self.pick(dtype=BOOL)
        value = condition and self.pick(lambda v: broadcast(v.shape, condition.shape) is not None)
        if condition is None or value is None:
            return
        other = self.initializer(np.zeros((), np.float32))
        self.add("Where", [condition, value, other], broadcast(value.shape, condition.shape) or ())

    # --- shapes ---

    def add_heads(self) -> None:
        """Split the last axis into heads and turn them to the front; sometimes attend, and turn them back."""
        value = self.pick(lambda v: v.rank == 3 and v.shape[2] in WIDTHS)
        if value is None:
            return
        batch, length, width = value.shape
        heads = self.one_of([h for h in (2, 3, 4) if int(width) % h == 0])
        depth = int(width) // heads
        target: Value = self.ints(0, 0, heads, depth)
        if isinstance(batch, int) and isinstance(length, int) and self.chance(0.5):
            target = self.ints(batch, length, heads, -1)
        elif self.chance(0.5):
            target = self._computed_target(value, heads, depth)
        split = self.add("Reshape", [value, target], (batch, length, heads, depth))
        turned = self.add("Transpose", [split], (batch, heads, length, depth), perm=[0, 2, 1, 3])
        if self.chance(0.5):
            if self.chance(0.5):
                scores = self.add("Transpose", [split], (batch, heads, depth, length), perm=[0, 2, 3, 1])
            else:
                scores = self._turn_merged(turned)
            products = self.add("MatMul", [turned, scores], (batch, heads, length, length))
            weights = self.add("Softmax", [products], products.shape, axis=-1)
            turned = self.add("MatMul", [weights, turned], (batch, heads, length, depth))
        back = self.add("Transpose", [turned], (batch, length, heads, depth), perm=[0, 2, 1, 3])
        self.add("Reshape", [back, self.one_of((self.ints(0, 0, -1), self.ints(0, 0, int(width))))], value.shape)

    def _turn_merged(self, value: Value) -> Value:
        """Turn the last two of four axes as PyTorch 2.15 writes it, with the batch and the heads merged."""
        batch, heads, length, depth = value.shape
        shape = self.add("Shape", [value], (4,), INT64)
        sizes = Value(self.fresh(), INT64, (2,)), Value(self.fresh(), INT64, (1,)), Value(self.fresh(), INT64, (1,))
        self.node("Split", [shape, self.ints(2, 1, 1)], [item.name for item in sizes], axis=0)
        merged = self.add("Concat", [self.ints(-1), *sizes[1:]], (3,), INT64, axis=0)
        flat = self.add("Reshape", [value, merged], (self.unknown_size(), length, depth))
        turned = self.add("Transpose", [flat], (flat.shape[0], depth, length), perm=[0, 2, 1])
        if self.chance(0.5):
            turned = self.add("Sigmoid", [turned], turned.shape)
        apart = self.add("Concat", [sizes[0], sizes[2], sizes[1]], (4,), INT64, axis=0)
        return self.add("Reshape", [turned, apart], (batch, heads, depth, length))

    def _computed_target(self, value: Value, heads: int, depth: int) -> Value:
        """Return a target of Reshape that is computed from the shape of a value, as exporters write it."""
        shape = self.add("Shape", [value], (value.rank,), INT64)
        sizes = []
        for axis in (0, 1):
            index = self.initializer(np.array(axis, np.int64))
            size = self.add("Gather", [shape, index], (), INT64, axis=0)
            sizes.append(self.add("Unsqueeze", [size, self.ints(0)], (1,), INT64))
        return self.add("Concat", [*sizes, self.ints(heads, depth)], (4,), INT64, axis=0)

    def add_reshape(self) -> None:
        value = self.pick(lambda v: v.rank >= 2, dtype=self.one_of((FLOAT, FLOAT, INT64)))
        if value is None:
            return
        if all(isinstance(size, int) for size in value.shape):
            sizes = [int(size) for size in value.shape]
            axis = self.random.randrange(value.rank - 1)
            merged = [*sizes[:axis], sizes[axis] * sizes[axis + 1], *sizes[axis + 2 :]]
            if self.chance(0.5):
                factors = [f for f in (2, 3, 4) if merged[axis] % f == 0] or [1]
                factor = self.one_of(factors)
                merged = [*merged[:axis], factor, merged[axis] // factor, *merged[axis + 1 :]]
            target = list(merged)
            if self.chance(0.4) and 0 not in target:
                target[self.random.randrange(len(target))] = -1
            self.add("Reshape", [value, self.ints(*target)], tuple(merged), value.dtype)
        elif isinstance(value.shape[-1], int) and isinstance(value.shape[-2], int):
            merged_size = value.shape[-1] * value.shape[-2]
            target = [*([0] * (value.rank - 2)), self.one_of((merged_size, -1))]
            self.add("Reshape", [value, self.ints(*target)], (*value.shape[:-2], merged_size), value.dtype)
        elif isinstance(value.shape[-1], int):
            rows = self.unknown_size()
            self.add("Reshape", [value, self.ints(-1, value.shape[-1])], (rows, value.shape[-1]), value.dtype)

    def add_mixed_reshape(self) -> None:
        """Reshape groups of axes that mix fixed sizes and symbols: right for parts only at some sizes, if at all."""
        value = self.pick(
            lambda v: v.rank >= 2 and len({isinstance(size, str) for size in v.shape}) == 2 and v.shape[-1] != 1
        )
        if value is None:
            return
        fixed = [int(size) for size in value.shape if isinstance(size, int)]
        product = int(np.prod(fixed, dtype=np.int64))
        kept = self.one_of([*fixed, *(size for size in range(2, product + 1) if product % size == 0 and size <= 96)])
        rest = self.one_of([size for size in (1, 2, 3, 4, 6) if (product // kept) % size == 0])
        forms = [[-1, kept], [kept, -1], [rest, -1, kept], [rest, kept, -1], [-1, rest, kept]]
        if isinstance(value.shape[0], str):
            forms += [[0, kept, -1], [0, rest, -1, kept], [0, rest, kept, -1]]
        target = self.one_of(forms)
        shape = tuple(size if size > 0 else self.unknown_size() for size in target)
        self.add("Reshape", [value, self.ints(*target)], shape)

    def add_mixed_broadcast(self) -> None:
        """Broadcast a symbol against a fixed size, which it can be, too, if it is not 1."""
        value = self.pick(lambda v: any(isinstance(size, str) for size in v.shape))
        if value is None:
            return
        axis = self.one_of([axis for axis, size in enumerate(value.shape) if isinstance(size, str)])
        size = self.one_of(WIDTHS)
        shape = (*value.shape[:axis], size, *value.shape[axis + 1 :])
        other = self.weight(size, *[1] * (value.rank - axis - 1))
        op = self.one_of(("Add", "Mul", "Sub", "Expand", "Where", "Greater"))
        if op == "Expand":
            self.add(op, [value, self.ints(*other.shape)], shape)
        elif op == "Where":
            condition = self.initializer(np.arange(size).reshape(other.shape) % 3 == 0)
            self.add(op, [condition, value, self.initializer(np.zeros((), np.float32))], shape)
        elif op == "Greater":
            self.add(op, [value, self.initializer(np.full(other.shape, 9.0, np.float32))], shape, BOOL)
        else:
            self.add(op, [value, other] if self.chance(0.5) else [other, value], shape)

    def add_flatten(self) -> None:
        value = self.pick(lambda v: v.rank >= 1 and all(isinstance(size, int) for size in v.shape))
        if value is not None:
            axis = self.random.randrange(value.rank + 1)
            sizes = [int(size) for size in value.shape]
            self.add("Flatten", [value], (int(np.prod(sizes[:axis])), int(np.prod(sizes[axis:]))), axis=axis)

    def add_squeeze(self) -> None:
        value = self.pick(lambda v: v.rank <= 4)
        if value is None:
            return
        axis = self.random.randrange(value.rank + 1)
        shape = (*value.shape[:axis], 1, *value.shape[axis:])
        wide = self.add("Unsqueeze", [value, self.ints(axis)], shape)
        if self.chance(0.4):
            self.add("Squeeze", [wide, self.ints(axis)], value.shape)

    def add_transpose(self) -> None:
        value = self.pick(lambda v: v.rank >= 2, dtype=self.one_of((FLOAT, FLOAT, INT64)))
        if value is not None:
            order = list(range(value.rank))
            self.random.shuffle(order)
            self.add("Transpose", [value], tuple(value.shape[axis] for axis in order), value.dtype, perm=order)

    def add_split(self) -> None:
        value = self.pick(lambda v: any(isinstance(size, int) and size >= 4 for size in v.shape))
        if value is None:
            return
        axis = self.one_of([axis for axis, size in enumerate(value.shape) if isinstance(size, int) and size >= 4])
        size = int(value.shape[axis])
        parts = self.one_of([n for n in (2, 3) if size % n == 0] or [0])
        if parts and self.chance(0.7):
            sizes = [size // parts] * parts
        else:
            first = self.random.randrange(1, size)
            sizes = [first, size - first]
        results = [Value(self.fresh(), FLOAT, (*value.shape[:axis], part, *value.shape[axis + 1 :])) for part in sizes]
        inputs: list[Value | str] = [value]
        attributes: dict[str, Any] = {}
        if len(set(sizes)) > 1 or self.chance(0.5):
            inputs.append(self.ints(*sizes))
        elif self.opset >= 18:
            attributes["num_outputs"] = len(sizes)
        self.node("Split", inputs, [item.name for item in results], axis=axis, **attributes)
        self.values += results
        if self.chance(0.3) and len(set(sizes)) == 1:
            self.add("Concat", results[::-1], value.shape, axis=axis)

    def add_concat(self) -> None:
        first = self.pick(lambda v: v.rank >= 1)
        if first is None:
            return
        axis = self.random.randrange(first.rank)
        second = self.pick(
            lambda v: (
                v.rank == first.rank and all(a == b for i, (a, b) in enumerate(zip(v.shape, first.shape)) if i != axis)
            )
        )
        second = second or first
        sizes = first.shape[axis], second.shape[axis]
        size = sizes[0] + sizes[1] if all(isinstance(s, int) for s in sizes) else self.unknown_size()  # type: ignore[operator]
        self.add("Concat", [first, second], (*first.shape[:axis], size, *first.shape[axis + 1 :]), axis=axis)

    def add_gather(self) -> None:
        value = self.pick(lambda v: any(isinstance(size, int) and size > 1 for size in v.shape))
        if value is None:
            return
        axis = self.one_of([axis for axis, size in enumerate(value.shape) if isinstance(size, int) and size > 1])
        size = int(value.shape[axis])
        kind = self.random.randrange(4)
        indices: Value | None
        if kind == 0:
            indices = self.initializer(np.array(self.random.randrange(-size, size), np.int64))
        elif kind == 1:
            shape = self.one_of(((3,), (2, 2), (6,), (2, 6)))
            drawn = np.random.default_rng(self.random.randrange(99)).integers(-size, size, shape)
            indices = self.initializer(drawn)
        else:
            indices = self.pick(lambda v: v.rank <= 2, INT64)
            if indices is None:
                return
            bound = self.initializer(np.array(size, np.int64))
            indices = self.add("Mod", [indices, bound], indices.shape, INT64)
        self.add("Gather", [value, indices], (*value.shape[:axis], *indices.shape, *value.shape[axis + 1 :]), axis=axis)

    def add_gather_elements(self) -> None:
        value = self.pick(lambda v: v.rank >= 2 and all(isinstance(size, int) and size > 0 for size in v.shape))
        if value is None:
            return
        sizes = [int(size) for size in value.shape]
        axis = self.random.randrange(len(sizes))
        shape = [self.one_of((size, size, max(size - 1, 1))) for size in sizes]
        drawn = np.random.default_rng(self.random.randrange(99)).integers(0, sizes[axis], shape)
        self.add("GatherElements", [value, self.initializer(drawn)], tuple(shape), axis=axis)

    def add_slice(self) -> None:
        value = self.pick(lambda v: any(isinstance(size, int) and size > 2 for size in v.shape))
        if value is None:
            return
        axis = self.one_of([axis for axis, size in enumerate(value.shape) if isinstance(size, int) and size > 2])
        size = int(value.shape[axis])
        low = self.random.randrange(size - 1)
        high = self.random.randrange(low + 1, size + 1)
        named = self.one_of((axis, axis - value.rank))
        result = (*value.shape[:axis], high - low, *value.shape[axis + 1 :])
        inputs = [value, self.ints(low), self.ints(high), self.ints(named)]
        if self.chance(0.2):
            inputs = [value, self.ints(-1), self.ints(-1000), self.ints(named), self.ints(-1)]
            result = value.shape
        self.add("Slice", inputs, result)

    def add_pad(self) -> None:
        value = self.pick(lambda v: v.rank >= 1)
        if value is None:
            return
        pads = [0] * (2 * value.rank)
        fixed = [axis for axis, size in enumerate(value.shape) if isinstance(size, int)]
        if not fixed:
            return
        axis = self.one_of(fixed)
        pads[axis], pads[axis + value.rank] = self.one_of(((1, 0), (0, 2), (1, 1)))
        size = int(value.shape[axis]) + pads[axis] + pads[axis + value.rank]
        self.add("Pad", [value, self.ints(*pads)], (*value.shape[:axis], size, *value.shape[axis + 1 :]))

    def add_tile(self) -> None:
        value = self.pick(lambda v: v.rank >= 1 and isinstance(v.shape[0], int))
        if value is not None:
            counts = [2, *([1] * (value.rank - 1))]
            self.add("Tile", [value, self.ints(*counts)], (2 * int(value.shape[0]), *value.shape[1:]))

    def add_expand(self) -> None:
        value = self.pick(lambda v: v.rank <= 3)
        if value is None:
            return
        front = self.one_of((2, 4, 6))
        target: Value
        if all(isinstance(size, int) for size in value.shape) and self.chance(0.5):
            target = self.ints(front, *[int(size) for size in value.shape])
            shape: Shape = (front, *value.shape)
        elif self.chance(0.5):
            sizes = self.add("Shape", [value], (value.rank,), INT64)
            target = self.add("Concat", [self.ints(front), sizes], (value.rank + 1,), INT64, axis=0)
            shape = (front, *value.shape)
        else:
            target, shape = self.ints(front, *([1] * value.rank)), (front, *value.shape)
        self.add("Expand", [value, target], shape)

    # --- reductions ---

    def add_reduce(self) -> None:
        value = self.pick(lambda v: v.rank >= 1 and 0 not in v.shape)
        if value is None:
            return
        op = self.one_of(
            ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2", "ReduceSumSquare", "ReduceL1", "ReduceMin")
        )
        axes = sorted({self.random.randrange(value.rank) for _ in range(self.one_of((1, 1, 2)))})
        keeps = self.one_of((0, 1))
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(value.shape) if keeps or axis not in axes)
        if op == "ReduceSum" or self.opset >= 18:
            if self.chance(0.15):
                self.add(op, [value], (1,) * value.rank if keeps else (), keepdims=keeps)
            else:
                self.add(op, [value, self.ints(*axes)], shape, keepdims=keeps)
        else:
            self.add(op, [value], shape, axes=axes, keepdims=keeps)

    def add_cumulative(self) -> None:
        value = self.pick(lambda v: v.rank >= 1)
        if value is not None:
            axis = self.initializer(np.array(self.random.randrange(value.rank), np.int64))
            self.add("CumSum", [value, axis], value.shape)

    def add_top_k(self) -> None:
        value = self.pick(lambda v: v.rank >= 1 and isinstance(v.shape[-1], int) and v.shape[-1] >= 3)
        if value is None:
            return
        best = Value(self.fresh(), FLOAT, (*value.shape[:-1], 2))
        self.node("TopK", [value, self.ints(2)], [best.name, self.fresh()], axis=-1)
        self.values.append(best)

    def add_arg_max(self) -> None:
        value = self.pick(lambda v: v.rank >= 1, INT64)
        if value is not None and 0 not in value.shape:
            axis, keeps = self.random.randrange(value.rank), self.one_of((0, 1))
            shape = tuple(1 if i == axis else size for i, size in enumerate(value.shape) if keeps or i != axis)
            self.add("ArgMax", [value], shape, INT64, axis=axis, keepdims=keeps)

    def add_unsplittable(self) -> None:
        """Add an operator that no rule splits, with a size that depends on its input, or not."""
        value = self.pick(lambda v: v.rank >= 1 and isinstance(v.shape[0], int) and v.shape[0] >= 2)
        if value is None:
            return
        if self.chance(0.5):
            updates = self.weight(*[1 for _ in range(value.rank)], scale=0.5)
            indices = self.initializer(np.zeros((1,) * value.rank, np.int64))
            self.add("ScatterElements", [value, indices, updates], value.shape, axis=0)
        else:
            mask = self.initializer(np.array([True, True]))
            self.add("Compress", [value, mask], (2, *value.shape[1:]), axis=0)

    def add_positions(self) -> None:
        """Look up a row per position of an axis, as position embeddings do."""
        value = self.pick(lambda v: v.rank >= 2)
        if value is None:
            return
        axis = self.random.randrange(value.rank - 1)
        size = self.add(
            "Shape", [value], (1,), INT64, start=axis, end=axis + 1 if self.chance(0.5) else axis + 1 - value.rank
        )
        end = self.add("Squeeze", [size], (), INT64)
        zero, one = (self.initializer(np.array(i, np.int64)) for i in (0, 1))
        positions = self.add("Range", [zero, end, one], (value.shape[axis],), INT64)
        rows = self.initializer(np.random.default_rng(3).standard_normal((16, 6)).astype(np.float32))
        bound = self.initializer(np.array(16, np.int64))
        wrapped = self.add("Mod", [positions, bound], positions.shape, INT64)
        self.add("Gather", [rows, wrapped], (value.shape[axis], 6), axis=0)

    def add_capped(self) -> None:
        """Add an axis whose size depends on a symbol only at some sizes: at most two or six of them, or rounded."""
        value = self.pick(lambda v: v.rank >= 1 and isinstance(v.shape[0], str))
        if value is None:
            return
        kind = self.random.randrange(3)
        rest = value.shape[1:]
        if kind == 0:
            high = self.ints(self.one_of((2, 4, 6)))
            self.add("Slice", [value, self.ints(0), high, self.ints(0)], (self.unknown_size(), *rest))
            return
        size = self.add("Shape", [value], (1,), INT64, start=0, end=1)
        op, number = self.one_of((("Min", 6), ("Mod", 4), ("Max", 9)))
        changed = self.add(op, [size, self.ints(number)], (1,), INT64)
        if kind == 1:
            self.add("ConstantOfShape", [changed], (self.unknown_size(),))
        else:
            target = self.add("Concat", [changed, self.ints(4)], (2,), INT64, axis=0)
            row = self.weight(1, 4)
            expanded = self.add("Expand", [row, target], (self.unknown_size(), 4))
            self.add("MatMul", [expanded, self.weight(4, 6)], (expanded.shape[0], 6))

    # --- other types ---

    def add_integers(self) -> None:
        value = self.pick(dtype=INT64)
        second = value and self.pick(lambda v: broadcast(v.shape, value.shape) is not None, INT64)
        if value is None or second is None:
            return
        shape = broadcast(value.shape, second.shape) or ()
        kind = self.random.randrange(5)
        if kind == 0:
            bound = self.initializer(np.array(5, np.int64))
            total = self.add("Add", [value, second], shape, INT64)
            self.add("Mod", [total, bound], shape, INT64)
        elif kind == 1:
            self.add("Greater", [value, second], shape, BOOL)
        elif kind == 2:
            self.add("Cast", [value], value.shape, FLOAT, to=FLOAT)
        elif kind == 3 and value.rank:
            self.add("ReduceSum", [value, self.ints(value.rank - 1)], (*value.shape[:-1], 1), INT64, keepdims=1)
        else:
            self.add("Equal", [value, second], shape, BOOL)

    def add_half(self) -> None:
        value = self.pick(lambda v: v.rank >= 2 and isinstance(v.shape[-1], int))
        if value is None:
            return
        self.has_half = True
        width = int(value.shape[-1])
        bounded = self.add("Tanh", [value], value.shape)
        half = self.add("Cast", [bounded], value.shape, FLOAT16, to=FLOAT16)
        numbers = np.random.default_rng(self.random.randrange(99)).standard_normal((width, 6)) * width**-0.5
        product = self.add(
            "MatMul", [half, self.initializer(numbers.astype(np.float16))], (*value.shape[:-1], 6), FLOAT16
        )
        self.add("Cast", [product], product.shape, FLOAT, to=FLOAT)

    def add_sizes(self) -> None:
        """Add a value whose size depends on the size of another one."""
        value = self.pick(lambda v: v.rank >= 1)
        if value is None:
            return
        axis = self.random.randrange(value.rank)
        shape = self.add("Shape", [value], (value.rank,), INT64)
        size = self.add("Slice", [shape, self.ints(axis), self.ints(axis + 1), self.ints(0)], (1,), INT64)
        cast = self.add("Cast", [size], (1,), FLOAT, to=FLOAT)
        tamed = self.add("Sqrt", [cast], (1,))
        self.add("Div", [value, tamed], value.shape)
        if self.chance(0.3):
            zeros = self.add("ConstantOfShape", [shape], value.shape)
            self.add("Add", [zeros, value], value.shape)

    def add_random(self) -> None:
        """Add a random value; every reader must see the same one."""
        value = self.pick()
        if value is not None and self.opset < 22:  # ONNX Runtime has no later ones
            noise = self.add("RandomNormalLike", [value], value.shape)
            del self.values[-1]
            copy = self.add(self.one_of(("Identity", "Neg")), [noise], value.shape)
            del self.values[-1]
            twice = self.add("Abs", [copy], value.shape)
            del self.values[-1]
            once = self.add("Abs", [noise], value.shape)
            del self.values[-1]
            self.add("Sub", [twice, once], value.shape)

    # --- subgraphs ---

    def inner(self) -> Builder:
        self.count += 1
        prefix = f"{self.prefix}s{self.count}_"
        return Builder(self.random, self.opset, prefix, values=list(self.values), is_wide=self.is_wide)

    def fill(self, inner: Builder, value: Value) -> Value:
        """Add some nodes to a subgraph; return the last value, of the shape of another one."""
        inner.values.append(value)
        for _ in range(self.random.randrange(3)):
            self.one_of(COMMON)(inner)
        self.has_half, self.needs_elements = (
            self.has_half or inner.has_half,
            self.needs_elements or inner.needs_elements,
        )
        same = [item for item in inner.values if item.dtype == FLOAT and item.shape == value.shape]
        other = inner.pick(lambda v: broadcast(value.shape, v.shape) == value.shape) or value
        return inner.add(self.one_of(("Add", "Sub")), [same[-1], other], value.shape)

    def add_if(self) -> None:
        value = self.pick()
        if value is None:
            return
        branches = {}
        for name in ("then_branch", "else_branch"):
            inner = self.inner()
            result = self.fill(inner, value)
            branches[name] = inner.graph([result], [])
        condition = self.initializer(np.array(self.chance(0.5)))
        self.add("If", [condition], value.shape, **branches)

    def add_loop(self) -> None:
        value = self.pick()
        step = value and self.pick(lambda v: broadcast(value.shape, v.shape) == value.shape)
        if value is None or step is None:
            return
        inner = self.inner()
        names = [inner.fresh() for _ in range(3)]
        carried = Value(names[2], FLOAT, value.shape)
        go_on = inner.add("Identity", [names[1]], (), BOOL)
        inner.values.append(step)
        total = self.fill(inner, carried)
        parameters = [Value(names[0], INT64, ()), Value(names[1], BOOL, ()), carried]
        body = inner.graph([go_on, total], parameters)
        trips = self.initializer(np.array(self.random.randrange(3), np.int64))
        self.add("Loop", [trips, "", value], value.shape, body=body)

    def add_scan(self) -> None:
        value = self.pick(lambda v: v.rank >= 2)
        other = value and self.pick(lambda v: broadcast(value.shape[1:], v.shape) == value.shape[1:])
        if value is None or other is None:
            return
        inner = self.inner()
        item = Value(inner.fresh(), FLOAT, value.shape[1:])
        inner.values.append(other)
        result = self.fill(inner, item)
        self.add("Scan", [value], value.shape, body=inner.graph([result], [item]), num_scan_inputs=1)

    def graph(self, outputs: Sequence[Value], inputs: Sequence[Value]) -> GraphProto:
        return helper.make_graph(
            self.nodes,
            f"{self.prefix}graph",
            [_declare(value) for value in inputs],
            [_declare(value) for value in outputs],
            self.initializers,
        )


def _declare(value: Value) -> Any:
    shape = [None if isinstance(size, str) and size.startswith("?") else size for size in value.shape]
    return helper.make_tensor_value_info(value.name, value.dtype, shape)


def broadcast(first: Shape, second: Shape) -> Shape | None:
    """Return the shape that two shapes broadcast to; None if there is none."""
    rank = max(len(first), len(second))
    shape: list[Dimension] = []
    for left, right in zip((1,) * (rank - len(first)) + first, (1,) * (rank - len(second)) + second):
        if left != right and 1 not in (left, right):
            return None
        shape.append(right if left == 1 else left)
    return tuple(shape)


COMMON: tuple[Callable[[Builder], None], ...] = (
    Builder.add_matmul,
    Builder.add_matmul,
    Builder.add_product,
    Builder.add_gemm,
    Builder.add_heads,
    Builder.add_fused_heads,
    Builder.add_reshape,
    Builder.add_mixed_reshape,
    Builder.add_mixed_reshape,
    Builder.add_transpose,
    Builder.add_softmax,
    Builder.add_layer_norm,
    Builder.add_binary,
    Builder.add_binary,
    Builder.add_scale,
    Builder.add_unary,
    Builder.add_split,
    Builder.add_concat,
    Builder.add_gather,
    Builder.add_reduce,
    Builder.add_convolution,
    Builder.add_convolution,
)
OTHERS: tuple[Callable[[Builder], None], ...] = (
    Builder.add_einsum,
    Builder.add_attention,
    Builder.add_integer_product,
    Builder.add_recurrent,
    Builder.add_step,
    Builder.add_fourier,
    Builder.add_transposed_convolution,
    Builder.add_unsplittable,
    Builder.add_positions,
    Builder.add_capped,
    Builder.add_capped,
    Builder.add_pool,
    Builder.add_channel_norm,
    Builder.add_depth_to_space,
    Builder.add_resize,
    Builder.add_clip,
    Builder.add_where,
    Builder.add_mixed_broadcast,
    Builder.add_flatten,
    Builder.add_squeeze,
    Builder.add_gather_elements,
    Builder.add_slice,
    Builder.add_pad,
    Builder.add_tile,
    Builder.add_expand,
    Builder.add_cumulative,
    Builder.add_top_k,
    Builder.add_arg_max,
    Builder.add_integers,
    Builder.add_integers,
    Builder.add_half,
    Builder.add_sizes,
    Builder.add_random,
    Builder.add_if,
    Builder.add_loop,
    Builder.add_scan,
)


WIDE: tuple[Callable[[Builder], None], ...] = (
    Builder.add_recurrent,
    Builder.add_empty_part,
    Builder.add_concat,
    Builder.add_unary,
)


def make_model(random: Random, max_nodes: int = 14, is_wide: bool = False) -> ShardableModel:
    """Return a random model; ONNX Runtime may still refuse some.

    A wide one has up to four symbols, which also change one by one, layers of two directions, and empty constants.
    """
    builder = Builder(random, opset=builder_opset(random), is_wide=is_wide)
    inputs = []
    for index in range(random.randrange(1, 4)):
        shape = INPUT_SHAPES[random.randrange(len(INPUT_SHAPES))]
        if is_wide:
            shape = tuple(builder.one_of(SYMBOLS) if isinstance(size, str) else size for size in shape)
        inputs.append(Value(f"x{index}", FLOAT, shape))
    inputs.append(Value("ids", INT64, (("N", 6), (2, "N"), (6,), (2, 6), (12,))[random.randrange(5)]))
    builder.values += [inputs[-1], *inputs[:-1]]
    for _ in range(random.randrange(3, max_nodes)):
        kinds = WIDE if is_wide and builder.chance(0.2) else COMMON if builder.chance(0.6) else OTHERS
        builder.one_of(kinds)(builder)
    outputs = _draw_outputs(builder, inputs)
    graph = builder.graph(outputs, [*inputs, *builder.overridable])
    opsets = [helper.make_opsetid("", builder.opset)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=8 if builder.opset < 19 else 11)
    bound = random.choice((1, 1, 2, 6, 8, 12)), random.choice((1, 1, 4, 5, 6))
    # ONNX Runtime's recurrent kernels and InstanceNormalization end the process for empty inputs.
    others = [pair for pair in OTHER_SIZES if all(pair) or not builder.needs_elements]
    sizes = [{"N": n, "M": m} for n, m in (bound, *others)]
    if is_wide:
        sizes = [{**item, **{name: random.choice((1, 2, 3, 4, 6, 8, 13)) for name in SYMBOLS[2:]}} for item in sizes]
        sizes[1:] = [*sizes[1:4], *({**sizes[0], name: 2 * sizes[0][name]} for name in SYMBOLS)]
    feeds = tuple(_draw_feeds(random, inputs, builder.overridable, size) for size in sizes)
    used = {size for value in inputs for size in value.shape if isinstance(size, str)}
    dimensions = tuple({name: size for name, size in item.items() if name in used} for item in sizes)
    return ShardableModel(proto, dimensions, feeds, 3e-2 if builder.has_half else 2e-4)


def builder_opset(random: Random) -> int:
    return (17, 18, 21, 23)[random.randrange(4)]


def _draw_outputs(builder: Builder, inputs: Sequence[Value]) -> list[Value]:
    """Return outputs: the last values, some that are read too, and rarely inputs and weights."""
    made = [value for value in builder.values if not value.is_weight and value not in inputs]
    outputs = [*made[-1:], *(value for value in made[:-1] if builder.chance(0.2))]
    if builder.chance(0.1):
        outputs.append(builder.one_of(inputs))
    weights = [value for value in builder.values if value.is_weight]
    if weights and builder.chance(0.1):
        outputs.append(builder.one_of(weights))
    return outputs or [inputs[0]]


def _draw_feeds(
    random: Random, inputs: Sequence[Value], overridable: Sequence[Value], sizes: dict[str, int]
) -> dict[str, NDArray[Any]]:
    numbers = np.random.default_rng(random.randrange(1000))
    feeds: dict[str, NDArray[Any]] = {}
    for value in (*inputs, *(item for item in overridable if random.random() < 0.5)):
        shape = tuple(sizes[size] if isinstance(size, str) else size for size in value.shape)
        if value.dtype == INT64:
            feeds[value.name] = numbers.integers(0, 5, shape)
        else:
            feeds[value.name] = numbers.standard_normal(shape).astype(np.float32)
    return feeds
