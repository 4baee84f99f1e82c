"""Puts a step together: micro-batches, sums of gradients, clipping, the update, states and metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from onnx import ModelProto, StringStringEntryProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnxplace.model_metadata import TRAINING_KEY, CarriedTensor, InferencePart, Parameter, TrainingStep
from onnxplace_training.torch.builder import BACKWARD, FORWARD, UPDATE, GraphBuilder, mark_owners
from onnxplace_training.torch.operators.random_numbers import mix_seed
from onnxplace_training.torch.optimizers import OptimizerPlan, UpdateWriter, write_clipping
from onnxplace_training.torch.step_trace import Problem, Results, Trace
from onnxplace_training.torch.translation import ONNX_TYPES, Context, Operand, to_numpy
from onnxplace_training.torch.translator import Translator

# The opset of the model: the first with Gelu. ONNX Runtime has all its operators.
OPSET, IR_VERSION = 20, 10
SCALARS = {"learning_rate": TensorProto.FLOAT, "step": TensorProto.INT64, "seed": TensorProto.INT64}


@dataclass
class StepAssembly:
    """The parts of a training step, and the model that they become."""

    problem: Problem
    trace: Trace
    plan: OptimizerPlan
    batch: Mapping[str, torch.Tensor]
    """The whole batch."""
    parts: int
    loss_scale: float | None
    clip: float | None
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    uses_seed: bool = False
    uses_step: bool = False
    outputs: dict[str, str] = field(default_factory=dict)
    """The value of each output of the model."""
    shapes: dict[str, tuple[int, tuple[Any, ...]]] = field(default_factory=dict)
    """Element type and shape of each output."""

    def build(self) -> ModelProto:
        """Return the model of the step."""
        self.reserve_names()
        results = self.run_parts()
        gradients = self.finish_gradients(results)
        self.add_output("loss", self.average([item.loss for item in results]), self.trace.results.loss)
        # Metrics of the user are means over micro-batches, those in whole numbers sums.
        for name, node in self.trace.results.metrics.items():
            self.add_output(name, self.average([result.metrics[name] for result in results]), node)
        self.update(gradients)
        buffers = self.list_buffers(results[-1])
        inference = self.list_inference(results)
        self.name_outputs(gradients, inference)
        self.builder.drop_unused(self.outputs)
        inference = {name: value for name, value in inference.items() if self.builder.is_produced(value)}
        step = self.describe(gradients, buffers, inference)
        mark_owners(self.builder, {item.name: item.gradient for item in step.parameters})
        return self.make_model(step)

    def reserve_names(self) -> None:
        """Take the names of inputs and outputs, before nodes get names."""
        names = [*self.batch, *SCALARS, "loss", *self.trace.results.metrics, "gradient_norm"]
        names += [short(key) for key in (*self.problem.trained, *self.problem.frozen, *self.problem.buffers)]
        names += [f"{plan.name}.{moment}" for plan in self.plan.parameters for moment in plan.moments]
        for name in names:
            for suffix in ("", ".new", ".gradient"):
                self.builder.reserve_name(f"{name}{suffix}")

    # ------------------------------------------------------------------------------------------------- micro-batches

    def run_parts(self) -> list[Results]:
        """Translate the trace once for each micro-batch; each takes the buffers of the one before."""
        buffers = {name: self.make_state(name, tensor) for name, tensor in self.problem.buffers.items()}
        parameters = {**self.problem.trained, **self.problem.frozen}
        fixed = {name: self.make_state(name, tensor) for name, tensor in parameters.items()}
        results = []
        for index in range(self.parts):
            micro_batch = str(index) if self.parts > 1 else ""
            with self.builder.within(phase=FORWARD, micro_batch=micro_batch):
                results.append(self.run_part(index, {**fixed, **buffers}))
            buffers = results[-1].buffers
        return results

    def make_state(self, name: str, tensor: torch.Tensor) -> Operand:
        """Return the operand of a parameter or buffer."""
        return Operand(short(name), tensor.dtype, tuple(tensor.shape))

    def run_part(self, index: int, states: Mapping[str, Operand]) -> Results:
        """Translate one micro-batch."""
        context = self.make_context(index)
        given = {node: states[name] for name, node in self.trace.inputs.items()}
        given |= {node: self.read_batch(context, name, index) for name, node in self.trace.batch.items()}
        translator = Translator(context, self.trace.graph_module)
        translator.translate(self.trace.graph_module.graph, given)
        items = [None if node is None else translator.values[node] for node in self.trace.results.flatten()]
        return self.trace.results.rebuild(items)

    def make_context(self, index: int) -> Context:
        """Return the context of a micro-batch: its sizes, and its random numbers."""
        sites, seeds = iter(range(1 << 30)), list[str]()

        def make_seed() -> str:
            if not seeds:
                self.uses_seed = self.uses_step = True
                with self.builder.within(module=""):
                    seeds.append(mix_seed(context, "seed", "step", index))
            return seeds[0]

        context = Context(self.builder, self.trace.symbols, self.parts, seed=make_seed, site=lambda: next(sites))
        return context

    def read_batch(self, context: Context, name: str, index: int) -> Operand:
        """Return an input of the batch, or its part for a micro-batch."""
        node, tensor = self.trace.batch[name], self.batch[name]
        shape = tuple(node.meta["val"].shape)
        if self.parts == 1 or not self.is_split(name):
            return Operand(name, tensor.dtype, shape)
        # Reshape fails if a batch cannot be split into equal parts, which would change the average.
        split = context.emit("Reshape", name, context.integers([self.parts, -1, *tensor.shape[1:]]))
        return Operand(context.emit("Gather", split, context.number(index, torch.int64), axis=0), tensor.dtype, shape)

    def is_split(self, name: str) -> bool:
        """Return whether an input of the batch has the batch as first axis."""
        sizes = [tensor.shape[0] for tensor in self.batch.values() if tensor.dim()]
        tensor = self.batch[name]
        return bool(tensor.dim() and tensor.shape[0] == sizes[0])

    def average(self, items: Sequence[Operand]) -> str:
        """Return the mean of a result over micro-batches."""
        context = Context(self.builder)
        names = [context.read(item) for item in items]
        if len(names) == 1:
            return names[0]
        total = self.builder.emit("Sum", *names)
        dtype = items[0].dtype
        if not dtype.is_floating_point:
            return total
        return self.builder.emit("Mul", total, context.number(1 / self.parts, dtype))

    # ------------------------------------------------------------------------------------------ gradients and update

    def finish_gradients(self, results: Sequence[Results]) -> dict[str, str]:
        """Return the gradient of each parameter that has one: summed over micro-batches, without the loss scale."""
        context, gradients = Context(self.builder), {}
        for key in self.problem.trained:
            operands = [result.gradients[key] for result in results]
            if operands[0] is None:
                continue
            with self.builder.within(phase=BACKWARD, parameter=short(key), module=parent(short(key))):
                names = [context.read(operand) for operand in operands]
                name = names[0] if len(names) == 1 else context.combine("Add", names)
                if self.loss_scale is not None:
                    name = context.emit("Mul", name, context.number(1 / self.loss_scale, torch.float32))
            gradients[short(key)] = name
        return gradients

    def add_output(self, name: str, value: str, node: torch.fx.Node) -> None:
        """Note an output of the model."""
        result = node.meta["val"]
        self.outputs[name] = value
        self.shapes[name] = ONNX_TYPES[result.dtype], tuple(result.shape)

    def update(self, gradients: Mapping[str, str]) -> None:
        """Add the update of each parameter with a gradient."""
        writer = UpdateWriter(self.builder, self.plan)
        with self.builder.within(phase=UPDATE, module="", micro_batch=""):
            if self.clip is not None:
                gradients, self.outputs["gradient_norm"] = write_clipping(self.builder, gradients, self.clip)
                self.shapes["gradient_norm"] = TensorProto.FLOAT, ()
            for plan in self.plan.parameters:
                if plan.name not in gradients:
                    continue
                with self.builder.within(parameter=plan.name, module=parent(plan.name)):
                    values = writer.write(plan, gradients[plan.name])
                for moment, value in values.items():
                    state = f"{plan.name}.{moment}" if moment else plan.name
                    self.outputs[f"{state}.new"] = value
        self.uses_step |= writer.used_step

    # ------------------------------------------------------------------------------------------------ what it is called

    def list_buffers(self, result: Results) -> list[str]:
        """Return the names of buffers that the step changes, and note their new values."""
        changed = []
        context = Context(self.builder)
        for key in self.problem.buffers:
            operand = result.buffers[key]
            if operand.constant is not None or operand.name != short(key):
                changed.append(short(key))
                self.outputs[f"{short(key)}.new"] = context.read(operand)
        return changed

    def list_inference(self, results: Sequence[Results]) -> dict[str, str]:
        """Return the values that the module returns, by name; none with micro-batches, which have them in parts."""
        if self.parts > 1:
            return {}
        outputs = {name: item for name, item in results[0].outputs.items() if item is not None and not item.constant}
        return {name: item.name for name, item in outputs.items() if self.builder.is_produced(item.name)}

    def name_outputs(self, gradients: dict[str, str], inference: dict[str, str]) -> None:
        """Rename values to the names of outputs and gradients; a value with two names is copied."""
        names: dict[str, str] = {}
        for output, value in self.outputs.items():
            if value in names or not self.builder.is_produced(value):
                value = self.builder.emit("Identity", value)
            names[value] = output
        for name, value in gradients.items():
            if value not in names and self.builder.is_produced(value):
                names[value] = f"{name}.gradient"
        for name, value in inference.items():
            if value not in names:
                names[value] = self.builder.reserve_name(name)
        self.builder.rename_values(names)
        gradients.update({name: names.get(value, value) for name, value in gradients.items()})
        inference.update({name: names.get(value, value) for name, value in inference.items()})

    def describe(
        self, gradients: Mapping[str, str], buffers: Sequence[str], inference: Mapping[str, str]
    ) -> TrainingStep:
        """Return the record of the step for the model's metadata."""
        entries = [
            Parameter(
                **carry(plan.name, plan.name),
                gradient=gradients[plan.name],
                moments=tuple(CarriedTensor(**carry(moment, f"{plan.name}.{moment}")) for moment in plan.moments),
            )
            for plan in self.plan.parameters
            if plan.name in gradients
        ]
        needed = self.builder.find_needed(inference.values())
        taken = [name for name in self.batch if name != "target" or not self.problem.is_criterion]
        return TrainingStep(
            loss="loss",
            learning_rate="learning_rate",
            step="step" if self.uses_step else "",
            seed="seed" if self.uses_seed else "",
            metrics=(*self.trace.results.metrics, *(["gradient_norm"] if self.clip is not None else [])),
            parameters=tuple(entries),
            buffers=tuple(CarriedTensor(**carry(name, name)) for name in buffers),
            optimizer=self.plan.describe(),
            module=type(self.problem.module).__name__,
            inference=InferencePart(
                inputs=tuple(name for name in taken if name in needed),
                outputs=tuple(inference.values()),
            ),
        )

    # --------------------------------------------------------------------------------------------------------- model

    def make_model(self, step: TrainingStep) -> ModelProto:
        """Return the ONNX model with its inputs, default values and metadata."""
        tensors = {short(key): tensor for key, tensor in {**self.problem.trained, **self.problem.frozen}.items()}
        tensors |= {short(key): tensor for key, tensor in self.problem.buffers.items()}
        for plan in self.plan.parameters:
            tensors |= {f"{plan.name}.{moment}": tensor for moment, tensor in plan.moments.items()}
        states = [state.input for state in step.list_states()]
        read = {name for node in self.builder.nodes for name in node.input} | set(states)
        initial = {name: numpy_helper.from_array(to_numpy(t), name) for name, t in tensors.items() if name in read}
        rate = numpy_helper.from_array(np.array(self.plan.learning_rate, dtype=np.float32), "learning_rate")
        inputs = [self.declare_batch(name) for name in self.batch]
        scalars = [name for name in ("learning_rate", step.step, step.seed) if name]
        inputs += [helper.make_tensor_value_info(name, SCALARS[name], []) for name in scalars]
        inputs += [declare_tensor(name, tensors[name]) for name in states]
        outputs = [self.declare_output(name) for name in self.outputs if name in self.shapes]
        outputs += [declare_tensor(state.output, tensors[state.input]) for state in step.list_states()]
        for node in self.builder.nodes:
            for key, text in self.builder.origins[node.name].describe().items():
                node.metadata_props.append(StringStringEntryProto(key=key, value=text))
        constants = [rate, *initial.values(), *self.builder.constants.values()]
        graph = helper.make_graph(self.builder.nodes, "training_step", inputs, outputs, constants)
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="onnxplace")
        helper.set_model_props(model, {TRAINING_KEY: step.model_dump_json()})
        return model

    def declare_batch(self, name: str) -> ValueInfoProto:
        """Return the declaration of an input of the batch."""
        tensor = self.batch[name]
        shape: list[int | str] = list(tensor.shape)
        if self.problem.dynamic_batch and self.is_split(name):
            shape[0] = "batch"
        return helper.make_tensor_value_info(name, ONNX_TYPES[tensor.dtype], shape)

    def declare_output(self, name: str) -> ValueInfoProto:
        """Return the declaration of the loss or a metric; sizes that depend on the batch are left open."""
        dtype, shape = self.shapes[name]
        return helper.make_tensor_value_info(name, dtype, [size if isinstance(size, int) else None for size in shape])


def short(key: str) -> str:
    """Return the name of a tensor for users, without the part for the module."""
    return key.removeprefix("module.")


def parent(name: str) -> str:
    """Return the path of the module that has a parameter."""
    return name.rpartition(".")[0]


def carry(name: str, state: str) -> dict[str, str]:
    """Return the fields of a carried tensor."""
    return {"name": name, "input": state, "output": f"{state}.new"}


def declare_tensor(name: str, tensor: torch.Tensor) -> ValueInfoProto:
    """Return the declaration of a state."""
    return helper.make_tensor_value_info(name, ONNX_TYPES[tensor.dtype], list(tensor.shape))
