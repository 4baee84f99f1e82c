"""The modules of a program that nodes come from: in their metadata, and in their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from onnx import NodeProto

from onnxplace.errors import suggest_nearest
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.names import match_names

# The metadata in which PyTorch's exporter records the modules of a node, outermost first, and after them its own name:
# "['', 'model', 'model.norm', 'mul_3']", and ": a.Llama/model: a.Model/model.norm: a.Norm/mul_3: aten.mul.Tensor".
_SCOPES = {"pkg.torch.onnx.name_scopes": re.compile(r"'([^']*)'"), "namespace": re.compile(r"(?:^|/)([^/:]*): ")}


def find_module_path(node: NodeProto) -> str:
    """Return the path of the innermost module of a node, "" if unknown or the whole model.

    >>> find_module_path(NodeProto(name="/model/norm/Mul")), find_module_path(NodeProto(name="node_mul_3"))
    ('model.norm', '')
    """
    # Protobuf returns texts that are not UTF-8 as bytes.
    metadata = {entry.key: entry.value for entry in node.metadata_props if isinstance(entry.value, str)}
    for key, pattern in _SCOPES.items():
        if modules := pattern.findall(metadata.get(key, ""))[:-1]:
            return str(modules[-1])
    return normalize_module(node.name).rpartition(".")[0]


def name_with_module(node: NodeProto) -> str:
    """Return the name that `load` gives to a node: with its module, where only its metadata has that.

    >>> node = NodeProto(name="node_mul_3")
    >>> node.metadata_props.add(key="namespace", value=": a.Llama/model.norm: a.Norm/mul_3: aten.mul.Tensor").key
    'namespace'
    >>> name_with_module(node)
    'model.norm/node_mul_3'
    """
    path = find_module_path(node)
    is_complete = not path or normalize_module(node.name).startswith(f"{path}.")
    return node.name if is_complete else f"{path}/{node.name or node.op_type}"


def normalize_module(name: str) -> str:
    """Return the path of a node or module as PyTorch writes it.

    >>> normalize_module("/model/norm")
    'model.norm'
    """
    return name.replace("/", ".").strip(".")


def list_aliases(name: str) -> Iterator[str]:
    """Yield what patterns may match instead of a node's name: its path, its name in its module, and the modules.

    The innermost module comes first, the whole model last.

    >>> list(list_aliases("model.norm/node_mul_3")), list(list_aliases("/model/norm/Mul"))
    (['model.norm.node_mul_3', 'node_mul_3', 'model.norm', 'model', ''], ['model.norm.Mul', 'model.norm', 'model', ''])
    """
    path, (module, _, own_name) = normalize_module(name), name.rpartition("/")
    yield path
    if module and "/" not in module:
        yield own_name
    while path:
        path = path.rpartition(".")[0]
        yield path


def match_nodes(patterns: Sequence[str], names: Sequence[str], where: str) -> list[list[int]]:
    """Return, per regular expression, the positions of the nodes whose names, or else aliases, it matches completely.

    Modules may be written as in names, `/model/norm`.

    Raises UsageError at `where` for an invalid pattern (U023), and for one that may take too long (U023).

    >>> match_nodes(["model.n.*", "model.norm"], ["model.norm/node_mul_3", "model.x/node_mul_4"], "--colocate")
    [[0], [0]]
    """
    matches = match_names(patterns, names, where)
    if all(matches):
        return matches
    nodes = group_pairs((alias, node) for node, name in enumerate(names) for alias in filter(None, list_aliases(name)))
    paths = [re.sub(r"^/(?=\w)", "", pattern).replace("/", ".") for pattern in patterns]
    by_alias, aliases = match_names(paths, list(nodes), where), list(nodes.values())
    return [
        positions or sorted({node for alias in hits for node in aliases[alias]})
        for positions, hits in zip(matches, by_alias)
    ]


def suggest_nodes(pattern: str, names: Sequence[str], values: Iterable[str] = ()) -> str:
    """Return a hint that offers the nearest node, module or value, or shows some names of nodes.

    >>> suggest_nodes("model.nrm", ["model.norm/node_mul_3"]), suggest_nodes("x", ["model.norm/node_mul_3"])
    ("did you mean 'model.norm'?", "names look like 'model.norm/node_mul_3'")
    """
    aliases = dict.fromkeys(alias for name in names for alias in (name, *list_aliases(name)))
    nearest = suggest_nearest(pattern, [*aliases, *values])
    return nearest if nearest.startswith("did") else f"names look like {', '.join(map(repr, names[:3]))}"
