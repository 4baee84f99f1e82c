"""Bundles keep the compiled models of their segments, which open on equal hardware, and do without them elsewhere."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import parser

import onnxplace
from onnxplace.driver.compile import compile_model
from onnxplace.errors import BundleError, NoteWarning
from onnxplace.machine.ort_sessions import without_optimisations
from onnxplace.measure.cached_trials import build_trial_key
from onnxplace.pipeline.registry import create_runtime
from onnxplace.reports.text import compile_summary
from tests.support.static_device import static_kind

PIPELINE = "optimize,profile{estimate=true},coplace,single,split,emit"
PLAIN = ["static0-000.static.onnx"]
COMPILED = ["static0-000.0.compiled.onnx"]


@pytest.fixture
def static(monkeypatch):
    with static_kind() as kind:
        monkeypatch.setattr(kind, "compiler", "static 1.0")
        yield kind


def compile_model_here(model, folder, pipeline=PIPELINE, devices="static:0", shape=4, **options):
    return compile_model(
        model, folder / "bundle", devices=devices, shape={"batch": shape}, pipeline=pipeline, **options
    )


@pytest.fixture
def bundle(static, model_file, tmp_path):
    result = compile_model_here(model_file, tmp_path).bundle
    static.opened.clear()
    return result


def run(bundle):
    """Return the output for the compiled size."""
    bundle = onnxplace.load(bundle.path)
    with onnxplace.InferenceSession(bundle) as session:
        return session.run(None, {"x": np.ones((4, 64), np.float32)})[0]


def alter_manifest(bundle, alter):
    path = bundle.path / "manifest.json"
    manifest = json.loads(path.read_text())
    alter(manifest)
    path.write_text(json.dumps(manifest))


def test_segments_open_from_their_compiled_models(static, bundle):
    assert run(bundle).shape == (4, 64)
    assert static.opened == COMPILED
    assert [item.made_for for item in bundle.manifest.segments[0].compiled] == ["static 1.0"]
    assert {f"segments/{name}{end}" for name in COMPILED for end in ("", ".bin")} == bundle.compiled_files


def test_each_plan_has_the_compiled_models_of_its_size(static, model_file, tmp_path):
    bundle = compile_model_here(model_file, tmp_path, shape=[1, 4], trial=False).bundle
    for plan, batch in zip(onnxplace.load(bundle.path, check="all").plans, (1, 4), strict=True):
        static.opened.clear()
        with create_runtime("onnxruntime").open(plan) as session:
            (y,) = session.run({"x": np.ones((batch, 64), np.float32)}).outputs.values()
        assert y.shape == (batch, 64)
        assert static.opened == COMPILED


def test_compiled_models_are_beside_the_segments_where_weights_are_elsewhere(static, model_file, tmp_path):
    proto = onnx.load(model_file)
    onnx.save(proto, tmp_path / "linked.onnx", save_as_external_data=True, location="linked.bin", size_threshold=0)
    bundle = compile_model_here(tmp_path / "linked.onnx", tmp_path, link_weights=True).bundle
    assert list(bundle.manifest.linked) == ["linked.bin"]
    static.opened.clear()
    assert run(bundle).shape == (4, 64)
    assert static.opened == COMPILED


def test_compiled_models_of_further_plans_may_be_removed(static, model_file, tmp_path):
    bundle = compile_model_here(model_file, tmp_path, shape=[1, 4], trial=False).bundle
    removed = [bundle.file(name) for name in bundle.compiled_files if name.startswith("plan1/")]
    assert sorted(file.name for file in removed) == [COMPILED[0], f"{COMPILED[0]}.bin"]
    for file in removed:
        file.unlink()
    plan = onnxplace.load(bundle.path, check="all").plans[1]
    with pytest.warns(NoteWarning, match="this file of the bundle is missing"):
        assert run(plan).shape == (4, 64)


def test_both_times_to_open_are_in_the_summary(bundle):
    (line,) = [line for line in compile_summary(bundle).splitlines() if line.startswith("opening")]
    assert line.startswith("opening compiled segments (compiling anew): static0-000 ")
    assert all(0 < item.open_seconds < 60 and item.compile_seconds > 0 for item in bundle.manifest.segments[0].compiled)


def test_elsewhere_segments_are_compiled_anew_with_a_note(static, bundle, monkeypatch):
    expected = run(bundle)
    static.opened.clear()
    monkeypatch.setattr(static, "compiler", "static 2.0")
    text = "static:0: its segments were compiled for static 1.0; here is static 2.0; compiling anew took [0-9.]+ m?s$"
    with pytest.warns(NoteWarning, match=text) as notes:
        actual = run(bundle)
    assert len(notes) == 1
    assert static.opened == PLAIN
    np.testing.assert_array_equal(actual, expected)


def test_a_device_that_keeps_no_compiled_models_ignores_them(static, bundle, monkeypatch):
    monkeypatch.setattr(static, "compiler", "")
    run(bundle)
    assert static.opened == PLAIN


def test_without_optimisations_segments_are_compiled_anew(static, bundle):
    with without_optimisations():
        run(bundle)
    assert static.opened == PLAIN


def test_compiled_models_may_be_removed(static, bundle):
    for name in bundle.compiled_files:
        bundle.file(name).unlink()
    with pytest.warns(
        NoteWarning, match="000.0.compiled.onnx cannot be used: this file of the bundle is missing; comp"
    ):
        run(bundle)
    assert onnxplace.load(bundle.path, check="all").manifest == bundle.manifest
    assert onnxplace.compile(
        bundle.path.parent / "model.onnx",
        bundle.path,
        devices="cpu:0",
        shape={"batch": 1},
        force=True,
        pipeline=PIPELINE,
    )


@pytest.mark.parametrize(("content", "reason"), [(b"x", "expected 1800 bytes"), (b"x" * 1800, "SHA-256 differs")])
def test_a_damaged_compiled_model_is_left_alone_and_reported(static, bundle, content, reason):
    bundle.file(f"segments/{COMPILED[0]}.bin").write_bytes(content)
    with pytest.warns(NoteWarning, match=f"000.0.compiled.onnx cannot be used: .*{reason}"):
        run(bundle)
    assert static.opened == PLAIN
    with pytest.raises(BundleError, match=reason):
        onnxplace.load(bundle.path, check="all")


def test_a_compiled_model_that_the_provider_refuses_is_replaced(static, bundle, monkeypatch):
    monkeypatch.setattr("tests.support.static_device.BINARY", b"of another driver")
    with pytest.warns(NoteWarning, match="cannot be used: .*the context is of another driver; compiling anew"):
        run(bundle)
    assert static.opened == [*COMPILED, *PLAIN]


def test_a_compiled_model_of_another_segment_is_replaced(static, bundle, tmp_path):
    def exchange(manifest):
        name = f"segments/{COMPILED[0]}"
        shutil.copy(other.file("segments/whole.onnx"), bundle.file(name))
        manifest["files"][name] = other.manifest.files["segments/whole.onnx"].model_dump()

    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2] other) => (float[2] y) { y = Relu(other) }'
    (tmp_path / "other").mkdir()
    other = onnxplace.compile(parser.parse_model(text), tmp_path / "other/bundle", devices="cpu:0", pipeline=PIPELINE)
    alter_manifest(bundle, exchange)
    with pytest.warns(
        NoteWarning, match="0.compiled.onnx cannot be used: its inputs are 'other', the manifest says 'x'"
    ):
        run(bundle)


def test_a_provider_that_writes_no_compiled_model_is_noted(static, model_file, tmp_path, monkeypatch):
    monkeypatch.setattr(static, "refuses_to_compile", True)
    compiled = compile_model_here(model_file, tmp_path)
    notes = [note for note in compiled.diagnostics if note.code == "N012"]
    assert [note.where for note in notes] == ["segment static0-000, static:0"]
    assert "it has no compiled model: " in notes[0].message
    assert "this driver cannot write contexts" in notes[0].message
    assert not list(compiled.bundle.path.rglob("*compiled*"))
    run(compiled.bundle)


def test_a_provider_that_takes_no_node_writes_none(static, model_file, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.static_device._write_context", lambda *_: None)
    compiled = compile_model_here(model_file, tmp_path)
    assert not compiled.bundle.compiled_files
    assert "N012" not in {note.code for note in compiled.diagnostics}
    run(compiled.bundle)


def test_a_manifest_that_names_a_compiled_model_elsewhere_opens_nothing_there(static, bundle, tmp_path):
    outside = tmp_path / "outside.compiled.onnx"
    shutil.copy(bundle.file(f"segments/{COMPILED[0]}"), outside)

    def leave(manifest):
        manifest["segments"][0]["compiled"][0]["files"] = ["../outside.compiled.onnx"]

    def list_it(manifest):
        manifest["files"]["../outside.compiled.onnx"] = manifest["files"][f"segments/{COMPILED[0]}"]

    alter_manifest(bundle, leave)
    with pytest.raises(BundleError, match=r"outside\.compiled\.onnx' among the files"):
        onnxplace.load(bundle.path)
    alter_manifest(bundle, list_it)
    with pytest.warns(NoteWarning, match="cannot be used: it names a file outside the bundle"):
        run(bundle)
    assert outside.name not in static.opened


def test_copies_on_equal_hardware_share_compiled_models(static, model_file, tmp_path):
    pipeline = PIPELINE.replace("split,", "split,replicate{routes=static:1},")
    bundle = compile_model_here(model_file, tmp_path, pipeline, devices="static:0,static:1").bundle
    assert len(bundle.manifest.segments[0].compiled) == 1
    static.opened.clear()
    run(bundle)
    assert static.opened == COMPILED * 2


def test_a_bundle_for_hardware_that_is_not_here_has_none(static, model_file, tmp_path, monkeypatch):
    monkeypatch.setattr(static, "find_problem", lambda *_: "it is not here")
    target = tmp_path / "target.toml"
    target.write_text('[[devices]]\nid = "static:0"\nmemory_bytes = 1000000000\n')
    bundle = onnxplace.compile(model_file, tmp_path / "bundle", target=target, shape={"batch": 4}, pipeline=PIPELINE)
    assert bundle.manifest.segments[0].static.shapes == {"x": (4, 64)}
    assert not bundle.compiled_files


def test_trials_do_not_depend_on_the_bytes_of_compiled_models(bundle):
    files = dict(bundle.manifest.files)
    name = f"segments/{COMPILED[0]}.bin"
    files[name] = files[name].model_copy(update={"sha256": "0"})
    other = replace(bundle, manifest=bundle.manifest.model_copy(update={"files": files}))
    assert build_trial_key(bundle, {}) == build_trial_key(other, {})
