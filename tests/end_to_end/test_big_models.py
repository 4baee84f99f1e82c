"""Large models: weights copied and read once, or linked; and models measured in chunks."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import onnxplace
from onnxplace.bundle import Bundle
from onnxplace.driver import compile_model
from onnxplace.errors import BundleError, UsageError
from onnxplace.facts import Profile, Source
from onnxplace.machine import local_target
from onnxplace.model import (
    WeightFile,
    bind,
    build_op_graph,
    infer_static_shapes,
    load,
    value_bytes,
    weights as weights_module,
)
from onnxplace.passes.profiling import MeasurementOptions, chunks, find_repeats, node_kinds
from onnxplace.pipeline import Pipeline
from onnxplace.state import State

SPLIT = "optimize,profile{estimate=true},coplace{join=never,device_map=MAP},m-etf,split,emit"


def chain(layers: int, width: int = 32) -> onnx.ModelProto:
    """Return `layers` x (MatMul, Add, Relu), each with weights of its own."""
    random = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    for layer in range(layers):
        w = random.standard_normal((width, width)).astype(np.float32) / width
        weights += [numpy_helper.from_array(w, f"w{layer}"), numpy_helper.from_array(w[0], f"b{layer}")]
        nodes += [
            helper.make_node("MatMul", [value, f"w{layer}"], [f"m{layer}"], name=f"matmul{layer}"),
            helper.make_node("Add", [f"m{layer}", f"b{layer}"], [f"a{layer}"], name=f"add{layer}"),
            helper.make_node("Relu", [f"a{layer}"], [f"r{layer}"], name=f"relu{layer}"),
        ]
        value = f"r{layer}"
    inputs_and_outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", width]) for n in ("x", value)]
    graph = helper.make_graph(nodes, "chain", inputs_and_outputs[:1], inputs_and_outputs[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def saved(folder: Path, model: onnx.ModelProto, location: str = "model.weights") -> Path:
    """Write a model with all its weights in one file next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / location).parent.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location=location, size_threshold=0)
    return path


def both_devices(tmp_path: Path) -> str:
    """Return a pipeline that puts the first layer and the rest on two devices."""
    (tmp_path / "map.json").write_text(json.dumps({".*0": "cpu:0", ".*": "cpu:1"}))
    return SPLIT.replace("MAP", str(tmp_path / "map.json"))


def compiled(path: Path, tmp_path: Path, **options) -> Bundle:
    return compile_model(
        path, devices="cpu:0,cpu:1", shape={"batch": 2}, pipeline=both_devices(tmp_path), **options
    ).bundle


@pytest.fixture
def linked(tmp_path) -> tuple[Bundle, Path]:
    """A bundle that refers to the weights file next to it."""
    path = saved(tmp_path / "here", chain(4))
    return compiled(path, tmp_path, link_weights=True), path.with_name("model.weights")


# ---------------------------------------------------------------------------------------------- copied


def test_each_byte_of_external_data_is_read_once_and_equal_tensors_are_stored_once(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(5000).astype(np.float32) for _ in range(3)]
    arrays.append(arrays[1])
    (tmp_path / "data").write_bytes(b"".join(a.tobytes() for a in arrays))
    tensors = [external(f"t{i}", 5000, "data", i * 20000) for i in range(4)]
    tensors.append(external("again", 5000, "data", 20000))
    read = []
    actual = weights_module.read_tensor_bytes
    monkeypatch.setattr(weights_module, "read_tensor_bytes", lambda t, f: read.append(t.name) or actual(t, f))
    with WeightFile(tmp_path / "out.bin", "out.bin") as weights:
        placed = [weights.place(tensor, tmp_path) for tensor in (*tensors, tensors[0])]
        size, digest = weights.bytes_written, weights.digest
    written = (tmp_path / "out.bin").read_bytes()
    assert read == ["t0", "t1", "t2", "t3"]
    assert len(written) == size < 3 * 20000 + 3 * 64
    assert weights_module.hashlib.sha256(written).hexdigest() == digest
    for tensor, array in zip(placed, (*arrays, arrays[1], arrays[0])):
        entries = {item.key: item.value for item in tensor.external_data}
        start = int(entries["offset"])
        assert written[start : start + 20000] == array.tobytes()
    assert placed[3].external_data[1] == placed[1].external_data[1] == placed[4].external_data[1]


