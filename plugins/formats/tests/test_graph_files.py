"""GraphML: what is read, what is written, and what is refused, with the message."""

import gzip
import json
import subprocess
import sys
import time
import tracemalloc

import networkx
import pytest

from onnxplace.cost_graph.cost_graphs import parse_cost_graph, read_cost_graph, write_cost_graph
from onnxplace.cost_graph.part_functions import from_networkx
from onnxplace.driver.place import place_cost_graph
from onnxplace.errors import InputError, UsageError
from onnxplace_formats import graphml
from plugins.formats.tests.test_networkx import everything, two_nodes
from tests.cost_graph.test_cost_graph import fork

DEVICES = '[{"id": "a", "memory_bytes": 1000}, {"id": "b", "memory_bytes": 1000}]'
GRAPHML = f"""<?xml version="1.0" encoding="UTF-8"?>
<graphml xmlns="http://graphml.graphdrawing.org/xmlns">
<key id="s" for="node" attr.name="seconds" attr.type="double"/>
<key id="w" for="node" attr.name="weights_bytes" attr.type="long"><default>8</default></key>
<key id="b" for="edge" attr.name="bytes" attr.type="long"/>
<key id="m" for="graph" attr.name="devices" attr.type="string"/>
<graph edgedefault="directed">
<data key="m">{DEVICES}</data>
<node id="x"><data key="s">1.5</data></node>
<node id="y"><data key="s">2</data><data key="w">0</data></node>
<edge source="x" target="y"><data key="b">4</data></edge>
</graph>
</graphml>"""
DOUBLE, TEXT = (f'attr.name="seconds" attr.type="{kind}"' for kind in ("double", "string"))
TEXTS = {"graphml": GRAPHML}
# Each entity is ten of the one before it: a billion of the first.
LAUGHS = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 10))
BOMB = f'<!DOCTYPE graphml [<!ENTITY l0 "ha">{LAUGHS}]>'
OUTSIDE = '<!DOCTYPE graphml [<!ENTITY l9 SYSTEM "file:///etc/hostname">]>'


@pytest.fixture
def file(tmp_path):
    """Write a file."""

    def write(text: str | bytes, name: str):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path / name

    return write


# ---------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("kind", TEXTS)
def test_a_file_is_read_with_its_machine_types_and_defaults(file, kind):
    graph = read_cost_graph(file(TEXTS[kind], f"g.{kind}"))
    assert (graph.name, graph.ids, graph.device_ids) == ("g", ("x", "y"), ("a", "b"))
    assert graph.profile.graph.names == ("x", "y")
    assert graph.profile.seconds["cuda/cost-graph"].tolist() == [1.5, 2.0]
    assert dict(zip(graph.profile.graph.weight_names, graph.profile.graph.weight_bytes.tolist())) == {
        graph.profile.graph.names[0]: 8
    }
    assert graph.profile.graph.value_bytes.tolist() == [4]
    assert graph.notes == ()


@pytest.mark.parametrize("kind", TEXTS)
def test_the_format_is_known_by_the_ending_or_said(file, kind):
    graph = read_cost_graph(file(TEXTS[kind], f"g.{kind}"))
    for name in (f"g.{kind.upper()}", f"g.{kind}.gz", f"G.{kind}.GZ"):
        for data in (TEXTS[kind].encode(), gzip.compress(TEXTS[kind].encode())):
            assert read_cost_graph(file(data, name)).ids == graph.ids
    assert read_cost_graph(file(TEXTS[kind], "g.xml"), kind).ids == graph.ids
    assert read_cost_graph(file(json.dumps(fork()), f"f.{kind}"), "json").name == "fork"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1"])
def test_files_in_other_encodings_are_read(file, encoding):
    text = GRAPHML.replace("UTF-8", encoding).replace('"x"', '"é"')
    assert read_cost_graph(file(text.encode(encoding), "g.graphml")).ids == ("é", "y")


@pytest.mark.parametrize("make", [networkx.DiGraph, networkx.MultiDiGraph])
@pytest.mark.parametrize("kind", TEXTS)
def test_files_of_networkx_are_read_like_its_graphs(tmp_path, kind, make):
    digraph = make(two_nodes())
    digraph.nodes["y"].update(group="left", backward=True, score=float("nan"))
    digraph.graph.clear()
    networkx.write_graphml_xml(digraph, tmp_path / f"g.{kind}")
    digraph.graph["devices"] = [{"id": 0, "memory_bytes": 0}, {"id": 1, "memory_bytes": 0}]
    expected = everything(from_networkx(digraph))
    assert everything(read_cost_graph(tmp_path / f"g.{kind}", device_count=2)) == {**expected, "name": "g"}


