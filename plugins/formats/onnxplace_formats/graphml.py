"""Read GraphML, the files of networkx, Gephi and yEd, in one pass and within limits.

networkx reads them too. But it merges duplicate nodes, creates nodes for misspelt ids in edges, expands entities and
names no line (docs/decisions/0007-graph-files.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from xml.parsers import expat

from onnxplace.errors import InputError, format_value
from onnxplace_formats.graph_attributes import AttributedGraph

# A node has about eight elements. This bounds the time to about a minute.
MAX_ELEMENTS = 1 << 24
# Nodes and edges together. This bounds memory to about 2 GiB.
MAX_ITEMS = 1 << 21
# Drawings of yEd are nested about ten deep.
MAX_DEPTH = 64

_WHOLE = frozenset({"int", "integer", "long", "short", "byte", "biginteger"})
_REAL = frozenset({"float", "double", "bigdecimal"})
_TRUTH = MappingProxyType({"true": True, "1": True, "false": False, "0": False})


@dataclass(frozen=True)
class Column:
    """An attribute that a file declares."""

    name: str
    type: str
    scope: str
    """`node`, `edge`, `graph` or `all`."""


@dataclass
class Item:
    """The node, the edge or the graph that is being read."""

    scope: str
    label: str
    """Its name in messages."""
    data: dict[str, Any] = field(default_factory=dict)


_GRAPH = "graphml/graph"
_DATA = (f"{_GRAPH}/data", f"{_GRAPH}/node/data", f"{_GRAPH}/edge/data")
_REFUSED = MappingProxyType(
    {
        f"{_GRAPH}/node/graph": "a graph in a node",
        f"{_GRAPH}/edge/graph": "a graph in an edge",
        f"{_GRAPH}/hyperedge": "a hyperedge",
    }
)


class _GraphmlReader:
    """Reads elements by their path: `<key>` declares an attribute, `<data>` gives it."""

    def __init__(self, known: frozenset[str], where: str) -> None:
        self.known, self.where = known, where
        self.nodes: dict[str, dict[str, Any]] = {}
        self.edges: list[tuple[str, str, dict[str, Any]]] = []
        self.columns: dict[str, Column] = {}
        """The declared attributes, by id."""
        self.defaults: dict[tuple[str, str], tuple[Column, str]] = {}
        """The defaults by scope and name; few, since only of known attributes."""
        self.graph = Item("graph", "the graph")
        self.item = self.graph
        self.directed = False
        self.has_graph = False
        self.paths: list[str] = []
        self.elements = 0
        self.text: list[str] | None = None
        self.unresolved: list[tuple[str, int]] = []
        self.key: Column | None = None
        """The attribute that is being declared, or whose data is being read."""
        self.starts: dict[str, Callable[[dict[str, str]], None]] = {
            "graphml/key": self._start_key,
            _GRAPH: self._start_graph,
            f"{_GRAPH}/node": self._start_node,
            f"{_GRAPH}/edge": self._start_edge,
            **dict.fromkeys(_DATA, self._start_data),
        }
        self.ends: dict[str, Callable[[str], None]] = {
            "graphml/key/default": self._end_default,
            **dict.fromkeys((f"{_GRAPH}/node", f"{_GRAPH}/edge"), self._end_item),
            **dict.fromkeys(_DATA, self._end_data),
        }
        paths = (*self.starts, *self.ends)
        self.inner = {path[:end] for path in paths for end, char in enumerate(path) if char == "/"}
        self.parser = expat.ParserCreate(namespace_separator=" ")
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._characters
        self.parser.StartDoctypeDeclHandler = self._refuse_doctype

    def read(self, data: bytes) -> AttributedGraph:
        """Return the graph that the file holds."""
        try:
            self.parser.Parse(data, True)
        except expat.ExpatError as error:
            reason = f"expected XML, found at column {error.offset + 1}: {expat.ErrorString(error.code)}"
            raise self.error("D001", reason, "export it again", line=error.lineno) from None
        except (LookupError, ValueError) as error:
            raise self.error("D001", f"its encoding cannot be read: {error}", "save it as UTF-8") from None
        if not self.has_graph:
            raise InputError("D001", "expected a <graph> in <graphml>, found none", where=self.where)
        for end, line in self.unresolved:
            if end not in self.nodes:
                message = f"an edge names node {format_value(end)}, expected the id of a node"
                raise self.error("D002", message, "declare the node, or correct the edge", line=line)
        return AttributedGraph(list(self.nodes.items()), self.edges, self.graph.data)

    def error(self, code: str, message: str, hint: str = "", line: int | None = None) -> InputError:
        """Return an error in a line, by default the current one of the parser."""
        line = self.parser.CurrentLineNumber if line is None else line
        return InputError(code, message, where=f"{self.where}, line {line}", hint=hint)

    def _refuse_doctype(self, *_: object) -> None:
        hint = "remove the line <!DOCTYPE ...>: entities can make a small file take all memory"
        raise self.error("D001", "expected XML without a document type, found <!DOCTYPE>", hint)

    # ------------------------------------------------------------------------------------------ elements

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self.elements += 1
        if self.elements > MAX_ELEMENTS or len(self.paths) == MAX_DEPTH:
            deep = len(self.paths) == MAX_DEPTH
            limit = f"{MAX_DEPTH} elements in one another" if deep else f"{MAX_ELEMENTS} elements"
            raise self.error("D001", f"expected at most {limit}, found more", "make the file smaller")
        name = tag.rpartition(" ")[2]
        if not self.paths and name != "graphml":
            hint = "say what it is with --graph-format json or graphml"
            raise self.error("D001", f"expected <graphml>, found <{name[:60]}>", hint)
        parent = self.paths[-1] if self.paths else ""
        # Below an unknown element, which has no children of interest, paths do not grow.
        path = name if not self.paths else f"{parent}/{name}" if parent in self.inner else ""
        self.paths.append(path)
        if path in _REFUSED:
            raise self.error("D001", f"expected a plain graph, found {_REFUSED[path]}", "flatten the graph first")
        if path in self.starts:
            self.starts[path](attributes)
        if path in self.ends:
            self.text = []

    def _end(self, tag: str) -> None:
        path = self.paths.pop()
        if path in self.ends:
            self.ends[path]("".join(self.text or ()))
        self.text = None

    def _characters(self, text: str) -> None:
        if self.text is not None:
            self.text.append(text)

    # ------------------------------------------------------------------------------------------ parts of a graph

    def _start_graph(self, attributes: dict[str, str]) -> None:
        """Begin the only graph of the file."""
        if self.has_graph:
            raise self.error("D001", "expected one graph, found another", "write each graph to a file of its own")
        self.has_graph = True
        self.directed = attributes.get("edgedefault") == "directed"

    def _start_node(self, attributes: dict[str, str]) -> None:
        """Begin a node."""
        node_id = attributes.get("id")
        if node_id is None:
            raise self.error("D002", "expected a node with an id, found one without", 'give each node its own "id"')
        if node_id in self.nodes:
            raise self.error("D002", f"two nodes have the id {format_value(node_id)}", 'give each node its own "id"')
        self._count()
        self.item = Item("node", f"node {format_value(node_id)}")
        self.nodes[node_id] = self.item.data

    def _start_edge(self, attributes: dict[str, str]) -> None:
        """Begin an edge; its ends may come later."""
        source, destination = attributes.get("source"), attributes.get("target")
        if source is None or destination is None:
            raise self.error("D002", "expected an edge with source and target, found one without")
        label = f"edge {format_value(source)} -> {format_value(destination)}"
        own = attributes.get("directed")
        if not (self.directed if own is None else own in ("true", "1")):
            hint = 'say edgedefault="directed" if each edge leads from its source to its target'
            raise self.error("D002", f"expected directed edges, found {label} without a direction", hint)
        self._count()
        line = self.parser.CurrentLineNumber
        self.unresolved += [(end, line) for end in (source, destination) if end not in self.nodes]
        self.item = Item("edge", label)
        self.edges.append((source, destination, self.item.data))

    def _end_item(self, _: str) -> None:
        """End a node or an edge: add the defaults of missing attributes, and return to the graph."""
        for (scope, name), (column, text) in self.defaults.items():
            if scope in (self.item.scope, "all") and name not in self.item.data:
                self.item.data[name] = self.cast(column, text)
        self.item = self.graph

    def _start_key(self, attributes: dict[str, str]) -> None:
        """Record an attribute that the file declares."""
        key = attributes.get("id")
        if key is None or key in self.columns:
            found = "one without" if key is None else f"a second one with the id {format_value(key)}"
            raise self.error("D001", f"expected an attribute with its own id, found {found}", "export the file again")
        name, kind = attributes.get("attr.name", ""), attributes.get("attr.type", "string")
        self.key = self.columns[key] = Column(name, kind, attributes.get("for", "all"))

    def _end_default(self, text: str) -> None:
        if self.key is not None and self.key.name in self.known:
            self.defaults[self.key.scope, self.key.name] = self.key, text

    def _start_data(self, attributes: dict[str, str]) -> None:
        key = attributes.get("key", "")
        self.key = self.columns.get(key)
        if self.key is None:
            message = f"{self.item.label} has data of key {format_value(key)}, expected a <key> for it"
            raise self.error("D001", message, "export the file again")

    def _end_data(self, text: str) -> None:
        if self.key is not None and self.key.name:  # drawings of yEd have no name
            self._store(self.key, text)

    def _store(self, column: Column, text: str) -> None:
        """Store an attribute of the current node, edge or graph."""
        if column.name in self.item.data:
            message = f"{column.name} of {self.item.label} is given twice"
            raise self.error("D002", message, "give it once")
        self.item.data[column.name] = self.cast(column, text)

    def cast(self, column: Column, text: str) -> Any:
        """Convert the text of an attribute to its type; raise InputError for an invalid one."""
        if column.name not in self.known:
            return text
        kind = column.type.lower()
        try:
            if "_" not in text:  # Python allows underscores in numbers
                if kind in _WHOLE:
                    return int(text)
                if kind in _REAL:
                    return float(text)
                if kind == "boolean":
                    return _TRUTH[text.strip().lower()]
            elif kind in _WHOLE | _REAL | {"boolean"}:
                raise ValueError
        except (ValueError, KeyError):
            found = f"{column.name} of {self.item.label} is {format_value(text)}"
            message = f"{found}, expected a value of type {format_value(kind)}"
            raise self.error("D002", message, "correct the value, or the type that the file declares") from None
        return text

    def _count(self) -> None:
        if len(self.nodes) + len(self.edges) >= MAX_ITEMS:
            message = f"expected at most {MAX_ITEMS} nodes and edges, found more"
            raise self.error("D001", message, "make the graph smaller")


def read_graphml(data: bytes, known: frozenset[str], where: str) -> AttributedGraph:
    """Read a graph from a file of GraphML; ids are texts.

    Attributes whose names are not in `known` stay texts, whatever type the file declares.

    Raises:
        InputError: The file is invalid; the error names the file and the line.

    >>> text = b'<graphml><graph edgedefault="directed"><node id="a"/></graph></graphml>'
    >>> read_graphml(text, frozenset(), "g.graphml").nodes
    [('a', {})]
    """
    return _GraphmlReader(known, where).read(data)
