"""Writing bundles: no file of the user's is ever lost, and there is a complete bundle or none after any failure."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import onnxplace
from onnxplace.bundle import staging
from onnxplace.errors import BundleError, ExecutionError, UsageError
from onnxplace.passes import emit
from onnxplace.utils import leases, renames as renames_module

SHAPE = {"batch": 4}
DEVICES = "cpu:0,cpu:1"
LINUX = sys.platform.startswith("linux")


@pytest.fixture(autouse=True)
def scratch(monkeypatch, tmp_path_factory):
    """A folder for temporary files, so that no test sweeps files of another one."""
    folder = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture(params=["atomic", "steps"])
def rename_method(request, monkeypatch):
    """Rename by Linux's renameat2, and in two steps as on other systems."""
    if request.param == "steps":
        monkeypatch.setattr(renames_module, "_renameat2", lambda *_: False)
    elif not LINUX:
        pytest.skip("the renames are those of Linux")
    return request.param


@pytest.fixture
def place(model_file):
    """The folder of the model, where bundles are written."""
    return model_file.parent


@pytest.fixture
def compiling(model_file, fast_pipeline):
    def run(output, **options):
        pipeline = options.pop("pipeline", fast_pipeline)
        return onnxplace.compile(model_file, output, devices=DEVICES, shape=SHAPE, pipeline=pipeline, **options)

    return run


@pytest.fixture
def meanwhile(monkeypatch):
    """Run a function while a bundle is being written."""
    actual = emit.write_bundle_files

    def during(happen):
        def write(*arguments):
            happen()
            return actual(*arguments)

        monkeypatch.setattr(emit, "write_bundle_files", write)

    return during


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---------------------------------------------------------------------------------------------- what came meanwhile


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
    actual, checked_folders = staging._require_only_bundle, []

    def checked(folder, path):
        actual(folder, path)
        checked_folders.append(folder)
        if len(checked_folders) == 3:  # before any work, before the exchange, and the exchanged folder after it
            pytest.fail("was not checked again")
        if len(checked_folders) == 2:
            (folder / "notes.txt").write_text("mine")

    monkeypatch.setattr(staging, "_require_only_bundle", checked)
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


# ---------------------------------------------------------------------------------------------- what force replaces


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
        lambda path: edit(path, lambda manifest: manifest.pop("format")),
        lambda path: edit(path, lambda manifest: manifest.update(schema_version="7.3")),
        lambda path: (path / "segments" / "weights.bin").unlink(),
        lambda path: (path / "costs.json").write_text("{}"),
    ],
    ids=["older", "newer", "missing file", "edited file"],
)
def test_force_replaces_bundles_of_all_formats(compiling, place, bundle_copy, rename_method, change):
    change(bundle_copy)
    compiling(bundle_copy, force=True)
    assert onnxplace.load(bundle_copy, "all").manifest.format == "onnxplace bundle"
    assert names(place) == {"model.onnx", "bundle"}


def test_a_missing_format_is_accepted_and_another_format_is_refused(bundle_copy):
    edit(bundle_copy, lambda manifest: manifest.pop("format"))
    assert onnxplace.load(bundle_copy, "all")
    edit(bundle_copy, lambda manifest: manifest.update(format="something else"))
    with pytest.raises(BundleError, match="'format'"):
        onnxplace.load(bundle_copy)


# ---------------------------------------------------------------------------------------------- names


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
    monkeypatch.setattr(onnxplace.api, "load", lambda *_: pytest.fail("worked"))
    monkeypatch.setattr("onnxplace.driver.compiler.load_model", lambda *_: pytest.fail("worked"))
    result = run_cli(*command, name)
    assert (result.code, result.out) == (2, "")
    assert [line[:11] for line in result.err.splitlines()] == ["error[U032]", "  hint: cho"]
    assert names(place) == {"model.onnx", "bundle"}


# ---------------------------------------------------------------------------------------------- no room


@pytest.fixture
def mounted(tmp_path_factory):
    """Mount small file systems in memory."""
    points = []

    def mount(options):
        point = tmp_path_factory.mktemp("disk")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", point], capture_output=True)
        if done.returncode:
            pytest.skip("file systems cannot be mounted here")
        points.append(point)
        return point

    if not LINUX or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("file systems cannot be mounted here")
    yield mount
    for point in points:
        subprocess.run(["umount", point], check=True)


