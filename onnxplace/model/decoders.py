"""Recognise a decoder: which outputs its next call takes, and which axes are the batch, new tokens and past tokens.

Runs then try the states that were recognised: two steps of a token each have to equal one step of both.

Keys and values of past tokens are found by the names that exporters give them. Where outputs are named after operators,
the graph tells: an operator that appends to a cache reads it and returns it. The input of new tokens names the axes of
all others, because exporters may give one size another name in each input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import TensorProto, ValueInfoProto

from onnxplace.errors import Diagnostic, ModelError, OnnxplaceError, UsageError, format_names
from onnxplace.feeds.feeds import Array, Declared
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.machine.hardware import available_memory_bytes
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.machine.ort_values import make_runner
from onnxplace.model.lineage import RANDOM_OPERATORS
from onnxplace.model.model import Model, declaration_of, store_for_session
from onnxplace.model.state_binding import OPTION, StateRequest, bind_states
from onnxplace.model.tensors import tensor_size
from onnxplace.utils.differences import find_largest_error
from onnxplace.utils.file_locks import temporary_folder

LLM_OPTION = "--llm"
# Input -> output whose value it takes in the next call; the first spelling whose output exists counts.
_SPELLINGS = (
    (r"past_key_values(.*)", r"present\1"),  # optimum, transformers.js, ONNX Runtime GenAI
    (r"past(.*)_in", r"past\1_out"),  # Qualcomm AI Hub
    (r"past(.*)", r"present\1"),  # converters of ONNX Runtime, examples of onnxplace
    (r"input\.cache\.(.*)", r"output.cache.\1"),  # the exporters in transformers
)
_PAST_NAME = re.compile(r"past|cache")
# Operators that return a cache with the new tokens: any input of theirs as their one output, or keys and values from
# this input on as the outputs after the first.
_CACHE_UPDATES = frozenset({"Concat", "ScatterND", "TensorScatter"})
_FIRST_PAST = {"Attention": 4, "GroupQueryAttention": 3, "MultiHeadAttention": 6}
# What comes from an encoder has its own length.
_CONTEXT_NAME = re.compile(r"encoder|cross")
_TOKEN_NAME = re.compile(r"input_ids|inputs_embeds|tokens|ids$")
# Keys and values have a batch, heads or tokens, and a width.
_MIN_CACHE_RANK = 3
_TOKENS_RANK = 2
# What torch calls a size that has no name.
_TORCH_SYMBOL = re.compile(r"[su][0-9]+")
# Roles of axes, with the name that an axis without one gets, and the size of one step of one conversation. All decoders
# have room for this many past tokens.
BATCH, NEW, PAST, TOTAL = "batch", "sequence", "past", "total"
_STEP_SIZES = {BATCH: 1, NEW: 1, PAST: 128}


@dataclass(frozen=True)
class Decoder:
    """A decoder with known states and sizes."""

    model: Model
    """The model; equal sizes of its inputs have equal names."""
    states: Mapping[str, str]
    """Output -> input that takes its value in the next call."""
    sizes: Mapping[str, int]
    """Symbolic dimension -> size: as given, or of one step of one conversation."""
    note: Diagnostic
    """What was recognised, in one line."""
    roles: Mapping[str, Mapping[int, str]]
    """Input -> axis -> role, of axes that have one."""
    symbols: Mapping[str, str]
    """Role -> name of its axes, or their size."""

    def complete(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of a request, where those that are not given are of one step of one conversation."""
        return {**self.sizes, **sizes}

    def list_prompt_sizes(self, given: Mapping[str, int]) -> list[dict[str, int]]:
        """Return the sizes of a prompt as long as the past of a step; nothing where sizes are fixed, or given."""
        new, past = self.symbols.get(NEW, ""), self.symbols.get(PAST, "")
        if new in given or not {new, past} <= self.sizes.keys():
            return []
        return [{**self.sizes, new: max(self.sizes[past], 1), past: 0}]


