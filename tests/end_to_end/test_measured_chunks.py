"""Large models that are measured in chunks."""

from dataclasses import replace

import numpy as np
import pytest
from onnx import parser

from onnxplace.facts import Profile, Source
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind, build_op_graph, infer_static_shapes, value_bytes
from onnxplace.passes.profiling import chunks
from onnxplace.passes.profiling.node_measurement import MeasurementOptions
from onnxplace.passes.profiling.repeated_layers import find_repeats, node_kinds
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.device_kinds import DeviceAddress
from tests.end_to_end.weight_checks import chain, saved


def structure(model):
    shapes = {**infer_static_shapes(model), **model.input_shapes()}
    graph, kinds = build_op_graph(model, value_bytes(model, shapes)), node_kinds(model, shapes)
    return graph, kinds, find_repeats(kinds, graph)


@pytest.mark.parametrize("limit", [1, 5_000, 10_000, 100_000, 1 << 40])
def test_chunks_cover_all_nodes_and_respect_the_limit(limit):
    model = bind(load(chain(12)), {"batch": 4}, {})
    graph, _, found = structure(model)
    pieces = chunks.cut_into_chunks(graph, found, limit)
    assert [node for piece in pieces for node in piece] == list(range(len(graph)))
    for piece in pieces:
        assert len(piece) == 1 or held(graph, piece) <= limit


def held(graph, piece) -> int:
    values = {v for n in piece for v in (*graph.inputs[n], *graph.outputs[n])}
    weights = {w for n in piece for w in graph.weights[n]}
    return sum(int(graph.value_bytes[v]) for v in values) + sum(int(graph.weight_bytes[w]) for w in weights)


def test_equal_chunks_are_run_once_and_cost_the_same(monkeypatch):
    model = bind(load(chain(12)), {"batch": 4}, {})
    graph, kinds, found = structure(model)
    runs = []
    actual = MeasurementOptions.measure
    monkeypatch.setattr(
        MeasurementOptions, "measure", lambda self, part, feeds: runs.append(part) or actual(self, part, feeds)
    )
    pieces = chunks.cut_into_chunks(graph, found, 7_000)
    timer = MeasurementOptions(DeviceAddress.of("cpu:0"), (0,), 3, 0.0)
    measured = chunks.measure_chunks(model, graph, kinds, pieces, model.feeds(), timer)
    assert len(pieces) == 12
    assert len(runs) == 1
    assert measured.measured.all()
    assert measured.whole_seconds is None
    assert (measured.seconds.reshape(12, 3) == measured.seconds[:3]).all()
    assert measured.seconds.sum() > 0
    assert len(np.unique(measured.unit)) % 12 == 0
    assert measured.value_bytes["r11"] == 4 * 32 * 4


