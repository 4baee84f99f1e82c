"""Training steps built by hand: a small reverse-mode differentiation that writes ONNX nodes, without torch.

`StepBuilder` records operators, `finish` appends their gradients and the optimiser. The names and metadata are those of
`onnxplace_training.export_training_step`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, StringStringEntryProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnxplace.model_metadata import MODULE_KEY, PARAMETER_KEY, PHASE_KEY, TRAINING_KEY, PhaseName

Array = NDArray[Any]
Optimizer = Literal["sgd", "momentum", "adam", "adamw"]
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "momentum", "adam", "adamw")
MOMENTS: Mapping[Optimizer, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}
MOMENTUM, BETA1, BETA2, EPSILON, WEIGHT_DECAY = 0.9, 0.9, 0.999, 1e-8, 0.01


@dataclass(frozen=True)
class Recorded:
    """An operator of the forward pass, with what its gradient needs."""

    inputs: tuple[str, ...]
    output: str
    module: str
    gradient: Callable[[str], Sequence[tuple[str, str]]]
    """From the gradient of the output to (input, summand of its gradient) pairs."""


@dataclass
class StepBuilder:
    """Builds the ONNX model of a training step."""

    name: str = "step"
    has_metadata: bool = True
    nodes: list[NodeProto] = field(default_factory=list)
    inputs: list[ValueInfoProto] = field(default_factory=list)
    outputs: list[ValueInfoProto] = field(default_factory=list)
    initializers: dict[str, TensorProto] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    tape: list[Recorded] = field(default_factory=list)
    phase: PhaseName = "forward"
    module: str = ""
    parameter_of_node: str = ""

    def input(self, name: str, *shape: int, dtype: int = TensorProto.FLOAT) -> str:
        """Add an input of the batch."""
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        self.shapes[name] = shape
        return name

    def parameter(self, name: str, values: Array) -> str:
        """Add a parameter with its initial values."""
        self.input(name, *values.shape)
        self.initializers[name] = numpy_helper.from_array(values.astype(np.float32), name)
        self.parameters.append(name)
        return name

    def constant(self, value: float | Sequence[int], dtype: type = np.float32) -> str:
        """Return the name of an initializer."""
        array = np.array(value, dtype=dtype)
        name = f"constant_{array.dtype}_{'_'.join(map(str, np.atleast_1d(array).tolist()))}"
        self.initializers.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def node(self, op: str, inputs: Sequence[str], shape: tuple[int, ...], output: str = "", **attributes: Any) -> str:
        """Add a node with one output of a shape; return its name."""
        output = output or f"{self.phase}/{op}_{len(self.nodes)}"
        node = helper.make_node(op, list(inputs), [output], name=f"{self.module or self.phase}/{output}", **attributes)
        if self.has_metadata:
            entries = {PHASE_KEY: str(self.phase), MODULE_KEY: self.module, PARAMETER_KEY: self.parameter_of_node}
            node.metadata_props.extend(StringStringEntryProto(key=k, value=v) for k, v in entries.items() if v)
        self.nodes.append(node)
        self.shapes[output] = shape
        return output

    def record(self, inputs: Sequence[str], output: str, gradient: Callable[[str], Sequence[tuple[str, str]]]) -> str:
        """Remember how the gradient of a forward operator is computed."""
        self.tape.append(Recorded(tuple(inputs), output, self.module, gradient))
        return output

    # --- operators of the forward pass ---

    def matmul(self, left: str, right: str) -> str:
        """[.., m, k] x [k, n] or equal leading axes."""
        shapes, rank = self.shapes, len(self.shapes[right])
        output = self.node("MatMul", [left, right], (*shapes[left][:-1], shapes[right][-1]))

        def gradient(upstream: str) -> list[tuple[str, str]]:
            swapped = [*range(rank - 2), rank - 1, rank - 2]
            right_shape = tuple(shapes[right][axis] for axis in swapped)
            other = self.node("Transpose", [right], right_shape, perm=swapped)
            pairs = [(left, self.node("MatMul", [upstream, other], shapes[left]))]
            rows, rows_shape, errors = left, shapes[left], upstream
            if len(rows_shape) > rank:
                rows_shape = (int(np.prod(rows_shape[:-1])), rows_shape[-1])
                rows = self.reshape_plain(left, rows_shape)
                errors = self.reshape_plain(upstream, (rows_shape[0], shapes[right][-1]))
            swapped = [*range(len(rows_shape) - 2), len(rows_shape) - 1, len(rows_shape) - 2]
            turned = self.node("Transpose", [rows], tuple(rows_shape[axis] for axis in swapped), perm=swapped)
            return [*pairs, (right, self.node("MatMul", [turned, errors], shapes[right]))]

        return self.record([left, right], output, gradient)

    def reshape_plain(self, value: str, shape: Sequence[int]) -> str:
        return self.node("Reshape", [value, self.constant(list(shape), np.int64)], tuple(shape))

    def reshape(self, value: str, *shape: int) -> str:
        before = self.shapes[value]
        output = self.reshape_plain(value, shape)
        return self.record([value], output, lambda upstream: [(value, self.reshape_plain(upstream, before))])

    def transpose(self, value: str, *perm: int) -> str:
        before = self.shapes[value]
        output = self.node("Transpose", [value], tuple(before[axis] for axis in perm), perm=list(perm))
        back = [perm.index(axis) for axis in range(len(perm))]
        return self.record(
            [value], output, lambda upstream: [(value, self.node("Transpose", [upstream], before, perm=back))]
        )

    def sum_to(self, value: str, shape: tuple[int, ...]) -> str:
        """Undo broadcasting of [shape] to the shape of a value."""
        current = self.shapes[value]
        if current == shape:
            return value
        missing = len(current) - len(shape)
        ones = [axis + missing for axis, size in enumerate(shape) if size == 1 and current[axis + missing] > 1]
        axes = [*range(missing), *ones]
        kept = tuple(1 if axis in axes else size for axis, size in enumerate(current))
        summed = self.node("ReduceSum", [value, self.constant(axes, np.int64)], kept, keepdims=1)
        return summed if kept == shape else self.reshape_plain(summed, shape)

    def add(self, left: str, right: str) -> str:
        """Broadcast addition, such as that of a bias."""
        shape = np.broadcast_shapes(self.shapes[left], self.shapes[right])
        output = self.node("Add", [left, right], shape)
        return self.record(
            [left, right],
            output,
            lambda upstream: [(name, self.sum_to(upstream, self.shapes[name])) for name in (left, right)],
        )

    def scale(self, value: str, factor: float) -> str:
        shape, other = self.shapes[value], self.constant(factor)
        output = self.node("Mul", [value, other], shape)
        return self.record([value], output, lambda upstream: [(value, self.node("Mul", [upstream, other], shape))])

    def relu(self, value: str) -> str:
        shape = self.shapes[value]
        output = self.node("Relu", [value], shape)

        def gradient(upstream: str) -> list[tuple[str, str]]:
            positive = self.node("Greater", [output, self.constant(0.0)], shape)
            return [(value, self.node("Where", [positive, upstream, self.constant(0.0)], shape))]

        return self.record([value], output, gradient)

    def tanh(self, value: str) -> str:
        shape = self.shapes[value]
        output = self.node("Tanh", [value], shape)

        def gradient(upstream: str) -> list[tuple[str, str]]:
            square = self.node("Mul", [output, output], shape)
            slope = self.node("Sub", [self.constant(1.0), square], shape)
            return [(value, self.node("Mul", [upstream, slope], shape))]

        return self.record([value], output, gradient)

    def softmax(self, value: str) -> str:
        """Along the last axis."""
        shape = self.shapes[value]
        output = self.node("Softmax", [value], shape, axis=-1)

        def gradient(upstream: str) -> list[tuple[str, str]]:
            product = self.node("Mul", [upstream, output], shape)
            total = self.node("ReduceSum", [product, self.constant([-1], np.int64)], (*shape[:-1], 1), keepdims=1)
            centred = self.node("Sub", [upstream, total], shape)
            return [(value, self.node("Mul", [output, centred], shape))]

        return self.record([value], output, gradient)

    def squared_error(self, value: str, target: str) -> str:
        """Return the mean of the squared differences, a scalar."""
        shape = self.shapes[value]
        difference = self.node("Sub", [value, target], shape)
        square = self.node("Mul", [difference, difference], shape)
        loss = self.node("ReduceMean", [square], (), keepdims=0)

        def gradient(upstream: str) -> list[tuple[str, str]]:
            factor = self.node("Mul", [upstream, self.constant(2.0 / float(np.prod(shape)))], ())
            return [(value, self.node("Mul", [difference, factor], shape))]

        return self.record([value], loss, gradient)

    # --- backward pass, optimiser, model ---

    def finish(
        self, loss: str, optimizer: Optimizer = "sgd", result: str = "", batch: Sequence[str] = ()
    ) -> ModelProto:
        """Append gradients and updates; return the model.

        Args:
            loss: The scalar that is minimised.
            optimizer: How parameters change.
            result: The value that the module returns.
            batch: Inputs of the module.
        """
        self.node("Identity", [loss], (), output="loss")
        self.outputs.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, ()))
        gradients = self._differentiate(loss)
        self.phase, self.module = "update", ""
        self.inputs.append(helper.make_tensor_value_info("learning_rate", TensorProto.FLOAT, ()))
        rate = np.array(1e-2, dtype=np.float32)
        self.initializers["learning_rate"] = numpy_helper.from_array(rate, "learning_rate")
        if optimizer in ("adam", "adamw"):
            self.inputs.append(helper.make_tensor_value_info("step", TensorProto.INT64, ()))
            corrections = self._correct_bias()
        else:
            corrections = ("", "")
        parameters = []
        for name in self.parameters:
            self.module, _, _ = name.rpartition(".")
            self.parameter_of_node = name
            moments = [self._add_moment(name, kind) for kind in MOMENTS[optimizer]]
            self._update(name, gradients[name], optimizer, corrections)
            self.outputs.append(helper.make_tensor_value_info(f"{name}.new", TensorProto.FLOAT, self.shapes[name]))
            entry = {"name": name, "input": name, "output": f"{name}.new", "gradient": gradients[name]}
            parameters.append({**entry, "moments": moments})
        self.parameter_of_node = ""
        graph = helper.make_graph(
            self.nodes, self.name, self.inputs, self.outputs, initializer=list(self.initializers.values())
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        if self.has_metadata:
            record = {
                "version": 1,
                "loss": "loss",
                "learning_rate": "learning_rate",
                "step": "step" if optimizer in ("adam", "adamw") else "",
                "parameters": parameters,
                "optimizer": {"name": optimizer},
                "module": self.name,
                "inference": {"inputs": list(batch), "outputs": [result] if result else []},
            }
            helper.set_model_props(model, {TRAINING_KEY: json.dumps(record)})
        return model

    def _differentiate(self, loss: str) -> dict[str, str]:
        """Append the backward pass; return the gradient of each parameter."""
        self.phase = "backward"
        used = {name for item in self.tape for name in item.inputs}
        unused = [name for name in self.parameters if name not in used]
        assert not unused, f"parameters without effect: {unused}"
        pending: dict[str, list[str]] = {loss: [self.constant(1.0)]}
        for item in reversed(self.tape):
            if item.output not in pending:
                continue
            self.module = item.module
            upstream = self._sum(item.output, pending.pop(item.output))
            for name, summand in item.gradient(upstream):
                pending.setdefault(name, []).append(summand)
        gradients = {}
        for name in self.parameters:
            self.module, _, _ = name.rpartition(".")
            self.parameter_of_node = name
            summed = self._sum(name, pending[name])
            gradients[name] = self.node("Identity", [summed], self.shapes[name], output=f"{name}.gradient")
        self.parameter_of_node = ""
        return gradients

    def _sum(self, name: str, summands: Sequence[str]) -> str:
        result = summands[0]
        for summand in summands[1:]:
            result = self.node("Add", [result, summand], self.shapes.get(name, ()))
        return result

    def _add_moment(self, name: str, kind: str) -> dict[str, str]:
        moment = f"{name}.{kind}"
        zeros = np.zeros(self.shapes[name], dtype=np.float32)
        self.input(moment, *zeros.shape)
        self.initializers[moment] = numpy_helper.from_array(zeros, moment)
        self.outputs.append(helper.make_tensor_value_info(f"{moment}.new", TensorProto.FLOAT, zeros.shape))
        return {"name": kind, "input": moment, "output": f"{moment}.new"}

    def _correct_bias(self) -> tuple[str, str]:
        """Return 1 - beta1 ** step and 1 - beta2 ** step, which all parameters share."""
        step = self.node("Cast", ["step"], (), to=TensorProto.FLOAT)
        results = []
        for beta in (BETA1, BETA2):
            power = self.node("Pow", [self.constant(beta), step], ())
            results.append(self.node("Sub", [self.constant(1.0), power], ()))
        return results[0], results[1]

    def _update(self, name: str, gradient: str, optimizer: Optimizer, corrections: tuple[str, str]) -> None:
        shape, new = self.shapes[name], f"{name}.new"
        if optimizer in ("sgd", "momentum"):
            direction = gradient
            if optimizer == "momentum":
                direction = self._average(f"{name}.momentum_buffer", gradient, MOMENTUM, 1.0)
            change = self.node("Mul", [direction, "learning_rate"], shape)
            self.node("Sub", [name, change], shape, output=new)
            return
        first = self._average(f"{name}.exp_avg", gradient, BETA1, 1 - BETA1)
        square = self.node("Mul", [gradient, gradient], shape)
        second = self._average(f"{name}.exp_avg_sq", square, BETA2, 1 - BETA2)
        first = self.node("Div", [first, corrections[0]], shape)
        second = self.node("Sqrt", [self.node("Div", [second, corrections[1]], shape)], shape)
        ratio = self.node("Div", [first, self.node("Add", [second, self.constant(EPSILON)], shape)], shape)
        if optimizer == "adamw":
            decay = self.node("Mul", [name, self.constant(WEIGHT_DECAY)], shape)
            ratio = self.node("Add", [ratio, decay], shape)
        change = self.node("Mul", [ratio, "learning_rate"], shape)
        self.node("Sub", [name, change], shape, output=new)

    def _average(self, moment: str, value: str, kept: float, added: float) -> str:
        """Return the new value of a moment."""
        shape = self.shapes[moment]
        old = self.node("Mul", [moment, self.constant(kept)], shape)
        share = value if added == 1.0 else self.node("Mul", [value, self.constant(added)], shape)
        return self.node("Add", [old, share], shape, output=f"{moment}.new")


def make_mlp(
    optimizer: Optimizer = "sgd",
    *,
    widths: Sequence[int] = (8, 16, 16, 4),
    batch: int = 4,
    seed: int = 0,
    has_metadata: bool = True,
) -> ModelProto:
    """Return the training step of a multilayer perceptron with the inputs `x` and `target`."""
    builder, random = StepBuilder("mlp", has_metadata), np.random.default_rng(seed)
    value = builder.input("x", batch, widths[0])
    target = builder.input("target", batch, widths[-1])
    for index, (before, after) in enumerate(pairwise(widths)):
        builder.module = f"layers.{index}"
        weight = builder.parameter(f"layers.{index}.weight", random.normal(size=(before, after)) / before**0.5)
        bias = builder.parameter(f"layers.{index}.bias", np.zeros(after))
        value = builder.add(builder.matmul(value, weight), bias)
        if index < len(widths) - 2:
            value = builder.relu(value) if index % 2 == 0 else builder.tanh(value)
    builder.module = "loss"
    return builder.finish(builder.squared_error(value, target), optimizer, value, ["x"])


def make_transformer(
    optimizer: Optimizer = "adam",
    *,
    layers: int = 2,
    width: int = 16,
    heads: int = 2,
    tokens: int = 6,
    batch: int = 4,
    seed: int = 0,
    has_metadata: bool = True,
) -> ModelProto:
    """Return the training step of a residual network with attention, with the inputs `x` and `target`."""
    builder, random = StepBuilder("transformer", has_metadata), np.random.default_rng(seed)
    value = builder.input("x", batch, tokens, width)
    target = builder.input("target", batch, tokens, width)

    def linear(name: str, argument: str, size: int, result: int) -> str:
        outer, builder.module = builder.module, name
        weight = builder.parameter(f"{name}.weight", random.normal(size=(size, result)) / size**0.5)
        bias = builder.parameter(f"{name}.bias", np.zeros(result))
        output = builder.add(builder.matmul(argument, weight), bias)
        builder.module = outer
        return output

    def split_heads(argument: str) -> str:
        return builder.transpose(builder.reshape(argument, batch, tokens, heads, width // heads), 0, 2, 1, 3)

    for index in range(layers):
        name = builder.module = f"layers.{index}"
        query, key, content = (split_heads(linear(f"{name}.{part}", value, width, width)) for part in "qkv")
        scores = builder.matmul(query, builder.transpose(key, 0, 1, 3, 2))
        weights = builder.softmax(builder.scale(scores, float((width // heads) ** -0.5)))
        mixed = builder.transpose(builder.matmul(weights, content), 0, 2, 1, 3)
        mixed = builder.reshape(mixed, batch, tokens, width)
        value = builder.add(value, linear(f"{name}.out", mixed, width, width))
        hidden = builder.tanh(linear(f"{name}.up", value, width, 2 * width))
        value = builder.add(value, linear(f"{name}.down", hidden, 2 * width, width))
    builder.module = "loss"
    return builder.finish(builder.squared_error(value, target), optimizer, value, ["x"])


def make_two_tower(
    optimizer: Optimizer = "adamw", *, width: int = 16, depth: int = 3, batch: int = 6, seed: int = 0
) -> ModelProto:
    """Return the step of two towers whose similarities mix all rows of a batch, with the inputs `left` and `right`."""
    builder, random = StepBuilder("two_tower"), np.random.default_rng(seed)
    ends = []
    for side in ("left", "right"):
        value = builder.input(side, batch, width)
        for index in range(depth):
            builder.module = f"{side}_tower.{index}"
            weight = builder.parameter(f"{builder.module}.weight", random.normal(size=(width, width)) / width**0.5)
            value = builder.tanh(builder.matmul(value, weight))
        ends.append(value)
    builder.module = "loss"
    similarity = builder.scale(builder.matmul(ends[0], builder.transpose(ends[1], 1, 0)), 1 / width)
    target = "identity_matrix"
    builder.initializers[target] = numpy_helper.from_array(np.eye(batch, dtype=np.float32), target)
    loss = builder.squared_error(builder.softmax(similarity), target)
    return builder.finish(loss, optimizer, similarity, ["left", "right"])


def make_recurrent(
    optimizer: Optimizer = "momentum", *, width: int = 8, steps: int = 4, batch: int = 3, seed: int = 0
) -> ModelProto:
    """Return the step of a recurrent network, unrolled over time, with the inputs `x` and `target`."""
    builder, random = StepBuilder("recurrent"), np.random.default_rng(seed)
    x, target = builder.input("x", batch, width), builder.input("target", batch, width)
    builder.module = "cell"
    into = builder.parameter("cell.input_weight", random.normal(size=(width, width)) / width**0.5)
    across = builder.parameter("cell.hidden_weight", random.normal(size=(width, width)) / width**0.5)
    hidden = builder.tanh(builder.matmul(x, into))
    for _ in range(steps):
        hidden = builder.tanh(builder.add(builder.matmul(hidden, across), builder.matmul(x, into)))
    builder.module = "loss"
    return builder.finish(builder.squared_error(hidden, target), optimizer, hidden, ["x"])


def draw_batch(model: ModelProto, seed: int = 0) -> dict[str, Array]:
    """Return random values for the inputs of a batch: those without a default value, except `step` and `seed`."""
    random = np.random.default_rng(seed)
    given = {tensor.name for tensor in model.graph.initializer} | {"step", "seed"}
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.input
        if value.name not in given
    }
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@dataclass
class ReferenceTrainer:
    """Runs a training step in one plain session, with the states in numpy."""

    model: ModelProto
    states: dict[str, Array] = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            self.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        record = json.loads(next(p.value for p in self.model.metadata_props if p.key == TRAINING_KEY))
        entries = [*record["parameters"], *(m for item in record["parameters"] for m in item["moments"])]
        self._inputs = {entry["output"]: entry["input"] for entry in entries}
        initial = {tensor.name: numpy_helper.to_array(tensor) for tensor in self.model.graph.initializer}
        self.states = {name: initial[name] for name in self._inputs.values()}

    def step(self, feeds: Mapping[str, Array], **more: Array) -> float:
        """Run one step; return the loss."""
        self.count += 1
        names = [output.name for output in self._session.get_outputs()]
        known = {item.name for item in self._session.get_inputs()}
        counted = {"step": np.array(self.count, dtype=np.int64)} if "step" in known else {}
        results = dict(zip(names, self._session.run(names, {**feeds, **self.states, **counted, **more})))
        self.states = {name: results[output] for output, name in self._inputs.items()}
        return float(results["loss"])


def remove_metadata(model: ModelProto) -> ModelProto:
    """Remove what says that a model is a training step."""
    del model.metadata_props[:]
    for node in model.graph.node:
        del node.metadata_props[:]
    return model


# A recurrent cell, which carries states and does not learn.
RECURRENT = """<ir_version: 10, opset_import: ["" : 20]>
cell (float[2,4] x, float[2,4] hidden, float[2,4] cell, float[4,4] w)
=> (float score, float[2,4] hidden_new, float[2,4] cell_new) {
    input = MatMul(x, w)
    both = Add(input, hidden)
    gate = Sigmoid(both)
    other = Tanh(both)
    kept = Mul(gate, cell)
    added = Mul(gate, other)
    cell_new = Add(kept, added)
    shown = Tanh(cell_new)
    hidden_new = Mul(gate, shown)
    score = ReduceMean<keepdims=0>(hidden_new)
}"""
