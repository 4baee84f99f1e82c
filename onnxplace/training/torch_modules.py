"""Copy states into modules of torch, which the caller has imported."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from onnxplace.errors import UsageError, format_names
from onnxplace.feeds import Array


def copy_into_module(states: Mapping[str, Array], module: Any) -> None:
    """Copy arrays into the parameters and buffers of a module.

    Raises UsageError, and copies nothing, if any differs.
    """
    torch = sys.modules.get("torch")  # whoever has a module of torch has imported it
    if torch is None or not isinstance(module, torch.nn.Module):
        message = f"expected a torch.nn.Module, got {type(module).__name__}"
        raise UsageError("L048", message, where="load_into")
    targets = module.state_dict(keep_vars=True)
    where, hint = f"load_into {type(module).__name__}", "give the module from which the step was exported"
    if missing := [name for name in states if name not in targets]:
        raise UsageError("L048", f"the module has no {format_names(missing)}", where=where, hint=hint)
    for name, array in states.items():
        shape = tuple(targets[name].shape)
        if shape != array.shape:
            message = f"{name!r} has the shape {list(shape)} in the module, expected {list(array.shape)}"
            raise UsageError("L048", message, where=where, hint=hint)
    with torch.no_grad():
        for name, array in states.items():
            # Arrays of a checkpoint are read-only, of which torch warns.
            targets[name].copy_(torch.from_numpy(array if array.flags.writeable else array.copy()))
