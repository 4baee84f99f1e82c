"""Local functions of a model: their bodies take the place of their calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy

from onnx import FunctionProto, ModelProto, NodeProto
from onnx.inliner import inline_local_functions
from onnx.shape_inference import infer_shapes

from onnxplace.errors import ModelError
from onnxplace.model.nested_graphs import walk_nodes
from onnxplace.model.operator_checks import keeps_meaning, merge_opsets

MAX_NESTED_CALLS = 100
"""The inliner of onnx, and this module, follow calls by recursion."""


def require_no_recursion(proto: ModelProto, where: str) -> None:
    """Raise ModelError if a local function calls itself, directly or through others."""
    functions = {identify_function(function): function for function in proto.functions}
    checked: set[str] = set()

    def visit(key: str, path: tuple[str, ...]) -> None:
        if len(path) > MAX_NESTED_CALLS and key in functions:
            message = f"its local functions call each other more than {MAX_NESTED_CALLS} deep"
            raise ModelError("M008", message, where=where, hint="export the model without functions")
        if key in path:
            calls = " -> ".join((*path[path.index(key) :], key))
            raise ModelError("M008", f"a local function calls itself: {calls}", where=where, hint="unroll it")
        if key in functions and key not in checked:
            for node in _walk_function(functions[key]):
                visit(identify_function(node), (*path, key))
            checked.add(key)

    for key in functions:
        visit(key, ())


def identify_function(item: FunctionProto | NodeProto) -> str:
    """Return domain, name and overload of a function, or of the one that a node may call, as a text."""
    name = item.name if isinstance(item, FunctionProto) else item.op_type
    return f"{item.domain}.{name}" + (f":{item.overload}" if item.overload else "")


def _walk_function(function: FunctionProto) -> Iterator[NodeProto]:
    """Yield the nodes of a function, and those of graphs that are defaults of its attributes."""
    return walk_nodes((*function.node, NodeProto(attribute=function.attribute_proto)))


def inline_functions(proto: ModelProto, where: str) -> ModelProto:
    """Return the model without local functions.

    Callers come first: if one passes on an attribute that it was not given, the called function takes its own default.

    Raises ModelError for a function that cannot be inlined.
    """
    require_no_recursion(proto, where)
    result = _align_function_opsets(proto)
    waiting = {identify_function(function): function for function in result.functions}
    while waiting:
        inner = {identify_function(node) for function in waiting.values() for node in _walk_function(function)}
        result = _inline_calls(result, {key: waiting[key] for key in waiting if key not in inner}, where)
        waiting = {key: waiting[key] for key in waiting if key in inner}
    return result


def _inline_calls(proto: ModelProto, functions: Mapping[str, FunctionProto], where: str) -> ModelProto:
    """Return the model with the bodies of these functions in place of their calls, and without other functions.

    Defaults of attributes are filled in before, as the inliner of onnx ignores them. `proto` is altered.
    """
    called = {}
    for node in walk_nodes(proto.graph.node):
        if function := functions.get(identify_function(node)):
            called[identify_function(node)] = function
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(item for item in function.attribute_proto if item.name not in given)
    del proto.functions[:]
    proto.functions.extend(called.values())
    try:
        inlined: ModelProto = inline_local_functions(proto)
        if inlined.functions:  # those of another opset stay unless they may be converted
            inlined = inline_local_functions(infer_shapes(proto), convert_version=True)
    except Exception as problem:  # noqa: BLE001 - the inliner raises plain C++ errors
        raise _build_inlining_error(proto, str(problem), where) from None
    if inlined.functions:
        raise _build_inlining_error(inlined, "", where)
    return inlined


def _align_function_opsets(proto: ModelProto) -> ModelProto:
    """Return the model with functions that import its own opsets, where all operators of the function stay the same."""
    result, versions = deepcopy(proto), _read_opsets(proto)
    for function in result.functions:
        for entry in function.opset_import:
            new = versions.get(entry.domain, entry.version)
            if not _list_changed_operators(function, entry.domain, entry.version, new):
                entry.version = new
    return result


def _read_opsets(proto: ModelProto) -> dict[str, int]:
    versions = {entry.domain: entry.version for entry in merge_opsets(proto)}
    return {**versions, "ai.onnx": versions[""]} if "" in versions else versions


def _list_changed_operators(function: FunctionProto, domain: str, old: int, new: int) -> list[str]:
    """Return the operators of a function that are others, or may be, in another opset."""
    domains = ("", "ai.onnx") if domain in ("", "ai.onnx") else (domain,)
    nodes = (node for node in _walk_function(function) if node.domain in domains)
    return [node.op_type for node in nodes if not keeps_meaning(node, old, new)]


def _build_inlining_error(proto: ModelProto, problem: str, where: str) -> ModelError:
    """Return the error for functions that cannot be inlined: it names the operator that another opset changed."""
    message, versions = f"its local functions cannot be inlined: {problem}", _read_opsets(proto)
    for function in proto.functions:
        for entry in function.opset_import:
            new = versions.get(entry.domain, entry.version)
            for operator in _list_changed_operators(function, entry.domain, entry.version, new):
                message = (
                    f"its local function {function.name!r} is written for opset {entry.version}, the model for {new}, "
                    f"and its {operator} cannot be converted"
                )
    return ModelError("M008", message, where=where, hint="export the model with one opset for all functions")
