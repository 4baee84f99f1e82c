"""Without PyTorch, the export says which extra it needs."""

import builtins
import subprocess
import sys

import pytest

from onnxplace.errors import UsageError


def test_importing_onnxplace_does_not_import_torch():
    script = "import sys, onnxplace, onnxplace.cli.app; print('torch' in sys.modules, 'onnxplace.torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_without_torch_the_error_names_the_extra(monkeypatch):
    real_import = builtins.__import__

    def refuse(name, *arguments, **options):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real_import(name, *arguments, **options)

    for name in [name for name in sys.modules if name == "torch" or name.startswith("onnxplace.torch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    import onnxplace.torch

    with pytest.raises(UsageError, match=r"U110.*not installed") as caught:
        _ = onnxplace.torch.export_training_step
    assert "pip install 'onnxplace[torch]'" in caught.value.hint


def test_other_names_do_not_exist():
    import onnxplace.torch

    assert onnxplace.torch.__all__ == ["export_training_step"]
    with pytest.raises(AttributeError):
        _ = onnxplace.torch.nothing
