"""Records forward and backward of a module as one graph of ATen operators, with the module of each operator."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from onnxplace_training.torch.builder import BACKWARD, FORWARD
from onnxplace_training.torch.decompositions import decompositions

MARK = "onnxplace"


@dataclass
class ModuleTracker:
    """Marks recorded operators with the innermost module that runs, also in the backward pass.

    Autograd numbers its nodes in the order in which they are made. The numbers at the beginning and the end of a
    module's call therefore tell which nodes are the module's.
    """

    names: Mapping[nn.Module, str]
    stack: list[tuple[str, int]] = field(default_factory=list)
    intervals: list[tuple[int, int, str]] = field(default_factory=list)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Follow the calls of all modules."""
        with contextlib.ExitStack() as hooks:
            for module, name in self.names.items():
                hooks.enter_context(module.register_forward_pre_hook(partial(self.enter, name), prepend=True))
                hooks.enter_context(module.register_forward_hook(partial(self.leave, name)))
            yield

    def enter(self, name: str, *_: object) -> None:
        """Note that a module begins; a hook."""
        self.stack.append((name, next_number()))
        set_mark(FORWARD, name)

    def leave(self, name: str, *_: object) -> None:
        """Note that a module ends, unless it fails: then it stays on the stack; a hook."""
        while self.stack:
            inner, start = self.stack.pop()
            if inner == name:
                self.intervals.append((start, next_number(), name))
                break
        set_mark(FORWARD, self.stack[-1][0] if self.stack else "")

    def find_module(self, number: int) -> str:
        """Return the innermost module that made a node of autograd."""
        around = [(end - start, name) for start, end, name in self.intervals if start <= number < end]
        return min(around)[1] if around else ""

    def mark_backward(self, loss: torch.Tensor) -> None:
        """Let each node of autograd mark the operators of its backward."""
        waiting, known = [loss.grad_fn], {loss.grad_fn}
        while waiting:
            node = waiting.pop()
            if node is None:
                continue
            # Leaves have a number of their own, and do not run.
            if not type(node).__name__.startswith("AccumulateGrad"):
                module = self.find_module(node._sequence_nr())
                node.register_prehook(lambda *_, module=module: set_mark(BACKWARD, module))
            following = [other for other, _ in node.next_functions if other not in known]
            known.update(following)
            waiting.extend(following)


def set_mark(phase: str, module: str) -> None:
    """Set the phase and module of the operators that follow."""
    traceback.current_meta["custom"] = {MARK: (phase, module)}


def read_mark(node: torch.fx.Node) -> tuple[str, str]:
    """Return the phase and module of an operator."""
    phase, module = node.meta.get("custom", {}).get(MARK, (FORWARD, ""))
    return phase, module


def next_number() -> int:
    """Return the number of the next node of autograd in this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute `scaled_dot_product_attention` in operators whose gradients are known."""
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        visible = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        weights = torch.softmax(scores.masked_fill(visible.logical_not(), -torch.inf), -1)
    elif attn_mask is None:
        weights = torch.softmax(scores, -1)
    else:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), -torch.inf)
        else:
            scores = scores + attn_mask
        # Rows in which everything is masked give zeros, not NaN.
        weights = torch._safe_softmax(scores, -1)
    return torch.dropout(weights, dropout_p, True) @ value


@contextlib.contextmanager
def prefer_plain_operators() -> Iterator[None]:
    """Keep torch from kernels that do a whole layer in one operator of a device: attention, recurrent layers."""
    attention = mock.patch.object(nn.functional, "scaled_dot_product_attention", attend)
    math_kernel = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    # As torch.export does: code that asks `torch.compiler.is_compiling()` hears that values of tensors are unknown.
    tracing = mock.patch.multiple(torch.compiler, _is_compiling_flag=True, _is_exporting_flag=True)
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with attention, math_kernel, tracing:
            yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def list_module_names(module: nn.Module, loss: object) -> dict[nn.Module, str]:
    """Return the path of each module; modules of the loss begin with `loss`."""
    names = {part: name for name, part in module.named_modules()}
    if isinstance(loss, nn.Module):
        names |= {part: f"loss.{name}".rstrip(".") for name, part in loss.named_modules() if part not in names}
    return names


def record(
    function: Callable[..., Any], arguments: Sequence[Any], fake_mode: Any
) -> tuple[torch.fx.GraphModule, list[torch.fx.Node]]:
    """Trace a function on tensors without data; returns its graph and the nodes of its flat results."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize

    functional = dispatch_functionalize(function, FunctionalTensorMode())
    saved_meta = dict(traceback.current_meta)
    try:
        with enable_python_dispatcher(), traceback.preserve_node_meta(), prefer_plain_operators(), fake_mode:
            graph_module = make_fx(functional, decomposition_table=decompositions(), tracing_mode="real")(*arguments)
    finally:
        traceback.current_meta.clear()
        traceback.current_meta.update(saved_meta)
    (output,) = graph_module.graph.find_nodes(op="output")
    return graph_module, list(torch.utils._pytree.tree_leaves(output.args, is_leaf=lambda item: item is None))
