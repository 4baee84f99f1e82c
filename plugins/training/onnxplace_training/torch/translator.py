"""Writes a trace in ONNX: one operator after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from onnxplace.errors import ModelError
from onnxplace_training.torch.tracing import read_mark
from onnxplace_training.torch.translation import (
    MAX_FOLDED_ELEMENTS,
    ONNX_TYPES,
    TRANSLATIONS,
    Context,
    Operand,
    SymbolicNumber,
    UntranslatableError,
    is_static,
)

# The modules of `operators` that fill the table when they are imported.
OPERATOR_MODULES = ("arithmetic", "layers", "layout", "random_numbers")
# Constants that are computed from others: at most this many elements, or the model grows.
MAX_COMPUTED_ELEMENTS = 1 << 20
UNIFORM = {"full", "zeros", "ones", "empty", "full_like", "zeros_like", "ones_like", "empty_like", "new_zeros"}
# Why operators have no translation, where more can be said than that.
DISTRIBUTION = "this distribution; dropout, rand, randn and bernoulli with a number are translated"
BAG = "use nn.Embedding and sum() or mean() in its place"
REASONS = {
    "convolution_backward": "a convolution over an axis of unknown size; try fixed shapes",
    "slice_scatter": "a slice of the batch whose bounds depend on it; try dynamic_batch=False",
    "index_put": "indexing with a mask, whose result has a size that depends on data; use where()",
    "embedding_dense_backward": "embeddings with scale_grad_by_freq",
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), BAG),
    **dict.fromkeys(("bernoulli", "multinomial", "randint", "randperm", "exponential"), DISTRIBUTION),
}
HINT = "use other operators in this module, or say on onnxplace's issue tracker that you need this one"


@dataclass
class Translator:
    """Translates the graph of a trace node by node."""

    context: Context
    attributes: torch.nn.Module
    """Holds the tensors of `get_attr` nodes."""
    values: dict[torch.fx.Node, Any] = field(default_factory=dict)
    """What each node became: an Operand, a number, a list of these, or None."""

    def translate(self, graph: torch.fx.Graph, given: Mapping[torch.fx.Node, Operand]) -> None:
        """Translate all nodes of a graph whose inputs are given.

        Raises:
            ModelError: ONNX has no equal of an operator; the message names the operator and the module.
        """
        for name in OPERATOR_MODULES:
            import_module(f"onnxplace_training.torch.operators.{name}")
        self.values.update(given)
        for node in graph.nodes:
            if node.op == "get_attr":
                self.values[node] = make_constant(getattr(self.attributes, node.target))
            elif node.op == "call_function":
                phase, module = read_mark(node)
                with self.context.builder.within(phase=phase, module=module):
                    self.values[node] = self.translate_node(node)

    def translate_node(self, node: torch.fx.Node) -> Any:
        """Translate one operator."""
        result = node.meta.get("val")
        if str(node.target).startswith("aten._local_scalar_dense"):
            raise refuse_data(node)
        if isinstance(result, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return SymbolicNumber(result.node.expr, isinstance(result, torch.SymFloat))
        if isinstance(result, (int, float)):
            return result
        if getattr(node.target, "__name__", "") == "getitem":
            return self.values[node.args[0]][node.args[1]]
        arguments, options = self.resolve(list(node.args)), self.resolve(dict(node.kwargs))
        folded = compute_constant(node, arguments, options)
        if folded is not None:
            return folded
        try:
            return self.apply(str(node.target), arguments, options, result)
        except UntranslatableError as problem:
            raise refuse(node, str(problem)) from None

    def apply(self, target: str, arguments: list[Any], options: dict[str, Any], result: Any) -> Any:
        """Call the translation of an operator and describe what it returns."""
        if target not in TRANSLATIONS:
            name = target.removeprefix("aten.").partition(".")[0]
            raise UntranslatableError(REASONS.get(name, "there is no translation of this operator"))
        self.context.result = result
        tensors = result if isinstance(result, (list, tuple)) else [result]
        if any(isinstance(tensor, torch.Tensor) and tensor.dtype not in ONNX_TYPES for tensor in tensors):
            raise UntranslatableError("its result has a type that ONNX Runtime does not have, such as complex numbers")
        returned = TRANSLATIONS[target](self.context, *arguments, **options)
        if isinstance(result, (list, tuple)):
            return [describe(item, tensor) for item, tensor in zip(returned, result)]
        return describe(returned, result)

    def resolve(self, value: Any) -> Any:
        """Return arguments with what their nodes became."""
        if isinstance(value, torch.fx.Node):
            return self.values[value]
        if isinstance(value, (list, tuple)):
            return [self.resolve(item) for item in value]
        if isinstance(value, dict):
            return {key: self.resolve(item) for key, item in value.items()}
        return value


def describe(returned: Any, tensor: torch.Tensor | None) -> Operand | None:
    """Return an operand with the type and shape that torch computed."""
    if tensor is None or returned is None or returned == "":
        return None
    if isinstance(returned, Operand):
        return replace(returned, dtype=tensor.dtype, shape=tuple(tensor.shape))
    return Operand(returned, tensor.dtype, tuple(tensor.shape))


def make_constant(tensor: torch.Tensor) -> Operand:
    """Return a tensor that is the same in every step as an operand."""
    return Operand("", tensor.dtype, tuple(tensor.shape), constant=tensor.detach().cpu())


def compute_constant(node: torch.fx.Node, arguments: list[Any], options: dict[str, Any]) -> Operand | None:
    """Compute an operator whose arguments are constants; None if it has others, or its result is large."""
    result, target = node.meta.get("val"), node.target
    if not isinstance(result, torch.Tensor) or not isinstance(target, torch._ops.OpOverload):
        return None
    if torch.Tag.nondeterministic_seeded in target.tags or not is_static(result.shape):
        return None
    is_uniform = target.overloadpacket.__name__ in UNIFORM
    if math.prod(result.shape) > (MAX_FOLDED_ELEMENTS if is_uniform else MAX_COMPUTED_ELEMENTS):
        return None
    leaves = torch.utils._pytree.tree_leaves((arguments, options), is_leaf=lambda item: item is None)
    if any(
        isinstance(item, SymbolicNumber) or (isinstance(item, Operand) and item.constant is None) for item in leaves
    ):
        return None

    def unwrap(item: Any) -> Any:
        return item.constant if isinstance(item, Operand) else item

    plain_arguments, plain_options = torch.utils._pytree.tree_map(unwrap, (arguments, options))
    with torch.no_grad():
        return make_constant(target(*plain_arguments, **plain_options))


def refuse_data(node: torch.fx.Node) -> ModelError:
    """Return the error for a number that is read from a tensor."""
    _, module = read_mark(node)
    message = "the code depends on the values of tensors, which a graph cannot: it reads a number with item()"
    where = f"module {module!r}" if module else "the module or the loss"
    return ModelError("L003", message, where=where, hint="compute with the tensor itself, detached if need be")


def refuse(node: torch.fx.Node, reason: str) -> ModelError:
    """Return the error for an operator that cannot be translated."""
    phase, module = read_mark(node)
    where = f"module {module!r}" if module else "the module or the loss"
    part = " in its gradient" if phase == "backward" else ""
    message = f"operator {node.target}{part} cannot be written in ONNX: {reason}"
    return ModelError("L002", message, where=where, hint=HINT)
