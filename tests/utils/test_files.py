"""Files that users name: read without hanging and within limits, written whole, with errors in one line."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from onnxplace.errors import InputError, UsageError
from onnxplace.utils import files

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="pipes and devices with names")
SHAPE = ("--shape", "batch=4")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.05)


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


# ---------------------------------------------------------------------------------------------- reading

GIVEN = {
    "costs": ("compile", "model.onnx", *SHAPE, "--costs"),
    "target": ("compile", "model.onnx", *SHAPE, "--target"),
    "device map": ("compile", "model.onnx", *SHAPE, "--device-map"),
    "sample inputs": ("compile", "model.onnx", *SHAPE, "--inputs"),
    "inputs": ("run", "bundle", "--inputs"),
    "cost graph": ("place",),
}


@POSIX
@pytest.mark.usefixtures("pipe", "bundle_copy", "no_gpus")
@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "/dev/null", "link", "folder", "missing", "x" * 300])
@pytest.mark.parametrize("option", GIVEN)
def test_what_is_not_a_file_is_refused_wherever_users_name_one(run_cli, model_file, monkeypatch, option, name):
    monkeypatch.chdir(model_file.parent)
    (model_file.parent / "link").symlink_to("/dev/zero")
    (model_file.parent / "folder").mkdir()
    ran = run_cli(*GIVEN[option], name)
    assert (ran.code, ran.out) == (2, "")
    first, *rest = ran.err.splitlines()
    assert first.startswith("error[")
    assert [line[:8] for line in rest] in ([], ["  hint: "])


@POSIX
@pytest.mark.parametrize("name", ["table.csv", "table.json"])
def test_cost_files_of_every_kind_are_read_with_care(run_cli, model_file, monkeypatch, name):
    monkeypatch.chdir(model_file.parent)
    Path(name).symlink_to("/dev/zero")
    ran = run_cli("compile", model_file, *SHAPE, "--devices", "cpu:0", "--costs", name)
    assert ran.code == 2
    assert "expected a file, got a device" in ran.err


@pytest.mark.parametrize("name", ["missing", "x" * 300, "a\0b", "caf\udce9"])
def test_names_that_no_file_can_have_are_refused_in_a_line(name):
    with pytest.raises(InputError) as refused:
        files.read_bytes(name, "D001")
    assert refused.value.code == "D001"
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "arguments",
    [("compile",), ("verify", "bundle", "--against"), ("compile", "model.onnx", *SHAPE, "--custom-op-library")],
    ids=lambda arguments: arguments[-1],
)
def test_a_name_that_is_too_long_is_the_users_mistake(run_cli, model_file, bundle_copy, monkeypatch, arguments):
    monkeypatch.chdir(model_file.parent)
    ran = run_cli(*arguments, "x" * 300)
    assert (ran.code, ran.out) == (2, "")
    assert "Traceback" not in ran.err


@POSIX
def test_a_pipe_without_a_writer_is_refused_with_what_to_do(pipe):
    with pytest.raises(InputError, match="nothing is written") as refused:
        files.read_bytes(pipe, "D001")
    assert refused.value.hint


def written(pipe, pieces):
    """Write to a pipe from a thread, slowly."""

    def write():
        with suppress(BrokenPipeError), open(pipe, "wb", buffering=0) as stream:
            for piece in pieces:
                time.sleep(0.1)
                stream.write(piece)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


@POSIX
def test_a_pipe_is_read_to_its_end_however_slowly_it_is_written(pipe, monkeypatch):
    monkeypatch.setattr(files, "PIPE_SECONDS", 30.0)
    thread = written(pipe, [b"a" * 100_000, b"", b"b"])
    assert files.read_bytes(pipe, "D001") == b"a" * 100_000 + b"b"
    thread.join()


@POSIX
def test_a_pipe_without_end_is_refused(pipe, monkeypatch):
    monkeypatch.setattr(files, "PIPE_SECONDS", 30.0)
    thread = written(pipe, [b"a" * 1000] * 3)
    with pytest.raises(InputError, match="expected at most 1500 bytes, got more"):
        files.read_bytes(pipe, "D001", max_bytes=1500)
    thread.join()


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="no names of open files")
def test_what_a_shell_substitutes_is_read():
    read, write = os.pipe()
    os.write(write, b'{"a": 1}')
    os.close(write)
    assert files.read_json(f"/dev/fd/{read}", "D001", "anything") == {"a": 1}
    os.close(read)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
def test_files_are_read_whole_up_to_a_limit(tmp_path, size):
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    if size <= 100:
        assert files.read_bytes(path, "D001", 100) == bytes(size)
        return
    with pytest.raises(InputError, match=f"expected at most 100 bytes, got {size} bytes") as refused:
        files.read_bytes(path, "D001", 100)
    assert (refused.value.code, refused.value.where) == ("D001", str(path))


def test_files_whose_size_is_not_known_are_read_whole_and_not_beyond_the_limit():
    path = "/proc/self/maps"
    if not os.path.exists(path):
        pytest.skip("no such files here")
    assert len(files.read_bytes(path, "D001")) > 1000
    with pytest.raises(InputError, match="got more"):
        files.read_bytes(path, "D001", 100)


@given(st.text(st.characters(codec=None, categories=None), max_size=2000))
def test_a_path_is_shown_as_one_readable_line(path):
    text = files.path_text(path)
    assert text.isprintable()
    assert len(text) < 320
    text.encode()


# ---------------------------------------------------------------------------------------------- writing


def test_files_are_written_whole_or_not_at_all(tmp_path):
    (tmp_path / "file").write_bytes(b"old")

    def fail(stream):
        stream.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_file(tmp_path / "file", fail)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_a_name_may_be_as_long_as_the_system_takes_it(tmp_path):
    files.write_file(tmp_path / ("x" * 255), lambda stream: stream.write(b"new"))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new"]


@POSIX
def test_a_pipe_that_nothing_reads_is_refused(pipe):
    with pytest.raises(UsageError, match="cannot write there") as refused:
        files.write_file(pipe, lambda stream: stream.write(b"data"))
    assert refused.value.code == "U032"


@POSIX
def test_a_pipe_that_is_read_later_is_written_to(pipe, monkeypatch):
    monkeypatch.setattr(files, "PIPE_SECONDS", 30.0)
    with ThreadPoolExecutor() as pool:
        data = pool.submit(pipe.read_bytes)
        files.write_file(pipe, lambda stream: stream.write(b"data" * 100_000))
        assert data.result() == b"data" * 100_000
    assert pipe.is_fifo()


@pytest.fixture
def umask():
    """Set the mask of new files as a careful user has it."""
    before = os.umask(0o027)
    yield
    os.umask(before)


@POSIX
@pytest.mark.usefixtures("umask")
def test_threads_that_write_at_once_leave_the_umask_alone(tmp_path, monkeypatch):
    mask = os.umask

    def touch(_):
        pytest.fail("the mask belongs to the whole process")

    monkeypatch.setattr(os, "umask", touch)
    with ThreadPoolExecutor(8) as pool:
        for index in range(64):
            pool.submit(files.write_file, tmp_path / str(index), lambda stream: stream.write(b"new"))
    monkeypatch.undo()
    assert mask(0o027) == 0o027
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
    assert len(list(tmp_path.iterdir())) == 64


@POSIX
@pytest.mark.usefixtures("umask")
def test_bundles_have_the_rights_that_the_umask_leaves(run_cli, model_file, fast_pipeline, monkeypatch):
    monkeypatch.chdir(model_file.parent)
    assert run_cli("compile", "model.onnx", *SHAPE, "-o", "new/b", "--pipeline", fast_pipeline).code == 0
    rights = {path.is_dir(): path.stat().st_mode & 0o777 for path in (Path("new"), *Path("new").rglob("*"))}
    assert rights == {True: 0o750, False: 0o640}
