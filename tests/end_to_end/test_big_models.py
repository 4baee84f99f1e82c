"""Large models: weights copied and read once, or linked."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper

import onnxplace
from onnxplace.bundle.bundle import Bundle, compute_sha256
from onnxplace.driver.compile import compile_model
from onnxplace.errors import BundleError, UsageError
from onnxplace.model import weights as weights_module
from onnxplace.model.weights import WeightFile
from tests.end_to_end.weight_checks import both_devices, chain, compiled, saved


@pytest.fixture
def linked(tmp_path) -> tuple[Bundle, Path]:
    """A bundle that refers to the weights file next to it."""
    path = saved(tmp_path / "here", chain(4))
    return compiled(path, tmp_path, link_weights=True), path.with_name("model.weights")


# --------------------------------------------------------------------------------------------------------------- copied


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


# --------------------------------------------------------------------------------------------------------------- linked


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
    from onnxplace.machine.isolated_sessions import open_session
    from onnxplace.machine.ort_sessions import make_session_options

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
    assert refused.value.code == "U042"
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


# ------------------------------------------------------------------------------------------------- linked, then changed


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


@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_weight_file_is_hashed_although_its_time_was_put_back(linked, run_cli, command):
    bundle, weights = linked
    about = weights.stat()
    altered(weights)
    os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))
    result = run_cli(command, bundle.path)
    assert result.code == 2
    assert "N009" in result.err
    assert str(weights) in result.err


def test_a_weight_file_is_not_hashed_while_it_is_as_it_was(linked):
    bundle, weights = linked
    with patch("onnxplace.bundle.bundle.compute_sha256", side_effect=compute_sha256) as hashed:
        Bundle.open(bundle.path)
        assert weights not in [Path(call.args[0]).resolve() for call in hashed.call_args_list]
        weights.chmod(0o600)
        Bundle.open(bundle.path)  # another time of change, and the same bytes
    assert weights.resolve() in [Path(call.args[0]).resolve() for call in hashed.call_args_list]


def altered(weights: Path) -> None:
    data = bytearray(weights.read_bytes())
    data[100] ^= 1
    weights.write_bytes(data)


def test_a_missing_weight_file_is_named(linked, run_cli):
    bundle, weights = linked
    weights.unlink()
    result = run_cli("run", bundle.path)
    assert result.code == 2
    assert "N009" in result.err
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
    assert refused.value.code == "N002"
