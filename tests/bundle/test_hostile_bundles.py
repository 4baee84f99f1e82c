"""Untrusted bundles: opening takes bounded time and memory, reads no other files, and reports what is wrong."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto, helper

import onnxplace
from onnxplace.bundle import bundle as bundle_module
from onnxplace.bundle.bundle import MANIFEST_FILE, compute_sha256
from tests.conftest import branches
from tests.support.endless import endless_bundle, feeds
from tests.support.fuzzing import fuzzed, read_or_refused, texts_of

needs_files = pytest.mark.skipif(sys.platform == "win32", reason="no such files")


def edit(folder, change):
    data = json.loads((folder / MANIFEST_FILE).read_text())
    change(data)
    (folder / MANIFEST_FILE).write_text(json.dumps(data))


def assert_refused(run_cli, folder, *texts):
    for command in (("run",), ("verify",), ("bench", "--repeat", "1")):
        result = run_cli(command[0], folder, *command[1:])
        assert result.code == 2, result
        for words in texts:
            assert words in result.err
    with pytest.raises(onnxplace.BundleError):
        onnxplace.load(folder)


# ------------------------------------------------------------------------------------------------ the manifest's file


@needs_files
@pytest.mark.parametrize("target", ["/dev/zero", "/dev/stdin", "/etc/hostname"])
def test_a_manifest_that_is_a_link_out_of_the_bundle_is_refused(run_cli, bundle_copy, target):
    (bundle_copy / MANIFEST_FILE).unlink()
    (bundle_copy / MANIFEST_FILE).symlink_to(target)
    assert_refused(run_cli, bundle_copy, "N002", "it is a link out of the bundle")


@needs_files
def test_a_manifest_that_is_a_pipe_is_refused_at_once(run_cli, bundle_copy):
    (bundle_copy / MANIFEST_FILE).unlink()
    os.mkfifo(bundle_copy / MANIFEST_FILE)
    assert_refused(run_cli, bundle_copy, "N002", "expected a file, got a pipe")


@needs_files
def test_a_manifest_that_links_to_itself_is_refused(run_cli, bundle_copy):
    (bundle_copy / MANIFEST_FILE).unlink()
    (bundle_copy / MANIFEST_FILE).symlink_to(MANIFEST_FILE)
    assert_refused(run_cli, bundle_copy, "N002", "link")


@needs_files
def test_a_manifest_that_links_to_a_file_of_the_bundle_is_read(bundle_copy):
    (bundle_copy / MANIFEST_FILE).rename(bundle_copy / "other.json")
    (bundle_copy / MANIFEST_FILE).symlink_to("other.json")
    assert onnxplace.load(bundle_copy)


@needs_files
def test_a_bundle_may_be_opened_through_a_link(bundle_copy, tmp_path):
    (tmp_path / "link").symlink_to(bundle_copy)
    assert onnxplace.load(tmp_path / "link")


def test_a_manifest_that_is_too_large_is_not_read(run_cli, bundle_copy, monkeypatch):
    monkeypatch.setattr(bundle_module, "MAX_MANIFEST_BYTES", 100)
    assert_refused(run_cli, bundle_copy, "N002", "expected at most 100 bytes")


def test_a_manifest_of_gigabytes_is_not_read(run_cli, bundle_copy):
    os.truncate(bundle_copy / MANIFEST_FILE, 1 << 40)  # a sparse file
    assert_refused(run_cli, bundle_copy, "N002", f"got {1 << 40}")


def test_a_manifest_with_a_duplicate_key_is_refused(run_cli, bundle_copy):
    text = (bundle_copy / MANIFEST_FILE).read_text()
    (bundle_copy / MANIFEST_FILE).write_text(text.replace('{\n "', '{\n "model": "another",\n "', 1))
    assert_refused(run_cli, bundle_copy, "N002", "'model' is given twice")


@needs_files
@pytest.mark.parametrize("name", ["segments/cpu0-000.onnx", "segments/weights.bin", "costs.json"])
def test_a_pipe_in_place_of_a_file_is_refused(run_cli, bundle_copy, name):
    (bundle_copy / name).unlink()
    os.mkfifo(bundle_copy / name)
    assert_refused(run_cli, bundle_copy, "N002", "expected a regular file")


# ------------------------------------------------------------------------------------------------ what it says


def test_half_of_a_character_is_refused_as_a_name(run_cli, bundle_copy):
    edit(bundle_copy, lambda m: m["outputs"][0].update(name="\ud800"))
    assert_refused(run_cli, bundle_copy, "N002", r"expected text, found '\ud800', which is half of a character")


def test_both_halves_of_a_character_are_a_name(bundle_copy):
    edit(bundle_copy, lambda m: m.update(model="\U0001f600"))
    assert r"\ud83d\ude00" in (bundle_copy / MANIFEST_FILE).read_text()
    assert onnxplace.load(bundle_copy).manifest.model == "\U0001f600"


@pytest.mark.parametrize("command", ["report", "merge", "export --to stages", "export --to triton"])
def test_what_reads_a_bundle_refuses_values_without_a_record(run_cli, bundle_copy, tmp_path, command):
    edit(bundle_copy, lambda m: m["values"].pop(m["inputs"][0]["name"]))
    result = run_cli(*command.split(), bundle_copy, "-o", tmp_path / "out")
    assert result.code == 2
    assert "N002" in result.err
    assert "is not listed among the values" in result.err
    assert not (tmp_path / "out").exists()


def test_the_type_of_an_input_that_is_not_one_is_named_by_exports(run_cli, bundle_copy, tmp_path):
    edit(bundle_copy, lambda m: m["inputs"][0].update(dtype="tensor(flaot)"))
    result = run_cli("merge", bundle_copy, "-o", tmp_path / "out.onnx")
    assert result.code == 2
    assert "expected a type such as 'tensor(float)', got 'tensor(flaot)'" in result.err


@pytest.mark.parametrize("version", ["2.0", "70.3"])
def test_a_newer_format_is_refused_with_what_this_version_reads(run_cli, bundle_copy, version):
    edit(bundle_copy, lambda m: m.update(schema_version=version))
    words = f"wrote it in format {version}, expected 1.x, which onnxplace {onnxplace.__version__} reads"
    assert_refused(run_cli, bundle_copy, "N003", words)


@pytest.mark.parametrize(
    "version", ["9" * 5000, "1." + "9" * 5000, "-1", "1", "", "1.1.1", "one.two", "٣.١", 1.1, None]
)
def test_an_invalid_schema_version_is_refused(run_cli, bundle_copy, version):
    edit(bundle_copy, lambda m: m.update(schema_version=version))
    assert_refused(run_cli, bundle_copy, "N002", "expected a schema_version")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda m: m["inputs"][0].update(shape=[1] * 70), "inputs.0.shape"),
        (lambda m: m["outputs"][0].update(shape=[-3, 64]), "outputs.0.shape"),
        (lambda m: m["values"]["d"].update(shape=[2**31]), "values.d.shape"),
        (lambda m: m.update(dimensions={"batch": -8}), "dimensions.batch"),
        (lambda m: m.update(dimensions={"batch": 2**31}), "dimensions.batch"),
        (lambda m: m["values"]["d"].update(bytes=-8), "values.d.bytes"),
        (lambda m: m["values"]["d"].update(bytes=10**400), "values.d.bytes"),
        (lambda m: m["segments"][0].update(seconds=1e300), "segments.0.seconds"),
        (lambda m: m["segments"][0].update(seconds=float("nan")), "segments.0.seconds"),
        (lambda m: m["predicted"].update(step_seconds=float("inf")), "predicted.step_seconds"),
    ],
)
def test_numbers_out_of_range_are_refused_by_field(run_cli, bundle_copy, change, place):
    edit(bundle_copy, change)
    assert_refused(run_cli, bundle_copy, "N002", place)


def test_a_file_name_that_is_too_long_is_refused(run_cli, bundle_copy):
    edit(bundle_copy, lambda m: m["files"].update({"x" * 5000: m["files"]["costs.json"]}))
    assert_refused(run_cli, bundle_copy, "N002", "cannot be read")


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "\udce9"])
def test_an_invalid_path_is_not_a_bundle(path):
    with pytest.raises(onnxplace.BundleError, match="N001") as raised:
        onnxplace.load(path)
    with pytest.raises(onnxplace.BundleError, match="N001"):
        onnxplace.InferenceSession(path)
    assert str(raised.value).isprintable() or "\n" in str(raised.value)
    str(raised.value).encode()


# ------------------------------------------------------------------------------------------------ segments exchanged


def exchange(bundle, first, second):
    """Exchange two segment files and their records in the manifest."""
    files = [bundle / f"segments/{name}.onnx" for name in (first, second)]
    a, b = (file.read_bytes() for file in files)
    files[0].write_bytes(b)
    files[1].write_bytes(a)

    def change(manifest):
        records = manifest["files"]
        first_file, second_file = (f"segments/{name}.onnx" for name in (first, second))
        records[first_file], records[second_file] = records[second_file], records[first_file]

    edit(bundle, change)


def test_exchanged_segments_are_refused_when_they_are_opened(run_cli, bundle_copy):
    exchange(bundle_copy, "cpu0-000", "cpu1-000")
    result = run_cli("run", bundle_copy)
    assert result.code == 2
    assert "N002" in result.err
    assert "segment cpu0-000 (segments/cpu0-000.onnx)" in result.err
    assert "the file belongs to another segment" in result.err


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        (TensorProto.DOUBLE, [4], "is tensor(double) [4], the manifest says tensor(float)"),
        (TensorProto.FLOAT, [4, 4], "is tensor(float) [4, 4], the manifest says tensor(float) (4,)"),
        (TensorProto.FLOAT, [5], "is tensor(float) [5], the manifest says tensor(float) (4,)"),
    ],
)
def test_a_segment_of_other_types_or_shapes_is_refused(tmp_path, kind, shape, message):
    bundle = endless_bundle(tmp_path)
    record = next(segment for segment in bundle.manifest.segments if segment.outputs == ("z",))
    inputs_and_outputs = [helper.make_tensor_value_info(name, kind, shape) for name in "xz"]
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["z"])], "other", inputs_and_outputs[:1], inputs_and_outputs[1:]
    )
    file = bundle.file(record.file)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    file.write_bytes(model.SerializeToString())
    about = {"sha256": compute_sha256(file), "bytes": file.stat().st_size}
    edit(bundle.path, lambda m: m["files"].update({record.file: about}))
    with pytest.raises(onnxplace.BundleError) as raised:
        onnxplace.InferenceSession(bundle.path)
    assert raised.value.code == "N002"
    assert message in raised.value.message


def test_an_input_whose_type_contradicts_its_segment_is_refused(run_cli, bundle_copy):
    edit(bundle_copy, lambda m: m["inputs"][0].update(dtype="tensor(string)"))
    result = run_cli("run", bundle_copy)
    assert result.code == 2
    assert "N002" in result.err


def test_a_damaged_large_segment_is_reported_as_damaged(run_cli, bundle_copy, monkeypatch):
    """Files too large to be hashed at each opening are hashed when ONNX Runtime refuses them."""
    monkeypatch.setattr(bundle_module, "MAX_SMALL_FILE_BYTES", 0)
    file = bundle_copy / "segments/cpu0-000.onnx"
    data = file.read_bytes()
    file.write_bytes(b"\xff" * len(data))
    result = run_cli("run", bundle_copy)
    assert result.code == 2
    assert "N002" in result.err
    assert "changed since the compile" in result.err
    assert "version" not in result.err


# ------------------------------------------------------------------------------------------------ anything else


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A bundle to alter, and the text of its manifest."""
    bundle = endless_bundle(tmp_path_factory.mktemp("fuzz"))
    return bundle.path, json.loads((bundle.path / MANIFEST_FILE).read_text())


