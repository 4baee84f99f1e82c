"""Inline the local functions of a model.

Their nodes can then be placed one by one.
"""

from __future__ import annotations

from onnx import ModelProto
from onnx.inliner import inline_local_functions
from onnx.shape_inference import infer_shapes

from onnxplace.errors import ModelError
from onnxplace.model.nested_graphs import walk_nodes
from onnxplace.model.schemas import find_since_version, merge_opsets

MAX_NESTED_CALLS = 100
"""The inliner of onnx, and this module, follow calls by recursion."""


def require_no_recursion(proto: ModelProto, where: str) -> None:
    """Raise ModelError if a local function calls itself, directly or through others."""
    functions = {(f.domain, f.name): f for f in proto.functions}
    checked: set[tuple[str, str]] = set()

    def visit(key: tuple[str, str], path: tuple[tuple[str, str], ...]) -> None:
        if len(path) > MAX_NESTED_CALLS and key in functions:
            message = f"its local functions call each other more than {MAX_NESTED_CALLS} deep"
            raise ModelError("M009", message, where=where, hint="export the model without functions")
        if key in path:
            calls = " -> ".join(f"{domain}.{name}" for domain, name in (*path[path.index(key) :], key))
            raise ModelError("M009", f"a local function calls itself: {calls}", where=where, hint="unroll it")
        if key in functions and key not in checked:
            for node in walk_nodes(functions[key].node):
                visit((node.domain, node.op_type), (*path, key))
            checked.add(key)

    for key in functions:
        visit(key, ())


def inline_functions(proto: ModelProto, where: str) -> ModelProto:
    """Return the model without local functions.

    Raises ModelError for one that cannot be inlined.
    """
    proto = _align_function_opsets(proto)
    try:
        inlined: ModelProto = inline_local_functions(proto)
        if inlined.functions:  # those of another opset stay unless they may be converted
            inlined = inline_local_functions(infer_shapes(proto), convert_version=True)
    except Exception as problem:  # noqa: BLE001 - the inliner raises plain C++ errors
        raise ModelError("M009", f"its local functions cannot be inlined: {problem}", where=where) from None
    if inlined.functions:
        name = inlined.functions[0].name
        hint = "export the model with one opset for all functions"
        raise ModelError("M009", f"its local function {name!r} cannot be inlined", where=where, hint=hint)
    return inlined


def _align_function_opsets(proto: ModelProto) -> ModelProto:
    """Return the model with functions that import its own opsets.

    A version changes only where it leaves all operators of the function the same.
    """
    versions = {entry.domain: entry.version for entry in merge_opsets(proto)}
    result = ModelProto()
    result.CopyFrom(proto)
    for function in result.functions:
        for entry in function.opset_import:
            domain = "" if entry.domain == "ai.onnx" else entry.domain
            operators = {n.op_type for n in walk_nodes(function.node) if n.domain in (domain, entry.domain)}
            new, old = versions.get(domain, entry.version), entry.version
            if all(find_since_version(op, old, domain) == find_since_version(op, new, domain) for op in operators):
                entry.version = new
    return result
