"""Check a model against the operators and opsets of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from onnx import NodeProto, TensorProto, helper

from onnxplace.errors import ExecutionError, ModelError, suggest_nearest
from onnxplace.machine import LIBRARY_HINT, list_operator_libraries, make_session_options, open_session
from onnxplace.model.model import Model
from onnxplace.model.nested_graphs import walk_nodes
from onnxplace.ort import import_onnxruntime


def require_operators(model: Model) -> None:
    """Raise ModelError for an operator or opset that ONNX Runtime lacks.

    The error names the first such node.

    Does nothing without ONNX Runtime: a model can be compiled for another machine.
    """
    try:
        known = _load_known_operators()
    except ExecutionError:
        return
    _require_opsets(model)
    versions = {entry.domain: entry.version for entry in model.opsets}
    for node in walk_nodes(model.nodes):
        domain = "" if node.domain == "ai.onnx" else node.domain
        since = known.get(domain, {}).get(node.op_type)
        if since is None:
            if domain and list_operator_libraries():
                continue  # ONNX Runtime does not list the operators of libraries; opening a session checks them
            raise _build_unknown_operator_error(domain, node, known)
        if since > versions.get(domain, since):
            raise ModelError(
                "M010",
                f"operator {node.op_type} needs opset {since} or newer, the model uses {versions[domain]}",
                where=f"node {node.name!r}",
                hint="export the model with a newer opset",
            )


def list_custom_operators(model: Model) -> tuple[str, ...]:
    """Return the operators that need a library, as `domain.Name`.

    Without ONNX Runtime, the result is empty.
    """
    try:
        known = _load_known_operators()
    except ExecutionError:
        return ()
    used = dict.fromkeys((node.domain, node.op_type) for node in walk_nodes(model.nodes))
    return tuple(
        _qualify(domain, name) for domain, name in used if domain != "ai.onnx" and name not in known.get(domain, {})
    )


def _build_unknown_operator_error(domain: str, node: NodeProto, known: Mapping[str, Mapping[str, int]]) -> ModelError:
    hint = suggest_nearest(node.op_type, known[domain]) if domain in known else f"known domains: {_list_domains(known)}"
    return ModelError(
        "M010",
        f"ONNX Runtime has no operator {_qualify(domain, node.op_type)}",
        where=f"node {node.name!r}",
        hint=f"{LIBRARY_HINT}; {hint}" if domain else hint,
    )


@lru_cache(maxsize=1)
def _load_known_operators() -> Mapping[str, Mapping[str, int]]:
    """Return domain -> operator -> first opset that has it."""
    import_onnxruntime()
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    known: dict[str, dict[str, int]] = {}
    for schema in state.get_all_operator_schema():
        names = known.setdefault(schema.domain, {})
        names[schema.name] = min(schema.since_version, names.get(schema.name, schema.since_version))
    return known


def _require_opsets(model: Model) -> None:
    """Raise ModelError for an opset that ONNX Runtime does not support.

    It is found by opening a model of one node.
    """
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    opsets = [entry for entry in model.opsets if entry.domain == ""] or [helper.make_opsetid("", 17)]
    node = helper.make_node("Identity", ["x"], ["y"])
    proto = helper.make_model(helper.make_graph([node], "probe", [value], [result]), opset_imports=opsets, ir_version=8)
    try:
        open_session(proto.SerializeToString(), make_session_options([0], "none"))
    except ModelError:
        raise ModelError(
            "M011",
            f"opset {opsets[0].version} is newer than onnxruntime {import_onnxruntime().__version__} supports",
            where=model.name,
            hint="export the model with an older opset, or update onnxruntime",
        ) from None


def _qualify(domain: str, operator: str) -> str:
    return f"{domain}.{operator}" if domain else operator


def _list_domains(known: Mapping[str, object]) -> str:
    return ", ".join(repr(domain or "ai.onnx") for domain in known)
