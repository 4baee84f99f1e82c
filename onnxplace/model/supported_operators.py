"""Hold a model against what the installed ONNX Runtime knows, before any work is done on it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from onnx import NodeProto, TensorProto, helper

from onnxplace.errors import ExecutionError, ModelError, nearest
from onnxplace.machine import LIBRARY_HINT, import_onnxruntime, open_session, operator_libraries, session_options
from onnxplace.model.model import Model
from onnxplace.model.nested_graphs import with_inner


def require_operators(model: Model) -> None:
    """Raise ModelError naming the first node whose operator, or the opset, that ONNX Runtime does not know.

    Does nothing where ONNX Runtime is not installed: a model can be compiled for a machine elsewhere.
    """
    try:
        known = _known_operators()
    except ExecutionError:
        return
    _require_opsets(model)
    versions = {entry.domain: entry.version for entry in model.opsets}
    for node in with_inner(model.nodes):
        domain = "" if node.domain == "ai.onnx" else node.domain
        since = known.get(domain, {}).get(node.op_type)
        if since is None:
            if domain and operator_libraries():
                continue  # ONNX Runtime does not tell what these hold; a session will
            raise _unknown(domain, node, known)
        if since > versions.get(domain, since):
            raise ModelError(
                "M010",
                f"operator {node.op_type} exists from opset {since} on, the model uses {versions[domain]}",
                where=f"node {node.name!r}",
                hint="export the model with a newer opset",
            )


def list_custom_operators(model: Model) -> tuple[str, ...]:
    """Return the operators, as `domain.Name`, that a model needs a library for; none where nobody can tell."""
    try:
        known = _known_operators()
    except ExecutionError:
        return ()
    used = dict.fromkeys((node.domain, node.op_type) for node in with_inner(model.nodes))
    return tuple(
        _full(domain, name) for domain, name in used if domain != "ai.onnx" and name not in known.get(domain, {})
    )


def _unknown(domain: str, node: NodeProto, known: Mapping[str, Mapping[str, int]]) -> ModelError:
    hint = nearest(node.op_type, known[domain]) if domain in known else f"known domains: {_listed(known)}"
    return ModelError(
        "M010",
        f"ONNX Runtime has no operator {_full(domain, node.op_type)}",
        where=f"node {node.name!r}",
        hint=f"{LIBRARY_HINT}; {hint}" if domain else hint,
    )


@lru_cache(maxsize=1)
def _known_operators() -> Mapping[str, Mapping[str, int]]:
    """Return, per domain, each operator and the first opset that has it."""
    import_onnxruntime()
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    known: dict[str, dict[str, int]] = {}
    for schema in state.get_all_operator_schema():
        names = known.setdefault(schema.domain, {})
        names[schema.name] = min(schema.since_version, names.get(schema.name, schema.since_version))
    return known


def _require_opsets(model: Model) -> None:
    """Open a model of one node under the same opsets: ONNX Runtime checks them before anything else."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    opsets = [entry for entry in model.opsets if entry.domain == ""] or [helper.make_opsetid("", 17)]
    node = helper.make_node("Identity", ["x"], ["y"])
    proto = helper.make_model(helper.make_graph([node], "probe", [value], [result]), opset_imports=opsets, ir_version=8)
    try:
        open_session(proto.SerializeToString(), session_options([0], "none"))
    except ModelError:
        raise ModelError(
            "M011",
            f"opset {opsets[0].version} is newer than onnxruntime {import_onnxruntime().__version__} takes",
            where=model.name,
            hint="export the model with an older opset, or update onnxruntime",
        ) from None


def _full(domain: str, operator: str) -> str:
    return f"{domain}.{operator}" if domain else operator


def _listed(known: Mapping[str, object]) -> str:
    return ", ".join(repr(domain or "ai.onnx") for domain in known)