def test_drawings_of_yed_are_passed_over(file):
    drawing = '<data key="d6"><y:ShapeNode><y:Fill color="#ff0000"/><y:NodeLabel>z</y:NodeLabel></y:ShapeNode></data>'
    text = GRAPHML.replace('<node id="x">', f'<node id="x">{drawing}<port name="p"/><desc>seconds</desc>')
    text = text.replace("xmlns=", 'xmlns:y="http://www.yworks.com/xml/graphml" xmlns=')
    text = text.replace("<graph ", '<key id="d6" for="node" yfiles.type="nodegraphics"/><graph ', 1)
    assert read_cost_graph(file(text, "g.graphml")).ids == ("x", "y")


def test_a_node_may_come_after_its_edges(file):
    node = '<node id="y"><data key="s">2</data><data key="w">0</data></node>\n'
    text = GRAPHML.replace(node, "").replace("</graph>", f"{node}</graph>")
    graphs = [read_cost_graph(file(data, "g.graphml")) for data in (text, GRAPHML)]
    assert everything(graphs[0]) == everything(graphs[1])


# ---------------------------------------------------------------------------------------------- what is refused

# What is replaced, by what, the code, the line, and what the message says.
REFUSED = [
    ("graphml", "?>", ">", "D001", 1, "expected XML, found at column"),
    ("graphml", "</graphml>", "", "D001", 13, "expected XML, found at column 1: no element found"),
    ("graphml", "<graphml xmlns", f"{BOMB}<graphml xmlns", "D001", 2, "expected XML without a document type"),
    ("graphml", 'encoding="UTF-8"', 'encoding="klingon"', "D001", 1, "unknown encoding"),
    ("graphml", 'encoding="UTF-8"', 'encoding="big5"', "D001", 1, "its encoding cannot be read: multi-byte encodings"),
    ("graphml", "<graphml xmlns", f"{OUTSIDE}<graphml xmlns", "D001", 2, "remove the line <!DOCTYPE ...>: entities"),
    ("graphml", "1.5", "&l9;", "D001", 9, "undefined entity"),
    ("graphml", "1.5", "a\x01b", "D001", 9, "not well-formed (invalid token)"),
    ("graphml", "graphml", "svg", "D001", 2, "expected <graphml>, found <svg>"),
    ("graphml", "graph>", "g>", "D001", 12, "mismatched tag"),
    ("graphml", "</graph>", '</graph><graph edgedefault="directed"/>', "D001", 12, "expected one graph, found another"),
    ("graphml", '<node id="x">', '<node id="x"><graph/>', "D001", 9, "expected a plain graph, found a graph in a node"),
    ("graphml", "</graph>", "<hyperedge/></graph>", "D001", 12, "expected a plain graph, found a hyperedge"),
    ("graphml", 'id="w"', 'id="s"', "D001", 4, "an attribute with its own id, found a second one with the id 's'"),
    ("graphml", ' id="w"', "", "D001", 4, "expected an attribute with its own id, found one without"),
    ("graphml", 'key="s">1.5', 'key="q">1.5', "D001", 9, "node 'x' has data of key 'q', expected a <key> for it"),
    ("graphml", '<node id="x">', "<node>", "D002", 9, "expected a node with an id, found one without"),
    ("graphml", '<node id="y">', '<node id="x">', "D002", 10, "two nodes have the id 'x'"),
    ("graphml", ' target="y"', "", "D002", 11, "expected an edge with source and target, found one without"),
    ("graphml", 'target="y"', 'target="z"', "D002", 11, "an edge names node 'z', expected the id of a node"),
    ("graphml", ">1.5<", ">fast<", "D002", 9, "seconds of node 'x' is 'fast', expected a value of type 'double'"),
    ("graphml", ">1.5<", "><", "D002", 9, "seconds of node 'x' is '', expected a value of type 'double'"),
    ("graphml", ">4<", ">4_0<", "D002", 11, "bytes of edge 'x' -> 'y' is '4_0', expected a value of type"),
    ("graphml", ">4<", ">4.5<", "D002", 11, "bytes of edge 'x' -> 'y' is '4.5', expected a value of type"),
    ("graphml", ">8<", ">many<", "D002", 9, "weights_bytes of node 'x' is 'many', expected a value of type 'long'"),
    ("graphml", '"directed"', '"undirected"', "D002", 11, "expected directed edges, found edge 'x' -> 'y' without"),
    ("graphml", '"directed"', '"undirected"', "D002", 11, 'say edgedefault="directed" if each edge leads from'),
    ("graphml", "1.5</data>", '1.5</data><data key="s">2</data>', "D002", 9, "seconds of node 'x' is given twice"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "old", "new", "code", "line", "words"), REFUSED)
