"""Any text in files and options is read, or refused as bad input.

`ONNXPLACE_EXAMPLES=3000 pytest tests/cli/test_fuzz_inputs.py` tries more texts, different ones each time.
"""

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace.cli.shared_options import parse_shape
from onnxplace.cost_graph.cost_graphs import read_cost_graph
from onnxplace.driver import place
from onnxplace.facts import Profile
from onnxplace.feeds.npz import read_npz
from onnxplace.machine import measurement_cache
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model
from onnxplace.model.state_binding import bind_states
from onnxplace.passes.coplace import Coplace
from onnxplace.passes.cost_files.cost_file import format_costs, format_costs_csv
from onnxplace.passes.profile import ProfileCosts
from onnxplace.passes.profiling.profile_model import recall_measurement, store_measurement
from onnxplace.pipeline.pipeline import Pipeline, run_pass
from onnxplace.state import State
from onnxplace.target.parsing import parse_devices, parse_memory
from onnxplace.target.target import Device, Link, Shared, Target
from onnxplace.target.target_file import format_target, read_target
from onnxplace.utils import names
from tests.cli.test_contradictions import states_model
from tests.conftest import FAST_PIPELINE, branches
from tests.machine.test_damaged_cache import NODES, keep_one, path_of
from tests.support.fuzzing import JUNK, fuzzed, read_or_refused, spliced, texts_of

# Values as TOML and CSV have them.
LITERALS = st.sampled_from(
    [*("inf", "nan", "-1", "0", "1e308", "9223372036854775808", "1" * 5000, "true", '""', '"cpu:0"', '"x"', "[]", "{}"),
     *("1979-05-27", "[[[[]]]]", "", "-", "?", "1e-320", "0x10", "1_000", '"cpu:1"', "[" * 5000)]
)  # fmt: skip


@st.composite
def lines_near(draw: st.DrawFn, text: str, separator: str) -> bytes:
    """Return a text with odd cells, missing lines and repeated lines.

    `separator` separates the cells of a line.
    """
    lines = [line.split(separator) for line in text.splitlines()]
    for _ in range(draw(st.integers(1, 3))):
        line = draw(st.integers(0, len(lines) - 1))
        cell = draw(st.integers(0, len(lines[line]) - 1))
        change = draw(st.sampled_from(["odd", "odd", "odd", "gone", "twice", "cell"]))
        if change == "odd":
            lines[line][cell] = draw(LITERALS)
        elif change == "gone" and len(lines) > 1:
            del lines[line]
        elif change == "twice":
            lines.append(list(lines[line]))
        else:
            lines[line].append(draw(LITERALS))
    return "\n".join(separator.join(line) for line in lines).encode()


# ---------------------------------------------------------------------------------------------- what is valid

TARGET = Target(
    (Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30, cores=2)),
    (Link("cpu:0", "cpu:1", 1e-5, 1e9),),
    shared=(Shared(("cpu:0", "cpu:1"), 1.5, 1.1, 1e9),),
)


@cache
def profiled() -> State:
    """Return the state of the model of two branches with estimated costs."""
    model = bind(load(branches()), {"batch": 4}, {})
    steps = Pipeline.parse("optimize,profile{estimate=true}")
    return steps.run(State(TARGET).with_facts(model))[0]


GRAPH = {
    "devices": [{"id": 0, "memory_bytes": 1000}, {"id": "b", "memory_bytes": 1000}],
    "comm": {"coef_us_per_byte": 0.1, "intercept_us": 10},
    "nodes": [
        {
            "id": 0,
            "name": "a",
            "compute_time_us": 12,
            "memory_bytes": 8,
            "temp_bytes": 4,
            "output_bytes": 64,
            "group": 1,
        },
        {"id": "x", "compute_time_us": 5, "topo_order": 2, "is_backward": True},
        {"id": 2, "compute_time_us": 5, "topo_order": 1},
    ],
    "edges": [
        {"src": 0, "dst": "x", "bytes": 64, "tensor": "a:0"},
        {"src": 0, "dst": 2, "tensors": [{"name": "t", "bytes": 4}]},
    ],
}


@pytest.fixture
def file(tmp_path) -> Callable[[bytes, str], Path]:
    """Write a file."""

    def write(data: bytes, name: str) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


