"""Convert programs of `torch.export`, and modules with example inputs, to ONNX by torch's own exporter."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from onnxplace.errors import ModelError, UsageError, format_names

import_module("onnxscript")  # which torch's exporter needs: its absence is reported before any work

# What torch says of tensors in attributes of a module that are no buffers.
_ASSIGNED = re.compile(r"self\.([^\s,]+)(?=.* assigned during export)")
EXPORT_HINT = "in Python: torch.export.save(torch.export.export(module, example_inputs), 'model.pt2')"


def convert_to_onnx(source: Any, path: Path, example_inputs: Sequence[Any] | Mapping[str, Any] = ()) -> dict[str, int]:
    """Write a program or a module as an ONNX file at `path`, and return the sizes that its example inputs have.

    Args:
        source: a program of `torch.export`, the path of one, or a module. Reading a program may run code that is in it.
        path: where the ONNX file is written, weights of more than 2 GB in a file of their own next to it.
        example_inputs: a module's arguments, in order or by name. All its sizes are fixed at theirs.

    Returns:
        Symbolic dimension -> size in the example inputs with which the program was traced.

    Raises:
        UsageError: Example inputs are missing, or given for a program; or it is neither.
        ModelError: torch cannot read, trace or convert it; the message quotes the cause. Or a call changes what the
            next one reads.

    >>> convert_to_onnx("encoder.pt2", Path("encoder.onnx"))  # doctest: +SKIP
    {'s77': 3}
    """
    where = str(source) if isinstance(source, (str, Path)) else type(source).__name__
    _require_source(source, where, has_inputs=bool(example_inputs))
    with _hush() as caught:
        program, assigned = source if isinstance(source, ExportedProgram) else None, list[str]()
        if isinstance(source, nn.Module):
            with _watch_buffers(source, assigned):
                program = _trace_module(source, where, example_inputs)
        elif program is None:
            with _quoting(where, "torch cannot read it as a program of torch.export", EXPORT_HINT):
                program = torch.export.load(source)
        with _quoting(where, "torch.onnx cannot convert it", "change the module, or export it with operators of yours"):
            converted = torch.onnx.export(program, (), dynamo=True, verbose=False)
        assigned += _ASSIGNED.findall(" ".join(str(item.message) for item in caught))
        _require_stateless(converted.exported_program, where, assigned)
        converted.model.graph.name = Path(where).stem
        converted.save(path)
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    return {str(size): size.node.hint for size in sizes if isinstance(size, torch.SymInt) and size.node.has_hint()}


def _require_source(source: Any, where: str, *, has_inputs: bool) -> None:
    """Raise UsageError unless the example inputs are those of a module."""
    if isinstance(source, nn.Module) and not has_inputs:
        hint = "give its arguments: example_inputs=(x, y), or {'x': x} by name"
        raise UsageError("U054", "expected example_inputs, with which a module is traced", where=where, hint=hint)
    if not isinstance(source, (nn.Module, ExportedProgram, str, Path)):
        hint = "give a module with example_inputs, a program of torch.export, or the path of one"
        raise UsageError("U054", "expected a model, got another object of torch", where=where, hint=hint)


def _trace_module(module: nn.Module, where: str, inputs: Sequence[Any] | Mapping[str, Any]) -> ExportedProgram:
    """Return the program of a module as in inference; its parts keep the mode that they are in."""
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with _quoting(where, "torch.export cannot trace it", "see whether module(*example_inputs) runs"):
            return torch.export.export(module, args, kwargs)
    finally:
        for part, mode in modes.items():
            part.training = mode


def _require_stateless(program: ExportedProgram, where: str, assigned: Sequence[str]) -> None:
    """Raise ModelError for what a call changes and a later one reads: an ONNX model keeps nothing.

    Args:
        program: In functional form: what was changed in place is an output.
        where: The model.
        assigned: Buffers and attributes, or elements of lists in them, that were set to other tensors.
    """
    inputs, outputs = program.graph_signature.input_specs, program.graph_signature.output_specs
    returned = {item.arg.name for item in outputs if item.kind is OutputKind.USER_OUTPUT}
    changed = {item.target: item.arg.name for item in outputs if item.kind.name.endswith("_MUTATION")}
    fed = {item.arg.name for item in inputs if item.kind is InputKind.USER_INPUT}
    read, lost = _find_ancestors(program, returned), list[str]()
    for item in inputs:
        name = item.target or item.arg.name
        if name in fed:  # callers lose what other inputs put into it, as into a cache
            is_lost = name in changed and changed[name] not in returned
            lost += [name] if is_lost and _find_ancestors(program, {changed[name]}) & (fed - {name}) else []
        elif item.arg.name in read:
            lost += [name] if name in changed or name in assigned else []
            lost += [element for element in assigned if "[" in element and "lifted_tensor" in name]
    if lost:
        message = f"a call changes {format_names(dict.fromkeys(lost))} for the next one: an ONNX model keeps nothing"
        hint = (
            "take it as an argument, return its new value, and give --state OUTPUT=INPUT; in inference: module.eval()"
        )
        raise ModelError("M004", message, where=where, hint=hint)


def _find_ancestors(program: ExportedProgram, names: Iterable[str]) -> set[str]:
    """Return the names of all nodes that these values are computed from, themselves included."""
    nodes = {node.name: node for node in program.graph.nodes}
    ancestors, waiting = set[str](), [nodes[name] for name in names if name in nodes]
    while waiting:
        node = waiting.pop()
        if node.name not in ancestors:
            ancestors.add(node.name)
            waiting += node.all_input_nodes
    return ancestors


@contextlib.contextmanager
def _watch_buffers(module: nn.Module, assigned: list[str]) -> Iterator[None]:
    """Collect the buffers that `forward` sets to other tensors; torch.export forgets those of inner modules."""
    before: dict[str, torch.Tensor] = {}

    def compare(*_: Any) -> None:
        assigned.extend(name for name, tensor in module.named_buffers() if before.get(name, tensor) is not tensor)

    hooks = (
        module.register_forward_pre_hook(lambda *_: before.update(module.named_buffers())),
        module.register_forward_hook(compare),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _hush() -> Iterator[list[warnings.WarningMessage]]:
    """Leave out what torch says of its own deprecations and of packages that it would use; yield its warnings."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _quoting(where: str, message: str, hint: str) -> Iterator[None]:
    """Turn any error of torch into a ModelError with the cause that it began with."""
    try:
        yield
    except Exception as problem:
        cause: BaseException = problem
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = str(cause).strip().partition("\n")[0] or type(cause).__name__
        raise ModelError("M004", f"{message}: {text}", where=where, hint=hint) from problem
