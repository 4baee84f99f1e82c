"""Cost graphs in files of GraphML, with ids that are not texts."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from onnxplace.cost_graph.data import CostGraph, GraphFormat, TimedPlacement
from onnxplace.errors import InputError, format_value
from onnxplace.state import State
from onnxplace_formats.graph_attributes import KNOWN, AttributedGraph, convert_attributed_graph
from onnxplace_formats.graphml import read_graphml
from onnxplace_formats.networkx_graphs import to_networkx

if TYPE_CHECKING:
    import networkx

# Characters that XML 1.0 cannot hold.
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# The type of an id that is not a text is stored in the file.
_ID_TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool}


class GraphmlFormat(GraphFormat):
    """GraphML, which a parser of this part reads, and networkx writes."""

    def read(self, data: bytes, name: str, where: str, device_count: int | None) -> CostGraph:
        """Return the cost graph in a file."""
        return convert_attributed_graph(read_graph(data, where), name, where, device_count=device_count)

    def write(self, graph: CostGraph | State, placement: TimedPlacement | None, where: str) -> bytes:
        """Return a file with a cost graph, or a state with a Profile."""
        from networkx.readwrite.graphml import GraphMLWriter

        stream = io.BytesIO()
        GraphMLWriter(_convert_to_texts(to_networkx(graph, placement), where), prettyprint=True).dump(stream)
        # XML reads a carriage return as a new line, except in attributes, where it is escaped already.
        return stream.getvalue().replace(b"\r", b"&#13;")


def read_graph(data: bytes, where: str) -> AttributedGraph:
    """Read a graph with attributes from GraphML, and restore ids that are not texts."""
    graph = read_graphml(data, KNOWN, where)
    ids = {text: _restore_id(text, attributes, where) for text, attributes in graph.nodes}
    if all(text is node_id for text, node_id in ids.items()):
        return graph
    nodes = [(ids[text], attributes) for text, attributes in graph.nodes]
    edges = [(ids[source], ids[destination], attributes) for source, destination, attributes in graph.edges]
    return AttributedGraph(nodes, edges, graph.attributes)


def _restore_id(text: Any, attributes: Mapping[str, Any], where: str) -> Hashable:
    """Return the id that a text stands for; raise InputError if it does not have the declared type."""
    kind = attributes.get("id_type", "str")
    try:
        if kind == "bool":
            return {"True": True, "False": False}[text]
        restored: Hashable = text if kind == "str" else _ID_TYPES[kind](text)
        return restored
    except (KeyError, ValueError, TypeError):
        kinds = "expected one of str, int, float, bool that fits"
        message = f"node {format_value(text)} has the id_type {format_value(kind)}, {kinds}"
        raise InputError("D002", message, where=where, hint="correct id_type, or remove it") from None


def _convert_to_texts(graph: networkx.MultiDiGraph[Any], where: str) -> networkx.MultiDiGraph[Any]:
    """Convert ids to texts, and attributes to one type each; raise InputError for data that XML cannot hold."""
    import networkx

    texts: dict[str, Hashable] = {}
    result: networkx.MultiDiGraph[Any] = networkx.MultiDiGraph(**_convert_graph_attributes(graph.graph, where))
    for node, attributes in graph.nodes(data=True):
        text = _convert_id(node, where)
        if text in texts:
            message = f"expected ids that differ as texts, found {format_value(texts[text])} and {format_value(node)}"
            raise InputError("U032", message, where=where, hint="rename one of the two nodes")
        texts[text] = node
        own = {"label": attributes["name"]} | {key: value for key, value in attributes.items() if key != "name"}
        if not isinstance(node, str):
            own["id_type"] = type(node).__name__
        result.add_node(text, **_convert_attributes(own, f"node {format_value(node)}", where))
    for source, destination, key, attributes in graph.edges(keys=True, data=True):
        label = f"edge {format_value(source)} -> {format_value(destination)}"
        ends = str(source), str(destination)
        result.add_edges_from([(*ends, key, _convert_attributes(attributes, label, where))])
    return result


def _convert_graph_attributes(attributes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the attributes of the graph, its devices as JSON."""
    try:
        devices = json.dumps(attributes["devices"])
    except TypeError:
        message = f"expected ids of devices that are texts or numbers, found {format_value(attributes['devices'])}"
        raise InputError("U032", message, where=where) from None
    return _convert_attributes({**attributes, "devices": devices}, "the graph", where)


def _convert_id(node: Hashable, where: str) -> str:
    """Return the text of an id; raise InputError if it cannot be read back."""
    if type(node).__name__ not in ("str", *_ID_TYPES):
        hint = "networkx.convert_node_labels_to_integers gives every node a number"
        message = f"expected ids that are texts or numbers, found {format_value(node)}"
        raise InputError("U032", message, where=where, hint=hint)
    return _require_xml(str(node), f"the id of node {format_value(node)}", where)


def _convert_attributes(attributes: Mapping[str, Any], label: str, where: str) -> dict[str, Any]:
    """Convert attributes for a file: numbers stay, all else becomes text."""
    result: dict[str, Any] = {}
    for key, value in attributes.items():
        if key == "device":  # of one type, so that it becomes one column
            value = str(value)
        elif isinstance(value, Mapping):
            value = json.dumps(value)
        if isinstance(value, str):
            _require_xml(value, f"{key} of {label}", where)
        result[key] = value
    return result


def _require_xml(text: str, label: str, where: str) -> str:
    """Return a text; raise InputError for characters that XML cannot hold."""
    if match := _NOT_IN_XML.search(text):
        message = f"{label} has the character U+{ord(match.group()):04X}, which XML cannot hold: {format_value(text)}"
        raise InputError("U032", message, where=where, hint="rename it, or keep the graph in JSON")
    return text