def test_chunks_are_fed_with_the_values_of_earlier_chunks(monkeypatch):
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[4] x) => (float[1] y, float[4] z) {
        [a] s = Shape(x)
        [b] i = Sub(s, s)
        [c] z = Add(x, x)
        [d] y = Gather(z, i)
        [e] q, r = TopK(z, s)
        [f] dead = Relu(q)
    }"""  # random indices would be out of range
    model = load(parser.parse_model(text))
    graph, kinds, _ = structure(model)
    fed_values = {}
    actual = MeasurementOptions.measure

    def spy(self, part, feeds):
        fed_values[part.nodes[0].name] = dict(feeds)
        return actual(self, part, feeds)

    monkeypatch.setattr(MeasurementOptions, "measure", spy)
    pieces = [range(i, i + 1) for i in range(len(graph))]
    found = chunks.measure_chunks(
        model, graph, kinds, pieces, model.feeds(), MeasurementOptions(DeviceAddress.of("cpu:0"), (0,), 3, 0.0)
    )
    assert found.measured.all()
    assert fed_values["d"]["i"].tolist() == [0]
    assert np.array_equal(fed_values["d"]["z"], 2 * fed_values["c"]["x"])


def test_chunks_that_cannot_run_alone_are_estimated_with_their_readers(monkeypatch):
    model = bind(load(chain(4)), {"batch": 4}, {})
    actual = chunks._run_chunk

    def failing(model, piece, *rest):
        return None if piece.start == 3 else actual(model, piece, *rest)

    monkeypatch.setattr(chunks, "_run_chunk", failing)
    monkeypatch.setattr(chunks, "wiring", lambda *_: object())  # no chunk is measured in place of another
    state, _ = Pipeline.parse("profile{repeat=3,seconds=0}").run(small_target().with_facts(model))
    profile = state[Profile]
    assert (profile.sources["cpu/1"] == Source.ESTIMATED).tolist() == [False] * 3 + [True] * 9
    assert (profile.seconds["cpu/1"][3:] > 0).all()
    assert "9 of 12 nodes" in state.diagnostics[0].message


def small_target() -> State:
    """Return a state with two devices that hold less than any of these models needs."""
    target = local_target("cpu:0,cpu:1")
    return State(replace(target, devices=tuple(replace(d, cores=1, memory_bytes=7_000) for d in target.devices)))


def test_a_model_beyond_the_memory_of_all_devices_of_a_class_is_measured_in_chunks():
    model = bind(load(chain(12)), {"batch": 4}, {})
    state, _ = Pipeline.parse("profile{repeat=3,seconds=0}").run(small_target().with_facts(model))
    assert [(note.code, note.where) for note in state.diagnostics] == [("C001", "cpu/1")]
    assert "12 pieces" in state.diagnostics[0].message
    assert not state[Profile].whole_seconds
    assert set(state[Profile].sources["cpu/1"].tolist()) <= {Source.MEASURED, Source.KNOWN}


def test_a_model_that_fits_is_measured_only_as_a_whole():
    model = bind(load(chain(12)), {"batch": 4}, {})
    state, _ = Pipeline.parse("profile{repeat=3,seconds=0}").run(State(local_target("cpu:0,cpu:1")).with_facts(model))
    assert not state.diagnostics
    assert state[Profile].whole_seconds


@pytest.mark.parametrize(("options", "pieces"), [("", 12), (",thorough=true", 0)])
def test_large_layers_that_repeat_are_measured_once(monkeypatch, options, pieces):
    model, parts, actual = bind(load(chain(12)), {"batch": 4}, {}), [], MeasurementOptions.measure
    monkeypatch.setattr(chunks, "BEYOND_CACHES_BYTES", 5_000)  # of a layer: the model is more than four of them
    monkeypatch.setattr(
        MeasurementOptions, "measure", lambda self, part, feeds: parts.append(part) or actual(self, part, feeds)
    )
    state = State(local_target("cpu:0,cpu:1")).with_facts(model)
    state, _ = Pipeline.parse(f"profile{{repeat=3,seconds=0,cache=false{options}}}").run(state)
    notes = [note.message for note in state.diagnostics if note.code == "C001"]
    profile = state[Profile]
    assert [len(part.nodes) for part in parts] == [3 if pieces else 36]
    assert [f"{pieces} pieces" in note and "known to" in note for note in notes] == [True] * bool(pieces)
    assert profile.quality["cpu/1"].runs == 3
    assert bool(profile.whole_seconds) == (not pieces)
    assert set(profile.sources["cpu/1"].tolist()) <= {Source.MEASURED, Source.KNOWN}


@pytest.mark.parametrize(("layers", "beyond"), [(3, 7_000), (12, 1 << 28)], ids=["few layers", "small ones"])
def test_a_model_that_caches_hold_or_that_repeats_little_is_measured_as_a_whole(monkeypatch, layers, beyond):
    model = bind(load(chain(layers)), {"batch": 4}, {})
    graph, kinds, found = structure(model)
    monkeypatch.setattr(chunks, "BEYOND_CACHES_BYTES", beyond)
    assert not chunks.has_repeated_chunks(graph, kinds, chunks.cut_into_chunks(graph, found, 1 << 40))


def test_a_model_larger_than_a_device_compiles_with_measured_costs(tmp_path, run_cli):
    path = saved(tmp_path / "here", chain(12, 64))
    out = tmp_path / "bundle"
    result = run_cli("compile", path, "-o", out, "--devices", "cpu:0,cpu:1", "--shape", "batch=2",
                  "--max-memory", "150KiB", "--placer", "fit")  # fmt: skip
    assert result.code == 0, result.err
    assert "C001" in result.err
    assert run_cli("verify", out, "--against", path).code == 0