def recognise_decoder(model: Model, request: StateRequest, sizes: Mapping[str, int]) -> Decoder:
    """Recognise states and axes of a decoder; those that the user gives are kept.

    Raises:
        UsageError: A given state contradicts a recognised one.
        ModelError: The model is no decoder, or the message names the part that is not recognised.
    """
    declared = [declaration_of(value, model) for value in model.inputs]
    inputs = {item.name: item for item in declared if item.dtype.startswith("tensor(") and item.shape is not None}
    states = _merge_states(dict(_find_states(model, inputs)), bind_states(model, request).states)
    if not states:
        message = (
            "not a decoder: no output returns an input with new tokens, as present.0.key does past_key_values.0.key"
        )
        hint = "omit --llm, or export the model with its cache (optimum: --task text-generation-with-past)"
        raise ModelError("S002", message, where=LLM_OPTION, hint=f"{hint}, or give --state OUT=IN")
    if lost := [name for name, item in inputs.items() if name not in states and _may_be_cache(item)]:
        others = format_names(value.name for value in model.outputs if value.name not in states.values())
        hint = f"name it: --state OUT={lost[0]} (other outputs: {others}); or omit --llm, and give --state and --shape"
        raise ModelError("S002", f"no output is recognised for {format_names(lost)}", where=LLM_OPTION, hint=hint)
    tokens = _find_tokens(item for name, item in inputs.items() if name not in states)
    roles = {name: _list_roles(item, tokens, name in states) for name, item in inputs.items()}
    names = _choose_names(inputs, roles, tokens)
    named = tuple(_rename_axes(value, roles.get(value.name, {}), names) for value in model.inputs)
    step = {names[role]: size for role, size in _STEP_SIZES.items() if role in names and not names[role].isdecimal()}
    return Decoder(
        model=replace(model, inputs=named),
        states=MappingProxyType({output: name for name, output in states.items()}),
        sizes=MappingProxyType({**step, **sizes}),
        note=_describe(model, states, tokens, {**step, **sizes}),
        roles=MappingProxyType(roles),
        symbols=MappingProxyType(names),
    )


# --------------------------------------------------------------------------------------------------------------- states


def _find_states(model: Model, inputs: Mapping[str, Declared]) -> Iterator[tuple[str, str]]:
    """Yield each cache (input, output), by names, or else by the operator that appends to it."""
    outputs = {value.name: declaration_of(value, model) for value in model.outputs}
    unnamed = {}
    for name, item in inputs.items():
        matches = [(match, output) for expression, output in _SPELLINGS if (match := re.fullmatch(expression, name))]
        spelled = next((text for match, output in matches if (text := match.expand(output)) in outputs), None)
        if spelled is not None:
            yield name, spelled
        elif len(item.shape or ()) >= _MIN_CACHE_RANK and "float" in item.dtype:
            unnamed[name] = item
    for node in model.nodes:
        pairs = [(name, node.output[0]) for name in node.input] if node.op_type in _CACHE_UPDATES else []
        if first := _FIRST_PAST.get(node.op_type):
            pairs = [*zip(node.input[first : first + 2], node.output[1:3])]
        yield from ((name, output) for name, output in pairs if name in unnamed and output in outputs)


def _may_be_cache(item: Declared) -> bool:
    return bool(_PAST_NAME.search(item.name)) and len(item.shape or ()) >= _MIN_CACHE_RANK and not item.optional


