"""What people have as a model: an ONNX file, a folder with one, or what a plugin makes an ONNX file of."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxplace.errors import Diagnostic, ModelError, UsageError, format_names
from onnxplace.model.decoders import recognise_decoder, try_states
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model
from onnxplace.model.state_binding import StateRequest, bind_states
from onnxplace.plugins import ask_plugins
from onnxplace.utils.file_locks import temporary_folder

if TYPE_CHECKING:
    from onnx import ModelProto

MODEL_FILE = "model.onnx"
# The folders of a model in which exporters put it, its own first.
_SUBFOLDERS = ("", "onnx")
# Files of models of Hugging Face's libraries that are not in ONNX.
_UNEXPORTED = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class ModelSource:
    """A model as it can be loaded."""

    path: str | Path | ModelProto
    """What `onnxplace.model.load` takes."""
    origin: Any
    """What the user gave; for a folder the file in it."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of symbolic dimensions in example inputs, which hold unless the user gives others."""
    diagnostics: tuple[Diagnostic, ...] = ()


@contextmanager
def open_source(
    model: Any, example_inputs: Sequence[object] | Mapping[str, object] | None = None
) -> Iterator[ModelSource]:
    """Find the file of a model, or convert the model to one that is kept until the end.

    Args:
        model: Path of an ONNX file or of a folder with one; an onnx.ModelProto; or what a plugin converts, such as a
            program or a module of torch.
        example_inputs: The arguments with which a module is traced.

    Raises:
        UsageError: Something else was given, or what the plugin needs is missing.
        ModelError: A folder has no model, or several; or the model cannot be converted.
        PluginError: The plugin has failed.
    """
    from onnx import ModelProto

    is_path = isinstance(model, (str, Path))
    is_onnx = is_path and (Path(model).suffix.lower() == ".onnx" or os.path.isdir(model))
    if not is_onnx and not isinstance(model, ModelProto):
        with temporary_folder() as folder:
            path = folder / MODEL_FILE
            sizes: Mapping[str, int] | None = ask_plugins("sources", model, path, example_inputs)
            if sizes is not None:
                yield ModelSource(path, model, sizes)
                return
    if not is_path and not isinstance(model, ModelProto):
        message = f"expected a path or onnx.ModelProto, got {type(model).__name__}"
        raise UsageError("U054", message, hint="onnx.load reads a file, onnxplace.compile takes its path too")
    if example_inputs is not None:
        hint = "give real inputs of an ONNX model as inputs={name: array}"
        raise UsageError("U042", "example_inputs are for torch modules", where="example_inputs", hint=hint)
    yield find_in_folder(Path(model)) if is_path and os.path.isdir(model) else ModelSource(model, model)


def find_in_folder(folder: Path) -> ModelSource:
    """Return the model in a folder, with a note that names it.

    It is the only one, or `model.onnx` next to variants of it, such as `model_quantized.onnx`. Exporters and model hubs
    put it into the folder itself or into `onnx` below it.

    Raises:
        ModelError: The folder has no model, or several.
    """
    files = [file for name in _SUBFOLDERS for file in sorted((folder / name).glob("*.onnx"))]
    if not files and any(file for pattern in _UNEXPORTED for file in folder.glob(pattern)):
        hint = f"export them: optimum-cli export onnx --model {folder} {folder.resolve().name}-onnx"
        raise ModelError("M003", "it is a folder of weights, without an ONNX model", where=str(folder), hint=hint)
    if not files:
        message = "it cannot be read: it is a folder (directory) without a model (model.onnx, onnx/model.onnx)"
        raise ModelError("M001", message, where=str(folder))
    chosen = next((file for file in files if file.name == MODEL_FILE), files[0])
    others = [str(file.relative_to(folder)) for file in files if file is not chosen]
    name = chosen.relative_to(folder)
    if any(not Path(other).name.startswith("model") for other in others) or (others and chosen.name != MODEL_FILE):
        message = f"it is a folder with several models: {format_names([str(name), *others])}"
        hint = f"name one of them: onnxplace compile {chosen}"
        raise ModelError("M003", message, where=str(folder), hint=hint)
    hint = f"others are there, too: {format_names(others, quoted=False)}" if others else ""
    note = Diagnostic("M003", f"its model {str(name)!r} is taken", where=str(folder), hint=hint)
    return ModelSource(chosen, chosen, diagnostics=(note,))


def bind_source(
    source: ModelSource,
    model: Model,
    *,
    shape: Mapping[str, int | Sequence[int]] | None,
    inputs: Mapping[str, Any] | None,
    state: StateRequest,
    llm: bool,
) -> tuple[Model, tuple[Diagnostic, ...]]:
    """Return a loaded model with sizes, samples and states, and notes on what was not given and is assumed.

    Args:
        source: Where the model is from.
        model: The model.
        shape: Sizes of symbolic dimensions that the user gave; of several, costs are for the first.
        inputs: Samples, which determine all sizes.
        state: Carried states that the user gave.
        llm: Whether states and sizes of a decoder are recognised.
    """
    several = {
        name: tuple(size) if isinstance(size, list | tuple) and size else (size,)
        for name, size in (shape or {}).items()
    }
    given, notes = {name: sizes[0] for name, sizes in several.items()}, (*source.diagnostics, *model.notes)
    if llm:
        decoder = recognise_decoder(model, state, given)
        by_hand = {output: name for name, output in bind_states(model, state).states.items()}
        bind_states(decoder.model, decoder.states)  # types and shapes are checked before they are tried
        notes = (*notes, decoder.note, *try_states(decoder, by_hand))
        model, state = decoder.model, decoder.states
        given = given if inputs else dict(decoder.sizes)
    assumed = {} if inputs or llm else {name: size for name, size in source.sizes.items() if name not in given}
    if assumed:
        text = ", ".join(f"{name}={size}" for name, size in assumed.items())
        notes += (Diagnostic("M003", f"sizes of its example inputs hold: {text}", hint="--shape gives others"),)
        given |= assumed
    others = [{**given, **dict(zip(several, sizes))} for sizes in list(product(*several.values()))[1:]]
    other_sizes = tuple(bind(model, sizes, inputs or {}).dimensions for sizes in others)
    return bind_states(replace(bind(model, given, inputs or {}), other_sizes=other_sizes), state), notes
