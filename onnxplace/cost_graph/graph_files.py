"""GraphML and GEXF files of cost graphs: which format a file has, its bytes, and ids that are not texts."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from onnxplace.cost_graph.graph_attributes import KNOWN
from onnxplace.cost_graph.graph_formats import read_graph_xml
from onnxplace.cost_graph.graph_xml import AttributedGraph
from onnxplace.errors import InputError, UsageError, format_value
from onnxplace.utils import format_path, write_file

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    import networkx

GraphFormat = Literal["json", "graphml", "gexf"]
GRAPH_FORMATS: tuple[GraphFormat, ...] = ("json", "graphml", "gexf")
# What XML 1.0 cannot hold.
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# Ids that are not texts have their type in the file.
_ID_TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool}


def format_of(path: Path) -> GraphFormat:
    """Return the format that the ending of a name stands for; JSON, unless it is that of another.

    >>> format_of(Path("placed.GEXF.gz")), format_of(Path("graph.json"))
    ('gexf', 'json')
    """
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    return {".graphml": "graphml", ".gexf": "gexf"}.get(suffix, "json")  # type: ignore[return-value]


def read_graph(data: bytes, kind: GraphFormat, where: str) -> AttributedGraph:
    """Return the graph with attributes that a file of GraphML or GEXF holds, with ids as they were written."""
    graph = read_graph_xml(data, kind, KNOWN, where)
    ids = {text: _restored_id(text, attributes, where) for text, attributes in graph.nodes}
    if all(text is node_id for text, node_id in ids.items()):
        return graph
    nodes = [(ids[text], attributes) for text, attributes in graph.nodes]
    edges = [(ids[source], ids[destination], attributes) for source, destination, attributes in graph.edges]
    return AttributedGraph(nodes, edges, graph.attributes)


def _restored_id(text: Any, attributes: Mapping[str, Any], where: str) -> Hashable:
    """Return the id that a text stands for; raises InputError if it is not of the type that the file says."""
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


def require_graph_format(path: Path) -> None:
    """Raise UsageError unless the ending of a name is that of a format in which graphs are written."""
    if format_of(path) == "json":
        hint = "end it in .graphml (networkx, yEd, Gephi) or .gexf (Gephi); .gz after it compresses"
        message = f"expected a file of GraphML or GEXF, got {format_value(path.name)}"
        raise UsageError("D009", message, where=format_path(path), hint=hint)


def write_graph(path: Path, graph: networkx.MultiDiGraph[Any]) -> None:
    """Write what `to_networkx` returned as GraphML or GEXF, by the file's ending; raises InputError or UsageError."""
    require_graph_format(path)
    packed = path.name.lower().endswith(".gz")
    write = _write_graphml if format_of(path) == "graphml" else _write_gexf
    stream = io.BytesIO()
    write(_texts_only(graph, format_path(path)), stream)
    # Outside of attributes, where it is escaped already, XML reads a carriage return as a new line.
    data = stream.getvalue().replace(b"\r", b"&#13;")
    write_file(path, lambda file: file.write(gzip.compress(data, mtime=0) if packed else data))


def _write_graphml(graph: networkx.MultiDiGraph[Any], stream: io.BytesIO) -> None:
    from networkx.readwrite.graphml import GraphMLWriter

    GraphMLWriter(graph, prettyprint=True).dump(stream)


def _write_gexf(graph: networkx.MultiDiGraph[Any], stream: io.BytesIO) -> None:
    """Write GEXF: the same whenever it is written, and with the machine, for which the format has no place."""
    from xml.etree.ElementTree import SubElement

    from networkx.readwrite.gexf import GEXFWriter

    for _, attributes in graph.nodes(data=True):
        color = attributes.pop("color", None)
        if color is not None:
            channels = (int(color[at : at + 2], 16) for at in (1, 3, 5))
            attributes["viz"] = {"color": {**dict(zip("rgb", channels)), "a": 1.0}}
    writer = GEXFWriter(graph, prettyprint=True)
    meta: Element | None = writer.xml.find("meta")
    if meta is not None:
        meta.attrib.clear()
        described = {**graph.graph, "devices": json.loads(graph.graph["devices"])}
        SubElement(meta, "description").text = json.dumps(described)
    writer.write(stream)


def _texts_only(graph: networkx.MultiDiGraph[Any], where: str) -> networkx.MultiDiGraph[Any]:
    """Return the graph with texts as ids, attributes of one type each; raises InputError for what XML cannot hold."""
    import networkx

    texts: dict[str, Hashable] = {}
    result: networkx.MultiDiGraph[Any] = networkx.MultiDiGraph(**_graph_texts(graph.graph, where))
    for node, attributes in graph.nodes(data=True):
        text = _id_text(node, where)
        if text in texts:
            message = f"expected ids that differ as texts, found {format_value(texts[text])} and {format_value(node)}"
            raise InputError("D009", message, where=where, hint="rename one of the two nodes")
        texts[text] = node
        own = {"label": attributes["name"]} | {key: value for key, value in attributes.items() if key != "name"}
        if not isinstance(node, str):
            own["id_type"] = type(node).__name__
        result.add_node(text, **_attribute_texts(own, f"node {format_value(node)}", where))
    for source, destination, key, attributes in graph.edges(keys=True, data=True):
        label = f"edge {format_value(source)} -> {format_value(destination)}"
        ends = str(source), str(destination)
        result.add_edges_from([(*ends, key, _attribute_texts(attributes, label, where))])
    return result


def _graph_texts(attributes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the attributes of the graph, its devices as JSON."""
    try:
        devices = json.dumps(attributes["devices"])
    except TypeError:
        message = f"expected ids of devices that are texts or numbers, found {format_value(attributes['devices'])}"
        raise InputError("D009", message, where=where) from None
    return _attribute_texts({**attributes, "devices": devices}, "the graph", where)


def _id_text(node: Hashable, where: str) -> str:
    """Return the text of an id; raises InputError for one that cannot be read back from it."""
    if type(node).__name__ not in ("str", *_ID_TYPES):
        hint = "networkx.convert_node_labels_to_integers gives every node a number"
        message = f"expected ids that are texts or numbers, found {format_value(node)}"
        raise InputError("D009", message, where=where, hint=hint)
    return _require_xml(str(node), f"the id of node {format_value(node)}", where)


def _attribute_texts(attributes: Mapping[str, Any], label: str, where: str) -> dict[str, Any]:
    """Return attributes as files have them: numbers as they are, the rest as text."""
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


def _require_xml(text: str, what: str, where: str) -> str:
    """Return a text; raises InputError for characters that XML cannot hold."""
    if bad := _NO_XML.search(text):
        message = f"{what} has the character U+{ord(bad.group()):04X}, which XML cannot hold: {format_value(text)}"
        raise InputError("D009", message, where=where, hint="rename it, or keep the graph in JSON")
    return text
