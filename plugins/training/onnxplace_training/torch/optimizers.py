"""The update of torch's optimisers, written in ONNX: moments, bias corrections, new parameters.

Formulas and names of moments are those of torch.optim, so that checkpoints mean the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from onnxplace.errors import UsageError, format_names
from onnxplace_training.torch.builder import GraphBuilder

MOMENTUM, FIRST, SECOND, LARGEST = "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
# Options that change how torch computes, not what.
IRRELEVANT = {"foreach", "fused", "capturable", "differentiable", "params"}


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter is updated."""

    name: str
    options: Mapping[str, Any]
    """The options of its parameter group."""
    moments: Mapping[str, torch.Tensor]
    """Initial values, by name."""
    has_moments: bool = False
    """Whether the optimiser has values of them already; SGD does not count its steps."""


@dataclass(frozen=True)
class OptimizerPlan:
    """An optimiser as it is at the time of the export."""

    kind: str
    """`sgd`, `adam` or `adamw`."""
    learning_rate: float
    """The rate of the first group; those of other groups are proportional to it."""
    steps: int
    """Steps that the optimiser has done before."""
    parameters: tuple[ParameterPlan, ...]

    def describe(self) -> dict[str, str | float | bool | None]:
        """Return the name and the options of the first group, for the metadata."""
        options = dict(self.parameters[0].options)
        if "betas" in options:
            options["beta1"], options["beta2"] = options.pop("betas")
        plain = {key: value for key, value in options.items() if isinstance(value, (str, float, int, bool))}
        return {"name": self.kind, **plain, "lr": self.learning_rate, "steps_before": float(self.steps)}


def plan_optimizer(optimizer: Any, names: Mapping[int, str]) -> OptimizerPlan:
    """Read an optimiser of torch: its options, and its moments if it has done steps.

    Args:
        optimizer: SGD, Adam or AdamW of torch.optim.
        names: the names of parameters, by their `id`.

    Raises:
        UsageError: It is another optimiser, or has parameters that the module does not have.
    """
    kinds = {torch.optim.SGD: "sgd", torch.optim.AdamW: "adamw", torch.optim.Adam: "adam"}
    if type(optimizer) not in kinds:
        message = f"expected an optimiser among SGD, Adam and AdamW of torch.optim, got {type(optimizer).__name__}"
        raise UsageError("L002", message, where="export_training_step", hint="AdamW is a good choice for most models")
    kind = kinds[type(optimizer)]
    plans, steps = [], set()
    for group in optimizer.param_groups:
        options = {key: to_number(value) for key, value in group.items() if key not in IRRELEVANT}
        for tensor in group["params"]:
            if id(tensor) not in names:
                message = f"the optimiser has a parameter {list(tensor.shape)} that neither the module nor the loss has"
                hint = "make the optimiser from module.parameters()"
                raise UsageError("L010", message, where="export_training_step", hint=hint)
            state = optimizer.state.get(tensor, {})
            steps.add(int(to_number(state.get("step", 0)) or 0))
            moments = list_moments(kind, options, state, tensor)
            has_moments = any(state.get(name) is not None for name in moments)
            plans.append(ParameterPlan(names[id(tensor)], options, moments, has_moments))
    if len(steps) > 1:
        message = f"parameters of the optimiser have done different numbers of steps: {format_names(map(str, steps))}"
        raise UsageError("L010", message, where="export_training_step", hint="export before the first step")
    if not plans:
        message = "the optimiser has no parameters"
        raise UsageError("L010", message, where="export_training_step", hint="make it from module.parameters()")
    rates = [plan.options["lr"] for plan in plans]
    return OptimizerPlan(kind, next((rate for rate in rates if rate), 0.0), steps.pop(), tuple(plans))


def to_number(value: Any) -> Any:
    """Return a tensor of one element as a number; betas may also be tensors."""
    if isinstance(value, (tuple, list)):
        return tuple(to_number(item) for item in value)
    return value.item() if isinstance(value, torch.Tensor) else value


def list_moments(kind: str, options: Mapping[str, Any], state: Mapping[str, Any], tensor: Any) -> dict[str, Any]:
    """Return the moments of a parameter, zero if the optimiser has none yet."""
    if kind == "sgd":
        wanted = [MOMENTUM] if options["momentum"] else []
    else:
        wanted = [FIRST, SECOND, *([LARGEST] if options["amsgrad"] else [])]
    return {name: torch.zeros_like(tensor) if state.get(name) is None else state[name] for name in wanted}


# -------------------------------------------------------------------------------------------------------------- update