def external(name: str, count: int, location: str, offset: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[count], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", 4 * count)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def test_tensors_of_one_checksum_and_different_bytes_are_both_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_module.zlib, "crc32", lambda data, value=0: 7)
    arrays = [np.full(1000, value, np.float32) for value in (1, 2, 1)]
    with WeightFile(tmp_path / "out.bin", "out.bin") as weights:
        placed = [weights.place(numpy_helper.from_array(a, f"t{i}"), None) for i, a in enumerate(arrays)]
        digest = weights.digest
    written = (tmp_path / "out.bin").read_bytes()
    offsets = [int(tensor.external_data[1].value) for tensor in placed]
    assert offsets[0] == offsets[2] != offsets[1]
    assert [np.frombuffer(written, np.float32, 1000, o)[0] for o in offsets] == [1, 2, 1]
    assert weights_module.hashlib.sha256(written).hexdigest() == digest


def test_a_weight_that_two_devices_read_is_stored_once(tmp_path):
    model = chain(2, 64)
    for node in model.graph.node:  # both layers read one weight, whose bytes are in the file once
        node.input[:] = [name.replace("w1", "w0") for name in node.input]
    path = saved(tmp_path / "here", model)
    bundle = compiled(path, tmp_path)
    assert {segment.device for segment in bundle.manifest.segments} == {"cpu:0", "cpu:1"}
    assert [segment.weights_bytes for segment in bundle.manifest.segments] == [64 * 64 * 4 + 256] * 2
    assert bundle.manifest.files["segments/weights.bin"].bytes == pytest.approx(64 * 64 * 4 + 512, abs=256)


def test_a_bundle_is_about_as_large_as_its_model(tmp_path):
    path = saved(tmp_path / "here", chain(4, 256))
    bundle = compiled(path, tmp_path)
    size = sum(file.stat().st_size for file in path.parent.glob("model.*") if file.is_file())
    assert sum(item.bytes for item in bundle.manifest.files.values()) < 1.02 * size


# ---------------------------------------------------------------------------------------------- linked


def test_a_linked_bundle_holds_no_weights_and_computes_the_same(linked, tmp_path, run_cli):
    bundle, weights = linked
    assert sorted(bundle.manifest.linked) == ["model.weights"]
    assert bundle.manifest.files["segments/weights.bin"].bytes == 0
    assert len({segment.device for segment in bundle.manifest.segments}) == 2
    x = np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32)
    copied = compiled(weights.with_name("model.onnx"), tmp_path, output=tmp_path / "copied")
    results = []
    for item in (bundle, copied):
        with onnxplace.InferenceSession(item) as session:
            results.append(session.run(None, {"x": x})[0])
    assert np.array_equal(*results)
    assert run_cli("verify", bundle.path).code == 0


def test_plain_onnxruntime_loads_linked_segments_with_one_option(linked):
    from onnxplace.machine import make_session_options, open_session

    bundle, weights = linked
    assert list(bundle.session_entries.values()) == [str(weights.parent)]
    for segment in bundle.manifest.segments:
        open_session(bundle.file(segment.file), make_session_options([0], entries=bundle.session_entries))


def test_the_weights_file_keeps_its_name_links_and_time(tmp_path):
    path = saved(tmp_path / "here", chain(4))
    before = path.with_name("model.weights").stat()
    compiled(path, tmp_path, link_weights=True)
    after = path.with_name("model.weights").stat()
    assert (after.st_nlink, after.st_mtime_ns, after.st_ino) == (1, before.st_mtime_ns, before.st_ino)


def test_weights_in_a_folder_below_can_be_linked(tmp_path):
    path = saved(tmp_path / "here", chain(4), "data/all.bin")
    bundle = compiled(path, tmp_path, link_weights=True, output=tmp_path / "up.bundle")
    assert list(bundle.manifest.linked) == ["here/data/all.bin"]
    with onnxplace.InferenceSession(bundle) as session:
        assert session.run(None, {"x": np.ones((1, 32), np.float32)})[0].shape == (1, 32)


def test_model_and_linked_bundle_can_move_together(linked, tmp_path):
    bundle, weights = linked
    moved = weights.parent.rename(tmp_path / "elsewhere")
    assert onnxplace.load(moved / bundle.path.name, "all").manifest == bundle.manifest
    with onnxplace.InferenceSession(moved / bundle.path.name) as session:
        assert session.run(None, {"x": np.ones((1, 32), np.float32)})[0].shape == (1, 32)


def test_a_copy_of_the_weights_with_another_time_is_accepted(linked):
    bundle, weights = linked
    os.utime(weights, ns=(1, 1))
    assert Bundle.open(bundle.path).manifest == bundle.manifest


def test_weights_outside_the_folder_are_refused_before_any_work(tmp_path):
    path, out = saved(tmp_path / "here", chain(2)), tmp_path / "there" / "bundle"
    with pytest.raises(UsageError) as refused:
        compiled(path, tmp_path, link_weights=True, output=out)
    assert refused.value.code == "U033"
    assert "model.weights" in refused.value.message
    assert not out.parent.exists()


