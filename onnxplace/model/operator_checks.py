"""Check the operators of a model: their form, by the definitions of ONNX, and whether ONNX Runtime has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, defs, helper

from onnxplace.errors import Diagnostic, ExecutionError, ModelError, format_names, suggest_nearest
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import list_operator_libraries, make_session_options
from onnxplace.machine.session_errors import LIBRARY_HINT
from onnxplace.model.model import Model
from onnxplace.model.nested_graphs import walk_nodes
from onnxplace.utils.ort import import_onnxruntime

# -------------------------------------------------------------------------------------------------- definitions of ONNX


_ONNX_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
# A schema allows any number of inputs by a maximum that no node reaches.
_MIN_UNLIMITED = 1 << 20


@dataclass(frozen=True)
class OperatorForm:
    """The inputs, outputs and attributes that an operator allows."""

    inputs: tuple[int, int]
    """Lowest and highest count."""
    outputs: tuple[int, int]
    """Lowest and highest count."""
    attributes: Mapping[str, int]
    """Name -> number of the type (`AttributeProto.AttributeType`)."""
    required: tuple[str, ...]
    """Names of the attributes that have no default value, sorted."""
    definition: Mapping[str, object]
    """Types and defaults of its attributes, and whether it is deprecated."""


@cache
def find_form(operator: str, domain: str, version: int) -> OperatorForm | None:
    """Return the form of a standard operator in an opset.

    Returns None if ONNX does not define it there.
    """
    try:
        schema = defs.get_schema(operator, version, "" if domain == "ai.onnx" else domain)
    except (defs.SchemaError, TypeError):  # onnx raises TypeError for a version beyond 32 bits
        return None
    return OperatorForm(
        inputs=(schema.min_input, schema.max_input),
        outputs=(schema.min_output, schema.max_output),
        attributes={name: int(item.type) for name, item in schema.attributes.items()},  # type: ignore[call-overload]
        required=tuple(sorted(name for name, attribute in schema.attributes.items() if attribute.required)),
        definition={
            "deprecated": schema.deprecated,
            **{name: (str(a.type), a.default_value.SerializeToString()) for name, a in schema.attributes.items()},
        },
    )


# From this opset on, versions of an operator that have the same inputs and attributes compute the same: later ones have
# more types. Before, PRelu and the arithmetic operators were broadcast in another way.
_FIRST_STABLE_OPSET = 7


def keeps_meaning(node: NodeProto, old: int, new: int) -> bool:
    """Return whether a node computes the same in two opsets of its domain; one that ONNX does not define does.

    >>> keeps_meaning(helper.make_node("Pad", ["x", "pads"], ["y"]), 18, 17)
    True
    """
    forms = [form for version in (old, new) if (form := find_form(node.op_type, node.domain, version)) is not None]
    if not forms or old == new:
        return True
    is_same = len(forms) > 1 and forms[0].definition == forms[1].definition and min(old, new) >= _FIRST_STABLE_OPSET
    return is_same and all(_count_given(node.input) <= form.inputs[1] for form in forms)


def merge_opsets(proto: ModelProto) -> list[OperatorSetIdProto]:
    """Return the highest opset of each domain.

    The domain "ai.onnx" becomes the empty one.
    """
    versions: dict[str, int] = {}
    for entry in proto.opset_import:
        domain = "" if entry.domain == "ai.onnx" else entry.domain
        versions[domain] = max(entry.version, versions.get(domain, 0))
    return [helper.make_opsetid(domain, version) for domain, version in versions.items()]


def require_form(nodes: Iterable[NodeProto], versions: Mapping[str, int], where: str) -> None:
    """Raise ModelError naming the first node that does not fit its operator.

    Operators that ONNX does not define are left to ONNX Runtime.

    Args:
        nodes: Nodes, those of subgraphs included.
        versions: Domain -> opset.
        where: Place for error messages.
    """
    for node in nodes:
        version = versions.get("" if node.domain == "ai.onnx" else node.domain)
        if version is None or node.domain not in _ONNX_DOMAINS:
            continue
        form = find_form(node.op_type, node.domain, version)
        if form is not None and (problem := _describe_problem(node, form)):
            place = f"{where}, node {node.name!r}"
            hint = "the model is damaged, or it declares another opset than it is written for; export it again"
            raise ModelError("M008", f"{node.op_type} of opset {version} {problem}", where=place, hint=hint)


def _describe_problem(node: NodeProto, form: OperatorForm) -> str:
    """Return how a node differs from its operator's form.

    Returns "" if it does not.
    """
    for kind, names, limits in (("inputs", node.input, form.inputs), ("outputs", node.output, form.outputs)):
        if len(names) < limits[0] or _count_given(names) > limits[1]:
            lowest, highest = limits
            several = f"{lowest} or more" if highest > _MIN_UNLIMITED else f"{lowest} to {highest}"
            return f"has {len(names)} {kind}, expected {lowest if lowest == highest else several}"
    types = {attribute.name: attribute.type for attribute in node.attribute}
    for name, number in types.items():
        expected = form.attributes.get(name, number)
        if expected != number:
            return f"has {name!r} of type {name_attribute_type(number)}, expected {name_attribute_type(expected)}"
    missing = [name for name in form.required if name not in types]
    return f"lacks the attribute {missing[0]!r}" if missing else ""


def _count_given(names: Sequence[str]) -> int:
    """Return the number of names without empty ones at the end.

    Those stand for omitted values.
    """
    return next((index for index in range(len(names), 0, -1) if names[index - 1]), 0)


def name_attribute_type(number: int) -> str:
    """Return the name of an attribute type; "?" for an unknown number."""
    return str(AttributeProto.AttributeType.Name(number)) if number in AttributeProto.AttributeType.values() else "?"


# ---------------------------------------------------------------------------------------------- kernels of ONNX Runtime


def require_operators(model: Model) -> None:
    """Raise ModelError for an operator or opset that ONNX Runtime lacks.

    The error names the first such node.

    Does nothing without ONNX Runtime: a model can be compiled for another machine.
    """
    known = _load_known_operators()
    if not known:
        return
    _require_opsets(model)
    versions = {entry.domain: entry.version for entry in model.opsets}
    for node in walk_nodes(model.nodes):
        domain = "" if node.domain == "ai.onnx" else node.domain
        since = known.get(domain, {}).get(node.op_type)
        if since is None:
            if domain and list_operator_libraries():
                continue  # ONNX Runtime does not list the operators of libraries; opening a session checks them
            domains = ", ".join(repr(name or "ai.onnx") for name in known)
            hint = suggest_nearest(node.op_type, known[domain]) if domain in known else f"known domains: {domains}"
            hint = f"{LIBRARY_HINT}; {hint}" if domain else hint
            message = f"ONNX Runtime has no operator {_qualify(domain, node.op_type)}"
            raise ModelError("M010", message, where=f"node {node.name!r}", hint=hint)
        if since > versions.get(domain, since):
            message = f"operator {node.op_type} needs opset {since} or newer, the model uses {versions[domain]}"
            hint = "export the model with a newer opset"
            raise ModelError("M010", message, where=f"node {node.name!r}", hint=hint)


def note_known_functions(functions: Iterable[FunctionProto], where: str) -> tuple[Diagnostic, ...]:
    """Return a note on local functions that have the name of an operator of ONNX Runtime, which runs the operator."""
    functions = [item for item in functions if item.name in _load_known_operators().get(item.domain, {})]
    if not functions:
        return ()
    names = format_names(_qualify(item.domain, item.name) for item in functions)
    message = f"the bundle computes functions where ONNX Runtime has operators of the same name: {names}"
    return (Diagnostic("M010", message, where=where, hint="rename the functions, or remove them"),)


def list_custom_operators(model: Model) -> tuple[str, ...]:
    """Return the operators that need a library, as `domain.Name`.

    Without ONNX Runtime, the result is empty.
    """
    known = _load_known_operators()
    used = dict.fromkeys((node.domain, node.op_type) for node in walk_nodes(model.nodes))
    return tuple(
        _qualify(domain, name)
        for domain, name in used
        if known and domain != "ai.onnx" and name not in known.get(domain, {})
    )


@lru_cache(maxsize=1)
def _load_known_operators() -> Mapping[str, Mapping[str, int]]:
    """Return domain -> operator -> first opset that has it; empty without ONNX Runtime."""
    try:
        import_onnxruntime()
    except ExecutionError:
        return {}
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
        version, hint = opsets[0].version, "export the model with an older opset, or update onnxruntime"
        message = f"opset {version} is newer than onnxruntime {import_onnxruntime().__version__} supports"
        raise ModelError("M010", message, where=model.name, hint=hint) from None


def _qualify(domain: str, operator: str) -> str:
    return f"{domain}.{operator}" if domain else operator
