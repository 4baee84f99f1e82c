"""Fixtures of the tests that write bundles."""

import pytest

import onnxplace
from onnxplace.passes import emit
from onnxplace.utils import renames as renames_module
from tests.bundle.staging_checks import DEVICES, LINUX, SHAPE


@pytest.fixture
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
