"""Try the states that are recognised in a decoder: two steps of a token each have to equal one step of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxplace.errors import Diagnostic, ModelError, OnnxplaceError, format_names
from onnxplace.feeds import Array, random_feeds
from onnxplace.machine import available_memory_bytes, make_runner, make_session_options, open_session
from onnxplace.model.decoders import BATCH, LLM_OPTION, NEW, PAST, TOTAL, Decoder
from onnxplace.model.lineage import RANDOM_OPERATORS
from onnxplace.model.model import Model, declaration_of, store_for_session
from onnxplace.model.tensors import tensor_size
from onnxplace.utils import find_largest_error, temporary_folder

Values = Mapping[str, Any]

# Tokens before those that are tried: another number, so that shapes tell them apart.
_PAST_TOKENS = 3
# Largest differences, relative to the largest magnitude: of float32, and of what is rounded to fewer bits.
_MAX_DIFFERENCE, _MAX_ROUNDED_DIFFERENCE = 1e-3, 0.05
# Weights of a model that is tried, as a part of the free memory: a session may copy them.
_MAX_WEIGHTS_SHARE = 0.4
_ROUNDED_TYPES = frozenset(map(TensorProto.DataType.Value, ("FLOAT16", "BFLOAT16", "INT8", "UINT8", "INT4", "UINT4")))


def try_states(decoder: Decoder, given: Mapping[str, str]) -> tuple[Diagnostic, ...]:
    """Raise ModelError for recognised states that are none, as runs show; return a note where they cannot tell.

    Args:
        decoder: The decoder, with its states.
        given: Output -> input of the states that the user gave: these are not judged.
    """
    if decoder.states.keys() <= given.keys():
        return ()
    try:
        with _open(decoder.model) as run:
            wrong, guesses = _compare_steps(decoder, run)
            doubt = f"it depends on what they take for {format_names(guesses)}" if wrong and guesses else ""
    except (OnnxplaceError, IndexError, ValueError) as problem:  # inputs of unexpected shapes
        wrong, doubt = [], getattr(problem, "message", str(problem))
    if doubt:
        hint = "compare two calls of a token each with one of both tokens"
        message = f"no run shows that its states hold: {doubt}"
        return (Diagnostic("S002", message, where=decoder.model.name, hint=hint),)
    if wrong := [output for output in wrong if output not in given]:
        message = f"{format_names(wrong)}: no states, as two calls with them differ from one call of both tokens"
        hint = "give states that hold by hand, which are not tried: --state OUT=IN; without --llm there are no others"
        raise ModelError("S002", message, where=LLM_OPTION, hint=hint)
    return ()


@contextmanager
def _open(model: Model) -> Iterator[Callable[[Values], dict[str, Any]]]:
    """Open a function from feeds to the outputs of a model by name."""
    if sum(map(tensor_size, model.initializers.values())) > _MAX_WEIGHTS_SHARE * available_memory_bytes():
        raise ModelError("S002", "the free memory is too small to open the model")
    with temporary_folder() as folder:
        source, entries = store_for_session(model, folder)
        options = make_session_options([0], "none", {**entries, "session.disable_prepacking": "1"})
        run = make_runner(open_session(source, options, where=model.name), model.name)
        yield lambda feeds: dict(zip((value.name for value in model.outputs), run(feeds)))


def _compare_steps(decoder: Decoder, run: Callable[[Values], dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the outputs that are not the next states, and what may be wrong with the runs that say so.

    Raises ModelError if the model does not run, or takes only as many tokens as in one step.
    """
    states, new = decoder.states, decoder.symbols.get(NEW, "1")
    count = int(new) if new.isdecimal() else 1
    feeds, guesses = _draw_feeds(decoder, count if new.isdecimal() else 2 * count)
    first = run(_cut_feeds(decoder, feeds, 0, count))
    if wrong := [output for output, name in states.items() if not _may_follow(feeds[name], first[output], count)]:
        return wrong, []
    if new.isdecimal():
        raise ModelError("S002", "the number of new tokens is fixed")
    both = run(_cut_feeds(decoder, feeds, 0, 2 * count))
    try:
        later = run({**_cut_feeds(decoder, feeds, count, count), **{name: first[out] for out, name in states.items()}})
    except ModelError:
        return [*states], guesses
    is_rounded = any(tensor.data_type in _ROUNDED_TYPES for tensor in decoder.model.initializers.values())
    limit = _MAX_ROUNDED_DIFFERENCE if is_rounded else _MAX_DIFFERENCE
    arrays = {name: value for name, value in both.items() if isinstance(value, np.ndarray)}
    compared = [name for name, value in arrays.items() if name in states or value.dtype.kind == "f"]
    different = [name for name in compared if not _are_close(later[name], both[name], limit)]
    wrong = [name for name in different if name in states] or [*states] * bool(different)
    return wrong, guesses + sorted(RANDOM_OPERATORS & {node.op_type for node in decoder.model.nodes})