@fuzzed
@given(st.data())
def test_any_altered_manifest_is_refused_or_runs(small, data):
    path, manifest = small
    (path / MANIFEST_FILE).write_bytes(data.draw(texts_of(manifest)))
    if (bundle := read_or_refused(lambda: onnxplace.load(path))) is None:
        return
    read_or_refused(lambda: bundle.zero_states())
    for runtime in ("simulated", "onnxruntime"):
        if (session := read_or_refused(lambda name=runtime: onnxplace.InferenceSession(bundle, runtime=name))) is None:
            continue
        with session:
            read_or_run(session)


def read_or_run(session):
    """Run a session that may have other inputs now; the timeout bounds its time."""
    try:
        session.run(None, feeds(2), timeout=20)
    except onnxplace.OnnxplaceError as problem:
        refused = problem
    else:
        return
    assert refused.exit_code in (2, 3) or refused.code in ("X001", "X003"), refused


def test_the_timeout_ends_a_bundle_that_never_ends(run_cli, tmp_path):
    bundle = endless_bundle(tmp_path)
    np.savez(tmp_path / "in.npz", **feeds(None))
    for seconds in ("0.2", "2", "20"):  # on a busy machine, the device may not have begun after the first
        result = run_cli("run", bundle.path, "--inputs", tmp_path / "in.npz", "--timeout", seconds)
        assert result.code == 4
        assert "X007" in result.err
        if "runs segment" in result.err:
            break
    assert "cpu:1 runs segment cpu1-000" in result.err
    np.savez(tmp_path / "in.npz", **feeds(2))
    assert run_cli("run", bundle.path, "--inputs", tmp_path / "in.npz", "--timeout", "60", "--repeat", "3").code == 0


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "x"])
def test_the_command_refuses_an_invalid_timeout(run_cli, bundle_copy, timeout):
    assert run_cli("run", bundle_copy, "--timeout", timeout).code == 2


