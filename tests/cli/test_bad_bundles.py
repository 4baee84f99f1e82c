"""Damaged, unsafe and impossible bundles are refused."""

import json
import shutil
from pathlib import Path

import pytest

import onnxplace
from tests.support.bad_input import edit_manifest

pytestmark = pytest.mark.usefixtures("no_gpus")


@pytest.mark.parametrize("command", ["run", "verify", "bench"])
def test_a_path_that_is_not_a_bundle_is_refused(refused, tmp_path, model_file, command):
    (tmp_path / "folder").mkdir()
    for path in ("nowhere", "folder", "model.onnx"):
        refused(2, (path, "not a bundle", "onnxplace compile"), command, path)
    (tmp_path / "model.bundle").mkdir()
    refused(2, ("there is no such folder", "did you mean 'model.bundle'?"), command, "modle.bundle")


@pytest.mark.parametrize("data", [b"{nope", b"\xff\xfe\x00", b"[]", b"{}", b"", b'{"schema_version": 1}'])
def test_a_manifest_that_is_malformed_is_named(refused, bundle_copy, data):
    (bundle_copy / "manifest.json").write_bytes(data)
    refused(2, ("manifest.json", "manifest"), "run", bundle_copy)


def test_a_manifest_that_is_nested_without_end_is_refused(refused, bundle_copy):
    (bundle_copy / "manifest.json").write_text("[" * 100000)
    refused(2, ("manifest.json",), "run", bundle_copy)


@pytest.mark.parametrize(
    ("change", "expected_words"),
    [
        (lambda m: m.pop("programs"), ("'programs'", "required")),
        (lambda m: m.update(transfers="many"), ("'transfers'", "integer")),
        (lambda m: m["predicted"].update(step_seconds=-1), ("'predicted.step_seconds'", "greater")),
        (lambda m: m["segments"][1].update(nodes="x"), ("'segments.1.nodes'", "integer")),
        (lambda m: m["programs"]["cpu:0"][0].update(op="explode"), ("'programs.cpu:0.0.op'", "'run'")),
        (lambda m: m["programs"]["cpu:0"][0].update(segment="cpu9-000"), ("cpu:0", "cpu9-000")),
        (lambda m: m["programs"].update({"cpu:7": m["programs"].pop("cpu:1")}), ("cpu:7",)),
    ],
    ids=["missing", "type", "negative", "nested", "step", "segment", "device"],
)
def test_a_wrong_field_of_a_manifest_is_named(refused, bundle_copy, change, expected_words):
    edit_manifest(bundle_copy, change)
    refused(2, ("manifest.json", *expected_words), "run", bundle_copy)


def test_a_bundle_of_a_newer_major_version_is_refused_with_a_fix(refused, bundle_copy):
    edit_manifest(bundle_copy, lambda m: m.update(schema_version="2.0", programs="something new"))
    refused(2, ("manifest.json", "2.0", "update onnxplace"), "run", bundle_copy)


def test_a_bundle_of_a_newer_minor_version_is_read(run_cli, bundle_copy):
    edit_manifest(bundle_copy, lambda m: m.update(schema_version="1.99"))
    assert run_cli("run", bundle_copy).code == 0


@pytest.mark.parametrize(
    "name", ["segments/cpu1-000.onnx", "segments/weights.bin", "segments/whole.onnx", "costs.json"]
)
def test_a_file_that_is_missing_is_named(refused, bundle_copy, name):
    (bundle_copy / name).unlink()
    refused(2, (name, "missing"), "run", bundle_copy)


@pytest.mark.parametrize(
    "name", ["segments/cpu1-000.onnx", "segments/weights.bin", "segments/whole.onnx", "costs.json"]
)
@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_file_with_one_flipped_byte_is_named(refused, bundle_copy, name, command):
    data = bytearray((bundle_copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (bundle_copy / name).write_bytes(data)
    refused(2, (name, "SHA-256", "compile the model again"), command, bundle_copy)


def test_truncated_weights_are_named_with_both_sizes(refused, bundle_copy):
    file = bundle_copy / "segments" / "weights.bin"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-100])
    expected_words = ("weights.bin", str(size), str(size - 100), "compile the model again")
    refused(2, expected_words, "run", bundle_copy)


def test_large_files_are_hashed_by_verify_though_not_by_run(refused, run_cli, bundle_copy, monkeypatch):
    monkeypatch.setattr("onnxplace.bundle.bundle.MAX_SMALL_FILE_BYTES", 1000)
    file = bundle_copy / "segments" / "weights.bin"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    assert run_cli("run", bundle_copy).code == 0
    refused(2, ("weights.bin", "SHA-256"), "verify", bundle_copy)