@pytest.fixture(autouse=True)
def limit_pattern_time(monkeypatch) -> None:
    monkeypatch.setattr(names, "MAX_SECONDS", 0.3)


# ---------------------------------------------------------------------------------------------- files


@fuzzed
@given(data=st.one_of(lines_near(format_target(TARGET), " = "), spliced(format_target(TARGET).encode()), JUNK))
def test_target_files(file, data):
    target = read_or_refused(lambda: read_target(file(data, "target.toml")))
    if target is not None:
        assert all(np.isfinite(array).all() for array in target.link_arrays())
        state = read_or_refused(lambda: Pipeline.parse("optimize,profile{estimate=true},m-etf").run(bound(target))[0])
        assert state is None or Profile in state


def bound(target: Target) -> State:
    return State(target).with_facts(bind(load(branches()), {"batch": 4}, {}))


@fuzzed
@given(data=texts_of({"left": "cpu:0", "rel.": "cpu:1", ".*": "cpu:0"}), way=st.sampled_from(["file", "text"]))
def test_device_maps(file, data, way):
    given_map = str(file(data, "map.json")) if way == "file" else data.decode(errors="replace")
    if way == "file" or given_map.startswith("{"):
        read_or_refused(lambda: run_pass(Coplace(device_map=given_map), profiled()))


@fuzzed
@given(st.one_of(st.text("abcrelu.*+?()[]{}|\\^$1,", max_size=20), st.text(max_size=10)))
def test_patterns(pattern):
    read_or_refused(lambda: run_pass(Coplace(colocate=(pattern,)), profiled()))


def cost_document() -> Any:
    return json.loads(format_costs(profiled()[Profile]))


def cost_table() -> str:
    return format_costs_csv(profiled()[Profile], profiled()[Model])


def place_by_costs(path: Path) -> State:
    steps = (ProfileCosts(costs=str(path), estimate=True, save=str(path.parent / "saved.json")), Coplace())
    placed = Pipeline((*steps, *Pipeline.parse("m-etf").passes)).run(profiled())[0]
    ends = [ProfileCosts(costs=str(path.parent / "saved.json"))]
    assert run_pass(ends[0], profiled())[Profile].unit.tolist()  # what we write is read
    return placed


@fuzzed
@given(st.data())
def test_cost_files_in_json(file, data):
    text = data.draw(texts_of(cost_document()))
    read_or_refused(lambda: place_by_costs(file(text, "costs.json")))


@fuzzed
@given(st.data())
def test_cost_files_in_csv(file, data):
    text = cost_table()
    near = data.draw(st.one_of(lines_near(text, ","), lines_near(text, "="), spliced(text.encode()), JUNK))
    read_or_refused(lambda: place_by_costs(file(near, "costs.csv")))


@fuzzed
@given(data=texts_of(GRAPH), packed=st.booleans())
def test_cost_graphs(file, data, packed):
    path = file(gzip.compress(data) if packed else data, "graph.json.gz")
    graph = read_or_refused(lambda: read_cost_graph(path))
    if graph is not None:
        placed = read_or_refused(lambda: place.place_cost_graph(graph, "m-etf"))
        assert placed is None or 0 <= placed.makespan_seconds < float("inf")


@fuzzed
@given(spliced(gzip.compress(json.dumps(GRAPH).encode(), mtime=0)))
def test_damaged_gzip_files(file, data):
    read_or_refused(lambda: read_cost_graph(file(data, "graph.json.gz")))


@fuzzed
@given(texts_of({"placement": {"0": 0, "x": "b", "2": 0}, "placer": "m-etf"}))
def test_placements(file, data):
    graph = read_cost_graph(file(json.dumps(GRAPH).encode(), "graph.json"))
    path = file(data, "placement.json")
    read_or_refused(lambda: place.evaluate_placement(graph, place.read_placement(path)))