def test_a_file_that_makes_no_sense_is_refused_with_its_line(run_cli, file, kind, old, new, code, line, words):
    text = TEXTS[kind]
    assert old in text
    path = file(text.replace(old, new, 2 if old == "graphml" else 1), f"g.{kind}")
    ran = run_cli("place", path, "--json")
    error = json.loads(ran.out)["error"]
    assert (ran.code, error["code"], error["where"]) == (2, code, f"{path}, line {line}")
    assert words in f"{error['message']} {error['hint']}"


@pytest.mark.parametrize(
    ("kind", "old", "new", "code", "words"),
    [
        ("graphml", GRAPHML[GRAPHML.index("<graph ") : -10], "", "D001", "expected a <graph> in <graphml>, found none"),
        ("graphml", "1.5", "-1.5", "D002", "seconds of node 'x' is -1.5, expected a number from 0 to 1e+12"),
        ("graphml", "1.5", "nan", "D002", "seconds of node 'x' is nan, expected a number"),
        ("graphml", "1.5", "9" * 400, "D002", "seconds of node 'x' is inf, expected a number"),
        ("graphml", DOUBLE, TEXT, "D002", "seconds of node 'x' is '1.5', ex"),
        ("graphml", DOUBLE, TEXT, "D002", "declare seconds as a number"),
        ("graphml", "</graph>", '<edge source="y" target="x"/></graph>', "D002", "the graph has a cycle through"),
        ("graphml", DEVICES, "[]", "D002", "expected a graph that names devices, found none"),
        ("graphml", DEVICES, "{}", "D002", "expected a graph that names devices, found none"),
        ("graphml", DEVICES, "[5]", "D002", "the graph's devices are [5], expected a list"),
        ("graphml", '"b" for="edge" attr.name="bytes"', '"b" for="edge" attr.name="tensor"', "", ""),
        ("graphml", 'attr.name="seconds" attr.type="double"', 'attr.name="id_type"', "D002", "has the id_type '1.5'"),
    ],
)  # fmt: skip
def test_a_graph_that_makes_no_sense_is_refused_by_name(run_cli, file, kind, old, new, code, words):
    assert old in TEXTS[kind]
    ran = run_cli("place", file(TEXTS[kind].replace(old, new, 1), f"g.{kind}"), "--json", "--placer", "single")
    if not code:  # a number as a tensor's name, and no bytes: odd, and noted
        assert [note["code"] for note in json.loads(ran.out)["diagnostics"]] == ["C002", "P010"]
        return
    error = json.loads(ran.out)["error"]
    assert (ran.code, error["code"]) == (2, code)
    assert words in f"{error['message']} {error['hint']}"


@pytest.mark.parametrize("kind", TEXTS)
def test_xml_bombs_are_refused_at_once(file, kind):
    began = time.process_time()
    for head in (BOMB, OUTSIDE, "<!DOCTYPE graphml [" + f'<!ENTITY a "{"a" * 100_000}">' + "]>"):
        text = TEXTS[kind].replace(f"<{kind} ", f"{head}<{kind} ", 1).replace("1.5", "&l9;" * 100)
        with pytest.raises(InputError, match="expected XML without a document type"):
            read_cost_graph(file(text, f"g.{kind}"))
    assert time.process_time() - began < 5


def test_a_graph_that_expands_without_end_is_refused(file, monkeypatch):
    monkeypatch.setattr("onnxplace.cost_graph.cost_graphs.MAX_FILE_BYTES", 1 << 20)
    data = gzip.compress(GRAPHML.replace("</graph>", " " * (2 << 20)).encode())
    assert len(data) < 10_000
    with pytest.raises(InputError, match="it holds more than 1048576 bytes"):
        read_cost_graph(file(data, "g.graphml.gz"))