def test_a_model_without_weight_files_is_copied_with_a_note(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(chain(2).SerializeToString())
    result = compile_model(
        path, devices="cpu:0,cpu:1", shape={"batch": 2}, pipeline=both_devices(tmp_path), link_weights=True
    )
    assert "N011" in {note.code for note in result.diagnostics}
    with onnxplace.InferenceSession(result.bundle) as session:
        assert session.run(None, {"x": np.ones((1, 32), np.float32)})[0].shape == (1, 32)


def test_the_option_can_be_given_on_the_command_line(tmp_path, run_cli):
    path = saved(tmp_path / "here", chain(2))
    result = run_cli("compile", path, "--devices", "cpu:0,cpu:1", "--shape", "batch=2", "--link-weights", "--json",
                  "--pipeline", both_devices(tmp_path))  # fmt: skip
    assert result.code == 0, result.err
    assert Bundle.open(json.loads(result.out)["bundle"]).manifest.linked.keys() == {"model.weights"}


# ---------------------------------------------------------------------------------------------- linked, then changed


def test_a_weight_file_of_another_size_is_named(linked, run_cli):
    bundle, weights = linked
    weights.write_bytes(weights.read_bytes() + b"more")
    result = run_cli("run", bundle.path)
    assert result.code == 2
    assert "N009" in result.err
    assert str(weights) in result.err
    assert "changed since the compile" in result.err


def test_a_weight_file_with_other_bytes_and_another_time_is_named(linked):
    bundle, weights = linked
    altered(weights)
    with pytest.raises(BundleError, match="changed since the compile") as refused:
        Bundle.open(bundle.path)
    assert refused.value.where == str(weights)


def test_verify_hashes_a_weight_file_whose_time_and_size_are_as_before(linked, run_cli):
    bundle, weights = linked
    about = weights.stat()
    altered(weights)
    os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))
    Bundle.open(bundle.path)  # time and size are unchanged
    result = run_cli("verify", bundle.path)
    assert result.code == 2
    assert "N009" in result.err
    assert str(weights) in result.err


def altered(weights: Path) -> None:
    data = bytearray(weights.read_bytes())
    data[100] ^= 1
    weights.write_bytes(data)


def test_a_missing_weight_file_is_named(linked, run_cli):
    bundle, weights = linked
    weights.unlink()
    result = run_cli("run", bundle.path)
    assert result.code == 2
    assert "N010" in result.err
    assert str(weights) in result.err


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/passwd", "model.bundle/../../outside.bin", "nul\0"])
def test_a_manifest_that_links_to_a_file_outside_the_folder_is_refused(linked, name):
    bundle, _ = linked
    (bundle.path.parent.parent / "outside.bin").write_bytes(b"")
    file = bundle.path / "manifest.json"
    data = json.loads(file.read_text())
    data["linked"] = {name: data["linked"]["model.weights"]}
    file.write_text(json.dumps(data))
    with pytest.raises(BundleError) as refused:
        Bundle.open(bundle.path)
    assert refused.value.code == "N005"


# ---------------------------------------------------------------------------------------------- measured in pieces


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
    timer = MeasurementOptions("cpu:0", (0,), 3, 0.0)
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
    found = chunks.measure_chunks(model, graph, kinds, pieces, model.feeds(), MeasurementOptions("cpu:0", (0,), 3, 0.0))
    assert found.measured.all()
    assert fed_values["d"]["i"].tolist() == [0]
    assert np.array_equal(fed_values["d"]["z"], 2 * fed_values["c"]["x"])


def test_chunks_that_cannot_run_alone_are_estimated_with_their_readers(monkeypatch):
    model = bind(load(chain(4)), {"batch": 4}, {})
    actual = chunks._run_chunk

    def failing(model, piece, *rest):
        return None if piece.start == 3 else actual(model, piece, *rest)

    monkeypatch.setattr(chunks, "_run_chunk", failing)
    monkeypatch.setattr(chunks, "_chunk_key", lambda *_: object())  # no chunk is measured in place of another
    state, _ = Pipeline.parse("profile{repeat=3,seconds=0}").run(small_target().having(model))
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
    state, _ = Pipeline.parse("profile{repeat=3,seconds=0}").run(small_target().having(model))
    assert [(note.code, note.where) for note in state.diagnostics] == [("C003", "cpu/1")]
    assert "12 pieces" in state.diagnostics[0].message
    assert not state[Profile].whole_seconds
    assert set(state[Profile].sources["cpu/1"].tolist()) <= {Source.MEASURED, Source.KNOWN}


def test_a_model_that_fits_is_measured_only_as_a_whole():
    model = bind(load(chain(12)), {"batch": 4}, {})
    state, _ = Pipeline.parse("profile{repeat=3,seconds=0}").run(State(local_target("cpu:0,cpu:1")).having(model))
    assert not state.diagnostics
    assert state[Profile].whole_seconds


def test_a_model_larger_than_a_device_compiles_with_measured_costs(tmp_path, run_cli):
    path = saved(tmp_path / "here", chain(12, 64))
    out = tmp_path / "bundle"
    result = run_cli("compile", path, "-o", out, "--devices", "cpu:0,cpu:1", "--shape", "batch=2",
                  "--max-memory", "150KiB", "--placer", "fit")  # fmt: skip
    assert result.code == 0, result.err
    assert "C003" in result.err
    assert run_cli("verify", out, "--against", path).code == 0
