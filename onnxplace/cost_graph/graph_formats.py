"""Read GraphML and GEXF, the files of networkx, Gephi and yEd."""

from __future__ import annotations

from collections.abc import Callable

from onnxplace.cost_graph.graph_xml import AttributedGraph, Column, GraphReader, Handlers
from onnxplace.errors import format_value
from onnxplace.utils import parse_json


class _GraphmlReader(GraphReader):
    """GraphML: `<key>` declares an attribute, `<data>` gives it."""

    root = "graphml"
    directed_by = "edgedefault"

    key: Column | None = None
    """The attribute that is being declared, or whose data is being read."""

    def handlers(self) -> Handlers:
        graph = "graphml/graph"
        data = (f"{graph}/data", f"{graph}/node/data", f"{graph}/edge/data")
        starts: dict[str, Callable[[dict[str, str]], None]] = {
            "graphml/key": self._start_key,
            graph: self.start_graph,
            f"{graph}/node": self.start_node,
            f"{graph}/edge": self._start_edge,
            **dict.fromkeys(data, self._start_data),
        }
        ends = {
            "graphml/key/default": self._end_default,
            **dict.fromkeys((f"{graph}/node", f"{graph}/edge"), self.end_item),
            **dict.fromkeys(data, self._end_data),
        }
        refused = {
            f"{graph}/node/graph": "a graph in a node",
            f"{graph}/edge/graph": "a graph in an edge",
            f"{graph}/hyperedge": "a hyperedge",
        }
        return Handlers(starts, ends, refused)

    def _start_key(self, attributes: dict[str, str]) -> None:
        name, kind = attributes.get("attr.name", ""), attributes.get("attr.type", "string")
        self.key = Column(name, kind, attributes.get("for", "all"))
        self.declare("", attributes.get("id"), self.key)

    def _end_default(self, text: str) -> None:
        self.set_default(self.key, text)

    def _start_edge(self, attributes: dict[str, str]) -> None:
        own = attributes.get("directed")
        self.start_edge(attributes, self.directed if own is None else own in ("true", "1"))

    def _start_data(self, attributes: dict[str, str]) -> None:
        key = attributes.get("key", "")
        self.key = self.columns.get(("", key))
        if self.key is None:
            message = f"{self.item.label} has data of key {format_value(key)}, expected a <key> for it"
            raise self.error("D001", message, "export the file again")

    def _end_data(self, text: str) -> None:
        if self.key is not None and self.key.name:  # drawings of yEd have no name
            self.store(self.key, text)


class _GexfReader(GraphReader):
    """GEXF: `<attribute>` declares an attribute, `<attvalue>` gives it; the machine is in the description."""

    root = "gexf"
    directed_by = "defaultedgetype"

    section = ""
    """The class of the attributes that are being declared."""
    column: Column | None = None

    def handlers(self) -> Handlers:
        graph = "gexf/graph"
        node, edge = f"{graph}/nodes/node", f"{graph}/edges/edge"
        starts: dict[str, Callable[[dict[str, str]], None]] = {
            graph: self._start_graph,
            f"{graph}/attributes": self._start_attributes,
            f"{graph}/attributes/attribute": self._start_attribute,
            node: self._start_node,
            edge: self._start_edge,
            **dict.fromkeys((f"{node}/attvalues/attvalue", f"{edge}/attvalues/attvalue"), self._start_value),
        }
        ends = {
            "gexf/meta/description": self._end_description,
            f"{graph}/attributes/attribute/default": self._end_default,
            **dict.fromkeys((node, edge), self.end_item),
        }
        return Handlers(starts, ends, {f"{node}/nodes": "nodes in a node", f"{node}/edges": "edges in a node"})

    def _end_description(self, text: str) -> None:
        if text.lstrip().startswith("{"):  # any other description is for people
            described = parse_json(text, "D001", "the description of a machine by onnxplace", self.where)
            self.graph.data.update(described)

    def _start_graph(self, attributes: dict[str, str]) -> None:
        self.start_graph(attributes)
        if attributes.get("name"):
            self.graph.data.setdefault("name", attributes["name"])

    def _start_attributes(self, attributes: dict[str, str]) -> None:
        self.section = attributes.get("class", "")

    def _start_attribute(self, attributes: dict[str, str]) -> None:
        self.column = Column(attributes.get("title", ""), attributes.get("type", "string"), self.section)
        self.declare(self.section, attributes.get("id"), self.column)

    def _end_default(self, text: str) -> None:
        self.set_default(self.column, text)

    def _start_node(self, attributes: dict[str, str]) -> None:
        self.start_node(attributes)
        if "label" in attributes:
            self.item.data["label"] = attributes["label"]

    def _start_edge(self, attributes: dict[str, str]) -> None:
        own = attributes.get("type")
        self.start_edge(attributes, self.directed if own is None else own == "directed")

    def _start_value(self, attributes: dict[str, str]) -> None:
        key = attributes.get("for", attributes.get("id", ""))
        column = self.columns.get((self.item.scope, key))
        if column is None:
            message = f"{self.item.label} has a value of attribute {format_value(key)}, expected an <attribute> for it"
            raise self.error("D001", message, "export the file again")
        self.store(column, attributes.get("value", ""))


def read_graph_xml(data: bytes, kind: str, known: frozenset[str], where: str) -> AttributedGraph:
    """Read a graph from a file of GraphML or GEXF (`kind`); ids are texts.

    Attributes whose names are not in `known` stay texts, whatever type the file declares.

    Raises:
        InputError: The file is invalid; the error names the file and the line.

    >>> text = b'<graphml><graph edgedefault="directed"><node id="a"/></graph></graphml>'
    >>> read_graph_xml(text, "graphml", frozenset(), "g.graphml").nodes
    [('a', {})]
    """
    return (_GraphmlReader if kind == "graphml" else _GexfReader)(known, where).read(data)