@dataclass
class UpdateWriter:
    """Writes the update of parameters, with the numbers that they share."""

    builder: GraphBuilder
    plan: OptimizerPlan
    used_step: bool = False
    shared: dict[tuple[object, ...], str] = field(default_factory=dict)

    def write(self, parameter: ParameterPlan, gradient: str) -> dict[str, str]:
        """Add the nodes of one parameter; returns the names of the new values, that of the parameter under ``""``."""
        if parameter.options["maximize"]:
            gradient = self.builder.emit("Neg", gradient)
        return self.write_sgd(parameter, gradient) if self.plan.kind == "sgd" else self.write_adam(parameter, gradient)

    def number(self, value: float) -> str:
        """Return a float32 constant."""
        return self.builder.constant(np.array(value, dtype=np.float32))

    def scale(self, value: str, factor: float) -> str:
        """Return a value times a number."""
        return value if factor == 1 else self.builder.emit("Mul", value, self.number(factor))

    def share(self, key: tuple[object, ...], make: Callable[[], str]) -> str:
        """Return a number that parameters share; it is written once, as no parameter's node."""
        if key not in self.shared:
            with self.builder.within(parameter="", module=""):
                self.shared[key] = make()
        return self.shared[key]

    def rate(self, options: Mapping[str, Any]) -> str:
        """Return the learning rate of a group."""
        ratio = options["lr"] / self.plan.learning_rate if self.plan.learning_rate else 1.0
        return self.share(("rate", ratio), lambda: self.scale("learning_rate", ratio))

    def step(self) -> str:
        """Return the number of the step, from the optimiser's first one, as float32."""
        self.used_step = True

        def make() -> str:
            name = "step"
            if self.plan.steps:
                name = self.builder.emit("Add", name, self.builder.constant(np.array(self.plan.steps, dtype=np.int64)))
            return self.builder.emit("Cast", name, to=1)

        return self.share(("step",), make)

    def correction(self, beta: float) -> str:
        """Return 1 - beta^step, without cancellation: as tanh(-x / 2) * (1 + e^x) with x = step * log(beta)."""
        if beta == 0:
            return self.number(1.0)
        step = self.step()

        def make() -> str:
            exponent = self.builder.emit("Mul", step, self.number(math.log(beta)))
            half = self.builder.emit("Tanh", self.builder.emit("Mul", exponent, self.number(-0.5)))
            power = self.builder.emit("Add", self.builder.emit("Exp", exponent), self.number(1.0))
            return self.builder.emit("Mul", half, power)

        return self.share(("correction", beta), make)

    def average(self, moment: str, value: str, kept: float, added: float) -> str:
        """Return kept * moment + added * value."""
        return self.builder.emit("Add", self.scale(moment, kept), self.scale(value, added))

    def decay(self, value: str, gradient: str, rate: float) -> str:
        """Return the gradient with the weight decay of a penalty."""
        return self.builder.emit("Add", gradient, self.scale(value, rate)) if rate else gradient

    def write_sgd(self, parameter: ParameterPlan, gradient: str) -> dict[str, str]:
        """Stochastic gradient descent, with momentum (Sutskever et al., 2013) or Nesterov's."""
        options, name = parameter.options, parameter.name
        gradient = self.decay(name, gradient, options["weight_decay"])
        results = {}
        if options["momentum"]:
            momentum, dampening = options["momentum"], options["dampening"]
            buffer = self.average(f"{name}.{MOMENTUM}", gradient, momentum, 1 - dampening)
            if dampening and not parameter.has_moments:
                # The first step takes the whole gradient.
                step = self.step()
                is_first = self.share(("first",), lambda: self.builder.emit("Equal", step, self.number(1.0)))
                buffer = self.builder.emit("Where", is_first, gradient, buffer)
            results[MOMENTUM] = buffer
            gradient = self.average(buffer, gradient, momentum, 1.0) if options["nesterov"] else buffer
        change = self.builder.emit("Mul", gradient, self.rate(options))
        return results | {"": self.builder.emit("Sub", name, change)}

    def write_adam(self, parameter: ParameterPlan, gradient: str) -> dict[str, str]:
        """Adam (Kingma and Ba, ICLR 2015), AMSGrad (Reddi et al., 2018), AdamW (Loshchilov and Hutter, ICLR 2019)."""
        options, name, emit = parameter.options, parameter.name, self.builder.emit
        (beta1, beta2), rate, decay = options["betas"], self.rate(options), options["weight_decay"]
        value = name
        if decay and (self.plan.kind == "adamw" or options.get("decoupled_weight_decay")):
            one = self.number(1.0)
            kept = self.share(("kept", rate, decay), lambda: emit("Sub", one, self.scale(rate, decay)))
            value = emit("Mul", name, kept)
        else:
            gradient = self.decay(name, gradient, decay)
        first = self.average(f"{name}.{FIRST}", gradient, beta1, 1 - beta1)
        second = self.average(f"{name}.{SECOND}", emit("Mul", gradient, gradient), beta2, 1 - beta2)
        results, largest = {FIRST: first, SECOND: second}, second
        if options["amsgrad"]:
            largest = results[LARGEST] = emit("Max", f"{name}.{LARGEST}", second)
        corrections = self.correction(beta1), self.correction(beta2)
        size = self.share(("size", rate, beta1), lambda: emit("Div", rate, corrections[0]))
        root = self.share(("root", beta2), lambda: emit("Sqrt", corrections[1]))
        divisor = emit("Add", emit("Div", emit("Sqrt", largest), root), self.number(options["eps"]))
        change = emit("Mul", emit("Div", first, divisor), size)
        return results | {"": emit("Sub", value, change)}


def write_clipping(builder: GraphBuilder, gradients: Mapping[str, str], limit: float) -> tuple[dict[str, str], str]:
    """Scale gradients such that the norm of all together is at most a limit; as torch's `clip_grad_norm_`.

    Returns the scaled gradients by parameter, and the norm before.
    """
    squares = []
    for name, gradient in gradients.items():
        with builder.within(parameter=name):
            squares.append(builder.emit("ReduceSumSquare", gradient, keepdims=0))
    total = squares[0] if len(squares) == 1 else builder.emit("Sum", *squares)
    norm = builder.emit("Sqrt", total)
    floor = builder.emit("Add", norm, builder.constant(np.array(1e-6, dtype=np.float32)))
    ratio = builder.emit("Div", builder.constant(np.array(limit, dtype=np.float32)), floor)
    factor = builder.emit("Min", ratio, builder.constant(np.array(1.0, dtype=np.float32)))
    scaled = {}
    for name, gradient in gradients.items():
        with builder.within(parameter=name):
            scaled[name] = builder.emit("Mul", gradient, factor)
    return scaled, norm
