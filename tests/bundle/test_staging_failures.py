"""Full disks, interrupts and foreign locks leave a complete bundle or none."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import onnxplace
from onnxplace.bundle import staging
from onnxplace.errors import ExecutionError, UsageError
from onnxplace.utils import file_locks
from tests.bundle.staging_checks import LINUX, names

pytestmark = pytest.mark.usefixtures("scratch")

# -------------------------------------------------------------------------------------------------------------- no room


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
    monkeypatch.setattr("onnxplace.driver.compile._run_pipeline", lambda *_: pytest.fail("worked"))
    with pytest.raises(UsageError, match="is not writable") as refused:
        compiling(disk / "b", force=force)
    assert refused.value.code == "U032"


@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk_after_the_trial_leaves_the_destination_unchanged(
    compiling, place, bundle_copy, monkeypatch, force
):
    def full(*_):
        raise ExecutionError("E001", "no space left", where=str(place / ".hidden" / "manifest.json"))

    monkeypatch.setattr("onnxplace.driver.trials.replace_manifest", full)
    before = {path: path.read_bytes() for path in bundle_copy.rglob("*") if path.is_file()}
    with pytest.raises(ExecutionError, match="no space left"):
        compiling(bundle_copy if force else place / "b", force=force)
    assert names(place) == {"model.onnx", "bundle"}
    assert {path: path.read_bytes() for path in bundle_copy.rglob("*") if path.is_file()} == before


def test_errors_and_notes_never_name_the_unfinished_bundle(compiling, place, monkeypatch):
    def fail(bundle, manifest):
        raise ExecutionError("X001", f"no {bundle.path}/x", where=str(bundle.path / "y"), hint=f"look at {bundle.path}")

    monkeypatch.setattr("onnxplace.driver.trials.replace_manifest", fail)
    with pytest.raises(ExecutionError) as failed:
        compiling(place / "b")
    path = place / "b"
    texts = failed.value.message, failed.value.where, failed.value.hint
    assert texts == (f"no {path}/x", f"{path}/y", f"look at {path}")


# ---------------------------------------------------------------------------------------------------------- interrupted


def run_interrupted_compiles(folder, bundle, how, destination, rename_method):
    """Run the script of that name in a process of its own; returns its output."""
    shutil.copytree(bundle, folder / "old")
    manifest = json.loads((folder / "old" / "manifest.json").read_text())
    (folder / "old" / "manifest.json").write_text(json.dumps({**manifest, "placer": "single"}))
    (folder / "tmp").mkdir()
    script = Path(__file__).parents[1] / "support" / "interrupted_compiles.py"
    variables = {**os.environ, "TMPDIR": str(folder / "tmp")}
    command = [sys.executable, "-W", "ignore", script, folder, how, destination, rename_method]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


FORKS = pytest.mark.skipif(not LINUX, reason="processes are forked, and killed")


@FORKS
@pytest.mark.slow  # about 30 compiles
@pytest.mark.parametrize(
    ("destination", "rename_method", "how"),  # each pair of values is in one of the cases
    [
        ("fresh", "atomic", "kill"),
        ("fresh", "steps", "raise"),
        ("force", "atomic", "raise"),
        ("force", "steps", "kill"),
    ],
)
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
@pytest.mark.slow
def test_several_compiles_that_replace_one_bundle_all_succeed(place, compiled, rename_method):
    assert run_interrupted_compiles(place, compiled, "race", "force", rename_method) == ["0"] * 4
    assert onnxplace.load(place / "b", "all").manifest.placer == "m-etf"


def abandoned(folder, digits="0"):
    """Leave a lock like a process that was killed."""
    lock = folder / f".onnxplace-{digits * 16}"
    lock.touch()
    return lock


@pytest.mark.skipif(not LINUX, reason="locks")
def test_leftovers_of_killed_processes_are_removed_with_a_note(run_cli, model_file, place, scratch, fast_pipeline):
    for folder in (place, scratch):
        lock = abandoned(folder)
        lock.with_name(f"{lock.name}.new").mkdir()
        (lock.with_name(f"{lock.name}.new") / "weights.bin").write_bytes(b"half")
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
    with file_locks.hold_file_lock(place) as lock:
        lock.path_with_ending("new").mkdir()
        assert staging.sweep_output(place / "b") == []
        assert lock.path_with_ending("new").is_dir()
    assert names(place) == {"model.onnx"}


@pytest.mark.skipif(not LINUX, reason="locks")
def test_nothing_is_swept_where_files_cannot_be_locked(place, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOLCK, "No locks available")

    abandoned(place)
    monkeypatch.setattr(file_locks, "_lock", refuse)
    assert staging.sweep_output(place / "b") == []
    with file_locks.hold_file_lock(place) as lock:
        assert lock.path.exists()
    assert len(names(place)) == 2


@pytest.mark.skipif(not LINUX, reason="locks")
def test_a_bundle_that_was_moved_aside_is_restored_with_a_note(run_cli, place, bundle_copy, model_file):
    old = place / f"{abandoned(place).name}.old.bundle"
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
@pytest.mark.parametrize("ending", [".old.", ".old..", ".old...", ".old", ".new"])
def test_a_lock_cannot_make_the_sweep_touch_other_folders(place, ending):
    (place / "inner").mkdir()
    (place / "precious").mkdir()
    lock = abandoned(place / "inner")
    lock.with_name(f"{lock.name}{ending}").mkdir()
    file_locks.sweep_leftovers(place / "inner")
    assert names(place) == {"model.onnx", "inner", "precious"}
    assert names(place / "inner") == set()


def test_a_link_is_never_swept(place):
    (place / "precious").mkdir()
    (place / f".onnxplace-{'1' * 16}").symlink_to("precious")
    assert staging.sweep_output(place / "b") == []
    if LINUX:
        lock = abandoned(place)
        lock.with_name(f"{lock.name}.new").symlink_to("precious")
        staging.sweep_output(place / "b")
    assert (place / "precious").is_dir()


# --------------------------------------------------------------------------------- locks that came from somewhere else


def planted(place, name):
    """Create a lock without a process, as from an untrusted archive; returns the folder it moved aside."""
    lock = place / f".onnxplace-{'1' * 16}"
    lock.touch()
    return lock.with_name(f"{lock.name}.old.{name}")


@pytest.mark.skipif(not LINUX, reason="locks")
def test_a_planted_lock_replaces_no_file(run_cli, place, model_file):
    (place / "thesis.txt").write_text("precious")
    planted(place, "thesis.txt").write_text("evil")
    assert run_cli("compile", model_file, "--shape", "batch=4", "-o", place / "b", "--no-trial").code == 0
    assert (place / "thesis.txt").read_text() == "precious"


@pytest.mark.skipif(not LINUX, reason="locks")
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_planted_lock_moves_a_folder_only_to_a_free_path(place, kind):
    (place / "elsewhere").mkdir()
    if kind == "file":
        (place / "mine").write_text("precious")
    else:
        (place / "mine").symlink_to("elsewhere")
    planted(place, "mine").mkdir()
    file_locks.sweep_leftovers(place)
    assert names(place) == {"model.onnx", "elsewhere", "mine"}
    assert (place / "mine").is_symlink() == (kind == "link")


@pytest.mark.skipif(not LINUX, reason="pipes")
def test_a_pipe_in_place_of_a_lock_is_not_waited_for(place):
    os.mkfifo(place / f".onnxplace-{'1' * 16}")
    (place / f".onnxplace-{'1' * 16}.old.nothing").mkdir()
    with pytest.raises(onnxplace.BundleError, match="N001"):
        onnxplace.load(place / "nothing")
    file_locks.sweep_leftovers(place)