def _may_follow(before: Array, after: Array, count: int) -> bool:
    """Return whether a state has the shape of the one before, or is the one before with new tokens after it."""
    growths = [new - old for old, new in zip(before.shape, after.shape)]
    if before.ndim != after.ndim or not any(growths):
        return before.shape == after.shape
    axis = next(axis for axis, growth in enumerate(growths) if growth)
    is_longer = sum(map(abs, growths)) == growths[axis] == count
    return is_longer and _are_close(before, after.take(range(before.shape[axis]), axis), _MAX_ROUNDED_DIFFERENCE)


def _are_close(one: Array, other: Array, limit: float) -> bool:
    """Return whether arrays agree; of two tokens the last one counts where one array has a single one."""
    for axis, sizes in enumerate(zip(one.shape, other.shape)):
        other = other.take([-1], axis) if sizes == (1, 2) else other
    if one.shape != other.shape or one.dtype.kind in "OSU":
        return one.shape == other.shape
    return find_largest_error(one, other)[1] <= limit


# --------------------------------------------------------------------------------------------------------------- inputs


def _draw_feeds(decoder: Decoder, count: int) -> tuple[dict[str, Any], list[str]]:
    """Return inputs of so many tokens after random states, and the names of those whose meaning is a guess."""
    few = {decoder.symbols.get(role): size for role, size in ((BATCH, 1), (NEW, count), (PAST, _PAST_TOKENS))}
    sizes = {name: few.get(name, size) for name, size in decoder.sizes.items()}
    states, guesses = set(decoder.states.values()), list[str]()
    declared = [declaration_of(value, decoder.model) for value in decoder.model.inputs]
    feeds = random_feeds(
        [replace(item, optional=item.optional and item.name not in states) for item in declared], sizes
    )
    for name, value in feeds.items():
        axes = {role: axis for axis, role in decoder.roles.get(name, {}).items()}
        if "mask" in name or value.dtype.kind == "b":
            feeds[name] = np.ones_like(value)
            is_sure = value.ndim < 3 and (TOTAL not in axes or value.shape[axes[TOTAL]] == _PAST_TOKENS + count)
            guesses += [] if is_sure else [name]
        elif value.dtype.kind in "iu" and NEW in axes:
            tokens = np.arange(value.shape[axes[NEW]]) + (_PAST_TOKENS if "position" in name else 0)
            tokens = np.expand_dims(tokens, [*range(1, value.ndim - axes[NEW])])
            feeds[name] = np.broadcast_to(tokens, value.shape).astype(value.dtype)
        elif value.dtype.kind in "iu" and (name not in states or value.ndim < 2):
            feeds[name] = np.full_like(value, _PAST_TOKENS)
            guesses += [] if name in states else [name]
    return feeds, guesses


def _cut_feeds(decoder: Decoder, feeds: Values, start: int, count: int) -> dict[str, Any]:
    """Return the inputs of some of the new tokens."""
    result, total = dict(feeds), _PAST_TOKENS + start + count
    for name in feeds.keys() - decoder.states.values():
        for axis, role in decoder.roles.get(name, {}).items():
            if role == NEW:
                result[name] = result[name].take(range(start, start + count), axis)
            elif role == TOTAL and result[name].shape[axis] - total in (0, 1):  # not of a cache of fixed length
                result[name] = result[name].take(range(total), axis)
    return result
