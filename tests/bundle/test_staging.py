"""Writing bundles: no file of the user's is ever lost."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import onnxplace
import onnxplace.session.inference_session
from onnxplace.bundle import staging
from onnxplace.errors import BundleError, UsageError
from tests.bundle.staging_checks import names

pytestmark = pytest.mark.usefixtures("scratch")

# -------------------------------------------------------------------------------------------------- what came meanwhile


def user_folder(path):
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")


COMES = {
    "folder": user_folder,
    "empty folder": Path.mkdir,
    "file": lambda path: path.write_text("dear"),
    "link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", COMES)
@pytest.mark.parametrize("output", ["b", "x" * 250])
def test_files_created_at_the_destination_meanwhile_stay(compiling, place, meanwhile, rename_method, kind, output):
    meanwhile(lambda: COMES[kind](place / output))
    with pytest.raises(UsageError, match="it already exists") as refused:
        compiling(place / output)
    assert refused.value.code == "U030"
    assert refused.value.where.endswith(output[-100:])
    assert names(place) == {"model.onnx", output}
    if kind == "folder":
        assert (place / output / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_force_does_not_replace_files_created_meanwhile(compiling, place, meanwhile, rename_method, kind):
    meanwhile(lambda: COMES[kind](place / "b"))
    with pytest.raises(UsageError) as refused:
        compiling(place / "b", force=True)
    assert refused.value.code == "U031"
    assert names(place) == {"model.onnx", "b"}


def test_a_file_added_to_the_bundle_at_the_last_moment_stays(compiling, place, bundle_copy, rename_method, monkeypatch):
    actual, checked_folders = staging._require_only_own_files, []

    def checked(folder, path, kind):
        actual(folder, path, kind)
        checked_folders.append(folder)
        if len(checked_folders) == 3:  # before any work, before the exchange, and the exchanged folder after it
            pytest.fail("was not checked again")
        if len(checked_folders) == 2:
            (folder / "notes.txt").write_text("mine")

    monkeypatch.setattr(staging, "_require_only_own_files", checked)
    with pytest.raises(UsageError, match=r"notes\.txt") as refused:
        compiling(bundle_copy, force=True)
    assert refused.value.code == "U031"
    assert (bundle_copy / "notes.txt").read_text() == "mine"
    assert onnxplace.load(bundle_copy, "all")
    assert names(place) == {"model.onnx", "bundle"}


def test_a_bundle_that_disappears_meanwhile_need_not_be_replaced(
    compiling, place, bundle_copy, meanwhile, rename_method
):
    meanwhile(lambda: shutil.rmtree(bundle_copy, ignore_errors=True))
    compiling(bundle_copy, force=True)
    assert onnxplace.load(bundle_copy, "all")
    assert names(place) == {"model.onnx", "bundle"}


# -------------------------------------------------------------------------------------------------- what force replaces


def web_app(path):
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps({"name": "shop", "icons": [], "files": {}}))
    (path / "index.html").write_text("<html>")


def bundle_with(name):
    def add(path):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("mine")

    return add


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda path: (shutil.rmtree(path), web_app(path)), "not a bundle"),
        (lambda path: (path / "manifest.json").write_text("{}"), "not a bundle"),
        (lambda path: (path / "manifest.json").write_text("{nope"), "not a bundle"),
        (lambda path: (path / "manifest.json").unlink(), "not a bundle"),
        (bundle_with("notes.txt"), "not the bundle's: notes.txt"),
        (bundle_with("segments/.hidden"), "not the bundle's: segments/.hidden"),
        (bundle_with("data/feeds.npz"), "not the bundle's: data, data/feeds.npz"),
        (lambda path: (path / "empty").mkdir(), "not the bundle's: empty"),
        (lambda path: (path / "link").symlink_to("nowhere"), "not the bundle's: link"),
    ],
    ids=["web app", "no format", "no JSON", "no manifest", "file", "hidden", "folder", "empty folder", "link"],
)
def test_force_replaces_no_files_of_the_user(compiling, place, bundle_copy, change, text):
    change(bundle_copy)
    before = {path: path.read_bytes() for path in bundle_copy.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=text) as refused:
        compiling(bundle_copy, force=True)
    assert refused.value.code == "U031"
    assert refused.value.hint
    assert {path: path.read_bytes() for path in bundle_copy.rglob("*") if path.is_file()} == before
    assert names(place) == {"model.onnx", "bundle"}


def edit(bundle, change):
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: edit(path, lambda manifest: manifest.update(schema_version="7.3")),
        lambda path: (path / "segments" / "weights.bin").unlink(),
        lambda path: (path / "costs.json").write_text("{}"),
    ],
    ids=["newer", "missing file", "edited file"],
)
def test_force_replaces_bundles_of_all_formats(compiling, place, bundle_copy, rename_method, change):
    change(bundle_copy)
    compiling(bundle_copy, force=True)
    assert onnxplace.load(bundle_copy, "all").manifest.format == "onnxplace bundle"
    assert names(place) == {"model.onnx", "bundle"}


def test_another_format_is_refused(bundle_copy):
    edit(bundle_copy, lambda manifest: manifest.update(format="something else"))
    with pytest.raises(BundleError, match="'format'"):
        onnxplace.load(bundle_copy)


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("output", "code"),
    [
        ("/", "U031"),
        (".", "U031"),
        ("..", "U031"),
        ("missing/..", "U031"),
        ("", "U032"),
        ("x" * 300, "U032"),
        ("a\0b", "U032"),
        ("a\0/b", "U032"),
        (b"b", "U032"),
        (5, "U032"),
        (os.fsdecode(b"caf\xe9"), "U032"),
        ("model.onnx/b", "U032"),
        ("/dev/null/b", "U032"),
        ("/proc/b", "U032"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_invalid_destinations_are_refused_in_one_line(compiling, place, monkeypatch, output, code, force):
    monkeypatch.chdir(place)
    with pytest.raises(UsageError) as refused:
        compiling(output, force=force)
    assert refused.value.code == code
    assert refused.value.where.isprintable()
    assert names(place) == {"model.onnx"}


@pytest.mark.parametrize("output", ["/", "..", "", os.fsdecode(b"caf\xe9"), "a\nb", "x" * 300])
def test_the_command_refuses_an_invalid_destination(run_cli, place, monkeypatch, output):
    monkeypatch.chdir(place)
    if "\n" in output:
        (place / output).mkdir()
    result = run_cli("compile", "model.onnx", "--shape", "batch=4", "-o", output)
    assert (result.code, result.out) == (2, "")
    assert [line[:8] for line in result.err.splitlines()] == ["error[U0", "  hint: "]


@pytest.mark.parametrize("output", ["x" * 255, "a\nb", "b/", "-", "~", "caf\u00e9 \U0001f600", "new/er/b"])
def test_unusual_names_are_accepted(run_cli, place, fast_pipeline, monkeypatch, output):
    monkeypatch.chdir(place)
    result = run_cli("compile", "model.onnx", "--shape", "batch=4", "-o", output, "--pipeline", fast_pipeline)
    assert result.code == 0, result.err
    assert run_cli("verify", output).code == 0


@pytest.mark.parametrize("name", ["x" * 300, "a\nb/c", os.fsdecode(b"caf\xe9"), "."])
@pytest.mark.parametrize(
    "command",
    [
        ("compile", "model.onnx", "--shape", "batch=4", "--save-costs"),
        ("run", "bundle", "--outputs"),
        ("run", "bundle", "--trace"),
        ("devices", "-o"),
    ],
    ids=lambda command: command[0] + command[-1],
)
def test_unwritable_files_are_refused_before_any_work(run_cli, place, bundle_copy, monkeypatch, command, name):
    monkeypatch.chdir(place)
    monkeypatch.setattr(onnxplace.session.inference_session, "load", lambda *_: pytest.fail("worked"))
    monkeypatch.setattr("onnxplace.driver.compile._run_pipeline", lambda *_: pytest.fail("worked"))
    result = run_cli(*command, name)
    assert (result.code, result.out) == (2, "")
    assert [line[:11] for line in result.err.splitlines()] == ["error[U032]", "  hint: cho"]
    assert names(place) == {"model.onnx", "bundle"}


# ------------------------------------------------------------------------------------------- what a command reads stays


@pytest.mark.parametrize("name", ["model.onnx", "./model.onnx"])
def test_costs_do_not_overwrite_the_model(run_cli, model_file, tmp_path, monkeypatch, name):
    monkeypatch.chdir(model_file.parent)
    before = model_file.read_bytes()
    result = run_cli("compile", model_file, "--shape", "batch=4", "-o", tmp_path / "b", "--save-costs", name)
    assert result.code == 2
    assert "U032" in result.err
    assert "model.onnx, which is read" in result.err
    assert model_file.read_bytes() == before


@pytest.mark.parametrize(("option", "name"), [("--outputs", "manifest.json"), ("--trace", "costs.json")])
def test_results_are_not_written_into_the_bundle(run_cli, bundle_copy, option, name):
    result = run_cli("run", bundle_copy, option, bundle_copy / name)
    assert result.code == 2
    assert "which is read" in result.err
    assert onnxplace.load(bundle_copy, "all")


def test_outputs_do_not_overwrite_inputs(run_cli, bundle_copy, tmp_path):
    np.savez(tmp_path / "in.npz", x=np.zeros((4, 64), np.float32))
    result = run_cli("run", bundle_copy, "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "in.npz")
    assert result.code == 2
    assert np.load(tmp_path / "in.npz")["x"].shape == (4, 64)


def test_force_replaces_no_folder_that_merely_resembles_an_old_bundle(run_cli, model_file, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "index.html").write_text("mine")
    keys = {"schema_version": "1.0", "pipeline": "", "programs": {}, "segments": [], "files": {"index.html": 1}}
    (site / "manifest.json").write_text(json.dumps(keys))
    result = run_cli("compile", model_file, "--shape", "batch=4", "-o", site, "--force")
    assert result.code == 2
    assert "U031" in result.err
    assert (site / "index.html").read_text() == "mine"