def _merge_states(recognised: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return input -> output of all states; raises UsageError for contradictions."""
    for name, output in given.items():
        if (other := recognised.get(name, output)) != output:
            message = f"--llm recognises output {other!r} for input {name!r}, not {output!r}"
            raise UsageError("S002", message, where=f"{OPTION} {output}={name}", hint="omit one of the two options")
    return {**recognised, **given}


# ----------------------------------------------------------------------------------------------------------------- axes


def _find_tokens(inputs: Iterator[Declared]) -> Declared:
    """Return the input of new tokens; raises ModelError if there is none."""
    candidates = [item for item in inputs if not re.search("mask|position", item.name)]
    named = [item for item in candidates if _TOKEN_NAME.search(item.name)]
    integers = [item for item in candidates if "int" in item.dtype and len(item.shape or ()) == _TOKENS_RANK]
    if tokens := next(iter([*named, *integers]), None):
        return tokens
    known = format_names(item.name for item in candidates) or "none"
    message = f"no input takes new tokens, as input_ids [batch, sequence]; others than states: {known}"
    hint = "omit --llm, and give your own --state OUT=IN and --shape"
    raise ModelError("S002", message, where=LLM_OPTION, hint=hint)


def _list_roles(item: Declared, tokens: Declared, is_state: bool) -> dict[int, str]:
    """Return axis -> role of the axes of an input that have one."""
    shape, sizes = item.shape or (), tokens.shape or ()
    rank = len(shape)
    if _CONTEXT_NAME.search(item.name):
        return {}
    if is_state:
        return _list_cache_roles(shape, has_batch=len(sizes) >= _TOKENS_RANK and not isinstance(sizes[0], int))
    if "mask" in item.name:
        layout = {1: (TOTAL,), 3: (BATCH, NEW, TOTAL), 4: (BATCH, "", NEW, TOTAL)}.get(rank, (BATCH, TOTAL))
    elif item is tokens and "int" not in item.dtype:
        layout = (BATCH, NEW, "")  # embedded tokens
    elif item is tokens or "position" in item.name or (rank == _TOKENS_RANK and "int" in item.dtype):
        layout = (*("",) * (rank - _TOKENS_RANK), BATCH, NEW)[-rank:]
    else:
        return {}
    return {axis: role for axis, role in enumerate(layout[:rank]) if role}


def _list_cache_roles(shape: tuple[int | str | None, ...], *, has_batch: bool) -> dict[int, str]:
    """Return the roles of the open axes of a cache: the batch first, past tokens last."""
    axes = [axis for axis, entry in enumerate(shape) if not isinstance(entry, int)]
    if has_batch and axes and (len(axes) > 1 or axes[0] == 0):  # a cache of fixed length may have an open batch only
        return {axes[0]: BATCH} | dict.fromkeys(axes[1:][-1:], PAST)
    return dict.fromkeys(axes[-1:], PAST)


def _choose_names(
    inputs: Mapping[str, Declared], roles: Mapping[str, Mapping[int, str]], tokens: Declared
) -> dict[str, str]:
    """Return role -> name of its axes, or their size, as the tokens or else the first input have it."""
    names: dict[str, str] = {}
    for item in (tokens, *inputs.values()):
        for axis, role in roles[item.name].items():
            if role != TOTAL:
                names.setdefault(role, _choose_name((item.shape or ())[axis], role))
    if {PAST, NEW} <= names.keys():
        names[TOTAL] = f"{names[PAST]} + {names[NEW]}"
    return names


def _choose_name(entry: int | str | None, role: str) -> str:
    """Return the name of an axis, or its size; that of its role, if it has none that tells a person something."""
    if isinstance(entry, str) and (not entry.isidentifier() or _TORCH_SYMBOL.fullmatch(entry)):
        return role
    return role if entry is None else str(entry)


def _rename_axes(value: ValueInfoProto, roles: Mapping[int, str], names: Mapping[str, str]) -> ValueInfoProto:
    """Return an input whose open axes have the names of their roles."""
    renamed = deepcopy(value)
    for axis, role in roles.items():
        size = renamed.type.tensor_type.shape.dim[axis]
        if not size.HasField("dim_value") and role in names:
            size.dim_param = names[role]
    return renamed


def _describe(model: Model, states: Mapping[str, str], tokens: Declared, sizes: Mapping[str, int]) -> Diagnostic:
    """Return the note on what was recognised."""
    name, output = next(iter(states.items()))
    text = ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())
    message = f"a decoder with {len(states)} states ({output}={name}, ...), new tokens in {tokens.name!r}, sizes {text}"
    return Diagnostic("S002", message, where=model.name, hint="--shape gives others, such as the longest cache")


# ----------------------------------------------------------------------------------------------------- trials of states


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
    """Return the outputs that are not the next states, and what may be wrong with the runs that show it.

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


def _draw_feeds(decoder: Decoder, count: int) -> tuple[dict[str, Any], list[str]]:
    """Return inputs of `count` tokens after random states, and the names of those whose meaning is a guess."""
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
