"""Without PyTorch, the export says which extra it needs."""

import builtins
import subprocess
import sys

import pytest

import onnxplace
from onnxplace.errors import UsageError


def test_importing_onnxplace_does_not_import_torch():
    names = "('torch', 'onnxplace_training')"
    script = f"import sys, onnxplace, onnxplace.cli.app; print(*(name in sys.modules for name in {names}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.fixture(params=["torch", "onnxscript"])
def missing(request, monkeypatch):
    """A package of the extra that cannot be imported."""
    real_import = builtins.__import__

    def refuse(name, *arguments, **options):
        if name.split(".")[0] == request.param:
            raise ModuleNotFoundError(f"No module named {request.param!r}", name=request.param)
        return real_import(name, *arguments, **options)

    for name in [name for name in sys.modules if name == request.param or name.startswith("onnxplace_training.torch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setitem(sys.modules, request.param, None)  # for `import_module`
    return request.param


@pytest.mark.parametrize("missing", ["torch"], indirect=True)
def test_without_torch_the_error_names_the_extra(missing):
    import onnxplace_training

    with pytest.raises(UsageError, match=r"U110.*not installed") as caught:
        _ = onnxplace_training.export_training_step
    assert "pip install 'onnxplace[torch]'" in caught.value.hint


def test_a_program_of_torch_needs_the_extra_and_the_error_names_the_file(missing, run_cli, tmp_path):
    if missing == "onnxscript":
        pytest.importorskip("torch")
    (tmp_path / "model.pt2").write_bytes(b"PK")
    for command in ("compile", "plan"):
        result = run_cli(command, tmp_path / "model.pt2")
        assert result.code == 2
        name = "PyTorch" if missing == "torch" else missing
        assert f"error[U110] {tmp_path / 'model.pt2'}: {name} is not installed, which reads programs of" in result.err
        assert "pip install 'onnxplace[torch]'" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


def test_a_program_that_is_not_there_is_reported_without_torch(run_cli, tmp_path):
    result = run_cli("compile", tmp_path / "model.pt2")
    assert (result.code, result.err.split(":")[0]) == (2, f"error[M001] {tmp_path / 'model.pt2'}")


def test_example_inputs_without_a_torch_module_are_refused(tmp_path):
    with pytest.raises(UsageError, match="example_inputs are for torch modules"):
        onnxplace.compile(tmp_path / "model.onnx", example_inputs=(1,))
    with pytest.raises(UsageError, match="for example_inputs, got 3") as caught:
        onnxplace.compile(tmp_path / "model.onnx", example_inputs=3)
    assert caught.value.hint == "write example_inputs=(x, y), or {'x': x} by name"


def test_other_names_do_not_exist():
    import onnxplace_training

    exports = ["convert_to_onnx", "export_training_step"]
    running = ["BatchSampler", "LossCurve", "Schedule", "StepResult", "Trainer", "make_schedule", "require_plot_format"]
    files = ["ArrayFile", "map_arrays", "write_arrays"]
    assert onnxplace_training.__all__ == sorted(exports + running + files)
    with pytest.raises(AttributeError):
        _ = onnxplace_training.nothing
