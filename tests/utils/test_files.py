"""Users' files are read within limits and without hanging, and written atomically; errors have one line."""

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

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes and devices")
SHAPE = ("--shape", "batch=4")


@pytest.fixture(autouse=True)
def short_pipe_wait(monkeypatch):
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.05)


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


# ---------------------------------------------------------------------------------------------- reading

COMMANDS = {
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
@pytest.mark.parametrize("option", COMMANDS)
def test_every_command_refuses_a_path_that_is_not_a_file(run_cli, model_file, monkeypatch, option, name):
    monkeypatch.chdir(model_file.parent)
    (model_file.parent / "link").symlink_to("/dev/zero")
    (model_file.parent / "folder").mkdir()
    result = run_cli(*COMMANDS[option], name)
    assert (result.code, result.out) == (2, ""), result.err
    first, *rest = result.err.splitlines()
    assert first.startswith("error[")
    assert [line[:8] for line in rest] in ([], ["  hint: "])


@POSIX
@pytest.mark.parametrize("name", ["table.csv", "table.json"])
def test_a_device_is_refused_as_a_cost_file_of_any_kind(run_cli, model_file, monkeypatch, name):
    monkeypatch.chdir(model_file.parent)
    Path(name).symlink_to("/dev/zero")
    result = run_cli("compile", model_file, *SHAPE, "--devices", "cpu:0", "--costs", name)
    assert result.code == 2
    assert "expected a file, got a device" in result.err


@pytest.mark.parametrize("name", ["missing", "x" * 300, "a\0b", "caf\udce9"])
def test_impossible_file_names_are_refused_in_one_line(name):
    with pytest.raises(InputError) as caught:
        files.read_bytes(name, "D001")
    assert caught.value.code == "D001"
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "arguments",
    [("compile",), ("verify", "bundle", "--against"), ("compile", "model.onnx", *SHAPE, "--custom-op-library")],
    ids=lambda arguments: arguments[-1],
)
def test_a_name_that_is_too_long_exits_with_2(run_cli, model_file, bundle_copy, monkeypatch, arguments):
    monkeypatch.chdir(model_file.parent)
    result = run_cli(*arguments, "x" * 300)
    assert (result.code, result.out) == (2, ""), result.err
    assert "Traceback" not in result.err


@POSIX
def test_a_pipe_without_a_writer_is_refused_with_a_hint(pipe):
    with pytest.raises(InputError, match="nothing is written") as caught:
        files.read_bytes(pipe, "D001")
    assert caught.value.hint


def write_slowly(pipe, blocks):
    """Start a thread that writes to a pipe, slowly, and return it."""

    def write():
        with suppress(BrokenPipeError), open(pipe, "wb", buffering=0) as stream:
            for block in blocks:
                time.sleep(0.1)
                stream.write(block)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


@POSIX
def test_a_slowly_written_pipe_is_read_to_its_end(pipe, monkeypatch):
    monkeypatch.setattr(files, "PIPE_SECONDS", 30.0)
    thread = write_slowly(pipe, [b"a" * 100_000, b"", b"b"])
    assert files.read_bytes(pipe, "D001") == b"a" * 100_000 + b"b"
    thread.join()


@POSIX
def test_a_pipe_with_too_many_bytes_is_refused(pipe, monkeypatch):
    monkeypatch.setattr(files, "PIPE_SECONDS", 30.0)
    thread = write_slowly(pipe, [b"a" * 1000] * 3)
    with pytest.raises(InputError, match="expected at most 1500 bytes, got more"):
        files.read_bytes(pipe, "D001", max_bytes=1500)
    thread.join()


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="open files have no names")
def test_a_process_substitution_of_a_shell_is_read():
    read_end, write_end = os.pipe()
    os.write(write_end, b'{"a": 1}')
    os.close(write_end)
    assert files.read_json(f"/dev/fd/{read_end}", "D001", "anything") == {"a": 1}
    os.close(read_end)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
