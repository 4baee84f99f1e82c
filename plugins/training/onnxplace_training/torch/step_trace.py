"""The trace of one training step: forward, loss and gradients, for one batch or micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onnxplace.errors import ModelError, UsageError, format_names
from onnxplace_training.torch.builder import BACKWARD, FORWARD
from onnxplace_training.torch.tracing import ModuleTracker, list_module_names, record, set_mark

# The size of a batch in a trace with a symbolic size: a number that no layer has by chance.
TRACED_BATCH = 11
BATCH = "batch"


@dataclass(frozen=True)
class Problem:
    """What to trace: the module, the loss, and the tensors that belong to them."""

    module: nn.Module
    loss: Callable[..., Any]
    is_criterion: bool
    """The loss takes what the module returns and the last tensor of the batch, not the module and the batch."""
    trained: Mapping[str, torch.Tensor]
    frozen: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    batch: Mapping[str, torch.Tensor]
    dynamic_batch: bool
    gradient_seed: float
    """The gradient of the loss with respect to itself: the scale of the loss."""


@dataclass(frozen=True)
class Trace:
    """The operators of one forward and backward pass, and the nodes of its inputs and results."""

    graph_module: torch.fx.GraphModule
    inputs: dict[str, torch.fx.Node]
    """The nodes of parameters and buffers."""
    batch: dict[str, torch.fx.Node]
    results: Results
    """Nodes in place of tensors."""
    symbols: dict[str, tuple[str, int]]
    """The input and axis that each symbolic size is."""


@dataclass(frozen=True)
class Results:
    """What a step computes: tensors while it is traced, then their nodes."""

    loss: Any
    metrics: dict[str, Any]
    outputs: dict[str, Any]
    """What the module returned."""
    gradients: dict[str, Any]
    """None where the loss does not depend on a parameter."""
    buffers: dict[str, Any]

    def list_groups(self) -> tuple[dict[str, Any], ...]:
        """Return all but the loss."""
        return self.metrics, self.outputs, self.gradients, self.buffers

    def flatten(self) -> list[Any]:
        """Return all tensors in one list, in the order of `rebuild`."""
        return [self.loss, *(item for group in self.list_groups() for item in group.values())]

    def rebuild(self, items: Sequence[Any]) -> Results:
        """Return the same names with other items."""
        rest = iter(items)
        return Results(next(rest), *({name: next(rest) for name in group} for group in self.list_groups()))


class StepModule(nn.Module):  # type: ignore[misc]
    """The module and the loss as one module, so that tensors of both can be replaced by name."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.module = problem.module
        self.problem = problem
        if isinstance(problem.loss, nn.Module):
            self.loss = problem.loss

    def forward(self, batch: Mapping[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return what the loss function returns, and the buffers after the step."""
        if self.problem.is_criterion:
            *arguments, target = batch.values()
            returned = self.problem.loss(self.module(*arguments), target)
        else:
            returned = self.problem.loss(self.module, **batch)
        return returned, dict(self.named_buffers())


@dataclass
class StepFunction:
    """The function that is traced: parameters, buffers and batch to loss and gradients, as a flat list."""

    problem: Problem
    tracker: ModuleTracker
    outputs: dict[str, torch.Tensor] | None = None
    """What the module returned in its first call."""
    results: Results | None = None

    def __call__(self, tensors: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> list[Any]:
        problem = self.problem
        leaves = {name: tensors[name].detach().requires_grad_() for name in problem.trained}
        buffers = {name: tensors[name].clone() for name in problem.buffers}
        replaced = {**leaves, **{name: tensors[name] for name in problem.frozen}, **buffers}
        set_mark(FORWARD, "")
        with problem.module.register_forward_hook(self.keep_outputs), self.tracker.watch():
            returned, changed = torch.func.functional_call(StepModule(problem), replaced, (batch,), strict=False)
        loss, metrics = read_loss(returned)
        self.tracker.mark_backward(loss)
        set_mark(BACKWARD, "")
        start = torch.full_like(loss, problem.gradient_seed)
        gradients = torch.autograd.grad(loss, list(leaves.values()), start, allow_unused=True)
        self.results = Results(
            loss.detach(),
            {name: metric.detach() for name, metric in metrics.items()},
            {name: output.detach() for name, output in (self.outputs or {}).items()},
            dict(zip(leaves, gradients)),
            {name: changed[name].detach() for name in buffers},
        )
        return self.results.flatten()

    def keep_outputs(self, _: nn.Module, __: object, returned: Any) -> None:
        """Keep what the module returns in its first call."""
        if self.outputs is None:
            self.outputs = flatten_outputs(returned)


def flatten_outputs(value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a module returned, by name: the keys of mappings, or `output`, `output_1`, ..."""
    if isinstance(value, torch.Tensor):
        return {"output": value}
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items() if isinstance(item, torch.Tensor)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        tensors = [item for item in value if isinstance(item, torch.Tensor)]
        return {f"output_{index}" if index else "output": tensor for index, tensor in enumerate(tensors)}
    return {}


def read_loss(returned: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and the metrics from what the loss function returned.

    Raises:
        UsageError: It is not a scalar of floating-point type, or no parameter has an influence on it.
    """
    metrics: Mapping[str, Any] = {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned, metrics = returned
    shape = tuple(returned.shape) if isinstance(returned, torch.Tensor) else None
    if shape != () or not returned.dtype.is_floating_point:
        kind = f"a tensor {list(shape)} of {returned.dtype}" if shape is not None else type(returned).__name__
        message = f"expected the loss to be a scalar tensor of floats, got {kind}"
        hint = "return loss, or (loss, {name: metric}); .mean() makes a scalar"
        raise UsageError("L005", message, where="export_training_step", hint=hint)
    if returned.grad_fn is None:
        message = "the loss does not depend on any trained parameter: there are no gradients"
        raise UsageError("L005", message, where="export_training_step", hint="do not detach() what the loss needs")
    wrong = [name for name, item in metrics.items() if not isinstance(item, torch.Tensor)]
    if wrong:
        message = f"expected metrics to be tensors, got others for {format_names(wrong)}"
        raise UsageError("L005", message, where="export_training_step", hint="compute metrics with torch")
    return returned, dict(metrics)


# -------------------------------------------------------------------------------------------------------------- traces


def trace_step(problem: Problem) -> Trace:
    """Trace forward, loss and gradients of a problem.

    Raises:
        UsageError: The loss is not a scalar, or the code needs a fixed batch size.
        ModelError: The module's code depends on the values of tensors, or uses operators without known results.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    tensors = {**problem.trained, **problem.frozen, **problem.buffers}
    fakes = {name: make_fake(mode, tensor, None) for name, tensor in tensors.items()}
    sizes = [tensor.shape[0] for tensor in problem.batch.values() if tensor.dim()]
    size = sizes[0] if sizes and problem.dynamic_batch else None
    batch = {name: make_fake(mode, tensor, size) for name, tensor in problem.batch.items()}
    function = StepFunction(problem, ModuleTracker(list_module_names(problem.module, problem.loss)))
    graph_module, nodes = run_trace(function, fakes, batch, mode)
    check_symbols(environment, batch)
    assert function.results is not None
    results = function.results.rebuild(nodes)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    named = dict(zip([*fakes, *((BATCH, name) for name in batch)], placeholders))
    return Trace(
        graph_module,
        {name: named[name] for name in fakes},
        {name: named[BATCH, name] for name in batch},
        results,
        list_symbols(batch),
    )


def make_fake(mode: Any, tensor: torch.Tensor, batch: int | None) -> torch.Tensor:
    """Return a tensor without data; if its first axis has the size of the batch, that is a symbol."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    is_batch = batch is not None and tensor.dim() > 0 and tensor.shape[0] == batch
    shape = (TRACED_BATCH, *tensor.shape[1:]) if is_batch else tensor.shape
    kinds = [DimDynamic.DUCK if is_batch and not axis else DimDynamic.STATIC for axis in range(tensor.dim())]
    context = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(torch.empty(shape, dtype=tensor.dtype), symbolic_context=context)


def run_trace(
    function: StepFunction, fakes: Mapping[str, Any], batch: Mapping[str, Any], mode: Any
) -> tuple[torch.fx.GraphModule, list[torch.fx.Node]]:
    """Trace a step, and say which module prevents it."""
    try:
        return record(function, (dict(fakes), dict(batch)), mode)
    except (UsageError, ModelError):
        raise
    except Exception as error:
        kind = type(error).__name__
        stack = function.tracker.stack
        where = f"module {stack[-1][0]!r}" if stack and stack[-1][0] else "the module" if stack else "the loss"
        if "DataDependent" in kind or "DynamicOutputShape" in kind:
            message = "the code depends on the values of tensors, which a graph cannot"
            hint = "replace item(), if tensor: and masks as indices by torch.where and fixed shapes"
        else:
            first_line = str(error).splitlines()[0] if str(error) else ""
            message = f"its code fails while it is traced: {kind}: {first_line}"
            hint = "check that it trains in torch with this example; with dynamic_batch=False, sizes are numbers"
        raise ModelError("L003", message, where=where, hint=hint) from error


def list_symbols(batch: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, int]]:
    """Return the smallest input that has each symbolic size, and the axis."""
    symbols: dict[str, tuple[str, int]] = {}
    for name in sorted(batch, key=lambda item: batch[item].stride(0) if batch[item].dim() else 0):
        for axis, size in enumerate(batch[name].shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                symbols.setdefault(str(size.node.expr), (name, axis))
    return symbols


def check_symbols(environment: Any, batch: Mapping[str, torch.Tensor]) -> None:
    """Raise UsageError if the code works for some batch sizes only."""
    reasons = [
        f"it needs {guard.expr}, in {guard.sloc.framework_loc.filename}, line {guard.sloc.framework_loc.lineno}"
        for guard in environment.guards
        # torch itself asks for sizes to choose kernels, which has no influence on results.
        if not guard.sloc.framework_loc.filename.startswith(str(Path(torch.__file__).parent))
    ]
    sizes = [size for tensor in batch.values() for size in tensor.shape]
    names = [str(size.node._expr) for size in sizes if isinstance(size, torch.SymInt)]
    reasons += [
        f"it needs {symbol} = {value}"
        for symbol, value in environment.replacements.items()
        if str(symbol) in names and value.is_number
    ]
    if reasons:
        message = f"the code works for some batch sizes only: {reasons[0]}"
        hint = "export with dynamic_batch=False, for the batch size of the example"
        raise UsageError("L003", message, where="export_training_step", hint=hint)
