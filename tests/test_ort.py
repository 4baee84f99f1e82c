"""Broken installations of ONNX Runtime are errors that name the wheels and the way out."""

import os
import subprocess
import sys

import pytest

from onnxplace.utils.ort import WHEELS


def run_devices(folder):
    """Run `onnxplace devices` where `folder` comes before the installed packages."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "ORT_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "onnxplace", "devices"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=folder)


def add_distribution(folder, name):
    """Make a wheel look installed, as `pip` records it."""
    record = folder / f"{name.replace('-', '_')}-1.27.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.27.0\n")


@pytest.mark.parametrize("names", [("onnxruntime", "onnxruntime-webgpu"), ("onnxruntime-gpu", "onnxruntime-webgpu")])
def test_two_wheels_are_an_error_that_names_them(tmp_path, names):
    for name in names:
        add_distribution(tmp_path, name)
    result = run_devices(tmp_path)
    first = result.stderr.splitlines()[0]
    assert result.returncode != 0
    assert first.startswith("error[R001]")
    assert all(name in first.split() for name in names)
    assert "installed and overwrite each other" in first
    assert "Traceback" not in result.stderr
    assert f"pip uninstall -y {first.partition(': ')[2].partition(' are ')[0].replace(' and ', ' ')}" in result.stderr
    assert "onnxplace[webgpu]" in result.stderr


def test_a_package_that_lost_its_files_to_another_wheel_is_an_error(tmp_path):
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").touch()
    result = run_devices(tmp_path)
    assert result.returncode != 0
    assert result.stderr.startswith("error[R001]")
    assert f"pip uninstall -y {' '.join(WHEELS)}" in result.stderr
    assert "Traceback" not in result.stderr