def archive(method: int = zipfile.ZIP_STORED) -> bytes:
    """Return an .npz file of two arrays."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as inside:
        for name, array in (("x", np.ones((4, 64), np.float32)), ("t", np.array(["a", "b"]))):
            content = io.BytesIO()
            np.save(content, array)
            inside.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue(), method)
    return stream.getvalue()


HEADERS = [
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 1048576), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (3,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 2.5), }",
    "{'descr': [('a', '<f4'), ('a', '<f4')], 'fortran_order': False, 'shape': (2,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (2L,), }",
    "{'descr': '<V0', 'fortran_order': False, 'shape': (2,), }",
    "(" * 3000,
    "{" * 90 + "}" * 90,
    "__import__('os')",
    "",
]


def with_header(text: str) -> bytes:
    """Return an .npz file whose array has the text as its header."""
    stream = io.BytesIO()
    header = text.encode("latin1") + b"\n"
    with zipfile.ZipFile(stream, "w") as inside:
        inside.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 100)
    return stream.getvalue()


@fuzzed
@given(
    st.one_of(
        spliced(archive()), spliced(archive(zipfile.ZIP_DEFLATED)), spliced(archive(zipfile.ZIP_LZMA)), JUNK,
        st.sampled_from(HEADERS).map(with_header), spliced(with_header(HEADERS[0])),
    )
)  # fmt: skip
def test_archives_of_inputs(file, data):
    read_or_refused(lambda: read_npz(file(data, "inputs.npz")))


@fuzzed
@given(st.data())
def test_entries_of_the_cost_cache(data):
    near = data.draw(texts_of(keep_one()))
    path_of("one").write_bytes(near)
    try:
        parsed = recall_measurement("one", NODES)
    except ValueError:
        assert not path_of("one").exists()
        return
    measurement, _ = parsed
    assert all(np.isfinite(array).all() for array in (measurement.seconds, measurement.spread))
    assert measurement.unit.max() < NODES
    store_measurement("two", measurement, [])


def test_the_cache_of_this_test_is_its_own():
    assert list(measurement_cache.folder().glob("*")) == []


# ---------------------------------------------------------------------------------------------- options


def near_texts(*valid: str) -> st.SearchStrategy[str]:
    """Return texts near those that are valid."""
    pieces = st.one_of(
        st.sampled_from(["", ",", "=", ":", "*", "{", "}", '"', "\\", ";", " ", "0", "-1", "GiB", "cpu:0", "nan"]),
        st.sampled_from(["9" * 30, "9" * 5000]),
        st.text(max_size=4),
    )  # fmt: skip
    cut = st.tuples(st.sampled_from(valid), st.integers(0, 30), pieces, st.integers(0, 30))
    return st.one_of(cut.map(lambda c: c[0][: c[1]] + c[2] + c[0][c[3] :]), st.lists(pieces, max_size=6).map("".join))


@fuzzed
@given(
    near_texts(FAST_PIPELINE, "auto{seconds=0.1,seed=3}", 'coplace{colocate="a;b",device_map="x"}', "profile{repeat=5}")
)
def test_texts_of_pipelines(text):
    parsed = read_or_refused(lambda: Pipeline.parse(text))
    assert parsed is None or str(Pipeline.parse(str(parsed))) == str(parsed)


@fuzzed
@given(near_texts("batch=8,seq=128", "x.0=4"))
def test_shapes(text):
    parsed = read_or_refused(lambda: parse_shape(text))
    assert parsed is None or all(type(size) is int and size >= 0 for size in parsed.values())
    if parsed:
        read_or_refused(lambda: bind(load(branches()), parsed, {}))


@fuzzed
@given(near_texts("16GiB", "cpu:0=16GiB,cpu:1=1.5k"))
def test_amounts_of_memory(text):
    parsed = read_or_refused(lambda: parse_memory(text, ["cpu:0", "cpu:1"]))
    if parsed is not None:
        TARGET.limiting(parsed)


@fuzzed
@given(near_texts("cpu:0,cpu:1", "cuda:0"))
def test_lists_of_devices(text):
    parsed = read_or_refused(lambda: parse_devices(text))
    assert parsed is None or len({device.id for device in parsed}) == len(parsed) > 0


STATES = load(states_model(3))


@fuzzed
@given(st.lists(near_texts("s0_next=s0", "*_next=*", "s*_*=s*"), max_size=3))
def test_states(texts):
    parsed = read_or_refused(lambda: bind_states(STATES, texts))
    assert parsed is None or set(parsed.states.values()) <= {value.name for value in STATES.outputs}
