"""Inputs of successive or repeated calls of a model with states, and how states are carried between calls."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.split_states import SplitStates
from onnxplace.errors import ExecutionError, FeedError, ModelError, suggest_nearest
from onnxplace.feeds.dimensions import (
    complete_dimensions,
    dimension_keys,
    dimensions_of_feeds,
    drop_derived_sizes,
    symbols_of_dimension,
)
from onnxplace.feeds.feeds import Array, Declared, check_feeds
from onnxplace.feeds.npz import read_npz
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.runtime.interface import RuntimeSession

Feeds = Mapping[str, Array]


class StepInputs:
    """The inputs of each step; states are fed only to the first, later steps carry them over.

    A state may grow with each step, as a cache of past tokens does. Drawn inputs grow with it if their shape names the
    growing symbol: `past`, or `past + seq`, or the symbol of the output that becomes the state.
    """

    def __init__(self, bundle: Bundle, given: Feeds | None, sizes: Mapping[str, int], seed: int) -> None:
        """Take the user's inputs, or draw them with these sizes of symbolic dimensions."""
        self._states = {item.name: item.shape or () for item in bundle.state_inputs}
        output_shapes = {item.name: item.shape or () for item in bundle.outputs}
        self._outputs = {item.input: output_shapes[item.output] for item in bundle.manifest.states}
        self._drawn = given is None
        self._growth: dict[str, int] = {}
        self._later: dict[str, int] = {}
        self._output_growth: dict[str, int] = {}
        self._bundle, self._seed = bundle, seed
        states, initial = SplitStates(bundle.manifest), bundle.initial_states()
        self.first: Feeds
        self.sizes: Mapping[str, int]
        """Sizes of symbolic dimensions; of drawn inputs without those that follow from others."""
        if given is None:
            self._inputs = [_with_sample_rank(item, sizes) for item in bundle.inputs]
            # Random parameters would not be those of a training step.
            self.first = {**states.align_copies(random_feeds(self._inputs, sizes, seed)), **initial}
            self.sizes = sizes
        else:
            self._inputs = bundle.inputs
            fed = check_feeds(states.cut_feeds(given), self._inputs, strict=bundle.manifest.has_equal_sizes)
            self.first = {**initial, **fed}
            self.sizes = dimensions_of_feeds(self.first, self._inputs)

    def resize(self, sizes: Mapping[str, int]) -> StepInputs:
        """Return drawn inputs of other sizes; raises FeedError if there are none."""
        return choose_step_inputs(self._bundle, None, sizes, self._seed)

    def learn(self, states: Feeds) -> None:
        """Learn which symbols grow from the states after the first step, by state input."""
        for name, array in states.items():
            if name in self.first:
                growths = [after - before for before, after in zip(self.first[name].shape, array.shape)]
                of_input, of_output = zip(self._states[name], growths), zip(self._outputs[name], growths)
                self._growth |= {symbol: growth for symbol, growth in of_input if isinstance(symbol, str) and symbol}
                self._output_growth |= {
                    symbol: growth for symbol, growth in of_output if isinstance(symbol, str) and symbol and growth > 0
                }

    def feeds(self, number: int) -> Feeds:
        """Return the inputs of a step, counted from 0."""
        if number == 0 or not self._states:
            return self.first
        feeds = self.first
        sizes = {key: size + number * self._get_growth(key) for key, size in {**self.sizes, **self._later}.items()}
        if self._drawn and sizes != self.sizes:
            inputs = [item for item in self._inputs if item.name not in self._states]
            feeds = random_feeds(inputs, sizes, self._seed)
        return {name: array for name, array in feeds.items() if name not in self._states}

    def switch(self, later: StepInputs) -> StepInputs:
        """Return these drawn inputs with later steps of another size, as tokens follow a prompt; states keep theirs."""
        kept = {symbol for shape in self._states.values() for symbol in shape}
        self._later = {name: size for name, size in later.sizes.items() if name not in kept}
        return self

    def count_state_bytes(self) -> int:
        """Return the bytes of the states that are fed to the first step."""
        return sum(array.nbytes for name, array in self.first.items() if name in self._states)

    @contextmanager
    def explained(self, number: int) -> Iterator[None]:
        """Add a hint to errors of later steps, counted from 0: inputs that did not grow with the states."""
        try:
            yield
        except (ExecutionError, ModelError) as problem:
            hint = self._describe_constant_inputs() if number else ""
            if not hint:
                raise
            raise type(problem)(problem.code, problem.message, where=problem.where, hint=hint) from None

    def _describe_constant_inputs(self) -> str:
        """Return a hint that names the inputs that do not grow with the states; empty if there are none."""
        growing = [symbol for symbol, growth in self._growth.items() if growth > 0]
        axes = [
            f"{item.name}[{axis}] ({size!r})"
            for item in self._inputs
            for axis, size in enumerate(item.shape or ())
            # An axis that the states have too need not grow if it did not grow there.
            if item.name not in self._states and isinstance(size, str) and size not in self._growth
            if not self._get_growth(size)
        ]
        if not growing or not axes:
            return ""
        single_step = "to run one step alone: --steps 1, or --repeat 1"
        names = ", ".join(repr(symbol) for symbol in growing)
        if not self._drawn:
            return f"the given inputs are the same in each step, while states grow along {names}; {single_step}"
        return (
            f"states grow along {names} from step to step, drawn inputs only along axes that are named after it; if "
            f"{' or '.join(axes)} has to grow too, rename it ('{growing[0]} + ...'); {single_step}"
        )

    def _get_growth(self, key: str) -> int:
        """Return by how much a dimension grows per step: a symbol, or an expression of symbols."""
        growths = [
            growth for symbol, growth in self._growth.items() if re.search(rf"(?<!\w){re.escape(symbol)}(?!\w)", key)
        ]
        return sum(growths) if growths else self._output_growth.get(key, 0)


