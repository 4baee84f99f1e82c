"""Local functions of a model: their bodies take the place of their calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy

from onnx import FunctionProto, ModelProto, NodeProto
from onnx.inliner import inline_local_functions

from onnxplace.errors import ModelError, format_names
from onnxplace.model.nested_graphs import walk_nodes
from onnxplace.model.operator_checks import keeps_meaning, merge_opsets
from onnxplace.model.shape_inference import infer_shapes

# Each level of calls is inlined by itself, which takes time for the whole model.
MAX_NESTED_CALLS = 100


def inline_functions(proto: ModelProto, where: str) -> ModelProto:
    """Return the model without local functions.

    Callers come first: if one passes on an attribute that it was not given, the called function takes its own default.

    Raises ModelError for a function that calls itself, or that cannot be inlined.
    """
    result = _align_function_opsets(proto)
    waiting = {identify_function(function): function for function in result.functions}
    calls = {key: {identify_function(node) for node in _walk_function(waiting[key])} for key in waiting}
    for _ in range(MAX_NESTED_CALLS):
        inner = {call for key in waiting for call in calls[key]}
        result = _inline_calls(result, {key: waiting[key] for key in waiting if key not in inner}, where)
        remaining = {key: waiting[key] for key in waiting if key in inner}
        if not remaining:
            return result
        if len(remaining) == len(waiting):
            cycle = " -> ".join(_find_cycle({key: calls[key] for key in remaining}))
            raise ModelError("M008", f"a local function calls itself: {cycle}", where=where, hint="unroll it")
        waiting = remaining
    message = f"its local functions call each other more than {MAX_NESTED_CALLS} deep"
    raise ModelError("M008", message, where=where, hint="export the model without functions")


def identify_function(item: FunctionProto | NodeProto) -> str:
    """Return domain, name and overload of a function, or of the one that a node may call, as a text."""
    name = item.name if isinstance(item, FunctionProto) else item.op_type
    return f"{item.domain}.{name}" + (f":{item.overload}" if item.overload else "")


def _walk_function(function: FunctionProto) -> Iterator[NodeProto]:
    """Yield the nodes of a function, and those of graphs that are defaults of its attributes."""
    return walk_nodes((*function.node, NodeProto(attribute=function.attribute_proto)))


def _find_cycle(calls: Mapping[str, set[str]]) -> list[str]:
    """Return the calls of a cycle; each function has a caller among these."""
    path = [next(iter(calls))]
    while path[0] not in path[1:]:
        path.insert(0, next(key for key in calls if path[0] in calls[key]))
    return path[: path.index(path[0], 1) + 1]


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
    inlined = proto
    with suppress(Exception):  # the inliner raises plain C++ errors, such as assertions
        inlined = inline_local_functions(proto)
        if inlined.functions:  # those of another opset stay unless they may be converted
            inlined = inline_local_functions(infer_shapes(proto), convert_version=True)
    if inlined.functions:
        names = format_names(function.name for function in inlined.functions)
        message = f"local functions cannot be inlined: {names}; operators in them may differ in the model's opset"
        raise ModelError("M008", message, where=where, hint="export the model with one opset for all functions")
    return inlined


def _align_function_opsets(proto: ModelProto) -> ModelProto:
    """Return the model with functions that import its own opsets, where all operators of the function stay the same."""
    result, versions = deepcopy(proto), {entry.domain: entry.version for entry in merge_opsets(proto)}
    for function in result.functions:
        for entry in function.opset_import:
            domains = ("", "ai.onnx") if entry.domain in ("", "ai.onnx") else (entry.domain,)
            new, nodes = versions.get(domains[0], entry.version), _walk_function(function)
            if all(keeps_meaning(node, entry.version, new) for node in nodes if node.domain in domains):
                entry.version = new
    return result
