"""What people have as a model: an ONNX file, a folder with one, or what a plugin makes an ONNX file of."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxplace.errors import Diagnostic, ModelError, OnnxplaceError, UsageError, format_names
from onnxplace.feeds.dimensions import drop_derived_sizes
from onnxplace.model.decoders import recognise_decoder, try_states
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model
from onnxplace.model.state_binding import StateRequest, bind_states
from onnxplace.plugins import ask_plugins
from onnxplace.utils.file_locks import temporary_folder

if TYPE_CHECKING:
    from onnx import ModelProto

MODEL_FILE = "model.onnx"
# How often a decoder is called for a token, next to a prompt.
TOKENS_PER_PROMPT = 100.0
# A weight beyond it is a mistake, and sums of such weights would lose the others, or overflow.
MAX_WEIGHT = 1e9
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


Sizes = Mapping[str, int | Sequence[int]]
SizesRequest = Sizes | Sequence[object] | None
"""Sizes of symbolic dimensions; or several, each alone or as a pair with its weight: how often it is."""


@dataclass(frozen=True)
class SizedModel:
    """A model with the sizes of one kind of request, and how often these are next to others."""

    model: Model
    weight: float = 1.0

    @contextmanager
    def name_in_errors(self) -> Iterator[None]:
        """Let errors say at which size they are."""
        try:
            yield
        except OnnxplaceError as problem:
            sizes = ",".join(f"{name}={size}" for name, size in drop_derived_sizes(self.model.dimensions).items())
            where = ": ".join(filter(None, (f"--shape {sizes}", problem.where)))
            raise type(problem)(problem.code, problem.message, where=where, hint=problem.hint) from problem


def list_sizes(shape: SizesRequest) -> list[tuple[dict[str, int], float]]:
    """Return the sizes of each kind of request with their weights; of dimensions with several sizes, all combinations.

    Raises UsageError for a weight that is no number above 0, or beyond `MAX_WEIGHT`.

    >>> list_sizes({"batch": [1, 8]})
    [({'batch': 1}, 1.0), ({'batch': 8}, 1.0)]
    """
    found = list[tuple[dict[str, int], float]]()
    for item in [shape or {}] if isinstance(shape, Mapping) or not shape else shape:
        sizes, weight = item if isinstance(item, tuple) and len(item) == 2 else (item, 1.0)
        is_number = isinstance(weight, (int, float)) and 0 < weight <= MAX_WEIGHT
        if not is_number or not isinstance(sizes, Mapping):
            message = f"expected sizes, or a pair of them and a weight above 0, at most {MAX_WEIGHT:g}, got {item!r}"
            hint = 'such as [{"batch": 1}, ({"batch": 8}, 0.1)]; --shape batch=1 --shape batch=8=0.1'
            raise UsageError("U005", message, where="--shape", hint=hint)
        choices = {
            name: tuple(size) if isinstance(size, list | tuple) and size else (size,) for name, size in sizes.items()
        }
        found += [(dict(zip(choices, chosen)), float(weight)) for chosen in product(*choices.values())]
    return found


def require_one_size(sized: Sequence[SizedModel], given: object, reason: str) -> None:
    """Raise UsageError if something is given that goes with one size, and a model has several."""
    if given and len(sized) > 1:
        hint = "give the most frequent size, with --llm also the number of new tokens; others run, too"
        raise UsageError("U042", f"there are {len(sized)} sizes, and {reason}", where="--shape", hint=hint)


def bind_source(
    source: ModelSource,
    model: Model,
    *,
    shape: SizesRequest,
    inputs: Mapping[str, Any] | None,
    state: StateRequest,
    llm: bool,
) -> tuple[list[SizedModel], tuple[Diagnostic, ...]]:
    """Return a loaded model with sizes, samples and states, for each kind of request, and notes on what is assumed.

    Of a decoder whose sizes are left open, the first one is a token, the second one a prompt.

    Args:
        source: Where the model is from.
        model: The model.
        shape: Sizes of symbolic dimensions that the user gave.
        inputs: Samples, which determine all sizes.
        state: Carried states that the user gave.
        llm: Whether states and sizes of a decoder are recognised.
    """
    requests, notes = list_sizes(shape), (*source.diagnostics, *model.notes)
    is_several = len(requests) > 1
    if inputs and is_several:
        message = "--inputs has arrays of one size, and --shape gives several"
        raise UsageError("U042", message, where="--shape", hint="omit one of the two")
    if llm:
        decoder = recognise_decoder(model, state, requests[0][0])
        by_hand = {output: name for name, output in bind_states(model, state).states.items()}
        bind_states(decoder.model, decoder.states)  # types and shapes are checked before they are tried
        notes = (*notes, decoder.note, *try_states(decoder, by_hand))
        model, state = decoder.model, decoder.states
        if not inputs:
            prompts = [] if is_several else decoder.list_prompt_sizes(requests[0][0])
            requests = [(decoder.complete(sizes), weight) for sizes, weight in requests]
            requests = [(sizes, TOKENS_PER_PROMPT * weight if prompts else weight) for sizes, weight in requests]
            requests += [(sizes, 1.0) for sizes in prompts]
    assumed = {} if inputs or llm else dict(source.sizes)
    if assumed := {name: size for name, size in assumed.items() if any(name not in item for item, _ in requests)}:
        text = ", ".join(f"{name}={size}" for name, size in assumed.items())
        notes += (Diagnostic("M003", f"sizes of its example inputs hold: {text}", hint="--shape gives others"),)
    sized = [
        SizedModel(bind_states(bind(model, {**assumed, **sizes}, inputs or {}), state), weight)
        for sizes, weight in requests
    ]
    for item in sized if is_several else ():
        with item.name_in_errors():
            item.model.input_shapes()  # no size is missing
    different = {tuple(sorted(item.model.dimensions.items())): item for item in reversed(sized)}
    return [item for item in sized if item in different.values()], notes