@pytest.mark.parametrize(("limit", "words"), [("MAX_ELEMENTS", "7 elements"), ("MAX_ITEMS", "7 nodes and edges")])
def test_a_file_of_more_than_is_taken_is_refused(file, monkeypatch, limit, words):
    monkeypatch.setattr(graphml, limit, 7)
    text = GRAPHML.replace("</graph>", "".join(f'<node id="{i}"/>' for i in range(9)) + "</graph>")
    with pytest.raises(InputError, match=rf"D001.*expected at most {words}, found more"):
        read_cost_graph(file(text, "g.graphml"))


def test_a_file_nested_too_deeply_is_refused_and_long_names_take_no_memory(file):
    with pytest.raises(InputError, match="expected at most 64 elements in one another, found more"):
        read_cost_graph(file(GRAPHML.replace("<data", "<a>" * 100_000 + "<data", 1), "g.graphml"))
    names = [f"{'n' * 100_000}{depth}" for depth in range(60)]
    inside = "".join(f"<{name}>" for name in names) + "".join(f"</{name}>" for name in reversed(names))
    path = file(GRAPHML.replace("<data", f"{inside}<data", 1), "g.graphml")
    tracemalloc.start()
    assert read_cost_graph(path).ids == ("x", "y")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * path.stat().st_size, peak


def test_xml_where_json_is_expected_is_called_by_its_name(file):
    with pytest.raises(InputError, match=r"expected JSON, found XML\n  hint: say what it is with `graph_format="):
        read_cost_graph(file(GRAPHML, "g.json"))
    with pytest.raises(InputError, match=r"line 1: expected XML, found at column 1: not well-formed"):
        read_cost_graph(file(json.dumps(fork()), "g.graphml"))
    with pytest.raises(InputError, match=r"line 1: expected <graphml>, found <gexf>"):
        read_cost_graph(file("<gexf/>", "g.graphml"))


# ---------------------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("kind", TEXTS)
def test_a_placed_graph_is_what_networkx_reads(tmp_path, kind):
    graph = parse_cost_graph(fork())
    placed = place_cost_graph(graph, "m-etf", groups="none")
    write_cost_graph(tmp_path / f"p.{kind}", graph, placed)
    digraph = networkx.read_graphml(tmp_path / f"p.{kind}")
    assert {node: data["device"] for node, data in digraph.nodes(data=True)} == placed.placement
    assert [data["label"] for _, data in digraph.nodes(data=True)] == ["n0", "n1", "n2", "n3"]
    assert [data["finish_seconds"] for _, data in digraph.nodes(data=True)] == placed.finish_seconds.tolist()
    assert sorted(data["tensor"] for _, _, data in digraph.edges(data=True)) == ["t", "t", "u", "v"]
    colors = {data["color"] for _, data in digraph.nodes(data=True)}
    assert len(colors) == 2
    assert everything(read_cost_graph(tmp_path / f"p.{kind}")) == everything(graph)


@pytest.mark.parametrize("name", ["p.graphml", "p.graphml.gz"])
def test_a_graph_is_written_the_same_on_any_day(tmp_path, monkeypatch, name):
    graph = parse_cost_graph(fork())
    write_cost_graph(tmp_path / name, graph)
    first = (tmp_path / name).read_bytes()
    monkeypatch.setattr(time, "strftime", lambda *_: "1970-01-01")
    monkeypatch.setattr(time, "time", lambda: 1.0)
    write_cost_graph(tmp_path / name, graph)
    assert (tmp_path / name).read_bytes() == first
    assert b"1970" not in first


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": [{"id": "a\x00"}]}, r"the id of node 'a\\x00' has the character U\+0000, which XML cannot hold"),
        ({"nodes": [{"id": 0, "name": "a\ud800"}]}, r"label of node 0 has the character U\+D800"),
        ({"nodes": [{"id": 0, "op": "\uffff"}]}, r"op of node 0 has the character U\+FFFF"),
        ({"nodes": [{"id": 0}, {"id": "0"}]}, "expected ids that differ as texts, found 0 and '0'"),
        ({"name": "\x1b[2J"}, r"name of the graph has the character U\+001B"),
        ({"nodes": [{"id": (1, 2)}]}, "expected ids that are texts or numbers, found \\(1, 2\\)"),
        ({"devices": [{"id": frozenset()}]}, "expected ids of devices that are texts or numbers, found"),
    ],
)
@pytest.mark.parametrize("kind", TEXTS)
def test_characters_that_xml_cannot_hold_are_an_error_and_write_nothing(tmp_path, kind, changes, words):
    graph = parse_cost_graph({**fork(edges=[]), **changes})
    with pytest.raises(InputError, match=words) as refused:
        write_cost_graph(tmp_path / f"p.{kind}", graph)
    assert refused.value.code == "U032"
    assert list(tmp_path.iterdir()) == []