def choose_step_inputs(
    bundle: Bundle, inputs: Feeds | str | Path | None, sizes: Mapping[str, int], seed: int
) -> StepInputs:
    """Return the given inputs, those in a file, or random ones.

    Random inputs have the shapes that the bundle was compiled with, except where `sizes` sets other ones. Raises
    FeedError for a dimension that the model does not have.
    """
    compiled_sizes = bundle.manifest.dimensions
    declared = [_with_sample_rank(item, compiled_sizes) for item in bundle.inputs]
    keys = dict.fromkeys(key for item in declared for key, size in dimension_keys(item) if size is None)
    known = sorted({name for key in keys for name in (key, *symbols_of_dimension(key))})
    for key in sizes:
        if key not in known:
            hint = suggest_nearest(key, known) if known else "all its dimensions are fixed"
            raise FeedError("M022", f"the model has no symbolic dimension {key!r}", where="--shape", hint=hint)
    # The given sizes, and those that follow from them, override the ones that the bundle was compiled with.
    overridden = complete_dimensions(keys, sizes)
    defaults = {
        key: size
        for key, size in drop_derived_sizes(compiled_sizes).items()
        if key in known and key not in overridden and not overridden.keys() & symbols_of_dimension(key)
    }
    all_sizes = drop_derived_sizes(complete_dimensions(keys, {**defaults, **sizes}))
    given = read_npz(Path(inputs)) if isinstance(inputs, (str, Path)) else inputs
    return StepInputs(bundle, given, all_sizes, seed)


def _with_sample_rank(item: Declared, sizes: Mapping[str, int]) -> Declared:
    """Return an input of unknown rank with the rank of the sample used at compile time, if any."""
    if item.shape is not None:
        return item
    keys = itertools.takewhile(lambda key: key in sizes, (f"{item.name}.{axis}" for axis in itertools.count()))
    return replace(item, shape=tuple(keys) or None)


def list_switches(steps: Iterable[StepInputs]) -> list[StepInputs]:
    """Return conversations from each of several drawn sizes to the next one, the smallest states first."""
    ordered = sorted(steps, key=StepInputs.count_state_bytes)
    return [low.switch(high) for low, high in itertools.pairwise(ordered)]


class StateCarrier:
    """Wrap a function that runs the whole model, and carry its states from call to call."""

    def __init__(self, run: Callable[[Feeds], Mapping[str, Any]], bundle: Bundle) -> None:
        self._run = run
        self._pairs = [(item.output, item.input) for item in bundle.manifest.states]
        self.states: dict[str, Any] = {}
        """States after the last call, by state input."""

    def __call__(self, feeds: Feeds) -> Mapping[str, Any]:
        outputs = self._run({**self.states, **feeds})
        self.states = {name: outputs[output] for output, name in self._pairs}
        return outputs


class RepeatedStep:
    """The inputs of a step that is repeated.

    States that keep their shapes, such as parameters, are fed to the first step only: feeding copies them, which takes
    as long as much of a training step. States that may grow, such as caches of past tokens, are fed to each step, so
    that all steps take the same time. Sessions that do not carry states are fed all of them in each step.
    """

    def __init__(self, bundle: Bundle, feeds: Mapping[str, Any], *, carries: bool = True) -> None:
        states = {item.input for item in bundle.manifest.states}
        self._first = feeds
        self._later = {name: value for name, value in feeds.items() if name not in states}
        self._carries = carries and bool(states) and keeps_state_shapes(bundle)
        self._has_run = False

    def prepare(self, session: RuntimeSession) -> Mapping[str, Any]:
        """Return the feeds of the next step of a session, which has run all steps before."""
        if self._carries and self._has_run:
            return self._later
        session.states.reset()  # states that are not fed would go on growing
        self._has_run = True
        return self._first


def keeps_state_shapes(bundle: Bundle) -> bool:
    """Return whether all states have fixed shapes; one symbol on both sides may stand for different sizes."""
    inputs = {item.name: item.shape for item in bundle.inputs}
    outputs = {item.name: item.shape for item in bundle.outputs}
    pairs = [(inputs[item.input], outputs[item.output]) for item in bundle.manifest.states]
    return all(before == after and _is_fixed(before) for before, after in pairs)


def _is_fixed(shape: Sequence[int | str | None] | None) -> bool:
    """Return whether all sizes of a shape are known; a scalar has none to know, an unknown rank is not fixed."""
    return shape is not None and all(isinstance(size, int) for size in shape)
