"""The modules of a program, such as PyTorch's, that a node comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator

from onnx import NodeProto

# The metadata in which PyTorch's exporter records the modules of a node, outermost first: ['', 'model', 'model.norm'].
SCOPES_KEY = "pkg.torch.onnx.name_scopes"


def list_module_paths(node: NodeProto) -> Iterator[str]:
    """Yield the modules that a node may be in, innermost first.

    `/model/layers.0/mlp/MatMul` is in `model.layers.0.mlp`, `model.layers.0`, `model.layers`, `model`, the whole.

    >>> list(list_module_paths(NodeProto(name="/model/norm/Mul")))
    ['model.norm.Mul', 'model.norm', 'model', '']
    """
    for entry in node.metadata_props:
        if entry.key == SCOPES_KEY:
            yield from filter(None, reversed(re.findall(r"'([^']*)'", entry.value)))
    yield from list_enclosing_modules(node.name)


def normalize_module(name: str) -> str:
    """Return the path of a node or module as PyTorch writes it.

    >>> normalize_module("/model/norm")
    'model.norm'
    """
    return name.replace("/", ".").strip(".")


def list_enclosing_modules(name: str) -> Iterator[str]:
    """Yield the path of a node or module, the modules around it, and the whole model.

    >>> list(list_enclosing_modules("/model/norm"))
    ['model.norm', 'model', '']
    """
    path = normalize_module(name)
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