def test_a_disk_that_fills_up_leaves_a_complete_bundle_or_none(compiling, place, mounted):
    compiling(place / "whole")
    needed = sum(-(-path.stat().st_size // 4096) * 4 for path in (place / "whole").rglob("*") if path.is_file())
    seen = []
    for size in (*range(4, needed - 8, 24), *range(needed - 8, needed + 24, 4)):  # in KiB; small steps near the limit
        disk = mounted(f"size={size}k")
        failed = None
        try:
            compiling(disk / "b")
        except ExecutionError as problem:
            failed = problem
        seen.append(failed is None)
        assert names(disk) == ({"b"} if failed is None else set())
        if failed is None:
            assert onnxplace.load(disk / "b", "all")
        else:
            assert failed.code == "E001"
            assert failed.where.startswith(str(disk / "b"))
    assert seen == sorted(seen)
    assert set(seen) == {False, True}


@pytest.mark.parametrize("force", [False, True])
def test_a_read_only_disk_is_reported_before_any_work(compiling, mounted, monkeypatch, force):
    disk = mounted("ro")
    monkeypatch.setattr("onnxplace.driver.compiler.load_model", lambda *_: pytest.fail("worked"))
    with pytest.raises(UsageError, match="is not writable") as refused:
        compiling(disk / "b", force=force)
    assert refused.value.code == "U032"


@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk_after_the_trial_leaves_the_destination_unchanged(
    compiling, place, bundle_copy, monkeypatch, force
):
    def full(*_):
        raise ExecutionError("E001", "no space left", where=str(place / ".hidden" / "manifest.json"))

    monkeypatch.setattr("onnxplace.driver.finishing.replace_manifest", full)
    before = {path: path.read_bytes() for path in bundle_copy.rglob("*") if path.is_file()}
    with pytest.raises(ExecutionError, match="no space left"):
        compiling(bundle_copy if force else place / "b", force=force)
    assert names(place) == {"model.onnx", "bundle"}
    assert {path: path.read_bytes() for path in bundle_copy.rglob("*") if path.is_file()} == before


def test_errors_and_notes_never_name_the_unfinished_bundle(compiling, place, monkeypatch):
    def fail(bundle, manifest):
        raise ExecutionError("X001", f"no {bundle.path}/x", where=str(bundle.path / "y"), hint=f"look at {bundle.path}")

    monkeypatch.setattr("onnxplace.driver.finishing.replace_manifest", fail)
    with pytest.raises(ExecutionError) as failed:
        compiling(place / "b")
    path = place / "b"
    texts = failed.value.message, failed.value.where, failed.value.hint
    assert texts == (f"no {path}/x", f"{path}/y", f"look at {path}")


# ---------------------------------------------------------------------------------------------- interrupted


def run_interrupted_compiles(folder, bundle, how, destination, rename_method):
    """Run the script of that name in a process of its own; returns its output."""
    shutil.copytree(bundle, folder / "old")
    manifest = json.loads((folder / "old" / "manifest.json").read_text())
    (folder / "old" / "manifest.json").write_text(json.dumps({**manifest, "placer": "single"}))
    (folder / "tmp").mkdir()
    script = Path(__file__).parents[1] / "support" / "interrupted_compiles.py"
    variables = {**os.environ, "TMPDIR": str(folder / "tmp")}
    command = [sys.executable, "-W", "ignore", script, folder, how, destination, rename_method]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


FORKS = pytest.mark.skipif(not LINUX, reason="processes are forked, and killed")


@FORKS
@pytest.mark.slow  # about 30 compiles
@pytest.mark.parametrize("how", ["kill", "raise"])
@pytest.mark.parametrize("rename_method", ["atomic", "steps"])
@pytest.mark.parametrize("destination", ["fresh", "force"])
def test_an_interrupted_compile_leaves_the_old_bundle_the_new_one_or_none(
    place, compiled, how, destination, rename_method
):
    result = run_interrupted_compiles(place, compiled, how, destination, rename_method)
    assert result.pop("moments") > 15
    assert set(result) == {"m-etf", "single" if destination == "force" else "none"}


@FORKS
@pytest.mark.parametrize("rename_method", ["atomic", "steps"])
def test_of_several_compiles_to_one_destination_exactly_one_succeeds(place, compiled, rename_method):
    assert run_interrupted_compiles(place, compiled, "race", "fresh", rename_method) == ["0", "30", "30", "30"]


@FORKS
@pytest.mark.parametrize("rename_method", ["atomic", "steps"])
def test_several_compiles_that_replace_one_bundle_all_succeed(place, compiled, rename_method):
    assert run_interrupted_compiles(place, compiled, "race", "force", rename_method) == ["0"] * 4
    assert onnxplace.load(place / "b", "all").manifest.placer == "m-etf"


def abandoned(folder, digits="0", journal=None):
    """Leave a lease like a process that was killed."""
    lease = folder / f".onnxplace-{digits * 16}"
    lease.write_bytes(b"" if journal is None else leases._JOURNAL + json.dumps(journal).encode())
    return lease


@pytest.mark.skipif(not LINUX, reason="locks")
def test_leftovers_of_killed_processes_are_removed_with_a_note(run_cli, model_file, place, scratch, fast_pipeline):
    for folder in (place, scratch):
        lease = abandoned(folder)
        lease.with_name(f"{lease.name}.new").mkdir()
        (lease.with_name(f"{lease.name}.new") / "weights.bin").write_bytes(b"half")
    foreign_files = {".onnxplace-notes", ".onnxplace-0123456789abcdef.new", ".onnxplace-0123456789ABCDEF", ".b.tmp"}
    for name in foreign_files:
        (place / name).write_text("mine")
    options = ("--shape", "batch=4", "--pipeline", fast_pipeline, "--json")
    result = run_cli("compile", model_file, "-o", place / "b", *options)
    assert result.code == 0
    assert names(place) == {"model.onnx", "b"} | foreign_files
    assert names(scratch) == set()
    notes = [note for note in json.loads(result.out)["diagnostics"] if note["code"] == "U034"]
    assert [note["where"] for note in notes] == [str(place), str(scratch)]
    assert f".onnxplace-{'0' * 16}.new" in notes[0]["message"]
    assert "U034" not in (place / "b" / "manifest.json").read_text()


@pytest.mark.skipif(not LINUX, reason="locks")
def test_files_of_a_living_process_are_not_swept(place):
    with leases.hold_lease(place) as lease:
        lease.beside("new").mkdir()
        assert staging.sweep_output(place / "b") == []
        assert lease.beside("new").is_dir()
    assert names(place) == {"model.onnx"}


@pytest.mark.skipif(not LINUX, reason="locks")
def test_nothing_is_swept_where_files_cannot_be_locked(place, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOLCK, "No locks available")

    abandoned(place)
    monkeypatch.setattr(leases, "_lock", refuse)
    assert staging.sweep_output(place / "b") == []
    with leases.hold_lease(place) as lease:
        assert lease.path.exists()
    assert len(names(place)) == 2


@pytest.mark.skipif(not LINUX, reason="locks")
def test_a_bundle_that_was_moved_aside_is_restored_with_a_note(run_cli, place, bundle_copy, model_file):
    old = abandoned(place, journal="bundle").with_name(f".onnxplace-{'0' * 16}.old")
    bundle_copy.rename(old)
    result = run_cli("run", bundle_copy)
    assert result.code == 2
    assert "N001" in result.err
    assert old.name in result.err
    result = run_cli("compile", model_file, "--shape", "batch=4", "-o", bundle_copy)
    assert result.code == 2
    assert "U030" in result.err
    assert "restored" in result.err
    assert onnxplace.load(bundle_copy, "all")
    assert names(place) == {"model.onnx", "bundle"}


@pytest.mark.skipif(not LINUX, reason="locks")
@pytest.mark.parametrize("journal", ["../precious", "/precious", "..", "", 3, None, ["b"]])
def test_a_lease_cannot_make_the_sweep_touch_other_folders(place, journal):
    (place / "inner").mkdir()
    (place / "precious").mkdir()
    abandoned(place / "inner", journal=journal)
    leases.sweep_leftovers(place / "inner")
    assert names(place) == {"model.onnx", "inner", "precious"}
    assert names(place / "inner") == set()


def test_a_link_is_never_swept(place):
    (place / "precious").mkdir()
    (place / f".onnxplace-{'1' * 16}").symlink_to("precious")
    assert staging.sweep_output(place / "b") == []
    if LINUX:
        lease = abandoned(place)
        lease.with_name(f"{lease.name}.new").symlink_to("precious")
        staging.sweep_output(place / "b")
    assert (place / "precious").is_dir()


# ---------------------------------------------------------------------------- leases that came from somewhere else


def planted(place, name):
    """Create a lease without a process, as from an untrusted archive; returns the folder it moved aside."""
    lease = place / f".onnxplace-{'1' * 16}"
    lease.write_bytes(b"onnxplace moves to " + json.dumps(name).encode())
    return lease.with_name(f"{lease.name}.old")


@pytest.mark.skipif(not LINUX, reason="locks")
def test_a_planted_lease_replaces_no_file(run_cli, place, model_file):
    (place / "thesis.txt").write_text("precious")
    planted(place, "thesis.txt").write_text("evil")
    assert run_cli("compile", model_file, "--shape", "batch=4", "-o", place / "b", "--no-trial").code == 0
    assert (place / "thesis.txt").read_text() == "precious"


@pytest.mark.skipif(not LINUX, reason="locks")
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_planted_lease_moves_a_folder_only_to_a_free_path(place, kind):
    (place / "elsewhere").mkdir()
    if kind == "file":
        (place / "mine").write_text("precious")
    else:
        (place / "mine").symlink_to("elsewhere")
    planted(place, "mine").mkdir()
    leases.sweep_leftovers(place)
    assert names(place) == {"model.onnx", "elsewhere", "mine"}
    assert (place / "mine").is_symlink() == (kind == "link")


@pytest.mark.skipif(not LINUX, reason="pipes")
def test_a_pipe_in_place_of_a_lease_is_not_waited_for(place):
    os.mkfifo(place / f".onnxplace-{'1' * 16}")
    (place / f".onnxplace-{'1' * 16}.old").mkdir()
    with pytest.raises(onnxplace.BundleError, match="N001"):
        onnxplace.load(place / "nothing")
    leases.sweep_leftovers(place)


# --------------------------------------------------------------------------------- what a command reads stays


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
    keys = {"schema_version": "1.1", "pipeline": "", "programs": {}, "segments": [], "files": {"index.html": 1}}
    (site / "manifest.json").write_text(json.dumps(keys))
    result = run_cli("compile", model_file, "--shape", "batch=4", "-o", site, "--force")
    assert result.code == 2
    assert "U031" in result.err
    assert (site / "index.html").read_text() == "mine"
