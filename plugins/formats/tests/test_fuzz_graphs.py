"""Whatever is in a file of GraphML: it is read, or refused as bad input, and nothing else happens.

`ONNXPLACE_EXAMPLES=3000 pytest plugins/formats/tests/test_fuzz_graphs.py` tries more, and others each time.
"""

import gzip
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace.cost_graph.cost_graphs import parse_cost_graph, read_cost_graph, write_cost_graph
from onnxplace.cost_graph.part_functions import from_networkx, to_networkx
from onnxplace.driver import place
from onnxplace.driver.place import place_cost_graph
from plugins.formats.tests.test_graph_files import BOMB, GRAPHML, OUTSIDE
from tests.cost_graph.test_cost_graph import fork
from tests.support.fuzzing import JUNK, ODD, fuzzed, read_or_refused, spliced

GIVEN = {"graphml": GRAPHML.encode()}
NUMBERS = ("0", "-1", "1e999", "nan", "1" * 5000)
NAMES = ("x", "y", "a", "node", "edge", "graph", "all", "seconds", "bytes", "devices", "weights", "id_type")
KINDS = ("double", "long", "string", "boolean", "int", "bool", "true", "directed", "undirected")
JSONS = ("[]", "{}", '[{"id": 0}]', "[" * 5000, '{"w": 1}')
ODD_TEXTS = st.sampled_from(["", " ", "é\U0001f600", *NUMBERS, *NAMES, *KINDS, *JSONS])
TAGS = (b"<a>", b"</a>", b"<node id='x'/>", b"<graph>", b"</graph>", b"<a>" * 100, b"<!--", b"<![CDATA[", b"]]>")
PIECES = st.one_of(
    st.sampled_from([BOMB.encode(), OUTSIDE.encode(), b"&lt;", b"&#0;", b"&l9;", b"\xff", b"\x00", *TAGS]), JUNK
)


@cache
def own(kind: str) -> bytes:
    """Return a placed graph as we write it."""
    graph = parse_cost_graph(fork())
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"g.{kind}"
        write_cost_graph(path, graph, place_cost_graph(graph, "single"))
        return path.read_bytes()


@st.composite
def mutated_xml(draw: st.DrawFn, data: bytes) -> bytes:
    """Return an XML text whose elements have odd attributes and texts, are gone, or are there twice."""
    root = ElementTree.fromstring(data)
    for _ in range(draw(st.integers(1, 3))):
        parents = [element for element in root.iter() if len(element)]
        parent = parents[draw(st.integers(0, len(parents) - 1))]
        at = draw(st.integers(0, len(parent) - 1))
        change = draw(st.sampled_from(["attribute", "attribute", "text", "text", "gone", "twice", "moved"]))
        if change == "attribute" and parent[at].attrib:
            parent[at].set(draw(st.sampled_from(sorted(parent[at].attrib))), draw(ODD_TEXTS))
        elif change == "text":
            parent[at].text = draw(ODD_TEXTS)
        elif change == "twice":
            parent.append(parent[at])
        elif change == "moved":
            parents[draw(st.integers(0, len(parents) - 1))].insert(0, ElementTree.fromstring("<node id='new'/>"))
        else:
            del parent[at]
            if not len(root):
                break
    return ElementTree.tostring(root)


@st.composite
def pasted(draw: st.DrawFn, data: bytes) -> bytes:
    """Return a text into which something was pasted where a tag begins or ends."""
    ends = [at for at, char in enumerate(data) if char in b"<>"]
    at = draw(st.sampled_from(ends)) + draw(st.integers(0, 1))
    return data[:at] + draw(PIECES) + data[at:]


@fuzzed
@given(st.data(), st.sampled_from(["graphml"]), st.booleans(), st.booleans())
def test_graph_files(tmp_path, data, kind, packed, placed):
    valid = own(kind) if placed else GIVEN[kind]
    near = data.draw(st.one_of(mutated_xml(valid), pasted(valid), spliced(valid), JUNK))
    path = tmp_path / f"graph.{kind}"
    path.write_bytes(gzip.compress(near) if packed else near)
    graph = read_or_refused(lambda: read_cost_graph(path, device_count=2))
    if graph is not None:
        assert np.isfinite(next(iter(graph.profile.seconds.values()))).all()
        result = read_or_refused(lambda: place.place_cost_graph(graph, "m-etf"))
        assert result is None or 0 <= result.makespan_seconds < float("inf")
        read_or_refused(lambda: write_cost_graph(tmp_path / f"again.{kind}", graph, result))


@fuzzed
@given(st.data())
def test_digraphs(data):
    digraph = to_networkx(parse_cost_graph(fork()))
    holders = [
        digraph.graph,
        *(node for _, node in digraph.nodes(data=True)),
        *(e for *_, e in digraph.edges(data=True)),
    ]
    for _ in range(data.draw(st.integers(1, 3))):
        holder = data.draw(st.sampled_from(holders))
        holder[data.draw(st.sampled_from([*holder, "topo_order", "weights", "backward", "label", "group"]))] = (
            data.draw(ODD)
        )
    graph = read_or_refused(lambda: from_networkx(digraph))
    if graph is not None:
        result = read_or_refused(lambda: place.place_cost_graph(graph, "m-etf"))
        assert result is None or 0 <= result.makespan_seconds < float("inf")


@pytest.mark.parametrize("kind", ["graphml"])
def test_fuzzed_inputs_are_valid_before_mutation(tmp_path, kind):
    for data in (own(kind), GIVEN[kind]):
        (tmp_path / f"g.{kind}").write_bytes(data)
        assert len(read_cost_graph(tmp_path / f"g.{kind}").ids) > 1