def test_files_are_read_completely_up_to_a_limit(tmp_path, size):
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    if size <= 100:
        assert files.read_bytes(path, "D001", 100) == bytes(size)
        return
    with pytest.raises(InputError, match=f"expected at most 100 bytes, got {size} bytes") as caught:
        files.read_bytes(path, "D001", 100)
    assert (caught.value.code, caught.value.where) == ("D001", str(path))


def test_files_of_unknown_size_are_read_completely_up_to_a_limit():
    path = "/proc/self/maps"
    if not os.path.exists(path):
        pytest.skip("no such files here")
    assert len(files.read_bytes(path, "D001")) > 1000
    with pytest.raises(InputError, match="got more"):
        files.read_bytes(path, "D001", 100)


@given(st.text(st.characters(codec=None, categories=None), max_size=2000))
def test_a_path_is_formatted_as_one_readable_line(path):
    text = files.format_path(path)
    assert text.isprintable()
    assert len(text) < 320
    text.encode()


# ---------------------------------------------------------------------------------------------- writing


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    (tmp_path / "file").write_bytes(b"old")

    def fail(stream):
        stream.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_file(tmp_path / "file", fail)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_the_longest_name_of_the_system_is_written(tmp_path):
    files.write_file(tmp_path / ("x" * 255), lambda stream: stream.write(b"new"))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new"]


@POSIX
def test_writing_to_a_pipe_without_a_reader_is_refused(pipe):
    with pytest.raises(UsageError, match="cannot write there") as caught:
        files.write_file(pipe, lambda stream: stream.write(b"data"))
    assert caught.value.code == "U032"


@POSIX
def test_writing_to_a_pipe_waits_for_a_reader(pipe, monkeypatch):
    monkeypatch.setattr(files, "PIPE_SECONDS", 30.0)
    with ThreadPoolExecutor() as pool:
        data = pool.submit(pipe.read_bytes)
        files.write_file(pipe, lambda stream: stream.write(b"data" * 100_000))
        assert data.result() == b"data" * 100_000
    assert pipe.is_fifo()


@pytest.fixture
def umask():
    """Set a umask that hides new files from other users."""
    old_umask = os.umask(0o027)
    yield
    os.umask(old_umask)


@POSIX
@pytest.mark.usefixtures("umask")
def test_concurrent_writes_do_not_change_the_umask(tmp_path, monkeypatch):
    mask = os.umask

    def set_umask(_):
        pytest.fail("the umask belongs to the whole process")

    monkeypatch.setattr(os, "umask", set_umask)
    with ThreadPoolExecutor(8) as pool:
        for index in range(64):
            pool.submit(files.write_file, tmp_path / str(index), lambda stream: stream.write(b"new"))
    monkeypatch.undo()
    assert mask(0o027) == 0o027
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
    assert len(list(tmp_path.iterdir())) == 64


@POSIX
@pytest.mark.usefixtures("umask")
def test_bundles_have_the_permissions_that_the_umask_leaves(run_cli, model_file, fast_pipeline, monkeypatch):
    monkeypatch.chdir(model_file.parent)
    assert run_cli("compile", "model.onnx", *SHAPE, "-o", "new/b", "--pipeline", fast_pipeline).code == 0
    permissions = {path.is_dir(): path.stat().st_mode & 0o777 for path in (Path("new"), *Path("new").rglob("*"))}
    assert permissions == {True: 0o750, False: 0o640}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("modle.onnx", "did you mean 'model.onnx'?"),
        ("model.onxx", "did you mean 'model.onnx'?"),
        ("0123456789.onnx", "known: model.onnx"),
        ("feeds.npz", ""),
        ("nowhere/model.onnx", "there is no folder nowhere"),
    ],
)
def test_a_missing_file_is_looked_for_in_its_folder(tmp_path, monkeypatch, name, hint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").touch()
    (tmp_path / "model.bundle").mkdir()
    with pytest.raises(InputError, match="there is no such file") as caught:
        files.open_input(Path(name), "M001")
    assert caught.value.hint == hint