def test_only_the_bundles_own_files_are_opened(bundle_copy, monkeypatch, tmp_path):
    """Names in a manifest that lead outside are refused before any access to the files there."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for name in ("../secret", str(secret), "segments/../../secret", "segments/link"):
        copy = Path(shutil.copytree(bundle_copy, tmp_path / "copy", dirs_exist_ok=True))
        if name.endswith("link"):
            (copy / name).symlink_to(secret)
        record = {"sha256": compute_sha256(secret), "bytes": 6}
        edit(copy, lambda m, name=name, record=record: m["files"].update({name: record}))
        with pytest.raises(onnxplace.BundleError, match="N002"):
            onnxplace.load(copy)


def test_names_in_a_model_cannot_control_the_terminal(run_cli, tmp_path):
    model = branches()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "a\x1b]0;owned\x07\x1b[2J"
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    result = run_cli("compile", tmp_path / "m.onnx", "-o", tmp_path / "b")
    assert result.code == 2
    assert "\x1b" not in result.err
    assert "\\x1b" in result.err


@needs_files
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_model_that_is_not_a_file_is_refused(run_cli, tmp_path, kind):
    if kind == "pipe":
        os.mkfifo(tmp_path / "m.onnx")
    else:
        (tmp_path / "m.onnx").symlink_to("/dev/zero")
    result = run_cli("compile", tmp_path / "m.onnx", "-o", tmp_path / "b")
    assert result.code == 2
    assert "M001" in result.err
    assert f"expected a file, got a {kind}" in result.err