def rename_in_manifest(bundle: Path, old: str, new: str) -> None:
    manifest = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(manifest.replace(json.dumps(old), json.dumps(new)))


@pytest.mark.parametrize("kind", ["parent", "absolute", "hidden parent"])
def test_a_file_named_outside_the_bundle_is_refused(refused, bundle_copy, tmp_path, kind):
    shutil.copy(bundle_copy / "segments" / "cpu1-000.onnx", tmp_path / "evil.onnx")
    name = {
        "parent": "../evil.onnx",
        "absolute": str(tmp_path / "evil.onnx"),
        "hidden parent": "segments/../../evil.onnx",
    }[kind]
    rename_in_manifest(bundle_copy, "segments/cpu1-000.onnx", name)
    refused(2, ("manifest.json", "outside the bundle", name, "do not trust"), "run", bundle_copy)


@pytest.mark.parametrize("name", ["segments/cpu1-000.onnx", "segments/weights.bin"])
def test_a_link_that_leads_out_of_the_bundle_is_refused(refused, bundle_copy, tmp_path, name):
    shutil.move(bundle_copy / name, tmp_path / "evil")
    (bundle_copy / name).symlink_to(tmp_path / "evil")
    refused(2, (name, "outside the bundle", "do not trust"), "run", bundle_copy)


def test_a_file_name_with_a_null_byte_is_refused(refused, bundle_copy):
    rename_in_manifest(bundle_copy, "segments/cpu1-000.onnx", "segments/\0")
    refused(2, ("manifest.json",), "run", bundle_copy)


def test_weights_that_the_manifest_does_not_list_are_refused(refused, bundle_copy):
    edit_manifest(bundle_copy, lambda m: m["files"].pop("segments/weights.bin"))
    refused(2, ("weights.bin",), "run", bundle_copy)


def step(op: str, **fields: str) -> dict[str, str]:
    return {"op": op, "segment": "", "value": "", "peer": "", **fields}


# In the compiled bundle cpu:1 makes `d` and sends it to cpu:0, which then adds it to its own `c`.
IMPOSSIBLE = {
    "waits for itself": lambda m: m["programs"]["cpu:1"].insert(0, step("receive", value="c", peer="cpu:0")),
    "value without a sender": lambda m: m["programs"]["cpu:1"].pop(1),
    "sends before producing": lambda m: m["programs"]["cpu:1"].insert(0, step("send", value="d", peer="cpu:0")),
    "program is empty": lambda m: m["programs"]["cpu:1"].clear(),
    "program is missing": lambda m: m["programs"].pop("cpu:1"),
    "segment never runs": lambda m: m["programs"]["cpu:0"].pop(0),
    "segment of another device": lambda m: m["programs"]["cpu:1"][0].update(segment="cpu0-001"),
    "segment on no device": lambda m: m["segments"][0].update(device="cpu:9"),
    "value freed before it is read": lambda m: m["programs"]["cpu:1"].insert(0, step("free", value="x")),
    "segment reads an unknown value": lambda m: m["segments"][0].update(inputs=["ghost"]),
    "output without a producer": lambda m: m["outputs"][0].update(value="ghost"),
    "output that is freed": lambda m: m["outputs"][0].update(value="c"),
    "unknown producer": lambda m: m["values"]["d"].update(producer="ghost"),
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_a_manifest_whose_programs_cannot_run_is_refused_when_it_is_opened(bundle_copy, kind):
    edit_manifest(bundle_copy, IMPOSSIBLE[kind])
    with pytest.raises(onnxplace.BundleError, match=r"manifest\.json"):
        onnxplace.load(bundle_copy)


@pytest.mark.parametrize("device", ["tpu:0", "cpu:x", "cpu"])
def test_a_bundle_for_a_kind_of_device_that_does_not_exist_is_refused(bundle_copy, device):
    rename_in_manifest(bundle_copy, "cpu:0", device)
    with pytest.raises(onnxplace.BundleError, match=device):
        onnxplace.load(bundle_copy)


def test_a_bundle_whose_devices_contradict_each_other_is_refused_by_name(refused, bundle_copy):
    edit_manifest(bundle_copy, lambda m: m["target"]["devices"].append(m["target"]["devices"][0]))
    refused(2, ("manifest.json", "twice"), "run", bundle_copy)