def test_other_endings_and_places_are_refused(tmp_path):
    for name in ("p.json", "p", "p.xml", "graphml", "p.gz"):
        with pytest.raises(UsageError, match=rf"U032.*expected a file of GraphML, got '{name}'"):
            write_cost_graph(tmp_path / name, parse_cost_graph(fork()))
    with pytest.raises(UsageError, match="U032"):
        write_cost_graph(tmp_path / "none" / "p.graphml", parse_cost_graph(fork()))


# ---------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("name", ["placed.graphml", "placed.graphml.gz"])
def test_the_command_writes_a_placed_graph_that_it_places_again(run_cli, file, tmp_path, name):
    path = file(json.dumps(fork()), "g.json")
    ran = run_cli("place", path, "--placer", "m-etf", "--groups", "none", "-o", tmp_path / name, "--json")
    assert ran.code == 0
    again = run_cli("place", tmp_path / name, "--placer", "m-etf", "--groups", "none", "--json")
    assert again.code == 0
    for key in ("makespan_seconds", "placement", "peak_bytes"):
        assert json.loads(again.out)[key] == json.loads(ran.out)[key]


def test_the_command_says_what_it_wrote_and_scores_go_out_too(run_cli, file, tmp_path):
    path = file(json.dumps(fork()), "g.json")
    mine = file(json.dumps(dict.fromkeys("0123", "a")), "mine.json")
    ran = run_cli("place", path, "--placement", mine, "--output", tmp_path / "p.graphml")
    assert ran.code == 0
    assert f"written to {tmp_path / 'p.graphml'}" in ran.out
    digraph = networkx.read_graphml(tmp_path / "p.graphml")
    assert {data["device"] for _, data in digraph.nodes(data=True)} == {"a"}


@pytest.mark.parametrize("kind", TEXTS)
def test_a_graph_without_devices_takes_those_of_the_command_line(run_cli, tmp_path, kind):
    digraph = two_nodes()
    digraph.graph.clear()
    networkx.write_graphml(digraph, tmp_path / "g.xml")
    ran = run_cli("place", tmp_path / "g.xml", "--graph-format", kind, "--devices", 2, "--max-memory", "1k", "--json",
                  "--placer", "m-etf")  # fmt: skip
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["makespan_seconds"] == 3.0
    ran = run_cli("place", tmp_path / "g.xml", "--graph-format", kind)
    assert (ran.code, "error[D002]" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("p.json", "U032", "expected a file of GraphML, got 'p.json'"),
        ("none/p.graphml", "U032", "there is no folder"),
        ("g.graphml", "U032", "which is read"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_refused_before_the_work(run_cli, file, tmp_path, name, code, words):
    path = file(GRAPHML, "g.graphml")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("onnxplace.driver.place.place_cost_graph", lambda *_, **__: pytest.fail("placed"))
        ran = run_cli("place", path, "-o", tmp_path / name)
    assert ran.code == 2
    assert f"error[{code}]" in ran.err
    assert words in ran.err
    assert path.read_text() == GRAPHML


def test_networkx_is_loaded_only_where_a_digraph_is_made(file, tmp_path):
    path = file(GRAPHML, "g.graphml")
    script = f"""
import sys
from onnxplace.cost_graph import read_cost_graph, to_networkx
graph = read_cost_graph({str(path)!r})
before = "networkx" in sys.modules
to_networkx(graph)
print(before, "networkx" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False True"


def test_a_graph_that_fits_nowhere_writes_nothing(run_cli, file, tmp_path):
    ran = run_cli("place", file(GRAPHML, "g.graphml"), "--max-memory", "1", "-o", tmp_path / "p.graphml")
    assert ran.code == 3
    assert not (tmp_path / "p.graphml").exists()
