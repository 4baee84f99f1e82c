"""A full disk ends a command with one line, and leaves no files."""

import errno
import sys
import tempfile
from pathlib import Path

import pytest

from onnxplace.bundle import staging
from tests.support.bad_input import SHAPE, contents, run_script

pytestmark = pytest.mark.usefixtures("no_gpus")


@pytest.mark.usefixtures("compiled")  # so that numba has its kernels on disk and need not write them
@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits there")
def test_a_file_that_outgrows_its_limit_ends_the_compilation_without_a_trace(model_file, fast_pipeline):
    folder = model_file.parent
    process = run_script(folder, "compile", model_file, *SHAPE, "--pipeline", fast_pipeline, LIMIT="20000")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (4, "")
    assert "no space left" in err
    assert "model.bundle" in err
    assert "another -o" in err
    assert "Traceback" not in err
    assert set(contents(folder)) == {"model.onnx", "tmp"}


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("method", ["mkdir", "write_bytes", "write_text", "rename_new"])
def test_a_full_disk_is_reported_and_leaves_no_files(refused, model_file, fast_pipeline, monkeypatch, method):
    mkdir = Path.mkdir
    monkeypatch.setattr(staging if method == "rename_new" else Path, method, full_disk)
    if method == "mkdir":  # the folder of the segments, not the one the bundle goes to
        monkeypatch.setattr(Path, "mkdir", lambda path, *a, **k: (mkdir if k else full_disk)(path, *a, **k))
    options = ("--pipeline", fast_pipeline)
    refused(4, ("model.bundle", "no space left", "another -o"), "compile", model_file, *SHAPE, *options)


@pytest.mark.parametrize("method", ["write_text", "exchange_names"])
def test_a_full_disk_leaves_the_bundle_that_force_would_have_replaced(
    refused, model_file, bundle_copy, fast_pipeline, monkeypatch, method
):
    monkeypatch.setattr(staging if method == "exchange_names" else Path, method, full_disk)
    options = ("-o", bundle_copy, "--pipeline", fast_pipeline, "--force")
    refused(4, ("no space left",), "compile", model_file, *SHAPE, *options)


def test_a_full_disk_leaves_no_parent_folders(refused, model_file, fast_pipeline, monkeypatch):
    monkeypatch.setattr(Path, "write_text", full_disk)
    options = ("-o", "new/folder/bundle", "--pipeline", fast_pipeline)
    refused(4, ("no space left",), "compile", model_file, *SHAPE, *options)


def test_the_profiler_reports_a_full_disk_for_temporary_files(refused, model_file, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryDirectory", full_disk)
    refused(4, ("no space left",), "compile", model_file, *SHAPE)
